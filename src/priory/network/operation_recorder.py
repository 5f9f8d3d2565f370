"""Records the operations that a function runs on its input, as a graph.

`make_fx` of torch does the same in about 1 ms per operation, most of it for a symbolic tensor and a stack trace. Here
an operation takes less than 0.1 ms. What depends on no input is computed while recording, and is a constant of the
graph.

An operation of `torch.linalg` that fails at one vector gives NaN there (`priory.network.failures`), which is recorded.

A function is not recorded here if it writes to a tensor in place, draws random numbers, or has a result whose shape or
Python value depends on the input; `make_fx` then decides.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph

from priory.network.dispatch_mode import DispatchMode
from priory.network.failures import REPLACED_OPS, FailuresAsNaN, PublicCalls

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx.node import Node

aten: Any = torch.ops.aten
IDENTITY_OPS = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
SHAPE_ONLY_OPS = {
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
    aten.new_empty_strided.default,
}
UNRECORDABLE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NotRecordableError(RuntimeError):
    """The function does something that a graph of operations can't repeat."""


class LongFunctionError(Exception):
    """The function has more operations than were asked for.

    Args:
        operations: Number of operations so far.
        elements: Number of elements that they wrote.
    """

    def __init__(self, operations: int, elements: int) -> None:
        super().__init__(f"{operations} operations")
        self.operations, self.elements = operations, elements


@dataclass(frozen=True, slots=True)
class Description:
    """The shape, dtype and device of a result."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        return len(self.shape)


class RecordedModule(nn.Module):
    """A graph with its constants as buffers."""

    graph: Graph


class OpTraits(NamedTuple):
    """What matters for recording an operation."""

    identity: bool
    shape_only: bool
    mutable: bool
    random: bool
    unrecordable: bool  # its shape or value depends on the input's values
    view: bool  # its result shares the memory of an argument
    replaced: bool  # where it fails, NaN is returned


@cache
def op_traits(func: Any) -> OpTraits:
    """The traits of an operation."""
    tags, returns = set(func.tags), func._schema.returns
    return OpTraits(
        identity=func in IDENTITY_OPS,
        shape_only=func in SHAPE_ONLY_OPS,
        mutable=func._schema.is_mutable,
        random=torch.Tag.nondeterministic_seeded in tags,
        unrecordable=bool(UNRECORDABLE_TAGS & tags),
        view=bool(returns) and returns[0].alias_info is not None and not func._schema.is_mutable,
        replaced=func in REPLACED_OPS,
    )


class OperationRecorder(DispatchMode):
    """A context that records the operations on one tensor, and on what is computed from it.

    Args:
        w: The input of the graph.
        longest: Number of operations at which recording stops with `LongFunctionError`; None for any number.
    """

    def __init__(self, w: Tensor, longest: int | None = None) -> None:
        super().__init__()
        self._longest, self._operations, self._elements = longest, 0, 0
        self.module, self.graph = RecordedModule(), Graph()
        self._constants: dict[int, tuple[Tensor, Node]] = {}
        self._failures, self._inside_replacement = FailuresAsNaN(), False
        self._attach(w, self.graph.placeholder("w"))

    @property
    def public_calls(self) -> PublicCalls:
        """A context that sees which error codes the function reads itself."""
        return self._failures.calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, traits = kwargs or {}, op_traits(func)
        if traits.replaced and not self._inside_replacement:
            return self._replaced(func, args, options)
        if traits.random:
            raise NotRecordableError(f"{func} draws random numbers")
        if not any(map(self._depends, args)) and not any(map(self._depends, options.values())):
            if traits.mutable and self._writes_to_constant((*args, *options.values())):
                raise NotRecordableError(f"{func} writes to a tensor that the graph reads")
            return func(*args, **options)
        if traits.shape_only:
            return func(*args, **options)
        if traits.mutable or (traits.unrecordable and not self._is_plain_index(func, args)):
            raise NotRecordableError(f"{func} can't be repeated with another input")
        found = func(*args, **options)
        if traits.identity:
            self._attach(found, self._node(args[0]))
            return found
        given, named = self._nodes(args), {k: self._nodes(v) for k, v in options.items()}
        node = self.graph.call_function(func)
        node.args = given  # as an argument of call_function it would be checked, which takes a third of the time
        if named:
            node.kwargs = named
        if isinstance(found, Tensor):
            self._attach(found, node)
            if self._longest is not None and not traits.view:
                self._count(found)
            return found
        parts = found if isinstance(found, (tuple, list)) else ()
        node.meta["val"] = tuple(describe(one) for one in parts)
        for i, one in enumerate(parts):
            if isinstance(one, Tensor):
                self._attach(one, self.graph.call_function(operator.getitem, (node, i)))
        return found

    def _count(self, found: Tensor) -> None:
        """Count an operation, and stop if there are too many."""
        self._operations, self._elements = self._operations + 1, self._elements + found.numel()
        if self._operations == self._longest:
            raise LongFunctionError(self._operations, self._elements)

    def _replaced(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Record what an operation that may fail is replaced by."""
        self._inside_replacement = True
        try:
            with self:
                return self._failures.replaced(func, args, options)
        finally:
            self._inside_replacement = False

    def finish(self, outputs: Any) -> RecordedModule:
        """Return the graph with these outputs, a tensor or a tuple of tensors."""
        self.graph.output(self._nodes(outputs))
        self.module.graph = self.graph
        return self.module

    def _attach(self, tensor: Tensor, node: Node) -> None:
        """Remember which node computes a tensor, for as long as the tensor lives."""
        node.meta["val"] = describe(tensor)
        tensor._recorded_as = (self, node)  # pyright: ignore[reportAttributeAccessIssue]

    def _recorded(self, tensor: Tensor) -> Node | None:
        owner, node = getattr(tensor, "_recorded_as", (None, None))
        return node if owner is self else None

    def _depends(self, argument: Any) -> bool:
        """Whether an argument is, or contains, a tensor that depends on the input."""
        if isinstance(argument, Tensor):
            return self._recorded(argument) is not None
        return isinstance(argument, (list, tuple)) and any(self._depends(one) for one in argument)

    def _nodes(self, argument: Any) -> Any:
        """An argument with nodes in place of tensors."""
        if isinstance(argument, Tensor):
            return self._node(argument)
        if isinstance(argument, (list, tuple)) and not isinstance(argument, torch.Size):
            return type(argument)(self._nodes(one) for one in argument)
        return argument

    def _node(self, tensor: Tensor) -> Node:
        node = self._recorded(tensor)
        if node is not None:
            return node
        if id(tensor) not in self._constants:
            name = f"constant_{len(self._constants)}"
            self.module.register_buffer(name, tensor.detach())
            node = self.graph.get_attr(name)
            node.meta["value"] = tensor.detach()
            self._constants[id(tensor)] = tensor, node  # the tensor is kept, so that its id stays its own
        return self._constants[id(tensor)][1]

    def _is_plain_index(self, func: Any, args: Any) -> bool:
        """Whether an operation reads entries by integers, or by a mask that does not depend on the input."""
        if func is not aten.index.Tensor:
            return False
        return not any(one is not None and one.dtype == torch.bool and self._depends(one) for one in args[1])

    def _writes_to_constant(self, arguments: tuple[Any, ...]) -> bool:
        read = {tensor.untyped_storage().data_ptr() for tensor, _ in self._constants.values()}
        return any(isinstance(one, Tensor) and one.untyped_storage().data_ptr() in read for one in arguments)


def recorded(function: Callable[[Tensor], Any], w: Tensor, longest: int | None = None) -> RecordedModule:
    """The operations of a function on w, with its results as outputs.

    Raises:
        NotRecordableError: If the function can't be recorded here.
        LongFunctionError: If it has `longest` operations or more.
    """
    recorder = OperationRecorder(w, longest)
    with recorder.public_calls, recorder:
        outputs = function(w)
    return recorder.finish(outputs)


def describe(tensor: Any) -> Description | None:
    """The description of a tensor; None for anything else."""
    return Description(tensor.shape, tensor.dtype, tensor.device) if isinstance(tensor, Tensor) else None
