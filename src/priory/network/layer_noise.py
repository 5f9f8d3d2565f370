"""Noise drawn at the layers instead of at the weights: local reparameterisation and flipout.

For q(w) = N(m, diag(s^2)), one draw of the weights for a whole batch makes the errors of the rows correlated. Both
estimators give each row its own noise at the cost of a second product per layer. A layer f(x; W, b), linear or a
convolution, has means M, b and standard deviations S, s_b:

    local      out = f(x; M, b) + sqrt(f(x^2; S^2, s_b^2)) eps,        eps ~ N(0, 1), per activation
    flipout    out = f(x; M, b) + f(x r; S eps, s_b eps_b) r',         eps ~ N(0, 1), per weight; r, r' = +-1, per row

**Bias.** sum_n log p(y_n | x_n, w) is a sum over rows, so its expectation under q depends only on the distribution of
each row's pass, not on the joint distribution of the rows. Under flipout row n sees the weights
M + (r'_n r_n^T) S eps, which are a draw of q: value and gradients are unbiased, for convolutions too. Under local
reparameterisation the activations of a row are Gaussian with the moments that q gives them, and independent, as those
of a linear layer are: unbiased. At the positions of a convolution, or of a linear layer on a sequence, one draw of the
weights gives *correlated* activations, and the paper's rule draws them as if they were independent: each has the right
distribution, but expectations of functions of several of them are biased. `LayerNoise.approximate` lists these
layers. Both estimators are biased where batch normalisation mixes rows.

**Layers without a rule** (norms, embeddings, recurrences, weights that are used twice, shared or parametrised) have
their parameters drawn once for the batch, w = m + s eps. `LayerNoise.fallbacks` lists these parameters.

Cost of a pass in addition to the network's own: each layer's products a second time, forward and backward (two and four
in total; two and two if the inputs need no gradient), and one normal draw per activation (local) or weight (flipout).

References:
    Kingma, Salimans and Welling (2015), Variational dropout and the local reparameterization trick.
    Wen, Vicol, Ba, Tran and Grosse (2018), Flipout: efficient pseudo-independent weight perturbations on mini-batches.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from priory.core.data import weighted_sum
from priory.core.errors import require
from priory.network.noisy_layers import NoisyLayer, candidates, checked, flipout, local, signs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from priory.core.data import Batch
    from priory.network.evaluation import Evaluation
    from priory.network.skeleton import Network

KIND_NAMES = {"local": "local reparameterisation", "flipout": "flipout"}


class LayerNoise:
    """Noisy passes of a network, with gradients in the means and standard deviations of a factorised Gaussian.

    Which layers have a rule depends on their types and on a trial pass over the first batch (`examine`, which the first
    noisy pass calls if it has not been called): a layer must act once per pass, on one row per input, and its weights
    must be read nowhere else. During a pass the forward functions of the skeleton's layers are replaced; they are
    restored afterwards, even if an exception is raised.

    Args:
        network: The network.
        kind: "local" for local reparameterisation or "flipout".

    >>> from priory.network.skeleton import Network
    >>> noise = LayerNoise(Network(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))), "local")
    >>> noise.fallbacks
    ('1.weight', '1.bias')
    >>> noise.note
    'local reparameterisation; one draw per batch for 1.weight, 1.bias'
    """

    def __init__(self, network: Network, kind: Literal["local", "flipout"]) -> None:
        require(kind in KIND_NAMES, "kind", "LayerNoise", "be 'local' or 'flipout'", repr(kind))
        self.network, self.kind = network, kind
        named = ((name, p) for name, p in network.skeleton.named_parameters() if id(p) in network.drawn)
        self._places: dict[str, slice] = {}
        self._leaves: dict[str, Tensor] = {}
        start = 0
        for name, p in named:
            self._leaves[name], self._places[name] = p, slice(start, start + p.numel())
            start += p.numel()
        self._layers = list(candidates(network))
        self._refused: dict[str, str] = {}  # layers without a rule according to the first batch, and the reason
        self._examined = False
        self._size = 0

    # Layers with a rule.

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The parameters that are drawn once for the whole batch; the list is complete after the first batch."""
        ruled = {name for layer in self._layers for name in layer.parameters}
        return tuple(name for name in self._places if name not in ruled)

    @property
    def approximate(self) -> tuple[str, ...]:
        """The layers whose noise differs in its joint distribution from one draw of the weights per row.

        These are the layers with several positions per row under local reparameterisation, as found on the first batch,
        and all layers if batch normalisation mixes rows.
        """
        meet = self._mixes_rows()
        return tuple(n.name for n in self._layers if meet or (self.kind == "local" and n.positions > 1))

    @property
    def note(self) -> str:
        """One line of text: the estimator, the layers that fall back with the reason, and the approximate layers."""
        parts = [KIND_NAMES[self.kind]]
        if self.fallbacks:
            parts.append(f"one draw per batch for {', '.join(self.fallbacks)}")
        parts += [f"'{name}' {reason}" for name, reason in self._refused.items()]
        if self.approximate:
            parts.append(f"approximate in {', '.join(repr(name) for name in self.approximate)}")
        return "; ".join(parts)

    def examine(self, inputs: Batch, buffers: Mapping[str, Tensor]) -> None:
        """Find the layers that have a rule, by two trial passes on copies of the buffers.

        The second pass has one more row, to rule out a dimension that has the length of the batch by coincidence.
        """
        for extra in (0, 1):
            rows = tuple(torch.cat([x, x[:1]]) if extra else x for x in inputs)
            try:
                used = self._try(rows, {name: b.clone() for name, b in buffers.items()})
            except Exception:
                if not extra:
                    raise
                self._refuse({layer.name: "is in a network that accepts a single batch size" for layer in self._layers})
                break
            self._refuse({layer.name: why for layer in self._layers if (why := used.get(layer.name))})
        self._examined = True

    def _try(self, inputs: Batch, buffers: Mapping[str, Tensor]) -> dict[str, str]:
        """One noiseless pass, forward and backward; the reason for each layer that has no rule."""
        why: dict[str, str] = {}
        rows = len(inputs[0])

        def look(layer: NoisyLayer, x: Tensor) -> Tensor:
            if x.ndim < 2 or len(x) != rows:
                why[layer.name] = "does not act on one row per input"
            bias = None if layer.bias is None else layer.bias.detach().requires_grad_()
            out = layer.act(x, layer.weight.detach().requires_grad_(), bias)
            wide = (x.shape[-1], out.shape[-1]) if layer.is_linear else (x.shape[1], out.shape[1])
            layer.widths, layer.positions = wide, out[:1].numel() // wide[1]
            return out

        def read(layer: NoisyLayer) -> Callable[[Tensor], None]:
            return lambda _: why.update({layer.name: "has weights that are read elsewhere"})

        # The layers use copies of their weights, so a gradient in a weight itself reveals another use of it.
        hooks = [p.register_hook(read(layer)) for layer in self._layers for p in layer.parameters.values()]
        self.network.collect_gradients_in(self.network.initial.new_zeros(self.network.size))
        try:
            with torch.enable_grad(), self.installed(look):
                outputs = self.network(self.network.initial, inputs, buffers, train=True)
                if outputs.requires_grad:
                    outputs.sum().backward()  # checkpointed parts run again here, and their calls are counted
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

    def _mixes_rows(self) -> bool:
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

        The likelihood's learnt coordinates are drawn once. The gradients are buffers that the next call
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
        """Like `log_likelihood_and_grads`, with the gradient in the standard deviations as two factors, (P,) each.

        The second factor may be None. If `noise` (P,) is given, flipout uses it as eps.
        """
        inputs, targets = batch[:-1], batch[-1]
        shape = (evaluation.size,)
        require(m.shape == shape, "m", "LayerNoise", f"have the shape {shape}", tuple(m.shape))
        require(scale.shape == shape, "scale", "LayerNoise", f"have the shape {shape}", tuple(scale.shape))
        if not self._examined:
            self.examine(inputs, buffers)
        if self._size != evaluation.size:
            self._allocate(evaluation.size)
        if noise is not None:
            self._noise = noise
        elif self.kind == "flipout":
            self._noise = torch.empty_like(m) if self._given else self._noise
            self._noise.normal_(generator=generator)
        self._given = noise is not None
        w, forward = self._draw(m, scale, len(targets), generator)
        # without a buffer to add to, autograd hands over its gradient, which saves two passes over the weights
        self.network.clear_gradients()
        for second in self._seconds.values():
            second.grad = None
        with torch.enable_grad(), self.installed(forward):
            tail = w[evaluation.learnt].detach().requires_grad_()
            outputs = self.network(w, inputs, buffers, train=True)
            total = weighted_sum(evaluation.log_prob(outputs, targets, tail, None), factor)
            total.backward()
        if tail.grad is not None:
            self._toward[evaluation.learnt] = tail.grad
        inner = self._follow_back(scale)
        return total.detach(), self._toward, self._spread, inner

    def _allocate(self, size: int) -> None:
        """Allocate the work vectors (P,); the leaves of the second products are views of one of them."""
        like = self.network.initial
        self._size = size
        self._w, self._noise, self._second = like.new_zeros(3, size).unbind()
        self._given = False  # whether `_noise` is the caller's memory
        self._toward, self._spread = like.new_zeros(2, size).unbind()
        self._seconds: dict[str, Tensor] = {}
        tiny = torch.finfo(like.dtype).tiny
        ruled = torch.zeros(size, dtype=torch.bool)
        for layer in self._layers:
            if self.kind == "local":  # the square root has no derivative at a variance of zero
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
    ) -> tuple[Tensor, Callable[[NoisyLayer, Tensor], Tensor]]:
        """The vector at which the network runs, with fallback parameters drawn, and the noisy forward function."""
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
        """Collect the gradients, and apply or return the derivative of S^2 or S eps in S for the second products."""
        placed = {id(layer.weight) for layer in self._layers if layer.placed}
        placed |= {id(layer.second_weight) for layer in self._layers if layer.placed}
        for leaves, flat in ((self._leaves, self._toward), (self._seconds, self._spread)):
            for name, leaf in leaves.items():
                if id(leaf) not in placed:
                    write_gradient(leaf.grad, flat[self._places[name]])
        if self.kind == "local":
            self._spread.mul_(scale).mul_(2)
            for run in self._once:
                torch.mul(self._toward[run], self._noise[run], out=self._spread[run])
            return None
        for run in self._once:
            self._spread[run] = self._toward[run]
        return self._noise

    @contextmanager
    def installed(self, forward: Callable[[NoisyLayer, Tensor], Tensor]) -> Iterator[None]:
        """A context in which the layers use this forward function, for a pass and its backward pass."""

        def bound(layer: NoisyLayer) -> Callable[[Tensor], Tensor]:
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


def write_gradient(gradient: Tensor | None, flat: Tensor) -> None:
    """Write the gradient of a leaf, or zeros if it has none, to its slice of the flat vector."""
    if gradient is None:
        flat.zero_()
    else:
        flat.view(gradient.shape).copy_(gradient)


def runs(chosen: Tensor) -> list[slice]:
    """Slices of consecutive true entries of a mask (P,).

    >>> runs(torch.tensor([True, True, False, True]))
    [slice(0, 2, None), slice(3, 4, None)]
    """
    edges = torch.diff(
        chosen.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32)
    )
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return [slice(a, b) for a, b in zip(starts, stops, strict=True)]
