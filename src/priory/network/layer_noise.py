"""Noise drawn where a layer acts: local reparameterisation (Kingma, Salimans and Welling 2015) and flipout
(Wen, Vicol, Ba, Tran and Grosse 2018).

For q(w) = N(m, diag(s^2)), one draw of the weights for a whole batch makes the rows' errors move together. Both
estimators give each row noise of its own at the price of a second product a layer. A layer f(x; W, b), linear or a
convolution, has means M, b and standard deviations S, s_b:

    local      out = f(x; M, b) + sqrt(f(x^2; S^2, s_b^2)) eps,        eps ~ N(0, 1), one an activation
    flipout    out = f(x; M, b) + f(x r; S eps, s_b eps_b) r',         eps ~ N(0, 1), one a weight; r, r' = +-1 a row

**What they estimate.** sum_n log p(y_n | x_n, w) is a sum over rows, so its expectation under q needs the right
distribution of each row's pass alone, whatever the rows do together. Under flipout row n sees the weights
M + (r'_n r_n^T) S eps, which are a draw of q: value and gradients are unbiased, for convolutions too. Under local
reparameterisation the activations of a row are Gaussian with the moments that q gives them, and independent, as those
of a linear layer are: unbiased. At the positions of a convolution, or of a linear layer on a sequence, one draw of the
weights gives *correlated* activations, and the paper's rule draws them as if they were independent: each has the right
distribution, but the expectation of what depends on several of them is another. `LayerNoise.approximate` names the
layers where that is so. So it is, for both estimators, where rows meet in batch normalisation.

**Where there is no rule** (norms, embeddings, recurrences, weights that are used twice, shared or parametrised) the
parameters are drawn once for the batch, w = m + s eps, and `LayerNoise.fallbacks` names them.

Cost of a pass, beside the network's own: each layer's products once more, forward and backward (two then four; two
then two where the inputs need no gradient), and normal numbers, one an activation (local) or one a weight (flipout).
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from priory.core.data import weighted_sum
from priory.core.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from priory.core.data import Batch
    from priory.network.evaluation import Evaluation
    from priory.network.skeleton import Network

RULED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NAMES = {"local": "local reparameterisation", "flipout": "flipout"}


@dataclass
class Layer:
    """A layer with a rule: how it acts, and its leaves for the second product, views of one vector."""

    name: str
    module: nn.Module
    act: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # f(x; weight, bias)
    parameters: Mapping[str, Tensor]  # those that are drawn: the weight and perhaps the bias, by full name
    weight: Tensor
    bias: Tensor | None
    second_weight: Tensor
    second_bias: Tensor | None = None
    toward: Tensor | None = None  # places of the gradients of the weight and of the second weight
    spread: Tensor | None = None
    placed: bool = False  # whether the pass writes them there by itself
    widths: tuple[int, int] = (0, 0)  # inputs and outputs a position: the signs that a row needs
    noise: Tensor | None = None  # memory for that of the activations, which each pass draws anew
    calls: int = 0
    positions: int = 1  # outputs a row and channel

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, nn.Linear)


class LayerNoise:
    """Noisy passes of a network, with gradients in the means and standard deviations of a factorised Gaussian.

    Which layers have a rule is known in part from their types and in part from a look at the first batch (`examine`,
    which the first pass does if nobody has): a layer must act once a pass, with a row for each input, and its weights
    must be read nowhere else. The network's skeleton runs with other forward functions during a pass, which are gone
    after it, also when an exception passes through.

    >>> from priory.network.skeleton import Network
    >>> noise = LayerNoise(Network(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))), "local")
    >>> noise.fallbacks
    ('1.weight', '1.bias')
    >>> noise.note
    'local reparameterisation; one draw a batch for 1.weight, 1.bias'
    """

    def __init__(self, network: Network, kind: Literal["local", "flipout"]) -> None:
        require(kind in NAMES, "kind", "LayerNoise", "be 'local' or 'flipout'", repr(kind))
        self.network, self.kind = network, kind
        named = ((name, p) for name, p in network.skeleton.named_parameters() if id(p) in network.drawn)
        self._places: dict[str, slice] = {}
        self._leaves: dict[str, Tensor] = {}
        start = 0
        for name, p in named:
            self._leaves[name], self._places[name] = p, slice(start, start + p.numel())
            start += p.numel()
        self._layers = list(candidates(network))
        self._refused: dict[str, str] = {}  # layers that the first batch showed to have no rule, and why
        self._examined = False
        self._size = 0

    # What is known of the layers.

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The parameters that are drawn once for the whole batch; complete from the first batch on."""
        ruled = {name for layer in self._layers for name in layer.parameters}
        return tuple(name for name in self._places if name not in ruled)

    @property
    def approximate(self) -> tuple[str, ...]:
        """The layers whose noise has another joint distribution than a draw of the weights a row.

        Local reparameterisation at several positions of a row, which the first batch shows; all layers where batch
        normalisation makes rows meet.
        """
        meet = self._rows_meet()
        return tuple(n.name for n in self._layers if meet or (self.kind == "local" and n.positions > 1))

    @property
    def note(self) -> str:
        """What is done, in one line: the estimator, what falls back and why, what is approximate."""
        parts = [NAMES[self.kind]]
        if self.fallbacks:
            parts.append(f"one draw a batch for {', '.join(self.fallbacks)}")
        parts += [f"'{name}' {reason}" for name, reason in self._refused.items()]
        if self.approximate:
            parts.append(f"approximate in {', '.join(repr(name) for name in self.approximate)}")
        return "; ".join(parts)

    def examine(self, inputs: Batch, buffers: Mapping[str, Tensor]) -> None:
        """Find out, in trial passes on copies of the buffers, which layers have a rule in this network.

        The second trial has a row more: a dimension that only happens to be as long as the batch does not follow.
        """
        for extra in (0, 1):
            rows = tuple(torch.cat([x, x[:1]]) if extra else x for x in inputs)
            try:
                used = self._try(rows, {name: b.clone() for name, b in buffers.items()})
            except Exception:
                if not extra:
                    raise
                self._refuse({layer.name: "is in a network that takes batches of one size" for layer in self._layers})
                break
            self._refuse({layer.name: why for layer in self._layers if (why := used.get(layer.name))})
        self._examined = True

    def _try(self, inputs: Batch, buffers: Mapping[str, Tensor]) -> dict[str, str]:
        """One plain pass, forward and backward; for each layer without a rule, why."""
        why: dict[str, str] = {}
        rows = len(inputs[0])

        def look(layer: Layer, x: Tensor) -> Tensor:
            if x.ndim < 2 or len(x) != rows:
                why[layer.name] = "does not act on a row for each input"
            bias = None if layer.bias is None else layer.bias.detach().requires_grad_()
            out = layer.act(x, layer.weight.detach().requires_grad_(), bias)
            wide = (x.shape[-1], out.shape[-1]) if layer.is_linear else (x.shape[1], out.shape[1])
            layer.widths, layer.positions = wide, out[:1].numel() // wide[1]
            return out

        def read(layer: Layer) -> Callable[[Tensor], None]:
            return lambda _: why.update({layer.name: "has weights that are read elsewhere"})

        # The layers act on stand-ins, so that a gradient of a weight itself comes from another reader.
        hooks = [p.register_hook(read(layer)) for layer in self._layers for p in layer.parameters.values()]
        self.network.collect_gradients_in(self.network.initial.new_zeros(self.network.size))
        try:
            with torch.enable_grad(), self._installed(look):
                outputs = self.network(self.network.initial, inputs, buffers, train=True)
                if outputs.requires_grad:
                    outputs.sum().backward()  # a checkpointed part runs again here, and is counted
        finally:
            for hook in hooks:
                hook.remove()
        for layer in self._layers:
            if layer.calls != 1:
                why[layer.name] = "is not used" if layer.calls == 0 else "is used more than once"
        return why

    def _refuse(self, why: dict[str, str]) -> None:
        self._refused.update(why)
        self._layers = [layer for layer in self._layers if layer.name not in why]

    def _rows_meet(self) -> bool:
        self.network.set_mode(train=True)
        norms = (m for m in self.network.layers if isinstance(m, nn.modules.batchnorm._BatchNorm))
        return any(m.training or m.running_mean is None for m in norms)

    # One noisy pass.

    def log_likelihood_and_grads(
        self,
        evaluation: Evaluation,
        m: Tensor,
        scale: Tensor,
        batch: Batch,
        factor: float | Tensor,
        buffers: Mapping[str, Tensor],
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """sum_n factor_n log p(y_n | noisy pass), and its gradients in the means and standard deviations, (P,) each.

        The coordinates that the likelihood learns are drawn once. The gradients are buffers that the next call
        overwrites.
        """
        value, toward, spread, inner = self.in_parts(evaluation, m, scale, batch, factor, buffers, generator)
        return value, toward, spread if inner is None else spread.mul_(inner)

    def in_parts(
        self,
        evaluation: Evaluation,
        m: Tensor,
        scale: Tensor,
        batch: Batch,
        factor: float | Tensor,
        buffers: Mapping[str, Tensor],
        generator: torch.Generator,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The same with the last gradient as it is before its inner derivative, (P,), which comes beside it.

        Flipout takes `noise` for its eps, (P,), if it is given.
        """
        inputs, targets = batch[:-1], batch[-1]
        shape = (evaluation.size,)
        require(m.shape == shape, "m", "LayerNoise", f"have the shape {shape}", tuple(m.shape))
        require(scale.shape == shape, "scale", "LayerNoise", f"have the shape {shape}", tuple(scale.shape))
        if not self._examined:
            self.examine(inputs, buffers)
        if self._size != evaluation.size:
            self._make_room(evaluation.size)
        if noise is not None:
            self._noise = noise
        elif self.kind == "flipout":
            self._noise = torch.empty_like(m) if self._given else self._noise
            self._noise.normal_(generator=generator)
        self._given = noise is not None
        w, forward = self._draw(m, scale, len(targets), generator)
        # Without a buffer to add to, a gradient is handed over as it is: two passes over the weights less.
        self.network.let_go_of_gradients()
        for second in self._seconds.values():
            second.grad = None
        with torch.enable_grad(), self._installed(forward):
            tail = w[evaluation.learnt].detach().requires_grad_()
            outputs = self.network(w, inputs, buffers, train=True)
            total = weighted_sum(evaluation.log_prob(outputs, targets, tail, None), factor)
            total.backward()
        if tail.grad is not None:
            self._toward[evaluation.learnt] = tail.grad
        inner = self._follow_back(scale)
        return total.detach(), self._toward, self._spread, inner

    def _make_room(self, size: int) -> None:
        """The work vectors (P,), and the leaves of the second products as views of one of them."""
        like = self.network.initial
        self._size = size
        self._w, self._noise, self._second = like.new_zeros(3, size).unbind()
        self._given = False  # whether the noise is somebody else's memory
        self._toward, self._spread = like.new_zeros(2, size).unbind()
        self._seconds: dict[str, Tensor] = {}
        tiny = torch.finfo(like.dtype).tiny
        ruled = torch.zeros(size, dtype=torch.bool)
        for layer in self._layers:
            if self.kind == "local":  # a variance of zero has a root without a slope
                layer.second_bias = like.new_full((layer.widths[1],), tiny)
            for name, p in layer.parameters.items():
                place = self._places[name]
                ruled[place] = True
                leaf = self._seconds[name] = self._second[place].view(p.shape).detach().requires_grad_()
                if p is layer.weight:
                    layer.second_weight = leaf
                    layer.toward, layer.spread = (t[place].view(p.shape) for t in (self._toward, self._spread))
                else:
                    layer.second_bias = leaf
        self._once = runs(~ruled)

    def _draw(
        self, m: Tensor, scale: Tensor, rows: int, generator: torch.Generator
    ) -> tuple[Tensor, Callable[[Layer, Tensor], Tensor]]:
        """What the network reads, with what is drawn once; the layers' noisy forward function."""
        w = self._w.copy_(m) if self._once else m
        if self.kind == "local":
            torch.mul(scale, scale, out=self._second)
            for run in self._once:
                w[run].addcmul_(scale[run], self._noise[run].normal_(generator=generator))
            return w, lambda layer, x: local(layer, checked(layer, x, rows), generator)
        torch.mul(scale, self._noise, out=self._second)
        for run in self._once:
            w[run].add_(self._second[run])
        shares = [rows * width for layer in self._layers for width in layer.widths]
        pools = iter(signs(sum(shares), w, generator).split(shares))
        pairs = {layer.name: pair for layer, pair in zip(self._layers, zip(pools, pools, strict=True), strict=True)}
        return w, lambda layer, x: flipout(layer, checked(layer, x, rows), *pairs[layer.name])

    def _follow_back(self, scale: Tensor) -> Tensor | None:
        """Put the gradients in their places; those of what the second products read, S^2 or S eps, lack d/dS of it."""
        placed = {id(layer.weight) for layer in self._layers if layer.placed}
        placed |= {id(layer.second_weight) for layer in self._layers if layer.placed}
        for leaves, flat in ((self._leaves, self._toward), (self._seconds, self._spread)):
            for name, leaf in leaves.items():
                if id(leaf) not in placed:
                    put(leaf.grad, flat[self._places[name]])
        if self.kind == "local":
            self._spread.mul_(scale).mul_(2)
            for run in self._once:
                torch.mul(self._toward[run], self._noise[run], out=self._spread[run])
            return None
        for run in self._once:
            self._spread[run] = self._toward[run]
        return self._noise

    @contextmanager
    def _installed(self, forward: Callable[[Layer, Tensor], Tensor]) -> Iterator[None]:
        """The layers' forward functions replaced, until the pass and its backward pass are over."""

        def bound(layer: Layer) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                layer.calls += 1
                return forward(layer, x)

            return run

        try:
            for layer in self._layers:
                layer.calls, layer.placed = 0, False
                vars(layer.module)["forward"] = bound(layer)
            yield
        finally:
            for layer in self._layers:
                vars(layer.module).pop("forward", None)


def put(gradient: Tensor | None, flat: Tensor) -> None:
    """Write a leaf's gradient, or zeros where it has none, to its place."""
    if gradient is None:
        flat.zero_()
    else:
        flat.view(gradient.shape).copy_(gradient)


# The two rules.


def local(layer: Layer, x: Tensor, generator: torch.Generator) -> Tensor:
    """f(x; M, b) + sqrt(f(x^2; S^2, s_b^2)) eps."""
    mean = layer.act(x, layer.weight, layer.bias)
    variance = layer.act(x.square(), layer.second_weight, layer.second_bias)
    if layer.noise is None or layer.noise.shape != mean.shape:
        layer.noise = torch.empty(mean.shape, dtype=mean.dtype, device=mean.device)
    # In place: the backward pass of a product does not read what it made.
    return mean.addcmul_(variance.sqrt_(), layer.noise.normal_(generator=generator))


def flipout(layer: Layer, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
    """f(x; M, b) + f(x r; S eps, s_b eps_b) r', with signs a row and channel, the same at every position."""
    if layer.is_linear and x.ndim == 2:
        layer.placed = True
        leaves = layer.weight, layer.bias, layer.second_weight, layer.second_bias
        return FlipoutLinear.apply(x, layer, into.view(len(x), -1), out.view(len(x), -1), *leaves)
    mean = layer.act(x, layer.weight, layer.bias)
    n, ones = len(x), [1] * (x.ndim - 2)
    into, out = (r.view(n, *ones, -1) if layer.is_linear else r.view(n, -1, *ones) for r in (into, out))
    return mean.addcmul_(layer.act(x * into, layer.second_weight, layer.second_bias), out)


class FlipoutLinear(torch.autograd.Function):
    """Flipout of a linear layer on rows, whose weights' gradients are written where they belong.

    Autograd's own would be laid out transposed, copied once to be turned and once more to its place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, into: Tensor, out: Tensor, *leaves: Tensor | None) -> Tensor:
        """The output for x W' + b + ((x r) V' + c) r', with the leaves W, b, V and c."""
        w, b, v, c = leaves
        assert w is not None
        assert v is not None
        flipped = x * into
        ctx.save_for_backward(x, flipped, w, v, into, out)
        ctx.layer, ctx.biased = layer, (b is not None, c is not None)
        return linear(x, w, b).addcmul_(linear(flipped, v, c), out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x and those of the biases; the weights' go to the layer's places."""
        x, flipped, w, v, into, out = ctx.saved_tensors
        (g,), h, layer = gradients, gradients[0] * out, ctx.layer
        torch.mm(g.mT, x, out=layer.toward)
        torch.mm(h.mT, flipped, out=layer.spread)
        to_x = (g @ w).addcmul_(h @ v, into) if ctx.needs_input_grad[0] else None
        to_b, to_c = (d.sum(0) if biased else None for d, biased in zip((g, h), ctx.biased, strict=True))
        return to_x, None, None, None, None, to_b, None, to_c


def checked(layer: Layer, x: Tensor, rows: int) -> Tensor:
    """A layer's input, if the layer acts as it did on the first batch."""
    if layer.calls == 1 and len(x) == rows:
        return x
    got = f"a call on {len(x)} rows for {rows} inputs" if len(x) != rows else "a second call"
    raise InputError(
        f"The layer '{layer.name}' must act once a pass, with a row for each input, in every batch as in the first, "
        f"got {got}: choose an estimator that draws the weights."
    )


def signs(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Fair signs, (count,): each random byte is the row of a table of eight."""
    words = torch.empty(-(-count // 64), dtype=torch.int64, device=like.device)
    bytes_ = words.random_(-(2**63), None, generator=generator).view(torch.uint8)
    return eights(like.dtype, like.device).index_select(0, bytes_.int()).view(-1)[:count]


@functools.cache
def eights(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The signs that a byte's bits stand for, (256, 8)."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return ((bits & 1) * 2 - 1).to(dtype)


# Which layers they hold for.


def candidates(network: Network) -> Iterator[Layer]:
    """The linear layers and convolutions whose weight is drawn, and theirs alone."""
    owners = [id(p) for module in network.skeleton.modules() for p in module._parameters.values() if p is not None]
    for name, module in network.skeleton.named_modules():
        plain = type(module) in RULED and "forward" not in vars(module) and module._compiled_call_impl is None
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if not plain or weight is None or id(weight) not in network.drawn or len(module._parameters) > 2:
            continue
        prefix = f"{name}." if name else ""
        drawn = {
            f"{prefix}{key}": p for key, p in module._parameters.items() if p is not None and id(p) in network.drawn
        }
        if all(owners.count(id(p)) == 1 for p in drawn.values()):
            act = module._conv_forward if isinstance(module, nn.modules.conv._ConvNd) else linear
            yield Layer(name, module, act, drawn, weight, bias, weight)


def runs(chosen: Tensor) -> list[slice]:
    """The stretches of a mask (P,) that are true.

    >>> runs(torch.tensor([True, True, False, True]))
    [slice(0, 2, None), slice(3, 4, None)]
    """
    edges = torch.diff(
        chosen.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32)
    )
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return [slice(a, b) for a, b in zip(starts, stops, strict=True)]
