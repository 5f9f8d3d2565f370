"""Proximal steps, which let gradient descent set weights to exactly zero at a kink of the penalty.

Adam moves each weight with its own stride t_i = rate / (sqrt(v_i) + eps). The smooth part of the loss moves the weights
to u. The proximal step then trades the distance from u, measured in the same strides, against the penalty:

    prox(u) = argmin_x  sum_i (x_i - u_i)^2 / (2 t_i) + a lambda r(x)

    L1           sign(u_i) max(0, |u_i| - a lambda t_i)
    elastic net  sign(u_i) max(0, |u_i| - a lambda_1 t_i) / (1 + 2 a lambda_2 t_i)
    group        x_i = u_i L / (L + c t_i) with L = ||x||, and zero if ||u / t|| <= c = a lambda

At a fixed point, minus the gradient of the smooth part is a subgradient of the penalty: the fixed point is the mode,
whatever the strides are. The norm L of a group solves sum_i (u_i / (L + c t_i))^2 = 1. Newton's method on the inverse
square root of the left-hand side converges in one step if the strides are equal.

References:
    Parikh and Boyd (2014), Proximal algorithms.
    Yun, Lozano and Yang (2021), Adaptive proximal gradient methods for structured neural networks.
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

Prox = Callable[[Tensor, Tensor, float], Tensor]  # (u (*B, n), strides (*B, n), weight of the penalty) -> x (*B, n)


@dataclass(frozen=True)
class ProximalBlock:
    """A parameter whose log prior has a kink, with its proximal step.

    Attributes:
        start: First coordinate of the parameter in the flat vector.
        stop: Coordinate after its last one.
        prox: Proximal step of its penalty.
    """

    start: int
    stop: int
    prox: Prox

    def step(self, w: Tensor, stride: Tensor, weight: float) -> None:
        """Apply the proximal step of `weight` times the penalty to w (*B, P), in place."""
        piece = w[..., self.start : self.stop]
        piece.copy_(self.prox(piece, stride[..., self.start : self.stop], weight))


def proximal_blocks(prior: object) -> list[ProximalBlock]:
    """Return the parameters of a network whose log prior has a kink with a known proximal step."""
    if not isinstance(prior, Prior):
        return []
    found = []
    for block, distribution in prior.others:
        if isinstance(distribution, Distribution) and block.bijector.identity:
            prox = proximal(distribution, block)
            if prox is not None:
                found.append(ProximalBlock(block.start, block.stop, prox))
    return found


@singledispatch
def proximal(distribution: Distribution, block: Block) -> Prox | None:
    """Return the proximal step of a negative log density, or None if none is known."""
    return None


@proximal.register(Independent)
def independent_prox(distribution: Independent, block: Block) -> Prox | None:
    """Return the proximal step of the base distribution."""
    return proximal(distribution.base_dist, block)


@proximal.register(Laplace)
def laplace_prox(distribution: Laplace, block: Block) -> Prox | None:
    """Return the soft threshold around the location of a Laplace distribution."""
    loc, rate = (t.expand(block.shape).reshape(-1) for t in (distribution.loc, 1 / distribution.scale))
    return lambda u, stride, weight: loc + soft_threshold(u - loc, weight * rate * stride)


@proximal.register(ElasticNetDensity)
def elastic_net_prox(distribution: ElasticNetDensity, block: Block) -> Prox | None:
    """Return the soft threshold followed by shrinkage, as the elastic net has it."""
    l1, l2 = (t.expand(block.shape).reshape(-1) for t in (distribution.l1, distribution.l2))
    return lambda u, stride, weight: soft_threshold(u, weight * l1 * stride) / (1 + 2 * weight * l2 * stride)


@proximal.register(GroupNormDensity)
def group_prox(distribution: GroupNormDensity, block: Block) -> Prox | None:
    """Return the group soft threshold over the groups of a tensor."""
    groups = distribution.groups

    def prox(u: Tensor, stride: Tensor, weight: float) -> Tensor:
        x, t = (groups.split(v.reshape(*v.shape[:-1], *groups.shape)) for v in (u, stride))
        return groups.join(group_soft_threshold(x, t, weight * distribution.rate)).reshape(u.shape)

    return prox


@proximal.register(GroupLasso)
def row_group_prox(distribution: GroupLasso, block: Block) -> Prox | None:
    """Return the group soft threshold over the rows of a matrix, or over a vector as a whole."""

    def prox(u: Tensor, stride: Tensor, weight: float) -> Tensor:
        x, t = (v.reshape(*v.shape[:-1], -1, distribution.size) for v in (u, stride))
        rate = distribution.rate.expand(block.shape[:-1]).reshape(-1, 1) if len(block.shape) > 1 else distribution.rate
        return group_soft_threshold(x, t, weight * rate).reshape(u.shape)

    return prox if block.shape[-1:] == (distribution.size,) else None


def soft_threshold(u: Tensor, threshold: Tensor) -> Tensor:
    """Shrink u towards zero by a threshold; values within the threshold become zero."""
    return u.sign() * (u.abs() - threshold).clamp_min(0)


def group_soft_threshold(u: Tensor, stride: Tensor, c: Tensor | float) -> Tensor:
    """Shrink each group of u (*B, groups, n) towards zero by the penalty c ||x||, in its strides.

    >>> u, stride = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.ones(2, 2)
    >>> group_soft_threshold(u, stride, 1.0)  # norms 5 and 0.5, reduced by 1
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """
    kept = torch.linalg.vector_norm(u / stride, dim=-1, keepdim=True) > c
    # start left of the root: Newton's iterates on an increasing, concave function stay there
    length = (torch.linalg.vector_norm(u, dim=-1, keepdim=True) - c * stride.amax(-1, keepdim=True)).clamp_min(0)
    for _ in range(NEWTON_STEPS):
        scaled = u / (length + c * stride)
        size = scaled.square().sum(-1, keepdim=True)
        slope = (scaled.square() / (length + c * stride)).sum(-1, keepdim=True)  # derivative of -size / 2
        length = length + size * (size.sqrt() - 1) / slope.clamp_min(torch.finfo(u.dtype).tiny)
    return torch.where(kept, u * length / (length + c * stride), 0.0)
