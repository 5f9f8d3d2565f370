"""Training data as methods use it: the number of rows, minibatches in a reproducible order, and passes in order.

`Data.of` takes tensors, arrays, anything with `__array__`, a `Dataset` or a `DataLoader`. Batches are tuples of tensors
with the targets last. The number of rows is read from the data. The order of batches depends only on (seed, epoch), so
a resumed fit sees the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from priory.core.errors import InputError, is_integer, require
from priory.core.loaders import (
    CollatedRows,
    batches_per_epoch,
    check_num_data,
    read_loader,
    recording,
    seeded,
    swapped,
)
from priory.core.streams import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from priory.core.loaders import LoaderRows

Batch = tuple[Tensor, ...]
DEFAULT_BATCH_SIZE = 128


class WeightedBatch(tuple[Tensor, ...]):
    """A batch whose row n counts `weights[n]` times in the log-likelihood.

    As a tuple it holds the parts without the weights, so code for plain batches works on it.
    """

    weights: Tensor  # (n,)

    def __new__(cls, parts: Iterable[Tensor], weights: Tensor) -> Self:
        batch = super().__new__(cls, parts)
        batch.weights = weights
        return batch

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.weights


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches and their weights."""
    parts = tuple(torch.cat(some) for some in zip(*batches, strict=True))
    weights = [batch.weights for batch in batches if isinstance(batch, WeightedBatch)]
    return WeightedBatch(parts, torch.cat(weights)) if weights else parts


def split_rows(batch: Batch, rows: int) -> Iterator[Batch]:
    """Split a batch into pieces of at most `rows` rows, each with its weights."""
    for start in range(0, len(batch[0]), rows):
        block = slice(start, start + rows)
        parts = tuple(t[block] for t in batch)
        yield WeightedBatch(parts, batch.weights[block]) if isinstance(batch, WeightedBatch) else parts


def weighted_sum(values: Tensor, factor: float | Tensor | None = None) -> Tensor:
    """Return sum_n factor_n values_n, (*B, n) -> (*B,), where `factor` is a number, a tensor (n,), or None for 1."""
    if isinstance(factor, Tensor):
        return (factor * values).sum(-1)
    return values.sum(-1) if factor is None else factor * values.sum(-1)


def unchanged(batch: Batch) -> Batch:
    """Return the batch as it is."""
    return batch


@dataclass(frozen=True)
class Data:
    """Training data from any source; `Data.of` builds one. At most one of tensors, dataset and loader is set.

    Args:
        num_data: Number of rows, or None without data (a density that holds its own).
        batch_size: Number of rows per minibatch.
        tensors: Rows in memory, one tensor per part. Default: None.
        dataset: Rows fetched one by one. Default: None.
        loader: The user's DataLoader, whose batches are used. Default: None.
        loader_rows: The rows that the loader reads and their importance weights. Default: None.
        prepare: Function that checks a batch and converts it to the model's dtype and device. Default: no change.
        single: Whether the data were given as one tensor and not as a tuple. Default: False.
        holes: Whether NaN marks a missing value. Default: False.
        weights: Weight of each row in the log-likelihood, (N,). Default: None, for weights of 1.
        minibatches: Whether the user chose the size of the minibatches. Default: False.

    Example:
        >>> data = Data.of((torch.arange(5.0)[:, None], torch.arange(5.0)), batch_size=2)
        >>> data.num_data, [len(y) for _, y in data.batches(seed=0, epoch=0)]
        (5, [2, 2, 1])
    """

    num_data: int | None
    batch_size: int
    tensors: Batch | None = None
    dataset: Dataset[Any] | None = None
    loader: DataLoader[Any] | None = None
    loader_rows: LoaderRows | None = None
    prepare: Callable[[Batch], Batch] = unchanged
    single: bool = False
    holes: bool = False
    weights: Tensor | None = None
    minibatches: bool = False

    @staticmethod
    def of(
        source: Any,
        batch_size: int | None = None,
        weights: Any = None,
        check_values: bool = True,
        num_data: int | None = None,
    ) -> Data:
        """Build a Data from any supported source.

        Args:
            source: A tensor or array, a tuple of them, a Dataset, a DataLoader, a Data, or None.
            batch_size: Number of rows per minibatch. Default: None, for 128.
            weights: One number >= 0 per row. Default: None, for weights of 1.
            check_values: Whether to require finite values; otherwise the model's `prepare` decides which values may be
                missing. Default: True.
            num_data: Number of rows, for a source from which it can't be read: an IterableDataset without a length, or
                a DataLoader whose sampler reads other rows in every epoch. Default: None.

        Returns:
            The data.

        Raises:
            InputError: If the source cannot be used.
        """
        if weights is not None:
            rows = Data.of(source, batch_size, check_values=check_values, num_data=num_data)
            return replace(rows, weights=read_weights(weights, rows))
        if isinstance(source, Data):
            return source
        ok = batch_size is None or is_integer(batch_size, 1)
        require(ok, "batch_size", "fit", "be an integer >= 1", repr(batch_size))
        ok = num_data is None or is_integer(num_data, 1)
        require(ok, "num_data", "fit", "be an integer >= 1", repr(num_data))
        if source is None:
            require(num_data is None, "num_data", "fit", "be left out without data", num_data)
            return Data(None, 1)
        if isinstance(source, IterableDataset):
            source, batch_size = DataLoader(source, int(batch_size or DEFAULT_BATCH_SIZE)), None
        if isinstance(source, DataLoader):
            must = "be left out with a DataLoader, which has its own batch size"
            require(batch_size is None, "batch_size", "fit", must, batch_size)
            read = read_loader(source, num_data)
            return Data(read.num_data, read.batch_size, loader=source, loader_rows=read)
        if isinstance(source, TensorDataset):
            source = source.tensors
        if isinstance(source, Dataset):
            require(hasattr(source, "__len__"), "data", "fit", "have a length", type(source).__name__)
            n = len(source)  # pyright: ignore[reportArgumentType] - checked in the line above
            require(n > 0, "data", "fit", "have at least one row", "none")
            check_num_data(num_data, n)
            return Data(n, min(int(batch_size or DEFAULT_BATCH_SIZE), n), dataset=source)
        single = not isinstance(source, (tuple, list))
        tensors = tuple(tensor_of(a, f"Part {i} of the data") for i, a in enumerate((source,) if single else source))
        require(bool(tensors), "data", "fit", "have at least one part", "none")
        shapes = [tuple(t.shape) for t in tensors]
        require(len({len(t) for t in tensors}) == 1, "data", "fit", "have the same number of rows in each part", shapes)
        n = len(tensors[0])
        require(n > 0, "data", "fit", "have at least one row", "none")
        check_num_data(num_data, n)
        for i, t in enumerate(tensors if check_values else ()):
            check_finite(t, part(i, len(tensors)))
        size = min(int(batch_size or DEFAULT_BATCH_SIZE), n)
        return Data(n, size, tensors=tensors, single=single, minibatches=batch_size is not None and size < n)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in one pass."""
        if self.num_data is None:
            return 1
        if self.loader is not None:
            return batches_per_epoch(self.loader, self.num_data, self.batch_size)
        return -(-self.num_data // self.batch_size)

    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the minibatches of an epoch after the first `skip`, in an order that depends only on (seed, epoch)."""
        if self.num_data is None:
            yield ()
        elif self.loader is not None:
            yield from self._loaded(seed, epoch, skip)
        elif self.batch_size >= self.num_data:  # one batch, whose order does not matter
            if skip == 0:
                yield self._take(None, stream(seed, "rows", epoch, 0))
        else:
            order = torch.randperm(self.num_data, generator=stream(seed, "order", epoch))
            for index in range(skip, self.steps_per_epoch):
                rows = order[index * self.batch_size : (index + 1) * self.batch_size]
                yield self._take(rows, None if self.tensors is not None else stream(seed, "rows", epoch, index))

    def blocks(self, rows: int) -> Iterator[Batch]:
        """Yield all rows once in order, `rows` at a time; a DataLoader yields its own batches in its own order.

        The rows of a DataLoader whose epochs repeat or leave out rows are fetched from its data set instead.
        """
        if self.num_data is None:
            yield ()
        elif self.loader_rows is not None and self.loader_rows.resampled:
            yield from self._part(self._indices()).blocks(rows)
        elif self.loader is not None:
            yield from self._loaded(0, 0, 0)
        else:
            for start in range(0, self.num_data, rows):
                yield self._take(torch.arange(start, min(start + rows, self.num_data)), stream(0, "block", start))

    def some(self, rows: int) -> Batch:
        """Return the first `rows` rows, or all if there are fewer."""
        found: list[Batch] = []
        for batch in self.blocks(rows):
            found.append(batch)
            if sum(len(b[0]) for b in found) >= rows:
                break
        return next(split_rows(joined(found), rows))

    def take(self, rows: Tensor) -> Batch:
        """Return rows by their indices, for data in memory."""
        assert self.tensors is not None
        batch = tuple(t[rows.to(t.device)] for t in self.tensors)
        return batch if self.weights is None else WeightedBatch(batch, self.weights[rows])

    def in_memory(self) -> Batch | None:
        """Return all rows as one batch with their weights, or None if they are not in memory."""
        return None if self.tensors is None else self._take(None, None)

    def in_one_batch(self) -> Data:
        """Return the data with all rows in each batch."""
        return replace(self, batch_size=max(1, self.num_data or 1))

    def random_rows(self, rows: int, block: int, generator: torch.Generator) -> Batch:
        """Return about `rows` random rows, chosen in one pass, `block` rows at a time; all rows if there are fewer."""
        assert self.num_data is not None
        if self.num_data <= rows:
            return joined(list(self.blocks(rows)))
        share = rows / self.num_data
        if self.tensors is not None:  # indexed once, because many small copies would fragment memory
            starts = range(0, self.num_data, block)
            sizes = [min(block, self.num_data - start) for start in starts]
            drawn = ((torch.rand(n, generator=generator) < share).nonzero()[:, 0] for n in sizes)
            chosen = torch.cat([start + keep for start, keep in zip(starts, drawn, strict=True)])
            return self.take(chosen)
        kept: list[Batch] = []
        for batch in self.blocks(block):
            keep = (torch.rand(len(batch[0]), generator=generator) < share).nonzero()[:, 0]
            parts = tuple(t[keep.to(t.device)] for t in batch)
            kept.append(WeightedBatch(parts, batch.weights[keep]) if isinstance(batch, WeightedBatch) else parts)
        return joined(kept)

    def split(self, fraction: float, seed: int) -> tuple[Data, Data]:
        """Split the rows at random into two parts, the second with this fraction of the rows."""
        if self.num_data is None or self.num_data < 2:
            raise InputError(f"Holding out rows needs at least 2 rows, got {self.num_data or 0}.")
        rows = self._indices()
        order = rows[torch.randperm(len(rows), generator=stream(seed, "holdout"))]
        held = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        if (len(rows) - held) % self.batch_size == 1 and len(rows) - held > 1:
            held += 1  # avoids a last batch of one row, on which batch normalisation fails
        return self._part(order[held:]), self._part(order[:held])

    def numbered(self) -> Data:
        """Append the row indices as a last part, for data in memory."""
        assert self.tensors is not None
        assert self.num_data is not None
        return replace(self, tensors=(*self.tensors, torch.arange(self.num_data)))

    def unnumbered(self) -> Data:
        """Remove the last part, the inverse of `numbered`."""
        assert self.tensors is not None
        return replace(self, tensors=self.tensors[:-1])

    def prepared(self, prepare: Callable[[Batch], Batch]) -> Data:
        """Apply `prepare` to every batch; data in memory are prepared once, now."""
        tensors = None if self.tensors is None else prepare(self.tensors)
        return replace(self, tensors=tensors, prepare=prepare)

    def _indices(self) -> Tensor:
        """Indices of the rows in the data set: all, or those that the loader's sampler visits."""
        assert self.num_data is not None
        if self.loader is None:
            return torch.arange(self.num_data)
        if self.loader_rows is None or self.loader_rows.indices is None:
            raise InputError(
                "The 'data' argument of fit must allow rows to be held out, got a DataLoader without indices; "
                "give the noise of the likelihood."
            )
        return self.loader_rows.indices

    def _part(self, rows: Tensor) -> Data:
        """The rows with these indices as a Data."""
        n, size = len(rows), min(self.batch_size, len(rows))
        weights = None if self.weights is None else self.weights[rows]
        if self.tensors is not None:
            tensors = tuple(t[rows] for t in self.tensors)
            return replace(self, num_data=n, batch_size=size, tensors=tensors, weights=weights)
        dataset = self.dataset if self.loader is None else self.loader.dataset
        assert dataset is not None
        collate = self.loader.collate_fn if self.loader is not None else default_collate
        part = CollatedRows(Subset(dataset, rows.tolist()), collate)
        return replace(self, num_data=n, batch_size=size, dataset=part, loader=None, loader_rows=None, weights=weights)

    def _take(self, rows: Tensor | None, generator: torch.Generator | None) -> Batch:
        """A batch of the rows with these indices, or of all; `generator` seeds a data set that draws at random."""
        if self.weights is not None:
            weights = self.weights if rows is None else self.weights[rows]
            return WeightedBatch(replace(self, weights=None)._take(rows, generator), weights)
        if self.tensors is not None:
            return self.tensors if rows is None else tuple(t[rows] for t in self.tensors)
        assert self.dataset is not None
        assert self.num_data is not None
        assert generator is not None
        chosen = list(range(self.num_data)) if rows is None else rows.tolist()
        with swapped(generator):
            items = [self.dataset[i] for i in chosen]
            collate = self.dataset.collate if isinstance(self.dataset, CollatedRows) else default_collate
            batch = as_batch(collate(items))
        for i, t in enumerate(batch):
            check_finite(t, part(i, len(batch)), chosen, self.holes)
        return self.prepare(batch)

    def _loaded(self, seed: int, epoch: int, skip: int) -> Iterator[Batch]:
        """The batches of the loader, with every generator that it uses seeded by (seed, epoch)."""
        assert self.loader is not None
        importance = None if self.loader_rows is None else self.loader_rows.weights
        loader, seen = (self.loader, None) if importance is None else recording(self.loader)
        generator, steps, index = stream(seed, "loader", epoch), self.steps_per_epoch, 0
        with seeded(self.loader, seed, epoch):
            while index < steps:  # a stream that is shorter than its length is read again
                begin = index
                with swapped(generator):
                    iterator = iter(loader)
                while index < steps:
                    with swapped(generator):
                        item = next(iterator, None)
                    if item is None:
                        break
                    rows = seen.popleft() if seen else slice(None)
                    if index >= skip:
                        batch = self.prepare(as_batch(item))
                        yield batch if importance is None else WeightedBatch(batch, importance[rows])
                    index += 1
                if index == begin:
                    raise InputError("The 'data' argument of fit must yield batches in every epoch, got none.")


def read_weights(weights: Any, rows: Data) -> Tensor | None:
    """Return the weights of the rows as a float64 tensor (N,), or None if all are 1."""
    if rows.num_data is None:
        raise InputError(
            "The 'weights' argument of fit must be left out without data, since there are no rows to weight."
        )
    if rows.loader is not None:
        raise InputError(
            "The 'weights' argument of fit must be left out with a DataLoader, whose rows have no indices; give its "
            "Dataset, as in fit(model, loader.dataset, method, weights=weights, batch_size=...)."
        )
    twice = rows.weights is not None
    require(not twice, "weights", "fit", "be left out if the data already have weights", "both")
    given = tensor_of(weights, "The 'weights' argument of fit")
    check_weights(given, rows.num_data, "fit")
    t = given.to("cpu", torch.float64)
    require(bool((t > 0).any()), "weights", "fit", "be above 0 for some row", "zeros only")
    return None if bool((t == 1).all()) else t


def check_weights(weights: Tensor, rows: int, owner: str) -> None:
    """Raise an InputError unless there is one real, finite weight >= 0 per row."""
    shape = tuple(weights.shape)
    require(shape == (rows,), "weights", owner, f"have one number per row, ({rows},)", f"the shape {shape}")
    require(not weights.is_complex(), "weights", owner, "be finite numbers >= 0", "complex numbers")
    wrong = weights[~(torch.isfinite(weights) & (weights >= 0))]
    require(not len(wrong), "weights", owner, "be finite numbers >= 0", f"{float(wrong[0]):g}" if len(wrong) else "")


def as_batch(item: Any, owner: str = "of the data") -> Batch:
    """Return a collated item as a tuple of tensors."""
    parts: Sequence[Any] = item if isinstance(item, (tuple, list)) else (item,)
    return tuple(tensor_of(a, f"Part {i} {owner}") for i, a in enumerate(parts))


def part(index: int, parts: int) -> str:
    """Return the name of a part of the data in error messages."""
    if index == parts - 1:
        return "targets"
    return "inputs" if parts == 2 else f"inputs {index}"


def check_finite(t: Tensor, name: str, rows: Sequence[int] | None = None, holes: bool = False) -> None:
    """Raise an InputError that names the first row with NaN (unless `holes`) or infinity; `rows` are its indices."""
    if not t.is_floating_point() or bool(torch.isfinite(t.sum())):
        return
    finite = ~t.isinf() if holes else torch.isfinite(t)
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0, 0])
        row = place if rows is None else rows[place]
        kind = "NaN" if bool(torch.isnan(t).any()) and not holes else "infinity"
        others = int((~finite).sum()) - 1
        more = f", and {others} more" if others else ""
        raise InputError(f"The {name} of the data must be finite, got {kind} in row {row}{more}.")


def tensor_of(a: Any, name: str) -> Tensor:
    """Return a dense tensor with at least one dimension, from a tensor, an array, a data frame or a list."""
    if isinstance(a, Tensor):
        t = a.detach()
    else:
        array = a.__array__() if hasattr(a, "__array__") else a
        try:
            t = torch.as_tensor(_plain(array))
        except (TypeError, ValueError, RuntimeError) as error:
            kind = getattr(array, "dtype", type(a).__name__)
            raise InputError(f"{name} must be numbers in a tensor or an array, got {kind}.") from error
    if t.ndim == 0:
        raise InputError(f"{name} must have rows, got a single number.")
    if t.layout != torch.strided:
        raise InputError(f"{name} must be a dense tensor, got {t.layout}.")
    return t


def _plain(array: Any) -> Any:
    """An array that torch can share: writable, with positive strides and native byte order; otherwise a copy."""
    if not hasattr(array, "flags") or not hasattr(array, "strides"):
        return array
    if array.dtype.kind not in "biufc":
        raise TypeError("not numbers")
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.writeable and all(s >= 0 for s in array.strides) else array.copy()
