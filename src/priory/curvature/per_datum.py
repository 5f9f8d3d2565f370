"""Gradients of a network's outputs for each datum, exact for any module.

For each datum n and each cotangent s_cn (of the shape of its outputs) this computes the row J_n' s_cn. `vmap` over
vector-Jacobian products handles most networks; others, such as recurrent ones, are looped over with plain autograd.
Memory: n C k numbers for k parameters, plus the activations of n data. Time: C backward passes over the data.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from priory.network.skeleton import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from priory.core.data import Batch
    from priory.curvature.base import Selection
    from priory.models.target import Target
    from priory.network.skeleton import Network


def gradients(
    network: Network,
    w: Tensor,
    inputs: Batch,
    cotangents: Tensor,
    names: Sequence[str],
    arrange: Callable[[Tensor], Tensor],
    buffers: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return J_n' s_cn for the named parameters, each (n, C, *shape), for cotangents (C, n, *rest)."""
    network.use_buffers(buffers or {})
    network.set_mode(train=False)
    params = parameters(network, w)
    chosen = {name: params.pop(name) for name in names}
    copies = _copies(network, params | chosen, inputs, cotangents.shape[2:], arrange)

    def outputs(free: dict[str, Tensor], datum: Batch) -> Tensor:  # of one datum, (*rest)
        rows = tuple(x.expand(copies, *x.shape) for x in datum)
        return arrange(checked(functional_call(network.skeleton, {**params, **free}, rows)))[0]

    def pulled(datum: Batch, some: Tensor) -> dict[str, Tensor]:  # of one datum, (C, *shape)
        return vmap(vjp(lambda free: outputs(free, datum), chosen)[1])(some)[0]

    each = cotangents.movedim(1, 0)  # (n, C, *rest)
    with twice_differentiable():
        if not any(isinstance(layer, nn.RNNBase) for layer in network.layers):
            try:
                return {name: g.detach() for name, g in vmap(pulled)(inputs, each).items()}
            except (RuntimeError, TypeError, ValueError):  # no batching rule, or a branch on a value
                pass
        rows = zip(zip(*(x.unbind(0) for x in inputs), strict=True), each, strict=True)
        found = [_pulled_one_by_one(lambda free, d=datum: outputs(free, d), chosen, some) for datum, some in rows]
    return {name: torch.stack([g[name] for g in found]) for name in names}


def _pulled_one_by_one(
    outputs: Callable[[dict[str, Tensor]], Tensor], chosen: dict[str, Tensor], some: Tensor
) -> dict[str, Tensor]:
    """Return J' s_c of one datum, with one backward pass per cotangent."""
    free = {name: t.detach().requires_grad_() for name, t in chosen.items()}
    with torch.enable_grad():
        f = outputs(free)
    last = len(some) - 1
    rows = [
        torch.autograd.grad(f, list(free.values()), s, retain_graph=c < last, materialize_grads=True)
        for c, s in enumerate(some)
    ]
    return {name: torch.stack(parts) for name, parts in zip(free, zip(*rows, strict=True), strict=True)}


def _copies(
    network: Network,
    params: dict[str, Tensor],
    inputs: Batch,
    rest: torch.Size,
    arrange: Callable[[Tensor], Tensor],
) -> int:
    """Return the copies of a datum that make a batch: 1, or 2 for a network that squeezes a batch of one."""
    alone = tuple(x[:1] for x in inputs)
    with torch.no_grad():
        found = checked(functional_call(network.skeleton, params, alone))
        if found.ndim == 0 or len(found) != 1:
            return 2
        return 1 if arrange(found).shape == (1, *rest) else 2


def parameters(network: Network, w: Tensor) -> dict[str, Tensor]:
    """Return the network's parameters by name, as views of w (>= size,) with one joint backward step."""
    shapes = [param.shape for param in network.params.values()]
    parts = w[: network.size].split([torch.Size(shape).numel() for shape in shapes])
    return {name: part.view(shape) for name, part, shape in zip(network.params, parts, shapes, strict=True)}


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Use the math kernel of attention: the fused kernels have neither batching rules nor second derivatives.

    Torch's warning that it loops over operations without a batching rule, such as weight_norm, is suppressed.
    """
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        yield


def places_within(target: Target, selection: Selection) -> Tensor | None:
    """Return the positions of the selected coordinates among those of their parameters; None for all."""
    if selection.whole:
        return None
    blocks = [target.model.layout[name] for name in selection.names]
    every = torch.cat([torch.arange(b.start, b.stop, device=selection.places.device) for b in blocks])
    return torch.searchsorted(every, selection.places)
