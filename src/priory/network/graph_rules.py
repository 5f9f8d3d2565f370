"""Rewrites a recorded graph so that it has fewer operations and gives the same numbers.

`make_fx` records every operation that autograd and vmap run. For a few hundred small vectors, calling an operation
costs 2 microseconds and its arithmetic almost nothing, so the time is proportional to the number of operations. The
rules only change rounding: a result is infinite or NaN exactly where it was before, unless a factor beyond 1e8 makes
it so.

    fold        computes once whatever depends on no input
    simplify    replaces x * 1, x / 1, x ** 1, x + 0, x - 0, a sum over one entry and a reshape to the same shape by x,
                and a matrix product of a column and a row by an elementwise product
    merge       computes once what is computed twice from the same arguments
    scale       rewrites (x c) d as x (c d), (x c) y as (x y) c and (x + c) + d as x + (c + d), for constants from 1e-8
                to 1e8
    gather      concatenates slices instead of adding zero-padded slices, the gradient of a tensor that is read in
                slices or entry by entry (`priory.network.graph_slices`)

`priory.network.graph_function` then fuses products with sums and calls torch directly. The table leaves out each rule
in turn, on the densities of `benchmarks/mcmc.py` at 256 chains. It gives the number of operations in the graph of
values and gradients, and how much longer a call of that graph takes; in brackets, a call of the graph of gradients
alone. Times are the least CPU time of 46 to 300 repeats. The network's times, and those of the logistic regression of
2.5 ms, are uncertain by 3 %.

    left out                     eight schools            logistic, batched       network 1-50-1
    nothing                      59 ops, 126 (73) us      22 ops, 2.5 (1.2) ms    48 ops, 12.9 (12.4) ms
    every rule                   174    +464 (+717) %     55    +16 (+122) %      124    +21 (+29) %
    fold                         113    +164 (+329) %     35     +8 (+110) %       67     +2  (+6) %
    simplify                      75     +35  (+39) %     28      0    (0) %       80    +12 (+23) %
      neutral elements            70     +24  (+28) %     24      0   (+5) %       56     +4  (+4) %
      changes of shape            64      +7   (+6) %     24      0    (0) %       48     +2  (+3) %
      column times row            59      -2   (-1) %     22     -1    (0) %       49    +23 (+24) %
    scale                         71     +23  (+26) %     23     -3    (0) %       53     +3  (+4) %
      factors                     69     +21  (+27) %     23     -2   (-2) %       52     +1  (+5) %
      (x c) y, terms, and merge   68     +10   (+5) %     22      0   (+3) %       52     +2  (+3) %
    gather                        65     +40  (+59) %     22     -2   (-3) %       54     +1  (+7) %
    as_tensors                    62     +14  (+17) %     24     -3   (+3) %       50     +3  (+7) %
    fuse                          65      +6   (+8) %     24     +1   (+1) %       51     +4  (+4) %
    rename                        60     +94 (+101) %     22     +1   (+2) %       48     +5  (+8) %
    constants bound to a name     59     +27  (+28) %     22      0   (+5) %       48     +5  (+8) %

(x c) y, terms and merge save 2 to 5 % each, and 10 % together.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph

aten: Any = torch.ops.aten
SHAPE_ONLY_OPS = (aten.ones_like.default, aten.zeros_like.default, aten.new_zeros.default, aten.new_ones.default)
VIEW_OPS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
IDENTITY_OPS = (
    *VIEW_OPS,
    aten.expand.default,
    aten.slice.Tensor,
    aten.slice_backward.default,
)  # if the shape stays the same
NEUTRAL_ELEMENTS = {aten.mul: 1, aten.div: 1, aten.pow: 1, aten.add: 0, aten.sub: 0}
MODERATE_RANGE = 1e-8, 1e8  # absolute values of constants whose products neither overflow nor underflow


def mutates(node: Node) -> bool:
    """Whether an operation writes to its arguments."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


# Properties of nodes.


def packet(node: Any) -> Any:
    """The operation of a node, regardless of the overload; None if it has none."""
    return getattr(getattr(node, "target", None), "overloadpacket", None)


def result(node: Any) -> Any:
    """A tensor with the shape and dtype of a node's result, or None if unknown."""
    meta = getattr(node, "meta", {})
    return meta.get("value", meta.get("val"))


def shape(node: Any) -> Any:
    """The shape of a node's result; the node itself if unknown."""
    return getattr(result(node), "shape", node)


def dtype(node: Any) -> Any:
    """The dtype of a node's result; the node itself if unknown."""
    return getattr(result(node), "dtype", node)


def same_float_type(node: Node, *others: Any) -> bool:
    """Whether the results of all nodes have the same floating-point dtype."""
    found = dtype(node)
    return isinstance(found, torch.dtype) and found.is_floating_point and all(dtype(n) == found for n in others)


def number(argument: Any) -> bool:
    """Whether an argument is a plain number."""
    return isinstance(argument, (int, float)) and not isinstance(argument, bool)


def constant(argument: Any) -> Any:
    """The value of an argument that does not depend on the input, a number or a tensor; None if it depends on it."""
    return argument if number(argument) else getattr(argument, "meta", {}).get("value")


def is_all(argument: Any, value: int) -> bool:
    """Whether an argument is this number, or a constant tensor whose entries all equal it."""
    found = argument if isinstance(argument, Tensor) else constant(argument)
    return bool((found == value).all()) if isinstance(found, Tensor) else found == value


def has_moderate_size(value: Any) -> bool:
    """Whether a constant is far enough from zero and infinity that the order of products doesn't matter."""
    if value is None:
        return False
    size, (low, high) = abs(value), MODERATE_RANGE
    return bool(((size >= low) & (size <= high)).all()) if isinstance(size, Tensor) else low <= size <= high


def without_repetition(value: Any) -> Any:
    """A constant without repeated entries, which broadcasting restores; a number if all entries are equal."""
    if not isinstance(value, Tensor):
        return value
    for d in range(value.ndim):
        first = value.narrow(d, 0, 1)
        value = first if bool((value == first).all()) else value
    return float(value) if value.numel() == 1 else value


def is_product(node: Any) -> bool:
    """Whether a node is the product of two tensors and has one use."""
    return packet(node) is aten.mul and not node.kwargs and len(node.users) == 1 and same_float_type(node, *node.args)


# Changes to a graph.


def insert_constant(module: Any, before: Node, value: Any) -> Any:
    """Insert a constant before a node, and return it as an argument: a number as is, a tensor as a node."""
    if not isinstance(value, Tensor):
        return value
    name = f"constant_{len(module._buffers)}"
    module.register_buffer(name, value.detach().contiguous())
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(name)
    node.meta["value"] = value.detach()
    return node


def call(graph: Graph, before: Node, target: Any, arguments: tuple[Any, ...], like: Any, **options: Any) -> Node:
    """Insert an operation before a node; its result has the shape and dtype of `like`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, arguments, options)
    node.meta["val"] = like
    return node


def replace_node(graph: Graph, node: Node, other: Node) -> None:
    """Replace every use of a node by another node, and erase it."""
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def remove_unused(graph: Graph) -> None:
    """Remove operations and constants whose results are not used; an operation that writes to its argument stays."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr") and not mutates(node):
            graph.erase_node(node)


# fold


def fold(module: Any) -> None:
    """Compute once whatever depends on no input, or only on the shape of an input."""
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function":
            shaped = node.target in SHAPE_ONLY_OPS and "val" in node.meta
            if shaped or all(n in values for n in node.all_input_nodes):
                given = {n: values[n] if n in values else blank(n) for n in node.all_input_nodes}
                arguments, options = map_arg((node.args, node.kwargs), given.__getitem__)
                with torch.no_grad():
                    values[node] = node.target(*arguments, **options)
    for node in [n for n in values if isinstance(values[n], Tensor) and any(u not in values for u in n.users)]:
        found = insert_constant(module, node, values[node])
        for user in [u for u in node.users if u not in values]:
            user.replace_input_with(node, found)
    remove_unused(module.graph)


def blank(node: Node) -> Tensor:
    """A tensor of a node's shape and dtype with arbitrary values."""
    like = node.meta["val"]
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


# simplify and merge


def simplify(graph: Graph) -> None:
    """Remove operations that change nothing, and combine consecutive reshapes into one."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.kwargs or not node.args:
            continue
        same = origin(node) if only_unit_dimensions(node) else unchanged(node)
        if node.target is aten.bmm.default and same_float_type(node, *node.args) and shape(node.args[0])[-1] == 1:
            node.target = aten.mul.Tensor  # a product of a column and a row
        if same is None:
            continue
        if shape(same) == shape(node) and dtype(same) == dtype(node):
            replace_node(graph, node, same)
        elif only_unit_dimensions(node):
            view = call(graph, node, aten.view.default, (same, list(shape(node))), result(node))
            replace_node(graph, node, view)


def unchanged(node: Node) -> Any:
    """The argument that an operation returns unchanged if the shapes agree, or None."""
    first, second = list[Any]((*node.args, None))[:2]
    if node.target in IDENTITY_OPS:
        return first
    neutral = NEUTRAL_ELEMENTS.get(packet(node))
    if neutral is None:
        return None
    if is_all(second, neutral) and not number(first):
        return first
    return second if packet(node) in (aten.mul, aten.add) and is_all(first, neutral) else None


def only_unit_dimensions(node: Any) -> bool:
    """Whether an operation only inserts or removes dimensions of size 1."""
    if not isinstance(node, Node) or node.target not in (*VIEW_OPS, aten.sum.dim_IntList) or node.kwargs:
        return False
    before, after = result(node.args[0]), result(node)
    if before is None or after is None or before.dtype != after.dtype:
        return False
    return [n for n in before.shape if n != 1] == [n for n in after.shape if n != 1]


def origin(node: Node) -> Any:
    """The node whose values these are, before dimensions of size 1 were inserted or removed."""
    first = node.args[0]
    return origin(first) if only_unit_dimensions(first) else first  # pyright: ignore[reportArgumentType] - it is a node


def merge(graph: Graph) -> None:
    """Compute once what is computed twice from the same arguments."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))  # nodes have unique names
        if key in seen:
            replace_node(graph, node, seen[key])
        else:
            seen[key] = node


# scale


def scale(module: Any) -> None:
    """Bring constant factors together at the end of a product, and constant terms at the end of a sum."""
    factors: dict[Node, tuple[Node, Any]] = {}
    for node in list(module.graph.nodes):
        found = factor(node)
        if found is not None:
            join(module, node, found, factors, aten.mul.Tensor, operator.mul)
        elif node.op == "call_function" and not node.kwargs and packet(node) in (aten.mul, aten.div):
            lift(module, node, factors)
    terms: dict[Node, tuple[Node, Any]] = {}
    for node in list(module.graph.nodes):
        found = term(node)
        if found is not None:
            join(module, node, found, terms, aten.add.Tensor, operator.add)
    remove_unused(module.graph)


def join(
    module: Any,
    node: Node,
    found: tuple[Node, Any],
    known: dict[Node, tuple[Node, Any]],
    target: Any,
    together: Callable[[Any, Any], Any],
) -> None:
    """Combine the constant of a node with the constant of its argument."""
    base, value = found
    if base in known and has_moderate_size(together(value, known[base][1])):
        base, value = known[base][0], together(value, known[base][1])
    fresh = call(
        module.graph, node, target, (base, insert_constant(module, node, without_repetition(value))), result(node)
    )
    known[fresh] = base, value
    replace_node(module.graph, node, fresh)


def lift(module: Any, node: Node, known: dict[Node, tuple[Node, Any]]) -> None:
    """Move constant factors inside a product or quotient to its end, if they have no other use."""
    value: Any = 1.0
    arguments = []
    for place, one in enumerate(node.args):
        base, own = known.get(one, (one, None)) if len(getattr(one, "users", ())) == 1 else (one, None)  # pyright: ignore
        arguments.append(base)
        if own is not None:
            value = value * own if packet(node) is aten.mul or place == 0 else value / own
    if arguments != list(node.args) and has_moderate_size(value) and same_float_type(node, *arguments):
        inner = call(module.graph, node, node.target, tuple(arguments), result(node))
        join(module, node, (inner, value), known, aten.mul.Tensor, operator.mul)


def factor(node: Node) -> tuple[Node, Any] | None:
    """The tensor and the constant of an operation that only multiplies them, or None."""
    if node.op != "call_function" or node.kwargs:
        return None
    first, second = (*node.args, None)[:2]
    pair: Any = None
    if packet(node) is aten.add and first is second:
        pair = first, 2.0
    elif packet(node) is aten.neg:
        pair = first, -1.0
    elif packet(node) is aten.mul:
        pair = (first, constant(second)) if constant(first) is None else (second, constant(first))
    elif packet(node) is aten.div and has_moderate_size(constant(second)):
        pair = first, 1 / constant(second)
    return pair if pair is not None and keeps_shape_and_type(node, *pair) else None


def term(node: Node) -> tuple[Node, Any] | None:
    """The tensor and the constant of an operation that only adds them, or None."""
    if node.op != "call_function" or node.kwargs or packet(node) not in (aten.add, aten.sub):
        return None
    first, second = node.args[:2]
    pair: Any = None
    if constant(second) is not None:
        pair = first, constant(second) if packet(node) is aten.add else -constant(second)
    elif packet(node) is aten.add and constant(first) is not None:
        pair = second, constant(first)
    return pair if pair is not None and keeps_shape_and_type(node, *pair) else None


def keeps_shape_and_type(node: Node, base: Any, value: Any) -> bool:
    """Whether a constant has moderate size and leaves the shape and dtype of a tensor unchanged."""
    if (
        not isinstance(base, Node)
        or constant(base) is not None
        or not same_float_type(node, base)
        or not has_moderate_size(value)
    ):
        return False
    return shape(base) == shape(node) and (not isinstance(value, Tensor) or value.dtype == dtype(node))
