"""Estimators of the gradient of the bound in the tensors of q, each in a few lines.

With draws w_s of q and f(w) = log p(D|w) + a log p(w) - t log q(w) (a and t are 1 at temperature one), the bound is
E_q[f], and its gradient is estimated by

    score            mean_s f(w_s) d log q(w_s)                            (Williams 1992; Ranganath 2014)
    score_baseline   mean_s (f(w_s) - b) d log q(w_s), b a moving average of f over earlier steps
    leave_one_out    mean_s (f(w_s) - mean_{r != s} f(w_r)) d log q(w_s)    (Kool 2019; Mnih and Rezende 2016)
    vargrad          half the gradient of the variance of log q - log p over the draws  (Richter 2020)
    pathwise         mean_s d f(w_s(noise)), closed forms where they exist (Kingma and Welling 2014; Blundell 2015)
    sticking         pathwise at the draws without d log q at fixed w, which has mean zero; the estimate then vanishes
                     where q is the posterior (Roeder 2017)
    doubly           the analogue for the importance-weighted bound (Tucker 2019), in `importance`

Each returns a loss whose gradient by autograd is minus the estimate. The network is not part of that graph: its
gradient g at the draws enters as the linear function g . w, so the cost is one backward pass per draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Normal

from priory.core.errors import InputError, require
from priory.divergences import ForwardKL, JensenShannon
from priory.estimators.evidence_bound import Elbo, assemble
from priory.families import DiagonalFamily, Factorised, FullRankFamily, LowRankFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch
    from priory.families import Family
    from priory.models.target import Target

SCORE_ESTIMATORS = ("score", "score_baseline", "leave_one_out", "vargrad")
PATH_ESTIMATORS = ("pathwise", "sticking", "doubly")
LAYER_ESTIMATORS = ("local", "flipout")
SYMMETRIC_FAMILIES = (DiagonalFamily, FullRankFamily, LowRankFamily, Factorised)
MIN_RATIO_DRAWS = 16  # for divergences with self-normalised ratios, which vanish at a single draw
ESTIMATORS = (*PATH_ESTIMATORS[:2], *LAYER_ESTIMATORS, *SCORE_ESTIMATORS, PATH_ESTIMATORS[2])


@dataclass(frozen=True)
class Estimate:
    """A loss to descend, (*B,), the bound with its parts, and f at the draws, (S, *B)."""

    loss: Tensor
    bound: Elbo
    each: Tensor
    weighted: Tensor | None = None  # the importance-weighted bound, if it is the objective


@dataclass(frozen=True)
class Terms:
    """Log densities at draws w (S, *B, P) of q, each (S, *B), differentiable in w."""

    w: Tensor
    weights: Tensor | None  # None for equal weights
    likelihood: Tensor
    gaussian: Tensor  # log p(w) of the coordinates with Gaussian priors
    others: Tensor | float  # log p(w) of the coordinates with other priors
    volume: Tensor | float  # log |det dx/du|, where its weight differs from the prior's

    @property
    def prior(self) -> Tensor:
        """log p(w) in unconstrained coordinates."""
        return self.gaussian + self.others

    def mean(self, values: Any) -> Any:
        """Return the weighted mean over draws."""
        if not isinstance(values, Tensor):
            return values
        return values.mean(0) if self.weights is None else (self.weights * values).sum(0)

    def joint(self, target: Target) -> Tensor:
        """Return log p(D|w) + a log p(w), with the volume element weighted by t."""
        a, t = target.prior_weight, target.entropy_weight
        return self.likelihood + a * self.prior + (t - a) * self.volume


def at_draws(
    target: Target, w: Tensor, weights: Tensor | None, batch: Batch, buffers: Mapping[str, Tensor], gradients: bool
) -> Terms:
    """Evaluate the parts of the log joint at draws of q; without `gradients` the network needs no backward pass."""
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
    """Make a value with a known gradient at w differentiable in w, to first order."""
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
    """Estimate minus the ELBO and its gradient from fresh draws of q.

    Args:
        target: The target of the fit.
        family: The distribution q; the loss is differentiable in its tensors.
        batch: The rows.
        buffers: Buffers of the network, by name.
        generator: Generator of the draws.
        samples: Number of draws.
        estimator: One of `ESTIMATORS`, except "local", "flipout" and "doubly". Default: "pathwise".
        baseline: Baseline of f for "score_baseline". Default: 0.
        divergence: A divergence to the prior that replaces the KL, for "pathwise". Default: None.
        antithetic: Whether draws come in pairs; None for pairs where `samples` is even and q symmetric. Default: None.

    Returns:
        The estimate, with a loss whose gradient by autograd is minus the estimated gradient of the bound.
    """
    target = target.with_empirical_precisions(family.detached())
    if estimator in SCORE_ESTIMATORS:
        w = family.independent(samples, generator).detach()
        return by_scores(target, family, at_draws(target, w, None, batch, buffers, False), estimator, baseline)
    if estimator not in PATH_ESTIMATORS[:2]:
        raise InputError(f"The estimator {estimator!r} does not estimate the ELBO from draws of q.")
    w = drawn(family, samples, generator, antithetic)
    terms = at_draws(target, w, family.weights(samples), batch, buffers, gradients=True)
    if divergence is not None:
        return generalised(target, family, terms, divergence)
    return pathwise(target, family, terms) if estimator == "pathwise" else sticking(target, family, terms)


def drawn(family: Family, samples: int, generator: torch.Generator, antithetic: bool | None) -> Tensor:
    """Return reparameterised draws; an even number from a symmetric q comes in pairs w, 2 loc - w."""
    loc = family.loc if isinstance(family, SYMMETRIC_FAMILIES) else None
    pairs = loc is not None and samples % 2 == 0
    fits = pairs or not antithetic
    require(fits, "antithetic", "the method", "be used with an even number of samples of a symmetric q", samples)
    if loc is None or not pairs or antithetic is False:
        return family.sample(samples, generator)
    half = family.sample(samples // 2, generator)
    return torch.cat([half, 2 * loc - half])


def pathwise(target: Target, family: Family, terms: Terms) -> Estimate:
    """Use closed forms for the entropy and Gaussian priors where the family has them."""
    log_q = family.log_prob(terms.w)
    cross, entropy = family.cross_entropy(target.prior), family.entropy()
    cross = terms.mean(-terms.gaussian) if cross is None else cross
    entropy = terms.mean(-log_q) if entropy is None else entropy
    cross = cross - terms.mean(terms.others)
    bound = assemble(target, terms.mean(terms.likelihood), cross, entropy, terms.mean(terms.volume))
    return Estimate(bound.loss, plain(bound), each(target, terms, log_q))


def sticking(target: Target, family: Family, terms: Terms) -> Estimate:
    """Evaluate everything at the draws, with the tensors of q held fixed inside log q."""
    return whole(target, terms, family.detached().log_prob(terms.w))


def by_scores(target: Target, family: Family, terms: Terms, estimator: str, baseline: Tensor | float) -> Estimate:
    """Use values of f and gradients of log q only, at draws without gradients."""
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
    """Estimate E_q[-log p(D|w)] + T D(q, p) for any divergence D (Knoblauch 2019), in closed form or from ratios."""
    prior = target.prior
    whole_density = getattr(target.model, "log_prob", None) is not None
    require(not whole_density, "divergence", "the method", "be left out for a Density without a log_prior", divergence)
    tempered = target.prior_weight != target.entropy_weight
    require(not tempered, "tempers", "another divergence", "be 'likelihood'", repr(target.tempers))
    closed = None
    if isinstance(family, DiagonalFamily) and not prior.others and not prior.improper:
        closed = divergence.between(Normal(family.loc, family.scale), Normal(prior.loc, prior.precision.rsqrt()))
    if closed is None and isinstance(divergence, (ForwardKL, JensenShannon)):
        must = (
            f"be at least {MIN_RATIO_DRAWS} for {type(divergence).__name__}, whose ratios are normalised by their mean"
        )
        require(len(terms.w) >= MIN_RATIO_DRAWS, "samples", "the method", must, len(terms.w))
    log_q = family.log_prob(terms.w)
    distance = divergence.of_ratios(log_q - terms.prior, terms.weights) if closed is None else closed.sum(-1)
    nll = -terms.mean(terms.likelihood)
    loss = nll + target.temperature * distance
    bound = plain(Elbo(-loss, nll, distance, target.num_data, target.temperature))
    return Estimate(loss, bound, each(target, terms, log_q))


def whole(target: Target, terms: Terms, log_q: Tensor) -> Estimate:
    """Estimate the bound without closed forms."""
    cross, entropy = terms.mean(-terms.prior), terms.mean(-log_q)
    bound = assemble(target, terms.mean(terms.likelihood), cross, entropy, terms.mean(terms.volume))
    return Estimate(bound.loss, plain(bound), each(target, terms, log_q))


def each(target: Target, terms: Terms, log_q: Tensor) -> Tensor:
    """Return f at the draws, detached, (S, *B)."""
    return (terms.joint(target) - target.entropy_weight * log_q).detach()


def plain(bound: Elbo) -> Elbo:
    """Detach the parts of the bound."""
    value, nll, kl = (part.detach() for part in (bound.value, bound.nll, bound.kl))
    return Elbo(value, nll, kl, bound.num_data, bound.temperature)
