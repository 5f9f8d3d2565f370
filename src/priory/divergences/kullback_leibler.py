"""The Kullback-Leibler divergence KL(q || p) = E_q[log q(x) - log p(x)], in nats.

For two Gaussians, KL(q || p) = log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2. The rules below are asked in
turn, from what is known exactly to what can be estimated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, kl_divergence

import priory.divergences.closed_forms  # noqa: F401 - fills torch's registry
from priory.distributions import GroupLasso, SpikeAndSlab
from priory.divergences.densities import discrete, dtype_of, interval, log_density
from priory.divergences.monte_carlo import draws, mean_and_error, with_score
from priory.divergences.norms import expected_norm, is_gaussian
from priory.divergences.quadrature import over_a_line
from priory.divergences.result import SAMPLES, Divergence, check_pair, exact
from priory.divergences.sums import over_labels
from priory.divergences.tails import improper_integral

if TYPE_CHECKING:
    from collections.abc import Callable

    Again = Callable[[Distribution, Distribution], Divergence]
    Function = Callable[[Tensor], Tensor]


def kl(q: Distribution, p: Distribution, samples: int = SAMPLES, seed: int = 0) -> Divergence:
    """KL(q || p), and how it was found: "exact", "quadrature" over a line, "sum" over counts, or "Monte Carlo".

    Monte Carlo takes `samples` draws. KL(p || q), which covers where this one seeks, is `kl(p, q)`. It is infinite
    where q reaches outside of p's support, and where q's tails are too heavy for p's, as a Cauchy's for a Gaussian.

    >>> from torch.distributions import Normal, StudentT
    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(float(kl(Normal(0 * one, one), Normal(one, 2 * one))), 6)
    0.443147
    >>> kl(Normal(0 * one, one), StudentT(3 * one)).kind
    'quadrature'
    """
    check_pair("kl", q, p, samples)

    def again(q: Distribution, p: Distribution) -> Divergence:
        return kl(q, p, samples, seed)

    for rule in (_with_spikes, _uncovered, _closed_form, _entry_by_entry, _to_group_lasso, _on_a_line, _summed):
        found = rule(q, p, again)
        if found is not None:
            return found
    return _from_draws(q, p, samples, seed)


def _with_spikes(q: Distribution, p: Distribution, again: Again) -> Divergence | None:
    """Spikes are compared as coins and slabs as densities: KL = KL(pi_q || pi_p) + pi_q KL(slab_q || slab_p)."""
    if not isinstance(p, SpikeAndSlab):
        if not isinstance(q, SpikeAndSlab):
            return None
        slab = again(q.slab, p)
        return slab.map(lambda value: torch.where(q.weight < 1, math.inf, value), lambda error: error)
    if not isinstance(q, SpikeAndSlab):  # a q without an atom gives the spike no mass
        return again(q, p.slab).map(lambda value: value - p.weight.log(), lambda error: error)
    xlogy, keeps = torch.special.xlogy, q.weight > 0
    coin = xlogy(q.weight, q.weight) + xlogy(1 - q.weight, 1 - q.weight)
    coin = coin - xlogy(q.weight, p.weight) - xlogy(1 - q.weight, 1 - p.weight)
    slab = again(q.slab, p.slab)
    # a slab that is never drawn counts for nothing, even where its divergence is infinite
    return slab.map(lambda value: coin + q.weight * torch.where(keeps, value, 0.0), lambda error: q.weight * error)


def _uncovered(q: Distribution, p: Distribution, again: Again) -> Divergence | None:
    """It is infinite where q has mass outside of p's support, and between labels and numbers."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    outside = torch.tensor(discrete(q) != discrete(p))
    ends = (interval(q), interval(p)) if q.event_shape == () else (None, None)
    if ends[0] is not None and ends[1] is not None:
        outside = (ends[0][0] < ends[1][0]) | (ends[0][1] > ends[1][1])
    if not bool(outside.all()):
        return None
    return exact(torch.full(shape, math.inf, dtype=dtype_of(q)))


def _closed_form(q: Distribution, p: Distribution, again: Again) -> Divergence | None:
    try:
        return exact(kl_divergence(q, p))
    except NotImplementedError:
        return None


def _entry_by_entry(q: Distribution, p: Distribution, again: Again) -> Divergence | None:
    """Independent entries add up, each with its own closed form or integral."""
    if not (isinstance(q, Independent) and isinstance(p, Independent)):
        return None
    if q.base_dist.event_shape != p.base_dist.event_shape:
        return None
    each = again(q.base_dist, p.base_dist)
    dims = tuple(range(-q.reinterpreted_batch_ndims, 0))
    # draws of the whole give one standard error, where those of the entries would be correlated
    return None if each.kind == "Monte Carlo" else each.map(lambda v: v.sum(dims), lambda e: e.sum(dims))


def _to_group_lasso(q: Distribution, p: Distribution, again: Again) -> Divergence | None:
    if not (isinstance(p, GroupLasso) and is_gaussian(q)):
        return None
    norm, error = (t.to(p.rate.dtype) for t in expected_norm(q))
    return Divergence(p.rate * norm + p.log_normaliser - q.entropy(), "quadrature", (p.rate * error).detach())


def _on_a_line(q: Distribution, p: Distribution, again: Again) -> Divergence | None:
    if not over_a_line(q, p):
        return None

    value, error = improper_integral(*_terms(q, p), q, p)
    return Divergence(value.to(dtype_of(q)), "quadrature", error.to(dtype_of(q)))


def _summed(q: Distribution, p: Distribution, again: Again) -> Divergence | None:
    return over_labels(*_terms(q, p), q, p)


def _terms(q: Distribution, p: Distribution) -> tuple[Function, Function]:
    """q (log q - log p), and the logarithm of q (1 + |log q - log p|): where its integral exists, so does the first's.

    The one is added as q alone is integrable, and the ratio may be 0 or rounding.
    """

    def terms(x: Tensor) -> Tensor:
        return relative_entropy(log_density(q, x), log_density(p, x))

    def log_size(x: Tensor) -> Tensor:
        log_q = log_density(q, x)
        return log_q + (log_q - log_density(p, x)).abs().log1p()

    return terms, log_size


def relative_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """q (log q - log p), which is 0 where q is, in value and in gradient."""
    mass = log_q.exp()
    there = mass > 0
    return mass * torch.where(there, torch.where(there, log_q, 0.0) - torch.where(there, log_p, 0.0), 0.0)


def _from_draws(q: Distribution, p: Distribution, samples: int, seed: int) -> Divergence:
    x = draws(q, samples, seed, "kl")
    log_q = q.log_prob(x)
    value, error = mean_and_error(with_score(log_q - log_density(p, x), log_q, q))
    return Divergence(value, "Monte Carlo", error)
