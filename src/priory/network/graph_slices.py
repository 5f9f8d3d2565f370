"""Rewrites the gradient of a tensor that is read in slices or entry by entry.

Autograd pads the gradient of each slice with zeros to the shape of the tensor, and adds up all of them. For a loop over
the n entries of a tensor these are n operations of n elements each. One concatenation has the same result. For a hidden
Markov model over 500 steps, a gradient writes 36,000 elements per vector instead of 1.5 million, and at 256 vectors it
takes 0.06 s instead of 1.1 s.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import Node

from priory.network.graph_rules import (
    aten,
    call,
    constant,
    fold,
    insert_constant,
    is_all,
    merge,
    mutates,
    number,
    only_unit_dimensions,
    packet,
    remove_unused,
    replace_node,
    result,
    same_float_type,
    scale,
    shape,
    simplify,
    without_repetition,
)


def simplify_graph(module: Any) -> None:
    """Apply all rules to a graph, in place; a graph that writes to its tensors is left unchanged."""
    graph = module.graph
    if any(mutates(node) for node in graph.nodes):  # a constant may be written to
        graph.eliminate_dead_code()
        return
    remove_unused(graph)
    fold(module)
    simplify(graph)
    merge(graph)
    scale(module)
    gather(module)
    simplify(graph)
    merge(graph)
    remove_unused(graph)


def gather(module: Any) -> None:
    """Concatenate slices instead of adding zero-padded slices."""
    inside: set[Node] = set()  # sums that are part of a larger one
    for node in reversed(list(module.graph.nodes)):
        if packet(node) is not aten.add or not node.users or node in inside:
            continue
        terms = summands(node, inside)
        dims = [padded_slice(one).dim for one in terms if padded_slice(one)]
        if len(dims) < 2:
            continue
        dim = max(dims, key=dims.count)
        slices, constants, rest = [], [], []
        for one in terms:
            own = padded_slice(one)
            kind = slices if own and own.dim == dim else constants if constant(one) is not None else rest
            kind.append(one)
        slices.sort(key=padded_slice)
        disjoint = all(padded_slice(a).end <= padded_slice(b).start for a, b in pairwise(slices))
        if len(slices) >= 2 and disjoint:
            whole = concatenated(module, node, slices, [constant(one) for one in constants])
            for one in rest:
                whole = call(module.graph, node, aten.add.Tensor, (whole, one), result(node))
            replace_node(module.graph, node, whole)
    remove_unused(module.graph)


def summands(root: Node, inside: set[Node]) -> list[Any]:
    """The terms of a sum, each with the shape and dtype of the sum; the sums among its terms are added to a set."""
    found: list[Any] = []
    open_: list[Any] = [root]
    while open_:
        node = open_.pop()
        own = node is root or (isinstance(node, Node) and len(node.users) == 1)
        plain = own and packet(node) is aten.add and not node.kwargs
        if plain and all(shape(n) == shape(root) and same_float_type(root, n) for n in node.args):
            inside.add(node)
            open_ += reversed(node.args)
        else:
            found.append(node)
    return found


class PaddedSlice(NamedTuple):
    """The dimension, start and end of a slice with zeros around it."""

    dim: int
    start: int
    end: int


def padded_slice(node: Any) -> Any:
    """Where a node is not zero, if it is a zero-padded slice or entry of one dimension; None for any other node."""
    if not isinstance(node, Node) or result(node) is None or node.kwargs:
        return None
    if node.target is aten.select_backward.default:
        _, sizes, dim, index = list[Any](node.args)
        dim, index = dim % len(sizes), index % sizes[dim]
        return PaddedSlice(dim, index, index + 1)
    if node.target is not aten.slice_backward.default:
        return None
    _, sizes, dim, start, end, step = list[Any](node.args)
    found = PaddedSlice(dim % len(sizes), start, min(end, sizes[dim]))
    return found if step == 1 and 0 <= start < end else None


def concatenated(module: Any, node: Node, slices: list[Node], added: list[Tensor]) -> Node:
    """Slices and constants concatenated to one tensor, with zeros in the gaps."""
    like, dim, graph = result(node), padded_slice(slices[0]).dim, module.graph
    entries = all(one.target is aten.select_backward.default for one in slices)
    if entries and 2 * len(slices) >= like.shape[dim] and not added:
        return stacked(module, node, slices, dim)
    total: Tensor = sum(added, torch.zeros((), dtype=like.dtype, device=like.device)).expand(like.shape)
    pieces, done = [], 0
    for one in slices:
        _, start, end = padded_slice(one)
        if start > done:
            pieces.append(insert_constant(module, node, total.narrow(dim, done, start - done)))
        piece, more = list[Any](one.args)[0], without_repetition(total.narrow(dim, start, end - start))
        if one.target is aten.select_backward.default:
            shaped = torch.empty((*like.shape[:dim], 1, *like.shape[dim + 1 :]), dtype=like.dtype, device="meta")
            piece = call(graph, node, aten.unsqueeze.default, (piece, dim), shaped)
        if not is_all(more, 0):
            piece = shifted(module, node, piece, more)
        pieces.append(piece)
        done = end
    if done < like.shape[dim]:
        pieces.append(insert_constant(module, node, total.narrow(dim, done, like.shape[dim] - done)))
    return call(graph, node, aten.cat.default, (pieces, dim), like)


def stacked(module: Any, node: Node, slices: list[Node], dim: int) -> Node:
    """Entries of one dimension stacked to one tensor, with zeros for those that are missing."""
    like = result(node)
    given: dict[int, Any] = {padded_slice(one).start: one.args[0] for one in slices}
    if len(given) < like.shape[dim]:
        sizes = (*like.shape[:dim], *like.shape[dim + 1 :])
        zeros = insert_constant(module, node, torch.zeros(sizes, dtype=like.dtype, device=like.device))
        given = {i: given.get(i, zeros) for i in range(like.shape[dim])}
    return call(module.graph, node, aten.stack.default, ([given[i] for i in sorted(given)], dim), like)


def shifted(module: Any, before: Node, piece: Any, value: Any) -> Node:
    """A piece with a constant added; a number is added before dimensions of size 1 are inserted."""
    if number(value) and only_unit_dimensions(piece):
        inner = shifted(module, before, piece.args[0], value)
        return call(module.graph, before, aten.view.default, (inner, list(shape(piece))), result(piece))
    return call(module.graph, before, aten.add.Tensor, (piece, insert_constant(module, before, value)), result(piece))
