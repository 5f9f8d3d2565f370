"""The Kullback-Leibler divergence KL(q || p) = E_q[log q(x) - log p(x)], in nats.

For two Gaussians, KL(q || p) = log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from priory.errors import require, whole

SAMPLES = 10_000


@dataclass(frozen=True)
class Divergence:
    """A divergence in nats: `kind` is "exact" or "Monte Carlo", `error` its standard error (0 if exact)."""

    value: Tensor
    kind: str
    error: Tensor

    def __float__(self) -> float:
        return float(self.value)


def kl(q: Distribution, p: Distribution, samples: int = SAMPLES) -> Divergence:
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
    try:
        value = kl_divergence(q, p)
        return Divergence(value, "exact", torch.zeros_like(value))
    except NotImplementedError:
        draw = q.rsample if q.has_rsample else q.sample
        x = draw(torch.Size([samples]))
        each = q.log_prob(x) - p.log_prob(x)
        return Divergence(each.mean(0), "Monte Carlo", each.std(0) / samples**0.5)
