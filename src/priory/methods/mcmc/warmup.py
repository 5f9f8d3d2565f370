"""The plan of a warm-up: how many chains, when the metric is learnt, and when the chains have settled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from priory.diagnostics import ess_mean
from priory.methods.draw_policy import disagreement, superchain_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from priory.methods.mcmc.population import Window
    from priory.models.target import Target
    from priory.network.recorded_graph import GraphCost

MAX_CHAINS, MIN_CHAINS = 256, 16
ELEMENTS_PER_CALL = 3000  # elements that torch computes in the time of one call
OWN_OPERATIONS = 40  # calls of torch of one step of a trajectory, besides the gradient
FIRST_ROUND_STEPS = 40  # transitions of the first round of a warm-up; each later round ends at twice the step
LEARNING_SHARE = 0.75  # of a round in which the metric is learnt; the rest tunes the step size alone
SETTLED_R_HAT = 1.03  # nested R-hat of the second half of the warm-up at which it ends
SETTLED_MEMORIES = 3  # autocorrelation times that a warm-up lasts at least
NOISE_VARIANCES, MAX_SETTLED_R_HAT = 8, 1.1  # of nested R-hat, which a warm-up may end with in spite of the noise


def number_of_chains(cost: GraphCost | None, target: Target, efficiency: float = 0.1) -> int:
    """The default number of chains: a power of two between 16 and 256 that takes the least time to a good answer.

    With a warm-up of some 40 transitions and 1,000 effective draws, K chains take a time proportional to
    (40 + 1000 / (e K)) (1 + K / r), where e is the `efficiency`, the effective draws per transition, and r the number
    of chains at which arithmetic takes as long as the calls of torch. It is least at K = sqrt(25 r / e). r follows from
    the numbers of operations and of elements of a gradient, so that no clock decides.
    """
    operations, elements = cost or (1, target.size * max(1, target.num_data or 1))
    balance = ELEMENTS_PER_CALL * (operations + OWN_OPERATIONS) / (elements + OWN_OPERATIONS * target.size)
    best = round(math.log2(max(1.0, math.sqrt(25 * balance / efficiency))))
    return max(MIN_CHAINS, min(MAX_CHAINS, 1 << best))


@dataclass
class Warmup:
    """The progress of a warm-up, in transitions. Its rounds end at 40, 80, 160 ... until the chains have settled."""

    limit: int  # the last transition
    exact: bool  # whether the user gave the limit, which is then always reached
    start: int  # of the current round
    end: int  # of the current round
    arrived: bool  # whether the chains have ascended
    learnt: bool  # whether the metric has been learnt
    frozen: bool  # whether it has ended
    accept: float  # the mean acceptance probability that the step size is tuned to
    divergences: int = 0  # transitions that diverged since the metric was last learnt

    @classmethod
    def of(cls, limit: int, exact: bool, arrived: bool, learnt: bool, accept: float) -> Warmup:
        return cls(limit, exact, 0, next_round(0, limit, exact), arrived, learnt, limit == 0, accept)

    @property
    def learns_until(self) -> int:
        """The transition of the current round after which the metric stays as it is."""
        return self.start + math.ceil(LEARNING_SHARE * (self.end - self.start))

    def learns_at(self, now: int) -> bool:
        """Whether the metric is learnt after this transition."""
        last = self.learns_until
        return now == last or (now < last and (now <= 4 or now % max(4, now // 8) == 0))

    def go_on(self) -> None:
        """Begin another round."""
        self.start, self.end = self.end, next_round(self.end, self.limit, self.exact)


def next_round(now: int, limit: int, exact: bool) -> int:
    """The end of the round after this transition; the last round of an exact warm-up is not a short one."""
    end = max(2 * now, FIRST_ROUND_STEPS)
    return limit if end >= limit or (exact and 3 * end > 2 * limit) else end


def settled(window: Window, steps: int, quantities: Callable[[Tensor], Tensor] | None = None) -> bool:
    """Whether the chains have forgotten their starts: they agree, and have run for many times their memory.

    They are compared in all coordinates, or in some `quantities` (..., Q) of vectors (..., P).

    Agreement is that of the superchains, or the chains, in the second half of the warm-up so far. The memory of a chain
    is its integrated autocorrelation time, the transitions per effective draw. With E effective draws per superchain,
    the square of nested R-hat exceeds one by noise of about 1 / E, and the largest of some hundred values by 8 / E.
    """
    x = window.recent()  # (*B, K, S, P)
    x = x if quantities is None else quantities(x)
    ids = superchain_ids(x.shape[-3])
    for member in x.reshape(-1, *x.shape[-3:]):
        ess = max(float(ess_mean(member).nan_to_num(nan=0.0).min()), 1e-9)
        memory = member[..., 0].numel() * window.stride / ess
        groups = len(member) if ids is None else int(ids[-1]) + 1
        noise = min(math.sqrt(1 + NOISE_VARIANCES * groups / ess), MAX_SETTLED_R_HAT)
        if memory * SETTLED_MEMORIES > steps or not disagreement(member, ids) < max(SETTLED_R_HAT, noise):
            return False
    return True
