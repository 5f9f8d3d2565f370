"""The multinomial mixture: counts over categories, such as words of documents (a mixture of unigrams).

p(y) = sum_k pi_k  (sum_d y_d)! / prod_d y_d!  prod_d p_kd^{y_d}

M-step:   p_kd = sum_n q_nk y_nd / sum_nd' q_nk y_nd'
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from priory.core.errors import InputError, require
from priory.core.flat import Param
from priory.latent.base import Rows, Theta
from priory.latent.mixture import MixtureModel

MIN_SHARE = 1e-12  # EM could never change a probability of exactly 0


class MultinomialMixture(MixtureModel):
    """A mixture of K multinomial distributions over D categories.

    Data are counts (n, D); a row with a single 1 is one categorical observation. The parameters are `weights` (K,) and
    `probs` (K, D).

    Args:
        k: Number of components K.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> MultinomialMixture(2, given="prior")
        Traceback (most recent call last):
        ...
        priory.InputError: The 'given' argument of MultinomialMixture must be 'weights', 'z' or both, got 'prior'.
    """

    soft: ClassVar[float] = 0.1

    def components(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Probabilities of the categories."""
        ok = len(shapes[0]) == 1 and shapes[0][0] > 1
        require(ok, "y", repr(self), "be (n, D) with two categories or more", f"rows of the shape {shapes[0]}")
        return {"probs": Param((self.k, *shapes[0]), constraints.simplex)}

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """Keep nothing; warn about rows without counts."""
        self.warn_of(len(rows), int((rows["y"].sum(1) == 0).sum()))
        return {}

    def features(self, rows: Rows) -> Tensor:
        """(y, 1), (D + 1, n)."""
        return torch.cat([rows["y"].T, torch.ones_like(rows["y"].T[:1])])

    def natural(self, theta: Theta) -> Tensor:
        """(log p, 0), (K, D + 1)."""
        log_probs = theta["probs"].log()
        return torch.cat([log_probs, torch.zeros_like(log_probs[:, :1])], 1)

    def base(self, rows: Rows) -> Tensor:
        """log (sum_d y_d)! - sum_d log y_d!."""
        return torch.lgamma(rows["y"].sum(1) + 1) - torch.lgamma(rows["y"] + 1).sum(1)

    def maximise(self, sums: Tensor, theta: Theta) -> Theta:
        """Return the share of each category in the counts of a component."""
        counts = sums[:, :-1]
        total = counts.sum(1, keepdim=True)
        shares = torch.where(total > 0, counts / torch.where(total > 0, total, 1.0), theta["probs"].to(sums.dtype))
        return {"probs": raised_shares(shares, MIN_SHARE)}

    def coordinates(self, rows: Rows) -> Tensor:
        """Return square roots of the shares of each row, which stabilises their variance."""
        return (rows["y"] / rows["y"].sum(1, keepdim=True).clamp_min(1.0)).sqrt()

    def emit(self, theta: Theta, z: Tensor, generator: torch.Generator) -> Tensor:
        """Raise an error, because the model has no distribution of the number of counts in a row."""
        raise InputError(f"{self!r} can't make rows: it does not say how many counts a row has.")

    def check_rows(self, rows: Rows) -> None:
        """Check that all values are counts."""
        super().check_rows(rows)
        wrong = (rows["y"] < 0) | (rows["y"] != rows["y"].floor())
        require(not bool(wrong.any()), "y", repr(self), "be integers >= 0", f"{rows['y'][wrong][:1].tolist()}")


def raised_shares(shares: Tensor, least: float) -> Tensor:
    """Maximise sum_d s_d log p_d over p with no p_d below `least`: small shares are raised, the rest is rescaled."""
    low = shares <= least
    while True:
        scale = (1 - least * low.sum(1, keepdim=True)) / torch.where(low, 0.0, shares).sum(1, keepdim=True)
        lower = low | (shares * scale <= least)  # each round can only add shares, so the loop ends
        if torch.equal(lower, low):
            return torch.where(low, least, shares * scale)
        low = lower
