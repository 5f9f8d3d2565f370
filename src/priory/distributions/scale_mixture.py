"""A mixture of a wide and a narrow Gaussian, both centred at 0: p(w) = pi N(w; 0, s1^2) + (1 - pi) N(w; 0, s2^2).

This prior expects most weights to be small and a few to be large. Unlike spike and slab it has a smooth density
(Blundell, Cornebise, Kavukcuoglu and Wierstra, 2015, "Weight Uncertainty in Neural Networks", who use pi between 1/4
and 3/4, s1 between e^-2 and 1, and s2 between e^-8 and e^-6).
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
    """Mixture of two zero-mean Gaussians with different scales.

        p(w) = pi N(w; 0, s1^2) + (1 - pi) N(w; 0, s2^2)

    Args:
        weight: Probability pi in [0, 1] of the first component, a number or a tensor.
        scale1: Standard deviation s1 > 0 of the first component.
        scale2: Standard deviation s2 > 0 of the second component.
        validate_args: Whether to check arguments and values, as in `torch.distributions`. Default: torch's setting.

    Example:
        >>> ScaleMixture(0.25, 2.0, 1.0).variance
        tensor(1.7500)

    References:
        Blundell, Cornebise, Kavukcuoglu and Wierstra (2015), Weight uncertainty in neural networks.
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
        self._set_parameters(validate_args, weight=weight, scale1=scale1, scale2=scale2)

    def log_prob(self, value: Tensor) -> Tensor:
        self._validated(value)
        # where weight = 0, both components are set to the second, so that log(weight) stays finite
        nonzero = self.weight > 0
        weight = torch.where(nonzero, self.weight, 0.5)
        scale1 = torch.where(nonzero, self.scale1, self.scale2)
        log_first, log_second = weight.log() - scale1.log(), torch.log1p(-weight) - self.scale2.log()
        square = value.square()
        # log(a + b) = log a + softplus(log b - log a): one transcendental function per value
        difference = (log_second - log_first) + 0.5 * (scale1**-2 - self.scale2**-2) * square
        return log_first - 0.5 * math.log(2 * math.pi) - 0.5 * scale1**-2 * square + softplus(difference)

    @torch.no_grad()
    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        options = {"dtype": self.weight.dtype, "device": self.weight.device}
        scale = torch.where(torch.rand(shape, **options) < self.weight, self.scale1, self.scale2)
        return scale * torch.randn(shape, **options)

    def cdf(self, value: Tensor) -> Tensor:
        self._validated(value)
        first, second = (torch.special.ndtr(value / scale) for scale in (self.scale1, self.scale2))
        return self.weight * first + (1 - self.weight) * second

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.weight)

    @property
    def mode(self) -> Tensor:
        return torch.zeros_like(self.weight)

    @property
    def variance(self) -> Tensor:
        return self.weight * self.scale1.square() + (1 - self.weight) * self.scale2.square()
