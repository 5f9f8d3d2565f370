"""Distributions that torch lacks: the priors behind common penalties, and sparsity-inducing priors.

All of them are torch distributions, so they can be used as the prior of a `Model` and as either argument of
`priory.kl`.
"""

from priory.distributions.generalised_gaussian import GeneralisedGaussian
from priory.distributions.group_lasso import GroupLasso
from priory.distributions.horseshoe import Horseshoe
from priory.distributions.log_uniform import LogUniform
from priory.distributions.logistic import Logistic
from priory.distributions.scale_mixture import ScaleMixture
from priory.distributions.spike_and_slab import SpikeAndSlab

__all__ = [
    "GeneralisedGaussian",
    "GroupLasso",
    "Horseshoe",
    "LogUniform",
    "Logistic",
    "ScaleMixture",
    "SpikeAndSlab",
]
