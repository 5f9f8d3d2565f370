"""The parts of a Jacobian, one per layer or parameter, kept as factors.

    LayerPart        a linear layer or a convolution: d f_c / d W = sum_t g_ct a_t'
    EmbeddingPart    an embedding, whose a_t selects one row of the weight
    DensePart        any other parameter: its dense rows

`JacobianRows` holds the parts of a few data. `layer_jacobians` makes it, and each structure of the curvature reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.network.skeleton import MEMORY_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_JACOBIAN_ELEMENTS = 1 << 22  # formed at a time where positions have to be summed


@dataclass(frozen=True)
class MatrixSlice:
    """The position of a matrix among the p coordinates: a weight row by row, and a bias as its last column."""

    weight: slice | None
    bias: slice | None
    shape: tuple[int, int]  # including the column of the bias

    def read(self, v: Tensor) -> Tensor:
        """Return the matrix inside v (..., p), (..., rows, columns)."""
        parts = []
        if self.weight is not None:
            parts.append(v[..., self.weight].unflatten(-1, (self.shape[0], -1)))
        if self.bias is not None:
            parts.append(v[..., self.bias].unsqueeze(-1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def add(self, matrix: Tensor, v: Tensor) -> None:
        """Add a matrix (..., rows, columns) to its coordinates in v (..., p)."""
        columns = self.shape[1] - (self.bias is not None)
        if self.weight is not None:
            v[..., self.weight] += matrix[..., :columns].flatten(-2)
        if self.bias is not None:
            v[..., self.bias] += matrix[..., -1]

    @property
    def key(self) -> tuple[int, int]:
        """A unique key of this position."""
        weight, bias = (-1 if part is None else part.start for part in (self.weight, self.bias))
        return weight, bias


@dataclass(frozen=True)
class LayerPart:
    """The Jacobian of a layer: d f_c / d W = sum_t g_ct a_t' for each datum."""

    place: MatrixSlice
    a: Tensor  # (n, T, in), with a 1 at the end where there is a bias
    g: Tensor  # (C, n, T, out)

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers held: independent of the cotangents, and for all cotangents together."""
        return self.a.numel(), self.g.numel()

    def at(self, some: slice) -> LayerPart:
        """Return the part for some of the data."""
        return LayerPart(self.place, self.a[some], self.g[:, some])

    def formed(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield the Jacobian (m, C, k, in) of m data and k rows of the weight at a time."""
        c, n, _, out = self.g.shape
        wide = self.a.shape[-1]
        rows = max(1, min(n, MAX_JACOBIAN_ELEMENTS // (c * out * wide)))
        rows_per_block = max(1, min(out, MAX_JACOBIAN_ELEMENTS // (c * wide * rows)))
        for first in range(0, n, rows):
            data = slice(first, min(n, first + rows))
            for top in range(0, out, rows_per_block):
                units = slice(top, min(out, top + rows_per_block))
                g = self.g[:, data, :, units].permute(1, 0, 3, 2).flatten(1, 2)  # (m, C k, T)
                yield data, units, torch.bmm(g, self.a[data]).unflatten(1, (c, -1))

    def add_to(self, dense: Tensor) -> None:
        """Add this part to a Jacobian (n, C, p)."""
        self.place.add(torch.einsum("cnto,nti->ncoi", self.g, self.a), dense)

    def squares(self) -> Tensor:
        """Return the squared entries of the Jacobian, summed over data and outputs, (out, in)."""
        if self.a.shape[1] == 1:
            return self.g[:, :, 0].square().sum(0).mT @ self.a[:, 0].square()
        total = self.a.new_zeros(self.g.shape[-1], self.a.shape[-1])
        for _, units, jacobian in self.formed():
            total[units] += jacobian.square().sum((0, 1))
        return total

    def covariance(self, weights: Tensor) -> Tensor:
        """Return J diag(weights) J' for each datum, (n, C, C), for weights (out, in)."""
        if self.a.shape[1] == 1:
            g = self.g[:, :, 0]
            return _inner(g * (self.a[:, 0].square() @ weights.mT), g)
        c, n = self.g.shape[:2]
        total = self.a.new_zeros(n, c, c)
        for data, units, jacobian in self.formed():
            total[data] += (jacobian * weights[units]).flatten(2) @ jacobian.flatten(2).mT
        return total


@dataclass(frozen=True)
class EmbeddingPart:
    """The Jacobian of an embedding: d f_c / d W[v] = sum over the positions t with index v of g_ct."""

    place: MatrixSlice
    index: Tensor  # (n, T)
    present: Tensor  # (n, T): 0 at the padding, whose row has no gradient, and 1 elsewhere
    g: Tensor  # (C, n, T, out), 0 at the padding

    @property
    def numbers(self) -> tuple[int, int]:
        return self.index.numel() * self.index.shape[1], 2 * self.g.numel()

    def at(self, some: slice) -> EmbeddingPart:
        return EmbeddingPart(self.place, self.index[some], self.present[some], self.g[:, some])

    def summed_by_index(self) -> Tensor:
        """Return, at each position, g summed over the positions of the datum with the same index, (C, n, T, out)."""
        same = self.index.unsqueeze(-1) == self.index.unsqueeze(-2)
        return same.to(self.g) @ self.g

    def add_to(self, dense: Tensor) -> None:
        c, n, t, out = self.g.shape
        found = dense.new_zeros(n, c, *self.place.shape)
        found.scatter_add_(2, self.index[:, None, :, None].expand(n, c, t, out), self.g.movedim(0, 1))
        self.place.add(found, dense)

    def squares(self) -> Tensor:
        each = (self.g * self.summed_by_index()).sum(0).flatten(0, 1)
        return each.new_zeros(self.place.shape).index_add_(0, self.index.flatten(), each)

    def covariance(self, weights: Tensor) -> Tensor:
        return _inner((self.g * weights[self.index]).flatten(2), self.summed_by_index().flatten(2))


@dataclass(frozen=True)
class DensePart:
    """The Jacobian of a parameter without a rule, as dense rows."""

    place: MatrixSlice  # of one row
    rows: Tensor  # (n, C, k)
    name: str

    def at(self, some: slice) -> DensePart:
        return DensePart(self.place, self.rows[some], self.name)

    def add_to(self, dense: Tensor) -> None:
        self.place.add(self.rows.unsqueeze(-2), dense)

    def squares(self) -> Tensor:
        return self.rows.square().sum((0, 1)).unsqueeze(0)

    def covariance(self, weights: Tensor) -> Tensor:
        return (self.rows * weights) @ self.rows.mT


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """Return sum_k x_cnk y_dnk, (n, C, C)."""
    return torch.bmm(x.movedim(0, 1), y.permute(1, 2, 0))


JacobianPart = LayerPart | EmbeddingPart | DensePart


@dataclass(frozen=True)
class JacobianRows:
    """Cotangents times the Jacobian in parts, with C rows for each of a few data."""

    parts: list[JacobianPart]
    outputs: Tensor  # (n, *rest), arranged
    count: int  # C
    touched: int  # coordinates of the parts' parameters
    among: Tensor | None = None  # positions of the p coordinates among them; None for all
    weights: Tensor | None = None  # (n,), of the data; the cotangents include their square roots

    def __len__(self) -> int:
        return len(self.outputs)

    def dense(self) -> Tensor:
        """Return the dense Jacobian, (n, C, p), for small problems."""
        found = self.outputs.new_zeros(len(self), self.count, self.touched)
        for part in self.parts:
            part.add_to(found)
        return found if self.among is None else found[..., self.among]

    def chunks(self, limit: int = MEMORY_LIMIT) -> Iterator[JacobianRows]:
        """Yield a few data at a time, so that three dense Jacobians in float64 stay under `limit` bytes."""
        rows_per_chunk = max(1, limit // (24 * self.count * self.touched))
        for start in range(0, len(self), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            weights = None if self.weights is None else self.weights[chunk]
            yield replace(
                self, parts=[part.at(chunk) for part in self.parts], outputs=self.outputs[chunk], weights=weights
            )
