"""The mixture, over posterior draws, of the likelihood's distribution at new inputs.

p(y | x, D) = E[p(y | x, w)] ~ (1/S) sum_s p(y | x, w_s)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch

from priory.core.streams import stream
from priory.likelihoods import Gaussian
from priory.predictive.distribution import Normals, PredictiveDistribution

if TYPE_CHECKING:
    from torch import Tensor

    from priory.likelihoods import Likelihood


@final
@dataclass(frozen=True, eq=False)
class MixtureOfDraws(PredictiveDistribution):
    """p(y | x, D) from S draws of the network's outputs and of the likelihood's learnt parameters.

    Args:
        likelihood: p(y | f).
        outputs: Outputs f at each draw, with the targets' dimensions first, (S, n, ...).
        learnt: The likelihood's learnt parameters at each draw, by name, each (S, ...).
        event: Shape of one target.
        seed: Seed of `samples`. Default: 0.
        complete: Whether these are all components of the posterior, as the members of an ensemble are, and no draws
            from it; the variance between them is then known and not estimated. Default: False.
    """

    likelihood: Likelihood
    outputs: Tensor
    learnt: dict[str, Tensor]
    event: torch.Size
    seed: int = 0
    complete: bool = False

    def of_all_components(self) -> MixtureOfDraws:
        return replace(self, complete=True)

    def describe(self) -> str:
        return f"{len(self.outputs)} draws"

    @property
    def example(self) -> Tensor:
        return self.outputs[0]

    @cached_property
    def means(self) -> Tensor:
        """E[y | x, w_s] at each draw, (S, n, *event)."""
        return self.likelihood.mean(self.outputs, self.learnt)

    @cached_property
    def mean(self) -> Tensor:
        return self.means.mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        if len(self.means) == 1:
            return torch.zeros_like(self.mean)
        return self.means.var(0, correction=0 if self.complete else 1)  # unbiased in the number of draws

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.likelihood.variance(self.outputs, self.learnt).mean(0)

    def log_prob(self, targets: Tensor) -> Tensor:
        values = self.likelihood.log_prob(self.outputs, targets, self.learnt)  # (S, n)
        return torch.logsumexp(values, 0) - math.log(len(values))

    def cdf(self, value: Tensor) -> Tensor:
        return self.likelihood.cdf(self.outputs, self.learnt, value).mean(0)

    @cached_property
    def samples(self) -> Tensor:
        generator = stream(self.seed, "predictive", device=self.outputs.device)
        return self.likelihood.draw(self.outputs, self.learnt, generator)

    @property
    def mutual_information(self) -> Tensor:
        within = self.likelihood.entropy(self.means, len(self.event)).mean(0)
        return self.likelihood.entropy(self.mean, len(self.event)) - within

    def normals(self) -> Normals | None:
        if not isinstance(self.likelihood, Gaussian):
            return None
        means, stds = self.likelihood.location_and_scale(self.outputs, self.learnt)
        return Normals(means, stds.expand_as(means))
