"""Likelihoods p(y | f) of a target y given a network's output f, one family per file."""

from priory.likelihoods.base import Declared, Likelihood
from priory.likelihoods.bernoulli import Bernoulli
from priory.likelihoods.categorical import Categorical
from priory.likelihoods.gaussian import Gaussian
from priory.likelihoods.poisson import Poisson
from priory.likelihoods.student_t import StudentT

__all__ = ["Bernoulli", "Categorical", "Declared", "Gaussian", "Likelihood", "Poisson", "StudentT"]
