"""The statistical assertions: they fail when they should, and by chance as often as they say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from priory.core.errors import InputError
from priory.testing import assert_covariance_close, assert_mean_close, assert_uniform_ranks, false_alarm
from priory.testing.statistics import _as_normal, _chi_square, _kolmogorov, _skewness


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def message(assertion: Callable[[], None]) -> str:
    with pytest.raises(AssertionError) as error:
        assertion()
    return str(error.value)


def fails(assertion: Callable[[], None]) -> bool:
    try:
        assertion()
    except AssertionError:
        return True
    return False


# False-alarm rates


@pytest.mark.parametrize("sigmas", [1.0, 3.0, 5.0, 7.0])
def test_the_false_alarm_rate_is_two_normal_tails_a_comparison(sigmas: float) -> None:
    tails = 2 * float(stats.norm.sf(sigmas))
    assert false_alarm(sigmas) == pytest.approx(tails, rel=1e-12)
    assert false_alarm(sigmas, 1000) == pytest.approx(min(1.0, 1000 * tails), rel=1e-12)


def tail_rates(draws: Tensor, expected: float, sigmas: float) -> float:
    """How often the compared number exceeds the limit, over the columns of draws (n, repetitions)."""
    off = (draws.mean(0) - expected) / (draws.std(0) / math.sqrt(len(draws)))
    return float((_as_normal(off, _skewness(draws), len(draws)).abs() > sigmas).double().mean())


@pytest.mark.parametrize(("n", "repetitions"), [(30, 100_000), (200, 20_000)])
def test_gaussian_means_raise_false_alarms_as_often_as_stated(n: int, repetitions: int) -> None:
    draws = normal(n, repetitions)
    for sigmas in (2.0, 3.0):
        rate, stated = tail_rates(draws, 0.0, sigmas), false_alarm(sigmas)
        # 5 standard errors of the rate, and a fifth of it for the approximation at 30 draws: 4 times, 2e-6
        assert abs(rate - stated) < 5 * math.sqrt(stated / repetitions) + 0.2 * stated


def test_skewed_means_raise_false_alarms_within_a_factor_of_two() -> None:
    draws = torch.empty(400, 20_000).exponential_(generator=torch.Generator().manual_seed(0)).double()
    uncorrected = (draws.mean(0) - 1) / draws.std(0) * math.sqrt(400)
    for sigmas in (2.0, 3.0):
        stated = false_alarm(sigmas)
        assert 0.5 * stated < tail_rates(draws, 1.0, sigmas) < 2 * stated
        # what the correction is for: one tail is half as heavy again, and more further out
        assert float((uncorrected < -sigmas).double().mean()) > 1.25 * stated / 2


def test_the_assertion_itself_fails_as_often_as_stated() -> None:
    draws = normal(4_000, 50, seed=1)
    failures = sum(fails(lambda d=d: assert_mean_close(d, 0.0, sigmas=2)) for d in draws)
    expected = 4_000 * false_alarm(2)
    # 5 standard errors: 6e-7; and a twentieth for 50 draws
    assert abs(failures - expected) < 5 * math.sqrt(expected) + 0.05 * expected


def test_covariances_raise_false_alarms_at_most_as_often_as_stated() -> None:
    draws = normal(2_000, 400, 2, seed=2)
    covariance = torch.eye(2)
    failures = sum(fails(lambda d=d: assert_covariance_close(d, covariance, sigmas=2)) for d in draws)
    expected = 2_000 * false_alarm(2, comparisons=3)  # a bound, and nearly reached by three weak dependences
    assert 0.8 * expected < failures < expected + 5 * math.sqrt(expected) + 0.1 * expected


def test_uniform_ranks_raise_false_alarms_at_most_at_their_level() -> None:
    generator = torch.Generator().manual_seed(3)
    ranks = torch.randint(0, 100, (2_000, 400), generator=generator)
    failures = sum(fails(lambda r=r: assert_uniform_ranks(r, 99, level=0.05)) for r in ranks)
    # chi-square has half the level, Kolmogorov-Smirnov at most the other half; 5 standard errors: 6e-7
    assert 0.025 * 2_000 - 5 * math.sqrt(50) < failures < 0.05 * 2_000 + 5 * math.sqrt(100)


@pytest.mark.parametrize("df", [29, 99, 999])
def test_student_deviations_become_normal_ones(df: int) -> None:
    """Wallace's map against scipy's exact tail, for symmetric draws."""
    for t in (1.0, 3.0, 5.0):
        z = float(_as_normal(torch.tensor(t).double(), torch.tensor(0.0).double(), df + 1))
        assert 2 * stats.norm.sf(z) == pytest.approx(2 * stats.t.sf(t, df), rel=0.02)


# Planted faults


@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_of_ten_standard_errors_is_found(sign: int) -> None:
    draws = normal(2000, 3)
    draws = draws - draws.mean(0)
    draws[:, 1] += sign * 10 * draws[:, 1].std() / math.sqrt(2000)
    text = message(lambda: assert_mean_close(draws, torch.zeros(3)))
    assert text.startswith("The mean of 2000 draws is wrong in 1 of 3 entries, most at [1]: expected 0, got ")
    assert f"{10 * sign:+.2f} standard errors" in text
    assert "The limit is 5, false-alarm rate 1.7e-06." in text


def test_the_message_has_the_expected_and_found_values_and_the_distance() -> None:
    draws = torch.linspace(-1, 1, 101, dtype=torch.float64) + 4.0
    error = float(draws.std()) / math.sqrt(101)
    text = message(lambda: assert_mean_close(draws, 4.0 + 8 * error))
    normal_ones = float(_as_normal(torch.tensor(-8.0).double(), torch.tensor(0.0).double(), 101))
    assert text == (
        f"The mean of 101 draws is wrong in 1 of 1 entries, most: expected {4 + 8 * error:.6g}, got 4, "
        f"-8.00 standard errors, as rare as {normal_ones:.2f} normal ones. The limit is 5, false-alarm rate 5.7e-07."
    )


def test_a_bias_in_skewed_draws_is_found_on_either_side() -> None:
    draws = torch.empty(2000).exponential_(generator=torch.Generator().manual_seed(0)).double()
    error = float(draws.std()) / math.sqrt(2000)
    for sign in (1, -1):
        assert fails(lambda sign=sign: assert_mean_close(draws, float(draws.mean()) + 10 * sign * error))
    assert_mean_close(draws, 1.0)


def test_a_covariance_off_by_ten_standard_errors_is_found_where_it_is() -> None:
    draws = normal(5000, 3)
    right = torch.eye(3, dtype=torch.float64)
    assert_covariance_close(draws, right)
    wrong = right.clone()
    wrong[2, 0] = wrong[0, 2] = 10 / math.sqrt(5000)  # the product of two standard normals has variance 1
    text = message(lambda: assert_covariance_close(draws, wrong))
    assert text.startswith("The covariance of 5000 draws is wrong in 1 of 6 entries, most at [2, 0]: expected ")
    assert "false-alarm rate 3.4e-06" in text


def test_the_covariance_is_the_unbiased_one() -> None:
    draws = normal(40, 3)
    deviations = draws - draws.mean(0)
    exact = deviations.T @ deviations / 39
    assert_covariance_close(draws, exact, sigmas=1.0)  # off by nothing at all but the skewness, a/2
    assert_covariance_close(draws[:, 0], exact[0, 0], sigmas=1.0)
    assert message(lambda: assert_covariance_close(draws[:, 0], 5.0)).count(" at ") == 0


@pytest.mark.parametrize("power", [0.8, 1.25])
def test_ranks_that_lean_to_one_side_are_found(power: float) -> None:
    uniform = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    text = message(lambda: assert_uniform_ranks((uniform**power * 100).long(), 99))
    assert text.startswith("The ranks of quantity 0 are not uniform on 0 to 99: expected a p-value of 5e-07 or")
    assert "2000 ranks of mean " in text
    assert text.endswith(" for 49.5). False-alarm rate 1e-06.")


@pytest.mark.parametrize("shape", [0.6, 1.6])
def test_ranks_of_a_posterior_too_wide_or_too_narrow_are_found_in_their_column(shape: float) -> None:
    beta = stats.beta(shape, shape)
    uniform = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uniform[:, 1] = torch.from_numpy(beta.ppf(uniform[:, 1].numpy()))
    text = message(lambda: assert_uniform_ranks((uniform * 100).long(), 99))
    assert text.startswith("The ranks of quantity 1 are not uniform")


@pytest.mark.parametrize("top", [1, 6, 9, 1000])
def test_uniform_ranks_pass_for_any_top(top: int) -> None:
    generator = torch.Generator().manual_seed(top)
    assert_uniform_ranks(torch.randint(0, top + 1, (3000, 3), generator=generator), top)


def test_rank_statistics_are_those_of_scipy() -> None:
    ranks = torch.randint(0, 1000, (500,), generator=torch.Generator().manual_seed(0))
    counts = torch.histc(ranks.double(), bins=20, min=0, max=1000).numpy()
    expected = stats.chisquare(counts)
    assert _chi_square(ranks, 999) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-10)
    distance, p_value = _kolmogorov(ranks, 999)
    assert distance == pytest.approx(stats.kstest((ranks.numpy() + 0.5) / 1000, "uniform").statistic, abs=1e-3)
    assert p_value == pytest.approx(stats.kstwo.sf(distance, 500), abs=0.01)
    distance, p_value = _kolmogorov((ranks**1.25 / 1000**0.25).long(), 999)
    assert p_value == pytest.approx(stats.kstwo.sf(distance, 500), rel=0.1)  # far out, where it decides
    assert p_value < 1e-4


# Edges


def test_draws_that_are_all_the_same_are_compared_up_to_rounding() -> None:
    constant = torch.full((1000, 2), 0.1, dtype=torch.float32)
    assert_mean_close(constant, 0.1)
    assert "got 0.1, " in message(lambda: assert_mean_close(constant, 0.2))
    assert_mean_close(torch.zeros(50), 0.0)
    assert_covariance_close(torch.zeros(50, 2), torch.zeros(2, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_draws_that_are_not_finite_are_wrong(bad: float) -> None:
    draws = normal(100, 2)
    draws[3, 1] = bad
    assert "most at [1]" in message(lambda: assert_mean_close(draws, 0.0))
    assert fails(lambda: assert_covariance_close(draws, torch.eye(2)))


def test_an_expectation_that_is_nan_is_wrong() -> None:
    assert fails(lambda: assert_mean_close(normal(100), math.nan))


def test_draws_may_be_integers_and_along_another_dimension() -> None:
    assert_mean_close(normal(3, 500), torch.zeros(3), dim=1)
    assert_covariance_close(normal(3, 500), torch.eye(3), dim=-1)
    tosses = torch.randint(0, 2, (500, 4), generator=torch.Generator().manual_seed(0))
    assert_mean_close(tosses, 0.5)
    assert "most at [1, 0]" in message(
        lambda: assert_mean_close(normal(500, 2, 2), torch.tensor([[0.0, 0.0], [9.0, 0.0]]))
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: assert_mean_close(torch.zeros(10), 0.0),
            "The 'samples' argument of assert_mean_close must be 30 draws or more, got 10.",
        ),
        (
            lambda: assert_covariance_close(torch.zeros(50, 2), torch.zeros(3, 3)),
            "The 'expected' argument of assert_covariance_close must have the shape (2, 2), got the shape (3, 3).",
        ),
        (
            lambda: assert_covariance_close(torch.zeros(50, 2, 2), torch.zeros(3, 3)),
            "The 'samples' argument of assert_covariance_close must be vectors or numbers, (n, d) or (n,), "
            "got (50, 2, 2).",
        ),
        (
            lambda: assert_uniform_ranks(torch.zeros(10), 9),
            "The 'ranks' argument of assert_uniform_ranks must be 100 or more, got 10.",
        ),
        (
            lambda: assert_uniform_ranks(torch.full((100,), 10), 9),
            "The 'ranks' argument of assert_uniform_ranks must lie between 0 and top = 9, got 10 to 10.",
        ),
    ],
)
def test_invalid_comparisons_are_refused(call: Callable[[], None], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == sentence
