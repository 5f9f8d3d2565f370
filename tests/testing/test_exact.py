"""Every closed form of the exact targets, by another route."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, special, stats
from torch import Tensor

from priory.core.errors import InputError
from priory.models.density import Density
from priory.testing import Coin, GaussianMean, LinearRegression, NormalGamma, NormalGammaPosterior, exact

COIN = Coin(heads=17, tails=13, a=5, b=3)
MEAN = GaussianMean.make(0)
LINEAR = LinearRegression.make(0)
GAMMA = NormalGamma.make(0)
TIGHT = {"epsabs": 1e-13, "epsrel": 1e-12, "limit": 500}


def log_joint(density: Density, params: dict[str, Tensor], data: tuple[Tensor, ...]) -> Tensor:
    assert density.log_prior is not None
    assert density.log_likelihood_of is not None
    return density.log_prior(params) + density.log_likelihood_of(params, data).sum()


def quad(function: Callable[[float], float], *points: float) -> float:
    return sum(integrate.quad(function, low, high, **TIGHT)[0] for low, high in itertools.pairwise(points))


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# Coin


def coin_log_joint(coin: Coin, p: float) -> float:
    return float(log_joint(coin.density(), {"p": scalar(p)}, coin.data))


@pytest.mark.parametrize("coin", [COIN, Coin.make(0), Coin(3, 0), Coin(0, 0, a=2.5, b=0.5 + 1)])
def test_coin_evidence_is_the_integral_of_its_joint(coin: Coin) -> None:
    evidence = quad(lambda p: math.exp(coin_log_joint(coin, p) + 15), 0, 0.3, 0.6, 1)
    assert math.log(evidence) - 15 == pytest.approx(coin.log_evidence, abs=1e-10)


def test_coin_evidence_is_of_the_tosses_in_their_order() -> None:
    assert COIN.log_evidence == pytest.approx(-21.397241822312, abs=1e-10)
    unordered = stats.betabinom.logpmf(17, 30, 5, 3)
    assert COIN.log_evidence == pytest.approx(float(unordered) - math.log(math.comb(30, 17)), abs=1e-10)


def test_coin_evidence_is_the_product_of_one_step_predictions() -> None:
    total, heads, tails = 0.0, 0, 0
    for toss in COIN.data[0].tolist():
        p = Coin(heads, tails, a=5, b=3).predictive
        total += math.log(p if toss else 1 - p)
        heads, tails = heads + int(toss), tails + 1 - int(toss)
    assert total == pytest.approx(COIN.log_evidence, abs=1e-10)


def test_coin_posterior_is_joint_over_evidence() -> None:
    for p in (0.05, 0.4, 0.93):
        expected = coin_log_joint(COIN, p) - COIN.log_evidence
        assert float(COIN.posterior.log_prob(scalar(p))) == pytest.approx(expected, abs=1e-10)


def test_coin_predictive_is_the_posterior_mean_and_its_mode_is_stationary() -> None:
    mean = quad(lambda p: p * math.exp(coin_log_joint(COIN, p) - COIN.log_evidence), 0, 0.5, 1)
    assert COIN.predictive == pytest.approx(mean, abs=1e-10)
    p = scalar(COIN.mode).requires_grad_()
    (slope,) = torch.autograd.grad(log_joint(COIN.density(), {"p": p}, COIN.data), p)
    assert float(slope) == pytest.approx(0.0, abs=1e-10)
    assert COIN.mode == pytest.approx(21 / 36, abs=1e-15)


def coin_elbo(coin: Coin, loc: float, scale: float) -> float:
    """The ELBO by scipy's adaptive quadrature, written from the joint in p and the volume element dp/du."""

    def integrand(z: float) -> float:
        u = loc + scale * z
        log_p, log_q = -np.logaddexp(0, -u), -np.logaddexp(0, u)
        log_likelihood = coin.heads * log_p + coin.tails * log_q
        log_prior = (coin.a - 1) * log_p + (coin.b - 1) * log_q - special.betaln(coin.a, coin.b)
        value = log_likelihood + log_prior + (log_p + log_q) - stats.norm.logpdf(u, loc, scale)
        return float(value * stats.norm.pdf(z))

    return quad(integrand, -12, -3, 0, 3, 12)


@pytest.mark.parametrize("coin", [COIN, Coin(3, 0), Coin(1, 0, a=0.5, b=0.5), Coin(400, 2, a=1, b=1)])
def test_no_gaussian_in_the_logit_beats_the_best_one(coin: Coin) -> None:
    best = coin.best_gaussian()
    loc, scale = float(best.loc), float(best.scale)
    assert coin_elbo(coin, loc, scale) == pytest.approx(best.elbo, abs=1e-10)
    assert best.elbo < coin.log_evidence
    for dloc, dscale in [(1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3), (1e-3, 1e-3), (0.5, -0.1 * scale)]:
        assert coin_elbo(coin, loc + dloc, scale + dscale) < best.elbo


@pytest.mark.parametrize("coin", [COIN, Coin(3, 0), Coin(1, 0, a=0.5, b=0.5), Coin(40_000, 9_000)])
def test_the_best_gaussian_is_stationary(coin: Coin) -> None:
    """E[f'(u)] = 0 and E[f''(u)] = -1 / scale^2, by adaptive quadrature."""
    best = coin.best_gaussian()
    alpha, beta = coin.a + coin.heads, coin.b + coin.tails
    loc, scale = float(best.loc), float(best.scale)

    def expect(function: Callable[[float], float]) -> float:
        return quad(lambda z: function(loc + scale * z) * float(stats.norm.pdf(z)), -12, -3, 0, 3, 12)

    def p(u: float) -> float:
        return float(special.expit(u))

    assert scale * expect(lambda u: alpha - (alpha + beta) * p(u)) == pytest.approx(0.0, abs=1e-10)
    curvature = expect(lambda u: -(alpha + beta) * p(u) * p(-u))
    assert curvature * scale**2 == pytest.approx(-1.0, abs=1e-10)


def test_the_best_gaussian_agrees_with_a_general_optimiser() -> None:
    found = optimize.minimize(
        lambda v: -coin_elbo(COIN, v[0], math.exp(v[1])), np.zeros(2), method="BFGS", options={"gtol": 1e-7}
    )
    best = COIN.best_gaussian()
    assert found.x[0] == pytest.approx(float(best.loc), abs=1e-6)
    assert math.exp(found.x[1]) == pytest.approx(float(best.scale), abs=1e-6)
    assert -found.fun == pytest.approx(best.elbo, abs=1e-10)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.3, 10), st.floats(0.3, 10))
def test_the_gap_of_the_best_gaussian_is_positive_and_small(heads: int, tails: int, a: float, b: float) -> None:
    coin = Coin(heads, tails, a=a, b=b)
    gap = coin.log_evidence - coin.best_gaussian().elbo
    assert 0 < gap < 0.35


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.integers(0, 50))
def test_exchanging_heads_and_tails_mirrors_the_best_gaussian(heads: int, tails: int) -> None:
    one, other = Coin(heads, tails, 2, 3).best_gaussian(), Coin(tails, heads, 3, 2).best_gaussian()
    assert float(one.loc) == pytest.approx(-float(other.loc), abs=1e-9)
    assert float(one.scale) == pytest.approx(float(other.scale), abs=1e-9)


# The mean of a Gaussian


def test_gaussian_mean_evidence_is_that_of_the_marginal_and_of_quadrature() -> None:
    n = len(MEAN.y)
    covariance = MEAN.noise**2 * np.eye(n) + MEAN.prior_scale**2
    marginal = stats.multivariate_normal.logpdf(MEAN.y.numpy(), np.full(n, MEAN.prior_loc), covariance)
    assert MEAN.log_evidence == pytest.approx(float(marginal), abs=1e-10)
    density = MEAN.density()

    def joint(m: float) -> float:
        return math.exp(float(log_joint(density, {"mean": scalar(m)}, MEAN.data)) - MEAN.log_evidence)

    m, s = float(MEAN.posterior.mean), float(MEAN.posterior.stddev)
    assert quad(joint, m - 12 * s, m, m + 12 * s) == pytest.approx(1.0, abs=1e-10)


def test_gaussian_mean_posterior_is_joint_over_evidence() -> None:
    for m in (-2.0, 0.3, 4.0):
        joint = float(log_joint(MEAN.density(), {"mean": scalar(m)}, MEAN.data))
        expected = pytest.approx(joint - MEAN.log_evidence, abs=1e-10)
        assert float(MEAN.posterior.log_prob(scalar(m))) == expected


def test_gaussian_mean_predictive_is_the_ratio_of_evidences() -> None:
    for new in (-1.0, 2.5):
        longer = GaussianMean(torch.cat([MEAN.y, scalar(new)[None]]), MEAN.noise, MEAN.prior_loc, MEAN.prior_scale)
        ratio = longer.log_evidence - MEAN.log_evidence
        assert float(MEAN.predictive.log_prob(scalar(new))) == pytest.approx(ratio, abs=1e-10)


def test_gaussian_mean_has_no_mean_field_gap() -> None:
    best = MEAN.best_mean_field()
    assert best.elbo == MEAN.log_evidence
    assert (best.loc, best.scale) == (MEAN.posterior.loc, MEAN.posterior.scale)


# Linear regression with known noise


@pytest.mark.parametrize("intercept", [False, True])
def test_linear_evidence_is_that_of_the_marginal(intercept: bool) -> None:
    problem = LinearRegression(LINEAR.X, LINEAR.y, 0.5, 1.5, intercept=intercept)
    X = problem.design(problem.X).numpy()
    covariance = 0.5**2 * np.eye(len(X)) + 1.5**2 * X @ X.T
    marginal = stats.multivariate_normal.logpdf(problem.y.numpy(), np.zeros(len(X)), covariance)
    assert problem.log_evidence == pytest.approx(float(marginal), abs=1e-10)


def test_linear_posterior_is_joint_over_evidence() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        w = torch.randn(4, generator=generator, dtype=torch.float64)
        joint = float(log_joint(LINEAR.density(), {"weights": w}, LINEAR.data))
        expected = pytest.approx(joint - LINEAR.log_evidence, abs=1e-10)
        assert float(LINEAR.posterior.log_prob(w)) == expected


def test_linear_predictive_is_the_ratio_of_evidences() -> None:
    x = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    for new in (-1.0, 2.5):
        longer = LinearRegression(
            torch.cat([LINEAR.X, x]), torch.cat([LINEAR.y, scalar(new)[None]]), 0.5, 1.5, intercept=True
        )
        ratio = longer.log_evidence - LINEAR.log_evidence
        assert float(LINEAR.predictive(x).log_prob(scalar(new))) == pytest.approx(ratio, abs=1e-10)


def test_linear_mean_field_gap_is_the_divergence_from_the_posterior() -> None:
    best = LINEAR.best_mean_field()
    q = torch.distributions.MultivariateNormal(best.loc, torch.diag(best.scale**2))
    gap = float(torch.distributions.kl_divergence(q, LINEAR.posterior))
    assert gap > 0.1  # the inputs are correlated, or the test would not see a wrong gap
    assert LINEAR.log_evidence - best.elbo == pytest.approx(gap, abs=1e-10)


def test_linear_mean_field_optimum_is_stationary_for_the_elbo() -> None:
    """The ELBO in its own form, E_q[log p(y, w)] + H(q), with autograd for its slope."""
    best, X = LINEAR.best_mean_field(), LINEAR.design(LINEAR.X)

    def elbo(loc: Tensor, scale: Tensor) -> Tensor:
        misfit = (LINEAR.y - X @ loc).square().sum() + (X.square() @ scale.square()).sum()
        log_likelihood = -0.5 * misfit / LINEAR.noise**2 - len(X) * math.log(LINEAR.noise * math.sqrt(2 * math.pi))
        prior = -0.5 * (loc.square() + scale.square()).sum() / LINEAR.prior_scale**2
        prior = prior - len(loc) * math.log(LINEAR.prior_scale * math.sqrt(2 * math.pi))
        return log_likelihood + prior + scale.log().sum() + 0.5 * len(loc) * math.log(2 * math.pi * math.e)

    loc, scale = best.loc.clone().requires_grad_(), best.scale.clone().requires_grad_()
    value = elbo(loc, scale)
    assert value.item() == pytest.approx(best.elbo, abs=1e-10)
    for slope in torch.autograd.grad(value, (loc, scale)):
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-9)


@pytest.mark.parametrize("intercept", [False, True])
def test_the_linear_model_has_the_log_joint_of_the_density(intercept: bool) -> None:
    problem = LinearRegression(LINEAR.X, LINEAR.y, 0.5, 1.5, intercept=intercept)
    model, density = problem.model(), problem.density()
    assert model.layout.names == (("weight", "bias") if intercept else ("weight",))
    w = torch.randn(5, 3 + intercept, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_model = model.log_likelihood(w, problem.data, {}).sum(-1) + model.prior.log_prob(w)
    by_density = density.log_likelihood(w, problem.data, {}).sum(-1) + density.prior.log_prob(w)
    by_posterior = problem.posterior.log_prob(w) + problem.log_evidence
    torch.testing.assert_close(by_model, by_posterior, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(by_density, by_posterior, rtol=1e-10, atol=1e-10)


def test_making_a_model_leaves_the_global_generator_unchanged() -> None:
    before = torch.get_rng_state()
    LINEAR.model()
    exact.make(seed=3)
    assert torch.equal(before, torch.get_rng_state())


# Linear regression with unknown noise


def gamma_marginal_given(tau: float, X: np.ndarray, y: np.ndarray, precision: np.ndarray) -> float:
    covariance = (np.eye(len(y)) + X @ np.linalg.inv(precision) @ X.T) / tau
    return float(stats.multivariate_normal.logpdf(y, np.zeros(len(y)), covariance))


def test_normal_gamma_evidence_is_an_integral_over_the_noise_of_gaussian_marginals() -> None:
    X, y, precision = GAMMA.X.numpy(), GAMMA.y.numpy(), GAMMA.prior_precision.numpy()

    def integrand(log_tau: float) -> float:
        tau = math.exp(log_tau)
        log_prior = float(stats.gamma.logpdf(tau, GAMMA.a, scale=1 / GAMMA.b)) + log_tau
        return math.exp(gamma_marginal_given(tau, X, y, precision) + log_prior - GAMMA.log_evidence)

    assert quad(integrand, -6, 0, 1, 2, 6) == pytest.approx(1.0, abs=1e-10)


def mass(log_density: Callable[[Tensor, Tensor], Tensor], belief: NormalGammaPosterior) -> float:
    """Return the integral of a density over one weight and the noise, on a grid that follows its ridge."""
    z = torch.linspace(-12, 12, 241, dtype=torch.float64)
    log_noise = torch.linspace(-6, 10, 641, dtype=torch.float64)
    grid = torch.cartesian_prod(z, log_noise)
    noise = grid[:, 1].exp()
    scale = noise * belief.precision.squeeze().rsqrt()
    values = torch.vmap(log_density)((belief.loc + grid[:, 0] * scale)[:, None], noise)
    volume = (scale * noise).log()  # dw = scale dz, dnoise = noise dlog_noise
    return float((values + volume).exp().sum()) * float(z[1] - z[0]) * float(log_noise[1] - log_noise[0])


def test_normal_gamma_evidence_is_a_double_integral_of_the_density() -> None:
    problem = NormalGamma(GAMMA.X[:6, :1], GAMMA.y[:6], prior_precision=0.7, a=1.5, b=0.8)
    density = problem.density()

    def posterior(w: Tensor, noise: Tensor) -> Tensor:
        return log_joint(density, {"weights": w, "noise": noise}, problem.data) - problem.log_evidence

    assert mass(posterior, problem.posterior) == pytest.approx(1.0, abs=1e-10)


def test_normal_gamma_prior_is_normalised_with_its_change_of_variables() -> None:
    prior = NormalGamma(GAMMA.X[:, :1], GAMMA.y, prior_precision=0.5, a=2.0, b=1.0).prior
    assert mass(prior.log_prob, prior) == pytest.approx(1.0, abs=1e-10)


def test_normal_gamma_posterior_is_joint_over_evidence() -> None:
    generator = torch.Generator().manual_seed(0)
    for noise in (0.2, 0.5, 1.7):
        params = {"weights": torch.randn(3, generator=generator, dtype=torch.float64), "noise": scalar(noise)}
        joint = float(log_joint(GAMMA.density(), params, GAMMA.data))
        expected = pytest.approx(joint - GAMMA.log_evidence, abs=1e-10)
        assert float(GAMMA.posterior.log_prob(**params)) == expected


def test_normal_gamma_predictive_is_the_ratio_of_evidences() -> None:
    x = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    for new in (-4.0, 0.5):
        longer = NormalGamma(
            torch.cat([GAMMA.X, x]),
            torch.cat([GAMMA.y, scalar(new)[None]]),
            GAMMA.prior_precision,
            GAMMA.a,
            GAMMA.b,
        )
        ratio = longer.log_evidence - GAMMA.log_evidence
        assert float(GAMMA.predictive(x).log_prob(scalar(new))) == pytest.approx(ratio, abs=1e-10)


def test_normal_gamma_moments_are_those_of_its_marginals() -> None:
    posterior = GAMMA.posterior
    tau = stats.gamma(posterior.a, scale=1 / posterior.b)
    noise = quad(lambda t: t**-0.5 * float(tau.pdf(t)), 1e-6, 2, 5, 20, 60)
    assert float(posterior.mean["noise"]) == pytest.approx(noise, abs=1e-10)
    student = stats.multivariate_t(
        posterior.loc.numpy(),
        posterior.b / posterior.a * np.linalg.inv(posterior.precision.numpy()),
        df=2 * posterior.a,
    )
    covariance = np.asarray(student.shape) * student.df / (student.df - 2)
    np.testing.assert_allclose(posterior.covariance.numpy(), covariance, rtol=1e-10)
    assert torch.equal(posterior.mean["weights"], posterior.loc)


# All of them


@pytest.mark.parametrize("seed", [0, 1])
def test_instances_are_functions_of_their_seed_in_float64(seed: int) -> None:
    for one, same, other in zip(exact.make(seed), exact.make(seed), exact.make(seed + 10), strict=True):
        assert one.log_evidence == same.log_evidence
        assert one.log_evidence != other.log_evidence
        assert all(t.dtype == torch.float64 for t in one.data)
        assert math.isfinite(one.log_evidence)


def test_names_differ() -> None:
    assert len({target.name for target in exact.make(0)}) == 4


@pytest.mark.parametrize("target", exact.make(0), ids=lambda target: target.name)
def test_a_density_passes_its_own_check_and_differentiates_many_draws_at_once(target: Any) -> None:
    density = target.density()
    density.check(target.data)
    assert density.dtype == torch.float64
    w = torch.randn(4, density.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, gradients = density.log_likelihood_and_grad(w, target.data, 1.0, {})
    for row, value, gradient in zip(w, values, gradients, strict=True):
        one, slope = density.log_likelihood_and_grad(row, target.data, 1.0, {})
        torch.testing.assert_close(value, one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Coin(-1, 2), "The 'heads' argument of Coin must be an integer >= 0, got -1."),
        (lambda: Coin(1, 2, a=0), "The 'a' argument of Coin must be a positive number, got 0."),
        (
            lambda: Coin(0, 3).mode,
            "The 'data' argument of Coin must leave both shapes of the posterior above 1, or there is no mode inside "
            "(0, 1), got (1.0, 4.0).",
        ),
        (
            lambda: GaussianMean(torch.ones(3), 0.0, 0.0, 1.0),
            "The 'noise' argument of GaussianMean must be a positive number, got 0.0.",
        ),
        (
            lambda: GaussianMean(torch.ones(3, 1), 1.0, 0.0, 1.0),
            "The 'y' argument of GaussianMean must hold one or more finite numbers, got the shape (3, 1).",
        ),
        (
            lambda: LinearRegression(torch.ones(3, 2), torch.ones(4), 1.0, 1.0),
            "The 'y' argument of LinearRegression must have a value for each of the 3 rows of X, got 4.",
        ),
        (
            lambda: NormalGamma(torch.ones(3, 2), torch.ones(3), -1.0, 1.0, 1.0),
            "The 'prior_precision' argument of NormalGamma must be a positive number or a positive-definite 2 x 2 "
            "matrix, got -1.0.",
        ),
    ],
)
def test_problems_without_a_solution_are_refused(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert str(error.value) == sentence
