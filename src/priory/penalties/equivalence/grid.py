"""Where a penalty is looked at: points that see both the middle of its prior and the tails, and locations for tests.

Around the `centre`, in units of the prior's own width: panels of a quarter up to 8 units to both sides, shrinking
towards corners, growing beyond to a million units. The locations of the tests are edges of panels and so are their
distances, hence the jump of a uniform density and the corner of a Laplace's never lie inside a panel.
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

PANEL_WIDTH = 0.25
CORE_HALF_WIDTH = 8.0
TEST_REACH_UNITS = 120.0  # what the families of the tests can reach: 6 units, and 40 times 2 units
POINTS_PER_PANEL = 6
TEST_SCALES = (0.25, 0.5, 1.0, 2.0)  # of the tests, in units
WIDTH_SEARCH_DECADES = torch.arange(1, 61, dtype=torch.float64) / 4  # how far to look for the unit
MAX_INTEGRABLE_SLOPE = -1.001  # a slope is measured; those of -1 are met as -1.0000 and -0.9999
WIDTH_CHANGE_NATS = (0.05, 4.0)  # nats between the centre and one unit away


@dataclass(frozen=True)
class Grid:
    """Points and widths (J,), those `near` enough for the tests, and the tests' locations (M, 1) and scales (S,)."""

    centre: float
    unit: float
    points: Tensor
    widths: Tensor
    near: Tensor
    mu: Tensor
    scales: Tensor

    @property
    def middle(self) -> Tensor:
        """Where errors are reported: 61 points up to 3 units to both sides."""
        return self.centre + self.unit * torch.linspace(-3, 3, 61, dtype=torch.float64)

    def smoothed(self, values: Tensor, family: LocationScaleFamily, scale: Tensor) -> Tensor:
        """E f(mu + s z) at the tests' locations, from f at the near points; scale (S,) -> (M, S)."""
        z = (self.points[self.near] - self.mu[..., None]) / scale[:, None]  # (M, S, J)
        weights = self.widths[self.near] / scale[:, None]
        return (weights * family.density(z) * values).sum(-1)


def make_grid(centre: float, unit: float, corners: Sequence[float]) -> Grid:
    """The grid for a prior of this centre and width."""
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
    """The distance nearest to 1 over which the penalty changes by about a nat, at a scale of a tenth of it."""
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
    """d log alpha / d log |theta| at both ends, -inf where the density is zero there; `distance` is from the centre."""

    def slope(end: int, before: int) -> float:
        if not bool(values[end].isfinite()):
            return -math.inf
        return float((values[end] - values[before]) / (distance[end] / distance[before]).log())

    return slope(0, POINTS_PER_PANEL), slope(-1, -1 - POINTS_PER_PANEL)


def log_integral(distance: Tensor, widths: Tensor, values: Tensor, slopes: tuple[float, float]) -> float:
    """log of the integral of e^A: panels, and beyond the ends the power laws of the slopes, inf if one is from -1."""
    terms = [torch.logsumexp(values + widths.log(), 0)]
    for end, slope in zip((0, -1), slopes, strict=True):
        if slope >= MAX_INTEGRABLE_SLOPE:
            return math.inf
        terms.append(values[end] + distance[end].abs().log() - math.log(-slope - 1))
    return float(torch.logsumexp(torch.stack(terms), 0))
