"""The evidence of a Gaussian around a mode (MacKay 1992), and the curvature of the log prior there.

    log p(D) ~ log p(D|w) + log p(w) + p/2 log 2 pi - 1/2 log det Q,    Q = H + diag(tau)

over the p coordinates of the curvature H. Point estimates (other weights, a noise) are fixed, and their prior is not
included. Exact for linear regression. At temperature T both log densities and both parts of Q have the weights of
`Target`: a log p(D|w) + b log p(w) and Q = a H + b diag(tau).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent

from priory.core.errors import InputError
from priory.models.base import has_network
from priory.priors.hierarchical import Hierarchical, precision_name

if TYPE_CHECKING:
    from priory.curvature.base import PrecisionGaussian, Selection
    from priory.models.target import Target


def log_evidence(
    target: Target, w: Tensor, gaussian: PrecisionGaussian, log_likelihood: Tensor | float, selection: Selection
) -> Tensor:
    """Return a log p(D|w) + b log p(w) + p/2 log 2 pi - 1/2 log det Q, float64, ().

    `log_likelihood` is log p(D|w) over all the data, untempered; `gaussian` has the precision Q over `selection`.
    """
    a, b = target.likelihood_power, target.prior_power
    log_prior = log_prior_of(target, w, selection)
    volume = 0.5 * selection.size * math.log(2 * math.pi) - 0.5 * gaussian.log_det.double()
    total = a * torch.as_tensor(log_likelihood, dtype=torch.float64) + b * log_prior.cpu() + volume.cpu()
    if b != 1 and not has_network(target.model):
        total = (
            total + (1 - b) * target.model.layout.log_det(w).double().cpu()
        )  # the volume element of a density is not tempered
    return total


def log_prior_of(target: Target, w: Tensor, selection: Selection) -> Tensor:
    """Return log p of the selected coordinates of w (P,) given the rest, float64, (); all of log p(w) for a density."""
    if not has_network(target.model):
        return target.log_prior(w).double()
    loc, precision = gaussian_part(target, w)
    at = selection.places
    d, tau = (w - loc)[at].double(), precision[at].double()
    log_tau = torch.where(tau > 0, tau, 2 * math.pi).log() - math.log(2 * math.pi)  # a flat coordinate adds nothing
    return 0.5 * (log_tau - tau * d * d).sum() + _without_gaussians(target, selection.names)(w).double()


def prior_precision(target: Target, w: Tensor) -> Tensor:
    """Return -d2 log p(w) / dw_i^2 of the prior at w, zero where the log prior is flat or convex, (P,)."""
    return gaussian_part(target, w)[1] + prior_second_derivative(target, w).neg().clamp_min(0)


def prior_second_derivative(target: Target, w: Tensor) -> Tensor:
    """Return d2 log p(w) / dw_i^2 where the prior is not Gaussian, and zero elsewhere, (P,)."""
    others = [(block, d) for block, d in target.prior.others if isinstance(d, Distribution)]
    for block, distribution in others:
        base = distribution.base_dist if isinstance(distribution, Independent) else distribution
        if tuple(base.event_shape) != ():
            raise InputError(
                f"The prior of '{block.name}' must be a product over single weights for a Laplace approximation, "
                f"got {type(base).__name__}."
            )
    if not others:
        return torch.zeros_like(w)
    leaf = w.detach().requires_grad_()
    with torch.enable_grad():
        log_prior = _without_gaussians(target, target.model.layout.names)(leaf)
        (slope,) = torch.autograd.grad(log_prior, leaf, create_graph=True)
        if not slope.requires_grad:
            return torch.zeros_like(w)
        # the prior is a product over weights, so its Hessian is diagonal: row sums give the diagonal
        return torch.autograd.grad(slope.sum(), leaf)[0]


def gaussian_part(target: Target, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return location and precision of the Gaussian coordinates, with learnt precisions; zeros elsewhere, (P,)."""
    prior = target.prior
    precision = prior.precision
    learnt = [block for block, distribution in prior.others if isinstance(distribution, Hierarchical)]
    if learnt:
        precision = precision.clone()
        for block in learnt:
            precision[block.start : block.stop] = w[target.model.layout[precision_name(block.name)].start].exp()
    return prior.loc, precision


def _without_gaussians(target: Target, names: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
    """Return log p of the named parameters with non-Gaussian priors, as a function of w."""
    keep = lambda block, distribution: block.name in names and not isinstance(distribution, Hierarchical)  # noqa: E731
    return target.prior.with_others(keep).log_prob_of_others
