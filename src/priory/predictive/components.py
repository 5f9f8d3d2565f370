"""A finite mixture of Gaussians for y at each input: the prediction of a mixture of regressions or of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch

from priory.core.errors import InputError
from priory.core.streams import stream
from priory.core.tables import counted
from priory.likelihoods import Gaussian
from priory.predictive.distribution import Normals, PredictiveDistribution

if TYPE_CHECKING:
    from torch import Tensor

    from priory.likelihoods import Likelihood


@final
@dataclass(frozen=True, eq=False)
class GaussianComponents(PredictiveDistribution):
    """p(y | x) = sum_k weights_k N(y; means_k, variances_k) at one value of the parameters.

    Args:
        weights: Weights of the components at each input, (n, K).
        means: Means, (n, K).
        variances: Variances, (n, K).
        draws: Number of draws of y in `samples`. Default: 64.
        seed: Seed of `samples`. Default: 0.
        likelihood: Likelihood of one component. Default: `Gaussian()`.
        event: Shape of one target. Default: ().
    """

    weights: Tensor
    means: Tensor
    variances: Tensor
    draws: int = 64
    seed: int = 0
    likelihood: Likelihood = field(default_factory=Gaussian)
    event: torch.Size = torch.Size()

    def describe(self) -> str:
        return counted(self.means.shape[1], "component")

    @property
    def example(self) -> Tensor:
        return self.mean

    @property
    def outputs(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise InputError("The prediction of a latent-variable model has no network outputs: use its mean or samples.")

    @cached_property
    def mean(self) -> Tensor:
        return (self.weights * self.means).sum(1)

    @cached_property
    def epistemic(self) -> Tensor:
        """Zero, because the parameters are a point estimate."""
        return torch.zeros_like(self.mean)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Var[y | x], within components and between them, (n,)."""
        return (self.weights * (self.variances + (self.means - self.mean[:, None]).square())).sum(1)

    @cached_property
    def _stds(self) -> Tensor:
        return self.variances.sqrt()

    def log_prob(self, targets: Tensor) -> Tensor:
        each = torch.distributions.Normal(self.means, self._stds).log_prob(targets[:, None])
        return (each + self.weights.log()).logsumexp(1)

    def cdf(self, value: Tensor) -> Tensor:
        z = (value[..., None] - self.means) / self._stds
        return (self.weights * torch.special.ndtr(z)).sum(-1)

    @cached_property
    def samples(self) -> Tensor:
        generator = stream(self.seed, "predictive", device=self.means.device)
        chosen = torch.multinomial(self.weights, self.draws, replacement=True, generator=generator)  # (n, S)
        noise = torch.randn(chosen.shape, dtype=self.means.dtype, device=self.means.device, generator=generator)
        return (self.means.gather(1, chosen) + self._stds.gather(1, chosen) * noise).mT

    @property
    def mutual_information(self) -> Tensor:
        raise InputError(
            "The prediction of a mixture of Gaussians is over real numbers, and only labels have a mutual information."
        )

    def normals(self) -> Normals:
        return Normals(self.means.mT, self._stds.mT, self.weights.mT)
