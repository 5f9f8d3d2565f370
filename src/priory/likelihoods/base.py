"""What a likelihood is: p(y | f) for a network's output f, and the parameters of its own that are learnt.

Shapes, from the right: a network gives outputs (n, *rest) for n rows; draws or chains stand in front, (*B, n,
*rest). Targets are (n, *event). Values a datum, (*B, n), are sums over the event. A parameter of the
likelihood's own, such as a noise, comes in `learnt` as (*B, *shape).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from priory.core.errors import InputError

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.distributions import Distribution

    from priory.core.flat import Param


@dataclass(frozen=True)
class Declared:
    """A parameter that is learnt beside the network's weights: where it lies and what is believed of it."""

    param: Param
    prior: Distribution


class Likelihood(ABC):
    """p(y | f). One subclass a family; each is built once and never changes."""

    classes: ClassVar[bool] = False  # whether y is a label, so that probabilities and entropies make sense
    discrete: ClassVar[bool] = False  # whether y is an integer, so that its quantiles are

    unit_scale: ClassVar[bool] = False  # whether targets should be of about unit scale, as a noise to be learnt expects

    @property
    def slope(self) -> float | None:
        """dE[y | f]/df, if y is Gaussian around a linear function of f with a noise that doesn't depend on f."""
        return None

    @property
    def canonical(self) -> bool:
        """Whether d^2 log p(y | f) / df^2 doesn't depend on y, so that the Fisher information in f is minus it."""
        return self.slope is not None

    @property
    def declared(self) -> dict[str, Declared]:
        """The learnt parameters by their short names ("noise"); a Model calls them "likelihood.noise"."""
        return {}

    def start(self, targets: Tensor) -> dict[str, Tensor]:
        """Where the learnt parameters begin, read off some targets."""
        return {}

    @abstractmethod
    def prepare(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """Targets in the type that log_prob takes, or the sentence that says why not."""

    @abstractmethod
    def arrange(self, outputs: Tensor, event: torch.Size) -> Tensor:
        """One network's outputs (n, *rest), shaped for targets of this event, or the sentence that says why not."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:  # noqa: B027 - most have nothing to ask
        """Whether these targets can come from these outputs at all; asked once a fit."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """log p(y | f) a datum, (*B, n), in nats with every constant."""

    @abstractmethod
    def mean(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """E[y | f], (*B, n, *event)."""

    @abstractmethod
    def variance(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """Var[y | f], (*B, n, *event)."""

    @abstractmethod
    def draw(self, outputs: Tensor, learnt: dict[str, Tensor], generator: Generator) -> Tensor:
        """One y for each f."""

    def score(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """d log p(y | f) / df at each datum, in the shape of the arranged outputs (*B, n, *rest)."""
        f = outputs.detach().requires_grad_()
        with torch.enable_grad():
            total = self.log_prob(f, targets, learnt).sum()  # data don't meet: each has its own gradient
        return torch.autograd.grad(total, f)[0]

    def roots(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """Columns whose outer products add up to the Fisher information in f, (C, n, *rest) at outputs (n, *rest).

            sum_c s_c s_c' = E_y[score score'] = -E_y[d^2 log p(y | f) / df^2]

        It is positive semi-definite at every f, and is minus the second derivative itself where that doesn't depend on
        y (Gaussian of a given noise, Categorical, Bernoulli, Poisson). C is the number of outputs of a datum.
        """
        raise InputError(
            f"{type(self).__name__} has no Fisher information of its outputs: its 'roots' are not written."
        )

    def cdf(self, outputs: Tensor, learnt: dict[str, Tensor], value: Tensor) -> Tensor:
        """P(y <= value | f), for likelihoods over numbers."""
        raise InputError(f"{type(self).__name__} is a likelihood over labels: it has probabilities, and no quantiles.")

    def entropy(self, probs: Tensor, event_dims: int) -> Tensor:
        """The entropy in nats of labels with these probabilities, (*B, n); for likelihoods over labels."""
        raise InputError(f"{type(self).__name__} is a likelihood over numbers: it has no probabilities of labels.")


def lift(value: Tensor, own: int, outputs: Tensor) -> Tensor:
    """Shape a learnt (*B, *own dims) so that it broadcasts against outputs (*B, n, *rest)."""
    lead = value.ndim - own
    return value.reshape((*value.shape[:lead], *[1] * (outputs.ndim - lead - own), *value.shape[lead:]))


def per_datum(values: Tensor, targets: Tensor) -> Tensor:
    """Sum values (*B, n, *event) over the event of targets (n, *event): (*B, n)."""
    return values.flatten(-(targets.ndim - 1)).sum(-1) if targets.ndim > 1 else values


def diagonal_roots(values: Tensor) -> Tensor:
    """Columns v_c e_c, one for each of the C values of a datum: (n, *rest) -> (C, n, *rest)."""
    flat = values.reshape(len(values), -1)  # (n, C)
    return torch.diag_embed(flat).movedim(1, 0).reshape(flat.shape[1], *values.shape)


def squeeze_last(outputs: Tensor, event: torch.Size, owner: str) -> Tensor:
    """Outputs for targets (n, *event): (n, 1) serves (n,), else the shapes must agree."""
    rest = outputs.shape[1:]
    if rest == event:
        return outputs
    if event == () and rest == (1,):
        return outputs.squeeze(-1)
    if rest == () and event == (1,):
        return outputs.unsqueeze(-1)
    raise InputError(
        f"The network's output must fit the targets of {owner}, of shape {shaped(event)}, got {shaped(rest)}."
    )


def shaped(rest: torch.Size) -> str:
    """How a sentence writes the shape of rows."""
    return f"(rows, {', '.join(map(str, rest))})" if rest else "(rows,)"


def as_float(targets: Tensor, dtype: torch.dtype, owner: str) -> Tensor:
    """Numeric targets in the model's floating type; complex ones are refused, booleans taken as 0 and 1."""
    if targets.is_complex():
        raise InputError(f"The targets of {owner} must be real numbers, got {targets.dtype}.")
    return targets if targets.dtype == dtype else targets.to(dtype)
