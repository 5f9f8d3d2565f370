"""Models of everyday practice for `posteriordb.py`, written as a user writes them, with their simulated data.

Each model is a function from its data, a dict of arrays, to a `Density` whose `log_prob` takes one draw at a time. The
data come from fixed seeds. `QUANTITIES` selects what is compared with a reference: functions of the draws, with leading
dimensions (chain, draw), whose means and standard deviations exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Dirichlet,
    Exponential,
    HalfCauchy,
    HalfNormal,
    InverseGamma,
    LKJCholesky,
    LogNormal,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
)
from torch.nn.functional import logsigmoid

import priory as pr
from priory import Param, constraints

Params = dict[str, Tensor]
Data = dict[str, Any]
positive = constraints.positive


def tensor(values: Any) -> Tensor:
    """The values as a float64 tensor."""
    return torch.as_tensor(np.asarray(values, dtype=np.float64))


def index(values: Any) -> Tensor:
    """The values as integers."""
    return torch.as_tensor(np.asarray(values, dtype=np.int64))


# Linear regressions on raw scales.


def covariate_data() -> Data:
    """A score with a covariate of mean 100 and standard deviation 15, and one of two groups."""
    rng = np.random.default_rng(1)
    x, group = rng.normal(100, 15, 200), rng.integers(0, 2, 200)
    return {"X": np.stack([np.ones(200), x, group], 1), "y": 25 + 0.6 * x + 5 * group + rng.normal(0, 12, 200)}


def response_data() -> Data:
    """Prices near 20,000 that fall with age."""
    rng = np.random.default_rng(2)
    age = rng.uniform(0, 10, 150)
    return {"X": np.stack([np.ones(150), age], 1), "y": 25_000 - 1_000 * age + rng.normal(0, 3_000, 150)}


def collinear_data() -> Data:
    """Two covariates with a correlation of 0.9998."""
    rng = np.random.default_rng(3)
    x = rng.normal(10, 2, 120)
    twin = x + rng.normal(0, 0.04, 120)
    return {"X": np.stack([np.ones(120), x, twin], 1), "y": 3 + 1.5 * x - 0.5 * twin + rng.normal(0, 1, 120)}


def years_data() -> Data:
    """A line over calendar years, whose intercept is at year 0."""
    rng = np.random.default_rng(4)
    year = np.arange(1970.0, 2021.0)
    return {"X": np.stack([np.ones(51), year], 1), "y": 14 + 0.02 * (year - 1995) + rng.normal(0, 0.15, 51)}


# Standard deviations of the priors of the coefficients, and the scale of the half-Normal prior of sigma.
REGRESSION_PRIORS: dict[str, tuple[list[float], float]] = {
    "raw_covariate": ([100.0, 10.0, 10.0], 50.0),
    "raw_response": ([50_000.0, 10_000.0], 10_000.0),
    "collinear": ([10.0, 100.0, 100.0], 10.0),
    "years": ([100.0, 1.0], 1.0),
}


def regression(data: Data, coefficient_sds: list[float], sigma_scale: float) -> pr.Density:
    """y ~ Normal(X beta, sigma), beta ~ Normal(0, coefficient_sds), sigma ~ half-Normal(sigma_scale)."""
    X, y, sds = tensor(data["X"]), tensor(data["y"]), tensor(coefficient_sds)

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, sds).log_prob(p["beta"]).sum() + HalfNormal(sigma_scale).log_prob(p["sigma"])
        return prior + Normal(X @ p["beta"], p["sigma"]).log_prob(y).sum()

    return pr.Density(log_prob, {"beta": Param((X.shape[1],)), "sigma": Param((), positive)})


# Hierarchical models.


def logit_data() -> Data:
    """2,000 rows in 200 groups."""
    rng = np.random.default_rng(5)
    group, X = np.repeat(np.arange(200), 10), rng.normal(size=(2000, 3))
    eta = -0.5 + 0.8 * rng.normal(size=200)[group] + X @ [0.7, -0.4, 0.2]
    return {"group": group, "X": X, "y": rng.binomial(1, 1 / (1 + np.exp(-eta)))}


def hierarchical_logit(data: Data) -> pr.Density:
    """y ~ Bernoulli(logit = mu + tau z_group + X beta)."""
    group, X, y = index(data["group"]), tensor(data["X"]), tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 2.0).log_prob(p["mu"]) + HalfNormal(1.0).log_prob(p["tau"])
        prior = prior + Normal(0.0, 1.0).log_prob(p["beta"]).sum() + Normal(0.0, 1.0).log_prob(p["z"]).sum()
        eta = p["mu"] + p["tau"] * p["z"][group] + X @ p["beta"]
        return prior + Bernoulli(logits=eta).log_prob(y).sum()

    params = {"mu": Param(), "tau": Param((), positive), "beta": Param((3,)), "z": Param((200,))}
    return pr.Density(log_prob, params)


def slopes_data() -> Data:
    """30 groups of ten rows, with an intercept and a slope each."""
    rng = np.random.default_rng(6)
    group, x = np.repeat(np.arange(30), 10), rng.normal(size=300)
    effects = rng.multivariate_normal([1.0, -0.5], [[0.64, -0.24], [-0.24, 0.36]], 30)[group]
    return {"group": group, "x": x, "y": effects[:, 0] + effects[:, 1] * x + rng.normal(0, 0.7, 300)}


def lkj_slopes(data: Data) -> pr.Density:
    """Varying intercepts and slopes: (a, b)_group = beta + diag(tau) L z_group, L L' ~ LKJ(2)."""
    group, x, y = index(data["group"]), tensor(data["x"]), tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 2.0).log_prob(p["beta"]).sum() + HalfNormal(1.0).log_prob(p["tau"]).sum()
        prior = prior + LKJCholesky(2, 2.0).log_prob(p["L"]) + HalfNormal(1.0).log_prob(p["sigma"])
        prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum()
        effects = p["beta"] + p["z"] @ (p["tau"][:, None] * p["L"]).T  # (30, 2)
        mean = effects[group, 0] + effects[group, 1] * x
        return prior + Normal(mean, p["sigma"]).log_prob(y).sum()

    params = {
        "beta": Param((2,)),
        "tau": Param((2,), positive),
        "L": Param((2, 2), constraints.corr_cholesky),
        "sigma": Param((), positive),
        "z": Param((30, 2)),
    }
    return pr.Density(log_prob, params)


def horseshoe_data() -> Data:
    """100 rows and 50 columns, five of which matter."""
    rng = np.random.default_rng(7)
    X = rng.normal(size=(100, 50))
    return {"X": X, "y": X[:, :5] @ [2.0, -1.5, 1.0, 0.5, -0.25] + rng.normal(0, 1, 100)}


def horseshoe(data: Data) -> pr.Density:
    """y ~ Normal(X beta, sigma), beta = z lambda tau, with half-Cauchy lambda, tau and sigma."""
    X, y = tensor(data["X"]), tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 1.0).log_prob(p["z"]).sum() + HalfCauchy(1.0).log_prob(p["lambda"]).sum()
        prior = prior + HalfCauchy(0.1).log_prob(p["tau"]) + HalfCauchy(1.0).log_prob(p["sigma"])
        beta = p["z"] * p["lambda"] * p["tau"]
        return prior + Normal(X @ beta, p["sigma"]).log_prob(y).sum()

    scale = Param((), positive)
    return pr.Density(log_prob, {"z": Param((50,)), "lambda": Param((50,), positive), "tau": scale, "sigma": scale})


# Counts, survival times, mixtures.


def zip_data() -> Data:
    """400 counts, a third of them structural zeros."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=400)
    zero = rng.random(400) < 1 / (1 + np.exp(0.8 - 0.6 * x))
    return {"x": x, "y": np.where(zero, 0, rng.poisson(np.exp(0.7 + 0.4 * x)))}


def zero_inflated_poisson(data: Data) -> pr.Density:
    """y is 0 with probability logistic(c + d x), and otherwise Poisson(exp(a + b x))."""
    x, y = tensor(data["x"]), tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 2.0).log_prob(p["rate"]).sum() + Normal(0.0, 2.0).log_prob(p["zero"]).sum()
        gate = p["zero"][0] + p["zero"][1] * x
        count = Poisson((p["rate"][0] + p["rate"][1] * x).exp()).log_prob(y) + logsigmoid(-gate)
        return prior + torch.where(y == 0, torch.logaddexp(logsigmoid(gate), count), count).sum()

    return pr.Density(log_prob, {"rate": Param((2,)), "zero": Param((2,))})


def weibull_data() -> Data:
    """200 survival times, censored at a random end of observation."""
    rng = np.random.default_rng(9)
    X = np.stack([rng.normal(size=200), rng.integers(0, 2, 200)], 1)
    time, end = np.exp(2.0 + X @ [0.5, -0.7]) * rng.weibull(1.5, 200), rng.uniform(2, 15, 200)
    return {"X": X, "time": np.minimum(time, end), "event": (time <= end).astype(int)}


def censored_weibull(data: Data) -> pr.Density:
    """time ~ Weibull(shape, exp(alpha + X beta)), right-censored where event is 0."""
    X, time, event = tensor(data["X"]), tensor(data["time"]), tensor(data["event"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 5.0).log_prob(p["alpha"]) + Normal(0.0, 2.0).log_prob(p["beta"]).sum()
        prior = prior + LogNormal(0.0, 1.0).log_prob(p["shape"])
        log_scale = p["alpha"] + X @ p["beta"]
        log_hazard = p["shape"].log() + (p["shape"] - 1) * time.log() - p["shape"] * log_scale
        survival = -((time.log() - log_scale) * p["shape"]).exp()
        return prior + (event * log_hazard + survival).sum()

    return pr.Density(log_prob, {"alpha": Param(), "beta": Param((2,)), "shape": Param((), positive)})


def mixture_data() -> Data:
    """300 rows of two overlapping clusters."""
    rng = np.random.default_rng(10)
    second = rng.random(300) < 0.4
    return {"y": np.where(second, rng.normal(2.5, 0.8, 300), rng.normal(-0.5, 1.2, 300))}


def ordered_mixture(data: Data) -> pr.Density:
    """y ~ theta Normal(mu_1, sigma_1) + (1 - theta) Normal(mu_2, sigma_2), mu_1 < mu_2."""
    y = tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 3.0).log_prob(p["mu"]).sum() + HalfNormal(2.0).log_prob(p["sigma"]).sum()
        prior = prior + Beta(2.0, 2.0).log_prob(p["theta"])
        first = p["theta"].log() + Normal(p["mu"][0], p["sigma"][0]).log_prob(y)
        second = torch.log1p(-p["theta"]) + Normal(p["mu"][1], p["sigma"][1]).log_prob(y)
        return prior + torch.logaddexp(first, second).sum()

    params = {
        "mu": Param((2,), constraints.ordered),
        "sigma": Param((2,), positive),
        "theta": Param((), constraints.unit_interval),
    }
    return pr.Density(log_prob, params)


# Series, curves and differential equations.


def gp_data() -> Data:
    """60 noisy points of a smooth curve."""
    rng = np.random.default_rng(11)
    x = np.sort(rng.uniform(-3, 3, 60))
    return {"x": x, "y": np.sin(2 * x) + 0.3 * x + rng.normal(0, 0.3, 60)}


def gp_cholesky(data: Data) -> pr.Density:
    """A Gaussian process with a squared-exponential kernel and noise, marginalised by a Cholesky factor."""
    x, y = tensor(data["x"]), tensor(data["y"])
    squares, eye = (x[:, None] - x).square(), torch.eye(len(x), dtype=torch.float64)

    def log_prob(p: Params) -> Tensor:
        prior = InverseGamma(5.0, 5.0).log_prob(p["length"]) + HalfNormal(2.0).log_prob(p["amplitude"])
        prior = prior + HalfNormal(1.0).log_prob(p["noise"])
        K = p["amplitude"] ** 2 * torch.exp(-squares / (2 * p["length"] ** 2)) + p["noise"] ** 2 * eye
        return prior + MultivariateNormal(torch.zeros_like(y), scale_tril=torch.linalg.cholesky(K)).log_prob(y)

    return pr.Density(log_prob, {name: Param((), positive) for name in ("length", "amplitude", "noise")})


SIR_PEOPLE, SIR_DAYS, SIR_SUBSTEPS = 763, 20, 10


def sir_data() -> Data:
    """People in bed on each of 20 days, from the equations themselves with negative binomial noise."""
    rng = np.random.default_rng(12)
    state, count, h = np.array([SIR_PEOPLE - 1.0, 1.0]), [], 1 / 1000

    for step in range(SIR_DAYS * 1000):
        new, gone = 1.7 * state[0] * state[1] / SIR_PEOPLE, 0.45 * state[1]
        state = state + h * np.array([-new, new - gone])
        if step % 1000 == 999:
            count.append(rng.poisson(rng.gamma(10.0, state[1] / 10.0)))
    return {"y": np.array(count)}


def sir_rk4(data: Data) -> pr.Density:
    """Infected people by the SIR equations, 200 steps of Runge and Kutta, with negative binomial counts."""
    y = tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        beta, gamma, phi = p["beta"], p["gamma"], p["phi"]

        def slope(state: Tensor) -> Tensor:
            new, gone = beta * state[0] * state[1] / SIR_PEOPLE, gamma * state[1]
            return torch.stack([-new, new - gone, gone])

        state, h, infected = torch.tensor([SIR_PEOPLE - 1.0, 1.0, 0.0], dtype=beta.dtype), 1 / SIR_SUBSTEPS, []
        for step in range(SIR_DAYS * SIR_SUBSTEPS):
            k1 = slope(state)
            k2 = slope(state + h / 2 * k1)
            k3 = slope(state + h / 2 * k2)
            k4 = slope(state + h * k3)
            state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            if step % SIR_SUBSTEPS == SIR_SUBSTEPS - 1:
                infected.append(state[1])
        mean = torch.stack(infected)
        prior = LogNormal(0.0, 1.0).log_prob(beta) + LogNormal(-1.0, 1.0).log_prob(gamma)
        prior = prior + Exponential(0.2).log_prob(phi)
        return prior + NegativeBinomial(phi, logits=mean.log() - phi.log()).log_prob(y).sum()

    return pr.Density(log_prob, {name: Param((), positive) for name in ("beta", "gamma", "phi")})


def ar2_data() -> Data:
    """100 noisy observations of an autoregression of order two."""
    rng = np.random.default_rng(13)
    x = np.zeros(100)
    x[:2] = rng.normal(0, 1, 2)
    for t in range(2, 100):
        x[t] = 0.5 * x[t - 1] + 0.3 * x[t - 2] + rng.normal(0, 0.8)
    return {"y": x + rng.normal(0, 0.5, 100)}


def ar2_states(data: Data) -> pr.Density:
    """x_t ~ Normal(phi_1 x_(t-1) + phi_2 x_(t-2), sigma), y_t ~ Normal(x_t, tau), with all 100 states sampled."""
    y = tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        x, phi = p["x"], p["phi"]
        prior = Normal(0.0, 0.5).log_prob(phi).sum() + HalfNormal(1.0).log_prob(p["sigma"])
        prior = prior + LogNormal(-1.0, 0.5).log_prob(p["tau"]) + Normal(0.0, 2.0).log_prob(x[:2]).sum()
        moves = Normal(phi[0] * x[1:-1] + phi[1] * x[:-2], p["sigma"]).log_prob(x[2:]).sum()
        return prior + moves + Normal(x, p["tau"]).log_prob(y).sum()

    scale = Param((), positive)
    return pr.Density(log_prob, {"phi": Param((2,)), "sigma": scale, "tau": scale, "x": Param((100,))})


HMM_STATES, HMM_STEPS = 3, 500


def hmm_data() -> Data:
    """500 steps of a chain of three states, seen with noise."""
    rng = np.random.default_rng(14)
    moves = np.array([[0.9, 0.08, 0.02], [0.1, 0.8, 0.1], [0.05, 0.15, 0.8]])
    state, y = 0, []
    for _ in range(HMM_STEPS):
        state = int(rng.choice(HMM_STATES, p=moves[state]))
        y.append(rng.normal([-2.0, 0.5, 3.0][state], 0.9))
    return {"y": np.array(y)}


def hmm_forward(data: Data) -> pr.Density:
    """Three ordered means, a common standard deviation and a transition matrix, by the forward algorithm."""
    y = tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 3.0).log_prob(p["mu"]).sum() + HalfNormal(2.0).log_prob(p["sigma"])
        prior = prior + Dirichlet(torch.full((3,), 2.0, dtype=p["mu"].dtype)).log_prob(p["moves"]).sum()
        emission = Normal(p["mu"], p["sigma"]).log_prob(y[:, None])  # (500, 3)
        moves = p["moves"].log()
        forward = emission[0]
        for t in range(1, len(y)):
            forward = torch.logsumexp(forward[:, None] + moves, 0) + emission[t]
        return prior + torch.logsumexp(forward, 0)

    params = {
        "mu": Param((3,), constraints.ordered),
        "sigma": Param((), positive),
        "moves": Param((3, 3), constraints.simplex),
    }
    return pr.Density(log_prob, params)


# Densities that no default can sample: the status must say so.


def funnel(data: Data) -> pr.Density:
    """Neal's funnel: v ~ Normal(0, 3), nine x ~ Normal(0, exp(v / 2))."""
    return pr.Density(
        lambda p: Normal(0.0, 3.0).log_prob(p["v"]) + Normal(0.0, (p["v"] / 2).exp()).log_prob(p["x"]).sum(),
        {"v": Param(), "x": Param((9,))},
    )


def bimodal(data: Data) -> pr.Density:
    """0.3 Normal(-10, 1) + 0.7 Normal(10, 1) in each of two coordinates that go together."""

    def log_prob(p: Params) -> Tensor:
        low, high = (Normal(at, 1.0).log_prob(p["x"]).sum() for at in (-10.0, 10.0))
        return torch.logaddexp(low + np.log(0.3), high + np.log(0.7))

    return pr.Density(log_prob, {"x": Param((2,))})


def _regression(name: str) -> Callable[[Data], pr.Density]:
    return lambda data: regression(data, *REGRESSION_PRIORS[name])


PRACTICE: dict[str, tuple[Callable[[], Data], Callable[[Data], pr.Density]]] = {
    "raw_covariate": (covariate_data, _regression("raw_covariate")),
    "raw_response": (response_data, _regression("raw_response")),
    "collinear": (collinear_data, _regression("collinear")),
    "years": (years_data, _regression("years")),
    "hierarchical_logit": (logit_data, hierarchical_logit),
    "ar2_states": (ar2_data, ar2_states),
    "horseshoe": (horseshoe_data, horseshoe),
    "ordered_mixture": (mixture_data, ordered_mixture),
    "gp_cholesky": (gp_data, gp_cholesky),
    "sir_rk4": (sir_data, sir_rk4),
    "lkj_slopes": (slopes_data, lkj_slopes),
    "censored_weibull": (weibull_data, censored_weibull),
    "zero_inflated_poisson": (zip_data, zero_inflated_poisson),
    "hmm_forward": (hmm_data, hmm_forward),
    "funnel": (dict, funnel),
    "bimodal": (dict, bimodal),
}

# Of many group effects or states, a few are compared. A scale of the horseshoe has no variance, but its logarithm has.
QUANTITIES: dict[str, Callable[[Params], Params]] = {
    "hierarchical_logit": lambda p: {
        **{n: p[n] for n in ("mu", "tau", "beta")},
        "effect": p["tau"][..., None] * p["z"][..., :10],
    },
    "lkj_slopes": lambda p: {
        **{n: p[n] for n in ("beta", "tau", "sigma")},
        "correlation": p["L"][..., 1, 0],
        "effect": (p["z"] @ (p["tau"][..., None] * p["L"]).mT)[..., :5, :],
    },
    "horseshoe": lambda p: {
        "beta": (p["z"] * p["lambda"] * p["tau"][..., None])[..., :10],
        "log_lambda": p["lambda"].log()[..., :10],
        "log_tau": p["tau"].log(),
        "sigma": p["sigma"],
    },
    "ar2_states": lambda p: {**{n: p[n] for n in ("phi", "sigma", "tau")}, "x": p["x"][..., ::10]},
    "funnel": lambda p: {"v": p["v"]},
}
