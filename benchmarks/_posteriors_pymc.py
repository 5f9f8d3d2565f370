"""The models of `_posteriors.py` and `_practice.py` in PyMC, sampled by nutpie, with the same names of parameters.

Run in an environment with PyMC and nutpie, without Priory or torch:

    python benchmarks/_posteriors_pymc.py JSON

where JSON is as for `_posteriors_numpyro.py`. Settings are nutpie's defaults for 4 chains on one core, compilation with
Numba included. Models with a loop over time (GARCH, SIR, hidden Markov models) are left out.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and hasattr(os, "sched_setaffinity"):  # one core, before anything counts them
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[os.getpid() % len(os.sched_getaffinity(0))]})

import numpy as np
import nutpie
import pymc as pm
import pytensor.tensor as pt

Data = dict[str, Any]
Model = Callable[[Data], None]


def flat_regression(X: Any, y: Any, sigma: Callable[[], Any]) -> None:
    pm.Normal("y", pt.dot(X, pm.Flat("beta", shape=X.shape[1])), sigma(), observed=y)


def kidiq(d: Data) -> None:
    hs, iq = d["mom_hs"], d["mom_iq"]
    X = np.stack([np.ones(len(hs)), hs, iq, hs * iq], 1)
    flat_regression(X, d["kid_score"], lambda: pm.HalfCauchy("sigma", 2.5))


def mesquite(d: Data) -> None:
    sizes = [np.log(d[n]) for n in ("diam1", "diam2", "canopy_height", "total_height", "density")]
    X = np.stack([np.ones(len(sizes[0])), *sizes, d["group"]], 1)
    flat_regression(X, np.log(d["weight"]), lambda: pm.HalfFlat("sigma"))


def nes(d: Data) -> None:
    age = d["age_discrete"]
    first = [np.ones(len(age)), d["real_ideo"], d["race_adj"]]
    X = np.stack([*first, *(1.0 * (age == k) for k in (2, 3, 4)), d["educ1"], d["gender"], d["income"]], 1)
    flat_regression(X, d["partyid7"], lambda: pm.HalfFlat("sigma"))


def earnings(d: Data) -> None:
    height, male = d["height"], d["male"]
    X = np.stack([np.ones(len(height)), height, male, height * male], 1)
    flat_regression(X, np.log(d["earn"]), lambda: pm.HalfFlat("sigma"))


def blr(d: Data) -> None:
    beta = pm.Normal("beta", 0, 10, shape=d["X"].shape[1])
    pm.Normal("y", pt.dot(d["X"], beta), pm.HalfNormal("sigma", 10), observed=d["y"])


def diamonds(d: Data) -> None:
    X = d["X"][:, 1:]
    X = X - X.mean(0)
    b, intercept = pm.Normal("b", 0, 1, shape=X.shape[1]), pm.StudentT("Intercept", nu=3, mu=8, sigma=10)
    pm.Normal("y", intercept + pt.dot(X, b), pm.HalfStudentT("sigma", nu=3, sigma=10), observed=d["Y"])


def autoregression(d: Data) -> None:
    y, lags = d["y"], int(d["K"])
    before = np.stack([y[lags - k : len(y) - k] for k in range(1, lags + 1)], 1)
    alpha, beta = pm.Normal("alpha", 0, 10), pm.Normal("beta", 0, 10, shape=lags)
    pm.Normal("y", alpha + pt.dot(before, beta), pm.HalfCauchy("sigma", 2.5), observed=y[lags:])


def mixture(y: Any, mu_scale: float, chance: float) -> None:
    ordered = pm.distributions.transforms.ordered
    mu = pm.Normal("mu", 0, mu_scale, shape=2, transform=ordered, initval=[-1.0, 1.0])
    sigma, theta = pm.HalfNormal("sigma", 2, shape=2), pm.Beta("theta", chance, chance)
    pm.NormalMixture("y", w=pt.stack([theta, 1 - theta]), mu=mu, sigma=sigma, observed=y)


def gp_regression(d: Data) -> None:
    rho, alpha, sigma = pm.Gamma("rho", 25, 4), pm.HalfNormal("alpha", 2), pm.HalfNormal("sigma", 1)
    gaussian_process(d, rho, alpha, sigma)


def gp_cholesky(d: Data) -> None:
    length, amplitude = pm.InverseGamma("length", 5, 5), pm.HalfNormal("amplitude", 2)
    gaussian_process(d, length, amplitude, pm.HalfNormal("noise", 1) ** 2)


def gaussian_process(d: Data, length: Any, amplitude: Any, variance: Any) -> None:
    x = d["x"]
    K = amplitude**2 * pt.exp(-((x[:, None] - x) ** 2) / (2 * length**2)) + variance * np.eye(len(x))
    pm.MvNormal("y", np.zeros(len(x)), cov=K, observed=d["y"])


def schools(d: Data, centred: bool) -> None:
    mu, tau = pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5)
    theta = pm.Normal("theta", mu, tau, shape=8) if centred else mu + tau * pm.Normal("z", 0, 1, shape=8)
    pm.Normal("y", theta, d["sigma"], observed=d["y"])


def regression(sds: list[float], sigma_scale: float) -> Model:
    def model(d: Data) -> None:
        beta = pm.Normal("beta", 0, np.array(sds), shape=len(sds))
        pm.Normal("y", pt.dot(d["X"], beta), pm.HalfNormal("sigma", sigma_scale), observed=d["y"])

    return model


def hierarchical_logit(d: Data) -> None:
    mu, tau = pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 1)
    beta, z = pm.Normal("beta", 0, 1, shape=3), pm.Normal("z", 0, 1, shape=200)
    pm.Bernoulli("y", logit_p=mu + tau * z[d["group"]] + pt.dot(d["X"], beta), observed=d["y"])


def lkj_slopes(d: Data) -> None:
    beta, sigma = pm.Normal("beta", 0, 2, shape=2), pm.HalfNormal("sigma", 1)
    chol, _, tau = pm.LKJCholeskyCov("factor", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1, shape=2))
    pm.Deterministic("tau", tau)
    pm.Deterministic("L", chol / tau[:, None])
    effects = beta + pt.dot(pm.Normal("z", 0, 1, shape=(30, 2)), chol.T)
    group = d["group"]
    pm.Normal("y", effects[group, 0] + effects[group, 1] * d["x"], sigma, observed=d["y"])


def horseshoe(d: Data) -> None:
    z, local = pm.Normal("z", 0, 1, shape=50), pm.HalfCauchy("lambda", 1, shape=50)
    tau, sigma = pm.HalfCauchy("tau", 0.1), pm.HalfCauchy("sigma", 1)
    pm.Normal("y", pt.dot(d["X"], z * local * tau), sigma, observed=d["y"])


def zero_inflated_poisson(d: Data) -> None:
    rate, zero = pm.Normal("rate", 0, 2, shape=2), pm.Normal("zero", 0, 2, shape=2)
    counts = pm.math.sigmoid(-(zero[0] + zero[1] * d["x"]))
    pm.ZeroInflatedPoisson("y", counts, pt.exp(rate[0] + rate[1] * d["x"]), observed=d["y"])


def censored_weibull(d: Data) -> None:
    alpha, beta, shape = pm.Normal("alpha", 0, 5), pm.Normal("beta", 0, 2, shape=2), pm.LogNormal("shape", 0, 1)
    log_scale, log_time = alpha + pt.dot(d["X"], beta), np.log(d["time"])
    log_hazard = pt.log(shape) + (shape - 1) * log_time - shape * log_scale
    pm.Potential("rows", (d["event"] * log_hazard - pt.exp((log_time - log_scale) * shape)).sum())


def ar2_states(d: Data) -> None:
    phi, sigma, tau = pm.Normal("phi", 0, 0.5, shape=2), pm.HalfNormal("sigma", 1), pm.LogNormal("tau", -1, 0.5)
    x = pm.Flat("x", shape=100)
    pm.Potential("first", pm.logp(pm.Normal.dist(0, 2), x[:2]).sum())
    pm.Potential("moves", pm.logp(pm.Normal.dist(phi[0] * x[1:-1] + phi[1] * x[:-2], sigma), x[2:]).sum())
    pm.Normal("y", x, tau, observed=d["y"])


def funnel(d: Data) -> None:
    pm.Normal("x", 0, pt.exp(pm.Normal("v", 0, 3) / 2), shape=9)


def bimodal(d: Data) -> None:
    x = pm.Flat("x", shape=2)
    low, high = (pm.logp(pm.Normal.dist(at, 1), x).sum() for at in (-10.0, 10.0))
    pm.Potential("modes", pm.math.logaddexp(low + np.log(0.3), high + np.log(0.7)))


MODELS: dict[str, Model] = {
    "kidiq-kidscore_interaction": kidiq,
    "mesquite-logmesquite": mesquite,
    "nes1980-nes": nes,
    "earnings-logearn_interaction": earnings,
    "arK-arK": autoregression,
    "sblri-blr": blr,
    "diamonds-diamonds": diamonds,
    "low_dim_gauss_mix-low_dim_gauss_mix": lambda d: mixture(d["y"], 2.0, 5.0),
    "gp_pois_regr-gp_regr": gp_regression,
    "eight_schools-eight_schools_noncentered": lambda d: schools(d, centred=False),
    "eight_schools-eight_schools_centered": lambda d: schools(d, centred=True),
    "raw_covariate": regression([100.0, 10.0, 10.0], 50.0),
    "raw_response": regression([50_000.0, 10_000.0], 10_000.0),
    "collinear": regression([10.0, 100.0, 100.0], 10.0),
    "years": regression([100.0, 1.0], 1.0),
    "hierarchical_logit": hierarchical_logit,
    "ar2_states": ar2_states,
    "horseshoe": horseshoe,
    "ordered_mixture": lambda d: mixture(d["y"], 3.0, 2.0),
    "gp_cholesky": gp_cholesky,
    "lkj_slopes": lkj_slopes,
    "censored_weibull": censored_weibull,
    "zero_inflated_poisson": zero_inflated_poisson,
    "funnel": funnel,
    "bimodal": bimodal,
}


def main() -> None:
    """Sample one posterior, and write draws by name with the time at which they were there."""
    run = json.loads(sys.argv[1])
    if run["name"] not in MODELS:
        raise SystemExit("left out: a loop over time")
    given = json.loads(Path(run["data"]).read_text())
    data = {n: np.asarray(v) if isinstance(v, list) else v for n, v in given.items()}
    with pm.Model() as model:
        MODELS[run["name"]](data)
    trace = nutpie.sample(nutpie.compile_pymc_model(model), chains=4, cores=1, seed=run["seed"], progress_bar=False)
    answered, cpu = time.time(), time.process_time()
    fields = trace.sample_stats
    told = {"answered": answered, "cpu": cpu, "divergences": int(fields["diverging"].sum())}
    told["gradients"] = float(fields["n_steps"].sum("draw").mean())
    names = [v.name for v in model.free_RVs if v.name != "factor"] + [v.name for v in model.deterministics]
    np.savez(run["draws"], **{n: trace.posterior[n].values for n in names if not n.startswith("factor")})
    Path(run["out"]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
