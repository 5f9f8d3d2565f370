"""What the distributions here share: parameters that broadcast, and a copy with another batch shape."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.utils import broadcast_all


class Parametrised(Distribution):
    """A distribution over numbers or vectors whose parameters, named in `arg_constraints`, have the batch's shape."""

    arg_constraints: ClassVar[dict[str, Any]]  # pyright: ignore[reportIncompatibleMethodOverride]
    support: Any  # pyright: ignore[reportIncompatibleMethodOverride]

    def _set(self, validate_args: bool | None, event: tuple[int, ...] = (), **parameters: Any) -> None:
        """Broadcast the parameters, keep them under their names, and let torch check them."""
        tensors = broadcast_all(*parameters.values())
        for name, value in zip(parameters, tensors, strict=True):
            setattr(self, name, value)
        super().__init__(tensors[0].shape, torch.Size(event), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """The same distribution over a larger batch."""
        shape = torch.Size(batch_shape)
        wider: Any = self._get_checked_instance(type(self), _instance)
        for name, value in vars(self).items():
            if name in self.arg_constraints:
                setattr(wider, name, value.expand(shape))
        Distribution.__init__(wider, shape, self.event_shape, validate_args=False)
        wider._validate_args = self._validate_args
        return wider

    def _checked(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return value
