"""Gaussian noise: y ~ N(f(x), noise^2), with a noise that is learnt, given, or predicted by the network."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from priory.likelihoods.base import per_datum
from priory.likelihoods.scale import LocationScale

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.distributions import Distribution


class Gaussian(LocationScale):
    """Gaussian likelihood for regression: y ~ N(f, noise^2).

    Args:
        noise: Standard deviation of y given f. "learn" (default) for a positive parameter with a prior, a positive
            number, a tensor with one value per output, or "network" if the network gives 2d values per row: d
            locations, then d raw scales, with scale = softplus(raw).
        outputs: Number of learnt noises: 1 (default) for one shared by all outputs, or the number of outputs for one
            noise per output.
        prior: Prior of a learnt noise, a distribution over positive numbers. Default: LogNormal(0, 3).

    Raises:
        InputError: If an argument is out of range.

    Example:
        >>> Gaussian(noise=-1.0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'noise' argument of Gaussian must be positive: one number, or one per output, got -1.0.
    """

    def __init__(
        self, noise: float | str | Tensor = "learn", *, outputs: int = 1, prior: Distribution | None = None
    ) -> None:
        super().__init__(noise, "noise", outputs, prior)

    @property
    def slope(self) -> float | Tensor | None:
        if self._source == "network":
            return None
        return 1.0 if self.units is None else self.units.pair(self.units.scale)[1]

    @property
    def information(self) -> tuple[float, float]:
        return 1.0, 2.0

    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        z, log_scale = self.residuals(outputs, targets, learnt)
        return per_datum(-0.5 * z * z - (log_scale + 0.5 * math.log(2 * math.pi)), targets)

    def mean(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        return self.location_and_scale(outputs, learnt)[0]

    def variance(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        location, scale = self.location_and_scale(outputs, learnt)
        return (scale * scale).expand_as(location)

    def draw(self, outputs: Tensor, learnt: dict[str, Tensor], generator: Generator) -> Tensor:
        location, scale = self.location_and_scale(outputs, learnt)
        noise = torch.randn(location.shape, dtype=location.dtype, device=location.device, generator=generator)
        return location + scale * noise

    def cdf(self, outputs: Tensor, learnt: dict[str, Tensor], value: Tensor) -> Tensor:
        location, scale = self.location_and_scale(outputs, learnt)
        return torch.special.ndtr((value - location) / scale)
