"""The frame of a model: the centre and the scale by which each column is standardised.

Variances are differences of squares, which lose digits if data are far from zero or have unequal scales. A model
therefore works with (y - centre) / scale. The frame is computed once, from some weighted rows, and stays fixed. Limits
such as the floor of a variance are relative to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from priory.core.errors import require

CONSTANT_COLUMN_SPREAD = 1e-12  # relative to the column's mean; a column that spreads less is constant
SCALE_MARGIN = 1e4  # factor between the limits of the floating type and the scales that are accepted


def frame(
    y: Tensor, weights: Tensor | None, name: str, owner: str, dtype: torch.dtype, together: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the weighted centre and scale of the observed values of each column of y (n, D), each (D,).

    With `together`, all columns share one scale. The scale of a constant column is its absolute value, at least 1.
    """
    y = y.double()
    counts = (~y.isnan()).double() if weights is None else (~y.isnan()) * weights.double()[:, None]
    total = counts.sum(0)
    empty = ", ".join(map(str, (total == 0).nonzero()[:, 0].tolist()))
    only = "only NaN" if weights is None else "only NaN and rows of weight 0"
    require(not empty, name, owner, "have a value in each column", f"{only} in column {empty}")
    share, filled = counts / total, y.nan_to_num(0.0)
    centre = (share * filled).sum(0)
    away = (filled - centre).abs() * (counts > 0)
    spread = rooted(share, away)
    if together:
        spread = rooted(torch.full_like(spread, 1 / len(spread)), spread).expand_as(centre)
    still = spread <= CONSTANT_COLUMN_SPREAD * centre.abs()
    scale = torch.where(still, centre.abs().clamp_min(1.0), spread)
    numbers = torch.finfo(dtype)
    low, high = SCALE_MARGIN * numbers.tiny**0.5, numbers.max**0.5 / SCALE_MARGIN
    wrong = (~((scale >= low) & (scale <= high))).nonzero()[:, 0].tolist()
    must = f"have columns that spread by {low:.0e} to {high:.0e}: measure in other units"
    require(not wrong, name, owner, must, f"{float(scale[wrong[0]]):.1e} in column {wrong[0]}" if wrong else "")
    return centre.to(dtype), scale.to(dtype)


def rooted(share: Tensor, away: Tensor) -> Tensor:
    """Return the root mean square over the first dimension without overflow or underflow of the squares."""
    size = away.amax(0)
    size = torch.where(size > 0, size, 1.0)
    return size * (share * (away / size).square()).sum(0).sqrt()
