"""Values and gradients of a function at many vectors of one shape, as a recorded graph of torch operations.

A sampler calls one function thousands of times at tensors of one shape. On small problems the time is spent on
calls of torch, not on arithmetic. So the function is recorded once, with its data inside
(`priory.network.operation_recorder`), and the graph is rewritten with as few operations as possible
(`priory.network.graph_rules`): the density of eight schools has 174 operations before and 59 after.

Long densities, with loops over time, are recorded too. From 1,000 operations on they run as a native program
(`priory.network.native_program`) where there is a C compiler. The table has the number of operations, the seconds that
recording and writing the program take, and milliseconds per value and gradient: of the program, in brackets of calls of
torch one by one, and of vmap of grad. These are CPU times of one thread on a busy machine, the least of several
repeats. Compiling takes another 0.5 s, once per process.

    density                                    operations   seconds   4 vectors           256 vectors
    SIR model, 200 Runge-Kutta steps               25,106   2.3 + 1.0   0.26 (55, 203)      5.9 (79, 220)
    hidden Markov model, 500 steps, 3 states        4,108   0.6 + 0.3   0.44 (18,  66)       14 (67, 336)
    Gaussian process, 60 points, Cholesky             123   0.03            (1.0, 2.2)          (52,  65)
    eight schools                                      50   0.02           (0.09, 1.6)        (0.10, 1.7)

A default run takes 400 to 1,500 gradients, so that 1,000 operations at 1.2 microseconds each save 0.5 to 1.8 s.
torch's own compiler (`compile`) takes 12 s for the 50 operations of eight schools, which a default run never gets back.

The number of vectors is fixed in a graph: another number is recorded anew. The cost of a gradient (`GraphCost`) is the
same for any number.

Inside a trajectory of HMC only gradients are needed. So a second graph leaves out the operations that only the
value needs: 39 operations on eight schools, and half of the time on a logistic regression.
"""

from __future__ import annotations

import gc
import math
import operator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from priory.core.errors import warn
from priory.network.failures import EVALUATION_ERRORS, failures_as_nan
from priory.network.graph_function import copied, function, native
from priory.network.graph_rules import mutates, result
from priory.network.graph_slices import simplify_graph
from priory.network.native_library import native_library
from priory.network.operation_recorder import LongFunctionError, NotRecordableError, RecordedModule, recorded
from priory.network.vectorise import unchecked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx.node import Node

    Order = Callable[[Tensor], Tensor]


NATIVE_OPERATIONS = 1000  # from which compiling the native program takes less time than it saves
NATIVE_OPERATIONS_PER_CALL = 50  # operations that a native program starts in the time of a call of torch


def by_coordinate(w: Tensor) -> Tensor:
    """Return vectors (*B, K, P) in a layout in which the values of one coordinate are contiguous.

    A density reads a few coordinates at a time, and torch is up to five times as fast on contiguous numbers.
    """
    if w.stride(-2) == 1 and w.stride(-1) * w.shape[-1] == w.numel():
        return w
    return w.movedim(-1, 0).contiguous().movedim(0, -1)


def by_vector(w: Tensor) -> Tensor:
    """Return vectors (*B, K, P) in the usual layout, in which each vector is contiguous."""
    return w.contiguous()


class GraphCost(NamedTuple):
    """The cost of one evaluation of values and gradients, counted and not timed, so that it is the same everywhere.

    Args:
        operations: Number of calls of torch, each of which handles all vectors at once. Views are not counted, and
            `NATIVE_OPERATIONS_PER_CALL` operations of a native program are one call.
        elements: Number of elements that the operations write, per vector.
    """

    operations: int
    elements: int


class RecordedGraph:
    """A function of vectors (S, P), recorded in one memory layout.

    Args:
        graph: The graph of gradients (S, P) and values (S,).
        w: Vectors of the shape and memory layout of the graph.
        order: The memory layout in which the graph takes its vectors.
        compile: Whether to compile the graph with torch's compiler.
    """

    def __init__(self, graph: RecordedModule | GraphModule, w: Tensor, order: Order, compile: bool) -> None:
        cost = operations(graph, len(w))
        long = cost.operations >= NATIVE_OPERATIONS
        self._graph, self._like, self.order = graph, w, order
        self._make = compiled if compile else native if long else function
        self.cost = as_native(cost, w) if long else cost

    @cached_property
    def _run(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Gradients and values, as a pair."""
        with without_collection(), torch.inference_mode(False):  # its constants are for any mode
            return self._make(self._graph, self._like)

    @cached_property
    def _slope(self) -> Callable[[Tensor], Tensor]:
        """Gradients alone."""
        with without_collection(), torch.inference_mode(False):  # its constants are for any mode
            return self._make(self._graph, self._like, value=False)

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
    gradients: Callable[[Tensor], tuple[Tensor, Tensor]],
    w: Tensor,
    orders: tuple[Order, ...],
    compile: bool = False,
    sound: Tensor | None = None,
    longest: int | None = None,
) -> RecordedGraph | None:
    """Record a function of vectors (S, P) at vectors of the shape of w (*B, P).

    Args:
        gradients: Gradients (S, P) and values (S,) at vectors (S, P), as a pair.
        w: Vectors of the shape at which the graph will be called.
        orders: Memory layouts to try; the first in which the function can be recorded is used.
        compile: Whether to compile the graph with torch's compiler.
        sound: A vector (P,) at which the function works, for recording where it raises an error at a vector of w.
        longest: Number of operations at which recording is given up; None for any number.

    Returns:
        The recorded graph, or None if the function cannot be recorded in any of the layouts.

    Raises:
        LongFunctionError: If the function has `longest` operations or more.
    """
    for vectors in (w,) if sound is None else (w, sound.expand_as(w)):
        for order in orders:
            flat = order(vectors).reshape(-1, w.shape[-1])
            try:
                graph = traced(gradients, flat, longest)
            except (*EVALUATION_ERRORS, TypeError):  # the caller's fallback reports errors of the function itself
                continue
            return RecordedGraph(graph, flat.detach(), order, compile)
    return None


def traced(
    gradients: Callable[[Tensor], tuple[Tensor, Tensor]], w: Tensor, longest: int | None = None
) -> RecordedModule | GraphModule:
    """The rewritten graph of a function at vectors of the shape and memory layout of w (S, P).

    A vector at which an operation of `torch.linalg` fails gets NaN, and the others don't notice.
    """
    with unchecked(), without_collection():
        try:
            graph = recorded(gradients, w.detach(), longest)
        except NotRecordableError:
            graph = make_fx(failures_as_nan(gradients))(w)
            if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes):
                raise
        simplify_graph(graph)
    return graph


@contextmanager
def without_collection() -> Iterator[None]:
    """Suspend garbage collection, which looks through all nodes of a long graph again and again while they are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def operations(graph: RecordedModule | GraphModule, vectors: int) -> GraphCost:
    """Count the operations of a graph that was recorded at a number of vectors, and the elements they write per vector.

    What depends on no vector has been computed once and is not counted, and neither are views, which write nothing.
    """
    count, elements = 0, 0
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or is_view(node):
            continue
        found = result(node)
        tensors = found if isinstance(found, (tuple, list)) else [found]
        count += 1
        elements += sum(math.prod(t.shape) for t in tensors if hasattr(t, "shape"))
    return GraphCost(count, -(-elements // vectors))


def as_native(cost: GraphCost, w: Tensor) -> GraphCost:
    """The cost of a long graph at vectors w, which runs as a native program where there is a C compiler."""
    if w.device.type != "cpu" or native_library(w.dtype) is None:
        return cost
    return GraphCost(-(-cost.operations // NATIVE_OPERATIONS_PER_CALL), cost.elements)


def cost_of_long_graph(beginning: LongFunctionError, w: Tensor) -> GraphCost:
    """The cost of a graph at vectors w (S, P), from its beginning.

    Only the ratio of elements to operations is known; the graph is taken to be ten times as long as its beginning.
    """
    return as_native(GraphCost(10 * beginning.operations, 10 * beginning.elements // len(w)), w)


def is_view(node: Node) -> bool:
    """Whether the result of an operation shares the memory of an argument."""
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return bool(returns) and returns[0].alias_info is not None and not mutates(node)


def compiled(module: RecordedModule | GraphModule, w: Tensor, value: bool = True) -> Callable[[Tensor], Any]:
    """The graph compiled by torch's compiler; if that fails, as `function` makes it, with a warning.

    The compiler receives the graph itself: `torch.compile` would check the shapes at each call, which for a small
    density takes twice as long as the density.
    """
    try:
        with torch.no_grad():
            from torch import _inductor  # which takes a second to import

            copy = copied(module, value)
            run: Any = _inductor.compile(GraphModule(copy, copy.graph), [w])
            run(w)
    except Exception as error:  # the compiler raises many types of exceptions
        reason = str(error).strip().split("\n")[0][:160]
        warn(f"The log density can't be compiled, so it runs uncompiled, which may be slower ({reason}).")
        return function(module, w, value)
    return run
