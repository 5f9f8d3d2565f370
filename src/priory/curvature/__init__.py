"""Curvature of a network's log-likelihood: GGN, Fisher and Hessian, one structure a file."""

from priory.curvature.base import KINDS, STRUCTURES, Curvature, Gaussian, Pass, Selection, select
from priory.curvature.diagonal import Diagonal
from priory.curvature.full import Full
from priory.curvature.kronecker import Kronecker
from priory.curvature.lowrank import LowRank
from priory.curvature.products import product

__all__ = [
    "KINDS",
    "STRUCTURES",
    "Curvature",
    "Diagonal",
    "Full",
    "Gaussian",
    "Kronecker",
    "LowRank",
    "Pass",
    "Selection",
    "product",
    "select",
]
