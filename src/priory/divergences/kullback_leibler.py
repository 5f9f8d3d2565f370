"""The Kullback-Leibler divergence KL(q || p) = E_q[log q(x) - log p(x)], in nats.

For two Gaussians, KL(q || p) = log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from priory.data import swapped
from priory.errors import require, whole
from priory.streams import stream

SAMPLES = 10_000


@dataclass(frozen=True)
class Divergence:
    """A divergence in nats: `kind` is "exact" or "Monte Carlo", `error` its standard error (0 if exact)."""

    value: Tensor
    kind: str
    error: Tensor

    def __float__(self) -> float:
        return float(self.value)


def kl(q: Distribution, p: Distribution, samples: int = SAMPLES, seed: int = 0) -> Divergence:
    """KL(q || p): torch's closed form where there is one, else a Monte Carlo estimate with its standard
    error.

    >>> from torch.distributions import Normal
    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(float(kl(Normal(0 * one, one), Normal(one, 2 * one))), 6)
    0.443147
    """
    for name, d in (("q", q), ("p", p)):
        require(isinstance(d, Distribution), name, "kl", "be a torch distribution", type(d).__name__)
    require(whole(samples, 2), "samples", "kl", "be a whole number from 2", samples)
    same = tuple(q.event_shape) == tuple(p.event_shape)
    shapes = (tuple(q.event_shape), tuple(p.event_shape))
    require(same, "p", "kl", "be over the same things as q, with the same event shape", shapes)
    try:
        value = kl_divergence(q, p)
        return Divergence(value, "exact", torch.zeros_like(value))
    except NotImplementedError:
        pass
    draw = q.rsample if q.has_rsample else q.sample
    with swapped(stream(seed, "kl")):  # torch's distributions draw from the global stream alone
        x = draw(torch.Size([samples]))
    inside: Any = p.support
    log_p = torch.where(inside.check(x), _log_prob(p, x), -torch.inf)
    each = q.log_prob(x) - log_p
    value = each.mean(0)
    return Divergence(value, "Monte Carlo", torch.where(torch.isfinite(value), each.std(0) / samples**0.5, 0.0))


def _log_prob(p: Distribution, x: Tensor) -> Tensor:
    """log p(x) without torch's check of the support: where x lies outside, the value is not used."""
    checks, p._validate_args = p._validate_args, False
    try:
        return p.log_prob(x)
    finally:
        p._validate_args = checks
