"""The Kullback-Leibler divergence KL(q || p) = E_q[log q(x) - log p(x)], in nats.

For two Gaussians, KL(q || p) = log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2. `kl` tries the rules below
in order of accuracy: closed forms, then integrals and sums, then Monte Carlo.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, VonMises, kl_divergence

import priory.divergences.closed_forms  # noqa: F401 - fills torch's registry
from priory.distributions import GroupLasso, SpikeAndSlab
from priory.divergences.densities import (
    FLOAT32_PI_ERROR,
    dtype_of,
    is_discrete,
    log_density,
    support_interval,
    widened,
)
from priory.divergences.monte_carlo import draws, mean_and_error, with_score
from priory.divergences.norms import expected_norm, is_gaussian
from priory.divergences.quadrature import over_a_line
from priory.divergences.result import DEFAULT_SAMPLES, ComputesKL, Divergence, check_pair, exact
from priory.divergences.sums import over_labels
from priory.divergences.tails import improper_integral

if TYPE_CHECKING:
    from collections.abc import Callable

    Recurse = Callable[[Distribution, Distribution], Divergence]
    Function = Callable[[Tensor], Tensor]


def kl(q: Distribution | ComputesKL, p: Any, samples: int = DEFAULT_SAMPLES, seed: int = 0) -> Divergence:
    """Compute the Kullback-Leibler divergence KL(q || p) = E_q[log q(x) - log p(x)], in nats.

    The most accurate method that applies is used: a closed form ("exact"), an integral over the real line
    ("quadrature"), a sum over counts ("sum"), or an average over draws ("Monte Carlo"). The divergence is infinite
    where q has mass outside the support of p, and where the tails of q are too heavy for p, such as those of a Cauchy
    for a Gaussian. KL(q || p) as a function of q is mode-seeking; the mass-covering KL(p || q) is `kl(p, q)`.

    Args:
        q: A proper torch distribution, or a posterior with a density.
        p: A torch distribution with the event shape of `q` and a batch shape that broadcasts. It may be improper
            (`LogUniform`); the divergence is then defined up to a constant. For a posterior, a distribution over its
            constrained parameters: a dict of distributions by name, one distribution for a single parameter, one over
            the vector of all entries of all parameters in their order, or another posterior of the same parameters.
        samples: Number of draws for Monte Carlo, an integer >= 2. Default: 10,000.
        seed: Seed of the draws. Default: 0.

    Returns:
        The value, how it was computed, and its error, each with the broadcast batch shape.

    Raises:
        InputError: If `q` is improper or has no density, if the shapes do not match, or if `samples` is not an
            integer >= 2.

    Example:
        >>> from torch.distributions import Normal, StudentT
        >>> one = torch.tensor(1.0, dtype=torch.float64)
        >>> round(float(kl(Normal(0 * one, one), Normal(one, 2 * one))), 6)
        0.443147
        >>> kl(Normal(0 * one, one), StudentT(3 * one)).kind
        'quadrature'

    References:
        Kullback and Leibler (1951), On information and sufficiency.
    """
    if isinstance(q, ComputesKL):
        return q.kl_to(p, samples, seed)
    check_pair("kl", q, p, samples)

    def recurse(q: Distribution, p: Distribution) -> Divergence:
        return kl(q, p, samples, seed)

    # in float64, since large terms cancel: KL(Gamma(1e5, 1) || Gamma(1.001e5, 1)) has no digit in float32
    wide_q, wide_p = widened(q), widened(p)
    for rule in (_with_spikes, _uncovered, _closed_form, _entry_by_entry, _to_group_lasso, _by_quadrature, _by_sum):
        found = rule(wide_q, wide_p, recurse)
        if found is not None:
            return _narrowed(found, dtype_of(q))
    return _by_monte_carlo(q, p, samples, seed)


def _narrowed(found: Divergence, dtype: torch.dtype) -> Divergence:
    """A result of float64 in another type; the error of one that is not exact includes the rounding."""
    value = found.value.to(dtype)
    rounding = 0.0 if found.kind == "exact" else (value.detach().double() - found.value.detach()).abs().nan_to_num(0.0)
    return Divergence(value, found.kind, (found.error + rounding).to(dtype))


def _with_spikes(q: Distribution, p: Distribution, recurse: Recurse) -> Divergence | None:
    """KL between spike-and-slab distributions: KL(pi_q || pi_p) + pi_q KL(slab_q || slab_p)."""
    if not isinstance(p, SpikeAndSlab):
        if not isinstance(q, SpikeAndSlab):
            return None
        slab = recurse(q.slab, p)
        return slab.map(lambda value: torch.where(q.weight < 1, math.inf, value), lambda error: error)
    if not isinstance(q, SpikeAndSlab):  # a q without a point mass never equals 0, so p is pi_p times its slab
        return recurse(q, p.slab).map(lambda value: value - p.weight.log(), lambda error: error)
    xlogy, keeps = torch.special.xlogy, q.weight > 0
    spike_kl = xlogy(q.weight, q.weight) + xlogy(1 - q.weight, 1 - q.weight)
    spike_kl = spike_kl - xlogy(q.weight, p.weight) - xlogy(1 - q.weight, 1 - p.weight)
    slab = recurse(q.slab, p.slab)
    # a slab of weight 0 contributes nothing, even if its divergence is infinite
    return slab.map(lambda value: spike_kl + q.weight * torch.where(keeps, value, 0.0), lambda error: q.weight * error)


def _uncovered(q: Distribution, p: Distribution, recurse: Recurse) -> Divergence | None:
    """Infinity where q has mass outside the support of p, or where only one of them is discrete."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    outside = torch.tensor(is_discrete(q) != is_discrete(p))
    ends = (support_interval(q), support_interval(p)) if q.event_shape == () else (None, None)
    if ends[0] is not None and ends[1] is not None:
        slack = FLOAT32_PI_ERROR if isinstance(p, VonMises) else 0.0
        outside = (ends[0][0] < ends[1][0] - slack) | (ends[0][1] > ends[1][1] + slack)
    if not bool(outside.all()):
        return None
    return exact(torch.full(shape, math.inf, dtype=dtype_of(q)))


def _closed_form(q: Distribution, p: Distribution, recurse: Recurse) -> Divergence | None:
    """The closed form in torch's registry, if there is one."""
    try:
        return exact(kl_divergence(q, p))
    except NotImplementedError:
        return None


def _entry_by_entry(q: Distribution, p: Distribution, recurse: Recurse) -> Divergence | None:
    """The sum over the independent entries of q and p, each by its closed form, integral or sum."""
    if not (isinstance(q, Independent) and isinstance(p, Independent)):
        return None
    if q.base_dist.event_shape != p.base_dist.event_shape:
        return None
    each = recurse(q.base_dist, p.base_dist)
    dims = tuple(range(-q.reinterpreted_batch_ndims, 0))
    # Monte Carlo draws the whole vector instead: the errors of entries would be correlated and could not be added
    return None if each.kind == "Monte Carlo" else each.map(lambda v: v.sum(dims), lambda e: e.sum(dims))


def _to_group_lasso(q: Distribution, p: Distribution, recurse: Recurse) -> Divergence | None:
    """KL of any Gaussian vector to the group lasso prior, with E||w|| by quadrature."""
    if not (isinstance(p, GroupLasso) and is_gaussian(q)):
        return None
    norm, error = (t.to(p.rate.dtype) for t in expected_norm(q))
    return Divergence(p.rate * norm + p.log_normaliser - q.entropy(), "quadrature", (p.rate * error).detach())


def _by_quadrature(q: Distribution, p: Distribution, recurse: Recurse) -> Divergence | None:
    """The integral over the real line, or infinity where it does not converge."""
    if not over_a_line(q, p):
        return None
    value, error = improper_integral(*_terms(q, p), q, p)
    return Divergence(value.to(dtype_of(q)), "quadrature", error.to(dtype_of(q)))


def _by_sum(q: Distribution, p: Distribution, recurse: Recurse) -> Divergence | None:
    """The sum over the classes or counts of q, or None if they cannot be listed."""
    return over_labels(*_terms(q, p), q, p)


def _terms(q: Distribution, p: Distribution) -> tuple[Function, Function]:
    """The integrand q (log q - log p), and the logarithm of the bound q (1 + |log q - log p|) on its size.

    Both have a finite integral for the same pairs, since q itself is integrable. The bound has the added 1 because
    the log ratio may be 0 or rounding error, whose logarithm says nothing about the tail.
    """

    def terms(x: Tensor) -> Tensor:
        return relative_entropy(log_density(q, x), log_density(p, x))

    def log_size(x: Tensor) -> Tensor:
        log_q = log_density(q, x)
        return log_q + (log_q - log_density(p, x)).abs().log1p()

    return terms, log_size


def relative_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return q (log q - log p), with value and gradient 0 where q is 0."""
    mass = log_q.exp()
    inside = mass > 0
    return mass * torch.where(inside, torch.where(inside, log_q, 0.0) - torch.where(inside, log_p, 0.0), 0.0)


def _by_monte_carlo(q: Distribution, p: Distribution, samples: int, seed: int) -> Divergence:
    """The average of log q - log p over draws of q."""
    x = draws(q, samples, seed, "kl")
    log_q = q.log_prob(x)
    value, error = mean_and_error(with_score(log_q - log_density(p, x), log_q, q))
    return Divergence(value, "Monte Carlo", error)
