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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import require
from priory.methods.base import Info, Plan, Traits
from priory.methods.mcmc.learning_rates import ReadRate, metrics
from priory.methods.mcmc.schedules import GradientSampler, Timetable, standard_normal, step_size
from priory.posteriors.chains import Chains

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.models.target import Target
    from priory.posteriors import Posterior


@dataclass
class SGHMCState:
    """Positions and velocities of the chains."""

    w: Tensor  # (*B, K, P)
    v: Tensor  # (*B, K, P)
    step: int
    read: ReadRate | None  # None if the learning rate was given
    timetable: Timetable = field(metadata={"fixed": True})


@dataclass(frozen=True)
class SGHMC(GradientSampler):
    """Stochastic gradient Hamiltonian Monte Carlo: minibatch gradients with momentum, friction and noise.

    `steps` in `fit` counts minibatches. There is no Metropolis correction: lower the rate to lower the bias.

    Args:
        learning_rate: Step size of gradient descent with momentum 1 - `friction` on the mean loss per row. Default:
            None, read from the curvature and the gradient noise of the target in the burn-in.
        friction: Friction a, above 0 and at most 1. Default: 0.1.
        start: A method such as `MAP()` or a fitted posterior to start the chains from. Default: None, the model's own
            initialisation.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.SGHMC(), steps=1000, progress=False)
        >>> round(posterior.mean["weight"].item(), 1)
        1.0

    References:
        Chen, Fox and Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo.
    """

    learning_rate: float | None = None
    friction: float = 0.1
    start: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.friction, (int, float)) and not isinstance(self.friction, bool)
        ok = number and 0 < self.friction <= 1
        require(ok, "friction", "SGHMC", "be a number above 0, up to 1", repr(self.friction))

    @property
    def traits(self) -> Traits:
        return Traits(chains=True, spread=True, trains_buffers=False, empirical_priors=False)

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
    ) -> SGHMCState:
        w = self.begin(target, plan, generator, shape, start)
        table = Timetable.of(self, plan.steps)
        read = self.read_rate(target, plan, w, table, self.friction)
        size = step_size(target, table.rates[0], read)
        v = size**0.5 * standard_normal(w, generator)
        return SGHMCState(w, v, 0, read, table)

    def step(
        self, target: Target, state: SGHMCState, batch: Batch, generator: torch.Generator
    ) -> tuple[SGHMCState, Info]:
        now, k = state.timetable, state.timetable.place(state.step)
        value, gradient = target.log_joint_and_grad(state.w, batch)
        if state.read is not None and now.adapts[k]:
            reads = now.reads[k], k == now.restart
            value, gradient, exploded = state.read.follow(target, state.w, value, gradient, batch, *reads)
            state.v.masked_fill_(exploded, 0.0)
            if now.reads[k]:
                state.read.choose(self.friction, now.sampling if now.settles[k] else None)
        size = step_size(target, now.rates[k], state.read)
        state.v.mul_(1 - self.friction).add_(size * gradient)
        if now.noisy[k]:
            state.v.add_((2 * self.friction * size) ** 0.5 * standard_normal(state.v, generator))
        state.w.add_(state.v)
        state.step += 1
        return state, Info(metrics(target, value, state.read), state.w if now.keeps[k] else None)

    def posterior(self, target: Target, state: SGHMCState, draws: Tensor | None = None) -> Chains:
        chains = Chains.kept(target, draws, state.w)
        status = None if state.read is None else state.read.status(self.friction)
        if status is not None:
            chains.know(status)
        return chains
