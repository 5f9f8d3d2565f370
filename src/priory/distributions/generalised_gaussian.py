"""The generalised Gaussian, or exponential power, distribution: p(w) = e^{-|w/a|^p} / (2 a Gamma(1 + 1/p)).

It is the prior behind the bridge penalty sum |w|^p: Laplace at p = 1, Gaussian with variance a^2 / 2 at p = 2.
Draws use the fact that |w/a|^p has the distribution Gamma(1/p, 1).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Gamma, constraints

from priory.distributions.base import Parametrised


class GeneralisedGaussian(Parametrised):
    """Generalised Gaussian (exponential power) distribution.

        p(w) = exp(-|w/a|^p) / (2 a Gamma(1 + 1/p))

    It is a Laplace distribution for p = 1 and a Gaussian with variance a^2 / 2 for p = 2.

    Args:
        scale: Scale a > 0, a number or a tensor.
        power: Power p > 0, a number or a tensor that broadcasts with `scale`.
        validate_args: Whether to check arguments and values, as in `torch.distributions`. Default: torch's setting.

    Example:
        >>> GeneralisedGaussian(2.0, 2.0).variance
        tensor(2.)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive, "power": constraints.positive}
    support = constraints.real
    has_rsample = True
    scale: Tensor
    power: Tensor

    def __init__(self, scale: Any, power: Any, validate_args: bool | None = None) -> None:
        self._set_parameters(validate_args, scale=scale, power=power)

    @property
    def log_normaliser(self) -> Tensor:
        """Logarithm of the normalising constant, log(2 a Gamma(1 + 1/p))."""
        return math.log(2) + self.scale.log() + torch.lgamma(1 + 1 / self.power)

    def _abs_power(self, value: Tensor) -> Tensor:
        """|w/a|^p, with gradient 0 at w = 0, where autograd would give NaN for a power below 1."""
        size = (value / self.scale).abs()
        at_zero = size == 0
        return torch.where(at_zero, 0.0, torch.where(at_zero, 1.0, size) ** self.power)

    def log_prob(self, value: Tensor) -> Tensor:
        return -self._abs_power(self._validated(value)) - self.log_normaliser

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        sign = torch.randint(0, 2, shape, device=self.scale.device).to(self.scale) * 2 - 1
        concentration = (1 / self.power).expand(shape)
        gamma = Gamma(concentration, torch.ones_like(concentration), validate_args=False).rsample()
        return sign * self.scale * gamma ** (1 / self.power)

    def cdf(self, value: Tensor) -> Tensor:
        inside = torch.special.gammainc((1 / self.power).expand_as(value), self._abs_power(self._validated(value)))
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
