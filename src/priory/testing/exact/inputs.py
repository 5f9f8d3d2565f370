"""Helpers of the exact problems: checks of inputs, synthetic rows, and the optimum of mean-field inference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from priory.core.errors import require

if TYPE_CHECKING:
    from priory.testing.exact.regression import LinearRegression, NormalGamma

LOG_2PI = math.log(2 * math.pi)


class Optimum(NamedTuple):
    """The factorised Gaussian with the highest ELBO.

    Attributes:
        loc: Its mean in unconstrained coordinates.
        scale: Its standard deviations in unconstrained coordinates.
        elbo: Its ELBO in nats.
    """

    loc: Tensor
    scale: Tensor
    elbo: float


def ones(n: int) -> Tensor:
    """Return n ones in float64."""
    return torch.ones(n, dtype=torch.float64)


def log_beta(a: float, b: float) -> float:
    """Return the logarithm of the beta function."""
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def log_normal(x: Tensor, loc: Any, scale: Any) -> Tensor:
    """Return the log density of a Gaussian."""
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    return -0.5 * ((x - loc) / scale) ** 2 - log_scale - 0.5 * LOG_2PI


def correlated_rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw correlated inputs, for which a factorised posterior has a gap to the evidence, and targets."""
    own, shared, noise = (torch.randn(20, k, generator=generator, dtype=torch.float64) for k in (3, 1, 1))
    X = 0.6 * own + 0.8 * shared
    return X, X @ torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64) + 0.5 * noise.squeeze(-1)


def checked_rows(value: Any, name: str, owner: str, ndim: int) -> Tensor:
    """Convert to float64, or raise an error that names the argument."""
    rows = torch.as_tensor(value, dtype=torch.float64)
    must = "hold a row or more of finite numbers" if ndim == 2 else "hold one or more finite numbers"
    ok = rows.ndim == ndim and rows.numel() > 0 and bool(rows.isfinite().all())
    require(ok, name, owner, must, f"the shape {tuple(rows.shape)}" if rows.ndim != ndim else value)
    return rows


def check_design_and_targets(problem: LinearRegression | NormalGamma) -> None:
    """Convert X and y to float64, and raise an error if their numbers of rows differ."""
    owner = type(problem).__name__
    X, y = checked_rows(problem.X, "X", owner, 2), checked_rows(problem.y, "y", owner, 1)
    require(len(X) == len(y), "y", owner, f"have a value for each of the {len(X)} rows of X", len(y))
    object.__setattr__(problem, "X", X)
    object.__setattr__(problem, "y", y)


def check_positive(problem: object, *names: str) -> None:
    """Raise an error for an attribute that isn't positive."""
    for name in names:
        value = getattr(problem, name)
        require(0 < value < math.inf, name, type(problem).__name__, "be a positive number", value)
