"""Kronecker-factored curvature (KFAC): the block of a layer as a Kronecker product of two small matrices.

For a layer with d f_c / d W = sum_t g_ct a_t' (see `layer_jacobians`), KFAC (Martens and Grosse 2015) treats a and g as
independent over the data. With B (out x out) over the rows of W and A (in x in) over its columns, bias included:

    H_W ~ B x A,      A = sum_n sum_t a_nt a_nt',      B = (1 / N T) sum_n sum_t sum_c g_cnt g_cnt'        "expand"
                      A = sum_n a_n a_n',  B = (1 / N) sum_n sum_c g_cn g_cn',  a_n = mean_t, g_cn = sum_t  "reduce"

are the two treatments of weights that act at several positions by Eschenhagen et al. (2023, "Kronecker-Factored
Approximate Curvature for Modern Neural Network Architectures"). Both are exact for a linear model with Gaussian noise,
and for one datum at one position. Blocks of different layers are independent. For an embedding the factor over its rows
is diagonal, the counts of its indices. A parameter without a rule keeps its exact block, or above 1,024 coordinates the
diagonal of the block.

A prior precision that is an outer product, delta alpha_i beta_j, is treated exactly; one number for the weight and one
for the bias of each layer is such a product. In the basis S_B x S_A in which both factors and both sides of the prior
are diagonal,

    Q = scale B x A + delta diag(alpha) x diag(beta)  ->  scale l_i m_j + delta e_i e_j = 1 / R_ij

so another delta needs no new decomposition. The covariance of the outputs of a datum, with a and g rotated into that
basis, is sum_ij a_j^2 g_ci g_di R_ij: one product per layer, without a Jacobian.

Cost: C backward passes to activations (one per sampled label), the products for A and B, N T (in^2 + C out^2) / 2 per
layer, and decompositions, in^3 + out^3 per layer. Memory: in^2 + out^2 per layer, twice with the basis, and p numbers
for R.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from priory.core.errors import InputError, require
from priory.core.linalg import eigh, try_cholesky
from priory.curvature.base import Curvature, Pass, PrecisionGaussian, Selection
from priory.curvature.jacobian_parts import DensePart, EmbeddingPart, LayerPart, MatrixSlice
from priory.curvature.layer_jacobians import curvature_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.curvature.jacobian_parts import JacobianPart, JacobianRows
    from priory.models.target import Target

Sharing = Literal["expand", "reduce"]
MAX_DENSE_BLOCK = 1024  # coordinates of a parameter without a rule, up to which its exact block is kept
STRIP_COLUMNS = 128  # of a symmetric product per strip: the lower half is never computed


# Sums over the data.


@dataclass
class Factors:
    """The two factors of one block, H = left x right, as sums until `closed`; a vector is a diagonal matrix."""

    place: MatrixSlice
    left: Tensor  # over rows
    right: Tensor  # over columns
    positions: float = 0.0  # counted with the weight of their row; `closed` divides by it

    @classmethod
    def empty(cls, part: JacobianPart) -> Factors:
        rows, columns = part.place.shape
        if isinstance(part, LayerPart):
            return cls(part.place, part.g.new_zeros(rows, rows), part.g.new_zeros(columns, columns))
        if isinstance(part, EmbeddingPart):
            return cls(part.place, part.g.new_zeros(rows), part.g.new_zeros(columns, columns))
        whole = (columns, columns) if columns <= MAX_DENSE_BLOCK else (columns,)
        return cls(part.place, part.rows.new_ones(1), part.rows.new_zeros(whole))

    def add(self, part: JacobianPart, sharing: Sharing, weights: Tensor | None = None) -> None:
        """Add some data to the sums; gradients include the roots of the weights (n,), inputs don't."""
        if isinstance(part, DensePart):
            if self.right.ndim == 1:
                self.right += part.squares()[0]
            else:
                add_gram(self.right, part.rows.flatten(0, 1))
        elif isinstance(part, EmbeddingPart):
            present = part.present if weights is None else part.present * weights[:, None]
            self.left.index_add_(0, part.index.flatten(), present.flatten())
            add_gram(self.right, part.g.flatten(0, 2))
            self.positions += float(present.sum())
        else:
            reduce = sharing == "reduce" and part.a.shape[1] > 1
            a, g = (part.a.mean(1, keepdim=True), part.g.sum(2, keepdim=True)) if reduce else (part.a, part.g)
            add_gram(self.right, (a if weights is None else a * weights.sqrt()[:, None, None]).flatten(0, 1))
            add_gram(self.left, g.flatten(0, 2))
            self.positions += (a.shape[0] if weights is None else float(weights.sum())) * a.shape[1]

    def closed(self, factor: float) -> Factors:
        """Return the factors, scaled from the rows seen to all rows."""
        left, right = (f if f.ndim == 1 else whole(f) for f in (self.left, self.right))
        return Factors(self.place, left * (factor / (self.positions or 1.0)), right)

    def times(self, v: Tensor) -> Tensor:
        """Return H v for v (..., rows, columns)."""
        v = v * self.left[:, None] if self.left.ndim == 1 else self.left @ v
        return v * self.right if self.right.ndim == 1 else v @ self.right

    def diagonal(self) -> Tensor:
        """Return the diagonal of the block, (rows, columns)."""
        left, right = (f if f.ndim == 1 else f.diagonal() for f in (self.left, self.right))
        return torch.outer(left, right)


def add_gram(total: Tensor, x: Tensor) -> None:
    """Add x'x to the strips on and above the diagonal of a total, for x (n, k)."""
    for start in range(0, len(total), STRIP_COLUMNS):
        stop = start + STRIP_COLUMNS
        total[start:stop, start:].addmm_(x[:, start:stop].mT, x[:, start:])


def whole(total: Tensor) -> Tensor:
    """Return the symmetric matrix with this upper half."""
    return total.triu() + total.triu(1).mT


# The basis in which a factor and its side of the prior are both diagonal.


@dataclass(frozen=True)
class Side:
    """S with S' F S = diag(values) and S' diag(prior) S = diag(share); a vector S is a diagonal matrix."""

    prior: Tensor
    basis: Tensor
    values: Tensor
    share: Tensor
    log_det: Tensor  # of (S S')^-1, float64

    @classmethod
    def of(cls, factor: Tensor, prior: Tensor) -> Side:
        """Whiten with the prior, or with the sum of factor and prior if the prior is flat in some coordinates."""
        firm = prior > 0
        if factor.ndim == 1:
            spread = torch.where(firm, prior, 1.0)
            return cls(prior, spread.rsqrt(), factor / spread, firm.to(factor), spread.double().log().sum())
        if bool(firm.all()):
            root = prior.rsqrt()
            values, vectors = eigh(root[:, None] * factor * root)
            share = torch.ones_like(values)
            return cls(prior, root[:, None] * vectors, values.clamp_min(0), share, prior.double().log().sum())
        size = float(factor.diagonal().mean()) or 1.0
        both, definite = try_cholesky(factor / size + torch.diag(prior))
        if not bool(definite):
            raise singular(1, len(prior))
        half = torch.linalg.solve_triangular(both, factor / size, upper=False)
        values, vectors = eigh(torch.linalg.solve_triangular(both, half.mT, upper=False))
        basis = torch.linalg.solve_triangular(both.mT, vectors, upper=True)
        values = values.clamp(0, 1)
        return cls(prior, basis, size * values, 1 - values, 2 * both.diagonal().double().log().sum())

    def fits(self, prior: Tensor) -> bool:
        """Whether the basis was made for this prior, up to rounding."""
        return torch.allclose(self.prior, prior, rtol=16 * torch.finfo(prior.dtype).eps, atol=0)

    def turned(self, x: Tensor) -> Tensor:
        """Return x S, along the last dimension."""
        return x * self.basis if self.basis.ndim == 1 else x @ self.basis

    def turned_back(self, x: Tensor) -> Tensor:
        """Return x S', along the last dimension."""
        return x * self.basis if self.basis.ndim == 1 else x @ self.basis.mT


def singular(none: int, size: int) -> InputError:
    """Return the error for directions with neither prior precision nor curvature."""
    return InputError(
        f"The prior's precision must be above zero where the curvature is zero, got zero and a curvature that is "
        f"singular in {none} of {size} directions: give the weights a Normal prior."
    )


def outer(precision: Tensor) -> tuple[float, Tensor, Tensor] | None:
    """Factorise a precision (rows, columns) as delta alpha_i beta_j, with maxima of 1; None if impossible."""
    rows, columns = precision.shape
    delta = float(precision.max())
    if delta == 0:
        return 0.0, precision.new_ones(rows), precision.new_ones(columns)
    row, column = divmod(int(precision.argmax()), columns)
    alpha, beta = precision[:, column] / delta, precision[row] / delta
    rest = (precision / delta - torch.outer(alpha, beta)).abs().max()
    close = float(rest) <= 64 * torch.finfo(precision.dtype).eps and bool((alpha > 0).all())
    return (delta, alpha, beta) if close else None


# The curvature and its Gaussian.


class Kronecker(Curvature):
    """H as one Kronecker product of two factors per layer, for structure="kron"."""

    structure: ClassVar[str] = "kron"

    def __init__(self, selection: Selection, blocks: list[Factors], notes: list[str]) -> None:
        self.selection, self.blocks, self._notes = selection, blocks, notes
        self._sides: dict[tuple[int, str], Side] = {}

    @classmethod
    def of(cls, given: Pass, sharing: Sharing = "expand") -> Kronecker:
        """Compute the factors in one pass over the data."""
        selection, target = given.selection, given.target
        require(selection.whole, "over", "Laplace", "name whole parameters for structure='kron'", "single coordinates")
        known = sharing in ("expand", "reduce")
        require(known, "sharing", "Kronecker", "be 'expand' or 'reduce'", repr(sharing))
        sums: dict[tuple[int, int], Factors] = {}
        plain: dict[str, int] = {}
        seen = 0
        for rows in curvature_rows(given):
            for part in rows.parts:
                sums.setdefault(part.place.key, Factors.empty(part)).add(part, sharing, rows.weights)
            plain |= {part.name: part.place.shape[1] for part in rows.parts if isinstance(part, DensePart)}
            seen += len(rows)
        factor = target.scale(seen)
        notes = [note(target, name, size) for name, size in plain.items()]
        return cls(selection, [sums[key].closed(factor) for key in sorted(sums)], notes)

    def gaussian(self, precision: Tensor, scale: float = 1.0) -> KroneckerGaussian:
        precision, scale = self.checked(precision, scale)
        pieces: list[Piece] = []
        for index, block in enumerate(self.blocks):
            found = outer(block.place.read(precision))
            if found is None:
                raise InputError(
                    "The prior's precision must be the product of one number per row and one per column of each weight "
                    "for structure='kron', such as one number per weight matrix and one per bias, got another: use "
                    "structure='diag'."
                )
            delta, alpha, beta = found
            left, right = self._side(index, "left", alpha), self._side(index, "right", beta)
            pieces.append(Piece.of(block, left, right, scale, delta))
        return KroneckerGaussian(pieces, precision, scale)

    def _side(self, index: int, name: Literal["left", "right"], prior: Tensor) -> Side:
        """Return the basis of one factor, cached as long as the prior changes only by a constant factor."""
        side = self._sides.get((index, name))
        if side is None or not side.fits(prior):
            side = self._sides[index, name] = Side.of(getattr(self.blocks[index], name), prior)
        return side

    def diagonal(self) -> Tensor:
        found = self.blocks[0].right.new_zeros(self.selection.size)
        for block in self.blocks:
            block.place.add(block.diagonal(), found)
        return found

    def dense(self) -> Tensor:
        p = self.selection.size
        found = self.blocks[0].right.new_zeros(p, p)
        for block in self.blocks:
            left, right = (torch.diag(f) if f.ndim == 1 else f for f in (block.left, block.right))
            at = block.place.read(torch.arange(p, device=found.device)).flatten()
            found[at[:, None], at] = torch.kron(left, right)
        return found

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": getattr(b, name) for i, b in enumerate(self.blocks) for name in ("left", "right")}

    def to_json(self) -> dict[str, Any]:
        def pair(part: slice | None) -> list[int] | None:
            return None if part is None else [part.start, part.stop]

        places = [[pair(b.place.weight), pair(b.place.bias), list(b.place.shape)] for b in self.blocks]
        return {"places": places, "notes": self._notes}

    @classmethod
    def of_tensors(cls, selection: Selection, tensors: Mapping[str, Tensor], **options: Any) -> Kronecker:
        blocks = []
        for i, (weight, bias, shape) in enumerate(options["places"]):
            at = [None if part is None else slice(*part) for part in (weight, bias)]
            place = MatrixSlice(at[0], at[1], (shape[0], shape[1]))
            blocks.append(Factors(place, tensors[f"{i}.left"], tensors[f"{i}.right"]))
        return cls(selection, blocks, options["notes"])

    def notes(self) -> list[str]:
        return list(self._notes)


def note(target: Target, name: str, size: int) -> str:
    """Return the note on a parameter without a Kronecker rule."""
    owner = target.network_model("Kronecker").network.skeleton.get_submodule(name.rpartition(".")[0])
    kept = "exact block" if size <= MAX_DENSE_BLOCK else "exact diagonal"
    return f"{name} of {type(owner).__name__}: {kept}, no Kronecker rule"


@dataclass(frozen=True)
class Piece:
    """One block of the Gaussian, in the basis in which it is diagonal."""

    block: Factors
    left: Side
    right: Side
    values: Tensor  # 1 / R, (rows, columns)

    @classmethod
    def of(cls, block: Factors, left: Side, right: Side, scale: float, delta: float) -> Piece:
        curved = torch.outer(scale * left.values, right.values)
        share = torch.outer(left.share, right.share)
        eps = torch.finfo(curved.dtype).eps
        if delta == 0 or float(share.min()) < 16 * eps:  # only then may a direction have neither
            rounding = max(curved.shape) * eps * float(curved.max())
            none = int(((curved <= rounding) & (delta * share <= 16 * eps * delta)).sum())
            if none:
                raise singular(none, curved.numel())
        return cls(block, left, right, curved.add_(share, alpha=delta))

    def turned(self, x: Tensor) -> Tensor:
        """Return S_B' x S_A for x (..., rows, columns)."""
        return self.left.turned(self.right.turned(x).mT).mT

    def turned_back(self, x: Tensor) -> Tensor:
        """Return S_B x S_A' for x (..., rows, columns)."""
        return self.left.turned_back(self.right.turned_back(x).mT).mT

    def log_det(self) -> Tensor:
        rows, columns = self.values.shape
        return self.values.double().log().sum() + columns * self.left.log_det + rows * self.right.log_det

    def variance(self) -> Tensor:
        """Return the marginal variances, (rows, columns)."""
        left, right = (replace(side, basis=side.basis.square()) for side in (self.left, self.right))
        return left.turned_back(right.turned_back(1 / self.values).mT).mT

    def covariance(self, part: JacobianPart) -> Tensor:
        """Return the block's contribution to J Q^-1 J', (n, C, C)."""
        left, right, place = self.left, self.right, part.place
        if isinstance(part, LayerPart):
            part = LayerPart(place, right.turned(part.a), left.turned(part.g))
        elif isinstance(part, EmbeddingPart):
            g = part.g * left.basis[part.index].unsqueeze(-1)
            part = EmbeddingPart(place, part.index, part.present, right.turned(g))
        else:
            part = DensePart(place, right.turned(part.rows), part.name)
        return part.covariance(1 / self.values)


class KroneckerGaussian(PrecisionGaussian):
    """N(0, Q^-1), block by block."""

    def __init__(self, pieces: list[Piece], precision: Tensor, scale: float) -> None:
        self.pieces, self.precision, self.scale = pieces, precision, scale

    @cached_property
    def log_det(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] - computed when first read
        return torch.stack([piece.log_det() for piece in self.pieces]).sum()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        q = self.precision
        noise = torch.randn(n, len(q), dtype=q.dtype, device=q.device, generator=generator)
        found = torch.zeros_like(noise)
        for piece in self.pieces:
            z = piece.block.place.read(noise) * piece.values.rsqrt()
            piece.block.place.add(piece.turned_back(z), found)
        return found

    def variance(self) -> Tensor:
        found = torch.zeros_like(self.precision)
        for piece in self.pieces:
            piece.block.place.add(piece.variance(), found)
        return found

    def solve(self, v: Tensor) -> Tensor:
        found = torch.zeros_like(v)
        for piece in self.pieces:
            z = piece.turned(piece.block.place.read(v)) / piece.values
            piece.block.place.add(piece.turned_back(z), found)
        return found

    def quadratic(self, v: Tensor) -> Tensor:
        total = (v.square() * self.precision).sum(-1)
        for piece in self.pieces:
            x = piece.block.place.read(v)
            total = total + self.scale * (x * piece.block.times(x)).sum((-2, -1))
        return total

    def output_covariance(self, rows: JacobianRows) -> Tensor:
        pieces = {piece.block.place.key: piece for piece in self.pieces}
        total = rows.outputs.new_zeros(len(rows), rows.count, rows.count)
        for part in rows.parts:
            total += pieces[part.place.key].covariance(part)
        return total
