"""Latent-variable models, which EM, variational EM and amortised EM fit."""

from priory.latent.base import Expectation, Generated, Latent, Rows
from priory.latent.bayesian_mixture import BayesianGaussianMixture
from priory.latent.bayesian_regression import BayesianRegression
from priory.latent.bernoulli_mixture import BernoulliMixture
from priory.latent.conjugate import Conjugate
from priory.latent.dirichlet_process import DirichletProcessMixture
from priory.latent.expectation import expect, score
from priory.latent.factor_analysis import FactorAnalysis
from priory.latent.factor_analysis_mixture import FactorAnalysisMixture
from priory.latent.gaussian_mixture import GaussianMixture
from priory.latent.hidden_markov import HiddenMarkov
from priory.latent.linear_gaussian import LinearGaussian
from priory.latent.mixture import MixtureModel, bounds
from priory.latent.mixture_of_experts import MixtureOfExperts
from priory.latent.multinomial_mixture import MultinomialMixture
from priory.latent.normal_gamma import NormalGamma
from priory.latent.poisson_mixture import PoissonMixture
from priory.latent.principal_components import PrincipalComponents
from priory.latent.principal_components_mixture import PrincipalComponentsMixture
from priory.latent.regression_mixture import RegressionMixture
from priory.latent.vae import VAE

Mixture = MixtureModel  # its name in this namespace

__all__ = [
    "VAE",
    "BayesianGaussianMixture",
    "BayesianRegression",
    "BernoulliMixture",
    "Conjugate",
    "DirichletProcessMixture",
    "Expectation",
    "FactorAnalysis",
    "FactorAnalysisMixture",
    "GaussianMixture",
    "Generated",
    "HiddenMarkov",
    "Latent",
    "LinearGaussian",
    "Mixture",
    "MixtureModel",
    "MixtureOfExperts",
    "MultinomialMixture",
    "NormalGamma",
    "PoissonMixture",
    "PrincipalComponents",
    "PrincipalComponentsMixture",
    "RegressionMixture",
    "Rows",
    "bounds",
    "expect",
    "score",
]
