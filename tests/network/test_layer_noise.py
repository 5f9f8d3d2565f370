"""Local reparameterisation and flipout against hand-derived gradients, closed forms and draws of the weights."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import priory as pr
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.network.layer_noise import LayerNoise
from priory.network.noisy_layers import signs
from priory.network.skeleton import Network
from priory.testing import assert_mean_close

F64 = torch.float64
KINDS = ["local", "flipout"]
NOISE = 0.7


def randn(*shape, name="x"):
    return torch.randn(*shape, generator=stream(0, name), dtype=F64)


def make_setup(net, *x_shape, likelihood=None, scale_factor=0.3):
    """Return a model, means, standard deviations and a batch."""
    model = pr.Model(net.to(F64), likelihood or pr.Gaussian(NOISE))
    m = randn(model.layout.size, name="m") * 0.5
    scale = scale_factor * (0.5 + randn(model.layout.size, name="s").abs())
    X = randn(*x_shape)
    model.check((X, y := randn(len(X), name="y")))
    return model, m, scale, (X, y)


def one_pass(noise, model, m, scale, batch, generator, factor=1.0, buffers=None):
    found = noise.log_likelihood_and_grads(model.evaluation, m, scale, batch, factor, buffers or {}, generator)
    return tuple(t.clone() for t in found)


def stacked_passes(kind, model, m, scale, batch, passes, factor=1.0):
    """Return the value and both gradients of several passes, (passes, 1 + 2P)."""
    noise, generator = LayerNoise(model.network, kind), stream(1, kind)
    each = (one_pass(noise, model, m, scale, batch, generator, factor) for _ in range(passes))
    return torch.stack([torch.cat([value[None], gm, gs]) for value, gm, gs in each])


def pathwise(model, m, scale, batch, draws):
    """Return value and gradients at draws of all weights, each shared by the whole batch, (draws, 1 + 2P)."""
    eps = torch.randn(draws, len(m), generator=stream(2, "pathwise"), dtype=F64)
    value, gradient = model.log_likelihood_and_grad(m + scale * eps, batch, 1.0, {})
    return torch.cat([value[:, None], gradient, gradient * eps], 1)


def by_autograd(function, m, scale):
    """Return the value of a function of (m, scale) and its two gradients."""
    m, scale = m.clone().requires_grad_(), scale.clone().requires_grad_()
    value = function(m, scale)
    return (value.detach(), *torch.autograd.grad(value, (m, scale)))


def log_normal(y, mean, noise=NOISE):
    return (-0.5 * ((y - mean) / noise) ** 2 - math.log(noise) - 0.5 * math.log(2 * math.pi)).sum()


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# Gradients at known noise.


def test_local_gradients_of_a_linear_layer_are_those_derived_by_hand():
    """With e_n = (y_n - f_n) / noise^2: d/dm_i = sum_n e_n x_ni and d/ds_i = sum_n e_n eps_n x_ni^2 s_i / std_n."""
    model, m, scale, (X, y) = make_setup(nn.Linear(3, 1), 6, 3)
    factor = 2.5
    value, grad_mean, grad_scale = one_pass(
        LayerNoise(model.network, "local"), model, m, scale, (X, y), stream(5, "noise"), factor
    )
    eps = torch.empty(6, 1, dtype=F64).normal_(generator=stream(5, "noise"))[:, 0]
    with_ones = torch.cat([X, torch.ones(6, 1, dtype=F64)], 1)  # the bias multiplies the last column
    std = (with_ones.square() @ scale.square()).sqrt()
    f = with_ones @ m + std * eps
    e = factor * (y - f) / NOISE**2
    assert_equal(
        (value, grad_mean, grad_scale),
        (factor * log_normal(y, f), with_ones.T @ e, with_ones.square().T @ (e * eps / std) * scale),
    )


def test_flipout_gradients_of_a_linear_layer_are_those_derived_by_hand():
    """d/ds_i = sum_n e_n r'_n r_ni x_ni eps_i."""
    model, m, scale, (X, y) = make_setup(nn.Linear(3, 1), 6, 3)
    factor = 2.5
    value, grad_mean, grad_scale = one_pass(
        LayerNoise(model.network, "flipout"), model, m, scale, (X, y), stream(5, "noise"), factor
    )
    generator = stream(5, "noise")
    eps = torch.empty(4, dtype=F64).normal_(generator=generator)
    r = signs(6 * 4, m, generator)
    r_in, r_out = r[:18].view(6, 3), r[18:]
    with_ones = torch.cat([X, torch.ones(6, 1, dtype=F64)], 1)
    signed = r_out[:, None] * torch.cat([X * r_in, torch.ones(6, 1, dtype=F64)], 1)
    f = with_ones @ m + signed @ (scale * eps)
    e = factor * (y - f) / NOISE**2
    assert_equal((value, grad_mean, grad_scale), (factor * log_normal(y, f), with_ones.T @ e, signed.T @ e * eps))


def unfolded(x, weight, bias, layer):
    """Compute a convolution as one matrix product per group."""
    k, pad = layer.kernel_size, layer.padding
    if pad == "same":
        total = [d * (size - 1) for d, size in zip(layer.dilation, k, strict=True)]
        x, pad = functional.pad(x, [t for n in reversed(total) for t in (n // 2, n - n // 2)]), 0
    elif layer.padding_mode != "zeros":
        x, pad = functional.pad(x, [p for p in reversed(pad) for _ in (0, 1)], mode=layer.padding_mode), 0
    size = [
        (n + 2 * (pad[i] if pad else 0) - layer.dilation[i] * (k[i] - 1) - 1) // layer.stride[i] + 1
        for i, n in enumerate(x.shape[2:])
    ]
    columns = functional.unfold(x, k, layer.dilation, pad, layer.stride).unflatten(
        1, (layer.groups, -1)
    )  # (n, g, ck, L)
    product = torch.einsum("ngkl,gok->ngol", columns, weight.flatten(1).unflatten(0, (layer.groups, -1)))
    out = product.flatten(1, 2).unflatten(2, size)
    return out if bias is None else out + bias[:, None, None]


CONVOLUTIONS = {
    "plain": {},
    "strides and zeros": {"stride": 2, "padding": 1},
    "groups without bias": {"groups": 2, "bias": False},
    "same, dilated": {"padding": "same", "dilation": 2},
    "circular": {"padding": (1, 2), "padding_mode": "circular"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_noisy_convolution_equals_the_one_computed_by_matrix_products(kind, options):
    conv = nn.Conv2d(2, 4, 3, **options).to(F64)
    outputs = conv(torch.zeros(1, 2, 6, 7, dtype=F64))[0].numel()
    net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(outputs, 1))
    model, m, scale, (X, y) = make_setup(net, 5, 2, 6, 7)
    found = one_pass(LayerNoise(model.network, kind), model, m, scale, (X, y), stream(5, "noise"))
    generator = stream(5, "noise")
    shape = (5, *conv(X).shape[1:])
    if kind == "local":
        eps1, eps2 = (torch.empty(s, dtype=F64).normal_(generator=generator) for s in (shape, (5, 1)))
    else:
        eps = torch.empty(len(m), dtype=F64).normal_(generator=generator)
        r = signs(5 * (2 + 4 + outputs + 1), m, generator)
        in1, out1, in2, out2 = r.split([10, 20, 5 * outputs, 5])

    def read(w):
        named = model.layout.constrain(w)
        return named["0.weight"], named.get("0.bias"), named["3.weight"], named["3.bias"]

    def function(m, s):
        (first, b, last, c), (spread_in, spread_bias, spread_out, spread_shift) = (
            read(m),
            read(s if kind == "local" else s * eps),
        )
        if kind == "local":
            sb2 = None if spread_bias is None else spread_bias.square()
            h = unfolded(X, first, b, conv) + unfolded(X.square(), spread_in.square(), sb2, conv).sqrt() * eps1
            h = functional.relu(h).flatten(1)
            f = h @ last.T + c + (h.square() @ spread_out.square().T + spread_shift.square()).sqrt() * eps2
        else:
            noisy = unfolded(X * in1.view(5, 2, 1, 1), spread_in, spread_bias, conv) * out1.view(5, 4, 1, 1)
            h = functional.relu(unfolded(X, first, b, conv) + noisy).flatten(1)
            f = h @ last.T + c + ((h * in2.view(5, -1)) @ spread_out.T + spread_shift) * out2.view(5, 1)
        return log_normal(y, f[:, 0])

    assert_equal(found, by_autograd(function, m, scale))


@pytest.mark.parametrize("kind", KINDS)
def test_fallback_parameters_and_learnt_coordinates_are_drawn_once(kind):
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1, bias=False))
    model, m, scale, (X, y) = make_setup(net, 6, 3, likelihood=pr.Gaussian())
    found = one_pass(LayerNoise(model.network, kind), model, m, scale, (X, y), stream(5, "noise"))
    generator = stream(5, "noise")
    once = torch.zeros(len(m), dtype=torch.bool)
    once[16:24] = once[-1] = True
    eps = torch.zeros(len(m), dtype=F64)
    if kind == "local":
        eps[16:24] = torch.empty(8, dtype=F64).normal_(generator=generator)
        eps[-1:] = torch.empty(1, dtype=F64).normal_(generator=generator)
        eps1, eps2 = (torch.empty(6, k, dtype=F64).normal_(generator=generator) for k in (4, 1))
    else:
        eps.normal_(generator=generator)
        in1, out1, in2, out2 = signs(6 * 12, m, generator).split([18, 24, 24, 6])

    def function(m, s):
        w = m + torch.where(once, s * eps, 0)
        first, b, gain, shift, last = (w[a:z] for a, z in ((0, 12), (12, 16), (16, 20), (20, 24), (24, 28)))
        d = s if kind == "local" else s * eps
        spread_in, spread_bias, spread_out = d[:12].view(4, 3), d[12:16], d[24:28].view(1, 4)
        if kind == "local":
            h = X @ first.view(4, 3).T + b + (X.square() @ spread_in.square().T + spread_bias.square()).sqrt() * eps1
        else:
            h = X @ first.view(4, 3).T + b + ((X * in1.view(6, 3)) @ spread_in.T + spread_bias) * out1.view(6, 4)
        h = functional.layer_norm(h, (4,), gain, shift).tanh()
        if kind == "local":
            f = h @ last.view(1, 4).T + (h.square() @ spread_out.square().T).sqrt() * eps2
        else:
            f = h @ last.view(1, 4).T + ((h * in2.view(6, 4)) @ spread_out.T) * out2.view(6, 1)
        noise = model.layout.constrain(w)["likelihood.noise"]
        return torch.distributions.Normal(f[:, 0], noise).log_prob(y).sum()

    assert_equal(found, by_autograd(function, m, scale))


def test_all_positions_of_a_row_share_its_flipout_signs():
    """The value equals that of the network run on each row alone, with the weights of that row."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 1))
    model, m, scale, (X, y) = make_setup(net, 4, 5, 2)
    value, *_ = one_pass(LayerNoise(model.network, "flipout"), model, m, scale, (X, y), stream(5, "noise"))
    generator = stream(5, "noise")
    delta = scale * torch.empty(len(m), dtype=F64).normal_(generator=generator)
    in1, out1, in2, out2 = (r.view(4, -1) for r in signs(4 * 21, m, generator).split([8, 12, 60, 4]))
    wanted = 0.0
    for n in range(4):
        flips = [(out1[n, :, None] * in1[n]).flatten(), out1[n], (out2[n, :, None] * in2[n]).flatten(), out2[n]]
        w = m + delta * torch.cat(flips)
        wanted = wanted + model.log_likelihood_and_grad(w, (X[n : n + 1], y[n : n + 1]), 1.0, {})[0]
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)


# Expectations.


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_are_unbiased_on_a_linear_gaussian_model(kind):
    """1,000 passes, 5 standard errors in 9 entries (false alarms: 5e-6)."""
    model, m, scale, (X, y) = make_setup(nn.Linear(3, 1), 6, 3)
    factor = 2.5
    with_ones = torch.cat([X, torch.ones(6, 1, dtype=F64)], 1)

    def expected(m, s):
        variance = with_ones.square() @ s.square()
        return factor * (log_normal(y, with_ones @ m) - 0.5 * variance.sum() / NOISE**2)

    value, grad_mean, grad_scale = by_autograd(expected, m, scale)
    assert_mean_close(
        stacked_passes(kind, model, m, scale, (X, y), 1_000, factor), torch.cat([value[None], grad_mean, grad_scale])
    )


def narrow():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def positions():
    return nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 1))


@pytest.mark.parametrize(
    ("kind", "build", "shape"),
    [("local", narrow, (5, 2)), ("flipout", narrow, (5, 2)), ("flipout", positions, (5, 1, 4))],
)
def test_value_and_gradients_have_the_same_mean_as_with_draws_of_the_weights(kind, build, shape):
    """1,000 differences of a pass and a draw of the weights, 5 standard errors in 27 entries (false alarms: 2e-5)."""
    setup = make_setup(build(), *shape, scale_factor=0.6)
    assert_mean_close(stacked_passes(kind, *setup, 1_000) - pathwise(*setup, 1_000), 0.0)


class Sum(nn.Module):
    """The sum over positions, (n, c, t) -> (n, c)."""

    def forward(self, x):
        return x.sum(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_local_treats_positions_as_independent_and_flipout_does_not(kind):
    """out_n = w sum_t x_nt has variance s^2 (sum_t x_nt)^2, and s^2 sum_t x_nt^2 with independent positions.

    1,000 passes, 5 standard errors in 3 entries (false alarms: 2e-6); the two variances differ by far more.
    """
    model, m, scale, (X, y) = make_setup(nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), Sum()), 5, 1, 4)
    X = X + 1
    x = X[:, 0]
    square = {"local": x.square().sum(-1), "flipout": x.sum(-1).square()}

    def expected(m, s):
        return log_normal(y, m * x.sum(-1)) - 0.5 * (s.square() * square[kind]).sum() / NOISE**2

    found = stacked_passes(kind, model, m, scale, (X, y), 1_000)
    value, grad_mean, grad_scale = by_autograd(expected, m, scale)
    assert_mean_close(found, torch.cat([value[None], grad_mean, grad_scale]))
    noise = LayerNoise(model.network, kind)
    noise.examine((X,), {})
    assert noise.approximate == (("0",) if kind == "local" else ())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_less_variance_than_with_one_draw_per_batch(kind):
    """Summed variances of 500 gradients each: the ratio is about 1/10, and 1/3 is asserted (false alarms: < 1e-9)."""
    setup = make_setup(nn.Linear(3, 1), 60, 3)
    layer_noise_variance, pathwise_variance = (
        draws[:, 1:5].var(0).sum() for draws in (stacked_passes(kind, *setup, 500), pathwise(*setup, 500))
    )
    assert float(layer_noise_variance) < float(pathwise_variance) / 3


def test_signs_are_fair_and_independent():
    """Means of signs and of products of neighbours, 5 standard errors, two entries per dtype (false alarms: 2e-6)."""
    for dtype in (torch.float32, F64):
        r = signs(100_001, torch.zeros((), dtype=dtype), stream(0, "signs"))
        assert r.dtype is dtype
        assert set(r.unique().tolist()) == {-1.0, 1.0}
        assert_mean_close(torch.stack([r[1:], r[1:] * r[:-1]], 1), 0.0)


# Layers without a rule.


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.b(self.a(self.a(x).tanh()))


class Tied(Twice):
    def forward(self, x):
        return self.b(functional.linear(self.a(x), self.a.weight.T))


class Shared(Twice):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(3, 3, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.b(self.c(self.a(x)))


class Checkpointed(Twice):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=False).tanh())


class PositionFirst(Twice):
    def forward(self, x):
        return self.b(self.a(x.transpose(0, 1)).mean(0))


class Recurrent(Twice):
    def __init__(self):
        super().__init__()
        self.a = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x):
        return self.b(self.a(x)[0][:, -1])


class Embedded(Twice):
    def __init__(self):
        super().__init__()
        self.a = nn.Embedding(5, 3)

    def forward(self, x):
        return self.b(self.a(x.abs().long().clamp(max=4)[:, 0]))


class OneSize(Twice):
    def __init__(self):
        super().__init__()
        self.register_buffer("mix", torch.eye(4, dtype=F64))

    def forward(self, x):
        return self.b(self.mix @ self.a(x))


def frozen():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    net[0].weight.requires_grad_(False)
    net[1].bias.requires_grad_(False)
    return net


A = ("a.weight", "a.bias")
CASES = {
    "a layer that is called twice": (Twice, (4, 3), A),
    "weights that are also read directly": (Tied, (4, 3), A),
    "shared weights": (Shared, (4, 3), A),
    "a layer that is recomputed in the backward pass": (Checkpointed, (4, 3), A),
    "positions before rows, with equal sizes": (PositionFirst, (4, 4, 3), A),
    "a recurrence": (
        Recurrent,
        (4, 2, 3),
        tuple(f"a.{k}_l0" for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
    ),
    "an embedding": (Embedded, (4, 3), ("a.weight",)),
    "a network for one batch size": (OneSize, (4, 3), (*A, "b.weight", "b.bias")),
    "a layer norm": (lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)), (4, 3), ("0.weight", "0.bias")),
    "a parametrised layer": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 1)),
        (4, 3),
        ("0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"),
    ),
    "a transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose1d(3, 1, 1), nn.Flatten(), nn.Linear(2, 1)),
        (4, 3, 2),
        ("0.weight", "0.bias"),
    ),
    "a frozen weight": (frozen, (4, 3), ("0.bias",)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("build", "shape", "wanted"), CASES.values(), ids=CASES)
def test_parameters_of_layers_without_a_rule_are_listed_as_fallbacks(kind, build, shape, wanted):
    model, m, scale, batch = make_setup(build(), *shape)
    noise = LayerNoise(model.network, kind)
    found = one_pass(noise, model, m, scale, batch, stream(0, "noise"))
    assert noise.fallbacks == wanted
    assert all(name in noise.note for name in wanted)
    assert all(bool(torch.isfinite(t).all()) for t in found)


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_rule_the_weights_are_drawn_once(kind):
    model, m, scale, batch = make_setup(OneSize(), 4, 3)
    found = one_pass(LayerNoise(model.network, kind), model, m, scale, batch, stream(5, "noise"))
    eps = torch.empty(len(m), dtype=F64).normal_(generator=stream(5, "noise"))
    value, gradient = model.log_likelihood_and_grad(m + scale * eps, batch, 1.0, {})
    assert_equal(found, (value, gradient, gradient * eps))


# Side effects on the network.


class RaisesOnRequest(Twice):
    broken = False

    def forward(self, x):
        h = self.a(x)
        if self.broken:
            raise RuntimeError("broken")
        return self.b(h)


@pytest.mark.parametrize("kind", KINDS)
def test_the_skeleton_and_the_module_are_restored_after_an_exception(kind):
    net = RaisesOnRequest().to(F64)
    state_before = {name: t.clone() for name, t in net.state_dict().items()}
    model, m, scale, batch = make_setup(net, 4, 3)
    noise = LayerNoise(model.network, kind)
    before = model.log_likelihood_and_grad(m, batch, 1.0, {})[0].clone()
    one_pass(noise, model, m, scale, batch, stream(0, "noise"))
    model.network.skeleton.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        one_pass(noise, model, m, scale, batch, stream(0, "noise"))
    model.network.skeleton.broken = False
    assert all("forward" not in vars(module) for module in model.network.skeleton.modules())
    assert torch.equal(model.log_likelihood_and_grad(m, batch, 1.0, {})[0], before)
    assert all(torch.equal(t, state_before[name]) for name, t in net.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_writes_its_buffers_once_per_pass_and_makes_every_layer_approximate(kind):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, m, scale, batch = make_setup(net, 6, 3)
    buffers, noise = model.buffers(), LayerNoise(model.network, kind)
    for _ in range(3):
        one_pass(noise, model, m, 1e-9 * scale, batch, stream(0, "noise"), buffers=buffers)
    assert int(buffers["1.num_batches_tracked"]) == 3
    mean = (batch[0] @ m[:12].view(4, 3).T + m[12:16]).mean(0)
    torch.testing.assert_close(buffers["1.running_mean"], (1 - 0.9**3) * mean, rtol=0, atol=1e-6)
    assert noise.approximate == ("0", "2")
    assert int(model.network.skeleton[1].num_batches_tracked) == 3


class DataDependent(Twice):
    def forward(self, x):
        h = self.a(x)
        return self.b(self.a(h) if float(x[0, 0]) > 100 else h)


def test_a_layer_that_is_called_more_often_than_on_the_first_batch_is_refused():
    model, m, scale, (X, y) = make_setup(DataDependent(), 4, 3)
    noise = LayerNoise(model.network, "flipout")
    one_pass(noise, model, m, scale, (X, y), stream(0, "noise"))
    with pytest.raises(InputError, match=r"The layer 'a' must act once per pass.*got a second call"):
        one_pass(noise, model, m, scale, (X + 1000, y), stream(0, "noise"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_of_zeros_to_a_layer_without_bias_has_finite_gradients(kind):
    for dtype in (torch.float32, F64):
        model = pr.Model(
            nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)).to(dtype), pr.Gaussian(1.0)
        )
        X, y = torch.zeros(4, 3, dtype=dtype), torch.ones(4, dtype=dtype)
        one = torch.ones(model.layout.size, dtype=dtype)
        found = one_pass(LayerNoise(model.network, kind), model, one, one, (X, y), stream(0, "noise"))
        assert all(t.dtype is dtype and bool(torch.isfinite(t).all()) for t in found)


def test_errors_name_the_bad_argument():
    model, m, scale, batch = make_setup(nn.Linear(3, 1), 4, 3)
    with pytest.raises(InputError, match=r"'kind' argument of LayerNoise must be 'local' or 'flipout', got 'global'"):
        LayerNoise(Network(nn.Linear(1, 1)), "global")
    noise = LayerNoise(model.network, "local")
    with pytest.raises(InputError, match=r"The 'm' argument of LayerNoise must have the shape \(4,\), got \(2, 4\)"):
        one_pass(noise, model, m.expand(2, 4), scale, batch, stream(0, "noise"))
    with pytest.raises(InputError, match=r"The 'scale' argument of LayerNoise must have the shape \(4,\), got \(3,\)"):
        one_pass(noise, model, m, scale[:3], batch, stream(0, "noise"))
