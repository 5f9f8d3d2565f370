"""From a penalty to its prior: `prior_from_penalty`, after Theorem 2 of Wolinski, Charpiat and Ollivier (2020).

    r(mu, s) = KL(beta_{mu,s} || alpha) + K    <=>    log alpha = A + K,   A the same at every s,   K = -log int e^A

A is computed by deconvolution if the penalty is a function, and by a smoothing spline if it is a table. A penalty that
fails the test is tried again divided by its apparent temperature T, or with the missing entropy added. If that fails
too, least squares gives the nearest Bayesian penalty, and the remainder is not Bayesian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - used by the doctest

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
    """Find the prior for which a penalty is a KL divergence, and certify whether there is one.

    The penalty is evaluated around `centre`, over several widths of the prior and at scales from 1/4 to 2 widths. It is
    valid if it is a KL plus a constant to within `tolerance` nats.

    Args:
        r: The penalty: a function of tensors or of numbers, a table (mu, scales, values[, noise[, keep]]) or `Table`,
            or a penalty of `priory.penalties`, which is read as r(w), minus the log density of a weight. A function has
            the signature r(mu, scale); r(mu) for "dirac"; r(m, p) with the keep probability p for "dropout"; r(mu,
            scale, p) for "spike_slab".
        family: Family of the posterior, with its scale: "gaussian" (default; standard deviation), "laplace" (b),
            "uniform" (half of the width), "logistic" (s), "gumbel" (beta), "dirac", "dropout" or "spike_slab".
        scale: The scale, if it is fixed and not learnt; for "dropout", the keep probability. Default: None, learnt.
        centre: Location around which the penalty is evaluated. Default: 0.0.
        width: Approximate width of the prior. Default: None, found automatically.
        corners: Points where the log prior may have corners. Default: None, the centre.
        tolerance: Largest deviation from a KL in nats for a valid penalty. Default: 1e-3.
        slab: Family of the slab for "spike_slab". Default: "gaussian".

    Returns:
        An `Equivalence` with the log prior, the constant K and the certificate.

    Raises:
        InputError: If the penalty is not finite around its centre, or the prior's peak is too far from it.

    Example:
        >>> found = prior_from_penalty(lambda mu, s: 0.5 * (mu**2 + s**2 - 1) - s.log(), "gaussian")
        >>> found.certificate.valid, round(found.log_prior(torch.tensor(0.0)).item(), 6)
        (True, -0.918939)

    References:
        Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in variational
        inference.
    """
    name = check_family(family, CALLER_NAME)
    require(_is_finite_number(centre), "centre", CALLER_NAME, "be a finite number", centre)
    for key, value in (("width", width), ("scale", scale)):
        ok = value is None or (_is_finite_number(value) and value > 0)
        require(ok, key, CALLER_NAME, "be a positive number", value)
    require(_is_finite_number(tolerance) and tolerance > 0, "tolerance", CALLER_NAME, "be a positive number", tolerance)
    require(isinstance(slab, str) and slab in FAMILIES, "slab", CALLER_NAME, f"be one of {', '.join(FAMILIES)}", slab)
    marks = (centre,) if corners is None else tuple(float(c) for c in corners)
    if isinstance(r, Regulariser):
        r = _negative_log_prob(single_weight_prior(r, CALLER_NAME))
    table = as_table(r)
    if table is not None:
        require(scale is None, "scale", CALLER_NAME, "be left out for a table, which holds its scales", scale)
        return _from_table(table, name, FAMILIES[slab], float(tolerance))
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


def _from_table(table: Table, name: str, slab: LocationScaleFamily, tolerance: float) -> Equivalence:
    """Dispatch a table on its family, after checking that it has the columns that the family needs."""
    without_scales, with_keep = table.scales is None, table.keep is not None
    must = "be a table with scales, or with None as scales for 'dirac'"
    got = f"{'no scales' if without_scales else 'scales'} for {name!r}"
    require(without_scales == (name == "dirac"), "r", CALLER_NAME, must, got)
    must = "be a table with `keep` for 'spike_slab', and only for it"
    got = f"{'keep rates' if with_keep else 'no keep rates'} for {name!r}"
    require(with_keep == (name == "spike_slab"), "r", CALLER_NAME, must, got)
    if name == "dirac":
        return atoms_from_table.dirac(table, tolerance)
    if name == "dropout":
        return atoms_from_table.dropout(table, tolerance)
    if name == "spike_slab":
        return atoms_from_table.spike_slab(table, slab, tolerance)
    read = from_table if len(table.scales) > 1 else from_table_at_one_scale
    return read(table, FAMILIES[name], tolerance)


def _negative_log_prob(distribution: Distribution) -> Callable[[Tensor], Tensor]:
    """Return the penalty -log p(w) of a distribution."""

    def penalty(w: Tensor) -> Tensor:
        return -distribution.log_prob(w)

    return penalty


def _is_finite_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
