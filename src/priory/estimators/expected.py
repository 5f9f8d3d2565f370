"""Closed forms: parts of a variational loss that are functions of the locations and scales of q, without draws.

    penalties on q      T r(mu, scale) instead of T KL(q || p)                         (`penalties.Variational`)
    Laplace priors      E|w - m0| = s [ 2 f(d) + d (2 F(d) - 1) ],  d = (m - m0) / s   under a Gaussian q
    elastic nets        a E|w| + b (m^2 + s^2)                                         under a Gaussian q

f and F are the standard normal density and distribution function. Each enters the bound as a cross-entropy
-E_q[log p(w)]. The entropy of its coordinates is added to a penalty on q, because the bound subtracts it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Laplace

from priory.core.errors import require
from priory.families.diagonal import LOG_2_PI_E
from priory.models.base import has_network
from priory.penalties.as_prior.densities import ElasticNetDensity
from priory.penalties.as_prior.variational import VariationalTerm

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.core.flat import Block
    from priory.estimators.gradients import Estimate
    from priory.models.target import Target


@dataclass(frozen=True)
class Expected:
    """Cross-entropies (*B,) as functions of locations and scales (*B, n), each with the block of its coordinates."""

    terms: tuple[tuple[Block, Callable[[Tensor, Tensor], Tensor]], ...]

    def without_closed_forms(self, target: Target) -> Target:
        """Return the target without the priors whose closed forms are here."""
        known = {block.name for block, _ in self.terms}
        return replace(target, prior=target.prior.with_others(lambda block, _: block.name not in known))

    def of(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Return the sum of the cross-entropies, (*B,)."""
        cut = ((b, *(t[..., b.start : b.stop] for t in (loc, scale))) for b, _ in self.terms)
        return sum(function(m, s) for (_, m, s), (_, function) in zip(cut, self.terms, strict=True))  # pyright: ignore

    def descend(self, weight: float, loc: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
        """Add `weight` times the gradient in locations and log scales to (2, *B, P); returns the value, (*B,)."""
        loc, log_scale = loc.detach().requires_grad_(), scale.detach().log().requires_grad_()
        with torch.enable_grad():
            value = self.of(loc, log_scale.exp())
            slopes = torch.autograd.grad(value.sum(), [loc, log_scale])  # members are independent
        for part, slope in zip(gradient, slopes, strict=True):
            part.add_(slope, alpha=weight)
        return value.detach()

    def joined(self, target: Target, family: Any, found: Estimate) -> Estimate:
        """Add these terms to an estimate of the loss without them."""
        value, t = self.of(family.loc, family.scale), target.prior_weight
        bound, fixed = found.bound, value.detach()
        bound = replace(bound, value=bound.value - t * fixed, kl=bound.kl + fixed)
        return replace(found, loss=found.loss + t * value, bound=bound)


def expected(target: Target, entropy: float, closed: bool) -> Expected | None:
    """Return the closed forms for a factorised q whose base has this entropy; `closed` adds those of a Gaussian q."""
    if not has_network(target.model):
        return None
    terms = []
    for block, distribution in target.prior.others:
        if isinstance(distribution, VariationalTerm):
            terms.append((block, penalised(distribution, entropy)))
        elif closed and isinstance(distribution, Distribution) and block.bijector.identity:
            function = cross_entropy(distribution, block)
            if function is not None:
                terms.append((block, function))
    return Expected(tuple(terms)) if terms else None


def check(target: Target, method: Any) -> None:
    """Raise InputError for a penalty on q with an objective other than the reparameterised ELBO."""
    if not has_network(target.model) or not any(isinstance(d, VariationalTerm) for _, d in target.prior.others):
        return
    owner, bound = type(method).__name__, method.bound
    paths = ("pathwise", "local", "flipout")
    ok = bound.estimator in paths and bound.objective == "elbo"
    require(ok, "estimator", owner, f"be one of {', '.join(paths)} for a penalty on q", repr(bound.estimator))
    none = bound.divergence is None
    require(none, "divergence", owner, "be left out for a penalty on q, which takes its place", bound.divergence)
    whole = target.prior_weight == target.entropy_weight
    require(whole, "tempers", owner, "be 'likelihood' for a penalty on q, which T multiplies", repr(target.tempers))


def penalised(distribution: VariationalTerm, entropy: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function r(mu, scale) + H(q) of the coordinates."""
    return lambda m, s: distribution.value(m, s) + s.log().sum(-1) + entropy * s.shape[-1]


def cross_entropy(distribution: Distribution, block: Block) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return -E[log p(w)] under N(m, s^2) as a function of m and s, or None for priors without a closed form."""
    base = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if isinstance(base, Laplace):
        loc, rate = (t.expand(block.shape).reshape(-1) for t in (base.loc, 1 / base.scale))
        constant = float((2 / rate.double()).log().sum())
        return lambda m, s: (rate * absolute(m - loc, s)).sum(-1) + constant
    if isinstance(base, ElasticNetDensity):
        l1, l2, log_z = (t.expand(block.shape).reshape(-1) for t in (base.l1, base.l2, base.log_normaliser))
        constant = float(log_z.double().sum())
        return lambda m, s: (l1 * absolute(m, s) + l2 * (m.square() + s.square())).sum(-1) + constant
    return None


def absolute(m: Tensor, s: Tensor) -> Tensor:
    """Return E|w| under N(m, s^2)."""
    d = m / s
    return s * math.sqrt(2 / math.pi) * torch.exp(-0.5 * d * d) + m * torch.erf(d / math.sqrt(2))


NORMAL_ENTROPY = 0.5 * LOG_2_PI_E  # entropy of a standard normal
