"""A mixture of Gaussians on a posterior with two modes and on posteriors inside the family."""

import math

import pytest
import torch

import priory as pr
from priory.core.errors import InputError
from priory.testing import GaussianMean, LinearRegression

F64 = torch.float64
EVIDENCE = 1.5


def two_modes(p):
    """0.3 N((-3, 1), diag(1/4, 1)) + 0.7 N((3, -1), diag(0.64, 0.49)), times e^1.5."""
    x, y = p["w"][..., 0], p["w"][..., 1]
    left = -0.5 * (4 * (x + 3).square() + (y - 1).square()) - math.log(0.5)
    right = -0.5 * (((x - 3) / 0.8).square() + ((y + 1) / 0.7).square()) - math.log(0.8 * 0.7)
    both = torch.logaddexp(left + math.log(0.3), right + math.log(0.7))
    return both - math.log(2 * math.pi) + EVIDENCE


def density():
    return pr.Density(two_modes, {"w": pr.Param((2,))}, batched=True)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_both_modes_are_found_with_their_weights_and_the_bound_is_the_evidence(covariance):
    """One Gaussian stays log 0.7 below. The start must be as wide as the distance of the modes."""
    method = pr.MixtureOfGaussians(covariance=covariance, learning_rate=0.05, initial_scale=2.0)
    posterior = pr.fit(density(), None, method, steps=500, progress=False)
    q = posterior.family
    order = q.components.loc[:, 0].argsort()
    torch.testing.assert_close(q.components.loc[order], torch.tensor([[-3, 1], [3, -1]], dtype=F64), rtol=0, atol=0.01)
    torch.testing.assert_close(q.proportions[order], torch.tensor([0.3, 0.7], dtype=F64), rtol=0, atol=0.01)
    bound = posterior.elbo(samples=2_000)
    assert abs(bound.value - EVIDENCE) < 0.01  # nats
    assert posterior.k_hat < 0.7
    draws = posterior.sample(2_000, seed=0)["w"]
    left = float((draws[:, 0] < 0).double().mean())
    assert abs(left - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 2_000)  # false alarms 6e-7


def test_one_component_gives_the_best_factorised_gaussian():
    exact = LinearRegression.make(0)
    method = pr.MixtureOfGaussians(components=1, learning_rate=0.05)
    posterior = pr.fit(exact.model(), exact.data, method, steps=500, batch_size=10**6, progress=False)
    best, q = exact.best_mean_field(), posterior.family.components
    assert float(((q.loc[0] - best.loc) / best.scale).abs().max()) < 0.05
    assert float((q.log_scale[0].exp() / best.scale - 1).abs().max()) < 0.03


def test_on_a_gaussian_posterior_the_bound_is_the_evidence():
    exact = GaussianMean.make(0)
    method = pr.MixtureOfGaussians(learning_rate=0.05, initial_scale=0.02)
    posterior = pr.fit(exact.density(), exact.data, method, steps=500, batch_size=10**6, progress=False)
    assert posterior.log_evidence.value == pytest.approx(exact.log_evidence, abs=1e-3)


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_a_number_of_components_that_is_not_a_positive_integer_is_refused(value):
    with pytest.raises(InputError, match="'components' argument of MixtureOfGaussians must be an integer >= 1"):
        pr.MixtureOfGaussians(components=value)


def test_an_unknown_covariance_is_refused():
    with pytest.raises(InputError, match="'covariance' argument of MixtureOfGaussians must be 'diagonal' or 'full'"):
        pr.MixtureOfGaussians(covariance="kron")


def test_a_loaded_posterior_equals_the_saved_one(tmp_path):
    posterior = pr.fit(density(), None, pr.MixtureOfGaussians(components=3), steps=5, progress=False)
    posterior.save(tmp_path / "mixture")
    loaded = pr.load(tmp_path / "mixture", density())
    assert torch.equal(loaded.theta, posterior.theta)
    assert loaded.form == posterior.form
    assert torch.equal(loaded.sample(3, seed=1)["w"], posterior.sample(3, seed=1)["w"])
