"""Callbacks: functions of the user that follow a fit in progress and may end it early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from priory.core.errors import is_integer, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.posteriors import Posterior


@dataclass(frozen=True)
class FitProgress:
    """The state of a fit that a callback receives after every epoch.

    Args:
        step: Number of steps taken.
        steps: Number of steps planned.
        epoch: Number of epochs completed.
        metrics: Mean of each metric of the history over the last epoch.
        posterior: A function that returns the posterior as it would be if the fit ended here.
    """

    step: int
    steps: int
    epoch: int
    metrics: dict[str, float]
    posterior: Callable[[], Posterior]


Moment = FitProgress  # the name under which callbacks have imported it before


def is_stop(answer: Any) -> bool:
    """Whether a callback returned True, as a bool, an array or a tensor; anything else continues the fit."""
    boolean = getattr(answer, "ndim", 1) == 0 and "bool" in str(getattr(answer, "dtype", ""))
    return answer is True or (boolean and bool(answer))


@runtime_checkable
class StatefulCallback(Protocol):
    """A callback whose state is kept in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        ...


@dataclass
class EarlyStop:
    """Ends a fit when a score has not improved for `patience` epochs. The posterior is that of the last step.

    Args:
        patience: Number of epochs without an improvement after which the fit ends. Default: 10.
        data: Held-out rows (X, y); the score is their mean negative log predictive density. Default: None, the score is
            the mean training loss of the epoch.
        least: Smallest decrease of the score, in nats, that counts as an improvement. Default: 0.
        samples: Number of draws per prediction of `data`. Default: 16.

    Example:
        >>> EarlyStop(patience=3).patience
        3
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
            require(is_integer(value, 1), name, "EarlyStop", "be an integer >= 1", repr(value))
        require(self.least >= 0, "least", "EarlyStop", "be zero or more", self.least)
        pair = self.data is None or (isinstance(self.data, (tuple, list)) and len(self.data) == 2)
        require(pair, "data", "EarlyStop", "be inputs and targets, (X, y)", type(self.data).__name__)

    def __call__(self, progress: FitProgress) -> bool:
        """Whether to end the fit."""
        if progress.step <= self.step:  # another fit
            self.best, self.waited = float("inf"), 0
        self.step = progress.step
        if self.data is None:
            score = progress.metrics["loss"]
        else:
            x, y = self.data
            score = -float(progress.posterior().predict(x, samples=self.samples).log_prob(y).mean())
        if score < self.best - self.least:
            self.best, self.waited = score, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, float]:
        """Return the state that a checkpoint keeps."""
        return {"best": self.best, "waited": self.waited, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.best, self.waited, self.step = float(state["best"]), int(state["waited"]), int(state["step"])
