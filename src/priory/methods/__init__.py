"""Methods: how to infer, one a file."""

from priory.methods.base import Info, Method, Plan
from priory.methods.map import MAP
from priory.methods.mean_field import MeanField

__all__ = ["MAP", "Info", "MeanField", "Method", "Plan"]
