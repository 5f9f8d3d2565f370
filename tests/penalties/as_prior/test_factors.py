"""Factors per layer against the table for VGG19, and explanations of the user's factor."""

import math

import pytest
import torch
from torch import nn

import priory as pr
from priory.penalties import L1, L2, Bridge, ElasticNet, GroupLasso, Penalty, explain, layer_factors
from priory.priors import edge_of_chaos, weight_decay

# 3 x 3 convolutions: input and output channels, then P / 2, sqrt(2 P), sqrt(P (P + 1)) and sqrt(P (9 out + 1)).
VGG_LAYER_FACTORS = [
    (3, 64, 13.5, 7.35, 27.5, 124.8),
    (64, 64, 288, 33.9, 576.5, 576.5),
    (64, 128, 288, 33.9, 576.5, 814.9),
    (256, 512, 1152, 67.9, 2304.5, 3258.7),
    (512, 512, 2304, 96.0, 4608.5, 4608.5),
]


@pytest.mark.parametrize("row", VGG_LAYER_FACTORS, ids=[f"{r[0]}-{r[1]}" for r in VGG_LAYER_FACTORS])
def test_the_factors_of_vgg_match_the_published_table(row) -> None:
    with torch.device("meta"):
        layer = nn.Conv2d(row[0], row[1], 3)
    names = ("l2", "l1", "group_lasso", "reverse_group_lasso")
    found = [layer_factors(layer, name, "fan_in")["weight"] for name in names]
    assert found == [pytest.approx(value, abs=0.05) for value in row[2:]]
    decay = explain(layer, L2("fan_in"), num_data=50_000, variance="fan_in").table[0]["weight_decay"]
    assert decay == pytest.approx(9 * row[0] / 50_000, rel=1e-12)  # P / N


def test_the_factors_of_the_last_layer_of_vgg_match_the_published_table() -> None:
    layer = nn.Linear(512, 10)
    names = ("l2", "l1", "group_lasso", "reverse_group_lasso")
    found = [layer_factors(layer, name, "fan_in")["weight"] for name in names]
    assert found == [pytest.approx(value, abs=0.05) for value in (256, 32.0, 512.5, 75.0)]


@pytest.mark.parametrize(("p", "factor"), [(0.5, 10.47), (1.5, 25.19), (3.0, 228.0)])
def test_the_factors_of_bridge_penalties_match_the_published_table(p: float, factor: float) -> None:
    found = layer_factors(nn.Linear(100, 10), Bridge(p), "fan_in")["weight"]
    assert found == pytest.approx(factor, rel=5e-4)


def test_each_variance_gives_its_own_factor() -> None:
    layer, point = nn.Linear(30, 10), edge_of_chaos("tanh", bias=0.2)
    variances = {"glorot": 2 / 40, "he": 2 / 30, "fan_in": 1 / 30, point: point.sigma_w**2 / 30}
    for rule, variance in variances.items():
        assert layer_factors(layer, L2, rule) == {"weight": pytest.approx(1 / (2 * variance))}
        assert layer_factors(layer, ElasticNet(), rule)["weight"] > 0


def test_a_weight_shared_by_two_layers_is_listed_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    assert list(layer_factors(net, "l1")) == ["0.weight"]
    model = pr.Model(net, pr.Gaussian(1.0), prior=L1(layer_factors(net, "l1")))
    assert set(model.layout.names) == {"0.weight", "0.bias", "1.bias"}


def test_layers_without_a_fan_have_no_factor() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    assert set(layer_factors(net, "l1")) == {"2.weight"}


def test_a_weight_decay_is_explained_as_its_gaussian_prior() -> None:
    layer = nn.Conv2d(64, 64, 3)
    found = explain(layer, 2e-4, num_data=50_000)
    assert found.rows[0].prior_sd == pytest.approx(float(weight_decay(2e-4, 50_000).scale), rel=1e-12)
    assert found.rows[0].ratio == pytest.approx(7.59, abs=0.005)
    assert found.table[0]["weight_decay"] == pytest.approx(2e-4)
    assert "Your weight decay of 0.0002 over 50,000 rows is a prior 7.6 times wider" in str(found)
    assert "7.6 times narrower" in explain(layer, 2e-4 * 7.59**4, num_data=50_000).sentence


def test_factors_that_match_the_initialisation_are_explained_as_equally_wide_in_every_layer() -> None:
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))
    found = explain(net, L1(layer_factors(net, "l1")), num_data=100)
    assert [row.name for row in found.rows] == ["0.weight", "2.weight"]
    assert "as wide as the initialisation (glorot) in every layer" in found.sentence
    assert found.rows[0].initial_sd == pytest.approx(math.sqrt(2 / 58))
    assert found.table[0]["mean_loss_factor"] == pytest.approx(found.rows[0].factor / 100)
    assert "weight_decay" not in found.table[0]
    lines = str(found).splitlines()
    assert len(lines) == 5
    assert lines[1].split()[:3] == ["layer", "shape", "lambda"]


def test_layers_with_different_ratios_are_named_in_the_explanation() -> None:
    net = nn.Sequential(nn.Linear(8, 50), nn.Linear(50, 1))
    sentence = explain(net, GroupLasso(1.0)).sentence
    assert "(0.weight)" in sentence
    assert "(1.weight)" in sentence


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: layer_factors(nn.Linear(2, 2), "lasso"),
            "The 'penalty' argument of layer_factors must be a penalty or one of",
        ),
        (
            lambda: layer_factors(nn.Linear(2, 2), 3.0),
            "The 'penalty' argument of layer_factors must be a penalty or one of",
        ),
        (
            lambda: layer_factors(nn.Linear(2, 2), Bridge),
            "The 'penalty' argument of layer_factors must be a penalty or one of",
        ),
        (lambda: layer_factors([], "l1"), "The 'net' argument of layer_factors must be a torch.nn.Module, got list."),
        (
            lambda: layer_factors(nn.Linear(2, 2), "l1", "kaiming"),
            "The 'variance' argument of layer_factors must be one of",
        ),
        (lambda: layer_factors(nn.Linear(2, 2), Penalty(abs)), "The variance of a weight under Penalty is not known"),
        (lambda: explain(nn.Linear(2, 2), 1e-4), "The 'num_data' argument of explain must be given for a weight decay"),
        (
            lambda: explain(nn.Linear(2, 2), 0.0, 10),
            "The 'penalty' argument of explain must be a positive weight decay",
        ),
        (lambda: explain(nn.Linear(2, 2), L1(), 0), "The 'num_data' argument of explain must be an integer >= 1"),
        (lambda: explain(nn.Tanh(), L1()), "The 'net' argument of explain must have a penalised layer with weights"),
    ],
)
def test_arguments_that_cannot_be_explained_are_rejected_in_a_sentence(make, says: str) -> None:
    with pytest.raises(pr.InputError) as error:
        make()
    assert says in str(error.value)
