"""The Metropolis-adjusted Langevin algorithm: one step along the gradient, with noise (Besag 1994; Roberts and Tweedie
1996).

    w' = w + (e^2 / 2) C g(w) + e C^(1/2) noise,

taken with the probability that makes up for the step's error. It is HMC with a single leapfrog step, and is written so:
the ratio of proposal densities is the change of kinetic energy. The step size is tuned to an acceptance of 0.574, the
best in many dimensions (Roberts and Rosenthal 1998).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from priory.methods.mcmc.integrators import integrate, kinetic
from priory.methods.mcmc.sampler import DIVERGED, Move, Sampler, State, metropolis, normal, wide

if TYPE_CHECKING:
    from priory.methods.mcmc.metrics import Metric


@dataclass(frozen=True)
class MALA(Sampler):
    """Langevin steps with a Metropolis correction: a gradient a draw, and draws that need many steps to be independent.

    The options are those of every `Sampler`.

    >>> MALA(accept=1.5)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'accept' argument of MALA must be a number between 0 and 1, got 1.5.
    """

    accept: float = 0.574

    draws: ClassVar[int] = 2000
    patience: ClassVar[tuple[int, int, int]] = (3000, 1000, 1000)

    def transition(self, state: State, generator: torch.Generator) -> Move:
        metric: Metric = state.metric
        p = metric.momentum(normal(state.w, generator))
        before = kinetic(metric, p) - state.value
        step = wide(state.step_size.log.exp())
        w, p, value, gradient = integrate("leapfrog", state.joint, metric, state.w, p, state.gradient, step)
        after = kinetic(metric, p) - value
        move = metropolis(state, (w, value, gradient), before, after, torch.ones_like(before), generator)
        # a step over the edge of the support is refused, and tells nothing of what is inside
        return replace(move, divergent=~(before - after > -DIVERGED) & ~torch.isneginf(value))
