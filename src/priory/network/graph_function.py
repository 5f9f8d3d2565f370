"""A rewritten graph as a plain Python function that calls torch as directly as possible.

    as_tensors  turns a number beside a tensor into a tensor of one entry, which torch handles faster
    fuse        computes a + b c in one operation
    rename      calls an operation by its public torch name, which takes half the time of the call through `torch.ops`

`priory.network.graph_rules` lists how much each of them saves.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.fx.node import Node, map_arg

from priory.network.graph_rules import (
    aten,
    call,
    constant,
    dtype,
    insert_constant,
    is_product,
    mutates,
    number,
    only_unit_dimensions,
    packet,
    remove_unused,
    replace_node,
    result,
    same_float_type,
    shape,
)
from priory.network.native_program import native_function
from priory.network.operation_recorder import RecordedModule

if TYPE_CHECKING:
    from collections.abc import Callable


BROADCASTING_OPS = (
    aten.mul,
    aten.div,
    aten.add,
    aten.sub,
    aten.where,
    aten.ge,
    aten.gt,
    aten.le,
    aten.lt,
    aten.maximum,
)
# operations that exist in `torch` under the same name with the same arguments
TORCH_NAMES = {
    *("abs", "add", "addmm", "bmm", "cat", "clamp", "cos", "cumsum", "digamma", "div", "eq", "erf", "exp", "expm1"),
    *("ge", "gt", "le", "lgamma", "log", "log1p", "logsumexp", "lt", "matmul", "maximum", "minimum", "mm", "mul"),
    *("ne", "neg", "permute", "pow", "reciprocal", "rsqrt", "rsub", "select", "sigmoid", "sign", "sin", "sqrt"),
    *("square", "squeeze", "stack", "sub", "sum", "t", "tanh", "transpose", "unsqueeze", "where"),
}


def function(module: nn.Module, w: Tensor, value: bool = True) -> Callable[[Tensor], Any]:
    """The graph as a function of vectors in the memory layout of w.

    Args:
        module: The graph, with its constants as attributes. It is left unchanged.
        w: Vectors in the memory layout in which the function will be called.
        value: Whether to return all outputs of the graph, or the first alone, without what only the others need.
    """
    module, columns = copied(module, value), not w.is_contiguous()
    as_tensors(module)
    fuse(module)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and not mutates(node):
            rename(module.graph, node, columns)
    remove_unused(module.graph)
    return generated(module)


def native(module: nn.Module, w: Tensor, value: bool = True) -> Callable[[Tensor], Any]:
    """The graph as a native program where there is a C compiler, otherwise as `function` makes it."""
    return native_function(module, w, value) or function(module, w, value)


def copied(module: Any, value: bool = True) -> RecordedModule:
    """A copy of a graph that shares its constants; without `value`, with its first output alone."""
    copy, graph = RecordedModule(), Graph()
    nodes: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            outputs = node.args[0] if value else node.args[0][0]
            graph.output(map_arg(outputs, nodes.__getitem__))
        else:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
        if node.op == "get_attr":
            name = f"constant_{len(copy._buffers)}"
            nodes[node].target = name
            copy.register_buffer(name, getattr(module, node.target).detach())
    copy.graph = graph
    if not any(mutates(node) for node in graph.nodes):
        remove_unused(graph)
    return copy


def generated(module: Any) -> Callable[[Tensor], Any]:
    """The graph as a Python function with one line per operation.

    Constants and operations are global names of the function. Results are local names, which are used again once a
    result has been read for the last time, so that its memory is released.
    """
    last = {used: node for node in module.graph.nodes for used in node.all_input_nodes}
    known: dict[str, Any] = {"__builtins__": {}}
    given: dict[int, str] = {}
    places: dict[Node, str] = {}
    lines, free, count = ["def run(w):"], list[str](), 0

    def bound(thing: Any) -> str:
        if id(thing) not in given:
            given[id(thing)] = f"g{len(known)}"
            known[given[id(thing)]] = thing  # which also keeps the thing, so that its id stays its own
        return given[id(thing)]

    def written(argument: Any) -> str:
        if isinstance(argument, Node):
            return places[argument]
        if isinstance(argument, (list, tuple)):
            inner = "".join(f"{written(one)}, " for one in argument)
            return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
        plain = (
            argument is None
            or isinstance(argument, (bool, int, str))
            or (isinstance(argument, float) and isfinite(argument))
        )
        return repr(argument) if plain else bound(argument)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            places[node] = "w"
        elif node.op == "get_attr":
            places[node] = bound(getattr(module, node.target))
        elif node.op == "output":
            lines.append(f"    return {written(node.args[0])}")
        else:
            arguments = [written(one) for one in node.args] + [f"{k}={written(v)}" for k, v in node.kwargs.items()]
            read = {used for used in node.all_input_nodes if last[used] is node and used.op == "call_function"}
            free += [places[used] for used in read]
            if not free:
                count += 1
            places[node] = free.pop() if free else f"v{count}"
            lines.append(f"    {places[node]} = {bound(node.target)}({', '.join(arguments)})")
            if node not in last:  # the result of an operation that writes to its argument
                free.append(places[node])
    exec(compile("\n".join(lines), "<recorded graph>", "exec"), known)
    return known["run"]


def fuse(module: Any) -> None:
    """Fuse a sum and a product with no other use into one operation."""
    for node in list(module.graph.nodes):
        if packet(node) not in (aten.add, aten.sub) or node.kwargs or not same_float_type(node, *node.args):
            continue
        first, second = node.args
        if first is second:
            continue
        added = packet(node) is aten.add
        product = next((n for n in ((second, first) if added else (second,)) if is_product(n)), None)
        if product is None:
            continue
        other, (left, right) = first if product is second else second, product.args
        if not added:
            if not isinstance(constant(right), Tensor):
                continue
            right = insert_constant(module, node, -constant(right))
        replace_node(module.graph, node, call(module.graph, node, torch.addcmul, (other, left, right), result(node)))
        module.graph.erase_node(product)


def as_tensors(module: Any) -> None:
    """Replace each number beside a tensor by a one-entry tensor with the same number of dimensions, which is faster."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.kwargs or result(node) is None:
            continue
        if packet(node) not in BROADCASTING_OPS:
            continue
        kinds = {dtype(n) for n in node.args if isinstance(n, Node) and dtype(n) is not torch.bool}
        kind = kinds.pop() if len(kinds) == 1 else None
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            continue
        for place, one in enumerate(node.args):
            value = constant(one)
            if number(one) or (isinstance(value, Tensor) and value.ndim == 0 and value.dtype == kind):
                wide = torch.as_tensor(value, dtype=kind, device=result(node).device).reshape([1] * result(node).ndim)
                node.update_arg(place, insert_constant(module, node, wide))
        if isinstance(node.target, torch._ops.OpOverload) and node.target._overloadname == "Scalar":
            node.target = packet(node).Tensor


def rename(graph: Graph, node: Node, columns: bool) -> None:
    """Call an operation by its public torch name where one exists: through `torch.ops` it takes twice as long."""
    name, given = getattr(packet(node), "__name__", ""), list[Any](node.args)
    if node.target is aten.pow.Tensor_Scalar and given[1] == 2:
        node.target, node.args = torch.mul, (given[0], given[0])
    elif node.target is aten.slice.Tensor and len(given) == 4 and result(node) is not None:
        x, dim, start, _ = given
        node.target, node.args = Tensor.narrow, (x, dim, start, shape(node)[dim])
    elif node.target is aten._to_copy.default and only_type(node):
        kind: Any = node.kwargs["dtype"]
        short = {torch.float32: Tensor.float, torch.float64: Tensor.double}.get(kind)
        node.target, node.args, node.kwargs = short or Tensor.to, (given[0],) if short else (given[0], kind), {}
    elif node.kwargs:
        return
    elif columns and node.target is aten.cat.default and len(shape(node)) == 2 and given[1] in (1, -1):
        pieces = [transposed(graph, node, piece) for piece in given[0]]
        node.target, node.args = Tensor.t, (call(graph, node, torch.cat, (pieces,), None),)
    elif name in TORCH_NAMES:
        node.target = getattr(torch, name)
    elif node.target in (aten.view.default, aten.expand.default):
        node.target = getattr(Tensor, name)


def transposed(graph: Graph, before: Node, piece: Node) -> Node:
    """Insert the transpose of a node's result, (K, n) -> (n, K)."""
    first = piece.args[0] if only_unit_dimensions(piece) or piece.target is Tensor.view else None
    if first is not None and len(shape(first)) == 1:
        return call(graph, before, torch.unsqueeze, (first, 0), None)
    return call(graph, before, Tensor.t, (piece,), None)


def only_type(node: Node) -> bool:
    """Whether a copy differs from its source in its dtype alone."""
    before, after, options = result(node.args[0]), result(node), set(node.kwargs)
    if before is None or after is None or "dtype" not in options:
        return False
    return options <= {"dtype", "layout", "device"} and before.device == after.device
