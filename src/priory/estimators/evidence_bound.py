"""The evidence lower bound, by autograd: the definition that every faster step is tested against.

    elbo = E_q[log p(D|w)] - T KL(q || p),    log p(D) = elbo + KL(q || p(w|D)) at T = 1

in nats for the whole data set; `loss` is minus it. With `tempers="posterior"` the entropy alone is multiplied
by T: elbo = E_q[log p(D|w) + log p(w)] + T H(q).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from priory.data import Batch
    from priory.families import Diagonal
    from priory.target import Target


@dataclass(frozen=True)
class Elbo:
    """The bound and its parts, in nats for the whole data set."""

    value: Tensor
    nll: Tensor  # -E_q[log p(D|w)]
    kl: Tensor  # KL(q || p), not multiplied by T
    num_data: int | None
    temperature: float

    @property
    def loss(self) -> Tensor:
        """Minus the bound."""
        return -self.value


def elbo(target: Target, family: Diagonal, noise: Tensor, batch: Batch) -> Elbo:
    """The reparameterised estimate from standard normal noise (S, P), differentiable in the family's tensors.

    w_s = m + s noise_s (Kingma and Welling 2014; Blundell 2015). Gaussian priors enter in closed form, others
    at the draws.
    """
    w = family.draw(noise)  # (S, P)
    log_likelihood = torch.stack([target.differentiable(v, batch) for v in w])
    prior = target.model.prior
    others = prior.log_prob_of_others(w).mean() if prior.others else 0.0
    return assemble(target, family, log_likelihood.mean(), others)


def assemble(target: Target, family: Diagonal, log_likelihood: Tensor, others: Tensor | float) -> Elbo:
    """The bound from estimates of E_q[log p(D|w)] and of E_q of the part of log p(w) that has no closed form."""
    entropy = family.entropy()
    cross = family.cross_entropy(target.model.prior) - others
    value = log_likelihood - target.prior_weight * cross + target.entropy_weight * entropy
    return Elbo(value, -log_likelihood, cross - entropy, target.num_data, target.temperature)
