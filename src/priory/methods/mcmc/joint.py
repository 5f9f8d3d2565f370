"""The log joint and its gradient at all chains, for a sampler.

A recorded graph (`priory.network.recorded_graph`) where all rows can be worked on at once, otherwise a sum over blocks
of rows.
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

AT_ONCE = 1 << 23  # rows x chains whose densities are computed together


@dataclass(frozen=True)
class Joint:
    """log p(w, D) and its gradient, at vectors of one shape."""

    both: Callable[[Tensor], tuple[Tensor, Tensor]]  # (*B, K, P) -> (*B, K), (*B, K, P)
    gradient: Callable[[Tensor], Tensor]  # (*B, K, P) -> (*B, K, P)
    order: Callable[[Tensor], Tensor] = by_vector  # vectors in the order in memory in which it wants them
    recorded: bool = False  # whether it is a recorded graph, which needs nothing of autograd

    def __call__(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return self.both(w)


def log_joint(target: Target, data: Data, w: Tensor, compile: bool = False) -> Joint:
    """The tempered log joint over every row and its gradient, as a function of vectors of the shape of w (*B, K, P).

    Recorded where all rows are worked on at once and the function can be; otherwise over blocks of rows, each of which
    stands for all of them, averaged in proportion to their rows.
    """
    rows = max(1, AT_ONCE // w[..., 0].numel())
    batch = whole(target, data, rows)
    if batch is None:
        return blockwise(target, data, rows)
    # a network multiplies matrices that are parts of its vectors, which must be contiguous
    orders = (by_vector,) if has_network(target.model) else (by_coordinate, by_vector)
    graph = record(gradients(target, batch), w, orders, compile)
    if graph is None:
        return blockwise(target, data, rows)
    return Joint(graph.values_and_grads, graph.grads, graph.order, recorded=True)


def values_alone(joint: Joint) -> Joint:
    """The log joint for who asks for values alone: its gradient, which may be no number, is zero."""
    return Joint(lambda w: (joint(w)[0], torch.zeros_like(w)), torch.zeros_like, joint.order, joint.recorded)


def whole(target: Target, data: Data, rows: int) -> Batch | None:
    """All rows as one batch, if there are few enough and the model takes many vectors in one pass."""
    if data.num_data is None:
        return ()
    if data.tensors is None or data.num_data > rows:
        return None
    return data.in_memory() if target.model.in_one_pass(data.tensors) else None


def blockwise(target: Target, data: Data, rows: int) -> Joint:
    """The log joint and its gradient, block of rows by block."""

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
