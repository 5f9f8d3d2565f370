"""The univariate normal by coordinate ascent, against the exact Normal-Gamma posterior and quadrature."""

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
from priory.fitting.prepare import make_target
from priory.fitting.run import Run
from priory.fitting.store import load
from priory.latent.base import Rows
from priory.latent.conjugate import VariationalView
from priory.latent.expectation import expect
from priory.latent.normal_gamma import NormalGamma
from priory.methods.em.variational_em import VariationalEM
from priory.posteriors.conjugate import ConjugatePosterior
from priory.testing import assert_mean_close

PRIOR = NormalGamma(mean=0.5, strength=0.7, shape=1.5, rate=2.0)


def column(n: int, seed: int = 0) -> Tensor:
    return 3 + 2 * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(model: NormalGamma, y: Tensor, method: VariationalEM | None = None, steps: int = 300) -> ConjugatePosterior:
    method = method or VariationalEM(tolerance=1e-15)
    prepared, rows = model.meet(y)
    target = make_target(prepared, rows)
    run = Run(target, method, method.plan(target, rows, steps, 0), 0, None)
    run.run(False, [])
    return run.posterior()  # pyright: ignore[reportReturnType]


def joint(mu: Any, tau: Any, y: Tensor) -> Any:
    """Return log p(y, mu, tau), computed with SciPy."""
    rows = sum(stats.norm.logpdf(value, mu, tau**-0.5) for value in y.tolist())
    return rows + stats.norm.logpdf(mu, 0.5, (0.7 * tau) ** -0.5) + stats.gamma.logpdf(tau, 1.5, scale=1 / 2.0)


def integral(log_q: Any, value: Any, centre: float, precision: Any) -> float:
    """Integrate exp(log_q) value over mu = centre + x / sqrt(precision) and log tau by sums on a grid."""
    x, u = np.linspace(-15, 15, 601), np.linspace(-14, 5, 761)
    tau = np.exp(u)[:, None]
    root = np.sqrt(precision(tau))
    mu = centre + x / root
    inside = np.exp(log_q(mu, tau)) * value(mu, tau) * tau / root
    return float(inside.sum() * (x[1] - x[0]) * (u[1] - u[0]))


def test_the_exact_evidence_equals_its_integral():
    y = column(3)
    found = integral(
        lambda mu, tau: joint(mu, tau, y), lambda mu, tau: 1.0, PRIOR.exact_posterior(y)["mean"], lambda tau: tau
    )
    assert PRIOR.exact_posterior(y)["log_evidence"] == pytest.approx(math.log(found), abs=1e-8)


def test_the_prior_agrees_with_scipy():
    model = PRIOR.meet(column(3))[0]
    theta = {"mean": torch.tensor(1.2, dtype=torch.float64), "precision": torch.tensor(0.4, dtype=torch.float64)}
    assert float(model.log_prior(theta)) == pytest.approx(float(joint(1.2, 0.4, torch.empty(0))), abs=1e-10)


def test_the_bound_equals_its_definition_by_quadrature():
    y = column(3)
    posterior = fitted(PRIOR, y, steps=1)
    phi = {name: float(t) for name, t in posterior.phi.items()}

    def log_q(mu: Any, tau: Any) -> Any:
        log_q_mean = stats.norm.logpdf(mu, phi["m"], phi["l"] ** -0.5)
        return log_q_mean + stats.gamma.logpdf(tau, phi["a"], scale=1 / phi["b"])

    found = integral(log_q, lambda mu, tau: joint(mu, tau, y) - log_q(mu, tau), phi["m"], lambda tau: phi["l"])
    assert posterior.bound == pytest.approx(found, abs=1e-8)


def test_the_bound_plus_the_divergence_is_the_exact_log_evidence():
    y = column(10)
    posterior, exact = fitted(PRIOR, y), PRIOR.exact_posterior(y)
    phi = {name: float(t) for name, t in posterior.phi.items()}
    tau, log_tau = phi["a"] / phi["b"], float(posterior.phi["a"].digamma() - posterior.phi["b"].log())
    # E_q[log p(mu, tau | y)] under the exact Normal-Gamma posterior
    square = (phi["m"] - exact["mean"]) ** 2 + 1 / phi["l"]
    log_q_mean = 0.5 * (math.log(exact["strength"] / (2 * math.pi)) + log_tau - exact["strength"] * tau * square)
    a, b = exact["shape"], exact["rate"]
    log_q_precision = a * math.log(b) - math.lgamma(a) + (a - 1) * log_tau - b * tau
    entropy = stats.norm.entropy(scale=phi["l"] ** -0.5) + stats.gamma.entropy(phi["a"], scale=1 / phi["b"])
    divergence = -float(entropy) - log_q_mean - log_q_precision
    assert divergence > 0
    assert posterior.log_evidence.value + divergence == pytest.approx(exact["log_evidence"], abs=1e-9)


def test_the_means_of_mean_and_precision_are_exact():
    y = column(50)
    posterior, exact = fitted(PRIOR, y), PRIOR.exact_posterior(y)
    assert float(posterior.mean["mean"]) == pytest.approx(exact["mean"], rel=1e-12)
    # The shape of q(tau) is larger by 1/2 and its rate by the variance of q(mu), so the means agree at the fixed point.
    assert float(posterior.mean["precision"]) == pytest.approx(exact["shape"] / exact["rate"], rel=1e-9)
    assert 0 < exact["log_evidence"] - posterior.log_evidence.value < 0.01


def test_under_a_flat_prior_the_mean_precision_is_that_of_the_sample():
    # The fixed point of a = (N + 1) / 2 and b = (sum of squares + 1 / E[tau]) / 2 is E[tau] = N / sum of squares.
    y = column(20)
    posterior = fitted(NormalGamma(0.0, strength=1e-9, shape=1e-9, rate=1e-9), y)
    assert 1 / float(posterior.mean["precision"]) == pytest.approx(float(y.var(correction=0)), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_never_falls_and_restarts_agree(seed: int):
    y = column(7, seed)
    posterior = fitted(PRIOR, y, VariationalEM(start="random", restarts=3, tolerance=1e-14))
    bound = posterior.history["bound"]
    assert float(bound.diff().min()) >= -1e-10 * float(bound.abs().max())
    assert posterior.converged
    assert posterior.bound == pytest.approx(fitted(PRIOR, y).bound, abs=1e-9)


def test_the_bound_from_statistics_equals_the_bound_from_rows():
    y = column(9)
    posterior = fitted(PRIOR, y)
    model = posterior.latent
    (found,) = expect(VariationalView(model), [posterior.phi], [(y,)])
    from_statistics = model.complete_q(posterior.phi, found.statistics) - model.kl_q(posterior.phi)
    assert float(from_statistics) == pytest.approx(posterior.bound, rel=1e-12)
    theta = posterior.mean
    point = model.e_step(theta, Rows({"y": y}))
    assert float(model.complete(theta, point.statistics)) == pytest.approx(float(point.bound.sum()), rel=1e-12)


def test_draws_have_the_moments_of_q_and_log_prob_is_the_density_of_q():
    posterior = fitted(PRIOR, column(12))
    phi, draws = posterior.phi, posterior.sample(4000, seed=1)
    assert_mean_close(draws["mean"], phi["m"])
    assert_mean_close(draws["precision"], phi["a"] / phi["b"])
    q = stats.norm.logpdf(1.5, float(phi["m"]), float(phi["l"]) ** -0.5)
    q += stats.gamma.logpdf(0.5, float(phi["a"]), scale=1 / float(phi["b"]))
    point = {"mean": torch.tensor(1.5).double(), "precision": torch.tensor(0.5).double()}
    assert float(posterior.log_prob(point)) == pytest.approx(float(q), abs=1e-10)


def test_a_saved_posterior_loads_unchanged(tmp_path: Path):
    y = column(12)
    posterior = fitted(PRIOR, y)
    posterior.save(tmp_path / "normal.priory")
    loaded = load(tmp_path / "normal.priory", PRIOR.meet(y[:3])[0])
    assert isinstance(loaded, ConjugatePosterior)
    assert loaded.phi.keys() == posterior.phi.keys()
    assert all(torch.equal(loaded.phi[name], t) for name, t in posterior.phi.items())
    assert loaded.log_evidence == posterior.log_evidence
    assert torch.equal(loaded.log_predictive(y), posterior.log_predictive(y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": math.inf}, "The 'mean' argument of NormalGamma must be a finite number, got inf."),
        ({"strength": 0}, "The 'strength' argument of NormalGamma must be a positive number, got 0."),
        ({"shape": -1.0}, "The 'shape' argument of NormalGamma must be a positive number, got -1.0."),
        ({"rate": "a"}, "The 'rate' argument of NormalGamma must be a positive number, got 'a'."),
    ],
)
def test_invalid_input_raises_an_error_that_names_it(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        NormalGamma(**options)
    assert str(caught.value) == message


def test_two_columns_are_refused():
    with pytest.raises(InputError, match=r"must be one column, \(n,\)"):
        NormalGamma().meet(torch.zeros(3, 2))


def test_generated_rows_follow_the_predictive_distribution():
    posterior = fit(NormalGamma(), torch.tensor([0.3, 1.9, -0.4, 2.2]).double(), VariationalEM(), progress=False)
    assert isinstance(posterior, ConjugatePosterior)
    y, z = posterior.generate(20_000)
    assert z.shape == (20_000, 2)
    draws = posterior.sample(400, seed=3)
    cdf = stats.norm(draws["mean"].numpy(), draws["precision"].numpy() ** -0.5).cdf
    for threshold in (-2.0, 0.0, 1.0, 3.0):
        wanted = cdf(threshold)  # one value per draw of theta
        error = (wanted.std() ** 2 / 400 + wanted.mean() * (1 - wanted.mean()) / 20_000) ** 0.5
        assert (
            abs(float((y < threshold).double().mean()) - wanted.mean()) < 4.5 * error
        )  # false alarms: 3e-5 over the four thresholds
