"""Smooth one-to-one maps onto triangular, positive-definite and correlation matrices.

Their unconstrained coordinates are the entries of a lower triangle, row by row. The rules of `priory.core.bijectors`
hold here too: logarithms instead of products, and plain tensor functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from priory.core.bijectors import Bijector


class TriangleIndex:
    """Index maps between an n x n lower-triangular matrix and the vector of its entries, row by row."""

    def __init__(self, n: int, strict: bool = False) -> None:
        rows, columns = torch.tril_indices(n, n, -1 if strict else 0)
        self.n, self.size = n, len(rows)
        self._take = rows * n + columns
        self._place = torch.full((n * n,), self.size).scatter(0, self._take, torch.arange(self.size))

    def matrix(self, u: Tensor) -> Tensor:
        """Return the matrix (*, n, n) of entries (*, size), by one gather, which vmap and tracing support."""
        return pad(u, (0, 1)).index_select(-1, self._place.to(u.device)).unflatten(-1, (self.n, self.n))

    def vector(self, x: Tensor) -> Tensor:
        """Return the entries of a matrix (*, n, n) as a vector (*, size)."""
        return x.flatten(-2).index_select(-1, self._take.to(x.device))


@dataclass(frozen=True, eq=False)
class TriangleMap(Bijector):
    """A map onto matrices whose coordinates are the entries of a lower triangle."""

    event_dim = 2
    triangle: TriangleIndex

    @property
    def free_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], self.triangle.size)


@dataclass(frozen=True, eq=False)
class LowerTriangularMap(TriangleMap):
    """A lower-triangular matrix, whose entries are u row by row."""

    def forward(self, u: Tensor) -> Tensor:
        return self.triangle.matrix(u)

    def inverse(self, x: Tensor) -> Tensor:
        return self.triangle.vector(x)

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        return self._total(torch.zeros_like(u).sum(-1))


@dataclass(frozen=True, eq=False)
class LowerCholeskyMap(TriangleMap):
    """A lower-triangular matrix with a positive diagonal, which is exp(u)."""

    def forward(self, u: Tensor) -> Tensor:
        raw = self.triangle.matrix(u)
        diagonal = diagonal_of(raw).exp().clamp(min=torch.finfo(u.dtype).tiny)
        return raw.tril(-1) + diagonal.diag_embed()

    def inverse(self, x: Tensor) -> Tensor:
        return self.triangle.vector(x.tril(-1) + diagonal_of(x).log().diag_embed())

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        return self._total(diagonal_of(self.triangle.matrix(u)).sum(-1))


@dataclass(frozen=True, eq=False)
class PositiveDefiniteMap(Bijector):
    """A positive-definite matrix x = L L', L a Cholesky factor: |det dx/dL| = 2^n prod_i L_ii^(n + 1 - i)."""

    event_dim = 2
    factor: LowerCholeskyMap

    @property
    def free_shape(self) -> tuple[int, ...]:
        return self.factor.free_shape

    def forward(self, u: Tensor) -> Tensor:
        factor = self.factor.forward(u)
        return factor @ factor.mT

    def inverse(self, x: Tensor) -> Tensor:
        return self.factor.inverse(torch.linalg.cholesky(x))

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        n = self.shape[-1]
        # powers n + 1 - i for i = 1, ..., n, plus one for the exp on the diagonal of the factor
        powers = torch.arange(n + 1, 1, -1, dtype=u.dtype, device=u.device)
        log_diagonal = diagonal_of(self.factor.triangle.matrix(u))
        return self._total((powers * log_diagonal).sum(-1) + n * math.log(2))


@dataclass(frozen=True, eq=False)
class CorrelationCholeskyMap(TriangleMap):
    """The Cholesky factor of a correlation matrix: L_ij = tanh(u_ij) prod_{k<j} sech(u_ik), with rows of length 1."""

    def forward(self, u: Tensor) -> Tensor:
        raw, _, log_left = self._logs(u)
        diagonal = (0.5 * diagonal_of(log_left)).exp().clamp(min=torch.finfo(u.dtype).tiny)
        return raw.tanh() * (0.5 * log_left).exp() + diagonal.diag_embed()

    def inverse(self, x: Tensor) -> Tensor:
        # sinh(u_ij) is the entry divided by the norm of the entries after it in its row
        after = x.square().flip(-1).cumsum(-1).flip(-1)[..., 1:]
        below = x[..., :-1].tril(-1)
        ratio = below / after.where(torch.ones_like(after).tril(-1) > 0, 1.0).sqrt()
        return self.triangle.vector(pad(ratio.asinh(), (0, 1)))

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        _, log_sech2, log_left = self._logs(u)
        return self._total((log_sech2 + 0.5 * log_left.tril(-1)).sum((-2, -1)))

    def log_diagonal(self, u: Tensor) -> Tensor:
        """Return log L_jj, (*, n)."""
        return 0.5 * diagonal_of(self._logs(u)[2])

    def _logs(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, log sech^2 u, and the log of the squared row length left before each entry, (*, n, n) each."""
        raw = self.triangle.matrix(u)
        log_sech2 = (2 * math.log(2) + logsigmoid(2 * raw) + logsigmoid(-2 * raw)).tril(-1)
        return raw, log_sech2, pad(log_sech2.cumsum(-1)[..., :-1], (1, 0))


@dataclass(frozen=True, eq=False)
class CorrelationMap(Bijector):
    """A correlation matrix x = L L', L the Cholesky factor of one: |det dx/dL| = prod_j L_jj^(n - j)."""

    event_dim = 2
    factor: CorrelationCholeskyMap

    @property
    def free_shape(self) -> tuple[int, ...]:
        return self.factor.free_shape

    def forward(self, u: Tensor) -> Tensor:
        factor = self.factor.forward(u)
        below = (factor @ factor.mT).tril(-1)
        # the diagonal is exactly one, and the matrix exactly symmetric
        return below + below.mT + torch.eye(self.shape[-1], dtype=u.dtype, device=u.device)

    def inverse(self, x: Tensor) -> Tensor:
        return self.factor.inverse(torch.linalg.cholesky(x))

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        n = self.shape[-1]
        powers = torch.arange(n - 1, -1, -1, dtype=u.dtype, device=u.device)
        own = self._total((powers * self.factor.log_diagonal(u)).sum(-1))
        return self.factor.log_det(u, x) + own


def diagonal_of(x: Tensor) -> Tensor:
    """The diagonal of matrices (*, n, n), as (*, n)."""
    return x.diagonal(0, -2, -1)
