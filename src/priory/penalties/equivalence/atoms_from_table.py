"""The prior of a penalty that is a table, for families with atoms: points, dropout, spike and slab.

With coins, r + H(p) is affine in p (see `atoms`), and its two ends are found by least squares over p:

    r(., p) + H(p) = p v + (1 - p) c_0,     v the penalty at p = 1,     c_0 one number for the whole table

and minus v is the log prior of points and of dropout, known at the locations: a cubic spline goes through it, or near
it where the table has noise. For spike and slab v is itself a table, that of the slab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import require
from priory.penalties.equivalence.atoms_from_function import POINT_SCALE, spike_slab_from_slab
from priory.penalties.equivalence.certificate import KIND_ENTROPY_MISSING, classify, format_constant, make_certificate
from priory.penalties.equivalence.families import FAMILIES
from priory.penalties.equivalence.from_prior import bernoulli_entropy
from priory.penalties.equivalence.from_table import (
    NOISE_SIGMAS,
    from_table,
    from_table_at_one_scale,
    tails_and_log_kappa,
)
from priory.penalties.equivalence.inputs import Table
from priory.penalties.equivalence.result import Equivalence, like_input, normalised
from priory.penalties.equivalence.spline import SplineFit, SplineProblem, interpolate

if TYPE_CHECKING:
    from priory.penalties.equivalence.families import LocationScaleFamily


@dataclass(frozen=True)
class AffineFit:
    """v (M, *S) and c_0, the largest distance of the table from these lines, and the noise of v."""

    at_one: Tensor
    at_zero: float
    off: float
    noise: float


def dirac(table: Table, tolerance: float) -> Equivalence:
    """The prior of a table r(mu): nothing is tested but the tails."""
    return _from_log_prior_values(table, table.values, table.noise, 0.0, tolerance, "dirac")


def dropout(table: Table, tolerance: float) -> Equivalence:
    """The prior of a table r(m, p): of several keep rates, or of one that is fixed."""
    keep, allowed = _check_keep_rates(table.scales, "scales"), max(tolerance, NOISE_SIGMAS * table.noise)
    if len(keep) == 1:
        return _fixed_dropout(table, float(keep[0]), tolerance)
    bare, kind, missing = fit_affine_in_keep(table.values, keep, table.noise), None, 0.0
    found = fit_affine_in_keep(table.values + bernoulli_entropy(keep), keep, table.noise)
    off = _distance_from_affine(table.mu, found)
    if off > allowed and _distance_from_affine(table.mu, bare) <= allowed:
        found, kind, missing = bare, KIND_ENTROPY_MISSING, 1.0
    result = _from_log_prior_values(
        table, found.at_one, found.noise, off, allowed, "dropout", kind, missing, "keep rate"
    )

    def nearest(m: Tensor, p: Tensor) -> Tensor:
        at_one = result.nearest(m)
        return -bernoulli_entropy(p) + p * at_one + (1 - p) * result.nearest(torch.zeros_like(m))

    return replace(result, nearest=nearest)


def spike_slab(table: Table, slab: LocationScaleFamily, tolerance: float) -> Equivalence:
    """The prior of a table r(mu, s, p): the slab's density, and the probability of the spike."""
    keep = _check_keep_rates(table.keep, "keep")
    require(len(keep) > 1, "keep", "Table", "be two probabilities or more", keep.tolist())
    found = fit_affine_in_keep(table.values + bernoulli_entropy(keep), keep, table.noise)
    inner = Table(table.mu, table.scales, found.at_one, found.noise)
    read = from_table if len(table.scales) > 1 else from_table_at_one_scale
    allowed = max(tolerance, NOISE_SIGMAS * table.noise)
    return spike_slab_from_slab(read(inner, slab, tolerance), table, found.off, found.at_zero, allowed)


def fit_affine_in_keep(values: Tensor, keep: Tensor, noise: float) -> AffineFit:
    """Least squares of p v + (1 - p) c_0 to values (M, *S, P), with one c_0 for all.

    >>> p = torch.tensor([0.2, 0.5], dtype=torch.float64)
    >>> round(fit_affine_in_keep(p * torch.tensor([[3.0], [4.0]]) + (1 - p) * 7, p, 0.0).at_zero, 6)
    7.0
    """
    size = keep.square().sum()
    across = (1 - keep) - keep * (keep * (1 - keep)).sum() / size  # what p can't explain of 1 - p
    at_zero = float((values @ across).mean() / across.square().sum())
    at_one = (values - (1 - keep) * at_zero) @ keep / size
    off = (values - keep * at_one[..., None] - (1 - keep) * at_zero).abs().max()
    return AffineFit(at_one, at_zero, float(off), noise / float(size.sqrt()))


def _fixed_dropout(table: Table, keep: float, tolerance: float) -> Equivalence:
    """With one p the part of c_0 is a constant: the log prior is -r / p."""
    noise = table.noise / keep
    result = _from_log_prior_values(table, table.values[:, 0] / keep, noise, 0.0, tolerance, "dropout")
    if not math.isfinite(result.constant):
        return replace(result, scale=keep)
    zero = torch.zeros((), dtype=torch.float64)
    at_zero = keep * result.nearest(zero)
    constant = float(at_zero + bernoulli_entropy(zero + keep) + result.log_prior(zero))
    words = result.certificate.verdict.replace(format_constant(result.constant), format_constant(constant))
    certificate, of_points = replace(result.certificate, verdict=words), result.nearest

    def nearest(m: Tensor, p: Tensor | None = None) -> Tensor:
        return keep * of_points(m)

    return replace(result, constant=constant, certificate=certificate, nearest=nearest, scale=keep)


def _from_log_prior_values(
    table: Table,
    values: Tensor,
    noise: float,
    off: float,
    allowed: float,
    name: str,
    mended: str | None = None,
    missing: float | None = None,
    what: str = "",
) -> Equivalence:
    """The equivalence for minus a log prior at the table's locations, (M,); `nearest` is its spline."""
    fit = _fit_spline(table.mu, -values, noise)
    error = max(fit.rms, noise) if noise else _interpolation_error(table.mu, -values)
    tails, log_kappa = tails_and_log_kappa(fit, table.mu)
    kind = classify(off, allowed, log_kappa, mended)
    certificate = make_certificate(kind, off, tails, log_kappa, error, missing_entropy=missing, what=what)
    middle, unit = float((table.mu[0] + table.mu[-1]) / 2), float(table.mu[-1] - table.mu[0]) / 12
    return Equivalence(
        normalised(fit, log_kappa),
        -log_kappa,
        certificate,
        name,
        table,
        like_input(lambda theta: torch.full_like(theta, error)),
        lambda mu, scale=None: -fit(mu),
        middle,
        unit,
    )


def _fit_spline(t: Tensor, values: Tensor, noise: float) -> SplineFit:
    """Through exact values; near noisy ones, as the spline that a family too narrow to matter would smooth."""
    if not noise:
        return interpolate(t, values)
    narrow, scale = FAMILIES["uniform"], torch.tensor([POINT_SCALE], dtype=torch.float64)
    return SplineProblem(Table(t, scale, -values[:, None] - narrow.entropy(scale), noise), narrow).fit()


def _interpolation_error(t: Tensor, values: Tensor) -> float:
    """How far a spline through every other value is from those that it leaves out: more than the error of all."""
    kept = torch.arange(len(t)) % 2 == 0
    kept[-1] = True
    return float((interpolate(t[kept], values[kept])(t) - values).abs().max())


def _distance_from_affine(m: Tensor, found: AffineFit) -> float:
    """How far a table is from lines in p that all begin with the price of a weight at 0, where that is known."""
    if not float(m[0]) <= 0 <= float(m[-1]):
        return found.off
    zero = torch.zeros((), dtype=torch.float64)
    at_zero = float(_fit_spline(m, found.at_one, found.noise)(zero))
    return max(found.off, abs(at_zero - found.at_zero))


def _check_keep_rates(keep: Tensor, name: str) -> Tensor:
    require(
        bool((keep <= 1).all()), name, "Table", "be probabilities above 0 for weights that are dropped", keep.tolist()
    )
    return keep
