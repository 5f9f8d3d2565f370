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
from priory.methods.draw_policy import DrawPolicy, superchain_ids
from priory.methods.mcmc.adaptation import Length, StepSize, first_step
from priory.methods.mcmc.drift import refuse_drift, separate_regions, warn_of_divergences, warn_of_drift
from priory.methods.mcmc.integrators import integrate, kinetic
from priory.methods.mcmc.joint import cost_of_gradient, log_joint, values_alone
from priory.methods.mcmc.metrics import METRICS, Metric
from priory.methods.mcmc.moves import Move, blank_statistics, write
from priory.methods.mcmc.population import Window, ascend, disperse, leave_negligible_modes, momentum_tail
from priory.methods.mcmc.starts import begin, from_prior, learnt_from, refuse_discrete, refuse_improper, side_by_side
from priory.methods.mcmc.warmup import MAX_CHAINS, Warmup, number_of_chains, settled
from priory.methods.point.map import MAP
from priory.models.base import has_network
from priory.posteriors.chains import Chains
from priory.posteriors.function_space import function_space, hidden_layers
from priory.posteriors.status import Status

if TYPE_CHECKING:
    from os import PathLike

    from priory.core.data import Data
    from priory.methods.mcmc.joint import Joint
    from priory.models.target import Target
    from priory.posteriors import Posterior
    from priory.posteriors.function_space import FunctionSpace

DIVERGENCE_NATS = 1000.0  # energy error at which a trajectory counts as divergent
MAX_DENSE_COORDINATES = 256  # up to this many a full covariance is learnt, given an eighth as many chains
CHECK_EVERY = 10  # transitions between two checks for drifting chains
MAX_WARMUP_STEPS = 640
MIN_DRAWS = 32  # of each chain, however long trajectories are
UNSETTLED_DRAWS = 250  # of each chain, where the chains have not settled and the user gave no number
MAX_LEAPFROGS = 20_000  # steps of all trajectories of a fit whose length the user has not given; half for its warm-up
MAX_NETWORK_LEAPFROGS = 200_000  # the same, for a network
DENSITY_EFFICIENCY, NETWORK_EFFICIENCY = 0.1, 0.6  # effective draws per transition, from which the chains are counted
START_MEMBERS = 8  # of an ensemble that chains of a deep network start from, one or more per superchain
ROOM_DRAWS = 256  # draws for whose statistics there is room at first
COUNTED_METRICS = ("divergences",)
UNCHECKED_METRICS = ("acceptance", "step_size", "divergences", "gradients")  # not finite for a chain without a density


@dataclass
class State:
    """The position of each chain, and everything that the warm-up has learnt."""

    w: Tensor  # (*B, K, P)
    value: Tensor  # log p(w, D), (*B, K)
    gradient: Tensor  # (*B, K, P)
    metric: Metric
    window: Window
    step_size: StepSize
    length: Length
    warmup: Warmup
    statistics: dict[str, Tensor]  # (*B, K, S), one value per kept draw
    buffers: dict[str, Tensor]
    step: int  # transitions taken
    drawn: int  # of them after the warm-up
    wanted: int  # draws of each chain, at most
    open_ended: bool  # whether fewer draws may be enough
    tail: Tensor | None  # of the momenta, (*B, 1); None where they are normal
    leapfrogs: int  # steps of all trajectories so far, each as long as the longest of the chains
    joint: Joint = field(metadata={"fixed": True})
    functions: FunctionSpace | None = field(metadata={"fixed": True})  # by which chains of a network are compared


@dataclass(frozen=True)
class Sampler(Options):
    """Base class of the samplers that correct every transition by Metropolis' rule.

    Args:
        chains: Number of chains, which move together as one batch. Default: None, a power of two between 16 and 256,
            fewer the more a gradient costs.
        warmup: Number of warm-up transitions, which are not kept. Default: None, until the chains have settled, at most
            640.
        thin: Keep every `thin`-th draw after the warm-up. `steps` in `fit` counts kept draws per chain. Default: 1.
        accept: Mean acceptance probability that the step size is tuned to, between 0 and 1. Default: None, 0.8, and up
            to 0.95 if transitions of the warm-up diverge.
        metric: Form of the covariance that rescales the parameters: "diagonal", "dense" or "low_rank". Default: None,
            "diagonal" for a network with hidden layers, "dense" for at most 256 parameters and at most 8 per chain,
            otherwise "low_rank".
        compile: Whether to compile the log density with `torch.compile`. Compiling takes 10 to 60 seconds and needs a
            C++ compiler; it about halves the time of a gradient of a small density. Default: False.
        until_ess: Stop once the smallest bulk effective sample size of all coordinates, or of a network's predictions
            at training inputs, reaches this number, or after `steps` draws. Default: None, after `steps` draws; and
            without `steps`, once the effective sample sizes are 1,000 and in the tails 400, and nested R-hat is below
            1.01.
        store: Folder for the draws, where they don't fit into memory. Default: None, they are kept in memory.
        start: Where the chains start: "prior" for draws from the model's prior; a method such as `Pathfinder()`, or a
            fitted posterior, for draws from its result. Default: None, the model's own initialisation, or for a network
            with more than one hidden layer the members of `Ensemble(MAP())`.
    """

    chains: int | None = None
    warmup: int | None = None
    thin: int = 1
    accept: float | None = None
    metric: Literal["diagonal", "dense", "low_rank"] | None = None
    compile: bool = False
    until_ess: float | None = None
    store: str | PathLike[str] | None = None
    start: Any = None

    draws: ClassVar[int] = 2000
    slopes: ClassVar[bool] = True  # whether it uses gradients
    longest_warmup: ClassVar[int] = MAX_WARMUP_STEPS
    acceptances: ClassVar[tuple[float, ...]] = (0.8, 0.9, 0.95)  # tried in turn while transitions diverge

    def __post_init__(self) -> None:
        name = type(self).__name__
        for option, least in (("chains", 1), ("warmup", 0)):
            value = getattr(self, option)
            ok = value is None or is_integer(value, least)
            require(ok, option, name, f"be an integer >= {least}", value)
        require(is_integer(self.thin, 1), "thin", name, "be an integer >= 1", self.thin)
        ok = self.accept is None or (isinstance(self.accept, float) and 0 < self.accept < 1)
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
            draws=DrawPolicy(self.until_ess, self.store, stops_early=True),
            trains_buffers=False,
            empirical_priors=False,
        )

    def default_start(self, model: Any) -> Any:
        """An ensemble of modes for a network with several hidden layers, which chains would take long to find."""
        if not has_network(model) or hidden_layers(model) < 2 or self.warmup == 0:
            return None
        from priory.methods.ensemble.ensemble import Ensemble

        return Ensemble(MAP(), size=START_MEMBERS)

    def length(self, data: Data) -> int:
        return self.draws

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        return Plan(data, self._longest_warmup() + steps * self.thin)

    def _longest_warmup(self) -> int:
        return self.longest_warmup if self.warmup is None else int(self.warmup)

    def _metric(self, chains: int, size: int, symmetric: bool) -> type[Metric]:
        dense = size <= min(MAX_DENSE_COORDINATES, 8 * chains)
        # a covariance across mirror images of a posterior fits none of them
        return METRICS[self.metric or ("diagonal" if symmetric else "dense" if dense else "low_rank")]

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
        lead = torch.Size([*shape, int(self.chains or MAX_CHAINS)])
        if self.start == "prior":
            w = from_prior(target, lead, generator, name)
        else:
            w = target.start(plan.data, lead, generator, start)
            w = w if start is None else side_by_side(w, len(getattr(start, "members", ())))
        if self.chains is None:
            efficiency = NETWORK_EFFICIENCY if has_network(target.model) else DENSITY_EFFICIENCY
            chains = number_of_chains(cost_of_gradient(target, plan.data, w), target, efficiency)
            w = w[..., :chains, :].contiguous()
        joint = log_joint(target, plan.data, w, self.compile)
        joint = joint if self.slopes else values_alone(joint)
        w, value, gradient = begin(joint, w, target, name)
        if self.slopes and not has_network(target.model):
            refuse_discrete(target.model, joint, w, value, gradient, name)
        refuse_improper(target, joint, w, value, name)
        limit = self._longest_warmup()
        wanted = max(0, plan.steps - limit) // self.thin
        functions = function_space(target, plan.data, target.buffers())
        metric = self._metric(w.shape[-2], w.shape[-1], functions is not None and functions.hidden_layers > 0).unit(w)
        near = None if start is None else learnt_from(start, joint, metric, w, generator, self.slopes)
        one = torch.ones(shape, dtype=w.dtype, device=w.device)
        state = State(
            w,
            value,
            gradient,
            metric=near or metric,
            window=Window.empty(w, self.slopes),
            step_size=StepSize.at(one),
            length=Length.at(one),
            warmup=Warmup.of(
                limit,
                self.warmup is not None,
                start is not None,
                near is not None,
                self.accept or self.acceptances[0],
            ),
            statistics=blank_statistics(value, min(wanted, ROOM_DRAWS), self.trees),
            buffers=target.buffers(),
            step=0,
            drawn=0,
            wanted=wanted,
            open_ended=plan.open_ended or self.until_ess is not None,
            tail=None,
            leapfrogs=0,
            joint=joint,
            functions=functions,
        )
        if state.warmup.frozen:
            self.restart(state, generator)
        return state

    trees: ClassVar[bool] = False
    heavy_tails: ClassVar[bool] = False  # whether momenta may have heavy tails

    @abstractmethod
    def transition(self, state: State, generator: torch.Generator) -> Move:
        """Move every chain once."""

    def acceptance_of(self, state: State, noise: Tensor, step: Tensor) -> Tensor:
        """The mean acceptance probability of a single step of this size, (*B,)."""
        p = state.metric.momentum(noise)
        energy = kinetic(state.metric, p, state.tail) - state.value
        _, p, value, _ = integrate(
            "leapfrog", state.joint, state.metric, state.w, p, state.gradient, wide(step), 1, state.tail
        )
        return probability(energy - kinetic(state.metric, p, state.tail) + value).mean(-1)

    def restart(self, state: State, generator: torch.Generator) -> None:
        """Search for a step size, at the start and after the metric is first learnt."""
        noise = normal(state.w, generator)
        step = first_step(lambda e: self.acceptance_of(state, noise, e), state.step_size.log.exp())
        state.step_size = StepSize.at(step)
        # with unit scales a half-turn takes pi; before the metric is learnt, use a few steps
        first = torch.full_like(step, math.pi / 2) if state.warmup.learnt else 8 * step
        state.length = Length.at(torch.maximum(first, 2 * step))

    def arrive(self, state: State, generator: torch.Generator) -> Tensor:
        """Bring the chains to the posterior before their first transition; return the gradients that it took."""
        taken = torch.zeros_like(state.step_size.log)
        if not state.warmup.arrived:
            if self.slopes:
                state.w, state.value, state.gradient, state.metric, taken = ascend(
                    state.joint, state.metric, state.w, state.value, state.gradient, generator
                )
                state.warmup.learnt = state.w.shape[-2] > 1
            state.w, state.value, state.gradient = disperse(
                state.joint, state.metric, state.w, state.value, state.gradient, generator
            )
            state.warmup.arrived = True
        self.restart(state, generator)
        return taken

    def step(self, target: Target, state: State, batch: Data, generator: torch.Generator) -> tuple[State, Info]:
        spent = self.arrive(state, generator) if state.step == 0 and not state.warmup.frozen else 0
        move = self.transition(state, generator)
        state.w, state.value, state.gradient = move.w, move.value, move.gradient
        accepted = move.acceptance.mean(-1)
        metrics: dict[str, Tensor | float] = {
            "acceptance": accepted,
            "step_size": state.step_size.log.exp(),
            "divergences": move.divergent.sum(-1).to(accepted.dtype),
            "gradients": move.steps.to(accepted.dtype).mean(-1) + spent,
        }
        state.step += 1
        state.leapfrogs += int(move.steps.nan_to_num(nan=0.0).max())
        if state.step % CHECK_EVERY == 0:
            refuse_drift(target, state.w, type(self).__name__)
        if not state.warmup.frozen:
            self.adapt(state, move, accepted, generator)
            return state, Info(metrics, counts=COUNTED_METRICS, unchecked=UNCHECKED_METRICS)
        kept, rest = divmod(state.drawn, self.thin)
        state.drawn += 1
        write(state.statistics, move, kept, rest == self.thin - 1)
        if rest != self.thin - 1:
            return state, Info(metrics, counts=COUNTED_METRICS, unchecked=UNCHECKED_METRICS)
        done = kept + 1 >= state.wanted and not state.warmup.exact  # otherwise the plan ends here
        done = done or (self.limited(state) and kept + 1 >= MIN_DRAWS and state.leapfrogs > max_leapfrogs(state))
        return state, Info(metrics, draw=state.w, done=done, counts=COUNTED_METRICS, unchecked=UNCHECKED_METRICS)

    def adapt(self, state: State, move: Move, accepted: Tensor, generator: torch.Generator) -> None:
        """Learn from one transition of the warm-up."""
        state.step_size.record(accepted, state.warmup.accept, self.furthest(state))
        if move.slope is not None:
            step = state.step_size.log.exp()
            state.length.record(move.slope, step / 2, self.longest * step)
        state.window.record(state.w, state.value, state.gradient)
        warmup, now = state.warmup, state.step
        warmup.divergences += int(move.divergent.sum())
        if warmup.learns_at(now):
            self.learn(state, generator)
            warmup.divergences = 0
            if now == warmup.learns_until:
                state.step_size = StepSize.at(state.step_size.log.exp())
                self.learn_length(state, generator)
        if self.limited(state) and 2 * state.leapfrogs > max_leapfrogs(state):
            warmup.limit = warmup.end = now
        if now == warmup.end:
            self.end_round(state)

    def limited(self, state: State) -> bool:
        """Whether the fit may end unconverged before its planned steps, because trajectories are long."""
        return state.open_ended and self.until_ess is None and not state.warmup.exact

    def end_round(self, state: State) -> None:
        """End the warm-up, or begin another round of it."""
        warmup = state.warmup
        if state.step < warmup.limit:
            higher = [a for a in self.acceptances if a > warmup.accept] if self.accept is None else []
            if warmup.divergences and higher:
                warmup.accept = higher[0]
            if (
                self.rescue(state)
                or (warmup.divergences and higher)
                or warmup.exact
                or not settled(state.window, state.step, state.functions)
            ):
                warmup.go_on()
                return
        warmup.frozen = True
        state.step_size.settle()
        state.length.settle()
        if state.open_ended and self.until_ess is None and not settled(state.window, state.step, state.functions):
            state.wanted = min(state.wanted, UNSETTLED_DRAWS)

    def rescue(self, state: State) -> bool:
        """Replace chains that stay in regions of negligible probability, and return whether there were any."""
        found = leave_negligible_modes(state.window, state.metric, state.w, state.value, state.gradient)
        if found is not None:
            state.w, state.value, state.gradient = found
        return found is not None

    def learn(self, state: State, generator: torch.Generator) -> None:
        """Learn the metric from the recent positions and gradients of all chains."""
        self.rescue(state)
        points, slopes = state.window.points()
        state.metric = state.metric.learnt(points, slopes)
        if self.heavy_tails:
            state.tail = momentum_tail(state.window)
        if not state.warmup.learnt and points.shape[-2] > 2:
            state.warmup.learnt = True
            self.restart(state, generator)

    def learn_length(self, state: State, generator: torch.Generator) -> None:
        """Learn the length of trajectories after the metric of a round, for samplers that have one."""

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
        drift, finished = "", state.open_ended or kept >= state.wanted
        if finished:
            drift = warn_of_drift(target, w, type(self).__name__)
            warn_of_divergences(target, w, statistics["divergent"], type(self).__name__, state.warmup.accept)
        found = Chains(target, w, state.buffers, statistics, momenta=self.slopes, superchains=superchain_ids(len(w)))
        if drift:
            found.know(Status("not_converged", drift), warned=True)
        elif finished and not has_network(target.model) and (apart := separate_regions(target, w, found.superchains)):
            found.know(Status("not_converged", apart))
        return found


def max_leapfrogs(state: State) -> int:
    """The steps of all trajectories of a fit whose length the user has not given."""
    return MAX_LEAPFROGS if state.functions is None else MAX_NETWORK_LEAPFROGS


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
