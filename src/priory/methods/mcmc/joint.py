"""The log joint and its gradient at all chains, for a sampler.

It is a recorded graph (`priory.network.recorded_graph`) where all rows fit into one evaluation, and otherwise a sum
over blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from priory.models.base import has_network
from priory.network.recorded_graph import by_coordinate, by_vector, record

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.core.data import Batch, Data
    from priory.models.target import Target

BLOCK_NUMBERS = 1 << 23  # rows x chains that are evaluated together


@dataclass(frozen=True)
class Joint:
    """log p(w, D) and its gradient, for vectors of one shape."""

    both: Callable[[Tensor], tuple[Tensor, Tensor]]  # (*B, K, P) -> (*B, K), (*B, K, P)
    gradient: Callable[[Tensor], Tensor]  # (*B, K, P) -> (*B, K, P)
    order: Callable[[Tensor], Tensor] = by_vector  # brings vectors into its preferred memory layout
    recorded: bool = False  # whether it is a recorded graph, which needs no autograd

    def __call__(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return self.both(w)


def log_joint(target: Target, data: Data, w: Tensor, compile: bool = False) -> Joint:
    """The tempered log joint over all rows and its gradient, as a function of vectors in the shape of w (*B, K, P).

    The function is recorded where all rows fit into one evaluation and recording works. Otherwise it averages over
    blocks of rows, each scaled to the whole data, in proportion to their numbers of rows.
    """
    rows = max(1, BLOCK_NUMBERS // w[..., 0].numel())
    batch = whole(target, data, rows)
    if batch is None:
        return blockwise(target, data, rows)
    # a network multiplies matrices that are views of its vectors, which must be contiguous
    orders = (by_vector,) if has_network(target.model) else (by_coordinate, by_vector)
    graph = record(gradients(target, batch), w, orders, compile)
    if graph is None:
        return blockwise(target, data, rows)
    return Joint(graph.values_and_grads, graph.grads, graph.order, recorded=True)


def values_alone(joint: Joint) -> Joint:
    """The log joint with a gradient of zero, for samplers that need values only."""
    return Joint(lambda w: (joint(w)[0], torch.zeros_like(w)), torch.zeros_like, joint.order, joint.recorded)


def whole(target: Target, data: Data, rows: int) -> Batch | None:
    """All rows as one batch, if they fit and the model evaluates many vectors in one pass; otherwise None."""
    if data.num_data is None:
        return ()
    if data.tensors is None or data.num_data > rows:
        return None
    return data.in_memory() if target.model.in_one_pass(data.tensors) else None


def blockwise(target: Target, data: Data, rows: int) -> Joint:
    """The log joint and its gradient, accumulated over blocks of rows."""

    def both(w: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient, seen = torch.zeros_like(w[..., 0]), torch.zeros_like(w), 0
        for block in data.blocks(min(rows, 1024)):
            n = len(block[0]) if block else 1
            block_value, block_gradient = target.log_joint_and_grad(w, block)
            value, gradient, seen = value + n * block_value, gradient + n * block_gradient, seen + n
        return value / seen, gradient / seen

    return Joint(both, lambda w: both(w)[1])


def gradients(target: Target, batch: Batch) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Gradients and values of the tempered log joint at vectors (S, P), as a function to be recorded."""

    def tempered(w: Tensor) -> Tensor:
        return target.log_joint(w, target.differentiable(w, batch), target.log_prior(w))

    def summed(w: Tensor) -> tuple[Tensor, Tensor]:
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            values = tempered(leaf)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        return gradient, values.detach()

    return summed if target.model.capabilities.batched else vmap(grad_and_value(tempered))
