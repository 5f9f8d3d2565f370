"""What `prior_from_penalty` gives back, and what it was asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from priory.penalties.equivalence.certificate import Certificate
    from priory.penalties.equivalence.inputs import Function


@dataclass(frozen=True)
class InversionSettings:
    """Where a penalty is looked at, and how far from a KL it may be."""

    centre: float
    width: float | None
    corners: tuple[float, ...]
    tolerance: float


@dataclass(frozen=True)
class Equivalence:
    """The prior behind a penalty: its log density, the constant K with r = KL + K, and the certificate.

    If the penalty is not valid, the log prior is that of the mended one (its entropy added, its T divided out), or of
    `nearest`, the Bayesian penalty nearest to r; `remainder(mu, scale)` is r minus that. A log prior that can't be
    normalised is given up to a constant, and K is -inf. `error(theta)` estimates how far the log prior is off.
    `spike` is the prior's probability of 0 for the family "spike_slab"; log_prior(0) is then its logarithm.
    """

    log_prior: Callable[[Tensor], Tensor]
    constant: float
    certificate: Certificate
    family: str
    penalty: Function = field(repr=False)
    error: Callable[[Tensor], Tensor] = field(repr=False)
    nearest: Function = field(repr=False)
    centre: float = 0.0
    unit: float = 1.0
    scale: float | None = None
    spike: float | None = None

    def remainder(self, *at: Any) -> Tensor:
        """The part of the penalty that is not Bayesian: r minus the nearest penalty that is."""
        points = [torch.as_tensor(a, dtype=torch.float64) for a in at]
        return self.penalty(*points) - self.nearest(*points)

    def __str__(self) -> str:
        return self.certificate.verdict


def like_input(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of float64 tensors as one of numbers and of tensors of any type, in whose type it answers."""

    def of(theta: Any) -> Tensor:
        given = theta if isinstance(theta, Tensor) else torch.as_tensor(theta, dtype=torch.float64)
        value = function(given.double())
        return value.to(given.dtype) if given.is_floating_point() else value

    return of


def normalised(function: Callable[[Tensor], Tensor], log_kappa: float) -> Callable[[Tensor], Tensor]:
    """A + K, or A itself where K is infinite."""
    add = -log_kappa if math.isfinite(log_kappa) else 0.0
    return like_input(lambda theta: function(theta) + add)
