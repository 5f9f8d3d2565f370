"""Expectation maximisation (Dempster, Laird and Rubin, 1977), for the models of `priory.latent`.

    E-step   q(z) = p(z | y, theta_t)                       statistics S, and L(q, theta_t) = log p(y | theta_t)
    M-step   theta_{t+1} = argmax Q(theta, theta_t),        Q = E_q[log p(y, z | theta)]

    log p(y | theta_{t+1})  =  Q + H(q) + gap,     gap = KL(q || p(z | y, theta_{t+1})) >= 0

The history has the bound, which is the log-likelihood of each theta, and beside it Q and the gap. The turns themselves
are in `methods.ascent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from priory.methods.em.ascent import Ascent, State
from priory.posteriors.latent import LatentPoint

if TYPE_CHECKING:
    from torch import Tensor

    from priory.models.target import Target


@dataclass(frozen=True)
class EM(Ascent):
    """Maximum likelihood, or the mode where a model has a prior, with the hidden variables summed out.

    Of `restarts` runs from different starts the best is kept. A run ends when an iteration raises the bound by less
    than `tolerance` nats a row, if that is not 0; `steps` in `fit` is the cap. `start` is one of the model's ways to
    begin ("k-means++" or "random" for mixtures), a dict of parameters, or a posterior. `accelerate` is SQUAREM.
    `annealing` is the temperatures of the first iterations, such as (8, 4, 2). `draws` of z take the place of q, if not
    0. `online`, above 0.5 and up to 1, reads minibatches instead of all rows. `gradient_steps` take the place of a
    model's closed M-step.

    >>> EM(restarts=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'restarts' argument of EM must be an integer >= 1, got 0.
    """

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> LatentPoint:
        found = self.point(target, state)
        self.warn_of_doubts(target, state, found)
        return found

    def point(self, target: Target, state: State) -> LatentPoint:
        theta, _, bound, settled = self.best(state)
        with torch.no_grad():
            prior = float(self.latent(target).log_prior(theta))
        return LatentPoint(target, theta, bound - prior, settled)
