"""A wide and a narrow Gaussian around 0: p(w) = pi N(w; 0, s1^2) + (1 - pi) N(w; 0, s2^2).

A prior that expects most weights to be small and a few to be large, as spike and slab does, with a density everywhere
(Blundell, Cornebise, Kavukcuoglu and Wierstra, 2015, "Weight Uncertainty in Neural Networks", with pi from 1/4 to 3/4,
s1 from 1 to e^-2 and s2 from e^-6 to e^-8).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import softplus

from priory.distributions.base import Parametrised


class ScaleMixture(Parametrised):
    """The weight pi is that of scale1.

    >>> ScaleMixture(0.25, 2.0, 1.0).variance
    tensor(1.7500)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "weight": constraints.unit_interval,
        "scale1": constraints.positive,
        "scale2": constraints.positive,
    }
    support = constraints.real
    weight: Tensor
    scale1: Tensor
    scale2: Tensor

    def __init__(self, weight: Any, scale1: Any, scale2: Any, validate_args: bool | None = None) -> None:
        self._set(validate_args, weight=weight, scale1=scale1, scale2=scale2)

    def log_prob(self, value: Tensor) -> Tensor:
        self._checked(value)
        some = self.weight > 0  # where the first has none of the weight, it stands for the second
        weight = torch.where(some, self.weight, 0.5)
        scale1 = torch.where(some, self.scale1, self.scale2)
        one, two = weight.log() - scale1.log(), torch.log1p(-weight) - self.scale2.log()
        square = value.square()
        # log(a + b) = log a + softplus(log b - log a): one transcendental function a value
        apart = (two - one) + 0.5 * (scale1**-2 - self.scale2**-2) * square
        return one - 0.5 * math.log(2 * math.pi) - 0.5 * scale1**-2 * square + softplus(apart)

    @torch.no_grad()
    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        options = {"dtype": self.weight.dtype, "device": self.weight.device}
        scale = torch.where(torch.rand(shape, **options) < self.weight, self.scale1, self.scale2)
        return scale * torch.randn(shape, **options)

    def cdf(self, value: Tensor) -> Tensor:
        self._checked(value)
        below = (torch.special.ndtr(value / scale) for scale in (self.scale1, self.scale2))
        one, two = below
        return self.weight * one + (1 - self.weight) * two

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.weight)

    @property
    def mode(self) -> Tensor:
        return torch.zeros_like(self.weight)

    @property
    def variance(self) -> Tensor:
        return self.weight * self.scale1.square() + (1 - self.weight) * self.scale2.square()
