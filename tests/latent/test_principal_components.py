"""Probabilistic principal components against the eigenvectors of the data's covariance."""

import pytest
import torch
from torch import Tensor

from priory.latent.principal_components import PrincipalComponents
from priory.methods.em.em import EM


@pytest.fixture
def rows() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return 3 * draw(80, 2) @ draw(2, 6) + draw(80, 6) + 10


def closed_form(y: Tensor, k: int) -> tuple[Tensor, float, float]:
    """Return W W', v and log p(y) at the maximum (Tipping and Bishop, 1999, equations 7, 8 and 4)."""
    spread = torch.cov(y.T, correction=0)
    values, vectors = torch.linalg.eigh(spread)
    noise = values[:-k].mean()
    outer = (vectors[:, -k:] * (values[-k:] - noise)) @ vectors[:, -k:].T
    fitted = torch.distributions.MultivariateNormal(y.mean(0), outer + noise * torch.eye(y.shape[1]))
    return outer, float(noise), float(fitted.log_prob(y).sum())


@pytest.mark.parametrize("k", [1, 2])
def test_em_from_a_random_start_reaches_the_closed_form(k, rows, fit_by_em):
    outer, noise, log_likelihood = closed_form(rows, k)
    posterior = fit_by_em(PrincipalComponents(k), rows, EM(start="random", tolerance=1e-12), steps=1000)
    loadings = posterior.mean["loadings"]
    torch.testing.assert_close(loadings @ loadings.T, outer, rtol=1e-4, atol=1e-4)
    assert float(posterior.mean["variance"]) == pytest.approx(noise, rel=1e-4)
    assert posterior.log_evidence.value == pytest.approx(log_likelihood, rel=1e-9)
    torch.testing.assert_close(posterior.mean["mean"], rows.mean(0), rtol=1e-8, atol=0)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_closed_form_is_a_fixed_point_of_em(k, rows, fit_by_em):
    outer, noise, log_likelihood = closed_form(rows, k)
    posterior = fit_by_em(PrincipalComponents(k), rows, EM(start="eigen", tolerance=0.0), steps=5)
    loadings = posterior.mean["loadings"]
    torch.testing.assert_close(loadings @ loadings.T, outer, rtol=1e-9, atol=1e-9)
    assert float(posterior.mean["variance"]) == pytest.approx(noise, rel=1e-10)
    assert posterior.log_evidence.value == pytest.approx(log_likelihood, rel=1e-12)


def test_the_posterior_means_are_the_shrunken_scores(rows, fit_by_em):
    posterior = fit_by_em(PrincipalComponents(2), rows, EM(start="eigen", tolerance=0.0), steps=1)
    theta, model = posterior.mean, posterior.latent
    hidden = model.hidden(theta, model.rows((rows,)))
    inner = theta["loadings"].T @ theta["loadings"] + theta["variance"] * torch.eye(2)
    scores = torch.linalg.solve(inner, theta["loadings"].T @ (rows - theta["mean"]).T).T
    torch.testing.assert_close(hidden["mean"], scores, rtol=1e-9, atol=1e-9)
