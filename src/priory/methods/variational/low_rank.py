"""Variational inference with a covariance of low rank plus a diagonal (Ong, Nott and Smith 2018).

    q(w) = N(m, F F' + diag(d^2)),   F: P x rank

It keeps the strongest few correlations, for networks whose full covariance doesn't fit into memory. Cost of a step:
`samples` passes and O(samples P rank + P rank^2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from priory.core.errors import is_integer, require
from priory.families.low_rank import LowRankForm
from priory.methods.variational.base import VariationalMethod

if TYPE_CHECKING:
    from priory.models.target import Target


@dataclass(frozen=True)
class LowRank(VariationalMethod):
    """Gaussian variational inference with a covariance of low rank plus a diagonal.

    Maximises the evidence lower bound over

        q(w) = N(m, F F' + diag(d^2)),    F: P x rank

    Keeps the strongest few correlations, for networks whose full covariance doesn't fit into memory. A step costs
    `samples` passes and O(samples P rank + P rank^2).

    Args:
        rank: Number of columns of F. Default: 5.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.LowRank(rank=1), steps=1000, progress=False)
        >>> round(posterior.mean["weight"].item(), 1)
        1.0

    References:
        Ong, Nott and Smith (2018), Gaussian variational approximation with a factor covariance structure.
    """

    rank: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_integer(self.rank, 1), "rank", "LowRank", "be an integer >= 1", self.rank)

    def form(self, target: Target) -> LowRankForm:
        return LowRankForm(target.size, min(self.rank, target.size))
