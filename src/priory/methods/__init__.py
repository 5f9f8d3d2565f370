"""Methods: how to infer, one a file."""

from priory.methods.base import Info, Method, Plan
from priory.methods.flow import Flow
from priory.methods.full_rank import FullRank
from priory.methods.laplace import Laplace, Subnetwork
from priory.methods.low_rank import LowRank
from priory.methods.map import MAP
from priory.methods.mean_field import MeanField
from priory.methods.mixture import MixtureOfGaussians
from priory.methods.natural import NaturalGradient
from priory.methods.pathfinder import Pathfinder

__all__ = [
    "MAP",
    "Flow",
    "FullRank",
    "Info",
    "Laplace",
    "LowRank",
    "MeanField",
    "Method",
    "MixtureOfGaussians",
    "NaturalGradient",
    "Pathfinder",
    "Plan",
    "Subnetwork",
]
