"""The interface of a likelihood: p(y | f) for a network's output f, and the likelihood's own learnt parameters.

Shapes: a network gives outputs (n, *rest) for n rows. Leading dimensions such as draws or chains come first,
(*B, n, *rest). Targets are (n, *event). Values per row, (*B, n), are sums over the event dimensions. A parameter of the
likelihood itself, such as a noise scale, is passed in `learnt` with shape (*B, *shape).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from priory.core.errors import InputError, require

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.distributions import Distribution

    from priory.core.flat import Param
    from priory.core.units import Units


@dataclass(frozen=True)
class Declared:
    """A likelihood parameter that is learnt together with the network's weights.

    Args:
        param: Shape and support of the parameter.
        prior: Prior distribution of the parameter.
    """

    param: Param
    prior: Distribution


class Likelihood(ABC):
    """Base class of likelihoods p(y | f), one subclass per family; instances are immutable.

    Subclasses implement `prepare`, `arrange`, `log_prob`, `mean`, `variance` and `draw`. `roots` is needed for the
    generalised Gauss-Newton matrix, `cdf` for quantiles, and `entropy` for class probabilities.

    In all methods, `outputs` are arranged network outputs (*B, n, *rest), and `learnt` maps the names in `declared` to
    values (*B, *shape).
    """

    classes: ClassVar[bool] = False  # whether y is a class label, so that probabilities and entropies are defined
    discrete: ClassVar[bool] = False  # whether y is an integer, so that its quantiles are integers too

    unit_scale: ClassVar[bool] = False  # whether targets should be of about unit scale, so that `in_units` is defined

    @property
    def slope(self) -> float | Tensor | None:
        """dE[y | f]/df, a number or one per output, if y is Gaussian with a mean linear in f; else None.

        It is None too if the noise depends on f.
        """
        return None

    @property
    def canonical(self) -> bool:
        """Whether d^2 log p(y | f) / df^2 does not depend on y, so that it equals minus the Fisher information in f."""
        return self.slope is not None

    @property
    def declared(self) -> dict[str, Declared]:
        """The learnt parameters by short name, such as "noise"; a Model names them "likelihood.noise"."""
        return {}

    def in_units(self, units: Units | None) -> Self:
        """Return the likelihood of targets in these units, given outputs at unit scale.

        Args:
            units: The shift and the scale of the targets; None for targets at unit scale.

        Returns:
            A likelihood whose `log_prob`, moments, draws and distribution function are in the user's units.

        Raises:
            InputError: If targets of this likelihood have no units, as labels and counts.
        """
        require(units is None, "units", type(self).__name__, "be left out: its targets have no units", units)
        return self

    def start(self, targets: Tensor) -> dict[str, Tensor]:
        """Return initial values of the learnt parameters.

        Args:
            targets: Prepared targets of some rows, (n, *event).

        Returns:
            A tensor for each name in `declared`.
        """
        return {}

    @abstractmethod
    def prepare(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert targets to the type that `log_prob` takes.

        Args:
            targets: Targets as the user gave them, (n, *event).
            dtype: Floating-point type of the model.

        Returns:
            The converted targets.

        Raises:
            InputError: If these cannot be targets of this likelihood.
        """

    @abstractmethod
    def arrange(self, outputs: Tensor, event: torch.Size) -> Tensor:
        """Reshape a network's outputs for targets with this event shape.

        Args:
            outputs: Outputs of one network, (n, *rest).
            event: Event shape of the targets.

        Returns:
            The arranged outputs, which every other method takes.

        Raises:
            InputError: If the outputs do not fit the targets.
        """

    def check(self, outputs: Tensor, targets: Tensor) -> None:  # noqa: B027 - most likelihoods need no check
        """Check once per fit that these targets are possible for these outputs.

        Args:
            outputs: Arranged outputs, (n, *rest).
            targets: Prepared targets, (n, *event).

        Raises:
            InputError: If a target has probability zero for every f, such as a label above the number of logits.
        """

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """Return log p(y | f) per row, (*B, n), in nats and with all constants."""

    @abstractmethod
    def mean(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """Return E[y | f], (*B, n, *event)."""

    @abstractmethod
    def variance(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """Return Var[y | f], (*B, n, *event)."""

    @abstractmethod
    def draw(self, outputs: Tensor, learnt: dict[str, Tensor], generator: Generator) -> Tensor:
        """Draw one y per f, (*B, n, *event)."""

    def score(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """Return d log p(y | f) / df per row, in the shape of the arranged outputs (*B, n, *rest)."""
        f = outputs.detach().requires_grad_()
        with torch.enable_grad():
            # rows are independent, so the gradient of the sum holds the gradient of each row
            total = self.log_prob(f, targets, learnt).sum()
        return torch.autograd.grad(total, f)[0]

    def roots(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        """Return a square root of the Fisher information in f: columns s_c whose outer products add up to it.

            sum_c s_c s_c' = E_y[score score'] = -E_y[d^2 log p(y | f) / df^2]

        The Fisher information is positive semi-definite at every f. It equals minus the second derivative where that
        does not depend on y (Gaussian with a given noise, Categorical, Bernoulli, Poisson).

        Args:
            outputs: Arranged outputs, (n, *rest).
            learnt: Learnt parameters, without leading dimensions.

        Returns:
            The columns, (C, n, *rest), where C is the number of outputs per row.

        Raises:
            InputError: If this likelihood does not implement it.
        """
        raise InputError(
            f"{type(self).__name__} does not define the Fisher information of its outputs; implement 'roots'."
        )

    def cdf(self, outputs: Tensor, learnt: dict[str, Tensor], value: Tensor) -> Tensor:
        """Return P(y <= value | f), (*B, n, *event), for likelihoods over numbers."""
        raise InputError(f"{type(self).__name__} is a likelihood over labels: it has probabilities but no quantiles.")

    def entropy(self, probs: Tensor, event_dims: int) -> Tensor:
        """Return the entropy in nats of labels with these probabilities, (*B, n), for likelihoods over labels."""
        raise InputError(f"{type(self).__name__} is a likelihood over numbers: it has no class probabilities.")


def lift(value: Tensor, param_dims: int, outputs: Tensor) -> Tensor:
    """Reshape a learnt parameter (*B, *shape), of `param_dims` own dimensions, to broadcast with (*B, n, *rest)."""
    lead = value.ndim - param_dims
    return value.reshape((*value.shape[:lead], *[1] * (outputs.ndim - lead - param_dims), *value.shape[lead:]))


def per_datum(values: Tensor, targets: Tensor) -> Tensor:
    """Sum values (*B, n, *event) over the event dimensions of targets (n, *event): (*B, n)."""
    return values.flatten(-(targets.ndim - 1)).sum(-1) if targets.ndim > 1 else values


def diagonal_roots(values: Tensor) -> Tensor:
    """Return the columns v_c e_c, one for each of the C values of a row: (n, *rest) -> (C, n, *rest)."""
    flat = values.reshape(len(values), -1)  # (n, C)
    return torch.diag_embed(flat).movedim(1, 0).reshape(flat.shape[1], *values.shape)


def squeeze_last(outputs: Tensor, event: torch.Size, owner: str) -> Tensor:
    """Reshape outputs to the shape of targets (n, *event), which may differ by a trailing dimension of size 1."""
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
    """Format a shape for an error message, such as "(rows, 3)"."""
    return f"(rows, {', '.join(map(str, rest))})" if rest else "(rows,)"


def as_float(targets: Tensor, dtype: torch.dtype, owner: str) -> Tensor:
    """Convert real targets to the model's dtype; booleans become 0 and 1, complex numbers raise an error."""
    if targets.is_complex():
        raise InputError(f"The targets of {owner} must be real numbers, got {targets.dtype}.")
    return targets if targets.dtype == dtype else targets.to(dtype)
