"""Model: a network, a likelihood and a prior; what is believed before the data.

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

from priory.core.data import Batch, Data, check_finite, part
from priory.core.errors import InputError, require, warn
from priory.core.flat import Layout
from priory.likelihoods import Likelihood
from priory.models.base import BaseModel, Capabilities
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
    """A network with a likelihood and a prior.

    The network is copied as it is now, and never changed. `prior` is any `torch.distributions` distribution,
    a number (the scale of a centred normal), a scale rule ("glorot", "he", "fan_in"), "flat",
    `priors.Hierarchical()` for a precision that is learnt, or a dict from name patterns to these, in which the
    first pattern that matches a name counts.

    >>> from torch import nn
    >>> from priory.likelihoods import Gaussian
    >>> Model(nn.Linear(2, 1), Gaussian(), prior={"weight": "he", "*": 1.0}).layout.names
    ('weight', 'bias', 'likelihood.noise')
    """

    def __init__(self, net: nn.Module, likelihood: Likelihood, prior: Any = "glorot") -> None:
        require(
            isinstance(likelihood, Likelihood),
            "likelihood",
            "Model",
            "be a likelihood such as Gaussian() or Categorical()",
            likelihood.__name__ + " itself" if isinstance(likelihood, type) else type(likelihood).__name__,
        )
        self.net, self.likelihood = net, likelihood
        self.network = Network(net)
        own = {f"likelihood.{name}": d for name, d in likelihood.declared.items()}
        believed = read_prior(prior, list(self.network.params), self.network.skeleton, self.network.dtype)
        precisions = declared(believed)
        tail = {**{name: d.param for name, d in own.items()}, **precisions}
        clash = [name for name in tail if name in self.network.params]
        require(not clash, "net", "Model", "have no parameter of the likelihood's or the prior's name", clash)
        self.layout = Layout({**self.network.params, **tail})
        by_name = {**believed, **{name: d.prior for name, d in own.items()}}
        self.prior = Prior(self.layout, by_name, self.network.initial)
        self.dtype, self.device = self.network.dtype, self.network.device
        # the likelihood's coordinates; the prior's come after them
        self.learnt = slice(self.network.size, self.layout.size - len(precisions))
        self.evaluation = Evaluation(self.network, self._log_prob, self.layout.size, self.learnt)
        self._example: Tensor | None = None  # one row of outputs, once a trial pass has shown them
        self._prior_text, self._prior_argument = str(prior), prior

    def __repr__(self) -> str:
        weights = f"{type(self.net).__name__} with {self.network.size:,} weights"
        return f"Model({weights}, {self.likelihood!r}, prior={self._prior_text})"

    def __copy__(self) -> Model:
        model = object.__new__(type(self))
        vars(model).update(vars(self))
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again from what it was made of: which parameters are whose is known by identity, which pickle loses."""
        network = self.network
        drawn = {name: network.initial[place] for name, place in network.place_of.items()}
        found = {"written": network.written, "modes": network.modes, "silent": network.silent, "quiet": network.quiet}
        own = {"prior": self.prior, "example": self._example, "tensors": {**network.fixed(), **drawn}}
        return restored, (type(self), self.net, self.likelihood, self._prior_argument, {**own, **found})

    @property
    def capabilities(self) -> Capabilities:
        """A network, whose posteriors predict."""
        return CAPABILITIES

    def with_prior(self, prior: Prior) -> Model:
        """The same network and likelihood under another prior over the same coordinates."""
        model = copy.copy(self)
        model.prior = prior
        return model

    # What comes in.

    def prepare(self, batch: Batch) -> Batch:
        """A batch in the model's types, on its device; targets last."""
        require(len(batch) >= 2, "data", "fit", "be inputs and targets, such as (X, y)", f"{len(batch)} part")
        for i, t in enumerate(batch):
            check_finite(t, part(i, len(batch)))
        targets = self.prepare_targets(batch[-1])
        if self._example is not None:
            self.likelihood.check(self._example, targets)
        return (*self.prepare_inputs(batch[:-1]), targets)

    def prepare_inputs(self, inputs: Batch) -> Batch:
        """Inputs in the network's type; integers stay where a network may look something up by them."""
        numbers = self.network.takes_numbers
        return tuple(
            x.to(self.device, self.dtype if x.is_floating_point() or (numbers and not x.is_complex()) else x.dtype)
            for x in inputs
        )

    def prepare_targets(self, targets: Tensor) -> Tensor:
        """Targets as the likelihood takes them."""
        return self.likelihood.prepare(targets, self.dtype).to(self.device)

    def check(self, batch: Batch, data: Data | None = None, drops: bool = False) -> None:
        """One trial pass: the network takes the inputs, fits the likelihood, is finite, and draws nothing at random.

        For a method that draws dropout's masks itself, the network's own does nothing. Targets in memory are then
        checked again, now that the network's outputs are known: labels must fit them.
        """
        require(len(batch) > 0, "data", "fit", "be inputs and targets, such as (X, y)", None)
        self.network.silence(modules=drops)
        outputs, drew = self._try(batch)
        if drew and drops:
            self.network.silence(modules=True, functions=True)
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
        """The shape of one target."""
        return batch[-1].shape[1:] if batch else torch.Size()

    def warn_of_scale(self, data: Data) -> None:
        """Say when numbers are far from unit scale, for which priors, learning rates and first noises are made."""
        if data.tensors is None:
            return
        targets = [("targets", data.tensors[-1])] if self.likelihood.unit_scale else []
        for name, t in [("inputs", data.tensors[0]), *targets]:
            if not t.is_floating_point() or t.ndim > 2 or len(t) < 2:
                continue
            columns = t.double().reshape(len(t), -1)
            centre, spread, top = columns.mean(0), columns.std(0), columns.abs().amax(0)
            odd = (spread > 50) | ((top > 0) & (top < 0.05)) | (centre.abs() > 20 * spread.clamp_min(0.5))
            if bool(odd.any()):
                column = int(odd.nonzero()[0])
                where = f", column {column}," if columns.shape[1] > 1 else ""
                warn(
                    f"The {name}{where} have mean {float(centre[column]):.3g} and standard deviation "
                    f"{float(spread[column]):.3g}: standardise them, as priors and learning rates are made for unit "
                    "scale."
                )

    def _try(self, batch: Batch) -> tuple[Tensor, bool]:
        """The outputs of a pass in training mode, and whether it drew random numbers."""
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

    # Where a fit begins.

    def start(self, targets: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The weights as given for shape (), else fresh ones; then what is learnt beside them, (*shape, P)."""
        tail = {f"likelihood.{name}": value for name, value in self.likelihood.start(targets).items()}
        pieces = [self.layout[name].bijector.inverse(value).reshape(-1) for name, value in tail.items()]
        pieces.append(self.prior.start(self.network.initial))
        weights = (
            [self.network.initial] if shape == () else [self.network.fresh(generator) for _ in range(shape.numel())]
        )
        return torch.stack([torch.cat([w, *pieces]) for w in weights]).reshape(*shape, self.layout.size)

    def buffers(self) -> dict[str, Tensor]:
        """A copy of the buffers that training writes, for a fit to change."""
        return self.network.own_buffers()

    def fixed(self) -> dict[str, Tensor]:
        """What predictions depend on and no fit changes."""
        return self.network.fixed()

    def in_one_pass(self, batch: Batch) -> bool:
        """Whether the network evaluates many vectors together on a batch."""
        return self.evaluation.in_one_pass(batch[:-1])

    def member(self, buffers: Buffers, index: int) -> dict[str, Tensor]:
        """The buffers of one member, by its place in the flattened leading shape; draws in front of it share them."""
        return self.network.member(buffers, index)

    # log p(y | x, w), a datum or summed.

    def outputs(
        self,
        w: Tensor,
        inputs: Batch,
        buffers: Buffers,
        event: torch.Size,
        limit: int = MEMORY_LIMIT,
        shared: SharedInputs | None = None,
    ) -> Tensor:
        """Outputs in evaluation mode for each vector, arranged for targets of this event: (S, P) -> (S, n, ...).

        In chunks of rows and draws whose activations stay under `limit` bytes. `shared` keeps what several calls with
        the same inputs have in common.
        """
        return self._arranged(self.evaluation.outputs(w, inputs, buffers, limit, shared), event)

    def _arranged(self, outputs: Tensor, event: torch.Size) -> Tensor:
        """Outputs (S, n, ...) arranged for targets of this event, draw by draw."""
        flat = self.likelihood.arrange(outputs.flatten(0, 1), event)
        return flat.unflatten(0, outputs.shape[:2])

    def learnt_at(self, w: Tensor) -> dict[str, Tensor]:
        """The likelihood's own parameters at w (*B, P), by their short names."""
        return self._read_tail(w[..., self.learnt])

    def log_likelihood(self, w: Tensor, batch: Batch, buffers: Buffers) -> Tensor:
        """log p(y_n | x_n, w) a datum, (*B, P) -> (*B, n), without gradient."""
        flat = w.reshape(-1, w.shape[-1])
        with torch.no_grad():
            outputs = self.outputs(flat, batch[:-1], buffers, batch[-1].shape[1:])
            values = self.likelihood.log_prob(outputs, batch[-1], self.learnt_at(flat))
        return values.reshape(*w.shape[:-1], -1)

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Batch, factor: float | Tensor, buffers: Buffers, offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """sum_n factor_n log p(y_n | x_n, w) and its gradient, (*B, P) -> (*B,), (*B, P); `factor` is a number or (n,).

        An `offset` (*B, n, ...) is added to the arranged outputs of each vector. For one vector the gradient is a
        buffer that the next call overwrites.
        """
        return self.evaluation.values_and_grads(w, batch, factor, buffers, offset)

    def log_likelihood_sum(self, w: Tensor, batch: Batch, weights: Tensor | None = None) -> Tensor:
        """sum_n weights_n log p(y_n | x_n, w) for one vector, through which autograd goes; buffers as given."""
        self.network.set_mode(train=True)
        return self.evaluation.sum(w, batch, self.buffers(), 1.0 if weights is None else weights)

    def _log_prob(self, outputs: Tensor, targets: Tensor, tail: Tensor, offset: Tensor | None = None) -> Tensor:
        """log p(y_n | outputs) per row, from outputs (*B, n, ...) and the likelihood's learnt coordinates (*B, k)."""
        arrange = self.likelihood.arrange if tail.ndim == 1 else self._arranged
        arranged = arrange(outputs, targets.shape[1:])
        return self.likelihood.log_prob(
            arranged if offset is None else arranged + offset, targets, self._read_tail(tail)
        )

    def _read_tail(self, tail: Tensor) -> dict[str, Tensor]:
        """The likelihood's parameters, by their short names, from its learnt coordinates (*B, k)."""
        found, offset = {}, self.network.size
        for name in self.likelihood.declared:
            block = self.layout[f"likelihood.{name}"]
            u = tail[..., block.start - offset : block.stop - offset]
            found[name] = block.bijector.forward(u.reshape((*tail.shape[:-1], *block.bijector.free_shape)))
        return found

    def describe(self) -> dict[str, Any]:
        """What a stored posterior must agree with."""
        network = re.sub(r" at 0x[0-9a-f]+", "", repr(self.network.skeleton))
        return {"layout": self.layout.signature(), "likelihood": repr(self.likelihood), "network": network}

    def prior_as_given(self) -> Prior:
        """The prior before evidence scaled it; a penalty on q, which has no density at one w, at unit scales."""
        return with_unit_scale_penalties(getattr(self.prior, "given", self.prior))


def restored(kind: type[Model], net: nn.Module, likelihood: Likelihood, prior: Any, state: dict[str, Any]) -> Model:
    """A model from what pickle kept of it; its network as it was when the model was made."""
    given = copy.deepcopy(net)
    for name, t in [*given.named_parameters(), *given.named_buffers()]:
        t.data.copy_(state["tensors"].get(name, t).reshape(t.shape))
    for name, module in given.named_modules():
        module.training = state["modes"][name]
    model = object.__new__(kind)
    Model.__init__(model, given, likelihood, prior)
    model.net, model.prior, model._example = net, state["prior"], state["example"]
    model.network.written = state["written"]
    model.network.silence(state["silent"], state["quiet"])
    return model


def rows_given(data: Any, owner: str) -> Data:
    """Inputs and targets that a person gives to something other than a fit, which the sentences then name."""
    try:
        rows = Data.of(data)
    except InputError as error:
        raise InputError(str(error).replace(" of fit ", f" of {owner} ", 1)) from error
    parts = 0 if rows.num_data is None else len(rows.some(1))
    got = "None" if rows.num_data is None else f"{parts} part"
    require(parts >= 2, "data", owner, "be inputs and targets, such as (X, y)", got)
    return rows
