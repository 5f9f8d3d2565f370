"""Matrix decompositions that are robust to rounding: a Cholesky factor with jitter, `eigh` and `svd` with a fallback.

`cholesky` adds as little to the diagonal of a matrix as makes it positive definite, and says so with a `JitterWarning`.
`try_cholesky` adds nothing and reports which members of a batch failed, for callers with their own remedy.
Log densities that run under `vmap`, where no value can be read, call `torch.linalg.cholesky` itself: samplers reject
the members that fail (`priory.network.failures`).
`eigh` and `svd` repeat in float64 what LAPACK can't decompose in float32, as happens to the factors of layers with dead
units, whose eigenvalues lie many orders of magnitude apart.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from priory.core.errors import InputError, PrioryWarning, warn

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
JITTER_GROWTH = 10.0  # factor between one attempt and the next
EIGH_JITTERS = (0.0, 1.0, 1e3)  # multiples of eps times the size of the matrix, in float64


class JitterWarning(PrioryWarning):
    """A matrix was singular to rounding, and something was added to its diagonal."""


class NotPositiveDefiniteError(InputError):
    """A matrix that has no Cholesky factor, even with jitter."""


class Eigen(NamedTuple):
    """Eigenvalues in ascending order, (..., n), and eigenvectors as columns, (..., n, n)."""

    values: Tensor
    vectors: Tensor


class Singular(NamedTuple):
    """Left vectors (..., m, k), singular values in descending order (..., k), and right vectors (..., k, n)."""

    left: Tensor
    values: Tensor
    right: Tensor


def try_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower factors (..., n, n), and which of them exist, (...); the others hold no meaningful numbers."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return factor, failed == 0


def cholesky(matrix: Tensor, name: str = "matrix", *, remedy: str = "", semidefinite: bool = False) -> Tensor:
    """Return the lower Cholesky factors of symmetric matrices, with jitter where rounding made them singular.

    Members of the batch that are positive definite are factorised as they are. The others get eps times their mean
    diagonal added to the diagonal, then ten times as much, up to sqrt(eps).

    Args:
        matrix: Symmetric matrices, (..., n, n); only the lower triangles are read.
        name: What the matrix is, for messages.
        remedy: What the user can do about a singular matrix, for the warning.
        semidefinite: Whether a singular matrix is expected, such as the covariance of perfectly correlated outputs. No
            warning is given then.

    Returns:
        Lower factors, (..., n, n).

    Raises:
        NotPositiveDefiniteError: If a matrix isn't positive definite even with jitter, or isn't finite.

    Example:
        >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
        tensor([[2., 0.],
                [1., 1.]])
    """
    factor, definite = try_cholesky(matrix)
    if bool(definite.all()):
        return factor
    info = torch.finfo(matrix.dtype)
    size = matrix.diagonal(dim1=-2, dim2=-1).abs().mean(-1).clamp_min(math.sqrt(info.tiny))
    added, jitter, largest = torch.zeros_like(size), info.eps, math.sqrt(info.eps)
    while not bool(definite.all()) and jitter <= largest:
        added = torch.where(definite, added, jitter * size)
        factor, definite = try_cholesky(matrix + torch.diag_embed(added[..., None].expand(matrix.shape[:-1])))
        jitter = min(JITTER_GROWTH * jitter, largest) if jitter < largest else math.inf
    if not bool(definite.all()):
        raise NotPositiveDefiniteError(f"The {name} must be positive definite, got one that is not.")
    if not semidefinite:
        end = f": {remedy}." if remedy else "."
        warn(
            f"The {name} is singular to rounding, so {float(added.max()):.3g} was added to its diagonal{end}",
            JitterWarning,
        )
    return factor


def eigh(matrix: Tensor) -> Eigen:
    """Return the eigenvalues and eigenvectors of symmetric matrices (..., n, n), in their own dtype.

    Falls back to float64, then to a little jitter, where LAPACK doesn't converge.

    Raises:
        InputError: If a matrix isn't finite.

    Example:
        >>> eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]])).values
        tensor([1., 2.])
    """
    try:
        return Eigen(*torch.linalg.eigh(matrix))
    except LinAlgError:
        _finite(matrix, "eigenvalues")
    wide = matrix.double()
    wide = 0.5 * (wide + wide.mT)
    size = wide.abs().amax((-2, -1))
    ramp = torch.linspace(1, 2, wide.shape[-1], dtype=torch.float64, device=wide.device)  # separates equal eigenvalues
    for jitter in EIGH_JITTERS:
        try:
            values, vectors = torch.linalg.eigh(
                wide + torch.diag_embed(jitter * torch.finfo(wide.dtype).eps * size[..., None] * ramp)
            )
        except LinAlgError:
            continue
        return Eigen(values.to(matrix.dtype), vectors.to(matrix.dtype))
    raise InputError(f"The eigenvalues of a matrix of shape {tuple(matrix.shape)} could not be found.")


def svd(matrix: Tensor) -> Singular:
    """Return the thin singular value decomposition of matrices (..., m, n), in their own dtype.

    Falls back to float64 where LAPACK doesn't converge.

    Raises:
        InputError: If a matrix isn't finite.
    """
    try:
        return Singular(*torch.linalg.svd(matrix, full_matrices=False))
    except LinAlgError:
        _finite(matrix, "singular values")
    return Singular(*(t.to(matrix.dtype) for t in torch.linalg.svd(matrix.double(), full_matrices=False)))


def _finite(matrix: Tensor, wanted: str) -> None:
    """Raise an error for a matrix with NaN or infinity, which no fallback can decompose."""
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(f"A matrix must be finite to have {wanted}, got NaN or infinity.")
