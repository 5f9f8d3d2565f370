"""Model: a network, a likelihood and a prior; what is believed before the data.

    w ~ prior,    y_n ~ likelihood(f_w(x_n), learnt parameters)

The network's weights, the parameters that the likelihood learns ("likelihood.noise") and the precisions that a
hierarchical prior learns ("prior.0.weight.precision") are one flat vector w, in this order. Sums here are over the rows
of a batch; the factor N/n, temperatures and signs belong to `Target`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.data import Batch, Data, check_finite, part
from priory.core.errors import InputError, require
from priory.core.flat import Layout
from priory.likelihoods import Likelihood
from priory.network.chain import Chain, Chains, differentiable
from priory.network.skeleton import MEMORY_LIMIT, SMALL_WORK, Network
from priory.network.vectorise import Vectorised
from priory.priors import Prior, declared, read_prior

if TYPE_CHECKING:
    from torch import nn

Buffers = Mapping[str, Tensor]


class Model:
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
        self._gradient = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)
        self._sum = Vectorised(self._functional_sum, "This network")
        self._forward = Vectorised(lambda v, inputs: self.network.functional(v, inputs, {}), "This network")
        self._example: Tensor | None = None  # one row of outputs, once a trial pass has shown them
        self._prior_text = str(prior)

    def __repr__(self) -> str:
        weights = f"{type(self.net).__name__} with {self.network.size:,} weights"
        return f"Model({weights}, {self.likelihood!r}, prior={self._prior_text})"

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

    def check(self, batch: Batch, drops: bool = False) -> None:
        """One trial pass: the network takes the inputs, fits the likelihood, is finite, and draws nothing at random.

        For a method that draws dropout's masks itself, the network's own does nothing.
        """
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

    def member(self, buffers: Buffers, index: int) -> dict[str, Tensor]:
        """The buffers of one member, by its place in the flattened leading shape; draws in front of it share them."""
        own = {}
        for name, b in buffers.items():
            shape = self.network.given[name].shape
            flat = b.reshape((-1, *shape)) if b.ndim > len(shape) else b[None]
            own[name] = flat[index % len(flat)]
        return own

    # log p(y | x, w), a datum or summed.

    def outputs(
        self,
        w: Tensor,
        inputs: Batch,
        buffers: Buffers,
        event: torch.Size,
        limit: int = MEMORY_LIMIT,
        chains: Chains | None = None,
    ) -> Tensor:
        """Outputs in evaluation mode for each vector, arranged for targets of this event: (S, P) -> (S, n, ...).

        In chunks of rows and draws whose activations stay under `limit` bytes. `chains` keeps what several calls with
        the same inputs share.
        """
        chains = chains or Chains()
        self.network.set_mode(train=False)
        each = max(1, self.network.activations(inputs, self.member(buffers, 0))) * w.element_size()
        rows = max(1, min(len(inputs[0]), limit // each))
        draws = max(1, min(len(w), limit // (each * rows)))
        pieces = []
        for start in range(0, len(inputs[0]), rows):
            some = tuple(x[start : start + rows] for x in inputs)
            chain = self._chain(some, chains, keep=rows == len(inputs[0]))
            if chain is not None and draws == len(w):
                pieces.append(chain(w, mirrored=chains.centre is not None and len(w) % 2 == 0))
                continue
            parts = [self._outputs(w[s : s + draws], some, buffers, s, chain) for s in range(0, len(w), draws)]
            pieces.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        return self._arranged(torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0], event)

    def _chain(self, inputs: Batch, chains: Chains, keep: bool) -> Chain | None:
        """The chain at these inputs, if the network is one; kept for the next call if they are all that there are."""
        if not self._chained(inputs):
            return None
        if chains.kept is None or not keep:
            chains.kept = Chain(self.network, inputs[0], chains.centre)
        return chains.kept

    def _chained(self, inputs: Batch) -> bool:
        """Whether the network is a chain at these inputs: rows of numbers in its own type."""
        x = inputs[0]
        return bool(self.network.chain) and len(inputs) == 1 and x.ndim == 2 and x.dtype == self.dtype

    def _outputs(self, w: Tensor, inputs: Batch, buffers: Buffers, first: int, chain: Chain | None) -> Tensor:
        """One chunk: a batched product a layer for a plain chain, vmap for other small ones, a loop for the rest."""
        network, x = self.network, inputs[0]
        if chain is not None:
            return chain(w, mirrored=False)
        if len(w) > 1 and network.dense and not buffers and len(x) * network.size <= SMALL_WORK:
            self._forward.loop = self._forward.loop or self._sum.loop  # one warning is enough
            return self._forward.values(w, inputs)
        members = (self.member(buffers, first + i) for i in range(len(w)))
        return torch.stack([network(v, inputs, own, train=False) for v, own in zip(w.unbind(0), members, strict=True)])

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
        self, w: Tensor, batch: Batch, factor: float, buffers: Buffers, offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """factor x sum_n log p(y_n | x_n, w) and its gradient, (*B, P) -> (*B,), (*B, P).

        An `offset` (*B, n, ...) is added to the arranged outputs of each vector. For one vector the gradient is a
        buffer that the next call overwrites.
        """
        if w.ndim == 1:
            return self._one(w, batch, factor, buffers, offset)
        flat = w.reshape(-1, w.shape[-1])
        own = None if offset is None else offset.reshape(len(flat), *offset.shape[w.ndim - 1 :])
        if self.network.batches_well(len(batch[0])) and not self.network.written:
            self.network.set_mode(train=True)
            if self._chained(batch[:-1]):
                values, gradients = self._many(flat, batch, own)
            else:
                self._sum.loop = self._sum.loop or self._forward.loop
                values, gradients = self._sum.values_and_grads(flat, batch, {}, each=() if own is None else (own,))
            values, gradients = values * factor, gradients * factor
        else:
            values, gradients = torch.empty_like(flat[:, 0]), torch.empty_like(flat)
            for i, v in enumerate(flat):
                moved = None if own is None else own[i]
                values[i], gradients[i] = self._one(v, batch, factor, self.member(buffers, i), moved)
        return values.reshape(w.shape[:-1]), gradients.reshape(w.shape)

    def _many(self, w: Tensor, batch: Batch, offset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over the rows and their gradients for a chain at vectors (S, P): a batched product a layer."""
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self._arranged(differentiable(self.network, leaf, batch[0]), batch[-1].shape[1:])
            outputs = outputs if offset is None else outputs + offset
            values = self.likelihood.log_prob(outputs, batch[-1], self.learnt_at(leaf)).sum(-1)
            (gradients,) = torch.autograd.grad(values.sum(), leaf)  # vectors don't meet: each has its own gradient
        return values.detach(), gradients

    def _one(
        self, w: Tensor, batch: Batch, factor: float, buffers: Buffers, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        inputs, targets = batch[:-1], batch[-1]
        self._gradient.zero_()
        self.network.collect_gradients_in(self._gradient)
        with torch.enable_grad():
            tail = w[self.learnt].detach().requires_grad_()
            outputs = self.network(w, inputs, buffers, train=True)
            total = factor * self._log_prob(outputs, targets, self._read_tail(tail), offset).sum()
            total.backward()
        if tail.grad is not None:
            self._gradient[self.learnt] = tail.grad
        return total.detach(), self._gradient

    def log_likelihood_sum(self, w: Tensor, batch: Batch) -> Tensor:
        """sum_n log p(y_n | x_n, w) for one vector, as a function that autograd goes through; buffers as given."""
        self.network.set_mode(train=True)
        return self._functional_sum(w, batch, self.buffers())

    def _functional_sum(self, w: Tensor, batch: Batch, buffers: Buffers, offset: Tensor | None = None) -> Tensor:
        outputs = self.network.functional(w, batch[:-1], buffers)
        return self._log_prob(outputs, batch[-1], self._read_tail(w[self.learnt]), offset).sum()

    def _log_prob(
        self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor], offset: Tensor | None = None
    ) -> Tensor:
        arranged = self.likelihood.arrange(outputs, targets.shape[1:])
        return self.likelihood.log_prob(arranged if offset is None else arranged + offset, targets, learnt)

    def _read_tail(self, tail: Tensor) -> dict[str, Tensor]:
        """The same from the learnt coordinates alone, (*B, k)."""
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
