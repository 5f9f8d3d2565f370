"""Metrics: estimates C of the posterior covariance, which give all directions the same scale.

A momentum is drawn from N(0, C^-1), moves the position with velocity C p, and has the kinetic energy p' C p / 2. Each
form costs one application of C and one draw per step:

    DiagonalMetric    C = diag(variance)                                            O(P)
    LowRankMetric     C = D (I + Q (L - I) Q') D, with D and L diagonal, Q (P, r)   O(P r)     (Bales et al. 2019)
    DenseMetric       C, with its Cholesky factor                                   O(P^2)

C is learnt from points x of all chains and the gradients g of log p there. For a Gaussian with precision A, g is
-A (x - mu), so Cov(g) = A Cov(x) A for any distribution of the points, and

    C = Cov(x) # Cov(g)^-1 = A^-1,        X # Y = X^1/2 (X^-1/2 Y X^-1/2)^1/2 X^1/2,

the geometric mean of two matrices. The points need not be draws of the posterior: P + 1 scattered points are enough.
For any posterior, C minimises the Fisher divergence between the points' distribution and a Gaussian (Seyboldt, Carlson
and Carpenter 2026). A diagonal C has the entries sqrt(Var(x_i) / Var(g_i)). Without gradients, C is Cov(x), shrunk
towards its diagonal.

Vectors are rows: tensors are (*B, K, P), with one metric for the K chains of each member.

References:
    Bales, Pourzanjani, Vehtari and Petzold (2019), Selecting the metric in Hamiltonian Monte Carlo.
    Seyboldt, Carlson and Carpenter (2026), Preconditioning Hamiltonian Monte Carlo by minimizing Fisher divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from priory.core.linalg import eigh, try_cholesky

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANK = 32  # directions that a LowRankMetric keeps
SKETCH_POINTS = 512  # points that the directions of a LowRankMetric are found from
MEAN_ROUNDING_EPS = 8  # rounding error of a mean, in eps: twice that of the mean of 1000 chains that haven't moved
SHRINKAGE_DRAWS = 5.0  # plus one per coordinate: weight of uncorrelated directions, in draws, without gradients
POINTS_PER_DIRECTION = 8  # of a LowRankMetric: fewer say more about themselves than about the posterior
RIDGE_POWER = 2 / 3  # eps to this power times the mean diagonal is added to the diagonals of both covariances
SPARE_POINTS = 8  # points beyond P + 1 that a full covariance needs


@dataclass(frozen=True)
class DiagonalMetric:
    """A variance per coordinate."""

    variance: Tensor  # (*B, 1, P)

    @classmethod
    def unit(cls, w: Tensor) -> DiagonalMetric:
        """The identity, for chains w (*B, K, P)."""
        return cls(torch.ones_like(w[..., :1, :]))

    def learnt(self, x: Tensor, g: Tensor | None = None) -> DiagonalMetric:
        """The metric learnt from points and gradients (*B, n, P); a coordinate that doesn't vary keeps its scale."""
        return DiagonalMetric(scales(x, g, self.variance))

    def velocity(self, p: Tensor) -> Tensor:
        """C p, (*B, K, P)."""
        return self.variance * p

    def momentum(self, noise: Tensor) -> Tensor:
        """Transform standard normal noise to a draw of N(0, C^-1)."""
        return noise * self.variance.rsqrt()

    def whitened(self, d: Tensor) -> Tensor:
        """d in coordinates in which C is the identity, (*B, K, P)."""
        return d * self.variance.rsqrt()

    def square(self, d: Tensor) -> Tensor:
        """d' C^-1 d, (*B, K)."""
        return self.whitened(d).square().sum(-1)


@dataclass(frozen=True)
class DenseMetric:
    """A full covariance matrix."""

    covariance: Tensor  # (*B, P, P)
    factor: Tensor  # its lower Cholesky factor

    @classmethod
    def unit(cls, w: Tensor) -> DenseMetric:
        one = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device).expand(*w.shape[:-2], -1, -1)
        return cls(one.clone(), one.clone())

    def learnt(self, x: Tensor, g: Tensor | None = None) -> DenseMetric:
        """The metric learnt from points and gradients (*B, n, P); with few points, their variances alone.

        The geometric mean is taken in coordinates in which the metric before is the identity: each round of learning
        then resolves scales that lie further apart than the round before.
        """
        before = self.covariance.diagonal(dim1=-2, dim2=-1)[..., None, :]
        variance, still = scales(x, g, before), ~varies(x)
        diagonal = torch.diag_embed(variance[..., 0, :])
        if x.shape[-2] <= x.shape[-1] + SPARE_POINTS and g is not None:
            return DenseMetric(diagonal, diagonal.sqrt())
        x = centred(x)
        if g is None:
            n, size = x.shape[-2], x.shape[-1]
            weight = n / (n + size + SHRINKAGE_DRAWS)
            covariance = weight * x.mT @ x / max(1, n - 1) + (1 - weight) * diagonal
        else:
            factor = self.factor
            inner = geometric_mean(self.whitened(x), centred(g) @ factor)
            covariance = factor @ inner @ factor.mT
        covariance = torch.where(still | still.mT, diagonal, 0.5 * (covariance + covariance.mT))
        factor, definite = try_cholesky(covariance)
        lost = ~definite[..., None, None] | ~torch.isfinite(factor).all(-1).all(-1)[..., None, None]
        return DenseMetric(torch.where(lost, diagonal, covariance), torch.where(lost, diagonal.sqrt(), factor))

    def velocity(self, p: Tensor) -> Tensor:
        return product(p, self.covariance)

    def momentum(self, noise: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, noise, upper=False, left=False)

    def whitened(self, d: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, d.mT, upper=False).mT

    def square(self, d: Tensor) -> Tensor:
        return self.whitened(d).square().sum(-1)


@dataclass(frozen=True)
class LowRankMetric:
    """A scale per coordinate, and a variance for each of a few directions."""

    scale: Tensor  # D, (*B, 1, P)
    basis: Tensor  # Q (*B, P, r), orthonormal columns
    spread: Tensor  # L (*B, 1, r)

    @classmethod
    def unit(cls, w: Tensor) -> LowRankMetric:
        rank = min(MAX_RANK, w.shape[-1])
        basis = torch.eye(w.shape[-1], rank, dtype=w.dtype, device=w.device).expand(*w.shape[:-2], -1, -1).clone()
        return cls(torch.ones_like(w[..., :1, :]), basis, w.new_ones(*w.shape[:-2], 1, rank))

    def learnt(self, x: Tensor, g: Tensor | None = None) -> LowRankMetric:
        """The scales of points and gradients (*B, n, P), and the directions in which C differs most from them.

        The directions are sought among the leading ones of the points and of the gradients, with the scales divided
        out. Without gradients their variances are shrunk towards one: with n independent draws and no correlation, the
        largest sample variance is already about (1 + sqrt(P / n))^2.
        """
        scale = scales(x, g, self.scale.square()).sqrt()
        n, size, rank = x.shape[-2], x.shape[-1], self.basis.shape[-1]
        every = max(1, n // SKETCH_POINTS)
        x = x[..., ::every, :]
        directions = min(rank, x.shape[-2] // POINTS_PER_DIRECTION)
        if directions == 0:
            return LowRankMetric(scale, self.basis, torch.ones_like(self.spread))
        x = centred(x) / scale
        sketch = [leading(x, directions)]
        if g is not None:
            g = centred(g[..., ::every, :]) * scale
            sketch.append(leading(g, directions))
        basis = torch.linalg.qr(torch.cat(sketch, -1)).Q  # (*B, P, up to 2r)
        if g is not None:
            inner = geometric_mean(x @ basis, g @ basis)
        else:
            n, belief = x.shape[-2], size + SHRINKAGE_DRAWS
            inner = (basis.mT @ (x.mT @ (x @ basis)) + belief * torch.eye(basis.shape[-1]).to(x)) / (n + belief)
        found, turn = eigh(inner)
        found = found.clamp(min=torch.finfo(found.dtype).eps)
        chosen = found.log().abs().topk(min(rank, found.shape[-1]), dim=-1).indices  # (*B, r)
        turn = turn.gather(-1, chosen[..., None, :].expand(*turn.shape[:-1], chosen.shape[-1]))
        spread = found.gather(-1, chosen)[..., None, :]
        missing = rank - chosen.shape[-1]
        basis = torch.nn.functional.pad(basis @ turn, (0, missing))
        return LowRankMetric(scale, basis.contiguous(), torch.nn.functional.pad(spread, (0, missing), value=1.0))

    def velocity(self, p: Tensor) -> Tensor:
        return self.scale * self._stretched(self.scale * p, self.spread - 1)

    def momentum(self, noise: Tensor) -> Tensor:
        return self._stretched(noise, self.spread.rsqrt() - 1) / self.scale

    def whitened(self, d: Tensor) -> Tensor:
        return self._stretched(d / self.scale, self.spread.rsqrt() - 1)

    def square(self, d: Tensor) -> Tensor:
        return self.whitened(d).square().sum(-1)

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


def geometric_mean(x: Tensor, g: Tensor) -> Tensor:
    """Cov(x) # Cov(g)^-1 of centred points and gradients (*B, n, P), (*B, P, P).

    With Cov(x) = L L', it is L (L' Cov(g) L)^-1/2 L'. The scale of each coordinate is divided out first, and a small
    share of the mean diagonal is added to both covariances.
    """
    n, size = x.shape[-2], x.shape[-1]
    scale = (x.square().mean(-2, keepdim=True) / g.square().mean(-2, keepdim=True)) ** 0.25
    scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0)
    one = torch.eye(size, dtype=x.dtype, device=x.device)
    first, second = (y.mT @ y / n for y in (x / scale, g * scale))
    ridge = torch.finfo(x.dtype).eps ** RIDGE_POWER * one
    first, second = (c + c.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * ridge for c in (first, second))
    factor, definite = try_cholesky(first)
    factor = torch.where(definite[..., None, None], factor, one)
    values, vectors = eigh((factor.mT @ second @ factor).nan_to_num())
    tiny = torch.finfo(x.dtype).tiny
    root = factor @ vectors * values.clamp(min=tiny)[..., None, :] ** -0.25
    return scale.mT * (root @ root.mT) * scale


def leading(x: Tensor, rank: int) -> Tensor:
    """The leading directions of points (*B, n, P), as columns (*B, P, up to rank)."""
    n, size = x.shape[-2], x.shape[-1]
    rank = min(rank, n - 1, size)
    if n >= size:
        return eigh(x.mT @ x).vectors[..., -rank:]
    values, vectors = eigh(x @ x.mT)
    return x.mT @ vectors[..., -rank:] * values[..., None, -rank:].clamp(min=torch.finfo(x.dtype).tiny).rsqrt()


def centred(x: Tensor) -> Tensor:
    """Points (*B, n, P) around their mean."""
    return x - x.mean(-2, keepdim=True)


def scales(x: Tensor, g: Tensor | None, before: Tensor) -> Tensor:
    """The diagonal of C from points and gradients (*B, n, P), (*B, 1, P); the value before where x doesn't vary."""
    variance = x.var(-2, keepdim=True) if x.shape[-2] > 1 else torch.zeros_like(x)
    found = variance
    if g is not None and x.shape[-2] > 1:
        found = (variance / g.var(-2, keepdim=True)).sqrt()
        found = torch.where(torch.isfinite(found) & (found > 0), found, variance)
    return torch.where(varies(x), found, before)


def varies(x: Tensor) -> Tensor:
    """Whether the variance of each coordinate exceeds the rounding error of its mean, (*B, 1, P)."""
    if x.shape[-2] < 2:
        return torch.zeros_like(x[..., :1, :], dtype=torch.bool)
    variance = x.var(-2, keepdim=True)
    rounding = (MEAN_ROUNDING_EPS * torch.finfo(x.dtype).eps * x.mean(-2, keepdim=True)).square()
    return (variance > rounding) & torch.isfinite(variance)
