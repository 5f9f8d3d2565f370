import math

import numpy as np
import pytest
import scipy.stats
import torch

from priory.core.errors import InputError
from priory.core.streams import stream
from priory.diagnostics import importance_resample, psis
from priory.diagnostics.importance import k_hat, pareto_fit

DOUBLE = torch.float64


def pareto_quantiles(n: int, k: float) -> torch.Tensor:
    return torch.from_numpy(scipy.stats.genpareto.ppf((np.arange(n) + 0.5) / n, k))


@pytest.mark.parametrize("k", [-0.3, 0.2, 0.5, 0.9, 1.4])
def test_the_shape_of_a_generalised_pareto_distribution_is_found(k):
    """The maximum-likelihood estimate has the standard error (1 + k) / sqrt(n); 5 of them, false alarms at 6e-7."""
    n = 20_000
    u = torch.rand(n, generator=stream(0, "pareto"), dtype=DOUBLE)
    x = 3.0 * torch.expm1(-k * torch.log1p(-u)) / k
    found, scale = pareto_fit(x.sort().values)
    assert abs(found - k) < 5 * (1 + abs(k)) / math.sqrt(n)
    assert abs(scale / 3.0 - 1) < 5 * math.sqrt(2 * (1 + abs(k)) / n)


def test_a_small_fit_is_that_of_the_formula_written_out_in_numpy():
    x = np.array([0.1, 0.4, 0.5, 1.2, 2.0, 3.5, 9.0])
    n, m = 7, 32
    profile, b = [], []
    for j in range(1, m + 1):
        b_j = 1 / 9.0 + (1 - math.sqrt(m / (j - 0.5))) / (3 * 0.4)  # the quartile is x[floor(7/4 + 1/2)]
        k_j = np.mean(np.log(1 - b_j * x))
        b.append(b_j)
        profile.append(n * math.log(-b_j / k_j) - n * k_j - n)
    weights = np.exp(np.array(profile) - max(profile))
    b_mean = np.sum(np.array(b) * weights) / weights.sum()
    k_raw = np.mean(np.log(1 - b_mean * x))
    k, scale = pareto_fit(torch.from_numpy(x))
    assert abs(k - (7 * k_raw + 5) / 17) < 1e-12
    assert abs(scale + k_raw / b_mean) < 1e-12


# arviz 0.20.0, psislw of the log of 0.1 + a generalised Pareto's quantiles at (i + 1/2) / S
ARVIZ = [
    (100, 0.2, 0.3196208843338411),
    (1000, 0.5, 0.4970859612625211),
    (4000, 0.8, 0.7773238490895125),
    (2000, -0.3, -0.2266933017331601),
]


@pytest.mark.parametrize(("size", "k", "published"), ARVIZ)
def test_k_hat_is_that_of_arviz(size, k, published):
    _, found = psis((0.1 + pareto_quantiles(size, k)).log())
    assert abs(found - published) < 1e-10


def test_k_hat_of_a_normal_that_is_too_narrow_is_one_less_the_ratio_of_variances():
    """Weights p/q of N(0, 1) over N(0, v) have the tail index 1 / (1 - v); logarithms in it keep the fit from exact."""
    x = torch.randn(200_000, generator=stream(0, "narrow"), dtype=DOUBLE)
    for v in (0.2, 0.5, 0.8):
        log_weights = 0.5 * x.square() * (1 - v)
        _, found = psis(log_weights)
        assert abs(found - (1 - v)) < 0.12


def test_k_hat_of_a_normal_that_is_too_wide_is_below_zero():
    x = 1.5 * torch.randn(20_000, generator=stream(0, "wide"), dtype=DOUBLE)
    assert psis(-0.5 * x.square() * (1 - 1 / 2.25))[1] < 0


def test_smoothing_keeps_the_order_and_the_body_and_sums_to_one():
    log_weights = 2 * torch.randn(1000, generator=stream(0, "order"), dtype=DOUBLE)
    smoothed, _ = psis(log_weights)
    assert abs(float(smoothed.exp().sum()) - 1) < 1e-12
    order = log_weights.argsort()
    assert bool((smoothed[order].diff() >= 0).all())
    body = order[:-95]  # 3 sqrt(1000) = 94.9 are smoothed
    shift = smoothed[body] - log_weights[body]
    assert float(shift.max() - shift.min()) < 1e-12
    raw_tail = smoothed[order[-95:]] - shift[0]
    assert not torch.allclose(raw_tail, log_weights[order[-95:]], atol=1e-3)
    assert float(raw_tail.max()) <= float(log_weights.max()) + 1e-12


def test_smoothing_makes_the_estimate_of_a_mean_less_variable():
    """E[x] = 1 under N(1, 1) from draws of N(0, 0.8): the smoothed estimate has the smaller error over 400 repeats."""
    x = 0.8**0.5 * torch.randn(400, 500, generator=stream(0, "mean"), dtype=DOUBLE)
    log_weights = -0.5 * (x - 1).square() + 0.5 * x.square() / 0.8
    raw = (log_weights.softmax(1) * x).sum(1)
    smooth = torch.stack([(psis(row)[0].exp() * v).sum() for row, v in zip(log_weights, x, strict=True)])
    assert float((smooth - 1).square().mean()) < float((raw - 1).square().mean())


def test_a_constant_shift_of_the_log_weights_changes_nothing():
    log_weights = 3 * torch.randn(500, generator=stream(0, "shift"), dtype=DOUBLE)
    (first, k_first), (second, k_second) = psis(log_weights), psis(log_weights + 700.0)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-9)
    assert abs(k_first - k_second) < 1e-9


def test_too_few_weights_are_left_as_they_are_with_an_infinite_k_hat():
    log_weights = torch.randn(20, generator=stream(0, "few"), dtype=DOUBLE)
    smoothed, found = psis(log_weights)
    torch.testing.assert_close(smoothed, log_weights.log_softmax(0))
    assert found == math.inf


def test_weights_that_are_all_alike_have_no_tail():
    smoothed, found = psis(torch.full((100,), -3.0, dtype=DOUBLE))
    assert found == -math.inf
    torch.testing.assert_close(smoothed, torch.full((100,), -math.log(100), dtype=DOUBLE))


def test_a_draw_without_density_keeps_a_weight_of_zero():
    log_weights = torch.randn(400, generator=stream(0, "zero"), dtype=DOUBLE)
    for positive, fits in ((5, False), (40, True)):
        log_weights[: 400 - positive] = -math.inf
        smoothed, found = psis(log_weights)
        assert math.isfinite(found) == fits
        assert bool((smoothed[: 400 - positive] == -math.inf).all())
        assert bool((smoothed[400 - positive :] > -math.inf).all())
        log_weights = torch.randn(400, generator=stream(0, "zero"), dtype=DOUBLE)


def test_weights_that_span_more_than_a_number_can_hold_are_smoothed():
    log_weights = 2000 * torch.randn(400, generator=stream(0, "span"), dtype=DOUBLE)
    smoothed, found = psis(log_weights)
    assert found > 1
    assert not bool(torch.isnan(smoothed).any())


def test_resampling_counts_are_the_expected_counts_up_to_rounding():
    log_weights = torch.randn(30, generator=stream(0, "share"), dtype=DOUBLE)
    share = 1000 * log_weights.softmax(0)
    counts = torch.bincount(importance_resample(log_weights + 5, 1000, stream(1)), minlength=30)
    assert int(counts.sum()) == 1000
    assert bool(((counts - share).abs() < 1).all())


def test_resampling_is_unbiased():
    """One draw from weights (1, 2, 5) / 8, 2000 times: 4 standard errors, 3 comparisons, false alarms at 2e-4."""
    weights, generator = torch.tensor([1.0, 2.0, 5.0], dtype=DOUBLE) / 8, stream(0, "unbiased")
    places = torch.cat([importance_resample(weights.log(), 1, generator) for _ in range(2000)])
    counts = torch.bincount(places, minlength=3) / 2000
    assert bool(((counts - weights).abs() < 4 * (weights * (1 - weights) / 2000).sqrt()).all())


def test_resampling_is_not_misled_by_draws_of_two_sources_by_turns():
    """Weights 0.7 and 0.3 by turns: equal steps of the period alone would meet one source only."""
    log_weights = torch.tensor([0.7, 0.3], dtype=DOUBLE).log().repeat(5000)
    places = importance_resample(log_weights, 1000, stream(0, "turns"))
    assert abs(float((places % 2).double().mean()) - 0.3) < 5 * math.sqrt(0.21 / 1000)  # false alarms below 6e-7


def test_a_draw_of_weight_zero_is_never_resampled():
    log_weights = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf], dtype=DOUBLE)
    assert set(importance_resample(log_weights, 1000, stream(0)).tolist()) == {1, 3}


@pytest.mark.parametrize("function", [psis, lambda w: importance_resample(w, 3, stream(0))])
@pytest.mark.parametrize(
    ("log_weights", "must"),
    [
        (torch.zeros(2, 2), "be a vector with at least one entry"),
        (torch.zeros(0), "be a vector with at least one entry"),
        ([0.0], "be a vector with at least one entry"),
        (torch.tensor([0.0, math.nan]), "have no NaN, and a finite maximum"),
        (torch.tensor([0.0, math.inf]), "have no NaN, and a finite maximum"),
        (torch.full((3,), -math.inf), "have no NaN, and a finite maximum"),
    ],
)
def test_invalid_log_weights_are_refused(function, log_weights, must):
    with pytest.raises(InputError, match=f"The 'log_weights' argument of .* must {must}"):
        function(log_weights)


@pytest.mark.parametrize("n", [0, 1.5, True])
def test_resampling_none_is_refused(n):
    with pytest.raises(InputError, match="The 'n' argument of importance_resample must be an integer >= 1"):
        importance_resample(torch.zeros(3), n, stream(0))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_weights_that_differ_only_by_rounding_have_no_tail(dtype):
    noise = torch.randn(1000, generator=stream(0, "rounding"), dtype=DOUBLE)
    even = (10 * torch.finfo(dtype).eps * noise).to(dtype)
    smoothed, shape = psis(even)
    assert shape == -math.inf
    torch.testing.assert_close(smoothed.exp(), torch.full_like(smoothed, 1e-3), rtol=1e-4, atol=0)


def test_k_hat_is_minus_infinity_where_all_draws_count_and_that_of_psis_elsewhere():
    """A variance of the weights below 0.01 is one of their logarithms below 0.01."""
    noise = torch.randn(1000, generator=stream(0, "even"), dtype=DOUBLE)
    assert k_hat(0.05 * noise) == -math.inf
    assert k_hat(0.5 * noise) == psis(0.5 * noise)[1] > -math.inf
    with pytest.raises(InputError, match="'log_weights' argument of k_hat must be a vector"):
        k_hat(torch.zeros(2, 2))
