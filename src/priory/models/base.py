"""The model protocol: the interface that the fitting loop, `Target`, the methods and the file format use.

`Model` (a network), `Density` (a log density) and the latent-variable models of `priory.latent` implement `BaseModel`.
Code that works with a model never checks its class. It uses the members below; what only some models support is
declared in their `capabilities`.

The life of a model in a fit:

    model, data = model.bind(data, batch_size)    shapes and types are known from here on
    model.check(batch, data)                      one trial evaluation, before anything is trained
    w = model.start(targets, shape, generator)    the first vector of unconstrained parameters
    model.log_likelihood_and_grad(w, batch, ...)  at every step
    model.describe()                              the properties that must match those of a stored posterior
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from priory.core.data import Batch, Data

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import TypeIs

    from priory.core.flat import Layout
    from priory.models.model import Model


@dataclass(frozen=True)
class Capabilities:
    """What a model can do beyond evaluating its log joint.

    Attributes:
        network: It maps inputs to targets by a network and a likelihood (`network`, `likelihood`, `outputs`), so that
            its posteriors predict, and its prior is a `Prior` that can be drawn from.
        latent: It has hidden variables, an E-step and a complete-data log-likelihood, which EM needs.
        conjugate: It has a q(theta) in closed form, which variational EM needs.
        encoder: It has a network for q(z | y), which amortised EM trains.
        separate_likelihood: The log-likelihood is separate from the prior, with one value per row. False for a
            `Density` that is one `log_prob`.
        batched: Its functions take leading dimensions themselves, without `vmap`.
    """

    network: bool = False
    latent: bool = False
    conjugate: bool = False
    encoder: bool = False
    separate_likelihood: bool = True
    batched: bool = False


class BaseModel(ABC):
    """Base class of models: parameters, a prior over them and a likelihood.

    Parameters are one flat vector w of P unconstrained coordinates; `layout` maps it to named, constrained tensors.
    Functions of w take leading dimensions, (*B, P). Sums here are over the rows of a batch; the factor N/n,
    temperatures and signs belong to `Target`.

    Attributes:
        layout: The parameters by name: shapes, supports and slices of the flat vector.
        prior: The prior in unconstrained coordinates: `log_prob`, `log_prob_of_others`, `loc`, `precision`.
        dtype: The floating type of w.
        device: The device of w.
        learnt: The coordinates of w that belong to the likelihood, such as a noise scale.
        no_slope: The reason why the model has no gradient; empty if it has one.
    """

    layout: Layout
    prior: Any  # a Prior or a DensityPrior
    dtype: torch.dtype
    device: torch.device
    learnt: slice
    no_slope: str = ""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The optional features that the model supports."""

    # Data.

    def bind(
        self, data: Any, batch_size: int | None = None, weights: Any = None, num_data: int | None = None
    ) -> tuple[Self, Data]:
        """Bind the model to data: set its shapes, and convert the data to its types.

        Args:
            data: Tensors, arrays, a Dataset, a DataLoader, None, or a `Data` that was bound before, which is
                returned as it is.
            batch_size: Rows per minibatch.
            weights: How often each row counts in the log-likelihood, (N,). Default: None, once.
            num_data: Number of rows, if it can't be read from the data. Default: None.

        Returns:
            The bound model, which is the model itself where nothing depends on the data, and the rows.
        """
        if isinstance(data, Data):
            return self, Data.of(data, weights=weights)
        return self, Data.of(data, batch_size, weights, num_data=num_data).prepared(self.prepare)

    @abstractmethod
    def prepare(self, batch: Batch) -> Batch:
        """Check a batch and convert it to the model's types and device."""

    def check(  # noqa: B027 - a model may have nothing to check
        self, batch: Any, data: Data | None = None, drops: bool = False
    ) -> None:
        """Evaluate the model once on a few rows of bound data, so that errors surface before a fit.

        Args:
            batch: The first rows, as a tuple or one tensor like the data; () if there are no data.
            data: All rows, if those in memory should be checked too.
            drops: Whether the method draws the masks of dropout itself.

        Raises:
            InputError: If the model can't be evaluated on the data.
        """

    def warn_of_scale(self, data: Data) -> None:  # noqa: B027 - unit scale matters to networks alone
        """Warn if the data are far from unit scale, where that matters to the model."""

    def event_shape(self, batch: Batch) -> torch.Size:
        """Return the shape of one target; () for a model without targets."""
        return torch.Size()

    # Initialisation.

    @abstractmethod
    def start(self, targets: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return a starting vector for each member, (*shape, P)."""

    def buffers(self) -> dict[str, Tensor]:
        """Return a copy of the buffers that training writes, such as running means."""
        return {}

    def fixed(self) -> dict[str, Tensor]:
        """Return the tensors that predictions depend on and no fit changes, such as frozen parameters."""
        return {}

    def in_one_pass(self, batch: Batch) -> bool:
        """Whether many vectors are evaluated together on a batch, rather than one after the other."""
        return True

    # log p(D | w).

    @abstractmethod
    def log_likelihood(self, w: Tensor, batch: Any, buffers: Mapping[str, Tensor]) -> Tensor:
        """Return log p(y_n | x_n, w) for each row, without gradient: (*B, P) -> (*B, n)."""

    @abstractmethod
    def log_likelihood_and_grad(
        self, w: Tensor, batch: Any, factor: float | Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return sum_n factor_n log p(y_n | x_n, w) and its gradient: (*B, P) -> (*B,), (*B, P).

        `factor` is a number or has one value per row, (n,).
        """

    @abstractmethod
    def log_likelihood_sum(self, w: Tensor, batch: Any, weights: Tensor | None = None) -> Tensor:
        """Return sum_n weights_n log p(y_n | x_n, w) for one vector (P,), differentiable by autograd."""

    def trial(self, w: Tensor) -> None:  # noqa: B027 - a network's prior is made of distributions that were checked
        """Call the user's log_prob or log_prior once at w (P,), so that its errors surface."""

    def values_only(self) -> BaseModel:
        """Return the model, with a gradient of zero if it has none, for methods that need no gradient."""
        return self

    # Files.

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the properties that must match those of a stored posterior, as JSON."""

    def bound_tensors(self) -> dict[str, Tensor]:
        """Return what `bind` has estimated from the data, which a file stores for `like`."""
        return {}

    def like(self, described: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Self:
        """Return the model in the shapes that `describe` recorded, with the `bound_tensors` of a file."""
        return self

    def prior_as_given(self) -> Any:
        """Return the prior as the user gave it, before evidence or data scaled it."""
        return self.prior


def has_network(model: object) -> TypeIs[Model]:
    """Whether this is a model with a network and a likelihood, as it declares."""
    return isinstance(model, BaseModel) and model.capabilities.network
