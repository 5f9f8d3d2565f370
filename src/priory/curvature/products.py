"""Matrix-free products of the curvature with vectors (Pearlmutter 1994; Schraudolph 2002).

    GGN and Fisher:   v -> J v -> s' J v -> s s' J v -> J' s s' J v,    summed over data and columns s
    Hessian:          v -> d/dw (g(w)' v),                              with g the gradient of -log p(D|w)

J v comes from differentiating J'u, which is linear in u: u -> J'u -> d(v'J'u)/du = J v. This works for every network
that autograd can differentiate twice, without forward mode. One pass over the data serves all k vectors. Time: 3 k
backward passes per datum (GGN) or 2 k (Hessian). Memory: k times the activations of a few data, and k p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

from priory.core.data import split_rows, weighted_sum
from priory.core.errors import require
from priory.curvature.base import BLOCK_ROWS
from priory.curvature.per_datum import parameters, twice_differentiable
from priory.network.skeleton import checked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch
    from priory.curvature.base import Pass, Roots, Selection
    from priory.models.target import Target

ELEMENTS_PER_ACTIVATION = 8  # held by a graph that is differentiated twice


def product(given: Pass, v: Tensor) -> Tensor:
    """Multiply the curvature by vectors without forming the matrix.

    The sampled Fisher draws new labels from its generator at each call.

    Args:
        given: Target, weights, data, coordinates and kind of the curvature H.
        v: One vector, (p,), or several, (k, p).

    Returns:
        H v, in the shape of `v`.
    """
    target, w, selection, buffers = given.target, given.w, given.selection, given.buffers or {}
    shaped = v.ndim in (1, 2) and v.shape[-1] == selection.size
    require(shaped, "v", "product", f"be ({selection.size},) or (k, {selection.size})", tuple(v.shape))
    vectors, total, seen = torch.atleast_2d(v), torch.zeros_like(torch.atleast_2d(v)), 0
    roots, network = given.roots(), target.network_model("Curvature").network
    network.use_buffers(buffers)
    network.set_mode(train=False)
    for batch in given.data.blocks(BLOCK_ROWS):
        columns = _numbers_of_columns(target, w, batch, roots, buffers)
        each = (ELEMENTS_PER_ACTIVATION * network.activations(batch[:-1], buffers) + columns) * w.element_size()
        rows = max(1, min(len(batch[0]), given.limit // each))
        together = max(1, min(len(vectors), given.limit // (each * rows)))
        for some in split_rows(batch, rows):
            total += _of_rows(target, w, some, vectors, roots, selection, together)
        seen += len(batch[0])
    total *= target.scale(seen)
    return total.reshape(v.shape)


def _numbers_of_columns(target: Target, w: Tensor, batch: Batch, roots: Roots, buffers: Mapping[str, Tensor]) -> int:
    """Return how many numbers the columns s_c of one datum hold; 0 for the Hessian."""
    if roots.kind == "hessian":
        return 0
    first = target.outputs(w[None], tuple(x[:2] for x in batch[:-1]), buffers)
    rest = first.shape[2:]
    return roots.count(rest) * rest.numel()


def _of_rows(
    target: Target, w: Tensor, batch: Batch, vectors: Tensor, roots: Roots, selection: Selection, together: int
) -> Tensor:
    """Return H v of a few data for the vectors (k, p), `together` of them at a time."""
    model = target.network_model("Curvature")
    inputs, targets = batch[:-1], batch[-1]
    with torch.enable_grad(), twice_differentiable():
        free = w[selection.places].detach().requires_grad_()  # (p,)
        whole = w.detach().scatter(0, selection.places, free)
        found = checked(functional_call(model.network.skeleton, parameters(model.network, whole), inputs))
        outputs = model.likelihood.arrange(found, target.event)  # (n, *rest)
        if roots.kind == "hessian":
            value = -weighted_sum(
                model.likelihood.log_prob(outputs, targets, model.learnt_at(w)), target.row_weights(batch)
            )
            slope = torch.autograd.grad(value, free, create_graph=True)[0]
            return _pulled(slope, free, vectors, together)
        columns = roots(outputs.detach(), targets, target.row_weights(batch))  # (C, n, *rest)
        u = torch.zeros_like(outputs, requires_grad=True)
        slope = torch.autograd.grad(outputs, free, u, create_graph=True)[0]  # J'u
        pushed = _pulled(slope, u, vectors, together)  # J v, (k, n, *rest)
        flat = columns.reshape(*columns.shape[:2], -1)  # (C, n, outputs)
        weights = torch.einsum("cno,kno->kcn", flat, pushed.reshape(*pushed.shape[:2], -1))
        back = torch.einsum("cno,kcn->kno", flat, weights).reshape(pushed.shape)
        return _pulled(outputs, free, back, together)


def _pulled(y: Tensor, x: Tensor, cotangents: Tensor, together: int) -> Tensor:
    """Return (dy/dx)' c for each c (k, *y): several at a time by vmap, or one by one where it has no rule."""
    if not y.requires_grad:  # linear in x: its slope is a constant
        return x.new_zeros(len(cotangents), *x.shape)
    found: list[Tensor] = []
    for some in cotangents.split(together):
        found += list(_several(y, x, some)) if len(some) > 1 else [_one(y, x, some[0])]
    return torch.stack(found)


def _several(y: Tensor, x: Tensor, cotangents: Tensor) -> Tensor:
    try:
        return torch.autograd.grad(y, x, cotangents, retain_graph=True, is_grads_batched=True, materialize_grads=True)[
            0
        ]
    except RuntimeError:
        return torch.stack([_one(y, x, c) for c in cotangents])


def _one(y: Tensor, x: Tensor, cotangent: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, cotangent, retain_graph=True, materialize_grads=True)[0]
