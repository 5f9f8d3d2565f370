"""SWAG: its moments equal those of the iterates, and invalid options are refused."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.testing.contract import classification


def run_steps(snapshots, rank, every=1, shape=(), steps=None):
    """Run the method step by step; return its posterior and the snapshots."""
    model, data = classification()
    model = pr.Model(nn.Sequential(nn.Linear(2, 3, dtype=torch.float64)), pr.Categorical(), prior=1.0)
    rows = Data.of((data[0].double(), data[1]), batch_size=7).prepared(model.prepare)
    target, generator = make_target(model, rows), stream(0, "swag")
    method = pr.SWAG(snapshots=snapshots, rank=rank, every=every, learning_rate=0.05)
    state = method.init(target, method.plan(target, rows, snapshots * every, 0), generator, torch.Size(shape))
    path = []
    for epoch in range(1000):
        for batch in rows.batches(0, epoch):
            if len(path) == (steps or snapshots * every):
                return method.posterior(target, state), torch.stack(path[every - 1 :: every])
            state, _ = method.step(target, state, batch, generator)
            path.append(state.w.clone())
    raise AssertionError


@pytest.mark.parametrize("every", [1, 3])
def test_the_moments_equal_those_of_the_iterates(every):
    posterior, path = run_steps(snapshots=30, rank=5, every=every)
    assert len(path) == 30
    mean = path.mean(0)
    away = (path[-5:] - mean).flip(0)
    covariance = 0.5 * torch.diag(path.var(0, correction=0)) + away.T @ away / (2 * 4)
    q = posterior.family
    found = q.factor @ q.factor.T + torch.diag((2 * q.log_diag).exp())
    assert torch.allclose(q.loc, mean, rtol=0, atol=1e-12)
    assert torch.allclose(found, covariance, rtol=1e-10, atol=1e-14)


def test_an_incomplete_run_uses_the_snapshots_so_far():
    posterior, path = run_steps(snapshots=30, rank=5, steps=3)
    mean = path.mean(0)
    away = path - mean
    covariance = 0.5 * torch.diag(path.var(0, correction=0)) + away.T @ away / (2 * 2)
    q = posterior.family
    assert torch.allclose(
        q.factor @ q.factor.T + torch.diag((2 * q.log_diag).exp()), covariance, rtol=1e-10, atol=1e-14
    )


def test_a_learnt_noise_stays_at_its_value_at_the_mode():
    X = torch.linspace(-1, 1, 30)[:, None]
    model = pr.Model(nn.Linear(1, 1), pr.Gaussian())
    mode = pr.fit(model, (X, X[:, 0]), pr.MAP(), steps=100)
    posterior = pr.fit(model, (X, X[:, 0]), pr.SWAG(snapshots=20, start=mode))
    noise = posterior.sample(5)["likelihood.noise"]
    assert torch.allclose(noise, mode.mean["likelihood.noise"].expand(5), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 1}, "The 'rank' argument of SWAG must be an integer >= 2, got 1."),
        ({"snapshots": 1}, "The 'snapshots' argument of SWAG must be an integer >= 2, got 1."),
        ({"every": 0}, "The 'every' argument of SWAG must be an integer >= 1, or None, got 0."),
        ({"learning_rate": -1.0}, "The 'learning_rate' argument of SWAG must be a positive number, got -1.0."),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(pr.InputError) as error:
        pr.SWAG(**options)
    assert str(error.value) == message


def test_fewer_snapshots_than_the_rank_all_enter_the_low_rank_part():
    X = torch.linspace(-1, 1, 12)[:, None]
    model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1), prior=1.0)
    few, named = (
        pr.fit(model, (X, X[:, 0]), method, steps=5, batch_size=4)
        for method in (pr.SWAG(snapshots=10), pr.SWAG(snapshots=10, rank=10))
    )
    assert all(torch.equal(t, named.tensors()[name]) for name, t in few.tensors().items())


def test_swag_uses_the_prior_that_its_mode_was_fitted_with():
    """The evidence makes the prior far tighter; under the original prior the iterates leave the mode."""
    X = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    y = 0.02 * X[:, 0] + torch.cos(40 * X[:, 0])
    model = pr.Model(nn.Linear(1, 1, dtype=X.dtype), pr.Gaussian(0.7), prior=10.0)
    mode = pr.fit(model, (X, y), pr.MAP(evidence_every=20), steps=400)
    factor = mode.model.prior.factors["weight"]
    assert float(factor) > 1e3
    posterior = pr.fit(model, (X, y), pr.SWAG(snapshots=50, start=mode, learning_rate=1e-3))
    assert torch.equal(posterior.model.prior.precision, mode.model.prior.precision)
    mode_at, plain = mode.mean["weight"], pr.fit(model, (X, y), pr.MAP(), steps=400).mean["weight"]
    assert float((posterior.mean["weight"] - mode_at).abs()) < 0.2 * float((plain - mode_at).abs())


def test_the_status_calls_the_steps_after_the_mode_steps_of_swag():
    X = torch.linspace(-1, 1, 20)[:, None]
    model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.01))
    mode = pr.fit(model, (X, 9 * X[:, 0]), pr.MAP(), steps=1, progress=False)
    reason = pr.fit(model, (X, 9 * X[:, 0]), pr.SWAG(start=mode), steps=5, progress=False).status.reason
    assert "at the end of 100 steps that SWAG took after the mode" in reason
    assert reason.endswith(": give the fit of the mode more steps, or SWAG more snapshots.")


def line(rows=50, columns=5):
    """A linear regression whose posterior standard deviations are known."""
    generator = torch.Generator().manual_seed(rows)
    X = torch.randn(rows, columns, generator=generator)
    y = X.sum(1, keepdim=True) + 0.5 * torch.randn(rows, 1, generator=generator)
    design = torch.cat([X, torch.ones(rows, 1)], 1)
    scale = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(columns + 1)).diagonal().sqrt()
    return X, y, scale


@pytest.mark.parametrize(
    ("learning_rate", "batch_size", "low", "high", "status", "remedy"),
    [
        (0.01, 50, 0.0, 0.3, "doubtful", "raise learning_rate, or give a smaller batch_size, or use Laplace"),
        (0.1, 5, 0.4, 1.6, "converged", ""),
        (0.5, 5, 2.0, 8.0, "doubtful", "so lower learning_rate, or use Laplace"),
    ],
    ids=["one batch per epoch", "minibatches", "a large rate"],
)
def test_the_status_says_how_the_snapshots_spread(learning_rate, batch_size, low, high, status, remedy):
    """Standard deviations of 0.02 to 0.1, about 0.8 and about 3 times those of the posterior."""
    X, y, scale = line()
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(5, 1), pr.Gaussian(0.5), prior=1.0)
    method = pr.SWAG(learning_rate=learning_rate)
    posterior = pr.fit(model, (X, y), method, batch_size=batch_size, steps=1000, progress=False)
    draws = posterior.sample(2000, seed=0)
    found = torch.cat([draws["weight"].reshape(2000, -1), draws["bias"].reshape(2000, -1)], 1).std(0)
    ratio = float((found / scale).log().mean().exp())
    assert low < ratio < high
    assert posterior.status.name == status
    assert remedy in posterior.status.reason
