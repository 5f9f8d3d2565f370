"""Prediction: the distribution of targets y at new inputs under a posterior.

`Prediction` is abstract; there is one final class per type of y:

    RegressionPrediction   real numbers: moments, quantiles, intervals
    CountPrediction        integers: the same, with quantiles that are integers
    ClassPrediction        labels: probabilities, entropy, mutual information

Each wraps a `PredictiveDistribution`, which represents p(y | x, D): a mixture over draws, a linearised network, an
average of other predictions, or the components of a latent-variable model. The variance of y is the variance of the
means (epistemic, which more data would reduce) plus the mean of the variances (aleatoric, which they would not).
Quantiles are computed from the distribution function of y, not from a Gaussian fitted to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from priory.core.data import check_finite, tensor_of
from priory.core.errors import InputError, require
from priory.core.tables import counted
from priory.network.layer_chain import SharedInputs
from priory.network.skeleton import MEMORY_LIMIT
from priory.predictive.averaged import Averaged
from priory.predictive.draws import MixtureOfDraws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from priory.core.data import Batch
    from priory.likelihoods import Likelihood
    from priory.models.model import Buffers, Model
    from priory.predictive.distribution import PredictiveDistribution

MAX_BISECTIONS = 60  # of a bracket around a quantile
MAX_DOUBLINGS = 200  # of the step that widens a bracket


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(ABC):
    """The predictive distribution of y at n new inputs. `posterior.predict` returns one of the final subclasses.

    Args:
        distribution: p(y | x, D) at each input.
        prepare: Turns the user's targets into tensors of the model's dtype and device.

    Example:
        >>> prediction = posterior.predict(X_new)  # doctest: +SKIP
        >>> prediction.mean, prediction.std, prediction.interval(0.95)  # doctest: +SKIP
    """

    distribution: PredictiveDistribution
    prepare: Callable[[Tensor], Tensor]

    classes: ClassVar[bool]  # whether y is a label

    @staticmethod
    def of(distribution: PredictiveDistribution, prepare: Callable[[Tensor], Tensor]) -> Prediction:
        """Wrap a distribution in the final class for its likelihood."""
        likelihood = distribution.likelihood
        kind = (
            ClassPrediction if likelihood.classes else CountPrediction if likelihood.discrete else RegressionPrediction
        )
        return kind(distribution, prepare)

    @staticmethod
    def of_draws(
        likelihood: Likelihood,
        outputs: Tensor,
        learnt: dict[str, Tensor],
        event: torch.Size,
        prepare: Callable[[Tensor], Tensor],
        seed: int = 0,
    ) -> Prediction:
        """Return the mixture over draws of a network's outputs, (S, n, ...); for the arguments see `MixtureOfDraws`."""
        return Prediction.of(MixtureOfDraws(likelihood, outputs, learnt, event, seed), prepare)

    def of_all_components(self) -> Prediction:
        """Return the prediction of a mixture whose components are all given, as the members of an ensemble are."""
        return replace(self, distribution=self.distribution.of_all_components())

    @staticmethod
    def average(parts: Sequence[Prediction], weights: Tensor) -> Prediction:
        """Return the weighted average of predictions at the same inputs.

        Args:
            parts: The predictions.
            weights: Their weights, (K,), which sum to one.

        Returns:
            The average, as a prediction.
        """
        require(len(parts) > 0, "parts", "Averaged", "be one prediction or more", "none")
        distributions, first = [part.distribution for part in parts], parts[0]
        same = all(len(p.example) == len(distributions[0].example) and p.event == first.event for p in distributions)
        require(
            same,
            "parts",
            "Averaged",
            "be of the same inputs and targets",
            [tuple(p.example.shape) for p in distributions],
        )
        shapes = [tuple(p.mean.shape) for p in distributions]
        alike = "predict means of one shape, which Bernoulli and Categorical don't"
        require(len(set(shapes)) == 1, "parts", "Averaged", alike, shapes)
        widest = max((p.example.dtype for p in distributions), key=lambda dtype: torch.finfo(dtype).bits)
        weights = weights.to(distributions[0].example.device, widest)
        return Prediction.of(Averaged(first.likelihood, first.event, tuple(distributions), weights), first.prepare)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({counted(len(self), 'row')}, {self.distribution.describe()}, {self.likelihood!r})"
        )

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.distribution.example)

    @property
    def likelihood(self) -> Likelihood:
        """The distribution of y given the network's output."""
        return self.distribution.likelihood

    @property
    def event(self) -> torch.Size:
        """The shape of one target."""
        return self.distribution.event

    @property
    def outputs(self) -> Tensor:
        """Draws of the network's outputs, (S, n, ...)."""
        return self.distribution.outputs

    # Moments.

    @property
    def mean(self) -> Tensor:
        """E[y | x, D], (n, *event); for labels the probabilities."""
        return self.distribution.mean

    @property
    def epistemic(self) -> Tensor:
        """Variance over w of E[y | x, w]: the part of the variance that more data would remove."""
        return self.distribution.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """Mean over w of Var[y | x, w]: the part of the variance that more data would not remove."""
        return self.distribution.aleatoric

    @cached_property
    def variance(self) -> Tensor:
        """Var[y | x, D] = epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """The square root of the total variance."""
        return self.variance.sqrt()

    # The distribution of y.

    @property
    def samples(self) -> Tensor:
        """Draws of y, (S, n, *event)."""
        return self.distribution.samples

    def log_prob(self, y: Any) -> Tensor:
        """Return log p(y | x, D), one value per row, (n,).

        Args:
            y: Targets, (n, *event); (n, 1) is accepted for (n,).

        Returns:
            The log predictive density or mass of each row, in nats.

        Raises:
            InputError: If the targets aren't finite, have another shape or can't come from the likelihood.
        """
        given = tensor_of(y, "The 'y' argument of log_prob")
        check_finite(given, "targets")
        targets = self.prepare(given)
        if self.event == () and targets.ndim == 2 and targets.shape[1] == 1:
            targets = targets.squeeze(1)
        shape = (len(self), *self.event)
        fits = tuple(targets.shape) == shape
        require(fits, "y", "log_prob", f"have the shape {shape}", f"the shape {tuple(targets.shape)}")
        self.likelihood.check(self.distribution.example, targets)
        return self.distribution.log_prob(targets)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(y <= value | x, D), for values that broadcast to (n, *event)."""
        return self.distribution.cdf(value)

    @abstractmethod
    def quantile(self, q: float) -> Tensor:
        """Return the value below which y lies with probability q.

        Args:
            q: A number between 0 and 1.

        Returns:
            The quantile of each row, (n, *event).

        Raises:
            InputError: If q isn't between 0 and 1, or y is a label.
        """

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval that contains y with probability `level`.

        Args:
            level: A number between 0 and 1. Default: 0.95.

        Returns:
            The lower and the upper end, each (n, *event).
        """
        ok = isinstance(level, Real) and 0 < level < 1
        require(ok, "level", "interval", "lie between 0 and 1", level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    # Labels.

    @property
    @abstractmethod
    def probs(self) -> Tensor:
        """p(y | x, D): one column per class, or for Bernoulli the probability of 1."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy of y in nats, (n,); for several labels per row, summed over them."""

    @property
    @abstractmethod
    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p]: the part of the entropy that is disagreement between draws, in nats, (n,)."""


class NumberPrediction(Prediction):
    """A prediction of real numbers or counts: it has quantiles, and no probabilities of labels."""

    classes: ClassVar[bool] = False

    def quantile(self, q: float) -> Tensor:
        """Return the value below which y lies with probability q, (n, *event)."""
        require(isinstance(q, Real) and 0 < q < 1, "q", "quantile", "lie between 0 and 1", q)
        closed = self.distribution.quantile(q)
        if closed is not None:
            return closed
        low, high = self._bracket(q)
        for _ in range(MAX_BISECTIONS):
            middle = self._between(low, high)
            below = self.cdf(middle) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    @abstractmethod
    def _between(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the next value to try in the interval from low to high."""

    @abstractmethod
    def _bracket(self, q: float) -> tuple[Tensor, Tensor]:
        """Return a value below and a value above the q-quantile."""

    def _centre_and_spread(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, or 0 and 1 where they aren't finite."""
        centre = self.mean if bool(torch.isfinite(self.mean).all()) else torch.zeros_like(self.mean)
        return centre, self.std if bool(torch.isfinite(self.std).all()) else torch.ones_like(centre)

    @property
    def probs(self) -> Tensor:
        raise self._no_labels("probs")

    @property
    def entropy(self) -> Tensor:
        raise self._no_labels("entropy")

    @property
    def mutual_information(self) -> Tensor:
        raise self._no_labels("mutual_information")

    def _no_labels(self, name: str) -> InputError:
        return InputError(f"The '{name}' of a prediction needs labels: the targets of {self.likelihood!r} are numbers.")


@final
class RegressionPrediction(NumberPrediction):
    """A prediction of real numbers."""

    def _between(self, low: Tensor, high: Tensor) -> Tensor:
        return 0.5 * (low + high)

    def _bracket(self, q: float) -> tuple[Tensor, Tensor]:
        centre, spread = self._centre_and_spread()
        low, high, step = centre - spread, centre + spread, spread + 1e-12
        for _ in range(MAX_DOUBLINGS):
            above, under = self.cdf(low) >= q, self.cdf(high) < q
            if not bool(above.any() | under.any()):
                break
            low, high = torch.where(above, low - step, low), torch.where(under, high + step, high)
            step = 2 * step
        return low, high


@final
class CountPrediction(NumberPrediction):
    """A prediction of counts: 0, 1, 2, ..."""

    def _between(self, low: Tensor, high: Tensor) -> Tensor:
        return (0.5 * (low + high)).floor()

    def _bracket(self, q: float) -> tuple[Tensor, Tensor]:
        centre, spread = self._centre_and_spread()
        high, step = (centre + spread).ceil(), (spread + 1e-12).ceil()
        for _ in range(MAX_DOUBLINGS):
            under = self.cdf(high) < q
            if not bool(under.any()):
                break
            high, step = torch.where(under, high + step, high), 2 * step
        return torch.full_like(high, -1.0), high


@final
class ClassPrediction(Prediction):
    """A prediction of labels: classes, binary labels, or several labels per row."""

    classes: ClassVar[bool] = True

    def quantile(self, q: float) -> Tensor:
        """Raise an error: labels have no quantiles."""
        require(isinstance(q, Real) and 0 < q < 1, "q", "quantile", "lie between 0 and 1", q)
        raise InputError(
            f"The targets of {self.likelihood!r} are labels: use 'probs', because labels have no quantiles."
        )

    @property
    def probs(self) -> Tensor:
        """p(y | x, D): one column per class, or for Bernoulli the probability of 1."""
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """Entropy of y in nats, (n,); for several labels per row, summed over them."""
        return self.distribution.entropy

    @property
    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p]: the part of the entropy that is disagreement between draws, in nats, (n,)."""
        return self.distribution.mutual_information


def predict(
    model: Model,
    draws: Iterable[Tensor],
    inputs: Batch,
    buffers: Buffers,
    event: torch.Size,
    seed: int,
    limit: int = MEMORY_LIMIT,
    centre: Tensor | None = None,
) -> Prediction:
    """Predict with a network at posterior draws of its parameters.

    Args:
        model: The model.
        draws: Vectors of unconstrained parameters, in one or several tensors (S, P).
        inputs: The inputs of n rows.
        buffers: The buffers of the posterior.
        event: The shape of one target.
        seed: Seed of the draws of y.
        limit: Bytes of activations that are held at once.
        centre: If given, the second half of each tensor of even length mirrors the first half around it. Default:
            None.

    Returns:
        The mixture over the draws.
    """
    outputs, learnt, shared = [], [], SharedInputs(centre)
    with torch.no_grad():
        for w in draws:
            outputs.append(model.outputs(w, inputs, buffers, event, limit, shared))
            learnt.append(model.learnt_at(w))
        all_learnt = {name: torch.cat([values[name] for values in learnt]) for name in learnt[0]}
        all_outputs = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return Prediction.of_draws(model.likelihood, all_outputs, all_learnt, event, model.prepare_targets, seed)
