"""Evaluates a network at one or many vectors of weights, and chooses the strategy.

    Plain           one vector, or a network that the other strategies do not cover: the skeleton is bound to each
                    vector in turn, and a backward pass per vector writes to one flat buffer
    Layers          a sequence of linear layers and elementwise activations: one batched product per layer, for outputs
                    (`LayerChain`) and through autograd (`chain_outputs`)
    Vmap            other small dense networks: `torch.vmap`; gradients are traced once per shape (`Vectorised`)
    RecordedGraph   samplers, whose data never change: values and gradients of the whole log joint at all vectors, as a
                    rewritten graph with the data inside

`Evaluation.strategy` chooses among the first three by shapes and layer types, never by measured time, so a result
does not depend on the load of the machine. A sampler asks `Evaluation.in_one_pass` whether it may record its log
joint over all of its vectors (`priory.network.recorded_graph`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.data import weighted_sum
from priory.network.layer_chain import SharedInputs, chain_outputs
from priory.network.skeleton import MAX_VMAP_WORK, MEMORY_LIMIT, Network
from priory.network.vectorise import Vectorised

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from priory.core.data import Batch

    Buffers = Mapping[str, Tensor]
    # outputs (*B, n, ...), targets (n, ...), learnt coordinates (*B, k) and an offset -> log p(y_n | outputs), (*B, n)
    LogProb = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Evaluation:
    """Outputs of a network, and sums of log-likelihoods with their gradients, at vectors of weights.

    Args:
        network: The network, whose weights are the first coordinates of a vector.
        log_prob: log p(y_n | outputs) per row, (*B, n), as a function of outputs (*B, n, ...), targets (n, ...), the
            likelihood's learnt coordinates (*B, k) and an offset that is added to the arranged outputs, or None.
        size: The number of coordinates P of a vector.
        learnt: The slice of a vector that holds the likelihood's learnt coordinates.
    """

    def __init__(self, network: Network, log_prob: LogProb, size: int, learnt: slice) -> None:
        self.network, self.log_prob, self.size, self.learnt = network, log_prob, size, learnt
        self.plain, self.layers, self.vmap = Plain(self), Layers(self), Vmap(self)

    # Choice of the strategy.

    def strategy(self, inputs: Batch, vectors: int, buffers: Buffers, gradients: bool) -> Plain | Layers | Vmap:
        """The strategy for this many vectors at these inputs."""
        network, rows = self.network, len(inputs[0])
        if gradients and (network.written or not network.batches_well(rows)):
            return self.plain
        if self.is_chain(inputs):
            return self.layers
        if gradients:
            return self.vmap
        small = network.dense and not buffers and rows * network.size <= MAX_VMAP_WORK
        return self.vmap if small and vectors > 1 else self.plain

    def is_chain(self, inputs: Batch) -> bool:
        """Whether the network is a chain of layers at these inputs: one matrix of the network's dtype."""
        x = inputs[0]
        return bool(self.network.layer_chain) and len(inputs) == 1 and x.ndim == 2 and x.dtype == self.network.dtype

    def in_one_pass(self, inputs: Batch) -> bool:
        """Whether gradients at many vectors are computed in one pass, rather than in a loop over them."""
        return self.strategy(inputs, 2, {}, gradients=True) is not self.plain

    # Outputs, values and gradients.

    def outputs(
        self,
        w: Tensor,
        inputs: Batch,
        buffers: Buffers,
        limit: int = MEMORY_LIMIT,
        shared: SharedInputs | None = None,
    ) -> Tensor:
        """The network's outputs in evaluation mode, (S, P) -> (S, n, ...).

        Args:
            w: The vectors, (S, P).
            inputs: The network's inputs, each with n rows.
            buffers: Buffers that training wrote, with the leading shape of the vectors or shared by all of them.
            limit: Bytes of activations held at a time; rows and vectors are evaluated in chunks of this size.
            shared: State that several calls with the same inputs share; new for each call if None.
        """
        shared, network = shared or SharedInputs(), self.network
        network.set_mode(train=False)
        each = max(1, network.activations(inputs, network.member(buffers, 0))) * w.element_size()
        rows = max(1, min(len(inputs[0]), limit // each))
        draws = max(1, min(len(w), limit // (each * rows)))
        together = draws == len(w)
        pieces = []
        for start in range(0, len(inputs[0]), rows):
            row_inputs = tuple(x[start : start + rows] for x in inputs)
            one_block = together and rows == len(inputs[0])
            block_state = shared if one_block else SharedInputs(shared.centre if together else None)
            parts = []
            for first in range(0, len(w), draws):
                vectors = w[first : first + draws]
                way = self.strategy(row_inputs, len(vectors), buffers, gradients=False)
                parts.append(way.outputs(vectors, row_inputs, buffers, first, block_state))
            pieces.append(parts[0] if together else torch.cat(parts))
        return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]

    def values_and_grads(
        self, w: Tensor, batch: Batch, factor: float | Tensor, buffers: Buffers, offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """sum_n factor_n log p(y_n | x_n, w) in training mode and its gradient, (*B, P) -> (*B,), (*B, P).

        Args:
            w: The vectors, (*B, P).
            batch: Inputs and, last, targets.
            factor: Multiplies each row's log-likelihood: one number, or one per row, (n,).
            buffers: Buffers that training writes, with the leading shape of the vectors.
            offset: Added to the arranged outputs of each vector, (*B, n, ...).

        Returns:
            Values and gradients. For one vector the gradient is a buffer that the next call overwrites.
        """
        if w.ndim == 1:
            return self.plain.value_and_grad(w, batch, factor, buffers, offset)
        flat = w.reshape(-1, w.shape[-1])
        vector_offset = None if offset is None else offset.reshape(len(flat), *offset.shape[w.ndim - 1 :])
        way = self.strategy(batch[:-1], len(flat), buffers, gradients=True)
        values, gradients = way.values_and_grads(flat, batch, factor, buffers, vector_offset)
        return values.reshape(w.shape[:-1]), gradients.reshape(w.shape)

    def sum(
        self, w: Tensor, batch: Batch, buffers: Buffers, weights: float | Tensor = 1.0, offset: Tensor | None = None
    ) -> Tensor:
        """sum_n weights_n log p(y_n | x_n, w) at one vector (P,), as a pure function for autograd and vmap.

        `weights` is (n,), or the number 1.
        """
        outputs = self.network.functional(w, batch[:-1], buffers)
        values = self.log_prob(outputs, batch[-1], w[self.learnt], offset)
        return weighted_sum(values, weights if isinstance(weights, Tensor) else None)


class Plain:
    """One vector at a time: the skeleton's parameters are views of it."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._of, network = evaluation, evaluation.network
        self._gradient = torch.zeros(evaluation.size, dtype=network.dtype, device=network.device)

    def outputs(self, w: Tensor, inputs: Batch, buffers: Buffers, first: int, shared: SharedInputs) -> Tensor:
        """The outputs at vectors (S, P), (S, n, ...); vector i uses the buffers of member `first + i`."""
        network = self._of.network
        members = (network.member(buffers, first + i) for i in range(len(w)))
        return torch.stack([network(v, inputs, b, train=False) for v, b in zip(w.unbind(0), members, strict=True)])

    def value_and_grad(
        self, w: Tensor, batch: Batch, factor: float | Tensor, buffers: Buffers, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The sum over rows at one vector (P,) and its gradient (P,), a buffer that the next call overwrites."""
        of, gradient = self._of, self._gradient
        gradient.zero_()
        of.network.collect_gradients_in(gradient)
        with torch.enable_grad():
            tail = w[of.learnt].detach().requires_grad_()
            outputs = of.network(w, batch[:-1], buffers, train=True)
            total = weighted_sum(of.log_prob(outputs, batch[-1], tail, offset), factor)
            total.backward()
        if tail.grad is not None:
            gradient[of.learnt] = tail.grad
        return total.detach(), gradient

    def values_and_grads(
        self, w: Tensor, batch: Batch, factor: float | Tensor, buffers: Buffers, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums over rows at vectors (S, P) and their gradients (S, P)."""
        values, gradients = torch.empty_like(w[:, 0]), torch.empty_like(w)
        for i, v in enumerate(w):
            member_buffers = self._of.network.member(buffers, i)
            member_offset = None if offset is None else offset[i]
            values[i], gradients[i] = self.value_and_grad(v, batch, factor, member_buffers, member_offset)
        return values, gradients


class Layers:
    """All vectors together through a chain of layers: one batched product per layer."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._of = evaluation

    def outputs(self, w: Tensor, inputs: Batch, buffers: Buffers, first: int, shared: SharedInputs) -> Tensor:
        """The outputs at vectors (S, P): (S, n, ...)."""
        return shared.chain(self._of.network, inputs[0])(w, mirrored=len(w) % 2 == 0)

    def values_and_grads(
        self, w: Tensor, batch: Batch, factor: float | Tensor, buffers: Buffers, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums over rows at vectors (S, P) and their gradients (S, P)."""
        of = self._of
        of.network.set_mode(train=True)
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            outputs = chain_outputs(of.network, leaf, batch[0])
            each = of.log_prob(outputs, batch[-1], leaf[:, of.learnt], offset)
            values = weighted_sum(each, factor if isinstance(factor, Tensor) else None)
            (gradients,) = torch.autograd.grad(values.sum(), leaf)  # each value depends on its own vector alone
        if isinstance(factor, Tensor):
            return values.detach(), gradients
        return values.detach() * factor, gradients * factor


class Vmap:
    """All vectors together by `torch.vmap`; where vmap fails, in a loop with a warning."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._of = evaluation
        self._sum = Vectorised(evaluation.sum, "This network")
        self._forward = Vectorised(self._without_buffers, "This network")

    def _without_buffers(self, w: Tensor, inputs: Batch) -> Tensor:
        return self._of.network.functional(w, inputs, {})

    def outputs(self, w: Tensor, inputs: Batch, buffers: Buffers, first: int, shared: SharedInputs) -> Tensor:
        """The outputs at vectors (S, P): (S, n, ...)."""
        self._forward.loop = self._forward.loop or self._sum.loop  # warn once
        return self._forward.values(w, inputs)

    def values_and_grads(
        self, w: Tensor, batch: Batch, factor: float | Tensor, buffers: Buffers, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums over rows at vectors (S, P) and their gradients (S, P)."""
        self._of.network.set_mode(train=True)
        self._sum.loop = self._sum.loop or self._forward.loop
        each = () if offset is None else (offset,)
        if isinstance(factor, Tensor):
            return self._sum.values_and_grads(w, batch, {}, factor, each=each)
        values, gradients = self._sum.values_and_grads(w, batch, {}, 1.0, each=each)  # a number stays out of the graph
        return values * factor, gradients * factor
