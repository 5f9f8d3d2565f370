"""Renyi's divergence of order alpha, D(q || p) = log int q^alpha p^(1 - alpha) / (alpha - 1), in nats.

It increases with alpha, and its limit for alpha -> 1 is the KL. For two Gaussians, with
S = alpha S_p + (1 - alpha) S_q,

    D = alpha/2 (m_q - m_p)' S^-1 (m_q - m_p) - log(|S| / (|S_q|^(1 - alpha) |S_p|^alpha)) / (2 (alpha - 1)),

which is infinite unless S is positive definite (Gil, Alajaji and Linder, 2013, "Renyi Divergence Measures for Commonly
Used Univariate Continuous Distributions").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from priory.core.linalg import try_cholesky
from priory.divergences.densities import dtype_of, is_discrete, log_density
from priory.divergences.monte_carlo import draws
from priory.divergences.norms import is_gaussian
from priory.divergences.quadrature import over_a_line
from priory.divergences.ratios import Renyi, check_alpha
from priory.divergences.result import DEFAULT_SAMPLES, Divergence, check_pair, exact
from priory.divergences.sums import log_peak, over_labels
from priory.divergences.tails import improper_integral

if TYPE_CHECKING:
    from collections.abc import Callable


def renyi(q: Distribution, p: Distribution, alpha: float, samples: int = DEFAULT_SAMPLES, seed: int = 0) -> Divergence:
    """Compute the Renyi divergence of order alpha, D(q || p) = log int q^alpha p^(1 - alpha) / (alpha - 1), in nats.

    It is exact for Gaussians and for distributions over classes, a truncated sum over counts, an integral over the real
    line, and a Monte Carlo estimate otherwise.

    Args:
        q: A proper torch distribution.
        p: A torch distribution with the event shape of `q` and a batch shape that broadcasts.
        alpha: Order, a positive number other than 1; for 1 use `kl`.
        samples: Number of draws for Monte Carlo, an integer >= 2. Default: 10,000.
        seed: Seed of the draws. Default: 0.

    Returns:
        The value, how it was computed, and its error, each with the broadcast batch shape.

    Raises:
        InputError: If `q` is improper, if shapes do not match, or if `alpha` or `samples` is out of range.

    Example:
        >>> one = torch.tensor(1.0, dtype=torch.float64)
        >>> round(float(renyi(Normal(0 * one, one), Normal(one, one), alpha=0.5)), 6)  # alpha / 2 at a distance of 1
        0.25

    References:
        Gil, Alajaji and Linder (2013), Renyi divergence measures for commonly used univariate continuous distributions.
    """
    check_pair("renyi", q, p, samples)
    check_alpha(alpha, "renyi")
    if isinstance(q, Normal) and isinstance(p, Normal):
        return exact(Renyi(alpha).between(q, p))
    if is_gaussian(q) and is_gaussian(p):
        return exact(_gaussians(q, p, alpha))
    if isinstance(q, Independent) and isinstance(p, Independent) and q.base_dist.event_shape == p.base_dist.event_shape:
        each = renyi(q.base_dist, p.base_dist, alpha, samples, seed)
        dims = tuple(range(-q.reinterpreted_batch_ndims, 0))
        if each.kind != "Monte Carlo":
            return each.map(lambda v: v.sum(dims), lambda e: e.sum(dims))
    if over_a_line(q, p):
        log_size = _log_affinity(q, p, alpha)
        affinity, error = improper_integral(lambda x: log_size(x).exp(), log_size, q, p)
        return _of_affinity(Divergence(affinity, "quadrature", error), alpha, dtype_of(q))
    if is_discrete(q):
        log_size = _log_affinity(q, p, alpha)
        largest = log_peak(log_size, q, p)
        summed = over_labels(lambda x: (log_size(x) - largest).exp(), log_size, q, p)
        if summed is not None:
            return _of_affinity(summed, alpha, dtype_of(q), largest)
    return _by_monte_carlo(q, p, alpha, samples, seed)


def _gaussians(q: Any, p: Any, alpha: float) -> Tensor:
    """The closed form for two Gaussian vectors, infinite where S is not positive definite."""
    if isinstance(q, Independent) and isinstance(p, Independent):
        return Renyi(alpha).between(q.base_dist, p.base_dist).sum(-1)  # pyright: ignore[reportArgumentType]
    cov_q, cov_p = _covariance(q), _covariance(p)
    root, known = try_cholesky(alpha * cov_p + (1 - alpha) * cov_q)
    root = torch.where(known[..., None, None], root, torch.eye(root.shape[-1]).to(root))
    solved = torch.linalg.solve_triangular(root, (q.mean - p.mean).unsqueeze(-1), upper=False).squeeze(-1)
    log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    log_ratio = log_det - (1 - alpha) * torch.logdet(cov_q) - alpha * torch.logdet(cov_p)
    value = 0.5 * alpha * solved.square().sum(-1) - log_ratio / (2 * (alpha - 1))
    return torch.where(known, value, math.inf)


def _covariance(d: Any) -> Tensor:
    """The covariance matrix of a factorised or correlated Gaussian."""
    return torch.diag_embed(d.variance) if isinstance(d, Independent) else d.covariance_matrix


def _log_affinity(q: Distribution, p: Distribution, alpha: float) -> Callable[[Tensor], Tensor]:
    """The logarithm of the integrand, log(q^alpha p^(1 - alpha)), as a function of x."""

    def log_size(x: Tensor) -> Tensor:
        log_q, log_p = log_density(q, x), log_density(p, x)
        inside = log_q > -math.inf
        exponent = alpha * torch.where(inside, log_q, 0.0) + (1 - alpha) * torch.where(inside, log_p, 0.0)
        return torch.where(inside, exponent, -math.inf)

    return log_size


def _of_affinity(affinity: Divergence, alpha: float, dtype: torch.dtype, shift: Tensor | float = 0.0) -> Divergence:
    """The divergence (log affinity + shift) / (alpha - 1), with the error propagated to first order."""
    value = (affinity.value.log() + shift) / (alpha - 1)
    error = affinity.error / (affinity.value * abs(alpha - 1))
    error = torch.where(torch.isfinite(value), error, 0.0).detach()
    return Divergence(value.to(dtype), affinity.kind, error.to(dtype))


def _by_monte_carlo(q: Distribution, p: Distribution, alpha: float, samples: int, seed: int) -> Divergence:
    """The estimate from log ratios at draws of q, with the standard error of the mean propagated to first order."""
    x = draws(q, samples, seed, "renyi")
    log_q = q.log_prob(x)
    r = log_q - log_density(p, x)
    if not q.has_rsample and log_q.requires_grad:
        # score-function term of the gradient of E[e^{(alpha - 1) r}]; the value is unchanged
        r = r + (log_q - log_q.detach()) / (alpha - 1)
    value = Renyi(alpha).of_ratios(r)
    share = torch.softmax((alpha - 1) * r.detach(), 0) * samples  # (S, *B), with mean 1
    error = share.std(0) / (samples**0.5 * abs(alpha - 1))
    return Divergence(value, "Monte Carlo", torch.where(torch.isfinite(value), error, 0.0))
