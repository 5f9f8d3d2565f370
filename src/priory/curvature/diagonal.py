"""The diagonal of the curvature, one number per coordinate.

    diag H = sum_n sum_c (J_n' s_cn)^2        elementwise

A layer with one position per datum needs no gradients of single data: (g a')^2 = g^2 (a^2)', so one product of squares
per layer is enough. Other layers form the gradient of each datum, a few data at a time. Time: C backward passes over
the N data and one product per layer, or C T products at T positions. Memory: p, plus that of `layer_jacobians`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import InputError
from priory.curvature.base import Curvature, Pass, PrecisionGaussian, Selection
from priory.curvature.layer_jacobians import curvature_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.curvature.jacobian_parts import JacobianRows


class DiagonalCurvature(Curvature):
    """The diagonal of H, for structure="diag"."""

    structure: ClassVar[str] = "diag"

    def __init__(self, selection: Selection, values: Tensor) -> None:
        self.selection, self.values = selection, values

    @classmethod
    def of(cls, given: Pass) -> DiagonalCurvature:
        """Compute the diagonal of H in one pass over the data."""
        total, among, seen = given.w.new_zeros(0), None, 0
        for rows in curvature_rows(given):
            total = total if seen else given.w.new_zeros(rows.touched)
            for part in rows.parts:
                part.place.add(part.squares(), total)
            seen, among = seen + len(rows), rows.among
        total = total if among is None else total[among]
        return cls(given.selection, total * given.target.scale(seen))

    def gaussian(self, precision: Tensor, scale: float = 1.0) -> IndependentGaussian:
        precision, scale = self.checked(precision, scale)
        total = scale * self.values + precision
        none = int((total <= 0).sum())
        if none:
            raise InputError(
                f"The prior's precision must be above zero where the curvature is zero, got zero and a curvature of "
                f"zero at {none} of {len(total)} coordinates: give the weights a Normal prior."
            )
        return IndependentGaussian(total)

    def diagonal(self) -> Tensor:
        return self.values

    def dense(self) -> Tensor:
        return torch.diag(self.values)

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    @classmethod
    def of_tensors(cls, selection: Selection, tensors: Mapping[str, Tensor], **options: Any) -> DiagonalCurvature:
        return cls(selection, tensors["values"], **options)


class IndependentGaussian(PrecisionGaussian):
    """N(0, Q^-1) with a diagonal Q."""

    def __init__(self, precision: Tensor) -> None:
        self.precision = precision
        self.log_det = precision.double().log().sum()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        q = self.precision
        noise = torch.randn(n, len(q), dtype=q.dtype, device=q.device, generator=generator)
        return noise.mul_(q.rsqrt())

    def variance(self) -> Tensor:
        return 1 / self.precision

    def solve(self, v: Tensor) -> Tensor:
        return v / self.precision

    def quadratic(self, v: Tensor) -> Tensor:
        return (v.square() * self.precision).sum(-1)

    def output_covariance(self, rows: JacobianRows) -> Tensor:
        variance = self.variance()
        if rows.among is not None:  # the other coordinates are fixed
            variance = variance.new_zeros(rows.touched).index_copy_(0, rows.among, variance)
        total = rows.outputs.new_zeros(len(rows), rows.count, rows.count)
        for part in rows.parts:
            total += part.covariance(part.place.read(variance))
        return total
