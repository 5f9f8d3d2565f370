"""The noise estimated on held-out rows, against a numerical optimiser."""

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.point.held_out import fraction_held, learn_from_held_out, updates_noise
from priory.models.target import Target


@pytest.mark.parametrize("draws", [1, 6])
def test_the_noise_maximises_the_predictive_density_of_held_out_rows(draws):
    model = pr.Model(nn.Linear(3, 1).double(), pr.Gaussian(), prior=1.0)
    noise = stream(0, "held")
    X = torch.randn(50, 3, dtype=torch.float64, generator=noise)
    y = X.sum(-1) + 0.3 * torch.randn(50, dtype=torch.float64, generator=noise)
    w = torch.cat([torch.ones(3), torch.zeros(2)]).double() + 0.2 * torch.randn(
        draws, 2, model.layout.size, dtype=torch.float64, generator=noise
    )  # two members
    w[..., -1] = 0.0
    held = model.prepare((X, y))
    for _ in range(30):
        w[..., -1:] = learn_from_held_out(Target(model, 50), w, held, {})
    for member in range(2):
        f = X @ w[:, member, :3].mT + w[:, member, 3]  # (n, S)

        def loss(log_noise, f=f):
            each = torch.distributions.Normal(f, torch.tensor(log_noise).exp()).log_prob(y[:, None])
            return -float(torch.logsumexp(each, 1).mean())

        best = minimize_scalar(loss, bounds=(-4, 2), method="bounded", options={"xatol": 1e-9}).x
        found = model.learnt_at(w[0, member])["noise"].log()
        # Different draws widen the prediction, so the noise of each draw alone would be too large (by 0.7).
        # Adam converges within half a percent.
        assert float(found) == pytest.approx(best, abs=5e-3)


def test_noise_updates_are_frequent_at_first_and_end_before_the_turn():
    update_steps = [step for step in range(2_000) if updates_noise(step, 1_234)]
    assert update_steps[:3] == [0, 25, 50]
    assert update_steps[-3:] == [1_100, 1_200, 1_233]
    assert len(update_steps) == 20 + 8 + 1


@pytest.mark.parametrize(("rows", "share"), [(100, 0.3), (1_000, 0.2), (10_000, 0.1)])
def test_small_data_sets_hold_out_a_larger_fraction(rows, share):
    assert fraction_held(Data.of((torch.zeros(rows, 1), torch.zeros(rows)))) == pytest.approx(share)
