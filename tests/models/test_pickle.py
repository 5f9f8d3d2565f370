"""Models, posteriors and predictions through pickle: the same numbers, though the user's network was trained since."""

import copy
import pickle

import pytest
import torch
from torch import nn

import priory as pr
from priory import latent

X = torch.linspace(-1, 1, 16)[:, None].repeat(1, 2)
Y = X[:, 0] - 0.3
METHODS = [pr.MAP(), pr.MeanField(), pr.Laplace(), pr.LastLayer(), pr.SWAG(), pr.Dropout(), pr.Ensemble(pr.MAP(), 2)]


def network(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3) if batch_norm else nn.Tanh(), nn.Linear(3, 1))


def again(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("through", [again, copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_model_is_what_it_was_when_it_was_made_though_its_network_was_trained_since(batch_norm, through):
    net = network(batch_norm)
    model = pr.Model(net, pr.Gaussian(), prior={"0.weight": 2.0, "*": "he"})
    before = pr.fit(model, (X, Y), pr.MAP(), steps=5, progress=False)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    net.eval()
    same = through(model)
    assert same is not model
    after = pr.fit(same, (X, Y), pr.MAP(), steps=5, progress=False)
    assert torch.equal(after.w, before.w)
    assert torch.equal(after.predict(X).mean, before.predict(X).mean)
    assert same.describe() == model.describe()


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_posterior_and_its_predictions_come_back_the_same(method):
    posterior = pr.fit(pr.Model(network(), pr.Gaussian(0.2)), (X, Y), method, epochs=3, progress=False)
    same = again(posterior)
    here, there = posterior.predict(X, seed=1), again(posterior.predict(X, seed=1))
    for prediction in (same.predict(X, seed=1), there):
        assert torch.equal(prediction.mean, here.mean)
        assert torch.equal(prediction.variance, here.variance)
    assert same.method == posterior.method


@pytest.mark.parametrize(
    ("method", "model"),
    [(pr.EM(), latent.GaussianMixture(2)), (pr.VariationalEM(), latent.BayesianGaussianMixture(2))],
    ids=repr,
)
def test_a_posterior_of_a_latent_model_comes_back_the_same(method, model):
    y = torch.cat([X + 3, X - 3])[:, :1]
    posterior = pr.fit(model, y, method, steps=5, progress=False)
    assert torch.equal(again(posterior).responsibilities(y), posterior.responsibilities(y))


def test_a_density_of_a_lambda_is_refused_with_a_sentence_by_pickle_alone():
    density = pr.Density(lambda p: -p["a"].square(), {"a": pr.Param()})
    with pytest.raises(pr.InputError, match="'log_prob' argument of Density must be defined by def at the top level"):
        pickle.dumps(density)
    assert copy.copy(density).log_prob is density.log_prob
    assert copy.deepcopy(density).log_prob is density.log_prob
    cloudpickle = pytest.importorskip("cloudpickle")
    assert repr(pickle.loads(cloudpickle.dumps(density))) == repr(density)
