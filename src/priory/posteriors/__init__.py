"""Posteriors: what methods give back."""

from priory.posteriors.base import Evidence, Posterior
from priory.posteriors.diagonal import DiagonalGaussian
from priory.posteriors.point import Point

KINDS: dict[str, type[Posterior]] = {cls.kind: cls for cls in (Point, DiagonalGaussian)}

__all__ = ["KINDS", "DiagonalGaussian", "Evidence", "Point", "Posterior"]
