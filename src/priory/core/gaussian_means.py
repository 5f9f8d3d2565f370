"""Means of Gaussians pushed through the maps of `priory.core.bijectors` and `priory.core.matrix_bijectors`."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    bound_like,
)
from priory.core.matrix_bijectors import (
    CorrelationCholeskyMap,
    CorrelationMap,
    LowerCholeskyMap,
    LowerTriangularMap,
    PositiveDefiniteMap,
    diagonal_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def gaussian_expectation(function: Callable[[Tensor], Tensor], loc: Tensor, scale: Tensor) -> Tensor:
    """Compute E[function(u)] for u ~ N(loc, scale^2), entry by entry, by the trapezoidal rule with 481 nodes.

    The error is of order exp(-48 pi d / scale) for a function that is analytic within distance d of the real line. For
    the sigmoid d = pi, and the error is 1e-12 up to a scale of 15 and 1e-6 at a scale of 30. By comparison, 64
    Gauss-Hermite nodes have an error of 7e-4 at a scale of 8.

    Args:
        function: Elementwise function of a tensor.
        loc: Means.
        scale: Standard deviations, which broadcast with `loc`.

    Returns:
        The expectations, in the broadcast shape of `loc` and `scale`.

    Example:
        >>> gaussian_expectation(torch.sigmoid, torch.tensor(1.0), torch.tensor(2.0))
        tensor(0.6477)

    References:
        Trefethen (2022), Exactness of quadrature formulas.
    """
    total = torch.zeros_like(loc + scale)
    steps = torch.arange(-240, 241, dtype=torch.float64, device=total.device)  # to 10 standard deviations
    nodes, weights = steps / 24, (-0.5 * (steps / 24).square()).softmax(0)
    chunk = max(1, 2**20 // max(1, total.numel()))  # nodes at a time, so that a long vector fits in memory
    for z, weight in zip(nodes.split(chunk), weights.split(chunk), strict=True):
        z, weight = (t.to(total.dtype).reshape(-1, *[1] * total.ndim) for t in (z, weight))
        total = total + (weight * function(loc + scale * z)).sum(0)
    return total


@singledispatch
def gaussian_mean(bijector: Bijector, loc: Tensor, scale: Tensor) -> Tensor:
    """Compute E[f(u)] for u ~ N(loc, diag(scale^2)), without sampling.

    The entries of u are independent, so each mean is built from means of single coordinates: exp(u) in closed form,
    sigmoid, tanh and sech by `gaussian_expectation`.

    Args:
        bijector: The map f.
        loc: Means of u, (*B, *free_shape).
        scale: Standard deviations of u, (*B, *free_shape).

    Returns:
        The means of x, (*B, *shape).

    Raises:
        NotImplementedError: If no rule is registered for this kind of bijector.

    Example:
        >>> from priory.constraints import bijector, positive
        >>> gaussian_mean(bijector(positive), torch.tensor(0.0), torch.tensor(2.0))
        tensor(7.3891)
    """
    raise NotImplementedError(f"The mean under a Gaussian is not implemented for {type(bijector).__name__}.")


def _exp_mean(loc: Tensor, scale: Tensor) -> Tensor:
    """E[exp(u)] for u ~ N(loc, scale^2)."""
    return (loc + 0.5 * scale.square()).exp()


@gaussian_mean.register
def _(bijector: IdentityMap, loc: Tensor, scale: Tensor) -> Tensor:
    return loc


@gaussian_mean.register
def _(bijector: HalfLineMap, loc: Tensor, scale: Tensor) -> Tensor:
    return bound_like(bijector.bound, loc) + bijector.sign * _exp_mean(loc, scale)


@gaussian_mean.register
def _(bijector: IntervalMap, loc: Tensor, scale: Tensor) -> Tensor:
    low, high = bound_like(bijector.low, loc), bound_like(bijector.high, loc)
    return low + (high - low) * gaussian_expectation(torch.sigmoid, loc, scale)


@gaussian_mean.register
def _(bijector: StickBreakingMap, loc: Tensor, scale: Tensor) -> Tensor:
    logit = loc - bijector.centre(loc)
    broken = gaussian_expectation(torch.sigmoid, logit, scale)
    log_left = gaussian_expectation(torch.sigmoid, -logit, scale).log().cumsum(-1)
    return pad(broken, (0, 1), value=1.0) * pad(log_left, (1, 0)).exp()


@gaussian_mean.register
def _(bijector: OrderedMap, loc: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([loc[..., :1], _exp_mean(loc[..., 1:], scale[..., 1:])], -1).cumsum(-1)


@gaussian_mean.register
def _(bijector: PositiveOrderedMap, loc: Tensor, scale: Tensor) -> Tensor:
    return _exp_mean(loc, scale).cumsum(-1)


@gaussian_mean.register
def _(bijector: LowerTriangularMap, loc: Tensor, scale: Tensor) -> Tensor:
    return bijector.triangle.matrix(loc)


@gaussian_mean.register
def _(bijector: LowerCholeskyMap, loc: Tensor, scale: Tensor) -> Tensor:
    loc, scale = bijector.triangle.matrix(loc), bijector.triangle.matrix(scale)
    return loc.tril(-1) + _exp_mean(diagonal_of(loc), diagonal_of(scale)).diag_embed()


@gaussian_mean.register
def _(bijector: PositiveDefiniteMap, loc: Tensor, scale: Tensor) -> Tensor:
    mean = gaussian_mean(bijector.factor, loc, scale)
    variance = bijector.factor.triangle.matrix(scale).square()
    # E[L L'] = E[L] E[L]' plus, on the diagonal, the variances summed over each row
    # Var[e^u] = E[e^u]^2 (e^(scale^2) - 1)
    rows = variance.tril(-1).sum(-1) + diagonal_of(mean).square() * diagonal_of(variance).expm1()
    return mean @ mean.mT + rows.diag_embed()


@gaussian_mean.register
def _(bijector: CorrelationCholeskyMap, loc: Tensor, scale: Tensor) -> Tensor:
    tanh = bijector.triangle.matrix(gaussian_expectation(torch.tanh, loc, scale))
    log_sech = bijector.triangle.matrix(gaussian_expectation(lambda u: 1 / u.cosh(), loc, scale).log())
    left = pad(log_sech.cumsum(-1)[..., :-1], (1, 0)).exp()
    return tanh * left + diagonal_of(left).diag_embed()


@gaussian_mean.register
def _(bijector: CorrelationMap, loc: Tensor, scale: Tensor) -> Tensor:
    factor = gaussian_mean(bijector.factor, loc, scale)
    below = (factor @ factor.mT).tril(-1)  # different rows of L depend on different coordinates
    return below + below.mT + torch.eye(bijector.shape[-1], dtype=loc.dtype, device=loc.device)


@gaussian_mean.register
def _(bijector: ZeroSumMap, loc: Tensor, scale: Tensor) -> Tensor:
    return bijector.forward(loc)


@gaussian_mean.register
def _(bijector: UnitVectorMap, loc: Tensor, scale: Tensor) -> Tensor:
    # 1/|u| = 2/sqrt(pi) int_0^inf exp(-t^2 |u|^2) dt, under which the entries of u are independent:
    # E[exp(-t^2 u^2)] = a^(-1/2) exp(-t^2 loc^2 / a) and E[u exp(-t^2 u^2)] = loc / a times that, a = 1 + 2 t^2 scale^2
    unit = (loc.square() + scale.square()).sum(-1, keepdim=True).rsqrt()
    total, step = torch.zeros_like(loc), 0.15
    for exponent in torch.arange(-40.0, 40.0, step, dtype=torch.float64).tolist():
        t2 = (unit * math.exp(exponent)).square()
        a = 1 + 2 * t2 * scale.square()
        log_each = -0.5 * a.log() - t2 * loc.square() / a
        weight = (log_each.sum(-1, keepdim=True) + 0.5 * t2.log()).exp()  # dt = t dv for t = exp(v)
        total = total + weight * loc / a
    return 2 / math.sqrt(math.pi) * step * total
