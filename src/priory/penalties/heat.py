"""The local test for learnt variances: a penalty of Gaussians is a KL if and only if it obeys a heat equation.

Smoothing with N(0, v) is heat flow for a time v / 2, and the entropy of n numbers is n log(2 pi e v) / 2, hence

    d/dv r = 1/2 Laplacian r - n / (2 v),    or    rho = 1 + [s dr/ds - sum_i s_i^2 d^2r/dmu_i^2] / n = 0,

with v = s^2. Away from 0, rho says what is wrong: 1 is a penalty without its entropy term, and T times a KL has
rho = 1 - T, everywhere. Derivatives are differences of fourth order, so that any function will do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from priory.errors import require
from priory.penalties.forward import numbers

STEP = 0.02  # of the scale
OWNER = "heat_residual"


def heat_residual(r: Any, mu: Any, scale: Any, *, vector: bool = False) -> Tensor:
    """rho of a penalty r(mu, scale): 0 for a KL, 1 without the entropy term, 1 - T for a tempered KL.

    With `vector`, the last dimension of `mu` is one point of R^n, `scale` has one number for it, (..., 1), or one for
    each coordinate, (..., n), and r gives one value a point.

    >>> rho = heat_residual(lambda mu, s: 0.5 * (mu**2 + s**2), 0.7, 0.3)  # no -log s
    >>> round(rho.item(), 6)
    1.0
    """
    require(callable(r), "r", OWNER, "be a function of a location and a scale", type(r).__name__)
    loc, s = numbers(mu, scale)
    loc, s = loc.double(), s.double()
    require(bool((s > 0).all()), "scale", OWNER, "be above zero", float(s.min()))
    if not vector:
        return 1 + _first(lambda t: r(loc, s * t.exp())) - _second(lambda t: r(loc + t * s, s))
    require(loc.ndim >= 1, "mu", OWNER, "have a last dimension with `vector`", tuple(loc.shape))
    n = loc.shape[-1]
    eye = torch.eye(n, dtype=torch.float64)
    bends = sum(_second(lambda t, e=e: r(loc + t * s * e, s)) for e in eye)
    return 1 + (_first(lambda t: r(loc, s * t.exp())) - bends) / n


def _at(function: Any, steps: tuple[int, ...]) -> list[Tensor]:
    return [function(torch.tensor(STEP * k, dtype=torch.float64)) for k in steps]


def _first(function: Any) -> Tensor:
    """The slope at 0."""
    a, b, d, e = _at(function, (-2, -1, 1, 2))
    return (a - 8 * b + 8 * d - e) / (12 * STEP)


def _second(function: Any) -> Tensor:
    """The second derivative at 0."""
    a, b, c, d, e = _at(function, (-2, -1, 0, 1, 2))
    return (-a + 16 * b - 30 * c + 16 * d - e) / (12 * STEP**2)
