import math

import pytest
import scipy.linalg
import torch

import priory as pr
from priory.core.data import Data
from priory.core.errors import DivergedError
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.mcmc import sghmc
from priory.methods.mcmc.schedules import Cyclical
from priory.methods.mcmc.sghmc import SGHMC
from priory.models.target import Target
from priory.posteriors.chains import Chains
from priory.testing import GaussianMean, LinearRegression, assert_covariance_close, assert_mean_close

DOUBLE = torch.float64


# The stationary distribution on a Gaussian of precision Q. One full-batch step is linear in z = (w - mean, v),
#   v' = (1 - a) v - e Q w + sqrt(2 a e) xi,   w' = w + v',
# so that the covariance of z solves the discrete Lyapunov equation S = A S A' + B.


def line(rows: int) -> LinearRegression:
    """Return a regression on two correlated inputs; X'X / N, and so the rate, is about the same for any N."""
    generator = stream(0, "line", rows)
    own, shared = (torch.randn(rows, k, generator=generator, dtype=DOUBLE) for k in (2, 1))
    X = 0.8 * own + 0.6 * shared
    y = X @ torch.tensor([1.0, -0.5], dtype=DOUBLE) + torch.randn(rows, generator=generator, dtype=DOUBLE)
    return LinearRegression(X, y, noise=1.0, prior_scale=2.0)


def batched(exact: LinearRegression) -> pr.Density:
    """Return the model as a density that takes all chains in one call."""

    def log_prior(p):
        return -0.5 * (p["w"] / exact.prior_scale).square().sum(-1)

    def log_likelihood(p, batch):
        return -0.5 * ((batch[1] - p["w"] @ batch[0].T) / exact.noise).square()

    return pr.Density(params={"w": pr.Param((2,))}, log_prior=log_prior, log_likelihood=log_likelihood, batched=True)


def lyapunov(precision: torch.Tensor, e: float, a: float) -> torch.Tensor:
    """Return the stationary covariance of (w, v), (2 d, 2 d), by solving the Lyapunov equation."""
    eye = torch.eye(len(precision), dtype=DOUBLE)
    pull, glide = -e * precision, (1 - a) * eye
    A = torch.cat([torch.cat([eye + pull, glide], 1), torch.cat([pull, glide], 1)])
    noise = 2 * a * e * eye.repeat(2, 2)
    return torch.from_numpy(scipy.linalg.solve_discrete_lyapunov(A.numpy(), noise.numpy()))


def closed_form(precision: torch.Tensor, e: float, a: float) -> torch.Tensor:
    """Return the covariance stated in the module's docstring, Q^-1 (I - e Q / (2 (2 - a)))^-1."""
    shrunk = torch.eye(len(precision), dtype=DOUBLE) - e * precision / (2 * (2 - a))
    return torch.linalg.inv(precision @ shrunk)


@pytest.mark.parametrize("a", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_the_covariance_of_the_docstring_solves_the_lyapunov_equation(a, rate):
    exact = line(20)
    whole = lyapunov(exact.precision, rate / 20, a)
    torch.testing.assert_close(whole[:2, :2], closed_form(exact.precision, rate / 20, a), rtol=1e-9, atol=1e-12)


def check_stationary(rows: int, rate: float, friction: float = 0.3, steps: int = 80, **options) -> None:
    """Mean and covariance of 4,000 chains, 5 comparisons at 5 standard errors: false alarms at 3e-6."""
    exact = line(rows)
    method = SGHMC(rate, friction=friction, chains=4000, burn_in=steps - 1)
    posterior = pr.fit(batched(exact), exact.data, method, steps=steps, batch_size=rows, progress=False, **options)
    assert isinstance(posterior, Chains)
    draws = posterior.w[:, -1]
    assert_mean_close(draws, exact.posterior.loc)
    expected = closed_form(exact.precision, rate / rows, friction)
    assert_covariance_close(draws, options.get("temperature", 1.0) * expected)


@pytest.mark.parametrize("rows", [20, 60])
@pytest.mark.parametrize("rate", [0.1, 1.2])
def test_the_stationary_covariance_has_the_known_discretisation_error(rows, rate):
    check_stationary(rows, rate)


def test_the_friction_does_not_change_the_stationary_distribution():
    check_stationary(20, 0.3, friction=0.8)


@pytest.mark.parametrize("temperature", [0.25, 3.0])
def test_a_tempered_posterior_is_tempered_once(temperature):
    check_stationary(20, 0.3, temperature=temperature, tempers="posterior")


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_noise_of_the_wrong_variance_is_detected(scale, monkeypatch):
    normal = sghmc.standard_normal
    monkeypatch.setattr(sghmc, "standard_normal", lambda like, generator: math.sqrt(scale) * normal(like, generator))
    with pytest.raises(AssertionError, match="covariance"):
        check_stationary(20, 0.3)


def test_the_noise_variance_of_an_exact_friction_step_is_detected(monkeypatch):
    """With 2 a - a^2 in place of 2 a, a fraction a / 2 = 0.4 of the covariance is missing."""
    normal = sghmc.standard_normal
    monkeypatch.setattr(sghmc, "standard_normal", lambda like, generator: math.sqrt(0.6) * normal(like, generator))
    with pytest.raises(AssertionError, match="covariance"):
        check_stationary(20, 0.3, friction=0.8)


def test_a_gradient_without_the_factor_n_is_detected(monkeypatch):
    monkeypatch.setattr(Target, "factor", lambda self, batch: 1.0 / len(batch[0]))
    with pytest.raises(AssertionError):
        check_stationary(20, 0.3)


def test_minibatch_noise_has_the_predicted_variance():
    """N = 24 values in 4 batches without replacement; the mean over chains follows the minibatch noise.

    After an epoch z is A^4 z + sum_j A^(3-j) (1, 1)' (e g_j + noise). The gradients g_j of the four batches have the
    variance s = (N/n)^2 n (1 - n/N) var(y) / noise^4 and, as they sum to a constant, the covariance -s / 3. 150 draws,
    16 steps apart, have correlations below 0.01; one comparison at 5 standard errors, false alarms at 6e-7.
    """
    y = 1.0 + torch.randn(24, generator=stream(0, "values"), dtype=DOUBLE)
    exact = GaussianMean(y, noise=1.0, prior_loc=0.0, prior_scale=10.0)

    def log_prior(p):
        return -0.5 * (p["m"] / 10).square()

    def log_likelihood(p, batch):
        return -0.5 * (batch[0] - p["m"][..., None]).square()

    density = pr.Density(params={"m": pr.Param()}, log_prior=log_prior, log_likelihood=log_likelihood, batched=True)
    rate, a, chains = 0.3, 0.5, 256
    method = SGHMC(rate, friction=a, chains=chains, burn_in=32, thin=16)
    posterior = pr.fit(density, exact.data, method, steps=32 + 16 * 150, batch_size=6, progress=False)
    assert isinstance(posterior, Chains)
    e, q = rate / 24, rate / 24 / float(exact.posterior.variance)
    A = torch.tensor([[1 - q, 1 - a], [-q, 1 - a]], dtype=DOUBLE)
    powers = torch.stack([torch.linalg.matrix_power(A, 3 - j).sum(1) for j in range(4)])  # A^(3-j) (1, 1)', (4, 2)
    s = 4**2 * 6 * (1 - 6 / 24) * float(y.var())
    covariance = e**2 * s * (4 / 3 * torch.eye(4, dtype=DOUBLE) - 1 / 3)
    over_an_epoch = powers.T @ covariance @ powers
    whole = torch.linalg.matrix_power(A, 4)
    shared = float(scipy.linalg.solve_discrete_lyapunov(whole.numpy(), over_an_epoch.numpy())[0, 0])
    own = float(closed_form(torch.tensor([[q / e]], dtype=DOUBLE), e, a))
    means = posterior.w[..., 0].mean(0)
    assert shared > 2 * own / chains  # so the test is sensitive to the minibatch noise
    assert float(torch.linalg.eigvals(torch.linalg.matrix_power(A, 16)).abs().max()) < 0.01
    assert_mean_close(means, exact.posterior.loc)
    assert_covariance_close(means, shared + own / chains)
    within = posterior.w[..., 0].var(0).mean()
    assert abs(float(within) / own - 1) < 5 * math.sqrt(2 / (chains * 150))


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_one_step_follows_the_formula(tempers, temperature):
    exact = line(20)
    model = batched(exact)
    rows = Data.of(exact.data, batch_size=5).prepared(model.prepare)
    target = make_target(model, rows, temperature, tempers)
    method = SGHMC(0.2, friction=0.3, chains=3)
    state = method.init(target, method.plan(target, rows, 10, 0), stream(0, "start"))
    w, v = state.w.clone(), state.v.clone()
    X, y = batch = next(iter(rows.batches(0, 0)))
    state, _ = method.step(target, state, batch, stream(1, "noise"))
    likelihood = 20 / 5 * (y - w @ X.T) @ X
    prior = -w / 4 * (temperature if tempers == "likelihood" else 1.0)
    noise = torch.randn(3, 2, generator=stream(1, "noise"), dtype=DOUBLE)
    v = 0.7 * v + 0.2 / 20 * (likelihood + prior) + math.sqrt(2 * 0.3 * 0.2 * temperature / 20) * noise
    torch.testing.assert_close(state.v, v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.w, w + v, rtol=1e-12, atol=1e-12)


def test_the_initial_momentum_has_its_stationary_variance():
    exact = line(20)
    model = batched(exact)
    rows = Data.of(exact.data).prepared(model.prepare)
    target, method = make_target(model, rows, 0.5, "posterior"), SGHMC(0.2, chains=4000)
    state = method.init(target, method.plan(target, rows, 10, 0), stream(0, "start"))
    assert_covariance_close(state.v, 0.5 * 0.2 / 20 * torch.eye(2))  # 3 comparisons: false alarms at 2e-6


def test_exploring_steps_of_a_cycle_have_momentum_and_no_noise():
    exact = line(20)
    model = batched(exact)
    rows = Data.of(exact.data).prepared(model.prepare)
    target, method = make_target(model, rows), SGHMC(0.3, chains=2, schedule=Cyclical(cycles=1, exploring=0.9))
    state = method.init(target, method.plan(target, rows, 10, 0), stream(0, "start"))
    w, v = state.w.clone(), state.v.clone()
    (batch,) = rows.batches(0, 0)
    for k in range(9):
        state, info = method.step(target, state, batch, stream(k))
        assert info.draw is None
        rate = 0.15 * (1 + math.cos(math.pi * k / 10))
        v = 0.9 * v + rate / 20 * target.log_joint_and_grad(w, batch)[1]
        w = w + v
    torch.testing.assert_close(state.w, w, rtol=1e-10, atol=1e-10)


def test_a_learning_rate_that_is_too_large_raises_an_error_with_a_remedy():
    exact = line(20)
    with pytest.raises(DivergedError, match="Try a smaller learning_rate") as caught:
        pr.fit(batched(exact), exact.data, SGHMC(100.0), steps=2000, progress=False)
    assert isinstance(caught.value.posterior, Chains)


@pytest.mark.parametrize("friction", [0, -0.1, 1.5, "much", True])
def test_a_friction_outside_its_range_is_refused(friction):
    with pytest.raises(pr.InputError, match="The 'friction' argument of SGHMC must be a number above 0, up to 1"):
        SGHMC(friction=friction)


def test_invalid_options_are_refused_with_the_name_of_the_sampler():
    with pytest.raises(pr.InputError, match="The 'learning_rate' argument of SGHMC must be a positive number"):
        SGHMC(learning_rate=0)
    exact = line(20)
    with pytest.raises(pr.InputError, match="The 'burn_in' argument of SGHMC must leave a draw of 10 steps to keep"):
        pr.fit(batched(exact), exact.data, SGHMC(burn_in=10), steps=10, progress=False)
