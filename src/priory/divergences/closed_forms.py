"""Closed forms of KL(q || p) that torch lacks, registered with torch, so that `kl_divergence` finds them too.

Each one is the cross-entropy of q and p minus the entropy of q. The Gaussian's cross-entropies follow from its absolute
moments (`core.special`): for w ~ N(mu, sigma^2),

    generalised Gaussian   E|w/a|^p + log(2 a Gamma(1 + 1/p)),
    log-uniform            E log|w|, up to the arbitrary constant of an improper density,
    group lasso            lambda E||w|| + log Z, in closed form where q is isotropic (`norms`).

The cross-entropies of the Laplace and the uniform distribution are elementary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributions import (
    Independent,
    Laplace,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    Uniform,
    kl_divergence,
    register_kl,
)

from priory.core.special import absolute_moment, log_moment
from priory.distributions import GeneralisedGaussian, GroupLasso, LogUniform
from priory.divergences.norms import expected_norm, is_gaussian, isotropic

if TYPE_CHECKING:
    from torch import Tensor

PSI_HALF = -1.9635100260214235  # digamma(1/2) = -gamma - 2 log 2


@register_kl(Normal, GeneralisedGaussian)
def normal_to_generalised_gaussian(q: Normal, p: GeneralisedGaussian) -> Tensor:
    """KL of a Gaussian to a generalised Gaussian: -H(q) + E|w/a|^p + log(2 a Gamma(1 + 1/p))."""
    return absolute_moment(q.loc / p.scale, q.scale / p.scale, p.power) + p.log_normaliser - q.entropy()


@register_kl(Normal, LogUniform)
def normal_to_log_uniform(q: Normal, p: LogUniform) -> Tensor:
    """KL of a Gaussian to the log-uniform prior: -H(q) + E log|w|, a function of mu / sigma alone."""
    x = 0.5 * (q.loc / q.scale).square()
    value = 0.5 * (log_moment(x) + PSI_HALF - math.log(math.pi) - 1)
    return value.expand(torch.broadcast_shapes(value.shape, p.batch_shape))


@register_kl(Laplace, Normal)
def laplace_to_normal(q: Laplace, p: Normal) -> Tensor:
    """KL of a Laplace to a Gaussian: -H(q) + [(m_q - m_p)^2 + 2 b^2] / (2 s^2) + log(2 pi s^2) / 2."""
    square = ((q.loc - p.loc) / p.scale).square() + 2 * (q.scale / p.scale).square()
    return 0.5 * square + p.scale.log() + 0.5 * math.log(2 * math.pi) - q.entropy()


@register_kl(Uniform, Laplace)
def uniform_to_laplace(q: Uniform, p: Laplace) -> Tensor:
    """KL of a uniform to a Laplace: -H(q) + E|w - m| / b + log(2 b), for q = U(c - h, c + h)."""
    offset, half = ((q.low + q.high) / 2 - p.loc).abs(), (q.high - q.low) / 2
    distance = torch.where(offset >= half, offset, (offset.square() + half.square()) / (2 * half))
    return distance / p.scale + (2 * p.scale).log() - q.entropy()


@register_kl(Independent, MultivariateNormal)
@register_kl(Independent, LowRankMultivariateNormal)
def independent_to_joint(q: Independent, p: Any) -> Tensor:
    """KL of a factorised Gaussian to a correlated one."""
    return kl_divergence(_joint(q), p)


@register_kl(MultivariateNormal, Independent)
@register_kl(LowRankMultivariateNormal, Independent)
def joint_to_independent(q: Any, p: Independent) -> Tensor:
    """KL of a correlated Gaussian to a factorised one, which depends on the variances of q and on its entropy."""
    if not is_gaussian(p):
        raise NotImplementedError
    square = ((q.loc - p.mean) / p.stddev).square() + q.variance / p.variance
    log_normaliser = (p.stddev.log() + 0.5 * math.log(2 * math.pi)).sum(-1)
    return 0.5 * square.sum(-1) + log_normaliser - q.entropy()


@register_kl(Independent, GroupLasso)
@register_kl(MultivariateNormal, GroupLasso)
@register_kl(LowRankMultivariateNormal, GroupLasso)
def gaussian_to_group_lasso(q: Any, p: GroupLasso) -> Tensor:
    """KL of an isotropic Gaussian to the group lasso prior: -H(q) + lambda E||w|| + log Z."""
    if not (is_gaussian(q) and isotropic(q)):
        raise NotImplementedError
    return p.rate * expected_norm(q)[0].to(p.rate.dtype) + p.log_normaliser - q.entropy()


def _joint(q: Independent) -> MultivariateNormal:
    """A factorised Gaussian as a MultivariateNormal."""
    if not is_gaussian(q):
        raise NotImplementedError
    return MultivariateNormal(q.mean, scale_tril=torch.diag_embed(q.stddev), validate_args=False)
