"""MALA: its proposal and acceptance follow the formula, and divergences are detected."""

import math

import pytest
import torch

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.mcmc import MALA
from priory.methods.mcmc.metrics import DiagonalMetric
from priory.models.target import Target


def test_the_proposal_and_its_acceptance_follow_the_formula():
    """w' = w + e^2 C g / 2 + e C^(1/2) noise is accepted by the ratio of densities and of proposals."""
    density = pr.Density(lambda p: -p["w"].pow(4).sum(-1) / 4, {"w": Param((2,))}, batched=True)
    target, data, e = Target(density, None), Data.of(None), 0.7
    method = MALA(chains=50, warmup=0)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "mala"))
    variance = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    state.metric, state.step_size.log = DiagonalMetric(variance), torch.tensor(math.log(e), dtype=torch.float64)
    w = state.w
    generator = stream(1, "mala")
    noise = torch.randn(w.shape, generator=generator, dtype=w.dtype)
    proposal = w + e**2 / 2 * variance * -(w**3) + e * variance.sqrt() * noise

    def log_q(to: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return -0.5 * ((to - at + e**2 / 2 * variance * at**3).square() / (e**2 * variance)).sum(-1)

    ratio = (w.pow(4) - proposal.pow(4)).sum(-1) / 4 + log_q(w, proposal) - log_q(proposal, w)
    move = method.transition(state, stream(1, "mala"))
    torch.testing.assert_close(move.acceptance, ratio.exp().clamp(max=1), rtol=1e-9, atol=1e-9)
    moved = (move.w != w).any(-1)
    assert 0 < int(moved.sum()) < 50
    torch.testing.assert_close(move.w[moved], proposal[moved], rtol=1e-12, atol=1e-12)


DIVERGING = {
    "steep": (lambda w: -w.pow(4), [False, True]),  # a step of 1 goes from 50 to -2.5e5
    "NaN gradient": (lambda w: torch.where(w > 0, w.sqrt(), 0.0) - 0.5 * w.square(), [True, False]),  # for w < 0
    "edge": (lambda w: torch.where(w > 0, 0.0, -math.inf) - 0.5 * w.square() / 1e4, [False, False]),
}


@pytest.mark.parametrize("name", DIVERGING)
def test_a_loss_of_1000_nats_or_a_nan_is_a_divergence_and_leaving_the_support_is_not(name):
    log_prob, wanted = DIVERGING[name]
    density = pr.Density(lambda p: log_prob(p["w"]).sum(-1), {"w": Param((1,))}, batched=True)
    target, data, method = Target(density, None), Data.of(None), MALA(chains=2, warmup=0)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "mala"))
    state.w = torch.tensor([[0.1], [50.0]], dtype=torch.float64)
    (state.value, state.gradient), state.step_size.log = state.joint(state.w), torch.zeros((), dtype=torch.float64)
    moves = [method.transition(state, stream(seed, "mala")) for seed in range(20)]
    found = torch.stack([move.divergent for move in moves])
    assert found.any(0).tolist() == wanted
    assert not bool(found.logical_and(torch.stack([move.acceptance for move in moves]) > 0).any())
