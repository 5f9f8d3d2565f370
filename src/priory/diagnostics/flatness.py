"""Whether a density falls at all over the width that an approximation of it has.

Where q's width in a direction is the best, under any family that can be stretched in it,

    E_q[(w - m) d log p / dw] = -1

there: stretching q by 1 + x changes the entropy by x and the mean of log p by -x. Where log p is flat the left side is
0 however wide q is, and nothing stops q from growing. It is a sign that p has no integral: a density needs a prior in
that direction, or the fit is far from its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from priory.core.linalg import svd

if TYPE_CHECKING:
    from torch import Tensor

    from priory.models.target import Target

DRAWS = 256  # at which a Gaussian's fall is 1 with a standard error of 0.09
FLAT = 0.1


def falls(away: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """-E_q[(w - m) d log p / dw] in each coordinate and its standard error, from draws (S, P) of both: (P,) each.

    Beside other coordinates that it is correlated with, a coordinate's own product varies by far more than one.
    """
    each = -away * gradient
    return each.mean(0), each.std(0) / len(each) ** 0.5


def is_flat(away: Tensor, gradient: Tensor) -> Tensor:
    """Whether log p is flat over q's width, beyond doubt, in each coordinate, (P,)."""
    fall, error = falls(away, gradient)
    return fall.abs() + 2 * error < FLAT


def flat_place(away: Tensor, gradient: Tensor, wide: Tensor) -> int | None:
    """The coordinate in which log p is flat over q's width, if there is one among the `wide`, (P,).

    Flat directions need not be coordinates: that in which q is widest is looked at too, and told by its largest part.
    """
    flat = wide & is_flat(away, gradient)
    if bool(flat.any()):
        return int(torch.where(flat, away.std(0), 0.0).argmax())
    along = svd(away).right[0]  # (P,)
    place = int(along.abs().argmax())
    flat = bool(is_flat((away @ along)[:, None], (gradient @ along)[:, None]))
    return place if bool(wide[place]) and flat else None


def name_of(target: Target, place: int) -> str:
    """The parameter that a coordinate belongs to, with its entry where there are several."""
    block = next(b for b in target.model.layout.blocks if b.start <= place < b.stop)
    return block.name + (f"[{place - block.start}]" if block.stop - block.start > 1 else "")
