"""Proximal steps: how a descent meets a corner at zero, so that weights end there exactly.

A step of Adam moves each weight by its own stride t_i = rate / (sqrt(v_i) + eps). The smooth part of the loss takes the
step to u; the penalty then takes it to the point that weighs distance, in the same strides, against itself:

    prox(u) = argmin_x  sum_i (x_i - u_i)^2 / (2 t_i) + a lambda r(x)

    L1           sign(u_i) max(0, |u_i| - a lambda t_i)
    elastic net  the same with the first part, divided by 1 + 2 a lambda_2 t_i
    group        x_i = u_i L / (L + c t_i) with L = ||x||, and zero if ||u / t|| <= c = a lambda

Where a step leads back to itself, minus the gradient of the smooth part is a slope of the penalty: it is the mode,
whatever the strides (Parikh and Boyd 2014, "Proximal Algorithms"; Yun, Lozano and Yang 2021, "Adaptive Proximal
Gradient Methods for Structured Neural Networks"). The length L of a group solves sum_i (u_i / (L + c t_i))^2 = 1;
Newton's method on the inverse root of the left side is exact in one step where the strides are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Laplace

from priory.distributions import GroupLasso
from priory.penalties.as_prior.densities import ElasticNetDensity, GroupNormDensity
from priory.priors import Prior

if TYPE_CHECKING:
    from priory.core.flat import Block

NEWTON_STEPS = 8

Prox = Callable[[Tensor, Tensor, float], Tensor]  # of u and strides (*B, n), and what the penalty is multiplied by


@dataclass(frozen=True)
class ProximalBlock:
    """A parameter whose prior has a corner: its place in the flat vector, and the proximal step there."""

    start: int
    stop: int
    prox: Prox

    def step(self, w: Tensor, stride: Tensor, weight: float) -> None:
        """Take the coordinates of w (*B, P) to where the penalty times `weight` takes them, in place."""
        piece = w[..., self.start : self.stop]
        piece.copy_(self.prox(piece, stride[..., self.start : self.stop], weight))


def proximal_blocks(prior: object) -> list[ProximalBlock]:
    """The parameters of a network whose log prior has a corner with a known proximal step."""
    if not isinstance(prior, Prior):
        return []
    found = []
    for block, believed in prior.others:
        if isinstance(believed, Distribution) and block.bijector.identity:
            prox = proximal(believed, block)
            if prox is not None:
                found.append(ProximalBlock(block.start, block.stop, prox))
    return found


@singledispatch
def proximal(believed: Distribution, block: Block) -> Prox | None:
    """The proximal step of minus a log density; None where none is known."""
    return None


@proximal.register(Independent)
def independent_prox(believed: Independent, block: Block) -> Prox | None:
    """That of the base."""
    return proximal(believed.base_dist, block)


@proximal.register(Laplace)
def laplace_prox(believed: Laplace, block: Block) -> Prox | None:
    """Towards the location, weight by weight."""
    loc, rate = (t.expand(block.shape).reshape(-1) for t in (believed.loc, 1 / believed.scale))
    return lambda u, stride, weight: loc + soft_threshold(u - loc, weight * rate * stride)


@proximal.register(ElasticNetDensity)
def elastic_net_prox(believed: ElasticNetDensity, block: Block) -> Prox | None:
    """Towards zero, and then by a share of what is left."""
    l1, l2 = (t.expand(block.shape).reshape(-1) for t in (believed.l1, believed.l2))
    return lambda u, stride, weight: soft_threshold(u, weight * l1 * stride) / (1 + 2 * weight * l2 * stride)


@proximal.register(GroupNormDensity)
def group_prox(believed: GroupNormDensity, block: Block) -> Prox | None:
    """Group by group."""
    groups = believed.groups

    def prox(u: Tensor, stride: Tensor, weight: float) -> Tensor:
        x, t = (groups.split(v.reshape(*v.shape[:-1], *groups.shape)) for v in (u, stride))
        return groups.join(group_soft_threshold(x, t, weight * believed.rate)).reshape(u.shape)

    return prox


@proximal.register(GroupLasso)
def row_group_prox(believed: GroupLasso, block: Block) -> Prox | None:
    """The rows of a matrix, or a vector as a whole."""

    def prox(u: Tensor, stride: Tensor, weight: float) -> Tensor:
        x, t = (v.reshape(*v.shape[:-1], -1, believed.size) for v in (u, stride))
        rate = believed.rate.expand(block.shape[:-1]).reshape(-1, 1) if len(block.shape) > 1 else believed.rate
        return group_soft_threshold(x, t, weight * rate).reshape(u.shape)

    return prox if block.shape[-1:] == (believed.size,) else None


def soft_threshold(u: Tensor, threshold: Tensor) -> Tensor:
    """u drawn towards zero by a threshold, and zero within it."""
    return u.sign() * (u.abs() - threshold).clamp_min(0)


def group_soft_threshold(u: Tensor, stride: Tensor, c: Tensor | float) -> Tensor:
    """Each group of u (*B, groups, n) drawn towards zero as a whole by the penalty c ||x||, in its own strides.

    >>> u, stride = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.ones(2, 2)
    >>> group_soft_threshold(u, stride, 1.0)  # lengths 5 and 0.5, less 1
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """
    kept = torch.linalg.vector_norm(u / stride, dim=-1, keepdim=True) > c
    # from the left of the root, where Newton's steps on an increasing, concave function stay
    length = (torch.linalg.vector_norm(u, dim=-1, keepdim=True) - c * stride.amax(-1, keepdim=True)).clamp_min(0)
    for _ in range(NEWTON_STEPS):
        scaled = u / (length + c * stride)
        size = scaled.square().sum(-1, keepdim=True)
        slope = (scaled.square() / (length + c * stride)).sum(-1, keepdim=True)  # of -size / 2
        length = length + size * (size.sqrt() - 1) / slope.clamp_min(torch.finfo(u.dtype).tiny)
    return torch.where(kept, u * length / (length + c * stride), 0.0)
