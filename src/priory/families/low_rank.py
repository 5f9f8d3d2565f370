"""The Gaussian whose covariance is of low rank plus a diagonal, q(w) = N(m, F F' + diag(d^2)) (Ong et al. 2018,
"Gaussian Variational Approximation with a Factor Covariance Structure").

    w = m + F e1 + d e2,    e1 ~ N(0, I_r), e2 ~ N(0, I_P)

With G = diag(d)^-1 F and C = I + G'G (r x r), Woodbury's identity and the determinant lemma give

    z'(G G' + I)^-1 z = z'z - (G'z)' C^-1 (G'z),    log det(F F' + diag(d^2)) = log det C + 2 sum_i log d_i

so that densities cost O(P r^2) and no P x P matrix is formed. theta holds G, whose entries are ratios of standard
deviations and therefore of order one at every scale of w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.core.linalg import try_cholesky
from priory.families.base import Family, Form, normal_noise
from priory.families.diagonal import LOG_2_PI_E
from priory.families.full_rank import columns

if TYPE_CHECKING:
    from torch import Tensor

# Fraction of each initial variance that comes from the factor: enough to break the symmetry between its columns.
INITIAL_FACTOR_SHARE = 0.01


@dataclass(frozen=True, eq=False)
class LowRankFamily(Family):
    """Gaussian with a covariance of low rank plus a diagonal, q(w) = N(m, F F' + diag(d^2)).

    Args:
        loc: Means m, (*B, P).
        factor: Factor F, (*B, P, r).
        log_diag: Log d, (*B, P).

    Example:
        >>> q = LowRankFamily(torch.zeros(2), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        >>> q.moments()[1]
        tensor([2., 5.])
    """

    loc: Tensor
    factor: Tensor
    log_diag: Tensor

    @property
    def size(self) -> int:
        return self.loc.shape[-1]

    def sample(self, n: int, generator: Any) -> Tensor:
        shared = normal_noise(n, self.factor[..., 0, :], generator)  # (n, *B, r)
        independent = normal_noise(n, self.loc, generator)  # (n, *B, P)
        return self.loc + (self.factor @ shared.movedim(0, -1)).movedim(-1, 0) + self.log_diag.exp() * independent

    def log_prob(self, w: Tensor) -> Tensor:
        z = (w - self.loc) / self.log_diag.exp()  # (..., *B, P)
        ratio, root = self._ratio_and_root()
        explained = torch.linalg.solve_triangular(root, ratio.mT @ columns(z, self.loc.ndim), upper=False)  # (*B, r, n)
        square = z.square().sum(-1) - explained.square().sum(-2).movedim(-1, 0).reshape(z.shape[:-1])
        return -0.5 * square - self._log_det(root) - 0.5 * math.log(2 * math.pi) * self.size

    def entropy(self) -> Tensor:
        return self._log_det(self._ratio_and_root()[1]) + 0.5 * LOG_2_PI_E * self.size

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, self.factor.square().sum(-1) + (2 * self.log_diag).exp()

    def _ratio_and_root(self) -> tuple[Tensor, Tensor]:
        """G = F / d, (*B, P, r), and the Cholesky factor of C = I + G'G, (*B, r, r)."""
        ratio = self.factor / self.log_diag.exp().unsqueeze(-1)
        inner = ratio.mT @ ratio
        # fails only for a member that is not finite, which must not affect the other members
        return ratio, try_cholesky(inner + torch.eye(inner.shape[-1]).to(inner))[0]

    def _log_det(self, root: Tensor) -> Tensor:
        """Half the log determinant of the covariance, (*B,)."""
        return root.diagonal(0, -2, -1).log().sum(-1) + self.log_diag.sum(-1)


@dataclass(frozen=True)
class LowRankForm(Form):
    """Parametrisation of a low-rank Gaussian, theta = [loc, G row by row, log d] with F = diag(d) G.

    Args:
        size: Length P of the flat vector.
        rank: Number r of columns of F.

    Example:
        >>> LowRankForm(size=10, rank=2).length
        40
    """

    kind: ClassVar[str] = "low_rank"
    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer("rank", 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size, self.size * self.rank, self.size)

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        """Return theta with rows of G in random directions, and with exactly the given standard deviations."""
        direction = torch.randn(*loc.shape, self.rank, generator=generator, dtype=loc.dtype, device=loc.device)
        length = math.sqrt(INITIAL_FACTOR_SHARE / (1 - INITIAL_FACTOR_SHARE))
        ratio = length * torch.nn.functional.normalize(direction, dim=-1)
        log_diag = self.expanded_scale(loc, scale).log() + 0.5 * math.log1p(-INITIAL_FACTOR_SHARE)
        return torch.cat([loc, ratio.flatten(-2), log_diag], -1)

    def family(self, theta: Tensor) -> LowRankFamily:
        loc, ratio, log_diag = self.split(theta)
        factor = log_diag.exp().unsqueeze(-1) * ratio.unflatten(-1, (self.size, self.rank))
        return LowRankFamily(loc, factor, log_diag)

    def moved(self, theta: Tensor, centre: Tensor, root: Tensor) -> Tensor | None:
        loc, ratio, log_diag = self.split(theta)
        return torch.cat([centre + root * loc, ratio, log_diag + root.log()], -1) if root.ndim == 1 else None
