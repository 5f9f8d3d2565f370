"""A factorised Gaussian over the flat vector, as mean-field variational inference leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.constraints import gaussian_mean
from priory.data import Data
from priory.errors import InputError, require, whole
from priory.estimators.evidence_bound import assemble
from priory.families import Diagonal
from priory.posteriors.base import Evidence, Posterior
from priory.streams import stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.target import Target

SAMPLES = 256  # draws behind log_evidence
AT_ONCE = 4096  # draws evaluated together, at most; fewer for many rows or many parameters


class DiagonalGaussian(Posterior):
    """q(w) = prod_i N(w_i; m_i, s_i^2), in free coordinates."""

    kind: ClassVar[str] = "diagonal_gaussian"

    def __init__(self, target: Target, family: Diagonal, buffers: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(target, buffers)
        self.family = Diagonal(family.loc.detach().clone(), family.log_scale.detach().clone())
        self.centre = self.family.loc

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        loc = self.family.loc
        noise = torch.randn(n, len(loc), generator=generator, dtype=loc.dtype, device=loc.device)
        return torch.addcmul(loc, self.family.scale, noise, out=noise)

    def draw_for_prediction(self, n: int, generator: torch.Generator) -> Tensor:
        """Pairs m + s eps, m - s eps: their errors cancel to first order, and half the noise is drawn."""
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

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        w = self.model.layout.unconstrain(params)
        value = self.family.log_prob(w) - self.model.layout.log_det(w)
        return torch.where(torch.isnan(w).any(-1), -torch.inf, value)  # outside of the support

    def elbo(self, data: Any = None, samples: int = SAMPLES, seed: int = 0) -> Evidence:
        """The bound on log p(D) from many draws over every row, with its standard error.

        Each draw gives log p(D|w) + log p(w) - log q(w), which hardly varies where q is close to the posterior; draws
        come in pairs m + s eps, m - s eps, whose odd errors cancel. It costs `samples` passes over the data. Without
        data, those of the fit are used.
        """
        require(whole(samples, 4), "samples", "elbo", "be a whole number from 4", samples)
        source = self.data if data is None else Data.of(data).prepared(self.model.prepare)
        if source is None:
            raise InputError("A posterior from a file has no data: call its elbo(data), with those of the fit.")
        require(
            source.num_data == self.num_data,
            "data",
            "elbo",
            f"have the {self.num_data} rows of the fit",
            source.num_data,
        )
        generator = stream(seed, "elbo", device=self.model.device)
        size, values = self.model.layout.size, []
        pairs = max(1, min(AT_ONCE, (1 << 17) // (self.num_data or 1), (1 << 24) // size) // 2)
        with torch.no_grad():
            for start in range(0, samples // 2, pairs):
                w = self.draw(min(pairs, samples // 2 - start), generator)
                w = torch.cat([w, 2 * self.family.loc - w])
                log_likelihood = self.target.log_likelihood(w, source, self.buffers)
                cross, entropy = -self.target.log_prior(w), -self.family.log_prob(w)
                volume = self.model.layout.log_det(w)
                each = assemble(self.target, log_likelihood, cross, entropy, volume).value
                values.append(each.double().view(2, -1).mean(0))
        each = torch.cat(values)  # a value a pair
        error, draws = float(each.std() / len(each) ** 0.5), f"{2 * len(each)} draws"
        kind = f"lower bound on log p(D) (ELBO, {draws})"
        if self.model.prior.improper:
            kind = f"ELBO with an improper prior, up to a constant ({draws})"
        if self.target.temperature != 1:
            kind = f"tempered ELBO, T = {self.target.temperature}, no bound on log p(D) ({draws})"
        return Evidence(float(each.mean()), kind, error)

    def evidence(self) -> Evidence:
        return self.elbo()

    def tensors(self) -> dict[str, Tensor]:
        return {"loc": self.family.loc, "log_scale": self.family.log_scale}

    @classmethod
    def of_tensors(
        cls, target: Target, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> DiagonalGaussian:
        return cls(target, Diagonal(tensors["loc"], tensors["log_scale"]), buffers)
