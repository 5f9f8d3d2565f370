"""Posteriors: what methods give back."""

from priory.posteriors.base import KINDS, Evidence, Posterior
from priory.posteriors.diagonal import DiagonalGaussian
from priory.posteriors.point import Point

__all__ = ["KINDS", "DiagonalGaussian", "Evidence", "Point", "Posterior"]
