"""How far draws can be believed: Pareto-smoothed importance sampling and its k-hat (Vehtari, Simpson, Gelman, Yao and
Gabry 2024).

Draws w_s from q stand for p with the weights r_s = p(w_s) / q(w_s). The largest M = min(S/5, 3 sqrt(S)) of them, less
the cutoff below them, are close to a generalised Pareto distribution,

    P(r - cutoff > x) = (1 + k x / scale)^(-1/k)

whose shape k says how many moments the weights have: all up to 1/k. Its fit (Zhang and Stephens 2009, with a prior of
ten draws at k = 1/2) replaces the M weights by their expected order statistics, no larger than the largest as drawn.
An estimate from S draws is good where k-hat is below 0.5, usable up to 0.7, and not to be believed above. Where q is p
to rounding there is no tail, only the noise of arithmetic, and k-hat is minus infinity by convention, as of weights
that are bounded. Cost: O(S log S).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from priory.core.errors import require, whole

FEWEST = 5  # weights in the tail that a fit needs
PRIOR_DRAWS, PRIOR_K = 10, 0.5
ROUNDING = 64  # units in the last place of a weight, within which weights are equal
EVEN = 0.01  # a variance of the ratios, of mean one, at which 99 of 100 draws count in full


def k_hat(log_ratios: Tensor) -> float:
    """How far draws of q may stand for p, from log p / q at each, (S,): the shape of the tail of the ratios.

    Minus infinity where the ratios vary so little that every draw counts the same, be it by rounding or because q is
    next to p: their tail has no shape to speak of. Every method that reports a k-hat goes by this rule.

    >>> k_hat(1e-6 * torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    -inf
    """
    checked(log_ratios, "k_hat")
    ratios = log_ratios.double().softmax(0) * len(log_ratios)
    even = len(ratios) > 1 and float(ratios.var()) < EVEN
    return -math.inf if even else psis(log_ratios)[1]


def psis(log_weights: Tensor) -> tuple[Tensor, float]:
    """The smoothed log weights, normalised to sum to one, (S,), and k-hat.

    Where fewer than 21 draws, or fewer than 6 of positive weight, leave no tail to fit, the weights stay as they are
    and k-hat is infinite; where the tail doesn't vary but by rounding, k-hat is minus infinity, as of weights that are
    bounded. A weight of zero is a log weight of minus infinity.

    >>> smoothed, shape = psis(torch.zeros(100))
    >>> round(float(smoothed.exp().sum()), 6), shape
    (1.0, -inf)
    """
    checked(log_weights, "psis")
    shifted = log_weights.double() - log_weights.max()
    size = math.ceil(min(0.2 * len(shifted), 3 * math.sqrt(len(shifted))))
    size = min(size, int(torch.isfinite(shifted).sum()) - 1)  # a weight of zero is no part of the tail, and stays zero
    shape = math.inf
    if size >= FEWEST:
        order = shifted.argsort(stable=True)
        tail, cutoff = shifted[order[-size:]], float(shifted[order[-size - 1]])
        excess = -tail.exp() * torch.expm1(cutoff - tail)
        rounding = ROUNDING * torch.finfo(log_weights.dtype).eps  # of the largest weight, which is one
        shape, scale = pareto_fit(excess) if float(excess[-1]) > rounding else (-math.inf, 0.0)
        if math.isfinite(shape):
            places = (torch.arange(size, dtype=torch.float64, device=excess.device) + 0.5) / size
            smooth = math.exp(cutoff) + pareto_quantile(places, shape, scale)
            shifted[order[-size:]] = smooth.log().clamp(max=0.0)
    return (shifted - shifted.logsumexp(0)).to(log_weights.dtype), shape


def importance_resample(log_weights: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n places of draws in proportion to their weights, (n,).

    The resampling is systematic: a draw of normalised weight r comes floor(n r) or ceil(n r) times, n r on average, so
    that less noise is added than by independent choices. The draws are shuffled first, as equal steps through draws of
    several sources by turns would keep meeting the same source.

    >>> importance_resample(torch.tensor([0.25, 0.75]).log(), 4, torch.Generator().manual_seed(0)).sort().values
    tensor([0, 1, 1, 1])
    """
    checked(log_weights, "importance_resample")
    require(whole(n, 1), "n", "importance_resample", "be an integer >= 1", n)
    order = torch.randperm(len(log_weights), generator=generator, device=log_weights.device)
    edges = log_weights.double().softmax(0)[order].cumsum(0)
    offset = torch.rand((), generator=generator, dtype=torch.float64, device=edges.device)
    points = (torch.arange(n, dtype=torch.float64, device=edges.device) + offset) / n
    # rounding must not take the last point to the end of the last weight, beyond which there is no draw
    return order[torch.searchsorted(edges / edges[-1], points.clamp(max=1 - 2**-53), right=True)]


def checked(log_weights: Tensor, owner: str) -> None:
    """Refuse what can't be log weights."""
    vector = isinstance(log_weights, Tensor) and log_weights.ndim == 1 and len(log_weights) > 0
    require(vector, "log_weights", owner, "be a vector of one or more", getattr(log_weights, "shape", log_weights))
    usable = not bool(torch.isnan(log_weights).any()) and math.isfinite(float(log_weights.max()))
    require(usable, "log_weights", owner, "be numbers, of which the largest is finite", log_weights.tolist())


def pareto_fit(x: Tensor) -> tuple[float, float]:
    """Shape k and scale of a generalised Pareto distribution, for x positive and in increasing order, (n,).

    With b = -k / scale the likelihood has a closed form in k. The posterior mean of b is taken over a grid, under the
    prior of Zhang and Stephens, and the shape is then drawn towards 1/2 as by ten more draws.
    """
    n, largest = len(x), float(x[-1])
    if not float(x[0]) < largest * (1 - 1e-10):  # no spread but rounding
        return -math.inf, 0.0
    grid = 30 + math.isqrt(n)
    j = torch.arange(1, grid + 1, dtype=x.dtype, device=x.device)
    quartile = float(x[int(n / 4 + 0.5) - 1])
    b = 1 / largest + (1 - (grid / (j - 0.5)).sqrt()) / (3 * max(quartile, 1e-280 * largest))
    k = torch.log1p(-b[:, None] * x).mean(1)
    profile = (n * ((-b / k).log() - k - 1)).nan_to_num(nan=-math.inf)  # b = 0 is no place for a formula with 0 / 0
    centre = float((profile.softmax(0) * b).sum())
    k_raw = float(torch.log1p(-centre * x).mean())
    return (n * k_raw + PRIOR_DRAWS * PRIOR_K) / (n + PRIOR_DRAWS), -k_raw / centre


def pareto_quantile(places: Tensor, k: float, scale: float) -> Tensor:
    """The x below which a generalised Pareto distribution has each of these probabilities."""
    left = -torch.log1p(-places)  # an exponential's quantile, which is the limit k = 0
    return scale * left if abs(k) < 1e-12 else scale * torch.expm1(k * left) / k
