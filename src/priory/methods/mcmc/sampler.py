"""The base of the exact samplers: all chains as one batch, a shared warm-up, and checks of the result.

Samplers differ only in their `transition`. All chains take it together, (*B, K, P), because on a small problem 256
chains cost little more than one. The warm-up learns a step size, a metric and, for HMC, a trajectory length from all
chains of a member, which then share them. After the warm-up nothing changes any more, so the draws are exact.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.draw_policy import DrawPolicy
from priory.methods.mcmc.adaptation import Length, Moments, StepSize, first_step, windows
from priory.methods.mcmc.drift import refuse_drift, warn_of_divergences, warn_of_drift
from priory.methods.mcmc.integrators import integrate, kinetic
from priory.methods.mcmc.joint import log_joint, values_alone
from priory.methods.mcmc.metrics import METRICS, Metric
from priory.methods.mcmc.starts import begin, from_prior, learnt_from, refuse_discrete, refuse_improper, replaced
from priory.models.base import has_network
from priory.posteriors.chains import Chains
from priory.posteriors.status import Status

if TYPE_CHECKING:
    from os import PathLike

    from priory.core.data import Data
    from priory.methods.mcmc.joint import Joint
    from priory.models.target import Target
    from priory.posteriors import Posterior

DIVERGENCE_NATS = 1000.0  # energy error at which a trajectory counts as divergent
MAX_CHAINS, MIN_CHAINS = 256, 4
SHORT_WARMUP_CHAINS = 16  # from this many on a short warm-up suffices, and a full covariance can be learnt
SHORTEST_WARMUP_CHAINS = 128  # from this many on a still shorter warm-up suffices
MAX_DENSE_COORDINATES = 128  # up to this many a full covariance is learnt
MEMORY_LIMIT_NUMBERS = 1 << 24  # rows or draws x coordinates x chains
CHECK_EVERY = 10  # transitions between two checks for stuck or drifting chains
STUCK_CHAIN_NATS = (20.0, 5.0)  # a chain is stuck this far below the median chain: a constant, and per coordinate
COUNTED_METRICS = ("divergences",)
UNCHECKED_METRICS = ("acceptance", "step_size", "divergences", "gradients")  # not finite for a chain without a density


@dataclass(frozen=True)
class Move:
    """The result of one transition: the new position of each chain, and its statistics, (*B, K)."""

    w: Tensor  # (*B, K, P)
    value: Tensor
    gradient: Tensor  # (*B, K, P)
    acceptance: Tensor  # the probability with which the proposal was taken, or its mean over a trajectory
    energy: Tensor  # of the state that was kept, with its momentum
    divergent: Tensor
    steps: Tensor  # gradients, or values where there is no gradient
    depth: Tensor | None = None  # of a tree
    slope: Tensor | None = None  # of the trajectory length's criterion, (*B,)


@dataclass
class State:
    """The position of each chain, and everything that the warm-up has learnt."""

    w: Tensor  # (*B, K, P)
    value: Tensor  # log p(w, D), (*B, K)
    gradient: Tensor  # (*B, K, P)
    metric: Metric
    moments: Moments
    step_size: StepSize
    length: Length
    statistics: dict[str, Tensor]  # (*B, K, S), one value per kept draw
    buffers: dict[str, Tensor]
    step: int
    warmup: int
    scaled: bool  # whether the metric has been learnt
    joint: Joint = field(metadata={"fixed": True})


@dataclass(frozen=True)
class Sampler(Options):
    """Base class of the samplers that correct every transition by Metropolis' rule.

    Args:
        chains: Number of chains, which move together as one batch. Default: None, a power of two between 4 and 256
            that the size of the problem allows.
        warmup: Number of warm-up transitions, which are not kept. Default: None, 900, 300 or 200 for fewer than
            16, 16 to 127, and 128 or more chains.
        thin: Keep every `thin`-th draw after the warm-up. `steps` in `fit` counts kept draws per chain.
        accept: Mean acceptance probability that the step size is tuned to, between 0 and 1. Default: 0.95.
        metric: Form of the covariance that rescales the parameters: "diagonal", "dense" or "low_rank". Default: None,
            "dense" for at least 16 chains and at most 128 parameters, otherwise "diagonal".
        compile: Whether to compile the log density with `torch.compile`. Compiling takes 10 to 60 seconds and needs a
            C++ compiler; it about halves the time of a gradient of a small density.
        until_ess: Stop before `steps` draws once the smallest bulk effective sample size of all coordinates reaches
            this number. Default: None, never.
        store: Folder for the draws, where they don't fit into memory. Default: None, they are kept in memory.
        start: Where the chains start: None for the model's own initialisation, "prior" for draws from the model's
            prior, a method such as `Pathfinder()` or a fitted posterior for draws from its result.
    """

    chains: int | None = None
    warmup: int | None = None
    thin: int = 1
    accept: float = 0.95
    metric: Literal["diagonal", "dense", "low_rank"] | None = None
    compile: bool = False
    until_ess: float | None = None
    store: str | PathLike[str] | None = None
    start: Any = None

    draws: ClassVar[int] = 500
    slopes: ClassVar[bool] = True  # whether it uses gradients
    patience: ClassVar[tuple[int, int, int]] = (900, 300, 200)  # warm-up steps: below 16, below 128, from 128 chains

    def __post_init__(self) -> None:
        name = type(self).__name__
        for option, least in (("chains", 1), ("warmup", 0)):
            value = getattr(self, option)
            ok = value is None or is_integer(value, least)
            require(ok, option, name, f"be an integer >= {least}", value)
        require(is_integer(self.thin, 1), "thin", name, "be an integer >= 1", self.thin)
        ok = isinstance(self.accept, float) and 0 < self.accept < 1
        require(ok, "accept", name, "be a number between 0 and 1", self.accept)
        require(self.metric in (None, *METRICS), "metric", name, f"be one of {', '.join(METRICS)}", self.metric)
        require(isinstance(self.compile, bool), "compile", name, "be True or False", self.compile)
        ok = not isinstance(self.start, (str, dict)) or self.start == "prior"
        require(ok, "start", name, "be 'prior', a method or a posterior", repr(self.start))

    @property
    def traits(self) -> Traits:
        return Traits(
            reads="pass",
            own_start=True,
            chains=True,
            spread=True,
            draws=DrawPolicy(self.until_ess, self.store),
            trains_buffers=False,
            empirical_priors=False,
        )

    def length(self, data: Data) -> int:
        return self.draws

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        return Plan(data, self._warmup(target) + steps * self.thin)

    def _warmup(self, target: Target) -> int:
        if self.warmup is not None:
            return int(self.warmup)
        chains = self._chains(target)
        return self.patience[(chains >= SHORT_WARMUP_CHAINS) + (chains >= SHORTEST_WARMUP_CHAINS)]

    def _chains(self, target: Target) -> int:
        return int(self.chains or number_of_chains(target))

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        name = type(self).__name__
        if not self.slopes:
            target = target.of_model(target.model.values_only())
        lead = torch.Size([*shape, self._chains(target)])
        if self.start == "prior":
            w = from_prior(target, lead, generator, name)
        else:
            w = target.start(plan.data, lead, generator, start)
        joint = log_joint(target, plan.data, w, self.compile)
        joint = joint if self.slopes else values_alone(joint)
        w, value, gradient = begin(joint, w, target, name)
        if self.slopes and not has_network(target.model):
            refuse_discrete(target.model, joint, w, value, gradient, name)
        refuse_improper(target, joint, w, value, name)
        warmup = self._warmup(target)
        few = lead[-1] >= SHORT_WARMUP_CHAINS and w.shape[-1] <= MAX_DENSE_COORDINATES
        metric = METRICS[self.metric or ("dense" if few else "diagonal")]
        kept = max(0, plan.steps - warmup) // self.thin
        near = None if start is None else learnt_from(start, metric.__name__, w, generator)
        state = State(
            w,
            value,
            gradient,
            metric=metric.unit(w) if near is None else metric.unit(w).learnt(near),
            moments=Moments.none(w, metric.__name__),
            step_size=StepSize.at(torch.ones(shape, dtype=w.dtype, device=w.device)),
            length=Length.at(torch.ones(shape, dtype=w.dtype, device=w.device)),
            statistics=blank_statistics(value, kept, self.trees),
            buffers=target.buffers(),
            step=0,
            warmup=warmup,
            scaled=near is not None,
            joint=joint,
        )
        self.restart(state, generator)
        return state

    trees: ClassVar[bool] = False

    @abstractmethod
    def transition(self, state: State, generator: torch.Generator) -> Move:
        """Move every chain once."""

    def acceptance_of(self, state: State, noise: Tensor, step: Tensor) -> Tensor:
        """The mean acceptance probability of a single step of this size, (*B,)."""
        p = state.metric.momentum(noise)
        energy = kinetic(state.metric, p) - state.value
        _, p, value, _ = integrate("leapfrog", state.joint, state.metric, state.w, p, state.gradient, wide(step))
        return probability(energy - kinetic(state.metric, p) + value).mean(-1)

    def restart(self, state: State, generator: torch.Generator, learnt: bool = False) -> None:
        """Search for a step size anew, at the start and after the metric has changed.

        A trajectory length that was `learnt` is kept if it is longer than the initial one: another metric of the same
        posterior hardly changes its unit, and the rest of the warm-up is short.
        """
        noise = normal(state.w, generator)
        step = first_step(lambda e: self.acceptance_of(state, noise, e), state.step_size.log.exp())
        state.step_size = StepSize.at(step)
        # with unit scales a half-turn takes pi; before the metric is learnt, use a few steps
        first = torch.full_like(step, math.pi / 2) if state.scaled else 8 * step
        length = torch.maximum(state.length.log.exp(), first) if learnt else first
        state.length = Length.at(torch.maximum(length, 2 * step))

    def step(self, target: Target, state: State, batch: Data, generator: torch.Generator) -> tuple[State, Info]:
        move = self.transition(state, generator)
        state.w, state.value, state.gradient = move.w, move.value, move.gradient
        accepted = move.acceptance.mean(-1)
        metrics: dict[str, Tensor | float] = {
            "acceptance": accepted,
            "step_size": state.step_size.log.exp(),
            "divergences": move.divergent.sum(-1).to(accepted.dtype),
            "gradients": move.steps.to(accepted.dtype).mean(-1),
        }
        if state.step < state.warmup:
            self.adapt(target, state, move, accepted, generator)
        kept, rest = divmod(state.step - state.warmup, self.thin)
        if kept >= 0:
            state.statistics["divergent"][..., kept] |= move.divergent  # thinned transitions count too
        state.step += 1
        if state.step % CHECK_EVERY == 0:
            refuse_drift(target, state.w, type(self).__name__)
        if state.step <= state.warmup or rest != self.thin - 1:
            return state, Info(metrics, counts=COUNTED_METRICS, unchecked=UNCHECKED_METRICS)
        write(state.statistics, move, kept)
        return state, Info(metrics, draw=state.w, counts=COUNTED_METRICS, unchecked=UNCHECKED_METRICS)

    def adapt(self, target: Target, state: State, move: Move, accepted: Tensor, generator: torch.Generator) -> None:
        """Learn from one transition of the warm-up."""
        state.step_size.record(accepted, self.accept, self.furthest(state))
        if move.slope is not None:
            step = state.step_size.log.exp()
            state.length.record(move.slope, step / 2, self.longest * step)
        ends, now = windows(state.warmup), state.step + 1
        if ends and (now in (ends[0] // 2, ends[0]) or (now < ends[0] and now % CHECK_EVERY == 0)):
            rescue(state)  # before moments are first recorded, and before the metric is learnt
        if ends and ends[0] // 2 < now <= ends[-1]:
            state.moments.record(state.w)
        if now in ends:
            learnt = state.scaled
            state.metric, state.scaled = state.metric.learnt(state.moments), True
            self.restart(state, generator, learnt)
            state.moments = Moments.none(state.w, type(state.metric).__name__)
        if now == state.warmup:
            state.step_size.settle()
            state.length.settle()

    longest: ClassVar[int] = 1000  # steps of a trajectory

    def furthest(self, state: State) -> Tensor:
        """An upper limit of the step size, (*B,)."""
        return torch.full_like(state.step_size.log, math.inf)

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Chains:
        if draws is None:  # before the first draw: the current positions
            return Chains(target, state.w.flatten(0, -2)[:, None, :], state.buffers, {})
        kept = draws.shape[-2]
        w = draws.flatten(0, -3)
        statistics = {name: s[..., :kept].flatten(0, -2) for name, s in state.statistics.items()}
        planned = state.warmup + self.thin * next(iter(state.statistics.values())).shape[-1]
        drift = ""
        if state.step >= planned or self.until_ess is not None:
            drift = warn_of_drift(target, w, type(self).__name__)
            warn_of_divergences(target, w, statistics["divergent"], type(self).__name__, self.accept)
        found = Chains(target, w, state.buffers, statistics, momenta=self.slopes)
        if drift:
            found.know(Status("not_converged", drift), warned=True)
        return found


# The number of chains, and the replacement of stuck ones.


def number_of_chains(target: Target) -> int:
    """The default number of chains: 256 on small problems, 4 on large ones, a power of two between."""
    work = target.size * max(Sampler.draws, target.num_data or 1)
    return max(MIN_CHAINS, min(MAX_CHAINS, 1 << max(0, (MEMORY_LIMIT_NUMBERS // work).bit_length() - 1)))


def rescue(state: State) -> None:
    """Replace stuck chains, whose density is hopelessly below the median chain's, by copies of other chains.

    This happens only in the warm-up. A few chains that never move would otherwise stay stuck, because the step size
    adapts to the mean acceptance of all chains.
    """
    middle = state.value.nanmedian(-1, keepdim=True).values
    alive = state.value > middle - (STUCK_CHAIN_NATS[0] + STUCK_CHAIN_NATS[1] * state.w.shape[-1])
    alive |= ~torch.isfinite(middle)  # a member without a density has no chain to copy
    if not bool(alive.all()):
        state.w, state.value, state.gradient = replaced(alive, state.w, state.value, state.gradient)


# The parts of a transition.


def normal(w: Tensor, generator: torch.Generator) -> Tensor:
    """Draw standard normal noise in the shape of w."""
    return torch.randn(w.shape, generator=generator, dtype=w.dtype, device=w.device)


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw uniform noise on (0, 1) in the shape of a tensor."""
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def wide(step: Tensor) -> Tensor:
    """Reshape one value per member, (*B,), to broadcast with vectors (*B, K, P)."""
    return step[..., None, None]


def probability(log_ratio: Tensor) -> Tensor:
    """min(1, exp(log_ratio)); zero where it is NaN, or where the current point has no density."""
    return torch.where(log_ratio < math.inf, log_ratio.exp().clamp(max=1.0), 0.0)


def metropolis(
    state: State,
    proposal: tuple[Tensor, Tensor, Tensor],
    before: Tensor,
    after: Tensor,
    steps: Tensor,
    generator: torch.Generator,
) -> Move:
    """Accept a proposal (w, log p, gradient) with probability min(1, exp(before - after)) of energies (*B, K)."""
    w, value, gradient = proposal
    ratio = before - after
    acceptance = probability(ratio)
    taken = uniform(ratio, generator) < acceptance
    rows = taken[..., None]
    return Move(
        torch.where(rows, w, state.w),
        torch.where(taken, value, state.value),
        torch.where(rows, gradient, state.gradient),
        acceptance,
        torch.where(taken, after, before),
        torch.zeros_like(taken),
        steps,
    )


# Statistics of the draws.


def blank_statistics(value: Tensor, kept: int, trees: bool) -> dict[str, Tensor]:
    """Allocate one value of each statistic per draw, (*B, K, S)."""
    room = value.new_zeros(*value.shape[:-1], kept, value.shape[-1]).mT  # the chains of one draw are contiguous
    found = {"energy": room, "acceptance": room.clone(), "divergent": room.bool(), "steps": room.int()}
    return {**found, "tree_depth": room.int()} if trees else found


def write(statistics: dict[str, Tensor], move: Move, kept: int) -> None:
    """Record the statistics of a kept draw, except for its divergence."""
    statistics["energy"][..., kept] = move.energy
    statistics["acceptance"][..., kept] = move.acceptance
    statistics["steps"][..., kept] = move.steps
    if move.depth is not None:
        statistics["tree_depth"][..., kept] = move.depth
