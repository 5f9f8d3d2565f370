"""Step sizes of the stochastic-gradient samplers, when noise is added, and which draws are kept.

A constant rate keeps every `thin`-th draw after `burn_in`. A cyclical rate (Zhang, Li, Zhang, Chen and Wilson 2020)
runs through M cycles of L = ceil(steps / M) steps. Each cycle starts with large steps, to find another mode, and ends
with small ones, to sample from it:

    rate_k = rate / 2 (1 + cos(pi r_k)),        r_k = (k mod L) / L

While r_k is below `exploring`, no noise is added and no draw is kept: that part of a cycle is its burn-in.

The rate is that of stochastic gradient descent on the mean loss per row: with N rows at temperature T, the step on the
log joint is T rate / N. The rate determines how fast a chain moves and how large its discretisation error is, and does
not change the target, which is the whole posterior at any N.

References:
    Zhang, Li, Zhang, Chen and Wilson (2020), Cyclical stochastic gradient MCMC for Bayesian deep learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from priory.core.errors import is_integer, require
from priory.methods.base import Options
from priory.methods.mcmc.learning_rates import READ_EVERY_STEPS, ReadRate
from priory.methods.optimise import default_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from priory.core.data import Data
    from priory.methods.base import Plan
    from priory.models.target import Target
    from priory.posteriors import Posterior

MAX_KEPT_DRAWS = 1_000  # per chain, unless `thin` is given


@dataclass(frozen=True)
class Cyclical(Options):
    """A learning rate that falls from its largest value to zero in each of several cycles.

    Draws are kept from the last part of each cycle, so that every cycle may contribute another mode.

    Args:
        cycles: Number of cycles. Default: 4.
        exploring: Share of each cycle, from 0 and below 1, that runs without noise and keeps no draws. Default: 0.8.

    Example:
        >>> import priory as pr
        >>> pr.SGHMC(schedule=pr.Cyclical(cycles=8)).schedule
        Cyclical(cycles=8, exploring=0.8)

    References:
        Zhang, Li, Zhang, Chen and Wilson (2020), Cyclical stochastic gradient MCMC for Bayesian deep learning.
    """

    cycles: int = 4
    exploring: float = 0.8

    def __post_init__(self) -> None:
        require(is_integer(self.cycles, 1), "cycles", "Cyclical", "be an integer >= 1", repr(self.cycles))
        number = isinstance(self.exploring, (int, float)) and 0 <= self.exploring < 1
        require(number, "exploring", "Cyclical", "be a number from 0 and below 1", repr(self.exploring))


@dataclass(frozen=True)
class Timetable:
    """For each step: its rate, whether noise is added, whether options adapt, whether the draw is kept.

    Args:
        rates: Learning rate; as a share of the rate that is read from the target, if none was given.
        noisy: Whether noise is added.
        adapts: Whether the step belongs to a burn-in, where the preconditioner and the learning rate may change.
        reads: Whether curvature and noise are read, to set the learning rate.
        settles: Whether the step belongs to the part of a burn-in whose rate is limited by the noise of minibatches.
        keeps: Whether the draw is kept.
        restart: Step at which running means of gradients start again, a quarter of the burn-in; -1 for none.
        sampling: Number of steps outside the burn-in.
    """

    rates: list[float]
    noisy: list[bool]
    adapts: list[bool]
    reads: list[bool]
    settles: list[bool]
    keeps: list[bool]
    restart: int
    sampling: int

    @classmethod
    def of(cls, sampler: GradientSampler, steps: int) -> Timetable:
        """The timetable of a fit with the given number of steps."""
        cyclical = sampler.schedule if isinstance(sampler.schedule, Cyclical) else None
        cycle = steps if cyclical is None else math.ceil(steps / cyclical.cycles)
        share = [k % cycle / cycle for k in range(steps)]
        falling = [1.0 if cyclical is None else 0.5 * (1 + math.cos(math.pi * r)) for r in share]
        burn_in, owner = sampler.burn_in, type(sampler).__name__
        if burn_in is None:
            burn_in = steps // 2 if cyclical is None else 0
        exploring = 0.0 if cyclical is None else cyclical.exploring
        noisy = [r >= exploring for r in share]
        must = f"have steps left to draw in: a cycle of {cycle} ends before the share {exploring} of exploring does"
        require(any(noisy), "schedule", owner, must, sampler.schedule)
        adapts = [k < burn_in or not noise for k, noise in enumerate(noisy)]
        places = [k for k, adapting in enumerate(adapts) if not adapting]
        sampling = len(places)
        thin = sampler.thin or max(1, math.ceil(sampling / MAX_KEPT_DRAWS))
        places = places[thin - 1 :: thin]
        require(bool(places), "burn_in", owner, f"leave a draw of {steps} steps to keep, {thin} steps apart", burn_in)
        kept = set(places)
        rates = falling if sampler.learning_rate is None else [sampler.learning_rate * f for f in falling]
        ends = [adapting and not later for adapting, later in zip(adapts, [*adapts[1:], False], strict=True)]
        restart = burn_in // 4 if cyclical is None else -1
        reads = [adapts[k] and (k % READ_EVERY_STEPS == 0 or k == restart or ends[k]) for k in range(steps)]
        settles = [cyclical is None and k >= burn_in // 2 for k in range(steps)]
        return cls(rates, noisy, adapts, reads, settles, [k in kept for k in range(steps)], restart, sampling)

    def place(self, step: int) -> int:
        """The index of a step in the lists; steps beyond the end use the last entry."""
        return min(step, len(self.rates) - 1)


@dataclass(frozen=True)
class GradientSampler(Options):
    """Options that the stochastic-gradient samplers share, and the initial positions of their chains.

    Args:
        learning_rate: Step size of gradient descent on the mean loss per row. Default: None, read from the curvature
            and the gradient noise of the target in the burn-in.
        chains: Number of chains, which read the same minibatches. Default: 4.
        burn_in: Steps at the start that are not kept. Default: None, half of the steps; with `Cyclical()`, none,
            because the exploring part of each cycle is its burn-in.
        thin: Keep every `thin`-th draw after the burn-in. Default: None, the smallest that keeps at most 1,000 draws
            per chain.
        schedule: "constant" (default) or `Cyclical()`.
    """

    learning_rate: float | None = None
    chains: int = 4
    burn_in: int | None = None
    thin: int | None = None
    schedule: Literal["constant"] | Cyclical = "constant"

    def __post_init__(self) -> None:
        owner, rate = type(self).__name__, self.learning_rate
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < math.inf
        require(rate is None or number, "learning_rate", owner, "be a positive number", repr(rate))
        require(is_integer(self.chains, 1), "chains", owner, "be an integer >= 1", repr(self.chains))
        ok = self.burn_in is None or is_integer(self.burn_in, 0)
        require(ok, "burn_in", owner, "be an integer >= 0", repr(self.burn_in))
        ok = self.thin is None or is_integer(self.thin, 1)
        require(ok, "thin", owner, "be an integer >= 1", repr(self.thin))
        ok = self.schedule == "constant" or isinstance(self.schedule, Cyclical)
        require(ok, "schedule", owner, "be 'constant' or Cyclical()", repr(self.schedule))

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=4_000, most=50_000)

    def begin(
        self, target: Target, plan: Plan, generator: torch.Generator, shape: torch.Size, start: Posterior | None
    ) -> Tensor:
        """The initial positions of the chains, (*shape, chains, P)."""
        return target.start(plan.data, torch.Size([*shape, self.chains]), generator, start)

    def read_rate(
        self,
        target: Target,
        plan: Plan,
        w: Tensor,
        table: Timetable,
        friction: float,
        scale_of: Callable[[Tensor], Tensor | None] = lambda gradient: None,
    ) -> ReadRate | None:
        """The learning rate read at the starting positions, or None if one was given.

        `scale_of` returns the square root of a preconditioner from the first gradient, or None.
        """
        if self.learning_rate is not None:
            return None
        batch = next(plan.data.batches(0, 0))
        scale = scale_of(target.log_joint_and_grad(w, batch)[1])
        found = ReadRate.at(target, w, batch, plan.data.steps_per_epoch, scale)
        found.choose(friction, table.sampling if table.settles[0] else None)
        return found


def step_size(target: Target, rate: float, read: ReadRate | None = None) -> Any:
    """The step on the tempered log joint, T rate / N, so that a rate is equally stable at any N and T.

    If a rate was read from the target, `rate` is a share of it, and the result has the shape (*B, 1, 1).
    """
    size = target.mean_loss_scale * rate
    return size if read is None else size * read.rate[..., None, None]


def standard_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw standard normal noise in the shape of a tensor."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
