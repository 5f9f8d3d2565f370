"""RandomWalk keeps the contract, and its proposal is the one of its formula."""

import math

import pytest
import torch

import priory as pr
from priory import Param
from priory.data import Data
from priory.methods.mcmc import RandomWalk
from priory.methods.mcmc.metrics import Diagonal
from priory.streams import stream
from priory.target import Target
from priory.testing.contract import CLAUSES, records_one_number_a_step


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
def test_random_walk_keeps_the_contract(clause):
    # the history has the steps of the warm-up too, and the clause counts draws
    clause(RandomWalk(chains=16, warmup=0 if clause is records_one_number_a_step else 100))


def test_the_proposal_is_a_normal_step_and_its_acceptance_the_ratio_of_densities():
    density = pr.Density(lambda p: -p["w"].pow(4).sum(-1) / 4, {"w": Param((2,))}, batched=True)
    target, data, e = Target(density, None), Data.of(None), 0.7
    method = RandomWalk(chains=50, warmup=0)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "walk"))
    variance = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    state.metric, state.step_size.log = Diagonal(variance), torch.tensor(math.log(e), dtype=torch.float64)
    w = state.w
    noise = torch.randn(w.shape, generator=stream(1, "walk"), dtype=w.dtype)
    proposal = w + e * variance.sqrt() * noise
    move = method.transition(state, stream(1, "walk"))
    ratio = (w.pow(4) - proposal.pow(4)).sum(-1) / 4
    torch.testing.assert_close(move.acceptance, ratio.exp().clamp(max=1), rtol=1e-9, atol=1e-9)
    moved = (move.w != w).any(-1)
    assert 0 < int(moved.sum()) < 50
    torch.testing.assert_close(move.w[moved], proposal[moved], rtol=1e-12, atol=1e-12)
