"""Predictions of latent-variable models are mixtures of Gaussians with the interface of all predictions."""

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

import priory as pr
from priory import evaluate
from priory.predictive import (
    ClassPrediction,
    CountPrediction,
    GaussianComponents,
    Prediction,
    PredictiveDistribution,
    RegressionPrediction,
)
from priory.testing import assert_mean_close

WEIGHTS = torch.tensor([[0.2, 0.8], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
MEANS = torch.tensor([[-1.0, 2.0], [0.0, 0.5], [3.0, -7.0]], dtype=torch.float64)
VARIANCES = torch.tensor([[0.5, 1.5], [0.01, 4.0], [2.0, 1.0]], dtype=torch.float64)
EXACT = MixtureSameFamily(Categorical(WEIGHTS), Normal(MEANS, VARIANCES.sqrt()))
Y = torch.tensor([0.3, -0.4, 2.5], dtype=torch.float64)


def prediction(samples: int = 64) -> Prediction:
    return Prediction.of(GaussianComponents(WEIGHTS, MEANS, VARIANCES, samples, seed=3), lambda y: y.double())


def test_moments_and_densities_equal_those_of_the_mixture():
    found = prediction()
    torch.testing.assert_close(found.mean, EXACT.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.variance, EXACT.variance, rtol=0, atol=1e-12)
    assert torch.equal(found.epistemic, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(found.log_prob(Y), EXACT.log_prob(Y), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.log_prob(Y[:, None]), EXACT.log_prob(Y), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.cdf(Y), EXACT.cdf(Y), rtol=0, atol=1e-12)


def test_the_default_interval_has_95_percent():
    low, high = prediction().interval()
    torch.testing.assert_close(EXACT.cdf(high) - EXACT.cdf(low), torch.full_like(low, 0.95), rtol=0, atol=1e-12)
    torch.testing.assert_close(EXACT.cdf(low), torch.full_like(low, 0.025), rtol=0, atol=1e-12)


def test_samples_are_drawn_from_the_mixture():
    found = prediction(4000).samples
    assert found.shape == (4000, 3)
    assert_mean_close(found, EXACT.mean)  # 6 comparisons at five standard errors: false alarm below 4e-6
    assert_mean_close((found <= Y).double(), EXACT.cdf(Y))
    assert torch.equal(found, prediction(4000).samples)


def test_the_crps_is_the_integral_of_the_squared_error_of_the_distribution_function():
    grid = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    wanted = 0.0
    for row in range(3):
        cdf = MixtureSameFamily(Categorical(WEIGHTS[row]), Normal(MEANS[row], VARIANCES[row].sqrt())).cdf(grid)
        wanted += float((cdf - (grid >= Y[row]).double()).square().sum() * 1e-4) / 3
    assert evaluate.crps(prediction(), Y) == pytest.approx(wanted, abs=1e-4)


def test_the_crps_of_an_average_weights_its_parts():
    part = prediction()
    again = Prediction.average([part, part], torch.tensor([0.3, 0.7]))
    assert evaluate.crps(again, Y) == pytest.approx(evaluate.crps(part, Y), abs=1e-6)


def test_the_prediction_of_a_mixture_of_experts_is_a_regression_prediction():
    x = torch.linspace(-2, 2, 60, dtype=torch.float64)[:, None]
    posterior = pr.fit(pr.latent.MixtureOfExperts(2), (x, x[:, 0].abs()), pr.EM(), steps=5)
    found = posterior.predict(x[:4], samples=7)
    assert type(found) is RegressionPrediction
    assert found.samples.shape == (7, 4)
    assert repr(found) == "RegressionPrediction(4 rows, 2 components, Gaussian(noise='learn'))"
    one = Prediction.of(GaussianComponents(*torch.ones(3, 1, 1), 7, 0), lambda y: y)
    assert repr(one) == "RegressionPrediction(1 row, 1 component, Gaussian(noise='learn'))"
    with pytest.raises(pr.InputError, match="no network outputs"):
        _ = found.outputs
    with pytest.raises(pr.InputError, match="needs labels"):
        _ = found.probs


def test_the_class_of_a_prediction_follows_its_likelihood():
    f = torch.zeros(2, 3, 4)
    made = lambda likelihood, outputs: Prediction.of_draws(likelihood, outputs, {}, torch.Size(), lambda y: y)  # noqa: E731
    assert type(made(pr.Gaussian(1.0), f[..., 0])) is RegressionPrediction
    assert type(made(pr.StudentT(3.0, scale=1.0), f[..., 0])) is RegressionPrediction
    assert type(made(pr.Poisson(), f[..., 0])) is CountPrediction
    assert type(made(pr.Bernoulli(), f[..., 0])) is ClassPrediction
    assert type(made(pr.Categorical(), f)) is ClassPrediction


@pytest.mark.parametrize("abstract", [Prediction, PredictiveDistribution])
def test_the_bases_are_abstract(abstract: type):
    with pytest.raises(TypeError, match="abstract"):
        abstract()
