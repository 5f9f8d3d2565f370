"""Methods under a learnt precision: point estimates keep it, MeanField updates it by empirical Bayes at every step."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.data import Data
from priory.estimators import elbo
from priory.families import DiagonalFamily
from priory.fitting.prepare import make_target
from priory.priors import Hierarchical
from priory.testing.contract import resumes_with_the_same_bits

F64 = torch.float64
ROW_COUNT, COLUMN_COUNT, NOISE_SD = 60, 20, 0.5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


X = normal(ROW_COUNT, COLUMN_COUNT, seed=3)
Y = X @ (normal(COLUMN_COUNT, seed=4) / 3) + NOISE_SD * normal(ROW_COUNT, seed=5)
DATA_PRECISION, DATA_MOMENT = X.T @ X / NOISE_SD**2, X.T @ Y / NOISE_SD**2
EMPIRICAL_PRIOR = Hierarchical(rate=0.0, infer="empirical")


def line(prior: object) -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(COLUMN_COUNT, 1, bias=False).double(), pr.Gaussian(NOISE_SD), prior)


def optimum(tau: float) -> tuple[Tensor, Tensor]:
    mean = torch.linalg.solve(DATA_PRECISION + tau * torch.eye(COLUMN_COUNT, dtype=F64), DATA_MOMENT)
    return mean, 1 / (DATA_PRECISION.diagonal() + tau)


@pytest.mark.parametrize("infer", ["variational", "empirical"])
def test_a_point_estimate_keeps_the_mean_of_the_gamma_and_is_the_ridge_solution_there(infer: Any) -> None:
    """Updated by its gradient or by n / sum w^2, the precision would maximise the unbounded joint density."""
    model = line(Hierarchical(6.0, 0.5, infer))
    posterior = pr.fit(model, (X, Y), pr.MAP(learning_rate=0.02), steps=1_500, batch_size=ROW_COUNT, progress=False)
    torch.testing.assert_close(posterior.mean["weight"][0], optimum(12.0)[0], rtol=0, atol=1e-6)
    if infer == "variational":
        assert float(posterior.mean["prior.weight.precision"]) == pytest.approx(12.0, rel=1e-12)


@pytest.mark.parametrize("method", [pr.SGLD(), pr.SGHMC(), pr.NUTS(), pr.SVGD()])
def test_a_method_without_the_moments_of_a_q_refuses_empirical_bayes(method: Any) -> None:
    with pytest.raises(pr.InputError, match=f"The 'prior' argument of {type(method).__name__} must be a distribution"):
        pr.fit(line(EMPIRICAL_PRIOR), (X, Y), method, steps=10, progress=False)


def test_mean_field_by_empirical_bayes_reaches_n_over_the_expected_squares() -> None:
    """The fixed point is iterated in closed form; means agree to 3 % of a standard deviation, tau to 1 %."""
    tau = 1.0
    for _ in range(1_000):
        mean, variance = optimum(tau)
        tau = COLUMN_COUNT / float((mean.square() + variance).sum())
    method = pr.MeanField(samples=512, learning_rate=0.1)
    model = line(EMPIRICAL_PRIOR)
    posterior = pr.fit(model, (X, Y), method, steps=800, batch_size=ROW_COUNT, progress=False)
    found = posterior.family
    assert float(((found.loc - mean) / variance.sqrt()).abs().max()) < 0.03
    assert float((found.scale / variance.sqrt() - 1).abs().max()) < 0.03
    precision = model.prior.precisions(found.loc, found.scale.square())["prior.weight.precision"]
    assert float(precision) == pytest.approx(tau, rel=0.01)
    covariance = NOISE_SD**2 * torch.eye(ROW_COUNT, dtype=F64) + X @ X.T / tau
    evidence = torch.distributions.MultivariateNormal(torch.zeros(ROW_COUNT, dtype=F64), covariance).log_prob(Y)
    bound = posterior.elbo(samples=20_000)
    gap = 0.5 * float(
        (DATA_PRECISION.diagonal() + tau).log().sum()
        - torch.logdet(DATA_PRECISION + tau * torch.eye(COLUMN_COUNT, dtype=F64))
    )
    assert abs(bound.value - (float(evidence) - gap)) < 0.02 + 4 * bound.error  # false alarms: 6e-5


def test_the_step_under_empirical_bayes_is_the_gradient_of_the_definition() -> None:
    model = line(Hierarchical(2.0, 0.3, "empirical"))
    target = make_target(model, Data.of((X, Y)).prepared(model.prepare), 1.0, "likelihood")
    loc, log_scale = normal(COLUMN_COUNT, seed=6).requires_grad_(), normal(COLUMN_COUNT, seed=7).requires_grad_()
    bound = elbo(target, DiagonalFamily(loc, log_scale), normal(1, COLUMN_COUNT, seed=8), (X, Y[:, None][:, 0]))
    tau = (2.0 - 1 + COLUMN_COUNT / 2) / (0.3 + 0.5 * (loc.square() + (2 * log_scale).exp()).sum().detach())
    w = loc + log_scale.exp() * normal(1, COLUMN_COUNT, seed=8)[0]
    fit = -0.5 * ((Y - X @ w) / NOISE_SD).square().sum() - ROW_COUNT * math.log(NOISE_SD * math.sqrt(2 * math.pi))
    kl = 0.5 * (tau * (loc.square() + (2 * log_scale).exp()) - 1 - tau.log()).sum() - log_scale.sum()
    torch.testing.assert_close(bound.value, fit - kl, rtol=0, atol=1e-9)


def problem(net_seed: int = 0) -> tuple[pr.Model, tuple[Tensor, Tensor]]:
    """Return a model whose precisions are set by empirical Bayes, and 22 rows."""
    torch.manual_seed(net_seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = pr.Model(net, pr.Gaussian(), {"*.weight": EMPIRICAL_PRIOR, "*": 1.0})
    return model, (normal(22, 3), normal(22, seed=1))


def short() -> Any:
    model, data = problem()
    return model, pr.fit(model, data, pr.MeanField(), steps=30, batch_size=8, progress=False)


def test_an_interrupted_empirical_fit_resumes_with_the_same_bits() -> None:
    resumes_with_the_same_bits(pr.MeanField(), problem)


def test_a_stored_empirical_posterior_has_the_same_precisions_and_bound(tmp_path: Path) -> None:
    _, posterior = short()
    posterior.save(tmp_path / "p.priory")
    fresh, _ = problem(net_seed=1)  # other initial weights: no warning of another prior
    again = pr.load(tmp_path / "p.priory", fresh)
    data = (normal(22, 3), normal(22, seed=1))
    assert again.elbo(data, samples=64).value == posterior.elbo(data, samples=64).value


def test_a_fit_does_not_change_the_prior_of_the_model() -> None:
    model, _ = short()
    weights = model.layout["0.weight"]
    assert bool((model.prior.precision[weights.start : weights.stop] == 1).all())
