"""From a prior to its penalty: the term that a variational loss adds to the negative log-likelihood.

    location-scale   r(mu, s)    = KL(beta_{mu,s} || alpha) = -H(beta_s) - E log alpha(mu + s z)
    dirac            r(mu)       = -log alpha(mu), dropping the entropy of a point
    dropout          r(m, p)     = -H(p) - p log alpha(m) - (1 - p) log alpha(0), with keep probability p
    spike and slab   r(mu, s, p) = KL(Bernoulli p || Bernoulli 1 - pi_0) + p KL(beta_{mu,s} || slab)

Closed forms of `priory.divergences` are used where they exist, and quadrature elsewhere. All penalties are
differentiable.

References:
    Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in variational
    inference, arXiv:2002.00178.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MixtureSameFamily, Normal, kl_divergence

from priory.core.errors import require
from priory.distributions import SpikeAndSlab
from priory.divergences import kl
from priory.divergences.densities import log_density
from priory.penalties.as_prior.base import Regulariser
from priory.penalties.as_prior.parameters import ParameterInfo
from priory.penalties.equivalence.families import FAMILIES, LocationScaleFamily, check_family

CALLER_NAME = "penalty_from_prior"
SINGLE_WEIGHT = ParameterInfo("w", (), is_weight=False, fan_in=1, fan_out=1, blocks=1, transposed=False)
PenaltyFunction = Callable[..., Tensor]


def penalty_from_prior(
    prior: Any, family: str = "gaussian", *, corners: Sequence[float] | None = None
) -> PenaltyFunction:
    """Return the penalty r(mu, scale) = KL(beta || prior) that corresponds to a prior, for a family of posteriors.

    Args:
        prior: A distribution, a penalty of `priory.penalties` with a number as its factor, an `Equivalence`, any object
            with a `log_prob` method, or a function that returns a log density.
        family: Family of the posterior: "gaussian" (default), "laplace", "uniform", "logistic", "gumbel", "dirac",
            "dropout" or "spike_slab".
        corners: Points where the density has corners, poles or narrow peaks. Default: the locations and bounds of a
            distribution, or 0 for a function.

    Returns:
        An elementwise, differentiable function of tensors or numbers, in nats: r(mu, scale), with r(mu) for "dirac",
        r(m, keep) for "dropout" and r(mu, scale, p) for "spike_slab". For a prior over vectors of n numbers and the
        family "gaussian" or "dirac", mu has the shape (..., n).

    Example:
        >>> r = penalty_from_prior(Normal(0.0, 1.3), "gaussian")
        >>> round(r(0.5, 0.8).item(), 6)
        0.248821

    References:
        Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in variational
        inference.
    """
    name, prior = check_family(family, CALLER_NAME), single_weight_prior(prior, CALLER_NAME)
    if name == "spike_slab":
        return _spike_slab(prior)
    if isinstance(prior, Distribution) and prior.event_shape:
        return _vector(prior, name)
    log_prior = log_density_of(prior)
    if name == "dirac":
        return lambda mu, scale=None: -log_prior(as_float_tensors(mu)[0])
    if name == "dropout":
        return _dropout(log_prior)
    marks: Sequence[Tensor | float] = corner_points(prior) if corners is None else tuple(corners)
    return _location_scale(prior, log_prior, FAMILIES[name], marks)


def _location_scale(
    prior: Any, log_prior: Callable[[Tensor], Tensor], family: LocationScaleFamily, marks: Sequence[Tensor | float]
) -> PenaltyFunction:
    """Return r(mu, s), by a closed-form KL if there is one and by quadrature otherwise."""

    def penalty(mu: Any, scale: Any) -> Tensor:
        if isinstance(scale, (int, float)):
            require(scale > 0, "scale", CALLER_NAME, "be positive", scale)
        loc, scale = torch.broadcast_tensors(*as_float_tensors(mu, scale))
        if isinstance(prior, SpikeAndSlab):
            return kl(family.member(loc, scale), prior).value
        if isinstance(prior, Distribution):
            try:
                return kl_divergence(family.member(loc, scale), prior)
            except NotImplementedError:
                pass
        return -family.entropy(scale) - family.expectation(log_prior, loc, scale, marks)

    return penalty


def _dropout(log_prior: Callable[[Tensor], Tensor]) -> PenaltyFunction:
    """Return r(m, keep) for dropout."""

    def penalty(m: Any, keep: Any) -> Tensor:
        m, keep = torch.broadcast_tensors(*as_float_tensors(m, keep))
        return -bernoulli_entropy(keep) - keep * log_prior(m) - (1 - keep) * log_prior(torch.zeros_like(m))

    return penalty


def _spike_slab(prior: Any) -> PenaltyFunction:
    """Return r(mu, scale, p) for a spike-and-slab posterior and prior."""
    ok = isinstance(prior, SpikeAndSlab)
    require(ok, "prior", CALLER_NAME, "be a SpikeAndSlab for the family 'spike_slab'", type(prior).__name__)

    def penalty(mu: Any, scale: Any, p: Any) -> Tensor:
        loc, scale, p = torch.broadcast_tensors(*as_float_tensors(mu, scale, p))
        return kl(SpikeAndSlab(p, Normal(loc, scale, validate_args=False), validate_args=False), prior).value

    return penalty


def _vector(prior: Distribution, name: str) -> PenaltyFunction:
    """Return one penalty for vectors of n numbers, with one scale per vector or per coordinate."""
    ok = name in ("gaussian", "dirac") and len(prior.event_shape) == 1
    must = "be 'gaussian' or 'dirac' for a prior over vectors"
    require(ok, "family", CALLER_NAME, must, f"{name!r} and the event shape {tuple(prior.event_shape)}")
    if name == "dirac":
        return lambda mu, scale=None: -log_density(prior, as_float_tensors(mu)[0])

    def penalty(mu: Any, scale: Any) -> Tensor:
        loc, scale = torch.broadcast_tensors(*as_float_tensors(mu, scale))
        return kl(Independent(Normal(loc, scale, validate_args=False), 1), prior).value

    return penalty


def as_float_tensors(*values: Any) -> list[Tensor]:
    """Return floating-point tensors; numbers take the type of the tensors beside them, or float64."""
    floats = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    like = floats[0] if floats else torch.zeros((), dtype=torch.float64)
    options = {"dtype": like.dtype, "device": like.device}
    return [v if isinstance(v, Tensor) and v.is_floating_point() else torch.as_tensor(v, **options) for v in values]


def bernoulli_entropy(p: Tensor) -> Tensor:
    """Return H(p) = -p log p - (1 - p) log(1 - p)."""
    return -torch.special.xlogy(p, p) - torch.special.xlogy(1 - p, 1 - p)


def single_weight_prior(prior: Any, owner: str) -> Any:
    """Return the distribution of one weight under a penalty; anything else is returned unchanged."""
    if not isinstance(prior, Regulariser):
        return prior
    ok = isinstance(prior.factor, (int, float))
    require(ok, "prior", owner, "have a number as its factor, since no network is given", repr(prior))
    return prior.prior(float(prior.factor), SINGLE_WEIGHT, torch.float64)  # pyright: ignore[reportArgumentType]


def log_density_of(prior: Any) -> Callable[[Tensor], Tensor]:
    """Return the elementwise log density of any object accepted as a prior."""
    if isinstance(prior, Distribution):
        return lambda w: log_density(prior, w)
    for name in ("log_prior", "log_prob"):
        function = getattr(prior, name, None)
        if callable(function):
            return function  # pyright: ignore[reportReturnType]
    must = "be a distribution, an Equivalence, a penalty or a function that returns a log density"
    require(callable(prior), "prior", CALLER_NAME, must, type(prior).__name__)
    return prior


def corner_points(prior: Any) -> tuple[Tensor | float, ...]:
    """Return the points where a density has peaks, corners and bounds."""
    if not isinstance(prior, Distribution):
        return (0.0,)
    if isinstance(prior, MixtureSameFamily):
        parts = prior.component_distribution
        return tuple(
            c for peak in corner_points(parts) for c in torch.as_tensor(peak).expand(parts.batch_shape).unbind(-1)
        )
    ends = (getattr(prior.support, end, math.inf) for end in ("lower_bound", "upper_bound"))
    finite = tuple(end for end in ends if bool(torch.as_tensor(end).isfinite().all()))
    return (getattr(prior, "loc", 0.0), *finite)
