"""Estimators of the gradient of an objective in q's own tensors, each in a few lines.

With draws w_s of q and f(w) = log p(D|w) + a log p(w) - t log q(w) (a and t are 1 at temperature one), the bound is
E_q[f], and its gradient is estimated by

    score            mean_s f(w_s) d log q(w_s)                            (Williams 1992; Ranganath 2014)
    score_baseline   mean_s (f(w_s) - b) d log q(w_s), b an average of f over the steps before
    leave_one_out    mean_s (f(w_s) - mean_{r != s} f(w_r)) d log q(w_s)    (Kool 2019; Mnih and Rezende 2016)
    vargrad          half the gradient of the variance of log q - log p over the draws  (Richter 2020)
    pathwise         mean_s d f(w_s(noise)), closed forms where they exist (Kingma and Welling 2014; Blundell 2015)
    sticking         the same at the draws, with d log q at fixed w left out: it has mean zero, and without it nothing
                     is left at q = posterior (Roeder 2017)
    doubly           the same for the importance-weighted bound (Tucker 2019), in `importance`

Each returns a loss whose gradient by autograd is minus the estimate. The network is not part of that graph: its own
gradient g at the draws enters as the linear function g . w, so that one backward pass a draw is all it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Normal

from priory.core.errors import InputError, require
from priory.estimators.evidence_bound import Elbo, assemble
from priory.families import DiagonalFamily, Factorised, FullRankFamily, LowRankFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch
    from priory.families import Family
    from priory.models.target import Target

SCORES = ("score", "score_baseline", "leave_one_out", "vargrad")
PATHS = ("pathwise", "sticking", "doubly")
LAYERS = ("local", "flipout")
SYMMETRIC = (DiagonalFamily, FullRankFamily, LowRankFamily, Factorised)
ESTIMATORS = (*PATHS[:2], *LAYERS, *SCORES, PATHS[2])


@dataclass(frozen=True)
class Estimate:
    """What to descend, (*B,), the bound it stands for with its parts, and f at the draws, (S, *B)."""

    loss: Tensor
    bound: Elbo
    each: Tensor
    weighted: Tensor | None = None  # the importance-weighted bound, where that is the objective


@dataclass(frozen=True)
class Terms:
    """Logarithms at draws w (S, *B, P) of q, each (S, *B): functions of w that autograd goes through."""

    w: Tensor
    weights: Tensor | None  # None: every draw counts the same
    likelihood: Tensor
    gaussian: Tensor  # log p(w) of the coordinates with Gaussian priors
    others: Tensor | float  # log p(w) of the rest
    volume: Tensor | float  # log |det dx/du|, where its weight differs from the prior's

    @property
    def prior(self) -> Tensor:
        """log p(w) in unconstrained coordinates."""
        return self.gaussian + self.others

    def mean(self, values: Any) -> Any:
        """The mean over draws."""
        if not isinstance(values, Tensor):
            return values
        return values.mean(0) if self.weights is None else (self.weights * values).sum(0)

    def joint(self, target: Target) -> Tensor:
        """log p(D|w) + a log p(w), with the volume element at its own weight."""
        a, t = target.prior_weight, target.entropy_weight
        return self.likelihood + a * self.prior + (t - a) * self.volume


def at_draws(
    target: Target, w: Tensor, weights: Tensor | None, batch: Batch, buffers: Mapping[str, Tensor], gradients: bool
) -> Terms:
    """The log joint at draws of q, part by part; without `gradients` the network needs no backward pass."""
    fixed, prior = w.detach(), target.prior
    if gradients:
        one = len(fixed) == 1
        value, gradient = target.log_likelihood_and_grad(fixed[0] if one else fixed, batch, buffers)
        likelihood = attached(value[None] if one else value, gradient[None] if one else gradient, w)
    else:
        likelihood = target.log_likelihood_of(fixed, batch, buffers)
    deviation = w - prior.loc
    gaussian = prior.log_normaliser - 0.5 * (prior.precision * deviation * deviation).sum(-1)
    others = attached(*target.others_and_grad(fixed), w) if prior.others else 0.0
    tempered = target.prior_weight != target.entropy_weight and target.model.layout.constrained
    volume = attached(*target.volume_and_grad(fixed), w) if tempered else 0.0
    return Terms(w, weights, likelihood, gaussian, others, volume)


def attached(value: Tensor, gradient: Tensor, w: Tensor) -> Tensor:
    """A value that is known with its gradient at w, as a function of w to first order."""
    return value + (gradient * (w - w.detach())).sum(-1)


def estimate(
    target: Target,
    family: Family,
    batch: Batch,
    buffers: Mapping[str, Tensor],
    generator: torch.Generator,
    samples: int,
    estimator: str = "pathwise",
    baseline: Tensor | float = 0.0,
    divergence: Any = None,
    antithetic: bool | None = None,
) -> Estimate:
    """One estimate of minus the bound and of its gradient, from fresh draws of q."""
    target = target.settled(family.detached())
    if estimator in SCORES:
        w = family.independent(samples, generator).detach()
        return by_scores(target, family, at_draws(target, w, None, batch, buffers, False), estimator, baseline)
    if estimator not in PATHS[:2]:
        raise InputError(f"The estimator {estimator!r} is not one of the bound by draws of q.")
    w = drawn(family, samples, generator, antithetic)
    terms = at_draws(target, w, family.weights(samples), batch, buffers, gradients=True)
    if divergence is not None:
        return generalised(target, family, terms, divergence)
    return pathwise(target, family, terms) if estimator == "pathwise" else sticking(target, family, terms)


def drawn(family: Family, samples: int, generator: torch.Generator, antithetic: bool | None) -> Tensor:
    """Reparameterised draws; an even number of a q that is symmetric around its `loc` in pairs w, 2 loc - w."""
    loc = family.loc if isinstance(family, SYMMETRIC) else None
    pairs = loc is not None and samples % 2 == 0
    fits = pairs or not antithetic
    require(fits, "antithetic", "the method", "be used with an even number of samples of a symmetric q", samples)
    if loc is None or not pairs or antithetic is False:
        return family.sample(samples, generator)
    half = family.sample(samples // 2, generator)
    return torch.cat([half, 2 * loc - half])


def pathwise(target: Target, family: Family, terms: Terms) -> Estimate:
    """Entropy and Gaussian priors in closed form, where the family has them."""
    log_q = family.log_prob(terms.w)
    cross, entropy = family.cross_entropy(target.prior), family.entropy()
    cross = terms.mean(-terms.gaussian) if cross is None else cross
    entropy = terms.mean(-log_q) if entropy is None else entropy
    cross = cross - terms.mean(terms.others)
    bound = assemble(target, terms.mean(terms.likelihood), cross, entropy, terms.mean(terms.volume))
    return Estimate(bound.loss, plain(bound), each(target, terms, log_q))


def sticking(target: Target, family: Family, terms: Terms) -> Estimate:
    """Everything at the draws, and q's own tensors held fixed inside log q."""
    return whole(target, terms, family.detached().log_prob(terms.w))


def by_scores(target: Target, family: Family, terms: Terms, estimator: str, baseline: Tensor | float) -> Estimate:
    """Values of f and gradients of log q alone, for draws that no gradient goes through."""
    log_q = family.log_prob(terms.w)
    found = whole(target, terms, log_q.detach())
    f, n = found.each, len(terms.w)
    if estimator == "vargrad":
        t = target.entropy_weight
        loss = 0.5 / t * (t * log_q - terms.joint(target)).var(0)
    else:
        if estimator == "leave_one_out":
            baseline = (f.sum(0) - f) / (n - 1)
        loss = -((f - (0.0 if estimator == "score" else baseline)) * log_q).mean(0)
    return Estimate(loss, found.bound, f)


def generalised(target: Target, family: Family, terms: Terms, divergence: Any) -> Estimate:
    """E_q[-log p(D|w)] + T D(q, p) for any divergence D (Knoblauch 2019): between factors, or from ratios at draws."""
    prior = target.prior
    whole_density = getattr(target.model, "log_prob", None) is not None
    require(not whole_density, "divergence", "the method", "be left out for a Density without a log_prior", divergence)
    tempered = target.prior_weight != target.entropy_weight
    require(not tempered, "tempers", "another divergence", "be 'likelihood'", repr(target.tempers))
    closed = None
    if isinstance(family, DiagonalFamily) and not prior.others and not prior.improper:
        closed = divergence.between(Normal(family.loc, family.scale), Normal(prior.loc, prior.precision.rsqrt()))
    log_q = family.log_prob(terms.w)
    distance = divergence.of_ratios(log_q - terms.prior, terms.weights) if closed is None else closed.sum(-1)
    nll = -terms.mean(terms.likelihood)
    loss = nll + target.temperature * distance
    bound = plain(Elbo(-loss, nll, distance, target.num_data, target.temperature))
    return Estimate(loss, bound, each(target, terms, log_q))


def whole(target: Target, terms: Terms, log_q: Tensor) -> Estimate:
    """The bound with nothing in closed form."""
    cross, entropy = terms.mean(-terms.prior), terms.mean(-log_q)
    bound = assemble(target, terms.mean(terms.likelihood), cross, entropy, terms.mean(terms.volume))
    return Estimate(bound.loss, plain(bound), each(target, terms, log_q))


def each(target: Target, terms: Terms, log_q: Tensor) -> Tensor:
    """f at the draws, as numbers, (S, *B)."""
    return (terms.joint(target) - target.entropy_weight * log_q).detach()


def plain(bound: Elbo) -> Elbo:
    """The bound as numbers."""
    value, nll, kl = (part.detach() for part in (bound.value, bound.nll, bound.kl))
    return Elbo(value, nll, kl, bound.num_data, bound.temperature)
