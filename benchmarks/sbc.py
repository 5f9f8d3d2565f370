"""Simulation-based calibration of HMC and NUTS with their default warm-up.

    python benchmarks/sbc.py [--simulations 1000] [--seed 0]

Parameters are drawn from the prior, and data given the parameters. The rank of each parameter among draws of the
posterior is then uniform (Talts et al. 2018), and so is that of the log joint, which detects errors that no single
parameter shows (Modrak et al. 2023). Every simulation has its own data and is one member of a batch,
(simulation, chain, coordinate): its chains ascend, disperse and learn their metric, step size and trajectory length by
themselves. Members settle together, in blocks of BLOCK_SIMULATIONS. Two draws per chain are kept, five transitions
apart, so that ranks are those of nearly independent draws.

Printed are the p-values of a chi-square test and of a Kolmogorov-Smirnov test of each rank. With Q quantities of all
models and samplers, uniform ranks have a smallest p-value below 0.01 / Q in one run of a hundred.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import priory as pr
from priory.constraints import positive
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.mcmc import HMC, NUTS
from priory.methods.mcmc.sampler import Sampler
from priory.models.target import Target
from priory.testing.statistics import uniformity

CHAINS, DRAWS, THIN = 16, 2, 5
MAX_RANK = CHAINS * DRAWS
BLOCK_SIMULATIONS = 250  # members that are sampled together
ROWS, X_MEAN, X_SCALE = 20, 100.0, 15.0  # of the regression
PRIOR_SCALES = {"intercept": 200.0, "slope": 5.0, "noise": 20.0}

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Simulated:
    """Parameters drawn from a prior, (R, ...), the data drawn given them, and the log joint of both."""

    truth: Params
    params: dict[str, pr.Param]
    log_prob: Callable[[Params, Tensor], Tensor]  # of parameters and data, with leading dimensions
    data: Tensor  # (R, ...)

    def part(self, start: int, stop: int) -> Simulated:
        """Some of the simulations."""
        truth = {name: x[start:stop] for name, x in self.truth.items()}
        return Simulated(truth, self.params, self.log_prob, self.data[start:stop])

    def density(self, chains: int) -> pr.Density:
        """A density of vectors in the order (simulation, chain); any other number of vectors uses the first data."""
        rows = self.data.repeat_interleave(chains, 0)

        def log_prob(p: Params) -> Tensor:
            (name, param), *_ = self.params.items()
            lead = p[name].shape[: p[name].ndim - len(param.shape)]
            return self.log_prob(p, rows if lead == (len(rows),) else rows[0])

        return pr.Density(log_prob, self.params, batched=True, dtype=torch.float64)


def normal(*shape: int, seed: int, name: str) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "sbc", name), dtype=torch.float64)


def hierarchy(simulations: int, seed: int) -> Simulated:
    """mu ~ N(0, 1), tau half-normal, z_j ~ N(0, 1) for three groups, and 8 tosses of a coin per group."""
    mu, tau = (normal(simulations, seed=seed, name=name) for name in ("mu", "tau"))
    z, tau = normal(simulations, 3, seed=seed, name="z"), tau.abs()
    chance = (mu[:, None] + tau[:, None] * z).sigmoid()
    tosses = torch.rand(simulations, 3, 8, generator=stream(seed, "sbc", "tosses"), dtype=torch.float64)
    heads = (tosses < chance[..., None]).double().sum(-1)

    def log_prob(p: Params, heads: Tensor) -> Tensor:
        logit = p["mu"][..., None] + p["tau"][..., None] * p["z"]
        prior = -0.5 * (p["mu"].square() + p["tau"].square() + p["z"].square().sum(-1))
        return prior + (heads * logsigmoid(logit) + (8 - heads) * logsigmoid(-logit)).sum(-1)

    params = {"mu": pr.Param(), "tau": pr.Param((), positive), "z": pr.Param((3,))}
    return Simulated({"mu": mu, "tau": tau, "z": z}, params, log_prob, heads)


def raw_regression(simulations: int, seed: int) -> Simulated:
    """A line through 20 rows with a covariate near 100 and a noise of unknown scale, neither of them standardised."""
    truth = {name: s * normal(simulations, seed=seed, name=name) for name, s in PRIOR_SCALES.items()}
    truth["noise"] = truth["noise"].abs()
    x = X_MEAN + X_SCALE * normal(ROWS, seed=seed, name="x")
    mean = truth["intercept"][:, None] + truth["slope"][:, None] * x
    y = mean + truth["noise"][:, None] * normal(simulations, ROWS, seed=seed, name="y")

    def log_prob(p: Params, y: Tensor) -> Tensor:
        residual = (y - p["intercept"][..., None] - p["slope"][..., None] * x) / p["noise"][..., None]
        prior = -0.5 * sum((p[name] / s).square() for name, s in PRIOR_SCALES.items())
        return prior - ROWS * p["noise"].log() - 0.5 * residual.square().sum(-1)

    params = {"intercept": pr.Param(), "slope": pr.Param(), "noise": pr.Param((), positive)}
    return Simulated(truth, params, log_prob, y)


MODELS = {"hierarchy": hierarchy, "raw regression": raw_regression}
METHODS: dict[str, Sampler] = {"HMC": HMC(chains=CHAINS, thin=THIN), "NUTS": NUTS(chains=CHAINS, thin=THIN)}


def ranks(method: Sampler, simulated: Simulated, seed: int = 0) -> Tensor:
    """The ranks of each true parameter and of the true log joint among the draws, (simulation, quantity)."""
    count = len(simulated.data)
    parts = [simulated.part(i, min(i + BLOCK_SIMULATIONS, count)) for i in range(0, count, BLOCK_SIMULATIONS)]
    return torch.cat([ranks_of_block(method, part, seed + i) for i, part in enumerate(parts)])


def ranks_of_block(method: Sampler, simulated: Simulated, seed: int) -> Tensor:
    """The ranks of simulations whose chains are sampled as one batch."""
    chains, count = int(method.chains or CHAINS), len(simulated.data)
    density = simulated.density(chains)
    target, data, generator = Target(density, None), Data.of(None), stream(seed, "sbc", "chains")
    plan = method.plan(target, data, DRAWS, 0)
    state = method.init(target, plan, generator, torch.Size([count]))
    kept: list[Tensor] = []
    for _ in range(plan.steps):
        state, info = method.step(target, state, data, generator)
        if info.draw is not None:
            kept.append(info.draw.clone())
        if info.done or len(kept) == DRAWS:
            break
    rows = simulated.data.repeat_interleave(chains, 0)
    draws = [density.layout.constrain(w.flatten(0, 1)) for w in kept]
    found = torch.stack([quantities(p, simulated.log_prob(p, rows)) for p in draws])  # (draw, simulation x chain, Q)
    found = found.unflatten(1, (count, chains)).transpose(1, 2).flatten(0, 1)  # (draw x chain, simulation, Q)
    truth = quantities(simulated.truth, simulated.log_prob(simulated.truth, simulated.data))
    return (found < truth).sum(0)


def quantities(p: Params, log_joint: Tensor) -> Tensor:
    """All parameters and the log joint as columns, (n, Q)."""
    return torch.cat([*[x.reshape(len(x), -1) for x in p.values()], log_joint[:, None]], -1)


def names(simulated: Simulated) -> list[str]:
    """The names of the quantities."""
    found = []
    for name, param in simulated.params.items():
        size = torch.Size(param.shape).numel()
        found += [name] if not param.shape else [f"{name}[{i}]" for i in range(size)]
    return [*found, "log joint"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    smallest, tests = 1.0, 0
    for title, model in MODELS.items():
        simulated = model(options.simulations, options.seed)
        for name, method in METHODS.items():
            began = time.process_time()
            found = ranks(method, simulated, options.seed)
            print(f"\n{title}, {name}: {options.simulations} simulations, {time.process_time() - began:.0f} CPU s")
            print(f"{'':14} {'mean rank':>10} {'chi-square p':>13} {'Kolmogorov p':>13}")
            for quantity, column in zip(names(simulated), found.unbind(1), strict=True):
                p = [p_value for _, p_value in uniformity(column, MAX_RANK).values()]
                smallest, tests = min(smallest, *p), tests + len(p)
                print(f"{quantity:14} {float(column.double().mean()):10.2f} {p[0]:13.3f} {p[1]:13.3f}", flush=True)
    verdict = "uniform" if smallest > 0.01 / tests else "NOT uniform"
    print(f"\nThe ranks are {verdict}: smallest of {tests} p-values {smallest:.2g}, limit {0.01 / tests:.2g}.")


if __name__ == "__main__":
    main()
