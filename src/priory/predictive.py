"""Prediction: the mixture, over posterior draws, of the likelihood's distribution at new inputs.

    p(y | x, D) = E[p(y | x, w)] ~ (1/S) sum_s p(y | x, w_s)

Everything here is of that mixture: its variance is the variance of the means (epistemic: what more data would
remove) plus the mean of the variances (aleatoric: what they would not), and its quantiles are found on its
own distribution function, not on a Gaussian fitted to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.chain import Chains
from priory.data import check_finite, tensor_of
from priory.errors import InputError, require
from priory.network import MEMORY_LIMIT
from priory.streams import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from priory.data import Batch
    from priory.likelihoods import Likelihood
    from priory.model import Buffers, Model

BISECTIONS = 60


@dataclass(frozen=True)
class Prediction:
    """What is known of y at n new inputs, from outputs (S, n, ...) and the likelihood's own parameters (S, ...)."""

    likelihood: Likelihood
    outputs: Tensor
    learnt: dict[str, Tensor]
    event: torch.Size
    prepare: Callable[[Tensor], Tensor]
    seed: int = 0

    def __repr__(self) -> str:
        return f"Prediction({self.outputs.shape[1]} rows, {self.outputs.shape[0]} draws, {self.likelihood!r})"

    @property
    def classes(self) -> bool:
        """Whether y is a label."""
        return self.likelihood.classes

    @cached_property
    def _means(self) -> Tensor:
        return self.likelihood.mean(self.outputs, self.learnt)  # (S, n, *event)

    # Moments.

    @cached_property
    def mean(self) -> Tensor:
        """E[y | x, D]; for classes the probabilities."""
        return self._means.mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Var over w of E[y | x, w]: the part of the variance that more data would remove."""
        return self._means.var(0, correction=0)

    @cached_property
    def aleatoric(self) -> Tensor:
        """E over w of Var[y | x, w]: the part that more data would not remove."""
        return self.likelihood.variance(self.outputs, self.learnt).mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Var[y | x, D] = epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """The root of the total variance."""
        return self.variance.sqrt()

    # The mixture itself.

    def log_prob(self, y: Any) -> Tensor:
        """log p(y | x, D) a row, (n,)."""
        given = tensor_of(y, "The 'y' of log_prob")
        check_finite(given, "targets")
        targets = self.prepare(given)
        if self.event == () and targets.ndim == 2 and targets.shape[1] == 1:
            targets = targets.squeeze(1)
        require(
            tuple(targets.shape) == (self.outputs.shape[1], *self.event),
            "y",
            "log_prob",
            f"have the shape {(self.outputs.shape[1], *self.event)}",
            f"the shape {tuple(targets.shape)}",
        )
        self.likelihood.check(self.outputs, targets)
        values = self.likelihood.log_prob(self.outputs, targets, self.learnt)  # (S, n)
        return torch.logsumexp(values, 0) - math.log(len(values))

    def quantile(self, q: float) -> Tensor:
        """The value below which y lies with probability q, by bisection on the mixture's distribution function."""
        require(isinstance(q, (int, float)) and 0 < q < 1, "q", "quantile", "lie between 0 and 1", q)
        if self.classes:
            raise InputError(f"{self.likelihood!r} is over labels: it has probabilities, and no quantiles.")
        low, high = self._bracket(q)
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            if self.likelihood.discrete:
                middle = middle.floor()
            below = self.cdf(middle) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds y with this probability."""
        require(
            isinstance(level, (int, float)) and 0 < level < 1,
            "level",
            "interval",
            "lie between 0 and 1",
            level,
        )
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value | x, D), for values that broadcast to (n, *event)."""
        return self.likelihood.cdf(self.outputs, self.learnt, value).mean(0)

    def _bracket(self, q: float) -> tuple[Tensor, Tensor]:
        """Values on the two sides of the q-quantile, by doubling."""
        centre = self.mean if bool(torch.isfinite(self.mean).all()) else torch.zeros_like(self.mean)
        spread = self.std if bool(torch.isfinite(self.std).all()) else torch.ones_like(centre)
        low, high, step = centre - spread, centre + spread, spread + 1e-12
        if self.likelihood.discrete:
            low, high, step = torch.full_like(low, -1.0), high.ceil(), step.ceil()
        for _ in range(200):
            above, under = self.cdf(low) >= q, self.cdf(high) < q
            if self.likelihood.discrete:
                above = torch.zeros_like(above)
            if not bool(above.any() | under.any()):
                break
            low, high = torch.where(above, low - step, low), torch.where(under, high + step, high)
            step = 2 * step
        return low, high

    @cached_property
    def samples(self) -> Tensor:
        """A draw of y for each posterior draw, (S, n, *event)."""
        generator = stream(self.seed, "predictive", device=self.outputs.device)
        return self.likelihood.draw(self.outputs, self.learnt, generator)

    # Classes.

    @property
    def probs(self) -> Tensor:
        """p(y | x, D): a column a class, or for Bernoulli the probability of 1."""
        self._labels_only("probs")
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats, a row; for several labels, summed over them."""
        self._labels_only("entropy")
        return self.likelihood.entropy(self.mean, len(self.event))

    @property
    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p]: how much of the entropy is disagreement between draws, in nats."""
        self._labels_only("mutual_information")
        within = self.likelihood.entropy(self._means, len(self.event)).mean(0)
        return self.likelihood.entropy(self.mean, len(self.event)) - within

    def _labels_only(self, name: str) -> None:
        if not self.classes:
            raise InputError(f"The '{name}' of a prediction needs labels: {self.likelihood!r} is over numbers.")


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
    """The mixture over vectors, (S, P) in one piece or several, at some inputs.

    A `centre` says that the second half of each piece, if it is even, mirrors the first around it.
    """
    outputs, learnt, chains = [], [], Chains(centre)
    with torch.no_grad():
        for w in draws:
            outputs.append(model.outputs(w, inputs, buffers, event, limit, chains))
            learnt.append(model.learnt_at(w))
        own = {name: torch.cat([found[name] for found in learnt]) for name in learnt[0]}
        whole = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return Prediction(model.likelihood, whole, own, event, model.prepare_targets, seed)
