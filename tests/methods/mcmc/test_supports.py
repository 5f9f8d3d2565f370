"""NUTS on zero sums, correlation matrices and the sphere, against closed forms; and other methods on the sphere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Beta

import priory as pr
from priory import constraints
from priory.core.bijectors import RADIUS_POWER
from priory.core.errors import InputError
from priory.diagnostics import mcse_mean
from priory.posteriors import Chains, LaplacePosterior


def sampled(density: pr.Density) -> Chains:
    return pr.fit(density, None, pr.NUTS(chains=32, warmup=200), steps=150, progress=False)


def assert_means(x: Tensor, expected: Tensor) -> None:
    """The means of draws (chain, draw, ...) within 5 standard errors: a false alarm once in 1.7 million entries."""
    z = (x.mean((0, 1)) - expected) / mcse_mean(x)
    assert float(z.abs().max()) < 5


@pytest.mark.parametrize("concentration", [1.0, 2.5])
def test_entries_of_correlation_matrices_have_the_beta_marginals_of_lkj(concentration: float) -> None:
    size = 4
    density = pr.Density(
        lambda p: (concentration - 1) * p["r"].logdet(), {"r": pr.Param((size, size), constraints.corr_matrix)}
    )
    rows, columns = torch.tril_indices(size, size, -1)
    posterior = sampled(density)
    r = posterior.draws["r"][..., rows, columns]  # (chain, draw, 6)
    alpha = concentration - 1 + size / 2
    edges = torch.linspace(-0.8, 0.8, 5, dtype=torch.float64)
    below = (r[..., None] < edges).double()  # (chain, draw, 6, 5)
    grid = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    mass = Beta(alpha, alpha).log_prob((0.5 * (grid + 1)).clamp(1e-12, 1 - 1e-12)).exp() / 2
    cdf = torch.cumulative_trapezoid(mass, grid)[((edges + 1) * 100_000).round().long() - 1]
    assert_means(below, cdf.expand(6, 5))
    assert_means(r.square(), torch.full((6,), 1 / (2 * alpha + 1), dtype=torch.float64))
    assert len(posterior.divergences) == 0
    assert len(posterior.summary().names) == size * (size - 1)  # the diagonal is constant, and left out


def test_a_normal_vector_given_its_sum_has_the_conditional_mean_and_covariance() -> None:
    mean = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    scale = torch.tensor([0.5, 1.0, 2.0, 0.3], dtype=torch.float64)
    density = pr.Density(
        lambda p: -0.5 * ((p["x"] - mean) / scale).square().sum(), {"x": pr.Param((4,), constraints.zero_sum)}
    )
    x = sampled(density).draws["x"]
    variance = scale.square()
    expected = mean - variance * mean.sum() / variance.sum()
    covariance = variance.diag() - torch.outer(variance, variance) / variance.sum()
    assert_means(x, expected)
    deviation = x - expected
    assert_means(deviation[..., None] * deviation[..., None, :], covariance)
    torch.testing.assert_close(x.sum(-1), torch.zeros_like(x[..., 0]), rtol=0, atol=1e-12)


def von_mises_fisher(kappa: float, mu: Tensor) -> pr.Density:
    return pr.Density(lambda p: kappa * (p["x"] * mu).sum(), {"x": pr.Param((3,), constraints.unit_vector)})


MU = torch.tensor([0.48, -0.6, 0.64], dtype=torch.float64)


@pytest.mark.parametrize("kappa", [0.0, 4.0, 400.0])
def test_directions_have_the_moments_of_the_uniform_and_the_von_mises_fisher_distribution(kappa: float) -> None:
    posterior = sampled(von_mises_fisher(kappa, MU))
    x = posterior.draws["x"]
    length = 1 / math.tanh(kappa) - 1 / kappa if kappa else 0.0
    along = 1 - 2 * length / kappa if kappa else 1 / 3  # E[(mu'x)^2]
    assert_means(x, length * MU)
    across = 0.5 * (1 - along)
    second = across * torch.eye(3, dtype=torch.float64) + (along - across) * torch.outer(MU, MU)
    assert_means(x[..., None] * x[..., None, :], second)
    assert len(posterior.divergences) == 0


def test_laplace_around_a_direction_has_the_curvature_of_the_sphere() -> None:
    kappa, m = 1e4, RADIUS_POWER
    posterior = pr.fit(von_mises_fisher(kappa, MU), None, pr.Laplace(), progress=False)
    assert isinstance(posterior, LaplacePosterior)
    torch.testing.assert_close(posterior.w, MU, rtol=0, atol=1e-6)  # of length one, the most probable
    log_z = math.lgamma((m + 3) / 2) + 0.5 * (m + 3) * math.log(2 / m) - math.log(2)
    # the curvature is kappa in two directions along the sphere, and 2 m in the direction of the length
    log_volume = 1.5 * math.log(2 * math.pi) - math.log(kappa) - 0.5 * math.log(2 * m)
    assert posterior.log_evidence.value == pytest.approx(kappa - m / 2 - log_z + log_volume, abs=1e-6)
    exact = math.log(2 * math.pi / kappa) + kappa
    assert posterior.log_evidence.value == pytest.approx(exact, abs=0.15)


def test_the_evidence_of_a_direction_is_bounded_by_its_normaliser() -> None:
    kappa = 4.0
    posterior = pr.fit(von_mises_fisher(kappa, MU), None, pr.FullRank(), steps=400, progress=False)
    log_normaliser = math.log(4 * math.pi * math.sinh(kappa) / kappa)
    bound = posterior.log_evidence
    assert log_normaliser - 1.0 < bound.value < log_normaliser + 5 * bound.error


def test_a_density_over_unit_vectors_is_refused_with_a_remedy() -> None:
    posterior = pr.fit(von_mises_fisher(4.0, MU), None, pr.MeanField(), steps=5, progress=False)
    with pytest.raises(InputError, match="no density in closed form over 'x', a unit vector: use its draws"):
        posterior.log_prob({"x": MU})
