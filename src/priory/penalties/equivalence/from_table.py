"""The prior of a penalty given as a table, at one scale or several, and the Bayesian penalty nearest to any penalty.

At several scales, one spline must explain them all; the residual is noise or not Bayesian. At one scale, a spline with
enough curvature can explain nearly everything, so the test is the L-curve: a prior exists if the residual goes to zero
at bounded curvature, and none exists if the curvature must keep growing. A penalty like |mu| at a fixed Gaussian scale
has no prior, since a function smoothed by a Gaussian has no corner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.special import gauss_legendre_panels
from priory.penalties.equivalence.certificate import (
    KIND_ENTROPY_MISSING,
    KIND_NO_PRIOR,
    KIND_TEMPERED,
    Certificate,
    classify,
    make_certificate,
)
from priory.penalties.equivalence.grid import POINTS_PER_PANEL, find_width, log_integral, tail_slopes
from priory.penalties.equivalence.inputs import Table
from priory.penalties.equivalence.result import Equivalence, like_input, normalised
from priory.penalties.equivalence.spline import SMOOTHING_GRID, SplineFit, SplineProblem

if TYPE_CHECKING:
    from priory.penalties.equivalence.families import LocationScaleFamily
    from priory.penalties.equivalence.grid import Grid
    from priory.penalties.equivalence.inputs import Function
    from priory.penalties.equivalence.result import InversionSettings

TEMPERATURE_MARGIN = 1e-3  # T within this distance of 0 is a missing entropy, and of 1 an untempered KL
NOISY_TEMPERATURE_MARGIN = 0.02  # margin around 0 for a table, whose noise shifts T
MAX_CURVATURE_NATS = 10.0  # per squared scale; at a higher curvature, the existence of a prior can't be decided
L_CURVE_CORNER_RATIO = 2.0  # residual at the corner of the L-curve, over the smallest residual
LOCATION_COUNT = 241
NOISE_SIGMAS = 5.0  # largest residual in standard deviations of the noise, among a few thousand values


def from_table(table: Table, family: LocationScaleFamily, tolerance: float) -> Equivalence:
    """Return the equivalence of a table with several scales."""
    allowed = max(tolerance, NOISE_SIGMAS * table.noise)
    fit = SplineProblem(table, family).fit()
    repaired_kind, missing, better = None, 0.0, fit
    if fit.worst > allowed:
        missing = SplineProblem(table, family, free_entropy=True).fit().slope
        repaired_kind, better = _repair(table, family, missing, allowed, fit)
        fit = SplineProblem(table, family).smoothest_fit()
        better = fit if repaired_kind is None else better
    tails, log_kappa = tails_and_log_kappa(better, table.mu)
    kind = classify(fit.worst, allowed, log_kappa, repaired_kind)
    error = max(better.rms, table.noise)
    certificate = make_certificate(kind, fit.worst, tails, log_kappa, error, missing_entropy=missing)
    return _equivalence(table, family, fit, normalised(better, log_kappa), certificate)


def from_table_at_one_scale(table: Table, family: LocationScaleFamily, tolerance: float) -> Equivalence:
    """Return the equivalence of a table with one fixed scale."""
    problem, scale = SplineProblem(table, family), float(table.scales[0])
    curve = [problem.solve(smoothing) for smoothing in SMOOTHING_GRID.tolist()]
    smooth = [fit for fit in curve if fit.curvature * scale**2 <= MAX_CURVATURE_NATS] or curve[:1]
    fit = problem.fit() if table.noise else min(smooth, key=lambda one: one.rms)
    exists = fit.rms <= max(tolerance, 1.2 * table.noise)
    if not exists:  # the corner of the L-curve: more curvature hardly reduces the residual
        fit = next(one for one in curve if one.rms <= L_CURVE_CORNER_RATIO * fit.rms)
    tails, log_kappa = tails_and_log_kappa(fit, table.mu)
    kind = classify(0.0, tolerance, log_kappa) if exists else KIND_NO_PRIOR
    last = curve[-1]
    explanation = (
        f"No prior exists at the fixed scale {scale:.3g}: a log prior of curvature {fit.curvature:.2g} leaves "
        f"{fit.rms:.1e} nats, and one of curvature {last.curvature:.2g} still {last.rms:.1e}. Any function smoothed by "
        f"this family is smoother than the penalty."
    )
    words, error = None if exists else explanation, max(fit.rms, table.noise)
    certificate = make_certificate(kind, fit.worst, tails, log_kappa, error, verdict=words, learnt="")
    return _equivalence(table, family, fit, normalised(fit, log_kappa), certificate)


def from_function_at_one_scale(
    penalty: Function, family: LocationScaleFamily, settings: InversionSettings, scale: float
) -> Equivalence:
    """Return the equivalence of a function at one fixed scale, by tabulating it."""
    mu_only: Callable[[Tensor, Tensor], Tensor] = lambda mu, s: penalty(mu, torch.full_like(mu, scale))  # noqa: E731
    unit = find_width(mu_only, settings.centre) if settings.width is None else settings.width
    reach = 8 * max(unit, scale)
    mu = settings.centre + torch.linspace(-reach, reach, LOCATION_COUNT, dtype=torch.float64)
    values = mu_only(mu, mu)
    return from_table_at_one_scale(Table(mu, [scale], values[:, None]), family, settings.tolerance)


def nearest_bayesian_penalty(
    penalty: Function, family: LocationScaleFamily, grid: Grid
) -> tuple[Function, Callable[[Tensor], Tensor], float]:
    """Return the Bayesian penalty nearest to r in least squares on the test grid, its log prior and its K."""
    reach = 6 * grid.unit
    mu = grid.centre + torch.linspace(-reach, reach, LOCATION_COUNT, dtype=torch.float64)
    with torch.no_grad():
        values = penalty(*torch.broadcast_tensors(mu[:, None], grid.scales))
    fit = SplineProblem(Table(mu, grid.scales, values), family).smoothest_fit()
    _, log_kappa = tails_and_log_kappa(fit, mu)
    return penalty_of_fit(fit, family), normalised(fit, log_kappa), -log_kappa


def penalty_of_fit(fit: SplineFit, family: LocationScaleFamily) -> Function:
    """Return the penalty KL + K of a fitted log prior."""

    def penalty(mu: Tensor, scale: Tensor) -> Tensor:
        mu, scale = torch.broadcast_tensors(mu, scale)
        return -family.entropy(scale) - family.expectation(fit, mu, scale)

    return penalty


def tails_and_log_kappa(fit: SplineFit, mu: Tensor) -> tuple[tuple[float, float], float]:
    """Return the slopes of the tails at the ends of the table, and the log of the integral of e^A."""
    centre = (mu[0] + mu[-1]) / 2
    edges = torch.linspace(float(mu[0]), float(mu[-1]), 400, dtype=torch.float64)
    points, widths = gauss_legendre_panels(edges[:-1], edges[1:], POINTS_PER_PANEL)
    values, distance = fit(points), points - centre
    some = torch.linspace(0, len(points) - 1, 21).round().long()  # evenly spaced, including both ends
    tails = tail_slopes(distance[some], values[some])
    return tails, log_integral(distance, widths, values, tails)


def _repair(
    table: Table, family: LocationScaleFamily, missing: float, allowed: float, fit: SplineFit
) -> tuple[str | None, SplineFit]:
    """Add the entropy or divide by T if that turns the table into a KL; return the kind of repair and its fit."""
    temperature = 1 - missing
    tries = []
    if abs(temperature) <= NOISY_TEMPERATURE_MARGIN:
        tries.append((KIND_ENTROPY_MISSING, table.values - family.entropy(table.scales), table.noise))
    if temperature > TEMPERATURE_MARGIN and abs(missing) >= TEMPERATURE_MARGIN:
        tries.append((KIND_TEMPERED, table.values / temperature, table.noise / temperature))
    for kind, values, noise in tries:
        better = SplineProblem(Table(table.mu, table.scales, values, noise), family).fit()
        if better.worst <= max(allowed, NOISE_SIGMAS * noise):
            return kind, better
    return None, fit


def _equivalence(
    table: Table,
    family: LocationScaleFamily,
    fit: SplineFit,
    log_prior: Callable[[Tensor], Tensor],
    certificate: Certificate,
) -> Equivalence:
    """Assemble the result for a table."""
    middle, unit = float((table.mu[0] + table.mu[-1]) / 2), float(table.mu[-1] - table.mu[0]) / 12
    one = float(table.scales[0]) if len(table.scales) == 1 else None
    constant = -math.log(certificate.kappa)
    error = like_input(lambda theta: torch.full_like(theta, certificate.error))
    closest = penalty_of_fit(fit, family)
    return Equivalence(log_prior, constant, certificate, family.name, table, error, closest, middle, unit, one)
