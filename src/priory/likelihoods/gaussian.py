"""Gaussian noise: y ~ N(f(x), noise^2), with the noise learnt, given, one an output, or from the network."""

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
    """y ~ N(f, noise^2).

    `noise` is the standard deviation: "learn" (a positive parameter with a prior of its own, LogNormal(0, 3)
    unless `prior` is given), a number, a tensor with one value an output, or "network" (the network gives 2d
    values a row: d means, d raw scales). `outputs` > 1 learns one noise an output.

    >>> Gaussian(noise=-1.0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'noise' argument of Gaussian must be positive, one number or one an output, got -1.0.
    """

    def __init__(
        self, noise: float | str | Tensor = "learn", *, outputs: int = 1, prior: Distribution | None = None
    ) -> None:
        super().__init__(noise, "noise", outputs, prior)

    @property
    def slope(self) -> float | None:
        return None if self._source == "network" else 1.0

    @property
    def information(self) -> tuple[float, float]:
        return 1.0, 2.0

    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        location, scale = self.location_and_scale(outputs, learnt)
        z = (targets - location) / scale
        return per_datum(-0.5 * z * z - (torch.log(scale) + 0.5 * math.log(2 * math.pi)), targets)

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
