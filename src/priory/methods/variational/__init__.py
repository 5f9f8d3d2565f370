"""Variational inference: methods that fit the closest distribution of a family to the posterior."""
