"""Points at which a penalty is evaluated, and the locations and scales of the tests.

All distances are in units of the prior's width, around the `centre`. Panels of a quarter unit cover 8 units on both
sides; they shrink towards corners, and grow outwards to a million units to see the tails. The locations of the tests
are panel edges and so are their distances, so the jump of a uniform density and the corner of a Laplace density never
fall inside a panel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.special import gauss_legendre_panels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from priory.penalties.equivalence.families import LocationScaleFamily

PANEL_WIDTH = 0.25  # in units
CORE_HALF_WIDTH = 8.0  # in units
TEST_REACH_UNITS = 120.0  # the tests see points up to 6 + 40 * 2 units away, and a margin
POINTS_PER_PANEL = 6
TEST_SCALES = (0.25, 0.5, 1.0, 2.0)  # in units
WIDTH_SEARCH_DECADES = torch.arange(1, 61, dtype=torch.float64) / 4  # distances tried for the unit, as powers of ten
MAX_INTEGRABLE_SLOPE = -1.001  # a true slope of -1 is measured as -1.0000 or -0.9999
WIDTH_CHANGE_NATS = (0.05, 4.0)  # accepted change between the centre and one unit away


@dataclass(frozen=True)
class Grid:
    """Quadrature points and test locations.

    Attributes:
        centre: Centre of the grid.
        unit: Width of the prior.
        points: Quadrature points, (J,).
        widths: Their quadrature weights, (J,).
        near: Mask of the points within reach of the tests, (J,).
        mu: Locations of the tests, (M, 1).
        scales: Scales of the tests, (S,).
    """

    centre: float
    unit: float
    points: Tensor
    widths: Tensor
    near: Tensor
    mu: Tensor
    scales: Tensor

    @property
    def middle(self) -> Tensor:
        """The 61 points up to 3 units on both sides at which errors are reported."""
        return self.centre + self.unit * torch.linspace(-3, 3, 61, dtype=torch.float64)

    def smoothed(self, values: Tensor, family: LocationScaleFamily, scale: Tensor) -> Tensor:
        """Return E f(mu + s z) at the test locations, given f at the near points; scale (S,) -> (M, S)."""
        z = (self.points[self.near] - self.mu[..., None]) / scale[:, None]  # (M, S, J)
        weights = self.widths[self.near] / scale[:, None]
        return (weights * family.density(z) * values).sum(-1)


def make_grid(centre: float, unit: float, corners: Sequence[float]) -> Grid:
    """Return the grid for a prior with this centre and width."""
    outward = [CORE_HALF_WIDTH]
    while outward[-1] < TEST_REACH_UNITS:
        outward.append(outward[-1] * 1.25)
    while outward[-1] < 1e6:
        outward.append(outward[-1] * 2)
    core = torch.arange(-CORE_HALF_WIDTH, CORE_HALF_WIDTH + PANEL_WIDTH / 2, PANEL_WIDTH, dtype=torch.float64)
    far = torch.tensor(outward[1:], dtype=torch.float64)
    shrinking = PANEL_WIDTH * 4.0 ** -torch.arange(1, 10, dtype=torch.float64)
    around = [(c - centre) / unit + torch.cat([-shrinking, torch.zeros(1).double(), shrinking]) for c in corners]
    edges = torch.cat([-far.flip(0), core, far, *around]).unique()
    points, widths = gauss_legendre_panels(edges[:-1], edges[1:], POINTS_PER_PANEL)
    mu = torch.arange(-6, 6.25, 0.5, dtype=torch.float64)[:, None]
    scales = torch.tensor(TEST_SCALES, dtype=torch.float64)
    near = points.abs() < TEST_REACH_UNITS
    return Grid(centre, unit, centre + unit * points, unit * widths, near, centre + unit * mu, unit * scales)


def find_width(penalty: Callable[[Tensor, Tensor], Tensor], centre: float) -> float:
    """Return the distance nearest to 1 over which the penalty, at a tenth of it as scale, changes by about a nat."""
    with torch.no_grad():
        steps = 10 ** torch.cat(
            [torch.zeros(1).double(), torch.stack([-WIDTH_SEARCH_DECADES, WIDTH_SEARCH_DECADES], 1).flatten()]
        )
        ends = torch.stack([-steps, torch.zeros_like(steps), steps]) + centre
        left, middle, right = penalty(ends, 0.1 * steps.expand_as(ends))
    change = torch.maximum((left - middle).abs(), (right - middle).abs())
    fits = (change >= WIDTH_CHANGE_NATS[0]) & (change <= WIDTH_CHANGE_NATS[1])
    return float(steps[fits][0]) if bool(fits.any()) else 1.0


def tail_slopes(distance: Tensor, values: Tensor) -> tuple[float, float]:
    """Return d log alpha / d log |theta| at both ends, -inf where the density is zero."""

    def slope(end: int, before: int) -> float:
        if not bool(values[end].isfinite()):
            return -math.inf
        return float((values[end] - values[before]) / (distance[end] / distance[before]).log())

    return slope(0, POINTS_PER_PANEL), slope(-1, -1 - POINTS_PER_PANEL)


def log_integral(distance: Tensor, widths: Tensor, values: Tensor, slopes: tuple[float, float]) -> float:
    """Return the log of the integral of e^A, inf if a tail is not integrable.

    The panels are summed, and the tails beyond both ends are power laws with these slopes.
    """
    terms = [torch.logsumexp(values + widths.log(), 0)]
    for end, slope in zip((0, -1), slopes, strict=True):
        if slope >= MAX_INTEGRABLE_SLOPE:
            return math.inf
        terms.append(values[end] + distance[end].abs().log() - math.log(-slope - 1))
    return float(torch.logsumexp(torch.stack(terms), 0))
