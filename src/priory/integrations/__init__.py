"""Posteriors of networks that something else trains: loops of one's own, Lightning, the Hugging Face Trainer."""

from priory.integrations.newton import posterior_of
from priory.integrations.snapshots import Snapshots

__all__ = ["Snapshots", "posterior_of"]
