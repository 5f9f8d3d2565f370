"""The generalised Gaussian, or exponential power, distribution: p(w) = e^{-|w/a|^p} / (2 a Gamma(1 + 1/p)).

It is the prior behind the bridge penalty sum |w|^p: Laplace at p = 1, Gaussian with variance a^2 / 2 at p = 2.
|w/a|^p has the distribution Gamma(1/p, 1), by which it is sampled.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Gamma, constraints

from priory.distributions.base import Parametrised


class GeneralisedGaussian(Parametrised):
    """The scale is a, the power is p.

    >>> GeneralisedGaussian(2.0, 2.0).variance
    tensor(2.)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "power": constraints.positive}
    support = constraints.real
    has_rsample = True
    scale: Tensor
    power: Tensor

    def __init__(self, scale: Any, power: Any, validate_args: bool | None = None) -> None:
        self._set(validate_args, scale=scale, power=power)

    @property
    def log_normaliser(self) -> Tensor:
        """log(2 a Gamma(1 + 1/p))."""
        return math.log(2) + self.scale.log() + torch.lgamma(1 + 1 / self.power)

    def _to_the_power(self, value: Tensor) -> Tensor:
        """|w/a|^p, with the slope 0 at 0: there a power below 1 has none, and autograd would give NaN."""
        size = (value / self.scale).abs()
        there = size == 0
        return torch.where(there, 0.0, torch.where(there, 1.0, size) ** self.power)

    def log_prob(self, value: Tensor) -> Tensor:
        return -self._to_the_power(self._checked(value)) - self.log_normaliser

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        sign = torch.randint(0, 2, shape, device=self.scale.device).to(self.scale) * 2 - 1
        concentration = (1 / self.power).expand(shape)
        gamma = Gamma(concentration, torch.ones_like(concentration), validate_args=False).rsample()
        return sign * self.scale * gamma ** (1 / self.power)

    def cdf(self, value: Tensor) -> Tensor:
        inside = torch.special.gammainc((1 / self.power).expand_as(value), self._to_the_power(self._checked(value)))
        return 0.5 + 0.5 * value.sign() * inside

    def entropy(self) -> Tensor:
        return 1 / self.power + self.log_normaliser

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.scale)

    @property
    def mode(self) -> Tensor:
        return torch.zeros_like(self.scale)

    @property
    def variance(self) -> Tensor:
        return self.scale.square() * (torch.lgamma(3 / self.power) - torch.lgamma(1 / self.power)).exp()
