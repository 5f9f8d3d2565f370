"""Mixtures over one model are drawn from and saved; over models that differ in what a file would lose, they are not."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.posteriors import Mixture

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


def test_members_of_models_that_were_made_apart_but_alike_are_saved_and_come_back(tmp_path):
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
def test_models_with_the_same_parameters_that_mean_another_thing_predict_and_are_not_saved(members, tmp_path):
    mixture = Mixture(members())
    first, second = (member.predict(X).mean for member in mixture.members)
    assert torch.allclose(mixture.predict(X).mean, (first + second) / 2)
    with pytest.raises(pr.InputError, match="A mixture over different models has no file of its own"):
        mixture.save(tmp_path / "mixture.priory")
    with pytest.raises(pr.InputError, match="A mixture over different models has no draws of its own"):
        mixture.sample(2)
