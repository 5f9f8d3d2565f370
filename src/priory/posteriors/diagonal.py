"""A factorised Gaussian over the flat vector: the posterior of mean-field variational inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.constraints import gaussian_mean
from priory.families import DiagonalFamily
from priory.families.diagonal import DiagonalForm
from priory.posteriors.variational import Variational

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.models.target import Target


class DiagonalGaussian(Variational):
    """A factorised Gaussian, q(w) = prod_i N(w_i; m_i, s_i^2), in unconstrained parameters.

    Args:
        target: Target of the fit.
        family: Means and log standard deviations.
        buffers: The network's buffers. Default: None, those of the model.
    """

    kind: ClassVar[str] = "diagonal_gaussian"
    family: DiagonalFamily  # pyright: ignore[reportIncompatibleVariableOverride] - a posterior's family never changes

    def __init__(self, target: Target, family: DiagonalFamily, buffers: Mapping[str, Tensor] | None = None) -> None:
        theta = torch.cat([family.loc, family.log_scale], -1)
        super().__init__(target, DiagonalForm(target.model.layout.size), theta, buffers)
        self.centre = self.family.loc

    @classmethod
    def of(cls, posterior: Variational) -> DiagonalGaussian:
        """Return a variational posterior whose q is a factorised Gaussian as this class, with what is known of it."""
        assert isinstance(posterior.family, DiagonalFamily)
        found = cls(posterior.target, posterior.family, posterior.buffers)
        found._given_status, found.warned = posterior._given_status, posterior.warned
        found.restore_results(posterior.results())
        return found

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        loc = self.family.loc
        noise = torch.randn(n, len(loc), generator=generator, dtype=loc.dtype, device=loc.device)
        return torch.addcmul(loc, self.family.scale, noise, out=noise)

    def draw_for_prediction(self, n: int, generator: torch.Generator) -> Tensor:
        """Antithetic pairs m + s eps, m - s eps: their errors cancel to first order, with half the noise."""
        loc, scale, half = self.family.loc, self.family.scale, (n + 1) // 2
        w = loc.new_empty(n, len(loc))
        noise = w[:half].normal_(generator=generator)
        torch.addcmul(loc, scale, noise[: n - half], value=-1, out=w[half:])
        torch.addcmul(loc, scale, noise, out=noise)
        return w

    @property
    def mean(self) -> dict[str, Tensor]:
        loc, scale = self.family.loc, self.family.scale
        return {
            block.name: block.free(loc)
            if block.bijector.identity
            else gaussian_mean(block.bijector, block.free(loc), block.free(scale))
            for block in self.model.layout.blocks
        }

    def to_json(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {"loc": self.family.loc, "log_scale": self.family.log_scale}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], **options: Any
    ) -> DiagonalGaussian:
        return cls(target, DiagonalFamily(tensors["loc"], tensors["log_scale"]), buffers)
