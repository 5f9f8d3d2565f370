"""The rules of local reparameterisation and flipout for one layer, and the layers to which they apply.

`priory.network.layer_noise` describes both estimators and runs whole networks with them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from priory.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from priory.network.skeleton import Network

LAYERS_WITH_RULE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class NoisyLayer:
    """A layer with a rule: its function, and the leaves of its second product, which are views of one vector."""

    name: str
    module: nn.Module
    act: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # f(x; weight, bias)
    parameters: Mapping[str, Tensor]  # drawn parameters by full name: the weight and, if trained, the bias
    weight: Tensor
    bias: Tensor | None
    second_weight: Tensor
    second_bias: Tensor | None = None
    toward: Tensor | None = None  # where the gradients of the weight and of the second weight are written
    spread: Tensor | None = None
    placed: bool = False  # whether the pass itself has written them there
    widths: tuple[int, int] = (0, 0)  # inputs and outputs per position: the number of signs per row
    noise: Tensor | None = None  # memory for the noise of the activations, drawn anew in each pass
    calls: int = 0
    positions: int = 1  # outputs per row and channel

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, nn.Linear)


# The two rules.


def local(layer: NoisyLayer, x: Tensor, generator: torch.Generator) -> Tensor:
    """f(x; M, b) + sqrt(f(x^2; S^2, s_b^2)) eps."""
    mean = layer.act(x, layer.weight, layer.bias)
    variance = layer.act(x.square(), layer.second_weight, layer.second_bias)
    if layer.noise is None or layer.noise.shape != mean.shape:
        layer.noise = torch.empty(mean.shape, dtype=mean.dtype, device=mean.device)
    # In place: the backward pass of a product does not read its output.
    return mean.addcmul_(variance.sqrt_(), layer.noise.normal_(generator=generator))


def flipout(layer: NoisyLayer, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
    """f(x; M, b) + f(x r; S eps, s_b eps_b) r', with one sign per row and channel, the same at every position."""
    if layer.is_linear and x.ndim == 2:
        layer.placed = True
        leaves = layer.weight, layer.bias, layer.second_weight, layer.second_bias
        return FlipoutLinear.apply(x, layer, into.view(len(x), -1), out.view(len(x), -1), *leaves)
    mean = layer.act(x, layer.weight, layer.bias)
    n, ones = len(x), [1] * (x.ndim - 2)
    into, out = (r.view(n, *ones, -1) if layer.is_linear else r.view(n, -1, *ones) for r in (into, out))
    return mean.addcmul_(layer.act(x * into, layer.second_weight, layer.second_bias), out)


class FlipoutLinear(torch.autograd.Function):
    """Flipout of a linear layer on rows, which writes the gradients of the weights to their slices of the flat vector.

    Autograd's gradient would be transposed, copied once to be contiguous, and copied again to its slice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NoisyLayer, into: Tensor, out: Tensor, *leaves: Tensor | None) -> Tensor:
        """The output x W' + b + ((x r) V' + c) r', with the leaves W, b, V and c."""
        w, b, v, c = leaves
        assert w is not None
        assert v is not None
        flipped = x * into
        ctx.save_for_backward(x, flipped, w, v, into, out)
        ctx.layer, ctx.biased = layer, (b is not None, c is not None)
        return linear(x, w, b).addcmul_(linear(flipped, v, c), out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x and of the biases; those of the weights are written to the layer's buffers."""
        x, flipped, w, v, into, out = ctx.saved_tensors
        (g,), h, layer = gradients, gradients[0] * out, ctx.layer
        torch.mm(g.mT, x, out=layer.toward)
        torch.mm(h.mT, flipped, out=layer.spread)
        to_x = (g @ w).addcmul_(h @ v, into) if ctx.needs_input_grad[0] else None
        to_b, to_c = (d.sum(0) if biased else None for d, biased in zip((g, h), ctx.biased, strict=True))
        return to_x, None, None, None, None, to_b, None, to_c


def checked(layer: NoisyLayer, x: Tensor, rows: int) -> Tensor:
    """Check that a layer is called as in the first batch, and return its input."""
    if layer.calls == 1 and len(x) == rows:
        return x
    got = f"a call on {len(x)} rows for {rows} inputs" if len(x) != rows else "a second call"
    raise InputError(
        f"The layer '{layer.name}' must act once per pass, on one row per input, in every batch as in the first, "
        f"got {got}; choose an estimator that draws the weights."
    )


def signs(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, (count,): each random byte indexes a table of eight signs."""
    words = torch.empty(-(-count // 64), dtype=torch.int64, device=like.device)
    bytes_ = words.random_(-(2**63), None, generator=generator).view(torch.uint8)
    return sign_table(like.dtype, like.device).index_select(0, bytes_.int()).view(-1)[:count]


@functools.cache
def sign_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The signs for the bits of each byte, (256, 8)."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return ((bits & 1) * 2 - 1).to(dtype)


# Layers with a rule.


def candidates(network: Network) -> Iterator[NoisyLayer]:
    """The linear layers and convolutions whose weight is trained and belongs to them alone."""
    owners = [id(p) for module in network.skeleton.modules() for p in module._parameters.values() if p is not None]
    for name, module in network.skeleton.named_modules():
        plain = (
            type(module) in LAYERS_WITH_RULE and "forward" not in vars(module) and module._compiled_call_impl is None
        )
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if not plain or weight is None or id(weight) not in network.drawn or len(module._parameters) > 2:
            continue
        prefix = f"{name}." if name else ""
        drawn = {
            f"{prefix}{key}": p for key, p in module._parameters.items() if p is not None and id(p) in network.drawn
        }
        if all(owners.count(id(p)) == 1 for p in drawn.values()):
            act = module._conv_forward if isinstance(module, nn.modules.conv._ConvNd) else linear
            yield NoisyLayer(name, module, act, drawn, weight, bias, weight)
