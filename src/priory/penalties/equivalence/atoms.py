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
from priory.penalties.equivalence.certificate import ENTROPY, NONE, VALID, Certificate, certify, kind_of
from priory.penalties.equivalence.certificate import constant as in_words
from priory.penalties.equivalence.from_prior import coin_entropy
from priory.penalties.equivalence.functions import from_function, refuse_far, refuse_gaps
from priory.penalties.equivalence.grid import find_unit, log_integral, make_grid, tail_slopes
from priory.penalties.equivalence.reading import OWNER, Function, as_function
from priory.penalties.equivalence.result import Equivalence, Look, like_input, normalised

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.penalties.equivalence.families import LocationScale
    from priory.penalties.equivalence.grid import Grid

POINT = 1e-6  # the scale that stands for none, where a penalty asks for one
COINS = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64)


def dirac(r: Any, look: Look) -> Equivalence:
    """The prior of a penalty on the weights themselves."""
    function = as_function(r, 2)

    def penalty(mu: Tensor, scale: Tensor | None = None) -> Tensor:
        return function(mu, torch.full_like(mu, POINT))

    grid = _grid(lambda mu, s: penalty(mu), look)
    log_kappa, certificate = _from_log_prior(lambda theta: -penalty(theta), grid, 0.0, look.tolerance)
    log_prior = normalised(lambda theta: -penalty(theta), log_kappa)
    return Equivalence(
        log_prior,
        -log_kappa,
        certificate,
        "dirac",
        penalty,
        like_input(torch.zeros_like),
        penalty,
        look.centre,
        grid.unit,
    )


def dropout(r: Any, look: Look, keep: float | None) -> Equivalence:
    """The prior of a penalty on weights that are kept with probability p: learnt, or fixed as `keep`."""
    require(keep is None or keep <= 1, "scale", OWNER, "be a probability above 0 for 'dropout'", keep)
    given = as_function(r, 2)
    if keep is None:
        return _learnt_dropout(given, look)

    def penalty(m: Tensor, p: Tensor | None = None) -> Tensor:
        return given(m, torch.full_like(m, keep))

    grid = _grid(lambda m, s: penalty(m), look)
    log_kappa, certificate = _from_log_prior(lambda theta: -penalty(theta) / keep, grid, 0.0, look.tolerance)
    log_prior = normalised(lambda theta: -penalty(theta) / keep, log_kappa)
    zero = torch.zeros((), dtype=torch.float64)
    constant = float(penalty(zero) + coin_entropy(zero + keep) + log_prior(zero)) if log_kappa < math.inf else -math.inf
    certificate = replace(certificate, verdict=certificate.verdict.replace(in_words(-log_kappa), in_words(constant)))
    none = like_input(torch.zeros_like)
    return Equivalence(
        log_prior, constant, certificate, "dropout", penalty, none, penalty, look.centre, grid.unit, keep
    )


def _learnt_dropout(penalty: Function, look: Look) -> Equivalence:
    def mended(m: Tensor, p: Tensor) -> Tensor:
        return penalty(m, p) - coin_entropy(p)

    grid = _grid(lambda m, s: penalty(m, torch.full_like(m, 0.5)), look)
    off = _from_affine(penalty, grid.middle)
    kind, chosen, missing = None, penalty, 0.0
    if off > look.tolerance and _from_affine(mended, grid.middle) <= look.tolerance:
        kind, chosen, missing = ENTROPY, mended, 1.0
    log_kappa, certificate = _from_log_prior(
        lambda theta: -_at_one(chosen, theta), grid, off, look.tolerance, kind, missing, "keep rate"
    )
    log_prior = normalised(lambda theta: -_at_one(chosen, theta), log_kappa)

    def nearest(m: Tensor, p: Tensor) -> Tensor:
        zero = _at_one(chosen, torch.zeros_like(m))
        return -coin_entropy(p) + p * _at_one(chosen, m) + (1 - p) * zero

    error = like_input(torch.zeros_like)
    return Equivalence(log_prior, -log_kappa, certificate, "dropout", penalty, error, nearest, look.centre, grid.unit)


def spike_slab(r: Any, look: Look, slab: LocationScale) -> Equivalence:
    """The prior of a penalty on spikes and slabs: the slab's density, and the probability of the spike."""
    penalty = as_function(r, 3)

    def of_slab(mu: Tensor, scale: Tensor) -> Tensor:
        return _ends(lambda p: penalty(mu, scale, p) + coin_entropy(p), mu)[1]

    found = from_function(of_slab, slab, look)
    return with_spike(found, penalty, *_spike_tests(penalty, found), look.tolerance)


def with_spike(found: Equivalence, penalty: Function, off: float, dropped: float, tolerance: float) -> Equivalence:
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
        certificate = replace(certificate, valid=False, kind=NONE, verdict=words, round_trip=off)
    elif certificate.kind == VALID:
        words = certificate.verdict.replace(in_words(slab_constant), in_words(constant))
        certificate = replace(certificate, verdict=f"{words} The spike at 0 has probability {spike:.4f}.")

    def log_prior(theta: Tensor) -> Tensor:
        return torch.where(theta == 0, math.log(spike), math.log1p(-spike) + found.log_prior(theta))

    def nearest(mu: Tensor, scale: Tensor, p: Tensor) -> Tensor:
        return -coin_entropy(p) + p * found.nearest(mu, scale) + (1 - p) * dropped

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
        return _line_tests(lambda p: penalty(*flat, p) + coin_entropy(p), flat[0])


def _from_affine(penalty: Function, m: Tensor) -> float:
    """How far r + H(p) is from lines in p that all begin with the price of a weight at 0."""
    with torch.no_grad():
        off, dropped = _line_tests(lambda p: penalty(m, p) + coin_entropy(p), m)
        return max(off, abs(dropped - float(_at_one(penalty, m.new_zeros(())))))


def _line_tests(function: Callable[[Tensor], Tensor], like: Tensor) -> tuple[float, float]:
    low, high = _ends(function, like)
    lines = torch.stack([function(torch.full_like(like, float(p))) - (low + float(p) * (high - low)) for p in COINS])
    spread = low - low.mean()
    return float(torch.maximum(lines.abs().max(), spread.abs().max())), float(low.mean())


def _ends(function: Callable[[Tensor], Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """The values at p = 0 and p = 1 of the line through p = 1/4 and p = 3/4, where logarithms are safe."""
    one, three = (function(torch.full_like(like, p)) for p in (0.25, 0.75))
    return 1.5 * one - 0.5 * three, 1.5 * three - 0.5 * one


def _at_one(penalty: Function, m: Tensor) -> Tensor:
    return _ends(lambda p: penalty(m, p) + coin_entropy(p), m)[1]


def _grid(penalty: Callable[[Tensor, Tensor], Tensor], look: Look) -> Grid:
    unit = find_unit(penalty, look.centre) if look.width is None else look.width
    return make_grid(look.centre, unit, look.corners)


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
    refuse_gaps(values, grid)
    values = torch.where(values.isfinite(), values, -math.inf)
    distance = grid.points - grid.centre
    tails = tail_slopes(distance, values)
    log_kappa = log_integral(distance, grid.widths, values, tails)
    kind = kind_of(off, tolerance, log_kappa, mended)
    if kind in (VALID, ENTROPY):
        refuse_far(float(grid.points[values.argmax()]), log_kappa, grid)
    return log_kappa, certify(kind, off, tails, log_kappa, 0.0, missing_entropy=missing, what=what)
