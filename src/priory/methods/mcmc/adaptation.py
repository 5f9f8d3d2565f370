"""Adaptation of the step size and of the trajectory length in a warm-up, from all chains together.

The metric is learnt in `priory.methods.mcmc.metrics`.

**Step size**, by dual averaging (Nesterov 2009; Hoffman and Gelman 2014) of the error in the acceptance, averaged over
chains (a harmonic mean would follow the worst chain):

    e_t = (1 - 1 / (t + 10)) e_(t-1) + (wanted - accepted) / (t + 10),     log step_t = anchor - e_t sqrt(t) / 0.05

At the end of the warm-up the step size is the average of log step_t with weights t^-0.75.

**Trajectory length** T of HMC, by ChEES (Hoffman, Radul and Sountsov 2021): with d = |w' - m'|^2 - |w - m|^2 the change
of the squared distance from the mean over a trajectory of length t, in the metric's coordinates, Adam maximises
E[d^2 / 4] in log T, by the gradient

    E[t d (w' - m')' p'],

averaged over chains with their acceptance as weights. t is a part of T given by the Halton sequence, and has the same
gradient in log T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

AVERAGING_DELAY, AVERAGING_GAIN, AVERAGING_DECAY = 10, 0.05, 0.75  # dual averaging: t0, gamma, kappa
FIRST_STEP_ACCEPTANCE = 0.8  # acceptance of one step at which the search for a first step size ends
MAX_HALVINGS = 60
LENGTH_RATE, LENGTH_DECAY = 0.025, 0.95  # Adam on log T: learning rate, and decay of the squared gradients


@dataclass
class StepSize:
    """Dual averaging of the log step size, one per member, (*B,)."""

    log: Tensor
    average: Tensor
    shortfall: Tensor
    anchor: Tensor
    count: int = 0

    @classmethod
    def at(cls, step: Tensor) -> StepSize:
        """Start, or restart, at this step size."""
        log = step.log()
        return cls(log, log.clone(), torch.zeros_like(log), log.clone())

    def record(self, accepted: Tensor, wanted: float, most: Tensor) -> None:
        """Update from the mean acceptance of the chains; the step size stays below `most`."""
        self.count += 1
        t = self.count
        self.shortfall = (1 - 1 / (t + AVERAGING_DELAY)) * self.shortfall + (wanted - accepted) / (t + AVERAGING_DELAY)
        self.log = torch.minimum(self.anchor - math.sqrt(t) / AVERAGING_GAIN * self.shortfall, most.log())
        weight = t**-AVERAGING_DECAY
        self.average = weight * self.log + (1 - weight) * self.average

    def settle(self) -> None:
        """Fix the step size at its average, at the end of the warm-up."""
        self.log = self.average.clone()


def first_step(accepted: Callable[[Tensor], Tensor], step: Tensor) -> Tensor:
    """The step size (*B,) at which the mean acceptance of one step crosses 0.8, found by doubling or halving.

    The search returns the last step size above that acceptance, so that the first transitions are not all rejected.
    """
    up = accepted(step) > FIRST_STEP_ACCEPTANCE
    searching = torch.ones_like(up)
    for _ in range(MAX_HALVINGS):
        trial = torch.where(up, 2 * step, step / 2)
        high = accepted(trial) > FIRST_STEP_ACCEPTANCE
        step = torch.where(searching & (high | ~up), trial, step)
        searching = searching & (high == up)
        if not bool(searching.any()):
            break
    return step


# The trajectory.


@dataclass
class Length:
    """Adam on the log trajectory length, one per member, (*B,)."""

    log: Tensor
    average: Tensor
    square: Tensor
    count: int = 0

    @classmethod
    def at(cls, length: Tensor) -> Length:
        log = length.log()
        return cls(log, log.clone(), torch.zeros_like(log))

    def record(self, slope: Tensor, low: Tensor, high: Tensor) -> None:
        """Ascend the gradient of the criterion in log T; T stays between `low` and `high`."""
        self.count += 1
        t = self.count
        self.square = LENGTH_DECAY * self.square + (1 - LENGTH_DECAY) * slope.square()
        size = (self.square / (1 - LENGTH_DECAY**t)).sqrt().clamp(min=1e-12)
        self.log = torch.minimum(torch.maximum(self.log + LENGTH_RATE * slope / size, low.log()), high.log())
        weight = t**-AVERAGING_DECAY
        self.average = weight * self.log + (1 - weight) * self.average

    def settle(self) -> None:
        self.log = self.average.clone()


def chees_slope(change: Tensor, outward: Tensor, length: Tensor, acceptance: Tensor) -> Tensor:
    """The gradient of ChEES in log T, (*B,), from d, (w' - m')' p' and the acceptance of each chain, (*B, K)."""
    weight = acceptance / acceptance.sum(-1, keepdim=True).clamp(min=1e-12)
    return length * (weight * change * outward).sum(-1)


def halton(index: int) -> float:
    """The number at an index, from 1, of the Halton sequence in base 2: 1/2, 1/4, 3/4, 1/8, ...

    >>> [halton(i) for i in (1, 2, 3, 4)]
    [0.5, 0.25, 0.75, 0.125]
    """
    value, part = 0.0, 0.5
    while index:
        value, index, part = value + part * (index & 1), index >> 1, part / 2
    return value
