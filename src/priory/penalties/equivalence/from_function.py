"""The prior of a penalty that is a function: invert it at the best scale, smooth the result again, and compare.

The tests, all forward and hence well-posed, are at 25 locations up to 6 widths of the prior and at scales from 1/4 to 2
widths:

    round trip    r(mu, s) against -H(s) - E A(mu + s z), with no constant fitted
    semigroup     g at one scale against g at the scale before, smoothed by what lies between (Gaussian family)
    heat          the residual of the heat equation (Gaussian family)
    tails         the slope of A against log |theta|, out to a million widths: an integral needs less than -1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import InputError, require
from priory.penalties.equivalence.certificate import (
    KIND_ENTROPY_MISSING,
    KIND_NOT_INTEGRABLE,
    KIND_TEMPERED,
    KIND_VALID,
    Certificate,
    classify,
    make_certificate,
)
from priory.penalties.equivalence.deconvolution import Deconvolution, deconvolve
from priory.penalties.equivalence.families import FAMILIES
from priory.penalties.equivalence.from_table import TEMPERATURE_MARGIN, nearest_bayesian_penalty
from priory.penalties.equivalence.grid import CORE_HALF_WIDTH, find_width, log_integral, make_grid, tail_slopes
from priory.penalties.equivalence.heat_equation import heat_residual
from priory.penalties.equivalence.inputs import CALLER_NAME
from priory.penalties.equivalence.result import Equivalence, InversionSettings, like_input, normalised

if TYPE_CHECKING:
    from priory.penalties.equivalence.families import LocationScaleFamily
    from priory.penalties.equivalence.grid import Grid
    from priory.penalties.equivalence.inputs import Function


@dataclass(frozen=True)
class Examination:
    """The inversion of a penalty with what the tests say of it."""

    inversion: Deconvolution
    round_trip: float
    missing_entropy: float
    tails: tuple[float, float]
    log_kappa: float
    error: float
    peak: float


def from_function(penalty: Function, family: LocationScaleFamily, settings: InversionSettings) -> Equivalence:
    """The equivalence for a penalty of locations and learnt scales."""
    unit = find_width(penalty, settings.centre) if settings.width is None else settings.width
    grid = make_grid(settings.centre, unit, settings.corners)
    with torch.no_grad():
        found = examine(penalty, family, grid)
        mended, better = _repair(penalty, family, grid, found, settings.tolerance)
        kind = classify(found.round_trip, settings.tolerance, better.log_kappa, mended)
        if kind in (KIND_VALID, KIND_ENTROPY_MISSING, KIND_TEMPERED):
            require_peak_in_core(better.peak, better.log_kappa, grid)
        certificate = _certificate(kind, penalty, family, grid, found, better)
    closest, constant = penalty, -better.log_kappa
    log_prior = normalised(lambda theta: better.inversion(theta)[0], better.log_kappa)
    if kind not in (KIND_VALID, KIND_NOT_INTEGRABLE):
        closest, other, other_constant = nearest_bayesian_penalty(penalty, family, grid)
        if mended is None:
            log_prior, constant = other, other_constant
    error = like_input(lambda theta: better.inversion(theta)[1])
    return Equivalence(log_prior, constant, certificate, family.name, penalty, error, closest, settings.centre, unit)


def examine(penalty: Function, family: LocationScaleFamily, grid: Grid) -> Examination:
    """Invert and test."""
    inversion = deconvolve(penalty, family, grid.middle[::3], grid.unit)
    values, _ = inversion(grid.points)
    require_finite_core(values, grid)
    values = torch.where(values.isfinite(), values, -math.inf)  # far out, a penalty may be too large for a number
    again = -family.entropy(grid.scales) - grid.smoothed(values[grid.near], family, grid.scales)
    difference = penalty(*torch.broadcast_tensors(grid.mu, grid.scales)) - again  # (M, S)
    distance = grid.points - grid.centre
    tails = tail_slopes(distance, values)
    return Examination(
        inversion,
        float(difference.abs().max()),
        slope(difference.mean(0), grid.scales.log()),
        tails,
        log_integral(distance, grid.widths, values, tails),
        float(inversion(grid.middle)[1].max()),
        float(grid.points[values.argmax()]),
    )


def slope(values: Tensor, against: Tensor) -> float:
    """Of the line of least squares."""
    x = against - against.mean()
    return float((x * values).sum() / x.square().sum())


def semigroup(penalty: Function, grid: Grid) -> float:
    """Root mean square over scales of g(s_k+1) - N(0, s_k+1^2 - s_k^2) * g(s_k), in nats."""
    family, near = FAMILIES["gaussian"], grid.points[grid.near]
    total = []
    for low, high in pairwise(grid.scales):
        g = -penalty(near, low.expand_as(near)) - family.entropy(low)
        between = (high.square() - low.square()).sqrt()
        smoothed = grid.smoothed(g, family, between[None])[:, 0]
        mu = grid.mu[:, 0]
        total.append(smoothed + penalty(mu, high.expand_as(mu)) + family.entropy(high))
    return float(torch.stack(total).square().mean().sqrt())


def _repair(
    penalty: Function, family: LocationScaleFamily, grid: Grid, found: Examination, tolerance: float
) -> tuple[str | None, Examination]:
    """What makes a KL of a penalty that is none: its entropy, or a division by T; and the tests of that."""
    temperature = 1 - found.missing_entropy
    if found.round_trip <= tolerance or temperature < -TEMPERATURE_MARGIN or abs(1 - temperature) < TEMPERATURE_MARGIN:
        return None, found
    if abs(temperature) <= TEMPERATURE_MARGIN:
        kind, other = KIND_ENTROPY_MISSING, lambda mu, s: penalty(mu, s) - family.entropy(s)
    else:
        kind, other = KIND_TEMPERED, lambda mu, s: penalty(mu, s) / temperature
    better = examine(other, family, grid)
    return (kind, better) if better.round_trip <= tolerance else (None, found)


def _certificate(
    kind: str, penalty: Function, family: LocationScaleFamily, grid: Grid, found: Examination, better: Examination
) -> Certificate:
    heat = between = None
    if family.name == "gaussian":
        rho = heat_residual(penalty, *torch.broadcast_tensors(grid.mu, grid.scales))
        heat, between = (float(rho.min()), float(rho.max())), semigroup(penalty, grid)
    return make_certificate(
        kind,
        found.round_trip,
        better.tails,
        better.log_kappa,
        better.error,
        missing_entropy=found.missing_entropy,
        semigroup=between,
        heat=heat,
    )


def require_finite_core(values: Tensor, grid: Grid) -> None:
    """Refuse a penalty that is not finite where the tests look."""
    bad = ~values[grid.near].isfinite()
    if bool(bad.any()):
        where = float(grid.points[grid.near][bad].abs().min())
        raise InputError(
            f"The 'r' argument of {CALLER_NAME} must be finite around its centre, got a value that is not at "
            f"{where:.3g}."
        )


def require_peak_in_core(peak: float, log_kappa: float, grid: Grid) -> None:
    """Refuse a prior whose peak lies where the points are too sparse for its integral."""
    near = abs(peak - grid.centre) <= CORE_HALF_WIDTH * grid.unit or not log_kappa < math.inf
    must = f"lie within {CORE_HALF_WIDTH:g} widths of the prior's peak, which is near {peak:.4g}"
    require(near, "centre", CALLER_NAME, must, f"{grid.centre:g} with a width of {grid.unit:.3g}")
