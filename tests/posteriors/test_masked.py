"""Masked weights: rates by parameter, and files."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.streams import stream
from priory.posteriors.masked import Masked


class Heads(nn.Module):
    """Two heads that read the same dropped features."""

    def __init__(self):
        super().__init__()
        self.body, self.drop = nn.Linear(3, 6), nn.Dropout(0.3)
        self.mean, self.other = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x):
        h = self.drop(torch.relu(self.body(x)))
        return self.mean(h) + self.other(h).tanh()


def fitted(method=None):
    X = torch.randn(40, 3, generator=stream(0, "x"))
    return pr.fit(pr.Model(Heads(), pr.Gaussian(0.1)), (X, X[:, 0]), method or pr.Dropout(), steps=20), X


def test_layers_that_read_the_same_units_share_masks_and_rates():
    posterior, _ = fitted(pr.Dropout("learn"))
    rates = posterior.rates
    assert set(rates) == {"mean.weight", "other.weight"}
    assert rates["mean.weight"] == rates["other.weight"] != pytest.approx(0.3, abs=1e-6)
    draws = fitted()[0].sample(50)
    assert torch.equal(draws["mean.weight"] == 0, draws["other.weight"] == 0)
    assert 0.1 < float((draws["mean.weight"] == 0).float().mean()) < 0.5  # 300 units at the rate 0.3; 7 standard errors


def test_a_file_stores_every_layer_that_reads_a_unit(tmp_path):
    posterior, X = fitted()
    posterior.save(tmp_path / "heads.priory")
    loaded = pr.load(tmp_path / "heads.priory", pr.Model(Heads(), pr.Gaussian(0.1)))
    assert loaded.rates == posterior.rates
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)


def test_a_site_is_written_as_weights_and_a_number_of_units():
    posterior, _ = fitted()
    assert posterior.to_json()["sites"] == [["mean.weight", 6, "other.weight"]]
    alone = Masked.of_tensors(posterior.target, posterior.tensors(), {}, noise="bernoulli", sites=[["mean.weight", 6]])
    assert alone.rates == {"mean.weight": pytest.approx(0.3)}


def test_masked_weights_have_no_evidence():
    with pytest.raises(pr.InputError, match="gives no evidence: its masks have no density"):
        _ = fitted()[0].log_evidence


class AlwaysOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.b(nn.functional.dropout(torch.relu(self.a(x)), 0.3, training=True))


def test_a_loaded_posterior_switches_off_dropout_that_ignores_the_mode(tmp_path):
    X = torch.randn(40, 3, generator=stream(0, "x"))
    posterior = pr.fit(pr.Model(AlwaysOn(), pr.Gaussian(0.1)), (X, X[:, 0]), pr.Dropout(), steps=20)
    posterior.save(tmp_path / "on.priory")
    loaded = pr.load(tmp_path / "on.priory", pr.Model(AlwaysOn(), pr.Gaussian(0.1)))
    assert posterior.rates == loaded.rates == {"b.weight": pytest.approx(0.3)}
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)
    assert torch.equal(loaded.predict(X[:1]).outputs, posterior.predict(X[:1]).outputs)
