"""Variational inference with a covariance of low rank plus a diagonal (Ong, Nott and Smith 2018).

    q(w) = N(m, F F' + diag(d^2)),   F: P x rank

It keeps the strongest few correlations, for networks whose full covariance doesn't fit into memory. Cost of a step:
`samples` passes and O(samples P rank + P rank^2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from priory.core.errors import is_integer, require
from priory.core.linalg import cholesky
from priory.families.low_rank import LowRankForm
from priory.methods.variational.arrival import best_gaussian
from priory.methods.variational.base import VariationalMethod
from priory.methods.variational.fixed_draws import begin_fixed_draws
from priory.methods.variational.frame import Frame

if TYPE_CHECKING:
    from torch import Tensor

    from priory.methods.variational.arrival import Search
    from priory.models.target import Target

CLOSEST_ITERATIONS = 300  # of L-BFGS towards a Gaussian


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

    def begin_fixed(self, target: Target, search: Search, generator: torch.Generator, shape: torch.Size) -> Any:
        best, form = best_gaussian(search, full=True), self.form(target)
        precision = torch.cholesky_inverse(cholesky(best.q.covariance(), "covariance of q"))
        frame = Frame(best.q.loc, precision.diagonal().rsqrt())
        inside = frame.root[:, None] * precision * frame.root
        columns = target.size + form.rank
        theta = closest_to(form, inside, generator)
        return begin_fixed_draws(form, theta, frame, search, columns, shape, best.status_of_rivals())


def closest_to(form: LowRankForm, precision: Tensor, generator: torch.Generator) -> Tensor:
    """Return the theta (K,) of the q with mean zero that is closest to N(0, precision^-1), by L-BFGS.

    Minus the bound is tr(precision (F F' + diag(d^2))) / 2 - log det(F F' + diag(d^2)) / 2 up to a constant.
    """
    zero = torch.zeros_like(precision[0])
    theta = form.initial(zero, torch.ones_like(zero), generator).requires_grad_()
    search = torch.optim.LBFGS([theta], max_iter=CLOSEST_ITERATIONS, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        q = form.family(theta)
        spread = (precision @ q.factor * q.factor).sum() + (precision.diagonal() * (2 * q.log_diag).exp()).sum()
        value = 0.5 * spread - q.entropy()
        value.backward()
        return value

    with torch.enable_grad():
        search.step(loss)
    found = theta.detach().clone()
    found[: form.size] = 0.0
    return found
