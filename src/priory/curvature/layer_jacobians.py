"""The Jacobian of a network's outputs, recorded at its layers and stored as factors.

A layer with the weight W acts on inputs a_t at positions t = 1..T: one for a plain linear layer, pixels for a
convolution, tokens for a sequence, calls for a layer that is used several times. Output c of a datum has the gradient

    d f_c / d W = sum_t g_ct a_t'        g_ct = d f_c / d (output of the layer at t)

A hook on the layer and a backward pass to the outputs of the layers, not to their weights, give these factors: in + C
out numbers per position, where the Jacobian has C in out. A bias is one more column, for which a_t is 1.

Linear layers with any leading dimensions, convolutions and embeddings have this rule, also if their weights are shared.
A layer uses the rule only after it has reproduced autograd's gradient for the first of two rows. All other parameters
(norms, recurrent layers, the projections of attention, weights that other code reads) use gradients of each datum.

Cost of n data with C cotangents: one forward pass and C backward passes to activations. Memory: n (T in + C T out) per
layer, in chunks under a limit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import pad

from priory.core.errors import require
from priory.core.streams import stream
from priory.curvature.base import BLOCK_ROWS
from priory.curvature.jacobian_parts import DensePart, EmbeddingPart, JacobianRows, LayerPart, MatrixSlice
from priory.curvature.per_datum import gradients, places_within
from priory.network.skeleton import MEMORY_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from priory.core.data import Batch
    from priory.curvature.base import Pass, Selection
    from priory.curvature.jacobian_parts import JacobianPart
    from priory.models.target import Target
    from priory.network.skeleton import Network

    Cotangents = Callable[[Tensor, slice], Tensor]  # arranged outputs (n, *rest) of some rows -> (C, n, *rest)

CACHED_BYTES = 1 << 25  # of parts processed together, to stay in the cache
MIN_ROWS_TOGETHER = 128
CONVOLUTION_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RULED_FORWARDS = {layer.forward for layer in (nn.Linear, *CONVOLUTION_LAYERS, nn.Embedding)}


def jacobian_rows(
    target: Target,
    w: Tensor,
    inputs: Batch,
    selection: Selection,
    cotangents: Cotangents | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    limit: int = MEMORY_LIMIT,
) -> Iterator[JacobianRows]:
    """Yield the Jacobian of the arranged outputs, or cotangents times it, for as many data at a time as fit.

    `limit` bounds the bytes of the parts. To make them dense, `JacobianRows.chunks` takes fewer data at a time.
    """
    yield from LayerJacobians(target, w, inputs, selection, buffers).rows(inputs, cotangents, limit=limit)


def curvature_rows(given: Pass) -> Iterator[JacobianRows]:
    """Yield rows whose outer products sum to H over one pass of the data, up to the factor N / rows seen."""
    must = "be 'ggn', 'fisher' or 'empirical' for a structure that is made of squares"
    require(given.kind != "hessian", "curvature", "Laplace", must, repr(given.kind))
    roots, jacobians = given.roots(), None
    for batch in given.data.blocks(BLOCK_ROWS):
        inputs, targets, weights = batch[:-1], batch[-1], given.target.row_weights(batch)
        jacobians = jacobians or LayerJacobians(given.target, given.w, inputs, given.selection, given.buffers)
        count = roots.count(jacobians.plan.rest)
        at = lambda some, weights=weights: None if weights is None else weights[some]  # noqa: E731
        columns = lambda outputs, some, y=targets, at=at: roots(outputs, y[some], at(some))  # noqa: E731
        first = 0
        for found in jacobians.rows(inputs, columns, count, given.limit):
            some = slice(first, first + len(found))
            yield found if weights is None else replace(found, weights=weights[some])
            first = some.stop


# Recording calls of layers.


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: its input, and the edge of the graph at its output."""

    module: nn.Module
    x: Tensor
    edge: GradientEdge  # which survives in-place writes to the output
    shape: torch.Size


@dataclass(frozen=True)
class RuledLayer:
    """A weight and its bias, or one of them, with the layers that use it and have a rule."""

    weight: str | None
    bias: str | None
    modules: tuple[nn.Module, ...]
    lead: int = 0  # the batch dimension of the layers' inputs

    @property
    def names(self) -> list[str]:
        return [name for name in (self.weight, self.bias) if name is not None]


@dataclass(frozen=True)
class JacobianPlan:
    """The layers with a rule, the parameters without, and the memory that a datum needs."""

    ruled: list[RuledLayer]
    plain: list[str]  # parameters without a rule
    rest: torch.Size  # shape of one datum's arranged outputs
    numbers_per_datum: int  # independent of the cotangents
    numbers_per_cotangent: int  # per datum and cotangent


PLANS: WeakKeyDictionary[Network, dict[tuple[Any, ...], JacobianPlan]] = (
    WeakKeyDictionary()
)  # by parameters, event shape and input shapes


class LayerJacobians:
    """Jacobians of a network at w, with a plan for inputs of these shapes that is made once from two rows."""

    def __init__(
        self,
        target: Target,
        w: Tensor,
        inputs: Batch,
        selection: Selection,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.event, self.w = target.network_model("A Jacobian"), target.event, w
        self.network, self.buffers, self.selection = self.model.network, buffers or {}, selection
        self.among = places_within(target, selection)
        self.spans: dict[str, slice] = {}  # of each name among the coordinates of the parts
        self.touched = 0
        for block in (self.model.layout[name] for name in selection.names):
            self.spans[block.name] = slice(self.touched, self.touched + block.stop - block.start)
            self.touched = self.spans[block.name].stop
        few = tuple(x[:2] for x in inputs)
        plans = PLANS.setdefault(self.network, {})
        key = (selection.names, self.event, *((x.shape, x.dtype) for x in few))
        if key not in plans:
            plans[key] = self._make_plan(few)
        self.plan = plans[key]

    def rows(
        self,
        inputs: Batch,
        cotangents: Cotangents | None = None,
        count: int | None = None,
        limit: int = MEMORY_LIMIT,
    ) -> Iterator[JacobianRows]:
        """Yield `count` cotangents times the Jacobian; one unit cotangent per output if None."""
        n, c = len(inputs[0]), count or self.plan.rest.numel()
        each = (self.plan.numbers_per_datum + c * self.plan.numbers_per_cotangent) * self.w.element_size()
        at_a_time = max(1, min(limit // each, max(MIN_ROWS_TOGETHER, CACHED_BYTES // each)))
        chunks = -(-n // at_a_time)
        for i in range(chunks):
            some = slice(i * n // chunks, (i + 1) * n // chunks)
            part = tuple(x[some] for x in inputs)
            given = every_output if cotangents is None else lambda outputs, s=some: cotangents(outputs, s)
            yield self._pass(part, given)

    def _pass(self, inputs: Batch, cotangents: Callable[[Tensor], Tensor]) -> JacobianRows:
        with self._recording(self.plan.ruled) as calls:
            outputs = self._forward(inputs)
            given = cotangents(outputs.detach())
            by_block = self._backward(outputs, given, calls, self.plan.ruled)
        parts: list[JacobianPart] = [part for found in by_block.values() for part in found]
        outputs = outputs.detach()
        if self.plan.plain:
            found = gradients(self.network, self.w, inputs, given, self.plan.plain, self._arrange, self.buffers)
            for name, g in found.items():
                parts.append(DensePart(self._place(name, None, 1, g[0, 0].numel()), g.flatten(2), name))
        return JacobianRows(parts, outputs, len(given), self.touched, self.among)

    def _forward(self, inputs: Batch) -> Tensor:
        return self._arrange(self.network(self.w, inputs, self.buffers, train=False))

    def _arrange(self, outputs: Tensor) -> Tensor:
        return self.model.likelihood.arrange(outputs, self.event)

    @contextmanager
    def _recording(self, ruled: list[RuledLayer]) -> Iterator[list[LayerCall]]:
        """Hook the layers and enable gradients for their parameters only; restore everything on exit."""
        calls: list[LayerCall] = []

        def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            if not output.requires_grad:
                return output
            x = args[0] if args else kwargs["input"]
            calls.append(LayerCall(module, x.detach(), get_gradient_edge(output), output.shape))
            return output.clone() if output._is_view() else output  # an in-place write to a view would move the edge

        skeleton = self.network.skeleton
        names = {name for block in ruled for name in block.names}
        others = [p for name, p in skeleton.named_parameters() if p.requires_grad and name not in names]
        modules = {m for block in ruled for m in block.modules}
        handles = []
        try:
            for p in others:
                p.requires_grad_(False)
            handles = [m.register_forward_hook(record_call, prepend=True, with_kwargs=True) for m in modules]
            with torch.enable_grad():
                yield calls
        finally:
            for handle in handles:
                handle.remove()
            for p in others:
                p.requires_grad_(True)

    def _backward(
        self, outputs: Tensor, cotangents: Tensor, calls: list[LayerCall], ruled: list[RuledLayer]
    ) -> dict[RuledLayer, list[LayerPart | EmbeddingPart]]:
        """Run one backward pass per cotangent to the outputs of the layers, and build their parts."""
        n, lead = len(outputs), {m: block.lead for block in ruled for m in block.modules}
        caught: list[Tensor] = []
        for c, cotangent in enumerate(cotangents if calls and outputs.requires_grad else ()):
            last = c + 1 == len(cotangents)
            edges = [call.edge for call in calls]
            found = torch.autograd.grad(outputs, edges, cotangent, retain_graph=not last, allow_unused=True)
            for i, (call, g) in enumerate(zip(calls, found, strict=True)):
                g = outputs.new_zeros(call.shape) if g is None else g
                g = positions_of_output(call.module, g, n, lead[call.module])  # (n, T, out)
                if c == 0:
                    caught.append(g.new_empty(len(cotangents), *g.shape))
                caught[i][c] = g
        by_module: dict[nn.Module, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for call, g in zip(calls, caught, strict=False):
            by_module[call.module].append((call.x, g))
        return {block: list(self._parts(block, n, by_module)) for block in ruled}

    def _parts(
        self, block: RuledLayer, n: int, by_module: Mapping[nn.Module, list[tuple[Tensor, Tensor]]]
    ) -> Iterator[LayerPart | EmbeddingPart]:
        """Yield the parts of one weight and its bias, one per group, with the positions of all calls concatenated."""
        uses = [(m, x, g) for m in block.modules for x, g in by_module.get(m, [])]
        if not uses:
            return
        g = joined([g for _, _, g in uses], 2)
        ones = g.new_ones(n, g.shape[2], 1)
        if block.weight is None:
            yield LayerPart(self._place(None, block.bias, g.shape[-1], 0), ones, g)
        elif isinstance(first := block.modules[0], nn.Embedding):
            index = joined([batch_first(x, block.lead).reshape(n, -1) for _, x, _ in uses], 1)
            learns = [batch_first(x, block.lead).reshape(n, -1) != padding(m) for m, x, _ in uses]
            present = joined(learns, 1).to(g)
            place = self._place(block.weight, None, first.num_embeddings, g.shape[-1])
            yield EmbeddingPart(place, index, present, g * present.unsqueeze(-1))
        else:
            a = joined([positions_of_input(m, x, n, block.lead) for m, x, _ in uses], 1)  # (n, T, groups, in)
            out = g.shape[-1] // a.shape[2]
            for i, own in enumerate(a.unbind(2)):
                place = self._place(block.weight, block.bias, out, own.shape[-1], i)
                own = own if block.bias is None else torch.cat([own, ones], -1)
                yield LayerPart(place, own, g[..., i * out : (i + 1) * out])

    def _place(self, weight: str | None, bias: str | None, rows: int, columns: int, group: int = 0) -> MatrixSlice:
        """Return the position of a matrix of these parameters, or of one of its groups, among the coordinates."""

        def part(name: str | None, size: int) -> slice | None:
            if name is None:
                return None
            start = self.spans[name].start + group * size
            return slice(start, start + size)

        return MatrixSlice(part(weight, rows * columns), part(bias, rows), (rows, columns + (bias is not None)))

    # Making the plan from the first rows.

    def _make_plan(self, few: Batch) -> JacobianPlan:
        """Find the layers whose rule reproduces autograd's gradient for the first row, and their memory."""
        with torch.no_grad():
            outputs = self._forward(few)
        cotangent = torch.zeros_like(outputs)
        cotangent[0] = torch.randn(outputs.shape[1:], generator=stream(0, "taps"), dtype=torch.float64).to(cotangent)
        untested = layers_with_a_rule(self.network, self.selection.names)
        verified: dict[RuledLayer, list[LayerPart | EmbeddingPart]] = {}
        for lead in (0, 1):
            if untested:
                verified |= self._verified(few, cotangent, [replace(block, lead=lead) for block in untested])
            passed = {(block.weight, block.bias) for block in verified}
            untested = [block for block in untested if (block.weight, block.bias) not in passed]
        ruled = {name for block in verified for name in block.names}
        plain = [name for name in self.selection.names if name not in ruled]
        of_plain = sum(self.spans[name].stop - self.spans[name].start for name in plain)
        numbers = [part.numbers for parts in verified.values() for part in parts]
        numbers_per_datum, numbers_per_cotangent = (sum(pair[i] for pair in numbers) // len(outputs) for i in (0, 1))
        numbers_per_datum += self.network.activations(few, self.buffers)
        return JacobianPlan(
            list(verified), plain, outputs.shape[1:], numbers_per_datum, numbers_per_cotangent + 3 * of_plain
        )

    def _verified(
        self, few: Batch, cotangent: Tensor, tried: list[RuledLayer]
    ) -> dict[RuledLayer, list[LayerPart | EmbeddingPart]]:
        """Return the layers, with their parts, whose rule reproduces autograd's gradient of the first row."""
        n, leaves = len(few[0]), dict(self.network.skeleton.named_parameters())
        names = [name for block in tried for name in block.names]
        with self._recording(tried) as calls:
            outputs = self._forward(few)
            lead = {m: block.lead for block in tried for m in block.modules}
            misfit = {call.module for call in calls if not divides(call, n, lead[call.module])}
            tried = [block for block in tried if not misfit.intersection(block.modules)]
            modules = {m for block in tried for m in block.modules}
            expected = torch.autograd.grad(
                *(outputs, [leaves[name] for name in names], cotangent),
                **{"retain_graph": True, "materialize_grads": True},
            )
            calls = [call for call in calls if call.module in modules]
            found = self._backward(outputs, cotangent[None], calls, tried)
        jacobian = self.w.new_zeros(n, 1, self.touched)
        for part in (part for parts in found.values() for part in parts):
            part.add_to(jacobian)
        agree = {
            name: same(jacobian[0, 0, self.spans[name]], right.to_dense().flatten())
            for name, right in zip(names, expected, strict=True)
        }
        return {b: parts for b, parts in found.items() if parts and all(agree[name] for name in b.names)}


def same(found: Tensor, right: Tensor) -> bool:
    """Whether two gradients are equal up to rounding."""
    off = torch.linalg.vector_norm(found - right, math.inf)
    return float(off) <= 100 * torch.finfo(right.dtype).eps ** 0.75 * float(right.abs().max())


def every_output(outputs: Tensor) -> Tensor:
    """Return the unit cotangents of all outputs, (C, n, *rest)."""
    return picks(outputs, range(outputs[0].numel()))


def picks(outputs: Tensor, some: range) -> Tensor:
    """Return the unit cotangents of some outputs, (k, n, *rest)."""
    rest = outputs.shape[1:]
    found = outputs.new_zeros(len(some), rest.numel())
    found[range(len(some)), some] = 1
    return found.reshape(len(some), 1, *rest).expand(len(some), *outputs.shape)


def layers_with_a_rule(network: Network, names: Sequence[str]) -> list[RuledLayer]:
    """Return weights and biases of layers with a rule, paired where they are always used together."""
    own = {id(p): name for name, p in network.skeleton.named_parameters() if name in names}
    readers: dict[tuple[str | None, str | None], list[nn.Module]] = defaultdict(list)
    for module in network.skeleton.modules():
        if type(module).forward in RULED_FORWARDS and "forward" not in vars(module):
            weight, bias = (own.get(id(module._parameters.get(key))) for key in ("weight", "bias"))
            if weight or bias:
                readers[weight, bias].append(module)
    weights, biases = (Counter(pair[i] for pair in readers) for i in (0, 1))
    blocks: dict[tuple[str | None, str | None], list[nn.Module]] = defaultdict(list)
    for (weight, bias), modules in readers.items():
        apart = weight and bias and (weights[weight] > 1 or biases[bias] > 1)
        for key in [(weight, None), (None, bias)] if apart else [(weight, bias)]:
            blocks[key] += modules
    return [
        RuledLayer(weight, bias, tuple(modules))
        for (weight, bias), modules in blocks.items()
        if weight is None or len({(isinstance(m, nn.Embedding), getattr(m, "groups", 1)) for m in modules}) == 1
    ]


# Positions.


def divides(call: LayerCall, n: int, lead: int) -> bool:
    """Whether a layer's inputs can be split by datum along this dimension."""
    if isinstance(call.module, CONVOLUTION_LAYERS):
        return lead == 0 and call.x.ndim == len(call.module.kernel_size) + 2 and len(call.x) % n == 0
    size = call.x.shape[lead] if call.x.ndim > lead else 0
    return size == n if lead else size > 0 and size % n == 0


def batch_first(x: Tensor, lead: int) -> Tensor:
    """Move the batch dimension to the front."""
    return x.transpose(0, lead) if lead else x


def positions_of_output(module: nn.Module, g: Tensor, n: int, lead: int) -> Tensor:
    """Reshape gradients in a layer's outputs to (n, T, out)."""
    if isinstance(module, CONVOLUTION_LAYERS):
        return g.flatten(2).mT.reshape(n, -1, g.shape[1])
    return batch_first(g, lead).reshape(n, -1, g.shape[-1])


def positions_of_input(module: nn.Module, x: Tensor, n: int, lead: int) -> Tensor:
    """Reshape or unfold a layer's inputs to (n, T, groups, in), the inputs of each position."""
    if not isinstance(module, CONVOLUTION_LAYERS):
        return batch_first(x, lead).reshape(n, -1, 1, x.shape[-1])
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = pad(x, module._reversed_padding_repeated_twice, mode=mode)
    for i, (size, stride, step) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        x = x.unfold(2 + i, (size - 1) * step + 1, stride)[..., ::step]
    k = len(module.kernel_size)  # x is (n, channels, *places, *window)
    x = x.unflatten(1, (module.groups, -1))
    order = (0, *range(3, 3 + k), 1, 2, *range(3 + k, 3 + 2 * k))
    x = x.permute(order)  # (n, *places, groups, channels, *window)
    return x.flatten(k + 2).flatten(1, k).reshape(n, -1, module.groups, math.prod(x.shape[k + 2 :]))


def padding(module: nn.Module) -> int:
    """Return the padding index of an embedding, or -1, which no input has."""
    index = getattr(module, "padding_idx", None)
    return -1 if index is None else index


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate the positions of several calls."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
