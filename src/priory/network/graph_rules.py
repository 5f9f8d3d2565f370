"""Rewrites a recorded graph so that it has fewer operations and gives the same numbers.

What `make_fx` records is what autograd and vmap did, one operation of torch after another. For a few hundred small
vectors an operation costs 2 microseconds to call, and its arithmetic next to nothing, so the number of operations is
the time. The rules change rounding alone: a number is infinite, or NaN, where it was, as long as no factor beyond 1e8
makes it so.

    fold        what depends on no input is computed once
    simplify    x * 1, x / 1, x ** 1, x + 0, x - 0, a sum over one entry and a change to the same shape are x; a matrix
                product of a column and a row is an elementwise product
    merge       what is computed twice from the same arguments is computed once
    scale       (x c) d is x (c d), (x c) y is (x y) c, (x + c) + d is x + (c + d), for constants from 1e-8 to 1e8
    gather      zeros around slices, added up, as the gradient of a vector read in slices, are the slices side by side

`priory.network.graph_function` then fuses products with sums and calls torch directly. Each rule was left out in turn,
on the densities of `benchmarks/mcmc.py` at 256 chains. Operations of the graph of values and gradients, and how much
longer a call of it takes and (in brackets) a call of the graph of gradients alone, least CPU time of 46 to 300 repeats.
Numbers on the network, and on the logistic regression of 2.5 ms, are uncertain by 3 %.

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

(x c) y, terms and merge pay 2 to 5 % each, and 10 % together.
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule

aten: Any = torch.ops.aten
OF_A_SHAPE = (aten.ones_like.default, aten.zeros_like.default, aten.new_zeros.default, aten.new_ones.default)
VIEWS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
AS_THEY_ARE = (*VIEWS, aten.expand.default, aten.slice.Tensor, aten.slice_backward.default)  # if the shape stays
NEUTRAL = {aten.mul: 1, aten.div: 1, aten.pow: 1, aten.add: 0, aten.sub: 0}
MODERATE = 1e-8, 1e8  # sizes of constants whose products neither overflow nor vanish


def tidy(module: GraphModule) -> None:
    """Take out of a graph what isn't needed, in place; a graph that writes to its tensors is left as it is."""
    graph = module.graph
    graph.eliminate_dead_code()
    if any(mutates(node) for node in graph.nodes):  # a constant may be written to
        return
    fold(module)
    simplify(graph)
    merge(graph)
    scale(module)
    gather(module)
    simplify(graph)
    merge(graph)
    graph.eliminate_dead_code()


def mutates(node: Node) -> bool:
    """Whether an operation writes to what it is given."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


# What a node is.


def packet(node: Any) -> Any:
    """The operation, whatever the types of its arguments."""
    return getattr(getattr(node, "target", None), "overloadpacket", None)


def result(node: Any) -> Any:
    """A tensor of the shape and type of what a node makes, or None where that is not known."""
    meta = getattr(node, "meta", {})
    return meta.get("value", meta.get("val"))


def shape(node: Any) -> Any:
    """The shape of what a node makes; the node itself if that is not known."""
    return getattr(result(node), "shape", node)


def dtype(node: Any) -> Any:
    """The type of what a node makes; the node itself if that is not known."""
    return getattr(result(node), "dtype", node)


def alike(node: Node, *others: Any) -> bool:
    """Whether nodes make floating-point numbers of one type."""
    found = dtype(node)
    return isinstance(found, torch.dtype) and found.is_floating_point and all(dtype(n) == found for n in others)


def number(argument: Any) -> bool:
    """Whether an argument is a plain number."""
    return isinstance(argument, (int, float)) and not isinstance(argument, bool)


def constant(argument: Any) -> Any:
    """The number or the tensor that an argument is whatever the input, or None."""
    return argument if number(argument) else getattr(argument, "meta", {}).get("value")


def is_all(argument: Any, value: int) -> bool:
    """Whether an argument is this number, or a constant of nothing else."""
    found = argument if isinstance(argument, Tensor) else constant(argument)
    return bool((found == value).all()) if isinstance(found, Tensor) else found == value


def moderate(value: Any) -> bool:
    """Whether a constant is so far from zero and infinity that the order of products doesn't matter."""
    if value is None:
        return False
    size, (low, high) = abs(value), MODERATE
    return bool(((size >= low) & (size <= high)).all()) if isinstance(size, Tensor) else low <= size <= high


def narrowed(value: Any) -> Any:
    """A constant without its repetitions, which broadcasting makes again: a number, if it is one throughout."""
    if not isinstance(value, Tensor):
        return value
    for d in range(value.ndim):
        first = value.narrow(d, 0, 1)
        value = first if bool((value == first).all()) else value
    return float(value) if value.numel() == 1 else value


# What is put into a graph.


def put(module: GraphModule, before: Node, value: Any) -> Any:
    """A constant as an argument: a number as it is, a tensor as a node."""
    if not isinstance(value, Tensor):
        return value
    name = f"constant_{sum(1 for _ in module.named_buffers())}"
    module.register_buffer(name, value.detach().contiguous())
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(name)
    node.meta["value"] = value.detach()
    return node


def call(graph: Graph, before: Node, target: Any, arguments: tuple[Any, ...], like: Any, **options: Any) -> Node:
    """Another operation, just before a node, whose result has the shape and type of `like`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, arguments, options)
    node.meta["val"] = like
    return node


def exchange(graph: Graph, node: Node, other: Node) -> None:
    """Use another node wherever this one is used."""
    node.replace_all_uses_with(other)
    graph.erase_node(node)


# fold


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
        found = put(module, node, values[node])
        for user in [u for u in node.users if u not in values]:
            user.replace_input_with(node, found)
    module.graph.eliminate_dead_code()


def blank(node: Node) -> Tensor:
    """A tensor of a node's shape, whose numbers don't matter."""
    like = node.meta["val"]
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


# simplify and merge


def simplify(graph: Graph) -> None:
    """Drop what changes nothing, and make one change of shape of several."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.kwargs or not node.args:
            continue
        same = origin(node) if only_ones(node) else unchanged(node)
        if node.target is aten.bmm.default and alike(node, *node.args) and shape(node.args[0])[-1] == 1:
            node.target = aten.mul.Tensor  # a product of a column and a row
        if same is None:
            continue
        if shape(same) == shape(node) and dtype(same) == dtype(node):
            exchange(graph, node, same)
        elif only_ones(node):
            view = call(graph, node, aten.view.default, (same, list(shape(node))), result(node))
            exchange(graph, node, view)


def unchanged(node: Node) -> Any:
    """The argument that an operation gives back as it is, if it has the same shape."""
    first, second = list[Any]((*node.args, None))[:2]
    if node.target in AS_THEY_ARE:
        return first
    neutral = NEUTRAL.get(packet(node))
    if neutral is None:
        return None
    if is_all(second, neutral) and not number(first):
        return first
    return second if packet(node) in (aten.mul, aten.add) and is_all(first, neutral) else None


def only_ones(node: Any) -> bool:
    """Whether an operation only puts in or takes out dimensions of one entry."""
    if not isinstance(node, Node) or node.target not in (*VIEWS, aten.sum.dim_IntList) or node.kwargs:
        return False
    before, after = result(node.args[0]), result(node)
    if before is None or after is None or before.dtype != after.dtype:
        return False
    return [n for n in before.shape if n != 1] == [n for n in after.shape if n != 1]


def origin(node: Node) -> Any:
    """The node whose numbers these are, before dimensions of one entry were put in or taken out."""
    first = node.args[0]
    return origin(first) if only_ones(first) else first  # pyright: ignore[reportArgumentType] - it is a node


def merge(graph: Graph) -> None:
    """Compute once what is computed twice from the same arguments."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))  # a node's name is its own
        if key in seen:
            exchange(graph, node, seen[key])
        else:
            seen[key] = node


# scale


def scale(module: GraphModule) -> None:
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
    module.graph.eliminate_dead_code()


def join(
    module: GraphModule,
    node: Node,
    found: tuple[Node, Any],
    known: dict[Node, tuple[Node, Any]],
    target: Any,
    together: Callable[[Any, Any], Any],
) -> None:
    """Make one constant of a node's own and of that of what it is applied to."""
    base, value = found
    if base in known and moderate(together(value, known[base][1])):
        base, value = known[base][0], together(value, known[base][1])
    fresh = call(module.graph, node, target, (base, put(module, node, narrowed(value))), result(node))
    known[fresh] = base, value
    exchange(module.graph, node, fresh)


def lift(module: GraphModule, node: Node, known: dict[Node, tuple[Node, Any]]) -> None:
    """Take the constant factors in a product or a quotient behind it, where nothing else needs them."""
    value: Any = 1.0
    arguments = []
    for place, one in enumerate(node.args):
        base, own = known.get(one, (one, None)) if len(getattr(one, "users", ())) == 1 else (one, None)  # pyright: ignore
        arguments.append(base)
        if own is not None:
            value = value * own if packet(node) is aten.mul or place == 0 else value / own
    if arguments != list(node.args) and moderate(value) and alike(node, *arguments):
        inner = call(module.graph, node, node.target, tuple(arguments), result(node))
        join(module, node, (inner, value), known, aten.mul.Tensor, operator.mul)


def factor(node: Node) -> tuple[Node, Any] | None:
    """A tensor and the constant that an operation multiplies it by, if that is all it does."""
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
    elif packet(node) is aten.div and moderate(constant(second)):
        pair = first, 1 / constant(second)
    return pair if pair is not None and steady(node, *pair) else None


def term(node: Node) -> tuple[Node, Any] | None:
    """A tensor and the constant that an operation adds to it, if that is all it does."""
    if node.op != "call_function" or node.kwargs or packet(node) not in (aten.add, aten.sub):
        return None
    first, second = node.args[:2]
    pair: Any = None
    if constant(second) is not None:
        pair = first, constant(second) if packet(node) is aten.add else -constant(second)
    elif packet(node) is aten.add and constant(first) is not None:
        pair = second, constant(first)
    return pair if pair is not None and steady(node, *pair) else None


def steady(node: Node, base: Any, value: Any) -> bool:
    """Whether a constant of moderate size leaves the shape and the type of a tensor."""
    if not isinstance(base, Node) or constant(base) is not None or not alike(node, base) or not moderate(value):
        return False
    return shape(base) == shape(node) and (not isinstance(value, Tensor) or value.dtype == dtype(node))


# gather


def gather(module: GraphModule) -> None:
    """Put slices side by side instead of adding up what has zeros around each."""
    for node in reversed(list(module.graph.nodes)):
        if packet(node) is not aten.add or not node.users:
            continue
        slices, constants, rest = [], [], []
        for one in summands(node, node):
            kind = slices if place(one) else constants if constant(one) is not None else rest
            kind.append(one)
        slices.sort(key=place)
        apart = all(place(a)[1] <= place(b)[0] for a, b in pairwise(slices))
        if len(slices) >= 2 and apart:
            whole = side_by_side(module, node, slices, [constant(one) for one in constants])
            for one in rest:
                whole = call(module.graph, node, aten.add.Tensor, (whole, one), result(node))
            exchange(module.graph, node, whole)
    module.graph.eliminate_dead_code()


def summands(node: Any, root: Node) -> list[Any]:
    """The tensors that a sum adds up, each of the sum's own shape and type."""
    inside = node is root or (isinstance(node, Node) and len(node.users) == 1)
    plain = inside and packet(node) is aten.add and not node.kwargs
    if plain and all(shape(n) == shape(root) and alike(root, n) for n in node.args):
        return [leaf for n in node.args for leaf in summands(n, root)]
    return [node]


def place(node: Any) -> Any:
    """The first entry and the end of a slice of the last dimension that has zeros around it, or None."""
    if not isinstance(node, Node) or node.target is not aten.slice_backward.default or result(node) is None:
        return None
    _, sizes, dim, start, end, step = node.args
    last, length = dim in (-1, len(sizes) - 1), sizes[-1]  # pyright: ignore - sizes are a list of integers
    return (start, min(end, length)) if last and step == 1 and 0 <= start < end else None  # pyright: ignore


def side_by_side(module: GraphModule, node: Node, slices: list[Node], added: list[Tensor]) -> Node:
    """Slices and constants as one tensor, with zeros where there are none."""
    like = result(node)
    total: Tensor = sum(added, torch.zeros(like.shape, dtype=like.dtype, device=like.device))
    pieces, done = [], 0
    for one in slices:
        start, end = place(one)
        if start > done:
            pieces.append(put(module, node, total[..., done:start]))
        piece, more = one.args[0], narrowed(total[..., start:end])
        if not is_all(more, 0):
            piece = shifted(module, node, piece, more)
        pieces.append(piece)
        done = end
    if done < like.shape[-1]:
        pieces.append(put(module, node, total[..., done:]))
    return call(module.graph, node, aten.cat.default, (pieces, like.ndim - 1), like)


def shifted(module: GraphModule, before: Node, piece: Any, value: Any) -> Node:
    """A piece with a constant added; a number is added before dimensions of one entry are put in."""
    if number(value) and only_ones(piece):
        inner = shifted(module, before, piece.args[0], value)
        return call(module.graph, before, aten.view.default, (inner, list(shape(piece))), result(piece))
    return call(module.graph, before, aten.add.Tensor, (piece, put(module, before, value)), result(piece))
