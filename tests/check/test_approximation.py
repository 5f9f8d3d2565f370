"""Draws of q against the joint density: moments by gradients and by weights, bounds, and the shape around a mode."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

import priory as pr
from priory.check.approximation import (
    ComparedDraws,
    compared,
    gradient_moments,
    importance_weighted_bounds,
    rows_of_fit,
    weighted_moments,
)
from priory.core.streams import stream

DOUBLE = torch.float64


def gaussian(size, seed=0):
    """A Gaussian with a full covariance: its mean, its covariance."""
    generator = stream(seed, "gaussian")
    factor = torch.randn(size, size, generator=generator, dtype=DOUBLE)
    return torch.randn(size, generator=generator, dtype=DOUBLE), factor @ factor.mT + 0.1 * torch.eye(
        size, dtype=DOUBLE
    )


def test_gradients_at_any_points_give_the_moments_of_a_gaussian_exactly():
    mean, covariance = gaussian(5)
    points = 3 + torch.rand(400, 5, generator=stream(0, "points"), dtype=DOUBLE).square()  # not normal, and elsewhere
    gradients = -(points - mean) @ torch.linalg.inv(covariance)
    found = gradient_moments(ComparedDraws(points, None, points, gradients), torch.ones(5, dtype=torch.bool))
    deviation = covariance.diagonal().sqrt()
    torch.testing.assert_close(found.ratio, points.std(0) / deviation, rtol=1e-6, atol=0)
    # C g + x is the mean at every point, so the shift has the noise of x alone, of which three errors are taken off
    shift = points.mean(0) - mean
    expected = ((shift.abs() - 3 * points.std(0) / 20).clamp(min=0)) / deviation
    torch.testing.assert_close(found.shift, expected, rtol=1e-6, atol=1e-9)


def test_weights_give_the_moments_of_the_posterior():
    x = 2 * torch.randn(40_000, 1, generator=stream(0, "x"), dtype=DOUBLE)
    ratios = (Normal(0.5, 1.0).log_prob(x) - Normal(0.0, 2.0).log_prob(x)).sum(-1)
    found = weighted_moments(ComparedDraws(x, ratios, x, x), torch.ones(1, dtype=torch.bool))
    assert float(found.ratio) == pytest.approx(2.0, rel=0.03)  # five standard errors
    assert float(found.shift) == pytest.approx(0.5, abs=0.05)


def test_importance_weighted_bounds_rise_from_the_elbo_to_the_evidence():
    assert importance_weighted_bounds(torch.full((2048,), 1.5, dtype=DOUBLE)) == pytest.approx([1.5] * 6, abs=1e-12)
    # q = N(0, 1), p = N(0, s^2): ELBO = -KL, evidence 0
    s = 1.3
    x = torch.randn(1 << 18, generator=stream(0, "iwae"), dtype=DOUBLE)
    bounds = importance_weighted_bounds(Normal(0.0, s).log_prob(x) - Normal(0.0, 1.0).log_prob(x))
    assert bounds[0] == pytest.approx(-(math.log(s) + 0.5 / s**2 - 0.5), abs=0.004)  # six standard errors
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(0.0, abs=0.002)


@pytest.mark.parametrize(("correlation", "begins"), [(0.1, "Believe it"), (0.95, "Believe the mean, not the spread")])
def test_mean_field_on_a_correlated_gaussian_has_the_mean_alone(correlation, begins):
    covariance = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=DOUBLE)
    q = MultivariateNormal(torch.tensor([1.0, -2.0], dtype=DOUBLE), covariance)
    posterior = pr.fit(
        pr.Density(lambda p: q.log_prob(p["x"]), {"x": pr.Param((2,))}), None, pr.MeanField(), progress=False
    )
    check = posterior.check()
    assert check.verdict.startswith(begins), check
    assert check["convergence"].passed  # the doubt of the status about k-hat is the item of that name
    # the mean-field optimum has the variances 1 / precision_ii = 1 - correlation^2
    assert check["spread"].value == pytest.approx(math.sqrt(1 - correlation**2), abs=0.06)


def test_laplace_is_believed_on_a_gaussian_and_not_on_a_skewed_density():
    def gamma(shape):
        return pr.Density(lambda p: shape * p["x"] - p["x"].exp(), {"x": pr.Param()})  # the log of a gamma variable

    good = pr.fit(gamma(200.0), None, pr.Laplace(), progress=False).check()
    bad = pr.fit(gamma(0.1), None, pr.Laplace(), progress=False).check()
    assert good.verdict.startswith("Believe it"), good
    assert good["shape"].value < 0.3
    assert not bad.verdict.startswith("Believe it"), bad
    assert bad["shape"].failed


def test_ratios_have_the_log_determinant_of_the_support():
    # q is exact in log s, so all ratios are equal only if the volume of the support is counted once
    density = pr.Density(
        lambda p: Normal(0.3, 0.5).log_prob(p["s"].log()) - p["s"].log(), {"s": pr.Param((), pr.constraints.positive)}
    )
    posterior = pr.fit(density, None, pr.Laplace(), progress=False)
    rows = rows_of_fit(posterior)
    assert rows is not None
    found = compared(posterior, rows, seed=0)
    assert found.log_ratios is not None
    assert float(found.log_ratios.std()) < 1e-6


def test_a_posterior_from_a_file_cannot_be_compared(tmp_path):
    x = torch.linspace(-1, 1, 40, dtype=DOUBLE)[:, None]
    model = pr.Model(torch.nn.Linear(1, 1).double(), pr.Gaussian(0.3))
    pr.fit(model, (x, 2 * x[:, 0]), pr.FullRank(), steps=400, progress=False).save(tmp_path / "p.priory")
    check = pr.load(tmp_path / "p.priory", model).check()
    assert check["k-hat"].outcome == "not known"
    assert check.verdict.startswith("Cannot tell, because the posterior comes from a file")
