"""A progress bar on a terminal, and nothing elsewhere.

With `rich` installed the bar is rich's; without it, one line that overwrites itself. Both show the main metrics and the
time left.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

REFRESH_SECONDS = 0.2  # between two updates of the bar
METRIC_FORMATS = {  # of the metrics that are shown
    "elbo": "elbo {:,.1f}",
    "loss": "loss {:,.1f}",
    "bound": "bound {:,.1f}",
    "nll": "nll {:,.1f}",
    "kl": "kl {:,.1f}",
    "step_size": "step size {:.3g}",
    "learning_rate": "rate {:.2g}",
    "acceptance": "acceptance {:.2f}",
    "divergences": "divergences {:.0f}",
    "ess": "ESS {:,.0f}",
}


class Progress:
    """A progress bar on standard error, if that is a terminal and the user wants one."""

    def __init__(self, label: str, steps: int, wanted: bool, done: int = 0) -> None:
        self.label, self.steps, self.first = label, max(1, steps), done
        self.on = wanted and sys.stderr.isatty()
        self.began = time.monotonic()
        self._next = 0.0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self.on:
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Rich
            except ImportError:
                return self
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Rich(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._bar.start()
            self._bar.add_task(self.label, total=self.steps, completed=self.first, text="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.on:
            sys.stderr.write("\n")

    def due(self) -> bool:
        """Whether it is time to draw."""
        return self.on and time.monotonic() >= self._next

    def show(self, done: int, metrics: Mapping[str, float], steps: int | None = None) -> None:
        """Draw the bar at this step; `steps` is the number of steps now expected, if it has changed."""
        self._next = time.monotonic() + REFRESH_SECONDS
        self.steps = self.steps if steps is None else max(1, steps)
        names = [name for name in METRIC_FORMATS if name in metrics and not (name == "loss" and "elbo" in metrics)]
        text = "  ".join(METRIC_FORMATS[name].format(metrics[name]) for name in names)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=self.steps, text=text)
        else:
            left = (time.monotonic() - self.began) / max(1, done - self.first) * (self.steps - done)
            filled = int(24 * done / self.steps)
            bar = "#" * filled + "." * (24 - filled)
            sys.stderr.write(f"\r{self.label} [{bar}] {done}/{self.steps}  {text}  {left:.0f} s left \033[K")
            sys.stderr.flush()
