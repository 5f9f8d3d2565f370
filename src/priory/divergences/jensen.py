"""The Jensen-Shannon divergence JS(q, p) = a KL(q || m) + (1 - a) KL(p || m), with m = a q + (1 - a) p, in nats.

It is finite for every pair of distributions and at most -a log a - (1 - a) log(1 - a). For a = 1/2 it is symmetric and
at most log 2 (Lin, 1991, "Divergence Measures Based on the Shannon Entropy").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributions import Distribution

from priory.core.errors import require
from priory.divergences.densities import dtype_of, log_density
from priory.divergences.kullback_leibler import relative_entropy
from priory.divergences.monte_carlo import draws, mean_and_error, with_score
from priory.divergences.quadrature import integrate, over_a_line
from priory.divergences.ratios import check_weight
from priory.divergences.result import DEFAULT_SAMPLES, KINDS_BY_ACCURACY, Divergence, check_pair
from priory.divergences.sums import over_labels

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def jensen_shannon(
    q: Distribution, p: Distribution, weight: float = 0.5, samples: int = DEFAULT_SAMPLES, seed: int = 0
) -> Divergence:
    """Compute the Jensen-Shannon divergence of two distributions, in nats.

        JS(q, p) = a KL(q || m) + (1 - a) KL(p || m),    m = a q + (1 - a) p

    It is exact for distributions over classes, a truncated sum over counts, an integral over the real line, and a Monte
    Carlo estimate otherwise.

    Args:
        q: A torch distribution.
        p: A torch distribution with the event shape of `q` and a batch shape that broadcasts.
        weight: Weight a of `q` in the mixture m, between 0 and 1. Default: 0.5.
        samples: Number of draws of each distribution for Monte Carlo, an integer >= 2. Default: 10,000.
        seed: Seed of the draws. Default: 0.

    Returns:
        The value, how it was computed, and its error, each with the broadcast batch shape.

    Raises:
        InputError: If a distribution is improper, if shapes do not match, or if `weight` or `samples` is out of range.

    Example:
        >>> from torch.distributions import Uniform
        >>> round(float(jensen_shannon(Uniform(0.0, 1.0), Uniform(2.0, 3.0))), 6)  # disjoint supports: log 2
        0.693147

    References:
        Lin (1991), Divergence measures based on the Shannon entropy.
    """
    check_pair("jensen_shannon", q, p, samples)
    proper = not getattr(p, "improper", False)
    require(proper, "p", "jensen_shannon", "be a proper distribution, which can be sampled", repr(p))
    check_weight(weight, "jensen_shannon")
    parts = ((q, p, weight, "q"), (p, q, 1 - weight, "p"))
    if over_a_line(q, p) and over_a_line(p, q):
        to_q, to_p = (_by_quadrature(*part) for part in parts)
    else:
        found = [_by_sum(*part) for part in parts]
        to_q, to_p = (sum_ or _by_monte_carlo(*part, samples, seed) for sum_, part in zip(found, parts, strict=True))
    value = weight * to_q.value + (1 - weight) * to_p.value
    # errors of quadrature and of sums may have the same sign, so they add; Monte Carlo errors are independent
    kind = max(to_q.kind, to_p.kind, key=KINDS_BY_ACCURACY.index)
    add = torch.hypot if kind == "Monte Carlo" else torch.add
    return Divergence(value, kind, add(weight * to_q.error, (1 - weight) * to_p.error))


def _terms(one: Distribution, other: Distribution, a: float) -> Callable[[Tensor], Tensor]:
    """The integrand of KL(one || a one + (1 - a) other)."""

    def terms(x: Tensor) -> Tensor:
        log_one, log_other = log_density(one, x), log_density(other, x)
        return relative_entropy(log_one, _log_mixture(log_one, log_other, a))

    return terms


def _by_quadrature(one: Distribution, other: Distribution, a: float, name: str) -> Divergence:
    """KL(one || mixture) as an integral over the real line."""
    value, error = integrate(_terms(one, other, a), one, other)
    return Divergence(value.to(dtype_of(one)), "quadrature", error.to(dtype_of(one)))


def _by_sum(one: Distribution, other: Distribution, a: float, name: str) -> Divergence | None:
    """KL(one || mixture) as a sum over classes or counts, or None if the support cannot be listed."""
    return over_labels(_terms(one, other, a), lambda x: log_density(one, x), one, other)


def _by_monte_carlo(one: Distribution, other: Distribution, a: float, name: str, samples: int, seed: int) -> Divergence:
    """KL(one || mixture) from draws of `one`."""
    x = draws(one, samples, seed, "jensen_shannon", name)
    log_one = one.log_prob(x)
    each = log_one - _log_mixture(log_one, log_density(other, x), a)
    value, error = mean_and_error(with_score(each, log_one, one))
    return Divergence(value, "Monte Carlo", error)


def _log_mixture(log_one: Tensor, log_other: Tensor, a: float) -> Tensor:
    """log(a one + (1 - a) other) from the two log densities."""
    return torch.logaddexp(log_one + math.log(a), log_other + math.log(1 - a))
