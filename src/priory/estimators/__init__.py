"""Objectives of variational inference and estimators of their gradients."""

from priory.estimators.elbo import Elbo, elbo

__all__ = ["Elbo", "elbo"]
