"""A check for directions in which a density does not fall over the width of its approximation q.

Where the width of q in a direction is optimal, under any family that can be scaled in that direction,

    E_q[(w - m) d log p / dw] = -1

holds there: scaling q by 1 + x changes the entropy by x and the mean of log p by -x. Where log p is flat the left side
is 0 for any width, and nothing stops q from growing. This suggests that p is improper: the parameter needs a prior in
that direction, or the fit is far from converged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from priory.core.linalg import svd

if TYPE_CHECKING:
    from torch import Tensor

    from priory.models.target import Target

FLATNESS_DRAWS = 256  # with this many the fall of a Gaussian is 1 with a standard error of 0.09
MIN_FALL = 0.1  # a smaller fall counts as flat


def mean_fall(deviations: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """-E_q[(w - m) d log p / dw] per coordinate and its standard error, from draws (S, P) of both factors: (P,) each.

    A coordinate that is correlated with other coordinates has a product that varies by far more than one.
    """
    products = -deviations * gradient
    return products.mean(0), products.std(0) / len(products) ** 0.5


def is_flat(deviations: Tensor, gradient: Tensor) -> Tensor:
    """Return whether log p is flat over the width of q, by two standard errors, per coordinate, (P,)."""
    fall, error = mean_fall(deviations, gradient)
    return fall.abs() + 2 * error < MIN_FALL


def flat_coordinate(deviations: Tensor, gradient: Tensor, wide: Tensor) -> int | None:
    """Return a coordinate, among those that are `wide` (P,), in which log p is flat over the width of q, or None.

    Flat directions need not be coordinates. The direction in which q is widest is checked too, and is reported as the
    coordinate with its largest component.
    """
    flat = wide & is_flat(deviations, gradient)
    if bool(flat.any()):
        return int(torch.where(flat, deviations.std(0), 0.0).argmax())
    widest = svd(deviations).right[0]  # (P,)
    coordinate = int(widest.abs().argmax())
    flat = bool(is_flat((deviations @ widest)[:, None], (gradient @ widest)[:, None]))
    return coordinate if bool(wide[coordinate]) and flat else None


def name_of(target: Target, coordinate: int) -> str:
    """Return the parameter name of a coordinate, with its index if the parameter has several entries."""
    block = next(b for b in target.model.layout.blocks if b.start <= coordinate < b.stop)
    return block.name + (f"[{coordinate - block.start}]" if block.stop - block.start > 1 else "")
