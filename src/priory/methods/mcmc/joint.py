"""The log joint and its gradient at all chains: one recorded graph without what a chain can't change.

A sampler calls one function thousands of times at tensors of one shape, and on small problems the time goes into
calling torch, not into arithmetic. So the density, its prior and the volume element are recorded once as one graph of
torch's operations (`make_fx`), over all chains, with the data inside; then everything is taken out of the graph that
no chain can change, and what is left is written with as few operations as can be (`graphs`). The density of eight
schools has 154 operations before, and 57 after.

Inside a trajectory of HMC only gradients are wanted. So the graph is kept a second time without what the value alone
needs: 37 operations on eight schools, and half of the time on a logistic regression.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from priory.core.errors import PrioryWarning
from priory.models.density import Density
from priory.network.graphs import function, tidy
from priory.network.vectorise import unchecked

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    from priory.core.data import Batch, Data
    from priory.models.target import Target

AT_ONCE = 1 << 23  # rows x chains whose densities are computed together


def by_coordinate(w: Tensor) -> Tensor:
    """Vectors (*B, K, P) in an order in memory in which a coordinate of all chains lies in one piece.

    A density reads a few of its coordinates at a time, and on numbers without gaps torch works up to five times as
    fast.
    """
    if w.stride(-2) == 1 and w.stride(-1) * w.shape[-1] == w.numel():
        return w
    return w.movedim(-1, 0).contiguous().movedim(0, -1)


def by_vector(w: Tensor) -> Tensor:
    """Vectors (*B, K, P) in the usual order, each in one piece."""
    return w.contiguous()


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
    # a network multiplies matrices that are parts of its vectors, which must lie in one piece
    for order in (by_coordinate, by_vector) if isinstance(target.model, Density) else (by_vector,):
        flat = order(w).reshape(-1, w.shape[-1])
        try:
            graph = record(gradients(target, batch), flat)
        except (RuntimeError, TypeError, ValueError):  # what is wrong with it, the target's own way says in its words
            continue
        make = compiled if compile else function
        return recorded(make(graph, flat), make(without_value(graph), flat), order)
    return blockwise(target, data, rows)


def values_alone(joint: Joint) -> Joint:
    """The log joint for who asks for values alone: its gradient, which may be no number, is zero."""
    return Joint(lambda w: (joint(w)[0], torch.zeros_like(w)), torch.zeros_like, joint.order, joint.recorded)


def recorded(
    run: Callable[[Tensor], Any], slope: Callable[[Tensor], Tensor], order: Callable[[Tensor], Tensor]
) -> Joint:
    """The log joint of two functions of vectors (S, P) in one order: gradients and values, and gradients."""

    def flat(w: Tensor) -> Tensor:
        return order(w) if w.ndim == 2 else order(w).reshape(-1, w.shape[-1])

    def both(w: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = run(flat(w))
        return value.reshape(w.shape[:-1]), order(gradient.reshape(w.shape))

    def gradient(w: Tensor) -> Tensor:
        found = slope(flat(w))
        return order(found if w.ndim == 2 else found.reshape(w.shape))

    return Joint(both, gradient, order, recorded=True)


def compiled(graph: GraphModule, w: Tensor) -> Callable[[Tensor], Any]:
    """The graph through torch's compiler, or as it is where that fails.

    The compiler is given the graph itself: `torch.compile` would ask at each call whether its shapes are still the
    same, which for a small density takes twice as long as the density.
    """
    try:
        with torch.no_grad():
            from torch import _inductor  # which takes a second to import

            run: Any = _inductor.compile(graph, [w])
            run(w)
    except Exception as error:  # a compiler's failures are of many kinds
        reason = str(error).strip().split("\n")[0][:160]
        warnings.warn(
            f"The log density can't be compiled, so it runs as it is ({reason}).", PrioryWarning, stacklevel=6
        )
        return graph
    return run


def whole(target: Target, data: Data, rows: int) -> Batch | None:
    """All rows as one batch, if there are few enough and the model takes many vectors in one pass."""
    if data.num_data is None:
        return ()
    if data.tensors is None or data.num_data > rows:
        return None
    if not isinstance(target.model, Density):
        network = target.model.network
        if network.written or not network.batches_well(data.num_data):
            return None
    return data.tensors


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
    a, b = 1 / target.temperature, target.prior_weight / target.temperature

    def tempered(w: Tensor) -> Tensor:
        value = a * target.differentiable(w, batch) + b * target.log_prior(w)
        return value if b == 1 else value + (1 - b) * target.model.layout.log_det(w)

    def summed(w: Tensor) -> tuple[Tensor, Tensor]:
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            values = tempered(leaf)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        return gradient, values.detach()

    return summed if isinstance(target.model, Density) and target.model.batched else vmap(grad_and_value(tempered))


def record(function: Callable[[Tensor], tuple[Tensor, Tensor]], w: Tensor) -> GraphModule:
    """The graph of a function at vectors of this shape and order in memory, without what doesn't depend on them."""
    with unchecked():
        module = make_fx(function)(w)
    tidy(module)
    return module


def without_value(graph: GraphModule) -> GraphModule:
    """The graph of gradients and values, without what the values alone need."""
    module = deepcopy(graph)
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.args = (output.args[0][0],)  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportArgumentType]
    module.graph.eliminate_dead_code()
    module.recompile()
    return module
