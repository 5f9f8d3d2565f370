"""Penalties used as priors: the norms, and what they mean to a method."""
