"""The evidence lower bound (ELBO) by autograd, the reference implementation that faster steps are tested against.

    elbo = E_q[log p(D|w)] - T KL(q || p),    log p(D) = elbo + KL(q || p(w|D)) at T = 1

in nats for the whole data set; `loss` is -elbo. With `tempers="posterior"` only the entropy is multiplied by T:

    elbo = E_q[log p(D|x) + log p(x)] + T H(q)

with x the user's parameters. In unconstrained coordinates u, x = f(u), the log prior includes log |det df/du|. This
term belongs to the entropy (the entropy of x is that of u plus its mean), so its weight is T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from priory.estimators.expected import NORMAL_ENTROPY, expected

if TYPE_CHECKING:
    from torch import Tensor

    from priory.core.data import Batch
    from priory.families import DiagonalFamily
    from priory.models.target import Target


@dataclass(frozen=True)
class Elbo:
    """The evidence lower bound and its parts, in nats for the whole data set, as tensors or floats.

    Attributes:
        value: The bound.
        nll: -E_q[log p(D|w)].
        kl: KL(q || p), not multiplied by T.
        num_data: Number of rows, or None for a `Density` with its data inside.
        temperature: T.
    """

    value: Any
    nll: Any
    kl: Any
    num_data: int | None
    temperature: float

    @property
    def loss(self) -> Any:
        """Minus `value`."""
        return -self.value


def elbo(target: Target, family: DiagonalFamily, noise: Tensor, batch: Batch) -> Elbo:
    """Estimate the ELBO by reparameterised draws w_s = m + s noise_s, differentiable in the tensors of q.

    Gaussian and Laplace priors and penalties on q have closed forms; other priors are evaluated at the draws.

    Args:
        target: The target of the fit.
        family: The factorised Gaussian q.
        noise: Standard normal noise, (S, P).
        batch: The rows.

    Returns:
        The `Elbo`.

    References:
        Kingma and Welling (2014), Auto-encoding variational Bayes.
        Blundell et al. (2015), Weight uncertainty in neural networks.
    """
    target = target.with_empirical_precisions(family)
    known = expected(target, NORMAL_ENTROPY, closed=True)
    if known is not None:
        target = known.without_closed_forms(target)
    w = family.draw(noise)  # (S, P)
    log_likelihood = torch.stack([target.differentiable(v, batch) for v in w]).mean()
    prior, layout = target.prior, target.model.layout
    cross = family.cross_entropy(prior)
    if prior.others:
        cross = cross - prior.log_prob_of_others(w).mean()
    if known is not None:
        cross = cross + known.of(family.loc, family.scale)
    return assemble(target, log_likelihood, cross, family.entropy(), layout.log_det(w).mean())


def assemble(target: Target, log_likelihood: Any, cross: Any, entropy: Any, volume: Any) -> Elbo:
    """Assemble the bound from E_q[log p(D|w)], -E_q[log p(u)], H(q) and E_q[log |det df/du|].

    All are in unconstrained coordinates u. log p(u) includes the volume element with the weight of the prior; the
    difference to the weight T is added here.
    """
    a, t = target.prior_weight, target.entropy_weight
    value = log_likelihood - a * cross + t * entropy
    if a != t:
        value = value + (t - a) * volume
    return Elbo(value, -log_likelihood, cross - entropy, target.num_data, target.temperature)
