"""The frame of a model: the centre and the scale of each column, by which data are read.

Variances are differences of squares, which lose their digits where data are far from zero or of unequal scales. A model
therefore works with (y - centre) / scale. The frame is found once, from some rows, each counted by its weight, and
stays: what a model calls small, such as the floor of a variance, is small beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from priory.core.errors import require

STILL = 1e-12  # of a column's size: one that spreads by less doesn't vary
ROOM = 1e4  # between the least square that is a number and the least variance that a model may need


def frame(
    y: Tensor, weights: Tensor | None, name: str, owner: str, dtype: torch.dtype, together: bool = False
) -> tuple[Tensor, Tensor]:
    """The centre and the scale of each column of y (n, D), each (D,), of what was seen and counts.

    `together` is one scale for all columns. A column that doesn't vary has its own size as its scale, and at least 1.
    """
    y = y.double()
    counts = (~y.isnan()).double() if weights is None else (~y.isnan()) * weights.double()[:, None]
    total = counts.sum(0)
    empty = ", ".join(map(str, (total == 0).nonzero()[:, 0].tolist()))
    only = "only NaN" if weights is None else "only NaN and rows that count 0 times"
    require(not empty, name, owner, "have a value in each column", f"{only} in column {empty}")
    share, filled = counts / total, y.nan_to_num(0.0)
    centre = (share * filled).sum(0)
    away = (filled - centre).abs() * (counts > 0)
    spread = rooted(share, away)
    if together:
        spread = rooted(torch.full_like(spread, 1 / len(spread)), spread).expand_as(centre)
    still = spread <= STILL * centre.abs()
    scale = torch.where(still, centre.abs().clamp_min(1.0), spread)
    numbers = torch.finfo(dtype)
    low, high = ROOM * numbers.tiny**0.5, numbers.max**0.5 / ROOM
    wrong = (~((scale >= low) & (scale <= high))).nonzero()[:, 0].tolist()
    must = f"have columns that spread by {low:.0e} to {high:.0e}: measure in other units"
    require(not wrong, name, owner, must, f"{float(scale[wrong[0]]):.1e} in column {wrong[0]}" if wrong else "")
    return centre.to(dtype), scale.to(dtype)


def rooted(share: Tensor, away: Tensor) -> Tensor:
    """The root of the mean square over the first dimension, also where a square is no number."""
    size = away.amax(0)
    size = torch.where(size > 0, size, 1.0)
    return size * (share * (away / size).square()).sum(0).sqrt()
