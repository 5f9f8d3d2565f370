"""The full curvature, a dense p x p matrix.

    Q = scale H + diag(precision) = L L',   w = L'^-1 e with e ~ N(0, I),   log det Q = 2 sum_i log L_ii

H is the sum of R'R over a few data at a time, with R (n C, p) their rows J_n' s_cn, so the Jacobian of all the data is
never held. H is stored in float64 for every model dtype, because products rounded to float32 would make it indefinite.
Memory: 8 p^2 bytes, twice that with a Gaussian, and three times while the Gaussian is computed. Time: N C p^2 to build,
or N p^2 / 2 for a single linear layer, and p^3 / 3 per factorisation. The Hessian needs p backward passes through a
gradient instead of C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import InputError
from priory.core.linalg import NotPositiveDefiniteError, cholesky, try_cholesky
from priory.curvature.base import Curvature, Kind, Pass, PrecisionGaussian, Selection, check_curvature
from priory.curvature.jacobian_parts import LayerPart
from priory.curvature.layer_jacobians import curvature_rows
from priory.curvature.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.curvature.jacobian_parts import JacobianRows

SINGULAR_RATIO = 1e-13  # conditional precision over precision of a coordinate below which Q counts as singular


class Full(Curvature):
    """H as a dense matrix, for structure="full"."""

    structure: ClassVar[str] = "full"

    def __init__(self, selection: Selection, matrix: Tensor, kind: Kind = "ggn") -> None:
        self.selection, self.matrix = selection, matrix
        self.kind: Kind = kind

    @classmethod
    def of(cls, given: Pass) -> Full:
        """Compute H in one pass over the data."""
        selection, w, kind = given.selection, given.w, given.kind
        if kind == "hessian":
            matrix = product(given, torch.eye(selection.size, dtype=w.dtype, device=w.device)).double()
            return cls(selection, 0.5 * (matrix + matrix.mT), kind)
        matrix, seen = torch.zeros(selection.size, selection.size, dtype=torch.float64, device=w.device), 0
        for rows in curvature_rows(given):
            seen += len(rows)
            part = rows.parts[0]
            if len(rows.parts) == 1 and rows.among is None and isinstance(part, LayerPart) and part.a.shape[1] == 1:
                add_layer(part, matrix)
                continue
            for few in rows.chunks(given.limit):
                flat = few.dense().flatten(0, 1).double()  # (n C, p)
                matrix.addmm_(flat.mT, flat)
        return cls(selection, matrix.mul_(given.target.scale(seen)), kind)

    def gaussian(self, precision: Tensor, scale: float = 1.0) -> FullGaussian:
        precision, scale = self.checked(precision, scale)
        check_curvature(self.matrix)
        matrix = scale * self.matrix
        matrix.diagonal().add_(precision.double())
        return FullGaussian(factorise(matrix, precision, self.kind), precision.dtype)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal().clone()

    def dense(self) -> Tensor:
        return self.matrix

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def of_tensors(cls, selection: Selection, tensors: Mapping[str, Tensor], **options: Any) -> Full:
        return cls(selection, tensors["matrix"], **options)


class FullGaussian(PrecisionGaussian):
    """N(0, Q^-1) by the Cholesky factor of Q; results have the dtype of the model."""

    def __init__(self, root: Tensor, dtype: torch.dtype) -> None:
        self.root, self.dtype = root, dtype
        self.log_det = 2 * root.diagonal().log().sum()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        p, device = len(self.root), self.root.device
        noise = torch.randn(n, p, dtype=self.dtype, device=device, generator=generator).double()
        return torch.linalg.solve_triangular(self.root, noise, upper=False, left=False).to(self.dtype)

    def variance(self) -> Tensor:
        unit = torch.eye(len(self.root), dtype=self.root.dtype, device=self.root.device)
        inverse = torch.linalg.solve_triangular(self.root, unit, upper=False)
        return inverse.square_().sum(0).to(self.dtype)

    def solve(self, v: Tensor) -> Tensor:
        flat = v.reshape(-1, v.shape[-1]).double()
        return torch.cholesky_solve(flat.mT, self.root).mT.reshape(v.shape).to(v.dtype)

    def quadratic(self, v: Tensor) -> Tensor:
        return (v.double() @ self.root).square().sum(-1).to(v.dtype)

    def output_covariance(self, rows: JacobianRows) -> Tensor:
        return torch.cat([self._between(few.dense()) for few in rows.chunks()])

    def _between(self, jacobian: Tensor) -> Tensor:
        """Return J Q^-1 J' of a few data, (n, C, p) -> (n, C, C)."""
        flat = jacobian.flatten(0, 1).double()
        half = torch.linalg.solve_triangular(self.root, flat.mT, upper=False).mT.reshape(jacobian.shape)
        return (half @ half.mT).to(jacobian.dtype)


def add_layer(layer: LayerPart, matrix: Tensor) -> None:
    """Add the curvature of one layer, sum_n (sum_c g_cn g_cn') x a_n a_n', with N p^2 / 2 products."""
    a, g = layer.a[:, 0].double(), layer.g[:, :, 0].double()  # (n, in), (C, n, out)
    out, places = g.shape[-1], layer.place.read(torch.arange(len(matrix), device=matrix.device))  # (out, in)
    for j in range(out):
        weights = (g[:, :, j, None] * g[:, :, j:]).sum(0)  # (n, out - j)
        blocks = a.mT @ (weights[:, :, None] * a[:, None]).flatten(1)  # (in, (out - j) in)
        matrix[places[j][:, None], places[j:].reshape(1, -1)] += blocks
        matrix[places[j + 1 :].reshape(-1, 1), places[j][None]] += blocks[:, a.shape[1] :].mT


def factorise(matrix: Tensor, precision: Tensor, kind: Kind) -> Tensor:
    """Return the Cholesky factor of Q, with jitter if only rounding makes it indefinite; raise InputError otherwise."""
    root, definite = try_cholesky(matrix)
    flat = not bool((precision > 0).all())  # with a flat prior Q may be singular, which rounding can hide
    if bool(definite) and not (flat and float((root.diagonal().square() / matrix.diagonal()).min()) < SINGULAR_RATIO):
        return root
    values = torch.linalg.eigvalsh(matrix)
    low, high = float(values[0]), float(values[-1])
    rounding = len(matrix) * torch.finfo(precision.dtype).eps * high
    if low < -rounding:
        raise indefinite(kind, low)
    if flat:
        none = int((values <= rounding).sum())
        raise InputError(
            f"The prior's precision must be above zero where the curvature is zero, got zero and a curvature that is "
            f"singular in {max(1, none)} of {len(values)} directions: give the weights a Normal prior."
        )
    try:
        return cholesky(matrix, "precision of the Gaussian", remedy="standardise the inputs, or use a stronger prior")
    except NotPositiveDefiniteError as error:
        raise InputError(
            f"The precision of the Gaussian must be positive definite, got a smallest eigenvalue of {low:.3g}."
        ) from error


def indefinite(kind: Kind, low: float) -> InputError:
    """Return the error for a Q with a negative smallest eigenvalue."""
    return InputError(
        f"The curvature of kind '{kind}' plus the prior's precision must be positive definite, got a smallest "
        f"eigenvalue of {low:.3g}: w is not a mode; train longer, or use curvature='ggn'."
    )
