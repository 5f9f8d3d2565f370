"""A set of equally weighted draws of the flat vector: a posterior without a density."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.core.errors import InputError, require
from priory.posteriors.base import Evidence, Posterior, choose_indices
from priory.posteriors.status import UNKNOWN, Status, of_history, of_k_hat, worst

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from priory.models.target import Target


class Draws(Posterior):
    """A set of draws, (1/S) sum_s delta(w - w_s).

    Args:
        target: Target of the fit.
        w: Draws in unconstrained parameters, (S, P).
        buffers: The network's buffers. Default: None, those of the model.
        k_hat: Pareto k-hat of the importance weights by which the draws were resampled, if they were. Below 0.5 the
            draws are good; above 0.7 they don't represent the posterior (see `priory.diagnostics.psis`). Default: None.
        evidence: Estimate of the evidence, if the method has one. Default: None.
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
        """Number of draws, S."""
        return len(self.w)

    @property
    def stored_w(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] - read only
        """All draws, (S, P)."""
        return self.w

    def compute_status(self, history: Mapping[str, Tensor] | None = None) -> Status:
        """Return the status from k-hat, and from the method or from the history."""
        remedy = "the draws don't represent the posterior, so use NUTS, or reparameterise the model"
        found = of_history(self.history if history is None else history) if self.k_hat is None else UNKNOWN
        return worst([self._given_status or found, of_k_hat(self.k_hat, remedy)])

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return n of the draws, (n, P): without replacement if there are enough, otherwise with replacement."""
        return next(self.draw_blocks([n], generator))

    def draw_blocks(self, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
        """Yield draws for one prediction in blocks of the given sizes, without replacement if there are enough."""
        indices = choose_indices(len(self.w), sum(sizes), generator).to(self.w.device)
        return (self.w[block] for block in indices.split(sizes))

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: x.mean(0) for name, x in self.model.layout.constrain(self.w).items()}

    def evidence(self) -> Evidence:
        raise InputError(f"{self.method or 'A set of draws'} gives no evidence: its draws have no density.")

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w} if self.k_hat is None else {"w": self.w, "k_hat": self.w.new_tensor(self.k_hat)}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> Draws:
        k_hat = float(tensors["k_hat"]) if "k_hat" in tensors else None
        return cls(target, tensors["w"], buffers, k_hat)
