"""Metrics: estimates C of the posterior covariance, which give all directions the same scale.

A momentum is drawn from N(0, C^-1), moves the position with velocity C p, and has the kinetic energy p' C p / 2. Each
form costs one application of C and one draw per step:

    DiagonalMetric    C = diag(variance)                                            O(P)
    LowRankMetric     C = D (I + Q (L - I) Q') D, with D and L diagonal, Q (P, r)   O(P r)     (Bales et al. 2019)
    DenseMetric       C, with its Cholesky factor                                   O(P^2)

Vectors are rows: tensors are (*B, K, P), with one metric for the K chains of each member.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from priory.core.linalg import svd, try_cholesky

if TYPE_CHECKING:
    from torch import Tensor

    from priory.methods.mcmc.adaptation import Moments

MAX_RANK = 16  # directions that a LowRankMetric keeps
MEAN_ROUNDING_EPS = 8  # rounding error of a mean, in eps: twice that of the mean of 1000 chains that haven't moved
SHRINKAGE_DRAWS = 5.0  # weight of the prior belief in independent directions, in draws, plus one per coordinate


@dataclass(frozen=True)
class DiagonalMetric:
    """A variance per coordinate."""

    variance: Tensor  # (*B, 1, P)

    @classmethod
    def unit(cls, w: Tensor) -> DiagonalMetric:
        """The identity, for chains w (*B, K, P)."""
        return cls(torch.ones_like(w[..., :1, :]))

    def learnt(self, moments: Moments) -> DiagonalMetric:
        """The metric estimated from a window; a coordinate that didn't move keeps its scale."""
        return DiagonalMetric(spread(moments, self.variance))

    def velocity(self, p: Tensor) -> Tensor:
        """C p, (*B, K, P)."""
        return self.variance * p

    def momentum(self, noise: Tensor) -> Tensor:
        """Transform standard normal noise to a draw of N(0, C^-1)."""
        return noise * self.variance.rsqrt()

    def square(self, d: Tensor) -> Tensor:
        """d' C^-1 d, (*B, K)."""
        return (d.square() / self.variance).sum(-1)


@dataclass(frozen=True)
class DenseMetric:
    """A full covariance matrix."""

    covariance: Tensor  # (*B, P, P)
    factor: Tensor  # its lower Cholesky factor

    @classmethod
    def unit(cls, w: Tensor) -> DenseMetric:
        one = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device).expand(*w.shape[:-2], -1, -1)
        return cls(one.clone(), one.clone())

    def learnt(self, moments: Moments) -> DenseMetric:
        """The covariance of a window, shrunk towards its diagonal with a weight of P + 5 draws.

        A coordinate that didn't move keeps its scale, and has no covariance with other coordinates.
        """
        variance = spread(moments, self.covariance.diagonal(dim1=-2, dim2=-1)[..., None, :])[..., 0, :]
        n, size = moments.count, variance.shape[-1]
        weight = n / (n + size + SHRINKAGE_DRAWS)
        diagonal, still = torch.diag_embed(variance), ~moved(moments)
        scatter = torch.where(still | still.mT, 0.0, moments.scatter / max(1, n - 1))
        covariance = weight * scatter + torch.where(still, diagonal, (1 - weight) * diagonal)
        factor, definite = try_cholesky(covariance)
        lost = ~definite[..., None, None] | ~torch.isfinite(factor).all(-1).all(-1)[..., None, None]
        return DenseMetric(torch.where(lost, diagonal, covariance), torch.where(lost, diagonal.sqrt(), factor))

    def velocity(self, p: Tensor) -> Tensor:
        return product(p, self.covariance)

    def momentum(self, noise: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, noise, upper=False, left=False)

    def square(self, d: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, d.mT, upper=False).square().sum(-2)


@dataclass(frozen=True)
class LowRankMetric:
    """A scale per coordinate, and a variance for each of a few directions."""

    scale: Tensor  # D, (*B, 1, P)
    basis: Tensor  # Q (*B, P, r), orthonormal columns, or zero where L is one
    spread: Tensor  # L (*B, 1, r)

    @classmethod
    def unit(cls, w: Tensor) -> LowRankMetric:
        rank = min(MAX_RANK, w.shape[-1])
        basis = torch.eye(w.shape[-1], rank, dtype=w.dtype, device=w.device).expand(*w.shape[:-2], -1, -1).clone()
        return cls(torch.ones_like(w[..., :1, :]), basis, w.new_ones(*w.shape[:-2], 1, rank))

    def learnt(self, moments: Moments) -> LowRankMetric:
        """The scales of a window, and the directions of its last draws whose variance differs most from one.

        The variances are shrunk towards one with a weight of P + 5 draws: with n independent draws and no correlation,
        the largest sample variance is already about (1 + sqrt(P / n))^2. n draws span n - 1 directions around their
        mean; where that is less than the rank, the remaining directions have variance one.
        """
        assert moments.recent is not None
        scale = spread(moments, self.scale.square()).sqrt()
        n, rank = min(moments.count, moments.recent.shape[-2]), self.basis.shape[-1]
        belief = scale.shape[-1] + SHRINKAGE_DRAWS
        recent = moments.recent[..., -n:, :]
        centred = (recent - recent.mean(-2, keepdim=True)) / scale  # (*B, n, P)
        _, size, directions = svd(centred)
        found = size.square() / max(1, n - 1)  # (*B, min(n, P))
        found = (n * found + belief) / (n + belief)
        found = torch.where(torch.arange(found.shape[-1], device=found.device) < n - 1, found, 1.0)
        lacking = max(0, rank - found.shape[-1])
        found, directions = pad(found, (0, lacking), value=1.0), pad(directions, (0, 0, 0, lacking))
        wrong = found.log().abs()
        chosen = wrong.topk(rank, dim=-1).indices  # (*B, r)
        basis = directions.gather(-2, chosen[..., None].expand(*chosen.shape, directions.shape[-1])).mT
        return LowRankMetric(scale, basis.contiguous(), found.gather(-1, chosen)[..., None, :])

    def velocity(self, p: Tensor) -> Tensor:
        return self.scale * self._stretched(self.scale * p, self.spread - 1)

    def momentum(self, noise: Tensor) -> Tensor:
        return self._stretched(noise, self.spread.rsqrt() - 1) / self.scale

    def square(self, d: Tensor) -> Tensor:
        return self._stretched(d / self.scale, self.spread.rsqrt() - 1).square().sum(-1)

    def _stretched(self, x: Tensor, by: Tensor) -> Tensor:
        """(I + Q diag(by) Q') x."""
        return x + product(product(x, self.basis) * by, self.basis.mT)


Metric = DiagonalMetric | DenseMetric | LowRankMetric
METRICS: dict[str, type[DiagonalMetric] | type[DenseMetric] | type[LowRankMetric]] = {
    "diagonal": DiagonalMetric,
    "dense": DenseMetric,
    "low_rank": LowRankMetric,
}


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix, keeping the memory layout of x."""
    return x @ matrix if x.is_contiguous() else (matrix.mT @ x.mT).mT


def spread(moments: Moments, before: Tensor) -> Tensor:
    """The variance of each coordinate in a window, (*B, 1, P); the value before where it didn't move."""
    return torch.where(moved(moments), variances(moments), before)


def moved(moments: Moments) -> Tensor:
    """Whether the variance of each coordinate in a window exceeds the rounding error of its mean, (*B, 1, P)."""
    variance = variances(moments)
    rounding = (MEAN_ROUNDING_EPS * torch.finfo(variance.dtype).eps * moments.mean[..., None, :]).square()
    return (variance > rounding) & torch.isfinite(variance)


def variances(moments: Moments) -> Tensor:
    """The variance of each coordinate in a window, (*B, 1, P)."""
    return (moments.squares / max(1, moments.count - 1))[..., None, :]
