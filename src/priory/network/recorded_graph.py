"""Values and gradients of a function at many vectors of one shape, as a recorded graph of torch operations.

A sampler calls one function thousands of times at tensors of one shape. On small problems the time is spent on
calls of torch, not on arithmetic. So the function is recorded once (`make_fx`) with its data inside, and the graph is
rewritten with as few operations as possible (`priory.network.graph_rules`): the density of eight schools has
174 operations before and 59 after.

Inside a trajectory of HMC only gradients are needed. So a second graph leaves out the operations that only the
value needs: 39 operations on eight schools, and half of the time on a logistic regression.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from priory.core.errors import warn
from priory.network.graph_function import function
from priory.network.graph_rules import simplify_graph
from priory.network.vectorise import unchecked

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    Order = Callable[[Tensor], Tensor]


def by_coordinate(w: Tensor) -> Tensor:
    """Vectors (*B, K, P) laid out in memory so that one coordinate of all vectors is contiguous.

    A density reads a few coordinates at a time, and torch is up to five times as fast on contiguous numbers.
    """
    if w.stride(-2) == 1 and w.stride(-1) * w.shape[-1] == w.numel():
        return w
    return w.movedim(-1, 0).contiguous().movedim(0, -1)


def by_vector(w: Tensor) -> Tensor:
    """Vectors (*B, K, P) in the usual layout, each contiguous."""
    return w.contiguous()


class RecordedGraph:
    """A function of vectors (S, P), recorded in one memory layout.

    Args:
        run: Gradients (S, P) and values (S,), as a pair.
        slope: Gradients (S, P) alone.
        order: The memory layout in which the graph takes its vectors.
    """

    def __init__(
        self, run: Callable[[Tensor], tuple[Tensor, Tensor]], slope: Callable[[Tensor], Tensor], order: Order
    ) -> None:
        self._run, self._slope, self.order = run, slope, order

    def values_and_grads(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients, (*B, P) -> (*B,), (*B, P)."""
        gradient, value = self._run(self._flat(w))
        return value.reshape(w.shape[:-1]), self.order(gradient.reshape(w.shape))

    def grads(self, w: Tensor) -> Tensor:
        """Gradients alone, (*B, P) -> (*B, P)."""
        found = self._slope(self._flat(w))
        return self.order(found if w.ndim == 2 else found.reshape(w.shape))

    def _flat(self, w: Tensor) -> Tensor:
        return self.order(w) if w.ndim == 2 else self.order(w).reshape(-1, w.shape[-1])


def record(
    gradients: Callable[[Tensor], tuple[Tensor, Tensor]], w: Tensor, orders: tuple[Order, ...], compile: bool = False
) -> RecordedGraph | None:
    """Record a function of vectors (S, P) at vectors of the shape of w (*B, P).

    Args:
        gradients: Gradients (S, P) and values (S,) at vectors (S, P), as a pair.
        w: Vectors of the shape at which the graph will be called.
        orders: Memory layouts to try; the first in which the function can be recorded is used.
        compile: Whether to compile the graph with torch's compiler.

    Returns:
        The recorded graph, or None if the function cannot be recorded in any of the layouts.
    """
    for order in orders:
        flat = order(w).reshape(-1, w.shape[-1])
        try:
            graph = traced(gradients, flat)
        except (RuntimeError, TypeError, ValueError):  # the caller's fallback reports errors of the function itself
            continue
        make = compiled if compile else function
        return RecordedGraph(make(graph, flat), make(without_value(graph), flat), order)
    return None


def traced(gradients: Callable[[Tensor], tuple[Tensor, Tensor]], w: Tensor) -> GraphModule:
    """The rewritten graph of a function at vectors of the shape and memory layout of w (S, P)."""
    with unchecked():
        graph = make_fx(gradients)(w)
    simplify_graph(graph)
    return graph


def without_value(graph: GraphModule) -> GraphModule:
    """A copy of a graph of gradients and values without the operations that only the values need."""
    module = deepcopy(graph)
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.args = (output.args[0][0],)  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportArgumentType]
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def compiled(graph: GraphModule, w: Tensor) -> Callable[[Tensor], Any]:
    """The graph compiled by torch's compiler; if that fails, the uncompiled graph, with a warning.

    The compiler receives the graph itself: `torch.compile` would check the shapes at each call, which for a small
    density takes twice as long as the density.
    """
    try:
        with torch.no_grad():
            from torch import _inductor  # which takes a second to import

            run: Any = _inductor.compile(graph, [w])
            run(w)
    except Exception as error:  # the compiler raises many types of exceptions
        reason = str(error).strip().split("\n")[0][:160]
        warn(f"The log density can't be compiled, so it runs uncompiled, which may be slower ({reason}).")
        return graph
    return run
