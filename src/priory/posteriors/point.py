"""A point: all belief on one vector, as MAP and maximum likelihood leave it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from priory.errors import InputError
from priory.posteriors.base import Posterior

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from priory.posteriors.base import Evidence
    from priory.target import Target


class Point(Posterior):
    """delta(w - w*)."""

    kind: ClassVar[str] = "point"
    point: ClassVar[bool] = True

    def __init__(self, target: Target, w: Tensor, buffers: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(target, buffers)
        self.w = w.detach().clone()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.w.expand(n, -1)

    @property
    def mean(self) -> dict[str, Tensor]:
        return self.model.layout.constrain(self.w)

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'A point'} gives no evidence: a point has no volume.")

    def elbo(self, data: object = None, samples: int = 0, seed: int = 0) -> Evidence:
        """None: see `evidence`."""
        return self.evidence()

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> Point:
        return cls(target, tensors["w"], buffers)
