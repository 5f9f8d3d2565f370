"""Predictions in the original units of the targets, for a model that was fitted to standardised targets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

from priory.core.errors import require
from priory.predictive.distribution import Normals, PredictiveDistribution

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from priory.likelihoods import Likelihood


@dataclass(frozen=True)
class Units:
    """The shift and scale by which targets were standardised: `original = shift + scale * standardised`.

    Args:
        shift: The number that was subtracted from the targets. Default: 0.0.
        scale: The positive number by which they were divided. Default: 1.0.
    """

    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        require(math.isfinite(self.shift), "shift", "Units", "be a finite number", self.shift)
        require(0 < self.scale < math.inf, "scale", "Units", "be positive and finite", self.scale)

    def restore(self, y: Tensor) -> Tensor:
        """Convert standardised targets to the original units."""
        return self.shift + self.scale * y

    def standard(self, y: Tensor) -> Tensor:
        """Standardise targets given in the original units."""
        return (y - self.shift) / self.scale


@final
@dataclass(frozen=True, eq=False)
class Rescaled(PredictiveDistribution):
    """The distribution of `shift + scale * y`, for a distribution of real numbers y.

    Args:
        likelihood: The likelihood of the standardised targets.
        event: Shape of one target.
        inner: The distribution of the standardised targets.
        units: The original units of the targets.
    """

    likelihood: Likelihood
    event: torch.Size
    inner: PredictiveDistribution
    units: Units

    def describe(self) -> str:
        return self.inner.describe()

    @property
    def example(self) -> Tensor:
        return self.inner.example

    @property
    def outputs(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The network's outputs, in standardised units, (S, n, ...)."""
        return self.inner.outputs

    @cached_property
    def mean(self) -> Tensor:
        return self.units.restore(self.inner.mean)

    @cached_property
    def epistemic(self) -> Tensor:
        return self.units.scale**2 * self.inner.epistemic

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.units.scale**2 * self.inner.aleatoric

    @cached_property
    def samples(self) -> Tensor:
        return self.units.restore(self.inner.samples)

    @property
    def mutual_information(self) -> Tensor:
        return self.inner.mutual_information

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the inner log density minus log(scale) for each number of a target."""
        return self.inner.log_prob(self.units.standard(targets)) - self.event.numel() * math.log(self.units.scale)

    def cdf(self, value: Tensor) -> Tensor:
        return self.inner.cdf(self.units.standard(value))

    def quantile(self, q: float) -> Tensor | None:
        closed = self.inner.quantile(q)
        return None if closed is None else self.units.restore(closed)

    def normals(self) -> Normals | None:
        normals = self.inner.normals()
        if normals is None:
            return None
        return Normals(self.units.restore(normals.means), self.units.scale * normals.stds, normals.weights)
