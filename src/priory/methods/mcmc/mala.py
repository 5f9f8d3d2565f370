"""The Metropolis-adjusted Langevin algorithm: one step along the gradient, with noise.

    w' = w + (e^2 / 2) C g(w) + e C^(1/2) noise

is accepted by Metropolis' rule, which corrects the discretisation error. It equals HMC with a single leapfrog step and
is implemented as such: the ratio of proposal densities is the change of kinetic energy. The step size is tuned to an
acceptance of 0.574, which is optimal in many dimensions (Roberts and Rosenthal 1998).

References:
    Besag (1994), Comments on "Representations of knowledge in complex systems".
    Roberts and Tweedie (1996), Exponential convergence of Langevin distributions and their discrete approximations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from priory.methods.mcmc.integrators import integrate, kinetic
from priory.methods.mcmc.sampler import DIVERGENCE_NATS, Move, Sampler, State, metropolis, normal, wide

if TYPE_CHECKING:
    from priory.methods.mcmc.metrics import Metric


@dataclass(frozen=True)
class MALA(Sampler):
    """The Metropolis-adjusted Langevin algorithm.

    Needs one gradient per transition, and many transitions per independent draw; `HMC` and `NUTS` are usually better.

    Args:
        warmup: Number of warm-up transitions, which are not kept. Default: None, until the chains have settled, at most
            5,120.
        accept: Mean acceptance probability that the step size is tuned to, between 0 and 1. Default: None, 0.574.

    Example:
        >>> import priory as pr
        >>> density = pr.Density(lambda p: -0.5 * (p["x"] - 3).square(), {"x": pr.Param()})
        >>> posterior = pr.fit(density, None, pr.MALA(), progress=False)
        >>> posterior.status.name, abs(posterior.mean["x"].item() - 3) < 0.2
        ('converged', True)

    References:
        Roberts and Tweedie (1996), Exponential convergence of Langevin distributions and their discrete approximations.
        Roberts and Rosenthal (1998), Optimal scaling of discrete approximations to Langevin diffusions.
    """

    draws: ClassVar[int] = 2000
    longest_warmup: ClassVar[int] = 5_120
    acceptances: ClassVar[tuple[float, ...]] = (0.574,)

    def transition(self, state: State, generator: torch.Generator) -> Move:
        metric: Metric = state.metric
        p = metric.momentum(normal(state.w, generator))
        before = kinetic(metric, p) - state.value
        step = wide(state.step_size.log.exp())
        w, p, value, gradient = integrate("leapfrog", state.joint, metric, state.w, p, state.gradient, step)
        after = kinetic(metric, p) - value
        move = metropolis(state, (w, value, gradient), before, after, torch.ones_like(before), generator)
        # a step out of the support is rejected; it does not mean that the trajectory inside is inaccurate
        return replace(move, divergent=~(before - after > -DIVERGENCE_NATS) & ~torch.isneginf(value))
