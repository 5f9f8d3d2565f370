"""The log joint and its gradient at all chains: one recorded graph without what a chain can't change.

A sampler calls one function thousands of times at tensors of one shape, and on small problems the time goes into
calling torch, not into arithmetic. So the density, its prior and the volume element are recorded once as one graph of
torch's operations (`make_fx`), over all chains, with the data inside; then everything is taken out of the graph that
no chain can change: constants are computed once, factors of one dropped, what is computed twice is computed once. The
density of eight schools has 154 operations before, and 73 after. Those that are left are called by torch's own names,
at half the cost of a call of what was recorded.

Inside a trajectory of HMC only gradients are wanted. So the graph is kept a second time without what the value alone
needs: on a logistic regression that is half of the time.
"""

from __future__ import annotations

import operator
import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from priory.density import Density
from priory.errors import PrioryWarning
from priory.vectorise import unchecked

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule, Node

    from priory.data import Batch, Data
    from priory.target import Target

AT_ONCE = 1 << 23  # rows x chains whose densities are computed together
aten: Any = torch.ops.aten
OF_A_SHAPE = (aten.ones_like.default, aten.zeros_like.default, aten.new_zeros.default, aten.new_ones.default)
# operations that torch has by the same name, with the same arguments
NAMED = {
    *("abs", "add", "addmm", "bmm", "cat", "clamp", "cos", "cumsum", "digamma", "div", "eq", "erf", "exp", "expm1"),
    *("ge", "gt", "le", "lgamma", "log", "log1p", "logsumexp", "lt", "matmul", "maximum", "minimum", "mm", "mul"),
    *("ne", "neg", "permute", "pow", "reciprocal", "rsqrt", "rsub", "select", "sigmoid", "sign", "sin", "sqrt"),
    *("square", "squeeze", "stack", "sub", "sum", "t", "tanh", "transpose", "unsqueeze", "where"),
}
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)


@dataclass(frozen=True)
class Joint:
    """log p(w, D) and its gradient, at vectors of one shape."""

    both: Callable[[Tensor], tuple[Tensor, Tensor]]  # (*B, K, P) -> (*B, K), (*B, K, P)
    gradient: Callable[[Tensor], Tensor]  # (*B, K, P) -> (*B, K, P)

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
    try:
        graph = record(gradients(target, batch), w.reshape(-1, w.shape[-1]))
    except (RuntimeError, TypeError, ValueError):  # what is wrong with it, the target's own way says in its own words
        return blockwise(target, data, rows)
    run, slope = graph, without_value(graph)
    if compile:
        run, slope = (compiled(g, w.reshape(-1, w.shape[-1])) for g in (run, slope))

    def both(w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            gradient, value = run(w.reshape(-1, w.shape[-1]))
        return value.reshape(w.shape[:-1]), gradient.reshape(w.shape)

    def gradient(w: Tensor) -> Tensor:
        with torch.no_grad():
            return slope(w.reshape(-1, w.shape[-1])).reshape(w.shape)

    return Joint(both, gradient)


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
    """The graph of a function at vectors of this shape, without what doesn't depend on them."""
    with unchecked():
        module = make_fx(function)(w)
    module.graph.eliminate_dead_code()
    if not any(mutates(node) for node in module.graph.nodes):  # else a constant may be written to
        fold(module)
        simplify(module.graph)
        merge(module.graph)
    module.graph.eliminate_dead_code()
    rename(module.graph)
    module.recompile()
    return module


def without_value(graph: GraphModule) -> GraphModule:
    """The graph of gradients and values, without what the values alone need."""
    module = deepcopy(graph)
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.args = (output.args[0][0],)  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportArgumentType]
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def mutates(node: Node) -> bool:
    """Whether an operation writes to what it is given."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def fold(module: GraphModule) -> None:
    """Compute once what depends on no input, or on its shape alone."""
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function":
            shaped = node.target in OF_A_SHAPE and "val" in node.meta
            if shaped or all(n in values for n in node.all_input_nodes):
                given = {n: values[n] if n in values else blank(n) for n in node.all_input_nodes}
                arguments, options = map_arg((node.args, node.kwargs), given.__getitem__)
                with torch.no_grad():
                    values[node] = node.target(*arguments, **options)
    for node in [n for n in values if isinstance(values[n], Tensor) and any(u not in values for u in n.users)]:
        name = f"constant_{node.name}"
        module.register_buffer(name, values[node].contiguous())
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        constant.meta["value"] = values[node]
        for user in [u for u in node.users if u not in values]:
            user.replace_input_with(node, constant)
    module.graph.eliminate_dead_code()


def rename(graph: Graph) -> None:
    """Call operations by torch's own names where they are the same: the way through `torch.ops` takes twice as long."""
    for node in graph.nodes:
        if node.op != "call_function" or node.kwargs or mutates(node):
            continue
        name = getattr(packet(node), "__name__", "")
        if name in NAMED:
            node.target = getattr(torch, name)
        elif node.target in (aten.view.default, aten.expand.default):
            node.target = getattr(Tensor, name)


def blank(node: Node) -> Tensor:
    """A tensor of a node's shape, whose numbers don't matter."""
    like = node.meta["val"]
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def simplify(graph: Graph) -> None:
    """Drop factors and powers of one, terms of zero, and changes to the same shape."""
    for node in list(graph.nodes):
        same = unchanged(node)
        if same is not None and shape(same) == shape(node) and dtype(same) == dtype(node):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def unchanged(node: Node) -> Node | None:
    """The argument that an operation gives back as it is, if it does."""
    if node.op != "call_function" or not node.args or node.kwargs:
        return None
    first, second = (*node.args, None)[:2]
    if node.target in RESHAPES:
        return first  # pyright: ignore[reportReturnType] - a reshape's first argument is a node
    neutral = {aten.mul: 1, aten.div: 1, aten.pow: 1, aten.add: 0, aten.sub: 0}.get(packet(node))
    if neutral is None:
        return None
    if is_all(second, neutral) and not isinstance(first, (int, float)):
        return first  # pyright: ignore[reportReturnType] - what is not a number is a node
    return second if packet(node) in (aten.mul, aten.add) and is_all(first, neutral) else None  # pyright: ignore


def packet(node: Node) -> Any:
    """The operation, whatever the types of its arguments."""
    return getattr(node.target, "overloadpacket", None)


def is_all(argument: Any, number: int) -> bool:
    """Whether an argument is this number, or a constant of nothing else."""
    if isinstance(argument, (int, float)):
        return argument == number
    value = getattr(argument, "meta", {}).get("value")
    return isinstance(value, Tensor) and bool((value == number).all())


def shape(node: Node) -> Any:
    """The shape of what a node makes; the node itself if that is not known."""
    value = node.meta.get("value", node.meta.get("val"))
    return getattr(value, "shape", node)


def dtype(node: Node) -> Any:
    """The type of what a node makes; the node itself if that is not known."""
    value = node.meta.get("value", node.meta.get("val"))
    return getattr(value, "dtype", node)


def merge(graph: Graph) -> None:
    """Compute once what is computed twice from the same arguments."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))  # a node's name is its own
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
