"""Families of q: distributions over the flat vector."""

from priory.families.diagonal import Diagonal

__all__ = ["Diagonal"]
