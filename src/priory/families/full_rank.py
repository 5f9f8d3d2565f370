"""The Gaussian with a full covariance, q(w) = N(m, L L'), parametrised by its Cholesky factor L.

    w = m + L eps,    H(q) = sum_i log L_ii + P/2 log(2 pi e)

theta holds L = (I + A) D, with columns relative to the diagonal D = diag(exp(.)), and A strictly lower-triangular.

    w_i = m_i + sum_{j<i} A_ij v_j + v_i,    v = D eps

An entry A_ij is the regression coefficient of w_i on the residual v_j. It is of order one however narrow q is, whereas
the entries of L itself would need steps that shrink with the width of q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.families.base import Family, Form, normal_noise
from priory.families.diagonal import LOG_2_PI_E

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class FullRankFamily(Family):
    """Gaussian with a full covariance, q(w) = N(m, L L').

    Args:
        loc: Means m, (*B, P).
        tril: Lower-triangular Cholesky factor L of the covariance, (*B, P, P), with a positive diagonal.

    Example:
        >>> q = FullRankFamily(torch.zeros(2), torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
        >>> q.moments()[1]
        tensor([ 1., 25.])
    """

    loc: Tensor
    tril: Tensor

    @property
    def size(self) -> int:
        return self.loc.shape[-1]

    def sample(self, n: int, generator: Any) -> Tensor:
        noise = normal_noise(n, self.loc, generator)
        # draws as columns (*B, P, n): one matrix product per member
        return self.loc + (self.tril @ noise.movedim(0, -1)).movedim(-1, 0)

    def log_prob(self, w: Tensor) -> Tensor:
        deviation = w - self.loc  # (..., *B, P)
        z = torch.linalg.solve_triangular(self.tril, columns(deviation, self.loc.ndim), upper=False)
        square = z.square().sum(-2).movedim(-1, 0).reshape(deviation.shape[:-1])
        return -0.5 * square - self._log_det() - 0.5 * math.log(2 * math.pi) * self.size

    def entropy(self) -> Tensor:
        return self._log_det() + 0.5 * LOG_2_PI_E * self.size

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, self.tril.square().sum(-1)

    def _log_det(self) -> Tensor:
        """log |det L|, (*B,)."""
        return self.tril.diagonal(0, -2, -1).log().sum(-1)


@dataclass(frozen=True)
class FullRankForm(Form):
    """Parametrisation of a full-rank Gaussian, theta = [loc, the entries of A below the diagonal by row, log D].

    Args:
        size: Length P of the flat vector.

    Example:
        >>> FullRankForm(3).length
        9
    """

    kind: ClassVar[str] = "full_rank"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size, self.size * (self.size - 1) // 2, self.size)

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        below = loc.new_zeros(*loc.shape[:-1], self.sizes[1])
        return torch.cat([loc, below, self.expanded_scale(loc, scale).log()], -1)

    def family(self, theta: Tensor) -> FullRankFamily:
        loc, below, log_diagonal = self.split(theta)
        indices = below_diagonal(self.size, theta.device)
        flat = theta.new_zeros(*loc.shape[:-1], self.size * self.size).index_copy(-1, indices, below)
        unit = flat.unflatten(-1, (self.size, self.size)) + torch.eye(self.size).to(theta)
        return FullRankFamily(loc, unit * log_diagonal.exp().unsqueeze(-2))

    def theta(self, family: FullRankFamily) -> Tensor:
        """Return the theta (*B, K) of a q, the inverse of `family`."""
        diagonal = family.tril.diagonal(0, -2, -1)
        unit = (family.tril / diagonal.unsqueeze(-2)).flatten(-2)
        below = unit.index_select(-1, below_diagonal(self.size, unit.device))
        return torch.cat([family.loc, below, diagonal.log()], -1)

    def moved(self, theta: Tensor, centre: Tensor, root: Tensor) -> Tensor:
        q, matrix = self.family(theta), root.diag() if root.ndim == 1 else root
        return self.theta(FullRankFamily(centre + q.loc @ matrix.mT, matrix @ q.tril))


def columns(deviation: Tensor, rank: int) -> Tensor:
    """Flatten the dimensions before the last `rank` and move them to the end: (..., *B, P) -> (*B, P, n)."""
    return deviation.reshape(-1, *deviation.shape[deviation.ndim - rank :]).movedim(0, -1)


@lru_cache(maxsize=16)
def below_diagonal(size: int, device: torch.device) -> Tensor:
    """Return the indices of the entries below the diagonal, row by row, in the flattened matrix."""
    rows, cols = torch.tril_indices(size, size, -1, device=device)
    return rows * size + cols
