"""Base class of mixtures whose columns are independent given the component.

    log p(y | k) = sum_d [ y_d a_kd + b_kd ],      T(y) = (y, seen, 1)

with seen_d = 1 where y_d has a value. A missing value, NaN, is marginalised by leaving its term out.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from priory.core.errors import require
from priory.latent.base import Rows, Theta
from priory.latent.mixture import MixtureModel

if TYPE_CHECKING:
    from priory.core.flat import Param


class ColumnMixture(MixtureModel):
    """Base class of mixtures with one parameter per component and column, the mean of that column."""

    missing: ClassVar[bool] = True
    soft: ClassVar[float] = 0.1
    parameter: ClassVar[str]  # the name of the parameter

    @abstractmethod
    def terms(self, means: Tensor) -> tuple[Tensor, Tensor]:
        """a and b of the log density, for the parameter (K, D)."""

    @abstractmethod
    def bounded(self, means: Tensor) -> Tensor:
        """Clamp the parameter to the interior of its range, where the log density is finite."""

    @abstractmethod
    def param(self, shape: tuple[int, ...]) -> Param:
        """The parameter's shape and support, for components and columns."""

    def components(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare one parameter per component and column."""
        require(len(shapes[0]) < 2, "y", repr(self), "be (n, D), or (n,)", f"rows of the shape {shapes[0]}")
        return {self.parameter: self.param((self.k, *shapes[0]))}

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """Keep nothing; warn about rows, and raise an error for a column without a value."""
        seen = ~flat(rows["y"]).isnan()
        empty = ", ".join(map(str, (~seen.any(0)).nonzero()[:, 0].tolist()))
        require(not empty, "y", repr(self), "have a value in each column", f"only NaN in column {empty}")
        lost = int((~seen.any(1)).sum())
        self.warn_of(len(seen), lost)
        return {}

    def features(self, rows: Rows) -> Tensor:
        """(y, seen, 1), (2 D + 1, n)."""
        y = flat(rows["y"]).T
        seen = ~y.isnan()
        return torch.cat([torch.where(seen, y, 0.0), seen.to(y.dtype), torch.ones_like(y[:1])])

    def natural(self, theta: Theta) -> Tensor:
        """(a, b, 0), (K, 2 D + 1)."""
        means = theta[self.parameter].reshape(self.k, -1)
        a, b = self.terms(means)
        return torch.cat([a, b, torch.zeros_like(means[:, :1])], 1)

    def maximise(self, sums: Tensor, theta: Theta) -> Theta:
        """Return the mean of the observed values of each column."""
        d = (sums.shape[1] - 1) // 2
        total, seen, _ = sums.split([d, d, 1], 1)
        there = seen > 1e-10
        old = theta[self.parameter]
        means = torch.where(there, total / torch.where(there, seen, 1.0), old.reshape(self.k, d).to(sums.dtype))
        return {self.parameter: self.bounded(means).reshape(old.shape)}

    def coordinates(self, rows: Rows) -> Tensor:
        """Return the columns centred and scaled, with zeros for missing values."""
        y = flat(rows["y"])
        centred = y - y.nanmean(0)
        spread = centred.square().nanmean(0).sqrt()
        return (centred / torch.where(spread > 0, spread, 1.0)).nan_to_num(0.0)


def flat(y: Tensor) -> Tensor:
    """Rows as (n, D)."""
    return y[:, None] if y.ndim == 1 else y
