"""The models of `_posteriors.py` and `_practice.py` in NumPyro, with the same names and shapes of parameters.

Run in an environment with NumPyro, without Priory or torch:

    python benchmarks/_posteriors_numpyro.py JSON

where JSON names the posterior, its data, the seed, and the file for the draws. Settings are NumPyro's defaults: NUTS,
4 chains, 1,000 warm-up steps and 1,000 draws, in 64 bits.
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

if __name__ == "__main__" and hasattr(os, "sched_setaffinity"):  # one core, before JAX counts them
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[os.getpid() % len(os.sched_getaffinity(0))]})

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro import sample

jax.config.update("jax_enable_x64", True)
Data = dict[str, Any]


def half_cauchy(name: str, scale: float) -> Any:
    return sample(name, dist.HalfCauchy(scale))


def half_normal(name: str, scale: float) -> Any:
    return sample(name, dist.HalfNormal(scale))


def normals(name: str, scale: Any, size: int) -> Any:
    return sample(name, dist.Normal(0.0, scale).expand([size]))


def flat(name: str, size: int) -> Any:
    return sample(name, dist.ImproperUniform(dist.constraints.real, (size,), ()))


def flat_positive(name: str) -> Any:
    return sample(name, dist.ImproperUniform(dist.constraints.positive, (), ()))


def observe(distribution: Any, y: Any) -> None:
    sample("y", distribution, obs=y)


# The reference posteriors.


def flat_regression(X: Any, y: Any, sigma: Callable[[], Any]) -> Callable[[], None]:
    def model() -> None:
        observe(dist.Normal(X @ flat("beta", X.shape[1]), sigma()), y)

    return model


def kidiq(d: Data) -> Callable[[], None]:
    hs, iq = d["mom_hs"], d["mom_iq"]
    X = jnp.stack([jnp.ones(len(hs)), hs, iq, hs * iq], 1)
    return flat_regression(X, d["kid_score"], lambda: half_cauchy("sigma", 2.5))


def mesquite(d: Data) -> Callable[[], None]:
    sizes = [jnp.log(d[n]) for n in ("diam1", "diam2", "canopy_height", "total_height", "density")]
    X = jnp.stack([jnp.ones(len(sizes[0])), *sizes, d["group"]], 1)
    return flat_regression(X, jnp.log(d["weight"]), lambda: flat_positive("sigma"))


def nes(d: Data) -> Callable[[], None]:
    age = d["age_discrete"]
    first = [jnp.ones(len(age)), d["real_ideo"], d["race_adj"]]
    X = jnp.stack([*first, *(1.0 * (age == k) for k in (2, 3, 4)), d["educ1"], d["gender"], d["income"]], 1)
    return flat_regression(X, d["partyid7"], lambda: flat_positive("sigma"))


def earnings(d: Data) -> Callable[[], None]:
    height, male = d["height"], d["male"]
    X = jnp.stack([jnp.ones(len(height)), height, male, height * male], 1)
    return flat_regression(X, jnp.log(d["earn"]), lambda: flat_positive("sigma"))


def blr(d: Data) -> Callable[[], None]:
    def model() -> None:
        beta = normals("beta", 10.0, d["X"].shape[1])
        observe(dist.Normal(d["X"] @ beta, half_normal("sigma", 10.0)), d["y"])

    return model


def diamonds(d: Data) -> Callable[[], None]:
    X = d["X"][:, 1:]
    X = X - X.mean(0)

    def model() -> None:
        b, intercept = normals("b", 1.0, X.shape[1]), sample("Intercept", dist.StudentT(3.0, 8.0, 10.0))
        sigma = sample("sigma", dist.FoldedDistribution(dist.StudentT(3.0, 0.0, 10.0)))
        observe(dist.Normal(intercept + X @ b, sigma), d["Y"])

    return model


def autoregression(d: Data) -> Callable[[], None]:
    y, lags = d["y"], int(d["K"])
    before = jnp.stack([y[lags - k : len(y) - k] for k in range(1, lags + 1)], 1)

    def model() -> None:
        alpha, beta = sample("alpha", dist.Normal(0.0, 10.0)), normals("beta", 10.0, lags)
        observe(dist.Normal(alpha + before @ beta, half_cauchy("sigma", 2.5)), y[lags:])

    return model


def mixture(y: Any, mu_scale: float, chance: float) -> Callable[[], None]:
    def model() -> None:
        mu = sample("mu", dist.ImproperUniform(dist.constraints.ordered_vector, (), (2,)))
        numpyro.factor("prior of mu", dist.Normal(0.0, mu_scale).log_prob(mu).sum())
        sigma = sample("sigma", dist.HalfNormal(2.0).expand([2]))
        theta = sample("theta", dist.Beta(chance, chance))
        each = dist.Normal(mu, sigma).log_prob(y[:, None]) + jnp.log(jnp.stack([theta, 1 - theta]))
        numpyro.factor("rows", logsumexp(each, 1).sum())

    return model


def gp_regression(d: Data) -> Callable[[], None]:
    x, y = d["x"], d["y"]

    def model() -> None:
        rho, alpha = sample("rho", dist.Gamma(25.0, 4.0)), half_normal("alpha", 2.0)
        sigma = half_normal("sigma", 1.0)
        K = alpha**2 * jnp.exp(-((x[:, None] - x) ** 2) / (2 * rho**2)) + sigma * jnp.eye(len(x))
        observe(dist.MultivariateNormal(jnp.zeros(len(x)), scale_tril=jnp.linalg.cholesky(K)), y)

    return model


def forward(emission: Any, moves: Any) -> Any:
    """Log-likelihood of emissions (steps, states) under log transition probabilities, by a scan."""
    step = lambda f, e: (logsumexp(f[:, None] + moves, 0) + e, None)  # noqa: E731
    return logsumexp(jax.lax.scan(step, emission[0], emission[1:])[0])


def hmm(d: Data) -> Callable[[], None]:
    y = d["y"]

    def model() -> None:
        rows = [sample(n, dist.Dirichlet(jnp.ones(2))) for n in ("theta1", "theta2")]
        mu = sample("mu", dist.ImproperUniform(dist.constraints.positive_ordered_vector, (), (2,)))
        numpyro.factor("prior of mu", dist.Normal(jnp.array([3.0, 10.0]), 1.0).log_prob(mu).sum())
        emission = dist.Normal(mu, 1.0).log_prob(y[:, None])
        numpyro.factor("rows", forward(emission, jnp.log(jnp.stack(rows))))

    return model


def garch(d: Data) -> Callable[[], None]:
    y = d["y"]

    def model() -> None:
        mu = sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        alpha0, alpha1 = flat_positive("alpha0"), sample("alpha1", dist.Uniform(0.0, 1.0))
        share = sample("share", dist.Uniform(0.0, 1.0))
        beta1 = share * (1 - alpha1)
        numpyro.factor("flat in beta1", jnp.log1p(-alpha1))

        def step(variance: Any, square: Any) -> Any:
            following = alpha0 + alpha1 * square + beta1 * variance
            return following, following

        first = jnp.asarray(d["sigma1"] ** 2, dtype=float)
        rest = jax.lax.scan(step, first, (y[:-1] - mu) ** 2)[1]
        observe(dist.Normal(mu, jnp.sqrt(jnp.concatenate([first[None], rest]))), y)

    return model


def schools(d: Data, centred: bool) -> Callable[[], None]:
    def model() -> None:
        mu, tau = sample("mu", dist.Normal(0.0, 5.0)), half_cauchy("tau", 5.0)
        theta = sample("theta", dist.Normal(mu, tau).expand([8])) if centred else mu + tau * normals("z", 1.0, 8)
        observe(dist.Normal(theta, d["sigma"]), d["y"])

    return model


# The models of practice.


def regression(sds: list[float], sigma_scale: float) -> Callable[[Data], Callable[[], None]]:
    def of(d: Data) -> Callable[[], None]:
        def model() -> None:
            beta = sample("beta", dist.Normal(0.0, jnp.array(sds)))
            observe(dist.Normal(d["X"] @ beta, half_normal("sigma", sigma_scale)), d["y"])

        return model

    return of


def hierarchical_logit(d: Data) -> Callable[[], None]:
    def model() -> None:
        mu, tau = sample("mu", dist.Normal(0.0, 2.0)), half_normal("tau", 1.0)
        beta, z = normals("beta", 1.0, 3), normals("z", 1.0, 200)
        observe(dist.Bernoulli(logits=mu + tau * z[d["group"]] + d["X"] @ beta), d["y"])

    return model


def lkj_slopes(d: Data) -> Callable[[], None]:
    group = d["group"]

    def model() -> None:
        beta, tau = normals("beta", 2.0, 2), sample("tau", dist.HalfNormal(1.0).expand([2]))
        factor, sigma = sample("L", dist.LKJCholesky(2, 2.0)), half_normal("sigma", 1.0)
        z = sample("z", dist.Normal(0.0, 1.0).expand([30, 2]))
        effects = beta + z @ (tau[:, None] * factor).T
        observe(dist.Normal(effects[group, 0] + effects[group, 1] * d["x"], sigma), d["y"])

    return model


def horseshoe(d: Data) -> Callable[[], None]:
    def model() -> None:
        z, local = normals("z", 1.0, 50), sample("lambda", dist.HalfCauchy(1.0).expand([50]))
        tau, sigma = half_cauchy("tau", 0.1), half_cauchy("sigma", 1.0)
        observe(dist.Normal(d["X"] @ (z * local * tau), sigma), d["y"])

    return model


def zero_inflated_poisson(d: Data) -> Callable[[], None]:
    x = d["x"]

    def model() -> None:
        rate, zero = normals("rate", 2.0, 2), normals("zero", 2.0, 2)
        count = dist.Poisson(jnp.exp(rate[0] + rate[1] * x))
        observe(dist.ZeroInflatedDistribution(count, gate_logits=zero[0] + zero[1] * x), d["y"])

    return model


def censored_weibull(d: Data) -> Callable[[], None]:
    X, time, event = d["X"], d["time"], d["event"]

    def model() -> None:
        alpha, beta = sample("alpha", dist.Normal(0.0, 5.0)), normals("beta", 2.0, 2)
        shape = sample("shape", dist.LogNormal(0.0, 1.0))
        log_scale = alpha + X @ beta
        log_hazard = jnp.log(shape) + (shape - 1) * jnp.log(time) - shape * log_scale
        survival = -jnp.exp((jnp.log(time) - log_scale) * shape)
        numpyro.factor("rows", (event * log_hazard + survival).sum())

    return model


def gp_cholesky(d: Data) -> Callable[[], None]:
    x, y = d["x"], d["y"]

    def model() -> None:
        length, amplitude = sample("length", dist.InverseGamma(5.0, 5.0)), half_normal("amplitude", 2.0)
        noise = half_normal("noise", 1.0)
        K = amplitude**2 * jnp.exp(-((x[:, None] - x) ** 2) / (2 * length**2)) + noise**2 * jnp.eye(len(x))
        observe(dist.MultivariateNormal(jnp.zeros(len(x)), scale_tril=jnp.linalg.cholesky(K)), y)

    return model


def sir_rk4(d: Data, people: int = 763, days: int = 20, substeps: int = 10) -> Callable[[], None]:
    def model() -> None:
        beta, gamma = sample("beta", dist.LogNormal(0.0, 1.0)), sample("gamma", dist.LogNormal(-1.0, 1.0))
        phi = sample("phi", dist.Exponential(0.2))

        def slope(s: Any) -> Any:
            new, gone = beta * s[0] * s[1] / people, gamma * s[1]
            return jnp.stack([-new, new - gone, gone])

        def step(s: Any, _: Any) -> Any:
            h = 1 / substeps
            k1 = slope(s)
            k2 = slope(s + h / 2 * k1)
            k3 = slope(s + h / 2 * k2)
            s = s + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(s + h * k3))
            return s, s[1]

        infected = jax.lax.scan(step, jnp.array([people - 1.0, 1.0, 0.0]), None, length=days * substeps)[1]
        observe(dist.NegativeBinomial2(infected[substeps - 1 :: substeps], phi), d["y"])

    return model


def ar2_states(d: Data) -> Callable[[], None]:
    def model() -> None:
        phi, sigma = normals("phi", 0.5, 2), half_normal("sigma", 1.0)
        tau = sample("tau", dist.LogNormal(-1.0, 0.5))
        x = sample("x", dist.ImproperUniform(dist.constraints.real, (100,), ()))
        numpyro.factor("first", dist.Normal(0.0, 2.0).log_prob(x[:2]).sum())
        moves = dist.Normal(phi[0] * x[1:-1] + phi[1] * x[:-2], sigma)
        numpyro.factor("moves", moves.log_prob(x[2:]).sum())
        observe(dist.Normal(x, tau), d["y"])

    return model


def hmm_forward(d: Data) -> Callable[[], None]:
    y = d["y"]

    def model() -> None:
        mu = sample("mu", dist.ImproperUniform(dist.constraints.ordered_vector, (), (3,)))
        numpyro.factor("prior of mu", dist.Normal(0.0, 3.0).log_prob(mu).sum())
        sigma = half_normal("sigma", 2.0)
        moves = sample("moves", dist.Dirichlet(jnp.full(3, 2.0)).expand([3]))
        numpyro.factor("rows", forward(dist.Normal(mu, sigma).log_prob(y[:, None]), jnp.log(moves)))

    return model


def funnel(d: Data) -> Callable[[], None]:
    def model() -> None:
        v = sample("v", dist.Normal(0.0, 3.0))
        sample("x", dist.Normal(0.0, jnp.exp(v / 2)).expand([9]))

    return model


def bimodal(d: Data) -> Callable[[], None]:
    def model() -> None:
        x = sample("x", dist.ImproperUniform(dist.constraints.real, (2,), ()))
        low, high = (dist.Normal(at, 1.0).log_prob(x).sum() for at in (-10.0, 10.0))
        numpyro.factor("modes", jnp.logaddexp(low + jnp.log(0.3), high + jnp.log(0.7)))

    return model


MODELS: dict[str, Callable[[Data], Callable[[], None]]] = {
    "kidiq-kidscore_interaction": kidiq,
    "mesquite-logmesquite": mesquite,
    "nes1980-nes": nes,
    "earnings-logearn_interaction": earnings,
    "arK-arK": autoregression,
    "sblri-blr": blr,
    "diamonds-diamonds": diamonds,
    "low_dim_gauss_mix-low_dim_gauss_mix": lambda d: mixture(d["y"], 2.0, 5.0),
    "gp_pois_regr-gp_regr": gp_regression,
    "hmm_example-hmm_example": hmm,
    "garch-garch11": garch,
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
    "sir_rk4": sir_rk4,
    "lkj_slopes": lkj_slopes,
    "censored_weibull": censored_weibull,
    "zero_inflated_poisson": zero_inflated_poisson,
    "hmm_forward": hmm_forward,
    "funnel": funnel,
    "bimodal": bimodal,
}


def main() -> None:
    """Sample one posterior, and write draws by name with the time at which they were there."""
    run = json.loads(sys.argv[1])
    given = json.loads(Path(run["data"]).read_text())
    data = {n: np.asarray(v) if isinstance(v, list) else v for n, v in given.items()}
    data = {n: jnp.asarray(v) if isinstance(v, np.ndarray) and v.dtype.kind in "fi" else v for n, v in data.items()}
    kernel = numpyro.infer.NUTS(MODELS[run["name"]](data))
    sampler = numpyro.infer.MCMC(kernel, num_warmup=1000, num_samples=1000, num_chains=4, progress_bar=False)
    sampler.run(jax.random.PRNGKey(run["seed"]), extra_fields=("num_steps", "diverging"))
    draws = jax.block_until_ready(sampler.get_samples(group_by_chain=True))
    answered, cpu = time.time(), time.process_time()
    fields = sampler.get_extra_fields(group_by_chain=True)
    told = {"answered": answered, "cpu": cpu, "divergences": int(fields["diverging"].sum())}
    told["gradients"] = float(fields["num_steps"].sum(1).mean())
    np.savez(run["draws"], **{name: np.asarray(x) for name, x in draws.items()})
    Path(run["out"]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
