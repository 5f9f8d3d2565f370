"""Low-rank curvature, H ~ U diag(s) U' + diag(rest): the r directions of largest curvature.

The eigenvectors come from products with H, by randomised subspace iteration (Halko, Martinsson and Tropp 2011): start
from random directions, multiply by H and orthonormalise a few times, then diagonalise H within their span. The Gaussian
uses Woodbury's identity. With D = diag(precision + scale rest) and D^-1/2 U (scale s) U' D^-1/2 = W diag(g) W',
W'W = I,

    Q = D^1/2 (I + W diag(g) W') D^1/2,    log det Q = log det D + sum log(1 + g)
    (I + W diag(g) W')^-1   = I - W diag(g / (1 + g)) W'
    (I + W diag(g) W')^-1/2 = I - W diag(1 - (1 + g)^-1/2) W'

A Hessian may have negative s; Q is not positive definite if any g <= -1.

Outside the r directions the curvature counts as zero, which overestimates variances, unless `rest` is used: the part of
the diagonal of H that these directions miss. The missing share of the trace is estimated from a few random directions
outside their span (Meyer, Musco, Musco and Woodruff 2021, "Hutch++"). With r = p nothing is missing, and H itself is
decomposed. Memory: p (r + 10) numbers in float64. Time: iterations x (r + 10) products, and p r^2 for a Gaussian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import InputError, is_integer, require
from priory.core.linalg import eigh
from priory.core.streams import stream
from priory.curvature.base import Curvature, Kind, Pass, PrecisionGaussian, Selection, check_curvature
from priory.curvature.diagonal import DiagonalCurvature
from priory.curvature.full import Full, indefinite
from priory.curvature.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.curvature.jacobian_parts import JacobianRows

DEFAULT_RANK = 64
EXTRA_DIRECTIONS = 10  # beyond the rank, for the accuracy of the wanted ones
BISECTION_STEPS = 30


class LowRankCurvature(Curvature):
    """Low-rank H for structure="lowrank": U diag(s) U' + diag(rest).

    Args:
        selection: The p coordinates.
        vectors: U, with orthonormal columns, (p, r).
        values: s, (r,).
        rest: Diagonal of the remaining curvature, (p,).
        kind: Kind of the curvature. Default: "ggn".
        share: Estimated share of the trace that is left out. Default: 0.
    """

    structure: ClassVar[str] = "lowrank"

    def __init__(
        self,
        selection: Selection,
        vectors: Tensor,
        values: Tensor,
        rest: Tensor,
        kind: Kind = "ggn",
        share: float = 0.0,
    ) -> None:
        self.selection, self.vectors, self.values, self.rest = selection, vectors.contiguous(), values, rest
        self.kind: Kind = kind
        self.share = share

    @classmethod
    def of(cls, given: Pass, rank: int = DEFAULT_RANK, iterations: int = 4, rest: bool = False) -> LowRankCurvature:
        """Compute H in `iterations` passes over the data; a sampled Fisher uses the same labels in each."""
        w, selection, kind, generator = given.w, given.selection, given.kind, given.generator
        for name, value in (("rank", rank), ("iterations", iterations)):
            require(is_integer(value, 1), name, "LowRank", "be an integer >= 1", repr(value))
        known = not (rest and kind == "hessian")
        require(known, "rest", "LowRank", "be False for the Hessian, whose diagonal costs p products", rest)
        none = torch.zeros(1, dtype=torch.float64, device=w.device).expand(selection.size)
        if rank >= selection.size:
            matrix = Full.of(given).matrix
            check_curvature(matrix)
            values, vectors = eigh(matrix)
            return cls(selection, vectors.flip(1), values.flip(0), none, kind)
        state = None if generator is None else generator.get_state()

        def multiply(v: Tensor) -> Tensor:  # H v for columns v (p, k)
            if generator is not None and state is not None:
                generator.set_state(state)
            return product(given, v.mT).mT

        noise = stream(0, "low rank")
        directions = lambda k: torch.randn(selection.size, k, dtype=w.dtype, generator=noise).to(w.device)  # noqa: E731
        basis = torch.linalg.qr(directions(min(selection.size, rank + EXTRA_DIRECTIONS)))[0]
        for _ in range(iterations - 1):
            basis = torch.linalg.qr(multiply(basis))[0]
        between = (basis.mT @ multiply(basis)).double()
        check_curvature(between)
        values, inner = eigh(between)
        order = values.abs().argsort(descending=True)
        values, vectors = values[order], basis.double() @ inner[:, order]
        rounding = float(values[0].abs()) * len(values) * torch.finfo(w.dtype).eps
        kept = min(rank, int((values.abs() > rounding).sum()))
        found = cls(selection, vectors[:, :kept], values[:kept], none, kind)
        if rest:
            exact = DiagonalCurvature.of(given).diagonal()
            found.rest = (exact.double() - found.diagonal()).clamp_min(0)
            return found
        outside = 0.0
        if basis.shape[1] < selection.size:
            probes = directions(EXTRA_DIRECTIONS)
            probes -= basis @ (basis.mT @ probes)
            outside = abs(float((probes * multiply(probes)).sum())) / EXTRA_DIRECTIONS
        dropped = outside + float(values[kept:].abs().sum())
        if dropped > rounding:
            found.share = dropped / (dropped + float(found.values.abs().sum()))
        return found

    def gaussian(self, precision: Tensor, scale: float = 1.0) -> PrecisionGaussian:
        precision, scale = self.checked(precision, scale)
        if len(self.values) == len(precision):
            return Full(self.selection, self.dense(), self.kind).gaussian(precision, scale)
        diagonal = precision.double() + scale * self.rest
        without = int((diagonal == 0).sum())
        if without:
            raise InputError(
                "The prior's precision must be above zero for structure='lowrank', which has curvature in "
                f"{len(self.values)} of {len(precision)} directions only, got zero at {without} coordinates."
            )
        gaussian = LowRankGaussian(self.vectors, scale * self.values, diagonal, precision.dtype)
        if bool((gaussian.gains <= -1).any()):
            raise indefinite(self.kind, lowest(self.vectors, scale * self.values, diagonal))
        return gaussian

    def diagonal(self) -> Tensor:
        return self.vectors.square() @ self.values + self.rest

    def dense(self) -> Tensor:
        return (self.vectors * self.values) @ self.vectors.mT + torch.diag(self.rest)

    def tensors(self) -> dict[str, Tensor]:
        return {"vectors": self.vectors, "values": self.values, "rest": self.rest.contiguous()}

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "share": self.share}

    @classmethod
    def of_tensors(cls, selection: Selection, tensors: Mapping[str, Tensor], **options: Any) -> LowRankCurvature:
        # copied, because unaligned memory of a file gives products that differ in the last bits
        return cls(selection, tensors["vectors"].clone(), tensors["values"], tensors["rest"], **options)

    def notes(self) -> list[str]:
        if not self.share:
            return []
        return [f"rank {len(self.values)} leaves out about {100 * self.share:.2g} % of the curvature's trace."]


class LowRankGaussian(PrecisionGaussian):
    """N(0, Q^-1) with Q = diag(d) + U diag(s) U', U (p, r); results have the dtype of the model."""

    def __init__(self, vectors: Tensor, values: Tensor, diagonal: Tensor, dtype: torch.dtype) -> None:
        self.vectors, self.values, self.scale, self.dtype = vectors, values, diagonal.rsqrt(), dtype
        self.gains, self.basis = spectrum(vectors, values, diagonal)  # g (r,), W (p, r)
        self.log_det = diagonal.log().sum() + self.gains.log1p().sum()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        shape = (n, len(self.scale))
        noise = torch.randn(shape, dtype=self.dtype, device=self.scale.device, generator=generator).double()
        return (self.scale * self._less(noise, 1 - (1 + self.gains).rsqrt())).to(self.dtype)

    def variance(self) -> Tensor:
        return (self.scale.square() * (1 - self.basis.square() @ self._known)).to(self.dtype)

    def solve(self, v: Tensor) -> Tensor:
        return (self.scale * self._less(self.scale * v.double(), self._known)).to(v.dtype)

    def quadratic(self, v: Tensor) -> Tensor:
        z = v.double()
        return ((z / self.scale).square().sum(-1) + (z @ self.vectors).square() @ self.values).to(v.dtype)

    def output_covariance(self, rows: JacobianRows) -> Tensor:
        return torch.cat([self._between(few.dense()) for few in rows.chunks()])

    def _between(self, jacobian: Tensor) -> Tensor:
        """Return J Q^-1 J' of a few data, (n, C, p) -> (n, C, C)."""
        scaled = jacobian.double() * self.scale
        inner = scaled @ self.basis  # (n, C, r)
        return (scaled @ scaled.mT - (inner * self._known) @ inner.mT).to(jacobian.dtype)

    @property
    def _known(self) -> Tensor:
        """The share of the prior variance that the data remove along each column of W, g / (1 + g), (r,)."""
        return self.gains / (1 + self.gains)

    def _less(self, z: Tensor, weights: Tensor) -> Tensor:
        """Return (I - W diag(weights) W') z for z (..., p)."""
        return z - (weights * (z @ self.basis)) @ self.basis.mT


def spectrum(vectors: Tensor, values: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Return g (r,) and W (p, r) of D^-1/2 U diag(s) U' D^-1/2 = W diag(g) W'."""
    basis, inner = torch.linalg.qr(vectors * diagonal.rsqrt()[:, None])
    gains, turn = eigh((inner * values) @ inner.mT)
    return gains, basis @ turn


def lowest(vectors: Tensor, values: Tensor, diagonal: Tensor) -> float:
    """Return a negative smallest eigenvalue of D + U diag(s) U': Q - x I is definite for every x below it."""
    low, high = float(values.min()), 0.0
    for _ in range(BISECTION_STEPS):
        middle = 0.5 * (low + high)
        definite = bool((spectrum(vectors, values, diagonal - middle)[0] > -1).all())
        low, high = (middle, high) if definite else (low, middle)
    return low
