"""Densities as functions on the whole line: -inf outside of the support, instead of torch's refusal."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, MixtureSameFamily, constraints

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERVALS = (
    constraints.greater_than,
    constraints.greater_than_eq,
    constraints.less_than,
    constraints.interval,
    constraints.half_open_interval,
)


def log_density(d: Distribution, x: Tensor) -> Tensor:
    """log d(x), and -inf where x lies outside of the support."""
    support: Any = d.support
    with _unchecked(d):
        return torch.where(support.check(x), d.log_prob(x), -math.inf)


def discrete(d: Distribution) -> bool:
    """Whether a distribution is over labels or counts."""
    return bool(getattr(d.support, "is_discrete", False))


def interval(d: Distribution) -> tuple[Tensor, Tensor] | None:
    """The ends of the support of a distribution over numbers, or None where it is no interval."""
    if isinstance(d, MixtureSameFamily):
        ends = interval(d.component_distribution)
        if ends is None:
            return None
        low, high = (end.expand(d.component_distribution.batch_shape) for end in ends)
        return low.amin(-1), high.amax(-1)
    support: Any = d.support
    if support is constraints.real:
        return torch.tensor(-math.inf), torch.tensor(math.inf)
    if discrete(d) or not isinstance(support, INTERVALS):
        return None
    low, high = getattr(support, "lower_bound", -math.inf), getattr(support, "upper_bound", math.inf)
    return torch.as_tensor(low), torch.as_tensor(high)


def dtype_of(d: Distribution) -> torch.dtype:
    """The type of a distribution's numbers, where there is no draw to read it from."""
    try:
        return d.mean.dtype
    except NotImplementedError:
        tensors = (t for part in _parts(d) for t in vars(part).values() if isinstance(t, Tensor))
        return next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())


def _parts(d: Distribution) -> list[Distribution]:
    """A distribution and those that it is made of."""
    inner = (getattr(d, name, None) for name in ("base_dist", "component_distribution", "slab"))
    return [d, *(part for found in inner if isinstance(found, Distribution) for part in _parts(found))]


@contextmanager
def _unchecked(d: Distribution) -> Iterator[None]:
    """Torch's check of the support switched off, in a distribution and in what it is made of."""
    parts = _parts(d)
    checks = [part._validate_args for part in parts]
    for part in parts:
        part._validate_args = False
    try:
        yield
    finally:
        for part, check in zip(parts, checks, strict=True):
            part._validate_args = check
