"""Starting points of finite density, for methods that run many vectors at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MAX_HALVINGS = 10  # of a start without a finite density, towards zero


def usable(value: Tensor, gradient: Tensor) -> Tensor:
    """Whether log p and its gradient are finite, (*B,)."""
    return torch.isfinite(value) & torch.isfinite(gradient).all(-1)


def halved_until_finite(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halve vectors (*B, P) without a finite log density until they have one; return them with values and gradients.

    Zero is the most likely place for a finite density: it is where a density is checked before a fit. Vectors that are
    still without one after ten halvings are returned as they are then.
    """
    value, gradient = function(w)
    for _ in range(MAX_HALVINGS):
        alive = usable(value, gradient)
        if bool(alive.all()):
            break
        w = torch.where(alive[..., None], w, w / 2)
        value, gradient = function(w)
    return w, value, gradient
