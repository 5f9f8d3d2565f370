"""The evidence lower bound, by autograd: the definition that every faster step is tested against.

    elbo = E_q[log p(D|w)] - T KL(q || p),    log p(D) = elbo + KL(q || p(w|D)) at T = 1

in nats for the whole data set; `loss` is minus it. With `tempers="posterior"` the entropy alone is multiplied by T:
elbo = E_q[log p(D|x) + log p(x)] + T H(q), where x are the person's own parameters. In unconstrained coordinates u, x
= f(u), the prior carries log |det df/du|, which belongs to the entropy (H of x is H of u plus its mean): its weight is
T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from priory.estimators.expected import GAUSSIAN, expected

if TYPE_CHECKING:
    from torch import Tensor

    from priory.core.data import Batch
    from priory.families import DiagonalFamily
    from priory.models.target import Target


@dataclass(frozen=True)
class Elbo:
    """The bound and its parts, in nats for the whole data set: tensors, or plain numbers."""

    value: Any
    nll: Any  # -E_q[log p(D|w)]
    kl: Any  # KL(q || p), not multiplied by T
    num_data: int | None
    temperature: float

    @property
    def loss(self) -> Any:
        """Minus the bound."""
        return -self.value


def elbo(target: Target, family: DiagonalFamily, noise: Tensor, batch: Batch) -> Elbo:
    """The reparameterised estimate from standard normal noise (S, P), differentiable in the family's tensors.

    w_s = m + s noise_s (Kingma and Welling 2014; Blundell 2015). Gaussian and Laplace priors and penalties on q enter
    in closed form, others at the draws.
    """
    target = target.settled(family)
    known = expected(target, GAUSSIAN, closed=True)
    if known is not None:
        target = known.apart(target)
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
    """The bound from its parts: E_q[log p(D|w)], -E_q[log p(u)], H(q), E_q[log |det df/du|], each in unconstrained
    coordinates.

    log p(u) holds the volume element already, with the weight of the prior; what is added makes that weight T.
    """
    a, t = target.prior_weight, target.entropy_weight
    value = log_likelihood - a * cross + t * entropy
    if a != t:
        value = value + (t - a) * volume
    return Elbo(value, -log_likelihood, cross - entropy, target.num_data, target.temperature)
