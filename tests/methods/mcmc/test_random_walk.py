"""RandomWalk: its proposal and acceptance follow the formula, and it needs no gradient."""

import math
from typing import Any

import pytest
import torch

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.streams import stream
from priory.diagnostics import bfmi
from priory.methods.mcmc import RandomWalk
from priory.methods.mcmc.metrics import DiagonalMetric
from priory.models.target import Target
from priory.testing import assert_mean_close


def test_the_proposal_is_a_normal_step_accepted_by_the_ratio_of_densities():
    density = pr.Density(lambda p: -p["w"].pow(4).sum(-1) / 4, {"w": Param((2,))}, batched=True)
    target, data, e = Target(density, None), Data.of(None), 0.7
    method = RandomWalk(chains=50, warmup=0)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "walk"))
    variance = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    state.metric, state.step_size.log = DiagonalMetric(variance), torch.tensor(math.log(e), dtype=torch.float64)
    w = state.w
    noise = torch.randn(w.shape, generator=stream(1, "walk"), dtype=w.dtype)
    proposal = w + e * variance.sqrt() * noise
    move = method.transition(state, stream(1, "walk"))
    ratio = (w.pow(4) - proposal.pow(4)).sum(-1) / 4
    torch.testing.assert_close(move.acceptance, ratio.exp().clamp(max=1), rtol=1e-9, atol=1e-9)
    moved = (move.w != w).any(-1)
    assert 0 < int(moved.sum()) < 50
    torch.testing.assert_close(move.w[moved], proposal[moved], rtol=1e-12, atol=1e-12)


WITHOUT_GRADIENT = {
    "detached": lambda w: -0.5 * (w.detach() - 1).square().sum(),
    "numpy": lambda w: torch.as_tensor(-0.5 * float(((w.numpy() - 1) ** 2).sum()), dtype=w.dtype),
}


@pytest.mark.filterwarnings("ignore:This density can't be vectorised")
@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_a_density_without_a_gradient_gives_the_same_draws_and_other_methods_refuse_it(name):
    log_prob = WITHOUT_GRADIENT[name]
    density = pr.Density(lambda p: log_prob(p["w"]), {"w": Param((2,))})
    smooth = pr.Density(lambda p: -0.5 * (p["w"] - 1).square().sum(), {"w": Param((2,))})
    method = RandomWalk(chains=4, warmup=20)
    without_gradient, with_gradient = (
        pr.fit(d, None, method, steps=10, progress=False).draws["w"] for d in (density, smooth)
    )
    torch.testing.assert_close(without_gradient, with_gradient, rtol=1e-9, atol=1e-9)
    for other in (pr.MAP(), pr.NUTS(chains=4), pr.MALA(chains=4), pr.Pathfinder(), pr.MeanField()):
        with pytest.raises(pr.InputError, match="must be differentiable in its parameters, except for RandomWalk"):
            pr.fit(density, None, other, steps=5, progress=False)


@pytest.mark.parametrize("support", [torch.distributions.constraints.positive, torch.distributions.constraints.real])
def test_other_methods_refuse_a_density_whose_only_gradient_is_the_volume_element(support):
    density = pr.Density(lambda p: -p["s"].detach().square(), {"s": Param((), support)})
    with pytest.raises(pr.InputError, match="must be differentiable in its parameters"):
        pr.fit(density, None, pr.HMC(chains=4, warmup=5), steps=5, progress=False)


@pytest.mark.filterwarnings("ignore:This density can't be vectorised")
def test_the_joint_of_a_prior_and_a_likelihood_without_gradients_includes_the_volume_element():
    y = torch.tensor([1.0, 2.5], dtype=torch.float64)
    support = torch.distributions.constraints.positive

    def density_with(transform):
        return pr.Density(
            log_prior=lambda p: -transform(p["s"]),
            log_likelihood=lambda p, y: -0.5 * (y - transform(p["s"])).square(),
            params={"s": Param((), support)},
        )

    without_gradient, smooth = (
        density_with(lambda s: torch.as_tensor(float(s.detach()), dtype=y.dtype)),
        density_with(lambda s: s),
    )
    w = torch.tensor([[0.3], [-1.0], [0.7]], dtype=y.dtype)
    data, generator = Data.of(y), stream(0, "walk")
    method = RandomWalk(chains=3, warmup=5)
    states = []
    for density in (without_gradient, smooth):
        target = Target(density, 2, single=True)
        density.check(y)
        states.append(method.init(target, method.plan(target, data, 1, 0), generator))
    torch.testing.assert_close(states[0].joint(w)[0], states[1].joint(w)[0], rtol=1e-12, atol=1e-12)
    assert bool((states[0].joint(w)[1] == 0).all())
    s = w[:, 0].exp()
    wanted = -s - 0.5 * (y - s[:, None]).square().sum(-1) + w[:, 0]
    torch.testing.assert_close(states[0].joint(w)[0], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batched", [False, True])
def test_a_nan_gradient_does_not_affect_the_walk(batched):
    """p = exp(sqrt(w) - w^2 / 2) for w > 0 and exp(-w^2 / 2) for w < 0, where autograd's gradient of the root is NaN.

    P(w < 0) is 1.2533 / (1.2533 + 3.0319) by the trapezoidal rule; 5 standard errors over 64 chains: false alarms at
    6e-7.
    """

    def log_prob(p: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.where(p["w"] > 0, p["w"].sqrt(), 0.0) - 0.5 * p["w"].square()

    line = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    mass = log_prob({"w": line}).exp()
    density = pr.Density(log_prob, {"w": Param()}, batched=batched)
    posterior: Any = pr.fit(density, None, RandomWalk(chains=64, warmup=100), steps=200, progress=False)
    assert_mean_close((posterior.w[..., 0] < 0).double().mean(1), mass[line < 0].sum() / mass.sum())


def test_the_summary_of_a_walk_has_no_bfmi(tmp_path):
    """Its energy is -log p without a momentum, so E-BFMI would be low for most chains of a correct walk."""
    density = pr.Density(lambda p: -0.5 * p["w"].square().sum(-1), {"w": Param((20,))}, batched=True)
    posterior: Any = pr.fit(density, None, RandomWalk(chains=16, warmup=100), steps=200, progress=False)
    assert float(bfmi(posterior.statistics["energy"]).median()) < 0.3
    posterior.save(tmp_path / "walk")
    for each in (posterior, pr.load(tmp_path / "walk", density)):
        found = each.summary()
        assert found.bfmi is None
        assert "E-BFMI" not in str(found)
