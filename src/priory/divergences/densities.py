"""Log densities on the whole real line, -inf outside the support, where torch would raise an error."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, MixtureSameFamily, constraints

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERVAL_CONSTRAINTS = (
    constraints.greater_than,
    constraints.greater_than_eq,
    constraints.less_than,
    constraints.interval,
    constraints.half_open_interval,
)


def log_density(d: Distribution, x: Tensor) -> Tensor:
    """Return log d(x), and -inf where x lies outside the support."""
    support: Any = d.support
    with _unchecked(d):
        return torch.where(support.check(x), d.log_prob(x), -math.inf)


def is_discrete(d: Distribution) -> bool:
    """Whether a distribution is over classes or counts."""
    return bool(getattr(d.support, "is_discrete", False))


def support_interval(d: Distribution) -> tuple[Tensor, Tensor] | None:
    """Return the lower and upper end of the support, or None if the support is not an interval."""
    if isinstance(d, MixtureSameFamily):
        ends = support_interval(d.component_distribution)
        if ends is None:
            return None
        low, high = (end.expand(d.component_distribution.batch_shape) for end in ends)
        return low.amin(-1), high.amax(-1)
    support: Any = d.support
    if support is constraints.real:
        return torch.tensor(-math.inf), torch.tensor(math.inf)
    if is_discrete(d) or not isinstance(support, INTERVAL_CONSTRAINTS):
        return None
    low, high = getattr(support, "lower_bound", -math.inf), getattr(support, "upper_bound", math.inf)
    return torch.as_tensor(low), torch.as_tensor(high)


def dtype_of(d: Distribution) -> torch.dtype:
    """Return the floating-point type of a distribution's values without drawing from it."""
    try:
        return d.mean.dtype
    except NotImplementedError:
        tensors = (t for part in _parts(d) for t in vars(part).values() if isinstance(t, Tensor))
        return next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())


def _parts(d: Distribution) -> list[Distribution]:
    """A distribution and, recursively, the base, component or slab distributions it is made of."""
    inner = (getattr(d, name, None) for name in ("base_dist", "component_distribution", "slab"))
    return [d, *(part for found in inner if isinstance(found, Distribution) for part in _parts(found))]


@contextmanager
def _unchecked(d: Distribution) -> Iterator[None]:
    """Switch off torch's argument validation in a distribution and in its parts."""
    parts = _parts(d)
    checks = [part._validate_args for part in parts]
    for part in parts:
        part._validate_args = False
    try:
        yield
    finally:
        for part, check in zip(parts, checks, strict=True):
            part._validate_args = check
