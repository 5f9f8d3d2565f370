"""Methods: how to infer, one a file."""

from priory.methods.amortised_em import AmortisedEM
from priory.methods.base import Info, Method, Plan
from priory.methods.dropout import Dropout
from priory.methods.em import EM
from priory.methods.ensemble import Ensemble
from priory.methods.flow import Flow
from priory.methods.full_rank import FullRank
from priory.methods.laplace import Laplace, Subnetwork
from priory.methods.last_layer import LastLayer
from priory.methods.low_rank import LowRank
from priory.methods.map import MAP
from priory.methods.mcmc import HMC, MALA, NUTS, RandomWalk
from priory.methods.mcmc.schedules import Cyclical
from priory.methods.mcmc.sghmc import SGHMC
from priory.methods.mcmc.sgld import SGLD
from priory.methods.mean_field import MeanField
from priory.methods.mixture import MixtureOfGaussians
from priory.methods.natural import NaturalGradient
from priory.methods.pathfinder import Pathfinder
from priory.methods.swag import SWAG
from priory.methods.variational_em import VariationalEM

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
