"""MAP against closed forms, and the estimation of a learnt noise."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.testing import Coin, GaussianMean, LinearRegression

F64 = torch.float64
QUICK = pr.MAP(learning_rate=0.1)  # reaches the mode of a linear model accurately in a few hundred steps
FULL_BATCH = {"steps": 500, "batch_size": 10**6, "progress": False}


def test_map_of_a_coin_is_the_mode_in_p_and_not_in_the_logit():
    coin = Coin(17, 13, 5, 3)
    p = float(pr.fit(coin.density(), coin.data, pr.MAP(), progress=False).mean["p"])
    assert p == pytest.approx(coin.mode, abs=1e-8)
    assert p == pytest.approx(21 / 36, abs=1e-8)
    assert abs(p - 22 / 38) > 1e-3  # the mode in the logit


def test_map_of_a_gaussian_mean_and_of_linear_regression_is_exact():
    exact = GaussianMean.make(0)
    found = pr.fit(exact.density(), exact.data, QUICK, **FULL_BATCH).mean["mean"]
    torch.testing.assert_close(found, exact.posterior.mean, rtol=0, atol=1e-9)
    line = LinearRegression.make(0)
    for built in (line.model(), line.density()):
        found = pr.fit(built, line.data, QUICK, **FULL_BATCH).draw(1, stream(0))[0]
        torch.testing.assert_close(found, line.posterior.mean, rtol=0, atol=1e-9)


def test_map_under_a_flat_prior_is_the_least_squares_solution():
    line = LinearRegression.make(1)
    model = pr.Model(line.model().net, pr.Gaussian(line.noise), prior="flat")
    found = pr.fit(model, line.data, QUICK, **FULL_BATCH).draw(1, stream(0))[0]
    solution = torch.linalg.lstsq(line.design(line.X), line.y[:, None]).solution[:, 0]
    torch.testing.assert_close(found, solution, rtol=0, atol=1e-9)


def test_a_penalty_lambda_sum_w_squared_is_a_gaussian_prior_of_precision_two_lambda():
    lam = 0.7
    X, y = torch.randn(12, 3, generator=stream(0, "x"), dtype=F64), torch.arange(12) % 2
    net = nn.Linear(3, 2).to(F64)
    prior = Normal(torch.zeros((), dtype=F64), torch.tensor((2 * lam) ** -0.5, dtype=F64))
    model = pr.Model(net, pr.Categorical(), prior=prior)
    data = Data.of((X, y), 12).prepared(model.prepare)
    target = make_target(model, data, 1.0, "likelihood")
    w = torch.randn(target.size, generator=stream(1, "w"), dtype=F64).requires_grad_()
    outputs = X @ w[:6].view(2, 3).T + w[6:]
    loss = nn.functional.cross_entropy(outputs, y, reduction="sum") + lam * w.square().sum()
    (wanted,) = torch.autograd.grad(loss, w)
    _, found = target.log_joint_and_grad(w.detach(), data.tensors)
    torch.testing.assert_close(-found, wanted, rtol=0, atol=1e-10)


def test_the_steps_are_those_of_adam():
    line = LinearRegression.make(2)
    model = line.model()
    method = pr.MAP(learning_rate=0.02, schedule="constant")
    ours = pr.fit(model, line.data, method, steps=7, batch_size=10**6, progress=False).draw(1, stream(0))[0]
    w = model.network.initial.clone().requires_grad_()
    optimizer = torch.optim.Adam([w], lr=0.02)
    X = line.design(line.X)
    for _ in range(7):
        optimizer.zero_grad()
        loss = (line.y - X @ w).square().sum() / (2 * line.noise**2) + w.square().sum() / (2 * line.prior_scale**2)
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(ours, w.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_the_mode_at_a_temperature_has_its_closed_form(temperature):
    """A tempered likelihood multiplies the prior's precision by T; a tempered posterior has the same mode."""
    line = LinearRegression.make(0)
    X = line.design(line.X)
    for tempers, factor in (("likelihood", temperature), ("posterior", 1.0)):
        options = {"temperature": temperature, "tempers": tempers, **FULL_BATCH}
        found = pr.fit(line.model(), line.data, QUICK, **options).draw(1, stream(0))[0]
        penalty = factor * (line.noise / line.prior_scale) ** 2 * torch.eye(X.shape[1], dtype=F64)
        torch.testing.assert_close(found, torch.linalg.solve(X.T @ X + penalty, X.T @ line.y), rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The targets have mean 5")
def test_a_constant_target_is_found_and_its_noise_is_small():
    X = torch.randn(60, 2, generator=stream(0, "x"))
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    data = (X, torch.full((60,), 5.0))
    posterior = pr.fit(pr.Model(net, pr.Gaussian()), data, pr.MAP(learning_rate=0.03), steps=500, progress=False)
    assert float((posterior.predict(X).mean - 5).abs().max()) < 0.1
    assert float(posterior.mean["likelihood.noise"]) < 0.1


def test_a_learnt_noise_does_not_collapse_when_the_network_can_fit_every_row():
    """A joint maximum would drive the noise to zero; held-out rows keep it at the size of the errors."""
    generator = stream(3, "data")
    X = torch.randn(40, 60, generator=generator)  # more inputs than rows
    y = torch.sin(X[:, 0]) + 0.3 * torch.randn(40, generator=generator)
    net = nn.Sequential(nn.Linear(60, 20), nn.Tanh(), nn.Linear(20, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
    model = pr.Model(net, pr.Gaussian(), prior="flat")
    posterior = pr.fit(model, (X, y), pr.MAP(), steps=500, progress=False)
    assert float((posterior.predict(X).mean - y).abs().max()) < 0.02
    assert 0.3 < float(posterior.mean["likelihood.noise"]) < 1.2
    X = torch.randn(400, 60, generator=generator)
    assert float(posterior.predict(X).log_prob(torch.sin(X[:, 0])).mean()) > -3


def test_the_noise_is_the_root_mean_square_of_the_held_out_residuals():
    line = LinearRegression.make(4)
    model = pr.Model(line.model().net, pr.Gaussian(), prior=1.0)
    data = Data.of(line.data, 10**6).prepared(model.prepare)
    target = make_target(model, data, 1.0, "likelihood")
    plan, early = QUICK.plan(target, data, 500, seed=0), []
    look = lambda moment: early.append(moment.posterior()) if moment.step == plan.turn else None  # noqa: E731
    posterior = pr.fit(model, line.data, QUICK, callbacks=[look], **FULL_BATCH)
    held = plan.held.tensors
    w = early[0].draw(1, stream(0))[0]
    residual = held[1] - line.design(held[0]) @ w[: line.design(held[0]).shape[1]]
    found = float(early[0].mean["likelihood.noise"])
    assert found == pytest.approx(float(residual.square().mean().sqrt()), rel=0.02)
    assert float(posterior.mean["likelihood.noise"]) == pytest.approx(
        found, abs=1e-12
    )  # it isn't changed after the turn


def test_a_point_has_no_evidence_and_no_density():
    line = LinearRegression.make(0)
    posterior = pr.fit(line.model(), line.data, pr.MAP(), steps=5, progress=False)
    with pytest.raises(pr.InputError, match="no evidence"):
        _ = posterior.log_evidence
    with pytest.raises(pr.InputError, match="no density"):
        posterior.log_prob(posterior.mean)
