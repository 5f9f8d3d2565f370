"""The Jensen-Shannon divergence JS(q, p) = a KL(q || m) + (1 - a) KL(p || m), with m = a q + (1 - a) p, in nats.

It is finite for every pair, at most -a log a - (1 - a) log(1 - a), which is log 2 for a = 1/2, and then symmetric
(Lin, 1991, "Divergence Measures Based on the Shannon Entropy").
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
from priory.divergences.result import KINDS, SAMPLES, Divergence, check_pair
from priory.divergences.sums import over_labels

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def jensen_shannon(
    q: Distribution, p: Distribution, weight: float = 0.5, samples: int = SAMPLES, seed: int = 0
) -> Divergence:
    """The Jensen-Shannon divergence, exact for labels, by quadrature or a sum, else by Monte Carlo; `weight` is q's.

    >>> from torch.distributions import Uniform
    >>> round(float(jensen_shannon(Uniform(0.0, 1.0), Uniform(2.0, 3.0))), 6)  # nothing in common: log 2
    0.693147
    """
    check_pair("jensen_shannon", q, p, samples)
    require(not getattr(p, "improper", False), "p", "jensen_shannon", "be proper, with draws to average over", repr(p))
    check_weight(weight, "jensen_shannon")
    parts = ((q, p, weight, "q"), (p, q, 1 - weight, "p"))
    if over_a_line(q, p) and over_a_line(p, q):
        to_q, to_p = (_on_a_line(*part) for part in parts)
    else:
        found = [_summed(*part) for part in parts]
        to_q, to_p = (sum_ or _from_draws(*part, samples, seed) for sum_, part in zip(found, parts, strict=True))
    value = weight * to_q.value + (1 - weight) * to_p.value
    # errors of quadrature and sums have a sign that is not known; two sets of draws are independent
    kind = max(to_q.kind, to_p.kind, key=KINDS.index)
    add = torch.hypot if kind == "Monte Carlo" else torch.add
    return Divergence(value, kind, add(weight * to_q.error, (1 - weight) * to_p.error))


def _terms(one: Distribution, other: Distribution, a: float) -> Callable[[Tensor], Tensor]:
    """What KL(one || a one + (1 - a) other) is the integral of."""

    def terms(x: Tensor) -> Tensor:
        log_one, log_other = log_density(one, x), log_density(other, x)
        return relative_entropy(log_one, _log_mixture(log_one, log_other, a))

    return terms


def _on_a_line(one: Distribution, other: Distribution, a: float, name: str) -> Divergence:
    value, error = integrate(_terms(one, other, a), one, other)
    return Divergence(value.to(dtype_of(one)), "quadrature", error.to(dtype_of(one)))


def _summed(one: Distribution, other: Distribution, a: float, name: str) -> Divergence | None:
    return over_labels(_terms(one, other, a), lambda x: log_density(one, x), one, other)


def _from_draws(one: Distribution, other: Distribution, a: float, name: str, samples: int, seed: int) -> Divergence:
    x = draws(one, samples, seed, "jensen_shannon", name)
    log_one = one.log_prob(x)
    each = log_one - _log_mixture(log_one, log_density(other, x), a)
    value, error = mean_and_error(with_score(each, log_one, one))
    return Divergence(value, "Monte Carlo", error)


def _log_mixture(log_one: Tensor, log_other: Tensor, a: float) -> Tensor:
    return torch.logaddexp(log_one + math.log(a), log_other + math.log(1 - a))
