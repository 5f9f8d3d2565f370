"""The log-uniform prior p(w) proportional to 1 / |w|, which gives every order of magnitude the same mass.

It is improper: it cannot be normalised, so it has no draws and no moments, and a divergence to it is defined only up to
a constant. It is the prior of variational dropout (Kingma, Salimans and Welling, 2015, "Variational Dropout and the
Local Reparameterization Trick").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch.distributions import constraints

from priory.distributions.base import Parametrised

if TYPE_CHECKING:
    from torch import Tensor


class LogUniform(Parametrised):
    """Improper log-uniform prior, log p(w) = -log |w| up to an arbitrary constant.

    It has no draws, mean or variance: `sample`, `rsample`, `mean` and `variance` raise NotImplementedError.

    Args:
        validate_args: Whether to check values, as in `torch.distributions`. Default: torch's setting.

    Example:
        >>> LogUniform().improper
        True

    References:
        Kingma, Salimans and Welling (2015), Variational dropout and the local reparameterization trick.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real
    improper = True

    def __init__(self, validate_args: bool | None = None) -> None:
        super().__init__(torch.Size(), validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        log = self._validated(value).abs().log()
        return -log.expand(torch.broadcast_shapes(log.shape, self.batch_shape))

    def rsample(self, sample_shape: Any = torch.Size()) -> NoReturn:
        raise NotImplementedError("A log-uniform distribution is improper: it has no draws.")

    sample = rsample

    @property
    def mean(self) -> NoReturn:
        raise NotImplementedError("A log-uniform distribution is improper: it has no mean.")

    @property
    def variance(self) -> NoReturn:
        raise NotImplementedError("A log-uniform distribution is improper: it has no variance.")
