"""The end of stochastic steps by a rule: a constant rate until the bound stops rising, then a decay to zero.

The bounds of 250 steps are averaged. Where one average exceeds the one before by less than twice its standard error and
by less than 0.05 nats, or by less than 0.01 nats, the rate falls linearly to zero over a quarter of the steps so far,
which averages the noise of the steps away (Welandawe et al. 2022), and the fit ends.

References:
    Welandawe, Andersen, Vehtari and Huggins (2022), Robust, automated, and accurate black-box variational inference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_STEPS = 250
MIN_DECAY_STEPS = 500
CLEAR_RISE_NATS, NEGLIGIBLE_RISE_NATS = 0.05, 0.01
RISE_ERRORS = 2.0


@dataclass
class Plateau:
    """Sums over the current window of steps, the average of the one before, and the step at which the decay began."""

    steps: int = 0
    total: float = 0.0
    squares: float = 0.0
    mean: float = -math.inf  # of the last complete window
    error: float = 0.0
    decay_from: int = 0  # 0 while the rate is constant
    risen: bool = False  # whether the bound was still rising when the decay began

    def record(self, bound: float, most: int) -> None:
        """Add the bound of a step to the window; `most` is the largest number of steps of the fit."""
        self.steps += 1
        shift = bound - self.mean if math.isfinite(self.mean) else bound
        self.total, self.squares = self.total + shift, self.squares + shift * shift
        if self.steps % WINDOW_STEPS == 0:
            average = self.total / WINDOW_STEPS
            variance = max(0.0, self.squares / WINDOW_STEPS - average**2)
            error = math.sqrt(variance / WINDOW_STEPS)
            rise = average if math.isfinite(self.mean) else math.inf
            noise = RISE_ERRORS * math.hypot(error, self.error)
            flat = rise < NEGLIGIBLE_RISE_NATS or (rise < noise and rise < CLEAR_RISE_NATS)
            if self.decay_from == 0 and flat:
                self.decay_from = self.steps
            self.mean = self.mean + average if math.isfinite(self.mean) else average
            self.error, self.total, self.squares = error, 0.0, 0.0
        if self.decay_from == 0 and self.steps >= most - MIN_DECAY_STEPS:
            self.decay_from, self.risen = self.steps, True

    @property
    def decay_steps(self) -> int:
        """Number of steps over which the rate falls to zero."""
        return max(MIN_DECAY_STEPS, self.decay_from // 4)

    @property
    def factor(self) -> float:
        """The rate of the next step as a share of the first."""
        if self.decay_from == 0:
            return 1.0
        return max(0.0, 1 - (self.steps - self.decay_from) / self.decay_steps)

    @property
    def ended(self) -> bool:
        """Whether the rate has reached zero."""
        return self.decay_from > 0 and self.steps >= self.decay_from + self.decay_steps
