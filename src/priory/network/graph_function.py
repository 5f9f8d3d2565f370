"""A rewritten graph as a plain Python function that calls torch as directly as possible.

    as_tensors  turns a number beside a tensor into a tensor of one entry, which torch handles faster
    fuse        computes a + b c in one operation
    rename      calls an operation by its public torch name, which takes half the time of the call through `torch.ops`

`priory.network.graph_rules` lists how much each of them saves.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.node import Node

from priory.network.graph_rules import (
    aten,
    call,
    constant,
    dtype,
    insert_constant,
    mutates,
    number,
    only_unit_dimensions,
    packet,
    replace_node,
    result,
    same_float_type,
    shape,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule

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


def function(module: GraphModule, w: Tensor) -> Callable[[Tensor], Any]:
    """The graph as a function of vectors in the memory layout of w.

    Constants are attributes of a plain object: a module looks its buffers up by name at each call.
    """
    module, columns = deepcopy(module), not w.is_contiguous()
    as_tensors(module)
    fuse(module)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and not mutates(node):
            rename(module.graph, node, columns)
    module.graph.eliminate_dead_code()
    module.recompile()
    names = [node.target for node in module.graph.nodes if node.op == "get_attr"]
    constants: Any = SimpleNamespace(**{name: getattr(module, name).detach() for name in names})
    forward = type(module).forward
    return lambda w: forward(constants, w)


def fuse(module: GraphModule) -> None:
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


def is_product(node: Any) -> bool:
    """Whether a node is the product of two tensors and has one use."""
    return packet(node) is aten.mul and not node.kwargs and len(node.users) == 1 and same_float_type(node, *node.args)


def as_tensors(module: GraphModule) -> None:
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
        pieces = [upright(graph, node, piece) for piece in given[0]]
        node.target, node.args = Tensor.t, (call(graph, node, torch.cat, (pieces,), None),)
    elif name in TORCH_NAMES:
        node.target = getattr(torch, name)
    elif node.target in (aten.view.default, aten.expand.default):
        node.target = getattr(Tensor, name)


def upright(graph: Graph, before: Node, piece: Node) -> Node:
    """A piece (K, n) transposed, (n, K)."""
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
