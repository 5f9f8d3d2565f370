"""DataLoaders and datasets under a seed: which rows they read, how often, and batches that depend on no global state.

A minibatch of n rows stands for all N rows, so N must be the number of rows and not the number of draws that a sampler
makes. If the sampler draws row i with probability p_i, its rows have importance weights 1 / (N p_i), with which

    E[N/n sum_{i in batch} log p(y_i | w) / (N p_i)] = sum_i log p(y_i | w).

`read_loader` finds N, the rows and their weights from the samplers of torch, and from one epoch after another of a
sampler that it does not know.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from priory.core.errors import InputError, is_integer, require, warn
from priory.core.streams import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

GIVE_NUM_DATA = "give the number of rows as fit(..., num_data=N) if every row is equally likely to be read"


@contextmanager
def swapped(generator: torch.Generator) -> Iterator[None]:
    """Replace torch's global generator by this one within a block, and restore it afterwards; this one advances."""
    saved = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(saved)


@contextmanager
def seeded(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[None]:
    """Seed the generators of a loader and its samplers by (seed, epoch) within a block, then restore them.

    Samplers with `set_epoch`, which shuffle by the number of the epoch, are told it.
    """
    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
    states = {key: g.get_state() for key, g in found.items()}
    counted: list[Any] = [h for h in holders[1:3] if hasattr(h, "set_epoch") and hasattr(h, "epoch")]
    epochs = [h.epoch for h in counted]
    for index, g in enumerate(found.values()):
        g.set_state(stream(seed, "sampler", epoch, index).get_state())
    for h in counted:
        h.set_epoch(epoch)
    try:
        yield
    finally:
        for key, g in found.items():
            g.set_state(states[key])
        for h, before in zip(counted, epochs, strict=True):
            h.set_epoch(before)


class CollatedRows(Dataset[Any]):
    """Rows of a loader's data set, with the loader's collate function."""

    def __init__(self, rows: Subset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.rows, self.collate = rows, collate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@dataclass(frozen=True)
class LoaderRows:
    """The rows that a loader reads.

    Args:
        num_data: N, the number of different rows that it can read.
        batch_size: Number of rows per batch.
        indices: Indices of these rows in the loader's data set, (N,); None if they have none.
        weights: Importance weight of every row of the data set; None if all are 1.
        once: Whether every epoch reads each of the N rows once.
    """

    num_data: int
    batch_size: int
    indices: Tensor | None
    weights: Tensor | None = None
    once: bool = True

    @property
    def resampled(self) -> bool:
        """Whether epochs repeat or leave out rows, which can be fetched by their indices instead."""
        return not self.once and self.indices is not None


class RecordingBatches:
    """A batch sampler that records the indices of the batches that it hands out."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.seen = batches, deque[Tensor]()
        self.sampler = getattr(batches, "sampler", None)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.seen.append(torch.as_tensor(batch))
            yield batch


def recording(loader: DataLoader[Any]) -> tuple[DataLoader[Any], deque[Tensor]]:
    """Return a copy of a loader, and a queue to which it appends the indices of each batch."""
    batches = RecordingBatches(loader.batch_sampler)
    copied = copy.copy(loader)
    # torch forbids to set attributes of a loader; batches must come in the order of their indices
    vars(copied).update(batch_sampler=batches, _iterator=None, in_order=True)
    return copied, batches.seen


def batches_per_epoch(loader: DataLoader[Any], num_data: int, batch_size: int) -> int:
    """Return the number of batches in an epoch: the loader's length, or N / n rounded up for one without."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -(-num_data // batch_size)


def read_loader(loader: DataLoader[Any], num_data: int | None = None) -> LoaderRows:
    """Return the rows that a loader reads.

    Args:
        loader: The loader.
        num_data: N for a loader from which it can't be read. Default: None.

    Returns:
        The rows, their number and their importance weights.

    Raises:
        InputError: If the loader makes no batches, or if the number of rows can be read neither from it nor from
            `num_data`.
    """
    must = "be a DataLoader that makes batches"
    require(loader.batch_sampler is not None, "data", "fit", must, "one with batch_size=None")
    if isinstance(loader.dataset, IterableDataset):
        return _of_stream(loader, num_data)
    rows = _of_sampler(loader, num_data)
    require(rows.num_data > 0 and len(loader) > 0, "data", "fit", "have at least one row", "none")
    return rows


def _of_stream(loader: DataLoader[Any], num_data: int | None) -> LoaderRows:
    """The rows of a loader over an IterableDataset, which have no indices."""
    rows = len(loader.dataset) if hasattr(loader.dataset, "__len__") else num_data  # pyright: ignore[reportArgumentType]
    if rows is None:
        raise InputError(
            "The 'num_data' argument of fit must be given for an IterableDataset without a length, got None; write "
            "fit(..., num_data=N) with its number of rows."
        )
    require(rows > 0, "data", "fit", "have at least one row", "none")
    check_num_data(num_data, rows)
    assert loader.batch_size is not None  # torch allows no batch_sampler here
    return LoaderRows(rows, loader.batch_size, None)


def check_num_data(num_data: int | None, rows: int) -> None:
    """Raise an InputError if the given number of rows differs from that of the data."""
    must = f"be left out for data whose number of rows is known to be {rows}"
    require(num_data is None or num_data == rows, "num_data", "fit", must, num_data)


def _of_sampler(loader: DataLoader[Any], num_data: int | None) -> LoaderRows:
    """The rows of a loader whose sampler yields indices of its data set."""
    batches: Any = loader.batch_sampler
    plain = type(batches) is BatchSampler
    sampler = batches.sampler if plain else batches
    size: Any = getattr(batches, "batch_size", None)
    drops = plain and batches.drop_last
    rows: Any = loader.dataset
    if not plain:
        return _of_epochs(loader, size, num_data)
    if type(sampler) is SequentialSampler:
        read = len(sampler) // size * size if drops else len(sampler)
        _warn_of_dropped(len(sampler) - read if read else 0)
        found = LoaderRows(read, size, torch.arange(read))
    elif type(sampler) is RandomSampler:
        n = len(sampler.data_source)
        once = not sampler.replacement and sampler.num_samples == n and not (drops and n % size)
        found = LoaderRows(n, size, torch.arange(n), once=once)
    elif type(sampler) is SubsetRandomSampler:
        found = _of_counts(_counted(sampler.indices), size, len(rows), drops)
    elif type(sampler) is WeightedRandomSampler:
        found = _of_weighted(sampler, size, drops)
    elif type(sampler) is DistributedSampler and sampler.num_replicas > 1:
        must = "read all rows on every process, as DataLoader(dataset, batch_size, shuffle=True) does"
        require(sampler.shuffle, "data", "fit", must, "a DistributedSampler with shuffle=False")
        n = len(sampler.dataset)  # pyright: ignore[reportArgumentType] - the sampler has read its length
        found = LoaderRows(n, size, torch.arange(n), once=False)
    else:
        return _of_epochs(loader, size, num_data)
    check_num_data(num_data, found.num_data)
    return found


def _of_weighted(sampler: WeightedRandomSampler, size: int, drops: bool) -> LoaderRows:
    """The rows of a sampler that draws rows with probabilities proportional to its weights."""
    indices = (sampler.weights > 0).nonzero()[:, 0]
    n = len(indices)
    if not sampler.replacement:
        all_of_them = sampler.num_samples == n and not (drops and n % size)
        must = "draw with replacement if it draws some of the rows, whose probabilities are unknown otherwise"
        require(all_of_them, "sampler", "fit's DataLoader", must, f"{sampler.num_samples} of {n} rows per epoch")
        return LoaderRows(n, size, indices)
    return LoaderRows(n, size, indices, _importance(sampler.weights.double()), once=False)


def _counted(indices: Iterable[Any]) -> Counter[Any]:
    """How often each index occurs."""
    return Counter(i.item() if isinstance(i, Tensor) else i for i in indices)


def _of_counts(counts: Counter[Any], size: int, length: int, drops: bool = False) -> LoaderRows:
    """The rows of a sampler that reads each index a fixed number of times per epoch, in a random order."""
    drawn = sum(counts.values())
    once = drawn == len(counts) and not (drops and drawn % size)
    if not all(is_integer(i, 0) for i in counts):
        require(once, "data", "fit", "be a DataLoader that reads each row once, or has integers as indices", "neither")
        return LoaderRows(drawn, size, None)
    indices = torch.tensor(sorted(counts), dtype=torch.long)
    often = torch.zeros(length, dtype=torch.float64)
    often[indices] = torch.tensor([float(counts[int(i)]) for i in indices], dtype=torch.float64)
    return LoaderRows(len(counts), size, indices, _importance(often), once)


def _importance(often: Tensor) -> Tensor | None:
    """The weights 1 / (N p_i) of rows with probabilities p_i proportional to `often`; None if they are equal."""
    kept = often[often > 0]
    if not len(kept) or bool((kept == kept[0]).all()):
        return None
    warn(
        "The DataLoader reads some rows more often than others. Each row is weighted by 1 / (N p), with p its "
        "probability, so the posterior is that of every row counted once; for other weights give the Dataset, as in "
        "fit(model, loader.dataset, method, weights=weights, batch_size=...)."
    )
    return torch.where(often > 0, often.sum() / (len(kept) * often), 0.0)


def _of_epochs(loader: DataLoader[Any], size: int | None, num_data: int | None) -> LoaderRows:
    """The rows of a sampler of another class, from the indices of two epochs.

    The same rows in both are all that it reads. Otherwise the rows are equally likely if the sampler itself has the
    same rows in both epochs, and only the rows dropped from the last batch differ.
    """
    batches: Any = loader.batch_sampler
    inner = batches.sampler if type(batches) is BatchSampler else None
    if num_data is not None:
        indices = torch.arange(num_data) if num_data == len(loader.dataset) else None  # pyright: ignore[reportArgumentType]
        return LoaderRows(num_data, size or _largest(loader), indices, once=False)
    if not hasattr(batches if inner is None else inner, "__len__"):
        raise InputError(
            "The 'data' argument of fit must be a DataLoader whose sampler has a length, got "
            f"{type(inner or batches).__name__}; {GIVE_NUM_DATA}."
        )
    epochs = [_drawn(loader, batches, epoch) for epoch in (0, 1)]
    size = size or max((len(batch) for batch in epochs[0]), default=1)
    read = [_counted(i for batch in epoch for i in batch) for epoch in epochs]
    length = len(loader.dataset)  # pyright: ignore[reportArgumentType] - has indices
    if read[0] == read[1]:
        if inner is not None and batches.drop_last:
            whole = _counted(_drawn(loader, inner, 0))
            _warn_of_dropped(len(whole - read[0]))
        return _of_counts(read[0], size, length)
    whole = [_counted(_drawn(loader, inner, epoch)) for epoch in (0, 1)] if inner is not None else read
    if whole[0] == whole[1]:
        return _of_counts(whole[0], size, length, drops=True)
    raise InputError(
        "The 'data' argument of fit must be a DataLoader whose sampler reads the same rows in every epoch, got "
        f"{type(inner or batches).__name__}, which reads other rows in the second; {GIVE_NUM_DATA}, or use a "
        "WeightedRandomSampler, whose probabilities are known."
    )


def _drawn(loader: DataLoader[Any], sampler: Any, epoch: int) -> list[Any]:
    """What a sampler of a loader yields in an epoch, at most as much as its length says."""
    with swapped(stream(0, "sampler", epoch)), seeded(loader, 0, epoch):
        return list(islice(sampler, len(sampler)))


def _largest(loader: DataLoader[Any]) -> int:
    """The number of rows in the largest of a loader's first batches."""
    batches: Any = loader.batch_sampler
    return max((len(batch) for batch in islice(batches, 16)), default=1)


def _warn_of_dropped(rows: int) -> None:
    """Warn about rows that a loader never reads."""
    if rows:
        warn(
            f"The DataLoader never reads {rows} {'row' if rows == 1 else 'rows'}, because drop_last=True drops the "
            "same rows in every epoch; the posterior is that of the others. Use shuffle=True or drop_last=False."
        )
