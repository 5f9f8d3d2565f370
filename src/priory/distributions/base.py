"""Base class of the distributions in this package: broadcasts the parameters and implements `expand`."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.utils import broadcast_all


class Parametrised(Distribution):
    """A distribution over scalars or vectors whose parameters, named in `arg_constraints`, have the batch shape."""

    arg_constraints: ClassVar[dict[str, Any]]  # pyright: ignore[reportIncompatibleMethodOverride]
    support: Any  # pyright: ignore[reportIncompatibleMethodOverride]

    def _set_parameters(self, validate_args: bool | None, event: tuple[int, ...] = (), **parameters: Any) -> None:
        """Broadcast the parameters, store them as attributes, and let torch validate them."""
        tensors = broadcast_all(*parameters.values())
        for name, value in zip(parameters, tensors, strict=True):
            setattr(self, name, value)
        super().__init__(tensors[0].shape, torch.Size(event), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return this distribution expanded to a larger batch shape."""
        shape = torch.Size(batch_shape)
        expanded: Any = self._get_checked_instance(type(self), _instance)
        for name, value in vars(self).items():
            if name in self.arg_constraints:
                setattr(expanded, name, value.expand(shape))
        Distribution.__init__(expanded, shape, self.event_shape, validate_args=False)
        expanded._validate_args = self._validate_args
        return expanded

    def _validated(self, value: Tensor) -> Tensor:
        """Return `value`, after checking it against the support if argument validation is on."""
        if self._validate_args:
            self._validate_sample(value)
        return value
