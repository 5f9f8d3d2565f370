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
from priory.diagnostics import ess_bulk, ess_tail, nested_r_hat, r_hat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Quantities = Callable[[Tensor], Tensor]  # of vectors (..., P), (..., Q)

FIRST_CHECK_DRAWS = 50  # draws per chain at the first check
MIN_FIRST_CHECK_DRAWS, MAX_FIRST_CHECK_DRAWS = 32, 100  # the same, for a run whose length the user has not given
DEFAULT_ESS = 1_000  # bulk effective sample size that is enough
TAIL_SHARE = 0.4  # tail effective sample size that is enough, relative to that of the bulk
LONG_CHAIN_ESS = 100  # effective draws of each chain, from which R-hat compares single chains
ENOUGH_R_HAT = 1.01  # nested R-hat below which superchains agree
ESS_BLOCK_ELEMENTS = 1 << 22  # numbers of draws whose effective sample size is computed together
MIN_SUPERCHAIN_CHAINS = 16  # chains, for superchains to be formed
MANY_CHAINS = 64  # chains, for 8 superchains instead of 4


def superchain_ids(chains: int) -> Tensor | None:
    """The superchain of each chain, (K,): 4 of them from 16 chains on, 8 from 64 on; None for fewer chains.

    Superchains have the same number of chains each, so there are none if 4 doesn't divide their number.

    >>> superchain_ids(16).tolist()
    [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    """
    count = 8 if chains >= MANY_CHAINS and chains % 8 == 0 else 4
    if chains < MIN_SUPERCHAIN_CHAINS or chains % count:
        return None
    return torch.arange(chains) * count // chains


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

    def pieces(self) -> Iterator[Tensor]:
        """Yield all draws in order, (*B, K, some, P)."""
        ...


@dataclass(frozen=True)
class DrawPolicy:
    """The target effective sample size of a sampler, and where it stores its draws.

    Args:
        until_ess: Sampling ends when the smallest bulk effective sample size of all coordinates reaches this number.
            Default: None, sampling ends after the planned steps.
        store: Folder for the draws, for more of them than fit into memory. Default: None, they are kept in memory.
        stops_early: Whether a run whose length the user has not given ends when its draws are enough. Default: False.
    """

    until_ess: float | None = None
    store: str | os.PathLike[str] | None = None
    stops_early: bool = False

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

    def monitor(self, spread: bool, open_ended: bool, quantities: Quantities | None = None) -> DrawMonitor:
        """Return a monitor of the draws of one run; with `spread`, of all processes together.

        An `open_ended` run, whose length the user has not given, ends when the draws are enough by all criteria.
        Draws are enough by some `quantities` (..., Q) of vectors (..., P). Default: None, by all coordinates.
        """
        strict = open_ended and self.stops_early
        return DrawMonitor(self.until_ess or (DEFAULT_ESS if strict else None), spread, strict, quantities)


@dataclass(frozen=True)
class Quality:
    """The smallest effective sample sizes of all coordinates, and the largest R-hat, where they were computed."""

    bulk: float
    tail: float = math.inf
    r_hat: float = 1.0

    def progress(self, wanted: float, strict: bool) -> float:
        """The share of the draws that are needed; one or more if there are enough."""
        share = self.bulk / wanted
        if not strict:
            return share
        share = min(share, self.tail / (TAIL_SHARE * wanted))
        # R-hat^2 - 1 falls in proportion to the draws
        return min(share, (ENOUGH_R_HAT**2 - 1) / max(self.r_hat**2 - 1, 1e-12))


class DrawMonitor:
    """Monitors the draws of one run: their quality, and the step at which there will be enough."""

    def __init__(
        self, until_ess: float | None, spread: bool, strict: bool = False, quantities: Quantities | None = None
    ) -> None:
        self.until_ess, self.spread, self.strict, self.quantities = until_ess, spread, strict, quantities
        self.quality: Quality | None = None  # when it was last computed
        self.first_step = 0  # steps before the first draw
        self.expected_end: int | None = None  # the step at which there should be enough draws
        self._next_check: int | None = None  # draws at which the quality is computed next

    def enough(self, draws: StoredDraws, step: int, planned: int, watched: bool) -> bool:
        """Whether there are enough draws.

        Their quality is computed only if it ends the run, or if it is `watched`. It grows in proportion to the draws,
        so the next check is at the number of draws that should be enough.
        """
        drawn = len(draws)
        if self._next_check is None:
            few = math.ceil(0.8 * (self.until_ess or DEFAULT_ESS) / draws.chains)
            strict = max(MIN_FIRST_CHECK_DRAWS, min(MAX_FIRST_CHECK_DRAWS, few))
            self._next_check = strict if self.strict else FIRST_CHECK_DRAWS
        if drawn < self._next_check or (self.until_ess is None and not watched):
            return False
        spread = self.until_ess is not None and self.spread
        given = draws, spread, self.quantities
        self.quality = quality_of(*given) if self.strict else Quality(smallest_ess(*given))
        if self.until_ess is None:
            self._next_check = 2 * drawn
            return False
        share = self.quality.progress(self.until_ess, self.strict)
        ratio = 1 / share if share > 0 else math.inf
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
        latest = int(gather(torch.tensor([self._next_check or 0], device=device)).max())
        self._next_check = latest or None


def smallest_ess(draws: StoredDraws, spread: bool = False, quantities: Quantities | None = None) -> float:
    """Return the smallest bulk effective sample size of all quantities; with `spread`, over all processes.

    It is zero while undefined for some quantity, one that never varies or is not finite.
    """
    return min(float(ess_bulk(x).nan_to_num(nan=0.0).min()) for x in blocks_of(draws, spread, quantities))


def quality_of(draws: StoredDraws, spread: bool = False, quantities: Quantities | None = None) -> Quality:
    """Return the quality of the draws; with `spread`, over all processes."""
    found = []
    for x in blocks_of(draws, spread, quantities):
        processes = world() if spread else 1
        ids = superchain_ids(len(x) // processes)
        if ids is not None and spread:  # no two processes share a superchain
            ids = (ids + torch.arange(processes)[:, None] * (1 + ids[-1])).flatten()
        bulk, tail = (float(measure(x).nan_to_num(nan=0.0).min()) for measure in (ess_bulk, ess_tail))
        long = bulk >= LONG_CHAIN_ESS * len(x)  # then single chains can be compared too
        found.append((bulk, tail, max(disagreement(x, ids), disagreement(x, None) if long else 1.0)))
    bulks, tails, reductions = zip(*found, strict=True)
    return Quality(min(bulks), min(tails), max(1.0, *reductions))


def blocks_of(draws: StoredDraws, spread: bool, quantities: Quantities | None = None) -> Iterator[Tensor]:
    """Yield draws of some quantities at a time, (chain, draw, quantity); with `spread`, of all processes.

    The quantities are all coordinates, or the given functions of them.
    """
    numbers = len(draws) * draws.chains * (world() if spread else 1)
    width = max(1, ESS_BLOCK_ELEMENTS // numbers)
    found = None if quantities is None else torch.cat([quantities(piece) for piece in draws.pieces()], -2)
    for start in range(0, draws.size if found is None else found.shape[-1], width):
        x = draws.columns(start, start + width) if found is None else found[..., start : start + width]
        x = x.reshape(-1, *x.shape[-2:])
        yield gather(x) if spread else x


def disagreement(x: Tensor, ids: Tensor | None) -> float:
    """The largest R-hat of draws x (chain, draw, ...): of superchains, or of chains if there are none.

    Superchains are compared in their means and in their spread, and so are the two halves of the time, of all chains
    together: chains that start alike and drift alike agree with each other at every moment.
    """
    if ids is None:
        return float(r_hat(x).nan_to_num(nan=math.inf).max())
    half = x.shape[1] // 2
    halves = torch.cat([x[:, :half], x[:, half : 2 * half]])
    early = torch.arange(2).repeat_interleave(len(x))
    found = []
    for y, groups in ((x, ids), (halves, early)):
        folded = (y - y.flatten(0, 1).median(0).values).abs()
        found += [nested_r_hat(y, groups), nested_r_hat(folded, groups)]
    return float(torch.stack(found).nan_to_num(nan=math.inf).max())
