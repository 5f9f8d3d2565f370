"""Bounds on the KL between two mixtures of Gaussians, q = sum_i a_i q_i and p = sum_j b_j p_j. It has no closed form.

Expectations of Gaussian components have closed forms, so Jensen's inequality bounds E_{q_i} log p from both sides:

    log sum_j b_j e^{E_{q_i} log p_j}  <=  E_{q_i} log p  <=  log sum_j b_j E_{q_i} p_j.

The same holds with q in place of p, and the difference of a lower and an upper bound is a bound on the KL (Durrieu,
Thiran and Kelly, 2012, "Lower and Upper Bounds for Approximation of the Kullback-Leibler Divergence between Gaussian
Mixture Models"). A second upper bound splits both mixtures into pairs, with shares f_ij of a_i and g_ij of b_j that are
optimised alternately,

    KL(q || p) <= sum_ij f_ij [log(f_ij / g_ij) + KL(q_i || p_j)],    sum_j f_ij = a_i,  sum_i g_ij = b_j,

(Hershey and Olsen, 2007, "Approximating the Kullback Leibler Divergence between Gaussian Mixture Models", section 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MixtureSameFamily, MultivariateNormal, Normal, kl_divergence

from priory.core.errors import require
from priory.divergences.norms import is_gaussian
from priory.divergences.result import check_pair

PAIRING_SWEEPS = 200  # alternating updates of the shares f and g


@dataclass(frozen=True)
class Bounds:
    """A lower and an upper bound on a divergence.

    Attributes:
        lower: Lower bound in nats, (*B,).
        upper: Upper bound in nats, (*B,).
    """

    lower: Tensor
    upper: Tensor


def kl_bounds(q: Distribution, p: Distribution) -> Bounds:
    """Compute a lower and an upper bound on KL(q || p) for Gaussians and mixtures of Gaussians.

    The bounds are closed-form expressions and differentiable; `kl` estimates the value itself.

    Args:
        q: A Gaussian, or a `MixtureSameFamily` of Gaussians: scalar, factorised or correlated.
        p: A distribution of the same kinds, with the event shape of `q` and a batch shape that broadcasts.

    Returns:
        The bounds in nats, (*B,) each.

    Raises:
        InputError: If either distribution is not a Gaussian or a mixture of Gaussians, or if shapes do not match.

    Example:
        >>> from torch.distributions import Categorical
        >>> two = MixtureSameFamily(Categorical(torch.ones(2)), Normal(torch.tensor([-3.0, 3.0]), torch.ones(2)))
        >>> bounds = kl_bounds(two, Normal(torch.tensor(0.0), torch.tensor(3.0)))
        >>> [round(float(b), 2) for b in (bounds.lower, bounds.upper)]
        [0.41, 0.61]

    References:
        Durrieu, Thiran and Kelly (2012), Lower and upper bounds for approximation of the Kullback-Leibler divergence
        between Gaussian mixture models.
        Hershey and Olsen (2007), Approximating the Kullback Leibler divergence between Gaussian mixture models.
    """
    check_pair("kl_bounds", q, p, 2)
    (log_a, q_parts), (log_b, p_parts) = (_components(name, d) for name, d in (("q", q), ("p", p)))
    entropy = q_parts.entropy()  # (*B, I)
    kl_to_q, kl_to_p = _pairwise_kl(q_parts, q_parts), _pairwise_kl(q_parts, p_parts)  # (*B, I, J)
    q_lower = _log_sum(log_a, -kl_to_q) - entropy
    q_upper = _log_sum(log_a, _log_overlap(q_parts, q_parts))
    p_lower = _log_sum(log_b, -kl_to_p) - entropy
    p_upper = _log_sum(log_b, _log_overlap(q_parts, p_parts))
    a = log_a.exp()
    lower = (a * (q_lower - p_upper)).sum(-1).clamp(min=0)
    upper = (a * (q_upper - p_lower)).sum(-1)
    return Bounds(lower, torch.minimum(upper, _paired(log_a, log_b, kl_to_p)))


def _components(name: str, d: Distribution) -> tuple[Tensor, MultivariateNormal]:
    """Log weights (*B, K), and the components as Gaussian vectors with batch shape (*B, K)."""
    parts = d.component_distribution if isinstance(d, MixtureSameFamily) else d
    gaussian = isinstance(parts, Normal) or is_gaussian(parts)
    require(gaussian, name, "kl_bounds", "be Gaussian or a mixture of Gaussians", repr(d))
    joint = _joint(parts)
    if isinstance(d, MixtureSameFamily):
        return d.mixture_distribution.logits.log_softmax(-1), joint
    single = MultivariateNormal(joint.loc.unsqueeze(-2), scale_tril=joint.scale_tril.unsqueeze(-3), validate_args=False)
    return joint.loc.new_zeros((*joint.batch_shape, 1)), single


def _joint(parts: Any) -> MultivariateNormal:
    """A scalar, factorised or correlated Gaussian as a MultivariateNormal."""
    if isinstance(parts, Normal):
        return MultivariateNormal(parts.loc[..., None], scale_tril=parts.scale[..., None, None], validate_args=False)
    if isinstance(parts, Independent):
        return MultivariateNormal(parts.mean, scale_tril=torch.diag_embed(parts.stddev), validate_args=False)
    return MultivariateNormal(parts.loc, covariance_matrix=parts.covariance_matrix, validate_args=False)


def _crossed(q: MultivariateNormal, p: MultivariateNormal) -> tuple[MultivariateNormal, MultivariateNormal]:
    """The components of q and of p with batch shapes that broadcast to (*B, I, J), one entry per pair."""
    rows = MultivariateNormal(q.loc.unsqueeze(-2), scale_tril=q.scale_tril.unsqueeze(-3), validate_args=False)
    columns = MultivariateNormal(p.loc.unsqueeze(-3), scale_tril=p.scale_tril.unsqueeze(-4), validate_args=False)
    return rows, columns


def _pairwise_kl(q: MultivariateNormal, p: MultivariateNormal) -> Tensor:
    """KL(q_i || p_j) for every pair of components, (*B, I, J)."""
    return kl_divergence(*_crossed(q, p))


def _log_overlap(q: MultivariateNormal, p: MultivariateNormal) -> Tensor:
    """log E_{q_i} p_j = log N(m_i; m_j, S_i + S_j) for every pair of components, (*B, I, J)."""
    rows, columns = _crossed(q, p)
    covariance = rows.covariance_matrix + columns.covariance_matrix
    return MultivariateNormal(columns.loc, covariance, validate_args=False).log_prob(rows.loc)


def _log_sum(log_weights: Tensor, exponents: Tensor) -> Tensor:
    """log sum_j weight_j exp(exponent_ij): (*B, J) and (*B, I, J) -> (*B, I)."""
    return torch.logsumexp(log_weights.unsqueeze(-2) + exponents, -1)


def _paired(log_a: Tensor, log_b: Tensor, divergences: Tensor) -> Tensor:
    """Hershey and Olsen's upper bound, (*B,); it holds after any number of sweeps, and each sweep tightens it."""
    log_g = log_b.unsqueeze(-2) + log_a.unsqueeze(-1) + torch.zeros_like(divergences)
    log_f = log_g
    for _ in range(PAIRING_SWEEPS):
        log_f = log_a.unsqueeze(-1) + torch.log_softmax(log_g - divergences, -1)
        log_g = log_b.unsqueeze(-2) + torch.log_softmax(log_f, -2)
    f = log_f.exp()
    return (f * (log_f - log_g + divergences)).sum((-2, -1))
