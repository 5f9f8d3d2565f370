"""Metrics: what a sampler takes for the covariance of the posterior, C, so that all directions have one scale.

A momentum is drawn from N(0, C^-1), moves the position at the velocity C p, and has the kinetic energy p' C p / 2. Of
three forms, each costs an application of C and a draw a step:

    Diagonal    C = diag(variance)                                            O(P)
    LowRank     C = D (I + Q (L - I) Q') D, with D and L diagonal, Q (P, r)   O(P r)     (Bales et al. 2019)
    Dense       C, with its Cholesky factor                                   O(P^2)

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

RANK = 16  # directions that a LowRank metric keeps, at most
ROUNDING = 8  # of a mean, in its type's eps: twice what is left of it where 1000 chains haven't moved
PLAIN = 5.0  # draws' worth of belief that directions are independent, beside one a coordinate


@dataclass(frozen=True)
class DiagonalMetric:
    """Each coordinate has a scale of its own."""

    variance: Tensor  # (*B, 1, P)

    @classmethod
    def unit(cls, w: Tensor) -> DiagonalMetric:
        """The metric before anything is known of w (*B, K, P)."""
        return cls(torch.ones_like(w[..., :1, :]))

    def learnt(self, moments: Moments) -> DiagonalMetric:
        """The metric of the draws of a window; a coordinate that didn't move keeps its scale."""
        return DiagonalMetric(spread(moments, self.variance))

    def velocity(self, p: Tensor) -> Tensor:
        """C p, (*B, K, P)."""
        return self.variance * p

    def momentum(self, noise: Tensor) -> Tensor:
        """A draw of N(0, C^-1) from standard normal noise."""
        return noise * self.variance.rsqrt()

    def square(self, d: Tensor) -> Tensor:
        """d' C^-1 d, (*B, K)."""
        return (d.square() / self.variance).sum(-1)


@dataclass(frozen=True)
class DenseMetric:
    """Every pair of coordinates has its covariance."""

    covariance: Tensor  # (*B, P, P)
    factor: Tensor  # its lower Cholesky factor

    @classmethod
    def unit(cls, w: Tensor) -> DenseMetric:
        one = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device).expand(*w.shape[:-2], -1, -1)
        return cls(one.clone(), one.clone())

    def learnt(self, moments: Moments) -> DenseMetric:
        """The covariance of a window, drawn towards its diagonal by as many draws as there are coordinates and 5.

        A coordinate that didn't move keeps its scale, and has no covariance with the others.
        """
        variance = spread(moments, self.covariance.diagonal(dim1=-2, dim2=-1)[..., None, :])[..., 0, :]
        n, size = moments.count, variance.shape[-1]
        weight = n / (n + size + PLAIN)
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
    """Each coordinate has a scale, and a few directions across them one more."""

    scale: Tensor  # D, (*B, 1, P)
    basis: Tensor  # Q (*B, P, r), orthonormal columns, or none where L is one
    spread: Tensor  # L (*B, 1, r)

    @classmethod
    def unit(cls, w: Tensor) -> LowRankMetric:
        rank = min(RANK, w.shape[-1])
        basis = torch.eye(w.shape[-1], rank, dtype=w.dtype, device=w.device).expand(*w.shape[:-2], -1, -1).clone()
        return cls(torch.ones_like(w[..., :1, :]), basis, w.new_ones(*w.shape[:-2], 1, rank))

    def learnt(self, moments: Moments) -> LowRankMetric:
        """The scales of a window, and of its last draws the directions in which a unit scale is most wrong.

        The spreads are drawn towards one by as many draws as there are coordinates and 5: the largest of n independent
        draws is about (1 + sqrt(P / n))^2, and no direction is wrong. n draws have n - 1 directions about their mean;
        where that is less than the rank, the others have no spread of their own.
        """
        assert moments.recent is not None
        scale = spread(moments, self.scale.square()).sqrt()
        n, rank = min(moments.count, moments.recent.shape[-2]), self.basis.shape[-1]
        belief = scale.shape[-1] + PLAIN
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
    """x @ matrix, in the order of x in memory."""
    return x @ matrix if x.is_contiguous() else (matrix.mT @ x.mT).mT


def spread(moments: Moments, before: Tensor) -> Tensor:
    """The variance of each coordinate in a window, (*B, 1, P), as before where it didn't move."""
    return torch.where(moved(moments), variances(moments), before)


def moved(moments: Moments) -> Tensor:
    """Whether each coordinate has a variance in a window that is more than the rounding of its mean, (*B, 1, P)."""
    variance = variances(moments)
    rounding = (ROUNDING * torch.finfo(variance.dtype).eps * moments.mean[..., None, :]).square()
    return (variance > rounding) & torch.isfinite(variance)


def variances(moments: Moments) -> Tensor:
    """The variance of each coordinate in a window, (*B, 1, P)."""
    return (moments.squares / max(1, moments.count - 1))[..., None, :]
