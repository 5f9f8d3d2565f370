"""Input formats of a penalty: a function of tensors, a function of numbers, or a table of values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from priory.core.errors import InputError, require

CALLER_NAME = "prior_from_penalty"
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Table:
    """A penalty known as a table of values r(mu_i, scale_j), shape (M, S).

    All values are converted to float64 tensors.

    Args:
        mu: At least 10 locations in increasing order, (M,).
        scales: Distinct positive scales, (S,). For "dropout" these are the keep probabilities; for "dirac", None.
        values: Values of the penalty: (M, S), for "dirac" (M,), for "spike_slab" (M, S, P).
        noise: Standard deviation of the noise of the values. Default: 0.0, exact values.
        keep: Keep probabilities for "spike_slab", (P,). Default: None.

    Example:
        >>> mu = torch.linspace(-4, 4, 81)
        >>> Table(mu, None, 0.5 * mu.square()).values.shape
        torch.Size([81])
    """

    mu: Any
    scales: Any
    values: Any
    noise: float = 0.0
    keep: Any = None

    def __post_init__(self) -> None:
        for name in ("mu", "scales", "values", "keep"):
            given = getattr(self, name)
            if given is not None or name in ("mu", "values"):
                object.__setattr__(self, name, torch.as_tensor(given, dtype=torch.float64))
        mu, values = self.mu, self.values
        ordered = mu.ndim == 1 and len(mu) >= 10 and bool((mu.diff() > 0).all())
        require(ordered, "mu", "Table", "be at least 10 locations in increasing order", tuple(mu.shape))
        for name in ("scales", "keep"):
            axis = getattr(self, name)
            if axis is not None:
                positive = axis.ndim == 1 and len(axis) >= 1 and bool((axis > 0).all())
                require(positive, name, "Table", "be positive numbers", axis.tolist())
                distinct = len(axis.unique()) == len(axis)
                require(distinct, name, "Table", "be distinct", axis.tolist())
        shape = (len(mu), *(len(axis) for axis in self.axes))
        require(tuple(values.shape) == shape, "values", "Table", f"have the shape {shape}", tuple(values.shape))
        require(bool(values.isfinite().all()), "values", "Table", "be finite", "a value that is not")
        ok = isinstance(self.noise, (int, float)) and self.noise >= 0
        require(ok, "noise", "Table", "be a standard deviation >= 0", self.noise)

    @property
    def axes(self) -> list[Tensor]:
        """Coordinates of the values beside the location."""
        return [axis for axis in (self.scales, self.keep) if axis is not None]

    def __call__(self, mu: Tensor, *others: Tensor) -> Tensor:
        """Return the value at the nearest scale (and `keep`), interpolated linearly between locations.

        Args:
            mu: Locations.
            *others: Scales and, if the table has them, keep probabilities.
        """
        mu, *at = torch.broadcast_tensors(mu, *others[: len(self.axes)])
        pairs = zip(at, self.axes, strict=True)
        columns = [(one[..., None].log() - axis.log()).abs().argmin(-1) for one, axis in pairs]
        row = torch.searchsorted(self.mu, mu.contiguous()).clamp(1, len(self.mu) - 1)
        share = (mu - self.mu[row - 1]) / (self.mu[row] - self.mu[row - 1])
        return (1 - share) * self.values[(row - 1, *columns)] + share * self.values[(row, *columns)]


def as_table(r: Any) -> Table | None:
    """Return a Table, given itself or a tuple of three to five parts; None for a function."""
    if isinstance(r, Table):
        return r
    if isinstance(r, (tuple, list)):
        must = "be (mu, scales, values), (mu, scales, values, noise) or (mu, scales, values, noise, keep)"
        require(len(r) in (3, 4, 5), "r", CALLER_NAME, must, f"{len(r)} parts")
        return Table(*r)
    return None


def as_function(r: Any, arguments: int) -> Function:
    """Return a penalty as an elementwise function of `arguments` float64 tensors.

    A function that takes fewer arguments ignores the rest. Arguments with a default keep it, unless all have one.
    """
    must = "be a function of a location and a scale, or a table (mu, scales, values)"
    require(callable(r), "r", CALLER_NAME, must, type(r).__name__)
    taken = min(arguments, _positional(r, arguments))

    def function(*given: Tensor) -> Tensor:
        inputs = torch.broadcast_tensors(*given)
        return _elementwise(r, inputs[:taken])

    return function


def _elementwise(r: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Evaluate r on tensors, or in a loop over numbers if it can't take tensors."""
    shape = inputs[0].shape
    try:
        value = r(*inputs)
        if hasattr(value, "__array__") and tuple(value.shape) == tuple(shape):  # a torch or numpy array
            return torch.as_tensor(value).to(torch.float64)
        if isinstance(value, (int, float)) and len(shape) == 0:
            return inputs[0].new_tensor(value)
        if isinstance(value, (int, float)):  # a constant penalty
            return torch.full_like(inputs[0], value)
    except InputError:
        raise
    except Exception:  # a function that fails on tensors may still accept numbers
        pass
    rows = zip(*(t.detach().reshape(-1).tolist() for t in inputs), strict=True)
    try:
        values = [float(r(*row)) for row in rows]
    except Exception as error:
        must = "return one number per location and scale"
        raise InputError(
            f"The 'r' argument of {CALLER_NAME} must {must}, got {type(error).__name__}: {error}."
        ) from error
    return inputs[0].new_tensor(values).reshape(shape)


def _positional(r: Any, otherwise: int) -> int:
    """Return the number of positional arguments without a default, or of all if each has a default."""
    try:
        parameters = list(inspect.signature(r).parameters.values())
    except (TypeError, ValueError):  # built-in functions of torch have no signature
        return _count_arguments_by_trial(r, otherwise)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return otherwise
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    require(bool(by_place), "r", CALLER_NAME, "take a location", "a function without arguments")
    return len([p for p in by_place if p.default is p.empty]) or len(by_place)


def _count_arguments_by_trial(r: Any, most: int) -> int:
    """Return the largest number of arguments with which r can be called, for a function without a signature."""
    half = torch.tensor(0.5, dtype=torch.float64)
    for count in range(most, 1, -1):
        try:
            r(*[half] * count)
        except TypeError:
            continue
        return count
    return 1
