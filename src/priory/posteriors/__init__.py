"""Posteriors: the results of `fit`, with one interface for all methods."""

from priory.posteriors.amortised import AmortisedPosterior
from priory.posteriors.base import KINDS, Evidence, Posterior
from priory.posteriors.chains import Chains
from priory.posteriors.conjugate import ConjugatePosterior
from priory.posteriors.diagonal import DiagonalGaussian
from priory.posteriors.draws import Draws
from priory.posteriors.laplace import LaplacePosterior
from priory.posteriors.last_layer import LastLayerPosterior
from priory.posteriors.latent import LatentPoint
from priory.posteriors.masked import Masked
from priory.posteriors.mixture import Mixture
from priory.posteriors.point import Point
from priory.posteriors.prior_function import PriorFunction
from priory.posteriors.variational import Variational

__all__ = [
    "KINDS",
    "AmortisedPosterior",
    "Chains",
    "ConjugatePosterior",
    "DiagonalGaussian",
    "Draws",
    "Evidence",
    "LaplacePosterior",
    "LastLayerPosterior",
    "LatentPoint",
    "Masked",
    "Mixture",
    "Point",
    "Posterior",
    "PriorFunction",
    "Variational",
]
