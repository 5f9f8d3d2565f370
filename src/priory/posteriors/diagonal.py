"""A factorised Gaussian over the flat vector, as mean-field variational inference leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.constraints import gaussian_mean
from priory.data import Data
from priory.errors import InputError, require
from priory.estimators.elbo import assemble
from priory.families import Diagonal
from priory.posteriors.base import Evidence, Posterior
from priory.streams import stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.target import Target

SAMPLES = 256  # draws behind log_evidence
AT_ONCE = 64  # draws evaluated together


class DiagonalGaussian(Posterior):
    """q(w) = prod_i N(w_i; m_i, s_i^2), in free coordinates."""

    kind: ClassVar[str] = "diagonal_gaussian"

    def __init__(self, target: Target, family: Diagonal, buffers: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(target, buffers)
        self.family = Diagonal(family.loc.detach().clone(), family.log_scale.detach().clone())

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        loc = self.family.loc
        noise = torch.randn(n, len(loc), generator=generator, dtype=loc.dtype, device=loc.device)
        return torch.addcmul(loc, self.family.scale, noise, out=noise)

    @property
    def mean(self) -> dict[str, Tensor]:
        loc, scale = self.family.loc, self.family.scale
        return {
            block.name: block.free(loc)
            if block.bijector.identity
            else gaussian_mean(block.bijector, block.free(loc), block.free(scale))
            for block in self.model.layout.blocks
        }

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        w = self.model.layout.unconstrain(params)
        return self.family.log_prob(w) - self.model.layout.log_det(w)

    def elbo(self, data: Any = None, samples: int = SAMPLES, seed: int = 0) -> Evidence:
        """The bound on log p(D) from many draws over every row, with its standard error.

        It costs `samples` passes over the data. Without data, those of the fit are used.
        """
        require(isinstance(samples, int) and samples >= 2, "samples", "elbo", "be a whole number from 2", samples)
        source = self.data if data is None else Data.of(data).prepared(self.model.prepare)
        if source is None:
            raise InputError("The 'data' of elbo must be given for a posterior that was loaded from a file.")
        require(
            source.num_data == self.num_data,
            "data",
            "elbo",
            f"have the {self.num_data} rows of the fit",
            source.num_data,
        )
        generator = stream(seed, "elbo", device=self.model.device)
        prior, values = self.model.prior, []
        with torch.no_grad():
            for start in range(0, samples, AT_ONCE):
                w = self.draw(min(AT_ONCE, samples - start), generator)
                others = prior.log_prob_of_others(w) if prior.others else 0.0
                log_likelihood = self.target.log_likelihood(w, source, self.buffers)
                values.append(assemble(self.target, self.family, log_likelihood, others).value.double())
        each = torch.cat(values)
        note = " with an improper prior, up to a constant" if self.model.prior.improper else ""
        if self.target.temperature != 1:
            note += f" at temperature {self.target.temperature}"
        error = float(each.std() / len(each) ** 0.5)
        return Evidence(float(each.mean()), f"lower bound (ELBO, {samples} draws{note})", error)

    def evidence(self) -> Evidence:
        return self.elbo()

    def tensors(self) -> dict[str, Tensor]:
        return {"loc": self.family.loc, "log_scale": self.family.log_scale}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> DiagonalGaussian:
        return cls(target, Diagonal(tensors["loc"], tensors["log_scale"]), buffers)
