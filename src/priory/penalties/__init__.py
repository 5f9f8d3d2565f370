"""Penalties and priors.

The package has two halves:

    as_prior/      Penalties that a `Model` accepts as its `prior`, and their strength per layer.
                   norms            L2, L1, group lasso, bridge, elastic net, or any function of the weights
                   variational      a penalty r(mu, scale) on the variational distribution q itself
                   factors          `layer_factors` and `explain`: the strength per layer and what it means
                   proximal         proximal steps, by which `MAP` reaches exact zeros

    equivalence/   The correspondence between penalties and priors in variational inference.
                   from_penalty     `prior_from_penalty`: the prior for which a penalty is a KL, if there is one
                   from_prior       `penalty_from_prior`: the penalty that corresponds to a prior
                   certificate      the verdict: valid, entropy missing, tempered, not integrable, no prior
                   heat_equation    a local test for penalties with learnt variances
"""

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
