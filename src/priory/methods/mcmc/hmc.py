"""Hamiltonian Monte Carlo with a trajectory length learnt by ChEES.

Each chain draws a momentum p ~ N(0, C^-1) and follows the dynamics of H(w, p) = -log p(w, D) + p' C p / 2 for a time t,
in n steps of about the tuned step size. The end point is accepted with probability min(1, exp(H - H')), which corrects
the discretisation error.

    t = (1 - h / 4) T,        n = max(1, round(t / size)),        step = t / n

h is the next number of the Halton sequence, so that t never stays at a period of the posterior. T is the length that
ChEES finds; after the warm-up it is a tenth longer. ChEES measures the autocorrelation of squares, which is flat around
its optimum, while that of means (a cosine, for a Gaussian) falls below zero slightly beyond it. All chains share t and
n, so they run in step and none waits for another. Where n would exceed 1,000, t is shortened instead: a step longer
than the tuned one diverges.

For a network with hidden layers T is that of its predictions, because weights wander along symmetries for much longer
than predictions need. While a trajectory is too short, the transitions per effective draw, a, fall as T^-2. So in each
round of the warm-up T is multiplied by sqrt(a / 1.5), with a that of the slowest prediction in recent transitions. The
integrator is then leapfrog: the step is limited by the stability of the stiffest directions, which two stages at twice
the cost extend by less.

Cost of a transition: n steps, of one or two gradients at all chains.

References:
    Duane, Kennedy, Pendleton and Roweth (1987), Hybrid Monte Carlo.
    Neal (2011), MCMC using Hamiltonian dynamics.
    Hoffman, Radul and Sountsov (2021), An adaptive MCMC scheme for setting trajectory lengths in Hamiltonian Monte
    Carlo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from priory.core.errors import require
from priory.diagnostics import ess_mean
from priory.methods.mcmc.adaptation import Length, chees_slope, halton
from priory.methods.mcmc.integrators import INTEGRATORS, integrate, kinetic
from priory.methods.mcmc.sampler import DIVERGENCE_NATS, Move, Sampler, State, metropolis, normal, wide

if TYPE_CHECKING:
    from torch import Tensor

    from priory.posteriors.function_space import FunctionSpace

LENGTH_FACTOR = 1.1  # of the trajectory after the warm-up, relative to the one that ChEES finds
LENGTH_JITTER = 0.25  # share of the trajectory length that varies
TRANSITIONS_PER_DRAW = 1.5  # per effective draw of the slowest prediction, to which the trajectory length is adjusted
MIN_LENGTH_FACTOR, MAX_LENGTH_FACTOR = 0.7, 3.0  # of one adjustment


@dataclass(frozen=True)
class HMC(Sampler):
    """Hamiltonian Monte Carlo: chains that run in step, with a trajectory length learnt from all of them.

    Args:
        trajectory: Longest trajectory length T, in units of the metric, in which a standard deviation is about 1. No
            trajectory takes more than 1,000 steps. Default: None, learnt in the warm-up by ChEES.
        integrator: "two_stage", with two gradients per step and steps more than twice as long, or "leapfrog". Default:
            None, "leapfrog" for networks with hidden layers, otherwise "two_stage".

    Example:
        >>> import priory as pr
        >>> density = pr.Density(lambda p: -0.5 * (p["x"] - 3).square(), {"x": pr.Param()})
        >>> posterior = pr.fit(density, None, pr.HMC(), progress=False)
        >>> posterior.status.name, abs(posterior.mean["x"].item() - 3) < 0.2
        ('converged', True)

    References:
        Duane, Kennedy, Pendleton and Roweth (1987), Hybrid Monte Carlo.
        Neal (2011), MCMC using Hamiltonian dynamics.
        Hoffman, Radul and Sountsov (2021), An adaptive MCMC scheme for setting trajectory lengths in Hamiltonian Monte
        Carlo.
    """

    trajectory: float | None = None
    integrator: Literal["two_stage", "leapfrog"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.trajectory is None or (isinstance(self.trajectory, (int, float)) and 0 < self.trajectory < 1e6)
        require(ok, "trajectory", "HMC", "be a positive number", self.trajectory)
        known = f"be one of {', '.join(INTEGRATORS)}"
        require(self.integrator in (None, *INTEGRATORS), "integrator", "HMC", known, self.integrator)

    def integrator_for(self, state: State) -> str:
        """The name of the integrator of a fit."""
        return self.integrator or ("leapfrog" if has_hidden_layers(state.functions) else "two_stage")

    def transition(self, state: State, generator: torch.Generator) -> Move:
        order = state.joint.order  # a state from a checkpoint may have another memory layout
        state.w, state.gradient = order(state.w), order(state.gradient)
        size = state.step_size.log.exp()
        length = (1 - LENGTH_JITTER * halton(state.step + 1)) * self.furthest(state)
        # the step size of a member without a density shrinks to zero: its chains stay where they are
        length = torch.minimum(length, self.longest * size).nan_to_num(nan=0.0)
        steps = (length / size).nan_to_num(nan=1.0).round().clamp(1, self.longest)  # (*B,)
        if steps.ndim:  # the other members must not wait for it
            steps = torch.where(torch.isfinite(state.value + state.w.sum(-1)).any(-1), steps, 1.0)
        step = length / steps
        p = order(state.metric.momentum(normal(state.w, generator)))
        before = kinetic(state.metric, p) - state.value
        w, p, value, gradient = self.follow(state, p, step, steps)
        after = kinetic(state.metric, p) - value
        taken = len(INTEGRATORS[self.integrator_for(state)][1]) * steps[..., None].expand_as(before)
        move = metropolis(state, (w, value, gradient), before, after, taken, generator)
        learning = not (state.warmup.frozen or self.trajectory or has_hidden_layers(state.functions))
        slope = self.slope(state, w, p, length, move.acceptance) if learning else None
        return replace(move, divergent=~(before - after > -DIVERGENCE_NATS), slope=slope)

    def furthest(self, state: State) -> Tensor:
        if self.trajectory is not None:
            return torch.full_like(state.length.log, self.trajectory)
        return (LENGTH_FACTOR if state.warmup.frozen else 1.0) * state.length.log.exp()

    def follow(self, state: State, p: Tensor, step: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Integrate each member's number of steps; members that have finished take steps of size zero."""
        joint, metric, w, value, gradient = state.joint, state.metric, state.w, state.value, state.gradient
        if steps.ndim == 0:
            return integrate(self.integrator_for(state), joint, metric, w, p, gradient, wide(step), int(steps))
        for i in range(int(steps.max())):
            now = wide(step * (i < steps))
            w, p, value, gradient = integrate(self.integrator_for(state), joint, metric, w, p, gradient, now)
        return w, p, value, gradient

    def learn_length(self, state: State, generator: torch.Generator) -> None:
        """For a network, adjust T to the number of transitions per effective draw of its predictions."""
        if not has_hidden_layers(state.functions) or self.trajectory is not None:
            return
        assert state.functions is not None
        x = state.functions(state.window.recent())  # (*B, K, S, Q)
        ess = torch.stack([ess_mean(member) for member in x.reshape(-1, *x.shape[-3:])])  # (members, Q)
        per_draw = (x.shape[-3] * x.shape[-2] / ess).nan_to_num(nan=math.inf).amax(-1).reshape(state.length.log.shape)
        least = MIN_LENGTH_FACTOR if state.window.stride == 1 else 1.0  # thinned snapshots give a lower bound
        factor = (per_draw / TRANSITIONS_PER_DRAW).sqrt().clamp(least, MAX_LENGTH_FACTOR).to(state.length.log.dtype)
        most = self.longest * state.step_size.log.exp()
        state.length = Length.at(torch.minimum(factor * state.length.log.exp(), most))

    def slope(self, state: State, w: Tensor, p: Tensor, length: Tensor, acceptance: Tensor) -> Tensor:
        """The gradient of the ChEES criterion in log T, (*B,); chains of zero acceptance count as not moved."""
        sound = (acceptance > 0)[..., None]
        w, p = torch.where(sound, w, state.w), torch.where(sound, p, 0.0)
        begin, end = (x - self.middle(state, x) for x in (state.w, w))
        change = state.metric.square(end) - state.metric.square(begin)
        return chees_slope(change, (end * p).sum(-1), length, acceptance)

    def middle(self, state: State, w: Tensor) -> Tensor:
        """The mean of the chains w (*B, K, P), (*B, 1, P); with a single chain, the mean of its window so far."""
        alone = w.shape[-2] == 1 and state.window.count > 1
        return state.window.recent().mean(-2) if alone else w.mean(-2, keepdim=True)


def has_hidden_layers(functions: FunctionSpace | None) -> bool:
    """Whether a fit is of a network whose weights have symmetries."""
    return functions is not None and functions.hidden_layers > 0
