"""The Poisson mixture: counts with one rate per component and column.

p(y) = sum_k pi_k prod_d exp(-r_kd) r_kd^{y_d} / y_d!

M-step:   r_kd = sum_n q_nk y_nd / sum_n q_nk

log p(y | r) is a difference of numbers that grow as y log y. To avoid cancellation it is computed relative to the mean
rate c of the data: y log(r / c) - (r - c), which is small for r near c, plus log p(y | c), which is constant.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import require
from priory.core.flat import Param
from priory.latent.base import Rows, Theta
from priory.latent.columns import ColumnMixture, flat

MIN_RATE = 1e-12  # EM could never change a rate of exactly 0


class PoissonMixture(ColumnMixture):
    """A mixture of K components of independent Poisson counts.

    Data are integers >= 0, (n, D) or (n,); NaN marks a missing value. The parameters are `weights` (K,) and `rates`
    (K, D).

    Args:
        k: Number of components K.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> PoissonMixture("two")
        Traceback (most recent call last):
        ...
        priory.InputError: The 'k' argument of PoissonMixture must be an integer >= 1, got 'two'.
    """

    parameter: ClassVar[str] = "rates"

    def param(self, shape: tuple[int, ...]) -> Param:
        """Rates."""
        return Param(shape, constraints.positive)

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """c, the mean of each column."""
        super().look(rows)
        return {"centre": flat(rows["y"]).nanmean(0).clamp_min(MIN_RATE)}

    def terms(self, means: Tensor) -> tuple[Tensor, Tensor]:
        """y log(r / c) - (r - c)."""
        centre = self.frame["centre"]
        return (means / centre).log(), centre - means

    def bounded(self, means: Tensor) -> Tensor:
        """Clamp rates to positive values."""
        return means.clamp_min(MIN_RATE)

    def base(self, rows: Rows) -> Tensor:
        """log p(y | c), summed over columns."""
        y, centre = flat(rows["y"]), self.frame["centre"]
        return (y * centre.log() - centre - torch.lgamma(y + 1)).nansum(1)

    def emit(self, theta: Theta, z: Tensor, generator: torch.Generator) -> Tensor:
        """A count for each column."""
        return torch.poisson(theta["rates"][z], generator=generator)

    def check_rows(self, rows: Rows) -> None:
        """Check that all values are counts."""
        super().check_rows(rows)
        wrong = ((rows["y"] < 0) | (rows["y"] != rows["y"].floor())) & ~rows["y"].isnan()
        require(not bool(wrong.any()), "y", repr(self), "be integers >= 0", f"{rows['y'][wrong][:1].tolist()}")
