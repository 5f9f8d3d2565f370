"""Metrics: C is learnt from points and gradients, and velocity, momentum and square agree with it."""

import pytest
import torch
from torch import Tensor

from priory.core.streams import stream
from priory.methods.mcmc.metrics import (
    MAX_RANK,
    METRICS,
    SHRINKAGE_DRAWS,
    DenseMetric,
    DiagonalMetric,
    LowRankMetric,
    geometric_mean,
)

DOUBLE = torch.float64
SIZE = 5


def points(count: int = 240, size: int = SIZE) -> Tensor:
    """Return correlated points of two members, (2, count, P)."""
    noise = torch.randn(2, count, size, generator=stream(0, "metrics"), dtype=DOUBLE)
    mix = torch.randn(2, size, size, generator=stream(1, "metrics"), dtype=DOUBLE)
    return noise @ mix + 3.0


def gaussian(sizes: Tensor, name: str) -> Tensor:
    """Return a covariance with these standard deviations along random directions, (P, P)."""
    turn = torch.linalg.qr(torch.randn(len(sizes), len(sizes), generator=stream(7, name), dtype=DOUBLE)).Q
    return turn * sizes.square() @ turn.mT


def covariance_of(metric: DiagonalMetric | DenseMetric | LowRankMetric, size: int = SIZE) -> Tensor:
    """Return C of each member, (2, P, P), from the velocities of unit momenta."""
    return metric.velocity(torch.eye(size, dtype=DOUBLE).expand(2, -1, -1))


def square_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.sqrt() @ vectors.mT


# Learning from gradients.


def test_the_geometric_mean_of_covariances_is_its_definition():
    """X # Y = X^1/2 (X^-1/2 Y X^-1/2)^1/2 X^1/2, with the square roots taken by eigenvalues."""
    x, g = points(), points(size=SIZE).roll(17, -2).square()
    x, g = x - x.mean(-2, keepdim=True), g - g.mean(-2, keepdim=True)
    found = geometric_mean(x, g)
    for member in (0, 1):
        first, second = (y[member].mT @ y[member] / 240 for y in (x, g))
        root, inverse = square_root(first), torch.linalg.inv(square_root(first))
        expected = root @ square_root(inverse @ torch.linalg.inv(second) @ inverse) @ root
        # the ridge of 1e-5 moves eigenvalues by about as much, relative to the largest
        torch.testing.assert_close(found[member], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_a_dense_metric_finds_a_gaussian_exactly_from_points_that_are_not_its_draws():
    """Cov(x) # (A Cov(x) A)^-1 = A^-1 for any points; what the ridge takes is gained in the next round."""
    covariance = gaussian(torch.logspace(-0.8, 0.8, SIZE, dtype=DOUBLE), "exact")
    x = points()
    g = -(x - 1.0) @ torch.linalg.inv(covariance)
    metric = DenseMetric.unit(x)
    for _ in range(3):
        metric = metric.learnt(x, g)
    factor = torch.linalg.cholesky(covariance)
    for member in (0, 1):  # in coordinates in which the covariance is the identity
        white = torch.linalg.solve(factor, torch.linalg.solve(factor, metric.covariance[member]).mT)
        torch.testing.assert_close(white, torch.eye(SIZE, dtype=DOUBLE), rtol=0, atol=1e-8)


def test_a_diagonal_metric_finds_the_scales_of_independent_coordinates_from_any_points():
    variance = torch.logspace(-8, 8, SIZE, dtype=DOUBLE)
    x = points()
    metric = DiagonalMetric.unit(x).learnt(x, -x / variance)
    torch.testing.assert_close(metric.variance, variance.expand(2, 1, -1), rtol=1e-10, atol=0)


def test_a_low_rank_metric_finds_a_gaussian_with_few_wide_and_narrow_directions():
    """60 coordinates, of whose directions 3 are wide and 2 narrow, from 40 points."""
    sizes = torch.ones(60, dtype=DOUBLE)
    sizes[:5] = torch.tensor([30.0, 10.0, 5.0, 0.2, 0.05])
    covariance = gaussian(sizes, "low rank")
    factor = torch.linalg.cholesky(covariance)
    x = torch.randn(40, 60, generator=stream(8, "metrics"), dtype=DOUBLE) @ factor.mT
    g = -x @ torch.linalg.inv(covariance)
    metric = LowRankMetric.unit(x)
    metric = metric.learnt(x, g)
    found = metric.velocity(torch.eye(60, dtype=DOUBLE))
    left = torch.linalg.solve(factor, torch.linalg.solve(factor, found).mT)
    before, after = (float(torch.linalg.cond(c)) for c in (covariance, left))
    assert after < before / 1000  # 3.6e5 before


def test_independent_coordinates_have_no_directions_that_stand_out():
    """With g = -x, Cov(x) # Cov(g)^-1 is the identity for any sample, unlike Cov(x) itself."""
    x = torch.randn(100, 1000, generator=stream(4, "metrics"), dtype=DOUBLE)
    metric = LowRankMetric.unit(x).learnt(x, -x)
    torch.testing.assert_close(metric.spread, torch.ones_like(metric.spread), rtol=0, atol=1e-6)
    torch.testing.assert_close(metric.scale, torch.ones_like(metric.scale), rtol=0, atol=1e-10)


def test_few_points_give_a_dense_metric_their_scales_alone():
    x = points(SIZE + 2)
    variance = torch.logspace(-2, 2, SIZE, dtype=DOUBLE)
    metric = DenseMetric.unit(x).learnt(x, -x / variance)
    torch.testing.assert_close(metric.covariance, torch.diag(variance).expand(2, -1, -1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", METRICS)
def test_a_coordinate_without_a_gradient_has_the_variance_of_its_points(name):
    x = points()
    g = -x.clone()
    g[..., 1] = 0.0
    covariance = covariance_of(METRICS[name].unit(x).learnt(x, g))
    assert bool(torch.isfinite(covariance).all())
    assert bool((torch.linalg.eigvalsh(covariance) > 0).all())


# Learning without gradients.


def test_without_gradients_a_diagonal_metric_has_the_variances():
    x = points()
    metric = DiagonalMetric.unit(x).learnt(x)
    torch.testing.assert_close(metric.variance[:, 0], x.var(1), rtol=1e-12, atol=1e-12)


def test_without_gradients_a_dense_metric_has_the_covariance_shrunk_towards_its_diagonal():
    x = points()
    metric = DenseMetric.unit(x).learnt(x)
    weight = 240 / (240 + SIZE + SHRINKAGE_DRAWS)
    for member in (0, 1):
        full = torch.cov(x[member].mT)
        expected = weight * full + (1 - weight) * full.diag().diag()
        torch.testing.assert_close(metric.covariance[member], expected, rtol=1e-11, atol=1e-11)


def test_without_gradients_a_low_rank_metric_of_full_rank_has_the_shrunken_covariance():
    x = points()
    metric = LowRankMetric.unit(x).learnt(x)
    belief = SIZE + SHRINKAGE_DRAWS
    for member in (0, 1):
        full = torch.cov(x[member].mT)
        d = full.diagonal().sqrt()
        correlation = full / d[:, None] / d * 239 / 240
        shrunk = (240 * correlation + belief * torch.eye(SIZE, dtype=DOUBLE)) / (240 + belief)
        torch.testing.assert_close(covariance_of(metric)[member], shrunk * d[:, None] * d, rtol=1e-10, atol=1e-10)


# Any metric.


@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("slopes", [True, False])
def test_a_low_rank_metric_can_be_learnt_from_few_points(count, slopes):
    x = torch.randn(2, count, 30, generator=stream(2, "metrics"), dtype=DOUBLE)
    metric = LowRankMetric.unit(x).learnt(x, -x if slopes else None)
    rank = min(MAX_RANK, 30)
    assert metric.basis.shape == (2, 30, rank)
    assert metric.spread.shape == (2, 1, rank)
    p = torch.randn(2, 4, 30, generator=stream(3, "metrics"), dtype=DOUBLE)
    momentum = metric.momentum(p)
    torch.testing.assert_close((momentum * metric.velocity(momentum)).sum(-1), p.square().sum(-1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("slopes", [True, False])
@pytest.mark.parametrize("name", METRICS)
def test_momenta_have_the_inverse_covariance_and_square_is_the_mahalanobis_distance(name, slopes):
    x = points()
    metric = METRICS[name].unit(x).learnt(x, -x.tanh() if slopes else None)
    covariance, unit = covariance_of(metric), torch.eye(SIZE, dtype=DOUBLE).expand(2, -1, -1)
    factor = metric.momentum(unit)  # one row per unit vector of noise
    torch.testing.assert_close(factor.mT @ factor, torch.linalg.inv(covariance), rtol=1e-9, atol=1e-9)
    d = points()[:, :40]
    expected = (d @ torch.linalg.inv(covariance) * d).sum(-1)
    torch.testing.assert_close(metric.square(d), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", METRICS)
def test_velocity_is_independent_of_the_memory_layout_and_preserves_it(name):
    x = points()[0]
    metric = METRICS[name].unit(x).learnt(x, -x)
    columns = metric.velocity(x.mT.contiguous().mT)
    torch.testing.assert_close(columns, metric.velocity(x), rtol=1e-12, atol=1e-12)
    assert columns.mT.is_contiguous()
    assert metric.velocity(x).is_contiguous()


@pytest.mark.parametrize("slopes", [True, False])
@pytest.mark.parametrize("name", METRICS)
def test_a_coordinate_that_did_not_move_keeps_its_scale(name, slopes):
    x = points().clone()
    x[..., 2] = 0.1  # rounding of the mean leaves a variance of some 1e-34, which must count as zero
    metric = METRICS[name].unit(x)
    for _ in range(3):
        metric = metric.learnt(x, -x if slopes else None)
        covariance = covariance_of(metric)
        assert bool((torch.linalg.eigvalsh(covariance) > 0).all())
        assert float(covariance[..., 2, 2].min()) > 0.01  # a low-rank metric shrinks it a little
        if name != "low_rank":
            assert bool((covariance[:, 2] == torch.eye(SIZE, dtype=DOUBLE)[2]).all())


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_tiny_movements_are_told_from_rounding_of_the_mean(dtype):
    """A standard deviation of 40 eps |mean| is a movement; constants averaged over 256 or 1000 chains are not."""
    noise = torch.randn(5120, 1, generator=stream(5, "metrics"), dtype=DOUBLE)
    width = 40 * 1000 * torch.finfo(dtype).eps
    x = (1000 + width * noise).to(dtype)
    found = DiagonalMetric.unit(x).learnt(x)
    assert float(found.variance.sqrt()) == pytest.approx(width, rel=0.1)
    place = (10 * torch.rand(500, generator=stream(6, "metrics"), dtype=DOUBLE) - 5).exp().to(dtype)
    for chains in (256, 1000):
        still = place.expand(10 * chains, 500).clone()
        assert bool((DiagonalMetric.unit(still).learnt(still).variance == 1).all())
