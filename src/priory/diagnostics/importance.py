"""Pareto-smoothed importance sampling and its diagnostic k-hat.

Draws w_s from q represent p with the weights r_s = p(w_s) / q(w_s). The largest M = min(S/5, 3 sqrt(S)) weights, minus
the cutoff below them, approximately follow a generalised Pareto distribution,

    P(r - cutoff > x) = (1 + k x / scale)^(-1/k)

whose shape k determines how many moments the weights have: all up to 1/k. Its fit (Zhang and Stephens 2009, with a
prior worth ten draws at k = 1/2) replaces the M weights by their expected order statistics, truncated at the largest
raw weight. An estimate from S draws is good where k-hat is below 0.5, usable up to 0.7, and unreliable above. Where q
equals p up to rounding there is no tail, only rounding noise, and k-hat is minus infinity by convention, as for bounded
weights. Cost: O(S log S).

References:
    Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling.
    Zhang and Stephens (2009), A new and efficient estimation method for the generalized Pareto distribution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from priory.core.errors import is_integer, require

MIN_TAIL_WEIGHTS = 5  # below which no Pareto distribution is fitted
PRIOR_DRAWS, PRIOR_K = 10, 0.5
MIN_LOG_WEIGHT = math.log(torch.finfo(torch.float64).tiny)  # relative to the largest; no tail begins below it
EQUAL_WEIGHT_EPS = 64  # weights that differ by less, in machine epsilons, are equal
NEGLIGIBLE_RATIO_VARIANCE = 0.01  # of ratios with mean one: the effective sample size is then 99 % of the draws


def k_hat(log_ratios: Tensor) -> float:
    """Pareto k-hat of importance ratios: how well draws of q represent p.

    Below 0.5 importance sampling is good, up to 0.7 usable, above 0.7 unreliable.

    Args:
        log_ratios: log p(w_s) - log q(w_s) at draws of q, (S,).

    Returns:
        The shape of the tail of the ratios. Minus infinity where the ratios hardly vary, by rounding or because q is
        very close to p: their tail then has no meaningful shape. Every method that reports a k-hat follows this rule.

    Example:
        >>> k_hat(1e-6 * torch.randn(1000, generator=torch.Generator().manual_seed(0)))
        -inf
    """
    checked(log_ratios, "k_hat")
    ratios = log_ratios.double().softmax(0) * len(log_ratios)
    even = len(ratios) > 1 and float(ratios.var()) < NEGLIGIBLE_RATIO_VARIANCE
    return -math.inf if even else psis(log_ratios)[1]


def psis(log_weights: Tensor, relative_efficiency: float = 1.0) -> tuple[Tensor, float]:
    """Pareto-smoothed importance sampling: smooth the largest weights, and report k-hat.

    Args:
        log_weights: Unnormalised log weights, (S,). A weight of zero has the log weight minus infinity.
        relative_efficiency: Effective draws per draw. Autocorrelated draws need a longer tail, of
            3 sqrt(S / relative_efficiency) weights. Default: 1.0, for independent draws.

    Returns:
        The smoothed log weights, normalised so that the weights sum to one, (S,), and k-hat. With fewer than 21 draws,
        or fewer than 6 of positive weight, there is no tail to fit: the weights are only normalised, and k-hat is
        infinity. Where the tail varies only by rounding, k-hat is minus infinity, as for bounded weights.

    Example:
        >>> smoothed, shape = psis(torch.zeros(100))
        >>> round(float(smoothed.exp().sum()), 6), shape
        (1.0, -inf)
    """
    checked(log_weights, "psis")
    positive = isinstance(relative_efficiency, (int, float)) and 0 < relative_efficiency < math.inf
    require(positive, "relative_efficiency", "psis", "be a positive number", relative_efficiency)
    shifted = log_weights.double() - log_weights.max()
    size = math.ceil(min(0.2 * len(shifted), 3 * math.sqrt(len(shifted) / relative_efficiency)))
    size = min(size, int(torch.isfinite(shifted).sum()) - 1)  # a weight of zero is not part of the tail, and stays zero
    if size < MIN_TAIL_WEIGHTS:
        return normalised(shifted, log_weights), math.inf
    largest, order = (t.flip(0) for t in shifted.topk(size + 1))  # in ascending order
    cutoff = max(float(largest[0]), MIN_LOG_WEIGHT)
    rounding = EQUAL_WEIGHT_EPS * torch.finfo(log_weights.dtype).eps  # of the largest weight, which is one
    if -math.expm1(cutoff) <= rounding:
        return normalised(shifted, log_weights), -math.inf
    above = largest > cutoff  # weights that equal the cutoff have no excess
    tail, order = largest[above], order[above]
    if len(tail) < MIN_TAIL_WEIGHTS:
        return normalised(shifted, log_weights), math.inf
    shape, scale = pareto_fit(-tail.exp() * torch.expm1(cutoff - tail))
    if math.isfinite(shape):
        places = (torch.arange(len(tail), dtype=torch.float64, device=tail.device) + 0.5) / len(tail)
        smooth = math.exp(cutoff) + pareto_quantile(places, shape, scale)
        shifted[order] = smooth.log().clamp(max=0.0)
    return normalised(shifted, log_weights), shape


def normalised(shifted: Tensor, like: Tensor) -> Tensor:
    """Log weights whose weights sum to one, in the dtype of another tensor."""
    return (shifted - shifted.logsumexp(0)).to(like.dtype)


def importance_resample(log_weights: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Resample the indices of draws in proportion to their weights.

    The resampling is systematic: a draw of normalised weight r is chosen floor(n r) or ceil(n r) times, n r on average,
    which adds less noise than independent choices. The draws are shuffled first; otherwise equal steps through draws
    that alternate between several sources could choose the same source every time.

    Args:
        log_weights: Unnormalised log weights, (S,).
        n: Number of indices.
        generator: Random generator.

    Returns:
        Indices of draws, (n,).

    Example:
        >>> importance_resample(torch.tensor([0.25, 0.75]).log(), 4, torch.Generator().manual_seed(0)).sort().values
        tensor([0, 1, 1, 1])
    """
    checked(log_weights, "importance_resample")
    require(is_integer(n, 1), "n", "importance_resample", "be an integer >= 1", n)
    order = torch.randperm(len(log_weights), generator=generator, device=log_weights.device)
    edges = log_weights.double().softmax(0)[order].cumsum(0)
    offset = torch.rand((), generator=generator, dtype=torch.float64, device=edges.device)
    points = (torch.arange(n, dtype=torch.float64, device=edges.device) + offset) / n
    # rounding must not move the last point beyond the last weight, where there is no draw
    return order[torch.searchsorted(edges / edges[-1], points.clamp(max=1 - 2**-53), right=True)]


def checked(log_weights: Tensor, owner: str) -> None:
    """Raise an error unless log_weights is a vector of log weights with a finite maximum."""
    vector = isinstance(log_weights, Tensor) and log_weights.ndim == 1 and len(log_weights) > 0
    require(
        vector, "log_weights", owner, "be a vector with at least one entry", getattr(log_weights, "shape", log_weights)
    )
    usable = not bool(torch.isnan(log_weights).any()) and math.isfinite(float(log_weights.max()))
    require(usable, "log_weights", owner, "have no NaN, and a finite maximum", log_weights.tolist())


def pareto_fit(x: Tensor) -> tuple[float, float]:
    """Shape k and scale of a generalised Pareto distribution fitted to positive x in ascending order, (n,).

    With b = -k / scale the likelihood has a closed form in k. The posterior mean of b is computed on a grid, under the
    prior of Zhang and Stephens, and the shape is then shrunk towards 1/2 with the weight of ten draws.
    """
    n, largest = len(x), float(x[-1])
    if not float(x[0]) < largest * (1 - 1e-10):  # only rounding
        return -math.inf, 0.0
    grid = 30 + math.isqrt(n)
    j = torch.arange(1, grid + 1, dtype=x.dtype, device=x.device)
    quartile = float(x[int(n / 4 + 0.5) - 1])
    b = 1 / largest + (1 - (grid / (j - 0.5)).sqrt()) / (3 * max(quartile, 1e-280 * largest))
    k = torch.log1p(-b[:, None] * x).mean(1)
    profile = (n * ((-b / k).log() - k - 1)).nan_to_num(nan=-math.inf)  # 0 / 0 at b = 0
    centre = float((profile.softmax(0) * b).sum())
    k_raw = float(torch.log1p(-centre * x).mean())
    return (n * k_raw + PRIOR_DRAWS * PRIOR_K) / (n + PRIOR_DRAWS), -k_raw / centre


def pareto_quantile(places: Tensor, k: float, scale: float) -> Tensor:
    """Quantiles of a generalised Pareto distribution at the given probabilities."""
    left = -torch.log1p(-places)  # an exponential's quantile, which is the limit k = 0
    return scale * left if abs(k) < 1e-12 else scale * torch.expm1(k * left) / k
