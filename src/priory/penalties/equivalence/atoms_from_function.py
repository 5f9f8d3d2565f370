"""The prior of a penalty given as a function, for families with atoms: Dirac, dropout, spike and slab.

    dirac        r(mu)       = -log alpha(mu) + K, the penalty of maximum a posteriori
    dropout      r(m, p)     = -H(p) - p log alpha(m) - (1 - p) log alpha(0) + K, with keep probability p
    spike, slab  r(mu, s, p) = KL(Bernoulli p || Bernoulli 1 - pi_0) + p KL(beta_{mu,s} || alpha) + K

Each is inverted exactly. In the last two, r + H(p) is affine in p, which is the test. At p = 1 it is a penalty without
atoms. At p = 0 it is a constant c_0; for dropout, c_0 is the penalty of a weight at 0. For spike and slab, the penalty
at p = 1 is KL + K_1, and the prior probability of the spike is pi_0 = sigmoid(K_1 - c_0).

Weight decay lambda m^2 with a fixed keep probability p corresponds to the prior N(0, p / (2 lambda)).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import require
from priory.penalties.equivalence.certificate import (
    KIND_ENTROPY_MISSING,
    KIND_NO_PRIOR,
    KIND_VALID,
    Certificate,
    classify,
    format_constant,
    make_certificate,
)
from priory.penalties.equivalence.from_function import from_function, require_finite_core, require_peak_in_core
from priory.penalties.equivalence.from_prior import bernoulli_entropy
from priory.penalties.equivalence.grid import find_width, log_integral, make_grid, tail_slopes
from priory.penalties.equivalence.inputs import CALLER_NAME, Function, as_function
from priory.penalties.equivalence.result import Equivalence, InversionSettings, like_input, normalised

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.penalties.equivalence.families import LocationScaleFamily
    from priory.penalties.equivalence.grid import Grid

POINT_SCALE = 1e-6  # scale passed to a penalty that expects one, in place of zero
TEST_KEEP_RATES = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64)


def dirac(r: Any, settings: InversionSettings) -> Equivalence:
    """Return the equivalence of a penalty on the weights themselves."""
    function = as_function(r, 2)

    def penalty(mu: Tensor, scale: Tensor | None = None) -> Tensor:
        return function(mu, torch.full_like(mu, POINT_SCALE))

    grid = _grid(lambda mu, s: penalty(mu), settings)
    log_kappa, certificate = _from_log_prior(lambda theta: -penalty(theta), grid, 0.0, settings.tolerance)
    log_prior = normalised(lambda theta: -penalty(theta), log_kappa)
    return Equivalence(
        log_prior,
        -log_kappa,
        certificate,
        "dirac",
        penalty,
        like_input(torch.zeros_like),
        penalty,
        settings.centre,
        grid.unit,
    )


def dropout(r: Any, settings: InversionSettings, keep: float | None) -> Equivalence:
    """Return the equivalence of a penalty on dropped weights, with the keep probability learnt or fixed as `keep`."""
    require(keep is None or keep <= 1, "scale", CALLER_NAME, "be a probability in (0, 1] for 'dropout'", keep)
    given = as_function(r, 2)
    if keep is None:
        return _learnt_dropout(given, settings)

    def penalty(m: Tensor, p: Tensor | None = None) -> Tensor:
        return given(m, torch.full_like(m, keep))

    grid = _grid(lambda m, s: penalty(m), settings)
    log_kappa, certificate = _from_log_prior(lambda theta: -penalty(theta) / keep, grid, 0.0, settings.tolerance)
    log_prior = normalised(lambda theta: -penalty(theta) / keep, log_kappa)
    zero = torch.zeros((), dtype=torch.float64)
    constant = (
        float(penalty(zero) + bernoulli_entropy(zero + keep) + log_prior(zero)) if log_kappa < math.inf else -math.inf
    )
    certificate = replace(
        certificate, verdict=certificate.verdict.replace(format_constant(-log_kappa), format_constant(constant))
    )
    error = like_input(torch.zeros_like)
    return Equivalence(
        log_prior, constant, certificate, "dropout", penalty, error, penalty, settings.centre, grid.unit, keep
    )


def _learnt_dropout(penalty: Function, settings: InversionSettings) -> Equivalence:
    """Return the equivalence of dropout with a learnt keep probability."""

    def with_entropy(m: Tensor, p: Tensor) -> Tensor:
        return penalty(m, p) - bernoulli_entropy(p)

    grid = _grid(lambda m, s: penalty(m, torch.full_like(m, 0.5)), settings)
    off = _distance_from_affine(penalty, grid.middle)
    kind, chosen, missing = None, penalty, 0.0
    if off > settings.tolerance and _distance_from_affine(with_entropy, grid.middle) <= settings.tolerance:
        kind, chosen, missing = KIND_ENTROPY_MISSING, with_entropy, 1.0
    log_kappa, certificate = _from_log_prior(
        lambda theta: -_penalty_at_keep_one(chosen, theta), grid, off, settings.tolerance, kind, missing, "keep rate"
    )
    log_prior = normalised(lambda theta: -_penalty_at_keep_one(chosen, theta), log_kappa)

    def nearest(m: Tensor, p: Tensor) -> Tensor:
        zero = _penalty_at_keep_one(chosen, torch.zeros_like(m))
        return -bernoulli_entropy(p) + p * _penalty_at_keep_one(chosen, m) + (1 - p) * zero

    error = like_input(torch.zeros_like)
    return Equivalence(
        log_prior, -log_kappa, certificate, "dropout", penalty, error, nearest, settings.centre, grid.unit
    )


def spike_slab(r: Any, settings: InversionSettings, slab: LocationScaleFamily) -> Equivalence:
    """Return the equivalence of a spike-and-slab penalty: the slab's density and the probability of the spike."""
    penalty = as_function(r, 3)

    def of_slab(mu: Tensor, scale: Tensor) -> Tensor:
        return _affine_ends(lambda p: penalty(mu, scale, p) + bernoulli_entropy(p), mu)[1]

    found = from_function(of_slab, slab, settings)
    return spike_slab_from_slab(found, penalty, *_spike_tests(penalty, found), settings.tolerance)


def spike_slab_from_slab(
    found: Equivalence, penalty: Function, deviation: float, at_zero: float, tolerance: float
) -> Equivalence:
    """Return the equivalence of spike and slab, given the slab's.

    `deviation` is the distance of r + H(p) from an affine function of p, and `at_zero` its value c_0 at p = 0.
    """
    slab_constant = found.constant
    if not math.isfinite(slab_constant):
        return replace(found, family="spike_slab", penalty=penalty)
    spike = 1 / (1 + math.exp(at_zero - slab_constant))
    constant = at_zero + math.log(spike)
    certificate = found.certificate
    if deviation > tolerance:
        must = "r + H(p) must be affine in p, with the same value for all mu and s at p = 0"
        words = f"No prior exists: {must}. It is off by {deviation:.1e} nats."
        certificate = replace(certificate, valid=False, kind=KIND_NO_PRIOR, verdict=words, round_trip=deviation)
    elif certificate.kind == KIND_VALID:
        words = certificate.verdict.replace(format_constant(slab_constant), format_constant(constant))
        certificate = replace(certificate, verdict=f"{words} The spike at 0 has probability {spike:.4f}.")

    def log_prior(theta: Tensor) -> Tensor:
        return torch.where(theta == 0, math.log(spike), math.log1p(-spike) + found.log_prior(theta))

    def nearest(mu: Tensor, scale: Tensor, p: Tensor) -> Tensor:
        return -bernoulli_entropy(p) + p * found.nearest(mu, scale) + (1 - p) * at_zero

    return replace(
        found,
        log_prior=like_input(log_prior),
        constant=constant,
        certificate=certificate,
        family="spike_slab",
        penalty=penalty,
        nearest=nearest,
        spike=spike,
    )


def _spike_tests(penalty: Function, found: Equivalence) -> tuple[float, float]:
    """Return the distance of r + H(p) from affine functions of p with a common value at p = 0, and that value."""
    mu = found.centre + found.unit * torch.linspace(-3, 3, 13, dtype=torch.float64)
    mu, scale = torch.broadcast_tensors(mu[:, None], found.unit * torch.tensor([0.125, 0.5, 2.0], dtype=torch.float64))
    flat = [t.reshape(-1) for t in (mu, scale)]
    with torch.no_grad():
        return _test_affine(lambda p: penalty(*flat, p) + bernoulli_entropy(p), flat[0])


def _distance_from_affine(penalty: Function, m: Tensor) -> float:
    """Return the distance of r + H(p) from affine functions of p that start at the penalty of a weight at 0."""
    with torch.no_grad():
        deviation, at_zero = _test_affine(lambda p: penalty(m, p) + bernoulli_entropy(p), m)
        return max(deviation, abs(at_zero - float(_penalty_at_keep_one(penalty, m.new_zeros(())))))


def _test_affine(function: Callable[[Tensor], Tensor], like: Tensor) -> tuple[float, float]:
    """Return the distance of a function of p from affine functions with a common value at p = 0, and that value."""
    low, high = _affine_ends(function, like)
    lines = torch.stack(
        [function(torch.full_like(like, float(p))) - (low + float(p) * (high - low)) for p in TEST_KEEP_RATES]
    )
    spread = low - low.mean()
    return float(torch.maximum(lines.abs().max(), spread.abs().max())), float(low.mean())


def _affine_ends(function: Callable[[Tensor], Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values at p = 0 and p = 1 of the line through p = 1/4 and p = 3/4, where logarithms are finite."""
    one, three = (function(torch.full_like(like, p)) for p in (0.25, 0.75))
    return 1.5 * one - 0.5 * three, 1.5 * three - 0.5 * one


def _penalty_at_keep_one(penalty: Function, m: Tensor) -> Tensor:
    """Return r + H(p) extrapolated to p = 1."""
    return _affine_ends(lambda p: penalty(m, p) + bernoulli_entropy(p), m)[1]


def _grid(penalty: Callable[[Tensor, Tensor], Tensor], settings: InversionSettings) -> Grid:
    """Return the evaluation grid, finding the width of the prior if it is not given."""
    unit = find_width(penalty, settings.centre) if settings.width is None else settings.width
    return make_grid(settings.centre, unit, settings.corners)


def _from_log_prior(
    function: Callable[[Tensor], Tensor],
    grid: Grid,
    off: float,
    tolerance: float,
    repaired_kind: str | None = None,
    missing: float | None = None,
    learnt: str = "",
) -> tuple[float, Certificate]:
    """Return log kappa and the certificate of a log prior that is known exactly."""
    with torch.no_grad():
        values = function(grid.points)
    require_finite_core(values, grid)
    values = torch.where(values.isfinite(), values, -math.inf)
    distance = grid.points - grid.centre
    tails = tail_slopes(distance, values)
    log_kappa = log_integral(distance, grid.widths, values, tails)
    kind = classify(off, tolerance, log_kappa, repaired_kind)
    if kind in (KIND_VALID, KIND_ENTROPY_MISSING):
        require_peak_in_core(float(grid.points[values.argmax()]), log_kappa, grid)
    return log_kappa, make_certificate(kind, off, tails, log_kappa, 0.0, missing_entropy=missing, learnt=learnt)
