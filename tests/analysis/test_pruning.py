"""Pruning: the smaller network computes the same, and weights go in the order that a Gaussian posterior gives them."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory import penalties
from priory.analysis.pruning import DEFAULT_SHARES, prune_neurons, prune_weights, weight_order
from priory.core.errors import InputError
from priory.families import DiagonalFamily
from priory.models.target import Target
from priory.posteriors import DiagonalGaussian


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(net: nn.Sequential, seed: int = 0) -> nn.Sequential:
    """The network in float64 with numbers of its own, normalisations in use."""
    net = net.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(generator=generator)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 2.0, generator=generator)
    return net.eval()


def silence(layer: Any, rows: tuple[int, ...] = (), columns: tuple[int, ...] = ()) -> None:
    with torch.no_grad():
        layer.weight[list(rows)] = 0
        layer.weight[:, list(columns)] = 0


def close(net: nn.Module, small: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(small(x), net(x), rtol=1e-12, atol=1e-12)


# Neurons.


def test_a_neuron_without_incoming_weights_is_folded_into_the_next_bias():
    net = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    silence(net[0], rows=(1, 3))
    found = prune_neurons(net)
    close(net, found.network, normal(20, 4))
    assert found.sizes == {"0": (5, 3), "2": (3, 3)}
    assert found.kept["0"].tolist() == [0, 2, 4]
    assert found.network[0].out_features == found.network[2].in_features == 3
    moved = net[2].bias + net[2].weight[:, [1, 3]] @ net[0].bias[[1, 3]].tanh()
    torch.testing.assert_close(found.network[2].bias, moved, rtol=1e-12, atol=1e-12)


def test_a_neuron_that_nothing_sees_is_removed_whatever_comes_in():
    net = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    silence(net[2], columns=(0,))
    found = prune_neurons(net)
    close(net, found.network, normal(20, 4))
    assert found.removed == 1
    torch.testing.assert_close(found.network[2].bias, net[2].bias)


def test_neurons_that_only_a_removed_neuron_reads_are_removed_too():
    net = filled(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    silence(net[4], columns=(1, 2))  # the second layer keeps its first neuron only,
    with torch.no_grad():
        net[2].weight[0, 2] = 0  # which does not look at neuron 2 of the first
    found = prune_neurons(net)
    close(net, found.network, normal(20, 3))
    assert found.sizes == {"0": (4, 3), "2": (3, 1), "4": (2, 2)}


def test_channels_are_pruned_through_normalisation_pooling_and_flattening():
    net = filled(
        nn.Sequential(
            *[nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ELU(), nn.Dropout2d(), nn.MaxPool2d(2)],
            *[nn.Conv2d(6, 5, 2), nn.BatchNorm2d(5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()],
            *[nn.Linear(5 * 4, 4), nn.Sigmoid(), nn.Linear(4, 2)],
        )
    )
    silence(net[0], rows=(0, 4))
    silence(net[5], rows=(2,))
    silence(net[10], columns=(4, 5, 6, 7), rows=(3,))  # all four places of channel 1
    found = prune_neurons(net)
    close(net, found.network, normal(7, 2, 12, 12))
    assert found.sizes == {"0": (6, 4), "5": (5, 3), "10": (4, 3), "12": (2, 2)}
    assert found.weights[1] < found.weights[0]
    assert found.stuck == 0


def test_zeros_around_the_image_keep_a_constant_that_is_not_zero_and_only_that():
    net = filled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)))
    silence(net[0], rows=(0, 1))
    with torch.no_grad():
        net[0].bias[0], net[0].bias[1] = 0.7, -0.7  # phi is 0.7 and 0
    found = prune_neurons(net)
    close(net, found.network, normal(5, 1, 8, 8))
    assert found.kept["0"].tolist() == [0, 2, 3]
    assert found.stuck == 1
    assert "1 constant channels stay" in str(found)


@pytest.mark.parametrize("flat", [False, True])
def test_zeros_that_an_average_takes_in_keep_a_constant_that_is_not_zero_and_only_that(flat: bool):
    last = [nn.Flatten(), nn.Linear(4 * 9, 3)] if flat else [nn.Conv2d(4, 3, 2)]
    net = filled(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2, stride=2, padding=1), *last))
    silence(net[0], rows=(0, 1))
    with torch.no_grad():
        net[0].bias[0], net[0].bias[1] = 0.7, -0.7  # phi is 0.7 and 0, and an average at the border 0.35
    found = prune_neurons(net)
    close(net, found.network, normal(5, 1, 6, 6))
    assert found.kept["0"].tolist() == [0, 2, 3]
    assert found.stuck == 1


def test_nested_sequences_and_layers_without_bias_are_pruned():
    inner = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Softplus())
    net = filled(nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), inner, nn.Linear(4, 2, bias=False)))
    silence(net[0][0], rows=(0,))
    silence(net[1][0], rows=(1,))
    found = prune_neurons(net)
    close(net, found.network, normal(9, 3))
    assert found.sizes == {"0.0": (5, 4), "1.0": (4, 3), "2": (2, 2)}


def test_a_layer_whose_neurons_are_all_zero_keeps_one_and_the_network_its_constant():
    net = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    silence(net[0], rows=(0, 1, 2, 3))
    found = prune_neurons(net)
    close(net, found.network, normal(9, 3))
    assert found.sizes["0"] == (4, 1)


def test_the_given_network_is_unchanged_and_unused_inputs_are_named():
    net = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))).train()
    silence(net[0], rows=(1,), columns=(2,))
    before = copy.deepcopy(net.state_dict())
    found = prune_neurons(net)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert found.unused_inputs.tolist() == [2]
    assert found.network.training


def problem(count: int = 300) -> tuple[Tensor, Tensor]:
    x = normal(count, 6, seed=3).float()
    return x, (x[:, 0] > x[:, 1]).long()


def test_a_group_lasso_prunes_neurons_without_a_change_of_accuracy():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 2))
    prior = {"*weight": penalties.GroupLasso("glorot"), "*": "glorot"}
    model = pr.Model(net, pr.Categorical(), prior=prior)
    posterior = pr.fit(model, problem(), pr.MAP(learning_rate=0.03), steps=300, batch_size=300, progress=False)
    found = prune_neurons(posterior, test=problem(100))
    assert found.removed >= 5
    assert found.after["accuracy"] == found.before["accuracy"]
    assert found.after["nll"][0] == pytest.approx(found.before["nll"][0], rel=1e-5)
    alone = posterior.predict(problem(100)[0])
    assert found.before["nll"][0] == pytest.approx(pr.evaluate.nll(alone, problem(100)[1]), rel=1e-5)
    assert "before" in str(found)


def test_a_learnt_noise_and_targets_as_numbers_are_scored_too():
    torch.manual_seed(0)
    x, y = problem(60)
    model = pr.Model(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), pr.Gaussian())
    posterior = pr.fit(model, (x, y.float()), pr.MAP(), steps=30, progress=False)
    found = prune_neurons(posterior, test=(x, y.float()))
    assert set(found.before) == {"nll", "rmse"}
    assert found.before["nll"][0] == pytest.approx(pr.evaluate.nll(posterior.predict(x), y.float()), rel=1e-5)


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (nn.Linear(2, 2), "The 'trained' argument of prune_neurons must be or have an nn.Sequential, got Linear."),
        (nn.Sequential(nn.Conv2d(2, 2, 1, groups=2)), "must have no grouped convolutions, got one at 0."),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "got LayerNorm at 1."),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(2)), "must flatten all but the rows"),
        (nn.Sequential(nn.ReLU()), "must have a layer with weights"),
        (nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(2), nn.Linear(2, 1)), "must pool channels only, not neurons"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3), nn.Linear(4, 1)), "must normalise each neuron"),
        (nn.Sequential(nn.Conv1d(1, 2, 1), nn.Linear(4, 1)), "after Flatten for those of a convolution,"),
        (nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Linear(6, 1)), "got 6 inputs of 2 after the 2 of 0."),
    ],
)
def test_a_network_that_is_not_a_chain_is_refused(net: nn.Module, sentence: str):
    with pytest.raises(InputError, match="prune_neurons") as error:
        prune_neurons(net)  # pyright: ignore[reportArgumentType]
    assert sentence in str(error.value)


def test_test_rows_need_a_posterior_and_a_pair():
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InputError, match="must be a posterior where there are test rows"):
        prune_neurons(net, test=problem())
    with pytest.raises(InputError, match=r"The 'test' argument of prune_neurons must be a pair \(X, y\), got 3."):
        prune_neurons(net, test=3)


# Weights.


def gaussian(mean: Tensor, scale: Tensor) -> DiagonalGaussian:
    """Return a posterior of three weights and a bias with given moments."""
    model = pr.Model(nn.Linear(3, 1).double(), pr.Gaussian(0.5))
    return DiagonalGaussian(Target(model, 10), DiagonalFamily(mean, scale.log()))


def test_signal_to_noise_and_density_at_zero_order_the_weights_by_their_formulas():
    mean = torch.tensor([0.3, -2.0, 0.2, 9.0], dtype=torch.float64)
    scale = torch.tensor([0.5, 1.0, 0.05, 1.0], dtype=torch.float64)
    posterior = gaussian(mean, scale)
    assert weight_order(posterior, "signal_to_noise").tolist() == [2, 1, 0]  # 4, 2, 0.6; the bias is none of them
    at_zero = torch.distributions.Normal(mean, scale).log_prob(torch.zeros(4, dtype=torch.float64))[:3]
    assert weight_order(posterior, "density_at_zero").tolist() == at_zero.argsort().tolist() == [2, 1, 0]
    narrow = gaussian(torch.zeros(4).double(), torch.tensor([0.1, 1.0, 0.5, 1.0]).double())
    assert weight_order(narrow, "density_at_zero").tolist() == [1, 2, 0]


def test_the_curve_has_the_exact_scores_of_masked_draws():
    mean = torch.tensor([1.5, -0.5, 0.01, 0.2], dtype=torch.float64)
    posterior = gaussian(mean, torch.full((4,), 1e-9, dtype=torch.float64))  # all but a point
    x = normal(40, 3)
    y = x @ mean[:3] + 0.2 + 0.1 * normal(40, seed=1)
    curve = prune_weights(posterior, (x, y), shares=(0.0, 1 / 3, 2 / 3, 1.0), samples=2)
    assert curve.shares == (1.0, 2 / 3, 1 / 3, 0.0)
    kept = [mean[:3] * torch.tensor(m).double() for m in ([1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0])]
    expected = [float((y - x @ w - 0.2).square().mean().sqrt()) for w in kept]
    assert curve.scores["rmse"] == pytest.approx(expected, abs=1e-7)
    losses = [0.5 * e**2 / 0.5**2 + math.log(0.5) + 0.5 * math.log(2 * math.pi) for e in expected]
    assert curve.scores["nll"] == pytest.approx(losses, abs=1e-7)
    assert curve.mask(2 / 3)["weight"].tolist() == [[1, 1, 0]]
    assert curve.mask(0.0)["bias"].tolist() == [1]
    network = curve.network(1 / 3)
    assert isinstance(network, nn.Linear)
    assert network.weight.tolist() == [[1.5, 0, 0]]
    assert curve.smallest == pytest.approx(2 / 3)  # the third weight says nothing


@pytest.mark.parametrize("method", [pr.MeanField(), pr.Laplace("diag"), pr.FullRank(), pr.LowRank(2), pr.SWAG()])
def test_every_gaussian_posterior_is_pruned(method: Any):
    torch.manual_seed(0)
    model = pr.Model(nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)), pr.Categorical())
    posterior = pr.fit(model, problem(60), method, steps=30, progress=False)
    curve = prune_weights(posterior, problem(40), shares=(1.0, 0.5), samples=8)
    assert set(curve.scores) == {"nll", "accuracy", "ece"}
    assert sorted(curve.order.tolist()) == [*range(18), *range(21, 27)]


def test_the_curve_prints_and_draws_its_shares(tmp_path: Path):
    curve = prune_weights(gaussian(normal(4), normal(4, seed=1).exp()), (normal(9, 3), normal(9)), samples=4)
    text = str(curve)
    assert all(f"{100 * share:g} " in text for share in DEFAULT_SHARES)
    figure = curve.plot(tmp_path / "curve.png")
    assert [ax.get_ylabel() for ax in figure.axes] == ["NLL", "RMSE"]
    assert (tmp_path / "curve.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"by": "size"},
            "The 'by' argument of prune_weights must be 'signal_to_noise' or 'density_at_zero', got size.",
        ),
        ({"shares": (1.5,)}, r"The 'shares' argument of prune_weights must lie between 0 and 1, got \[1.5\]."),
        ({"shares": ()}, "The 'shares' argument of prune_weights must be shares"),
        ({"samples": 0}, "The 'samples' argument of prune_weights must be an integer >= 1, got 0."),
        ({"test": 1}, r"The 'test' argument of prune_weights must be a pair \(X, y\), got 1."),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], sentence: str):
    arguments = {"posterior": gaussian(normal(4), normal(4).exp()), "test": (normal(9, 3), normal(9))} | options
    with pytest.raises(InputError, match=sentence):
        prune_weights(**arguments)


def test_a_posterior_that_is_not_gaussian_is_refused():
    model = pr.Model(nn.Linear(3, 1).double(), pr.Gaussian(0.5))
    point = pr.fit(model, (normal(9, 3), normal(9)), pr.MAP(), steps=2, progress=False)
    with pytest.raises(InputError, match=r"must be Gaussian, as those of MeanField, Laplace and SWAG are, got Point"):
        prune_weights(point, (normal(9, 3), normal(9)))
