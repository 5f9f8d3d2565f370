"""One form of error for the whole library: what is wrong, what it must be, what came.

Every sentence reads *The 'samples' argument of MeanField must be at least 1, got 0.*, so that a person can
mend the call without reading a traceback.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


class InputError(ValueError):
    """An argument, a data set or a network that can't be used, named in one sentence."""


class DivergedError(RuntimeError):
    """A fit that met a value that is not finite.

    `posterior` is built from the last good state (None when there was none), so that nothing is lost.
    """

    def __init__(self, message: str, posterior: Any = None) -> None:
        super().__init__(message)
        self.posterior = posterior


class StoreError(ValueError):
    """A file that can't be read as what it was asked to be, and why."""


class MissingExtra(ImportError):  # noqa: N818 - reads as the sentence it prints
    """An optional dependency that is not installed, with the command that installs it."""


class PrioryWarning(UserWarning):
    """Something works, but not as well as it could; the text says what to do."""


def require(ok: bool, name: str, owner: str, must: str, got: object) -> None:
    """Raise the one form of error unless `ok`.

    >>> require(0 >= 1, "samples", "MeanField", "be at least 1", 0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'samples' argument of MeanField must be at least 1, got 0.
    """
    if not ok:
        kind = "" if owner.startswith("the ") else "argument "  # "the network" has an output, and no such argument
        raise InputError(f"The '{name}' {kind}of {owner} must {must}, got {_short(got)}.")


def _short(got: object) -> str:
    text = " ".join((got if isinstance(got, str) else repr(got)).split())
    return text if len(text) <= 120 else text[:117] + "..."


def warn(message: str, category: type[PrioryWarning] = PrioryWarning) -> None:
    """Say something as a `PrioryWarning` that points at the person's own line: the last outside of this package."""
    level, frame = 1, sys._getframe()
    # torch's frames may lie between two of ours, as those of vmap do
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("priory", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def whole(value: object, least: int) -> bool:
    """Whether a value is an integer (of any library's integer types) from `least`.

    >>> whole(3, 1), whole(True, 1), whole(2.0, 1)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def extra(module: str, name: str) -> ModuleType:
    """Import an optional module, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtra(f"This needs '{package}': pip install 'priory[{name}]'.") from error


for _public in (InputError, DivergedError, StoreError, PrioryWarning):
    _public.__module__ = "priory"  # where users import them from, and what a traceback shows
