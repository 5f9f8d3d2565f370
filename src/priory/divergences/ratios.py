"""Divergences estimated from log ratios r = log q(w) - log p(w) at draws of q, for objectives that replace the KL.

    KL(q || p)          E_q[r]
    Renyi-alpha         log E_q[e^{(alpha - 1) r}] / (alpha - 1)        (Li and Turner, 2016, "Renyi Divergence
                                                                         Variational Inference")
    KL(p || q)          E_q[-r e^{-r}]
    Jensen-Shannon      a KL(q || m) + (1 - a) KL(p || m),  m = a q + (1 - a) p

Generalised variational inference replaces the KL by any of them (Knoblauch, Jewson and Damoulas, 2022, "An
Optimization-Centric View on Bayes' Rule"). The last two weight the draws by p / q. The weights are divided by their
mean, so they stay bounded and the normalising constant of p cancels, at the price of a bias of order 1 / draws.
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
    """Base class of divergences that can be estimated from log ratios at draws of q.

    An instance can be passed as `divergence=` to a variational method, where it replaces the KL divergence.
    """

    @abstractmethod
    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        """Estimate the divergence from log ratios at draws of q.

        Args:
            r: Log ratios log q(w) - log p(w), (S, *B).
            weights: Weights of the draws, (S, *B), which sum to 1 over S. Default: None, for equal weights.

        Returns:
            The estimate in nats, (*B,).
        """

    @abstractmethod
    def between(self, q: Normal, p: Normal) -> Tensor | None:
        """Return the closed form for two factorised Gaussians, one value per coordinate.

        Args:
            q: Factors of q.
            p: Factors of p.

        Returns:
            The divergence of each coordinate in nats; their sum is that of the whole vector. None if there is no closed
            form.
        """


@dataclass(frozen=True)
class KL(Ratio):
    """The KL divergence KL(q || p), which is mode-seeking in q.

    Example:
        >>> KL().of_ratios(torch.tensor([0.0, 1.0]))
        tensor(0.5000)
    """

    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        return _mean(r, weights)

    def between(self, q: Normal, p: Normal) -> Tensor:
        return kl_divergence(q, p)


@dataclass(frozen=True)
class Renyi(Ratio):
    """The Renyi divergence of order alpha, log E_q[e^{(alpha - 1) r}] / (alpha - 1).

    Below alpha = 1 it is more mass-covering than the KL, above 1 more mode-seeking.

    Args:
        alpha: Order, a positive number other than 1.

    Raises:
        InputError: If `alpha` is not a positive number other than 1.

    Example:
        >>> Renyi(2.0).of_ratios(torch.tensor([0.0, 0.0]))
        tensor(0.)

    References:
        Li and Turner (2016), Renyi divergence variational inference.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_alpha(self.alpha, "Renyi")

    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        return _log_mean_exp((self.alpha - 1) * r, weights) / (self.alpha - 1)

    def between(self, q: Normal, p: Normal) -> Tensor:
        """Return the closed form for two factorised Gaussians, one value per coordinate, infinite unless v > 0.

            log(s_p / s_q) + log(s_p^2 / v) / (2 (alpha - 1)) + alpha (m_q - m_p)^2 / (2 v)

        Here v = alpha s_p^2 + (1 - alpha) s_q^2.
        """
        a, ratio = self.alpha, (q.scale / p.scale).square()
        v = a + (1 - a) * ratio  # in units of the variance of p
        known = v > 0
        v = torch.where(known, v, 1.0)
        value = -0.5 * ratio.log() - v.log() / (2 * (a - 1)) + a * ((q.loc - p.loc) / p.scale).square() / (2 * v)
        return torch.where(known, value, math.inf)


@dataclass(frozen=True)
class ForwardKL(Ratio):
    """The forward KL divergence KL(p || q), which is mass-covering in q.

    It is estimated from draws of q by self-normalised importance weights.

    Example:
        >>> ForwardKL().of_ratios(torch.tensor([0.5, 0.5]))  # equal importance weights
        tensor(0.)
    """

    def of_ratios(self, r: Tensor, weights: Tensor | None = None) -> Tensor:
        r = _normalised(r, weights)
        return _mean(-r * (-r).exp(), weights)

    def between(self, q: Normal, p: Normal) -> Tensor:
        return kl_divergence(p, q)


@dataclass(frozen=True)
class JensenShannon(Ratio):
    """The Jensen-Shannon divergence a KL(q || m) + (1 - a) KL(p || m) with m = a q + (1 - a) p, which is bounded.

    It is estimated from draws of q by self-normalised importance weights.

    Args:
        weight: Weight a of q in the mixture m, between 0 and 1. Default: 0.5.

    Raises:
        InputError: If `weight` is not between 0 and 1.

    Example:
        >>> JensenShannon().of_ratios(torch.tensor([0.5, 0.5]))
        tensor(0.)

    References:
        Lin (1991), Divergence measures based on the Shannon entropy.
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
    """Raise an InputError unless alpha is a positive number other than 1."""
    ok = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and 0 < alpha < math.inf and alpha != 1
    require(ok, "alpha", owner, "be a positive number other than 1 (for 1 use the KL)", alpha)


def check_weight(weight: Any, owner: str) -> None:
    """Raise an InputError unless the mixture weight is strictly between 0 and 1."""
    ok = isinstance(weight, (int, float)) and 0 < weight < 1
    require(ok, "weight", owner, "be a number between 0 and 1", weight)


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted mean over the leading dimension."""
    return values.mean(0) if weights is None else (weights * values).sum(0)


def _log_mean_exp(values: Tensor, weights: Tensor | None) -> Tensor:
    """Logarithm of the weighted mean of exp(values) over the leading dimension."""
    if weights is None:
        return torch.logsumexp(values, 0) - math.log(values.shape[0])
    return torch.logsumexp(values + weights.log(), 0)


def _normalised(r: Tensor, weights: Tensor | None) -> Tensor:
    """Log ratios shifted so that the importance weights p / q = e^-r average to 1."""
    return r + _log_mean_exp(-r, weights)
