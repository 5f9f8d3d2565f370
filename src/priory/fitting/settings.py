"""The settings of one fit, checked when they are made."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from priory.core.errors import is_integer, require
from priory.fitting.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from priory.fitting.callbacks import FitProgress


@dataclass(frozen=True)
class Settings:
    """The keyword arguments of `fit`, except the batch size, which belongs to the data."""

    epochs: int | None
    steps: int | None
    seed: int
    temperature: float
    tempers: Literal["likelihood", "posterior"]
    progress: bool
    checkpoint: Any
    callbacks: Sequence[Callable[[FitProgress], Any]]

    def __post_init__(self) -> None:
        for name, number in (("epochs", self.epochs), ("steps", self.steps)):
            require(number is None or is_integer(number, 1), name, "fit", "be an integer >= 1", repr(number))
        both = self.epochs is not None and self.steps is not None
        require(not both, "steps", "fit", "be left out when epochs are given", self.steps)
        require(is_integer(self.seed, -(2**63)), "seed", "fit", "be an integer", repr(self.seed))
        ok = isinstance(self.callbacks, (tuple, list)) and all(callable(callback) for callback in self.callbacks)
        require(ok, "callbacks", "fit", "be a list of functions", self.callbacks)
        require(not torch.is_inference_mode_enabled(), "mode", "fit", "allow gradients", "torch.inference_mode()")
        object.__setattr__(self, "seed", int(self.seed))
        object.__setattr__(self, "checkpoint", checkpoint_at(self.checkpoint))

    def without_length(self) -> Settings:
        """Return the settings with the method's default length and without callbacks."""
        return dataclasses.replace(self, epochs=None, steps=None, callbacks=())

    def for_start(self) -> Settings:
        """Return the settings of the method that is fitted first, with another seed so that noise is not shared."""
        return dataclasses.replace(self, seed=self.seed + 1, checkpoint=self.checkpoint_named("start"))

    def checkpoint_named(self, suffix: str) -> Checkpoint | None:
        """Return a checkpoint with the same interval and a suffix in its file name; None without a checkpoint."""
        kept: Checkpoint | None = self.checkpoint
        return None if kept is None else dataclasses.replace(kept, path=f"{os.fspath(kept.path)}.{suffix}")


def checkpoint_at(given: Any) -> Checkpoint | None:
    """Return the given checkpoint, or one at the given path."""
    if given is None or isinstance(given, Checkpoint):
        return given
    path = isinstance(given, (str, os.PathLike))
    require(path, "checkpoint", "fit", "be a path or a Checkpoint", repr(given))
    folder = os.path.dirname(os.path.abspath(given))
    require(os.path.isdir(folder), "checkpoint", "fit", "lie in a folder that exists", folder)
    return Checkpoint(given)
