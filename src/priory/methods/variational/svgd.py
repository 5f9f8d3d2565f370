"""Stein variational gradient descent (Liu and Wang 2016): particles that follow the gradient of the log joint and repel
each other through a kernel.

The particles move in the direction phi in which KL(q || p) falls fastest, among those in the unit ball of the kernel's
space, with q the distribution of the particles. The first term of phi moves them to where the posterior is high, the
second moves them apart: a single particle finds the mode in unconstrained coordinates, many represent the posterior.
Steps are those of Adam (Kingma and Ba 2015), which stop where phi is zero, whatever the scale of each coordinate.

The particles are one more leading dimension, (*B, n, P). Cost of a step: one pass of the network per particle, and
O(n^2 P).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.posteriors import Draws, Posterior

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.core.data import Batch, Data
    from priory.models.target import Target

JITTER_SCALE = 0.02  # of the prior's standard deviations, between particles that start at the same vector


@dataclass
class SVGDState:
    """The particles and Adam's moments."""

    w: Tensor  # (*B, n, P)
    adam: Adam


@dataclass(frozen=True)
class SVGD(Options):
    """Stein variational gradient descent: a set of particles, moved together towards the posterior.

    Each step moves particle w_i along

        phi(w_i) = 1/n sum_j [k(w_j, w_i) d/dw_j log p(w_j, D) + d/dw_j k(w_j, w_i)],    k(w, v) = exp(-|w - v|^2 / h)

    with n the number of `particles` and h the `bandwidth`. The posterior is a `Draws` of the particles, all equally
    likely. Where there are far fewer particles than parameters, their spread is smaller than that of the posterior.

    Args:
        particles: Number of particles n, an integer >= 1. Default: 64, the number of draws that
            `predict` takes, so that it uses each particle once.
        learning_rate: Step size of Adam at the first step. Default: 0.01.
        schedule: How the learning rate falls: "cosine" (to zero), "constant", or a function from an optimizer to a
            `torch.optim.lr_scheduler`. Default: "cosine".
        bandwidth: The bandwidth h of the kernel, a positive number. Default: None, the median rule: at each step h is
            the median squared distance between two particles divided by log n, so that the kernels of the others add up
            to about one at each particle.
        start: A method that is fitted first, or a posterior whose draws are the first particles; those that coincide,
            as the draws of a point do, are jittered. Default: None, initialisations of the network that are drawn anew,
            or for a `Density` uniform draws on (-2, 2).

    Raises:
        InputError: If an option is out of its range.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> density = pr.Density(lambda p: -0.5 * (p["x"] - 3).square(), {"x": pr.Param()})
        >>> posterior = pr.fit(density, None, pr.SVGD(particles=2, learning_rate=0.05), steps=1000, progress=False)
        >>> torch.sort(posterior.sample(2)["x"]).values  # 3 -/+ sqrt(log 2)
        tensor([2.1674, 3.8326], dtype=torch.float64)

    References:
        Liu and Wang (2016), Stein variational gradient descent: a general purpose Bayesian inference algorithm.
    """

    particles: int = 64
    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    bandwidth: float | None = None
    start: Any = None

    def __post_init__(self) -> None:
        require(is_integer(self.particles, 1), "particles", "SVGD", "be an integer >= 1", self.particles)
        check_rate(self.learning_rate, self.schedule, "SVGD")
        h = self.bandwidth
        number = isinstance(h, (int, float)) and not isinstance(h, bool) and 0 < h < math.inf
        require(h is None or number, "bandwidth", "SVGD", "be a positive number, or None", h)

    @property
    def traits(self) -> Traits:
        return Traits(trains_buffers=False, empirical_priors=False)

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=4_000, most=50_000)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> SVGDState:
        w = target.start(plan.data, torch.Size([*shape, self.particles]), generator, start)
        w = jittered(w, JITTER_SCALE * target.prior.typical_scale(), generator)
        return SVGDState(w, Adam.of(w, rates(self.schedule, self.learning_rate, plan.steps, "SVGD")))

    def step(
        self, target: Target, state: SVGDState, batch: Batch, generator: torch.Generator
    ) -> tuple[SVGDState, Info]:
        value, score = target.log_joint_and_grad(state.w, batch)
        phi = direction(state.w, score, self.bandwidth)
        state.adam.descend(state.w, -phi)
        return state, Info({"loss": target.loss(value).mean(-1), "phi": phi.square().mean((-2, -1)).sqrt()})

    def posterior(self, target: Target, state: SVGDState, draws: Tensor | None = None) -> Draws:
        return Draws(target, state.w.flatten(0, -2))


def direction(w: Tensor, score: Tensor, bandwidth: float | None = None) -> Tensor:
    """Return phi at particles w with gradients `score` of the log joint, all (*B, n, P)."""
    centred = w - w.mean(-2, keepdim=True)  # phi depends on differences, which lose fewer digits near zero
    squares = squared_distances(centred)
    h = median_rule(squares) if bandwidth is None else squares.new_full((1, 1), bandwidth)
    kernel = torch.exp(-squares / h)
    repulsion = 2 / h * (kernel.sum(-1, keepdim=True) * centred - kernel @ centred)  # d/dw_j k_ij, summed
    return (kernel @ score + repulsion) / w.shape[-2]


def squared_distances(w: Tensor) -> Tensor:
    """Return |w_i - w_j|^2 for particles (*B, n, P): (*B, n, n), with zeros on the diagonal."""
    inner = w @ w.mT
    norms = inner.diagonal(dim1=-2, dim2=-1)
    return (norms[..., :, None] + norms[..., None, :] - 2 * inner).clamp(min=0)


def median_rule(squares: Tensor) -> Tensor:
    """Return h for each set of squared distances (*B, n, n): (*B, 1, 1).

    The median is over pairs, the lower one where their number is even. Where it is zero, the mean is used instead.
    """
    n = squares.shape[-1]
    if n == 1:
        return torch.ones_like(squares)  # the kernel of a particle with itself is one at any bandwidth
    i, j = torch.triu_indices(n, n, offset=1, device=squares.device)
    pairs = squares[..., i, j]
    median, mean = pairs.median(-1).values, pairs.mean(-1)
    typical = torch.where(median == 0, torch.where(mean == 0, torch.ones_like(mean), mean), median)
    return (typical / math.log(n))[..., None, None]


def jittered(w: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """Add noise of this scale, (P,), to particles that equal another one, because equal particles would stay equal."""
    noise = torch.randn(w.shape, generator=generator, dtype=w.dtype, device=w.device)
    exact = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist") == 0
    repeated = exact.tril(-1).any(-1, keepdim=True)
    return torch.where(repeated, w + scale * noise, w)
