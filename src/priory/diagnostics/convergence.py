"""Whether Markov chains have forgotten where they began, and how many independent draws theirs are worth (Vehtari,
Gelman, Simpson, Carpenter and Bürkner 2021).

R-hat compares chains with each other. Of M chains of n draws, each split in half, with W the mean of the variances
within and B / n the variance of the means,

    R-hat = sqrt(((n - 1) / n W + B / n) / W)

taken of the draws' normal scores, Phi^-1((rank - 3/8) / (S + 1/4)), so that it needs no variance to exist, and of those
of |x - median|, so that chains which differ in spread alone are seen; the larger counts. Below 1.01 is good.

The effective sample size is S / tau, with the autocorrelations rho of all chains together, variance between them
included, summed up to where noise begins (Geyer 1992: sums of neighbouring pairs, as long as they are positive, none
larger than the one before):

    tau = 1 + 2 sum_t rho_t,      rho_t = 1 - (W - mean over chains of the autocovariance at t) / var+

The bulk's is of normal scores, a quantile's of the indicator x <= quantile, the tail's the smaller of those at 5 % and
95 %. The Monte Carlo standard error follows: sd / sqrt(ESS) for a mean. 100 effective draws a chain make these numbers
themselves reliable. Many short chains, each too short for an R-hat of its own, are compared in groups that share a
start (nested R-hat: Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman 2024). E-BFMI is of Hamiltonian
samplers (Betancourt 2016): below 0.3 their energy wanders too slowly to see the tails.

Draws are (chain, draw, ...), and a result has the shape that is left. It is NaN where there is nothing to say: fewer
than 4 draws a chain, a draw that is not finite, a quantity that never varies. Cost: O(S log S) a quantity.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import require, whole

if TYPE_CHECKING:
    from collections.abc import Callable

FEWEST = 4  # draws a chain
AT_A_TIME = 1 << 22  # numbers that are worked on together


def r_hat(x: Tensor) -> Tensor:
    """Rank-normalised split R-hat, the larger of the bulk's and the folded one.

    >>> apart = torch.stack([torch.linspace(0, 1, 100), torch.linspace(5, 6, 100)])
    >>> float(r_hat(apart)) > 1.5
    True
    """

    def of(draws: Tensor) -> Tensor:
        halves = split(draws)
        ordered = halves.flatten(0, 1).sort(0).values
        middle = len(ordered) // 2  # of an even number
        folded = (halves - 0.5 * (ordered[middle - 1] + ordered[middle])).abs()
        return torch.maximum(potential_reduction(normal_scores(halves)), potential_reduction(normal_scores(folded)))

    return by_columns(of, x, "r_hat")


def ess_bulk(x: Tensor) -> Tensor:
    """How many independent draws the middle of the distribution is known as well as from."""
    return by_columns(lambda draws: effective(normal_scores(split(draws))), x, "ess_bulk")


def ess_tail(x: Tensor) -> Tensor:
    """The same of the tails: the smaller of the effective sizes at the quantiles 5 % and 95 %."""

    def of(draws: Tensor) -> Tensor:
        return torch.minimum(effective_below(draws, 0.05), effective_below(draws, 0.95))

    return by_columns(of, x, "ess_tail")


def ess_mean(x: Tensor) -> Tensor:
    """How many independent draws the mean is known as well as from."""
    return by_columns(lambda draws: effective(split(draws)), x, "ess_mean")


def ess_sd(x: Tensor) -> Tensor:
    """How many independent draws the standard deviation is known as well as from."""
    return by_columns(lambda draws: effective(split(squared_deviations(draws))), x, "ess_sd")


def ess_quantile(x: Tensor, q: float) -> Tensor:
    """How many independent draws the quantile q is known as well as from."""
    check_probability(q, "ess_quantile")
    return by_columns(lambda draws: effective_below(draws, q), x, "ess_quantile")


def mcse_mean(x: Tensor) -> Tensor:
    """The standard error of the draws' mean as an estimate of the target's."""

    def of(draws: Tensor) -> Tensor:
        return draws.flatten(0, 1).std(0) / effective(split(draws)).sqrt()

    return by_columns(of, x, "mcse_mean")


def mcse_sd(x: Tensor) -> Tensor:
    """The standard error of the draws' standard deviation: that of the variance over twice the standard deviation."""

    def of(draws: Tensor) -> Tensor:
        squares = squared_deviations(draws)
        flat = squares.flatten(0, 1)
        return (flat.var(0, correction=0) / effective(split(squares)) / flat.mean(0) / 4).sqrt()

    return by_columns(of, x, "mcse_sd")


def mcse_quantile(x: Tensor, q: float) -> Tensor:
    """The standard error of the draws' quantile q: half the width of its central interval of probability 0.683.

    The share of draws below the quantile has a Beta distribution; its quantiles, read off the draws, are the interval.
    """
    check_probability(q, "mcse_quantile")

    def of(draws: Tensor) -> Tensor:
        size = effective_below(draws, q)
        ordered = draws.flatten(0, 1).sort(0).values
        low, high = (beta_quantile(p, size * q + 1, size * (1 - q) + 1) for p in (0.1586553, 0.8413447))
        below = (low * len(ordered) - 1).clamp(min=0).floor()
        above = (high * len(ordered) - 1).clamp(max=len(ordered) - 1).ceil()
        edges = ordered.gather(0, torch.stack([below, above]).long())
        return 0.5 * (edges[1] - edges[0])

    return by_columns(of, x, "mcse_quantile")


def nested_r_hat(x: Tensor, groups: int) -> Tensor:
    """R-hat of many short chains, in `groups` of neighbours of which each shares a start: sqrt(1 + B / W).

    B is the variance of the groups' means, and W the mean over groups of the variance between the chains of one plus
    the variance within them. One draw a chain is enough, or one chain a group. With M chains in each of K groups the
    value of a sampler that has converged lies near sqrt(1 + 1 / M) for one draw a chain: compare it with that.
    """
    check_draws(x, "nested_r_hat")
    chains, draws = x.shape[:2]
    ok = whole(groups, 2) and chains % groups == 0 and (chains > groups or draws > 1)
    must = f"be an integer >= 2 that divides the {chains} chains into groups of two draws or more"
    require(ok, "groups", "nested_r_hat", must, groups)

    def of(columns: Tensor) -> Tensor:
        grouped = columns.unflatten(0, (groups, -1))  # (group, chain, draw, quantity)
        means = grouped.mean(2)
        within = torch.zeros_like(means[:, 0])
        if draws > 1:
            within += grouped.var(2).mean(1)
        if chains > groups:
            within += means.var(1)
        return (1 + means.mean(1).var(0) / within.mean(0)).sqrt()

    return by_columns(of, x, "nested_r_hat", fewest=1)


def bfmi(energy: Tensor) -> Tensor:
    """E-BFMI of each chain, from the energies of its draws: (chain, draw) -> (chain,).

    E[(E_t - E_(t-1))^2] / Var E: how much of the energy's spread one resampling of the momentum goes through.
    """
    ok = isinstance(energy, Tensor) and energy.ndim == 2
    require(ok, "energy", "bfmi", "be a tensor (chain, draw)", getattr(energy, "shape", energy))
    energy = energy.double()
    if energy.shape[1] < FEWEST:
        return energy.new_full(energy.shape[:1], torch.nan)
    return energy.diff(dim=1).square().mean(1) / energy.var(1)


def quantile(x: Tensor, q: float) -> Tensor:
    """The quantile q of all chains together, linear between two draws."""
    check_probability(q, "quantile")
    return by_columns(lambda draws: quantile_of(draws, q), x, "quantile", fewest=1, still=True)


# The mathematics, on (chain, draw, quantity) in float64.


def split(x: Tensor) -> Tensor:
    """Each chain in half, so that one that drifts differs from itself; the middle one of odd draws is left out."""
    half = x.shape[1] // 2
    return torch.cat([x[:, :half], x[:, x.shape[1] - half :]])


def normal_scores(x: Tensor) -> Tensor:
    """Phi^-1((rank - 3/8) / (S + 1/4)) among all chains; draws that are equal share their mean rank."""
    flat = x.flatten(0, 1).T.contiguous()
    ordered = flat.sort(1).values
    rank = 0.5 * (1.0 + torch.searchsorted(ordered, flat).double() + torch.searchsorted(ordered, flat, right=True))
    return torch.special.ndtri((rank - 0.375) / (flat.shape[1] + 0.25)).T.reshape(x.shape)


def potential_reduction(x: Tensor) -> Tensor:
    """R-hat of draws as they are."""
    n, within = x.shape[1], x.var(1).mean(0)
    return ((n - 1) / n + x.mean(1).var(0) / within).sqrt()


def autocovariance(x: Tensor) -> Tensor:
    """The autocovariance of each chain at every lag, over n: (chain, lag, quantity)."""
    n = x.shape[1]
    size = 1 << (2 * n - 1).bit_length()  # zeros behind the draws keep the ends of a chain from meeting
    spectrum = torch.fft.rfft(x - x.mean(1, keepdim=True), size, dim=1)
    return torch.fft.irfft(spectrum.abs().square(), size, dim=1)[:, :n] / n


def effective(x: Tensor) -> Tensor:
    """S / tau, from Geyer's initial monotone sequence over all chains."""
    chains, n = x.shape[:2]
    mean_autocovariance = autocovariance(x).mean(0)
    within = mean_autocovariance[0] * n / (n - 1)
    total = mean_autocovariance[0] + (x.mean(1).var(0) if chains > 1 else 0.0)
    rho = 1 - (within - mean_autocovariance) / total
    rho[0] = 1
    pairs = max(1, (n - 1) // 2)  # the last two lags are of too few products
    even, sums = rho[0 : 2 * pairs : 2], rho[: 2 * pairs].unflatten(0, (pairs, 2)).sum(1)
    place = torch.arange(pairs, device=x.device)[:, None]
    last = torch.where(sums > 0, pairs - 1, place).amin(0)  # the first pair that is not positive, or the last of all
    before = torch.where(place < last, sums.cummin(0).values, 0.0).sum(0)
    edge, edge_sum = even.gather(0, last[None])[0], sums.gather(0, last[None])[0]
    # half of the pair at which the sum ends is still a positive autocorrelation, and lessens the variance
    tau = 2 * before - 1 + torch.where((edge > 0) | (edge_sum >= 0), edge, 0.0)
    # anticorrelated chains are worth more than their number of draws, but not without bound
    size = chains * n / tau.clamp(min=1 / math.log10(chains * n))
    # an indicator that is always 1, as of x <= the largest value of a discrete x, has no error
    return torch.where((x == x[:1, :1]).flatten(0, 1).all(0), float(chains * n), size)


def effective_below(x: Tensor, q: float) -> Tensor:
    """The effective size of the indicator x <= quantile."""
    return effective(split((x <= quantile_of(x, q)).double()))


def squared_deviations(x: Tensor) -> Tensor:
    """(x - mean)^2, with the mean of all chains."""
    return (x - x.mean((0, 1))).square()


def quantile_of(x: Tensor, q: float) -> Tensor:
    """The quantile q of all chains together: (quantity,)."""
    ordered = x.flatten(0, 1).sort(0).values
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def beta_quantile(p: float, a: Tensor, b: Tensor) -> Tensor:
    """The x at which the distribution function of Beta(a, b) is p, for a and b from 1.

    Newton's method on logit x, from the normal distribution with the logit's mean and variance.
    """
    spread = (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
    centre = torch.digamma(a) - torch.digamma(b)
    t = centre + math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * p - 1, dtype=torch.float64))) * spread
    log_scale = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    for _ in range(50):
        slope = (log_scale + a * torch.nn.functional.logsigmoid(t) + b * torch.nn.functional.logsigmoid(-t)).exp()
        step = ((beta_cdf(t.sigmoid(), a, b) - p) / slope).clamp(-spread, spread)
        t = t - step
        if not bool((step.abs() > 1e-13 * (1 + t.abs())).any()):
            break
    return t.sigmoid()


def beta_cdf(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The regularised incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    swap = x > (a + 1) / (a + b + 2)  # where the fraction converges slowly, its mirror image converges fast
    x, a, b = torch.where(swap, 1 - x, x), torch.where(swap, b, a), torch.where(swap, a, b)
    log_front = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b) + a * x.log() + b * torch.log1p(-x)
    # the fraction 1 / (1 + d1 / (1 + d2 / (1 + ...))) as a product of ratios of successive terms (Lentz 1976)
    c, d = torch.ones_like(x), 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1 + numerator / c, 1 / (1 + numerator * d)
            ratio = c * d
            value = value * ratio
        if not bool(((ratio - 1).abs() > 1e-15).any()):
            break
    found = log_front.exp() * value / a
    return torch.where(swap, 1 - found, found)


# What comes in.


def by_columns(
    function: Callable[[Tensor], Tensor], x: Tensor, owner: str, fewest: int = FEWEST, still: bool = False
) -> Tensor:
    """A function of (chain, draw, quantity) over the quantities of x (chain, draw, ...), some at a time.

    NaN for too few draws, for one that is not finite and, unless `still`, for a quantity that never varies.
    """
    check_draws(x, owner)
    flat, rest = x.detach().reshape(*x.shape[:2], -1), x.shape[2:]
    columns = flat.shape[2]
    if x.shape[1] < fewest or columns == 0:
        return torch.full(rest, torch.nan, dtype=torch.float64, device=x.device)
    some = max(1, AT_A_TIME // (x.shape[0] * x.shape[1]))
    found = []
    for start in range(0, columns, some):
        piece = flat[..., start : start + some].double()
        usable = torch.isfinite(piece).all(0).all(0)
        if not still:
            usable &= (piece != piece[:1, :1]).flatten(0, 1).any(0)
        found.append(torch.where(usable, function(piece.nan_to_num()), torch.nan))
    return torch.cat(found).reshape(rest)


def check_draws(x: Tensor, owner: str) -> None:
    """Refuse what can't be draws of chains."""
    ok = isinstance(x, Tensor) and x.ndim >= 2 and x.shape[0] > 0 and x.shape[1] > 0
    require(ok, "x", owner, "be a tensor (chain, draw, ...) of one or more", getattr(x, "shape", x))


def check_probability(q: float, owner: str) -> None:
    """Refuse what can't be the probability of a quantile."""
    require(isinstance(q, (int, float)) and 0 < q < 1, "q", owner, "lie between 0 and 1", q)
