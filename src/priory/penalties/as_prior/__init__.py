"""Penalties that are used as priors: norms, their strength per layer, and proximal steps."""
