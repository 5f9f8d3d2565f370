"""The prior of a penalty given as a table, for families with atoms: Dirac, dropout, spike and slab.

r + H(p) is affine in the keep probability p (see `atoms_from_function`). Its two ends are found by least squares over
p:

    r(., p) + H(p) = p v + (1 - p) c_0,     v the penalty at p = 1,     c_0 one number for the whole table

For Dirac and dropout, -v is the log prior at the locations, up to a constant. A cubic spline interpolates it, or
smooths it if the table has noise. For spike and slab, v is itself a table, that of the slab.
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
    """Least-squares fit of p v + (1 - p) c_0 to a table.

    Attributes:
        at_one: v, (M, *S).
        at_zero: c_0.
        deviation: Largest distance of the table from the fit.
        noise: Standard deviation of the noise of v.
    """

    at_one: Tensor
    at_zero: float
    deviation: float
    noise: float


def dirac(table: Table, tolerance: float) -> Equivalence:
    """Return the equivalence of a table r(mu); only the tails are tested."""
    return _from_log_prior_values(table, table.values, table.noise, 0.0, tolerance, "dirac")


def dropout(table: Table, tolerance: float) -> Equivalence:
    """Return the equivalence of a table r(m, p) with several keep probabilities, or one that is fixed."""
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
    """Return the equivalence of a table r(mu, s, p): the slab's density and the probability of the spike."""
    keep = _check_keep_rates(table.keep, "keep")
    require(len(keep) > 1, "keep", "Table", "have at least two probabilities", keep.tolist())
    found = fit_affine_in_keep(table.values + bernoulli_entropy(keep), keep, table.noise)
    inner = Table(table.mu, table.scales, found.at_one, found.noise)
    read = from_table if len(table.scales) > 1 else from_table_at_one_scale
    allowed = max(tolerance, NOISE_SIGMAS * table.noise)
    return spike_slab_from_slab(read(inner, slab, tolerance), table, found.deviation, found.at_zero, allowed)


def fit_affine_in_keep(values: Tensor, keep: Tensor, noise: float) -> AffineFit:
    """Fit p v + (1 - p) c_0 to values (M, *S, P) by least squares, with one c_0 for the whole table.

    >>> p = torch.tensor([0.2, 0.5], dtype=torch.float64)
    >>> round(fit_affine_in_keep(p * torch.tensor([[3.0], [4.0]]) + (1 - p) * 7, p, 0.0).at_zero, 6)
    7.0
    """
    size = keep.square().sum()
    across = (1 - keep) - keep * (keep * (1 - keep)).sum() / size  # the part of 1 - p that is orthogonal to p
    at_zero = float((values @ across).mean() / across.square().sum())
    at_one = (values - (1 - keep) * at_zero) @ keep / size
    off = (values - keep * at_one[..., None] - (1 - keep) * at_zero).abs().max()
    return AffineFit(at_one, at_zero, float(off), noise / float(size.sqrt()))


def _fixed_dropout(table: Table, keep: float, tolerance: float) -> Equivalence:
    """Return the equivalence at one keep probability, where the log prior is -r / p up to a constant."""
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
    repaired_kind: str | None = None,
    missing: float | None = None,
    learnt: str = "",
) -> Equivalence:
    """Return the equivalence given minus the log prior at the table's locations, (M,)."""
    fit = _fit_spline(table.mu, -values, noise)
    error = max(fit.rms, noise) if noise else _interpolation_error(table.mu, -values)
    tails, log_kappa = tails_and_log_kappa(fit, table.mu)
    kind = classify(off, allowed, log_kappa, repaired_kind)
    certificate = make_certificate(kind, off, tails, log_kappa, error, missing_entropy=missing, learnt=learnt)
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
    """Interpolate exact values; smooth noisy ones with the spline of a family that is too narrow to matter."""
    if not noise:
        return interpolate(t, values)
    narrow, scale = FAMILIES["uniform"], torch.tensor([POINT_SCALE], dtype=torch.float64)
    return SplineProblem(Table(t, scale, -values[:, None] - narrow.entropy(scale), noise), narrow).fit()


def _interpolation_error(t: Tensor, values: Tensor) -> float:
    """Bound the interpolation error by that of a spline through every other value."""
    kept = torch.arange(len(t)) % 2 == 0
    kept[-1] = True
    return float((interpolate(t[kept], values[kept])(t) - values).abs().max())


def _distance_from_affine(m: Tensor, found: AffineFit) -> float:
    """Return the distance from affine functions of p that start at the penalty of a weight at 0, if covered."""
    if not float(m[0]) <= 0 <= float(m[-1]):
        return found.deviation
    zero = torch.zeros((), dtype=torch.float64)
    at_zero = float(_fit_spline(m, found.at_one, found.noise)(zero))
    return max(found.deviation, abs(at_zero - found.at_zero))


def _check_keep_rates(keep: Tensor, name: str) -> Tensor:
    """Raise an InputError unless all keep probabilities are at most 1."""
    require(
        bool((keep <= 1).all()),
        name,
        "Table",
        "be probabilities in (0, 1] for 'dropout' and 'spike_slab'",
        keep.tolist(),
    )
    return keep
