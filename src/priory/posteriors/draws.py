"""A set of draws of the flat vector, each as likely as the others: a posterior without a density."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.core.errors import InputError, require
from priory.posteriors.base import Evidence, Posterior, chosen
from priory.posteriors.status import UNKNOWN, Status, of_k_hat, worst

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from priory.models.target import Target


class Draws(Posterior):
    """(1/S) sum_s delta(w - w_s), in unconstrained coordinates, w (S, P).

    `k_hat` is the shape of the importance weights that the draws were resampled by, if they were: below 0.5 they are
    good, above 0.7 they are not the posterior's (see `priory.diagnostics.psis`).
    """

    kind: ClassVar[str] = "draws"

    def __init__(
        self,
        target: Target,
        w: Tensor,
        buffers: Mapping[str, Tensor] | None = None,
        k_hat: float | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        super().__init__(target, buffers)
        size = target.size
        ok = w.ndim == 2 and len(w) > 0 and w.shape[1] == size
        require(ok, "w", "Draws", f"be one draw or more of {size} coordinates", f"the shape {tuple(w.shape)}")
        require(bool(torch.isfinite(w).all()), "w", "Draws", "be finite", "a draw that is not")
        self.w, self.k_hat, self._evidence = w.detach().clone(), k_hat, evidence

    @property
    def stored_draws(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - read only
        """S."""
        return len(self.w)

    def judged(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """What the method said, and k-hat."""
        remedy = "the draws are not the posterior's, so use NUTS, or give the parameters another form"
        return worst([self._known or UNKNOWN, of_k_hat(self.k_hat, remedy)])

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n of the draws, (n, P): no one twice where there are enough, and with replacement otherwise."""
        return next(self.pieces([n], generator))

    def pieces(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """The same, so many at a time."""
        places = chosen(len(self.w), sum(sizes), generator).to(self.w.device)
        return (self.w[some] for some in places.split(sizes))

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: x.mean(0) for name, x in self.model.layout.constrain(self.w).items()}

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'A set of draws'} gives no evidence: its draws have no density.")

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w} if self.k_hat is None else {"w": self.w, "k_hat": self.w.new_tensor(self.k_hat)}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **own: Any
    ) -> Draws:
        k_hat = float(tensors["k_hat"]) if "k_hat" in tensors else None
        return cls(target, tensors["w"], buffers, k_hat)
