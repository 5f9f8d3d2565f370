"""Supports of parameters, and the smooth map from unconstrained coordinates onto each of them.

`bijector(support, shape)` gives x = f(u): u is unconstrained in R^k, x lies in its support, and u has as many
coordinates as x has degrees of freedom (a simplex of K has K - 1, a Cholesky factor n(n + 1)/2, that of a correlation
matrix n(n - 1)/2). A density p(x) becomes p(f(u)) |det df/du| in u, with the determinant over the free entries of x:
all but the last of a simplex, the lower triangle of a symmetric matrix, the entries below the diagonal for a
correlation. Leading dimensions stay in front:

    u: (*B, *free_shape)  <->  x: (*B, *shape)        log_det(u, x): (*B,)

The constraint objects are those of `torch.distributions.constraints`, with `ordered` and `positive_ordered` added. The
maps are in `priory.core.bijectors`.

>>> weights = bijector(simplex, (3,))
>>> weights.free_shape
(2,)
>>> weights.forward(torch.zeros(2))
tensor([0.3333, 0.3333, 0.3333])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions.constraints import (
    Constraint,
    corr_cholesky,
    greater_than,
    greater_than_eq,
    half_open_interval,
    independent,
    interval,
    is_dependent,
    less_than,
    lower_cholesky,
    lower_triangular,
    nonnegative,
    positive,
    positive_definite,
    real,
    real_vector,
    simplex,
    unit_interval,
)

from priory.core.bijectors import (
    Bijector,
    CorrelationCholeskyMap,
    HalfLineMap,
    IdentityMap,
    IntervalMap,
    LowerCholeskyMap,
    LowerTriangularMap,
    OrderedMap,
    PositiveDefiniteMap,
    PositiveOrderedMap,
    StickBreakingMap,
    TriangleIndex,
    gaussian_expectation,
    gaussian_mean,
)
from priory.core.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Bijector",
    "Constraint",
    "bijector",
    "corr_cholesky",
    "gaussian_expectation",
    "gaussian_mean",
    "greater_than",
    "greater_than_eq",
    "half_open_interval",
    "independent",
    "interval",
    "less_than",
    "lower_cholesky",
    "lower_triangular",
    "nonnegative",
    "ordered",
    "positive",
    "positive_definite",
    "positive_ordered",
    "real",
    "real_vector",
    "simplex",
    "unit_interval",
]


class _Ordered(Constraint):
    """Vectors whose entries increase strictly: x_1 < x_2 < ... < x_K."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return (value[..., 1:] > value[..., :-1]).all(-1)


class _PositiveOrdered(Constraint):
    """Vectors of positive entries that increase strictly: 0 < x_1 < x_2 < ... < x_K."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return (value > 0).all(-1) & (value[..., 1:] > value[..., :-1]).all(-1)


ordered = _Ordered()
positive_ordered = _PositiveOrdered()


def bijector(support: Constraint, shape: Sequence[int] = ()) -> Bijector:
    """Return the map from unconstrained coordinates to values of this shape in a support.

    Args:
        support: A constraint of `priory.constraints` or `torch.distributions.constraints`.
        shape: Shape of one value. Default: (), a scalar.

    Returns:
        The bijector, with methods `forward`, `inverse` and `log_det`.

    Raises:
        InputError: If the support is discrete or unknown, or if it does not fit the shape.

    Example:
        >>> bijector(positive, (2,)).forward(torch.zeros(2))
        tensor([1., 1.])
        >>> bijector(simplex, (3, 4)).free_shape
        (3, 3)
    """
    shape = tuple(int(size) for size in shape)
    if isinstance(support, independent):
        rank = support.event_dim
        require(len(shape) >= rank, "shape", "Param", f"have at least the {rank} dimensions of its support", shape)
        return bijector(support.base_constraint, shape)
    known = isinstance(support, Constraint) and not is_dependent(support)
    require(not (known and support.is_discrete), "support", "Param", "be continuous", support)
    require(type(support) in _BUILDERS, "support", "Param", f"be {_KNOWN}, or independent of these", support)
    if support.event_dim == 1:
        require(len(shape) >= 1, "shape", "Param", f"end in a vector for the support {support}", shape)
    if support.event_dim == 2:
        square = len(shape) >= 2 and shape[-1] == shape[-2]
        require(square, "shape", "Param", f"end in a square matrix for the support {support}", shape)
    return _BUILDERS[type(support)](support, shape)


def _half_line(support: Any, shape: tuple[int, ...]) -> Bijector:
    """The map onto a half-line, bounded from below or from above."""
    """Return the map onto the side of a bound on which the support lies."""
    if hasattr(support, "lower_bound"):
        return HalfLineMap(shape, _bound(support.lower_bound, shape), 1)
    return HalfLineMap(shape, _bound(support.upper_bound, shape), -1)


def _interval(support: Any, shape: tuple[int, ...]) -> Bijector:
    """The map onto a bounded interval."""
    """Return the map onto an interval, and refuse bounds in the wrong order."""
    low, high = _bound(support.lower_bound, shape), _bound(support.upper_bound, shape)
    rises = bool(torch.as_tensor(low < high).all())
    require(rises, "support", "Param", "have a lower bound below its upper bound", support)
    return IntervalMap(shape, low, high)


def _bound(bound: Any, shape: tuple[int, ...]) -> float | Tensor:
    """A bound as a number if it is a scalar, or as a tensor that broadcasts to the shape."""
    """Return a bound as a number, or as a tensor that broadcasts to the shape."""
    if not isinstance(bound, Tensor) or bound.ndim == 0:
        return float(bound)  # a Python number is cheaper than a tensor in every evaluation
    sizes = zip(reversed(bound.shape), reversed(shape), strict=False)
    fits = bound.ndim <= len(shape) and all(bound_size in (1, size) for bound_size, size in sizes)
    must = f"have bounds that broadcast to the shape {shape}"
    require(fits, "support", "Param", must, f"bounds of shape {tuple(bound.shape)}")
    return bound.detach()


_BUILDERS: dict[type, Callable[[Any, tuple[int, ...]], Bijector]] = {
    type(real): lambda _, shape: IdentityMap(shape),
    greater_than: _half_line,
    greater_than_eq: _half_line,
    less_than: _half_line,
    interval: _interval,
    half_open_interval: _interval,
    type(simplex): lambda _, shape: StickBreakingMap(shape),
    _Ordered: lambda _, shape: OrderedMap(shape),
    _PositiveOrdered: lambda _, shape: PositiveOrderedMap(shape),
    type(lower_triangular): lambda _, shape: LowerTriangularMap(shape, TriangleIndex(shape[-1])),
    type(lower_cholesky): lambda _, shape: LowerCholeskyMap(shape, TriangleIndex(shape[-1])),
    type(positive_definite): lambda _, shape: PositiveDefiniteMap(
        shape, LowerCholeskyMap(shape, TriangleIndex(shape[-1]))
    ),
    type(corr_cholesky): lambda _, shape: CorrelationCholeskyMap(shape, TriangleIndex(shape[-1], strict=True)),
}
_KNOWN = (
    "real, positive, nonnegative, greater_than, less_than, interval, simplex, ordered, positive_ordered, "
    "lower_triangular, lower_cholesky, positive_definite, corr_cholesky"
)
