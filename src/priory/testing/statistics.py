"""Assertions about draws, in standard errors, each with a known false-alarm rate.

A limit of 5 standard errors is exceeded by chance once in 1.7 million comparisons, so a failing test has found a
defect. Two corrections keep that rate correct: one for skewed draws, whose Studentised mean has one long tail (Hall,
1992, "On the Removal of Skewness by Transformation"), and one for a standard error that is estimated from few draws
(Wallace, 1959, "Bounds on Normal Approximations to Student's and the Chi-Square Distributions"). Draws must be
independent: for Markov chains, pass one mean per chain.

>>> draws = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
>>> assert_mean_close(draws, 0.0)
>>> assert_covariance_close(draws, torch.eye(3))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from priory.core.errors import require

MIN_DRAWS = 30  # with fewer draws the corrections are not accurate


def false_alarm(sigmas: float, comparisons: int = 1) -> float:
    """Bound the probability that any of several comparisons is off by more than `sigmas` standard errors.

    Args:
        sigmas: The limit, in standard errors.
        comparisons: Number of comparisons. Default: 1.

    Returns:
        comparisons x P(|z| > sigmas) for a standard normal z, at most 1.

    Example:
        >>> round(false_alarm(5, comparisons=100), 7)
        5.73e-05
    """
    return min(1.0, comparisons * math.erfc(sigmas / math.sqrt(2)))


def assert_mean_close(samples: Tensor, expected: Any, *, sigmas: float = 5, dim: int = 0) -> None:
    """Assert that the mean of independent draws is as expected, within `sigmas` standard errors.

    Every entry of the mean is compared. The false-alarm rate is `false_alarm(sigmas, entries)` for 30 Gaussian draws or
    more. It is within a factor of two of that for 1000 draws or more that are as skewed as an exponential.

    Args:
        samples: The draws, at least 30.
        expected: The expected mean: a number or a tensor that broadcasts to the shape of the mean.
        sigmas: The limit, in standard errors. Default: 5.
        dim: The dimension of the draws. Default: 0.

    Raises:
        AssertionError: If an entry is off by more than the limit, or is NaN.
        InputError: If there are fewer than 30 draws.
    """
    draws = _draws(samples, dim, "assert_mean_close")
    _assert_close(draws, expected, sigmas, "mean", _resolution(samples))


def assert_covariance_close(samples: Tensor, expected: Any, *, sigmas: float = 5, dim: int = 0) -> None:
    """Assert that the covariance of independent draws is as expected, within `sigmas` standard errors.

    The standard errors are those of the products of deviations, so the draws need not be Gaussian. There are
    d(d + 1)/2 comparisons.

    Args:
        samples: The draws, at least 30: vectors, (n, d) for dim 0, or numbers, (n,), whose variance is compared.
        expected: The expected covariance, (d, d), or variance, a number.
        sigmas: The limit, in standard errors. Default: 5.
        dim: The dimension of the draws. Default: 0.

    Raises:
        AssertionError: If an entry is off by more than the limit, or is NaN.
        InputError: If there are fewer than 30 draws, or the shapes don't agree.
    """
    draws = _draws(samples, dim, "assert_covariance_close")
    must = "be vectors or numbers, (n, d) or (n,)"
    require(draws.ndim <= 2, "samples", "assert_covariance_close", must, tuple(samples.shape))
    deviations = (draws - draws.mean(0)).reshape(len(draws), -1)
    d, unbiased = deviations.shape[1], len(draws) / (len(draws) - 1)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    must = f"have the shape {(d, d)}" if draws.ndim == 2 else "be one number"
    fits = expected.shape == ((d, d) if draws.ndim == 2 else ())
    require(fits, "expected", "assert_covariance_close", must, f"the shape {tuple(expected.shape)}")
    i, j = torch.tril_indices(d, d)
    products = deviations[:, i] * deviations[:, j] * unbiased
    places = list(zip(i.tolist(), j.tolist(), strict=True)) if draws.ndim == 2 else [()]
    _assert_close(products, expected.reshape(d, d)[i, j], sigmas, "covariance", _resolution(samples), places)


def assert_uniform_ranks(ranks: Tensor, top: int, *, level: float = 1e-6) -> None:
    """Assert that independent ranks are uniform on 0, 1, ..., top, as those of simulation-based calibration must be.

    Each quantity is tested twice: by a chi-square test over at most 20 bins, which detects any shape, and by a
    Kolmogorov-Smirnov test, which is more powerful for a shift.

    Args:
        ranks: At least 100 ranks, (n,), or (n, k) for k quantities.
        top: The largest possible rank, an integer >= 1.
        level: Upper bound on the false-alarm rate of all tests together. Default: 1e-6.

    Raises:
        AssertionError: If a test rejects uniformity.
        InputError: If there are too few ranks, or a rank is outside 0 to `top`.

    References:
        Talts et al. (2018), "Validating Bayesian Inference Algorithms with Simulation-Based Calibration".
    """
    ranks = ranks.reshape(len(ranks), -1).long()
    n, columns = ranks.shape
    require(n >= 100, "ranks", "assert_uniform_ranks", "be 100 or more", n)
    require(top >= 1, "top", "assert_uniform_ranks", "be at least 1", top)
    low, high = int(ranks.min()), int(ranks.max())
    must, got = f"lie between 0 and top = {top}", f"{low} to {high}"
    require(low >= 0 and high <= top, "ranks", "assert_uniform_ranks", must, got)
    each = level / (2 * columns)
    for k, column in enumerate(ranks.cpu().unbind(1)):
        for test, (value, p_value) in uniformity(column, top).items():
            if p_value < each:
                raise AssertionError(
                    f"The ranks of quantity {k} are not uniform on 0 to {top}: expected a p-value of "
                    f"{each:.2g} or more, got {p_value:.2g} ({test} statistic {value:.4g}; {n} ranks of mean "
                    f"{float(column.double().mean()):.4g} for {top / 2:.4g}). False-alarm rate {level:.2g}."
                )


def _assert_close(
    draws: Tensor, expected: Any, sigmas: float, what: str, resolution: float, places: list[Any] | None = None
) -> None:
    """Compare the mean over the first dimension with the expected one, entry by entry."""
    n, mean = len(draws), draws.mean(0)
    expected = torch.as_tensor(expected, dtype=torch.float64, device=draws.device).expand(mean.shape)
    # draws that are all equal have a rounding error only
    rounding = resolution * torch.maximum(mean.abs(), expected.abs())
    error = torch.maximum(draws.std(0) / math.sqrt(n), rounding).clamp(min=torch.finfo(mean.dtype).tiny)
    off = (mean - expected) / error
    equivalent = _as_normal(off, _skewness(draws), n)
    wrong = ~(equivalent.abs() <= sigmas)  # NaN is wrong too
    if not bool(wrong.any()):
        return
    worst = int(equivalent.abs().nan_to_num(nan=math.inf).argmax())
    place = places[worst] if places is not None else torch.unravel_index(torch.tensor(worst), mean.shape)
    where = f" at {[int(i) for i in place]}" if len(place) else ""
    values = (float(t.reshape(-1)[worst]) for t in (expected, mean, off, equivalent))
    raise AssertionError(
        f"The {what} of {n} draws is wrong in {int(wrong.sum())} of {mean.numel()} entries, most{where}: "
        "expected {:.6g}, got {:.6g}, {:+.2f} standard errors, as rare as {:+.2f} normal ones. ".format(*values)
        + f"The limit is {sigmas:g}, false-alarm rate {false_alarm(sigmas, mean.numel()):.2g}."
    )


def _draws(samples: Tensor, dim: int, owner: str) -> Tensor:
    draws = samples.detach().double().movedim(dim, 0)
    require(len(draws) >= MIN_DRAWS, "samples", owner, f"be {MIN_DRAWS} draws or more", len(draws))
    return draws


def _resolution(samples: Tensor) -> float:
    return torch.finfo(samples.dtype).eps if samples.is_floating_point() else 0.0


def _skewness(draws: Tensor) -> Tensor:
    deviation = draws - draws.mean(0)
    spread = deviation.square().mean(0).sqrt()
    return torch.where(spread > 0, deviation.pow(3).mean(0) / spread.pow(3), 0.0)


def _as_normal(off: Tensor, skewness: Tensor, n: int) -> Tensor:
    """Turn a Studentised mean of n draws into a standard normal: Hall's cubic, then Wallace's map from t."""
    a = skewness / (3 * math.sqrt(n))
    t = off + a * off.square() + a.square() * off.pow(3) / 3 + a / 2
    # the cubic is flat near -1 / a, where it would hide a large error of few draws: reduce by half at most
    t = torch.where(t.abs() < off.abs() / 2, off / 2, t)
    df = n - 1
    return t.sign() * (8 * df + 1) / (8 * df + 3) * (df * (t.square() / df).log1p()).sqrt()


def uniformity(ranks: Tensor, top: int) -> dict[str, tuple[float, float]]:
    """Return the statistic and p-value of each test for the ranks of one quantity, (n,)."""
    return {"chi-square": _chi_square(ranks, top), "Kolmogorov-Smirnov": _kolmogorov(ranks, top)}


def _chi_square(ranks: Tensor, top: int) -> tuple[float, float]:
    """Return the chi-square statistic and p-value, over bins in which 20 ranks or more are expected."""
    n, bins = len(ranks), min(top + 1, 20, len(ranks) // 20)
    expected = torch.bincount(torch.arange(top + 1) * bins // (top + 1)).double() * n / (top + 1)
    counts = torch.bincount(ranks * bins // (top + 1), minlength=bins).double()
    statistic = ((counts - expected).square() / expected).sum()
    half_df = torch.tensor((bins - 1) / 2, dtype=torch.float64)
    return float(statistic), float(torch.special.gammaincc(half_df, statistic / 2))


def _kolmogorov(ranks: Tensor, top: int) -> tuple[float, float]:
    """Return the Kolmogorov-Smirnov statistic and p-value; for integers the p-value is conservative."""
    n = len(ranks)
    below = torch.bincount(ranks, minlength=top + 1).cumsum(0).double() / n
    uniform = torch.arange(1, top + 2, dtype=torch.float64) / (top + 1)
    distance = float((below - uniform).abs().max())
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if scaled < 0.3:  # where the series converges slowly the p-value is 1 to five digits
        return distance, 1.0
    return distance, math.fsum(2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 30))
