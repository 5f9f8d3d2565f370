"""Errors and warnings about chains that run away, still drift after the warm-up, or diverge."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch

from priory.core.errors import DivergedError, PrioryWarning
from priory.diagnostics.flatness import name_of
from priory.methods.mcmc.metrics import MEAN_ROUNDING_EPS

if TYPE_CHECKING:
    from torch import Tensor

    from priory.models.target import Target

RUNAWAY_LIMIT = 1e10  # an unconstrained coordinate beyond this means an improper posterior
MAX_SPREAD_RATIO = 2.0  # interquartile range of the last fifth of the draws, relative to the first fifth
MIN_FIFTH_DRAWS = 20  # draws per chain in a fifth, for a comparison
MAX_SHIFT_WIDTHS = 0.5  # shift of the median from the first to the last fifth, in interquartile ranges
MIN_SHIFT_ERRORS = 6.0  # standard errors of a significant shift
MIN_REGION_DRAWS = 8  # draws per chain, for separate regions to be detected
MIN_REGION_GAP = 2.0  # distance of separate regions, in standard deviations within a superchain
MIN_DRIFT_CHAINS = 32  # chains, for a standard error over chains


def refuse_drift(target: Target, w: Tensor, owner: str) -> None:
    """Raise an error if chains run away: no proper posterior is that wide in unconstrained parameters."""
    far = w.abs().flatten(0, -2).amax(0)
    if float(far.max()) < RUNAWAY_LIMIT:
        return
    name = name_of(target, int(far.argmax()))
    raise DivergedError(
        f"The chains of {owner} drift off: '{name}' has reached {float(far.max()):.1g} in unconstrained "
        f"coordinates. The "
        "posterior seems to be improper in it: give it a prior, or a narrower one."
    )


def warn_of_drift(target: Target, w: Tensor, owner: str) -> str:
    """Warn if draws (K, S, P) still spread or shift between their first and last fifth, and return the warning.

    The shifts of different chains are independent, which gives their mean a standard error.
    """
    fifth = w.shape[1] // 5
    if w.shape[0] < MIN_DRIFT_CHAINS or fifth < MIN_FIFTH_DRAWS:
        return ""
    early, late = (quartiles(some.flatten(0, 1)) for some in (w[:, :fifth], w[:, -fifth:]))
    before, after = ((q[2] - q[0]).clamp(min=torch.finfo(w.dtype).tiny) for q in (early, late))
    growth = (after / before).nan_to_num(nan=1.0)
    ways = w[:, -fifth:].mean(1) - w[:, :fifth].mean(1)  # (K, P)
    sure = ways.mean(0).abs() > MIN_SHIFT_ERRORS * ways.std(0) / math.sqrt(len(ways))
    way = torch.where(sure, (late[1] - early[1]).abs() / after, 0.0)
    if float(growth.max()) >= MAX_SPREAD_RATIO:
        what, place, size = "spread", int(growth.argmax()), f"{float(growth.max()):.1f} times as wide as they began"
    elif float(way.max()) >= MAX_SHIFT_WIDTHS:
        what, place, size = "move", int(way.argmax()), f"{float(way.max()):.1f} of their widths from where they began"
    else:
        return ""
    sentence = (
        f"The chains of {owner} still {what}: the draws of '{name_of(target, place)}' end {size}. The posterior is "
        "improper in it and needs a prior, or the warm-up was too short."
    )
    warnings.warn(sentence, PrioryWarning, stacklevel=5)
    return sentence


def separate_regions(target: Target, w: Tensor, superchains: Tensor | None) -> str:
    """Say which superchains of draws (K, S, P) are in separate regions that no chain has crossed; empty if none are.

    In the coordinate with the largest nested R-hat, the superchains are divided at the widest gap between their means.
    The regions are separate if the gap exceeds the standard deviations of both sides, each superchain's own.
    """
    if superchains is None or w.shape[1] < MIN_REGION_DRAWS:
        return ""
    count = len(superchains.unique())
    groups = w.unflatten(0, (count, -1)).flatten(1, 2)  # (superchain, draw, P)
    means, spreads = groups.mean(1), groups.std(1)
    place = int((means.var(0) / spreads.square().mean(0)).nan_to_num(nan=0.0).argmax())
    order = means[:, place].argsort()
    m, s = means[order, place], spreads[order, place]
    gap = int(m.diff().argmax())
    low, high = m[: gap + 1], m[gap + 1 :]
    if not float(high[0] - low[-1]) > MIN_REGION_GAP * float(s.max()):
        return ""
    return (
        "The chains are in separate regions that none of them leaves: in unconstrained coordinates "
        f"'{name_of(target, place)}' is near {float(low.mean()):.3g} in {len(low)} of {count} superchains and near "
        f"{float(high.mean()):.3g} in the others. Each region is sampled, but how probable each is remains "
        "unknown. If both are real, compare their evidence; if they are the same up to a relabelling, order the "
        "parameters, as constraints.ordered does."
    )


def quartiles(w: Tensor) -> Tensor:
    """The quartiles of draws (n, P), which are robust to long tails: (3, P)."""
    ordered = w.mT.contiguous().sort(-1).values
    return ordered[:, [len(w) // 4, len(w) // 2, 3 * len(w) // 4]].mT


def warn_of_divergences(target: Target, w: Tensor, divergent: Tensor, owner: str, accept: float) -> None:
    """Warn how many transitions diverged, and which parameter stands out in the draws (K, S, P) there."""
    count = int(divergent.sum())
    if count == 0:
        return
    there, all_ = w[divergent], w.flatten(0, 1)
    spread, mean = all_.std(0), all_.mean(0)
    moved = spread > MEAN_ROUNDING_EPS * torch.finfo(w.dtype).eps * mean.abs()
    off = torch.where(moved, (there.mean(0) - mean) / spread, 0.0).nan_to_num(nan=0.0)
    place = int(off.abs().argmax())
    side = "low" if float(off[place]) < 0 else "high"
    where = (
        f"most where '{name_of(target, place)}' is {side}, {abs(float(off[place])):.1f} standard deviations from its "
        "mean: what is drawn there can't be trusted"
        if bool(moved.any())
        else "and no chain has moved: its draws are where it began"
    )
    warnings.warn(
        f"{count} of the {divergent.numel():,} transitions of {owner} diverged, {where}. Write the model so that its "
        f"parameters are less dependent, or raise 'accept', which is {accept:g}, with fewer chains that are longer.",
        PrioryWarning,
        stacklevel=5,
    )
