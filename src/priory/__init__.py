"""Priory gives the model you already have a posterior you can trust.

Model (what is believed) x Method (how to infer) -> Posterior (what is known). Verbs: `fit` and `predict`.

    import priory as pr

    model = pr.Model(net, pr.Gaussian(), prior="glorot")
    posterior = pr.fit(model, (X, y), pr.MeanField(), epochs=200)
    prediction = posterior.predict(X_new)

Names are imported when they are first used, so that `import priory` costs little more than `import torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "EM": "priory.methods",
    "HMC": "priory.methods",
    "MALA": "priory.methods",
    "MAP": "priory.methods",
    "NUTS": "priory.methods",
    "SGHMC": "priory.methods",
    "SGLD": "priory.methods",
    "SWAG": "priory.methods",
    "AmortisedEM": "priory.methods",
    "Bernoulli": "priory.likelihoods",
    "Categorical": "priory.likelihoods",
    "Certificate": "priory.penalties",
    "Checkpoint": "priory.fitting.checkpoint",
    "Cyclical": "priory.methods",
    "Density": "priory.models.density",
    "DivergedError": "priory.core.errors",
    "Dropout": "priory.methods",
    "EarlyStop": "priory.fitting.callbacks",
    "Ensemble": "priory.methods",
    "Equivalence": "priory.penalties",
    "Flow": "priory.methods",
    "FullRank": "priory.methods",
    "Gaussian": "priory.likelihoods",
    "InputError": "priory.core.errors",
    "Laplace": "priory.methods",
    "LastLayer": "priory.methods",
    "LowRank": "priory.methods",
    "MeanField": "priory.methods",
    "MixtureOfGaussians": "priory.methods",
    "Model": "priory.models.model",
    "NaturalGradient": "priory.methods",
    "Param": "priory.core.flat",
    "Pathfinder": "priory.methods",
    "Poisson": "priory.likelihoods",
    "PrioryWarning": "priory.core.errors",
    "RandomWalk": "priory.methods",
    "StoreError": "priory.core.errors",
    "StudentT": "priory.likelihoods",
    "Subnetwork": "priory.methods",
    "VariationalEM": "priory.methods",
    "average": "priory.analysis.stacking",
    "compare": "priory.analysis.comparison",
    "explain_kl": "priory.divergences",
    "fit": "priory.fitting.fit",
    "jensen_shannon": "priory.divergences",
    "kl": "priory.divergences",
    "layer_factors": "priory.penalties",
    "load": "priory.fitting.store",
    "penalty_from_prior": "priory.penalties",
    "prior_from_penalty": "priory.penalties",
    "prune_neurons": "priory.analysis.pruning",
    "prune_weights": "priory.analysis.pruning",
    "renyi": "priory.divergences",
    "stack": "priory.analysis.stacking",
    "temperature_sweep": "priory.analysis.sweeps",
}
_MODULES = (
    "constraints",
    "curvature",
    "distributions",
    "divergences",
    "estimators",
    "evaluate",
    "latent",
    "optim",
    "penalties",
    "plot",
    "priors",
    "testing",
)

__all__ = [
    "EM",
    "HMC",
    "MALA",
    "MAP",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SWAG",
    "AmortisedEM",
    "Bernoulli",
    "Categorical",
    "Certificate",
    "Checkpoint",
    "Cyclical",
    "Density",
    "DivergedError",
    "Dropout",
    "EarlyStop",
    "Ensemble",
    "Equivalence",
    "Flow",
    "FullRank",
    "Gaussian",
    "InputError",
    "Laplace",
    "LastLayer",
    "LowRank",
    "MeanField",
    "MixtureOfGaussians",
    "Model",
    "NaturalGradient",
    "Param",
    "Pathfinder",
    "Poisson",
    "PrioryWarning",
    "RandomWalk",
    "StoreError",
    "StudentT",
    "Subnetwork",
    "VariationalEM",
    "__version__",
    "average",
    "compare",
    "constraints",
    "curvature",
    "distributions",
    "divergences",
    "estimators",
    "evaluate",
    "explain_kl",
    "fit",
    "jensen_shannon",
    "kl",
    "latent",
    "layer_factors",
    "load",
    "optim",
    "penalties",
    "penalty_from_prior",
    "plot",
    "prior_from_penalty",
    "priors",
    "prune_neurons",
    "prune_weights",
    "renyi",
    "stack",
    "temperature_sweep",
    "testing",
]

if TYPE_CHECKING:
    from priory import (
        constraints,
        curvature,
        distributions,
        divergences,
        estimators,
        evaluate,
        latent,
        optim,
        penalties,
        plot,
        priors,
        testing,
    )
    from priory.analysis.comparison import compare
    from priory.analysis.pruning import prune_neurons, prune_weights
    from priory.analysis.stacking import average, stack
    from priory.analysis.sweeps import temperature_sweep
    from priory.core.errors import DivergedError, InputError, PrioryWarning, StoreError
    from priory.core.flat import Param
    from priory.divergences import explain_kl, jensen_shannon, kl, renyi
    from priory.fitting.callbacks import EarlyStop
    from priory.fitting.checkpoint import Checkpoint
    from priory.fitting.fit import fit
    from priory.fitting.store import load
    from priory.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
    from priory.methods import (
        EM,
        HMC,
        MALA,
        MAP,
        NUTS,
        SGHMC,
        SGLD,
        SWAG,
        AmortisedEM,
        Cyclical,
        Dropout,
        Ensemble,
        Flow,
        FullRank,
        Laplace,
        LastLayer,
        LowRank,
        MeanField,
        MixtureOfGaussians,
        NaturalGradient,
        Pathfinder,
        RandomWalk,
        Subnetwork,
        VariationalEM,
    )
    from priory.models.density import Density
    from priory.models.model import Model
    from priory.penalties import Certificate, Equivalence, layer_factors, penalty_from_prior, prior_from_penalty


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"priory.{name}")
    else:
        raise AttributeError(f"priory has no '{name}'.")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
