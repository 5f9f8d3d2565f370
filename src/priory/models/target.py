"""Target: the log joint in nats for the whole data set. N/n, the temperature and signs live here and nowhere
else.

    log p(w, D) = sum_n log p(y_n | x_n, w) + log p(w)

A minibatch of n rows stands for all N: its log-likelihood is multiplied by N/n, with n its own number of
rows. At temperature T, `tempers="likelihood"` means p(D|w)^(1/T) p(w), and `"posterior"` means (p(D|w)
p(w))^(1/T).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from priory.core.errors import InputError, require
from priory.models.model import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from priory.core.data import Batch, Data
    from priory.families import Family
    from priory.models.density import Density
    from priory.posteriors import Posterior


@dataclass(frozen=True)
class Target:
    """What a method sees of a model and its data: values and gradients at w (*B, P), never a module."""

    model: Model | Density
    num_data: int | None
    temperature: float = 1.0
    tempers: Literal["likelihood", "posterior"] = "likelihood"
    event: torch.Size = field(default_factory=lambda: torch.Size())  # the shape of one target
    single: bool = False  # data given as one tensor, which a density gets back as one

    def __post_init__(self) -> None:
        t = self.temperature
        number = isinstance(t, Real) and not isinstance(t, bool) and 0 < t < float("inf")
        require(number, "temperature", "fit", "be a positive number", repr(t))
        object.__setattr__(self, "temperature", float(t))
        known = self.tempers in ("likelihood", "posterior")
        require(known, "tempers", "fit", "be 'likelihood' or 'posterior'", repr(self.tempers))
        whole = getattr(self.model, "log_prob", None) is not None and self.tempers == "likelihood" and t != 1
        require(
            not whole,
            "tempers",
            "fit",
            "be 'posterior' for a Density that is one log_prob",
            repr(self.tempers),
        )

    @property
    def size(self) -> int:
        """P, the number of coordinates."""
        return self.model.layout.size

    @property
    def prior_weight(self) -> float:
        """What -E_q[log p(w)] is multiplied by in the loss nll + ... : T, or 1 when the whole posterior is tempered."""
        return self.temperature if self.tempers == "likelihood" else 1.0

    @property
    def entropy_weight(self) -> float:
        """What -H(q) is multiplied by in the loss: T either way."""
        return self.temperature

    def factor(self, batch: Batch) -> float:
        """N/n: how many rows each row of this batch stands for."""
        return 1.0 if self.num_data is None else self.num_data / len(batch[0])

    @property
    def empirical(self) -> bool:
        """Whether empirical Bayes sets precisions of the prior."""
        return bool(getattr(self.model.prior, "empirical", False))

    def settled(self, family: Family) -> Target:
        """The target with the precisions that empirical Bayes sets under this q; itself where there are none."""
        if not self.empirical:
            return self
        assert isinstance(self.model, Model)
        moments = family.moments()
        if moments is None:
            raise InputError(
                "A prior precision with infer='empirical' needs a q whose variances are known: use 'variational'."
            )
        model = copy.copy(self.model)
        model.prior = self.model.prior.settled(*moments)
        return replace(self, model=model)

    # In nats for the whole data, untempered.

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """log p(D | w), estimated from the batch, and its gradient: (*B,), (*B, P).

        The gradient may be a buffer that the next call overwrites.
        """
        return self.model.log_likelihood_and_grad(w, self.form(batch), self.factor(batch), buffers or {})

    def differentiable(self, w: Tensor, batch: Batch) -> Tensor:
        """log p(D | w), estimated from the batch, as a function of one vector (P,) that autograd goes through."""
        return self.factor(batch) * self.model.log_likelihood_sum(w, self.form(batch))

    def pointwise(self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """log p(y_n | x_n, w) for each row of the batch, no factor: (*B, n)."""
        return self.model.log_likelihood(w, self.form(batch), buffers or {})

    def outputs(self, w: Tensor, inputs: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """The network's outputs at vectors (S, P), arranged for the targets, without gradient: (S, n, ...)."""
        assert isinstance(self.model, Model)
        with torch.no_grad():
            return self.model.outputs(w, inputs, buffers or {}, self.event)

    def log_likelihood(
        self, w: Tensor, data: Data, buffers: Mapping[str, Tensor] | None = None, rows: int = 1024
    ) -> Tensor:
        """log p(D | w) over every row, one block at a time: (*B,)."""
        total, seen = w.new_zeros(w.shape[:-1]), 0
        for batch in data.blocks(rows):
            total = total + self.pointwise(w, batch, buffers).sum(-1)
            seen += len(batch[0]) if batch else 0
        return total if self.num_data is None else self.num_data / seen * total  # a loader may drop its last rows

    def log_prior(self, w: Tensor) -> Tensor:
        """log p(w) in unconstrained coordinates, log-determinants included: (*B,)."""
        return self.model.prior.log_prob(w)

    # Tempered.

    def log_joint_and_grad(
        self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None, jacobian: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The tempered log joint, estimated from the batch, and its gradient: (*B,), (*B, P).

        Without `jacobian` it is a density over the person's own parameters, whose maximum is their mode.
        """
        value, gradient = self.log_likelihood_and_grad(w, batch, buffers)
        prior, prior_gradient = self.log_prior_and_grad(w, jacobian)
        a, b = 1 / self.temperature, self.prior_weight / self.temperature
        value, gradient = a * value + b * prior, gradient.mul(a).add_(prior_gradient, alpha=b)
        if jacobian and b != 1 and self.model.layout.constrained:
            volume, volume_gradient = self.volume_and_grad(w)
            value, gradient = value + (1 - b) * volume, gradient.add_(volume_gradient, alpha=1 - b)
        return value, gradient

    def log_prior_and_grad(self, w: Tensor, jacobian: bool = True) -> tuple[Tensor, Tensor]:
        """log p(w) and its gradient: (*B,), (*B, P)."""
        prior = self.model.prior
        deviation = w - prior.loc
        gradient = -prior.precision * deviation
        value = prior.log_normaliser + 0.5 * (gradient * deviation).sum(-1)
        if prior.others:
            others, others_gradient = self.others_and_grad(w, jacobian)
            value, gradient = value + others, gradient + others_gradient
        return value, gradient

    def others_and_grad(self, w: Tensor, jacobian: bool = True) -> tuple[Tensor, Tensor]:
        """The part of log p(w) that has no closed form, and its gradient: (*B,), (*B, P)."""
        return summed(lambda v: self.model.prior.log_prob_of_others(v, jacobian), w)

    def volume_and_grad(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """log |det dx/du| and its gradient: (*B,), (*B, P)."""
        return summed(self.model.layout.log_det, w)

    # Where a fit begins.

    def start(
        self, data: Data, shape: torch.Size, generator: torch.Generator, posterior: Posterior | None = None
    ) -> Tensor:
        """A starting vector for each member, (*shape, P): the model's own, or a draw of a posterior."""
        if posterior is not None:
            return posterior.starts(shape.numel(), generator).reshape(*shape, self.size).clone()
        targets = data.some(512)[-1] if data.num_data is not None else torch.empty(0)
        return self.model.start(targets, shape, generator)

    def buffers(self, shape: torch.Size = torch.Size(), posterior: Posterior | None = None) -> dict[str, Tensor]:
        """The buffers that a fit writes, one copy a member, (*shape, ...), as given or as a posterior has them."""
        found = {**self.model.buffers(), **(posterior.buffers if posterior is not None else {})}
        return {name: b.expand((*shape, *b.shape)).clone() for name, b in found.items()}

    def form(self, batch: Batch) -> Any:
        """The batch as it was given: a tuple, or one tensor."""
        return batch[0] if self.single and len(batch) == 1 else batch


def summed(function: Callable[[Tensor], Tensor], w: Tensor) -> tuple[Tensor, Tensor]:
    """Values (*B,) of a function that takes leading dimensions, and its gradient (*B, P), in one backward pass."""
    leaf = w.detach().requires_grad_()
    with torch.enable_grad():
        values = function(leaf)
        if not values.requires_grad:  # a density with everything in its likelihood
            return values, torch.zeros_like(w)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)  # members don't meet: each has its own gradient
    return values.detach(), gradient
