"""The exponential integral E1(u) = int_u^inf e^-t / t dt, in the scaled form whose logarithm never under- or overflows.

With Stieltjes' continued fraction (Abramowitz and Stegun, 1964, 5.1.22),

    e^u E1(u) = 1 / (u + r),    r(u) = 1 - 1 / (u + 3 - 4 / (u + 5 - 9 / (u + 7 - ...))),

so that d/du log(e^u E1(u)) = -r / u, and dr/du = r + r^2 / u - 1. Nothing cancels for large u, where r tends to 1.
For small u, E1(u) = -gamma - log u - sum_k (-u)^k / (k k!) (5.1.11).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EULER = 0.5772156649015329
SWITCH = 2.0  # below it the series loses less than two digits, above it the fraction converges in DEPTH levels
DEPTH = 48
TERMS = 28


def log_scaled_e1(u: Tensor) -> Tensor:
    """log(e^u E1(u)) for u > 0, to 1e-13, differentiable twice.

    >>> log_scaled_e1(torch.tensor([1.0, 1e6], dtype=torch.float64)).exp()
    tensor([5.9635e-01, 1.0000e-06], dtype=torch.float64)
    """
    value: Any = _LogScaledE1.apply(u)
    return value


def _remainder(u: Tensor) -> Tensor:
    """r(u), by series and by fraction, without a gradient of its own."""
    small, large = u.clamp(max=SWITCH), u.clamp(min=SWITCH)
    power, total = torch.ones_like(small), -EULER - small.log()
    for k in range(1, TERMS + 1):
        power = power * (-small / k)
        total = total - power / k
    by_series = 1 / (small.exp() * total) - small
    tail = large + (2 * DEPTH + 1)
    for k in range(DEPTH - 1, 0, -1):
        tail = large + (2 * k + 1) - (k + 1) ** 2 / tail
    return torch.where(u < SWITCH, by_series, 1 - 1 / tail)


class _Remainder(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return _remainder(u)

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
        return -(u + _remainder(u)).log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (u,) = ctx.saved_tensors
        r: Any = _Remainder.apply(u)
        return -gradient * r / u
