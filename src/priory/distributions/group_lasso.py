"""The prior behind the group lasso: p(w) = e^{-lambda ||w||} / Z over a group of n weights.

Z = 2 pi^{n/2} Gamma(n) / (Gamma(n/2) lambda^n). The norm of w has the distribution Gamma(n, lambda) and its direction
is uniform, so each weight has variance (n + 1) / lambda^2. The penalty is that of Yuan and Lin (2006), "Model Selection
and Estimation in Regression with Grouped Variables".
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Gamma, constraints

from priory.core.errors import is_integer, require
from priory.distributions.base import Parametrised


class GroupLasso(Parametrised):
    """Prior of the group lasso, over vectors of n weights.

        p(w) = exp(-lambda ||w||) / Z,    Z = 2 pi^{n/2} Gamma(n) / (Gamma(n/2) lambda^n)

    Args:
        rate: Rate lambda > 0, a number or a tensor with the batch shape.
        n: Number of weights per group, an integer >= 1; the event shape is (n,).
        validate_args: Whether to check arguments and values, as in `torch.distributions`. Default: torch's setting.

    Raises:
        InputError: If `n` is not an integer >= 1.

    Example:
        >>> group = GroupLasso(2.0, 3)
        >>> group.event_shape, group.variance
        (torch.Size([3]), tensor([1., 1., 1.]))

    References:
        Yuan and Lin (2006), Model selection and estimation in regression with grouped variables.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"rate": constraints.positive, "n": constraints.positive_integer}
    support = constraints.real_vector
    has_rsample = True
    rate: Tensor
    n: Tensor

    def __init__(self, rate: Any, n: Any, validate_args: bool | None = None) -> None:
        # n is a tensor when a copy is built from `arg_constraints`
        size = int(n.reshape(-1)[0]) if isinstance(n, Tensor) else n
        require(is_integer(size, 1), "n", "GroupLasso", "be an integer >= 1", n)
        self.size = int(size)
        self._set_parameters(validate_args, (self.size,), rate=rate, n=float(size))

    def expand(self, batch_shape: Any, _instance: Any = None) -> GroupLasso:
        expanded = super().expand(batch_shape, _instance)
        expanded.size = self.size
        return expanded

    @property
    def log_normaliser(self) -> Tensor:
        """Logarithm of the normalising constant Z, with the batch shape."""
        n = self.size
        constant = math.log(2) + n / 2 * math.log(math.pi) + math.lgamma(n) - math.lgamma(n / 2)
        return constant - n * self.rate.log()

    def log_prob(self, value: Tensor) -> Tensor:
        return -self.rate * torch.linalg.vector_norm(self._validated(value), dim=-1) - self.log_normaliser

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        direction = torch.randn(shape, dtype=self.rate.dtype, device=self.rate.device)
        direction = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        rate = self.rate.expand(shape[:-1])
        length = Gamma(torch.full_like(rate, self.size), rate, validate_args=False).rsample()
        return length.unsqueeze(-1) * direction

    def entropy(self) -> Tensor:
        return self.size + self.log_normaliser

    @property
    def mean(self) -> Tensor:
        return self.rate.new_zeros(self.batch_shape + self.event_shape)

    @property
    def mode(self) -> Tensor:
        return self.mean

    @property
    def variance(self) -> Tensor:
        return ((self.size + 1) / self.rate.square()).unsqueeze(-1).expand(self.batch_shape + self.event_shape)
