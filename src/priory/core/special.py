"""Special functions that torch lacks: incomplete beta, Kummer's function, exponential integral, quadrature nodes.

Kummer's function 1F1(a; b; -x) for x >= 0 gives the moments of a Gaussian. For w ~ N(mu, sigma^2) and
x = mu^2 / (2 sigma^2),

    E|w|^p   = sigma^p 2^(p/2) Gamma((p + 1)/2) / sqrt(pi)  1F1(-p/2; 1/2; -x),
    d/dsigma E|w|^p = p sigma^(p-1) 2^(p/2) Gamma((p + 1)/2) / sqrt(pi)  1F1(1 - p/2; 1/2; -x),
    E log|w| = [log(2 sigma^2) + psi(1/2) + D(x)] / 2,    D(x) = -d/da 1F1(a; 1/2; -x) at a = 0.

Kummer's transformation turns the alternating series into one of positive terms, an average over k ~ Poisson(x)
(Abramowitz and Stegun, 1964, 13.1.27), and far out the asymptotic series takes over (13.5.1):

    1F1(a; b; -x) = e^-x sum_k x^k / k! (b - a)_k / (b)_k
                  ~ Gamma(b) / Gamma(b - a) x^-a sum_k (a)_k (a - b + 1)_k / k! x^-k.

Its derivative is of the same kind: d/dx 1F1(a; b; -x) = -(a / b) 1F1(a + 1; b + 1; -x), and D'(x) = 2 1F1(1; 3/2; -x),
which is Dawson's integral of sqrt(x) over sqrt(x) / 2.

The exponential integral E1(u) = int_u^inf e^-t / t dt is computed in a scaled form whose logarithm never under- or
overflows. With Stieltjes' continued fraction (Abramowitz and Stegun, 1964, 5.1.22),

    e^u E1(u) = 1 / (u + r),    r(u) = 1 - 1 / (u + 3 - 4 / (u + 5 - 9 / (u + 7 - ...))),

so that d/du log(e^u E1(u)) = -r / u, and dr/du = r + r^2 / u - 1. Nothing cancels for large u, where r tends to 1.
For small u, E1(u) = -gamma - log u - sum_k (-u)^k / (k k!) (5.1.11).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from priory.core.linalg import eigh

BETA_TERMS = 10_000  # levels of the continued fraction; it needs O(sqrt(max(a, b)))
KUMMER_ASYMPTOTIC_FROM = 40.0  # x from which the asymptotic series is used; its error is of the order of e^-x
KUMMER_TERMS = 150  # enough up to there for a >= -10, a power of 20
KUMMER_ASYMPTOTIC_TERMS = 36
EULER_GAMMA = 0.5772156649015329
E1_FRACTION_FROM = 2.0  # below, the series loses less than two digits; above, the fraction converges
E1_FRACTION_LEVELS = 48
E1_SERIES_TERMS = 28


# Incomplete beta.


def incomplete_beta(a: float | Tensor, b: float | Tensor, x: Tensor, y: Tensor | None = None) -> Tensor:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction.

    (Abramowitz and Stegun, 1964, 26.5.8, evaluated by Lentz's method.) The fraction converges fast for
    x < (a + 1) / (a + b + 2); elsewhere 1 - I_(1-x)(b, a) is used.

    Args:
        a: First parameter, positive.
        b: Second parameter, positive.
        x: Values in [0, 1].
        y: 1 - x, where the caller knows it to more digits than x has.

    Returns:
        I_x(a, b), in the shape and dtype of x.

    Example:
        >>> round(incomplete_beta(2.0, 3.0, torch.tensor(0.5, dtype=torch.float64)).item(), 12)
        0.6875
    """
    a, b = (torch.as_tensor(t, dtype=torch.float64, device=x.device) for t in (a, b))
    swap = x > (a + 1) / (a + b + 2)
    rest = 1 - x if y is None else y
    x, rest = torch.where(swap, rest, x), torch.where(swap, x, rest)
    a, b = torch.where(swap, b, a), torch.where(swap, a, b)
    constant = (torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)).to(x.dtype)
    log_rest = torch.log1p(-x) if y is None else rest.log()
    log_front = constant + a.to(x.dtype) * x.log() + b.to(x.dtype) * log_rest
    info = torch.finfo(x.dtype)
    tiny = math.sqrt(info.tiny)
    nonzero = lambda v: torch.where(v.abs() < tiny, tiny, v)  # noqa: E731 - Lentz never divides by zero
    c, d = torch.ones_like(x), 1 / nonzero(1 - ((a + b) / (a + 1)).to(x.dtype) * x)
    value, ratio = d, d
    for m in range(1, BETA_TERMS):
        for coefficient in (
            m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            numerator = coefficient.to(x.dtype) * x
            c, d = nonzero(1 + numerator / c), 1 / nonzero(1 + numerator * d)
            ratio = c * d
            value = value * ratio
        if not bool(((ratio - 1).abs() > 4 * info.eps).any()):
            break
    found = log_front.exp() * value / a.to(x.dtype)
    return torch.where(swap, 1 - found, found)


def student_cdf(t: Tensor, df: float) -> Tensor:
    """P(T <= t) = 1 - I_x(df/2, 1/2) / 2 for t > 0, with x = df / (df + t^2) and I the incomplete beta function."""
    total = df + t * t
    rest = torch.where(torch.isinf(total), torch.ones_like(t), t * t / total)
    tail = 0.5 * incomplete_beta(df / 2, 0.5, df / total, rest)
    return torch.where(t > 0, 1 - tail, tail)


# Gauss-Legendre quadrature.


@lru_cache
def legendre(n: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the n-point Gauss-Legendre rule on [-1, 1] (Golub and Welsch, 1969)."""
    k = torch.arange(1, n, dtype=torch.float64)
    off = k / (4 * k * k - 1).sqrt()
    points, vectors = eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return points, 2 * vectors[0].square()


def gauss_legendre_panels(left: Tensor, right: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of `points`-point rules on panels from `left` to `right` (E, *B), each (E * points, *B)."""
    nodes, weights = (t.to(left).reshape(1, -1, *[1] * (left.ndim - 1)) for t in legendre(points))
    half, middle = ((right - left) / 2).unsqueeze(1), ((right + left) / 2).unsqueeze(1)
    return (middle + half * nodes).flatten(0, 1), (half * weights).flatten(0, 1)


# Kummer's function and the moments of a Gaussian.


def kummer(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """1F1(a; b; -x) for -10 <= a < b + 1 and x >= 0, to 1e-13 relative for a < b; differentiable in x and in a.

    >>> half, x = torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    >>> kummer(-2 * half, half, x).item()  # a = -1 is the second moment: 1 + 2x
    5.0
    """
    if a.requires_grad:  # a learnt power, which is rare: differentiate the terms of the series
        return _kummer_value(a, b, x)
    value: Any = _Kummer.apply(a, b, x)
    return value


def absolute_moment(loc: Tensor, scale: Tensor, power: Tensor) -> Tensor:
    """E|w|^p for w ~ N(loc, scale^2) and a power up to 20; differentiable.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(absolute_moment(one, 2 * one, 2 * one).item(), 12)  # the mean's square and the variance
    5.0
    """
    if power.requires_grad:
        return _absolute_moment(loc, scale, power)
    value: Any = _AbsoluteMoment.apply(*torch.broadcast_tensors(loc, scale), power)
    return value


def log_moment(x: Tensor) -> Tensor:
    """D(x) = -d/da 1F1(a; 1/2; -x) at a = 0, the expectation of psi(k + 1/2) - psi(1/2) over k ~ Poisson(x)."""
    value: Any = _LogMoment.apply(x)
    return value


def _kummer_value(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    near, far = x.clamp(max=KUMMER_ASYMPTOTIC_FROM), x.clamp(min=KUMMER_ASYMPTOTIC_FROM)
    return torch.where(x < KUMMER_ASYMPTOTIC_FROM, _kummer_series(a, b, near), _kummer_asymptotic(a, b, far))


def _kummer_series(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    term = torch.exp(-x) + 0 * (a + b)  # in the shape of all three
    total = term
    for k in range(KUMMER_TERMS):
        term = term * (x * ((b - a + k) / ((b + k) * (k + 1))))
        total = total + term
    return total


def _kummer_asymptotic(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    # 1 / Gamma(y) = y / Gamma(y + 1), which has the sign of y
    term = (b - a) * torch.exp(torch.lgamma(b) - torch.lgamma(b - a + 1)) * x.pow(-a)
    total, inverse = term, 1 / x
    for k in range(KUMMER_ASYMPTOTIC_TERMS):
        term = term * (inverse * ((a + k) * (a - b + 1 + k) / (k + 1)))
        total = total + term
    return total


def _centred_moment(scale: Tensor, power: Tensor) -> Tensor:
    """sigma^p 2^(p/2) Gamma((p + 1)/2) / sqrt(pi), the moment of a centred Gaussian."""
    return torch.exp(power * (math.sqrt(2) * scale).log() + torch.lgamma((power + 1) / 2)) / math.sqrt(math.pi)


def _absolute_moment(loc: Tensor, scale: Tensor, power: Tensor) -> Tensor:
    return _centred_moment(scale, power) * kummer(-power / 2, power.new_tensor(0.5), 0.5 * (loc / scale).square())


class _AbsoluteMoment(torch.autograd.Function):
    """The moment with explicit derivatives: in those of the chain rule, two terms of the order of x cancel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loc: Tensor, scale: Tensor, power: Tensor) -> Tensor:
        return _absolute_moment(loc, scale, power)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        loc, scale, power = ctx.saved_tensors
        ratio, a = loc / scale, 1 - power / 2
        common = gradient * power * _centred_moment(scale, power) / scale
        x, half = 0.5 * ratio.square(), power.new_tensor(0.5)
        in_loc, in_scale = common * ratio * kummer(a, 3 * half, x), common * kummer(a, half, x)
        return in_loc.sum_to_size(loc.shape), in_scale.sum_to_size(scale.shape), None


class _Kummer(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return _kummer_value(a, b, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b, x = ctx.saved_tensors
        slope = gradient * (-a / b) * kummer(a + 1, b + 1, x)
        return None, None, slope.sum_to_size(x.shape)


class _LogMoment(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        half = 0.5
        near, far = x.clamp(max=KUMMER_ASYMPTOTIC_FROM), x.clamp(min=KUMMER_ASYMPTOTIC_FROM)
        weight, digamma, total = torch.exp(-near), 0.0, torch.zeros_like(near)
        for k in range(KUMMER_TERMS):
            total = total + weight * digamma
            weight, digamma = weight * near / (k + 1), digamma + 1 / (half + k)  # psi(y + 1) = psi(y) + 1 / y
        power, rest = torch.ones_like(far), torch.zeros_like(far)
        for k in range(1, KUMMER_ASYMPTOTIC_TERMS + 1):
            power = power * ((k - half) / far)
            rest = rest - power / k
        limit = far.log() - torch.special.digamma(torch.full_like(far, half)) + rest
        return torch.where(x < KUMMER_ASYMPTOTIC_FROM, total, limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return gradient * 2 * kummer(x.new_tensor(1.0), x.new_tensor(1.5), x)


# The exponential integral.


def log_scaled_e1(u: Tensor) -> Tensor:
    """log(e^u E1(u)) for u > 0, to 1e-13, differentiable twice.

    >>> log_scaled_e1(torch.tensor([1.0, 1e6], dtype=torch.float64)).exp()
    tensor([5.9635e-01, 1.0000e-06], dtype=torch.float64)
    """
    value: Any = _LogScaledE1.apply(u)
    return value


def _e1_remainder(u: Tensor) -> Tensor:
    """Return r(u), by the series and by the fraction, without a gradient."""
    small, large = u.clamp(max=E1_FRACTION_FROM), u.clamp(min=E1_FRACTION_FROM)
    power, total = torch.ones_like(small), -EULER_GAMMA - small.log()
    for k in range(1, E1_SERIES_TERMS + 1):
        power = power * (-small / k)
        total = total - power / k
    by_series = 1 / (small.exp() * total) - small
    tail = large + (2 * E1_FRACTION_LEVELS + 1)
    for k in range(E1_FRACTION_LEVELS - 1, 0, -1):
        tail = large + (2 * k + 1) - (k + 1) ** 2 / tail
    return torch.where(u < E1_FRACTION_FROM, by_series, 1 - 1 / tail)


class _E1Remainder(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return _e1_remainder(u)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        u, r = ctx.saved_tensors
        return gradient * (r + r * r / u - 1)


class _LogScaledE1(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return -(u + _e1_remainder(u)).log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (u,) = ctx.saved_tensors
        r: Any = _E1Remainder.apply(u)
        return -gradient * r / u
