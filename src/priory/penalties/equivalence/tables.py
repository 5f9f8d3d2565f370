"""The prior of a penalty that is known as a table, at one scale or at several, and the Bayesian penalty nearest to any.

At several scales one spline must explain them all; what it leaves is noise, or not Bayesian. At one scale a spline can
explain nearly everything if it may bend enough, so that the question is the L-curve's: does the residual go to zero
while the curvature stays what it is (a prior exists), or only by bending more and more (none does)? A penalty like
|mu| at a fixed Gaussian scale is of the second sort: what a Gaussian has smoothed has no corner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.penalties.equivalence.certificate import ENTROPY, NONE, TEMPERED, Certificate, certify, kind_of
from priory.penalties.equivalence.families import panels
from priory.penalties.equivalence.grid import POINTS, find_unit, log_integral, tail_slopes
from priory.penalties.equivalence.reading import Table
from priory.penalties.equivalence.result import Equivalence, like_input, normalised
from priory.penalties.equivalence.spline import LAMBDAS, Fit, Problem

if TYPE_CHECKING:
    from priory.penalties.equivalence.families import LocationScale
    from priory.penalties.equivalence.grid import Grid
    from priory.penalties.equivalence.reading import Function
    from priory.penalties.equivalence.result import Look

NO_ENTROPY = 1e-3  # a T nearer to 0 is none, and one nearer to 1 is no other
UNSURE = 0.02  # a T of a table, which noise may have moved, that is nearer to 0 may be none
BENT = 10.0  # nats within one scale: a log prior more bent than this can't be told from one that doesn't exist
CORNER = 2.0  # times the least residual, where an L-curve has its corner
LOCATIONS = 241
WITHIN = 5.0  # standard deviations of the noise that a residual may have, among a few thousand


def from_table(table: Table, family: LocationScale, tolerance: float) -> Equivalence:
    """The equivalence for values at several scales."""
    allowed = max(tolerance, WITHIN * table.noise)
    fit = Problem(table, family).fit()
    mended, missing, better = None, 0.0, fit
    if fit.worst > allowed:
        missing = Problem(table, family, free_entropy=True).fit().slope
        mended, better = _mended(table, family, missing, allowed, fit)
        fit = Problem(table, family).nearest()
        better = fit if mended is None else better
    tails, log_kappa = integral(better, table.mu)
    kind = kind_of(fit.worst, allowed, log_kappa, mended)
    error = max(better.rms, table.noise)
    certificate = certify(kind, fit.worst, tails, log_kappa, error, missing_entropy=missing)
    return _equivalence(table, family, fit, normalised(better, log_kappa), certificate)


def at_one_scale(table: Table, family: LocationScale, tolerance: float) -> Equivalence:
    """The equivalence for one scale that is not learnt."""
    problem, scale = Problem(table, family), float(table.scales[0])
    curve = [problem.solve(smoothing) for smoothing in LAMBDAS.tolist()]
    smooth = [fit for fit in curve if fit.curvature * scale**2 <= BENT] or curve[:1]
    fit = problem.fit() if table.noise else min(smooth, key=lambda one: one.rms)
    exists = fit.rms <= max(tolerance, 1.2 * table.noise)
    if not exists:  # the corner of the L-curve: from there on bending more helps little
        fit = next(one for one in curve if one.rms <= CORNER * fit.rms)
    tails, log_kappa = integral(fit, table.mu)
    kind = kind_of(0.0, tolerance, log_kappa) if exists else NONE
    last = curve[-1]
    refused = (
        f"No prior exists at the fixed scale {scale:.3g}: a log prior of curvature {fit.curvature:.2g} leaves "
        f"{fit.rms:.1e} nats, and one of curvature {last.curvature:.2g} still {last.rms:.1e}. Whatever this family has "
        f"smoothed is smoother than the penalty."
    )
    words, error = None if exists else refused, max(fit.rms, table.noise)
    certificate = certify(kind, fit.worst, tails, log_kappa, error, verdict=words, what="")
    return _equivalence(table, family, fit, normalised(fit, log_kappa), certificate)


def tabulated(penalty: Function, family: LocationScale, look: Look, scale: float) -> Equivalence:
    """The equivalence for a function at one scale that is not learnt."""
    mu_only: Callable[[Tensor, Tensor], Tensor] = lambda mu, s: penalty(mu, torch.full_like(mu, scale))  # noqa: E731
    unit = find_unit(mu_only, look.centre) if look.width is None else look.width
    reach = 8 * max(unit, scale)
    mu = look.centre + torch.linspace(-reach, reach, LOCATIONS, dtype=torch.float64)
    values = mu_only(mu, mu)
    return at_one_scale(Table(mu, [scale], values[:, None]), family, look.tolerance)


def nearest(penalty: Function, family: LocationScale, grid: Grid) -> tuple[Function, Callable[[Tensor], Tensor], float]:
    """The Bayesian penalty nearest to r in least squares over the grid's tests, its log prior and its K."""
    reach = 6 * grid.unit
    mu = grid.centre + torch.linspace(-reach, reach, LOCATIONS, dtype=torch.float64)
    with torch.no_grad():
        values = penalty(*torch.broadcast_tensors(mu[:, None], grid.scales))
    fit = Problem(Table(mu, grid.scales, values), family).nearest()
    _, log_kappa = integral(fit, mu)
    return bayesian(fit, family), normalised(fit, log_kappa), -log_kappa


def bayesian(fit: Fit, family: LocationScale) -> Function:
    """The penalty of a fitted log prior: KL + K."""

    def penalty(mu: Tensor, scale: Tensor) -> Tensor:
        mu, scale = torch.broadcast_tensors(mu, scale)
        return -family.entropy(scale) - family.expectation(fit, mu, scale)

    return penalty


def integral(fit: Fit, mu: Tensor) -> tuple[tuple[float, float], float]:
    """The slopes of the tails, where the table ends, and log kappa."""
    centre = (mu[0] + mu[-1]) / 2
    edges = torch.linspace(float(mu[0]), float(mu[-1]), 400, dtype=torch.float64)
    points, widths = panels(edges[:-1], edges[1:], POINTS)
    values, distance = fit(points), points - centre
    some = torch.linspace(0, len(points) - 1, 21).round().long()  # from end to end
    tails = tail_slopes(distance[some], values[some])
    return tails, log_integral(distance, widths, values, tails)


def _mended(table: Table, family: LocationScale, missing: float, allowed: float, fit: Fit) -> tuple[str | None, Fit]:
    """What makes a KL of a table that is none, its entropy or a division by T, and the fit of that."""
    temperature = 1 - missing
    tries = []
    if abs(temperature) <= UNSURE:
        tries.append((ENTROPY, table.values - family.entropy(table.scales), table.noise))
    if temperature > NO_ENTROPY and abs(missing) >= NO_ENTROPY:
        tries.append((TEMPERED, table.values / temperature, table.noise / temperature))
    for kind, values, noise in tries:
        better = Problem(Table(table.mu, table.scales, values, noise), family).fit()
        if better.worst <= max(allowed, WITHIN * noise):
            return kind, better
    return None, fit


def _equivalence(
    table: Table, family: LocationScale, fit: Fit, log_prior: Callable[[Tensor], Tensor], certificate: Certificate
) -> Equivalence:
    middle, unit = float((table.mu[0] + table.mu[-1]) / 2), float(table.mu[-1] - table.mu[0]) / 12
    one = float(table.scales[0]) if len(table.scales) == 1 else None
    constant = -math.log(certificate.kappa)
    error = like_input(lambda theta: torch.full_like(theta, certificate.error))
    closest = bayesian(fit, family)
    return Equivalence(log_prior, constant, certificate, family.name, table, error, closest, middle, unit, one)
