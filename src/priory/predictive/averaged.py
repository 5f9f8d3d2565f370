"""The average of several predictions: p(y | x, D) = sum_k a_k p_k(y | x, D), with weights a_k that add up to one.

Members of an ensemble, and posteriors that were stacked or averaged by their evidence, predict like this. Each part
stays what it is (a mixture over draws, a Gaussian in closed form), and everything here is of their mixture: the
variance is what lies within the parts and between their means,

    epistemic = sum_k a_k (epistemic_k + (mean_k - mean)^2),    aleatoric = sum_k a_k aleatoric_k
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import require
from priory.predictive.prediction import Prediction

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, repr=False, kw_only=True)
class Averaged(Prediction):
    """What several posteriors know of y at the same n inputs. `Averaged.of` makes one."""

    outputs: Tensor = field(init=False, default=property(lambda self: self._outputs))  # pyright: ignore
    parts: tuple[Prediction, ...]
    weights: Tensor  # (K,), adding up to one

    @classmethod
    def of(cls, parts: Sequence[Prediction], weights: Tensor) -> Averaged:
        """The average of predictions at the same inputs."""
        require(len(parts) > 0, "parts", "Averaged", "be one prediction or more", "none")
        first = parts[0]
        same = all(len(p.example) == len(first.example) and p.event == first.event for p in parts)
        require(same, "parts", "Averaged", "be of the same inputs and targets", [tuple(p.example.shape) for p in parts])
        shapes = [tuple(p.mean.shape) for p in parts]
        alike = "predict means of one shape, as Bernoulli and Categorical don't"
        require(len(set(shapes)) == 1, "parts", "Averaged", alike, shapes)
        widest = max((p.example.dtype for p in parts), key=lambda dtype: torch.finfo(dtype).bits)
        given = {"parts": tuple(parts), "weights": weights.to(first.example.device, widest)}
        return cls(first.likelihood, {}, first.event, first.prepare, first.seed, **given)

    def __repr__(self) -> str:
        return f"Averaged({len(self.example)} rows, {len(self.parts)} parts, {self.likelihood!r})"

    @property
    def example(self) -> Tensor:
        """The outputs of one network of the first part, (n, ...)."""
        return self.parts[0].example

    @cached_property
    def _outputs(self) -> Tensor:
        """The outputs behind every part, one after the other, (S, n, ...)."""
        return torch.cat([part.outputs for part in self.parts])

    def _mean_of(self, values: list[Tensor]) -> Tensor:
        return torch.tensordot(self.weights, torch.stack([value.to(self.weights) for value in values]), 1)

    @cached_property
    def mean(self) -> Tensor:
        """E[y | x, D]; for classes the probabilities."""
        return self._mean_of([part.mean for part in self.parts])

    @cached_property
    def epistemic(self) -> Tensor:
        """The part of the variance that more data would remove: within the parts and between them."""
        return self._mean_of([part.epistemic + (part.mean - self.mean).square() for part in self.parts])

    @cached_property
    def aleatoric(self) -> Tensor:
        """The part that more data would not remove."""
        return self._mean_of([part.aleatoric for part in self.parts])

    def _log_prob(self, targets: Tensor) -> Tensor:
        each = torch.stack([part._log_prob(targets).to(self.weights) for part in self.parts])  # (K, n)
        return torch.logsumexp(each + self.weights.log()[:, None], 0)

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value | x, D), for values that broadcast to (n, *event)."""
        return self._mean_of([part.cdf(value) for part in self.parts])

    @cached_property
    def samples(self) -> Tensor:
        """Draws of y, (S, n, *event), from each part as many as its weight says."""
        each = [part.samples for part in self.parts]
        wanted = sum(len(draws) for draws in each)
        at = (torch.arange(wanted, dtype=torch.float64) + 0.5) / wanted
        part = torch.searchsorted(self.weights.double().cumsum(0).cpu(), at).clamp_max(len(each) - 1)
        counts = torch.bincount(part, minlength=len(each)).tolist()
        taken = [draws[torch.arange(n) % len(draws)] for draws, n in zip(each, counts, strict=True)]
        return torch.cat(taken)

    @property
    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p]: how much of the entropy is disagreement, between parts and within them, in nats."""
        self._labels_only("mutual_information")
        within = [part.entropy - part.mutual_information for part in self.parts]
        return self.entropy - self._mean_of(within)
