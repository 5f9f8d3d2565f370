"""A posterior against another one of the same model."""

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import priory as pr
from priory.check.reference import mmd_p_value, sliced_wasserstein
from priory.core.streams import stream

DOUBLE = torch.float64


def normal_draws(n, shift=0.0, seed=0):
    return shift + torch.randn(n, 3, generator=stream(seed, "draws"), dtype=DOUBLE)


def test_the_sliced_distance_of_a_shift_is_its_mean_projection():
    x, shift = normal_draws(500), torch.tensor([0.0, 0.0, 2.0], dtype=DOUBLE)
    # the projections of a shift on random directions in three dimensions are uniform on (-2, 2): 1 on average
    assert sliced_wasserstein(x, x + shift, seed=0) == pytest.approx(1.0, abs=0.3)  # 4 standard errors of 64 directions
    assert sliced_wasserstein(x, x, seed=0) == 0.0


def test_permutations_of_one_distribution_have_uniform_p_values_and_of_two_small_ones():
    values = torch.tensor(
        [mmd_p_value(normal_draws(60, seed=2 * s), normal_draws(60, seed=2 * s + 1), s) for s in range(40)]
    )
    assert float((values < 0.05).double().mean()) < 0.25  # 10 of 40 at 0.05: false alarm 2e-5
    assert float(values.mean()) == pytest.approx(0.5, abs=0.25)  # 5 standard errors
    assert mmd_p_value(normal_draws(250), normal_draws(250, 1.0, seed=1), 0) < 0.01


def density(correlation=0.9):
    covariance = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=DOUBLE)
    q = MultivariateNormal(torch.zeros(2, dtype=DOUBLE), covariance)
    return pr.Density(lambda p: q.log_prob(p["x"]), {"x": pr.Param((2,))})


def test_nuts_is_the_reference_of_a_small_density():
    narrow = pr.fit(density(), None, pr.MeanField(), progress=False).check(reference="nuts")
    exact = pr.fit(density(), None, pr.FullRank(), progress=False).check(reference="nuts")
    assert narrow["spread against the reference"].failed
    assert narrow["mean against the reference"].passed
    assert narrow.verdict.startswith("Believe the mean, not the spread")
    assert exact.verdict.startswith("Believe it"), exact


def test_predictions_of_networks_are_compared():
    x = torch.linspace(-1, 1, 40, dtype=DOUBLE)[:, None]
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = pr.Model(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2)).double(), pr.Categorical())
    one, other = (pr.fit(model, (x, y), pr.MAP(), steps=steps, progress=False) for steps in (1, 600))
    assert one.check(against=one)["total variation against the reference"].value == 0
    assert one.check(against=other)["total variation against the reference"].failed


def test_other_models_and_large_ones_are_refused():
    posterior = pr.fit(density(), None, pr.MAP(), steps=5, progress=False)
    other = pr.fit(pr.Density(lambda p: -p["y"].square(), {"y": pr.Param()}), None, pr.MAP(), steps=5, progress=False)
    with pytest.raises(pr.InputError, match="'against' argument of check must be a posterior of the same model"):
        posterior.check(against=other)
    with pytest.raises(pr.InputError, match="'reference' argument of check must be 'nuts' or None, got 'stan'"):
        posterior.check(reference="stan")
    wide = pr.Density(lambda p: -p["y"].square().sum(), {"y": pr.Param((1001,))})
    large = pr.fit(wide, None, pr.MAP(), steps=2, progress=False)
    with pytest.raises(pr.InputError, match="here 1,001: NUTS would take too long"):
        large.check(reference="nuts")
