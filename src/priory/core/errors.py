"""Errors and warnings of the library, and the one form in which errors about arguments are written.

Messages read *The 'samples' argument of MeanField must be an integer >= 1, got 0.*, so that the user can correct the
call without reading a traceback.
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
    """An argument, a data set or a network is invalid; the message names it and says what is allowed."""


class DivergedError(RuntimeError):
    """A fit produced a value that is not finite.

    Args:
        message: The error message.
        posterior: Posterior built from the last finite state, so that no work is lost. Default: None, if there was no
            finite state.
    """

    def __init__(self, message: str, posterior: Any = None) -> None:
        super().__init__(message)
        self.posterior = posterior


class StoreError(ValueError):
    """A file cannot be loaded as the requested kind of object; the message says why."""


class MissingExtra(ImportError):  # noqa: N818 - named after what is missing
    """An optional dependency is not installed; the message has the command that installs it."""


class PrioryWarning(UserWarning):
    """A result may be inaccurate or slow to compute; the message says why and what to do."""


def require(ok: bool, name: str, owner: str, must: str, got: object) -> None:
    """Raise an InputError about an argument unless a condition holds.

    Args:
        ok: The condition.
        name: Name of the argument.
        owner: Name of the class or function that takes the argument.
        must: What the argument must be, after "must", such as "be positive".
        got: The value that was given; strings are printed as they are, other values by their repr.

    Raises:
        InputError: If `ok` is false.

    Example:
        >>> require(0 >= 1, "samples", "MeanField", "be an integer >= 1", 0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'samples' argument of MeanField must be an integer >= 1, got 0.
    """
    if not ok:
        kind = "" if owner.startswith("the ") else "argument "  # "the network" has an output instead of an argument
        raise InputError(f"The '{name}' {kind}of {owner} must {must}, got {_short(got)}.")


def _short(got: object) -> str:
    """A value in one line of at most 120 characters."""
    text = " ".join((got if isinstance(got, str) else repr(got)).split())
    return text if len(text) <= 120 else text[:117] + "..."


def warn(message: str, category: type[PrioryWarning] = PrioryWarning) -> None:
    """Issue a `PrioryWarning` that points at the line in the user's code that called this package."""
    level, frame = 1, sys._getframe()
    # frames of torch may lie between frames of this package, such as those of vmap
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("priory", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def is_integer(value: object, least: int) -> bool:
    """Whether a value is an integer >= `least`; numpy integers count, booleans and floats do not.

    Example:
        >>> is_integer(3, 1), is_integer(True, 1), is_integer(2.0, 1)
        (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def extra(module: str, name: str) -> ModuleType:
    """Import an optional module, or raise a MissingExtra with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtra(f"This needs '{package}': pip install 'priory[{name}]'.") from error


for _public in (InputError, DivergedError, StoreError, PrioryWarning):
    _public.__module__ = "priory"  # the path users import them from, shown in tracebacks
