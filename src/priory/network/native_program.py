"""A recorded graph as a list of operations for a small C program, without a call of Python or torch per operation.

A density with a loop over time has thousands of operations on a few numbers each. Calling torch takes about a
microsecond per operation, whatever the number of vectors; the C program (`native_operations.c`) takes some 20 ns.
`priory.network.recorded_graph` has the times.

All results have fixed places in memory, made once. Views cost nothing: torch makes them when the program is written,
and the program sees their addresses and strides. An operation that the program doesn't have, or that is large enough
for torch to be as fast, is called through torch between two parts of the program. The memory of a result is used again
once it has been read for the last time.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

from priory.network.graph_rules import (
    VIEW_OPS,
    aten,
    dtype,
    is_product,
    mutates,
    number,
    packet,
    result,
    same_float_type,
    shape,
)
from priory.network.native_library import CODES, native_library
from priory.network.native_memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph

NATIVE_ELEMENTS = 1 << 14  # a larger operation is left to torch
SUMMED_ELEMENTS = 1 << 10  # a longer sum is left to torch, whose rounding errors are smaller
# operations with the same name and the same meaning of their arguments, all tensors
ELEMENTWISE_OPS = {
    *("neg", "exp", "log", "log1p", "sqrt", "tanh", "sigmoid", "abs", "sin", "cos"),
    *("add", "sub", "mul", "div", "maximum", "minimum", "ge", "gt", "le", "lt", "eq", "ne", "addcmul", "where"),
}
# operations that read or write memory in a layout fixed when they were recorded
LAYOUT_OPS = {aten.as_strided, aten._reshape_alias, aten.as_strided_copy, aten.view_as_real, aten.view_as_complex}


class NotNativeError(Exception):
    """The graph can't be written as a program."""


def native_function(module: Any, w: Tensor, value: bool = True) -> Callable[[Tensor], Any] | None:
    """The graph as a function of vectors in the shape of w (S, P), or None if it can't be run natively.

    Args:
        module: The graph, with its constants as attributes. It is left unchanged.
        w: Vectors of the shape and dtype at which the function will be called.
        value: Whether to return all outputs of the graph, or the first alone, without what only the others need.
    """
    if w.device.type != "cpu" or any(mutates(n) or packet(n) in LAYOUT_OPS for n in module.graph.nodes):
        return None
    run = native_library(w.dtype)
    if run is None:
        return None
    try:
        return NativeProgram(module, w, value, run)
    except NotNativeError:
        return None


class NativeProgram:
    """A graph as parts of a native program and calls of torch, run one after the other.

    Args:
        module: The graph, with its constants as attributes.
        w: Vectors of the shape and dtype of the input.
        value: Whether to return all outputs, or the first alone.
        run: The function that runs a part of the program between two addresses.
    """

    def __init__(self, module: Any, w: Tensor, value: bool, run: Callable[[int, int], None]) -> None:
        self._run_native, self._like = run, w
        self._words: list[int] = []
        self._parts: list[int | Callable[[], None]] = []  # the end of a part of the program, or a call of torch
        self._memory = Memory(len(w))
        self._values: dict[Node, Any] = {}
        end: Any = next(iter(reversed(module.graph.nodes)))  # the node of the outputs
        outputs = end.args[0] if value else end.args[0][0]
        nodes = needed(module.graph, outputs)
        self._products = self._fused(nodes)
        last: dict[Node, Any] = {}
        for node in nodes:
            last.update(dict.fromkeys(self._read(node), node))
        last.update(dict.fromkeys(nodes_in(outputs), end))
        unread: dict[Any, list[Node]] = defaultdict(list)
        for used, node in last.items():
            unread[node].append(used)
        products = set(self._products.values())
        for node in nodes:
            if node.op == "placeholder":
                self._input = self._values[node] = self._memory.take(node, w.shape, w.dtype)
            elif node.op == "get_attr":
                self._values[node] = getattr(module, str(node.target)).detach()
            elif node not in products:
                self._values[node] = self._write(node)
                for used in unread[node]:
                    self._memory.release(used)
        self._outputs = map_arg(outputs, self._values.__getitem__)
        self._parts.append(len(self._words))
        self._code = torch.tensor(self._words, dtype=torch.int64)
        self._steps = self._linked()
        del self._words, self._parts

    def __call__(self, w: Tensor) -> Any:
        self._input.copy_(w.detach())
        for step in self._steps:
            step()
        return map_tensors(self._outputs)

    def _linked(self) -> list[Callable[[], None]]:
        """The parts as functions without arguments, in their order."""
        steps: list[Callable[[], None]] = []
        start, base, size, run = 0, self._code.data_ptr(), self._code.element_size(), self._run_native
        for part in self._parts:
            if not isinstance(part, int):
                steps.append(part)
            elif part > start:
                steps.append(lambda a=base + start * size, b=base + part * size: run(a, b))
                start = part
        return steps

    # Writing.

    def _fused(self, nodes: list[Node]) -> dict[Node, Node]:
        """Products that are computed together with the sum that is their only use, by that sum."""
        found: dict[Node, Node] = {}
        for node in nodes:
            if packet(node) is not aten.add or node.kwargs or node.args[0] is node.args[1]:
                continue
            if dtype(node) is not self._like.dtype or not same_float_type(node, *node.args):
                continue
            product = next((one for one in reversed(node.args) if is_product(one)), None)
            if product is not None and shape(node).numel() <= NATIVE_ELEMENTS:
                found[node] = product  # pyright: ignore[reportArgumentType] - it is a node
        return found

    def _read(self, node: Node) -> list[Node]:
        """The nodes whose results an operation reads, once products are fused with sums."""
        product = self._products.get(node)
        if product is None:
            return node.all_input_nodes
        return [*(one for one in node.all_input_nodes if one is not product), *product.all_input_nodes]

    def _write(self, node: Node) -> Any:
        """Write an operation, and return its result: a tensor, or a tuple of tensors."""
        if node.target is operator.getitem:
            whole, place = list[Any](node.args)
            self._memory.share(node, whole)
            return self._values[whole][place]
        viewed = self._view(node)
        if viewed is not None:
            return viewed
        like = result(node)
        if like is None:
            raise NotNativeError
        if not isinstance(like, (tuple, list)):
            out = self._memory.take(node, like.shape, like.dtype)
            if self._write_native(node, out):
                return out
            return self._call_torch(node, out)
        outs = tuple(None if one is None else self._memory.take(node, one.shape, one.dtype) for one in like)
        return self._call_torch(node, outs)

    def _view(self, node: Node) -> Any:
        """The result of an operation that only looks at its argument in another way; None for any other operation."""
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        aliases = len(returns) == 1 and returns[0].alias_info is not None
        if not (aliases or node.target in VIEW_OPS):
            return None
        first = self._values[node.args[0]]  # pyright: ignore[reportArgumentType] - it is a node
        arguments, options = map_arg((node.args, node.kwargs), lambda n: self._values[n])
        if node.target in VIEW_OPS[:3]:
            try:
                found = first.view(arguments[1])
            except RuntimeError:  # the layout is another than torch's
                out = self._memory.take(node, result(node).shape, first.dtype, plain=True)
                copy = out.view(first.shape)
                if first.dtype is not self._like.dtype:
                    raise NotNativeError from None
                self._emit("copy", copy, first)
                return out
        else:
            target: Any = node.target
            found = target(*arguments, **options)
        memory = first.untyped_storage().data_ptr()
        if any(one.untyped_storage().data_ptr() != memory for one in (found if isinstance(found, list) else [found])):
            raise NotNativeError
        self._memory.share(node, node.args[0])
        return found

    def _call_torch(self, node: Node, out: Any) -> Any:
        """Call an operation through torch between two parts of the program."""
        target: Any = node.target
        arguments, options = map_arg((node.args, node.kwargs), lambda n: self._values[n])

        def step() -> None:
            found = target(*arguments, **options)
            if isinstance(out, Tensor):
                out.copy_(found)
                return
            for place, one in zip(out, found, strict=True):
                if place is not None:
                    place.copy_(one)

        self._parts += [len(self._words), step]
        return out

    def _write_native(self, node: Node, out: Tensor) -> bool:
        """Write an operation as part of the program, if the program has it."""
        name = getattr(packet(node) or node.target, "__name__", "").split(".")[0]
        write = getattr(self, f"_{name}", None) if name in SPECIAL_OPS else None
        if out.numel() > NATIVE_ELEMENTS:
            return False
        if node in self._products:
            product = self._products[node]
            (other,) = [one for one in node.args if one is not product]
            self._emit("addcmul", out, *(self._values[one] for one in (other, *product.args)))  # pyright: ignore
            return True
        if write is not None:
            return not node.kwargs and write(out, *map_arg(node.args, lambda n: self._values[n]))
        if name not in ELEMENTWISE_OPS or node.kwargs:
            return False
        arguments = [self._operand(one) for one in map_arg(node.args, lambda n: self._values[n])]
        kinds = [None if one is None else one.dtype for one in arguments]
        real, flag = self._like.dtype, torch.bool
        given = [flag, real, real] if name == "where" else [real] * len(kinds)
        made = flag if name in ("ge", "gt", "le", "lt", "eq", "ne") else real
        if kinds != given or out.dtype is not made:
            return False
        self._emit(name, out, *arguments)
        return True

    def _operand(self, argument: Any) -> Tensor | None:
        """An argument as a tensor; None if it is neither a tensor nor a number."""
        if number(argument):
            return self._memory.keep(torch.tensor(argument, dtype=self._like.dtype))
        return argument if isinstance(argument, Tensor) else None

    def _real(self, *tensors: Any) -> bool:
        return all(isinstance(one, Tensor) and one.dtype is self._like.dtype for one in tensors)

    def _emit(self, name: str, out: Tensor, *arguments: Any) -> None:
        """Append an operation whose arguments broadcast to the result, or whose result broadcasts to the arguments."""
        arrays = torch.broadcast_tensors(out, *arguments)
        sizes, steps = out.element_size(), [one.element_size() for one in arrays]
        strides = [[d * size for d in one.stride()] for one, size in zip(arrays, steps, strict=True)]
        shape = arrays[0].shape
        if 0 in shape:
            return
        dims = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: strides[0][d] or sizes * (1 << 40))
        rows: list[list[int]] = []  # innermost first: the size, and the distance of entries in each array
        for d in dims:
            own = [one[d] for one in strides]
            if rows and all(a * rows[-1][0] == b for a, b in zip(rows[-1][1:], own, strict=True)):
                rows[-1][0] *= shape[d]
            else:
                rows.append([shape[d], *own])
        rows = rows or [[1, *[0] * len(arrays)]]
        self._words += [CODES[name], len(rows), len(arrays), *(one.data_ptr() for one in arrays)]
        for row in reversed(rows):
            self._words += row

    def _constant(self, value: float) -> Tensor:
        return self._memory.keep(torch.tensor(value, dtype=self._like.dtype))

    # Operations that take several operations of the program.

    def _sum(self, out: Tensor, x: Any, dims: Any = None, keep: bool = False) -> bool:
        dims = list(range(x.ndim)) if not dims else [d % x.ndim for d in dims]
        if not self._real(out, x) or x.numel() > SUMMED_ELEMENTS * max(1, out.numel()):
            return False
        self._emit("copy", out, self._constant(0.0))
        self._emit("sum", with_dims(out, dims, keep), x)
        return True

    def _logsumexp(self, out: Tensor, x: Any, dims: Any, keep: bool = False) -> bool:
        dims = [d % x.ndim for d in dims]
        if not self._real(out, x) or x.numel() > NATIVE_ELEMENTS or x.numel() == 0:
            return False
        highest, total, logarithm = (self._memory.scratch(out.shape, out.dtype, which) for which in range(3))
        shifted, exponentials = (self._memory.scratch(x.shape, x.dtype, which) for which in (3, 4))
        finite = self._memory.scratch(out.shape, torch.bool)
        self._emit("copy", highest, self._constant(-torch.inf))
        self._emit("max", with_dims(highest, dims, keep), x)
        # an infinite maximum must not be subtracted from itself
        self._emit("abs", out, highest)
        self._emit("lt", finite, out, self._constant(torch.inf))
        self._emit("where", out, finite, highest, self._constant(0.0))
        self._emit("copy", highest, out)
        self._emit("sub", shifted, x, with_dims(highest, dims, keep))
        self._emit("exp", exponentials, shifted)
        self._emit("copy", total, self._constant(0.0))
        self._emit("sum", with_dims(total, dims, keep), exponentials)
        self._emit("log", logarithm, total)
        self._emit("add", out, logarithm, highest)
        return True

    def _mm(self, out: Tensor, x: Any, y: Any) -> bool:
        if not self._real(out, x, y) or x.shape[-1] * out.numel() > NATIVE_ELEMENTS:
            return False
        self._emit("copy", out, self._constant(0.0))
        self._emit("dot", out[..., None], x[..., :, None, :], y.mT[..., None, :, :])
        return True

    _bmm = _mm

    def _pow(self, out: Tensor, x: Any, exponent: Any) -> bool:
        if not self._real(out, x) or not (number(exponent) or self._real(exponent)):
            return False
        if number(exponent) and exponent == 2:
            self._emit("mul", out, x, x)
        else:
            self._emit("pow", out, x, self._operand(exponent))
        return True

    def _rsub(self, out: Tensor, x: Any, other: Any, alpha: Any = 1) -> bool:
        if alpha != 1 or not self._real(out, x):
            return False
        self._emit("sub", out, self._operand(other), x)
        return True

    def _clone(self, out: Tensor, x: Any) -> bool:
        if not self._real(out, x):
            return False
        self._emit("copy", out, x)
        return True

    def _select_backward(self, out: Tensor, x: Any, sizes: Any, dim: int, index: int) -> bool:
        return self._padded(out, x, lambda whole: whole.select(dim, index))

    def _slice_backward(self, out: Tensor, x: Any, sizes: Any, dim: int, start: int, end: int, step: int) -> bool:
        return self._padded(out, x, lambda whole: aten.slice.Tensor(whole, dim, start, end, step))

    def _padded(self, out: Tensor, x: Any, part: Callable[[Tensor], Tensor]) -> bool:
        """A tensor of zeros with x in one part."""
        if not self._real(out, x):
            return False
        self._emit("copy", out, self._constant(0.0))
        self._emit("copy", part(out), x)
        return True

    def _stack(self, out: Tensor, tensors: Any, dim: int = 0) -> bool:
        if not self._real(out, *tensors):
            return False
        for i, one in enumerate(tensors):
            self._emit("copy", out.select(dim, i), one)
        return True

    def _cat(self, out: Tensor, tensors: Any, dim: int = 0) -> bool:
        if not self._real(out, *tensors) or any(one.ndim != out.ndim for one in tensors):
            return False
        start = 0
        for one in tensors:
            self._emit("copy", out.narrow(dim, start, one.shape[dim]), one)
            start += one.shape[dim]
        return True


SPECIAL_OPS = {
    *("sum", "logsumexp", "mm", "bmm", "pow", "rsub", "clone"),
    *("select_backward", "slice_backward", "stack", "cat"),
}


def nodes_in(argument: Any) -> list[Node]:
    """The nodes in an argument, a node or nested sequences of nodes."""
    found: list[Node] = []
    map_arg(argument, found.append)
    return found


def needed(graph: Graph, outputs: Any) -> list[Node]:
    """The nodes of a graph that some outputs need, and its inputs, in their order."""
    found = set(nodes_in(outputs))
    for node in reversed(graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in found or node.op == "placeholder"]


def with_dims(reduced: Tensor, dims: list[int], kept: bool) -> Tensor:
    """A reduced tensor with its reduced dimensions as dimensions of size 1."""
    for d in () if kept else sorted(dims):
        reduced = reduced.unsqueeze(d)
    return reduced


def map_tensors(outputs: Any) -> Any:
    """Copies of the outputs, in their structure."""
    if isinstance(outputs, Tensor):
        return outputs.clone()
    return type(outputs)(map_tensors(one) for one in outputs)
