"""Methods: how to infer, one per file.

A public method is named here and nowhere else in the source: in `__all__`, in `_MODULES` and, for the type checker, in
the imports. `priory` exports what `__all__` lists. Modules are imported when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from priory.methods.base import Info as Info
    from priory.methods.base import Method as Method
    from priory.methods.base import Plan as Plan
    from priory.methods.base import Traits as Traits
    from priory.methods.em.amortised_em import AmortisedEM
    from priory.methods.em.em import EM
    from priory.methods.em.variational_em import VariationalEM
    from priory.methods.ensemble.dropout import Dropout
    from priory.methods.ensemble.ensemble import Ensemble
    from priory.methods.ensemble.swag import SWAG
    from priory.methods.laplace.laplace import Laplace, Subnetwork
    from priory.methods.laplace.last_layer import LastLayer
    from priory.methods.mcmc.hmc import HMC
    from priory.methods.mcmc.mala import MALA
    from priory.methods.mcmc.nuts import NUTS
    from priory.methods.mcmc.random_walk import RandomWalk
    from priory.methods.mcmc.schedules import Cyclical
    from priory.methods.mcmc.sghmc import SGHMC
    from priory.methods.mcmc.sgld import SGLD
    from priory.methods.point.map import MAP
    from priory.methods.variational.flow import Flow
    from priory.methods.variational.full_rank import FullRank
    from priory.methods.variational.low_rank import LowRank
    from priory.methods.variational.mean_field import MeanField
    from priory.methods.variational.mixture import MixtureOfGaussians
    from priory.methods.variational.natural import NaturalGradient
    from priory.methods.variational.pathfinder import Pathfinder
    from priory.methods.variational.svgd import SVGD

__all__ = [
    "EM",
    "HMC",
    "MALA",
    "MAP",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SVGD",
    "SWAG",
    "AmortisedEM",
    "Cyclical",
    "Dropout",
    "Ensemble",
    "Flow",
    "FullRank",
    "Laplace",
    "LastLayer",
    "LowRank",
    "MeanField",
    "MixtureOfGaussians",
    "NaturalGradient",
    "Pathfinder",
    "RandomWalk",
    "Subnetwork",
    "VariationalEM",
]

_MODULES = {
    "EM": "em.em",
    "HMC": "mcmc.hmc",
    "MALA": "mcmc.mala",
    "MAP": "point.map",
    "NUTS": "mcmc.nuts",
    "SGHMC": "mcmc.sghmc",
    "SGLD": "mcmc.sgld",
    "SVGD": "variational.svgd",
    "SWAG": "ensemble.swag",
    "AmortisedEM": "em.amortised_em",
    "Cyclical": "mcmc.schedules",
    "Dropout": "ensemble.dropout",
    "Ensemble": "ensemble.ensemble",
    "Flow": "variational.flow",
    "FullRank": "variational.full_rank",
    "Info": "base",
    "Laplace": "laplace.laplace",
    "LastLayer": "laplace.last_layer",
    "LowRank": "variational.low_rank",
    "MeanField": "variational.mean_field",
    "Method": "base",
    "MixtureOfGaussians": "variational.mixture",
    "NaturalGradient": "variational.natural",
    "Pathfinder": "variational.pathfinder",
    "Plan": "base",
    "RandomWalk": "mcmc.random_walk",
    "Subnetwork": "laplace.laplace",
    "Traits": "base",
    "VariationalEM": "em.variational_em",
}


def by_name(name: str) -> Any:
    """The class of this name, such as "MAP"."""
    return vars(importlib.import_module(f"priory.methods.{_MODULES[name]}"))[name]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"priory.methods has no '{name}'.")
    globals()[name] = found = by_name(name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in _MODULES if name not in __all__)])
