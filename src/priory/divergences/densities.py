"""Log densities on the whole real line, -inf outside the support, where torch would raise an error.

Torch's density of a Kumaraswamy is -inf next to 1, where its transforms round, and that of a von Mises has an error of
1e-7. Both are computed here by formulas that keep their digits.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.distributions import Distribution, Kumaraswamy, MixtureSameFamily, Transform, VonMises, constraints

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOAT32_PI_ERROR = 1e-6  # bounds written as math.pi may be float32 numbers
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
    if isinstance(d, Kumaraswamy):
        inside = (x > 0) & (x < 1)
        return torch.where(inside, _log_kumaraswamy(d, torch.where(inside, x, 0.5)), -math.inf)
    if isinstance(d, VonMises):
        return torch.where(x.abs() <= math.pi + FLOAT32_PI_ERROR, _log_von_mises(d, x), -math.inf)
    with _unchecked(d):
        return torch.where(support.check(x), d.log_prob(x), -math.inf)


def _log_kumaraswamy(d: Kumaraswamy, x: Tensor) -> Tensor:
    """log a + log b + (a - 1) log x + (b - 1) log(1 - x^a), for 0 < x < 1."""
    a, b = d.concentration1, d.concentration0
    return a.log() + b.log() + (a - 1) * x.log() + (b - 1) * (-(a * x.log()).expm1()).log()


def _log_von_mises(d: VonMises, x: Tensor) -> Tensor:
    """k cos(x - m) - log(2 pi I_0(k)), as k (cos(x - m) - 1) - log(2 pi I_0(k) exp(-k))."""
    k = d.concentration
    return -2 * k * (0.5 * (x - d.loc)).sin().square() - torch.special.i0e(k).log() - math.log(2 * math.pi)


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
    if isinstance(d, VonMises):  # torch draws angles between -pi and pi, and says that the support is the real line
        return torch.tensor(-math.pi, dtype=torch.float64), torch.tensor(math.pi, dtype=torch.float64)
    if support is constraints.real:
        return torch.tensor(-math.inf), torch.tensor(math.inf)
    if is_discrete(d) or not isinstance(support, INTERVAL_CONSTRAINTS):
        return None
    low, high = getattr(support, "lower_bound", -math.inf), getattr(support, "upper_bound", math.inf)
    return torch.as_tensor(low), torch.as_tensor(high)


def widened(d: Any, seen: dict[int, Any] | None = None) -> Any:
    """Return a copy of a distribution with its parameters in float64, through which gradients flow.

    `seen` holds the copies by the id of the original, since a transform and its inverse refer to each other.
    """
    seen = {} if seen is None else seen
    if id(d) in seen:
        return seen[id(d)]
    found = seen[id(d)] = object.__new__(type(d))
    vars(found).update(vars(d))
    for name, value in vars(d).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            vars(found)[name] = value.double()
        elif isinstance(value, (Distribution, Transform)):
            vars(found)[name] = widened(value, seen)
        elif isinstance(value, list) and any(isinstance(part, Transform) for part in value):
            vars(found)[name] = [widened(part, seen) for part in value]
        elif isinstance(value, ReferenceType):  # to the inverse of a transform, which torch makes again
            vars(found)[name] = None
    return found


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
