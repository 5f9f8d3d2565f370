"""Target: the log joint density of a model and its data, in nats for the whole data set.

The prior, the factor N/n, the weights of rows, the temperature and signs are applied here and nowhere else.

    log p(w, D) = sum_n weights_n log p(y_n | x_n, w) + log p(w)

with weights of one unless `fit` was given others. A minibatch of n rows stands for all N: its weighted log-likelihood
is multiplied by N/n, with n its own number of rows. At temperature T, `tempers="likelihood"` means p(D|w)^(1/T) p(w),
and `"posterior"` means (p(D|w) p(w))^(1/T):

    tempered log joint = a log p(D|w) + b log p(w),    a = likelihood_power = 1/T,    b = prior_power = 1 or 1/T

In unconstrained coordinates log p(w) includes log |det df/du|, which belongs to the coordinates and not to the prior,
so its power is one at every temperature. `dataclasses.replace(target, prior=...)` is the target under another prior.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from priory.core.data import WeightedBatch, weighted_sum
from priory.core.errors import InputError, require
from priory.models.base import has_network

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from priory.core.data import Batch, Data
    from priory.families import Family
    from priory.models.base import BaseModel
    from priory.models.model import Model
    from priory.posteriors import Posterior


@dataclass(frozen=True)
class Target:
    """The log joint density that a method works on: values and gradients at unconstrained parameters w (*B, P).

    Args:
        model: The model, bound to its data.
        num_data: N, the number of rows; None for a density that contains its data.
        temperature: T, a positive number. Default: 1.0.
        tempers: "likelihood" for p(D|w)^(1/T) p(w), or "posterior" for (p(D|w) p(w))^(1/T). Default: "likelihood".
        event: The shape of one target. Default: ().
        single: Whether the data are one tensor, which a density's functions then get instead of a tuple. Default:
            False.
        prior: The prior over w. Default: None, the prior of the model.
    """

    model: BaseModel
    num_data: int | None
    temperature: float = 1.0
    tempers: Literal["likelihood", "posterior"] = "likelihood"
    event: torch.Size = field(default_factory=lambda: torch.Size())
    single: bool = False
    prior: Any = None

    def __post_init__(self) -> None:
        if self.prior is None:
            object.__setattr__(self, "prior", self.model.prior)
        t = self.temperature
        number = isinstance(t, Real) and not isinstance(t, bool) and 0 < t < float("inf")
        require(number, "temperature", "fit", "be a positive number", repr(t))
        object.__setattr__(self, "temperature", float(t))
        known = self.tempers in ("likelihood", "posterior")
        require(known, "tempers", "fit", "be 'likelihood' or 'posterior'", repr(self.tempers))
        whole = not self.model.capabilities.separate_likelihood and self.tempers == "likelihood" and t != 1
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

    def of_model(self, model: Any) -> Target:
        """Return the target of another model of the same data, under the prior of that model."""
        return replace(self, model=model, prior=model.prior)

    def model_with_prior(self) -> BaseModel:
        """Return the model with this target's prior: the model itself, or a copy if the prior was replaced."""
        return self.model if self.prior is self.model.prior else self.network_model("A prior").with_prior(self.prior)

    def network_model(self, owner: str, why: str = "has no network") -> Model:
        """Return the model for a caller that needs its network; raise an error that names the owner if it has none."""
        if not has_network(self.model):
            raise InputError(f"{owner} needs a Model: a {type(self.model).__name__} {why}.")
        return self.model

    # Weights of the likelihood, of the prior and of rows.

    @property
    def likelihood_power(self) -> float:
        """a = 1/T: the power of p(D|w) in the tempered joint density."""
        return 1 / self.temperature

    @property
    def prior_power(self) -> float:
        """b: the power of p(w) in the tempered joint density, 1, or 1/T when the whole posterior is tempered."""
        return 1.0 if self.tempers == "likelihood" else 1 / self.temperature

    @property
    def prior_weight(self) -> float:
        """T b: the weight of -E_q[log p(w)] in the loss; T, or 1 when the whole posterior is tempered."""
        return self.temperature if self.tempers == "likelihood" else 1.0

    @property
    def entropy_weight(self) -> float:
        """T: the weight of -H(q) in the loss, for both values of `tempers`."""
        return self.temperature

    def loss(self, log_joint: Tensor) -> Tensor:
        """Return -T times the tempered log joint, -log p(D|w) - prior_weight log p(w).

        Its values are comparable between temperatures.
        """
        return -self.temperature * log_joint

    @property
    def mean_loss_scale(self) -> float:
        """T/N: the factor from the tempered log joint to minus the mean loss per row."""
        return self.temperature / (self.num_data or 1)

    def scale(self, rows: int) -> float:
        """Return N/n, the number of rows that each of n rows stands for; 1 for a density that contains its data.

        A pass over a DataLoader that drops its last rows sees n < N rows.
        """
        return 1.0 if self.num_data is None else self.num_data / rows

    def factor(self, batch: Batch) -> float | Tensor:
        """Return the factor of log p(y_n | x_n, w) for the rows of a batch: N/n, or N/n x weights_n, (n,)."""
        weights = self.row_weights(batch)
        factor = 1.0 if self.num_data is None else self.num_data / len(batch[0])
        return factor if weights is None else factor * weights

    def row_weights(self, batch: Batch) -> Tensor | None:
        """Return the weights of a batch's rows in the model's type, (n,); None if each row counts once."""
        if not isinstance(batch, WeightedBatch):
            return None
        return batch.weights.to(self.model.device, self.model.dtype)

    # Empirical Bayes.

    @property
    def empirical(self) -> bool:
        """Whether precisions of the prior are set by empirical Bayes."""
        return bool(getattr(self.prior, "empirical", False))

    def with_empirical_precisions(self, family: Family) -> Target:
        """Return the target with its prior's precisions set by empirical Bayes under q; itself if there are none."""
        if not self.empirical:
            return self
        moments = family.moments()
        if moments is None:
            raise InputError(
                "A prior precision with infer='empirical' needs a q whose variances are known: use 'variational'."
            )
        return replace(self, prior=self.prior.with_empirical_precisions(*moments))

    def scaled(self, factors: Mapping[str, Tensor]) -> Target:
        """Return the target with the prior's precisions multiplied by factors, by parameter: see `Prior.scaled`."""
        return replace(self, prior=self.prior.scaled(factors)) if factors else self

    # In nats for the whole data, untempered.

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log p(D | w), estimated from the batch, and its gradient: (*B,), (*B, P).

        The gradient may be a buffer that the next call overwrites.
        """
        return self.model.log_likelihood_and_grad(w, self.form(batch), self.factor(batch), buffers or {})

    def differentiable(self, w: Tensor, batch: Batch) -> Tensor:
        """Return log p(D | w), estimated from the batch, for one vector (P,), differentiable by autograd."""
        return self.scale(len(batch[0]) if batch else 1) * self.rows_log_likelihood(w, batch)

    def rows_log_likelihood(self, w: Tensor, batch: Batch) -> Tensor:
        """Return sum_n weights_n log p(y_n | x_n, w) over the batch for one vector (P,), differentiable by autograd."""
        return self.model.log_likelihood_sum(w, self.form(batch), self.row_weights(batch))

    def pointwise(self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return log p(y_n | x_n, w) for each row of the batch, without factor or weight: (*B, n)."""
        return self.model.log_likelihood(w, self.form(batch), buffers or {})

    def log_likelihood_of(self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return log p(D | w), estimated from the batch, without gradient: (*B,)."""
        return weighted_sum(self.pointwise(w, batch, buffers), self.factor(batch))

    def outputs(self, w: Tensor, inputs: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the network's outputs at vectors (S, P), arranged for the targets, without gradient: (S, n, ...)."""
        with torch.no_grad():
            return self.network_model("Target.outputs").outputs(w, inputs, buffers or {}, self.event)

    def log_likelihood(
        self, w: Tensor, data: Data, buffers: Mapping[str, Tensor] | None = None, rows: int = 1024
    ) -> Tensor:
        """Return log p(D | w) over all rows, evaluated in blocks of `rows` rows: (*B,)."""
        total, seen = w.new_zeros(w.shape[:-1]), 0
        for batch in data.blocks(rows):
            total = total + weighted_sum(self.pointwise(w, batch, buffers), self.row_weights(batch))
            seen += len(batch[0]) if batch else 0
        return total if self.num_data is None else self.scale(seen) * total

    def log_prior(self, w: Tensor) -> Tensor:
        """Return log p(w) in unconstrained coordinates, log-determinants included: (*B,)."""
        return self.prior.log_prob(w)

    # Tempered.

    def log_joint_and_grad(
        self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None, jacobian: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the tempered log joint, estimated from the batch, and its gradient: (*B,), (*B, P).

        Without `jacobian` it is the density over the constrained parameters, which MAP maximises.
        """
        value, gradient = self.log_likelihood_and_grad(w, batch, buffers)
        prior, prior_gradient = self.log_prior_and_grad(w, jacobian)
        a, b = self.likelihood_power, self.prior_power
        value, gradient = a * value + b * prior, gradient.mul(a).add_(prior_gradient, alpha=b)
        if jacobian and b != 1 and self.model.layout.constrained:
            volume, volume_gradient = self.volume_and_grad(w)
            value, gradient = value + (1 - b) * volume, gradient.add_(volume_gradient, alpha=1 - b)
        return value, gradient

    def whole_log_joint_and_grad(self, w: Tensor, data: Data, rows: int = 1024) -> tuple[Tensor, Tensor]:
        """Return the tempered log joint over all rows and its gradient, in blocks of `rows` rows: (*B,), (*B, P).

        Each block is scaled to the whole data, so the blocks are averaged in proportion to their rows.
        """
        value, gradient, seen = torch.zeros_like(w[..., 0]), torch.zeros_like(w), 0
        for block in data.blocks(rows):
            n = len(block[0]) if block else 1
            block_value, block_gradient = self.log_joint_and_grad(w, block)
            value, gradient, seen = value + n * block_value, gradient + n * block_gradient, seen + n
        return value / seen, gradient / seen

    def log_joint(self, w: Tensor, log_likelihood: Tensor, log_prior: Tensor) -> Tensor:
        """Return the tempered log joint a log p(D|w) + b log p(w) from its two parts at w, (*B,).

        The log-determinant of the coordinates keeps the power one.
        """
        a, b = self.likelihood_power, self.prior_power
        value = a * log_likelihood + b * log_prior
        return value if b == 1 else value + (1 - b) * self.model.layout.log_det(w)

    def log_prior_and_grad(self, w: Tensor, jacobian: bool = True) -> tuple[Tensor, Tensor]:
        """Return log p(w) and its gradient: (*B,), (*B, P)."""
        prior = self.prior
        deviation = w - prior.loc
        gradient = -prior.precision * deviation
        value = prior.log_normaliser + 0.5 * (gradient * deviation).sum(-1)
        if prior.others:
            others, others_gradient = self.others_and_grad(w, jacobian)
            value, gradient = value + others, gradient + others_gradient
        return value, gradient

    def others_and_grad(self, w: Tensor, jacobian: bool = True) -> tuple[Tensor, Tensor]:
        """Return the part of log p(w) without a closed form, and its gradient: (*B,), (*B, P)."""
        return summed(lambda v: self.prior.log_prob_of_others(v, jacobian), w)

    def volume_and_grad(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return log |det dx/du| and its gradient: (*B,), (*B, P)."""
        return summed(self.model.layout.log_det, w)

    # Initialisation.

    def unread_share(self, rows: int) -> float:
        """Return 1 - n/N, the share of the data that a batch of n rows leaves out; 0 for a density without rows."""
        return 0.0 if self.num_data is None else 1 - rows / self.num_data

    def start(
        self, data: Data, shape: torch.Size, generator: torch.Generator, posterior: Posterior | None = None
    ) -> Tensor:
        """Return a starting vector for each member, (*shape, P): the model's start, or a draw of a posterior."""
        if posterior is not None:
            return posterior.starts(shape.numel(), generator).reshape(*shape, self.size).clone()
        targets = data.some(512)[-1] if data.num_data is not None else torch.empty(0)
        return self.model.start(targets, shape, generator)

    def buffers(self, shape: torch.Size = torch.Size(), posterior: Posterior | None = None) -> dict[str, Tensor]:
        """Return the buffers that a fit writes, one copy per member, (*shape, ...), from the model or a posterior."""
        found = {**self.model.buffers(), **(posterior.buffers if posterior is not None else {})}
        return {name: b.expand((*shape, *b.shape)).clone() for name, b in found.items()}

    def form(self, batch: Batch) -> Any:
        """Return a batch in the form in which the data were given: a tuple, or one tensor."""
        if self.single and len(batch) == 1:
            return batch[0]
        return tuple(batch) if isinstance(batch, WeightedBatch) else batch


def summed(function: Callable[[Tensor], Tensor], w: Tensor) -> tuple[Tensor, Tensor]:
    """Return values (*B,) and gradients (*B, P) of a function of w (*B, P), in one backward pass."""
    leaf = w.detach().requires_grad_()
    with torch.enable_grad():
        values = function(leaf)
        if not values.requires_grad:  # a density with everything in its likelihood
            return values, torch.zeros_like(w)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)  # members are independent, so each gets its own gradient
    return values.detach(), gradient
