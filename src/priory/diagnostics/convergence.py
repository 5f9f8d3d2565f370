"""Convergence of Markov chains: R-hat, effective sample sizes and Monte Carlo standard errors.

R-hat compares chains with each other. For M chains of n draws, each split in half, with W the mean of the variances
within chains and B / n the variance of their means,

    R-hat = sqrt(((n - 1) / n W + B / n) / W)

is computed from the normal scores of the draws, Phi^-1((rank - 3/8) / (S + 1/4)), so that no variance needs to exist,
and from those of |x - median|, so that chains which differ only in their spread are detected. The larger of the two is
reported; it should be below 1.01.

The effective sample size is S / tau, with the autocorrelations rho of all chains together, including the variance
between them. The sum is truncated where noise begins, by the initial monotone sequence of Geyer (1992): sums of
neighbouring pairs, as long as they are positive, none larger than the one before:

    tau = 1 + 2 sum_t rho_t,      rho_t = 1 - (W - mean over chains of the autocovariance at t) / var+

The bulk ESS uses normal scores, the ESS of a quantile the indicator x <= quantile, and the tail ESS is the smaller of
those at 5 % and 95 %. The Monte Carlo standard error of a mean is sd / sqrt(ESS). These estimates are themselves
reliable from 100 effective draws per chain.

Many short chains, each too short for its own R-hat, are compared in groups that share a start (nested R-hat). E-BFMI
is for Hamiltonian samplers (Betancourt 2016): below 0.3 the energy changes too slowly to reach the tails.

Draws are (chain, draw, ...), and a result has the remaining shape. It is NaN for fewer than 4 draws per chain, for
draws that are not finite, and for a quantity that never varies. Cost: O(S log S) per quantity.

References:
    Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), Rank-normalization, folding, and localization: an improved
    R-hat for assessing convergence of MCMC.
    Geyer (1992), Practical Markov chain Monte Carlo.
    Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2024), Nested R-hat: assessing the convergence of
    Markov chain Monte Carlo when running many short chains.
    Betancourt (2016), Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte Carlo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.diagnostics.chain_statistics import (
    Halves,
    beta_quantile,
    effective,
    effective_below,
    quantile_of,
    quantile_of_sorted,
    sort,
    split,
    squared_deviations,
    standard_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_DRAWS = 4  # per chain
BLOCK_NUMBERS = 1 << 20  # draws x quantities that are processed together
TAIL_PROBABILITIES = (0.05, 0.95)  # of the quantiles whose effective sample size is the tail ESS


@dataclass(frozen=True)
class Measures:
    """Summary statistics and diagnostics of draws (chain, draw, ...), each in the remaining shape, in float64.

    Attributes:
        mean: Means.
        mcse: Monte Carlo standard errors of the means.
        sd: Standard deviations.
        quantiles: One tensor per requested probability.
        ess_bulk: Effective sample sizes of the bulk.
        ess_tail: Effective sample sizes of the tails.
        r_hat: Rank-normalised split R-hat.
    """

    mean: Tensor
    mcse: Tensor
    sd: Tensor
    quantiles: tuple[Tensor, ...]
    ess_bulk: Tensor
    ess_tail: Tensor
    r_hat: Tensor


def measures(x: Tensor, probabilities: tuple[float, ...] = (0.05, 0.5, 0.95)) -> Measures:
    """Compute all statistics of a summary table in one pass over the draws.

    The values equal those of `r_hat`, `ess_bulk`, `ess_tail`, `mcse_mean` and `quantile`, which share their sorts here:
    256 chains of 500 draws of 20 quantities take about half a second on one thread.

    Args:
        x: Draws, (chain, draw, ...).
        probabilities: Probabilities of the quantiles. Default: (0.05, 0.5, 0.95).

    Returns:
        A `Measures`, with one tensor per statistic.
    """
    few = x.shape[1] < MIN_DRAWS

    def of(draws: Tensor) -> Tensor:
        flat, halves = draws.flatten(1), None if few else Halves(draws)
        ordered = sort(flat)[0] if halves is None or draws.shape[2] % 2 else halves.ordered
        at = lambda q: quantile_of_sorted(ordered, q)  # noqa: E731
        columns = [flat.mean(1), flat.std(1), *(at(q) for q in probabilities)]
        if halves is None:
            columns += 4 * [torch.full_like(flat[:, 0], torch.nan)]
        else:
            tails = (effective(split((draws <= at(q)[:, None, None]).double())) for q in TAIL_PROBABILITIES)
            found = (standard_error(draws), halves.effective(), torch.minimum(*tails), halves.reduction())
            varies = ordered[:, 0] < ordered[:, -1]
            columns += [torch.where(varies, column, torch.nan) for column in found]
        return torch.stack(columns, -1)

    count = 2 + len(probabilities) + 4
    found = by_columns(of, x, "measures", fewest=1, still=True, columns=count)
    mean, sd, *quantiles, mcse, bulk, tail, reduction = found.movedim(-1, 0)
    return Measures(mean, mcse, sd, tuple(quantiles), bulk, tail, reduction)


def r_hat(x: Tensor) -> Tensor:
    """Rank-normalised split R-hat: the larger of the bulk's and the folded one.

    Args:
        x: Draws, (chain, draw, ...).

    Returns:
        R-hat in the shape `x.shape[2:]`, in float64; NaN where it is not defined.

    Example:
        >>> apart = torch.stack([torch.linspace(0, 1, 100), torch.linspace(5, 6, 100)])
        >>> float(r_hat(apart)) > 1.5
        True
    """
    return by_columns(lambda draws: Halves(draws).reduction(), x, "r_hat")


def ess_bulk(x: Tensor) -> Tensor:
    """Effective sample size of the bulk of the distribution, from normal scores.

    Args:
        x: Draws, (chain, draw, ...).

    Returns:
        The effective sample size in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """
    return by_columns(lambda draws: Halves(draws).effective(), x, "ess_bulk")


def ess_tail(x: Tensor) -> Tensor:
    """Effective sample size of the tails: the smaller of those of the 5 % and 95 % quantiles.

    Args:
        x: Draws, (chain, draw, ...).

    Returns:
        The effective sample size in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """

    def of(draws: Tensor) -> Tensor:
        return torch.minimum(*(effective_below(draws, q) for q in TAIL_PROBABILITIES))

    return by_columns(of, x, "ess_tail")


def ess_mean(x: Tensor) -> Tensor:
    """Effective sample size for the mean.

    Args:
        x: Draws, (chain, draw, ...).

    Returns:
        The effective sample size in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """
    return by_columns(lambda draws: effective(split(draws)), x, "ess_mean")


def ess_sd(x: Tensor) -> Tensor:
    """Effective sample size for the standard deviation.

    Args:
        x: Draws, (chain, draw, ...).

    Returns:
        The effective sample size in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """
    return by_columns(lambda draws: effective(split(squared_deviations(draws))), x, "ess_sd")


def ess_quantile(x: Tensor, q: float) -> Tensor:
    """Effective sample size for a quantile.

    Args:
        x: Draws, (chain, draw, ...).
        q: Probability of the quantile, between 0 and 1.

    Returns:
        The effective sample size in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """
    check_probability(q, "ess_quantile")
    return by_columns(lambda draws: effective_below(draws, q), x, "ess_quantile")


def mcse_mean(x: Tensor) -> Tensor:
    """Monte Carlo standard error of the mean, sd / sqrt(ESS).

    Args:
        x: Draws, (chain, draw, ...).

    Returns:
        The standard error in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """
    return by_columns(standard_error, x, "mcse_mean")


def mcse_sd(x: Tensor) -> Tensor:
    """Monte Carlo standard error of the standard deviation: that of the variance over twice the sd.

    Args:
        x: Draws, (chain, draw, ...).

    Returns:
        The standard error in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """

    def of(draws: Tensor) -> Tensor:
        squares = squared_deviations(draws)
        flat = squares.flatten(1)
        return (flat.var(1, correction=0) / effective(split(squares)) / flat.mean(1) / 4).sqrt()

    return by_columns(of, x, "mcse_sd")


def mcse_quantile(x: Tensor, q: float) -> Tensor:
    """Monte Carlo standard error of a quantile: half the width of its central interval of probability 0.683.

    The share of draws below the quantile has a Beta distribution. Its quantiles, looked up in the sorted draws, are the
    interval.

    Args:
        x: Draws, (chain, draw, ...).
        q: Probability of the quantile, between 0 and 1.

    Returns:
        The standard error in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """
    check_probability(q, "mcse_quantile")

    def of(draws: Tensor) -> Tensor:
        size = effective_below(draws, q)
        ordered = sort(draws.flatten(1))[0]
        total = ordered.shape[1]
        low, high = (beta_quantile(p, size * q + 1, size * (1 - q) + 1) for p in (0.1586553, 0.8413447))
        below = (low * total - 1).clamp(min=0).floor()
        above = (high * total - 1).clamp(max=total - 1).ceil()
        edges = ordered.gather(1, torch.stack([below, above], 1).long())
        return 0.5 * (edges[:, 1] - edges[:, 0])

    return by_columns(of, x, "mcse_quantile")


def nested_r_hat(x: Tensor, groups: int) -> Tensor:
    """Nested R-hat for many short chains in groups that share a start: sqrt(1 + B / W).

    B is the variance of the groups' means. W is the mean over groups of the variance between the chains of a group plus
    the variance within them. One draw per chain is enough, or one chain per group. With M chains in each group and one
    draw per chain, the value of a converged sampler is near sqrt(1 + 1 / M): compare it with that.

    Args:
        x: Draws, (chain, draw, ...), with the chains of a group next to each other.
        groups: Number of groups, an integer >= 2 that divides the number of chains.

    Returns:
        Nested R-hat in the shape `x.shape[2:]`, in float64; NaN where it is not defined.

    References:
        Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2024), Nested R-hat: assessing the convergence
        of Markov chain Monte Carlo when running many short chains.
    """
    check_draws(x, "nested_r_hat")
    chains, draws = x.shape[:2]
    ok = is_integer(groups, 2) and chains % groups == 0 and (chains > groups or draws > 1)
    must = f"be an integer >= 2 that divides the {chains} chains into groups of two draws or more"
    require(ok, "groups", "nested_r_hat", must, groups)

    def of(columns: Tensor) -> Tensor:
        grouped = columns.unflatten(1, (groups, -1))  # (quantity, group, chain, draw)
        means = grouped.mean(3)
        within = torch.zeros_like(means[:, :, 0])
        if draws > 1:
            within += grouped.var(3).mean(2)
        if chains > groups:
            within += means.var(2)
        return (1 + means.mean(2).var(1) / within.mean(1)).sqrt()

    return by_columns(of, x, "nested_r_hat", fewest=1)


def bfmi(energy: Tensor) -> Tensor:
    """Energy Bayesian fraction of missing information (E-BFMI) of each chain: E[(E_t - E_(t-1))^2] / Var E.

    It measures how much of the energy's spread one resampling of the momentum covers. Below 0.3 the tails are poorly
    explored.

    Args:
        energy: Energies of the draws, (chain, draw).

    Returns:
        E-BFMI, (chain,); NaN for fewer than 4 draws per chain.
    """
    ok = isinstance(energy, Tensor) and energy.ndim == 2
    require(ok, "energy", "bfmi", "be a tensor (chain, draw)", getattr(energy, "shape", energy))
    energy = energy.double()
    if energy.shape[1] < MIN_DRAWS:
        return energy.new_full(energy.shape[:1], torch.nan)
    return energy.diff(dim=1).square().mean(1) / energy.var(1)


def quantile(x: Tensor, q: float) -> Tensor:
    """Quantile of all chains together, interpolated linearly between two draws.

    Args:
        x: Draws, (chain, draw, ...).
        q: Probability of the quantile, between 0 and 1.

    Returns:
        The quantile in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """
    check_probability(q, "quantile")
    return by_columns(lambda draws: quantile_of(draws, q), x, "quantile", fewest=1, still=True)


def by_columns(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    owner: str,
    fewest: int = MIN_DRAWS,
    still: bool = False,
    columns: int | None = None,
) -> Tensor:
    """Apply a function of (quantity, chain, draw) to the quantities of x (chain, draw, ...), in blocks.

    The result is NaN for too few draws, for draws that are not finite and, unless `still`, for a quantity that never
    varies. A function that returns several `columns` per quantity, (quantity, columns), has them last in the result.
    """
    check_draws(x, owner)
    flat, rest = x.detach().reshape(*x.shape[:2], -1), x.shape[2:]
    ends = () if columns is None else (columns,)
    quantities = flat.shape[2]
    if x.shape[1] < fewest or quantities == 0:
        return torch.full((*rest, *ends), torch.nan, dtype=torch.float64, device=x.device)
    some = max(1, BLOCK_NUMBERS // (x.shape[0] * x.shape[1]))
    found = []
    for start in range(0, quantities, some):
        piece = flat[..., start : start + some].permute(2, 0, 1).double().contiguous()
        usable = torch.isfinite(piece).flatten(1).all(1)
        if not still:
            usable &= (piece != piece[:, :1, :1]).flatten(1).any(1)
        values = function(piece.nan_to_num())
        found.append(torch.where(usable.reshape(-1, *[1] * len(ends)), values, torch.nan))
    return torch.cat(found).reshape((*rest, *ends))


def check_draws(x: Tensor, owner: str) -> None:
    """Raise an error unless x is a tensor of draws (chain, draw, ...)."""
    ok = isinstance(x, Tensor) and x.ndim >= 2 and x.shape[0] > 0 and x.shape[1] > 0
    require(ok, "x", owner, "be a tensor (chain, draw, ...) of one or more", getattr(x, "shape", x))


def check_probability(q: float, owner: str) -> None:
    """Raise an error unless q is a probability between 0 and 1."""
    require(isinstance(q, (int, float)) and 0 < q < 1, "q", owner, "lie between 0 and 1", q)
