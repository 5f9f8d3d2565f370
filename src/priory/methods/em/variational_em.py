"""Variational EM: E- and M-steps where the parameters are random too (Attias, 1999; Beal, 2003; Bishop, 2006, ch. 10).

    E-step   q(z)      in proportion to  exp E_q(theta)[log p(y, z | theta)]
    M-step   q(theta)  in proportion to  p(theta) exp E_q(z)[log p(y, z | theta)]

Each raises the one bound, with all of its constants,

    log p(y)  =  L(q) + KL(q(z) q(theta) || p(z, theta | y))  >=  L(q)

so that L stands for the evidence: it compares models, such as numbers of components, without held-out rows. With
conjugate priors both steps are closed forms (`priory.latent.conjugate`), and the whole is EM of a model whose
parameters are the numbers phi of q(theta) and whose log prior is -KL(q(theta) || p(theta)): coordinate ascent. EM is
the case of a q(theta) that is a point.

With `online` the statistics are averaged over minibatches. The natural parameters of q(theta) are the prior's plus
S, so that averaging S is a step along the natural gradient of L: stochastic variational inference (Hoffman, Blei, Wang
and Paisley, 2013), at the rates (t + 1)^-online.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from priory.core.errors import require
from priory.latent.conjugate import has_conjugate_prior
from priory.methods.em.ascent import Ascent
from priory.posteriors.conjugate import ConjugatePosterior

if TYPE_CHECKING:
    from torch import Tensor

    from priory.core.data import Batch
    from priory.latent.base import Latent, Theta
    from priory.methods.em.ascent import State
    from priory.models.target import Target
    from priory.posteriors import Posterior


@dataclass(frozen=True)
class VariationalEM(Ascent):
    """q(z) q(theta) by coordinate ascent, for the conjugate models of `priory.latent`.

    Of `restarts` runs from different starts the one with the highest bound is kept. A run ends when an iteration raises
    the bound by less than `tolerance` nats a row; `steps` in `fit` is the cap. `start` is one of the model's ways to
    begin, a dict of the numbers of q, or a posterior of the same model. `online`, between 0.5 and 1, reads minibatches.

    >>> VariationalEM(restarts=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'restarts' argument of VariationalEM must be an integer >= 1, got 0.
    """

    def latent(self, target: Target) -> Latent:
        """The target's model as one over the numbers of q."""
        model = target.model
        must = "be a latent model with conjugate priors, such as latent.BayesianGaussianMixture(3)"
        require(has_conjugate_prior(model), "model", "VariationalEM", must, type(model).__name__)
        assert has_conjugate_prior(model)
        return model.view

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> ConjugatePosterior:
        found = self.point(target, state)
        self.warn_of_doubts(target, state, found)
        return found

    # Its parts.

    def point(self, target: Target, state: State) -> ConjugatePosterior:
        """q(theta) of the best restart."""
        phi, _, bound, settled = self.best(state)
        return ConjugatePosterior(target, phi, bound, settled)

    def first(self, model: Latent, batch: Batch, generator: torch.Generator, start: Posterior | None) -> Theta:
        """A phi to begin from: of the posterior, of the dict, or the model's own way."""
        if start is None:
            return super().first(model, batch, generator, None)
        must = "be a posterior of VariationalEM"
        require(isinstance(start, ConjugatePosterior), "start", "VariationalEM", must, repr(start))
        assert isinstance(start, ConjugatePosterior)
        return {name: t.clone() for name, t in start.phi.items()}
