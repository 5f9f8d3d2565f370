"""Hamiltonian Monte Carlo with a trajectory length learnt by ChEES (Duane et al. 1987; Neal 2011; Hoffman, Radul and
Sountsov 2021).

Each chain is given a momentum p ~ N(0, C^-1) and follows H(w, p) = -log p(w, D) + p' C p / 2 for a time t, in n steps
of about the tuned size. The end is taken with probability min(1, exp(H - H')), which makes up for the steps' error.

    t = (1 - h / 4) T,        n = round(t / size), from 1,        a step of t / n

h is the next number of Halton's sequence, so that no period of the posterior is met again and again. T is the length
that ChEES wants, and after the warm-up a tenth more: ChEES looks at squares, whose autocorrelation is flat there, while
that of means, the cosine of a Gaussian's turn, falls below zero. t and n are the same for all chains: they go in step,
and none waits for another. Where n would be above 1,000, t is shorter: a step longer than the tuned one diverges. Cost
of a transition: n steps, of one or two gradients at all chains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from priory.core.errors import require
from priory.methods.mcmc.adaptation import chees_slope, halton
from priory.methods.mcmc.integrators import INTEGRATORS, integrate, kinetic
from priory.methods.mcmc.sampler import DIVERGED, Move, Sampler, State, metropolis, normal, wide

if TYPE_CHECKING:
    from torch import Tensor

BEYOND = 1.1  # times what ChEES wants
JITTER = 0.25  # the share of a trajectory that is left to chance


@dataclass(frozen=True)
class HMC(Sampler):
    """Hamiltonian Monte Carlo: many chains in step, with a trajectory length that is learnt from all of them.

    `trajectory` fixes the longest length T (in the metric's units, in which a standard deviation is about 1) instead;
    none takes more than 1,000 steps.
    `integrator` is "two_stage", which takes two gradients a step and steps more than twice as long, or "leapfrog". The
    other options are those of every `Sampler`.

    >>> HMC(chains=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'chains' argument of HMC must be an integer >= 1, got 0.
    """

    trajectory: float | None = None
    integrator: Literal["two_stage", "leapfrog"] = "two_stage"

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.trajectory is None or (isinstance(self.trajectory, (int, float)) and 0 < self.trajectory < 1e6)
        require(ok, "trajectory", "HMC", "be a positive number", self.trajectory)
        known = f"be one of {', '.join(INTEGRATORS)}"
        require(self.integrator in INTEGRATORS, "integrator", "HMC", known, self.integrator)

    @property
    def stages(self) -> int:
        """Gradients a step."""
        return len(INTEGRATORS[self.integrator][1])

    def transition(self, state: State, generator: torch.Generator) -> Move:
        order = state.joint.order  # in which what comes from a checkpoint may not be
        state.w, state.gradient = order(state.w), order(state.gradient)
        size = state.step_size.log.exp()
        length = (1 - JITTER * halton(state.step + 1)) * self.furthest(state)
        # a member without a density, whose steps shrink to none, goes nowhere
        length = torch.minimum(length, self.longest * size).nan_to_num(nan=0.0)
        steps = (length / size).nan_to_num(nan=1.0).round().clamp(1, self.longest)  # (*B,)
        if steps.ndim:  # nor do the others wait for it
            steps = torch.where(torch.isfinite(state.value + state.w.sum(-1)).any(-1), steps, 1.0)
        step = length / steps
        p = order(state.metric.momentum(normal(state.w, generator)))
        before = kinetic(state.metric, p) - state.value
        w, p, value, gradient = self.follow(state, p, step, steps)
        after = kinetic(state.metric, p) - value
        taken = self.stages * steps[..., None].expand_as(before)
        move = metropolis(state, (w, value, gradient), before, after, taken, generator)
        learning = state.step < state.warmup and self.trajectory is None
        slope = self.slope(state, w, p, length, move.acceptance) if learning else None
        return replace(move, divergent=~(before - after > -DIVERGED), slope=slope)

    def furthest(self, state: State) -> Tensor:
        if self.trajectory is not None:
            return torch.full_like(state.length.log, self.trajectory)
        return (1.0 if state.step < state.warmup else BEYOND) * state.length.log.exp()

    def follow(self, state: State, p: Tensor, step: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The end of the trajectory of each member's number of steps; members that have ended take steps of none."""
        joint, metric, w, value, gradient = state.joint, state.metric, state.w, state.value, state.gradient
        if steps.ndim == 0:
            return integrate(self.integrator, joint, metric, w, p, gradient, wide(step), int(steps))
        for i in range(int(steps.max())):
            now = wide(step * (i < steps))
            w, p, value, gradient = integrate(self.integrator, joint, metric, w, p, gradient, now)
        return w, p, value, gradient

    def slope(self, state: State, w: Tensor, p: Tensor, length: Tensor, acceptance: Tensor) -> Tensor:
        """The slope of the length's criterion, with chains that went astray at the point where they began."""
        sound = (acceptance > 0)[..., None]
        w, p = torch.where(sound, w, state.w), torch.where(sound, p, 0.0)
        begin, end = (x - self.middle(state, x) for x in (state.w, w))
        change = state.metric.square(end) - state.metric.square(begin)
        return chees_slope(change, (end * p).sum(-1), length, acceptance)

    def middle(self, state: State, w: Tensor) -> Tensor:
        """The mean of the chains w (*B, K, P), (*B, 1, P), or of the window so far where there is one chain."""
        alone = w.shape[-2] == 1 and state.moments.count > 0
        return state.moments.mean[..., None, :] if alone else w.mean(-2, keepdim=True)
