"""Random-walk Metropolis: a normal step, taken if it doesn't lose too much (Metropolis et al. 1953; Haario, Saksman and
Tamminen 2001 for the scale and the shape of the step).

    w' = w + e C^(1/2) noise,    taken with probability min(1, p(w', D) / p(w, D)).

It needs no gradient of the density, and of all samplers the most draws: its step is tuned to an acceptance of 0.234,
the best in many dimensions (Roberts, Gelman and Gilks 1997). C is learnt in the warm-up alone, so that the draws are
exact.
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
    """Random-walk Metropolis with a learnt scale: the plainest exact sampler, and a check on the others.

    The options are those of every `Sampler`.

    >>> RandomWalk(thin=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'thin' argument of RandomWalk must be an integer >= 1, got 0.
    """

    accept: float = 0.234

    draws: ClassVar[int] = 4000
    patience: ClassVar[tuple[int, int, int]] = (3000, 1000, 1000)
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
    """A normal step of each chain; C applied to a momentum of covariance C^-1 has the covariance C."""
    return state.w + wide(step) * state.metric.velocity(state.metric.momentum(noise))
