"""Penalties and priors: which prior a penalty is, whether it is one at all, and what its factor should be."""

from priory.penalties.as_prior.base import Regulariser
from priory.penalties.as_prior.factors import Explanation, explain, layer_factors
from priory.penalties.as_prior.norms import L1, L2, Bridge, ElasticNet, GroupLasso, Penalty, ReverseGroupLasso
from priory.penalties.as_prior.variational import Variational
from priory.penalties.equivalence.certificate import Certificate
from priory.penalties.equivalence.from_penalty import prior_from_penalty
from priory.penalties.equivalence.from_prior import penalty_from_prior
from priory.penalties.equivalence.heat_equation import heat_residual, heat_residual_matrix
from priory.penalties.equivalence.inputs import Table
from priory.penalties.equivalence.result import Equivalence

__all__ = [
    "L1",
    "L2",
    "Bridge",
    "Certificate",
    "ElasticNet",
    "Equivalence",
    "Explanation",
    "GroupLasso",
    "Penalty",
    "Regulariser",
    "ReverseGroupLasso",
    "Table",
    "Variational",
    "explain",
    "heat_residual",
    "heat_residual_matrix",
    "layer_factors",
    "penalty_from_prior",
    "prior_from_penalty",
]
