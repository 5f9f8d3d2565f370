"""Variational EM: E- and M-steps that treat the parameters as random (Attias 1999; Beal 2003; Bishop 2006, ch. 10).

    E-step   q(z)      proportional to  exp E_q(theta)[log p(y, z | theta)]
    M-step   q(theta)  proportional to  p(theta) exp E_q(z)[log p(y, z | theta)]

Both steps raise the same bound, with all of its constants,

    log p(y)  =  L(q) + KL(q(z) q(theta) || p(z, theta | y))  >=  L(q)

so L approximates the evidence: it compares models, such as numbers of components, without held-out rows. With
conjugate priors both steps have closed forms (`priory.latent.conjugate`). The whole is then EM for a model whose
parameters are the parameters phi of q(theta), with the log prior -KL(q(theta) || p(theta)): coordinate ascent. EM is
the special case in which q(theta) is a point.

With `online` the statistics are averaged over minibatches. The natural parameters of q(theta) are the prior's plus S,
so averaging S is a step along the natural gradient of L: stochastic variational inference (Hoffman, Blei, Wang and
Paisley 2013), with the rates (t + 1)^-online.
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
    from priory.methods.em.ascent import AscentState
    from priory.models.target import Target
    from priory.posteriors import Posterior


@dataclass(frozen=True)
class VariationalEM(Ascent):
    """Variational EM: q(z) q(theta) by coordinate ascent, for the conjugate models of `priory.latent`.

    Args:
        start: One of the model's initialisations (see the model), a dict of the parameters of q, or a fitted posterior.
            Default: None, the model's first initialisation.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> y = torch.cat([torch.linspace(-6, -4, 50), torch.linspace(4, 6, 150)])
        >>> posterior = pr.fit(pr.latent.BayesianGaussianMixture(4), y, pr.VariationalEM(), progress=False)
        >>> int((posterior.mean["weights"] > 0.1).sum())  # two of the four components are used
        2

    References:
        Attias (1999), Inferring parameters and structure of latent variable models by variational Bayes.
        Beal (2003), Variational algorithms for approximate Bayesian inference.
        Hoffman, Blei, Wang and Paisley (2013), Stochastic variational inference.
    """

    def latent(self, target: Target) -> Latent:
        """The target's model, as a latent model whose parameters are those of q."""
        model = target.model
        must = "be a latent model with conjugate priors, such as latent.BayesianGaussianMixture(3)"
        require(has_conjugate_prior(model), "model", "VariationalEM", must, type(model).__name__)
        assert has_conjugate_prior(model)
        return model.view

    def posterior(self, target: Target, state: AscentState, draws: Tensor | None = None) -> ConjugatePosterior:
        found = self.point(target, state)
        self.report_problems(target, state, found)
        return found

    # The parts of an iteration.

    def point(self, target: Target, state: AscentState) -> ConjugatePosterior:
        """q(theta) of the best restart."""
        phi, _, bound, converged = self.best(state)
        return ConjugatePosterior(target, phi, bound, converged)

    def first(self, model: Latent, batch: Batch, generator: torch.Generator, start: Posterior | None) -> Theta:
        """The initial phi of a restart: from a posterior, from a dict, or by the model's initialisation."""
        if start is None:
            return super().first(model, batch, generator, None)
        must = "be a posterior of VariationalEM"
        require(isinstance(start, ConjugatePosterior), "start", "VariationalEM", must, repr(start))
        assert isinstance(start, ConjugatePosterior)
        return {name: t.clone() for name, t in start.phi.items()}
