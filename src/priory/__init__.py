"""Priory gives the model you already have a posterior you can trust.

Model (what is believed) x Method (how to infer) -> Posterior (what is known). Verbs: `fit` and `predict`.

    import priory as pr

    model = pr.Model(net, pr.Gaussian(), prior="glorot")
    posterior = pr.fit(model, (X, y), pr.MeanField(), epochs=200)
    prediction = posterior.predict(X_new)

Names are imported when they are first used, so that `import priory` costs little more than `import torch`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from priory import methods

__version__ = "0.1.0"

_WHERE = {
    "Bernoulli": "priory.likelihoods",
    "Categorical": "priory.likelihoods",
    "Certificate": "priory.penalties",
    "Checkpoint": "priory.fitting.checkpoint",
    "Density": "priory.models.density",
    "DivergedError": "priory.core.errors",
    "EarlyStop": "priory.fitting.callbacks",
    "Equivalence": "priory.penalties",
    "Gaussian": "priory.likelihoods",
    "InputError": "priory.core.errors",
    "Model": "priory.models.model",
    "Param": "priory.core.flat",
    "Poisson": "priory.likelihoods",
    "PrioryWarning": "priory.core.errors",
    "StoreError": "priory.core.errors",
    "StudentT": "priory.likelihoods",
    "average": "priory.analysis.stacking",
    "cite": "priory.methods.citations",
    "compare": "priory.analysis.comparison",
    "explain_kl": "priory.divergences",
    "fit": "priory.fitting.fit",
    "generate": "priory.analysis.generated",
    "jensen_shannon": "priory.divergences",
    "kl": "priory.divergences",
    "layer_factors": "priory.penalties",
    "load": "priory.fitting.store",
    "penalty_from_prior": "priory.penalties",
    "prior_draws": "priory.analysis.prior_draws",
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
    "Bernoulli",
    "Categorical",
    "Certificate",
    "Checkpoint",
    "Density",
    "DivergedError",
    "EarlyStop",
    "Equivalence",
    "Gaussian",
    "InputError",
    "Model",
    "Param",
    "Poisson",
    "PrioryWarning",
    "StoreError",
    "StudentT",
    "__version__",
    "average",
    "cite",
    "compare",
    "constraints",
    "curvature",
    "distributions",
    "divergences",
    "estimators",
    "evaluate",
    "explain_kl",
    "fit",
    "generate",
    "jensen_shannon",
    "kl",
    "latent",
    "layer_factors",
    "load",
    "optim",
    "penalties",
    "penalty_from_prior",
    "plot",
    "prior_draws",
    "prior_from_penalty",
    "priors",
    "prune_neurons",
    "prune_weights",
    "renyi",
    "stack",
    "temperature_sweep",
    "testing",
]
__all__ += methods.__all__

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
    from priory.analysis.generated import generate
    from priory.analysis.prior_draws import prior_draws
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
    from priory.methods import *  # noqa: F403 - what its __all__ lists
    from priory.methods.citations import cite
    from priory.models.density import Density
    from priory.models.model import Model
    from priory.penalties import Certificate, Equivalence, layer_factors, penalty_from_prior, prior_from_penalty


def __getattr__(name: str) -> Any:
    if name in methods.__all__:
        value = methods.by_name(name)
    elif name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"priory.{name}")
    else:
        close = difflib.get_close_matches(name, __all__, 1)
        raise AttributeError(f"priory has no '{name}'." + (f" Did you mean '{close[0]}'?" if close else ""))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
