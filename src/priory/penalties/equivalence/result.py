"""The result of `prior_from_penalty`, and the settings of the inversion."""

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
    """Where a penalty is evaluated, and the tolerance of the test.

    Attributes:
        centre: Location around which the penalty is evaluated.
        width: Approximate width of the prior, or None to find it.
        corners: Points where the log prior may have corners.
        tolerance: Largest deviation from a KL in nats for a valid penalty.
    """

    centre: float
    width: float | None
    corners: tuple[float, ...]
    tolerance: float


@dataclass(frozen=True)
class Equivalence:
    """The prior that corresponds to a penalty, such that r = KL + K.

    If the penalty is not valid, the log prior is the one of the repaired penalty (entropy added, or divided by T), or
    else of `nearest`. A log prior that can't be normalised is given up to a constant, with K = -inf.

    Attributes:
        log_prior: Log density of the prior, a function of tensors or numbers. For "spike_slab", log_prior(0) is the
            logarithm of `spike`.
        constant: K.
        certificate: Verdict on the penalty and its measurements.
        family: Name of the family of posteriors.
        penalty: The penalty r.
        error: Function that estimates the absolute error of the log prior at theta, in nats.
        nearest: The Bayesian penalty nearest to r in least squares; r itself if it is valid.
        centre: Location around which the penalty was evaluated.
        unit: Width of the prior that was found or given.
        scale: The fixed scale or keep probability, None if it is learnt.
        spike: Prior probability of 0 for the family "spike_slab", otherwise None.
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
        """Return the part of the penalty that is not Bayesian: r minus the nearest Bayesian penalty.

        Args:
            *at: Arguments of the penalty, such as mu and scale, as tensors or numbers.
        """
        points = [torch.as_tensor(a, dtype=torch.float64) for a in at]
        return self.penalty(*points) - self.nearest(*points)

    def __str__(self) -> str:
        return self.certificate.verdict


def like_input(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function of float64 tensors so that it accepts numbers and tensors of any type and keeps their type."""

    def wrapped(theta: Any) -> Tensor:
        given = theta if isinstance(theta, Tensor) else torch.as_tensor(theta, dtype=torch.float64)
        value = function(given.double())
        return value.to(given.dtype) if given.is_floating_point() else value

    return wrapped


def normalised(function: Callable[[Tensor], Tensor], log_kappa: float) -> Callable[[Tensor], Tensor]:
    """Return the function A + K, or A itself if K is infinite."""
    add = -log_kappa if math.isfinite(log_kappa) else 0.0
    return like_input(lambda theta: function(theta) + add)
