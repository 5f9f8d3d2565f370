"""The references of `benchmarks/posteriordb.py` are of the densities that are sampled.

Where a reference integrates over the parameters themselves, its log density equals that of the model plus the Jacobian,
which comes from autograd. Where it integrates out Gaussian effects or states, so does the test: a density that is
quadratic in them is integrated by its value, gradient and Hessian at one point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

Captured = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any], Tensor]


@pytest.fixture(scope="module")
def references(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("_references")


@pytest.fixture(scope="module")
def practice(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("_practice")


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    """Numbers in 64 bits: torch's Gamma and HalfCauchy of Python numbers cast their argument to the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def captured(references: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], Captured]:
    """The log density, the moments and the start that a reference gives to its importance sampler."""

    def of(name: str, data: Any) -> Captured:
        monkeypatch.setattr(references, "importance", lambda f, start, moments, **_: (f, moments, torch.tensor(start)))
        return references.REFERENCES[name](data)

    return of


def near(start: Tensor, count: int = 3) -> Tensor:
    return start + 0.2 * torch.randn(count, len(start), generator=torch.Generator().manual_seed(0))


def same_up_to_a_constant(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found - found[0], expected - expected[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "name", ["zero_inflated_poisson", "censored_weibull", "ordered_mixture", "gp_cholesky", "sir_rk4", "hmm_forward"]
)
def test_the_density_of_a_reference_is_that_of_its_model(practice: ModuleType, captured: Any, name: str):
    simulate, model = practice.PRACTICE[name]
    density = model(simulate())
    log_density, moments, start = captured(name, simulate())
    u = near(start)

    def free(one: Tensor) -> Tensor:
        """The entries of the parameters that vary freely: of a row of a simplex, all but the last."""
        values = {n: x[0] for n, x in moments(one[None])[0].items()}
        return torch.cat([(x[..., :-1] if n == "moves" else x).flatten() for n, x in values.items()])

    jacobian = torch.stack([torch.linalg.slogdet(torch.func.jacrev(free)(one))[1] for one in u])
    values = moments(u)[0]
    own = torch.stack([density.log_prob({n: x[i] for n, x in values.items()}) for i in range(len(u))])
    same_up_to_a_constant(log_density(u), own + jacobian)


def integrated(log_prob: Callable[[Tensor], Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log of the integral of exp(log_prob), quadratic in its argument, with the mean and the covariance."""
    zero = torch.zeros(size)
    gradient, hessian = torch.func.grad(log_prob)(zero), torch.func.jacrev(torch.func.grad(log_prob))(zero)
    mean = -torch.linalg.solve(hessian, gradient)
    log_integral = log_prob(mean) - 0.5 * torch.linalg.slogdet(-hessian)[1]
    return log_integral, mean, torch.linalg.inv(-hessian)


def test_the_states_of_the_autoregression_are_integrated_out(practice: ModuleType, captured: Any):
    data = practice.ar2_data()
    density = practice.ar2_states(data)
    log_density, moments, start = captured("ar2_states", data)
    u = near(start)
    values, variances = moments(u)
    expected = []
    for i, one in enumerate(u):
        p = {"phi": one[:2], "sigma": one[2].exp(), "tau": one[3].exp()}
        value, mean, cov = integrated(lambda x, p=p: density.log_prob({**p, "x": x}), 100)
        expected.append(value + one[2] + one[3])
        torch.testing.assert_close(values["x"][i], mean[::10], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(variances["x"][i], cov.diagonal()[::10], rtol=1e-8, atol=1e-8)
    same_up_to_a_constant(log_density(u), torch.stack(expected))


def test_the_effects_of_the_varying_slopes_are_integrated_out(practice: ModuleType, captured: Any):
    data = practice.slopes_data()
    density = practice.lkj_slopes(data)
    log_density, moments, start = captured("lkj_slopes", data)
    u = near(start)
    values, variances = moments(u)
    expected = []
    for i, one in enumerate(u):
        rho, tau = one[4].tanh(), one[2:4].exp()
        root = (1 - rho**2).sqrt()
        factor = torch.stack([torch.stack([torch.ones(()), torch.zeros(())]), torch.stack([rho, root])])
        p = {"beta": one[:2], "tau": tau, "L": factor, "sigma": one[5].exp()}
        value, mean, cov = integrated(lambda z, p=p: density.log_prob({**p, "z": z.reshape(30, 2)}), 60)
        expected.append(value + one[2] + one[3] + one[5] + 2 * root.log())
        to_effect = tau[:, None] * factor
        torch.testing.assert_close(values["effect"][i], (mean.reshape(30, 2) @ to_effect.T)[:5], rtol=1e-8, atol=1e-8)
        spread = torch.stack([to_effect @ cov[2 * g : 2 * g + 2, 2 * g : 2 * g + 2] @ to_effect.T for g in range(5)])
        torch.testing.assert_close(variances["effect"][i], spread.diagonal(dim1=1, dim2=2), rtol=1e-8, atol=1e-8)
    same_up_to_a_constant(log_density(u), torch.stack(expected))


def test_the_effects_of_the_hierarchical_logit_are_integrated_out(practice: ModuleType, captured: Any):
    """By the trapezoidal rule: the reference's 32 nodes are off by less than 1e-4 nats over all 200 groups."""
    data = practice.logit_data()
    log_density, moments, _ = captured("hierarchical_logit", data)
    u = torch.tensor([[-0.4, -0.2, 0.7, -0.3, 0.2], [0.1, 0.1, 0.5, 0.0, 0.1]])
    z = np.linspace(-12, 12, 1201)
    expected, first = [], []
    for mu, log_tau, *beta in u.tolist():
        tau = math.exp(log_tau)
        eta = mu + tau * z + (data["X"] @ beta)[:, None]
        rows = np.where(data["y"][:, None] == 1, -np.log1p(np.exp(-eta)), -np.log1p(np.exp(eta)))
        weight = np.exp(rows.reshape(200, 10, -1).sum(1) - 0.5 * z**2)
        prior = -(mu**2) / 8 - tau**2 / 2 + log_tau - np.square(beta).sum() / 2
        expected.append(np.log(weight.sum(1)).sum() + prior)
        first.append(tau * (weight @ z / weight.sum(1))[:10])
    found, known = log_density(u), torch.tensor(expected)
    assert float(found[1] - found[0]) == pytest.approx(float(known[1] - known[0]), abs=1e-4)
    torch.testing.assert_close(moments(u)[0]["effect"], torch.tensor(np.array(first)), rtol=1e-5, atol=1e-6)


def test_flat_priors_give_the_students_t_of_a_regression(references: ModuleType, practice: ModuleType):
    data = practice.response_data()
    found = references.regression(data, [1e12, 1e12], 1e12)
    X, y = data["X"], data["y"]
    best, square, *_ = np.linalg.lstsq(X, y, rcond=None)
    # sigma^2 is inverse gamma with the shape (n - p - 1) / 2, as the prior is flat in sigma
    variance = square[0] / (len(y) - 2 - 3)
    spread = np.sqrt(np.diag(np.linalg.inv(X.T @ X)) * variance)
    assert found["beta"]["mean"] == pytest.approx(best.tolist(), rel=1e-8)
    assert found["beta"]["sd"] == pytest.approx(spread.tolist(), rel=1e-8)
    second = found["sigma"]["mean"] ** 2 + found["sigma"]["sd"] ** 2
    assert second == pytest.approx(variance, rel=1e-8)


def test_importance_sampling_finds_the_moments_of_a_gaussian(references: ModuleType):
    """Within 4 standard errors: at fixed seeds, and once in 2,600 seeds otherwise (6 comparisons)."""
    root = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
    log_density = lambda u: -0.5 * (torch.linalg.solve(root, (u - 3).mT).square().sum(0))  # noqa: E731
    moments = lambda u: ({"x": u, "noisy": u[:, 0]}, {"x": 0 * u, "noisy": torch.ones(len(u))})  # noqa: E731
    found = references.importance(log_density, [0.0, 0.0], moments, draws=20_000)
    for name, sd in (("x", [1.0, 1.0]), ("noisy", math.sqrt(2))):
        entry = {key: np.array(value) for key, value in found[name].items()}
        assert np.all(np.abs(entry["mean"] - 3) < 4 * entry["mcse_mean"])
        assert np.all(np.abs(entry["sd"] - sd) < 4 * entry["mcse_sd"])
        assert np.all(entry["mcse_mean"] < 0.02)
