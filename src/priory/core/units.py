"""Affine maps between the user's units and unit scale: value = shift + scale * standardised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import require

if TYPE_CHECKING:
    from collections.abc import Mapping

CONSTANT_SPREAD = 1e-12  # spread over magnitude up to which a column is constant: rounding of float64 sums


@dataclass(frozen=True, eq=False)
class Units:
    """The shift and the scale of some numbers, which broadcast with them.

    Args:
        shift: What is subtracted, in float64: one number, or one per column or channel.
        scale: The positive numbers that the rest is divided by, of the same shape.

    Example:
        >>> units = Units(torch.tensor(30.0), torch.tensor(5.0))
        >>> units.standard(torch.tensor([35.0])).tolist(), units.restore(torch.tensor([1.0])).tolist()
        ([1.0], [35.0])
    """

    shift: Tensor
    scale: Tensor
    _numbers: tuple[float, float] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for name in ("shift", "scale"):
            object.__setattr__(self, name, getattr(self, name).detach().double().cpu())
        require(bool(torch.isfinite(self.shift).all()), "shift", "Units", "be finite", self.shift.tolist())
        positive = bool((torch.isfinite(self.scale) & (self.scale > 0)).all())
        require(positive, "scale", "Units", "be positive and finite", self.scale.tolist())
        # read once, because a step of a fit uses them
        numbers = (float(self.shift), float(self.scale)) if self.scale.ndim == 0 else None
        object.__setattr__(self, "_numbers", numbers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Units):
            return NotImplemented
        return torch.equal(self.shift, other.shift) and torch.equal(self.scale, other.scale)

    def __hash__(self) -> int:
        return hash((tuple(self.shift.reshape(-1).tolist()), tuple(self.scale.reshape(-1).tolist())))

    def pair(self, like: Tensor) -> tuple[Any, Any]:
        """Return shift and scale as numbers, or as tensors of the type and device of `like`."""
        return self._numbers or (self.shift.to(like), self.scale.to(like))

    def standard(self, values: Tensor) -> Tensor:
        """Convert values in the user's units to unit scale."""
        shift, scale = self.pair(values)
        return (values - shift) / scale

    def restore(self, values: Tensor) -> Tensor:
        """Convert values at unit scale to the user's units."""
        shift, scale = self.pair(values)
        return shift + scale * values

    def log_volume(self, event: torch.Size) -> float:
        """Return log |d value / d standardised| of one target of this shape: the sum of the log scales."""
        return float(self.scale.log().expand(event).sum())

    def tensors(self) -> dict[str, Tensor]:
        """Return shift and scale by name, for a file."""
        return {"shift": self.shift, "scale": self.scale}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Units:
        """Restore what `tensors` returned."""
        return cls(tensors["shift"], tensors["scale"])


class RunningMoments:
    """Mean and standard deviation of rows that come in blocks, with weights (Chan, Golub and LeVeque 1979).

    Args:
        dim: The dimension of a block whose entries have moments of their own, such as 1 for the columns of a table;
            None for one pair of moments over all entries.
    """

    def __init__(self, dim: int | None) -> None:
        self.dim = dim
        self.weight, self.mean, self.square = 0.0, torch.zeros(()), torch.zeros(())  # square: sum of w (x - mean)^2

    def add(self, block: Tensor, weights: Tensor | None = None) -> None:
        """Include the rows of a block (n, ...), of which row i counts `weights[i]` times."""
        x = block.double().cpu()
        x = x[None] if self.dim is None else x.movedim(self.dim, 0)
        x = x.reshape(len(x), len(block), -1)  # (entries, n, positions)
        each = x.new_ones(len(block), 1) if weights is None else weights.to(x)[:, None]
        weight = float(each.sum()) * x.shape[2]
        if weight == 0:
            return
        mean = (x * each).sum((1, 2)) / weight
        square = ((x - mean[:, None, None]).square() * each).sum((1, 2))
        total, off = self.weight + weight, mean - self.mean
        self.square = self.square + square + off.square() * (self.weight * weight / total)
        self.mean = self.mean + off * (weight / total)
        self.weight = total

    def units(self, behind: int = 0) -> Units:
        """Return the units in which the rows have mean 0 and standard deviation 1; a constant entry has scale 1.

        `behind` is the number of dimensions after `dim`, over which the units broadcast.
        """
        spread = (self.square / self.weight).sqrt()
        scale = torch.where(spread > CONSTANT_SPREAD * self.mean.abs(), spread, torch.ones_like(spread))
        shape = [] if self.dim is None else [-1, *[1] * behind]
        return Units(self.mean.reshape(shape), scale.reshape(shape))
