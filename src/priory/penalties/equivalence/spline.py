"""Smoothing splines: a log prior from a table of a penalty, as one natural cubic spline that explains every scale.

    min over A of   sum_ij [r(mu_i, s_j) + H(s_j) + E A(mu_i + s_j z)]^2 + lambda int A'''(t)^2 dt

with A(t) = spline(t) + c t^2. Smoothing a spline is linear in its values at the knots, so this is a least-squares
problem. lambda minimises the expected error given the noise of the table (Green and Silverman 1994, "Nonparametric
Regression and Generalized Linear Models").

The third derivative is penalised rather than the second: a Gaussian then costs nothing, and a smooth log prior is
estimated from more of the noisy values around each point. A corner is expensive in either case.

At a single scale, the same fit as a function of lambda shows whether a prior exists. If none does, the residual stops
decreasing while the curvature keeps growing (the L-curve).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from priory.penalties.equivalence.families import LocationScaleFamily
    from priory.penalties.equivalence.inputs import Table

SMOOTHING_GRID = 10.0 ** torch.arange(2.0, -16.5, -0.5, dtype=torch.float64)
KNOT_COUNT = 81


@dataclass(frozen=True)
class NaturalSpline:
    """Natural cubic spline: cubic between the knots (n,), linear outside, with continuous second derivative."""

    knots: Tensor

    @cached_property
    def second(self) -> Tensor:
        """Matrix from values at the knots to second derivatives there, (n, n); zero at both ends."""
        h = self.knots.diff()
        inner = torch.diag((h[:-1] + h[1:]) / 3) + torch.diag(h[1:-1] / 6, 1) + torch.diag(h[1:-1] / 6, -1)
        slope = torch.zeros(len(h), len(self.knots), dtype=h.dtype)
        rows = torch.arange(len(h))
        slope[rows, rows], slope[rows, rows + 1] = -1 / h, 1 / h
        m = torch.zeros(len(self.knots), len(self.knots), dtype=h.dtype)
        m[1:-1] = torch.linalg.solve(inner, slope.diff(dim=0))
        return m

    def basis(self, t: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the matrix from values at the knots to the weighted sum of values at t: (T, K), (K,) -> (T, n)."""
        h, w = self.knots.diff(), torch.ones_like(t) if weights is None else weights.expand_as(t)
        clamped = t.clamp(self.knots[0], self.knots[-1])
        k = (torch.searchsorted(self.knots, clamped, right=True) - 1).clamp(0, len(h) - 1)
        right = (clamped - self.knots[k]) / h[k]
        value = torch.zeros(len(t), len(self.knots), dtype=t.dtype)
        bending = torch.zeros_like(value)
        for at, u in ((k, 1 - right), (k + 1, right)):
            value.scatter_add_(1, at, w * u)
            bending.scatter_add_(1, at, w * (u**3 - u) * h[k] ** 2 / 6)
        beyond = w * (t - clamped)
        outside = torch.stack([beyond.clamp(max=0).sum(1), beyond.clamp(min=0).sum(1)], 1)
        return value + bending @ self.second + outside @ self.end_slopes

    @cached_property
    def end_slopes(self) -> Tensor:
        """Matrix from values at the knots to first derivatives at the two ends, (2, n)."""
        h, n = self.knots.diff(), len(self.knots)
        eye = torch.eye(n, dtype=h.dtype)
        first = (eye[1] - eye[0]) / h[0] - h[0] / 6 * self.second[1]
        last = (eye[n - 1] - eye[n - 2]) / h[-1] + h[-1] / 6 * self.second[n - 2]
        return torch.stack([first, last])

    @cached_property
    def second_derivative_root(self) -> Tensor:
        """Matrix L (n, n) with |L y|^2 = int spline''^2."""
        h = self.knots.diff()
        n = len(self.knots)
        gram = torch.zeros(n, n, dtype=h.dtype)
        rows = torch.arange(n - 1)
        gram[rows, rows] += h / 3
        gram[rows + 1, rows + 1] += h / 3
        gram[rows, rows + 1] += h / 6
        gram[rows + 1, rows] += h / 6
        return torch.linalg.cholesky(gram).T @ self.second

    @cached_property
    def third_derivative_root(self) -> Tensor:
        """Matrix L (n - 1, n) with |L y|^2 = int spline'''^2."""
        return self.second.diff(dim=0) / self.knots.diff().sqrt()[:, None]


@dataclass(frozen=True)
class SplineFit:
    """A fitted function spline(t) + c t^2.

    Attributes:
        spline: The spline's knots.
        values: Values of the spline at the knots, (n,).
        square: c.
        residual: Residuals of the fit, (M, S).
        curvature: Root mean square second derivative.
        slope: Coefficient of log s if it was fitted too, otherwise 0.
    """

    spline: NaturalSpline
    values: Tensor
    square: Tensor
    residual: Tensor
    curvature: float
    slope: float = 0.0

    def __call__(self, theta: Tensor) -> Tensor:
        spline, y = self.spline, self.values
        knots, h, bending = spline.knots, spline.knots.diff(), spline.second @ y
        inside = theta.clamp(knots[0], knots[-1])
        k = (torch.searchsorted(knots, inside.detach().contiguous(), right=True) - 1).clamp(0, len(h) - 1)
        right = (inside - knots[k]) / h[k]
        left = 1 - right
        value = left * y[k] + right * y[k + 1]
        value = value + ((left**3 - left) * bending[k] + (right**3 - right) * bending[k + 1]) * h[k] ** 2 / 6
        first, last = spline.end_slopes @ y
        beyond = theta - inside
        return value + beyond * torch.where(beyond < 0, first, last) + self.square * theta.square()

    @property
    def rms(self) -> float:
        """Root mean square residual."""
        return float(self.residual.square().mean().sqrt())

    @property
    def worst(self) -> float:
        """Largest absolute residual."""
        return float(self.residual.abs().max())


class SplineProblem:
    """The least-squares problem of one table and one family, solved for any lambda.

    With `free_entropy`, a multiple of log s is fitted beside the spline.
    """

    def __init__(self, table: Table, family: LocationScaleFamily, free_entropy: bool = False) -> None:
        self.table, self.free_entropy = table, free_entropy
        self.spline = NaturalSpline(graded_knots(table.mu))
        mu, s = torch.broadcast_tensors(table.mu[:, None], table.scales[None])
        flat_mu, flat_s = mu.reshape(-1), s.reshape(-1)
        z, weights = family.quadrature
        t = flat_mu[:, None] + flat_s[:, None] * z  # (M S, K)
        design = torch.cat([self.spline.basis(t, weights), t.square() @ weights[:, None]], 1)
        columns = [design, -flat_s.log()[:, None]] if free_entropy else [design]
        self.design = torch.cat(columns, 1)
        self.target = -(table.values + family.entropy(table.scales)).reshape(-1)
        self.length = float(table.mu[-1] - table.mu[0])
        q, self.factor = torch.linalg.qr(self.design)
        self.projected = q.T @ self.target

    def solve(self, smoothing: float) -> SplineFit:
        """Return the fit for one lambda, given per value of the table."""
        n, rows = len(self.spline.knots), self._rows(smoothing)
        right = torch.cat([self.projected, self.projected.new_zeros(len(rows) - len(self.projected))])
        size = rows.norm(dim=0)  # scale the columns: the one of c is far larger
        found = torch.linalg.lstsq(rows / size, right[:, None], driver="gelsd").solution[:, 0] / size
        residual = (self.design @ found - self.target).reshape(self.table.values.shape)
        bending = self.spline.second_derivative_root @ found[:n]
        curvature = float((bending.square().sum() / self.length).sqrt() + 2 * found[n].abs())
        return SplineFit(
            self.spline, found[:n], found[n], residual, curvature, float(found[n + 1]) if self.free_entropy else 0.0
        )

    def _rows(self, smoothing: float) -> Tensor:
        """Return the triangular factor of the design stacked on the smoothing term."""
        n = len(self.spline.knots)
        rough = torch.zeros(n - 1, self.design.shape[1], dtype=torch.float64)
        rough[:, :n] = self.spline.third_derivative_root * (smoothing * len(self.target)) ** 0.5
        return torch.cat([self.factor, rough])

    def fit(self) -> SplineFit:
        """Return the fit with the least expected error.

        It minimises Mallows' C_p, residual^2 + 2 noise^2 (degrees of freedom) / (number of values).
        """
        if self.table.noise == 0:
            return self.solve(float(SMOOTHING_GRID[-1]))
        scores = []
        for smoothing in SMOOTHING_GRID.tolist():
            freedom = self.degrees_of_freedom(smoothing)
            scores.append(self.solve(smoothing).rms ** 2 + 2 * self.table.noise**2 * freedom / len(self.target))
        return self.solve(float(SMOOTHING_GRID[int(torch.tensor(scores).argmin())]))

    def smoothest_fit(self) -> SplineFit:
        """Return the smoothest fit whose residual is within 5 % of the smallest, if no spline explains the table."""
        limit = 1.05 * self.solve(float(SMOOTHING_GRID[-1])).rms
        fits = (self.solve(smoothing) for smoothing in SMOOTHING_GRID.tolist())
        return next(fit for fit in fits if fit.rms <= limit)

    def degrees_of_freedom(self, smoothing: float) -> float:
        """Return the effective degrees of freedom, the trace of the hat matrix."""
        rows = self._rows(smoothing)
        q, _ = torch.linalg.qr(rows / rows.norm(dim=0))
        return float(q[: len(self.factor)].square().sum())


def interpolate(t: Tensor, values: Tensor) -> SplineFit:
    """Return the spline plus c t^2 through all values, with the c that minimises the third derivative."""
    spline = NaturalSpline(t)
    bending, square = spline.third_derivative_root @ values, spline.third_derivative_root @ t.square()
    c = (bending @ square) / (square @ square)
    left = values - c * t.square()
    curvature = (spline.second_derivative_root @ left).square().sum() / (t[-1] - t[0])
    return SplineFit(spline, left, c, torch.zeros_like(values), float(curvature.sqrt() + 2 * c.abs()))


def graded_knots(mu: Tensor, knots: int = KNOT_COUNT) -> Tensor:
    """Return knots across the range of the locations, densest around 0, where priors have their corners."""
    low, high = float(mu[0]), float(mu[-1])
    centre = min(max(0.0, low), high)
    reach = max(high - centre, centre - low)
    u = torch.linspace(-1, 1, knots, dtype=torch.float64)
    graded = centre + reach * u.sign() * (0.15 * u.abs() + 0.85 * u.abs() ** 2.5)
    inside = graded[(graded > low) & (graded < high)]
    return torch.cat([mu[:1], inside, mu[-1:]]).unique()
