"""Evaluates a chain of linear layers and activations at many vectors: one batched product per layer.

Activations are stored as columns, (S, width, n). A few draws are evaluated at a time, in the same memory. Where the
second half of the draws mirrors the first around a centre, w' = 2 c - w, the first layer needs one product per pair:

    W x = C x + (W - C) x,      W' x = C x - (W - C) x

and C x is computed once. Cost: one pass per draw; for pairs, the first layer costs almost half.

`chain_outputs` is the differentiable version. For small networks the time goes into calling torch, and eight vectors
need as many calls as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.network.skeleton import Network

IN_PLACE = {nn.ReLU: torch.relu_, nn.Tanh: torch.tanh_, nn.Sigmoid: torch.sigmoid_}
CACHED_ACTIVATIONS = 1 << 21  # activations of a layer computed at a time: 8 MiB in float32, which fits into the cache


class LayerChain:
    """The chain of a network at inputs (n, in), ready for vectors (S, P)."""

    def __init__(self, network: Network, x: Tensor, centre: Tensor | None) -> None:
        self.network, self.layers, self.centre = network, network.layer_chain, centre
        self.columns = x.mT.contiguous()  # (in, n)
        self.widths = [m.out_features for m in self.layers if isinstance(m, nn.Linear)]
        first, drawn = self.layers[0], network.drawn
        pairs = (
            isinstance(first, nn.Linear) and len(self.widths) > 1 and all(id(p) in drawn for p in first.parameters())
        )
        self._work: list[Tensor] = []
        self.middle = None  # C x, (width, n)
        if centre is not None and pairs:
            self.middle = self._product(centre[None], first, self.columns[None], None)[0]

    def __call__(self, w: Tensor, mirrored: bool) -> Tensor:
        """The outputs (S, n, out) at vectors (S, P); if `mirrored`, the second half mirrors the first."""
        outputs = self._pairs(w) if mirrored and self.middle is not None else self._each(w)
        return outputs.mT.contiguous()

    def _each(self, w: Tensor) -> Tensor:
        n = self.columns.shape[-1]
        together = max(1, min(len(w), CACHED_ACTIVATIONS // (n * max(self.widths))))
        work = self._memory(together, n)
        outputs = w.new_empty(len(w), self.widths[-1], n)
        for start in range(0, len(w), together):
            some, out = w[start : start + together], outputs[start : start + together]
            self._through(some, self.columns.expand(len(some), -1, -1), self.layers, [*work, out], ours=False)
        return outputs

    def _pairs(self, w: Tensor) -> Tensor:
        assert self.centre is not None
        assert self.middle is not None
        (first, *rest), n, half = self.layers, self.columns.shape[-1], len(w) // 2
        together = max(1, min(half, CACHED_ACTIVATIONS // (2 * n * max(self.widths))))
        work = [memory.unflatten(0, (2, together)) for memory in self._memory(2 * together, n)]
        outputs = w.new_empty(2, half, self.widths[-1], n)
        for start in range(0, half, together):
            some = slice(start, min(start + together, half))
            size = some.stop - start
            plus, minus = (work[0][k, :size] for k in (0, 1))
            x = self.columns.expand(size, -1, -1)
            self._product(w[some], first, x, plus, minus_centre=self.centre)  # (W - C) x
            torch.sub(self.middle, plus, out=minus)
            plus.add_(self.middle)
            for k, h in enumerate((plus, minus)):
                into = [*(memory[k, :size] for memory in work[1:]), outputs[k, some]]
                self._through(w[k * half + start : k * half + some.stop], h, tuple(rest), into, ours=True)
        return outputs.flatten(0, 1)

    def _memory(self, draws: int, n: int) -> list[Tensor]:
        """Memory for the activations of this many draws, reused by every call."""
        if not self._work or len(self._work[0]) != draws:
            self._work = [self.columns.new_empty(draws, width, n) for width in self.widths[:-1]]
        return self._work

    def _through(self, w: Tensor, h: Tensor, layers: tuple[nn.Module, ...], work: list[Tensor], ours: bool) -> None:
        """Run layers on h (S, width, n), each product into its own memory; with `ours`, h itself may be overwritten."""
        memory = iter(work)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                h, ours = self._product(w, layer, h, next(memory)[: len(w)]), True
            else:
                h = IN_PLACE[type(layer)](h) if ours and type(layer) in IN_PLACE else layer(h)

    def _product(
        self, w: Tensor, layer: nn.Module, h: Tensor, out: Tensor | None, minus_centre: Tensor | None = None
    ) -> Tensor:
        """W h + b for each vector, (S, out, n), or for its deviation from `minus_centre` if given."""
        assert isinstance(layer, nn.Linear)
        weight, bias = (None if p is None else self.network.of_each(w, p) for p in (layer.weight, layer.bias))
        assert weight is not None
        if minus_centre is not None:
            at = minus_centre[None]
            weight = weight - self.network.of_each(at, layer.weight)
            bias = None if bias is None else bias - self.network.of_each(at, layer.bias)
        if bias is None:
            return torch.bmm(weight, h, out=out)
        return torch.baddbmm(bias.unsqueeze(-1), weight, h, out=out)


def chain_outputs(network: Network, w: Tensor, x: Tensor, factors: Mapping[int, Tensor] | None = None) -> Tensor:
    """The outputs (S, n, out) of a network's chain at vectors (S, P) and inputs (n, in), differentiable.

    `factors` (S, width, n) multiply the inputs of a layer; the keys are the ids of the layers' weights.
    """
    pieces, h, factors = network.cut(w), x.mT, factors or {}
    each = lambda p: pieces[id(p)] if id(p) in pieces else p.detach().expand(len(w), *p.shape)  # noqa: E731
    for layer in network.layer_chain:
        if isinstance(layer, nn.Linear):
            weight, by = each(layer.weight), factors.get(id(layer.weight))
            h = h.expand(len(w), *h.shape[-2:]) if by is None else h * by
            bias = None if layer.bias is None else each(layer.bias).unsqueeze(-1)
            h = torch.bmm(weight, h) if bias is None else torch.baddbmm(bias, weight, h)
        else:
            h = layer(h)
    return h.mT


@dataclass
class SharedInputs:
    """State shared by several calls with the same inputs.

    Args:
        centre: The vector (P,) around which the second half of the draws mirrors the first, or None.
    """

    centre: Tensor | None = None
    _chain: LayerChain | None = None

    def chain(self, network: Network, x: Tensor) -> LayerChain:
        """The network's chain of layers at the inputs (n, in), built by the first call."""
        if self._chain is None:
            self._chain = LayerChain(network, x, self.centre)
        return self._chain
