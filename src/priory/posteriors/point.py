"""A point: the posterior of MAP and maximum likelihood."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from priory.core.errors import InputError
from priory.posteriors.base import Posterior
from priory.posteriors.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from priory.models.target import Target
    from priory.posteriors.base import Evidence
    from priory.posteriors.status import Status

FACTOR_PREFIX = "factor."  # in files, of the factor on the prior precision of a parameter


class Point(Posterior):
    """A point, delta(w - w*). The prior of its target includes the factors that maximising the evidence found.

    Args:
        target: Target of the fit.
        w: The point in unconstrained parameters, (P,).
        buffers: The network's buffers. Default: None, those of the model.
        mode: How the point was found, if it was found as a mode; its gradient then decides the status, and not the
            history. Default: None.
    """

    kind: ClassVar[str] = "point"
    point: ClassVar[bool] = True

    def __init__(
        self, target: Target, w: Tensor, buffers: Mapping[str, Tensor] | None = None, mode: Mode | None = None
    ) -> None:
        super().__init__(target, buffers)
        self.w, self.mode = w.detach().clone(), mode

    def __repr__(self) -> str:
        return super().__repr__() if self.mode is None else f"{super().__repr__()[:-1]}; {self.mode})"

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """Return the status of the search for the mode, or else that of the history."""
        if self.mode is not None and self._given_status is not None:
            return self._given_status
        return super().compute_status(history)

    def quick_status(self) -> Status:
        return self.status if self.mode is not None else super().quick_status()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.w.expand(n, -1)

    @property
    def mean(self) -> dict[str, Tensor]:
        return self.model.layout.constrain(self.w)

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'A point'} gives no evidence: a point has no density.")

    def elbo(self, data: object = None, samples: int = 0, seed: int = 0) -> Evidence:
        """Raise an error: a point has no evidence, and no bound on it."""
        return self.evidence()

    def to_json(self) -> dict[str, Any]:
        return {} if self.mode is None else {"mode": asdict(self.mode)}

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w, **{FACTOR_PREFIX + name: factor for name, factor in self.target.prior.factors.items()}}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> Point:
        factors = {name[len(FACTOR_PREFIX) :]: t for name, t in tensors.items() if name.startswith(FACTOR_PREFIX)}
        mode = Mode(**options["mode"]) if "mode" in options else None
        return cls(target.scaled(factors), tensors["w"], buffers, mode)
