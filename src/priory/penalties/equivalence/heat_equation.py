"""A local test for learnt variances: a penalty on Gaussians is a KL if and only if it satisfies a heat equation.

Smoothing with N(0, v) is heat flow for the time v / 2, and the entropy of n coordinates is n log(2 pi e v) / 2, hence

    d/dv r = 1/2 Laplacian r - n / (2 v),    or    rho = 1 + [s dr/ds - sum_i s_i^2 d^2r/dmu_i^2] / n = 0,

with v = s^2. A nonzero rho shows what is wrong: rho = 1 everywhere is a penalty without its entropy term, and
rho = 1 - T everywhere is T times a KL. For a full covariance V = L L' (Bonnet 1964; Price 1958),

    d/dV r = 1/2 Hessian r - 1/2 V^-1,    or    R = I + L' [2 dr/dV - Hessian r] L = 0,

which is the identity times 1 or 1 - T in the same cases. Derivatives are finite differences of fourth order, so r can
be any function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from priory.core.errors import require
from priory.core.linalg import try_cholesky
from priory.penalties.equivalence.from_prior import as_float_tensors

STEP_SCALES = 0.02  # step of the differences, in scales
CALLER_NAME = "heat_residual"


def heat_residual(r: Any, mu: Any, scale: Any, *, vector: bool = False) -> Tensor:
    """Return the residual rho of the heat equation: 0 for a KL, 1 without the entropy term, 1 - T for T times a KL.

        rho = 1 + [s dr/ds - sum_i s_i^2 d^2r/dmu_i^2] / n

    Args:
        r: Penalty r(mu, scale) of Gaussians with mean mu and standard deviation scale, a function of tensors.
        mu: Means. With `vector`, shape (..., n).
        scale: Positive standard deviations. With `vector`, shape (..., 1) or (..., n).
        vector: Whether the last dimension of `mu` is one point of R^n, for which r returns one value. Default: False,
            elementwise.

    Returns:
        A float64 tensor with one residual per value of r.

    Example:
        >>> rho = heat_residual(lambda mu, s: 0.5 * (mu**2 + s**2), 0.7, 0.3)  # -log s is missing
        >>> round(rho.item(), 6)
        1.0
    """
    require(callable(r), "r", CALLER_NAME, "be a function of a location and a scale", type(r).__name__)
    loc, s = as_float_tensors(mu, scale)
    loc, s = loc.double(), s.double()
    require(bool((s > 0).all()), "scale", CALLER_NAME, "be positive", float(s.min()))
    if not vector:
        return 1 + _first_derivative(lambda t: r(loc, s * t.exp())) - _second_derivative(lambda t: r(loc + t * s, s))
    require(loc.ndim >= 1, "mu", CALLER_NAME, "have at least one dimension with `vector`", tuple(loc.shape))
    n = loc.shape[-1]
    eye = torch.eye(n, dtype=torch.float64)
    second_derivatives = sum(_second_derivative(lambda t, e=e: r(loc + t * s * e, s)) for e in eye)
    return 1 + (_first_derivative(lambda t: r(loc, s * t.exp())) - second_derivatives) / n


def heat_residual_matrix(r: Any, mu: Any, covariance: Any) -> Tensor:
    """Return the residual R of the heat equation of a full covariance: 0 for a KL, (1 - T) I for T times a KL.

        R = I + L' [2 dr/dV - Hessian r] L,    V = L L'

    Args:
        r: Penalty r(mu (..., n), covariance (..., n, n)) of Gaussians, a function of tensors.
        mu: Means, (..., n).
        covariance: Positive definite covariances, (..., n, n).

    Returns:
        A float64 tensor (..., n, n).

    Example:
        >>> import torch
        >>> def r(mu, v):  # a KL to a standard normal, up to a constant
        ...     return 0.5 * (mu.square().sum(-1) + v.diagonal(dim1=-2, dim2=-1).sum(-1) - v.logdet())
        >>> v = torch.tensor([[1.0, 0.6], [0.6, 2.0]], dtype=torch.float64)
        >>> bool(heat_residual_matrix(r, [0.3, -1.0], v).abs().max() < 1e-6)
        True

    References:
        Bonnet (1964), Transformations des signaux aleatoires a travers les systemes non lineaires sans memoire.
        Price (1958), A useful theorem for nonlinear devices having Gaussian inputs.
    """
    owner = "heat_residual_matrix"
    require(callable(r), "r", owner, "be a function of a location and a covariance", type(r).__name__)
    loc, v = (t.double() for t in as_float_tensors(mu, covariance))
    n = loc.shape[-1] if loc.ndim else 0
    square = v.ndim >= 2 and tuple(v.shape[-2:]) == (n, n)
    require(
        square,
        "covariance",
        owner,
        f"have the shape (..., {n}, {n}), since the location has {n} coordinates",
        tuple(v.shape),
    )
    factor, definite = try_cholesky(v)
    require(bool(definite.all()), "covariance", owner, "be positive definite", "a matrix that is not")
    eye = torch.eye(n, dtype=torch.float64)
    rows = torch.stack([torch.stack([_matrix_entry(r, loc, factor, a, b) for b in eye], -1) for a in eye], -2)
    return eye + rows


def _matrix_entry(r: Any, loc: Tensor, factor: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a' L' [2 dr/dV - Hessian r] L b, along V = L (1 + t (ab' + ba')) L' and by polarisation of the Hessian."""
    outer = torch.outer(a, b) + torch.outer(b, a)
    slope = _first_derivative(lambda t: r(loc, factor @ torch.matrix_exp(t * outer) @ factor.mT))
    plus, minus = (
        _second_derivative(lambda t, d=d: r(loc + t * factor @ d, factor @ factor.mT)) for d in (a + b, a - b)
    )
    return slope - (plus - minus) / 4


def _evaluate_at_steps(function: Any, steps: tuple[int, ...]) -> list[Tensor]:
    """Evaluate a function of one variable at these multiples of the step."""
    return [function(torch.tensor(STEP_SCALES * k, dtype=torch.float64)) for k in steps]


def _first_derivative(function: Any) -> Tensor:
    """Return the first derivative at 0."""
    a, b, d, e = _evaluate_at_steps(function, (-2, -1, 1, 2))
    return (a - 8 * b + 8 * d - e) / (12 * STEP_SCALES)


def _second_derivative(function: Any) -> Tensor:
    """Return the second derivative at 0."""
    a, b, c, d, e = _evaluate_at_steps(function, (-2, -1, 0, 1, 2))
    return (-a + 16 * b - 30 * c + 16 * d - e) / (12 * STEP_SCALES**2)
