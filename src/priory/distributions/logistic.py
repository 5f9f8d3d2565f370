"""The logistic distribution: log p(w) = log sigmoid(z) + log sigmoid(-z) - log s, with z = (w - m) / s."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid

from priory.distributions.base import Parametrised


class Logistic(Parametrised):
    """Logistic distribution: bell-shaped and smooth, with the exponential tails of a Laplace distribution.

        log p(w) = log sigmoid(z) + log sigmoid(-z) - log s,    z = (w - m) / s

    Args:
        loc: Location m, which is the mean and the mode; a number or a tensor.
        scale: Scale s > 0, a number or a tensor; the standard deviation is pi s / sqrt(3).
        validate_args: Whether to check arguments and values, as in `torch.distributions`. Default: torch's setting.

    Example:
        >>> round(Logistic(0.0, 1.0).log_prob(torch.tensor(0.0)).item(), 4)  # the density is 1 / 4 at the centre
        -1.3863
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"loc": constraints.real, "scale": constraints.positive}
    support = constraints.real
    has_rsample = True
    loc: Tensor
    scale: Tensor

    def __init__(self, loc: Any, scale: Any, validate_args: bool | None = None) -> None:
        self._set_parameters(validate_args, loc=loc, scale=scale)

    def log_prob(self, value: Tensor) -> Tensor:
        z = (self._validated(value) - self.loc) / self.scale
        return logsigmoid(z) + logsigmoid(-z) - self.scale.log()

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        u = torch.rand(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.icdf(u.clamp(min=torch.finfo(u.dtype).tiny))

    def cdf(self, value: Tensor) -> Tensor:
        return torch.sigmoid((self._validated(value) - self.loc) / self.scale)

    def icdf(self, value: Tensor) -> Tensor:
        return self.loc + self.scale * (value.log() - torch.log1p(-value))

    def entropy(self) -> Tensor:
        return self.scale.log() + 2

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale.square() * (math.pi**2 / 3)
