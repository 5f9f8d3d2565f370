"""Stochastic gradient Langevin dynamics: gradient ascent on the log joint with noise.

    w <- w + e g(w) + sqrt(2 e) xi,       g an estimate of grad log p(w, D) from a minibatch,  xi ~ N(0, I)

With e = T rate / N and the joint tempered, the noise has the variance 2 T rate / N. There is no Metropolis correction,
so the draws have an error of O(e): on a Gaussian of precision Q their covariance is Q^-1 (I - e Q / 2)^-1, and
minibatch noise of covariance C adds about e C Q^-1 / 2. Halving the rate halves both. All chains read the same
minibatches.

With `precondition`, each coordinate has its own step size, as in RMSprop (Li, Chen, Carlson and Carin 2016):

    w <- w + e G g + sqrt(2 e G) xi,      G = 1 / (1e-5 + sqrt(V)),    V <- 0.99 V + 0.01 (g / N)^2

V is averaged over chains and is updated only while no draws are kept. If the learning rate is read from the target, V
starts again after a quarter of the burn-in, because gradients on the way from the start are larger than later ones. A G
that changed with w would need its divergence added, which Li et al. leave out; a constant G needs no such term. Cost of
a step: one pass of the network, and O(P) per chain.

References:
    Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics.
    Li, Chen, Carlson and Carin (2016), Preconditioned stochastic gradient Langevin dynamics for deep neural networks.
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

SQUARES_DECAY, SCALE_DAMPING = 0.99, 1e-5  # of the running mean of squared gradients; added to its root


@dataclass
class SGLDState:
    """Positions of the chains, and the running mean of their squared gradients per row."""

    w: Tensor  # (*B, K, P)
    squares: Tensor | None  # (*B, 1, P)
    seen: int  # gradients in the squares
    step: int
    read: ReadRate | None  # None if the learning rate was given
    timetable: Timetable = field(metadata={"fixed": True})


@dataclass(frozen=True)
class SGLD(GradientSampler):
    """Stochastic gradient Langevin dynamics: minibatch gradients with noise.

    `steps` in `fit` counts minibatches. There is no Metropolis correction: the bias is proportional to the learning
    rate and to the curvature per row, which is 1 / noise^2 in a regression.

    Args:
        precondition: Whether each coordinate has its own step size, as in RMSprop, learnt in the burn-in. Default:
            False.
        start: A method such as `MAP()` or a fitted posterior to start the chains from. Default: None, the model's own
            initialisation.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.SGLD(), steps=1000, progress=False)
        >>> round(posterior.mean["weight"].item(), 1)
        1.0

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
    def traits(self) -> Traits:
        return Traits(chains=True, spread=True, trains_buffers=False, empirical_priors=False)

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
    ) -> SGLDState:
        w = self.begin(target, plan, generator, shape, start)
        squares = torch.zeros_like(w[..., :1, :]) if self.precondition else None
        state = SGLDState(w, squares, 0, 0, None, Timetable.of(self, plan.steps))
        state.read = self.read_rate(target, plan, w, state.timetable, 1.0, lambda g: at_first(state, g, target))
        return state

    def step(
        self, target: Target, state: SGLDState, batch: Batch, generator: torch.Generator
    ) -> tuple[SGLDState, Info]:
        now, k = state.timetable, state.timetable.place(state.step)
        value, gradient = target.log_joint_and_grad(state.w, batch)
        if state.squares is not None and now.adapts[k]:
            if state.read is not None and k == now.restart:
                forget(state)
            observe(state, gradient, target)
        if state.read is not None and now.adapts[k]:
            metric = preconditioner(state)
            scale = None if metric is None else metric.sqrt()
            reads = now.reads[k], k == now.restart
            value, gradient, _ = state.read.follow(target, state.w, value, gradient, batch, *reads, scale)
            if now.reads[k]:
                state.read.choose(1.0, now.sampling if now.settles[k] else None)
        noise = standard_normal(state.w, generator) if now.noisy[k] else None
        move(state, gradient, step_size(target, now.rates[k], state.read), noise)
        state.step += 1
        return state, Info(metrics(target, value, state.read), state.w if now.keeps[k] else None)

    def posterior(self, target: Target, state: SGLDState, draws: Tensor | None = None) -> Chains:
        chains = Chains.kept(target, draws, state.w)
        status = None if state.read is None else state.read.status(1.0)
        if status is not None:
            chains.know(status)
        return chains


def observe(state: SGLDState, gradient: Tensor, target: Target) -> None:
    """Add the squared gradient per row, averaged over chains, to the running mean."""
    assert state.squares is not None
    each = gradient * target.mean_loss_scale
    state.squares.lerp_(each.square().mean(-2, keepdim=True), 1 - SQUARES_DECAY)
    state.seen += 1


def forget(state: SGLDState) -> None:
    """Drop the squared gradients so far: those on the way from the start may be many times larger than later ones."""
    assert state.squares is not None
    state.squares.zero_()
    state.seen = 0


def at_first(state: SGLDState, gradient: Tensor, target: Target) -> Tensor | None:
    """The square root of the preconditioner that the first gradient would give, (*B, 1, P); None for the identity."""
    if state.squares is None:
        return None
    trial = SGLDState(state.w, torch.zeros_like(state.squares), 0, 0, None, state.timetable)
    observe(trial, gradient, target)
    metric = preconditioner(trial)
    assert metric is not None
    return metric.sqrt()


def preconditioner(state: SGLDState) -> Tensor | None:
    """G, (*B, 1, P); None for the identity."""
    if state.squares is None:
        return None
    unbiased = state.squares / (1 - SQUARES_DECAY**state.seen)  # the running mean starts at zero
    return 1 / (SCALE_DAMPING + unbiased.sqrt())


def move(state: SGLDState, gradient: Tensor, size: float | Tensor, noise: Tensor | None) -> None:
    """Take one step in place; without noise, a step of gradient ascent."""
    metric = preconditioner(state)
    size = size if metric is None else size * metric
    state.w.add_(size * gradient)
    if noise is not None:
        state.w.add_((2 * size) ** 0.5 * noise)
