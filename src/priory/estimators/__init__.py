"""Objectives of variational inference, and estimators of their gradients."""

from priory.estimators.comparison import Variances, variance
from priory.estimators.evidence_bound import Elbo, elbo
from priory.estimators.gradients import ESTIMATORS, estimate
from priory.estimators.importance import importance_weighted

__all__ = ["ESTIMATORS", "Elbo", "Variances", "elbo", "estimate", "importance_weighted", "variance"]
