"""Bayesian Gaussian mixture: the bound against enumeration, q against scikit-learn, and the choice of k."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.distributions import Dirichlet, MultivariateNormal, Wishart

from priory.core.errors import InputError
from priory.fitting.fit import fit
from priory.fitting.store import load
from priory.latent.base import Rows
from priory.latent.bayesian_mixture import BayesianGaussianMixture, discounts
from priory.latent.conjugate import kl_dirichlet, kl_wishart
from priory.methods.em.em import EM
from priory.methods.em.variational_em import VariationalEM
from priory.posteriors.conjugate import ConjugatePosterior
from priory.testing import assert_mean_close

PRIOR: dict[str, Any] = {
    "concentration": 0.8,
    "mean": [0.5, -0.3],
    "strength": 0.6,
    "spread": [[1.5, 0.4], [0.4, 0.9]],
    "freedom": 4.5,
}


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(
    model: BayesianGaussianMixture, data: Any, method: VariationalEM | None = None, steps: int = 500, seed: int = 0
) -> ConjugatePosterior:
    prepared, rows = model.meet(data)
    posterior = fit(prepared, rows, method or VariationalEM(), steps=steps, seed=seed, progress=False)
    assert isinstance(posterior, ConjugatePosterior)
    return posterior


def log_evidence(y: np.ndarray) -> float:
    """Return log p(y) of one component under PRIOR, as a product of Student's t predictive densities."""
    m, beta, nu = np.array(PRIOR["mean"]), PRIOR["strength"], PRIOR["freedom"]
    scatter = (nu - 3) * np.array(PRIOR["spread"])
    total = 0.0
    for row in y:
        freedom = nu - 1
        shape = scatter * (1 + beta) / (beta * freedom)
        total += float(stats.multivariate_t.logpdf(row, m, shape, freedom))
        difference = row - m
        scatter = scatter + beta / (1 + beta) * np.outer(difference, difference)
        m, beta, nu = m + difference / (1 + beta), beta + 1, nu + 1
    return total


def kl_components(phi: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the KL divergence between Normal-Wisharts, summed over components."""
    difference = (phi["means"] - other["means"])[..., None]
    distance = (difference * torch.linalg.solve(phi["scatter"], difference)).sum((-2, -1))
    ratio = other["beta"] / phi["beta"]
    means = 0.5 * (2 * (ratio - 1 - ratio.log()) + other["beta"] * phi["nu"] * distance)
    return float((means + kl_wishart(phi["nu"], phi["scatter"], other["nu"], other["scatter"])).sum())


# The bound.


def test_the_bound_of_one_component_is_the_exact_log_evidence():
    y = 2 * randn(0, 6, 2) + 1
    posterior = fitted(BayesianGaussianMixture(1, **PRIOR), y)
    assert posterior.log_evidence.kind == "lower bound"
    assert posterior.log_evidence.value == pytest.approx(log_evidence(y.numpy()), abs=1e-9)
    one_column = {**PRIOR, "mean": 0.5, "spread": 1.3, "freedom": 3.2}
    full, diagonal_fit = (fitted(BayesianGaussianMixture(1, c, **one_column), y[:, 0]) for c in ("full", "diagonal"))
    assert full.bound == pytest.approx(diagonal_fit.bound, rel=1e-12)


def test_the_bound_plus_the_divergence_is_the_log_evidence_by_enumeration():
    y = torch.cat([randn(1, 3, 2), randn(2, 2, 2) + 3])
    model = BayesianGaussianMixture(2, **PRIOR)
    posterior = fitted(model, y, VariationalEM(tolerance=1e-3))  # the identity holds at any q(z) q(theta)
    prepared, phi = posterior.latent, posterior.phi
    assert isinstance(prepared, BayesianGaussianMixture)
    q = posterior.responsibilities(y)
    alpha = torch.full((2,), 0.8, dtype=torch.float64)
    joint, log_q, divergence = [], [], []
    for z in itertools.product(range(2), repeat=5):
        labels = torch.tensor(z)
        one_hot = torch.nn.functional.one_hot(labels, 2).double()
        counts = one_hot.sum(0)
        log_z = (alpha + counts).lgamma().sum() - (alpha + counts).sum().lgamma()
        log_z = log_z - alpha.lgamma().sum() + alpha.sum().lgamma()
        joint.append(float(log_z) + sum(log_evidence(y[labels == k].numpy()) for k in range(2)))
        log_q.append(float((one_hot * q.log()).sum()))
        given_z = prepared.m_step_q({"sums": prepared.split_statistics(one_hot.T, Rows({"y": y}))}, {})
        divergence.append(float(kl_dirichlet(phi["alpha"], given_z["alpha"])) + kl_components(phi, given_z))
    evidence = np.logaddexp.reduce(joint)
    total = sum(
        math.exp(log_q_z) * (log_q_z - (log_p_z - evidence) + kl_theta)
        for log_q_z, log_p_z, kl_theta in zip(log_q, joint, divergence, strict=True)
    )
    assert total > 0.01
    assert posterior.bound + total == pytest.approx(evidence, abs=1e-9)


def test_the_divergence_of_wisharts_matches_gammas_in_one_dimension_and_draws_in_two():
    nu, nu0 = torch.tensor(5.0).double(), torch.tensor(3.5).double()
    v, v0 = torch.tensor([[2.0]]).double(), torch.tensor([[0.7]]).double()
    gamma = torch.distributions.Gamma
    wanted = torch.distributions.kl_divergence(gamma(nu / 2, v[0, 0] / 2), gamma(nu0 / 2, v0[0, 0] / 2))
    assert float(kl_wishart(nu, v, nu0, v0)) == pytest.approx(float(wanted), rel=1e-12)
    v, v0 = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), torch.tensor([[0.7, -0.1], [-0.1, 0.9]]).double()
    draws = torch.tensor(stats.wishart(5.0, np.linalg.inv(v.numpy())).rvs(4000, random_state=0))
    q, p = Wishart(nu, precision_matrix=v), Wishart(nu0, precision_matrix=v0)
    assert_mean_close(q.log_prob(draws) - p.log_prob(draws), kl_wishart(nu, v, nu0, v0))  # false alarms: 6e-7


def test_the_e_step_equals_the_equations_of_bishop():
    y = randn(3, 7, 2)
    posterior = fitted(BayesianGaussianMixture(2, **PRIOR), y, steps=2)
    phi = posterior.phi
    precision = torch.linalg.inv(phi["scatter"][:, 0])
    difference = y[:, None] - phi["means"][:, 0]
    distance = 2 / phi["beta"][:, 0] + phi["nu"][:, 0] * torch.einsum(
        "nki,kij,nkj->nk", difference, precision, difference
    )
    halves = (phi["nu"] + 1 - torch.tensor([1.0, 2.0]).double()) / 2
    log_det = halves.digamma().sum(1) + 2 * math.log(2) + precision.logdet()
    log_pi = phi["alpha"].digamma() - phi["alpha"].sum().digamma()
    rho = log_pi + 0.5 * log_det - math.log(2 * math.pi) - 0.5 * distance
    torch.testing.assert_close(posterior.responsibilities(y), rho.softmax(1), rtol=1e-10, atol=1e-12)
    found = posterior.latent.e_step_q(phi, Rows({"y": y}))
    torch.testing.assert_close(found.bound, rho.logsumexp(1), rtol=1e-10, atol=1e-12)
    assert bool((discounts(phi, 2) < 0).all())


def test_q_equals_that_of_scikit_learn():
    mixture = pytest.importorskip("sklearn.mixture")
    y = clusters(13, 2, 5.0, rows=30)
    sklearn_fit = mixture.BayesianGaussianMixture(
        n_components=2,
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=0.8,
        mean_prior=PRIOR["mean"],
        mean_precision_prior=0.6,
        degrees_of_freedom_prior=4.5,
        covariance_prior=1.5 * np.array(PRIOR["spread"]),
        reg_covar=0,
        max_iter=2000,
        tol=1e-14,
        random_state=0,
    ).fit(y.numpy())
    phi = fitted(BayesianGaussianMixture(2, **PRIOR), y, VariationalEM(tolerance=1e-14), steps=2000).phi
    order, sklearn_order = phi["means"][:, 0, 0].argsort(), np.argsort(sklearn_fit.means_[:, 0])
    np.testing.assert_allclose(phi["means"][order, 0].numpy(), sklearn_fit.means_[sklearn_order], rtol=1e-6, atol=1e-6)
    centre = (phi["scatter"] / phi["nu"][..., None, None])[order, 0]
    np.testing.assert_allclose(centre.numpy(), sklearn_fit.covariances_[sklearn_order], rtol=1e-6, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 5),
    covariance=st.sampled_from(["full", "diagonal"]),
    missing=st.booleans(),
)
def test_the_bound_never_falls(seed: int, k: int, covariance: str, missing: bool):
    y = randn(seed, 30, 2) * torch.tensor([1.0, 30.0]) + 5 * (randn(seed + 1, 30, 1) > 0) + 100
    if missing:
        y[randn(seed + 2, 30, 2) > 1.2] = torch.nan
        y[0] = 100.0
        y = y[~y.isnan().all(1)]
    model = BayesianGaussianMixture(k, covariance, given="weights")
    posterior = fitted(model, (y, randn(seed, len(y)).exp()), VariationalEM(tolerance=0), steps=30, seed=seed)
    bound = posterior.history["bound"]
    assert float(bound.diff().min()) >= -1e-10 * float(bound.abs().max())
    assert float(posterior.history["gap"].min()) >= -1e-10 * float(bound.abs().max())


# The number of components.


def clusters(seed: int, k: int, distance: float, rows: int = 60) -> Tensor:
    """Draw k spherical clusters on a circle, with neighbouring centres `distance` standard deviations apart."""
    angle = 2 * math.pi * torch.arange(k, dtype=torch.float64) / k
    radius = 0.0 if k == 1 else distance / (2 * math.sin(math.pi / k))
    centres = radius * torch.stack([angle.cos(), angle.sin()], 1)
    return (randn(seed, k, rows, 2) + centres[:, None]).reshape(-1, 2)


@pytest.mark.parametrize(("seed", "k", "distance"), [(0, 1, 0.0), (1, 2, 4.5), (2, 3, 4.5), (3, 4, 5.0), (4, 5, 5.0)])
def test_the_bound_chooses_the_true_number_of_components(seed: int, k: int, distance: float):
    y = clusters(seed, k, distance)
    method = VariationalEM(restarts=2, tolerance=1e-4)
    bounds = [fitted(BayesianGaussianMixture(j), y, method).log_evidence_of_labels.value for j in range(1, k + 3)]
    assert 1 + int(np.argmax(bounds)) == k


def test_label_permutations_count_only_components_that_have_rows():
    y = clusters(2, 3, 6.0, rows=30)
    posterior = fitted(BayesianGaussianMixture(3), y)
    with_permutations = posterior.log_evidence_of_labels
    assert with_permutations.value - posterior.bound == pytest.approx(math.log(6), abs=1e-12)
    assert with_permutations.kind == "lower bound with all exchanges of labels"
    phi = {name: t.clone() for name, t in posterior.phi.items()}
    phi["nu"][:2] = 4.0  # the value of the prior: two components without rows
    assert posterior.latent.symmetry(phi) == pytest.approx(math.log(3), abs=1e-12)


# Row weights and missing values.


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_row_weight_equals_that_many_repetitions(covariance: str):
    y, weights = clusters(5, 2, 5.0, rows=8), torch.arange(16) % 3
    start = fitted(BayesianGaussianMixture(2, covariance, **prior_for(covariance)), y).phi
    weighted_fit = BayesianGaussianMixture(2, covariance, **prior_for(covariance), given="weights")
    prior = weighted_fit.meet((y, weights))[0]
    unweighted_model = BayesianGaussianMixture(2, covariance, **prior_for(covariance)).meet(y)[0]
    repeated = Rows({"y": y.repeat_interleave(weights, 0)})
    repeated_rows, weighted_rows = (
        unweighted_model.e_step_q(start, repeated),
        prior.e_step_q(start, Rows({"y": y}, weights.double())),
    )
    assert float((weights * weighted_rows.bound).sum()) == pytest.approx(float(repeated_rows.bound.sum()), rel=1e-12)
    for name, t in prior.m_step_q(weighted_rows.statistics, start).items():
        torch.testing.assert_close(
            t, unweighted_model.m_step_q(repeated_rows.statistics, start)[name], rtol=1e-10, atol=1e-10
        )


def prior_for(covariance: str) -> dict[str, Any]:
    return PRIOR if covariance == "full" else {**PRIOR, "spread": [1.5, 0.9]}


def test_missing_values_are_marginalised_with_diagonal_covariances():
    y = randn(6, 9, 2)
    y[:3, 0], y[5, 1] = torch.nan, torch.nan
    joint_fit = fitted(BayesianGaussianMixture(1, "diagonal", **prior_for("diagonal")), y)
    sum_of_columns = 0.0
    for d in range(2):
        prior = {**PRIOR, "mean": PRIOR["mean"][d], "spread": [1.5, 0.9][d]}
        sum_of_columns += fitted(BayesianGaussianMixture(1, **prior), y[:, d][~y[:, d].isnan()]).bound
    assert joint_fit.bound == pytest.approx(sum_of_columns, abs=1e-9)


def test_missing_values_are_marginalised_with_full_covariances():
    posterior = fitted(BayesianGaussianMixture(2, **PRIOR), randn(7, 12, 2), steps=3)
    with_missing = torch.tensor([[0.7, torch.nan]], dtype=torch.float64)
    grid = torch.linspace(-60, 60, 20001, dtype=torch.float64)
    filled = torch.stack([torch.full_like(grid, 0.7), grid], 1)
    model, phi = posterior.latent, posterior.phi
    wanted = (model.e_step_q(phi, Rows({"y": filled})).bound.exp().sum() * (grid[1] - grid[0])).log()
    assert float(model.e_step_q(phi, Rows({"y": with_missing})).bound) == pytest.approx(float(wanted), abs=1e-9)
    grid = torch.linspace(-3000, 3000, 600001, dtype=torch.float64)
    filled = torch.stack([torch.full_like(grid, 0.7), grid], 1)
    predictive_integral = (posterior.log_predictive(filled).exp().sum() * (grid[1] - grid[0])).log()
    assert float(posterior.log_predictive(with_missing)) == pytest.approx(float(predictive_integral), abs=1e-6)


# Draws and densities of q.


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_draws_have_the_moments_of_q_and_average_to_the_predictive(covariance: str):
    y = clusters(8, 2, 4.0, rows=15)
    posterior = fitted(BayesianGaussianMixture(2, covariance), y)
    draws, mean = posterior.sample(3000, seed=0), posterior.mean
    for name in ("weights", "means", "covariances"):  # 2 + 4 + 8 comparisons (false alarms: 8e-6)
        assert_mean_close(draws[name].flatten(1), mean[name].flatten())
    model = posterior.latent
    rows = Rows({"y": y[:3]})
    each = torch.stack([model.log_marginal({n: t[i] for n, t in draws.items()}, rows) for i in range(600)])
    assert_mean_close(each.exp(), posterior.log_predictive(y[:3]).exp())
    flat = model.layout.constrain(posterior.draw(2, torch.Generator().manual_seed(0)))
    assert flat["covariances"].shape == (2, *mean["covariances"].shape)


def test_the_density_of_q_equals_that_of_torch():
    posterior = fitted(BayesianGaussianMixture(2, **PRIOR), randn(9, 10, 2))
    phi, draws = posterior.phi, posterior.sample(3, seed=2)
    lambdas = torch.linalg.inv(draws["covariances"])
    wishart = Wishart(phi["nu"][:, 0], precision_matrix=phi["scatter"][:, 0]).log_prob(lambdas)
    jacobian = 3 * lambdas.logdet()  # |d Lambda / d Sigma| = |Lambda|^(D + 1)
    normal = MultivariateNormal(phi["means"][:, 0], draws["covariances"] / phi["beta"][..., None])
    wanted = (wishart + jacobian + normal.log_prob(draws["means"])).sum(1) + Dirichlet(phi["alpha"]).log_prob(
        draws["weights"]
    )
    torch.testing.assert_close(posterior.log_prob(draws), wanted, rtol=1e-9, atol=1e-9)


def test_the_divergence_from_the_prior_equals_its_monte_carlo_estimate():
    for covariance in ("full", "diagonal"):
        posterior = fitted(BayesianGaussianMixture(2, covariance, **prior_for(covariance)), randn(10, 10, 2))
        draws = posterior.sample(3000, seed=0)
        ratio = posterior.log_prob(draws) - posterior.latent.log_prior(draws)
        assert_mean_close(ratio, posterior.latent.kl_q(posterior.phi))  # false alarms: 6e-7


def test_em_finds_the_mode_of_the_same_model():
    model, rows = BayesianGaussianMixture(2, **{**PRIOR, "concentration": 2.0}).meet(clusters(11, 2, 4.0, rows=20))
    posterior = fit(model, rows, EM(tolerance=1e-15), steps=2000, progress=False)
    w = model.layout.unconstrain(posterior.mean).requires_grad_()
    theta = model.layout.constrain(w)
    (y,) = next(iter(rows.blocks(100)))
    value = model.log_marginal(theta, Rows({"y": y})).sum() + model.log_prior(theta)
    (gradient,) = torch.autograd.grad(value, w)
    assert float(gradient.abs().max()) < 1e-4
    assert float(posterior.history["bound"].diff().min()) >= -1e-10 * abs(value.item())


def test_a_saved_posterior_loads_unchanged(tmp_path: Path):
    y = clusters(12, 2, 4.0, rows=10)
    posterior = fitted(BayesianGaussianMixture(2, "diagonal"), y)
    posterior.save(tmp_path / "mixture.priory")
    model = BayesianGaussianMixture(2, "diagonal").meet(y[:5])[0]  # no warning, because the prior is the same
    loaded = load(tmp_path / "mixture.priory", model)
    assert isinstance(loaded, ConjugatePosterior)
    for name, t in posterior.mean.items():
        assert torch.equal(loaded.mean[name], t)
    assert loaded.log_evidence_of_labels == posterior.log_evidence_of_labels
    assert torch.equal(loaded.log_predictive(y), posterior.log_predictive(y))
    assert torch.equal(loaded.predict_labels(y), posterior.predict_labels(y))
    assert float(loaded.latent.kl_q(loaded.phi)) == float(posterior.latent.kl_q(posterior.phi))


def test_degenerate_data_give_a_finite_result():
    for y in (torch.ones(5, 2), torch.zeros(1, 2), torch.stack([torch.ones(6), torch.arange(6.0)], 1)):
        for covariance in ("full", "diagonal"):
            posterior = fitted(BayesianGaussianMixture(1, covariance), y.double())
            assert math.isfinite(posterior.bound)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "The 'k' argument of BayesianGaussianMixture must be an integer >= 1, got 0."),
        (
            {"covariance": "tied"},
            "The 'covariance' argument of BayesianGaussianMixture must be one of full, diagonal, got 'tied'.",
        ),
        (
            {"concentration": 0},
            "The 'concentration' argument of BayesianGaussianMixture must be a positive number, got 0.",
        ),
        (
            {"strength": math.nan},
            "The 'strength' argument of BayesianGaussianMixture must be a positive number, got nan.",
        ),
        (
            {"freedom": 3.0},
            "The 'freedom' argument of BayesianGaussianMixture must be above 3 for full covariances of 2 "
            "columns, got 3.0",
        ),
        ({"mean": [0.0]}, "The 'mean' argument of BayesianGaussianMixture must be 2 finite numbers"),
        ({"spread": [1.0, -1.0]}, "The 'spread' argument of BayesianGaussianMixture must be positive, for 2 columns"),
        (
            {"spread": [1.0, 1.0, 1.0]},
            "The 'spread' argument of BayesianGaussianMixture must be positive, for 2 columns",
        ),
    ],
)
def test_invalid_input_raises_an_error_that_names_it(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        BayesianGaussianMixture(**{"k": 2, **options}).meet(torch.zeros(3, 2))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_row_weight_equals_that_many_repetitions_also_in_the_default_prior(covariance: str):
    y, weights = clusters(5, 2, 5.0, rows=8), torch.arange(16) % 3
    start = VariationalEM(start=fitted(BayesianGaussianMixture(2, covariance), y, steps=1))
    weighted_fit = fitted(BayesianGaussianMixture(2, covariance, given="weights"), (y, weights), start)
    repeated = fitted(BayesianGaussianMixture(2, covariance), y.repeat_interleave(weights, 0), start)
    assert weighted_fit.bound == pytest.approx(repeated.bound, abs=1e-9)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_generated_rows_follow_the_predictive_density(covariance: str):
    posterior = fitted(BayesianGaussianMixture(2, covariance), clusters(3, 2, 4.0, rows=6))
    y, z = posterior.generate(4000, seed=1)
    assert y.shape == (4000, 2)
    grid = torch.linspace(-400, 400, 80001, dtype=torch.float64)
    for d in range(2):
        one_column_known = torch.full((len(grid), 2), torch.nan, dtype=torch.float64)
        one_column_known[:, d] = grid
        cdf = posterior.log_predictive(one_column_known).exp().cumsum(0) * (grid[1] - grid[0])
        found = stats.kstest(np.interp(y[:, d], grid, cdf), "uniform")
        assert found.pvalue > 1e-5  # the false-alarm rate per column
    fractions = torch.bincount(z, minlength=2) / 4000
    error = (posterior.mean["weights"].prod() / 4000).sqrt()
    assert abs(float(fractions[0] - posterior.mean["weights"][0])) < 4.5 * float(error)  # false alarms: 1e-5
    assert torch.equal(posterior.generate(5, seed=1).y, posterior.generate(5, seed=1).y)
    assert torch.equal(posterior.hidden(y[:3])["responsibilities"], posterior.responsibilities(y[:3]))
    with pytest.raises(InputError, match=r"The 'n' argument of generate must be an integer >= 1, got 0."):
        posterior.generate(0)
