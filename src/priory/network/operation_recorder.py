"""Records the operations that a function runs on its input, as a graph.

`make_fx` of torch does the same in about 1 ms per operation, most of it for a symbolic tensor and a stack trace. Here
an operation takes less than 0.1 ms. What depends on no input is computed while recording, and is a constant of the
graph.

A function is not recorded here if it writes to a tensor in place, draws random numbers, or has a result whose shape or
Python value depends on the input; `make_fx` then decides.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from priory.network.dispatch_mode import DispatchMode

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


class OperationRecorder(DispatchMode):
    """A context that records the operations on one tensor, and on what is computed from it.

    Args:
        w: The input of the graph.
    """

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.module, self.graph = RecordedModule(), Graph()
        self._constants: dict[int, tuple[Tensor, Node]] = {}
        self._attach(w, self.graph.placeholder("w"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRecordableError(f"{func} draws random numbers")
        if not any(self._depends(one) for one in (*args, *options.values())):
            if func._schema.is_mutable and self._writes_to_constant((*args, *options.values())):
                raise NotRecordableError(f"{func} writes to a tensor that the graph reads")
            return func(*args, **options)
        if func in SHAPE_ONLY_OPS:
            return func(*args, **options)
        if func._schema.is_mutable or (UNRECORDABLE_TAGS & set(func.tags) and not self._is_plain_index(func, args)):
            raise NotRecordableError(f"{func} can't be repeated with another input")
        found = func(*args, **options)
        if func in IDENTITY_OPS:
            self._attach(found, self._node(args[0]))
            return found
        node = self.graph.call_function(func, self._nodes(args), {k: self._nodes(v) for k, v in options.items()})
        if isinstance(found, Tensor):
            self._attach(found, node)
            return found
        parts = found if isinstance(found, (tuple, list)) else ()
        node.meta["val"] = tuple(describe(one) for one in parts)
        for i, one in enumerate(parts):
            if isinstance(one, Tensor):
                self._attach(one, self.graph.call_function(operator.getitem, (node, i)))
        return found

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


def recorded(function: Callable[[Tensor], Any], w: Tensor) -> RecordedModule:
    """The operations of a function on w, with its results as outputs.

    Raises:
        NotRecordableError: If the function can't be recorded here.
    """
    recorder = OperationRecorder(w)
    with recorder:
        outputs = function(w)
    return recorder.finish(outputs)


def describe(tensor: Any) -> Description | None:
    """The description of a tensor; None for anything else."""
    return Description(tensor.shape, tensor.dtype, tensor.device) if isinstance(tensor, Tensor) else None
