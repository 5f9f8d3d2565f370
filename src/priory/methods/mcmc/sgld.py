"""Stochastic gradient Langevin dynamics (Welling and Teh 2011): gradient ascent on the log joint, with as much noise
as makes its draws the posterior's.

    w <- w + e g(w) + sqrt(2 e) xi,       g an estimate of grad log p(w, D) from a minibatch,  xi ~ N(0, I)

With e = T rate / N and the joint tempered, the noise has the variance 2 T rate / N. There is no Metropolis correction,
so that draws are wrong by O(e): on a Gaussian of precision Q their covariance is Q^-1 (I - e Q / 2)^-1, and minibatch
noise of covariance C adds about e C Q^-1 / 2. Halve the rate to halve both. All chains read the same minibatches.

With `precondition`, each coordinate has a step of its own, as in RMSprop (Li, Chen, Carlson and Carin 2016):

    w <- w + e G g + sqrt(2 e G) xi,      G = 1 / (1e-5 + sqrt(V)),    V <- 0.99 V + 0.01 (g / N)^2

V is the mean over chains, and moves only while nothing is drawn. A G that moved with w would need its divergence added,
which Li et al. leave out; one that stays needs none. Cost of a step: one pass of the network and O(P) a chain.
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

DECAY, DAMPING = 0.99, 1e-5


@dataclass
class State:
    """Where the chains are, and the running squares of their gradients a datum."""

    w: Tensor  # (*B, K, P)
    squares: Tensor | None  # (*B, 1, P)
    seen: int  # gradients in the squares
    step: int
    timetable: Timetable = field(metadata={"fixed": True})


@dataclass(frozen=True)
class SGLD(GradientSampler):
    """Stochastic gradient Langevin dynamics; `steps` of the fit count minibatches.

    `learning_rate` is that of gradient descent on the loss a datum (0.05 unless given, and 0.01 with `precondition`).
    The error that it leaves is proportional to it and to the curvature a datum, which is 1 / noise^2 in a regression.
    Of each of `chains` the draws after `burn_in` steps (half of them, unless given) are kept, every `thin`-th (as many
    as leave 1,000, unless given). `schedule` is "constant" or `Cyclical()`.

    >>> SGLD(learning_rate=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'learning_rate' argument of SGLD must be a positive number, got 0.
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
    """Add a gradient a datum to the running squares, the mean over chains."""
    assert state.squares is not None
    each = gradient * target.mean_loss_scale
    state.squares.lerp_(each.square().mean(-2, keepdim=True), 1 - DECAY)
    state.seen += 1


def preconditioner(state: State) -> Tensor | None:
    """G, (*B, 1, P); None for the identity."""
    if state.squares is None:
        return None
    unbiased = state.squares / (1 - DECAY**state.seen)  # they begin at zero
    return 1 / (DAMPING + unbiased.sqrt())


def move(state: State, gradient: Tensor, size: float, noise: Tensor | None) -> None:
    """One step in place; without noise, one of gradient ascent."""
    metric = preconditioner(state)
    state.w.add_(gradient if metric is None else metric * gradient, alpha=size)
    if noise is not None:
        state.w.add_(noise if metric is None else metric.sqrt() * noise, alpha=math.sqrt(2 * size))
