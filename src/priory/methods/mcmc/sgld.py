"""Stochastic gradient Langevin dynamics: gradient ascent on the log joint with noise.

    w <- w + e g(w) + sqrt(2 e) xi,       g an estimate of grad log p(w, D) from a minibatch,  xi ~ N(0, I)

With e = T rate / N and the joint tempered, the noise has the variance 2 T rate / N. There is no Metropolis correction,
so the draws have an error of O(e): on a Gaussian of precision Q their covariance is Q^-1 (I - e Q / 2)^-1, and
minibatch noise of covariance C adds about e C Q^-1 / 2. Halving the rate halves both. All chains read the same
minibatches.

With `precondition`, each coordinate has its own step size, as in RMSprop (Li, Chen, Carlson and Carin 2016):

    w <- w + e G g + sqrt(2 e G) xi,      G = 1 / (1e-5 + sqrt(V)),    V <- 0.99 V + 0.01 (g / N)^2

V is averaged over chains and is updated only while no draws are kept. A G that changed with w would need its divergence
added, which Li et al. leave out; a constant G needs no such term. Cost of a step: one pass of the network, and O(P) per
chain.

References:
    Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics.
    Li, Chen, Carlson and Carin (2016), Preconditioned stochastic gradient Langevin dynamics for deep neural networks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import require
from priory.methods.base import Info, Plan, Traits
from priory.methods.mcmc.schedules import GradientSampler, Timetable, standard_normal, step_size
from priory.posteriors.chains import Chains

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.models.target import Target
    from priory.posteriors import Posterior

SQUARES_DECAY, SCALE_DAMPING = 0.99, 1e-5  # of the running mean of squared gradients; added to its root


@dataclass
class State:
    """Positions of the chains, and the running mean of their squared gradients per row."""

    w: Tensor  # (*B, K, P)
    squares: Tensor | None  # (*B, 1, P)
    seen: int  # gradients in the squares
    step: int
    timetable: Timetable = field(metadata={"fixed": True})


@dataclass(frozen=True)
class SGLD(GradientSampler):
    """Stochastic gradient Langevin dynamics: minibatch gradients with noise.

    `steps` in `fit` counts minibatches. There is no Metropolis correction: the bias is proportional to the learning
    rate and to the curvature per row, which is 1 / noise^2 in a regression.

    Args:
        learning_rate: Step size of gradient descent on the mean loss per row. Default: None, 0.05, or 0.01 with
            `precondition`.
        chains: Number of chains, which read the same minibatches.
        burn_in: Steps at the start that are not kept. Default: None, half of the steps; with `Cyclical()`, none,
            because the exploring part of each cycle is its burn-in.
        thin: Keep every `thin`-th draw after the burn-in. Default: None, the smallest that keeps at most 1,000 draws
            per chain.
        schedule: "constant" (default) or `Cyclical()`.
        precondition: Whether each coordinate has its own step size, as in RMSprop, learnt in the burn-in.
        start: A method such as `MAP()` or a fitted posterior to start the chains from. Default: None, the model's own
            initialisation.

    Example:
        >>> SGLD(learning_rate=0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'learning_rate' argument of SGLD must be a positive number, got 0.

    References:
        Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics.
        Li, Chen, Carlson and Carin (2016), Preconditioned stochastic gradient Langevin dynamics for deep neural
        networks.
    """

    learning_rate: float | None = None
    precondition: bool = False
    start: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.precondition, bool), "precondition", "SGLD", "be True or False", self.precondition)

    @property
    def rate(self) -> float:
        return self.learning_rate if self.learning_rate is not None else 0.01 if self.precondition else 0.05

    @property
    def traits(self) -> Traits:
        return Traits(chains=True, spread=True, trains_buffers=False)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        ok = Timetable.of(self, steps).adapts[0] or not self.precondition
        require(ok, "burn_in", "SGLD", "be 1 or more, to learn the preconditioner in", self.burn_in)
        return Plan(data, steps)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        w = self.begin(target, plan, generator, shape, start)
        squares = torch.zeros_like(w[..., :1, :]) if self.precondition else None
        return State(w, squares, 0, 0, Timetable.of(self, plan.steps))

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        now, k = state.timetable, state.timetable.place(state.step)
        value, gradient = target.log_joint_and_grad(state.w, batch)
        if state.squares is not None and now.adapts[k]:
            observe(state, gradient, target)
        noise = standard_normal(state.w, generator) if now.noisy[k] else None
        move(state, gradient, step_size(target, now.rates[k]), noise)
        state.step += 1
        return state, Info({"loss": target.loss(value.mean(-1))}, state.w if now.keeps[k] else None)

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Chains:
        return Chains.kept(target, draws, state.w)


def observe(state: State, gradient: Tensor, target: Target) -> None:
    """Add the squared gradient per row, averaged over chains, to the running mean."""
    assert state.squares is not None
    each = gradient * target.mean_loss_scale
    state.squares.lerp_(each.square().mean(-2, keepdim=True), 1 - SQUARES_DECAY)
    state.seen += 1


def preconditioner(state: State) -> Tensor | None:
    """G, (*B, 1, P); None for the identity."""
    if state.squares is None:
        return None
    unbiased = state.squares / (1 - SQUARES_DECAY**state.seen)  # the running mean starts at zero
    return 1 / (SCALE_DAMPING + unbiased.sqrt())


def move(state: State, gradient: Tensor, size: float, noise: Tensor | None) -> None:
    """Take one step in place; without noise, a step of gradient ascent."""
    metric = preconditioner(state)
    state.w.add_(gradient if metric is None else metric * gradient, alpha=size)
    if noise is not None:
        state.w.add_(noise if metric is None else metric.sqrt() * noise, alpha=math.sqrt(2 * size))
