"""Supports of parameters, and the smooth map from unconstrained coordinates onto each of them.

| support | values | coordinates |
| --- | --- | --- |
| `real`, `real_vector` | any number | one each |
| `positive`, `nonnegative`, `greater_than(low)`, `less_than(high)` | one side of a bound | one each |
| `unit_interval`, `interval(low, high)`, `half_open_interval(low, high)` | between two bounds | one each |
| `simplex` | positive vectors of K entries with sum one | K - 1 |
| `zero_sum` | vectors of K entries with sum zero | K - 1 |
| `unit_vector` | vectors of K entries with length one | K, one of them auxiliary |
| `ordered`, `positive_ordered` | vectors with increasing entries; above zero | K |
| `lower_triangular`, `lower_cholesky` | n x n triangles; with a positive diagonal | n (n + 1) / 2 |
| `positive_definite` | symmetric n x n matrices with positive eigenvalues | n (n + 1) / 2 |
| `corr_matrix`, `corr_cholesky` | correlation matrices; their Cholesky factors | n (n - 1) / 2 |

`bijector(support, shape)` gives x = f(u): u is unconstrained in R^k and x lies in its support. A density p(x) becomes
p(f(u)) |det df/du| in u, with the determinant over the free entries of x: all but the last of a simplex, the lower
triangle of a symmetric matrix, the entries below the diagonal for a correlation. For `zero_sum` it is the volume within
the hyperplane, and for `unit_vector` the area on the sphere. Leading dimensions stay in front:

    u: (*B, *free_shape)  <->  x: (*B, *shape)        log_det(u, x): (*B,)

The constraint objects are those of `torch.distributions.constraints`, with `corr_matrix`, `ordered`,
`positive_ordered`, `unit_vector` and `zero_sum` added. The maps are in `priory.core.bijectors` and
`priory.core.matrix_bijectors`.

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
    HalfLineMap,
    IdentityMap,
    IntervalMap,
    OrderedMap,
    PositiveOrderedMap,
    StickBreakingMap,
    UnitVectorMap,
    ZeroSumMap,
)
from priory.core.errors import require
from priory.core.gaussian_means import gaussian_expectation, gaussian_mean
from priory.core.matrix_bijectors import (
    CorrelationCholeskyMap,
    CorrelationMap,
    LowerCholeskyMap,
    LowerTriangularMap,
    PositiveDefiniteMap,
    TriangleIndex,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Bijector",
    "Constraint",
    "bijector",
    "corr_cholesky",
    "corr_matrix",
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
    "unit_vector",
    "zero_sum",
]

TOLERANCE_EPS = 64  # deviation from an equality that counts as rounding, in eps of the type and entries of the value


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


class _ZeroSum(Constraint):
    """Vectors whose entries sum to zero."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return value.sum(-1).abs() <= _rounding(value, value.shape[-1]) * (1 + value.abs().amax(-1))


class _UnitVector(Constraint):
    """Vectors of length one: points on the unit sphere."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return (value.square().sum(-1) - 1).abs() <= _rounding(value, value.shape[-1])


class _CorrMatrix(Constraint):
    """Correlation matrices: symmetric and positive definite, with ones on the diagonal, up to rounding."""

    event_dim = 2

    def check(self, value: Tensor) -> Tensor:
        close = _rounding(value, value.shape[-1])
        unit = ((value.diagonal(0, -2, -1) - 1).abs() <= close).all(-1)
        symmetric = ((value - value.mT).abs() <= close).flatten(-2).all(-1)
        lifted = value + close * torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
        return unit & symmetric & (torch.linalg.cholesky_ex(lifted).info == 0)


def _rounding(value: Tensor, size: int) -> float:
    """Return the deviation from an equality that sums of `size` entries of this type may have."""
    return TOLERANCE_EPS * size * torch.finfo(value.dtype).eps


corr_matrix = _CorrMatrix()
ordered = _Ordered()
positive_ordered = _PositiveOrdered()
unit_vector = _UnitVector()
zero_sum = _ZeroSum()


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
    named = isinstance(support, str)
    require(
        not named, "support", "Param", f"be a constraint, such as constraints.{support}, not its name", repr(support)
    )
    require(not (known and support.is_discrete), "support", "Param", "be continuous", support)
    require(type(support) in _BUILDERS, "support", "Param", f"be {_KNOWN}, or independent of these", support)
    if support.event_dim == 1:
        require(len(shape) >= 1, "shape", "Param", f"end in a vector for the support {support}", shape)
    if support.event_dim == 2:
        square = len(shape) >= 2 and shape[-1] == shape[-2]
        require(square, "shape", "Param", f"end in a square matrix for the support {support}", shape)
    return _BUILDERS[type(support)](support, shape)


def _half_line(support: Any, shape: tuple[int, ...]) -> Bijector:
    """Return the map onto the side of a bound on which the support lies."""
    if hasattr(support, "lower_bound"):
        return HalfLineMap(shape, _bound(support.lower_bound, shape), 1)
    return HalfLineMap(shape, _bound(support.upper_bound, shape), -1)


def _interval(support: Any, shape: tuple[int, ...]) -> Bijector:
    """Return the map onto an interval, and refuse bounds in the wrong order."""
    low, high = _bound(support.lower_bound, shape), _bound(support.upper_bound, shape)
    rises = bool(torch.as_tensor(low < high).all())
    require(rises, "support", "Param", "have a lower bound below its upper bound", support)
    return IntervalMap(shape, low, high)


def _unit_vector(_: Any, shape: tuple[int, ...]) -> Bijector:
    """Return the map onto a sphere, and refuse the two points that are the sphere of one dimension."""
    require(
        shape[-1] > 1, "shape", "Param", "end in a vector of two entries or more for the support unit_vector", shape
    )
    return UnitVectorMap(shape)


def _correlation_factor(_: Any, shape: tuple[int, ...]) -> CorrelationCholeskyMap:
    """Return the map onto Cholesky factors of correlation matrices."""
    return CorrelationCholeskyMap(shape, TriangleIndex(shape[-1], strict=True))


def _bound(bound: Any, shape: tuple[int, ...]) -> float | Tensor:
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
    type(corr_cholesky): _correlation_factor,
    _CorrMatrix: lambda support, shape: CorrelationMap(shape, _correlation_factor(support, shape)),
    _UnitVector: _unit_vector,
    _ZeroSum: lambda _, shape: ZeroSumMap(shape),
}
_KNOWN = (
    "real, positive, nonnegative, greater_than, less_than, interval, simplex, zero_sum, unit_vector, ordered, "
    "positive_ordered, lower_triangular, lower_cholesky, positive_definite, corr_matrix, corr_cholesky"
)
