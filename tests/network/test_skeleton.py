"""Any module can be fitted or is refused with one clear error, and the user's module never changes."""

import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils import parametrizations

import priory as pr
from priory.core.data import Data
from priory.core.errors import DivergedError, InputError, StoreError
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.models.target import Target
from priory.network.faster_layers import pool_by_maxima
from priory.network.skeleton import MAX_BATCHED_WORK, Network

ROWS = 12
METHODS = [pr.MAP(), pr.MeanField(), pr.MeanField(samples=3)]
F64 = torch.float64


# Networks. `NETWORKS` names the inputs that each of them takes; each returns one output per row.


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(a) + self.right(b)))


class Tokens(nn.Module):
    """An embedding, a layer that reads the sequence, and a linear head on the mean over positions."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 4), body, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.embed(x))
        return self.head((h[0] if isinstance(h, tuple) else h).mean(1))


class SelfAttention(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=p, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class TiedAutoencoder(nn.Module):
    """An autoencoder whose decoder shares the weight of its encoder; the output is the sum of the reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x))).sum(-1, keepdim=True)


class BareParameters(nn.Module):
    """Parameters that are registered on the module itself instead of on a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 1))
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(()))])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.shifts[0] + self.shifts[1]


class ParametersInList(nn.Module):
    """Reads its registered parameters through a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.weights = [self.first.weight, self.first.bias, self.second.weight, self.second.bias]

    def forward(self, x: Tensor) -> Tensor:
        w, b, v, c = self.weights
        return linear(torch.tanh(linear(x, w, b)), v, c)


class Unregistered(nn.Module):
    """A layer, and a parameter in a plain list, which `parameters()` doesn't return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(3, 1), [nn.Parameter(torch.ones(1))]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.hidden[0]


class ReplacedBuffer(nn.Module):
    """Keeps a running mean in a buffer that each pass rebinds to a new tensor instead of updating it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("centre", torch.zeros(3))
        self.centre: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return self.layer(x - self.centre)


class InfiniteBuffer(nn.Module):
    """BatchNorm, and a constant buffer with an infinite entry, as in an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.layer(x * torch.softmax(x + self.mask, -1))


def frozen_weight() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    net[0].weight.requires_grad_(False)
    return net


def dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Linear(4, 1))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 1))


def image_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))


def encoder() -> nn.Module:
    return Tokens(nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, batch_first=True))


def make_inputs(kind: str, count: int = ROWS, seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    if kind == "two":
        return torch.randn(count, 3, generator=g), torch.randn(count, 2, generator=g)
    if kind == "images":
        return (torch.randn(count, 1, 6, 6, generator=g),)
    if kind == "tokens":
        return (torch.randint(7, (count, 5), generator=g),)
    return (torch.randn(count, 3, generator=g),)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dense": (dense, "rows"),
    "batch norm": (lambda: dense(nn.BatchNorm1d(4)), "rows"),
    "batch norm in eval mode": (lambda: dense(nn.BatchNorm1d(4)).eval(), "rows"),
    "batch norm over images": (image_norm, "images"),
    "batch norm over images in eval mode": (lambda: image_norm().eval(), "images"),
    "batch norm without statistics": (lambda: dense(nn.BatchNorm1d(4, track_running_stats=False)), "rows"),
    "batch norm beside an infinite buffer": (InfiniteBuffer, "rows"),
    "layer norm": (lambda: dense(nn.LayerNorm(4)), "rows"),
    "group norm": (lambda: dense(nn.GroupNorm(2, 4)), "rows"),
    "convolution": (convolution, "images"),
    "embedding": (lambda: Tokens(nn.Identity()), "tokens"),
    "attention": (lambda: Tokens(SelfAttention()), "tokens"),
    "transformer encoder": (encoder, "tokens"),
    "transformer encoder in eval mode": (lambda: encoder().eval(), "tokens"),
    "lstm": (lambda: Tokens(nn.LSTM(4, 4, batch_first=True)), "tokens"),
    "gru": (lambda: Tokens(nn.GRU(4, 4, batch_first=True)), "tokens"),
    "tied": (TiedAutoencoder, "rows"),
    "frozen weight": (frozen_weight, "rows"),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 1))), "rows"),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 1))), "rows"),
    "raw parameters": (BareParameters, "rows"),
    "unregistered parameters": (Unregistered, "rows"),
    "a replaced buffer": (ReplacedBuffer, "rows"),
    "two inputs": (TwoInputs, "two"),
}
DROPOUT_NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a dropout layer": (lambda: dense(nn.Dropout(0.5)), "rows"),
    "a dropout function": (lambda: FunctionalDropout(), "rows"),
    "dropout in an lstm": (lambda: Tokens(nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)), "tokens"),
    "dropout in attention": (lambda: Tokens(SelfAttention(0.5)), "tokens"),
    "dropout in an encoder": (lambda: Tokens(nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True)), "tokens"),
}


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(dropout(x, 0.5, self.training))


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    make, kind = (NETWORKS | DROPOUT_NETWORKS)[name]
    torch.manual_seed(0)
    return make(), make_inputs(kind), torch.randn(ROWS, generator=torch.Generator().manual_seed(9))


# Snapshots of a module, to check that it doesn't change.


def observable_state(net: nn.Module) -> dict[str, Any]:
    """Return all that the user can observe of a module: tensors and addresses, gradients, modes, hooks, attributes."""
    snapshot: dict[str, Any] = {"rng": torch.get_rng_state().clone()}
    for name, t in (*net.named_parameters(), *net.named_buffers()):
        grad = None if t.grad is None else (t.grad.data_ptr(), t.grad.clone())
        snapshot[name] = (id(t), t.data_ptr(), t.detach().clone(), t.requires_grad, grad)
    for name, module in net.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        snapshot[f"module {name}"] = (id(module), type(module), module.training, hooks, sorted(vars(module)))
    return snapshot


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def add_gradients_and_hooks(net: nn.Module) -> nn.Module:
    """Give a module gradients and a hook, as the user's module may have."""
    net.register_forward_hook(lambda module, args, output: None)
    for p in net.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 0.25)
    return net


def fitted(net: nn.Module, inputs: tuple[Tensor, ...], y: Tensor, method: Any = None, **options: Any) -> Any:
    model = pr.Model(net, options.pop("likelihood", None) or pr.Gaussian(0.5), options.pop("prior", "glorot"))
    return pr.fit(model, (*inputs, y), method or pr.MAP(), progress=False, **({"steps": 3} | options))


# All kinds of networks.


@pytest.mark.parametrize("method", METHODS, ids=["MAP", "MeanField", "three samples"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_fits_and_predicts_and_the_users_module_is_unchanged(name: str, method: Any) -> None:
    net, inputs, y = build(name)
    before = observable_state(add_gradients_and_hooks(net))
    posterior = fitted(net, inputs, y, method, batch_size=5)
    prediction = posterior.predict(inputs, samples=4)
    assert prediction.mean.shape == (ROWS,)
    assert bool(torch.isfinite(prediction.mean).all())
    assert set(posterior.mean) == {n for n, p in net.named_parameters() if p.requires_grad}
    assert any(not torch.equal(posterior.mean[n], dict(net.named_parameters())[n]) for n in posterior.mean)
    assert equal(observable_state(net), before)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_loaded_posterior_gives_the_same_predictions_for_every_network(name: str, tmp_path: Path) -> None:
    net, inputs, y = build(name)
    posterior = fitted(net, inputs, y, pr.MeanField(), batch_size=5)
    posterior.save(tmp_path / "fit.priory")
    other = copy.deepcopy(net)
    before = observable_state(other)
    again = pr.load(tmp_path / "fit.priory", pr.Model(other, pr.Gaussian(0.5)))
    assert torch.equal(again.predict(inputs, samples=4).mean, posterior.predict(inputs, samples=4).mean)
    assert set(again.buffers) == set(posterior.buffers)
    assert all(torch.equal(again.buffers[n], posterior.buffers[n]) for n in again.buffers)
    assert equal(observable_state(other), before)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_seed_gives_the_same_bits_twice_from_one_model(name: str) -> None:
    net, inputs, y = build(name)
    model = pr.Model(net, pr.Gaussian(0.5))
    first, second = (
        pr.fit(model, (*inputs, y), pr.MeanField(), steps=4, batch_size=5, progress=False) for _ in range(2)
    )
    assert all(torch.equal(first.mean[n], second.mean[n]) for n in first.mean)
    assert torch.equal(first.predict(inputs, samples=3).mean, second.predict(inputs, samples=3).mean)


def test_a_second_fit_does_not_change_the_predictions_of_the_first() -> None:
    for name in ("batch norm", "spectral norm", "a replaced buffer", "frozen weight"):
        net, inputs, y = build(name)
        model = pr.Model(net, pr.Gaussian(0.5))
        first = pr.fit(model, (*inputs, y), pr.MAP(), steps=3, progress=False)
        first_predictions = first.predict(inputs).mean
        pr.fit(model, (*(3 * x + 1 for x in inputs), y), pr.MAP(), steps=5, progress=False)
        assert torch.equal(first.predict(inputs).mean, first_predictions), name


def test_a_shared_parameter_is_counted_once() -> None:
    net, inputs, y = build("tied")
    posterior = fitted(net, inputs, y, pr.MeanField())
    assert list(posterior.mean) == ["encode.weight", "encode.bias", "decode.bias"]
    assert posterior.model.layout.size == 9 + 3 + 3


def test_a_frozen_parameter_is_used_but_not_learnt() -> None:
    net, (x,), y = build("frozen weight")
    posterior = fitted(net, (x,), y, steps=20)
    assert "0.weight" not in posterior.mean
    m = posterior.mean
    manual = linear(torch.tanh(linear(x, net[0].weight, m["0.bias"])), m["2.weight"], m["2.bias"])
    torch.testing.assert_close(posterior.predict(x).mean, manual[:, 0].detach())


def test_loading_into_a_model_with_other_frozen_weights_raises_or_restores_them(tmp_path: Path) -> None:
    net, (x,), y = build("frozen weight")
    posterior = fitted(net, (x,), y)
    posterior.save(tmp_path / "fit.priory")
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].weight += 1
    try:
        again = pr.load(tmp_path / "fit.priory", pr.Model(other, pr.Gaussian(0.5)))
    except StoreError:
        return
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


def test_loading_into_a_model_with_other_statistics_raises_or_restores_them(tmp_path: Path) -> None:
    net, (x,), y = build("batch norm in eval mode")
    posterior = fitted(net, (x,), y)
    posterior.save(tmp_path / "fit.priory")
    other = copy.deepcopy(net)
    other[1].running_mean += 1
    try:
        again = pr.load(tmp_path / "fit.priory", pr.Model(other, pr.Gaussian(0.5)))
    except StoreError:
        return
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


# BatchNorm: its running statistics are updated during the fit.


def train_with_torch_adam(
    net: nn.Module, x: Tensor, y: Tensor, batches: list[Tensor], rate: float, noise: float
) -> nn.Module:
    """Train the log joint with `torch.optim.Adam`: N/n times the Gaussian term, and a N(0, 2^2) prior."""
    net = copy.deepcopy(net)
    adam = torch.optim.Adam(net.parameters(), lr=rate)
    for rows in batches:
        adam.zero_grad()
        output = net(x[rows])[:, 0]
        nll = -torch.distributions.Normal(output, noise).log_prob(y[rows]).sum() * (len(x) / len(rows))
        penalty = sum(p.square().sum() / (2 * 2.0**2) for p in net.parameters())
        (nll + penalty).backward()
        adam.step()
    return net


@pytest.mark.parametrize("steps", [1, 6])
def test_map_of_a_batch_norm_network_matches_training_with_torch_adam(steps: int) -> None:
    torch.manual_seed(0)
    net = dense(nn.BatchNorm1d(4)).double()
    x, y = torch.randn(ROWS, 3, dtype=F64) + 1, torch.randn(ROWS, dtype=F64)
    data = Data.of((x, y), batch_size=5)
    index = Data.of((torch.arange(ROWS), y), batch_size=5)
    order = [rows for epoch in range(2) for rows, _ in index.batches(0, epoch)][:steps]
    method = pr.MAP(learning_rate=0.03, schedule="constant")
    posterior = pr.fit(pr.Model(net, pr.Gaussian(0.5), 2.0), (x, y), method, steps=steps, batch_size=5, progress=False)
    assert data.num_data == ROWS
    reference = train_with_torch_adam(net, x, y, order, 0.03, 0.5)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(posterior.mean[name], p.detach(), rtol=0, atol=1e-10)
    assert set(posterior.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for name, b in reference.named_buffers():
        torch.testing.assert_close(posterior.buffers[name], b, rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.predict(x).mean, reference.eval()(x)[:, 0].detach(), rtol=0, atol=1e-10)


def test_in_eval_mode_the_given_statistics_are_used_and_not_updated() -> None:
    torch.manual_seed(0)
    net = dense(nn.BatchNorm1d(4)).double()
    x, y = torch.randn(ROWS, 3, dtype=F64), torch.randn(ROWS, dtype=F64)
    net(5 + x)
    net.eval()
    method = pr.MAP(learning_rate=0.03, schedule="constant")
    posterior = pr.fit(pr.Model(net, pr.Gaussian(0.5), 2.0), (x, y), method, steps=4, progress=False)
    reference = train_with_torch_adam(net, x, y, [torch.arange(ROWS)] * 4, 0.03, 0.5)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(posterior.mean[name], p.detach(), rtol=0, atol=1e-10)
    for name, b in posterior.buffers.items():
        assert torch.equal(b, dict(net.named_buffers())[name])
    torch.testing.assert_close(posterior.predict(x).mean, reference(x)[:, 0].detach(), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore::priory.core.errors.PrioryWarning")
def test_batch_norm_statistics_follow_the_data_and_are_used_in_predictions() -> None:
    net, (x,), y = build("batch norm")
    posterior = fitted(net, (100 + x,), y, pr.MeanField(), steps=60)
    assert int(posterior.buffers["1.num_batches_tracked"]) == 60
    assert not torch.allclose(posterior.buffers["1.running_mean"], net[1].running_mean, atol=1.0)
    whole, rows = posterior.predict(100 + x, seed=1), [posterior.predict(100 + x[i : i + 1], seed=1) for i in range(3)]
    torch.testing.assert_close(torch.cat([p.mean for p in rows]), whole.mean[:3])  # not the batch's statistics


@pytest.mark.parametrize("name", ["batch norm", "batch norm over images", "spectral norm", "convolution", "lstm"])
def test_every_network_fits_with_learnt_noise(name: str) -> None:
    net, inputs, y = build(name)
    before = observable_state(net)
    posterior = fitted(net, inputs, y, likelihood=pr.Gaussian(), steps=30, batch_size=5)
    assert 0.01 < float(posterior.mean["likelihood.noise"]) < 10
    assert bool(torch.isfinite(posterior.predict(inputs).log_prob(y)).all())
    assert equal(observable_state(net), before)


@pytest.mark.filterwarnings("ignore:The inputs, column 0, have mean")
def test_a_replaced_buffer_ends_at_the_same_value_as_in_plain_training() -> None:
    net, (x,), y = build("a replaced buffer")
    posterior = fitted(net, (x + 5,), y, steps=4)
    reference = copy.deepcopy(net)
    for _ in range(4):
        reference(x + 5)
    torch.testing.assert_close(posterior.buffers["centre"], reference.centre)


def test_a_last_batch_of_one_row_raises_an_error_about_batch_norm() -> None:
    net, (x,), y = build("batch norm")
    before = observable_state(net)
    with pytest.raises((InputError, ValueError), match="more than 1 value per channel"):
        fitted(net, (x[:11],), y[:11], steps=3, batch_size=5)
    assert equal(observable_state(net), before)


# Dropout.


@pytest.mark.parametrize("name", DROPOUT_NETWORKS)
def test_dropout_is_refused_in_training_mode_and_accepted_in_eval_mode(name: str) -> None:
    net, inputs, y = build(name)
    before = observable_state(net)
    with pytest.raises(InputError, match=r"must not draw random numbers.*dropout in training mode.*net\.eval\(\)"):
        fitted(net, inputs, y)
    assert equal(observable_state(net), before)
    posterior = fitted(net.eval(), inputs, y, pr.MeanField())
    assert torch.equal(posterior.predict(inputs).mean, posterior.predict(inputs).mean)


def test_a_dropout_rate_of_zero_is_accepted() -> None:
    net, (x,), y = build("a dropout layer")
    net[1].p = 0.0
    assert bool(torch.isfinite(fitted(net, (x,), y).predict(x).mean).all())


# Exceptions during a fit or a prediction.


class Failing(nn.Module):
    """Raises at its n-th pass in training mode; counts the passes in an attribute, as a user's module might."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.norm, self.layer, self.at, self.error = nn.BatchNorm1d(3), nn.Linear(3, 1), at, error
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            if self.count == self.at:
                raise self.error
        return self.layer(self.norm(x))


@pytest.mark.parametrize("error", [RuntimeError("no"), ValueError("no"), KeyboardInterrupt("no"), MemoryError("no")])
@pytest.mark.parametrize("method", METHODS[:2], ids=["MAP", "MeanField"])
def test_a_network_that_raises_during_a_fit_is_unchanged(method: Any, error: BaseException) -> None:
    _, (x,), y = build("dense")
    net = add_gradients_and_hooks(Failing(at=6, error=error))  # the trial pass is the first
    before = observable_state(net)
    with pytest.raises(type(error), match="no"):
        fitted(net, (x,), y, method, steps=10)
    assert equal(observable_state(net), before)
    assert net.count == 0


def test_a_network_that_raises_on_the_first_pass_is_refused_with_an_input_error() -> None:
    _, (x,), y = build("dense")
    net = add_gradients_and_hooks(Failing(at=1, error=ZeroDivisionError("by hand")))
    before = observable_state(net)
    with pytest.raises(InputError, match=r"network must take the inputs.*\(12, 3\).*by hand"):
        fitted(net, (x,), y)
    assert equal(observable_state(net), before)


@pytest.mark.parametrize("name", ["batch norm", "lstm", "spectral norm"])
def test_an_interrupt_in_a_callback_leaves_the_module_unchanged(name: str) -> None:
    net, inputs, y = build(name)
    before = observable_state(add_gradients_and_hooks(net))

    def interrupt(progress: Any) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(net, inputs, y, pr.MeanField(), steps=10, callbacks=[interrupt])
    assert equal(observable_state(net), before)


def test_a_fit_that_diverges_leaves_the_module_unchanged() -> None:
    net, inputs, y = build("batch norm")
    before = observable_state(add_gradients_and_hooks(net))
    with pytest.raises(DivergedError):
        fitted(net, inputs, y, pr.MAP(learning_rate=1e30, schedule="constant"), steps=20)
    assert equal(observable_state(net), before)


def test_a_prediction_that_raises_leaves_the_module_unchanged() -> None:
    net, inputs, y = build("batch norm")
    posterior = fitted(net, inputs, y)
    before = observable_state(add_gradients_and_hooks(net))
    with pytest.raises(InputError, match="must take the inputs"):
        posterior.predict(torch.zeros(2, 5))
    assert equal(observable_state(net), before)


def test_later_changes_of_the_module_do_not_affect_the_model() -> None:
    net, (x,), y = build("batch norm")
    unchanged_net = copy.deepcopy(net)
    model = pr.Model(net, pr.Gaussian(0.5))
    with torch.no_grad():
        for t in (*net.parameters(), *net.buffers()):
            t.zero_()
    net.eval()
    a, b = (
        pr.fit(m, (x, y), pr.MAP(), steps=3, progress=False) for m in (model, pr.Model(unchanged_net, pr.Gaussian(0.5)))
    )
    assert torch.equal(a.predict(x).mean, b.predict(x).mean)


def test_fits_inside_no_grad_give_the_same_result() -> None:
    for name in ("dense", "convolution", "batch norm"):
        net, inputs, y = build(name)
        outside = fitted(net, inputs, y, pr.MeanField(samples=2))
        with torch.no_grad():
            inside = fitted(net, inputs, y, pr.MeanField(samples=2))
        assert all(torch.equal(inside.mean[n], outside.mean[n]) for n in inside.mean)


# Networks that are refused.


class HoldsLock(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.lock = threading.Lock()


class NotCopied(nn.Linear):
    """Returns itself instead of a copy."""

    def __deepcopy__(self, memo: Any) -> "NotCopied":
        return self


class ReturnsTuple(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class ReturnsNaN(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.nan


class ReturnsScalar(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).sum()


class ReturnsDetached(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).detach()


def mixed_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1).double())


def untrainable() -> nn.Module:
    return nn.Linear(3, 1).requires_grad_(False)


def holds_graph() -> nn.Module:
    net = nn.Linear(3, 1)
    net.last = net(torch.zeros(1, 3))  # a tensor with a graph, which deepcopy refuses
    return net


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(3, 1))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not a module": (lambda: "net", r"The 'net' argument of Model must be a torch.nn.Module, got str"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(1)),
        r"'net' argument of Model must have its shapes.*one batch "
        r"through",
    ),
    "lazy batch norm": (lambda: nn.Sequential(nn.Linear(3, 1), nn.LazyBatchNorm1d()), r"must have its shapes"),
    "no deepcopy": (HoldsLock, r"'net' argument of Model must allow copy.deepcopy, got TypeError \(.*lock"),
    "a tensor with a graph": (holds_graph, r"'net' argument of Model must allow copy.deepcopy, got RuntimeError"),
    "a copy that is the original": (lambda: NotCopied(3, 1), r"'net' argument of Model must .*copy"),
    "scripted": (scripted, r"'net' argument of Model must "),
    "mixed dtypes": (mixed_dtypes, r"one dtype on one device, got .*float(32|64).*float(32|64)"),
    "nothing to train": (
        untrainable,
        r"'net' argument of Model must have a parameter that requires a gradient, "
        r"got none",
    ),
    "no parameter": (nn.ReLU, r"'net' argument of Model must have a parameter that requires a gradient"),
    "half": (lambda: nn.Linear(3, 1).half(), r"be in float32 or float64, got torch.float16"),
    "bfloat": (lambda: nn.Linear(3, 1).bfloat16(), r"be in float32 or float64, got torch.bfloat16"),
    "complex": (lambda: nn.Linear(3, 1, dtype=torch.complex64), r"be in float32 or float64, got torch.complex64"),
    "a tuple as output": (lambda: ReturnsTuple(3, 1), r"output must be one tensor, got tuple"),
    "a bare lstm": (lambda: nn.LSTM(3, 1), r"output must be one tensor, got tuple"),
    "NaN as output": (lambda: ReturnsNaN(3, 1), r"'output' of the network must be finite.*initial weights, got NaN"),
    "a scalar as output": (
        lambda: ReturnsScalar(3, 1),
        r"'output' of the network must have a row for each of the 12 inputs, got .*\(\)",
    ),
    "no gradient": (lambda: ReturnsDetached(3, 1), r"network.*must.*(differentiable|depend|gradient)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unusable_network_is_refused_with_an_input_error_and_unchanged(name: str) -> None:
    make, message = REFUSED[name]
    torch.manual_seed(0)
    net, (x,), y = make(), make_inputs("rows"), torch.zeros(ROWS)
    describe = observable_state if isinstance(net, nn.Module) and "lazy" not in name else repr
    before = describe(net)
    with pytest.raises(InputError, match=f"(?s){message}"):
        fitted(net, (x,), y)
    assert equal(describe(net), before)


# Many parameter vectors in one call.


def target_of(name: str) -> tuple[Target, tuple[Tensor, ...]]:
    net, inputs, y = build(name)
    model = pr.Model(net.double(), pr.Gaussian())
    data = Data.of((*inputs, y)).prepared(model.prepare)
    target = make_target(model, data, 1.0, "likelihood")
    return target, data.some(ROWS)


def vectors(target: Target, *shape: int) -> Tensor:
    noise = torch.randn(*shape, target.size, dtype=F64, generator=torch.Generator().manual_seed(1))
    return torch.cat([target.model.network.initial, torch.zeros(1, dtype=F64)]) + 0.1 * noise


DIFFERENTIABLE_NETWORKS = [
    "dense",
    "layer norm",
    "convolution",
    "embedding",
    "attention",
    "lstm",
    "gru",
    "tied",
    "frozen weight",
    "two inputs",
]
DIFFERENTIABLE_NETWORKS += ["raw parameters", "weight norm", "batch norm", "batch norm in eval mode"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (2, 3)) for name in DIFFERENTIABLE_NETWORKS),
        *((name, s) for name in ("dense", "convolution") for s in ((3,), (1,), (0,))),
    ],
)
def test_values_and_gradients_of_many_vectors_equal_those_of_each(name: str, shape: tuple[int, ...]) -> None:
    target, batch = target_of(name)
    w = vectors(target, *shape)
    values, gradients = target.log_likelihood_and_grad(w, batch)
    assert values.shape == shape
    assert gradients.shape == w.shape
    for index in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
        value, gradient = target.log_likelihood_and_grad(w[tuple(index)].clone(), batch)
        torch.testing.assert_close(values[tuple(index)], value, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradients[tuple(index)], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", DIFFERENTIABLE_NETWORKS)
def test_the_gradient_of_one_vector_equals_autograd_of_differentiable(name: str) -> None:
    target, batch = target_of(name)
    w = vectors(target).requires_grad_()
    value, gradient = target.log_likelihood_and_grad(w.detach(), batch)
    gradient = gradient.clone()
    total = target.differentiable(w, batch)
    (wanted,) = torch.autograd.grad(total, w)
    torch.testing.assert_close(value, total.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", DIFFERENTIABLE_NETWORKS)
def test_the_gradient_equals_that_of_the_users_module(name: str) -> None:
    net, inputs, y = build(name)
    net = net.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    model = pr.Model(net, pr.Gaussian(0.5))
    target = make_target(model, Data.of((*inputs, y)).prepared(model.prepare), 1.0, "likelihood")
    value, gradient = target.log_likelihood_and_grad(model.network.initial.clone(), (*inputs, y.double()))
    total = torch.distributions.Normal(net(*inputs)[:, 0], 0.5).log_prob(y.double()).sum()
    wanted = torch.autograd.grad(total, [p for p in net.parameters() if p.requires_grad])
    torch.testing.assert_close(value, total.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, torch.cat([g.reshape(-1) for g in wanted]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["dense", "convolution", "lstm", "tied", "batch norm in eval mode"])
def test_pointwise_values_sum_to_the_log_likelihood(name: str) -> None:
    target, batch = target_of(name)
    w = vectors(target, 2, 3)
    pointwise = target.pointwise(w, batch)
    assert pointwise.shape == (2, 3, ROWS)
    torch.testing.assert_close(pointwise.sum(-1), target.log_likelihood_and_grad(w, batch)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("limit", [1, 2_000, 10**9])  # one draw and one row per chunk, several, all in one chunk
def test_every_draw_uses_its_own_buffers_at_every_memory_limit(limit: int) -> None:
    net, inputs, y = build("batch norm")
    net = net.double()
    model = pr.Model(net, pr.Gaussian(0.5))
    batch = model.prepare((*inputs, y))
    model.check(batch)  # the trial pass finds the buffers that training writes
    inputs, generator = batch[:-1], torch.Generator().manual_seed(2)
    w = torch.randn(5, model.layout.size, generator=generator, dtype=F64)
    given = model.buffers()
    buffers = {
        name: torch.rand(5, *b.shape, generator=generator, dtype=F64) + 0.5 if b.is_floating_point() else b.expand(5)
        for name, b in given.items()
    }
    assert any(b.is_floating_point() for b in given.values())
    found = model.outputs(w, inputs, buffers, torch.Size(), limit=limit)
    for i in range(5):
        reference = copy.deepcopy(net).eval()
        nn.utils.vector_to_parameters(w[i], reference.parameters())
        for name, b in reference.named_buffers():
            b.copy_(buffers[name][i])
        with torch.no_grad():
            torch.testing.assert_close(found[i], reference(*inputs)[:, 0], rtol=1e-10, atol=1e-10)


def test_parameters_read_through_a_list_give_correct_values_or_an_input_error() -> None:
    torch.manual_seed(0)
    net, (x,), y = ParametersInList().double(), make_inputs("rows"), torch.zeros(ROWS)
    before = observable_state(net)
    try:
        model = pr.Model(net, pr.Gaussian(0.5))
    except InputError:
        return
    data = Data.of((x, y)).prepared(model.prepare)
    target, batch = make_target(model, data, 1.0, "likelihood"), data.some(ROWS)
    w = model.network.initial + 0.1 * torch.randn(3, model.network.size, dtype=F64)
    values, gradients = target.log_likelihood_and_grad(w, batch)
    for i, v in enumerate(w):
        a, b, c, d = v[:12].view(4, 3), v[12:16], v[16:20].view(1, 4), v[20:]
        outputs = linear(torch.tanh(linear(x.double(), a, b)), c, d)[:, 0]
        value = torch.distributions.Normal(outputs, 0.5).log_prob(y.double()).sum()
        torch.testing.assert_close(values[i], value, rtol=1e-10, atol=1e-10)
        alone, gradient = target.log_likelihood_and_grad(v.clone(), batch)
        torch.testing.assert_close(alone, value, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradients[i], gradient, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(target.differentiable(v, batch), value, rtol=1e-10, atol=1e-10)
    assert equal(observable_state(net) | {"rng": None}, before | {"rng": None})


def test_vectors_may_have_any_strides() -> None:
    for name in ("dense", "convolution"):
        target, batch = target_of(name)
        w = vectors(target, 3)
        strided = w.t().contiguous().t()
        for a, b in zip(
            target.log_likelihood_and_grad(strided, batch), target.log_likelihood_and_grad(w, batch), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_shapes_and_layer_types_decide_between_one_batched_pass_and_a_loop() -> None:
    small = Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    limit = MAX_BATCHED_WORK // small.size
    assert [small.batches_well(rows) for rows in (1, limit, limit + 1)] == [True, True, False]
    for name in ("convolution", "lstm", "gru", "attention", "batch norm", "weight norm"):
        assert not Network(build(name)[0]).batches_well(1), name


# Random starting points, for members and chains.


@pytest.mark.parametrize(
    "name", ["dense", "convolution", "lstm", "tied", "raw parameters", "weight norm", "frozen weight"]
)
def test_random_starts_differ_are_reproducible_and_leave_the_network_unchanged(name: str) -> None:
    net, inputs, y = build(name)
    model = pr.Model(net, pr.Gaussian(0.5))
    before, output = observable_state(net), model.network(model.network.initial, inputs, {}, train=False).detach()
    starts = [model.start(y, torch.Size((3,)), stream(0, "start")) for _ in range(2)]
    assert torch.equal(*starts)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(starts[0][i], starts[0][j])
    assert equal(observable_state(net), before)
    assert torch.equal(model.network(model.network.initial, inputs, {}, train=False).detach(), output)


def test_a_relu_runs_in_place_only_after_a_convolution_or_a_linear_layer() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Tanh(), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2), nn.ReLU())
    skeleton = Network(net).skeleton
    assert [m.inplace for m in skeleton if isinstance(m, nn.ReLU)] == [True, False, True]
    assert not any(m.inplace for m in net if isinstance(m, nn.ReLU))
    shared_relu = nn.ReLU()
    shared = Network(nn.Sequential(nn.Conv2d(1, 2, 3), shared_relu, nn.Tanh(), shared_relu)).skeleton
    assert not any(m.inplace for m in shared if isinstance(m, nn.ReLU))


def test_a_relu_in_place_does_not_change_values_or_gradients() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 1))
    net = net.to(torch.float64)
    X = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    net(X).square().sum().backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in net.parameters()])  # pyright: ignore
    network, found = Network(net), torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    network.collect_gradients_in(found)
    outputs = network(network.initial, (X,), {}, train=True)
    outputs.square().sum().backward()
    assert torch.equal(outputs, net(X))
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("size", "options"), [(2, {}), (3, {}), (2, {"stride": 1}), (2, {"padding": 1}), (2, {"ceil_mode": True})]
)
@pytest.mark.parametrize("shape", [(4, 3, 9, 8), (2, 1, 2, 7), (3, 5, 5)])
def test_pooling_by_maxima_equals_torchs_pooling_exactly(
    size: int, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if size > min(shape[-2:]):
        pytest.skip("the pooling window is larger than the image")
    x[..., 0, 0] = torch.nan
    pool = nn.MaxPool2d(size, **options)
    net = nn.Sequential(pool)
    pool_by_maxima(net)
    with torch.no_grad():
        torch.testing.assert_close(net(x), nn.MaxPool2d(size, **options)(x), rtol=0, atol=0, equal_nan=True)
    leaf, plain = (x.nan_to_num().requires_grad_() for _ in range(2))
    net(leaf).square().sum().backward()
    nn.MaxPool2d(size, **options)(plain).square().sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    assert torch.equal(leaf.grad, plain.grad)


def test_a_pooling_layer_defined_by_the_user_is_not_replaced() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    skeleton = Network(net).skeleton
    assert "forward" in vars(skeleton[1])  # pyright: ignore[reportIndexIssue]
    assert "forward" not in vars(net[1])
    assert repr(skeleton) == repr(net)


def test_autocast_does_not_reuse_casts_of_an_earlier_vector():
    network = Network(nn.Linear(3, 2))
    x = torch.ones(4, 3)
    w = network.initial.clone()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        first = network(w, (x,), {}, train=False)
        w += 1  # the same memory
        second = network(w, (x,), {}, train=False)
        third = network(w + 1, (x,), {}, train=False)
    assert torch.allclose(second - first, torch.tensor(4.0, dtype=torch.bfloat16), atol=0.1)
    assert torch.allclose(third - second, torch.tensor(4.0, dtype=torch.bfloat16), atol=0.1)
