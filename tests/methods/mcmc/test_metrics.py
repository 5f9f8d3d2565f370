"""A metric's three uses agree with one covariance, and that is the one of the draws that it was learnt from."""

import pytest
import torch
from torch import Tensor

from priory.core.streams import stream
from priory.methods.mcmc.adaptation import RECENT_DRAWS, Moments
from priory.methods.mcmc.metrics import MAX_RANK, METRICS, SHRINKAGE_DRAWS, DenseMetric, DiagonalMetric, LowRankMetric

DOUBLE = torch.float64
SIZE = 5


def draws(steps: int = 6, chains: int = 40) -> Tensor:
    """Correlated draws of two members, (steps, 2, chains, P)."""
    noise = torch.randn(steps, 2, chains, SIZE, generator=stream(0, "metrics"), dtype=DOUBLE)
    mix = torch.randn(2, SIZE, SIZE, generator=stream(1, "metrics"), dtype=DOUBLE)
    return noise @ mix + 3.0


def heard(w: Tensor, metric: str) -> Moments:
    moments = Moments.none(w[0], METRICS[metric].__name__)
    for step in w:
        moments.record(step)
    return moments


def applied(metric: DiagonalMetric | DenseMetric | LowRankMetric) -> Tensor:
    """C of each member, (2, P, P), from the velocities of unit momenta."""
    return metric.velocity(torch.eye(SIZE, dtype=DOUBLE).expand(2, -1, -1))


def test_moments_are_those_of_all_draws_of_all_chains():
    w = draws()
    moments = heard(w, "dense")
    every = w.movedim(0, 1).flatten(1, 2)  # (2, steps x chains, P)
    centred = every - every.mean(1, keepdim=True)
    assert moments.count == 240
    torch.testing.assert_close(moments.mean, every.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.squares, centred.square().sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.scatter, centred.mT @ centred, rtol=1e-11, atol=1e-11)


def test_a_diagonal_metric_has_the_variances():
    w = draws()
    metric = DiagonalMetric.unit(w[0]).learnt(heard(w, "diagonal"))
    every = w.movedim(0, 1).flatten(1, 2)
    torch.testing.assert_close(metric.variance[:, 0], every.var(1), rtol=1e-12, atol=1e-12)


def test_a_dense_metric_has_the_covariance_drawn_towards_its_diagonal():
    w = draws()
    metric = DenseMetric.unit(w[0]).learnt(heard(w, "dense"))
    weight = 240 / (240 + SIZE + SHRINKAGE_DRAWS)
    for member in (0, 1):
        full = torch.cov(w[:, member].flatten(0, 1).mT)
        expected = weight * full + (1 - weight) * full.diag().diag()
        torch.testing.assert_close(metric.covariance[member], expected, rtol=1e-11, atol=1e-11)


def test_a_low_rank_metric_of_full_rank_has_the_covariance_of_the_last_draws_drawn_towards_one():
    w = draws(steps=8, chains=RECENT_DRAWS // 8)  # all of them are the last ones
    metric = LowRankMetric.unit(w[0]).learnt(heard(w, "low_rank"))
    for member in (0, 1):
        full = torch.cov(w[:, member].flatten(0, 1).mT)
        d = full.diagonal().sqrt()
        correlation = full / d[:, None] / d
        shrunk = (RECENT_DRAWS * correlation + (SIZE + SHRINKAGE_DRAWS) * torch.eye(SIZE, dtype=DOUBLE)) / (
            RECENT_DRAWS + SIZE + SHRINKAGE_DRAWS
        )
        torch.testing.assert_close(applied(metric)[member], shrunk * d[:, None] * d, rtol=1e-10, atol=1e-10)


def test_a_low_rank_metric_hears_of_no_draws_but_those_of_its_window():
    """160 draws about 100, fewer than it has room for: all of their covariance, as that of draws about zero."""
    w = draws(steps=4)
    near, far = (LowRankMetric.unit(w[0]).learnt(heard(x, "low_rank")) for x in (w, w + 100))
    torch.testing.assert_close(applied(far), applied(near), rtol=1e-9, atol=1e-9)
    for member in (0, 1):
        full = torch.cov(w[:, member].flatten(0, 1).mT)
        d = full.diagonal().sqrt()
        shrunk = (160 * full / d[:, None] / d + (SIZE + SHRINKAGE_DRAWS) * torch.eye(SIZE, dtype=DOUBLE)) / (
            160 + SIZE + SHRINKAGE_DRAWS
        )
        torch.testing.assert_close(applied(near)[member], shrunk * d[:, None] * d, rtol=1e-10, atol=1e-10)


def test_independent_coordinates_have_spreads_near_one_however_many_they_are():
    """Of 256 draws of 1000 the spreads found are up to (1 + sqrt(1000 / 255))^2 = 8.9, drawn towards one by 1005."""
    w = torch.randn(64, 4, 1000, generator=stream(4, "metrics"), dtype=DOUBLE)
    metric = LowRankMetric.unit(w[0]).learnt(heard(w, "low_rank"))
    assert float(metric.spread.min()) > 0.75
    assert float(metric.spread.max()) < (RECENT_DRAWS * 8.9 + 1005) / (RECENT_DRAWS + 1005)
    every = w.flatten(0, 1)
    size = torch.linalg.svdvals((every - every.mean(0)) / every.std(0)).square() / 255
    by_hand = (RECENT_DRAWS * size + 1000 + SHRINKAGE_DRAWS) / (RECENT_DRAWS + 1000 + SHRINKAGE_DRAWS)
    torch.testing.assert_close(metric.spread.max(), by_hand.max(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_a_low_rank_metric_of_few_draws_has_their_directions_alone(count):
    """n draws in 30 coordinates span n - 1 directions about their mean; all others keep a spread of one."""
    w = torch.randn(1, 2, count, 30, generator=stream(2, "metrics"), dtype=DOUBLE)
    metric = LowRankMetric.unit(w[0]).learnt(heard(w, "low_rank"))
    assert metric.basis.shape == (2, 30, MAX_RANK)
    assert metric.spread.shape == (2, 1, MAX_RANK)
    assert ((metric.spread - 1).abs() > 1e-9).sum(-1).max() <= count - 1
    p = torch.randn(2, 4, 30, generator=stream(3, "metrics"), dtype=DOUBLE)
    momentum = metric.momentum(p)
    torch.testing.assert_close((momentum * metric.velocity(momentum)).sum(-1), p.square().sum(-1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", METRICS)
def test_momenta_have_the_inverse_of_the_covariance_and_squares_measure_by_it(name):
    w = draws()
    metric = METRICS[name].unit(w[0]).learnt(heard(w, name))
    covariance, unit = applied(metric), torch.eye(SIZE, dtype=DOUBLE).expand(2, -1, -1)
    factor = metric.momentum(unit)  # rows are what unit noise leads to
    torch.testing.assert_close(factor.mT @ factor, torch.linalg.inv(covariance), rtol=1e-9, atol=1e-9)
    d = draws()[0]
    expected = (d @ torch.linalg.inv(covariance) * d).sum(-1)
    torch.testing.assert_close(metric.square(d), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", METRICS)
def test_a_velocity_is_the_same_in_any_order_in_memory_and_keeps_it(name):
    w = draws()[:, 0]
    metric = METRICS[name].unit(w[0]).learnt(heard(w, name))
    p = w[0]
    columns = metric.velocity(p.mT.contiguous().mT)
    torch.testing.assert_close(columns, metric.velocity(p), rtol=1e-12, atol=1e-12)
    assert columns.mT.is_contiguous()
    assert metric.velocity(p).is_contiguous()


@pytest.mark.parametrize("name", METRICS)
def test_a_coordinate_that_did_not_move_keeps_its_scale(name):
    w = draws().clone()
    w[..., 2] = 0.1  # whose mean is rounded: its variance, some 1e-34, is none
    assert float(heard(w, name).squares[..., 2].max()) > 0
    covariance = applied(METRICS[name].unit(w[0]).learnt(heard(w, name)))
    assert bool((torch.linalg.eigvalsh(covariance) > 0).all())
    assert float(covariance[..., 2, 2].min()) > 0.01  # in part what the draws say, unless the metric is diagonal
    if name == "diagonal":
        assert bool((covariance[..., 2, 2] == 1).all())


def test_a_dense_metric_keeps_the_scale_of_a_coordinate_that_never_moves_through_every_window():
    w = draws().clone()
    w[..., 2] = 0.1
    metric = DenseMetric.unit(w[0])
    rest = [0, 1, 3, 4]
    for _ in range(3):
        metric = metric.learnt(heard(w, "dense"))
        assert bool((metric.covariance[:, 2] == torch.eye(SIZE, dtype=DOUBLE)[2]).all())
        assert bool((metric.covariance[:, :, 2] == torch.eye(SIZE, dtype=DOUBLE)[2]).all())
        weight = 240 / (240 + SIZE + SHRINKAGE_DRAWS)
        for member in (0, 1):
            full = torch.cov(w[:, member].flatten(0, 1)[:, rest].mT)
            found = metric.covariance[member][rest][:, rest]
            torch.testing.assert_close(found, weight * full + (1 - weight) * full.diag().diag(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_what_moves_by_a_few_roundings_of_its_place_has_moved_and_what_is_only_rounded_has_not(dtype):
    """About 1000, by 40 times eps |mean|, in float32 0.005; and at 500 places, in a mean over 256 or 1000 chains."""
    noise = torch.randn(20, 256, 1, generator=stream(5, "metrics"), dtype=DOUBLE)
    width = 40 * 1000 * torch.finfo(dtype).eps
    w = (1000 + width * noise).to(dtype)
    found = DiagonalMetric.unit(w[0]).learnt(heard(w, "diagonal"))
    assert float(found.variance.sqrt()) == pytest.approx(width, rel=0.1)
    place = (10 * torch.rand(500, generator=stream(6, "metrics"), dtype=DOUBLE) - 5).exp().to(dtype)
    for chains in (256, 1000):
        still = place.expand(10, chains, 500).clone()
        assert bool((DiagonalMetric.unit(still[0]).learnt(heard(still, "diagonal")).variance == 1).all())
