"""Sequences as rows: how models over time hold them, whatever their lengths.

A row is a sequence, (T,) or (T, D), and rows of unequal length are padded with NaN at their ends to the longest,
(n, T) or (n, T, D). NaN after a sequence's last value is its end; before it, a value that wasn't seen. A list of
sequences is padded for you.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from priory.data import Data, tensor_of
from priory.errors import require
from priory.latent.base import Latent, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from priory.data import Batch


class SequenceModel(Latent):
    """A model of sequences, which may be longer or shorter than those that it was fitted to."""

    missing: ClassVar[bool] = True

    def meet(self, data: Any, batch_size: int | None = None) -> tuple[Self, Data]:
        """The model in the data's shapes and type, and the data as it reads them; a list is one of sequences."""
        if isinstance(data, tuple) and data and isinstance(data[0], list):
            data = (padded(data[0]), *data[1:])
        return super().meet(padded(data) if isinstance(data, list) else data, batch_size)

    def prepare(self, batch: Batch) -> Batch:
        """A batch in the model's type, on its device, with its checks; of any length in time."""
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
    rows = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), torch.nan)
    for row, t in zip(rows, tensors, strict=True):
        row[: len(t)] = t
    return rows


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
