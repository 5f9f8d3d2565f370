"""From a penalty to its prior: `prior_from_penalty`, after Theorem 2 of Wolinski, Charpiat and Ollivier (2020).

    r(mu, s) = KL(beta_{mu,s} || alpha) + K    <=>    log alpha = A + K,   A the same at every s,   K = -log int e^A

A comes from `inversion` for functions and from `spline` for tables; the two conditions are tested here and worded in
`certificate`. A penalty that fails is tried again divided by the T that it seems to have, or with the entropy that it
lacks; for what fails then, least squares gives the nearest Bayesian penalty, and the rest is not Bayesian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - for the doctest

from priory.core.errors import require
from priory.penalties.as_prior.base import Regulariser
from priory.penalties.equivalence import atoms_from_function, atoms_from_table
from priory.penalties.equivalence.families import FAMILIES, check_family
from priory.penalties.equivalence.from_function import from_function
from priory.penalties.equivalence.from_prior import single_weight_prior
from priory.penalties.equivalence.from_table import from_function_at_one_scale, from_table, from_table_at_one_scale
from priory.penalties.equivalence.inputs import CALLER_NAME, as_function, as_table
from priory.penalties.equivalence.result import Equivalence, InversionSettings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributions import Distribution

    from priory.penalties.equivalence.families import LocationScaleFamily
    from priory.penalties.equivalence.inputs import Table

__all__ = ["Equivalence", "prior_from_penalty"]


def prior_from_penalty(
    r: Any,
    family: str = "gaussian",
    *,
    scale: float | None = None,
    centre: float = 0.0,
    width: float | None = None,
    corners: Sequence[float] | None = None,
    tolerance: float = 1e-3,
    slab: str = "gaussian",
) -> Equivalence:
    """The prior that a penalty is, for a family of posteriors, and a certificate that says whether it is one.

    `r(mu, scale)` is a function of tensors or of numbers, a table (mu, scales, values[, noise[, keep]]), or a penalty
    of `priory.penalties`, whose r(w) is minus the log density of a weight. The scale is the standard deviation of
    "gaussian", b of "laplace", half the width of "uniform", s of "logistic", beta of "gumbel". It is r(mu) for "dirac",
    r(m, p) with the probability to be kept for "dropout", r(mu, scale, p) for "spike_slab", whose slab is of the family
    `slab`. `scale` is given where it is fixed and not learnt (for "dropout", p).

    The penalty is looked at around `centre`, over some widths of the prior (found by itself unless given), with care
    at `corners` (the centre unless given). It is valid if it is a KL to within `tolerance` nats.

    >>> found = prior_from_penalty(lambda mu, s: 0.5 * (mu**2 + s**2 - 1) - s.log(), "gaussian")
    >>> found.certificate.valid, round(found.log_prior(torch.tensor(0.0)).item(), 6)
    (True, -0.918939)
    """
    name = check_family(family, CALLER_NAME)
    require(_number(centre), "centre", CALLER_NAME, "be a number", centre)
    for key, value in (("width", width), ("scale", scale)):
        ok = value is None or (_number(value) and value > 0)
        require(ok, key, CALLER_NAME, "be a number above zero", value)
    require(_number(tolerance) and tolerance > 0, "tolerance", CALLER_NAME, "be a number above zero", tolerance)
    require(isinstance(slab, str) and slab in FAMILIES, "slab", CALLER_NAME, f"be one of {', '.join(FAMILIES)}", slab)
    marks = (centre,) if corners is None else tuple(float(c) for c in corners)
    if isinstance(r, Regulariser):
        r = _minus_log(single_weight_prior(r, CALLER_NAME))
    table = as_table(r)
    if table is not None:
        require(scale is None, "scale", CALLER_NAME, "be left out for a table, which has its own", scale)
        return _of_table(table, name, FAMILIES[slab], float(tolerance))
    settings = InversionSettings(float(centre), None if width is None else float(width), marks, float(tolerance))
    if name == "dirac":
        return atoms_from_function.dirac(r, settings)
    if name == "dropout":
        return atoms_from_function.dropout(r, settings, scale)
    if name == "spike_slab":
        require(scale is None, "scale", CALLER_NAME, "be learnt for 'spike_slab'", scale)
        return atoms_from_function.spike_slab(r, settings, FAMILIES[slab])
    function = as_function(r, 2)
    if scale is not None:
        return from_function_at_one_scale(function, FAMILIES[name], settings, float(scale))
    return from_function(function, FAMILIES[name], settings)


def _of_table(table: Table, name: str, slab: LocationScaleFamily, tolerance: float) -> Equivalence:
    without, coins = table.scales is None, table.keep is not None
    must = "be a table with scales, or without (None) for 'dirac'"
    require(without == (name == "dirac"), "r", CALLER_NAME, must, f"{'none' if without else 'scales'} for {name!r}")
    must = "be a table with `keep` for 'spike_slab' alone"
    require(coins == (name == "spike_slab"), "r", CALLER_NAME, must, f"{'some' if coins else 'none'} for {name!r}")
    if name == "dirac":
        return atoms_from_table.dirac(table, tolerance)
    if name == "dropout":
        return atoms_from_table.dropout(table, tolerance)
    if name == "spike_slab":
        return atoms_from_table.spike_slab(table, slab, tolerance)
    read = from_table if len(table.scales) > 1 else from_table_at_one_scale
    return read(table, FAMILIES[name], tolerance)


def _minus_log(distribution: Distribution) -> Callable[[Tensor], Tensor]:
    def penalty(w: Tensor) -> Tensor:
        return -distribution.log_prob(w)

    return penalty


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
