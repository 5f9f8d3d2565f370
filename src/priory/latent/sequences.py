"""Base class of models whose rows are sequences of any length.

A row is a sequence, (T,) or (T, D), and rows of unequal length are padded with NaN at their ends to the longest,
(n, T) or (n, T, D). NaN after the last value of a sequence is padding; before it, NaN is a missing value. A list of
sequences is padded automatically.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from priory.core.data import Data, tensor_of
from priory.core.errors import require
from priory.latent.base import Latent, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from priory.core.data import Batch


STEPS_PER_BLOCK = 1 << 18  # over all sequences of a block, about


class SequenceModel(Latent):
    """Base class of models of sequences, which may be longer or shorter than those of the fit."""

    missing: ClassVar[bool] = True
    sequences: ClassVar[bool] = True

    sample: ClassVar[int] = 1 << 11

    def read(self, data: Any, batch_size: int | None = None, num_data: int | None = None) -> Data:
        """Read sequences as rows; lists of sequences and of known states are padded."""
        if isinstance(data, list):
            data = padded(data)
        elif isinstance(data, tuple) and data and isinstance(data[0], list):
            named = dict(zip([*self.parts, *self.given], data, strict=False))
            if isinstance(named.get("z"), list):
                named["z"] = padded_states(named["z"], repr(self))
            data = (padded(data[0]), *list(named.values())[1:], *data[len(named) :])
        return super().read(data, batch_size, num_data)

    def parts_of(self, data: Any) -> tuple[Any, ...]:
        """Return the parts of data in memory; a list is a list of sequences."""
        return (data,) if isinstance(data, list) else super().parts_of(data)

    def in_shapes(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, **frame: Tensor
    ) -> Self:
        """Return a copy of the model for sequences of this shape, with fewer rows per block if they are long."""
        model = super().in_shapes(shapes, dtype, device, **frame)
        model.block = max(1, min(Latent.block, STEPS_PER_BLOCK // shapes[0][0]))
        return model

    def steps_or(self, steps: int | None) -> int:
        """Return the length of generated sequences: `steps`, or the length of the data if it is None."""
        assert self.shapes is not None
        return int(steps) if steps is not None else self.shapes[0][0]

    def prepare(self, batch: Batch) -> Batch:
        """Check a batch of sequences of any length, and convert it to the model's type and device."""
        self._check_parts(batch)
        assert self.shapes is not None
        y = batch[0]
        must = "be sequences: (n, T) or (n, T, D), or a list of (T,) or (T, D)"
        require(y.ndim in (2, 3) and y.shape[1] > 0, "y", repr(self), must, f"the shape {tuple(y.shape)}")
        model = copy.copy(self)
        model.shapes = ((y.shape[1], *self.shapes[0][1:]),)
        return super(SequenceModel, model).prepare(batch)


def padded(sequences: Sequence[Any]) -> Tensor:
    """Sequences (T_n,) or (T_n, D) as one tensor (n, T) or (n, T, D), with NaN after each one's end.

    >>> padded([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    tensor([[1., 2.],
            [3., nan]])
    """
    require(len(sequences) > 0, "data", "fit", "have at least one sequence", "none")
    tensors = [tensor_of(s, f"Sequence {i} of the data") for i, s in enumerate(sequences)]
    tensors = [t if t.is_floating_point() else t.double() for t in tensors]
    shapes = {tuple(t.shape[1:]) for t in tensors}
    ok = len(shapes) == 1 and all(t.ndim in (1, 2) for t in tensors)
    require(ok, "data", "fit", "be sequences of the shape (T,) or (T, D), the same D in all", sorted(shapes))
    longest = max(len(t) for t in tensors)
    double = any(t.dtype == torch.float64 for t in tensors)
    rows = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), torch.nan)
    rows = rows.double() if double else rows
    for row, t in zip(rows, tensors, strict=True):
        row[: len(t)] = t
    return rows


def padded_states(states: Sequence[Any], owner: str) -> Tensor:
    """Pad known states of sequences, each (T_n,), to integers (n, T), -1 after the end."""
    numbers = padded(states).nan_to_num(-1)
    must = "be integers, one per step, -1 where it is hidden"
    require(numbers.ndim == 2 and bool((numbers == numbers.floor()).all()), "z", owner, must, numbers)
    return numbers.long()


def seen(y: Tensor) -> Tensor:
    """Whether a step has any value, (n, T)."""
    if not bool(y.sum().isnan()):  # the usual case, in a tenth of the time
        return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)
    there = ~y.isnan()
    return there.any(2) if y.ndim == 3 else there


def lengths(there: Tensor) -> Tensor:
    """Steps up to the last that has a value, (n,), from whether each has one (n, T)."""
    steps = torch.arange(1, there.shape[1] + 1, device=there.device)
    return (there * steps).amax(1)


def sequences_of(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences (n, T, ...), whether each step has a value (n, T), and how long each is (n,)."""
    there = seen(rows["y"])
    return rows["y"], there, lengths(there)
