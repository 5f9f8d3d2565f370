"""Random-walk Metropolis: a normal proposal with a learnt scale and shape.

    w' = w + e C^(1/2) noise,    accepted with probability min(1, p(w', D) / p(w, D)).

It needs no gradient of the density, and the most draws of all samplers. The step is tuned to an acceptance of 0.234,
which is optimal in many dimensions (Roberts, Gelman and Gilks 1997). C is learnt in the warm-up only, so that the draws
are exact.

References:
    Metropolis, Rosenbluth, Rosenbluth, Teller and Teller (1953), Equation of state calculations by fast computing
    machines.
    Haario, Saksman and Tamminen (2001), An adaptive Metropolis algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from priory.methods.mcmc.sampler import Move, Sampler, State, metropolis, normal, probability, wide

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RandomWalk(Sampler):
    """Random-walk Metropolis with a learnt scale: the simplest exact sampler, and a check on the other ones.

    It works for densities without gradients.

    Args:
        warmup: Number of warm-up transitions, which are not kept. Default: None, until the chains have settled, at most
            5,120.
        accept: Mean acceptance probability that the step size is tuned to, between 0 and 1. Default: None, 0.234.

    Example:
        >>> import priory as pr
        >>> density = pr.Density(lambda p: -0.5 * (p["x"] - 3).square(), {"x": pr.Param()})
        >>> posterior = pr.fit(density, None, pr.RandomWalk(), progress=False)
        >>> posterior.status.name, abs(posterior.mean["x"].item() - 3) < 0.2
        ('converged', True)

    References:
        Metropolis, Rosenbluth, Rosenbluth, Teller and Teller (1953), Equation of state calculations by fast computing
        machines.
        Haario, Saksman and Tamminen (2001), An adaptive Metropolis algorithm.
        Roberts, Gelman and Gilks (1997), Weak convergence and optimal scaling of random walk Metropolis algorithms.
    """

    draws: ClassVar[int] = 4000
    longest_warmup: ClassVar[int] = 5_120
    acceptances: ClassVar[tuple[float, ...]] = (0.234,)
    slopes: ClassVar[bool] = False

    def transition(self, state: State, generator: torch.Generator) -> Move:
        w = proposal(state, normal(state.w, generator), state.step_size.log.exp())
        value, gradient = state.joint(w)
        one = torch.ones_like(value)
        return metropolis(state, (w, value, gradient), -state.value, -value, one, generator)

    def acceptance_of(self, state: State, noise: Tensor, step: Tensor) -> Tensor:
        value, _ = state.joint(proposal(state, noise, step))
        return probability(value - state.value).mean(-1)


def proposal(state: State, noise: Tensor, step: Tensor) -> Tensor:
    """Propose a normal step of each chain: C applied to a momentum of covariance C^-1 has covariance C."""
    return state.w + wide(step) * state.metric.velocity(state.metric.momentum(noise))
