"""Gaussians of every covariance, mixtures and location-scale families against torch.distributions."""

import math

import pytest
import torch
from torch.distributions import (
    Categorical,
    Independent,
    Laplace,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Uniform,
    kl_divergence,
)
from torch.testing import assert_close

from priory.core.streams import stream
from priory.families import (
    DiagonalFamily,
    Factorised,
    FactorisedForm,
    FullRankFamily,
    FullRankForm,
    LowRankFamily,
    LowRankForm,
    MixtureFamily,
    MixtureForm,
)
from priory.testing import assert_covariance_close, assert_mean_close

F64 = torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=stream(seed, "numbers"), dtype=F64)


def exactly(mine, theirs):
    assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_full_rank_is_the_multivariate_normal(shape):
    form = FullRankForm(4)
    q = form.family(0.5 * normal(*shape, form.length))
    theirs = MultivariateNormal(q.loc, scale_tril=q.tril)
    w = normal(7, *shape, 4, seed=1)
    exactly(q.log_prob(w), theirs.log_prob(w))
    exactly(q.entropy(), theirs.entropy())
    exactly(q.moments()[1], theirs.variance)


def test_draws_of_full_rank_have_its_covariance():
    """5 standard errors, 14 comparisons: false-alarm rate 8e-6."""
    form = FullRankForm(4)
    q = form.family(0.5 * normal(form.length))
    w = q.sample(20_000, stream(1, "draws"))
    assert_mean_close(w, q.loc)
    assert_covariance_close(w, q.tril @ q.tril.mT)


def test_theta_of_a_full_rank_family_describes_it():
    form = FullRankForm(5)
    theta = normal(2, form.length)
    exactly(form.theta(form.family(theta)), theta)
    factor = torch.linalg.cholesky(normal(5, 9) @ normal(5, 9).mT)
    exactly(form.family(form.theta(FullRankFamily(normal(5), factor))).tril, factor)


def test_adam_fits_full_rank_to_fifty_correlated_coordinates():
    """To 0.01 nat at a rate of 0.01, by the exact gradient: it is the parameterisation that is tested."""
    size = 50
    covariance = 0.05 * torch.eye(size, dtype=F64) + 0.95
    target = MultivariateNormal(torch.linspace(-1, 1, size, dtype=F64), covariance)
    form = FullRankForm(size)
    start = form.initial(torch.zeros(size, dtype=F64), torch.full((size,), 0.02, dtype=F64), stream(0, "start"))
    theta = start.requires_grad_()
    adam = torch.optim.Adam([theta], lr=1e-2)
    for _ in range(1_000):
        q = form.family(theta)
        loss = kl_divergence(MultivariateNormal(q.loc, scale_tril=q.tril, validate_args=False), target)
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert loss.item() < 0.01


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_low_rank_is_the_low_rank_multivariate_normal(shape, rank):
    form = LowRankForm(4, rank)
    q = form.family(0.5 * normal(*shape, form.length))
    theirs = LowRankMultivariateNormal(q.loc, q.factor, (2 * q.log_diag).exp())
    w = normal(7, *shape, 4, seed=1)
    exactly(q.log_prob(w), theirs.log_prob(w))
    exactly(q.entropy(), theirs.entropy())
    exactly(q.moments()[1], theirs.variance)


def test_draws_of_low_rank_have_its_covariance():
    """5 standard errors, 14 comparisons: false-alarm rate 8e-6."""
    q = LowRankFamily(normal(4), normal(4, 2), torch.tensor([-1.0, 0.0, 0.5, -2.0], dtype=F64))
    w = q.sample(20_000, stream(1, "draws"))
    assert_mean_close(w, q.loc)
    assert_covariance_close(w, q.factor @ q.factor.mT + (2 * q.log_diag).exp().diag())


def test_diagonal_is_independent_normals():
    q = DiagonalFamily(normal(3, 4), 0.3 * normal(3, 4, seed=1))
    theirs = Independent(Normal(q.loc, q.scale), 1)
    w = normal(5, 3, 4, seed=2)
    exactly(q.log_prob(w), theirs.log_prob(w))
    exactly(q.entropy(), theirs.entropy())
    assert torch.equal(
        q.sample(5, stream(0, "draws")), q.draw(torch.randn(5, 3, 4, generator=stream(0, "draws"), dtype=F64))
    )


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_mixture_agrees_with_torchs_mixture(covariance, shape):
    form = MixtureForm(3, 4, covariance)
    q = form.family(0.5 * normal(*shape, form.length))
    parts = q.components
    each = (
        MultivariateNormal(parts.loc, scale_tril=parts.tril)
        if isinstance(parts, FullRankFamily)
        else Independent(Normal(parts.loc, parts.scale), 1)
    )
    theirs = MixtureSameFamily(Categorical(logits=q.logits), each)
    w = normal(7, *shape, 3, seed=1)
    exactly(q.log_prob(w), theirs.log_prob(w))
    exactly(q.moments()[0], theirs.mean)
    exactly(q.moments()[1], theirs.variance)


def test_a_mixture_draws_from_every_component_and_weights_the_draws():
    logits = torch.tensor([0.2, 0.8], dtype=F64).log()
    q = MixtureFamily(
        logits, DiagonalFamily(torch.tensor([[-100.0], [100.0]], dtype=F64), torch.zeros(2, 1, dtype=F64))
    )
    w, weights = q.sample(7, stream(0, "draws")), q.weights(7)
    assert (w[:, 0] > 0).tolist() == [False, True] * 3
    exactly(weights, torch.tensor([0.2, 0.8] * 3, dtype=F64) / 3)
    assert len(q.sample(1, stream(0, "draws"))) == 2


def test_independent_draws_of_a_mixture_have_its_proportions():
    """5 standard errors, 6 comparisons: false-alarm rate 3e-6."""
    logits = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]], dtype=F64).log()
    q = MixtureFamily(
        logits,
        DiagonalFamily(torch.tensor([[-100.0], [100.0]], dtype=F64).expand(3, 2, 1), torch.zeros(3, 2, 1, dtype=F64)),
    )
    w = q.independent(20_000, stream(0, "draws"))
    assert w.shape == (20_000, 3, 1)
    assert_mean_close((w[..., 0] > 0).double(), q.proportions[:, 1])
    assert_mean_close(w[..., 0], q.moments()[0][:, 0])


def test_components_of_a_mixture_start_separated():
    form = MixtureForm(2, 3)
    q = form.family(form.initial(torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64), stream(0, "start")))
    assert float(torch.pdist(q.components.loc).min()) > 0.5
    assert torch.equal(q.logits, torch.zeros(3, dtype=F64))
    assert (
        form.family(form.initial(normal(2), torch.ones(2, dtype=F64), stream(0, "start")))
        .log_prob(normal(2))
        .isfinite()
    )


@pytest.mark.parametrize("base", ["laplace", "logistic", "uniform"])
def test_location_scale_families_agree_with_torch(base):
    form = FactorisedForm(3, base)
    q = form.family(0.3 * normal(2, form.length))
    w = q.loc + 0.9 * q.scale * (2 * torch.rand(5, 2, 3, generator=stream(0, "points"), dtype=F64) - 1)
    loc, scale = q.loc, q.scale
    if base == "logistic":
        z = (w - loc) / scale
        exactly(q.log_prob(w), (z.sigmoid().log() + (-z).sigmoid().log() - scale.log()).sum(-1))
        exactly(q.entropy(), (scale.log() + 2).sum(-1))
        exactly(q.moments()[1], math.pi**2 / 3 * scale.square())
    else:
        theirs = Independent(Laplace(loc, scale) if base == "laplace" else Uniform(loc - scale, loc + scale), 1)
        exactly(q.log_prob(w), theirs.log_prob(w))
        exactly(q.entropy(), theirs.entropy())
        exactly(q.moments()[1], theirs.variance)


def test_uniform_has_density_at_its_draws_and_none_outside():
    q = Factorised(torch.tensor([1e4]), torch.tensor([-6.0]), "uniform")  # narrow, far from zero, in single precision
    assert bool(q.log_prob(q.sample(10_000, stream(0, "draws"))).isfinite().all())
    wide = Factorised(torch.zeros(2, dtype=F64), torch.zeros(2, dtype=F64), "uniform")
    assert wide.log_prob(torch.tensor([0.5, 1.0 + 1e-9], dtype=F64)).item() == -math.inf
    exactly(wide.log_prob(torch.tensor([0.5, -0.99], dtype=F64)), torch.tensor(-2 * math.log(2), dtype=F64))
