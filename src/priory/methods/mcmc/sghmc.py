"""Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum.

    v <- (1 - a) v + e g(w) + sqrt(2 a e) xi,     w <- w + v,       g an estimate of grad log p(w, D),  xi ~ N(0, I)

with the friction a in (0, 1] and e = T rate / N on the tempered joint, as in SGLD. Friction removes the energy that
minibatch noise adds. In this order of the two updates the noise variance has to be 2 a e. On a Gaussian of precision Q
the draws then have the covariance

    Q^-1 (I - e Q / (2 (2 - a)))^-1

for any friction; the noise of an exact Ornstein-Uhlenbeck step, (2 a - a^2) e, would lower the variance by a share of
a / 2. Minibatch noise of covariance C multiplies the covariance by about 1 + e C / (2 a): lower the rate, or raise the
friction. Chen et al. subtract an estimate of C from the noise; here that estimate is zero, as is their default. A chain
needs about 1 / a steps to change direction, and a friction of 1 gives SGLD. Cost of a step: one pass of the network,
and O(P) per chain.

References:
    Chen, Fox and Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo.
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


@dataclass
class State:
    """Positions and velocities of the chains."""

    w: Tensor  # (*B, K, P)
    v: Tensor  # (*B, K, P)
    step: int
    timetable: Timetable = field(metadata={"fixed": True})


@dataclass(frozen=True)
class SGHMC(GradientSampler):
    """Stochastic gradient Hamiltonian Monte Carlo: minibatch gradients with momentum, friction and noise.

    `steps` in `fit` counts minibatches. There is no Metropolis correction: lower the rate to lower the bias.

    Args:
        learning_rate: Step size of gradient descent with momentum 1 - `friction` on the mean loss per row. Default:
            0.01.
        chains: Number of chains, which read the same minibatches.
        burn_in: Steps at the start that are not kept. Default: None, half of the steps; with `Cyclical()`, none,
            because the exploring part of each cycle is its burn-in.
        thin: Keep every `thin`-th draw after the burn-in. Default: None, the smallest that keeps at most 1,000 draws
            per chain.
        schedule: "constant" (default) or `Cyclical()`.
        friction: Friction a, above 0 and at most 1. Default: 0.1.
        start: A method such as `MAP()` or a fitted posterior to start the chains from. Default: None, the model's own
            initialisation.

    Example:
        >>> SGHMC(friction=0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'friction' argument of SGHMC must be a number above 0, up to 1, got 0.

    References:
        Chen, Fox and Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo.
    """

    learning_rate: float = 0.01
    friction: float = 0.1
    start: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.friction, (int, float)) and not isinstance(self.friction, bool)
        ok = number and 0 < self.friction <= 1
        require(ok, "friction", "SGHMC", "be a number above 0, up to 1", repr(self.friction))

    @property
    def rate(self) -> float:
        return self.learning_rate

    @property
    def traits(self) -> Traits:
        return Traits(chains=True, spread=True, trains_buffers=False)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        Timetable.of(self, steps)  # raises if the options leave no draw to keep
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
        table = Timetable.of(self, plan.steps)
        v = math.sqrt(step_size(target, table.rates[0])) * standard_normal(w, generator)
        return State(w, v, 0, table)

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        now, k = state.timetable, state.timetable.place(state.step)
        value, gradient = target.log_joint_and_grad(state.w, batch)
        size = step_size(target, now.rates[k])
        state.v.mul_(1 - self.friction).add_(gradient, alpha=size)
        if now.noisy[k]:
            state.v.add_(standard_normal(state.v, generator), alpha=math.sqrt(2 * self.friction * size))
        state.w.add_(state.v)
        state.step += 1
        return state, Info({"loss": target.loss(value.mean(-1))}, state.w if now.keeps[k] else None)

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Chains:
        return Chains.kept(target, draws, state.w)
