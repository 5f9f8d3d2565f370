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

Many short chains, each too short for its own R-hat, are compared in superchains that share a start (nested R-hat).
E-BFMI is for Hamiltonian samplers (Betancourt 2016): below 0.3 the energy changes too slowly to reach the tails.

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

from priory.core.errors import require
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
    from collections.abc import Callable, Sequence

MIN_DRAWS = 4  # per chain
BLOCK_ELEMENTS = 1 << 20  # draws x quantities that are processed together
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
        ess_within: Effective sample sizes of the bulk without the variance between chains: the sum of those that the
            chains would have if they agreed.
    """

    mean: Tensor
    mcse: Tensor
    sd: Tensor
    quantiles: tuple[Tensor, ...]
    ess_bulk: Tensor
    ess_tail: Tensor
    r_hat: Tensor
    ess_within: Tensor


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
            columns += 5 * [torch.full_like(flat[:, 0], torch.nan)]
        else:
            tails = (effective(split((draws <= at(q)[:, None, None]).double())) for q in TAIL_PROBABILITIES)
            bulk, within = halves.effective()
            found = (standard_error(draws), bulk, torch.minimum(*tails), halves.reduction(), within)
            varies = ordered[:, 0] < ordered[:, -1]
            columns += [torch.where(varies, column, torch.nan) for column in found]
        return torch.stack(columns, -1)

    count = 2 + len(probabilities) + 5
    found = by_columns(of, x, "measures", min_draws=1, allow_constant=True, columns=count)
    mean, sd, *quantiles, mcse, bulk, tail, reduction, within = found.movedim(-1, 0)
    return Measures(mean, mcse, sd, tuple(quantiles), bulk, tail, reduction, within)


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
    return by_columns(lambda draws: Halves(draws).effective()[0], x, "ess_bulk")


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


def nested_r_hat(x: Tensor, superchains: Tensor | Sequence[int]) -> Tensor:
    """Nested R-hat for many short chains, in superchains whose chains share a start.

    With K superchains of M chains of N draws each,

        nested R-hat = sqrt(1 + B / W),    B = variance over superchains of their means,
        W = mean over superchains of (variance of the chains' means + mean of the variances within chains)

    The first term of W is 0 for M = 1, the second for N = 1. Draws are used as they are: neither ranked, folded nor
    split, as in `rhat_nested` of the R package posterior. The value of a converged sampler is near sqrt(1 + 1 / E),
    where E is the effective sample size of one superchain (M, for one draw per chain): compare it with that.

    Args:
        x: Draws, (chain, draw, ...). One draw per chain is enough if a superchain has several chains.
        superchains: Superchain of each chain, (chain,): integers in any order, two or more different ones, each for the
            same number of chains.

    Returns:
        Nested R-hat in the shape `x.shape[2:]`, in float64; NaN for draws that are not finite, and for a quantity that
        never varies.

    Example:
        >>> x = torch.tensor([[0.0], [2.0], [4.0], [6.0]])  # means 1 and 5: B = 8, W = 2
        >>> round(float(nested_r_hat(x, [0, 0, 1, 1])), 4)  # sqrt(1 + 8 / 2)
        2.2361

    References:
        Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2024), Nested R-hat: assessing the convergence
        of Markov chain Monte Carlo when running many short chains.
    """
    check_draws(x, "nested_r_hat")
    order, count = by_superchain(superchains, x.shape[0], "nested_r_hat")
    size, draws = x.shape[0] // count, x.shape[1]
    enough = f"have two draws or more in each of the {count} superchains"
    require(size > 1 or draws > 1, "x", "nested_r_hat", enough, "one draw of one chain")
    order, found, flat = order.to(x.device), [], x.detach().reshape(*x.shape[:2], -1)
    if flat.shape[2] == 0:
        return flat.new_empty(x.shape[2:], dtype=torch.float64)
    for piece in flat.split(max(1, 4 * BLOCK_ELEMENTS // (x.shape[0] * draws)), 2):
        some = piece.double()  # (chain, draw, quantity)
        mean = some.mean(1, keepdim=True)
        grouped = mean[order, 0].unflatten(0, (count, size))  # (superchain, chain, quantity)
        within = (some - mean).square_().sum((0, 1)) / (len(some) * max(1, draws - 1))
        if size > 1:
            within += grouped.var(1).mean(0)
        value = (1 + grouped.mean(1).var(0) / within).sqrt()
        low, high = torch.aminmax(some.flatten(0, 1), dim=0)
        usable = torch.isfinite(low) & torch.isfinite(high) & (low < high)
        found.append(torch.where(usable, value, torch.nan))
    return torch.cat(found).reshape(x.shape[2:])


def by_superchain(superchains: Tensor | Sequence[int], chains: int, owner: str) -> tuple[Tensor, int]:
    """The indices of the chains with those of a superchain next to each other, and the number of superchains.

    Raises:
        InputError: Unless there is one id per chain, and two or more superchains of the same number of chains.
    """
    ids = torch.as_tensor(superchains)
    ok = ids.ndim == 1 and not ids.is_floating_point() and not ids.is_complex()
    got = f"the shape {tuple(ids.shape)} of {ids.dtype}".replace("torch.", "")
    require(ok and len(ids) == chains, "superchains", owner, f"be {chains} integers, one per chain", got)
    sizes = ids.cpu().unique(return_counts=True)[1]
    equal = len(sizes) > 1 and bool((sizes == sizes[0]).all())
    must = "be two or more superchains of the same number of chains"
    require(equal, "superchains", owner, must, f"superchains of {sizes.tolist()} chains")
    return ids.cpu().argsort(stable=True), len(sizes)


def bfmi(energy: Tensor, superchains: Tensor | Sequence[int] | None = None) -> Tensor:
    """Energy Bayesian fraction of missing information (E-BFMI) of each chain: E[(E_t - E_(t-1))^2] / Var E.

    It measures how much of the energy's spread one resampling of the momentum covers. Below 0.3 the tails are poorly
    explored.

    Args:
        energy: Energies of the draws, (chain, draw).
        superchains: Superchain of each chain, (chain,), for one value per superchain, because short chains are noisy.
            Default: None, one value per chain.

    Returns:
        E-BFMI, (chain,) or (superchain,); NaN for fewer than 4 draws per chain.
    """
    ok = isinstance(energy, Tensor) and energy.ndim == 2
    require(ok, "energy", "bfmi", "be a tensor (chain, draw)", getattr(energy, "shape", energy))
    energy = energy.double()
    if energy.shape[1] < MIN_DRAWS:
        return energy.new_full(energy.shape[:1], torch.nan)
    changes = energy.diff(dim=1).square()
    if superchains is None:
        return changes.mean(1) / energy.var(1)
    order, count = by_superchain(superchains, len(energy), "bfmi")
    changes, energy = (t[order.to(t.device)].unflatten(0, (count, -1)).flatten(1) for t in (changes, energy))
    return changes.mean(1) / energy.var(1)


def quantile(x: Tensor, q: float) -> Tensor:
    """Quantile of all chains together, interpolated linearly between two draws.

    Args:
        x: Draws, (chain, draw, ...).
        q: Probability of the quantile, between 0 and 1.

    Returns:
        The quantile in the shape `x.shape[2:]`, in float64; NaN where it is not defined.
    """
    check_probability(q, "quantile")
    return by_columns(lambda draws: quantile_of(draws, q), x, "quantile", min_draws=1, allow_constant=True)


def hdi(x: Tensor, level: float = 0.9) -> Tensor:
    """Highest-density interval: the shortest interval that contains a given share of the draws of all chains.

    It suits a distribution with one mode. Unlike a central interval it is not invariant to a change of variables.

    Args:
        x: Draws, (chain, draw, ...).
        level: Share of the draws, between 0 and 1. Default: 0.9.

    Returns:
        Lower and upper ends, `(*x.shape[2:], 2)`, in float64; NaN for draws that are not finite. Of several shortest
        intervals it is the first, as in ArviZ.

    Example:
        >>> hdi(torch.tensor([[0.0, 1.0, 1.1, 1.2, 9.0]]), level=0.5)
        tensor([1.0000, 1.2000], dtype=torch.float64)
    """
    ok = isinstance(level, (int, float)) and 0 < level < 1
    require(ok, "level", "hdi", "lie between 0 and 1", level)

    def of(draws: Tensor) -> Tensor:
        ordered = sort(draws.flatten(1))[0]
        inside = int(level * ordered.shape[1])
        widths = ordered[:, inside:] - ordered[:, : ordered.shape[1] - inside]
        low = widths.argmin(1, keepdim=True)
        return torch.cat([ordered.gather(1, low), ordered.gather(1, low + inside)], 1)

    return by_columns(of, x, "hdi", min_draws=1, allow_constant=True, columns=2)


def by_columns(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    owner: str,
    min_draws: int = MIN_DRAWS,
    allow_constant: bool = False,
    columns: int | None = None,
) -> Tensor:
    """Apply a function of (quantity, chain, draw) to the quantities of x (chain, draw, ...), in blocks.

    The result is NaN for too few draws, for draws that are not finite and, unless `allow_constant`, for a quantity that
    never varies. If the function returns several `columns` per quantity, (quantity, columns), they are the last
    dimension of the result.
    """
    check_draws(x, owner)
    flat, rest = x.detach().reshape(*x.shape[:2], -1), x.shape[2:]
    ends = () if columns is None else (columns,)
    quantities = flat.shape[2]
    if x.shape[1] < min_draws or quantities == 0:
        return torch.full((*rest, *ends), torch.nan, dtype=torch.float64, device=x.device)
    block_size = max(1, BLOCK_ELEMENTS // (x.shape[0] * x.shape[1]))
    blocks = []
    for start in range(0, quantities, block_size):
        block = flat[..., start : start + block_size].permute(2, 0, 1).double().contiguous()
        usable = torch.isfinite(block).flatten(1).all(1)
        if not allow_constant:
            usable &= (block != block[:, :1, :1]).flatten(1).any(1)
        values = function(block.nan_to_num())
        blocks.append(torch.where(usable.reshape(-1, *[1] * len(ends)), values, torch.nan))
    return torch.cat(blocks).reshape((*rest, *ends))


def check_draws(x: Tensor, owner: str) -> None:
    """Raise an error unless x is a tensor of draws (chain, draw, ...)."""
    ok = isinstance(x, Tensor) and x.ndim >= 2 and x.shape[0] > 0 and x.shape[1] > 0
    require(ok, "x", owner, "be a tensor (chain, draw, ...) with at least one draw", getattr(x, "shape", x))


def check_probability(q: float, owner: str) -> None:
    """Raise an error unless q is a probability between 0 and 1."""
    require(isinstance(q, (int, float)) and 0 < q < 1, "q", owner, "lie between 0 and 1", q)
