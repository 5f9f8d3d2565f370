"""The normal approximations of Pathfinder's paths: a diagonal plus a low rank, in batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normal:
    """N(loc, C) with C = T T' and T = diag(scale) (I + Q (L - I) Q'): diagonal plus low rank."""

    loc: Tensor  # (*B, P)
    scale: Tensor  # (*B, P)
    basis: Tensor  # Q (*B, P, r), orthonormal columns
    factor: Tensor  # L (*B, r, r), lower triangular

    def draw(self, noise: Tensor) -> Tensor:
        """Return loc + T noise, for standard normal noise (n, *B, P)."""
        inner = noise[..., None, :] @ self.basis  # (n, *B, 1, r)
        inner = inner @ (self.factor - self._one()).mT
        return self.loc + self.scale * (noise + (inner @ self.basis.mT)[..., 0, :])

    def newton(self, gradient: Tensor) -> Tensor:
        """Return loc + C gradient = loc + T (T' gradient), (*B, P)."""
        scaled = self.scale * gradient
        inner = scaled[..., None, :] @ self.basis @ (self.factor - self._one())
        return self.draw((scaled + (inner @ self.basis.mT)[..., 0, :])[None])[0]

    def log_prob(self, w: Tensor) -> Tensor:
        """log q at w (n, *B, P): (n, *B)."""
        z = (w - self.loc) / self.scale
        inner = (z[..., None, :] @ self.basis).mT  # (n, *B, r, 1)
        factor = self.factor.expand(*inner.shape[:-2], *self.factor.shape[-2:])
        # |T^-1 (w - loc)|^2: outside of the basis z itself, inside of it L^-1 Q'z
        solved = torch.linalg.solve_triangular(factor, inner, upper=False)
        square = z.square().sum(-1) + (solved.square() - inner.square()).sum((-2, -1))
        return -0.5 * (square + self.log_det() + self.loc.shape[-1] * math.log(2 * math.pi))

    def log_det(self) -> Tensor:
        """log |det C|, (*B,)."""
        return 2 * (self.scale.log().sum(-1) + self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1))

    def standard_deviations(self) -> Tensor:
        """Return the root of the diagonal of C = T T', (*B, P)."""
        inner = self.basis @ (self.factor - self._one())  # Q (L - I), and Q'Q = I
        square = 1 + (2 * inner * self.basis + inner.square()).sum(-1)
        return self.scale * square.sqrt()

    def _one(self) -> Tensor:
        return torch.eye(self.factor.shape[-1], dtype=self.factor.dtype, device=self.factor.device)


def chosen(first: Tensor, one: Normal, other: Normal) -> Normal:
    """Choose between two approximations by a mask `first`, (*B,)."""
    vector, matrix = first[..., None], first[..., None, None]
    return Normal(
        torch.where(vector, one.loc, other.loc),
        torch.where(vector, one.scale, other.scale),
        torch.where(matrix, one.basis, other.basis),
        torch.where(matrix, one.factor, other.factor),
    )


def mixture(paths: Normal, w: Tensor) -> Tensor:
    """Return the log density of the uniform mixture of the paths' normals (K, P) at w (n, P), (n,)."""
    return each_log_prob(paths, w).logsumexp(0) - math.log(len(paths.loc))


def each_log_prob(paths: Normal, w: Tensor) -> Tensor:
    """Return the log density of each path's normal (K, P) at w (n, P), (K, n)."""
    each = zip(paths.loc, paths.scale, paths.basis, paths.factor, strict=True)
    return torch.stack([Normal(*parts).log_prob(w) for parts in each])
