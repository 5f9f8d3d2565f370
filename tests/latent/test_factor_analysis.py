"""Factor analysis against dense Gaussians and scikit-learn, with complete and with missing values."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import FactorAnalysis as Peer
from torch import Tensor

from priory.core.errors import InputError, PrioryWarning
from priory.core.streams import stream
from priory.latent import expect, score
from priory.latent.factor_analysis import FactorAnalysis
from priory.latent.principal_components import PrincipalComponents
from priory.methods.em.em import EM
from priory.posteriors.latent import LatentPoint

KINDS = {"factors": FactorAnalysis, "components": PrincipalComponents}


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table(n: int = 60) -> Tensor:
    """Draw rows of five columns from a model with two factors, with unequal means and scales."""
    y = randn(0, n, 2) @ randn(1, 2, 5) + torch.tensor([0.3, 0.5, 0.4, 0.6, 0.2]) * randn(2, n, 5)
    return y * torch.tensor([1.0, 10.0, 0.1, 1.0, 3.0]).double() + torch.tensor([5.0, -20.0, 1.0, 0.0, 100.0]).double()


def with_missing(y: Tensor, share: float = 0.2) -> Tensor:
    return y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(4)) < share, torch.nan)


def dense(theta: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    noise = theta.get("variances", theta.get("variance"))
    assert noise is not None
    spread = theta["loadings"] @ theta["loadings"].T + torch.diag(noise.expand(5))
    return theta["mean"].numpy(), spread.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_densities_and_factors_equal_those_of_the_joint_gaussian_of_the_observed_values(kind):
    y = with_missing(table(20))
    model, data = KINDS[kind](2).meet(y)
    theta, rows = model.begin(model.rows((y,)), "random", stream(0, "test")), model.rows((y,))
    mean, spread = dense(theta)
    loadings = theta["loadings"].numpy()
    found, latent = model.e_step(theta, rows), model.hidden(theta, rows)
    torch.testing.assert_close(model.log_marginal(theta, rows), found.bound, rtol=1e-12, atol=1e-12)
    for n, row in enumerate(y.numpy()):
        s = ~np.isnan(row)
        inner = spread[np.ix_(s, s)]
        assert float(found.bound[n]) == pytest.approx(scipy.stats.multivariate_normal(mean[s], inner).logpdf(row[s]))
        gain = np.linalg.solve(inner, loadings[s]).T
        np.testing.assert_allclose(latent["mean"][n], gain @ (row[s] - mean[s]), rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(latent["covariance"][n], np.eye(2) - gain @ loadings[s], rtol=1e-8, atol=1e-8)
    (whole,) = expect(model, [theta], data.blocks(7))
    torch.testing.assert_close(whole.statistics["moments"], found.statistics["moments"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_fishers_identity_holds_and_the_gradient_of_q_is_zero_at_the_m_step(kind):
    y = with_missing(table())
    model, data = KINDS[kind](2).meet(y)
    theta = model.begin(model.rows((y,)), "random", stream(0, "test"))
    u = model.layout.unconstrain(theta).requires_grad_()
    model.log_marginal(model.layout.constrain(u), model.rows((y,))).sum().backward()
    torch.testing.assert_close(score(model, theta, data), u.grad, rtol=1e-8, atol=1e-7)
    (found,) = expect(model, [theta], data.blocks(100))
    best = model.layout.unconstrain(model.m_step(found.statistics, theta)).requires_grad_()
    model.complete(model.layout.constrain(best), found.statistics).backward()
    assert best.grad is not None
    assert float(best.grad.abs().max()) < 1e-6


def test_q_and_the_entropy_of_the_factors_add_up_to_the_likelihood():
    y = table()
    model, data = FactorAnalysis(2).meet(y)
    theta = model.begin(model.rows((y,)), "random", stream(0, "test"))
    (found,) = expect(model, [theta], data.blocks(100))
    covariance = model.hidden(theta, model.rows((y,)))["covariance"]
    entropy = 0.5 * torch.logdet(2 * math.pi * math.e * covariance).sum()
    torch.testing.assert_close(model.complete(theta, found.statistics) + entropy, found.bound, rtol=1e-10, atol=0)


def test_the_maximum_equals_that_of_scikit_learn(fit_by_em):
    y = table(200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sklearn_fit = Peer(2, tol=1e-12, max_iter=5000, svd_method="lapack").fit(y.numpy())
    found = {"mean": sklearn_fit.mean_, "loadings": sklearn_fit.components_.T, "variances": sklearn_fit.noise_variance_}
    start = {name: torch.from_numpy(t) for name, t in found.items()}
    total = sklearn_fit.score(y.numpy()) * 200
    at_sklearn_maximum = fit_by_em(FactorAnalysis(2), y, EM(start=start, tolerance=0.0), steps=1)
    # a further step at the maximum gains nothing
    assert at_sklearn_maximum.log_evidence.value == pytest.approx(total, rel=1e-10)
    fit = fit_by_em(FactorAnalysis(2), y, EM(tolerance=1e-8, accelerate=True), steps=300)
    assert fit.log_evidence.value == pytest.approx(total, rel=1e-6)
    _, spread = dense(fit.mean)
    np.testing.assert_allclose(spread, sklearn_fit.get_covariance(), rtol=0.02, atol=0.02)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(list(KINDS)), k=st.integers(1, 4), missing=st.booleans())
def test_the_bound_never_falls(seed, kind, k, missing):
    y = with_missing(table(15)) if missing else table(15)
    model, data = KINDS[kind](k).meet(y)
    theta, before = model.begin(model.rows((y,)), "random", stream(seed, "begin")), -math.inf
    for _ in range(8):
        (found,) = expect(model, [theta], data.blocks(100))
        assert float(found.bound) >= before - 1e-10 * abs(float(found.bound))
        before, theta = float(found.bound), model.m_step(found.statistics, theta)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_weight_equals_that_many_repetitions(kind, fit_by_em):
    y, weights = with_missing(table(20)), torch.arange(20.0) % 3
    weighted_fit = fit_by_em(KINDS[kind](1, given="weights"), (y, weights), EM(start="eigen", tolerance=0.0), steps=3)
    repeated = fit_by_em(KINDS[kind](1), y.repeat_interleave(weights.long(), 0), EM(start=weighted_fit.mean), steps=1)
    again = fit_by_em(KINDS[kind](1, given="weights"), (y, weights), EM(start=weighted_fit.mean), steps=1)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(again.mean[name], t, rtol=1e-8, atol=1e-10)


def test_a_posterior_is_rebuilt_from_its_tensors_and_float32_agrees_with_float64(fit_by_em):
    y = table()
    posterior = fit_by_em(FactorAnalysis(2), y, steps=20)
    rebuilt = LatentPoint.of_tensors(posterior.target, posterior.tensors(), {}, **posterior.to_json())
    torch.testing.assert_close(rebuilt.log_likelihood(y), posterior.log_likelihood(y), rtol=0, atol=0)
    single = fit_by_em(FactorAnalysis(2), y.float(), steps=20)
    assert single.log_evidence.value == pytest.approx(posterior.log_evidence.value, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_generated_rows_have_the_moments_of_the_model(kind, fit_by_em):
    posterior = fit_by_em(KINDS[kind](2), table(), steps=5)
    y, z = posterior.generate(20_000)
    mean, spread = (torch.as_tensor(t) for t in dense(posterior.mean))
    size = spread.diagonal().sqrt()
    # 5 means, 25 covariances and 10 covariances with the factors, at 5 standard errors: false alarms below 1e-4
    assert bool(((y.mean(0) - mean).abs() < 5 * size / 20_000**0.5).all())
    assert bool(((y.T.cov() - spread).abs() < 5 * (2 / 20_000) ** 0.5 * size[:, None] * size).all())
    cross = (y - mean).T @ z / 20_000
    assert bool(((cross - posterior.mean["loadings"]).abs() < 5 * (2 / 20_000) ** 0.5 * size[:, None]).all())


def test_the_noise_of_collinear_columns_is_held_at_the_floor_with_a_warning(fit_by_em):
    y = table()
    y[:, 1] = 2 * y[:, 0]
    with pytest.warns(PrioryWarning, match="explain columns 0, 1 completely: the noise is held at 0.001"):
        posterior = fit_by_em(FactorAnalysis(2, floor=1e-3), y, steps=500)
    assert float(posterior.history["bound"].diff().min()) > -1e-8


def test_rows_without_any_value_give_a_warning():
    y = table()
    y[:2] = torch.nan
    with pytest.warns(PrioryWarning, match=r"2 rows have no value, and say nothing about FactorAnalysis\(2\)"):
        model, _ = FactorAnalysis(2).meet(y)
    theta = model.begin(model.rows((y,)), "eigen", stream(0, "test"))
    assert model.e_step(theta, model.rows((y,))).bound[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FactorAnalysis(1.5), "The 'k' argument of FactorAnalysis must be an integer >= 1, got 1.5."),
        (lambda: FactorAnalysis(1, floor=1), "The 'floor' argument of FactorAnalysis must lie between 0 and 1, got 1."),
        (
            lambda: FactorAnalysis(1, given="z"),
            "The 'given' argument of FactorAnalysis must be 'weights' or left out, got 'z'",
        ),
        (lambda: FactorAnalysis(5).meet(table()), "must be less than the columns, 5, got 5."),
        (lambda: FactorAnalysis(1).meet(torch.ones(5)), "must be (n, D), got rows of the shape ()."),
        (lambda: FactorAnalysis(1).meet(table() * torch.tensor([1, 1, 1, 1, torch.nan])), "only NaN in column 4"),
    ],
)
def test_impossible_models_and_data_raise_an_error(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
