"""A point with a prior function predicts the sum of both, can be saved, and has no single parameter vector."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import priory as pr

X = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()


def member(net: nn.Module):
    model = pr.Model(net, pr.Gaussian(), prior=1.0)
    ensemble = pr.fit(model, (X, X[:, 0] ** 2), pr.Ensemble(pr.MAP(), 2, anchored="function"), steps=30, batch_size=8)
    return model, ensemble.members[1]


@pytest.mark.parametrize("net", [plain, normed])
def test_predictions_are_the_sum_of_the_learnt_and_the_fixed_network(net):
    torch.manual_seed(0)
    model, point = member(net())
    wide = 3 * X
    learnt, fixed = (model.layout.constrain(v) for v in (point.w, point.a))
    noise = learnt.pop("likelihood.noise")
    del fixed["likelihood.noise"]
    total = functional_call(model.net.eval(), {**learnt, **point.buffers}, wide)[:, 0]
    total = total + functional_call(model.net, fixed, wide)[:, 0]  # with the initial running statistics
    found = point.predict(wide)
    torch.testing.assert_close(found.mean, total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.std, noise.expand(20), rtol=1e-12, atol=1e-12)
    assert found.outputs.shape == (1, 20)
    assert not torch.allclose(found.mean, functional_call(model.net, {**learnt, **point.buffers}, wide)[:, 0])


@pytest.mark.parametrize("net", [plain, normed])
def test_a_loaded_posterior_equals_the_saved_one(net, tmp_path):
    model, point = member(net())
    point.save(tmp_path / "point")
    again = pr.load(tmp_path / "point", model)
    assert type(again) is type(point)
    assert torch.equal(again.w, point.w)
    assert torch.equal(again.a, point.a)
    assert again.buffers.keys() == point.buffers.keys()
    assert torch.equal(again.predict(X).mean, point.predict(X).mean)


def test_parameters_and_evidence_are_refused():
    model, point = member(plain())
    for ask in (point.sample, lambda: point.mean, lambda: pr.fit(model, (X, X[:, 0]), pr.MAP(start=point), steps=1)):
        with pytest.raises(
            pr.InputError, match="A network with a prior function added to it has no single parameter vector"
        ):
            ask()
    with pytest.raises(pr.InputError, match="gives no evidence"):
        _ = point.log_evidence
