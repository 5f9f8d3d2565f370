"""The thirteen posteriors of the reference data as densities, with what is known of each.

Normalising constants that don't depend on the parameters are left out, so that evidences are up to a constant. Where a
density holds a reference parameter in another form (z for theta in the non-centred eight schools, beta1 / (1 - alpha1)
in the garch model), `Problem.named` gives back the reference's own.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import priory as pr
from priory import Param, constraints
from priory.posteriors import Posterior

Params = dict[str, Tensor]
positive = constraints.positive

NEARLY_GAUSSIAN = (
    "kidiq-kidscore_interaction",
    "mesquite-logmesquite",
    "nes1980-nes",
    "earnings-logearn_interaction",
    "arK-arK",
    "sblri-blr",
    "diamonds-diamonds",
    "low_dim_gauss_mix-low_dim_gauss_mix",
    "gp_pois_regr-gp_regr",
    "hmm_example-hmm_example",
)
NAMES = (
    *NEARLY_GAUSSIAN,
    "eight_schools-eight_schools_noncentered",
    "eight_schools-eight_schools_centered",
    "garch-garch11",
)


@dataclass(frozen=True)
class Problem:
    """A density, the reference draws of its posterior by parameter, and their means and standard deviations."""

    name: str
    density: pr.Density
    named: Callable[[Params], Params]  # the density's parameters as the reference holds them
    held: Callable[[Params], Params]  # and back
    draws: Params  # (10000, ...) each
    mean: Params
    sd: Params


def problem(name: str, folder: Path) -> Problem:
    """Return one of NAMES from the folder of reference data."""
    with open(folder / "posteriordb" / "index.csv") as stream:
        row = next(r for r in csv.DictReader(stream) if r["posterior"] == name)
    with gzip.open(folder / "posteriordb" / "data" / f"{row['data']}.json.gz") as stream:
        data = json.load(stream)
    stored = np.load(folder / "posteriordb" / "draws" / f"{row['reference']}.npz")
    draws = torch.from_numpy(stored["draws"].astype(float)).flatten(0, 1)
    with open(folder / "posteriordb" / "summary" / f"{row['reference']}.csv") as stream:
        rows = list(csv.DictReader(stream))
    names = [str(n) for n in stored["names"]]
    assert [r["param"] for r in rows] == names
    mean, sd = (torch.tensor([float(r[column]) for r in rows], dtype=torch.float64) for column in ("mean", "sd"))
    density, named, held = MODELS[name](data)
    return Problem(name, density, named, held, *(by_name(t, names) for t in (draws, mean, sd)))


def by_name(values: Tensor, names: list[str]) -> Params:
    """Columns (..., d) gathered by parameter: those called beta[1] and beta[2] are entries of one beta."""
    stems = list(dict.fromkeys(n.split("[")[0] for n in names))
    columns = {stem: [i for i, n in enumerate(names) if n.split("[")[0] == stem] for stem in stems}
    return {
        stem: values[..., places] if "[" in names[places[0]] else values[..., places[0]]
        for stem, places in columns.items()
    }


def distances(posterior: Posterior, problem: Problem, draws: int = 4000) -> dict[str, float]:
    """How many reference standard deviations the posterior's mean is away, the furthest entry of each parameter.

    A parameter that the density holds in another form is averaged over draws.
    """
    found = {n: x.double().mean(0) for n, x in problem.named(posterior.sample(draws, seed=0)).items()}
    found |= {n: x.double() for n, x in posterior.mean.items() if n in problem.mean}
    return {n: float(((found[n] - m) / problem.sd[n]).abs().max()) for n, m in problem.mean.items()}


def close_to_reference(posterior: Posterior, problem: Problem, sds: float) -> None:
    """Assert that every mean of the posterior is within so many reference standard deviations of the reference's."""
    away = distances(posterior, problem)
    far = {n: round(d, 3) for n, d in away.items() if not d < sds}
    assert not far, f"{problem.name}: the means of {far} are further than {sds} reference standard deviations away."


# The pieces of the models, up to constants, with leading dimensions in front.


def normal(x: Tensor, loc: Any, scale: Any) -> Tensor:
    """Return log N(x; loc, scale^2), one value per entry."""
    scale = torch.as_tensor(scale, dtype=x.dtype)
    return -0.5 * ((x - loc) / scale).square() - scale.log()


def student(x: Tensor, df: float, loc: float, scale: float) -> Tensor:
    """log of a Student-t density; df = 1 is Cauchy's."""
    return -(df + 1) / 2 * torch.log1p(((x - loc) / scale).square() / df)


def regression(X: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """log N(y; X b, sigma^2), summed: |y - X b|^2 is |R (b - b0)|^2 and what is left at least squares b0, X = Q R."""
    basis, root = torch.linalg.qr(X)
    best = torch.linalg.solve_triangular(root, (basis.mT @ y)[:, None], upper=True)[:, 0]
    left, n = (y - X @ best).square().sum(), len(y)

    def log_likelihood(beta: Tensor, sigma: Tensor) -> Tensor:
        square = ((beta - best) @ root.mT).square().sum(-1) + left
        return -n * sigma.log() - 0.5 * square / sigma.square()

    return log_likelihood


def columns(*parts: Any) -> Tensor:
    """A design matrix from its columns; a number stands for a column of it."""
    tensors = [torch.as_tensor(p, dtype=torch.float64) for p in parts]
    return torch.stack(torch.broadcast_tensors(*tensors), -1)


def vector(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(p: Params) -> Params:
    return p


Model = tuple[pr.Density, Callable[[Params], Params], Callable[[Params], Params]]


def density(log_prob: Callable[[Params], Tensor], **params: Param) -> Model:
    return pr.Density(log_prob, params, batched=True, dtype=torch.float64), same, same


# The models.


def flat_regression(X: Tensor, y: Tensor, log_prior: Callable[[Params], Tensor] | None = None) -> Model:
    """y ~ Normal(X beta, sigma) with a flat prior, plus `log_prior` if it is given."""
    log_likelihood = regression(X, y)

    def log_prob(p: Params) -> Tensor:
        value = log_likelihood(p["beta"], p["sigma"])
        return value if log_prior is None else value + log_prior(p)

    return density(log_prob, beta=Param((X.shape[1],)), sigma=Param((), positive))


def kidiq(data: dict[str, Any]) -> Model:
    hs, iq = vector(data["mom_hs"]), vector(data["mom_iq"])
    X = columns(1.0, hs, iq, hs * iq)
    return flat_regression(X, vector(data["kid_score"]), lambda p: student(p["sigma"], 1, 0, 2.5))


def mesquite(data: dict[str, Any]) -> Model:
    sizes = [vector(data[n]).log() for n in ("diam1", "diam2", "canopy_height", "total_height", "density")]
    return flat_regression(columns(1.0, *sizes, data["group"]), vector(data["weight"]).log())


def nes(data: dict[str, Any]) -> Model:
    age = vector(data["age_discrete"])
    ages = [(age == k).double() for k in (2, 3, 4)]
    before, after = ([data[n] for n in names] for names in (("real_ideo", "race_adj"), ("educ1", "gender", "income")))
    return flat_regression(columns(1.0, *before, *ages, *after), vector(data["partyid7"]))


def earnings(data: dict[str, Any]) -> Model:
    height, male = vector(data["height"]), vector(data["male"])
    return flat_regression(columns(1.0, height, male, height * male), vector(data["earn"]).log())


def autoregression(data: dict[str, Any]) -> Model:
    y, lags = vector(data["y"]), data["K"]
    before = [y[lags - k : len(y) - k] for k in range(1, lags + 1)]
    log_likelihood = regression(columns(1.0, *before), y[lags:])

    def log_prob(p: Params) -> Tensor:
        weights = torch.cat([p["alpha"][..., None], p["beta"]], -1)
        prior = normal(weights, 0, 10).sum(-1) + student(p["sigma"], 1, 0, 2.5)
        return prior + log_likelihood(weights, p["sigma"])

    return density(log_prob, alpha=Param(), beta=Param((lags,)), sigma=Param((), positive))


def blr(data: dict[str, Any]) -> Model:
    return flat_regression(
        vector(data["X"]),
        vector(data["y"]),
        lambda p: normal(p["beta"], 0, 10).sum(-1) + normal(p["sigma"], 0, 10),
    )


def diamonds(data: dict[str, Any]) -> Model:
    X = vector(data["X"])[:, 1:]
    log_likelihood = regression(torch.cat([torch.ones(len(X), 1).double(), X - X.mean(0)], 1), vector(data["Y"]))

    def log_prob(p: Params) -> Tensor:
        prior = normal(p["b"], 0, 1).sum(-1) + student(p["Intercept"], 3, 8, 10) + student(p["sigma"], 3, 0, 10)
        return prior + log_likelihood(torch.cat([p["Intercept"][..., None], p["b"]], -1), p["sigma"])

    return density(log_prob, b=Param((X.shape[1],)), Intercept=Param(), sigma=Param((), positive))


def gaussian_mixture(data: dict[str, Any]) -> Model:
    y = vector(data["y"])

    def log_prob(p: Params) -> Tensor:
        each = normal(y[:, None], p["mu"][..., None, :], p["sigma"][..., None, :])  # (*B, n, 2)
        chance = torch.stack([p["theta"], 1 - p["theta"]], -1).log()
        prior = (normal(p["mu"], 0, 2) + normal(p["sigma"], 0, 2)).sum(-1) + 4 * chance.sum(-1)
        return prior + (each + chance[..., None, :]).logsumexp(-1).sum(-1)

    return density(
        log_prob,
        mu=Param((2,), constraints.ordered),
        sigma=Param((2,), positive),
        theta=Param((), constraints.unit_interval),
    )


def gp(data: dict[str, Any]) -> Model:
    x, y = vector(data["x"]), vector(data["y"])
    apart, one = (x[:, None] - x).square(), torch.eye(len(x), dtype=torch.float64)

    def log_prob(p: Params) -> Tensor:
        rho, alpha, sigma = (p[n][..., None, None] for n in ("rho", "alpha", "sigma"))
        K = alpha.square() * torch.exp(-apart / (2 * rho.square())) + sigma * one
        factor, failed = torch.linalg.cholesky_ex(K)
        white = torch.linalg.solve_triangular(factor, y[:, None].expand(*K.shape[:-1], 1), upper=False)
        fit = -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * white.square().sum((-2, -1))
        prior = 24 * p["rho"].log() - 4 * p["rho"] + normal(p["alpha"], 0, 2) + normal(p["sigma"], 0, 1)
        return torch.where(failed > 0, -torch.inf, fit + prior)  # far out, where rounding leaves K indefinite

    return density(log_prob, **{n: Param((), positive) for n in ("rho", "alpha", "sigma")})


def hmm(data: dict[str, Any]) -> Model:
    y = vector(data["y"])

    def log_prob(p: Params) -> Tensor:
        emitted = normal(y[:, None], p["mu"][..., None, :], 1.0)  # (*B, n, 2)
        moves = torch.stack([p["theta1"], p["theta2"]], -2).log()  # (*B, from, to)
        forward = emitted[..., 0, :]
        for t in range(1, len(y)):
            forward = (forward[..., :, None] + moves).logsumexp(-2) + emitted[..., t, :]
        return forward.logsumexp(-1) + normal(p["mu"], vector([3.0, 10.0]), 1.0).sum(-1)

    return density(
        log_prob,
        theta1=Param((2,), constraints.simplex),
        theta2=Param((2,), constraints.simplex),
        mu=Param((2,), constraints.positive_ordered),
    )


def eight_schools(data: dict[str, Any], centred: bool) -> Model:
    y, sigma = vector(data["y"]), vector(data["sigma"])
    effect = "theta" if centred else "z"

    def theta(p: Params) -> Tensor:
        return p["mu"][..., None] + p["tau"][..., None] * p["z"]

    def log_prob(p: Params) -> Tensor:
        prior = normal(p["mu"], 0, 5) + student(p["tau"], 1, 0, 5)
        if centred:
            prior, effects = prior + normal(p["theta"], p["mu"][..., None], p["tau"][..., None]).sum(-1), p["theta"]
        else:
            prior, effects = prior + normal(p["z"], 0, 1).sum(-1), theta(p)
        return prior + normal(y, effects, sigma).sum(-1)

    given, _, _ = density(log_prob, **{effect: Param((8,)), "mu": Param(), "tau": Param((), positive)})
    if centred:
        return given, same, same
    return (
        given,
        lambda p: {"theta": theta(p), "mu": p["mu"], "tau": p["tau"]},
        lambda p: {"z": (p["theta"] - p["mu"][..., None]) / p["tau"][..., None], "mu": p["mu"], "tau": p["tau"]},
    )


def garch(data: dict[str, Any]) -> Model:
    """beta1 = (1 - alpha1) share; a flat density over beta1 is one of 1 - alpha1 over the share."""
    y, first = vector(data["y"]), data["sigma1"]

    def log_prob(p: Params) -> Tensor:
        beta1 = p["share"] * (1 - p["alpha1"])
        square = (y - p["mu"][..., None]).square()  # (*B, T)
        variance = [torch.full_like(beta1, first**2)]
        for t in range(1, len(y)):
            variance.append(p["alpha0"] + p["alpha1"] * square[..., t - 1] + beta1 * variance[-1])
        v = torch.stack(variance, -1)
        return -0.5 * (v.log() + square / v).sum(-1) + torch.log1p(-p["alpha1"])

    unit = constraints.unit_interval
    given, _, _ = density(
        log_prob, mu=Param(), alpha0=Param((), positive), alpha1=Param((), unit), share=Param((), unit)
    )
    rest = ("mu", "alpha0", "alpha1")
    return (
        given,
        lambda p: {**{n: p[n] for n in rest}, "beta1": p["share"] * (1 - p["alpha1"])},
        lambda p: {**{n: p[n] for n in rest}, "share": p["beta1"] / (1 - p["alpha1"])},
    )


MODELS: dict[str, Callable[[dict[str, Any]], Model]] = {
    "kidiq-kidscore_interaction": kidiq,
    "mesquite-logmesquite": mesquite,
    "nes1980-nes": nes,
    "earnings-logearn_interaction": earnings,
    "arK-arK": autoregression,
    "sblri-blr": blr,
    "diamonds-diamonds": diamonds,
    "low_dim_gauss_mix-low_dim_gauss_mix": gaussian_mixture,
    "gp_pois_regr-gp_regr": gp,
    "hmm_example-hmm_example": hmm,
    "eight_schools-eight_schools_noncentered": lambda data: eight_schools(data, centred=False),
    "eight_schools-eight_schools_centered": lambda data: eight_schools(data, centred=True),
    "garch-garch11": garch,
}
