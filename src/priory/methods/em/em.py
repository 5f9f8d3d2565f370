"""Expectation maximisation (Dempster, Laird and Rubin 1977), for the models of `priory.latent`.

    E-step   q(z) = p(z | y, theta_t)                       statistics S, and L(q, theta_t) = log p(y | theta_t)
    M-step   theta_{t+1} = argmax Q(theta, theta_t),        Q = E_q[log p(y, z | theta)]

    log p(y | theta_{t+1})  =  Q + H(q) + gap,     gap = KL(q || p(z | y, theta_{t+1})) >= 0

The history has the bound, which is the log-likelihood of each theta, as well as Q and the gap. The iterations are in
`priory.methods.em.ascent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from priory.methods.em.ascent import Ascent, AscentState
from priory.posteriors.latent import LatentPoint

if TYPE_CHECKING:
    from torch import Tensor

    from priory.models.target import Target


@dataclass(frozen=True)
class EM(Ascent):
    """Expectation maximisation: maximum likelihood with the latent variables integrated out.

    Where the model has a prior over its parameters, EM finds the mode of the posterior.

    Args:
        start: One of the model's initialisations ("k-means++" or "random" for mixtures), a dict of parameters, or a
            fitted posterior. Default: None, the model's first initialisation.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> y = torch.cat([torch.linspace(-6, -4, 50), torch.linspace(4, 6, 150)])
        >>> posterior = pr.fit(pr.latent.GaussianMixture(2), y, pr.EM(), progress=False)
        >>> posterior.mean["weights"].sort().values
        tensor([0.2500, 0.7500])
        >>> posterior.responsibilities(y[:1]).max().item() > 0.99
        True

    References:
        Dempster, Laird and Rubin (1977), Maximum likelihood from incomplete data via the EM algorithm.
        Cappe and Moulines (2009), On-line expectation-maximization algorithm for latent data models.
        Varadhan and Roland (2008), Simple and globally convergent methods for accelerating the convergence of any EM
        algorithm.
    """

    def posterior(self, target: Target, state: AscentState, draws: Tensor | None = None) -> LatentPoint:
        found = self.point(target, state)
        self.report_problems(target, state, found)
        return found

    def point(self, target: Target, state: AscentState) -> LatentPoint:
        theta, _, bound, converged = self.best(state)
        with torch.no_grad():
            prior = float(self.latent(target).log_prior(theta))
        return LatentPoint(target, theta, None if bound is None else bound - prior, converged)
