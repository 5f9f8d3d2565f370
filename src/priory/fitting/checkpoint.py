"""Checkpoints: an interrupted fit resumes from its checkpoint, with the same bits as without the interruption.

A checkpoint contains everything that the next step depends on: the State, the generator, the step, the history and the
state of callbacks. The order of the data is a function of (seed, epoch), so the step determines the next batch. Draws
are in shards beside the checkpoint (see `draws_store`), which records their number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import InputError, StoreError, require
from priory.fitting.store import check_folder, read, write

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKPOINT_FORMAT = 2  # raised when a checkpoint of an earlier version can't be resumed from


@dataclass(frozen=True)
class Checkpoint:
    """Where to write the checkpoint of a fit, and how often.

    Args:
        path: File of the checkpoint; its folder must exist.
        seconds: Time between two checkpoints. Default: 30.
        every: Number of steps between two checkpoints, in place of `seconds`. Default: None.

    Example:
        >>> Checkpoint("fit.checkpoint", every=1000).every
        1000
    """

    path: str | os.PathLike[str]
    seconds: float = 30.0
    every: int | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.path, (str, os.PathLike)), "path", "Checkpoint", "be a path", self.path)
        require(self.seconds >= 0, "seconds", "Checkpoint", "be zero or more", self.seconds)
        ok = self.every is None or (isinstance(self.every, int) and self.every >= 1)
        require(ok, "every", "Checkpoint", "be an integer >= 1", self.every)


class CheckpointWriter:
    """Writes and reads the checkpoint of one fit; `identity` holds the properties that a resumed fit must share."""

    def __init__(self, checkpoint: Checkpoint | str | os.PathLike[str], identity: dict[str, Any]) -> None:
        self.checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        self.identity = json.loads(json.dumps({"format": CHECKPOINT_FORMAT, **identity}))  # as a file gives it back
        check_folder(self.checkpoint.path, "checkpoint")
        self._last = time.monotonic()

    @property
    def stamp(self) -> str:
        """The hash of the identity, which marks the draws of this fit."""
        return hashlib.blake2b(json.dumps(self.identity, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def draws_folder(self) -> str:
        """The folder of the draws, if the user names no other."""
        return f"{os.fspath(self.checkpoint.path)}.draws"

    def due(self, step: int) -> bool:
        """Whether it is time to write."""
        if self.checkpoint.every is not None:
            return step % self.checkpoint.every == 0
        return time.monotonic() - self._last >= self.checkpoint.seconds

    def write(
        self, step: int, state: Any, generator: torch.Generator, kept: dict[str, Tensor], notes: list[Any]
    ) -> None:
        """Write everything that the next step depends on."""
        tensors = {f"state.{path}": value for path, value in leaves(state) if isinstance(value, Tensor)}
        numbers = {path: value for path, value in leaves(state) if not isinstance(value, Tensor)}
        tensors |= {f"kept.{name}": t for name, t in kept.items()} | {"generator": generator.get_state()}
        meta = {"identity": self.identity, "step": step, "numbers": numbers, "notes": notes}
        write(self.checkpoint.path, "checkpoint", tensors, meta)
        self._last = time.monotonic()

    def read(self, state: Any, generator: torch.Generator) -> tuple[int, Any, dict[str, Tensor], list[Any]] | None:
        """Read a checkpoint into a fresh State; None if there is no checkpoint."""
        if not Path(self.checkpoint.path).exists():
            return None
        tensors, meta = read(self.checkpoint.path, "checkpoint")
        for key, current in self.identity.items():
            stored = meta["identity"].get(key)
            if stored != current:
                both = f"is {stored}, this one's is {current}" if len(f"{stored}{current}") < 120 else "differs"
                raise StoreError(
                    f"The checkpoint {os.fspath(self.checkpoint.path)} is of another fit: its {key} {both}. "
                    "Use another path, or remove the file to begin anew."
                )
        restored = {path: tensors.get(f"state.{path}", meta["numbers"].get(path)) for path, _ in leaves(state)}
        state = rebuild(state, restored)
        generator.set_state(tensors["generator"])
        kept = {name[len("kept.") :]: t for name, t in tensors.items() if name.startswith("kept.")}
        return meta["step"], state, kept, meta["notes"]


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of a State by path, except fields marked as scratch or fixed."""
    if dataclasses.is_dataclass(state):
        for f in dataclasses.fields(state):
            if not (f.metadata.get("scratch") or f.metadata.get("fixed")):
                yield from leaves(getattr(state, f.name), f"{path}.{f.name}" if path else f.name)
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (tuple, list)):
        for i, value in enumerate(state):
            yield from leaves(value, f"{path}.{i}" if path else str(i))
    elif state is None or isinstance(state, (Tensor, int, float, str)):
        yield path, state
    else:
        raise InputError(
            f"A State must be made of tensors, numbers and dataclasses of them, got {type(state).__name__} at '{path}'."
        )


def rebuild(state: Any, values: dict[str, Any], path: str = "") -> Any:
    """Return the State with its leaves replaced; tensors are overwritten in place, so that views stay valid."""
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        changed = {}
        for f in dataclasses.fields(state):
            if not (f.metadata.get("scratch") or f.metadata.get("fixed")):
                changed[f.name] = rebuild(getattr(state, f.name), values, f"{path}.{f.name}" if path else f.name)
        return dataclasses.replace(state, **changed)
    if isinstance(state, dict):
        return {key: rebuild(value, values, f"{path}.{key}" if path else str(key)) for key, value in state.items()}
    if isinstance(state, (tuple, list)):
        return type(state)(rebuild(v, values, f"{path}.{i}" if path else str(i)) for i, v in enumerate(state))
    if isinstance(state, Tensor):
        same = isinstance(values[path], Tensor) and values[path].shape == state.shape
        return state.copy_(values[path]) if same else values[path].clone()  # a buffer may have grown
    return values[path]


def copied(state: Any) -> dict[str, Any]:
    """Return copies of the State's leaves by path, for `rebuild`."""
    return {path: value.clone() if isinstance(value, Tensor) else value for path, value in leaves(state)}
