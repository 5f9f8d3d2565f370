"""A normalising flow on a posterior that no Gaussian fits."""

import math

import pytest
import torch

import priory as pr
from priory.core.errors import InputError
from priory.testing import GaussianMean, LinearRegression

F64 = torch.float64


def banana(p):
    """The unnormalised log density of x ~ N(0, 1), y ~ N(x^2, 1/4)."""
    x, y = p["w"][..., 0], p["w"][..., 1]
    return -0.5 * x.square() - 2 * (y - x.square()).square()


def banana_evidence():
    """Return the log of the integral of the density, by the trapezoid rule."""
    x, y = torch.linspace(-8, 8, 401, dtype=F64), torch.linspace(-5, 70, 3_001, dtype=F64)
    w = torch.cartesian_prod(x, y)
    return float((banana({"w": w}).exp().sum() * (x[1] - x[0]) * (y[1] - y[0])).log())


def test_a_flow_has_a_higher_bound_than_a_gaussian_on_a_banana():
    """At least 0.35 nat above the best Gaussian, and at most 4 standard errors above the evidence (6e-5)."""
    model, evidence = pr.Density(banana, {"w": pr.Param((2,))}, batched=True), banana_evidence()
    assert evidence == pytest.approx(math.log(math.pi), abs=1e-8)  # the constants are 2 pi and 1/2
    straight = pr.fit(model, None, pr.FullRank(), steps=200, progress=False).elbo(samples=10_000)
    method = pr.Flow(layers=4, hidden=16, learning_rate=0.02, initial_scale=1.0)
    bent = pr.fit(model, None, method, steps=500, progress=False).elbo(samples=10_000)
    assert bent.value - straight.value > 0.35 + 4 * math.hypot(bent.error, straight.error)
    assert bent.value < evidence + 4 * bent.error
    assert bent.value > evidence - 0.15


def test_a_flow_reaches_a_correlated_gaussian_posterior():
    """Linear regression with correlations: within 0.02 nat, where a factorised Gaussian is 0.5 nat below."""
    exact = LinearRegression.make(0)
    method = pr.Flow(layers=4, hidden=8, samples=8, learning_rate=0.02)
    posterior = pr.fit(exact.model(), exact.data, method, steps=500, batch_size=10**6, progress=False)
    bound = posterior.elbo(samples=2_000)
    assert exact.log_evidence - exact.best_mean_field().elbo > 0.5
    assert abs(bound.value - exact.log_evidence) < 0.02 + 4 * bound.error  # false alarms 6e-5
    assert posterior.k_hat < 0.7


def test_a_flow_of_one_coordinate_is_a_gaussian():
    exact = GaussianMean.make(0)
    method = pr.Flow(layers=2, hidden=4, samples=8, learning_rate=0.05)
    posterior = pr.fit(exact.density(), exact.data, method, steps=400, batch_size=10**6, progress=False)
    assert posterior.log_evidence.value == pytest.approx(exact.log_evidence, abs=1e-4)


@pytest.mark.parametrize("option", ["layers", "hidden"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_sizes_that_are_not_positive_integers_are_refused(option, value):
    with pytest.raises(InputError, match=f"'{option}' argument of Flow must be an integer >= 1"):
        pr.Flow(**{option: value})


def test_a_loaded_posterior_equals_the_saved_one(tmp_path):
    exact = LinearRegression.make(0)
    posterior = pr.fit(exact.model(), exact.data, pr.Flow(layers=3, hidden=5), steps=5, progress=False)
    posterior.save(tmp_path / "flow")
    loaded = pr.load(tmp_path / "flow", exact.model())
    assert torch.equal(loaded.theta, posterior.theta)
    assert loaded.form == posterior.form
    assert torch.equal(loaded.sample(3, seed=1)["weight"], posterior.sample(3, seed=1)["weight"])
