"""The prior of a penalty for families with atoms: points, dropout, spike and slab. Each is inverted exactly.

    dirac        r(mu)       = -log alpha(mu) + K: the penalty of maximum a posteriori
    dropout      r(m, p)     = -H(p) - p log alpha(m) - (1 - p) log alpha(0) + K, with p the probability to be kept
    spike, slab  r(mu, s, p) = KL(coin p || coin 1 - pi_0) + p KL(beta_{mu,s} || alpha) + K

In the last two, r + H(p) is affine in p, which is their test. At p = 1 it is a penalty without coins; at p = 0 it is a
number c_0, for dropout the price of a weight at 0. For spike and slab that penalty is KL + K_1, and the prior's
probability of the spike is pi_0 = sigmoid(K_1 - c_0). Weight decay lambda m^2 with a fixed keep rate p is the prior
N(0, p / (2 lambda)).
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

POINT_SCALE = 1e-6  # the scale that stands for none, where a penalty asks for one
TEST_KEEP_RATES = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64)


def dirac(r: Any, settings: InversionSettings) -> Equivalence:
    """The prior of a penalty on the weights themselves."""
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
    """The prior of a penalty on weights that are kept with probability p: learnt, or fixed as `keep`."""
    require(keep is None or keep <= 1, "scale", CALLER_NAME, "be a probability above 0 for 'dropout'", keep)
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
    none = like_input(torch.zeros_like)
    return Equivalence(
        log_prior, constant, certificate, "dropout", penalty, none, penalty, settings.centre, grid.unit, keep
    )


def _learnt_dropout(penalty: Function, settings: InversionSettings) -> Equivalence:
    def mended(m: Tensor, p: Tensor) -> Tensor:
        return penalty(m, p) - bernoulli_entropy(p)

    grid = _grid(lambda m, s: penalty(m, torch.full_like(m, 0.5)), settings)
    off = _distance_from_affine(penalty, grid.middle)
    kind, chosen, missing = None, penalty, 0.0
    if off > settings.tolerance and _distance_from_affine(mended, grid.middle) <= settings.tolerance:
        kind, chosen, missing = KIND_ENTROPY_MISSING, mended, 1.0
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
    """The prior of a penalty on spikes and slabs: the slab's density, and the probability of the spike."""
    penalty = as_function(r, 3)

    def of_slab(mu: Tensor, scale: Tensor) -> Tensor:
        return _affine_ends(lambda p: penalty(mu, scale, p) + bernoulli_entropy(p), mu)[1]

    found = from_function(of_slab, slab, settings)
    return spike_slab_from_slab(found, penalty, *_spike_tests(penalty, found), settings.tolerance)


def spike_slab_from_slab(
    found: Equivalence, penalty: Function, off: float, dropped: float, tolerance: float
) -> Equivalence:
    """The equivalence of spike and slab from the slab's, how far from affine in p r + H(p) is, and its value c_0."""
    slab_constant = found.constant
    if not math.isfinite(slab_constant):
        return replace(found, family="spike_slab", penalty=penalty)
    spike = 1 / (1 + math.exp(dropped - slab_constant))
    constant = dropped + math.log(spike)
    certificate = found.certificate
    if off > tolerance:
        must = "r + H(p) must be affine in p, and one number wherever p = 0"
        words = f"No prior exists: {must}. It is off by {off:.1e} nats."
        certificate = replace(certificate, valid=False, kind=KIND_NO_PRIOR, verdict=words, round_trip=off)
    elif certificate.kind == KIND_VALID:
        words = certificate.verdict.replace(format_constant(slab_constant), format_constant(constant))
        certificate = replace(certificate, verdict=f"{words} The spike at 0 has probability {spike:.4f}.")

    def log_prior(theta: Tensor) -> Tensor:
        return torch.where(theta == 0, math.log(spike), math.log1p(-spike) + found.log_prior(theta))

    def nearest(mu: Tensor, scale: Tensor, p: Tensor) -> Tensor:
        return -bernoulli_entropy(p) + p * found.nearest(mu, scale) + (1 - p) * dropped

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
    """How far r + H(p) is from affine in p with one value at p = 0, and that value."""
    mu = found.centre + found.unit * torch.linspace(-3, 3, 13, dtype=torch.float64)
    mu, scale = torch.broadcast_tensors(mu[:, None], found.unit * torch.tensor([0.125, 0.5, 2.0], dtype=torch.float64))
    flat = [t.reshape(-1) for t in (mu, scale)]
    with torch.no_grad():
        return _test_affine(lambda p: penalty(*flat, p) + bernoulli_entropy(p), flat[0])


def _distance_from_affine(penalty: Function, m: Tensor) -> float:
    """How far r + H(p) is from lines in p that all begin with the price of a weight at 0."""
    with torch.no_grad():
        off, dropped = _test_affine(lambda p: penalty(m, p) + bernoulli_entropy(p), m)
        return max(off, abs(dropped - float(_penalty_at_keep_one(penalty, m.new_zeros(())))))


def _test_affine(function: Callable[[Tensor], Tensor], like: Tensor) -> tuple[float, float]:
    low, high = _affine_ends(function, like)
    lines = torch.stack(
        [function(torch.full_like(like, float(p))) - (low + float(p) * (high - low)) for p in TEST_KEEP_RATES]
    )
    spread = low - low.mean()
    return float(torch.maximum(lines.abs().max(), spread.abs().max())), float(low.mean())


def _affine_ends(function: Callable[[Tensor], Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """The values at p = 0 and p = 1 of the line through p = 1/4 and p = 3/4, where logarithms are safe."""
    one, three = (function(torch.full_like(like, p)) for p in (0.25, 0.75))
    return 1.5 * one - 0.5 * three, 1.5 * three - 0.5 * one


def _penalty_at_keep_one(penalty: Function, m: Tensor) -> Tensor:
    return _affine_ends(lambda p: penalty(m, p) + bernoulli_entropy(p), m)[1]


def _grid(penalty: Callable[[Tensor, Tensor], Tensor], settings: InversionSettings) -> Grid:
    unit = find_width(penalty, settings.centre) if settings.width is None else settings.width
    return make_grid(settings.centre, unit, settings.corners)


def _from_log_prior(
    function: Callable[[Tensor], Tensor],
    grid: Grid,
    off: float,
    tolerance: float,
    mended: str | None = None,
    missing: float | None = None,
    what: str = "",
) -> tuple[float, Certificate]:
    """log kappa and the certificate of a log prior that is known exactly."""
    with torch.no_grad():
        values = function(grid.points)
    require_finite_core(values, grid)
    values = torch.where(values.isfinite(), values, -math.inf)
    distance = grid.points - grid.centre
    tails = tail_slopes(distance, values)
    log_kappa = log_integral(distance, grid.widths, values, tails)
    kind = classify(off, tolerance, log_kappa, mended)
    if kind in (KIND_VALID, KIND_ENTROPY_MISSING):
        require_peak_in_core(float(grid.points[values.argmax()]), log_kappa, grid)
    return log_kappa, make_certificate(kind, off, tails, log_kappa, 0.0, missing_entropy=missing, what=what)
