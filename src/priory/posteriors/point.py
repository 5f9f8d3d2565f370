"""A point: all belief on one vector, as MAP and maximum likelihood leave it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from priory.core.errors import InputError
from priory.posteriors.base import Posterior

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from priory.models.target import Target
    from priory.posteriors.base import Evidence

FACTOR = "factor."  # what a file puts before the name of a parameter whose prior was scaled


class Point(Posterior):
    """delta(w - w*). Its target has the prior that the mode was found under, factors of the evidence included."""

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
        return {"w": self.w, **{FACTOR + name: factor for name, factor in self.target.prior.factors.items()}}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> Point:
        factors = {name[len(FACTOR) :]: t for name, t in tensors.items() if name.startswith(FACTOR)}
        return cls(target.scaled(factors), tensors["w"], buffers)
