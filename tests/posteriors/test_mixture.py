"""Mixtures over one model can be sampled and saved; mixtures over different models can only predict."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.posteriors import Mixture, mixture
from priory.predictive import Prediction
from priory.testing.contract import classification

X = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]


def fitted(net: nn.Module, noise: float = 0.1):
    return pr.fit(pr.Model(net.double(), pr.Gaussian(noise)), (X, X[:, 0]), pr.MAP(), steps=5, progress=False)


def chain(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 2), activation, nn.Linear(2, 1))


class Frozen(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.net, self.frozen = nn.Linear(1, 1), nn.Parameter(torch.tensor(value), requires_grad=False)

    def forward(self, x):
        return self.net(x) + self.frozen


def test_members_of_equal_models_are_saved_and_loaded(tmp_path):
    mixture = Mixture([fitted(Frozen(1.0)), fitted(Frozen(1.0))])
    mixture.save(tmp_path / "mixture.priory")
    again = pr.load(tmp_path / "mixture.priory", mixture.model)
    assert torch.equal(again.predict(X).mean, mixture.predict(X).mean)


@pytest.mark.parametrize(
    "members",
    [
        lambda: [fitted(Frozen(1.0)), fitted(Frozen(2.0))],
        lambda: [fitted(chain(nn.Tanh())), fitted(chain(nn.ReLU()))],
        lambda: [fitted(nn.Linear(1, 1), 0.1), fitted(nn.Linear(1, 1), 0.5)],
    ],
    ids=["frozen parameters", "networks", "noises"],
)
def test_mixtures_over_different_models_predict_but_are_not_saved_or_sampled(members, tmp_path):
    mixture = Mixture(members())
    first, second = (member.predict(X).mean for member in mixture.members)
    assert torch.allclose(mixture.predict(X).mean, (first + second) / 2)
    with pytest.raises(pr.InputError, match="A mixture over different models has no file of its own"):
        mixture.save(tmp_path / "mixture.priory")
    with pytest.raises(pr.InputError, match="A mixture over different models has no draws of its own"):
        mixture.sample(2)


def average_of_members(posterior, x, seed=3):
    """Average the predictions of the members, computed one after the other."""
    return Prediction.average([m.predict(x, seed=seed + k) for k, m in enumerate(posterior.members)], posterior.weights)


@pytest.mark.parametrize("anchored", [False, "function"])
@pytest.mark.parametrize("at_a_time", [1, 2, 100])
def test_points_with_equal_weights_predicted_in_one_batch_equal_separate_predictions(anchored, at_a_time, monkeypatch):
    model = pr.Model(chain(nn.Tanh()).double(), pr.Gaussian())
    posterior = pr.fit(model, (X, X[:, 0]), pr.Ensemble(pr.MAP(), 3, anchored=anchored), steps=5)
    monkeypatch.setattr(mixture, "BLOCK_ELEMENTS", at_a_time * model.layout.size)
    found, wanted = posterior.predict(X, seed=3), average_of_members(posterior, X)
    assert len(found.outputs) == 3
    for name in ("outputs", "mean", "epistemic", "aleatoric", "std"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_prob(X[:, 0]), wanted.log_prob(X[:, 0]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.interval(0.9), wanted.interval(0.9), rtol=1e-10, atol=1e-10)


def test_labels_predicted_in_one_batch_equal_separate_predictions():
    model, data = classification()
    posterior = pr.fit(model, data, pr.Ensemble(pr.MAP(), 3), steps=20)
    found, wanted = posterior.predict(data[0]), average_of_members(posterior, data[0])
    for name in ("probs", "entropy", "mutual_information"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)


def test_predictions_use_unequal_weights():
    points = [fitted(chain(nn.Tanh())) for _ in range(3)]
    points = [pr.fit(points[0].model, (X, c * X[:, 0]), pr.MAP(0.1), steps=50) for c in (0.0, 1.0, -2.0)]
    mixed = Mixture(points, [0.5, 0.3, 0.2])
    found, wanted = mixed.predict(X, seed=3), average_of_members(mixed, X)
    weighted_mean = sum(a * point.predict(X).mean for a, point in zip((0.5, 0.3, 0.2), points, strict=True))
    torch.testing.assert_close(found.mean, weighted_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.epistemic, wanted.epistemic, rtol=1e-12, atol=1e-12)
    alone = Mixture(points, [0.0, 1.0, 0.0]).predict(X)
    torch.testing.assert_close(alone.mean, points[1].predict(X).mean, rtol=1e-12, atol=1e-12)


def test_rounded_weights_are_normalised():
    points = [fitted(nn.Linear(1, 1)), fitted(nn.Linear(1, 1))]
    weights = Mixture(points, [0.30004, 0.7]).weights
    assert float(weights.sum()) == pytest.approx(1, abs=1e-15)
    assert float(weights[0] / weights[1]) == pytest.approx(0.30004 / 0.7, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "The 'samples' argument of predict must be an integer >= 1, got 0."),
        ({"seed": 0.5}, "The 'seed' argument of predict must be an integer, got 0.5."),
        ({"link": "probit"}, "The 'link' argument of predict must be left out"),
    ],
)
def test_invalid_options_of_predict_are_refused(options, message):
    model = pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.1))
    for anchored in (False, "function"):
        posterior = pr.fit(model, (X, X[:, 0]), pr.Ensemble(pr.MAP(), 2, anchored=anchored), steps=2)
        for each in (posterior, posterior.members[0]):
            with pytest.raises(pr.InputError) as error:
                each.predict(X, **options)
            assert message in str(error.value)
        with pytest.raises(pr.InputError, match="The network must take the inputs"):
            posterior.predict(X.expand(-1, 2))


@pytest.mark.parametrize("n", [1, 5, 8, 20])
def test_starts_cycle_through_members_of_equal_weight(n):
    points = [fitted(nn.Linear(1, 1)) for _ in range(8)]
    w = torch.stack([point.w for point in points])
    places = []
    for seed in range(20):
        starts = points[0].target.start(Data.of((X, X[:, 0])), torch.Size([n]), stream(seed), Mixture(points))
        which = (starts[:, None] == w).all(-1)
        assert bool((which.sum(1) == 1).all())
        assert set(which.sum(0).tolist()) <= {n // 8, -(-n // 8)}
        places.append(int(which[0].long().argmax()))
    assert (
        len(set(places)) > 3
    )  # the first member is random: 20 draws from 8 have at most 3 values with probability 2e-7


def test_starts_are_drawn_by_the_weights_when_these_differ():
    points = [fitted(nn.Linear(1, 1)) for _ in range(2)]
    starts = Mixture(points, [1.0, 0.0]).starts(6, stream(0))
    assert torch.equal(starts, points[0].w.expand(6, -1))
