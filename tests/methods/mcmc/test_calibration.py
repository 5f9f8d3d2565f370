"""Simulation-based calibration of HMC and NUTS; samplers with a planted bug must fail it.

Parameters are drawn from the prior, and data given the parameters. The rank of each parameter among draws of the
posterior is then uniform (Talts et al. 2018), and so is the rank of the log joint, which detects errors that no single
parameter shows (Modrak et al. 2023). Each replicate has its own data and its own warm-up; all replicates are members of
one batch, (replicate, chain, coordinate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import priory as pr
from priory.constraints import positive, unit_interval
from priory.core.data import Data
from priory.core.flat import Layout, Param
from priory.core.streams import stream
from priory.methods.mcmc import HMC, NUTS, hmc, nuts
from priory.methods.mcmc.integrators import kinetic
from priory.methods.mcmc.sampler import Move, Sampler, State
from priory.models.target import Target
from priory.testing import assert_uniform_ranks

REPLICATES, CHAINS, WARMUP, DRAWS, THIN = 250, 4, 60, 8, 3
MAX_RANK = CHAINS * DRAWS
SIGNIFICANCE_LEVEL = 1e-3  # false alarms per calibration; 6e-3 over the six

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Simulated:
    """Parameters drawn from a prior, (R, ...), the data drawn given them, and the log joint of both."""

    truth: Params
    params: dict[str, Param]
    log_prob: Callable[[Params, Tensor], Tensor]  # of parameters and data, with leading dimensions
    data: Tensor  # (R, ...)

    def density(self, chains: int) -> pr.Density:
        """Return a density of vectors in the order (replicate, chain); one vector alone uses the first data set."""
        rows = self.data.repeat_interleave(chains, 0)

        def log_prob(p: Params) -> Tensor:
            many = any(p[name].ndim > len(param.shape) for name, param in self.params.items())
            return self.log_prob(p, rows if many else rows[0])

        return pr.Density(log_prob, self.params, batched=True, dtype=torch.float64)


def randn(*shape: int, name: str) -> Tensor:
    return torch.randn(*shape, generator=stream(0, "calibration", name), dtype=torch.float64)


def gaussian_mean() -> Simulated:
    """Simulate m ~ N(0, 1) and three values y ~ N(m, 0.5^2)."""
    m = randn(REPLICATES, name="mean")
    y = m[:, None] + 0.5 * randn(REPLICATES, 3, name="values")

    def log_prob(p: Params, y: Tensor) -> Tensor:
        return -0.5 * p["m"].square() - 0.5 * ((y - p["m"][..., None]) / 0.5).square().sum(-1)

    return Simulated({"m": m}, {"m": Param()}, log_prob, y)


def coin() -> Simulated:
    """Simulate p ~ Beta(5, 2), the fifth of six uniform order statistics, and three tosses."""
    uniform = torch.rand(REPLICATES, 9, generator=stream(0, "calibration", "coin"), dtype=torch.float64)
    p = uniform[:, :6].kthvalue(5, -1).values
    heads = (uniform[:, 6:] < p[:, None]).double().sum(-1)

    def log_prob(values: Params, heads: Tensor) -> Tensor:
        p = values["p"]
        return (4 + heads) * p.log() + (4 - heads) * torch.log1p(-p)

    return Simulated({"p": p}, {"p": Param((), unit_interval)}, log_prob, heads)


def hierarchy() -> Simulated:
    """Simulate mu ~ N(0, 1), tau half-normal, z_j ~ N(0, 1) for three groups, and 8 tosses per group."""
    mu, tau, z = (randn(REPLICATES, *shape, name=name) for name, shape in (("mu", ()), ("tau", ()), ("z", (3,))))
    tau = tau.abs()
    chance = (mu[:, None] + tau[:, None] * z).sigmoid()
    tosses = torch.rand(REPLICATES, 3, 8, generator=stream(0, "calibration", "tosses"), dtype=torch.float64)
    heads = (tosses < chance[..., None]).double().sum(-1)

    def log_prob(p: Params, heads: Tensor) -> Tensor:
        logit = p["mu"][..., None] + p["tau"][..., None] * p["z"]
        prior = -0.5 * (p["mu"].square() + p["tau"].square() + p["z"].square().sum(-1))
        return prior + (heads * logsigmoid(logit) + (8 - heads) * logsigmoid(-logit)).sum(-1)

    params = {"mu": Param(), "tau": Param((), positive), "z": Param((3,))}
    return Simulated({"mu": mu, "tau": tau, "z": z}, params, log_prob, heads)


MODELS = {"gaussian mean": gaussian_mean, "coin": coin, "hierarchy": hierarchy}
METHODS = {
    "HMC": HMC(chains=CHAINS, warmup=WARMUP, thin=THIN),
    "NUTS": NUTS(chains=CHAINS, warmup=WARMUP, thin=THIN, max_depth=6),
}
LEAPFROG = replace(METHODS["HMC"], integrator="leapfrog")


def ranks(method: Sampler, simulated: Simulated) -> Tensor:
    """Return the ranks of each true parameter and of the true log joint among the draws, (replicate, quantity)."""
    density = simulated.density(CHAINS)
    target, data, generator = Target(density, None), Data.of(None), stream(1, "calibration", "chains")
    plan = method.plan(target, data, DRAWS, 0)
    state = method.init(target, plan, generator, torch.Size([REPLICATES]))
    kept = []
    for _ in range(plan.steps):
        state, info = method.step(target, state, data, generator)
        if info.draw is not None:
            kept.append(info.draw.clone())
    assert len(kept) == DRAWS
    rows = simulated.data.repeat_interleave(CHAINS, 0)
    draws = [density.layout.constrain(w.flatten(0, 1)) for w in kept]
    found = torch.stack([quantities(p, simulated.log_prob(p, rows)) for p in draws])  # (draw, replicate x chain, Q)
    found = found.unflatten(1, (REPLICATES, CHAINS)).transpose(1, 2).flatten(0, 1)  # (draw x chain, replicate, Q)
    truth = quantities(simulated.truth, simulated.log_prob(simulated.truth, simulated.data))
    return (found < truth).sum(0)


def quantities(p: Params, log_joint: Tensor) -> Tensor:
    """Return all parameters and the log joint as columns, (n, Q)."""
    return torch.cat([*[x.reshape(len(x), -1) for x in p.values()], log_joint[:, None]], -1)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_the_ranks_of_the_true_parameters_are_uniform(method: Sampler, model: Callable[[], Simulated]):
    assert_uniform_ranks(ranks(method, model()), MAX_RANK, level=SIGNIFICANCE_LEVEL)


# Planted bugs.


def assert_not_calibrated(method: Sampler, simulated: Simulated) -> None:
    with pytest.raises(AssertionError, match="not uniform"):
        assert_uniform_ranks(ranks(method, simulated), MAX_RANK, level=SIGNIFICANCE_LEVEL)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_missing_log_determinant_is_detected(method: Sampler, monkeypatch: pytest.MonkeyPatch):
    """Without it, Beta(a, b) is sampled as Beta(a - 1, b - 1)."""
    monkeypatch.setattr(Layout, "log_det", lambda self, w: 0 * w.sum(-1))
    assert_not_calibrated(method, coin())


def test_a_missing_metropolis_correction_is_detected(monkeypatch: pytest.MonkeyPatch):
    """Without it, a leapfrog step e scales the variance of a unit Gaussian by 1 / (1 - e^2 / 4)."""
    right = hmc.metropolis

    def always(state: State, proposal: tuple[Tensor, Tensor, Tensor], *rest: Any) -> Move:
        move = right(state, proposal, *rest)
        w, value, gradient = proposal
        return replace(move, w=w, value=value, gradient=gradient) if state.warmup.frozen else move

    monkeypatch.setattr(hmc, "metropolis", always)
    assert_not_calibrated(replace(LEAPFROG, accept=0.8), gaussian_mean())


def test_a_doubled_kinetic_energy_is_detected(monkeypatch: pytest.MonkeyPatch):
    """NUTS corrects by weighting the points of a trajectory; the planted bug overweights points of low momentum."""
    monkeypatch.setattr(nuts, "kinetic", lambda *given: 2 * kinetic(*given))
    assert_not_calibrated(METHODS["NUTS"], gaussian_mean())


@pytest.mark.parametrize("method", [LEAPFROG, METHODS["NUTS"]], ids=METHODS.keys())
def test_a_stale_gradient_is_detected(method: Sampler, monkeypatch: pytest.MonkeyPatch):
    """The second half step of the momentum uses the gradient at the start of the step; steps are long."""
    right = hmc.integrate

    def stale(
        name: str, joint: Any, metric: Any, w: Tensor, p: Tensor, gradient: Tensor, step: Tensor, *rest: Any
    ) -> Any:
        w, p, value, fresh = right(name, joint, metric, w, p, gradient, step, *rest)
        return w, p - 0.5 * step * (fresh - gradient), value, fresh

    for module in (hmc, nuts):
        monkeypatch.setattr(module, "integrate", stale)
    assert_not_calibrated(replace(method, accept=0.6), gaussian_mean())
