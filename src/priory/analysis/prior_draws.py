"""Draws of a model's parameters from its prior, before any data.

They show what a prior believes: pass them to `generate` for prior predictive draws of the data.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from priory.core.errors import DivergedError, InputError, is_integer, require
from priory.core.streams import stream
from priory.fitting.fit import fit
from priory.methods.mcmc.nuts import NUTS
from priory.models.base import has_network
from priory.models.density import Density
from priory.models.named_prior import NamedPrior
from priory.priors.draws import draw_prior

if TYPE_CHECKING:
    from torch import Tensor

    from priory.models.base import BaseModel

CHAINS, MIN_STEPS = 32, 400  # of the sampler, for a prior that is only a function; enough to judge its chains
DRAWS_PER_SAMPLE = 4  # draws of the chains per draw that is returned, so that these are nearly independent


def prior_draws(model: BaseModel, n: int, seed: int = 0) -> dict[str, Tensor]:
    """Draw parameters from the prior of a model.

    The draws are exact and independent for a `Model`, and for a `Density` whose `log_prior` is a dict of
    distributions. For a `log_prior` that is a function they are taken from four times as many draws of NUTS on the
    prior alone.

    Args:
        model: A `Model` with proper priors, or a `Density` with a `log_prior`.
        n: Number of draws, an integer >= 1.
        seed: Seed of the draws. Default: 0.

    Returns:
        Constrained parameters by name, each (n, *shape).

    Raises:
        InputError: If the model has no separate prior, if the prior is improper or has no draws, or if the chains of
            NUTS don't agree on it.

    Example:
        >>> from torch.distributions import HalfNormal, Normal
        >>> import priory as pr
        >>> theta = lambda p: Normal(p["mu"], p["tau"])
        >>> model = pr.Density(
        ...     params={"mu": pr.Param(), "tau": pr.Param((), pr.constraints.positive), "theta": pr.Param((8,))},
        ...     log_prior={"mu": Normal(0.0, 5.0), "tau": HalfNormal(5.0), "theta": theta},
        ...     log_likelihood=lambda p, batch: Normal(p["theta"], 10.0).log_prob(batch[0]),
        ... )
        >>> {name: tuple(x.shape) for name, x in prior_draws(model, 100).items()}
        {'mu': (100,), 'tau': (100,), 'theta': (100, 8)}
    """
    require(is_integer(n, 1), "n", "prior_draws", "be an integer >= 1", n)
    if has_network(model):
        generator = stream(seed, "prior", device=model.device)
        rule = {"argument": "model", "owner": "prior_draws", "must": "be a model of which"}
        return model.layout.constrain(draw_prior(model.prior, torch.Size([int(n)]), generator, **rule))
    must = "be a Model, or a Density with log_prior and log_likelihood"
    require(isinstance(model, Density), "model", "prior_draws", must, type(model).__name__)
    assert isinstance(model, Density)
    require(model.log_prior is not None, "model", "prior_draws", must, "a Density that is one log_prob")
    if isinstance(model.log_prior, NamedPrior) and not model.log_prior.restricted:
        return model.log_prior.draw(int(n), seed)
    return by_sampling(model, int(n), seed)


def by_sampling(model: Density, n: int, seed: int) -> dict[str, Tensor]:
    """Draw from a prior that is only a log density, by NUTS."""
    alone = Density(model.log_prior, model.params, batched=model.batched, dtype=model.dtype, device=model.device)
    steps = max(MIN_STEPS, math.ceil(DRAWS_PER_SAMPLE * n / CHAINS))
    try:
        posterior = fit(alone, None, NUTS(chains=CHAINS, accept=0.95), steps=steps, seed=seed, progress=False)
    except DivergedError as error:
        raise InputError(f"The prior of the model must be proper, but can't be drawn from. {error}") from error
    status = posterior.status
    if status.name == "not_converged":
        raise InputError(
            f"The prior of the model must be one that NUTS can draw from: {status.reason} Give 'log_prior' as a dict "
            "of distributions, whose draws are exact."
        )
    return posterior.sample(n, seed=seed)
