"""The prior of a penalty given as a function, for a location-scale family with a learnt scale.

The penalty is deconvolved at the best scale, the result is smoothed again, and compared with the penalty. All tests run
in the forward direction and are therefore well-posed. They use 25 locations up to 6 widths of the prior and scales from
1/4 to 2 widths:

    round trip    r(mu, s) against -H(s) - E A(mu + s z), with no constant fitted
    semigroup     g at one scale against g at the previous scale, smoothed by the difference (Gaussian family)
    heat          the residual of the heat equation (Gaussian family)
    tails         the slope of A against log |theta|, out to a million widths: integrable if below -1
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
    """The deconvolution of a penalty and the results of its tests.

    Attributes:
        deconvolution: The log prior up to its constant.
        round_trip: Largest difference in nats between the penalty and the re-smoothed log prior.
        missing_entropy: Slope of the difference against log s.
        tails: Slopes of both tails.
        log_kappa: Log of the integral of e^A.
        error: Largest estimated error of A near the centre.
        peak: Location of the largest value of A.
    """

    deconvolution: Deconvolution
    round_trip: float
    missing_entropy: float
    tails: tuple[float, float]
    log_kappa: float
    error: float
    peak: float


def from_function(penalty: Function, family: LocationScaleFamily, settings: InversionSettings) -> Equivalence:
    """Return the equivalence of a penalty r(mu, s) with a learnt scale."""
    unit = find_width(penalty, settings.centre) if settings.width is None else settings.width
    grid = make_grid(settings.centre, unit, settings.corners)
    with torch.no_grad():
        found = examine(penalty, family, grid)
        repaired_kind, better = _repair(penalty, family, grid, found, settings.tolerance)
        kind = classify(found.round_trip, settings.tolerance, better.log_kappa, repaired_kind)
        if kind in (KIND_VALID, KIND_ENTROPY_MISSING, KIND_TEMPERED):
            require_peak_in_core(better.peak, better.log_kappa, grid)
        certificate = _certificate(kind, penalty, family, grid, found, better)
    closest, constant = penalty, -better.log_kappa
    log_prior = normalised(lambda theta: better.deconvolution(theta)[0], better.log_kappa)
    if kind not in (KIND_VALID, KIND_NOT_INTEGRABLE):
        closest, other, other_constant = nearest_bayesian_penalty(penalty, family, grid)
        if repaired_kind is None:
            log_prior, constant = other, other_constant
    error = like_input(lambda theta: better.deconvolution(theta)[1])
    return Equivalence(log_prior, constant, certificate, family.name, penalty, error, closest, settings.centre, unit)


def examine(penalty: Function, family: LocationScaleFamily, grid: Grid) -> Examination:
    """Deconvolve a penalty and run the tests."""
    deconvolution = deconvolve(penalty, family, grid.middle[::3], grid.unit)
    values, _ = deconvolution(grid.points)
    require_finite_core(values, grid)
    values = torch.where(values.isfinite(), values, -math.inf)  # far out, the penalty may overflow
    again = -family.entropy(grid.scales) - grid.smoothed(values[grid.near], family, grid.scales)
    difference = penalty(*torch.broadcast_tensors(grid.mu, grid.scales)) - again  # (M, S)
    distance = grid.points - grid.centre
    tails = tail_slopes(distance, values)
    return Examination(
        deconvolution,
        float(difference.abs().max()),
        regression_slope(difference.mean(0), grid.scales.log()),
        tails,
        log_integral(distance, grid.widths, values, tails),
        float(deconvolution(grid.middle)[1].max()),
        float(grid.points[values.argmax()]),
    )


def regression_slope(values: Tensor, against: Tensor) -> float:
    """Return the slope of the least-squares line of `values` against `against`."""
    x = against - against.mean()
    return float((x * values).sum() / x.square().sum())


def semigroup_error(penalty: Function, grid: Grid) -> float:
    """Return the root mean square over scales of g(s_k+1) - N(0, s_k+1^2 - s_k^2) * g(s_k), in nats."""
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
    """Add the entropy or divide by T if that turns the penalty into a KL; return the kind of repair and its tests."""
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
    """Return the certificate, including the Gaussian family's own tests."""
    heat = between = None
    if family.name == "gaussian":
        rho = heat_residual(penalty, *torch.broadcast_tensors(grid.mu, grid.scales))
        heat, between = (float(rho.min()), float(rho.max())), semigroup_error(penalty, grid)
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
    """Raise an InputError if the penalty is not finite within reach of the tests."""
    bad = ~values[grid.near].isfinite()
    if bool(bad.any()):
        where = float(grid.points[grid.near][bad].abs().min())
        raise InputError(
            f"The 'r' argument of {CALLER_NAME} must be finite around its centre, got a value that is not finite at "
            f"a distance of {where:.3g} from 0."
        )


def require_peak_in_core(peak: float, log_kappa: float, grid: Grid) -> None:
    """Raise an InputError if the prior's peak lies where the points are too sparse to integrate it."""
    near = abs(peak - grid.centre) <= CORE_HALF_WIDTH * grid.unit or not log_kappa < math.inf
    must = f"lie within {CORE_HALF_WIDTH:g} widths of the prior's peak, which is near {peak:.4g}"
    require(near, "centre", CALLER_NAME, must, f"{grid.centre:g} with a width of {grid.unit:.3g}")
