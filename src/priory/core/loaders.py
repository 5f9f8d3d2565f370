"""DataLoaders and datasets under a seed: how many rows they have, and batches that depend on no global random state."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from priory.core.errors import InputError, require
from priory.core.streams import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    """Seed the generators of a loader and its samplers by (seed, epoch) within a block, then restore them."""
    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
    states = {key: g.get_state() for key, g in found.items()}
    for index, g in enumerate(found.values()):
        g.set_state(stream(seed, "sampler", epoch, index).get_state())
    try:
        yield
    finally:
        for key, g in found.items():
            g.set_state(states[key])


class CollatedRows(Dataset[Any]):
    """Rows of a loader's data set, with the loader's collate function."""

    def __init__(self, rows: Subset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.rows, self.collate = rows, collate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def loader_sizes(loader: DataLoader[Any]) -> tuple[int, int]:
    """The number of rows that a loader visits, and its batch size."""
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "The 'data' argument of fit must be a DataLoader with a length, from which the number of rows is read, "
            "got a DataLoader over an IterableDataset."
        )
    batches: Any = loader.batch_sampler
    require(batches is not None, "data", "fit", "be a DataLoader that makes batches", "one with batch_size=None")
    if loader.batch_size is not None:
        rows, size = len(loader.sampler), loader.batch_size  # pyright: ignore[reportArgumentType]
    elif hasattr(batches, "sampler") and hasattr(batches, "batch_size"):
        rows, size = len(batches.sampler), batches.batch_size
    else:
        sizes = [len(batch) for batch in batches]
        rows, size = sum(sizes), max(sizes, default=1)
    require(rows > 0 and len(loader) > 0, "data", "fit", "have at least one row", "none")
    return rows, size
