"""Curvature of a network's log-likelihood: GGN, Fisher and Hessian, with one structure per file."""

from priory.curvature.base import KINDS, STRUCTURES, Curvature, Pass, PrecisionGaussian, Selection, select
from priory.curvature.diagonal import DiagonalCurvature
from priory.curvature.full import Full
from priory.curvature.kronecker import Kronecker
from priory.curvature.lowrank import LowRankCurvature
from priory.curvature.products import product

Diagonal, LowRank, Gaussian = DiagonalCurvature, LowRankCurvature, PrecisionGaussian  # their names in this namespace

__all__ = [
    "KINDS",
    "STRUCTURES",
    "Curvature",
    "Diagonal",
    "DiagonalCurvature",
    "Full",
    "Gaussian",
    "Kronecker",
    "LowRank",
    "LowRankCurvature",
    "Pass",
    "PrecisionGaussian",
    "Selection",
    "product",
    "select",
]
