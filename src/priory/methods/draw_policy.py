"""Where a sampler stores its draws, and when it has enough of them.

A `DrawPolicy` is what a sampler declares in its `Traits`; a `DrawMonitor` follows one run. The effective sample size is
computed at intervals that grow with the number of draws, so that all computations together cost a few times the last.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from priory.core.distributed import gather, world
from priory.core.errors import require
from priory.diagnostics import ess_bulk

if TYPE_CHECKING:
    from torch import Tensor

FIRST_CHECK_DRAWS = 50  # draws per chain before the effective sample size is first computed
ESS_BLOCK_NUMBERS = 1 << 22  # numbers of draws whose effective sample size is computed together


class StoredDraws(Protocol):
    """The draws of a run so far, in memory or on disk."""

    def __len__(self) -> int: ...

    @property
    def chains(self) -> int:
        """The number of chains, K."""
        ...

    @property
    def size(self) -> int:
        """The number of coordinates, P."""
        ...

    def columns(self, start: int, stop: int) -> Tensor:
        """The coordinates from `start` to `stop` of all draws, (*B, K, S, stop - start)."""
        ...


@dataclass(frozen=True)
class DrawPolicy:
    """The target effective sample size of a sampler, and where it stores its draws.

    Args:
        until_ess: Sampling ends when the smallest bulk effective sample size of all coordinates reaches this number.
            Default: None, sampling ends after the planned steps.
        store: Folder for the draws, for more of them than fit into memory. Default: None, they are kept in memory.
    """

    until_ess: float | None = None
    store: str | os.PathLike[str] | None = None

    def check(self, owner: str, spread: bool) -> None:
        """Check that the target is a positive number and that the folder can be written to."""
        until, store = self.until_ess, self.store
        number = isinstance(until, (int, float)) and not isinstance(until, bool) and 0 < until < math.inf
        require(until is None or number, "until_ess", owner, "be a positive number", repr(until))
        if store is None:
            return
        require(isinstance(store, (str, os.PathLike)), "store", owner, "be the path of a folder", repr(store))
        require(not os.path.isfile(store), "store", owner, "be a folder", f"the file {os.fspath(store)}")
        folder = os.path.dirname(os.path.abspath(store))
        require(os.path.isdir(folder), "store", owner, "lie in a folder that exists", folder)
        require(not spread, "store", owner, "be left out when chains run on several processes", os.fspath(store))

    def monitor(self, spread: bool) -> DrawMonitor:
        """Return a monitor of the draws of one run; with `spread`, of all processes together."""
        return DrawMonitor(self.until_ess, spread)


class DrawMonitor:
    """Monitors the draws of one run: their effective sample size, and the step at which there will be enough."""

    def __init__(self, until_ess: float | None, spread: bool) -> None:
        self.until_ess, self.spread = until_ess, spread
        self.ess: float | None = None  # the smallest of all coordinates, when it was last computed
        self.first_step = 0  # steps before the first draw
        self.expected_end: int | None = None  # the step at which there should be enough draws
        self._next_check = FIRST_CHECK_DRAWS  # draws at which the effective sample size is computed next

    def enough(self, draws: StoredDraws, step: int, planned: int, watched: bool) -> bool:
        """Whether the effective sample size has reached its target.

        The effective sample size is computed only if it ends the run, or if it is `watched`. It grows in proportion to
        the draws, so the next check is at the number of draws that should be enough.
        """
        drawn = len(draws)
        if drawn < self._next_check or (self.until_ess is None and not watched):
            return False
        self.ess = smallest_ess(draws, self.until_ess is not None and self.spread)
        if self.until_ess is None:
            self._next_check = 2 * drawn
            return False
        ratio = self.until_ess / self.ess if self.ess > 0 else math.inf
        self._next_check = math.ceil(drawn * min(2.0, max(1.1, 1.05 * ratio)))
        more = (ratio - 1) * (step - self.first_step)
        self.expected_end = step + math.ceil(max(0.0, min(more, planned - step)))
        return ratio <= 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"next_check": self._next_check, "first_step": self.first_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self._next_check, self.first_step = state["next_check"], state["first_step"]

    def synchronise(self, device: torch.device) -> None:
        """Move the next check to the latest one of all processes, so that they check together."""
        self._next_check = int(gather(torch.tensor([self._next_check], device=device)).max())


def smallest_ess(draws: StoredDraws, spread: bool = False) -> float:
    """Return the smallest bulk effective sample size of all coordinates; with `spread`, over all processes.

    It is zero while undefined for some coordinate, one that never varies or is not finite.
    """
    numbers = len(draws) * draws.chains * (world() if spread else 1)
    width, smallest = max(1, ESS_BLOCK_NUMBERS // numbers), math.inf
    for start in range(0, draws.size, width):
        x = draws.columns(start, start + width)
        x = x.reshape(-1, *x.shape[-2:])
        found = ess_bulk(gather(x) if spread else x)
        smallest = min(smallest, float(found.nan_to_num(nan=0.0).min()))
    return smallest
