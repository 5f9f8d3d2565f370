"""Curvature of low rank, H ~ U diag(s) U' + diag(rest): the r directions that the data say most about.

The eigenvectors come from products alone, by randomised subspace iteration (Halko, Martinsson and Tropp 2011): start
from random directions, multiply by H and orthonormalise, a few times; then diagonalise H between them. The Gaussian is
by Woodbury's identity. With D = diag(precision + scale rest), G = D^-1/2 U (scale s)^1/2 and G'G = V diag(g) V',

    Q = D^1/2 (I + G G') D^1/2,    log det Q = log det D + sum log(1 + g)
    (I + G G')^-1   = I - G V diag(1 / (1 + g)) V' G'
    (I + G G')^-1/2 = I - G V diag(1 / (t + t^2)) V' G',    t = sqrt(1 + g)

What lies outside the r directions counts as no curvature, so that variances err to the wide side, unless `rest` is
kept: what the diagonal of H has beyond them. Memory p (r + 10), in float64 in the Gaussian; time that of
iterations x (r + 10) products, and p r^2 for a Gaussian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.curvature.base import Curvature, Gaussian, Kind, Selection, check_curvature, check_kind
from priory.curvature.diagonal import Diagonal
from priory.curvature.products import product
from priory.errors import InputError, require, whole
from priory.network import MEMORY_LIMIT
from priory.streams import stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.curvature.taps import Rows
    from priory.data import Data
    from priory.target import Target

RANK = 64
EXTRA = 10  # directions beyond the rank, which make the wanted ones accurate


class LowRank(Curvature):
    """U (p, r) with orthonormal columns, s (r,) descending, and the diagonal of the rest, (p,) or 0."""

    structure: ClassVar[str] = "lowrank"

    def __init__(self, selection: Selection, vectors: Tensor, values: Tensor, rest: Tensor, negative: int = 0) -> None:
        self.selection, self.vectors, self.values, self.rest, self.negative = selection, vectors, values, rest, negative

    @classmethod
    def of(
        cls,
        target: Target,
        w: Tensor,
        data: Data,
        selection: Selection,
        kind: Kind = "ggn",
        samples: int = 1,
        generator: torch.Generator | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        limit: int = MEMORY_LIMIT,
        rank: int = RANK,
        iterations: int = 4,
        rest: bool = False,
    ) -> LowRank:
        """H at w by `iterations` passes over the data; a sampled Fisher has the same labels in each."""
        check_kind(kind, samples, generator)
        for name, value in (("rank", rank), ("iterations", iterations)):
            require(whole(value, 1), name, "LowRank", "be a whole number from 1", repr(value))
        known = not (rest and kind == "hessian")
        require(known, "rest", "LowRank", "be False for the Hessian, whose diagonal costs p products", rest)
        state = None if generator is None else generator.get_state()

        def multiply(v: Tensor) -> Tensor:  # H v for columns v (p, k)
            if generator is not None and state is not None:
                generator.set_state(state)
            return product(target, w, data, v.mT, kind, selection, samples, generator, buffers, limit).mT

        noise = torch.randn(
            selection.size, min(selection.size, rank + EXTRA), dtype=w.dtype, generator=stream(0, "low rank")
        )
        basis = torch.linalg.qr(noise.to(w.device))[0]
        for _ in range(iterations - 1):
            basis = torch.linalg.qr(multiply(basis))[0]
        between = (basis.mT @ multiply(basis)).double()
        check_curvature(between)
        values, inner = torch.linalg.eigh(between)  # ascending
        rounding = values.abs().max() * len(values) * torch.finfo(w.dtype).eps
        kept = min(rank, int((values > rounding).sum()))
        negative = int((values < -rounding).sum())
        values = values.flip(0)[:kept].to(w.dtype)
        vectors = (basis.double() @ inner.flip(1)[:, :kept]).to(w.dtype)
        left = torch.zeros_like(w[:1]).expand(selection.size)
        if rest:
            exact = Diagonal.of(target, w, data, selection, kind, samples, generator, buffers, limit).diagonal()
            left = (exact - (vectors.square() @ values)).clamp_min(0).to(w.dtype)
        return cls(selection, vectors, values, left, negative)

    def gaussian(self, precision: Tensor, scale: float = 1.0) -> LowRankGaussian:
        precision, scale = self.checked(precision, scale)
        diagonal = precision.double() + scale * self.rest.double()
        without = int((diagonal == 0).sum())
        if without:
            raise InputError(
                "The prior's precision must be above zero for structure='lowrank', which has curvature in "
                f"{len(self.values)} of {len(precision)} directions only. Got zero at {without} coordinates instead."
            )
        factor = self.vectors.double() * (scale * self.values.double()).sqrt()
        return LowRankGaussian(factor, diagonal, precision.dtype)

    def diagonal(self) -> Tensor:
        return self.vectors.square() @ self.values + self.rest

    def dense(self) -> Tensor:
        return (self.vectors * self.values) @ self.vectors.mT + torch.diag(self.rest)

    def tensors(self) -> dict[str, Tensor]:
        return {"vectors": self.vectors, "values": self.values, "rest": self.rest.contiguous()}

    def own(self) -> dict[str, Any]:
        return {"negative": self.negative}

    @classmethod
    def of_tensors(cls, selection: Selection, tensors: Mapping[str, Tensor], **own: Any) -> LowRank:
        return cls(selection, tensors["vectors"], tensors["values"], tensors["rest"], **own)

    def notes(self) -> list[str]:
        if not self.negative:
            return []
        return [f"{self.negative} negative eigenvalues of the Hessian are left out: w is no minimum along them"]


class LowRankGaussian(Gaussian):
    """N(0, Q^-1) with Q = diag(d) + F F', F (p, r); results are in the model's type."""

    def __init__(self, factor: Tensor, diagonal: Tensor, dtype: torch.dtype) -> None:
        self.factor, self.scale, self.dtype = factor, diagonal.rsqrt(), dtype
        self.whitened = factor * self.scale[:, None]  # G, (p, r)
        values, self.basis = torch.linalg.eigh(self.whitened.mT @ self.whitened)
        self.values = values.clamp_min(0)
        self.log_det = diagonal.log().sum() + self.values.log1p().sum()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        shape = (n, len(self.scale))
        noise = torch.randn(shape, dtype=self.dtype, device=self.scale.device, generator=generator).double()
        root = (1 + self.values).sqrt()
        return (self.scale * self._less(noise, 1 / (root + root * root))).to(self.dtype)

    def variance(self) -> Tensor:
        mixed = self.whitened @ self.basis  # G V, (p, r)
        return (self.scale.square() * (1 - mixed.square() @ (1 / (1 + self.values)))).to(self.dtype)

    def solve(self, v: Tensor) -> Tensor:
        return (self.scale * self._less(self.scale * v.double(), 1 / (1 + self.values))).to(v.dtype)

    def quadratic(self, v: Tensor) -> Tensor:
        z = v.double()
        return ((z / self.scale).square().sum(-1) + (z @ self.factor).square().sum(-1)).to(v.dtype)

    def output_covariance(self, rows: Rows) -> Tensor:
        return torch.cat([self._between(few.dense()) for few in rows.chunks()])

    def _between(self, jacobian: Tensor) -> Tensor:
        """J Q^-1 J' of a few data, (n, C, p) -> (n, C, C)."""
        scaled = jacobian.double() * self.scale
        inner = scaled @ self.whitened @ self.basis  # (n, C, r)
        return (scaled @ scaled.mT - (inner / (1 + self.values)) @ inner.mT).to(jacobian.dtype)

    def _less(self, z: Tensor, weights: Tensor) -> Tensor:
        """(I - G V diag(weights) V' G') z for z (..., p)."""
        inner = z @ self.whitened @ self.basis
        return z - (weights * inner) @ self.basis.mT @ self.whitened.mT
