"""Real NVP: its start, its inverse, its determinant, and a posterior that no Gaussian fits."""

import math

import pytest
import torch
from torch.testing import assert_close

from priory.core.streams import stream
from priory.families import DiagonalFamily, FlowForm
from priory.families.flow import halves

F64 = torch.float64


def moved(form, shape=(), seed=0):
    generator = stream(seed, "theta")
    start = form.initial(torch.zeros(*shape, form.size, dtype=F64), torch.ones(form.size, dtype=F64), generator)
    return start + 0.5 * torch.randn(start.shape, generator=generator, dtype=F64)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_flow_starts_as_the_factorised_gaussian(size, shape):
    form = FlowForm(size)
    generator = stream(0, "start")
    loc = torch.randn(*shape, size, generator=generator, dtype=F64)
    scale = torch.rand(size, generator=generator, dtype=F64) + 0.1
    q, gaussian = form.family(form.initial(loc, scale, generator)), DiagonalFamily(loc, scale.log().expand_as(loc))
    w = q.sample(5, stream(1, "draws"))
    assert_close(w, gaussian.sample(5, stream(1, "draws")), rtol=0, atol=1e-12)
    assert_close(q.log_prob(w), gaussian.log_prob(w), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_density_of_a_draw_is_that_of_its_noise_divided_by_the_jacobian(size, monkeypatch):
    """log q(w) = log N(z) - log |det dw/dz|, with the determinant by autograd."""
    form = FlowForm(size, layers=5, hidden=7)
    q = form.family(moved(form))
    for seed in range(5):
        z = torch.randn(size, generator=stream(seed, "noise"), dtype=F64)

        def draw(noise):
            monkeypatch.setattr("priory.families.flow.normal_noise", lambda n, like, generator: noise.expand(n, -1))
            return q.sample(1, stream(0, "draws"))[0]

        jacobian = torch.autograd.functional.jacobian(draw, z)
        log_det = torch.linalg.slogdet(jacobian).logabsdet
        expected = -0.5 * z.square().sum() - 0.5 * size * math.log(2 * math.pi) - log_det
        assert_close(q.log_prob(draw(z)), expected, rtol=0, atol=1e-10)


def test_every_coordinate_is_read_and_transformed_by_a_pair_of_couplings():
    for size in (2, 3, 8):
        (a, b), (c, d), *_ = halves(size, 4, 0)
        assert sorted([*a.tolist(), *b.tolist()]) == list(range(size))
        assert (c.tolist(), d.tolist()) == (b.tolist(), a.tolist())
    assert halves(1, 4, 0) == ()
    orders = {tuple(halves(8, 2, seed)[0][0].tolist()) for seed in range(4)}
    assert len(orders) > 1


def test_a_flow_learns_a_banana_that_no_gaussian_fits():
    """x ~ N(0, 1), y | x ~ N(x^2, 0.5^2): the best Gaussian has s_x^2 = (sqrt(65) - 1) / 32 and is 0.56 nat away."""

    def log_prob(w):
        x, y = w.unbind(-1)
        return -0.5 * x.square() - 2 * (y - x.square()).square() - math.log(2 * math.pi) - math.log(0.5)

    form = FlowForm(2, layers=2, hidden=16)
    theta = form.initial(torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64), stream(0, "start")).requires_grad_()
    adam, generator = torch.optim.Adam([theta], lr=2e-2), stream(0, "draws")
    for _ in range(300):
        q = form.family(theta)
        w = q.sample(64, generator)
        loss = (q.detached().log_prob(w) - log_prob(w)).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    q = form.family(theta.detach())
    w = q.sample(20_000, stream(1, "draws"))
    assert float((q.log_prob(w) - log_prob(w)).mean()) < 0.15
