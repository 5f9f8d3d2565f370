"""Truncated Dirichlet-process mixture: stick-breaking weights, the bound, and the number of components in use."""

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from priory.core.errors import InputError
from priory.fitting.fit import fit
from priory.latent.base import Rows
from priory.latent.dirichlet_process import DirichletProcessMixture, broken
from priory.methods.em.em import EM
from priory.methods.em.variational_em import VariationalEM
from priory.posteriors.conjugate import ConjugatePosterior
from priory.testing import assert_mean_close


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clusters(rows: int = 30) -> Tensor:
    centres = torch.tensor([[0.0, 0.0], [7.0, 0.0], [0.0, 7.0]], dtype=torch.float64)
    return (randn(0, 3, rows, 2) + centres[:, None]).reshape(-1, 2)


def fitted(
    model: DirichletProcessMixture, data: Any, method: VariationalEM | None = None, **o: Any
) -> ConjugatePosterior:
    prepared, rows = model.meet(data)
    posterior = fit(prepared, rows, method or VariationalEM(), progress=False, **o)
    assert isinstance(posterior, ConjugatePosterior)
    return posterior


def test_only_as_many_components_get_rows_as_there_are_clusters():
    posterior = fitted(DirichletProcessMixture(8), clusters(), VariationalEM(restarts=3), steps=500)
    weights = posterior.mean["weights"]
    assert int((weights > 0.02).sum()) == 3
    assert len(posterior.predict_labels(clusters()).unique()) == 3
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
    assert posterior.log_evidence_of_labels.value == posterior.bound


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_never_falls(seed: int):
    covariance = ("full", "diagonal")[seed % 2]
    model = DirichletProcessMixture(5, covariance, concentration=0.1 * 10**seed)
    posterior = fitted(model, randn(seed, 30, 2), VariationalEM(tolerance=0), steps=40, seed=seed)
    bound = posterior.history["bound"]
    assert float(bound.diff().min()) >= -1e-10 * float(bound.abs().max())


def test_stick_breaking_weights_equal_those_of_blei_and_jordan():
    model = DirichletProcessMixture(3, concentration=2.5).meet(clusters(4))[0]
    sticks = model.weight_step(torch.tensor([5.0, 2.0, 1.5]).double())["sticks"]
    assert sticks.tolist() == [[6.0, 2.5 + 3.5], [3.0, 2.5 + 1.5]]
    phi = {"sticks": sticks}
    log_v, log_rest = sticks[:, 0].digamma() - sticks.sum(1).digamma(), sticks[:, 1].digamma() - sticks.sum(1).digamma()
    wanted = torch.stack([log_v[0], log_rest[0] + log_v[1], log_rest[0] + log_rest[1]])
    torch.testing.assert_close(model.log_weights_q(phi), wanted, rtol=1e-12, atol=0)
    draws = model.weight_sample(phi, 4000, torch.Generator().manual_seed(0))
    assert_mean_close(draws, model.weight_mean(phi))  # 6 comparisons (false alarms: 3e-6)
    assert_mean_close(draws.log(), model.log_weights_q(phi))


def test_the_density_of_the_weights_is_the_transformed_density_of_the_sticks():
    model = DirichletProcessMixture(3, concentration=2.5).meet(clusters(4))[0]
    v = torch.tensor([0.3, 0.6], dtype=torch.float64, requires_grad=True)
    pi = broken(v.log(), (1 - v).log()).exp()
    jacobian = torch.autograd.functional.jacobian(lambda v: broken(v.log(), (1 - v).log()).exp()[:2], v.detach())
    wanted = stats.beta.logpdf([0.3, 0.6], 1, 2.5).sum() - float(jacobian.det().abs().log())
    prior = model.weight_prior(pi.detach())
    assert float(model.log_weight_q(prior, pi.detach())) == pytest.approx(wanted, abs=1e-10)


def test_the_divergence_from_the_prior_equals_its_monte_carlo_estimate():
    posterior = fitted(DirichletProcessMixture(4, concentration=1.7), clusters(5))
    draws = posterior.sample(3000, seed=0)
    ratio = posterior.log_prob(draws) - posterior.latent.log_prior(draws)
    assert_mean_close(ratio, posterior.latent.kl_q(posterior.phi))  # false alarms: 6e-7


def test_a_higher_truncation_hardly_changes_the_predictive_density():
    method = VariationalEM(tolerance=1e-9)
    ten, fourteen = (fitted(DirichletProcessMixture(k), clusters(), method, steps=2000, seed=1) for k in (10, 14))
    new = torch.tensor([[1.0, 1.0], [20.0, 20.0]], dtype=torch.float64)
    torch.testing.assert_close(ten.log_predictive(new), fourteen.log_predictive(new), atol=0.02, rtol=0)


def test_the_start_sorts_components_by_their_number_of_rows():
    model = DirichletProcessMixture(3).meet(clusters())[0]
    y = torch.cat([clusters()[:5], clusters()[30:]])
    phi = model.begin_q(Rows({"y": y}), "k-means++", torch.Generator().manual_seed(0))
    assert bool((phi["nu"][:, 0].diff() <= 0).all())


def test_invalid_input_raises_an_error_that_names_it():
    with pytest.raises(InputError, match="The 'k' argument of DirichletProcessMixture must be an integer >= 2"):
        DirichletProcessMixture(1)
    with pytest.raises(
        InputError, match="The 'given' argument of DirichletProcessMixture must be 'weights' or nothing"
    ):
        DirichletProcessMixture(3, given="z")
    prepared, rows = DirichletProcessMixture(3).meet(clusters(4))
    with pytest.raises(InputError, match="has no mode: fit it by VariationalEM"):
        fit(prepared, rows, EM(), progress=False)
