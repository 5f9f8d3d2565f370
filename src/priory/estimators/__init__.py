"""Objectives of variational inference and estimators of their gradients."""

from priory.estimators.evidence_bound import Elbo, elbo

__all__ = ["Elbo", "elbo"]
