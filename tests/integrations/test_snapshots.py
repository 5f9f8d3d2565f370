"""SWAG of a training that is not ours: the moments of the weights as they were, in a posterior like any other."""

import copy

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.integrations import Snapshots


def regression(noise=0.1):
    generator = stream(0, "outside")
    X = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    y = X[:, 0] - X[:, 1] + 0.1 * torch.randn(40, generator=generator, dtype=torch.float64)
    net = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.5, 0.0]]))
        net.bias.zero_()
    return net, pr.Model(net, pr.Gaussian(noise), prior=1.0), (X, y)


def trained(net, data, steps, after):
    """A plain loop, which calls `after` with each number of steps."""
    X, y = data
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        rows = torch.arange(4) + 4 * (step % 10)
        nn.functional.mse_loss(net(X[rows])[:, 0], y[rows]).backward()
        optimizer.step()
        after(step)


def flat(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def test_the_moments_are_those_of_the_snapshots():
    net, model, data = regression()
    snapshots, path = Snapshots(model, data, rank=5), []

    def after(step):
        snapshots.take()
        path.append(flat(net).clone())

    trained(net, data, 30, after)
    path = torch.stack(path)
    mean = path.mean(0)
    away = path[-5:] - mean
    covariance = 0.5 * torch.diag(path.var(0, correction=0)) + away.T @ away / (2 * 4)
    q = snapshots.posterior.family
    assert torch.allclose(q.loc, mean, rtol=0, atol=1e-12)
    found = q.factor @ q.factor.T + torch.diag((2 * q.log_diag).exp())
    assert torch.allclose(found, covariance, rtol=1e-10, atol=1e-14)


def test_snapshots_are_taken_at_regular_steps_after_the_given_fraction():
    _, model, data = regression()
    for every, ends, expected in ((3, (), [18, 21, 24, 27, 30]), (None, (10, 20, 30), [20, 30])):
        snapshots, counts = Snapshots(model, data, begin=0.5, every=every), {}
        for step in range(1, 31):
            snapshots.on_step(step, 30)
            if step in ends:
                snapshots.on_step(step, 30, epoch_ends=True)
            counts[step] = snapshots.count
        assert [step for step in range(2, 31) if counts[step] > counts[step - 1]] == expected


def test_accumulation_steps_without_an_optimizer_step_take_no_snapshot():
    _, model, data = regression()
    snapshots = Snapshots(model, data, begin=0.0, every=2)
    for step in (0, 1, 1, 2, 2, 2, 3, 4):
        snapshots.on_step(step, 4)
    assert snapshots.count == 2


def test_a_restored_checkpoint_continues_with_the_same_values():
    net, model, data = regression()
    whole, first, second = (Snapshots(model, data, rank=3, begin=0.0, every=1) for _ in range(3))

    def after(step):
        whole.on_step(step, 20)
        (first if step <= 8 else second).on_step(step, 20)
        if step == 8:
            second.load_state_dict(copy.deepcopy(first.state_dict()))

    trained(net, data, 20, after)
    assert second.count == 20
    assert torch.equal(second.posterior.theta, whole.posterior.theta)


def test_the_posterior_predicts_can_be_saved_and_has_its_data(tmp_path):
    net, model, data = regression()
    snapshots = Snapshots(model, data, rank=3)
    trained(net, data, 40, lambda step: snapshots.take())
    posterior = snapshots.posterior
    assert posterior.num_data == 40
    assert torch.isfinite(torch.tensor(posterior.log_evidence.value))
    posterior.save(tmp_path / "walk.priory")
    again = pr.load(tmp_path / "walk.priory", model)
    assert torch.equal(again.predict(data[0]).mean, posterior.predict(data[0]).mean)
    assert float(posterior.predict(data[0]).log_prob(data[1]).mean()) > 0


def test_a_learnt_noise_is_fitted_on_the_held_out_rows_and_snapshots_can_continue():
    net, model, (X, y) = regression("learn")
    held = (X[30:], y[30:] + 0.6 * torch.tensor([1.0, -1.0]).repeat(5))  # noisier than the training rows
    snapshots = Snapshots(model, (X[:30], y[:30]), held=held)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -1.0]]))
    for _ in range(3):
        snapshots.take()
    noise = snapshots.posterior.mean["likelihood.noise"]
    residual = (held[1] - net(held[0])[:, 0].detach()).square().mean().sqrt()
    assert float(noise) == pytest.approx(float(residual), rel=0.02)
    for _ in range(3):
        snapshots.take()
    assert float(snapshots.posterior.mean["likelihood.noise"]) == pytest.approx(float(noise), rel=1e-6)


def test_running_statistics_are_those_at_the_end_of_the_training():
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    X = torch.linspace(-1, 1, 10)[:, None]
    snapshots = Snapshots(pr.Model(net, pr.Gaussian(0.1)), (X, X[:, 0]))
    for _ in range(3):
        net(X)
        snapshots.take()
    net.eval()
    assert float(net[1].running_var[0]) != 1.0
    prediction = snapshots.posterior.predict(X, samples=4)
    assert torch.allclose(prediction.mean, net(X)[:, 0].detach(), atol=1e-5)


def test_a_network_with_dropout_predicts_without_it():
    net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    X = torch.linspace(-1, 1, 10)[:, None]
    snapshots = Snapshots(pr.Model(net, pr.Gaussian(0.1)), (X, X[:, 0]))
    for _ in range(2):
        snapshots.take()
    net.eval()
    assert torch.allclose(snapshots.posterior.predict(X, samples=4).mean, net(X)[:, 0].detach(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 1}, "The 'rank' argument of Snapshots must be an integer >= 2, got 1."),
        ({"begin": 1.0}, "The 'begin' argument of Snapshots must be a number in [0, 1), got 1.0."),
        ({"every": 0}, "The 'every' argument of Snapshots must be an integer >= 1, or None, got 0."),
    ],
)
def test_invalid_arguments_raise_an_error_that_names_them(options, sentence):
    _, model, data = regression()
    with pytest.raises(InputError) as error:
        Snapshots(model, data, **options)
    assert str(error.value) == sentence


def test_invalid_models_missing_held_out_rows_and_diverged_weights_raise_an_error():
    net, model, data = regression()
    with pytest.raises(InputError, match="The 'model' argument of Snapshots must be a Model"):
        Snapshots(net, data)
    with pytest.raises(InputError, match="The 'held' argument of Snapshots must be held-out rows"):
        Snapshots(regression("learn")[1], data)
    snapshots = Snapshots(model, data, rank=3)
    with pytest.raises(InputError, match="needs at least 2 snapshots"):
        _ = snapshots.posterior
    with pytest.raises(InputError, match="be of the same model and rank"):
        snapshots.load_state_dict(Snapshots(model, data, rank=4).state_dict())
    with torch.no_grad():
        net.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="must be finite; the training has diverged"):
        snapshots.take()


def test_a_module_that_trains_another_network_raises_an_error():
    net, model, data = regression()
    snapshots = Snapshots(model, data)
    snapshots.check_module(nn.Sequential(net))
    with pytest.raises(InputError, match="be made from the network that is trained, not from a copy"):
        snapshots.check_module(copy.deepcopy(net))


def test_running_statistics_are_updated_for_a_model_made_in_evaluation_mode():
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).eval()
    X = torch.linspace(-1, 1, 10)[:, None]
    snapshots = Snapshots(pr.Model(net, pr.Gaussian(0.1)), (X, X[:, 0]))
    net.train()
    for _ in range(3):
        net(X)
        snapshots.take()
    net.eval()
    assert torch.allclose(snapshots.posterior.predict(X, samples=4).mean, net(X)[:, 0].detach(), atol=1e-5)


def test_weights_that_were_frozen_when_the_model_was_made_must_stay_frozen():
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    snapshots = Snapshots(pr.Model(net, pr.Gaussian(0.1)), (torch.zeros(4, 1), torch.zeros(4)))
    snapshots.take()
    with torch.no_grad():
        net[0].weight.add_(1)
    with pytest.raises(InputError, match=r"got '0.weight', which was frozen when the model was made"):
        snapshots.take()
