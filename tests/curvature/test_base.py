"""Selections of the coordinates of a curvature."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.core.flat import Param
from priory.curvature import STRUCTURES, Curvature, select
from priory.curvature.base import Roots
from priory.fitting.prepare import make_target
from priory.likelihoods import Categorical, Gaussian, Likelihood


def model_of(net: nn.Module, likelihood: Likelihood | None = None) -> pr.Model:
    return pr.Model(net, likelihood or Gaussian(), prior=1.0)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def test_all_selects_the_network_without_the_noise() -> None:
    model = model_of(mlp())
    selection = select(model, "all")
    assert model.layout.size == 14
    assert selection.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert selection.places.tolist() == list(range(13))
    assert selection.size == 13
    assert selection.whole
    assert selection.spans() == {
        "0.weight": slice(0, 6),
        "0.bias": slice(6, 9),
        "2.weight": slice(9, 12),
        "2.bias": slice(12, 13),
    }


def test_names_and_patterns_are_sorted_in_the_order_of_the_layout() -> None:
    selection = select(model_of(mlp()), ["2.*", "0.bias", "2.weight"])
    assert selection.names == ("0.bias", "2.weight", "2.bias")
    assert selection.places.tolist() == [6, 7, 8, 9, 10, 11, 12]
    assert selection.spans()["2.bias"] == slice(6, 7)


def test_coordinates_are_sorted_and_report_whether_parameters_are_complete() -> None:
    model = model_of(mlp())
    some = select(model, torch.tensor([12, 7, 0]))
    assert some.places.tolist() == [0, 7, 12]
    assert some.names == ("0.weight", "0.bias", "2.bias")
    assert not some.whole
    assert some.spans() == {"0.weight": slice(0, 1), "0.bias": slice(1, 2), "2.bias": slice(2, 3)}
    assert select(model, torch.tensor([8, 6, 7])).whole


def test_all_selects_every_parameter_of_a_density() -> None:
    density = pr.Density(lambda p: -p["a"].square().sum() - p["b"] ** 2, {"a": Param((2,)), "b": Param(())})
    assert select(density).places.tolist() == [0, 1, 2]
    assert select(density, ["b"]).places.tolist() == [2]
    with pytest.raises(InputError, match="'over' argument of Laplace must be 'all' or names for a Density"):
        select(density, "last")


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("first", "must be 'all', 'last', a list of names or patterns of them, or a LongTensor .*got 'first'"),
        ([], r"must be 'all', 'last', .*got \[\]"),
        ([1], r"must be 'all', 'last', .*got \[1\]"),
        (3, "must be 'all', 'last', .*got 3"),
        (["3.weight"], r"must match parameters among 0.weight, .*got \['3.weight'\]"),
        (["likelihood.noise"], "must match parameters among 0.weight"),
        (torch.tensor([0.5]), "must hold integers from 0 to 12 as a LongTensor"),
        (torch.tensor([], dtype=torch.long), "must hold integers from 0 to 12"),
        (torch.tensor([13]), "must hold integers from 0 to 12"),
        (torch.tensor([-1]), "must hold integers from 0 to 12"),
        (torch.tensor([1, 1]), "must name each coordinate once, got 2 with repetitions"),
    ],
)
def test_an_invalid_selection_is_refused(over, message: str) -> None:
    with pytest.raises(InputError, match="The 'over' argument of Laplace " + message):
        select(model_of(mlp()), over)


# The last layer.


class Backwards(nn.Module):
    """Registers its layers in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(3, 1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(self.head(torch.tanh(self.body(x)))).squeeze(-1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.location, self.scale = nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return torch.cat([self.location(h), self.scale(h)], -1)


class Bypass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return h + self.head(torch.relu(h))


class Scaled(nn.Module):
    """Applies a parameter of its own after its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(2, 1), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.body(x)


class AttentionLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mix = nn.Linear(2, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)[:, None]
        return self.mix(h, h, h)[0][:, 0]


class Adapter(nn.Module):
    """A frozen layer with trainable parameters in parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.base = nn.Linear(2, 3), nn.Linear(3, 2).requires_grad_(False)
        self.up = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x)).detach()
        return self.base(h) + self.up(h)


class TiedOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(x)))


NETWORKS_WITH_LAST_LAYER = {
    "a sequence": (mlp, ["2.weight", "2.bias"]),
    "a single layer": (lambda: nn.Linear(2, 1), ["weight", "bias"]),
    "nested sequences with a tail": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2), nn.ReLU()), nn.Flatten()),
        ["1.0.weight", "1.0.bias"],
    ),
    "a norm at the end": (lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), ["1.weight", "1.bias"]),
    "another order of registration": (Backwards, ["head.weight", "head.bias"]),
    "attention": (
        AttentionLast,
        ["mix.in_proj_weight", "mix.in_proj_bias", "mix.out_proj.weight", "mix.out_proj.bias"],
    ),
    "an adapter": (Adapter, ["up.weight"]),
    "tied weights": (TiedOut, ["embed.weight"]),
}


@pytest.mark.parametrize("name", NETWORKS_WITH_LAST_LAYER)
def test_the_last_layer_is_the_one_called_last(name: str) -> None:
    make, expected = NETWORKS_WITH_LAST_LAYER[name]
    model = model_of(make())
    assert select(model, "last", (torch.randn(5, 2),)).names == tuple(expected)


@pytest.mark.parametrize("name", ["a sequence", "a single layer", "nested sequences with a tail", "a norm at the end"])
def test_the_last_layer_of_a_plain_sequence_needs_no_inputs(name: str) -> None:
    make, expected = NETWORKS_WITH_LAST_LAYER[name]
    assert select(model_of(make()), "last").names == tuple(expected)


def test_a_frozen_last_layer_is_skipped() -> None:
    net = mlp()
    net[2].requires_grad_(False)
    for inputs in (None, (torch.randn(5, 2),)):
        assert select(model_of(net), "last", inputs).names == ("0.weight", "0.bias")


@pytest.mark.parametrize(
    ("make", "mine", "others"),
    [
        (TwoHeads, "scale.weight, scale.bias", "body.weight, body.bias, location.weight, location.bias"),
        (Bypass, "head.weight, head.bias", "body.weight, body.bias"),
        (Scaled, "scale", "body.weight, body.bias"),
    ],
)
def test_a_network_without_a_unique_last_layer_is_refused(make, mine: str, others: str) -> None:
    message = f"its output comes from {mine}, but also from {others} beside it, got 'last'"
    with pytest.raises(InputError, match=message):
        select(model_of(make()), "last", (torch.randn(5, 2),))


def test_a_network_that_is_not_a_sequence_needs_inputs_to_find_its_last_layer() -> None:
    with pytest.raises(
        InputError, match="not a plain sequence of layers, unless inputs show which layer it calls last"
    ):
        select(model_of(Backwards()), "last")


def test_finding_the_last_layer_leaves_no_hooks() -> None:
    model = model_of(Backwards())
    select(model, "last", (torch.randn(5, 2),))
    assert not any(m._forward_hooks for m in model.network.skeleton.modules())


# Columns.


def test_each_kind_of_curvature_has_the_stated_number_of_columns() -> None:
    model = pr.Model(nn.Linear(2, 3).double(), Categorical(), prior=1.0)
    data = Data.of((torch.randn(5, 2), torch.arange(5) % 3)).prepared(model.prepare)
    target = make_target(model, data)
    outputs, y = torch.randn(5, 3).double(), torch.arange(5) % 3
    for kind, samples, expected in (("ggn", 1, 3), ("fisher", 4, 4), ("empirical", 1, 1)):
        roots = Roots(target, model.network.initial, kind, samples, torch.Generator().manual_seed(0))
        assert roots(outputs, y).shape == (expected, 5, 3)
        assert roots.count(torch.Size([3])) == expected


def test_structures_are_looked_up_by_name() -> None:
    assert all(issubclass(kind, Curvature) and kind.structure == name for name, kind in STRUCTURES.items())
    assert {"full", "lowrank"} <= STRUCTURES.keys()
