"""Adaptation: what a sampler learns in its warm-up, from all chains at once.

**Step size**, by dual averaging (Nesterov 2009; Hoffman and Gelman 2014) of the shortfall of the acceptance, the plain
mean over chains (a harmonic mean follows the worst chain):

    e_t = (1 - 1 / (t + 10)) e_(t-1) + (wanted - accepted) / (t + 10),     log step_t = anchor - e_t sqrt(t) / 0.05

and, when the warm-up ends, its average log step with weights t^-0.75.

**Metric**, from the moments of the draws of all chains in windows that double, so that what is learnt early is
forgotten.

**Trajectory length** T of HMC, by ChEES (Hoffman, Radul and Sountsov 2021): with d = |w' - m'|^2 - |w - m|^2 the change
of the squared distance from the mean over a trajectory of length t, in the metric's coordinates, Adam climbs
E[d^2 / 4] in log T, by

    E[t d (w' - m')' p'],

averages over chains with their acceptance as weights. t is a part of T by Halton's sequence, with the same slope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

DELAY, PULL, FADE = 10, 0.05, 0.75  # dual averaging: t0, gamma, kappa
CROSSED = 0.8  # the acceptance of one step around which a first step size is looked for
HALVINGS = 60
RATE, MEMORY = 0.025, 0.95  # Adam on log T: its rate, and how long squared gradients are remembered
SHORTEST = 8  # steps before the metric is learnt, and half of the shortest warm-up in which it is
RECENT = 256  # draws that a low-rank metric is made of


@dataclass
class StepSize:
    """Dual averaging of log step, one a member, (*B,)."""

    log: Tensor
    average: Tensor
    shortfall: Tensor
    anchor: Tensor
    count: int = 0

    @classmethod
    def at(cls, step: Tensor) -> StepSize:
        """Begin, or begin again, at this step size."""
        log = step.log()
        return cls(log, log.clone(), torch.zeros_like(log), log.clone())

    def hear(self, accepted: Tensor, wanted: float, most: Tensor) -> None:
        """Learn from the mean acceptance of the chains; the step stays below `most`."""
        self.count += 1
        t = self.count
        self.shortfall = (1 - 1 / (t + DELAY)) * self.shortfall + (wanted - accepted) / (t + DELAY)
        self.log = torch.minimum(self.anchor - math.sqrt(t) / PULL * self.shortfall, most.log())
        weight = t**-FADE
        self.average = weight * self.log + (1 - weight) * self.average

    def settle(self) -> None:
        """Keep the average: the warm-up is over."""
        self.log = self.average.clone()


def first_step(accepted: Callable[[Tensor], Tensor], step: Tensor) -> Tensor:
    """The step size (*B,) at which one step's mean acceptance crosses 0.8, by doubling or halving.

    The end at which the acceptance is below is never taken, so that what begins is not rejected at once.
    """
    up = accepted(step) > CROSSED
    searching = torch.ones_like(up)
    for _ in range(HALVINGS):
        trial = torch.where(up, 2 * step, step / 2)
        high = accepted(trial) > CROSSED
        step = torch.where(searching & (high | ~up), trial, step)
        searching = searching & (high == up)
        if not bool(searching.any()):
            break
    return step


# The metric.


@dataclass
class Moments:
    """Count, mean and sums of squared deviations of the draws of a window, all chains together."""

    count: int
    mean: Tensor  # (*B, P)
    squares: Tensor  # (*B, P)
    scatter: Tensor  # (*B, P, P) for a dense metric, empty otherwise
    recent: Tensor | None  # the last draws (*B, R, P) for a low-rank metric, after zeros while there are fewer

    @classmethod
    def none(cls, w: Tensor, metric: str) -> Moments:
        """Before the first draw of the chains w (*B, K, P), for a metric of this class."""
        zeros, size = torch.zeros_like(w[..., 0, :]), w.shape[-1]
        scatter = w.new_zeros(*w.shape[:-2], size, size) if metric == "DenseMetric" else w.new_zeros(*w.shape[:-2], 0)
        recent = w.new_zeros(*w.shape[:-2], RECENT, size) if metric == "LowRankMetric" else None
        return cls(0, zeros, zeros.clone(), scatter, recent)

    def hear(self, w: Tensor) -> None:
        """Add one draw of each chain (*B, K, P) (Chan, Golub and LeVeque 1979)."""
        k = w.shape[-2]
        mean = w.mean(-2)
        total, apart = self.count + k, mean - self.mean
        deviations = w - mean[..., None, :]
        between = self.count * k / total
        self.squares = self.squares + deviations.square().sum(-2) + between * apart.square()
        if self.scatter.ndim >= 2 and self.scatter.shape[-1]:
            outer = apart[..., :, None] * apart[..., None, :]
            self.scatter = self.scatter + deviations.mT @ deviations + between * outer
        if self.recent is not None:
            self.recent = torch.cat([self.recent, w[..., -RECENT:, :]], -2)[..., -RECENT:, :].contiguous()
        self.mean, self.count = self.mean + k / total * apart, total


def windows(warmup: int) -> list[int]:
    """The steps after which the metric is learnt: from a twentieth of the warm-up, doubling, up to four fifths.

    What is drawn in the first half of the first is forgotten, and the last fifth leaves time to settle the step size.

    >>> windows(300)
    [15, 30, 60, 120, 240]
    """
    ends = [round(warmup / 20 * 2**k) for k in range(5)]
    return [end for end in ends if end >= SHORTEST] if warmup >= 2 * SHORTEST else []


# The trajectory.


@dataclass
class Length:
    """Adam on log T, one a member, (*B,)."""

    log: Tensor
    average: Tensor
    square: Tensor
    count: int = 0

    @classmethod
    def at(cls, length: Tensor) -> Length:
        log = length.log()
        return cls(log, log.clone(), torch.zeros_like(log))

    def hear(self, slope: Tensor, low: Tensor, high: Tensor) -> None:
        """Climb by the slope of the criterion in log T; T stays between two lengths."""
        self.count += 1
        t = self.count
        self.square = MEMORY * self.square + (1 - MEMORY) * slope.square()
        size = (self.square / (1 - MEMORY**t)).sqrt().clamp(min=1e-12)
        self.log = torch.minimum(torch.maximum(self.log + RATE * slope / size, low.log()), high.log())
        weight = t**-FADE
        self.average = weight * self.log + (1 - weight) * self.average

    def settle(self) -> None:
        self.log = self.average.clone()


def chees_slope(change: Tensor, outward: Tensor, length: Tensor, acceptance: Tensor) -> Tensor:
    """The slope of ChEES in log T, (*B,), from d, (w' - m')' p' and the acceptance of each chain, (*B, K)."""
    weight = acceptance / acceptance.sum(-1, keepdim=True).clamp(min=1e-12)
    return length * (weight * change * outward).sum(-1)


def halton(index: int) -> float:
    """The index-th number of Halton's sequence in base 2, from 1: 1/2, 1/4, 3/4, 1/8, ...

    >>> [halton(i) for i in (1, 2, 3, 4)]
    [0.5, 0.25, 0.75, 0.125]
    """
    value, part = 0.0, 0.5
    while index:
        value, index, part = value + part * (index & 1), index >> 1, part / 2
    return value
