"""The target of a fit in coordinates v in which the posterior has about unit scale: w = centre + root v.

Stochastic steps of a fixed size then suit a posterior of any place and width. Values are log p(w, D) itself; only the
coordinates change. The entropy of v is that of w minus log |det root|.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from priory.models.target import Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.core.data import Batch


@dataclass(frozen=True)
class Frame:
    """Coordinates v with w = centre + root v; root is a scale per coordinate (P,), or lower-triangular (P, P)."""

    centre: Tensor
    root: Tensor

    def outward(self, v: Tensor) -> Tensor:
        """Return w = centre + root v, (*B, P)."""
        return self.centre + (v * self.root if self.root.ndim == 1 else v @ self.root.mT)

    def inward(self, w: Tensor) -> Tensor:
        """Return v = root^-1 (w - centre), (P,)."""
        away = w - self.centre
        if self.root.ndim == 1:
            return away / self.root
        return torch.linalg.solve_triangular(self.root, away[:, None], upper=False)[:, 0]

    def pulled_back(self, gradient: Tensor) -> Tensor:
        """Return root' g, the gradient in v, (*B, P)."""
        return gradient * self.root if self.root.ndim == 1 else gradient @ self.root

    def log_det(self) -> float:
        """Return log |det root|."""
        diagonal = self.root if self.root.ndim == 1 else self.root.diagonal()
        return float(diagonal.log().sum())


@dataclass(frozen=True)
class FramedTarget(Target):
    """A target as a function of the coordinates v of a frame."""

    frame: Frame = None  # pyright: ignore[reportAssignmentType] - always given by `framed`

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        value, gradient = super().log_likelihood_and_grad(self.frame.outward(w), batch, buffers)
        return value, self.frame.pulled_back(gradient)

    def pointwise(self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        return super().pointwise(self.frame.outward(w), batch, buffers)

    def others_and_grad(self, w: Tensor, jacobian: bool = True) -> tuple[Tensor, Tensor]:
        value, gradient = super().others_and_grad(self.frame.outward(w), jacobian)
        return value, self.frame.pulled_back(gradient)

    def volume_and_grad(self, w: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = super().volume_and_grad(self.frame.outward(w))
        return value, self.frame.pulled_back(gradient)


def framed(target: Target, frame: Frame) -> FramedTarget:
    """Return the target in the coordinates of a frame."""
    return FramedTarget(**{f.name: getattr(target, f.name) for f in fields(Target)}, frame=frame)
