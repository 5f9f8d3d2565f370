"""Variational inference with a covariance of low rank plus a diagonal (Ong, Nott and Smith 2018).

    q(w) = N(m, F F' + diag(d^2)),   F: P x rank

The strongest few correlations, for networks whose full covariance doesn't fit. Cost of a step: `samples` passes and
O(samples P rank + P rank^2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from priory.core.errors import require, whole
from priory.families.low_rank import LowRankForm
from priory.methods.variational.base import VariationalMethod

if TYPE_CHECKING:
    from priory.models.target import Target


@dataclass(frozen=True)
class LowRank(VariationalMethod):
    """Gaussian variational inference with `rank` directions of correlation; other options as in `MeanField`.

    >>> LowRank(rank=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'rank' argument of LowRank must be an integer >= 1, got 0.
    """

    rank: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(whole(self.rank, 1), "rank", "LowRank", "be an integer >= 1", self.rank)

    def form(self, target: Target) -> LowRankForm:
        return LowRankForm(target.size, min(self.rank, target.size))
