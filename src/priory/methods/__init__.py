"""Methods: how to infer, one a file."""

from priory.methods.base import Info, Method, Plan
from priory.methods.em.amortised_em import AmortisedEM
from priory.methods.em.em import EM
from priory.methods.em.variational_em import VariationalEM
from priory.methods.ensemble.dropout import Dropout
from priory.methods.ensemble.ensemble import Ensemble
from priory.methods.ensemble.swag import SWAG
from priory.methods.laplace.laplace import Laplace, Subnetwork
from priory.methods.laplace.last_layer import LastLayer
from priory.methods.mcmc import HMC, MALA, NUTS, RandomWalk
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
    "Cyclical",
    "Dropout",
    "Ensemble",
    "Flow",
    "FullRank",
    "Info",
    "Laplace",
    "LastLayer",
    "LowRank",
    "MeanField",
    "Method",
    "MixtureOfGaussians",
    "NaturalGradient",
    "Pathfinder",
    "Plan",
    "RandomWalk",
    "Subnetwork",
    "VariationalEM",
]
