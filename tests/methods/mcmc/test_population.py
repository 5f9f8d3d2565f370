"""The population of chains: their ascent, superchains, the window that the metric is learnt from, and stuck chains."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.draw_policy import superchain_ids
from priory.methods.mcmc import HMC, NUTS
from priory.methods.mcmc.joint import Joint, log_joint
from priory.methods.mcmc.metrics import METRICS, DenseMetric
from priory.methods.mcmc.population import (
    WINDOW_SNAPSHOTS,
    Window,
    ascend,
    disperse,
    far_apart,
    leave_negligible_modes,
    momentum_tail,
)
from priory.methods.mcmc.warmup import Warmup
from priory.models.target import Target

DOUBLE = torch.float64


def population(log_prob: Any, size: int, chains: int, spread: float = 2.0) -> tuple[Joint, Tensor, Tensor, Tensor]:
    """Return the joint of a density, and starts uniform on (-spread, spread) with their values and gradients."""
    density = pr.Density(log_prob, {"w": Param((size,))}, batched=True)
    w = spread * (2 * torch.rand(chains, size, generator=stream(0, "population"), dtype=DOUBLE) - 1)
    joint = log_joint(Target(density, None), Data.of(None), w)
    return joint, w, *joint(w)


def narrow_valley(p: dict[str, Tensor]) -> Tensor:
    """A Gaussian around (2000, -30000) with standard deviations from 0.001 to 1000, correlated."""
    x = p["w"] - torch.tensor([2000.0, -30000.0, 0.0, 5.0], dtype=DOUBLE)
    turned = torch.stack([x[..., 0] + 0.5 * x[..., 1], x[..., 1] / 1000, x[..., 2] / 0.001, x[..., 3] - x[..., 2]], -1)
    return -0.5 * turned.square().sum(-1)


# Arrive.


@pytest.mark.parametrize("metric", ["dense", "diagonal"])
def test_chains_arrive_far_away_on_raw_scales_in_few_steps(metric):
    joint, w, value, gradient = population(narrow_valley, 4, 64)
    assert float(value.max()) < -400
    w, value, _, _, taken = ascend(joint, METRICS[metric].unit(w), w, value, gradient, stream(1, "population"))
    assert taken <= (60 if metric == "dense" else 200)
    if metric == "dense":  # within 2 P nats of the mode, whose value is zero
        assert float(value.median()) > -8


def test_the_ascent_learns_the_covariance_of_a_gaussian():
    joint, w, value, gradient = population(narrow_valley, 4, 64)
    *_, metric, _ = ascend(joint, DenseMetric.unit(w), w, value, gradient, stream(1, "population"))
    precision = -torch.autograd.functional.hessian(lambda x: narrow_valley({"w": x}), torch.zeros(4, dtype=DOUBLE))
    assert isinstance(metric, DenseMetric)
    ratios = torch.linalg.eigvals(metric.covariance @ precision).real  # of the learnt and the true variances
    assert 0.3 < float(ratios.min()) <= float(ratios.max()) < 3  # from an identity that was off by a factor of 1e6


def test_the_ascent_keeps_chains_in_their_own_basins():
    def two_modes(p: dict[str, Tensor]) -> Tensor:
        return torch.logaddexp(-0.5 * (p["w"] - 6).square().sum(-1), -0.5 * (p["w"] + 6).square().sum(-1))

    joint, w, value, gradient = population(two_modes, 2, 128, spread=8.0)
    sides = w.sum(-1).sign()
    clear = w.sum(-1).abs() > 3
    w, *_ = ascend(joint, DenseMetric.unit(w), w, value, gradient, stream(1, "population"))
    kept = (w.sum(-1).sign() == sides)[clear].double().mean()
    assert float(kept) > 0.9
    assert 0.25 < float((w.sum(-1) > 0).double().mean()) < 0.75


def test_the_ascent_stops_below_the_mode_of_many_coordinates():
    """The typical set of 100 standard normal coordinates lies 50 nats below their mode; an ascent may end there."""
    joint, w, value, gradient = population(lambda p: -0.5 * p["w"].square().sum(-1), 100, 256)
    *_, taken = ascend(joint, DenseMetric.unit(w), w, value, gradient, stream(1, "population"))
    assert taken <= 3


def test_members_ascend_on_their_own():
    """Two members in one call both arrive."""
    _, w, *_ = population(narrow_valley, 4, 64)
    both = torch.stack([w, w.flip(0)])
    density = pr.Density(narrow_valley, {"w": Param((4,))}, batched=True)
    together = log_joint(Target(density, None), Data.of(None), both)
    found, values, *_ = ascend(together, DenseMetric.unit(both), both, *together(both), stream(1, "population"))
    assert found.shape == both.shape
    assert bool((values.median(-1).values > -8).all())


# Disperse.


def test_superchains_have_equal_sizes_and_few_chains_have_none():
    assert superchain_ids(15) is None
    assert superchain_ids(18) is None
    for chains, count in ((16, 4), (36, 4), (64, 8), (68, 4), (256, 8)):
        ids = superchain_ids(chains)
        assert ids is not None
        assert torch.bincount(ids).tolist() == [chains // count] * count


def test_chains_of_a_superchain_share_a_start_and_superchains_do_not():
    joint, w, value, gradient = population(lambda p: -0.5 * p["w"].square().sum(-1), 3, 64)
    w, value, gradient = disperse(joint, DenseMetric.unit(w), w, value, gradient, stream(2, "population"))
    groups = w.unflatten(0, (8, 8))
    assert bool((groups == groups[:, :1]).all())
    starts = groups[:, 0]
    assert float(torch.pdist(starts).min()) > 0.5
    again = joint(w)
    torch.testing.assert_close((value, gradient), again, rtol=1e-12, atol=1e-12)


def test_superchains_are_more_dispersed_than_the_posterior():
    """From chains that are all near the mode, starts have about twice the standard deviations of the metric.

    The mean of 8 x 50 squares of N(0, 2^2) is 4 with a relative standard error of sqrt(2 / 400) = 0.07: 5 errors.
    """
    joint, w, value, gradient = population(lambda p: -0.5 * p["w"].square().sum(-1), 50, 64, spread=1e-3)
    w, *_ = disperse(joint, DenseMetric.unit(w), w, value, gradient, stream(2, "population"))
    assert float(w.square().mean()) == pytest.approx(4.0, rel=0.35)


def test_superchains_start_in_every_mode_that_a_chain_has_found():
    """One chain of 64 is in the second mode; the starts are far apart, so one superchain begins there."""
    w = 0.1 * torch.randn(64, 2, generator=stream(3, "population"), dtype=DOUBLE)
    w[17] += 20
    places = far_apart(DenseMetric.unit(w), w, torch.ones(64, dtype=torch.bool), 8)
    assert 17 in places.tolist()
    assert len(set(places.tolist())) == 8


def test_a_start_outside_the_support_is_drawn_closer():
    def inside(p: dict[str, Tensor]) -> Tensor:
        x = p["w"]
        return torch.where(x.abs() < 0.5, 0.0, -math.inf).sum(-1) - 0.5 * x.square().sum(-1)

    joint, w, value, gradient = population(inside, 2, 16, spread=0.1)
    w, value, _ = disperse(joint, DenseMetric.unit(w), w, value, gradient, stream(2, "population"))
    assert bool(torch.isfinite(value).all())
    assert float(w.abs().max()) < 0.5


# The window.


def test_a_window_holds_evenly_spaced_snapshots_of_the_whole_time():
    w = torch.zeros(3, 2, dtype=DOUBLE)
    window = Window.empty(w, slopes=True)
    for time in range(1, 301):
        window.record(w + time, torch.full((3,), float(time), dtype=DOUBLE), -(w + time))
    times = window.x[: window.count, 0, 0].tolist()
    assert WINDOW_SNAPSHOTS // 2 <= window.count <= WINDOW_SNAPSHOTS
    assert times == [16.0 * i for i in range(1, window.count + 1)]
    assert window.values[: window.count, 0].tolist() == times
    assert window.g[: window.count, 0, 0].tolist() == [-t for t in times]
    assert window.recent().shape == (3, window.count - window.count // 2, 2)
    x, g = window.points()
    assert g is not None
    assert torch.equal(x, -g)
    assert float(x.min()) > 300 / 2 - 16


def test_a_window_without_gradients_has_none():
    w = torch.zeros(3, 2, dtype=DOUBLE)
    window = Window.empty(w, slopes=False)
    window.record(w, w[:, 0], w)
    assert window.points()[1] is None


# Lost chains.


def recorded(w: Tensor, value: Tensor) -> Window:
    """Return a window of 16 snapshots in which the chains vary a little around w, with these values."""
    window = Window.empty(w, slopes=True)
    generator = stream(4, "population")
    for _ in range(16):
        noise = torch.randn(w.shape, generator=generator, dtype=DOUBLE)
        window.record(w + noise, value, w)
    return window


def test_chains_in_a_region_of_negligible_probability_are_replaced_from_their_superchain():
    w = torch.arange(32.0, dtype=DOUBLE).view(16, 2)
    value = torch.zeros(16, dtype=DOUBLE)
    value[5] = -60.0
    found = leave_negligible_modes(recorded(w, value), DenseMetric.unit(w), w, value, -w)
    assert found is not None
    place = [i if i != 5 else 4 for i in range(16)]
    copy = [i for i in range(4, 8) if torch.equal(found[0][5], w[i])]
    assert copy
    assert copy[0] != 5
    place[5] = copy[0]
    assert torch.equal(found[0], w[place])
    assert torch.equal(found[1], value[place])
    assert torch.equal(found[2], -w[place])


def test_a_superchain_in_a_negligible_region_starts_again_elsewhere():
    w = torch.arange(32.0, dtype=DOUBLE).view(16, 2)
    value = torch.zeros(16, dtype=DOUBLE)
    value[8:12] = -60.0
    found = leave_negligible_modes(recorded(w, value), DenseMetric.unit(w), w, value, -w)
    assert found is not None
    assert bool((found[1] == 0).all())


def test_a_wide_region_of_low_density_is_kept():
    """A region 60 nats lower but e^40 times as wide in each of two coordinates has e^20 times the probability."""
    w = torch.zeros(16, 2, dtype=DOUBLE)
    value = torch.zeros(16, dtype=DOUBLE)
    value[5] = -60.0
    window = recorded(w, value)
    window.x[:, 5] *= math.exp(40)
    assert leave_negligible_modes(window, DenseMetric.unit(w), w, value, -w) is None


def test_chains_with_ordinary_differences_are_not_replaced():
    w = torch.zeros(16, 2, dtype=DOUBLE)
    value = -torch.arange(16.0, dtype=DOUBLE) / 2
    assert leave_negligible_modes(recorded(w, value), DenseMetric.unit(w), w, value, -w) is None


# The energy.


def energies(variance: float, size: int = 100) -> Window:
    """Return a window of 64 chains of `size` coordinates whose log density is normal with this variance."""
    window = Window.empty(torch.zeros(64, size, dtype=DOUBLE), slopes=True)
    window.count = WINDOW_SNAPSHOTS
    window.values = math.sqrt(variance) * torch.randn(
        window.values.shape, generator=stream(0, "energies"), dtype=DOUBLE
    )
    return window


def test_momenta_get_heavy_tails_where_the_density_varies_more_than_that_of_a_gaussian():
    """The kinetic energy, of variance (P / 2) (1 + tail), is to vary as much as the potential energy."""
    assert momentum_tail(energies(50.0)) is None  # P / 2, as for a Gaussian
    window = energies(200.0)
    tail = momentum_tail(window)
    assert tail is not None
    assert 2.6 < float(tail) < 3.4  # 3, with a standard error of 0.16
    window.values[..., 0] = -1e9  # a chain that has not arrived
    kept = momentum_tail(window)
    assert kept is not None
    assert abs(float(kept) - float(tail)) < 0.5
    widest = momentum_tail(energies(1e6))
    assert widest is not None
    assert float(widest) == 100 / 16  # sixteen degrees of freedom
    assert momentum_tail(energies(1e6, size=16)) is None  # which for so few coordinates are hardly heavy tails


# The warm-up.


def test_rounds_of_the_warm_up_double_and_learn_in_their_first_three_quarters():
    warmup = Warmup.of(640, exact=False, arrived=False, learnt=False, accept=0.8)
    ends = [warmup.end]
    while warmup.end < warmup.limit:
        warmup.go_on()
        ends.append(warmup.end)
    assert ends == [40, 80, 160, 320, 640]
    warmup = Warmup.of(640, exact=False, arrived=False, learnt=False, accept=0.8)
    times = [t for t in range(1, 41) if warmup.learns_at(t)]
    assert times == [1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 30]


@pytest.mark.parametrize("limit", [1, 5, 39, 41, 100, 250])
def test_a_warm_up_of_a_given_length_ends_there(limit):
    warmup = Warmup.of(limit, exact=True, arrived=False, learnt=False, accept=0.8)
    start = 0
    while warmup.end < limit:
        start = warmup.end
        warmup.go_on()
    assert warmup.end == limit
    assert limit < 40 or limit - start >= 20  # the last round is not a short one


def correlated(p: dict[str, Tensor]) -> Tensor:
    x = p["w"]
    return -0.5 * x[..., 0].square() - 0.5 * (x[..., 1] - 3 * x[..., 0]).square() / 0.01


@pytest.mark.parametrize("method", [NUTS, HMC])
def test_a_fit_at_its_defaults_stops_when_the_draws_are_enough(method):
    """Means and variances are those of the Gaussian: 4 comparisons at 5 standard errors, false alarms at 1e-5."""
    density = pr.Density(correlated, {"w": Param((2,))}, batched=True)
    posterior = pr.fit(density, None, method(), progress=False)
    assert posterior.status.name == "converged"
    assert posterior.num_chains * posterior.num_draws < 10_000
    assert posterior.superchains is not None
    w = posterior.draws["w"]
    mean, error = w.mean((0, 1)), pr.diagnostics.mcse_mean(w)
    assert bool((mean.abs() < 5 * error).all())
    sd, error = w.flatten(0, 1).std(0), pr.diagnostics.mcse_sd(w)
    assert bool(((sd - torch.tensor([1.0, math.sqrt(9.01)], dtype=DOUBLE)).abs() < 5 * error).all())


def test_steps_alone_means_exactly_that_many_draws():
    density = pr.Density(correlated, {"w": Param((2,))}, batched=True)
    posterior = pr.fit(density, None, NUTS(chains=16), steps=7, progress=False)
    assert posterior.num_draws == 7


def test_two_far_modes_are_not_converged():
    def two_modes(p: dict[str, Tensor]) -> Tensor:
        return torch.logaddexp(-0.5 * (p["w"] - 5).square().sum(-1), -0.5 * (p["w"] + 5).square().sum(-1))

    density = pr.Density(two_modes, {"w": Param((2,))}, batched=True)
    with pytest.warns(pr.PrioryWarning, match="has not converged"):
        posterior = pr.fit(density, None, NUTS(chains=64), progress=False)
    assert posterior.status.name == "not_converged"
    sides = (posterior.draws["w"].mean((1, 2)) > 0).double().mean()
    assert 0 < float(sides) < 1  # both were found
