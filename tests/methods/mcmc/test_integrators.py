"""Integrators with every metric: reversibility, volume preservation and order of accuracy."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from priory.core.streams import stream
from priory.methods.mcmc.integrators import INTEGRATORS, heavy, integrate, kinetic, velocity
from priory.methods.mcmc.joint import Joint
from priory.methods.mcmc.metrics import METRICS, DenseMetric, DiagonalMetric, LowRankMetric, Metric

DOUBLE, SIZE = torch.float64, 4


def randn(*shape: int, name: str = "noise") -> Tensor:
    return torch.randn(*shape, generator=stream(0, "integrators", name), dtype=DOUBLE)


def metric_of(name: str) -> Metric:
    scale = randn(1, SIZE, name="scale").exp()
    if name == "diagonal":
        return DiagonalMetric(scale)
    if name == "low_rank":
        return LowRankMetric(scale, torch.linalg.qr(randn(SIZE, 2)).Q, randn(1, 2, name="spread").exp())
    root = randn(SIZE, SIZE, name="root")
    covariance = root @ root.mT + torch.eye(SIZE, dtype=DOUBLE)
    return DenseMetric(covariance, torch.linalg.cholesky(covariance))


def quartic(w: Tensor) -> tuple[Tensor, Tensor]:
    """log p = -sum w^4 / 4 - (w_0 w_1)^2 / 2, which is not Gaussian."""
    square = (w[..., 0] * w[..., 1]).square()
    cross = torch.stack([w[..., 0] * w[..., 1] ** 2, w[..., 1] * w[..., 0] ** 2], -1)
    gradient = -(w**3) - torch.cat([cross, torch.zeros_like(w[..., 2:])], -1)
    return -w.pow(4).sum(-1) / 4 - square / 2, gradient


joint = Joint(quartic, lambda w: quartic(w)[1])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_trajectories_are_reversible(integrator, metric):
    m, w, p = metric_of(metric), randn(3, SIZE, name="w"), randn(3, SIZE, name="p")
    step = torch.tensor([[0.1], [0.07], [-0.05]], dtype=DOUBLE)
    at = (w, p, *joint(w))
    for _ in range(7):
        at = integrate(integrator, joint, m, at[0], at[1], at[3], step)
    assert float((at[0] - w).abs().min()) > 1e-3
    back = (at[0], -at[1], *at[2:])
    for _ in range(7):
        back = integrate(integrator, joint, m, back[0], back[1], back[3], step)
    torch.testing.assert_close(back[0], w, rtol=0, atol=1e-10)
    torch.testing.assert_close(-back[1], p, rtol=0, atol=1e-10)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_trajectories_preserve_volume(integrator, metric):
    m = metric_of(metric)

    def flow(z: Tensor) -> Tensor:
        w, p = z[None, :SIZE], z[None, SIZE:]
        at = (w, p, *joint(w))
        for _ in range(4):
            at = integrate(integrator, joint, m, at[0], at[1], at[3], torch.tensor(0.05, dtype=DOUBLE))
        return torch.cat([at[0][0], at[1][0]])

    jacobian = jacrev(flow)(randn(2 * SIZE, name="z"))
    assert isinstance(jacobian, Tensor)
    assert float((jacobian - torch.eye(2 * SIZE, dtype=DOUBLE)).abs().max()) > 0.1
    assert abs(float(torch.linalg.det(jacobian)) - 1) < 1e-10


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_several_steps_in_one_call_equal_single_steps(integrator):
    m, w, p = metric_of("dense"), randn(3, SIZE, name="w"), randn(3, SIZE, name="p")
    step, at = torch.tensor(0.05, dtype=DOUBLE), (w, p, *joint(w))
    for _ in range(5):
        at = integrate(integrator, joint, m, at[0], at[1], at[3], step)
    together = integrate(integrator, joint, m, w, p, joint(w)[1], step, 5)
    for one_by_one, once in zip(at, together, strict=True):
        torch.testing.assert_close(once, one_by_one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_halving_the_step_divides_the_error_of_the_energy_by_four(integrator):
    m, w, p = metric_of("dense"), 0.5 * randn(1, SIZE, name="w"), randn(1, SIZE, name="p")

    def error(steps: int) -> float:
        at = (w, p, *joint(w))
        for _ in range(steps):
            at = integrate(integrator, joint, m, at[0], at[1], at[3], torch.tensor(0.4 / steps, dtype=DOUBLE))
        return float(kinetic(m, at[1]) - at[2] - kinetic(m, p) + joint(w)[0])

    assert error(64) / error(128) == pytest.approx(4, rel=0.05)


def test_one_leapfrog_step_follows_the_formula():
    w, p = torch.tensor([[1.0]], dtype=DOUBLE), torch.tensor([[2.0]], dtype=DOUBLE)
    m = DiagonalMetric(torch.tensor([[3.0]], dtype=DOUBLE))
    # With g = -w^3: p = 2 - 0.05, then w = 1 + 0.1 * 3 * 1.95 = 1.585, then half a step of p at 1.585.
    step = torch.tensor(0.1, dtype=DOUBLE)
    single = Joint(lambda v: (-(v[..., 0] ** 4) / 4, -(v**3)), lambda v: -(v**3))
    at = integrate("leapfrog", single, m, w, p, -(w**3), step)
    assert float(at[0]) == pytest.approx(1.585, abs=1e-12)
    assert float(at[1]) == pytest.approx(1.95 - 0.05 * 1.585**3, abs=1e-12)
    assert float(kinetic(m, p)) == pytest.approx(6.0, abs=1e-12)


# Momenta with heavy tails.

TAIL = torch.tensor([SIZE / 3], dtype=DOUBLE)  # three degrees of freedom


@pytest.mark.parametrize("metric", METRICS)
def test_heavy_tailed_momenta_have_the_kinetic_energy_of_a_student_distribution(metric):
    """exp(-K) is proportional to a mixture of normal densities of precision C times s, s ~ Gamma(df / 2, df / 2)."""
    m, p = metric_of(metric), randn(5, SIZE, name="p")
    half = SIZE / float(TAIL) / 2
    log_s = torch.linspace(-40, 8, 20_001, dtype=DOUBLE)
    square = (p * m.velocity(p)).sum(-1)
    log_terms = (half + SIZE / 2) * log_s - log_s.exp() * (half + square[:, None] / 2)
    mixture = log_terms.logsumexp(-1)
    found = kinetic(m, p, TAIL)
    torch.testing.assert_close(found[0] - found, mixture - mixture[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("metric", METRICS)
def test_the_velocity_is_the_derivative_of_the_kinetic_energy(metric):
    m, p = metric_of(metric), randn(5, SIZE, name="p").requires_grad_()
    for tail in (None, TAIL):
        (slope,) = torch.autograd.grad(kinetic(m, p, tail).sum(), p)
        torch.testing.assert_close(velocity(m, p, tail), slope, rtol=1e-12, atol=1e-12)


def test_light_tails_are_those_of_normal_momenta():
    m, p = metric_of("dense"), randn(5, SIZE, name="p")
    tail = torch.tensor([1e-9], dtype=DOUBLE)
    torch.testing.assert_close(kinetic(m, p, tail), kinetic(m, p), rtol=1e-7, atol=0)
    torch.testing.assert_close(velocity(m, p, tail), m.velocity(p), rtol=1e-7, atol=1e-9)


def test_a_member_with_normal_momenta_is_not_changed_by_another_with_heavy_tails():
    m, p = metric_of("dense"), randn(2, 5, SIZE, name="p")
    tails = torch.tensor([[0.0], [1.0]], dtype=DOUBLE)
    found = heavy(p, tails, stream(0, "integrators", "scales"))
    assert torch.equal(found[0], p[0])
    assert torch.equal(found[1], heavy(p, torch.ones_like(tails), stream(0, "integrators", "scales"))[1])
    assert torch.equal(kinetic(m, p, tails)[0], kinetic(m, p)[0])
    assert torch.equal(velocity(m, p, tails)[0], m.velocity(p)[0])


def test_draws_of_heavy_tailed_momenta_have_the_energy_of_their_distribution():
    """1 / (1 + p' C p / df) is Beta(df / 2, P / 2), so K has a known mean and variance: 5 standard errors, 1e-6."""
    m, count = metric_of("dense"), 40_000
    p = heavy(m.momentum(randn(count, SIZE, name="draws")), TAIL, stream(0, "integrators", "scales"))
    found, df = kinetic(m, p, TAIL), SIZE / float(TAIL)
    ends = torch.tensor([df / 2, (df + SIZE) / 2], dtype=DOUBLE)
    mean = (df + SIZE) / 2 * float(-torch.digamma(ends).diff().neg())
    variance = ((df + SIZE) / 2) ** 2 * float(-torch.polygamma(1, ends).diff())
    assert abs(float(found.mean()) - mean) < 5 * math.sqrt(variance / count)
    assert abs(float(found.var()) / variance - 1) < 5 * math.sqrt(8 / count)  # of an exponential distribution


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_trajectories_with_heavy_tailed_momenta_are_reversible_and_keep_the_energy(integrator):
    m, w, p = metric_of("dense"), randn(3, SIZE, name="w"), randn(3, SIZE, name="p")
    before, changes = kinetic(m, p, TAIL) - joint(w)[0], []
    for steps in (16, 32):
        step = torch.tensor(0.2 / steps, dtype=DOUBLE)
        at = integrate(integrator, joint, m, w, p, joint(w)[1], step, steps, TAIL)
        back = integrate(integrator, joint, m, at[0], -at[1], at[3], step, steps, TAIL)
        torch.testing.assert_close(back[0], w, rtol=0, atol=1e-10)
        changes.append((kinetic(m, at[1], TAIL) - at[2] - before).abs())
    assert bool((changes[1] < changes[0] / 3).all())  # the error is of second order
