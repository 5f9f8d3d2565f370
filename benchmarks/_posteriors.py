"""The thirteen reference posteriors of posteriordb for `posteriordb.py`, written as a user writes them.

Each model is a function from its data to a `Density` whose `log_prob` takes one draw at a time. The formulas are in
MODELS.md, with the data. `QUANTITIES` turns draws into the parameters of the reference, where the density has others.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Gamma,
    HalfCauchy,
    HalfNormal,
    MultivariateNormal,
    Normal,
    StudentT,
)

import priory as pr
from priory import Param, constraints
from priory.diagnostics import mcse_mean, mcse_sd

Params = dict[str, Tensor]
Data = dict[str, Any]
positive, unit = constraints.positive, constraints.unit_interval


def tensor(values: Any) -> Tensor:
    """The values as a float64 tensor."""
    return torch.as_tensor(np.asarray(values, dtype=np.float64))


# Files.


def row(name: str, folder: Path) -> dict[str, str]:
    """The row of a posterior in the index of the reference data."""
    with open(folder / "posteriordb" / "index.csv") as stream:
        return next(r for r in csv.DictReader(stream) if r["posterior"] == name)


def data(name: str, folder: Path) -> Data:
    """The data of a posterior."""
    with gzip.open(folder / "posteriordb" / "data" / f"{row(name, folder)['data']}.json.gz") as stream:
        return json.load(stream)


def density(name: str, folder: Path) -> pr.Density:
    """A posterior's density."""
    return MODELS[name](data(name, folder))


def reference(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Mean and sd of each parameter of the reference draws, with their standard errors, as nested lists."""
    stored = np.load(folder / "posteriordb" / "draws" / f"{row(name, folder)['reference']}.npz")
    draws, names = torch.from_numpy(stored["draws"].astype(float)), [str(n) for n in stored["names"]]
    found = {}
    for stem in dict.fromkeys(n.split("[")[0] for n in names):
        places = [i for i, n in enumerate(names) if n.split("[")[0] == stem]
        x = draws[..., places] if "[" in names[places[0]] else draws[..., places[0]]
        found[stem] = {
            "mean": x.mean((0, 1)).tolist(),
            "sd": x.flatten(0, 1).std(0).tolist(),
            "mcse_mean": mcse_mean(x).tolist(),
            "mcse_sd": mcse_sd(x).tolist(),
        }
    return found


# Linear regressions.


def flat_regression(X: Tensor, y: Tensor, log_prior: Callable[[Params], Tensor] | None = None) -> pr.Density:
    """y ~ Normal(X beta, sigma), flat apart from `log_prior`."""

    def log_prob(p: Params) -> Tensor:
        log_likelihood = Normal(X @ p["beta"], p["sigma"]).log_prob(y).sum()
        return log_likelihood if log_prior is None else log_likelihood + log_prior(p)

    return pr.Density(log_prob, {"beta": Param((X.shape[1],)), "sigma": Param((), positive)})


def kidiq(data: Data) -> pr.Density:
    """Test scores of children, from the mother's schooling and IQ and their product."""
    hs, iq = tensor(data["mom_hs"]), tensor(data["mom_iq"])
    X = torch.stack([torch.ones_like(hs), hs, iq, hs * iq], 1)
    return flat_regression(X, tensor(data["kid_score"]), lambda p: HalfCauchy(2.5).log_prob(p["sigma"]))


def mesquite(data: Data) -> pr.Density:
    """Log weights of bushes, from the logarithms of their sizes."""
    sizes = [tensor(data[n]).log() for n in ("diam1", "diam2", "canopy_height", "total_height", "density")]
    X = torch.stack([torch.ones_like(sizes[0]), *sizes, tensor(data["group"])], 1)
    return flat_regression(X, tensor(data["weight"]).log())


def nes(data: Data) -> pr.Density:
    """Party identification of voters."""
    age = tensor(data["age_discrete"])
    first = [torch.ones_like(age), tensor(data["real_ideo"]), tensor(data["race_adj"])]
    ages = [(age == k).double() for k in (2, 3, 4)]
    X = torch.stack([*first, *ages, *(tensor(data[n]) for n in ("educ1", "gender", "income"))], 1)
    return flat_regression(X, tensor(data["partyid7"]))


def earnings(data: Data) -> pr.Density:
    """Log earnings, from height in inches, sex and their product."""
    height, male = tensor(data["height"]), tensor(data["male"])
    X = torch.stack([torch.ones_like(height), height, male, height * male], 1)
    return flat_regression(X, tensor(data["earn"]).log())


def blr(data: Data) -> pr.Density:
    """A linear regression with proper priors."""
    return flat_regression(
        tensor(data["X"]),
        tensor(data["y"]),
        lambda p: Normal(0.0, 10.0).log_prob(p["beta"]).sum() + HalfNormal(10.0).log_prob(p["sigma"]),
    )


def diamonds(data: Data) -> pr.Density:
    """Log prices of 5,000 diamonds, from 24 centred columns."""
    X, y = tensor(data["X"])[:, 1:], tensor(data["Y"])
    X = X - X.mean(0)

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 1.0).log_prob(p["b"]).sum() + StudentT(3.0, 8.0, 10.0).log_prob(p["Intercept"])
        prior = prior + StudentT(3.0, 0.0, 10.0).log_prob(p["sigma"])
        return prior + Normal(p["Intercept"] + X @ p["b"], p["sigma"]).log_prob(y).sum()

    return pr.Density(log_prob, {"b": Param((X.shape[1],)), "Intercept": Param(), "sigma": Param((), positive)})


def autoregression(data: Data) -> pr.Density:
    """An autoregression of order five."""
    y, lags = tensor(data["y"]), data["K"]
    before = torch.stack([y[lags - k : len(y) - k] for k in range(1, lags + 1)], 1)

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 10.0).log_prob(p["alpha"]) + Normal(0.0, 10.0).log_prob(p["beta"]).sum()
        prior = prior + HalfCauchy(2.5).log_prob(p["sigma"])
        return prior + Normal(p["alpha"] + before @ p["beta"], p["sigma"]).log_prob(y[lags:]).sum()

    return pr.Density(log_prob, {"alpha": Param(), "beta": Param((lags,)), "sigma": Param((), positive)})


# The others.


def gaussian_mixture(data: Data) -> pr.Density:
    """A mixture of two normal distributions with ordered means."""
    y = tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 2.0).log_prob(p["mu"]).sum() + HalfNormal(2.0).log_prob(p["sigma"]).sum()
        prior = prior + Beta(5.0, 5.0).log_prob(p["theta"])
        first = p["theta"].log() + Normal(p["mu"][0], p["sigma"][0]).log_prob(y)
        second = torch.log1p(-p["theta"]) + Normal(p["mu"][1], p["sigma"][1]).log_prob(y)
        return prior + torch.logaddexp(first, second).sum()

    params = {"mu": Param((2,), constraints.ordered), "sigma": Param((2,), positive), "theta": Param((), unit)}
    return pr.Density(log_prob, params)


def gp_regression(data: Data) -> pr.Density:
    """A Gaussian process over eleven points; sigma is a variance."""
    x, y = tensor(data["x"]), tensor(data["y"])
    squares, eye = (x[:, None] - x).square(), torch.eye(len(x), dtype=torch.float64)

    def log_prob(p: Params) -> Tensor:
        prior = Gamma(25.0, 4.0).log_prob(p["rho"]) + HalfNormal(2.0).log_prob(p["alpha"])
        prior = prior + HalfNormal(1.0).log_prob(p["sigma"])
        K = p["alpha"] ** 2 * torch.exp(-squares / (2 * p["rho"] ** 2)) + p["sigma"] * eye
        return prior + MultivariateNormal(torch.zeros_like(y), scale_tril=torch.linalg.cholesky(K)).log_prob(y)

    return pr.Density(log_prob, {n: Param((), positive) for n in ("rho", "alpha", "sigma")})


def hmm(data: Data) -> pr.Density:
    """A hidden Markov model of two states, by the forward algorithm."""
    y = tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        emission = Normal(p["mu"], 1.0).log_prob(y[:, None])
        moves = torch.stack([p["theta1"], p["theta2"]]).log()
        forward = emission[0]
        for t in range(1, len(y)):
            forward = torch.logsumexp(forward[:, None] + moves, 0) + emission[t]
        prior = Normal(3.0, 1.0).log_prob(p["mu"][0]) + Normal(10.0, 1.0).log_prob(p["mu"][1])
        return prior + torch.logsumexp(forward, 0)

    rows = {n: Param((2,), constraints.simplex) for n in ("theta1", "theta2")}
    return pr.Density(log_prob, {**rows, "mu": Param((2,), constraints.positive_ordered)})


def garch(data: Data) -> pr.Density:
    """GARCH(1, 1) with beta1 = share (1 - alpha1), as the support of beta1 depends on alpha1."""
    y = tensor(data["y"])

    def log_prob(p: Params) -> Tensor:
        beta1 = p["share"] * (1 - p["alpha1"])
        variance = [torch.full_like(beta1, data["sigma1"] ** 2)]
        for t in range(1, len(y)):
            variance.append(p["alpha0"] + p["alpha1"] * (y[t - 1] - p["mu"]) ** 2 + beta1 * variance[-1])
        log_likelihood = Normal(p["mu"], torch.stack(variance).sqrt()).log_prob(y).sum()
        return log_likelihood + torch.log1p(-p["alpha1"])

    params = {"mu": Param(), "alpha0": Param((), positive), "alpha1": Param((), unit), "share": Param((), unit)}
    return pr.Density(log_prob, params)


def schools_noncentred(data: Data) -> pr.Density:
    """Eight schools with theta = mu + tau z."""
    y, sigma = tensor(data["y"]), tensor(data["sigma"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfCauchy(5.0).log_prob(p["tau"])
        prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum()
        return prior + Normal(p["mu"] + p["tau"] * p["z"], sigma).log_prob(y).sum()

    return pr.Density(log_prob, {"z": Param((8,)), "mu": Param(), "tau": Param((), positive)})


def schools_centred(data: Data) -> pr.Density:
    """Eight schools with theta ~ Normal(mu, tau), a funnel."""
    y, sigma = tensor(data["y"]), tensor(data["sigma"])

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfCauchy(5.0).log_prob(p["tau"])
        prior = prior + Normal(p["mu"], p["tau"]).log_prob(p["theta"]).sum()
        return prior + Normal(p["theta"], sigma).log_prob(y).sum()

    return pr.Density(log_prob, {"theta": Param((8,)), "mu": Param(), "tau": Param((), positive)})


MODELS: dict[str, Callable[[Data], pr.Density]] = {
    "kidiq-kidscore_interaction": kidiq,
    "mesquite-logmesquite": mesquite,
    "nes1980-nes": nes,
    "earnings-logearn_interaction": earnings,
    "arK-arK": autoregression,
    "sblri-blr": blr,
    "diamonds-diamonds": diamonds,
    "low_dim_gauss_mix-low_dim_gauss_mix": gaussian_mixture,
    "gp_pois_regr-gp_regr": gp_regression,
    "hmm_example-hmm_example": hmm,
    "garch-garch11": garch,
    "eight_schools-eight_schools_noncentered": schools_noncentred,
    "eight_schools-eight_schools_centered": schools_centred,
}
QUANTITIES: dict[str, Callable[[Params], Params]] = {
    "garch-garch11": lambda p: {
        **{n: p[n] for n in ("mu", "alpha0", "alpha1")},
        "beta1": p["share"] * (1 - p["alpha1"]),
    },
    "eight_schools-eight_schools_noncentered": lambda p: {
        "theta": p["mu"][..., None] + p["tau"][..., None] * p["z"],
        "mu": p["mu"],
        "tau": p["tau"],
    },
}
