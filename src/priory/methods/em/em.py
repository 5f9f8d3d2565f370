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
        restarts: Number of runs from different starts; the one with the highest bound is kept.
        tolerance: A run ends when an iteration raises the bound by less than this many nats per row. 0 runs all
            iterations. `steps` in `fit` is the cap on iterations (default: 200).
        start: One of the model's initialisations ("k-means++" or "random" for mixtures), a dict of parameters, or a
            fitted posterior. Default: None, the model's first initialisation.
        accelerate: Whether to extrapolate every second iteration by SQUAREM.
        annealing: Temperatures, each >= 1, of the first iterations, such as (8, 4, 2). They flatten q(z), so that a
            poor start is left more easily. Default: (), none.
        draws: Number of draws of z that replace q(z) in the statistics (Monte Carlo EM). Default: 0, q(z) itself.
        online: Exponent, above 0.5 and at most 1, of the decaying rate of minibatch updates. Default: None, every
            iteration reads all rows.
        gradient_steps: Number of L-BFGS steps that replace the model's closed M-step (generalised EM). Default: None,
            the closed form.

    Example:
        >>> EM(restarts=0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'restarts' argument of EM must be an integer >= 1, got 0.

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
        return LatentPoint(target, theta, bound - prior, converged)
