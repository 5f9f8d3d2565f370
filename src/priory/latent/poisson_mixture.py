"""The Poisson mixture: rows of counts, each column with its own rate in each component.

p(y) = sum_k pi_k prod_d exp(-r_kd) r_kd^{y_d} / y_d!

M-step:   r_kd = sum_n q_nk y_nd / sum_n q_nk
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.errors import require
from priory.flat import Param
from priory.latent.base import Rows
from priory.latent.columns import ColumnMixture, flat

LEAST = 1e-12  # a rate of exactly 0 could never change again


class PoissonMixture(ColumnMixture):
    """K components of independent counts, `rates` (K, D). Data are whole numbers from 0, or NaN.

    >>> PoissonMixture("two")
    Traceback (most recent call last):
    ...
    priory.errors.InputError: The 'k' of PoissonMixture must be a whole number from 1. Got 'two' instead.
    """

    parameter: ClassVar[str] = "rates"

    def param(self, shape: tuple[int, ...]) -> Param:
        """Rates."""
        return Param(shape, constraints.positive)

    def terms(self, means: Tensor) -> tuple[Tensor, Tensor]:
        """y log r - r."""
        return means.log(), -means

    def bounded(self, means: Tensor) -> Tensor:
        """Above zero."""
        return means.clamp_min(LEAST)

    def base(self, rows: Rows) -> Tensor:
        """-log y!, summed over columns."""
        return -torch.lgamma(flat(rows["y"]).nan_to_num(0.0) + 1).sum(1)

    def check_rows(self, rows: Rows) -> None:
        """Only counts."""
        super().check_rows(rows)
        wrong = ((rows["y"] < 0) | (rows["y"] != rows["y"].floor())) & ~rows["y"].isnan()
        require(not bool(wrong.any()), "y", repr(self), "be whole numbers from 0", f"{rows['y'][wrong][:1].tolist()}")
