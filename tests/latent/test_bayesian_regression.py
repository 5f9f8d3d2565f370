"""Regression with automatic relevance determination, compared with quadrature and on simulated data."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from priory.core.errors import InputError
from priory.fitting.fit import fit
from priory.fitting.store import load
from priory.latent.base import Rows
from priory.latent.bayesian_regression import BayesianRegression
from priory.methods.em.variational_em import VariationalEM
from priory.posteriors.conjugate import ConjugatePosterior
from priory.testing import assert_mean_close

PRIOR = BayesianRegression(shape=2.0, rate=1.5, relevance_shape=1.2, relevance_rate=0.8)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(n: int = 60, d: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    x = randn(0, n, d)
    w = torch.zeros(d, dtype=torch.float64)
    w[0], w[-1] = 2.0, -1.0
    return x, x @ w + 0.3 * randn(1, n), w


def fitted(model: BayesianRegression, data: Any, method: VariationalEM | None = None, **o: Any) -> ConjugatePosterior:
    prepared, rows = model.meet(data)
    posterior = fit(prepared, rows, method or VariationalEM(tolerance=1e-14), progress=False, **{"steps": 3000, **o})
    assert isinstance(posterior, ConjugatePosterior)
    return posterior


def grids() -> tuple[np.ndarray, np.ndarray, float]:
    """Return alpha and tau on a grid of their logarithms, and the area of a cell."""
    u = np.linspace(-12, 8, 401)
    return np.exp(u)[:, None], np.exp(u)[None, :], float(u[1] - u[0]) ** 2


def test_the_bound_is_just_below_the_log_evidence_by_quadrature():
    x, y = randn(2, 6, 1), randn(3, 6)
    posterior = fitted(PRIOR, (x, y))
    alpha, tau, area = grids()
    xx, xy, yy = float((x * x).sum()), float(x[:, 0] @ y), float(y @ y)
    precision = alpha + tau * xx  # of w given alpha and tau; w is integrated out in closed form
    log_p = 0.5 * (6 * np.log(tau / (2 * np.pi)) + np.log(alpha / precision) - tau * yy + (tau * xy) ** 2 / precision)
    log_p = log_p + stats.gamma.logpdf(alpha, 1.2, scale=1 / 0.8) + stats.gamma.logpdf(tau, 2.0, scale=1 / 1.5)
    evidence = math.log(float((np.exp(log_p) * alpha * tau).sum() * area))
    assert 0 < evidence - posterior.bound < 0.2


def test_the_bound_equals_its_definition_by_quadrature():
    x, y = randn(2, 4, 1), randn(3, 4)
    posterior = fitted(PRIOR, (x, y), steps=2)
    phi = {name: float(t) for name, t in posterior.phi.items()}
    alpha, tau, area = grids()
    m, v = phi["m"], phi["V"]
    # E over q(w) of log p(y, w | alpha, tau), which is quadratic in w
    square = float((y - m * x[:, 0]).square().sum()) + v * float((x * x).sum())
    joint = (
        2 * np.log(tau / (2 * np.pi)) - 0.5 * tau * square + 0.5 * (np.log(alpha / (2 * np.pi)) - alpha * (m**2 + v))
    )
    joint = joint + stats.gamma.logpdf(alpha, 1.2, scale=1 / 0.8) + stats.gamma.logpdf(tau, 2.0, scale=1 / 1.5)
    log_q = stats.gamma.logpdf(alpha, phi["c"], scale=1 / phi["d"]) + stats.gamma.logpdf(
        tau, phi["a"], scale=1 / phi["b"]
    )
    found = float((np.exp(log_q) * (joint - log_q) * alpha * tau).sum() * area) + float(stats.norm.entropy(m, v**0.5))
    assert posterior.bound == pytest.approx(found, abs=1e-8)


def test_the_bound_is_stationary_in_each_factor():
    x, y, _ = problem(12, 3)
    posterior = fitted(PRIOR, (x, y))
    model, phi = posterior.latent, {name: t.clone().requires_grad_() for name, t in posterior.phi.items()}
    found = model.e_step_q(phi, Rows({"x": x, "y": y}))
    bound = found.bound.sum() - model.kl_q(phi)
    gradients = torch.autograd.grad(bound, list(phi.values()))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-5
    from_statistics = model.complete_q(phi, found.statistics) - model.kl_q(phi)
    assert from_statistics.item() == pytest.approx(bound.item(), rel=1e-12)


def test_irrelevant_inputs_get_a_high_precision():
    x, y, w = problem()
    posterior = fitted(BayesianRegression(), (x, y), VariationalEM(tolerance=1e-10))
    relevance = posterior.mean["relevance"]
    assert float(relevance[1:-1].min()) > 20 * float(relevance[[0, -1]].max())
    torch.testing.assert_close(posterior.mean["weights"], w, atol=0.15, rtol=0)  # 4 standard errors, 0.3 / sqrt(60)
    smaller = fitted(BayesianRegression(), (x[:, [0, -1]], y), VariationalEM(tolerance=1e-10))
    assert smaller.bound > posterior.bound  # the smaller model generated the data


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_never_falls(seed: int):
    x, y = randn(seed, 15, 4), 10**seed * randn(seed + 9, 15)
    posterior = fitted(BayesianRegression(), (x, y), VariationalEM(tolerance=0), steps=60, seed=seed)
    bound = posterior.history["bound"]
    assert float(bound.diff().min()) >= -1e-10 * float(bound.abs().max())


def test_predictions_have_the_moments_of_q():
    x, y, _ = problem()
    posterior = fitted(PRIOR, (x, y))
    phi, new = posterior.phi, randn(5, 3, 5)
    prediction = posterior.predict(new, samples=4000)
    assert_mean_close(prediction.outputs, new @ phi["m"])
    wanted = ((new @ phi["V"]) * new).sum(1)
    assert_mean_close((prediction.outputs - new @ phi["m"]).square(), wanted)
    noise = phi["b"] / (phi["a"] - 1)
    torch.testing.assert_close(prediction.aleatoric, noise.expand(3), rtol=0.05, atol=0)  # 10 standard errors
    density = posterior.log_predictive((new, new @ phi["m"]), samples=2000)
    torch.testing.assert_close(density, prediction.log_prob(new @ phi["m"]), atol=0.05, rtol=0)


def test_draws_of_q_have_its_mean_and_its_divergence_from_the_prior():
    posterior = fitted(PRIOR, problem(20, 2)[:2])
    draws = posterior.sample(3000, seed=0)
    for name, mean in posterior.mean.items():
        assert_mean_close(draws[name], mean)
    ratio = posterior.log_prob(draws) - posterior.latent.log_prior(draws)
    assert_mean_close(ratio, posterior.latent.kl_q(posterior.phi))  # false alarms: 6e-7


def test_a_saved_posterior_loads_unchanged(tmp_path: Path):
    x, y, _ = problem()
    posterior = fitted(PRIOR, (x, y))
    posterior.save(tmp_path / "regression.priory")
    loaded = load(tmp_path / "regression.priory", PRIOR.meet((x[:4], y[:4]))[0])
    assert torch.equal(loaded.predict(x[:3]).mean, posterior.predict(x[:3]).mean)
    assert loaded.log_evidence == posterior.log_evidence


def test_invalid_input_raises_an_error_that_names_it():
    for name in ("shape", "rate", "relevance_shape", "relevance_rate"):
        with pytest.raises(
            InputError, match=f"The '{name}' argument of BayesianRegression must be a positive number, got -1"
        ):
            BayesianRegression(**{name: -1})
    with pytest.raises(InputError, match=r"must be \(n, D\)"):
        PRIOR.meet((torch.zeros(3), torch.zeros(3)))
    with pytest.raises(InputError, match=r"must be one column, \(n,\)"):
        PRIOR.meet((torch.zeros(3, 2), torch.zeros(3, 2)))
    posterior = fitted(PRIOR, (randn(0, 4, 2), randn(1, 4)), steps=2)
    with pytest.raises(InputError, match=r"The 'x' argument of predict must have rows of the shape \(2,\)"):
        posterior.predict(torch.zeros(3, 1))
    with pytest.raises(InputError, match="has no responsibilities"):
        posterior.responsibilities((randn(0, 4, 2), randn(1, 4)))
