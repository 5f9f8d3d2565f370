"""Model: a network with a likelihood and a prior over its weights.

    w ~ prior,    y_n ~ likelihood(f_w(x_n), learnt parameters)

The network's weights, the parameters that the likelihood learns ("likelihood.noise") and the precisions that a
hierarchical prior learns ("prior.0.weight.precision") are one flat vector w, in this order. Sums here are over the rows
of a batch; the factor N/n, temperatures and signs belong to `Target`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.data import Batch, Data, check_finite, part, unchanged
from priory.core.errors import InputError, require
from priory.core.flat import Layout
from priory.core.tables import counted
from priory.likelihoods import Likelihood
from priory.models.base import BaseModel, Capabilities
from priory.models.standardisation import Standardisation, warn_of_scale
from priory.network.evaluation import Evaluation
from priory.network.layer_chain import SharedInputs
from priory.network.skeleton import MEMORY_LIMIT, Network
from priory.penalties.as_prior.variational import with_unit_scale_penalties
from priory.priors import Prior, declared, read_prior

if TYPE_CHECKING:
    from torch import nn

Buffers = Mapping[str, Tensor]
CAPABILITIES = Capabilities(network=True)


class Model(BaseModel):
    """A network with a likelihood and a prior: w ~ prior, y_n ~ likelihood(f_w(x_n)).

    Args:
        net: Any `nn.Module` that maps inputs to the outputs the likelihood expects. It is copied in its current state
            and never changed.
        likelihood: The distribution of targets given outputs, such as `Gaussian()` or `Categorical()`.
        prior: The prior over the network's parameters: a `torch.distributions` distribution, a number (the scale of a
            centred normal), a scale rule ("glorot", "he" or "fan_in"), "flat", `priors.Hierarchical()` for a learnt
            precision, or a dict from name patterns to these, in which the first pattern that matches a parameter's
            name applies. Default: "glorot".
        standardise: Whether `fit` standardises inputs, and the targets of `Gaussian` and `StudentT`, by the mean and
            the standard deviation of the training rows. The network and the priors, also that of a learnt noise, are
            then at unit scale; predictions, densities, evidences and a given noise are in the user's units. The
            posterior keeps the units. Default: False.

    Raises:
        InputError: If the likelihood is not a likelihood, the prior can't be read, or names clash.

    Example:
        >>> from torch import nn
        >>> from priory.likelihoods import Gaussian
        >>> Model(nn.Linear(2, 1), Gaussian(), prior={"weight": "he", "*": 1.0}).layout.names
        ('weight', 'bias', 'likelihood.noise')
    """

    def __init__(
        self, net: nn.Module, likelihood: Likelihood, prior: Any = "glorot", *, standardise: bool = False
    ) -> None:
        require(
            isinstance(likelihood, Likelihood),
            "likelihood",
            "Model",
            "be a likelihood such as Gaussian() or Categorical()",
            likelihood.__name__ + " itself" if isinstance(likelihood, type) else type(likelihood).__name__,
        )
        require(isinstance(standardise, bool), "standardise", "Model", "be True or False", repr(standardise))
        self.net, self.likelihood, self.standardise = net, likelihood, standardise
        self.units: Standardisation | None = None  # of inputs and targets, once a fit has estimated them
        self.network = Network(net)
        likelihood_params = {f"likelihood.{name}": d for name, d in likelihood.declared.items()}
        priors_by_name = read_prior(prior, list(self.network.params), self.network.skeleton, self.network.dtype)
        precisions = declared(priors_by_name)
        tail = {**{name: d.param for name, d in likelihood_params.items()}, **precisions}
        clash = [name for name in tail if name in self.network.params]
        require(not clash, "net", "Model", "have no parameter of the likelihood's or the prior's name", clash)
        self.layout = Layout({**self.network.params, **tail})
        by_name = {**priors_by_name, **{name: d.prior for name, d in likelihood_params.items()}}
        self.prior = Prior(self.layout, by_name, self.network.initial)
        self.dtype, self.device = self.network.dtype, self.network.device
        # the likelihood's coordinates; the prior's come after them
        self.learnt = slice(self.network.size, self.layout.size - len(precisions))
        self.evaluation = Evaluation(self.network, self._log_prob, self.layout.size, self.learnt)
        self._example: Tensor | None = None  # one row of outputs, once a trial pass has shown them
        self._prior_text, self._prior_argument = str(prior), prior

    def __repr__(self) -> str:
        weights = f"{type(self.net).__name__} with {counted(self.network.size, 'weight')}"
        scale = ", standardise=True" if self.standardise else ""
        found = f" ({self.units})" if self.units is not None and str(self.units) else ""
        return f"Model({weights}, {self.likelihood!r}, prior={self._prior_text}{scale}{found})"

    def __copy__(self) -> Model:
        model = object.__new__(type(self))
        vars(model).update(vars(self))
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments and the state: pickling would lose which parameters are identical."""
        network = self.network
        drawn = {name: network.initial[place] for name, place in network.place_of.items()}
        found = {"written": network.written, "modes": network.modes, "silent": network.silent, "quiet": network.quiet}
        state = {"prior": self.prior, "example": self._example, "tensors": {**network.fixed(), **drawn}}
        state |= {"standardise": self.standardise, "units": self.units}
        likelihood = self.likelihood if self.units is None else self.likelihood.in_units(None)
        return restored, (type(self), self.net, likelihood, self._prior_argument, {**state, **found})

    @property
    def capabilities(self) -> Capabilities:
        """A model with a network, so its posteriors predict."""
        return CAPABILITIES

    def with_prior(self, prior: Prior) -> Model:
        """Return a copy of the model with another prior over the same coordinates."""
        model = copy.copy(self)
        model.prior = prior
        return model

    def in_float64(self) -> Model:
        """Return a copy of the model in float64, under the prior that the user gave."""
        _, (kind, net, likelihood, prior, state) = self.__reduce__()
        wide = {**state, "prior": None, "example": None if self._example is None else self._example.double()}
        return restored(kind, copy.deepcopy(net).double(), likelihood, prior, wide)

    def with_units(self, units: Standardisation) -> Model:
        """Return a copy of the model for data in these units."""
        model = copy.copy(self)
        model.units, model.likelihood = units, self.likelihood.in_units(units.targets)
        model.evaluation = Evaluation(model.network, model._log_prob, model.layout.size, model.learnt)
        return model

    # Data.

    def bind(
        self, data: Any, batch_size: int | None = None, weights: Any = None, num_data: int | None = None
    ) -> tuple[Model, Data]:
        """Bind the model to data: estimate their units, if it standardises and has none yet, and convert the data."""
        rows = Data.of(data, batch_size, weights, num_data=num_data)
        if isinstance(data, Data) and rows.prepare is not unchanged:
            return self._bound_like(rows), rows
        model = self
        if self.standardise and self.units is None:
            model = self.with_units(Standardisation.of(rows, self.network, self.likelihood.unit_scale))
        return model, rows.prepared(model.prepare)

    def _bound_like(self, rows: Data) -> Model:
        """Return the model in the units in which these rows were prepared."""
        units = getattr(getattr(rows.prepare, "__self__", None), "units", None)
        if self.units == units and (units is not None or not self.standardise):
            return self
        must = "be the rows as you have them, because this model has other units"
        require(self.standardise and self.units is None and units is not None, "data", "fit", must, "prepared rows")
        assert units is not None
        return self.with_units(units)

    def prepare(self, batch: Batch) -> Batch:
        """Check a batch, targets last, and convert it to the model's types and device."""
        require(len(batch) >= 2, "data", "fit", "be inputs and targets, such as (X, y)", f"{len(batch)} part")
        for i, t in enumerate(batch):
            check_finite(t, part(i, len(batch)))
        targets = self.prepare_targets(batch[-1])
        if self._example is not None:
            self.likelihood.check(self._example, targets)
        return (*self.prepare_inputs(batch[:-1]), targets)

    def prepare_inputs(self, inputs: Batch) -> Batch:
        """Convert inputs to the network's type and units.

        Integers stay integers for a network that may use them as indices.
        """
        numbers = self.network.takes_numbers
        if self.standardise:
            must = "be False where no fit has estimated the units"
            require(self.units is not None, "standardise", "Model", must, True)
            assert self.units is not None
            inputs = self.units.standard_inputs(inputs, self.dtype)
        return tuple(
            x.to(self.device, self.dtype if x.is_floating_point() or (numbers and not x.is_complex()) else x.dtype)
            for x in inputs
        )

    def prepare_targets(self, targets: Tensor) -> Tensor:
        """Convert targets to the form that the likelihood expects."""
        return self.likelihood.prepare(targets, self.dtype).to(self.device)

    def check(self, batch: Batch, data: Data | None = None, drops: bool = False) -> None:
        """Run one trial pass and check the outputs.

        The network must accept the inputs, its outputs must suit the likelihood and be finite, and it must not draw
        random numbers. If the method draws the dropout masks (`drops`), dropout in the network is disabled. Targets
        in memory are then checked again, because labels can only be compared with outputs of known shape.
        """
        require(len(batch) > 0, "data", "fit", "be inputs and targets, such as (X, y)", None)
        self.network.disable_dropout(modules=drops)
        outputs, drew = self._try(batch)
        if drew and drops:
            self.network.disable_dropout(modules=True, functions=True)
            outputs, drew = self._try(batch)
        if drew:
            raise InputError(
                "The network must not draw random numbers of its own, got dropout in training mode: "
                "call net.eval(), or set its p to 0, before Model; or fit with Dropout()."
            )
        targets = batch[-1]
        require(outputs.requires_grad, "output", "the network", "depend on its parameters", "a detached tensor")
        outputs = outputs.detach()
        rows = outputs.ndim >= 1 and len(outputs) == len(targets)
        got = f"the shape {tuple(outputs.shape)}"
        require(rows, "output", "the network", f"have a row for each of the {len(targets)} inputs", got)
        arranged = self.likelihood.arrange(outputs, targets.shape[1:])
        self.likelihood.check(arranged, targets)
        finite = bool(torch.isfinite(outputs).all())
        require(finite, "output", "the network", "be finite at its initial weights", "NaN or infinity")
        self._example = arranged[:1]
        if data is not None and data.tensors is not None:
            self.prepare(data.tensors)

    def event_shape(self, batch: Batch) -> torch.Size:
        """Return the shape of one target."""
        return batch[-1].shape[1:] if batch else torch.Size()

    def warn_of_scale(self, data: Data) -> None:
        """Warn if data are far from unit scale, which default priors, learning rates and noise scales assume."""
        if not self.standardise:
            warn_of_scale(data, self.network, self.likelihood.unit_scale)

    def _try(self, batch: Batch) -> tuple[Tensor, bool]:
        """Return the outputs of a pass in training mode, and whether it drew random numbers."""
        inputs = batch[:-1]
        before = torch.get_rng_state(), (torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None)
        try:
            with torch.enable_grad():
                outputs = self.network.try_once(inputs)
            drew = not torch.equal(before[0], torch.get_rng_state())
            if before[1] is not None:
                drew = drew or not torch.equal(before[1], torch.cuda.get_rng_state(self.device))
        except InputError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs)
            reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
            raise InputError(f"The network must take the inputs, got {shapes} and it raised {reason}") from error
        finally:
            torch.set_rng_state(before[0])
            if before[1] is not None:
                torch.cuda.set_rng_state(before[1], self.device)
        return outputs, drew

    # Initialisation.

    def start(self, targets: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return starting vectors, (*shape, P): the network's weights for shape (), else newly initialised ones.

        The learnt parameters of the likelihood and the prior follow the weights.
        """
        tail = {f"likelihood.{name}": value for name, value in self.likelihood.start(targets).items()}
        pieces = [self.layout[name].bijector.inverse(value).reshape(-1) for name, value in tail.items()]
        pieces.append(self.prior.start(self.network.initial))
        weights = (
            [self.network.initial] if shape == () else [self.network.fresh(generator) for _ in range(shape.numel())]
        )
        return torch.stack([torch.cat([w, *pieces]) for w in weights]).reshape(*shape, self.layout.size)

    def buffers(self) -> dict[str, Tensor]:
        """Return a copy of the buffers that training writes."""
        return self.network.own_buffers()

    def fixed(self) -> dict[str, Tensor]:
        """Return the tensors that predictions depend on and no fit changes."""
        return self.network.fixed()

    def in_one_pass(self, batch: Batch) -> bool:
        """Whether the network evaluates many vectors together on a batch."""
        return self.evaluation.in_one_pass(batch[:-1])

    def member(self, buffers: Buffers, index: int) -> dict[str, Tensor]:
        """Return the buffers of one member, by its index in the flattened leading shape."""
        return self.network.member(buffers, index)

    # log p(y | x, w), per row or summed.

    def outputs(
        self,
        w: Tensor,
        inputs: Batch,
        buffers: Buffers,
        event: torch.Size,
        limit: int = MEMORY_LIMIT,
        shared: SharedInputs | None = None,
    ) -> Tensor:
        """Return the outputs in evaluation mode for each vector: (S, P) -> (S, n, ...).

        Args:
            w: Vectors of unconstrained coordinates, (S, P).
            inputs: The inputs of n rows.
            buffers: The buffers of the fit.
            event: The shape of one target; outputs are arranged for it.
            limit: Bytes of activations that are held at once; rows and draws are evaluated in chunks.
            shared: A cache for several calls with the same inputs. Default: None.

        Returns:
            The arranged outputs, (S, n, ...).
        """
        return self._arranged(self.evaluation.outputs(w, inputs, buffers, limit, shared), event)

    def _arranged(self, outputs: Tensor, event: torch.Size) -> Tensor:
        """Arrange outputs (S, n, ...) for targets of this event shape, draw by draw."""
        flat = self.likelihood.arrange(outputs.flatten(0, 1), event)
        return flat.unflatten(0, outputs.shape[:2])

    def learnt_at(self, w: Tensor) -> dict[str, Tensor]:
        """Return the likelihood's learnt parameters at w (*B, P), by their short names."""
        return self._read_tail(w[..., self.learnt])

    def log_likelihood(self, w: Tensor, batch: Batch, buffers: Buffers) -> Tensor:
        """Return log p(y_n | x_n, w) per row, (*B, P) -> (*B, n), without gradient."""
        flat = w.reshape(-1, w.shape[-1])
        with torch.no_grad():
            outputs = self.outputs(flat, batch[:-1], buffers, batch[-1].shape[1:])
            values = self.likelihood.log_prob(outputs, batch[-1], self.learnt_at(flat))
        return values.reshape(*w.shape[:-1], -1)

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Batch, factor: float | Tensor, buffers: Buffers, offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return sum_n factor_n log p(y_n | x_n, w) and its gradient, (*B, P) -> (*B,), (*B, P).

        `factor` is a number or has one value per row, (n,). An `offset` (*B, n, ...) is added to the arranged outputs
        of each vector. For one vector the gradient is a buffer that the next call overwrites.
        """
        return self.evaluation.values_and_grads(w, batch, factor, buffers, offset)

    def log_likelihood_sum(self, w: Tensor, batch: Batch, weights: Tensor | None = None) -> Tensor:
        """Return sum_n weights_n log p(y_n | x_n, w) for one vector (P,), differentiable by autograd.

        The network's initial buffers are used.
        """
        self.network.set_mode(train=True)
        return self.evaluation.sum(w, batch, self.buffers(), 1.0 if weights is None else weights)

    def _log_prob(self, outputs: Tensor, targets: Tensor, tail: Tensor, offset: Tensor | None = None) -> Tensor:
        """Return log p(y_n | outputs) per row, from outputs (*B, n, ...) and learnt coordinates (*B, k)."""
        arrange = self.likelihood.arrange if tail.ndim == 1 else self._arranged
        arranged = arrange(outputs, targets.shape[1:])
        return self.likelihood.log_prob(
            arranged if offset is None else arranged + offset, targets, self._read_tail(tail)
        )

    def _read_tail(self, tail: Tensor) -> dict[str, Tensor]:
        """Return the likelihood's parameters, by their short names, from its learnt coordinates (*B, k)."""
        found, offset = {}, self.network.size
        for name in self.likelihood.declared:
            block = self.layout[f"likelihood.{name}"]
            u = tail[..., block.start - offset : block.stop - offset]
            found[name] = block.bijector.forward(u.reshape((*tail.shape[:-1], *block.bijector.free_shape)))
        return found

    def describe(self) -> dict[str, Any]:
        """Return the properties that must match those of a stored posterior."""
        network = re.sub(r" at 0x[0-9a-f]+", "", repr(self.network.skeleton))
        found = {"layout": self.layout.signature(), "likelihood": repr(self.likelihood), "network": network}
        return {**found, "standardise": True} if self.standardise else found

    def bound_tensors(self) -> dict[str, Tensor]:
        """Return the units of inputs and targets."""
        return {} if self.units is None else self.units.tensors()

    def like(self, described: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Model:
        """Return the model in the units that a file stores."""
        return self.with_units(Standardisation.of_tensors(tensors)) if tensors and self.standardise else self

    def prior_as_given(self) -> Prior:
        """Return the prior before the evidence scaled it; penalties on q are evaluated at unit scales."""
        return with_unit_scale_penalties(getattr(self.prior, "given", self.prior))


def restored(kind: type[Model], net: nn.Module, likelihood: Likelihood, prior: Any, state: dict[str, Any]) -> Model:
    """Rebuild a pickled model, with its network in the state it had when the model was made."""
    given = copy.deepcopy(net)
    for name, t in [*given.named_parameters(), *given.named_buffers()]:
        t.data.copy_(state["tensors"].get(name, t).reshape(t.shape))
    for name, module in given.named_modules():
        module.training = state["modes"][name]
    model = object.__new__(kind)
    Model.__init__(model, given, likelihood, prior, standardise=state.get("standardise", False))
    model.net, model.prior, model._example = net, state["prior"] or model.prior, state["example"]
    model.network.written = state["written"]
    model.network.disable_dropout(state["silent"], state["quiet"])
    units = state.get("units")
    return model if units is None else model.with_units(units)


def rows_given(data: Any, owner: str) -> Data:
    """Read inputs and targets that the user gave to `owner`, which error messages then name instead of `fit`."""
    try:
        rows = Data.of(data)
    except InputError as error:
        raise InputError(str(error).replace(" of fit ", f" of {owner} ", 1)) from error
    parts = 0 if rows.num_data is None else len(rows.some(1))
    got = "None" if rows.num_data is None else f"{parts} part"
    require(parts >= 2, "data", owner, "be inputs and targets, such as (X, y)", got)
    return rows


def inputs_as_given(rows: Data, inputs: Batch) -> Batch:
    """Return inputs of bound rows in the user's units, as `predict` takes them."""
    units = getattr(getattr(rows.prepare, "__self__", None), "units", None)
    return inputs if units is None else units.original_inputs(inputs)
