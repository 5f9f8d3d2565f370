"""Kummer's function 1F1(a; b; -x) for x >= 0, which the moments of a Gaussian are made of.

For w ~ N(mu, sigma^2) and x = mu^2 / (2 sigma^2),

    E|w|^p   = sigma^p 2^(p/2) Gamma((p + 1)/2) / sqrt(pi)  1F1(-p/2; 1/2; -x),
    d/dsigma E|w|^p = p sigma^(p-1) 2^(p/2) Gamma((p + 1)/2) / sqrt(pi)  1F1(1 - p/2; 1/2; -x),
    E log|w| = [log(2 sigma^2) + psi(1/2) + D(x)] / 2,    D(x) = -d/da 1F1(a; 1/2; -x) at a = 0.

Kummer's transformation turns the alternating series into one of positive terms, an average over k ~ Poisson(x)
(Abramowitz and Stegun, 1964, 13.1.27), and far out the asymptotic series takes over (13.5.1):

    1F1(a; b; -x) = e^-x sum_k x^k / k! (b - a)_k / (b)_k
                  ~ Gamma(b) / Gamma(b - a) x^-a sum_k (a)_k (a - b + 1)_k / k! x^-k.

Its slope is again one of the kind: d/dx 1F1(a; b; -x) = -(a / b) 1F1(a + 1; b + 1; -x), and D'(x) = 2 1F1(1; 3/2; -x),
which is Dawson's integral of sqrt(x) over sqrt(x) / 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SWITCH = 40.0  # what the asymptotic series leaves out is of the order of e^-x
TERMS = 150  # enough for a >= -10, a power of 20, up to the switch
TAIL = 36


def kummer(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """1F1(a; b; -x) for -10 <= a < b + 1 and x >= 0, to 1e-13 relative for a < b; differentiable in x and in a.

    >>> half, x = torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    >>> kummer(-2 * half, half, x).item()  # a = -1 is the second moment: 1 + 2x
    5.0
    """
    if a.requires_grad:  # a learnt power, which is rare: through the terms themselves
        return _value(a, b, x)
    value: Any = _Kummer.apply(a, b, x)
    return value


def absolute_moment(loc: Tensor, scale: Tensor, power: Tensor) -> Tensor:
    """E|w|^p for w ~ N(loc, scale^2) and a power up to 20; differentiable.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(absolute_moment(one, 2 * one, 2 * one).item(), 12)  # the mean's square and the variance
    5.0
    """
    if power.requires_grad:
        return _moment(loc, scale, power)
    value: Any = _AbsoluteMoment.apply(*torch.broadcast_tensors(loc, scale), power)
    return value


def log_moment(x: Tensor) -> Tensor:
    """D(x) = -d/da 1F1(a; 1/2; -x) at a = 0, the expectation of psi(k + 1/2) - psi(1/2) over k ~ Poisson(x)."""
    value: Any = _LogMoment.apply(x)
    return value


def _value(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    near, far = x.clamp(max=SWITCH), x.clamp(min=SWITCH)
    return torch.where(x < SWITCH, _series(a, b, near), _asymptotic(a, b, far))


def _series(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    term = torch.exp(-x) + 0 * (a + b)  # in the shape of all three
    total = term
    for k in range(TERMS):
        term = term * (x * ((b - a + k) / ((b + k) * (k + 1))))
        total = total + term
    return total


def _asymptotic(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    # 1 / Gamma(y) = y / Gamma(y + 1), which has the sign of y
    term = (b - a) * torch.exp(torch.lgamma(b) - torch.lgamma(b - a + 1)) * x.pow(-a)
    total, inverse = term, 1 / x
    for k in range(TAIL):
        term = term * (inverse * ((a + k) * (a - b + 1 + k) / (k + 1)))
        total = total + term
    return total


def _factor(scale: Tensor, power: Tensor) -> Tensor:
    """sigma^p 2^(p/2) Gamma((p + 1)/2) / sqrt(pi), the moment of a centred Gaussian."""
    return torch.exp(power * (math.sqrt(2) * scale).log() + torch.lgamma((power + 1) / 2)) / math.sqrt(math.pi)


def _moment(loc: Tensor, scale: Tensor, power: Tensor) -> Tensor:
    return _factor(scale, power) * kummer(-power / 2, power.new_tensor(0.5), 0.5 * (loc / scale).square())


class _AbsoluteMoment(torch.autograd.Function):
    """The moment with its slopes written out: in the chain rule's, two terms of the order of x cancel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loc: Tensor, scale: Tensor, power: Tensor) -> Tensor:
        return _moment(loc, scale, power)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        loc, scale, power = ctx.saved_tensors
        ratio, a = loc / scale, 1 - power / 2
        common = gradient * power * _factor(scale, power) / scale
        x, half = 0.5 * ratio.square(), power.new_tensor(0.5)
        in_loc, in_scale = common * ratio * kummer(a, 3 * half, x), common * kummer(a, half, x)
        return in_loc.sum_to_size(loc.shape), in_scale.sum_to_size(scale.shape), None


class _Kummer(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return _value(a, b, x)

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
        near, far = x.clamp(max=SWITCH), x.clamp(min=SWITCH)
        weight, digamma, total = torch.exp(-near), 0.0, torch.zeros_like(near)
        for k in range(TERMS):
            total = total + weight * digamma
            weight, digamma = weight * near / (k + 1), digamma + 1 / (half + k)  # psi(y + 1) = psi(y) + 1 / y
        power, rest = torch.ones_like(far), torch.zeros_like(far)
        for k in range(1, TAIL + 1):
            power = power * ((k - half) / far)
            rest = rest - power / k
        limit = far.log() - torch.special.digamma(torch.full_like(far, half)) + rest
        return torch.where(x < SWITCH, total, limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return gradient * 2 * kummer(x.new_tensor(1.0), x.new_tensor(1.5), x)
