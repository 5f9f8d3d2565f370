"""Closed forms of KL(q || p) that torch lacks, added to torch's own registry, so that `kl_divergence` knows them too.

The Gaussian's cross-entropies come from its absolute moments (`hypergeometric`): for w ~ N(mu, sigma^2),

    generalised Gaussian   E|w/a|^p + log(2 a Gamma(1 + 1/p)),
    log-uniform            E log|w|, up to the constant that an improper density leaves open,
    group lasso            lambda E||w|| + log Z, closed where q is isotropic (`norms`),

and the Laplace's and the uniform's are elementary. From each the entropy of q is taken.
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

from priory.distributions import GeneralisedGaussian, GroupLasso, LogUniform
from priory.divergences.hypergeometric import absolute_moment, log_moment
from priory.divergences.norms import expected_norm, is_gaussian, isotropic

if TYPE_CHECKING:
    from torch import Tensor

PSI_HALF = -1.9635100260214235  # digamma(1/2) = -gamma - 2 log 2


@register_kl(Normal, GeneralisedGaussian)
def normal_to_generalised_gaussian(q: Normal, p: GeneralisedGaussian) -> Tensor:
    """-H(q) + E|w/a|^p + log(2 a Gamma(1 + 1/p))."""
    return absolute_moment(q.loc / p.scale, q.scale / p.scale, p.power) + p.log_normaliser - q.entropy()


@register_kl(Normal, LogUniform)
def normal_to_log_uniform(q: Normal, p: LogUniform) -> Tensor:
    """-H(q) + E log|w|, which depends on mu / sigma alone."""
    x = 0.5 * (q.loc / q.scale).square()
    value = 0.5 * (log_moment(x) + PSI_HALF - math.log(math.pi) - 1)
    return value.expand(torch.broadcast_shapes(value.shape, p.batch_shape))


@register_kl(Laplace, Normal)
def laplace_to_normal(q: Laplace, p: Normal) -> Tensor:
    """-H(q) + [(m_q - m_p)^2 + 2 b^2] / (2 s^2) + log(2 pi s^2) / 2, with no difference of large squares."""
    square = ((q.loc - p.loc) / p.scale).square() + 2 * (q.scale / p.scale).square()
    return 0.5 * square + p.scale.log() + 0.5 * math.log(2 * math.pi) - q.entropy()


@register_kl(Uniform, Laplace)
def uniform_to_laplace(q: Uniform, p: Laplace) -> Tensor:
    """-H(q) + E|w - m| / b + log(2 b), for q = U(c - h, c + h)."""
    offset, half = ((q.low + q.high) / 2 - p.loc).abs(), (q.high - q.low) / 2
    distance = torch.where(offset >= half, offset, (offset.square() + half.square()) / (2 * half))
    return distance / p.scale + (2 * p.scale).log() - q.entropy()


@register_kl(Independent, MultivariateNormal)
@register_kl(Independent, LowRankMultivariateNormal)
def independent_to_joint(q: Independent, p: Any) -> Tensor:
    """A factorised Gaussian against a correlated one."""
    return kl_divergence(_joint(q), p)


@register_kl(MultivariateNormal, Independent)
@register_kl(LowRankMultivariateNormal, Independent)
def joint_to_independent(q: Any, p: Independent) -> Tensor:
    """A correlated Gaussian against a factorised one, for which its variances are enough."""
    if not is_gaussian(p):
        raise NotImplementedError
    square = ((q.loc - p.mean) / p.stddev).square() + q.variance / p.variance
    log_normaliser = (p.stddev.log() + 0.5 * math.log(2 * math.pi)).sum(-1)
    return 0.5 * square.sum(-1) + log_normaliser - q.entropy()


@register_kl(Independent, GroupLasso)
@register_kl(MultivariateNormal, GroupLasso)
@register_kl(LowRankMultivariateNormal, GroupLasso)
def gaussian_to_group_lasso(q: Any, p: GroupLasso) -> Tensor:
    """-H(q) + lambda E||w|| + log Z for an isotropic q."""
    if not (is_gaussian(q) and isotropic(q)):
        raise NotImplementedError
    return p.rate * expected_norm(q)[0].to(p.rate.dtype) + p.log_normaliser - q.entropy()


def _joint(q: Independent) -> MultivariateNormal:
    if not is_gaussian(q):
        raise NotImplementedError
    return MultivariateNormal(q.mean, scale_tril=torch.diag_embed(q.stddev), validate_args=False)
