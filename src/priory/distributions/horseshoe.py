"""The horseshoe prior: w ~ N(0, l^2 s^2) with a local scale l ~ half-Cauchy(0, 1).

Integrated over l, with u = w^2 / (2 s^2),

    p(w) = e^u E1(u) / (s sqrt(2 pi^3)).

The pole at 0 shrinks small weights strongly, and the tails, which fall like 1 / w^2, leave large weights almost
unchanged. The name comes from the shape of the density of the shrinkage factor 1 / (1 + l^2) (Carvalho, Polson and
Scott, 2010, "The Horseshoe Estimator for Sparse Signals").
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.special import log_scaled_e1
from priory.distributions.base import Parametrised


class Horseshoe(Parametrised):
    """Horseshoe distribution with the local scale integrated out.

        p(w) = e^u E1(u) / (s sqrt(2 pi^3)),    u = w^2 / (2 s^2)

    Here E1 is the exponential integral. The mean is undefined (NaN) and the variance is infinite.

    Args:
        scale: Global scale s > 0, a number or a tensor.
        validate_args: Whether to check arguments and values, as in `torch.distributions`. Default: torch's setting.

    Example:
        >>> round(Horseshoe(1.0).log_prob(torch.tensor(1.0)).item(), 4)
        -2.1439

    References:
        Carvalho, Polson and Scott (2010), The horseshoe estimator for sparse signals.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"scale": constraints.positive}
    support = constraints.real
    has_rsample = True
    scale: Tensor

    def __init__(self, scale: Any, validate_args: bool | None = None) -> None:
        self._set_parameters(validate_args, scale=scale)

    def log_prob(self, value: Tensor) -> Tensor:
        u = 0.5 * (self._validated(value) / self.scale) ** 2
        # u is clamped to the smallest positive number, so that a weight initialised at 0 has a finite density
        u = u.clamp(min=torch.finfo(u.dtype).tiny)
        return log_scaled_e1(u) - self.scale.log() - 0.5 * math.log(2 * math.pi**3)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        first, second = (torch.randn(shape, dtype=self.scale.dtype, device=self.scale.device) for _ in range(2))
        local = (first / second).abs()  # half-Cauchy
        return self.scale * local * torch.randn(shape, dtype=self.scale.dtype, device=self.scale.device)

    @property
    def mean(self) -> Tensor:
        return torch.full_like(self.scale, math.nan)

    @property
    def mode(self) -> Tensor:
        return torch.zeros_like(self.scale)

    @property
    def variance(self) -> Tensor:
        return torch.full_like(self.scale, math.inf)
