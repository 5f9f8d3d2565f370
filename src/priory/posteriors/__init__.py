"""Posteriors: what methods give back."""

from priory.posteriors.base import KINDS, Evidence, Posterior
from priory.posteriors.chains import Chains
from priory.posteriors.diagonal import DiagonalGaussian
from priory.posteriors.draws import Draws
from priory.posteriors.laplace import LaplacePosterior
from priory.posteriors.point import Point
from priory.posteriors.variational import Variational

__all__ = [
    "KINDS",
    "Chains",
    "DiagonalGaussian",
    "Draws",
    "Evidence",
    "LaplacePosterior",
    "Point",
    "Posterior",
    "Variational",
]
