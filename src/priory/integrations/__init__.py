"""Posteriors of networks that are trained elsewhere: in a custom loop, by Lightning, or by the Hugging Face Trainer."""

from priory.integrations.newton import posterior_of
from priory.integrations.snapshots import Snapshots

__all__ = ["Snapshots", "posterior_of"]
