"""A point with a fixed function beside it predicts their sum, is kept in a file, and has no parameters to give."""

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
def test_it_predicts_the_sum_of_what_was_learnt_and_what_is_fixed(net):
    torch.manual_seed(0)
    model, point = member(net())
    wide = 3 * X
    learnt, fixed = (model.layout.constrain(v) for v in (point.w, point.a))
    noise = learnt.pop("likelihood.noise")
    del fixed["likelihood.noise"]
    total = functional_call(model.net.eval(), {**learnt, **point.buffers}, wide)[:, 0]
    total = total + functional_call(model.net, fixed, wide)[:, 0]  # with the statistics that the network came with
    found = point.predict(wide)
    torch.testing.assert_close(found.mean, total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.std, noise.expand(20), rtol=1e-12, atol=1e-12)
    assert found.outputs.shape == (1, 20)
    assert not torch.allclose(found.mean, functional_call(model.net, {**learnt, **point.buffers}, wide)[:, 0])


@pytest.mark.parametrize("net", [plain, normed])
def test_it_comes_back_from_a_file_bit_for_bit(net, tmp_path):
    model, point = member(net())
    point.save(tmp_path / "point")
    again = pr.load(tmp_path / "point", model)
    assert type(again) is type(point)
    assert torch.equal(again.w, point.w)
    assert torch.equal(again.a, point.a)
    assert again.buffers.keys() == point.buffers.keys()
    assert torch.equal(again.predict(X).mean, point.predict(X).mean)


def test_who_asks_for_parameters_or_evidence_is_told_that_there_are_none():
    model, point = member(plain())
    for ask in (point.sample, lambda: point.mean, lambda: pr.fit(model, (X, X[:, 0]), pr.MAP(start=point), steps=1)):
        with pytest.raises(
            pr.InputError, match="A network with a prior function added to it has no single parameter vector"
        ):
            ask()
    with pytest.raises(pr.InputError, match="gives no evidence"):
        _ = point.log_evidence
