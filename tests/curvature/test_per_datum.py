"""Gradients per row against autograd for one output of one row at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from priory.curvature import per_datum
from priory.curvature.per_datum import gradients, parameters
from priory.network.skeleton import Network


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=3, dropout=0.0, batch_first=True)
        self.mix, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.head = kind(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])


class Branch(nn.Module):
    """Branches on a value, which vmap doesn't support."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) if float(row.sum()) > 0 else -2 * self.layer(row) for row in x])


class Two(nn.Module):
    """Two inputs, of which the second is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.layer(torch.tanh(x) * self.embed(index))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def residual() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.norm(self.conv(x)))

    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), Block(), *pool, nn.Linear(2, 2))


NETWORKS = {
    "a sequence": (lambda: nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 2)), (numbers(4, 3),)),
    "convolutions with a relu in place": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)),
        (numbers(4, 1, 3, 3),),
    ),
    "residual blocks with batch norm": (residual, (numbers(4, 1, 3, 3),)),
    "a transformer": (Attention, (numbers(4, 3, 4),)),
    "an embedding with padding": (
        lambda: nn.Sequential(nn.Embedding(4, 2, padding_idx=0), nn.Flatten(), nn.Linear(4, 2)),
        (torch.tensor([[0, 1], [1, 1], [3, 0], [2, 3]]),),
    ),
    "two inputs": (Two, (numbers(4, 3), torch.tensor([3, 0, 1, 3]))),
    "an lstm": (lambda: Recurrent(nn.LSTM), (numbers(4, 3, 2),)),
    "a gru": (lambda: Recurrent(nn.GRU), (numbers(4, 3, 2),)),
    "a branch on a value": (Branch, (numbers(4, 3),)),
}
WITHOUT_VMAP = ("an lstm", "a gru", "a branch on a value")


def by_loop(network: Network, w: Tensor, inputs: tuple[Tensor, ...], cotangents: Tensor) -> dict[str, Tensor]:
    leaf = w.clone().requires_grad_()
    network.set_mode(train=False)
    outputs = network.functional(leaf, inputs, {})
    rows = [
        [torch.autograd.grad(outputs[n], leaf, c[n], retain_graph=True)[0] for c in cotangents]
        for n in range(len(outputs))
    ]
    whole = torch.stack([torch.stack(row) for row in rows])  # (n, C, P)
    stops = torch.tensor([torch.Size(p.shape).numel() for p in network.params.values()]).tolist()
    parts = zip(network.params.items(), whole.split(stops, -1), strict=True)
    return {name: part.unflatten(-1, p.shape) for (name, p), part in parts}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_those_of_autograd_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    network = Network(make().double().eval())
    cotangents = numbers(3, 4, 2)
    looped = []
    plain = per_datum._pulled_one_by_one
    monkeypatch.setattr(per_datum, "_pulled_one_by_one", lambda *a: looped.append(1) or plain(*a))
    found = gradients(network, network.initial, inputs, cotangents, list(network.params), lambda f: f)
    expected = by_loop(network, network.initial, inputs, cotangents)
    assert found.keys() == expected.keys()
    for key, g in found.items():
        torch.testing.assert_close(g, expected[key], rtol=1e-9, atol=1e-11)
        assert not g.requires_grad
    assert bool(looped) == (name in WITHOUT_VMAP)


def test_only_the_named_parameters_are_returned() -> None:
    make, inputs = NETWORKS["a sequence"]
    network = Network(make().double())
    cotangents = numbers(2, 4, 2)
    every = by_loop(network, network.initial, inputs, cotangents)
    found = gradients(network, network.initial, inputs, cotangents, ["2.bias", "0.weight"], lambda f: f)
    assert list(found) == ["2.bias", "0.weight"]
    for key, g in found.items():
        torch.testing.assert_close(g, every[key], rtol=1e-10, atol=1e-12)


def test_cotangents_refer_to_the_arranged_outputs() -> None:
    make, inputs = NETWORKS["a sequence"]
    network = Network(make().double())
    names, cotangents = list(network.params), numbers(2, 4, 2)
    plain = gradients(network, network.initial, inputs, cotangents, names, lambda f: f)
    turned = gradients(
        network, network.initial, inputs, cotangents.flip(-1)[..., None], names, lambda f: f.flip(1)[..., None]
    )
    for key, g in plain.items():
        torch.testing.assert_close(g, turned[key], rtol=1e-12, atol=1e-13)


def test_an_unused_parameter_has_zero_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    network = Network(Unused().double())
    found = gradients(network, network.initial, (numbers(4, 3),), numbers(2, 4, 2), list(network.params), lambda f: f)
    assert found["spare.weight"].shape == (4, 2, 2, 3)
    assert not found["spare.weight"].any()
    assert found["layer.weight"].any()


def test_buffers_are_read_and_not_written() -> None:
    network = Network(nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2, affine=False)).double())
    network.try_once((numbers(4, 3),))
    buffers = {"1.running_var": torch.tensor([4.0, 9.0], dtype=torch.float64)}
    args = (network, network.initial, (numbers(4, 3),), numbers(2, 4, 2), ["0.weight"], lambda f: f)
    plain, moved = gradients(*args)["0.weight"], gradients(*args, buffers)["0.weight"]
    scale = torch.tensor([4.0, 9.0], dtype=torch.float64)
    expected = plain * ((1 + 1e-5) / (scale + 1e-5)).sqrt()[:, None]
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(gradients(*args)["0.weight"], plain)


def test_parameters_are_slices_of_the_vector() -> None:
    network = Network(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double())
    found = parameters(network, torch.arange(20.0))
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "0.weight": (2, 3),
        "0.bias": (2,),
        "1.weight": (1, 2),
        "1.bias": (1,),
    }
    assert torch.cat([t.flatten() for t in found.values()]).tolist() == list(range(11))
