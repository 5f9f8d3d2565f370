"""Storage of the draws of a fit: in memory, or in a folder of safetensors shards.

A shard is a file with the tensor "draws" (*B, chain, draw, coordinate) of consecutive draws, named by the index of the
first. Full shards never change. The last shard is rewritten when it has grown, so the cost of a checkpoint is bounded
by the size of a shard for any number of draws. Every shard is written atomically, before the checkpoint that counts its
draws. After an interruption there may be more draws than were counted; these are dropped and drawn again.

Draws on disk are read through memory maps. The tensor of all draws is mapped from one scratch file, which is removed
with the tensor. The draws may therefore exceed the memory, and a posterior uses them as an ordinary tensor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from priory.core.errors import StoreError
from priory.fitting.store import read, write

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARD_BYTES = 1 << 24  # size at which a shard is full


class KeptDraws:
    """The draws (*B, K, P) of a fit in order.

    Args:
        folder: The folder of the shards. Default: None, draws are kept in memory only.
        stamp: The identity of the fit that the shards belong to.
        mapped: Whether the user named the folder. It must then hold no draws of another fit, and `tensor` returns a
            memory map. Otherwise the folder belongs to a checkpoint. Default: False.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, stamp: str = "", mapped: bool = False) -> None:
        self.folder, self.stamp, self.mapped = None if folder is None else Path(folder), stamp, mapped
        self._full: list[Path] = []
        self._before = 0  # number of draws in the full shards
        self._tail: list[Tensor] = []
        self._written = 0  # number of draws of the tail that are written
        self._device: torch.device | None = None

    def __len__(self) -> int:
        return self._before + len(self._tail)

    @property
    def chains(self) -> int:
        """Number of chains, over all members; 1 for draws without chains."""
        return self._tail_or_last().numel() // self.size

    @property
    def size(self) -> int:
        """P."""
        return self._tail_or_last().shape[-1]

    def _tail_or_last(self) -> Tensor:
        return self._tail[-1] if self._tail else mapped_shard(self._full[-1])[..., -1, :]

    def append(self, draw: Tensor) -> None:
        """Append a draw."""
        self._device = draw.device
        self._tail.append(draw.clone() if self.folder is None else draw.to("cpu", copy=True))
        if self.folder is not None and draw.nbytes * len(self._tail) >= SHARD_BYTES:
            self.flush()
            self._full.append(self._last())
            self._before, self._tail, self._written = len(self), [], 0

    def flush(self) -> None:
        """Write the draws that are only in memory to the last shard."""
        if self.folder is None or self._written == len(self._tail):
            return
        self.folder.mkdir(exist_ok=True)
        write(self._last(), "shard of draws", {"draws": torch.stack(self._tail, -2)}, {"stamp": self.stamp})
        self._written = len(self._tail)

    def _last(self) -> Path:
        assert self.folder is not None
        return self.folder / f"draws-{self._before:010d}.safetensors"

    def begin(self, count: int, device: torch.device | str = "cpu") -> None:
        """Read the first `count` draws of the folder and delete later ones; never delete draws of another fit."""
        if self.folder is None:
            return
        self._device = torch.device(device)
        for path in sorted(self.folder.glob("draws-*.safetensors")):
            if len(self) < count:
                self._take(path, count)
            elif self.mapped and not count and not self._stamped(path):
                raise StoreError(f"{os.fspath(self.folder)} holds the draws of another fit. Use another folder.")
            else:
                path.unlink()
        if len(self) < count:
            raise StoreError(f"{os.fspath(self.folder)} lacks some of the {count} draws that the checkpoint counts.")
        for draft in self.folder.glob(".draws-*"):  # left by an interrupted write
            with contextlib.suppress(OSError):
                draft.unlink()

    def _take(self, path: Path, count: int) -> None:
        tensors, meta = read(path, "shard of draws")
        if path != self._last() or meta["stamp"] != self.stamp:
            raise StoreError(f"{os.fspath(path)} holds draws of another fit than the checkpoint's.")
        draws = tensors["draws"]
        some = draws.shape[-2]
        full = draws.nbytes >= SHARD_BYTES or len(self) + some < count  # the last may be short
        if full and len(self) + some <= count:
            self._full.append(path)
            self._before += some
        else:
            self._tail = [d.clone() for d in draws[..., : count - self._before, :].unbind(-2)]
            self._written = some if len(self._tail) == some else 0

    def _stamped(self, path: Path) -> bool:
        with contextlib.suppress(StoreError):
            return read(path, "shard of draws")[1]["stamp"] == self.stamp
        return False

    def columns(self, start: int, stop: int) -> Tensor:
        """Return the coordinates from `start` to `stop` of all draws, (*B, K, S, stop - start)."""
        pieces = list(self.pieces(start, stop))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)  # no second copy of what is in memory

    def tensor(self) -> Tensor | None:
        """Return all draws, (*B, K, S, P), or None if there are none."""
        if not len(self):
            return None
        if not self.mapped:
            return self.columns(0, self.size).to(self._device)
        assert self.folder is not None
        first = self._tail_or_last()
        shape = (*first.shape[:-1], len(self), first.shape[-1])
        self.folder.mkdir(exist_ok=True)
        whole = scratch(self.folder, shape, first.dtype)
        place = 0
        for piece in self.pieces():
            whole[..., place : place + piece.shape[-2], :] = piece
            place += piece.shape[-2]
        return whole

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """Yield the draws in order, (*B, K, some, stop - start)."""
        for path in self._full:
            yield mapped_shard(path)[..., start:stop]
        if self._tail:
            yield torch.stack([draw[..., start:stop] for draw in self._tail], -2)


def mapped_shard(path: Path) -> Tensor:
    """Return the draws of a shard as a memory map."""
    with safe_open(os.fspath(path), framework="pt") as file:
        return file.get_tensor("draws")


def scratch(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor that is stored in a file of the folder, which is removed with the tensor."""
    path = folder / f".draws-{os.getpid()}-{secrets.token_hex(4)}"
    numbers = torch.Size(shape).numel()
    try:
        with open(path, "xb") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk raises an error here, but would crash the process in a map
                os.posix_fallocate(file.fileno(), 0, numbers * dtype.itemsize)
        return torch.from_file(os.fspath(path), shared=True, size=numbers, dtype=dtype).reshape(shape)
    finally:
        with contextlib.suppress(OSError):  # where a mapped file can't be removed, the next fit removes it
            path.unlink(missing_ok=True)
