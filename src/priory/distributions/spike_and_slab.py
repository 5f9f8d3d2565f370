"""Spike and slab: a weight is 0 with probability 1 - pi, and drawn from the slab with probability pi.

The density is with respect to the sum of Lebesgue measure and a unit point mass at 0: log p(0) = log(1 - pi), and
log p(w) = log pi + log slab(w) elsewhere (Mitchell and Beauchamp, 1988, "Bayesian Variable Selection in Linear
Regression"). Gradient-based methods almost never reach the point mass; `ScaleMixture` is the smooth counterpart.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from priory.core.errors import require
from priory.distributions.base import Parametrised


class SpikeAndSlab(Parametrised):
    """Spike-and-slab distribution: exactly 0 with probability 1 - pi, a draw from the slab with probability pi.

        log p(0) = log(1 - pi),    log p(w) = log pi + log slab(w) for w != 0

    Args:
        weight: Probability pi in [0, 1] of the slab, a number or a tensor.
        slab: A torch distribution over single real numbers.
        validate_args: Whether to check arguments and values, as in `torch.distributions`. Default: torch's setting.

    Raises:
        InputError: If `slab` is not a scalar torch distribution whose support is the real line.

    Example:
        >>> SpikeAndSlab(0.5, torch.distributions.Normal(0.0, 2.0)).variance
        tensor(2.)

    References:
        Mitchell and Beauchamp (1988), Bayesian variable selection in linear regression.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"weight": constraints.unit_interval}
    support = constraints.real
    weight: Tensor
    slab: Distribution

    def __init__(self, weight: Any, slab: Distribution, validate_args: bool | None = None) -> None:
        ok = isinstance(slab, Distribution)
        require(ok, "slab", "SpikeAndSlab", "be a torch distribution", type(slab).__name__)
        scalar_and_real = slab.event_shape == () and slab.support is constraints.real
        require(scalar_and_real, "slab", "SpikeAndSlab", "be over the real line, with scalar events", repr(slab))
        weight = weight if isinstance(weight, Tensor) else torch.as_tensor(weight, dtype=_dtype(slab))
        shape = torch.broadcast_shapes(weight.shape, slab.batch_shape)
        self.weight, self.slab = weight.expand(shape), slab.expand(shape)
        Distribution.__init__(self, shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SpikeAndSlab:
        shape = torch.Size(batch_shape)
        expanded = SpikeAndSlab(self.weight.expand(shape), self.slab.expand(shape), validate_args=False)
        expanded._validate_args = self._validate_args
        return expanded

    def log_prob(self, value: Tensor) -> Tensor:
        spike = self._validated(value) == 0
        # the slab is evaluated at 1 where value = 0, since a pole of the slab at 0 would make the gradient NaN
        elsewhere = self.weight.log() + self.slab.log_prob(torch.where(spike, 1.0, value))
        return torch.where(spike, torch.log1p(-self.weight), elsewhere)

    @torch.no_grad()
    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        slab = self.slab.sample(torch.Size(sample_shape))
        kept = torch.rand(slab.shape, dtype=slab.dtype, device=slab.device) < self.weight
        return torch.where(kept, slab, 0.0)

    @property
    def mean(self) -> Tensor:
        return self.weight * self.slab.mean

    @property
    def variance(self) -> Tensor:
        mean = self.slab.mean
        return self.weight * (self.slab.variance + (1 - self.weight) * mean.square())


def _dtype(slab: Distribution) -> torch.dtype:
    """The floating-point type of the slab's parameters."""
    floats = (t.dtype for t in vars(slab).values() if isinstance(t, Tensor) and t.is_floating_point())
    return next(floats, torch.get_default_dtype())
