"""Divergences between distributions, exact where a closed form is known and honest about it elsewhere."""

from priory.divergences.kullback_leibler import Divergence, kl

__all__ = ["Divergence", "kl"]
