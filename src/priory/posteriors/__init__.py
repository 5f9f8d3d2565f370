"""Posteriors: what methods give back."""

from priory.posteriors.base import KINDS, Evidence, Posterior
from priory.posteriors.diagonal import DiagonalGaussian
from priory.posteriors.draws import Draws
from priory.posteriors.point import Point
from priory.posteriors.variational import Variational

__all__ = ["KINDS", "DiagonalGaussian", "Draws", "Evidence", "Point", "Posterior", "Variational"]
