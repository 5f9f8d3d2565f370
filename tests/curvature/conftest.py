"""Small networks with every kind of layer, with data, as test cases for curvatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import priory as pr
from priory.core.data import Data
from priory.curvature import Selection, select
from priory.fitting.prepare import make_target
from priory.likelihoods import Likelihood
from priory.models.target import Target


@dataclass(frozen=True)
class Problem:
    target: Target
    data: Data
    w: Tensor
    selection: Selection
    plain: set[str]  # parameters of layers without a rule

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        assert self.data.tensors is not None
        return self.data.tensors[:-1]

    def jacobian(self, inputs: tuple[Tensor, ...] | None = None) -> Tensor:
        """Return the Jacobian (n, C, p), computed by autograd through a function of w."""
        network, likelihood = self.target.model.network, self.target.model.likelihood
        inputs = self.inputs if inputs is None else inputs
        leaf = self.w.clone().requires_grad_()
        with torch.enable_grad():
            outputs = likelihood.arrange(network.functional(leaf, inputs, {}), self.target.event)
            flat = outputs.reshape(len(outputs), -1)
            rows = [torch.autograd.grad(f, leaf, retain_graph=True)[0] for f in flat.flatten()]
        return torch.stack(rows).reshape(*flat.shape, -1)[..., self.selection.places]


class Mean(nn.Module):
    """The mean over a dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dim)


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x.transpose(0, 1))).mean(0))


class Folded(SequenceFirst):
    """Merges positions into the rows before the layer."""

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.tanh(self.inner(x.reshape(-1, 3)))
        return self.outer(inside.reshape(len(x), -1, 4).mean(1))


class InPlace(SequenceFirst):
    """Writes in place to a view of a layer's output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(functional.relu_(self.inner(x)).mean(1))


class Twice(nn.Module):
    """One layer called twice, and one weight with two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.again(torch.tanh(self.again(x))))
        return torch.tanh(self.left(h)) * self.right(x)


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.out.weight = self.look.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.look(x)).mean(1))


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank layer in parallel (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 3), nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Irregular(nn.Module):
    """A weight that is read outside its layer, a parameter of the module itself, and an in-place operation."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.both, self.plain = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        self.raw, self.unused = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(x, self.read.weight, self.read.bias)
        h = functional.relu_(self.plain(torch.tanh(h + self.raw) * self.both(x)) + 1.0)
        return h + (self.both.weight.sum() * x.sum(1, keepdim=True)) + 0.0 * self.unused


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.norm, self.out = (
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.LayerNorm(4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.attend(x, x, x, need_weights=False)[0]).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Residual(nn.Module):
    """A block with batch normalisation and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.outer, self.out = nn.Conv2d(3, 1, 1), nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.softplus(x + self.outer(self.inner(x))).mean((2, 3)))


def images(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(3, *shape)


def words(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(5, (3, *shape))


def after(*layers: nn.Module, features: int) -> nn.Module:
    """Return layers for images, followed by a linear layer on the pooled channels."""
    return nn.Sequential(*layers, nn.Flatten(2), Mean(-1), nn.Linear(features, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], set[str]]] = {
    "linear": (lambda: nn.Linear(3, 2), images(3), set()),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)),
        images(3),
        set(),
    ),
    "sequence": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Mean(1), nn.Linear(4, 2)), images(4, 3), set()),
    "grid of outputs": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), images(2, 2, 3), set()),
    "sequence first": (SequenceFirst, images(2, 3), set()),
    "folded": (Folded, images(2, 3), set()),
    "in place": (InPlace, images(2, 3), set()),
    "conv1d": (lambda: after(nn.Conv1d(2, 3, 3, stride=2, dilation=2), nn.ReLU(), features=3), images(2, 9), set()),
    "conv2d": (lambda: after(nn.Conv2d(2, 3, (3, 2), padding=(1, 2)), nn.ReLU(), features=3), images(2, 4, 3), set()),
    "conv3d": (lambda: after(nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), nn.Tanh(), features=2), images(1, 3, 4, 2), set()),
    "groups": (lambda: after(nn.Conv2d(4, 6, 2, groups=2), nn.ReLU(), features=6), images(4, 3, 3), set()),
    "circular": (
        lambda: after(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), nn.Tanh(), features=2),
        images(2, 4),
        set(),
    ),
    "same": (lambda: after(nn.Conv1d(2, 2, 4, padding="same", dilation=2), nn.Tanh(), features=2), images(2, 5), set()),
    "transposed": (
        lambda: after(nn.ConvTranspose1d(2, 2, 3), nn.Tanh(), features=2),
        images(2, 4),
        {"0.weight", "0.bias"},
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Tanh(), Mean(1), nn.Linear(3, 2)),
        words(4),
        set(),
    ),
    "tied": (Tied, words(3), {"look.weight"}),
    "twice": (Twice, images(3), set()),
    "adapted": (Adapted, images(4), set()),
    "odd": (Irregular, images(3), {"read.weight", "read.bias", "both.weight", "both.bias", "raw", "unused"}),
    "norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        images(3),
        {"1.weight", "1.bias"},
    ),
    "residual": (Residual, images(1, 3, 3), {"inner.1.weight", "inner.1.bias"}),
    "attention": (
        Attention,
        images(3, 4),
        {
            "attend.in_proj_weight",
            "attend.in_proj_bias",
            "attend.out_proj.weight",
            "attend.out_proj.bias",
            "norm.weight",
            "norm.bias",
        },
    ),
    "recurrent": (
        Recurrent,
        images(3, 2),
        {f"lstm.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh")},
    ),
}


def make(net: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, over: object = "all") -> Problem:
    model = pr.Model(net, likelihood, prior=1.0)
    data = Data.of((x, y)).prepared(model.prepare)
    target = make_target(model, data)
    w = model.start(y, torch.Size(), torch.Generator().manual_seed(0))
    return Problem(target, data, w, select(model, over, data.tensors[:-1] if data.tensors else None), set())


@pytest.fixture(params=list(NETWORKS))
def problem(request: pytest.FixtureRequest) -> Problem:
    """A float64 network of each kind with random weights, three rows of data and Gaussian noise."""
    net, inputs, plain = NETWORKS[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        built, x = net().double().eval(), inputs()
        for buffer in built.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2.0)
        x = x.double() if x.is_floating_point() else x
        with torch.no_grad():
            y = torch.randn_like(built(x))
    made = make(built, pr.Gaussian(noise=0.5), x, y)
    return Problem(made.target, made.data, made.w, made.selection, plain)


@pytest.fixture
def make_problem() -> Callable[..., Problem]:
    return make
