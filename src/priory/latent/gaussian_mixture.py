"""The Gaussian mixture, with spherical, diagonal, tied or full covariances; univariate for data that are one column.

    p(y) = sum_k pi_k N(y; mu_k, Sigma_k),      T(y) = (y_i y_j for i <= j, y, 1)

    M-step:   N_k = sum_n q_nk,   mu_k = sum_n q_nk y_n / N_k,   Sigma_k = sum_n q_nk y_n y_n' / N_k - mu_k mu_k'

Data are first centred and scaled by a fixed frame, because the last equation subtracts two numbers that are large where
the data are far from zero. The likelihood is unbounded: it grows without limit as a component collapses onto one row or
onto a plane. Covariances are therefore kept above `floor`, relative to the variance of the data. The M-step is exact
under that constraint (the eigenvalues of the unconstrained solution are raised to the floor), so the bound never
decreases. The common alternative of adding the floor to the variances does not maximise the bound.

A missing value, NaN, is marginalised. Without covariances between columns its features are zero. With them, the row's
density is that of the observed values, and y y' is expected under p(missing | observed, k) (Ghahramani and Jordan,
1994).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints as torch_constraints

from priory import constraints
from priory.core.errors import require
from priory.core.flat import Param
from priory.core.linalg import cholesky, eigh
from priory.latent.base import Expectation, Rows, Theta
from priory.latent.frames import frame
from priory.latent.mixture import MixtureModel, assigned, log_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LOG_TAU = math.log(2 * math.pi)
COVARIANCE_TYPES = ("full", "tied", "diagonal", "spherical")
NARROW_VARIANCE = 1e-4  # of the data's variance; narrower components use distances from their mean, not features
AT_FLOOR = 1.001  # times the floor: a variance below this counts as at the floor


class GaussianMixture(MixtureModel):
    """A mixture of K Gaussians: p(y) = sum_k pi_k N(y; mu_k, Sigma_k).

    Data are (n, D), or (n,) for one column; NaN marks a missing value. The parameters are `weights` (K,), `means`
    (K, D) and `covariances`, (K, D, D) for "full", (D, D) for "tied", (K, D) for "diagonal" and (K,) for "spherical".
    For data with one column, (n,), `means` and `covariances` are (K,).

    Args:
        k: Number of components K.
        covariance: "full", "tied" (one covariance for all components), "diagonal" (or "diag") or "spherical". Default:
            "full".
        floor: Smallest variance of a component in any direction, as a fraction of the data's variance. Default: 1e-6.
        given: The parts that follow the rows in the data: "weights", one per row; "z", the known component of each row,
            -1 where it is hidden; or both. Default: ().

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> GaussianMixture(2, covariance="tied")
        GaussianMixture(2, covariance='tied')
    """

    missing: ClassVar[bool] = True

    def __init__(self, k: int, covariance: str = "full", floor: float = 1e-6, given: str | Sequence[str] = ()) -> None:
        super().__init__(k, given)
        named = "diagonal" if covariance == "diag" else covariance
        known = isinstance(covariance, str) and named in COVARIANCE_TYPES
        require(known, "covariance", type(self).__name__, f"be one of {', '.join(COVARIANCE_TYPES)}", repr(covariance))
        ok = isinstance(floor, (int, float)) and 0 < floor < 1
        require(ok, "floor", type(self).__name__, "lie between 0 and 1", repr(floor))
        self.covariance, self.floor = named, float(floor)
        self.shared = ("covariances",) if named == "tied" else ()

    def __repr__(self) -> str:
        return f"GaussianMixture({self.k}, covariance={self.covariance!r})"

    @property
    def _crossed(self) -> bool:
        """Whether there are covariances between columns."""
        return self.covariance in ("full", "tied")

    @property
    def _alike(self) -> bool:
        """Whether all columns share one variance, so that they must share one scale."""
        return self.covariance == "spherical"

    def components(self, *shapes: tuple[int, ...]) -> dict[str, Param]:
        """Declare the means and covariances."""
        shape = shapes[0]
        require(len(shape) < 2, "y", repr(self), "be (n, D), or (n,)", f"rows of the shape {shape}")
        if shape == ():
            one = () if self.covariance == "tied" else (self.k,)
            return {"means": Param((self.k,)), "covariances": Param(one, torch_constraints.positive)}
        (d,) = shape
        kind = constraints.positive_definite if self._crossed else torch_constraints.positive
        sizes = {"full": (self.k, d, d), "tied": (d, d), "diagonal": (self.k, d), "spherical": (self.k,)}
        return {"means": Param((self.k, d)), "covariances": Param(sizes[self.covariance], kind)}

    # The frame.

    def look(self, rows: Rows) -> dict[str, Tensor]:
        """Return the centre and the scale of each column; one scale for all columns if covariances are spherical."""
        y = columns(rows["y"])
        centre, scale = frame(y, rows.weights, "y", repr(self), self.dtype, together=self._alike)
        self.warn_of(len(y), int(y.isnan().all(1).sum()))
        return {"centre": centre, "scale": scale}

    def framed(self, rows: Rows) -> Tensor:
        """Return the rows in the frame, (n, D)."""
        return (columns(rows["y"]) - self.frame["centre"]) / self.frame["scale"]

    def coordinates(self, rows: Rows) -> Tensor:
        """Return the rows in the frame, with zeros for missing values."""
        return self.framed(rows).nan_to_num(0.0)

    def standard(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """Return means (K, D) and covariances (K, D, D), or variances (K, D), in the frame."""
        centre, scale = self.frame["centre"], self.frame["scale"]
        d = len(scale)
        means = (theta["means"].reshape(self.k, d) - centre) / scale
        spread = theta["covariances"]
        if self._crossed:
            return means, spread.reshape(-1, d, d).expand(self.k, d, d) / (scale[:, None] * scale)
        if self.covariance == "spherical" and self.shapes != ((),):
            spread = spread[:, None].expand(self.k, d)
        return means, spread.reshape(self.k, d) / scale.square()

    # The equations, in the frame.

    def features(self, rows: Rows) -> Tensor:
        """Return (x_i x_j for i <= j, x, 1), or without covariances (x^2, x, seen, 1) with zeros for NaN."""
        x = self.framed(rows).T  # (D, n)
        return pairs(x) if self._crossed else masked(x)

    def natural(self, theta: Theta) -> Tensor:
        """Return -(x - mu)' P (x - mu) / 2 + log |P| / 2 - D log(2 pi) / 2 - log |scale| as coefficients, (K, F)."""
        means, spread = self.standard(theta)
        jacobian = self.frame["scale"].log()
        if not self._crossed:
            constant = -0.5 * (means.square() / spread + spread.log() + LOG_TAU) - jacobian
            return torch.cat([-0.5 / spread, means / spread, constant, torch.zeros_like(means[:, :1])], 1)
        factor = torch.linalg.cholesky(spread)
        precision = torch.cholesky_inverse(factor)
        linear = (precision @ means[..., None])[..., 0]
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = -0.5 * ((linear * means).sum(-1) + log_det + means.shape[1] * LOG_TAU) - jacobian.sum()
        i, j = torch.triu_indices(means.shape[1], means.shape[1])
        once = torch.where(i == j, -0.5, -1.0).to(precision)  # a pair i < j stands for both of its entries
        return torch.cat([once * precision[:, i, j], linear, constant[:, None]], 1)

    def narrow_components(self, theta: Theta) -> Tensor:
        """Return the indices of components with little variance in some direction."""
        return (self.least(theta) < NARROW_VARIANCE).nonzero()[:, 0]

    def direct(self, theta: Theta, rows: Rows, which: Tensor) -> Tensor:
        """Return log N(y_n; mu_k, Sigma_k) from the distances to the mean."""
        (means, spread), x = self.standard(theta), self.framed(rows)
        if self._crossed:
            everything = torch.ones(x.shape[1], dtype=torch.bool)
            return conditional(x, everything, means[which], spread[which], self.frame["scale"])[0]
        away = (x - means[which, None]).square() / spread[which, None]  # (K, n, D), NaN where y is
        constant = spread[which, None].log() + LOG_TAU + 2 * self.frame["scale"].log()
        return -0.5 * (away + constant).nansum(-1)

    def maximise(self, sums: Tensor, theta: Theta) -> Theta:
        """Return the means, and the covariances raised to the floor."""
        d = len(self.frame["scale"])
        old_means, old_spread = self.standard(theta)
        if self._crossed:
            counts = sums[:, -1:]
            means = sums[:, -1 - d : -1] / counts.clamp_min(torch.finfo(sums.dtype).tiny)
            squares = matrices(sums[:, : -1 - d], d)
            if self.covariance == "tied":
                spread = (squares.sum(0) - (counts * means).T @ means) / counts.sum()
            else:
                spread = squares / counts[..., None].clamp_min(torch.finfo(sums.dtype).tiny)
                spread = spread - means[:, :, None] * means[:, None, :]
            return self.unframed(means, raised(spread, self.floor))
        square, linear, seen, _ = sums.split([d, d, d, 1], 1)
        there = seen > 1e-10  # a component may have rows, and none with a value in this column
        count = torch.where(there, seen, 1.0)
        means = torch.where(there, linear / count, old_means)
        around = torch.where(there, (square / count - means.square()).clamp_min(0.0), old_spread)
        if self.covariance == "spherical":
            around = ((seen * around).sum(1) / seen.sum(1).clamp_min(1e-300))[:, None].expand_as(around)
        return self.unframed(means, around.clamp_min(self.floor))

    def unframed(self, means: Tensor, spread: Tensor) -> Theta:
        """Convert means and covariances from the frame to the units of the data."""
        centre, scale = self.frame["centre"].double(), self.frame["scale"].double()
        if self._crossed:
            spread = spread * scale[:, None] * scale
        else:
            spread = spread * scale.square()
            spread = spread[:, 0] if self.covariance == "spherical" else spread
        shapes = {block.name: block.shape for block in self.layout.blocks}
        means = centre + scale * means
        return {"means": means.reshape(shapes["means"]), "covariances": spread.reshape(shapes["covariances"])}

    def emit(self, theta: Theta, z: Tensor, generator: torch.Generator) -> Tensor:
        """Draw mu_k + L_k e with Sigma_k = L_k L_k' and e ~ N(0, I)."""
        assert self.shapes is not None
        means, spread = self.standard(theta)
        x = torch.randn(len(z), means.shape[1], generator=generator, dtype=self.dtype, device=self.device)
        factor = cholesky(spread, "covariance of a component") if self._crossed else spread.sqrt()
        for k in range(self.k):
            of_component = z == k
            x[of_component] = means[k] + (
                x[of_component] @ factor[k].mT if self._crossed else x[of_component] * factor[k]
            )
        return (self.frame["centre"] + self.frame["scale"] * x).reshape(len(z), *self.shapes[0])

    def least(self, theta: Theta) -> Tensor:
        """Return the smallest variance of each component in any direction, in the frame, (K,)."""
        _, spread = self.standard(theta)
        return torch.linalg.eigvalsh(spread)[:, 0] if self._crossed else spread.amin(1)

    def allows(self, theta: Theta) -> bool:
        """Whether all variances are above the floor."""
        return bool((self.least(theta) >= self.floor).all())

    def problems(self, theta: Theta, statistics: Mapping[str, Tensor]) -> list[str]:
        """Warn about components without rows, and about components whose variance is at the floor."""
        held = ((self.least(theta) <= AT_FLOOR * self.floor) & (theta["weights"] > 0)).nonzero()[:, 0].tolist()
        if not held:
            return super().problems(theta, statistics)
        its = "their variances are" if len(held) > 1 else "its variance is"
        remedy = "a simpler covariance or a higher floor"
        return [
            *super().problems(theta, statistics),
            f"{self.named_components(held)} would have a singular covariance: {its} held at {self.floor:g} of the "
            f"data's. Try {f'fewer components, {remedy}' if self.k > 1 else remedy}.",
        ]

    # Rows with missing values, if there are covariances between columns.

    def e_step(self, theta: Theta, rows: Rows) -> Expectation:
        """Compute responsibilities and their statistics; rows with missing values one pattern at a time."""
        if not self._crossed or not bool(rows["y"].sum().isnan()):
            return super().e_step(theta, rows)
        holes = columns(rows["y"]).isnan().any(1)
        bound = rows["y"].new_zeros(len(rows))
        gap = torch.zeros_like(bound) if rows.temperature != 1 else None
        sums = 0.0
        for index, found, part in self._parts(theta, rows, holes):
            bound[index] = found.bound
            if gap is not None and found.gap is not None:
                gap[index] = found.gap
            sums = sums + part
        assert isinstance(sums, Tensor)
        return Expectation({"sums": sums, "base": sums.new_zeros(())}, bound, gap)

    def _parts(self, theta: Theta, rows: Rows, holes: Tensor) -> Iterator[tuple[Tensor, Expectation, Tensor]]:
        """Yield complete rows, then each pattern of missing values: indices, bound and statistics (K, F)."""
        whole = (~holes).nonzero()[:, 0]
        if len(whole):
            found = super().e_step(theta, rows.at(whole))
            yield whole, found, found.statistics["sums"]
        for index, logits, filled, left in self.by_missing_pattern(theta, rows, holes):
            some = rows.at(index)
            found = assigned(logits + log_weights(theta)[:, None], some)
            yield index, Expectation({}, found.bound, found.gap), filled_sums(found.q_counted(some), filled, left)

    def by_missing_pattern(
        self, theta: Theta, rows: Rows, holes: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield the rows with missing values, one pattern at a time: indices and the results of `conditional`."""
        means, spread = self.standard(theta)
        for index, seen in patterns(columns(rows["y"]), holes):
            yield index, *conditional(self.framed(rows.at(index)), seen, means, spread, self.frame["scale"])

    def log_joint(self, theta: Theta, rows: Rows, careful: bool = False) -> Tensor:
        """Return log p(y_n, z_n = k | theta) of the observed values, (K, n)."""
        if not self._crossed or not bool(rows["y"].sum().isnan()):
            return super().log_joint(theta, rows, careful)
        holes = columns(rows["y"]).isnan().any(1)
        whole = (~holes).nonzero()[:, 0]
        places, values = [whole], [super().log_joint(theta, rows.at(whole), careful)]
        for index, logits, _, _ in self.by_missing_pattern(theta, rows, holes):
            places.append(index)
            values.append(logits + log_weights(theta)[:, None])
        return torch.cat(values, 1)[:, torch.cat(places).argsort()]

    def split_statistics(self, q: Tensor, rows: Rows) -> Tensor:
        """Return S of an initial assignment, with each cluster's mean in place of missing values."""
        x = self.framed(rows)
        if not self._crossed or not bool(x.isnan().any()):
            return super().split_statistics(q, rows)
        seen = (~x.isnan()).to(x.dtype)
        x = x.nan_to_num(0.0)
        means = (q @ x) / (q @ seen).clamp_min(1e-10)
        filled = torch.where(seen > 0, x, q.T @ means)
        return q @ pairs(filled.T).mT


# Features.


def columns(y: Tensor) -> Tensor:
    """Return rows (n,) or (n, D) as (n, D)."""
    return y[:, None] if y.ndim == 1 else y


def pairs(x: Tensor) -> Tensor:
    """Return (x_i x_j for i <= j, x, 1), (F, n), of x (D, n)."""
    d, n = x.shape
    features = x.new_empty((d * (d + 1) // 2 + d + 1, n))
    features[-1] = 1.0
    own = features[-1 - d : -1].copy_(x)
    start = 0
    for i in range(d):
        torch.mul(own[i:], own[i], out=features[start : start + d - i])
        start += d - i
    return features


def masked(x: Tensor) -> Tensor:
    """Return (x^2, x, seen, 1), (3 D + 1, n), of x (D, n), with zeros where x is NaN."""
    d, n = x.shape
    features = x.new_empty((3 * d + 1, n))
    square, filled, seen, one = features.split([d, d, d, 1])
    filled.copy_(x)
    seen.fill_(1.0)
    one.fill_(1.0)
    if bool(x.sum().isnan()):
        holes = filled.isnan()
        filled.masked_fill_(holes, 0.0)
        seen.masked_fill_(holes, 0.0)
    torch.mul(filled, filled, out=square)
    return features


def matrices(upper: Tensor, d: int) -> Tensor:
    """Return symmetric matrices (K, D, D) from their upper triangles, row by row, (K, D (D + 1) / 2)."""
    i, j = torch.triu_indices(d, d)
    full = upper.new_zeros((len(upper), d, d))
    full[:, i, j] = upper
    full[:, j, i] = upper
    return full


def raised(spread: Tensor, floor: float) -> Tensor:
    """Raise eigenvalues to the floor, which maximises -log |C| - tr(C^-1 S) over C with no eigenvalue below it."""
    values, vectors = eigh(spread)
    if not bool((values < floor).any()):
        return spread
    lifted = (vectors * values.clamp_min(floor)[..., None, :]) @ vectors.mT
    return torch.where((values < floor).any(-1)[..., None, None], (lifted + lifted.mT) / 2, spread)


# Missing values.


def patterns(y: Tensor, holes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows with the same pattern of missing values: indices, and which columns are observed, (D,)."""
    index = holes.nonzero()[:, 0]
    kinds, kind = torch.unique(~y[index].isnan(), dim=0, return_inverse=True)
    for number, seen in enumerate(kinds):
        yield index[kind == number], seen


def conditional(x: Tensor, seen: Tensor, means: Tensor, spread: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(seen | k) (K, n), E[x | seen, k] (K, n, D) and Cov (K, D, D) for rows x (n, D)."""
    s, u = seen.nonzero()[:, 0], (~seen).nonzero()[:, 0]
    away = x[:, s] - means[:, None, s]  # (K, n, S)
    factor = torch.linalg.cholesky(spread[:, s[:, None], s])
    white = torch.linalg.solve_triangular(factor, away.mT, upper=False)  # (K, S, n)
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + scale[s].log().sum() + 0.5 * len(s) * LOG_TAU
    logits = -0.5 * white.square().sum(1) - log_det[:, None]
    cross = torch.linalg.solve_triangular(factor, spread[:, s[:, None], u], upper=False)  # L^-1 C_su, (K, S, U)
    filled = torch.zeros(len(means), *x.shape, dtype=x.dtype, device=x.device)
    filled[:, :, s] = x[:, s].expand(len(means), -1, -1)
    filled[:, :, u] = means[:, None, u] + white.mT @ cross
    left = torch.zeros_like(spread)
    left[:, u[:, None], u] = spread[:, u[:, None], u] - cross.mT @ cross
    return logits, filled, left


def filled_sums(q: Tensor, filled: Tensor, left: Tensor) -> Tensor:
    """Return the expected (x_i x_j for i <= j, x, 1) of rows with missing values, weighted by q (K, m): (K, F)."""
    counts = q.sum(1)
    squares = (filled * q[..., None]).mT @ filled + counts[:, None, None] * left
    i, j = torch.triu_indices(filled.shape[2], filled.shape[2])
    return torch.cat([squares[:, i, j], (q[:, None] @ filled)[:, 0], counts[:, None]], 1)
