"""Divergences of q from p by the log ratios r = log q(w) - log p(w) at draws of q, for objectives that replace the KL.

    KL(q || p)          E_q[r]
    Renyi-alpha         log E_q[e^{(alpha - 1) r}] / (alpha - 1)        (Li and Turner, 2016, "Renyi Divergence
                                                                         Variational Inference")
    KL(p || q)          E_q[-r e^{-r}]
    Jensen-Shannon      a KL(q || m) + (1 - a) KL(p || m),  m = a q + (1 - a) p

Generalised variational inference puts any of them in the place of the KL (Knoblauch, Jewson and Damoulas, 2022, "An
Optimization-Centric View on Bayes' Rule"). The last two weigh draws by p / q; the weights are divided by their mean, so
that they stay bounded, and p's constant does not matter. The price is a bias of the order of 1 / draws.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from priory.core.errors import require

if TYPE_CHECKING:
    from typing import Any


class Ratio(ABC):
    """A divergence that can be estimated from log ratios at draws of q."""

    @abstractmethod
    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        """The estimate from r (S, *B), (*B,); draws count equally, or with weights (S, *B) that sum to 1 over S."""

    @abstractmethod
    def between(self, q: Normal, p: Normal) -> Tensor | None:
        """The closed form for each coordinate of two factorised Gaussians, to be summed; None where there is none."""


@dataclass(frozen=True)
class KL(Ratio):
    """KL(q || p), which seeks a mode.

    >>> KL().of_ratios(torch.tensor([0.0, 1.0]))
    tensor(0.5000)
    """

    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        return _mean(r, weights)

    def between(self, q: Normal, p: Normal) -> Tensor:
        return kl_divergence(q, p)


@dataclass(frozen=True)
class Renyi(Ratio):
    """Renyi's divergence of order alpha > 0, other than 1: below 1 it covers more than the KL, above 1 less.

    >>> Renyi(2.0).of_ratios(torch.tensor([0.0, 0.0]))
    tensor(0.)
    """

    alpha: float

    def __post_init__(self) -> None:
        check_alpha(self.alpha, "Renyi")

    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        return _log_mean_exp((self.alpha - 1) * r, weights) / (self.alpha - 1)

    def between(self, q: Normal, p: Normal) -> Tensor:
        """log(s_p / s_q) + log(s_p^2 / v) / (2 (alpha - 1)) + alpha (m_q - m_p)^2 / (2 v), infinite unless v > 0.

        Here v = alpha s_p^2 + (1 - alpha) s_q^2.
        """
        a, ratio = self.alpha, (q.scale / p.scale).square()
        v = a + (1 - a) * ratio  # in units of p's variance
        known = v > 0
        v = torch.where(known, v, 1.0)
        value = -0.5 * ratio.log() - v.log() / (2 * (a - 1)) + a * ((q.loc - p.loc) / p.scale).square() / (2 * v)
        return torch.where(known, value, math.inf)


@dataclass(frozen=True)
class ForwardKL(Ratio):
    """KL(p || q), which covers p.

    >>> ForwardKL().of_ratios(torch.tensor([0.5, 0.5]))  # no draw weighs more than another
    tensor(0.)
    """

    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        r = _normalised(r, weights)
        return _mean(-r * (-r).exp(), weights)

    def between(self, q: Normal, p: Normal) -> Tensor:
        return kl_divergence(p, q)


@dataclass(frozen=True)
class JensenShannon(Ratio):
    """The Jensen-Shannon divergence, which is bounded; `weight` is that of q in the mixture.

    >>> JensenShannon().of_ratios(torch.tensor([0.5, 0.5]))
    tensor(0.)
    """

    weight: float = 0.5

    def __post_init__(self) -> None:
        check_weight(self.weight, "JensenShannon")

    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        a, r = self.weight, _normalised(r, weights)
        log_m = torch.logaddexp(torch.full_like(r, math.log(a)), math.log(1 - a) - r)  # log m / q
        return _mean(-a * log_m + (1 - a) * (-r).exp() * (-r - log_m), weights)

    def between(self, q: Normal, p: Normal) -> None:
        return None


def check_alpha(alpha: Any, owner: str) -> None:
    """Refuse an order that has no divergence."""
    ok = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and 0 < alpha < math.inf and alpha != 1
    require(ok, "alpha", owner, "be a positive number other than 1, where it is the KL", alpha)


def check_weight(weight: Any, owner: str) -> None:
    """Refuse a weight that leaves no mixture."""
    ok = isinstance(weight, (int, float)) and 0 < weight < 1
    require(ok, "weight", owner, "be a number between 0 and 1", weight)


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:
    return values.mean(0) if weights is None else (weights * values).sum(0)


def _log_mean_exp(values: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return torch.logsumexp(values, 0) - math.log(values.shape[0])
    return torch.logsumexp(values + weights.log(), 0)


def _normalised(r: Tensor, weights: Tensor | None) -> Tensor:
    """Log ratios shifted so that p / q = e^-r is 1 on average."""
    return r + _log_mean_exp(-r, weights)
