"""What a person's own code sees of a fit on its way, and how it ends one early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from priory.core.errors import require, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.posteriors import Posterior


@dataclass(frozen=True)
class Moment:
    """What a callback sees: where the fit is, its numbers, and the posterior as it would be if it stopped here."""

    step: int
    steps: int
    epoch: int
    metrics: dict[str, float]
    posterior: Callable[[], Posterior]


def says_stop(answer: Any) -> bool:
    """Whether a callback's answer is True: Python's, an array's or a tensor's; anything else means to go on."""
    boolean = getattr(answer, "ndim", 1) == 0 and "bool" in str(getattr(answer, "dtype", ""))
    return answer is True or (boolean and bool(answer))


@runtime_checkable
class Remembering(Protocol):
    """A callback with a memory, which checkpoints keep."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as JSON takes it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember it again."""
        ...


@dataclass
class EarlyStop:
    """Ends a fit when a number has not improved for `patience` epochs.

    With `data`, the number is the mean negative log predictive density of those rows; without, the mean
    training loss of the epoch. `least` is the improvement that counts, in nats. The posterior is that of the last step.
    """

    patience: int = 10
    data: Any = field(default=None, repr=False)
    least: float = 0.0
    samples: int = 16
    best: float = field(default=float("inf"), init=False)
    waited: int = field(default=0, init=False)
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in ("patience", "samples"):
            value = getattr(self, name)
            require(whole(value, 1), name, "EarlyStop", "be an integer >= 1", repr(value))
        require(self.least >= 0, "least", "EarlyStop", "be zero or more", self.least)
        pair = self.data is None or (isinstance(self.data, (tuple, list)) and len(self.data) == 2)
        require(pair, "data", "EarlyStop", "be inputs and targets, (X, y)", type(self.data).__name__)

    def __call__(self, moment: Moment) -> bool:
        """Whether to stop."""
        if moment.step <= self.step:  # another fit
            self.best, self.waited = float("inf"), 0
        self.step = moment.step
        if self.data is None:
            score = moment.metrics["loss"]
        else:
            x, y = self.data
            score = -float(moment.posterior().predict(x, samples=self.samples).log_prob(y).mean())
        if score < self.best - self.least:
            self.best, self.waited = score, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"best": self.best, "waited": self.waited, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.best, self.waited, self.step = float(state["best"]), int(state["waited"]), int(state["step"])
