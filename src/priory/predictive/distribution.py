"""The distribution of new targets given the data, p(y | x, D).

A `PredictiveDistribution` has moments, densities and draws; `Prediction` wraps one and adds methods that depend on
whether y is a real number, a count or a label. Shapes: n rows, targets (n, *event), S draws first, (S, n, ...).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from priory.likelihoods import Likelihood


class Normals(NamedTuple):
    """A mixture of K Gaussians for each entry of y, in tensors (K, n, *event); without weights they are equal."""

    means: Tensor
    stds: Tensor
    weights: Tensor | None = None


class PredictiveDistribution(ABC):
    """Base class of representations of p(y | x, D) at n rows. Subclasses are final."""

    likelihood: Likelihood  # the distribution of y given the network's output
    event: torch.Size  # shape of one target
    outputs: Tensor  # draws of the network's outputs, (S, n, ...)

    @property
    @abstractmethod
    def example(self) -> Tensor:
        """Outputs of one network, or one mean, (n, ...), which the likelihood uses to check targets."""

    @cached_property
    def mean(self) -> Tensor:
        """E[y | x, D], (n, *event); for labels the probabilities."""
        raise NotImplementedError

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance of E[y | x, w] over the posterior, (n, *event)."""
        raise NotImplementedError

    @cached_property
    def aleatoric(self) -> Tensor:
        """Posterior mean of Var[y | x, w], (n, *event)."""
        raise NotImplementedError

    @cached_property
    def samples(self) -> Tensor:
        """Draws of y, (S, n, *event)."""
        raise NotImplementedError

    @property
    @abstractmethod
    def mutual_information(self) -> Tensor:
        """Mutual information of a label and the parameters in nats, (n,)."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """log p(y | x, D), one value per row, (n,), for targets (n, *event) that were prepared and checked."""

    @abstractmethod
    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value | x, D), for values that broadcast to (n, *event)."""

    def of_all_components(self) -> PredictiveDistribution:
        """Return the distribution of a mixture whose components are all given, rather than drawn from more."""
        return self

    def quantile(self, q: float) -> Tensor | None:
        """The q-quantile, (n, *event), where it has a closed form."""
        return None

    def normals(self) -> Normals | None:
        """Return the Gaussian components, if this is a finite mixture of Gaussians; None otherwise."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Return the kind of representation for `repr`, such as "64 draws", "exact" or "3 parts"."""

    @property
    def entropy(self) -> Tensor:
        """The entropy of a label in nats, (n,); for several labels per row, summed over them."""
        return self.likelihood.entropy(self.mean, len(self.event))
