"""Data as a method sees it: how many rows there are, minibatches in a reproducible order, one pass in order.

Tensors, arrays, anything with `__array__`, a `Dataset` or a `DataLoader` come in; tuples of tensors come out,
the targets last. The number of rows is read from the data, never asked for. Order is a function of (seed,
epoch) alone, so that a resumed fit sees the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from priory.errors import InputError, require
from priory.streams import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Batch = tuple[Tensor, ...]
DEFAULT_BATCH = 128


@dataclass(frozen=True)
class Data:
    """Rows to learn from. `Data.of` makes one from whatever a person has.

    >>> data = Data.of((torch.arange(5.0)[:, None], torch.arange(5.0)), batch_size=2)
    >>> data.num_data, [len(y) for _, y in data.batches(seed=0, epoch=0)]
    (5, [2, 2, 1])
    """

    num_data: int | None  # None: no data at all (a density that has them inside)
    batch_size: int
    tensors: Batch | None = None  # in memory
    dataset: Dataset[Any] | None = None  # fetched row by row
    loader: DataLoader[Any] | None = None  # the person's own batches
    prepare: Callable[[Batch], Batch] = lambda batch: batch  # to the model's types and device, with its checks

    @staticmethod
    def of(source: Any, batch_size: int | None = None) -> Data:
        """Read tensors, arrays, a Dataset, a DataLoader, another Data, or None."""
        if isinstance(source, Data):
            return source
        whole = batch_size is None or (isinstance(batch_size, int) and batch_size >= 1)
        require(whole, "batch_size", "fit", "be a whole number from 1", batch_size)
        if source is None:
            return Data(None, 1)
        if isinstance(source, DataLoader):
            require(
                batch_size is None,
                "batch_size",
                "fit",
                "be left out with a DataLoader, which has its own",
                batch_size,
            )
            return Data(_rows_of_loader(source), source.batch_size or 1, loader=source)
        if isinstance(source, TensorDataset):
            source = source.tensors
        if isinstance(source, Dataset):
            require(hasattr(source, "__len__"), "data", "fit", "have a length", type(source).__name__)
            n = len(source)  # pyright: ignore[reportArgumentType] - checked in the line above
            require(n > 0, "data", "fit", "have at least one row", "none")
            return Data(n, min(batch_size or DEFAULT_BATCH, n), dataset=source)
        tensors = tuple(_tensor(a, i) for i, a in enumerate(source if isinstance(source, (tuple, list)) else (source,)))
        rows = {len(t) for t in tensors}
        require(
            len(rows) == 1,
            "data",
            "fit",
            "have the same number of rows in each part",
            [tuple(t.shape) for t in tensors],
        )
        n = rows.pop()
        require(n > 0, "data", "fit", "have at least one row", "none")
        for i, t in enumerate(tensors):
            check_finite(t, part(i, len(tensors)))
        return Data(n, min(batch_size or DEFAULT_BATCH, n), tensors=tensors)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass."""
        if self.num_data is None:
            return 1
        return len(self.loader) if self.loader is not None else -(-self.num_data // self.batch_size)

    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Minibatches in the order that belongs to (seed, epoch), from the skip-th on."""
        if self.num_data is None:
            yield ()
        elif self.loader is not None:
            yield from self._loaded(seed, epoch, skip)
        elif self.batch_size >= self.num_data:  # one batch: its order doesn't matter
            if skip == 0:
                yield self._take(None)
        else:
            order = torch.randperm(self.num_data, generator=stream(seed, "order", epoch))
            for start in range(skip * self.batch_size, self.num_data, self.batch_size):
                yield self._take(order[start : start + self.batch_size])

    def blocks(self, rows: int) -> Iterator[Batch]:
        """One pass over all rows in order, `rows` at a time (a DataLoader's own batches, whatever their order)."""
        if self.num_data is None:
            yield ()
        elif self.loader is not None:
            yield from self._loaded(0, 0, 0)
        else:
            for start in range(0, self.num_data, rows):
                yield self._take(torch.arange(start, min(start + rows, self.num_data)))

    def some(self, rows: int) -> Batch:
        """The first rows: enough to look at shapes and scales."""
        return tuple(t[:rows] for t in next(iter(self.blocks(rows))))

    def split(self, fraction: float, seed: int) -> tuple[Data, Data]:
        """Two disjoint parts, the second with this fraction of the rows, chosen by the seed."""
        if self.num_data is None or self.num_data < 2:
            raise InputError(
                "Rows can be held out of two or more. Got fewer: give the noise, as in Gaussian(noise=0.1)."
            )
        order = torch.randperm(self.num_data, generator=stream(seed, "holdout"))
        held = max(1, round(fraction * self.num_data))
        return self._part(order[held:]), self._part(order[:held])

    def prepared(self, prepare: Callable[[Batch], Batch]) -> Data:
        """The same rows, each batch passed through `prepare`; what is in memory is prepared at once."""
        if self.tensors is not None:
            return Data(self.num_data, self.batch_size, tensors=prepare(self.tensors))
        return Data(self.num_data, self.batch_size, dataset=self.dataset, loader=self.loader, prepare=prepare)

    def _part(self, rows: Tensor) -> Data:
        n, size = len(rows), min(self.batch_size, len(rows))
        if self.tensors is not None:
            return Data(n, size, tensors=tuple(t[rows] for t in self.tensors))
        dataset = self.dataset if self.loader is None else self.loader.dataset
        if self.loader is not None and not hasattr(dataset, "__getitem__"):
            raise InputError(
                "The 'data' of fit must allow rows to be held out. Got a DataLoader without indices: give the noise."
            )
        assert dataset is not None
        collate = self.loader.collate_fn if self.loader is not None else default_collate
        return Data(n, size, dataset=_Collated(Subset(dataset, rows.tolist()), collate), prepare=self.prepare)

    def _take(self, rows: Tensor | None) -> Batch:
        if self.tensors is not None:
            return self.tensors if rows is None else tuple(t[rows] for t in self.tensors)
        assert self.dataset is not None
        assert self.num_data is not None
        chosen = range(self.num_data) if rows is None else rows.tolist()
        items = [self.dataset[i] for i in chosen]
        collate = self.dataset.collate if isinstance(self.dataset, _Collated) else default_collate
        return self.prepare(as_batch(collate(items)))

    def _loaded(self, seed: int, epoch: int, skip: int) -> Iterator[Batch]:
        """A loader's batches with torch's global stream swapped for ours while it draws, and put back after."""
        assert self.loader is not None
        theirs, state = None, stream(seed, "loader", epoch).get_state()
        own = getattr(self.loader, "generator", None)
        if own is not None:
            own.set_state(stream(seed, "sampler", epoch).get_state())
        iterator: Iterator[Any] | None = None
        index = 0
        while True:
            theirs = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                iterator = iter(self.loader) if iterator is None else iterator
                item = next(iterator)
            except StopIteration:
                return
            finally:
                state = torch.get_rng_state()
                torch.set_rng_state(theirs)
            if index >= skip:
                yield self.prepare(as_batch(item))
            index += 1


class _Collated(Dataset[Any]):
    """Rows of a loader's data set, with the loader's own way of making a batch of them."""

    def __init__(self, rows: Subset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.rows, self.collate = rows, collate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def as_batch(item: Any) -> Batch:
    """A collated item as a tuple of tensors."""
    parts: Sequence[Any] = item if isinstance(item, (tuple, list)) else (item,)
    return tuple(_tensor(a, i) for i, a in enumerate(parts))


def part(index: int, parts: int) -> str:
    """How a sentence calls a part of the data."""
    if index == parts - 1:
        return "targets"
    return "inputs" if parts == 2 else f"inputs {index}"


def check_finite(t: Tensor, name: str) -> None:
    """Refuse NaN and infinity, saying in which row."""
    if t.is_floating_point() and not bool(torch.isfinite(t.sum())) and not bool((finite := torch.isfinite(t)).all()):
        row = int((~finite).nonzero()[0, 0]) if t.ndim else 0
        kind = "NaN" if bool(torch.isnan(t).any()) else "infinity"
        raise InputError(
            f"The {name} of the data must be finite. Got {kind} in row {row} (and {int((~finite).sum()) - 1} more)."
        )


def _tensor(a: Any, index: int) -> Tensor:
    if isinstance(a, Tensor):
        t = a.detach()
    else:
        array = a.__array__() if hasattr(a, "__array__") else a
        try:
            t = torch.as_tensor(array)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = getattr(array, "dtype", type(a).__name__)
            raise InputError(
                f"Part {index} of the data must be numbers in a tensor or an array. Got {kind} instead."
            ) from error
    require(t.ndim >= 1, "data", "fit", "have rows", f"a single number in part {index}")
    require(t.layout == torch.strided, "data", "fit", "be dense tensors", t.layout)
    return t


def _rows_of_loader(loader: DataLoader[Any]) -> int:
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "The 'data' of fit must be a DataLoader with a length, from which the number of rows is read. "
            "Got a DataLoader over an IterableDataset instead."
        )
    try:
        rows = len(loader.sampler)  # pyright: ignore[reportArgumentType] - a sampler without a length is the case below
    except (TypeError, NotImplementedError):
        rows = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    require(rows > 0 and len(loader) > 0, "data", "fit", "have at least one row", "none")
    return rows
