"""The average of several predictions: p(y | x, D) = sum_k a_k p_k(y | x, D), with weights a_k that add up to one.

This is the prediction of an ensemble, and of posteriors that were stacked or averaged by their evidence. Each part p_k
has its own representation (a mixture over draws, a Gaussian in closed form). The variance is the mean variance within
the parts plus the variance between their means:

    epistemic = sum_k a_k (epistemic_k + (mean_k - mean)^2),    aleatoric = sum_k a_k aleatoric_k
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch

from priory.predictive.distribution import Normals, PredictiveDistribution

if TYPE_CHECKING:
    from torch import Tensor

    from priory.likelihoods import Likelihood


@final
@dataclass(frozen=True, eq=False)
class Averaged(PredictiveDistribution):
    """The weighted average of distributions of y at the same n inputs. `Prediction.average` returns one.

    Args:
        likelihood: The likelihood of the first part.
        event: Shape of one target.
        parts: The distributions, all of targets of the same shape.
        weights: Their weights, (K,), which sum to one.
    """

    likelihood: Likelihood
    event: torch.Size
    parts: tuple[PredictiveDistribution, ...]
    weights: Tensor

    def of_all_components(self) -> Averaged:
        return replace(self, parts=tuple(part.of_all_components() for part in self.parts))

    def describe(self) -> str:
        return f"{len(self.parts)} parts"

    @property
    def example(self) -> Tensor:
        return self.parts[0].example

    @cached_property
    def outputs(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Draws of the network's outputs of all parts, concatenated, (S, n, ...)."""
        return torch.cat([part.outputs for part in self.parts])

    def _average(self, values: list[Tensor]) -> Tensor:
        return torch.tensordot(self.weights, torch.stack([value.to(self.weights) for value in values]), 1)

    @cached_property
    def mean(self) -> Tensor:
        return self._average([part.mean for part in self.parts])

    @cached_property
    def epistemic(self) -> Tensor:
        return self._average([part.epistemic + (part.mean - self.mean).square() for part in self.parts])

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._average([part.aleatoric for part in self.parts])

    def log_prob(self, targets: Tensor) -> Tensor:
        each = torch.stack([part.log_prob(targets).to(self.weights) for part in self.parts])  # (K, n)
        return torch.logsumexp(each + self.weights.log()[:, None], 0)

    def cdf(self, value: Tensor) -> Tensor:
        return self._average([part.cdf(value) for part in self.parts])

    @cached_property
    def samples(self) -> Tensor:
        """Draws of y, (S, n, *event); the number of draws from each part is proportional to its weight."""
        samples = [part.samples for part in self.parts]
        num_draws = sum(map(len, samples))
        quantiles = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
        part_of_draw = torch.searchsorted(self.weights.double().cumsum(0).cpu(), quantiles).clamp_max(len(samples) - 1)
        counts = torch.bincount(part_of_draw, minlength=len(samples)).tolist()
        return torch.cat([draws[torch.arange(n) % len(draws)] for draws, n in zip(samples, counts, strict=True)])

    @property
    def mutual_information(self) -> Tensor:
        within = [part.entropy - part.mutual_information for part in self.parts]
        return self.entropy - self._average(within)

    def normals(self) -> Normals | None:
        normals = [normals for part in self.parts if (normals := part.normals()) is not None]
        if len(normals) < len(self.parts):
            return None
        weights = [torch.full_like(n.means, 1 / len(n.means)) if n.weights is None else n.weights for n in normals]
        shares = torch.cat([a * w for a, w in zip(self.weights, weights, strict=True)])
        return Normals(torch.cat([n.means for n in normals]), torch.cat([n.stds for n in normals]), shares)
