"""The Bernoulli mixture, or latent class analysis: binary columns with one probability per component and column.

p(y) = sum_k pi_k prod_d p_kd^{y_d} (1 - p_kd)^{1 - y_d}

M-step:   p_kd = sum_n q_nk y_nd / sum_n q_nk
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import require
from priory.core.flat import Param
from priory.latent.base import Rows, Theta
from priory.latent.columns import ColumnMixture

MIN_DISTANCE = 1e-12  # of a probability from 0 and 1; EM could never change a probability of exactly 0


class BernoulliMixture(ColumnMixture):
    """A mixture of K components of independent binary columns (latent class analysis).

    Data are 0 and 1, (n, D) or (n,); NaN marks a missing value. The parameters are `weights` (K,) and `probs` (K, D).

    Args:
        k: Number of components K.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> BernoulliMixture(0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'k' argument of BernoulliMixture must be an integer >= 1, got 0.
    """

    parameter: ClassVar[str] = "probs"

    def param(self, shape: tuple[int, ...]) -> Param:
        """Probabilities."""
        return Param(shape, constraints.unit_interval)

    def terms(self, means: Tensor) -> tuple[Tensor, Tensor]:
        """y logit(p) + log(1 - p)."""
        return means.log() - torch.log1p(-means), torch.log1p(-means)

    def bounded(self, means: Tensor) -> Tensor:
        """Clamp probabilities away from 0 and 1."""
        closest = max(MIN_DISTANCE, torch.finfo(self.dtype).eps)
        return means.clamp(closest, 1 - closest)

    def emit(self, theta: Theta, z: Tensor, generator: torch.Generator) -> Tensor:
        """Draw 0 or 1 for each column."""
        return torch.bernoulli(theta["probs"][z], generator=generator)

    def check_rows(self, rows: Rows) -> None:
        """Check that all values are 0 or 1."""
        super().check_rows(rows)
        wrong = (rows["y"] != 0) & (rows["y"] != 1) & ~rows["y"].isnan()
        require(not bool(wrong.any()), "y", repr(self), "be 0 and 1", f"{rows['y'][wrong][:1].tolist()}")
