"""Dropout: noise on inputs equals noise on weights, the loss is the variational bound, and rates are found."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.network.dropout_sites import DropoutUnits, sites_by_layer
from priory.network.skeleton import Network
from priory.network.traced_dropout import sites_in_network
from priory.testing.contract import (
    classification,
    keeps_members_apart,
    leads_its_metrics_with_the_shape,
    regression,
)


def test_searched_rates_keep_the_contract_of_members():
    leads_its_metrics_with_the_shape(pr.Dropout((0.1, 0.3)))
    keeps_members_apart(pr.Dropout((0.1, 0.3)))


# Noise on inputs and noise on weights.


def masked(net, inputs, noise="bernoulli", seed=0):
    """Return a network, its units, a masked vector and the factors of the mask."""
    network = Network(net)
    units = DropoutUnits.of(network, sites_by_layer(network, inputs=True), network.size)
    generator = stream(seed, "masks")
    keep = torch.rand(len(units.site), generator=generator, dtype=torch.float64) > 0.4
    factors = keep.double() / 0.6
    w = network.initial * units.spread(factors)
    return network(w, (inputs,), {}, train=False), factors, units


@pytest.mark.parametrize("shape", [(7, 3), (7, 4, 3)], ids=["rows", "sequences"])
def test_noise_on_the_inputs_of_a_linear_layer_equals_noise_on_its_weights(shape):
    net, x = nn.Linear(3, 5).double(), torch.randn(shape, dtype=torch.float64, generator=stream(0, "x"))
    found, z, _ = masked(net, x)
    assert torch.allclose(found, net(x * z), rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_noise_on_the_channels_of_a_convolution_equals_noise_on_its_kernels(groups):
    net = nn.Conv2d(4, 6, 3, groups=groups).double()
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64, generator=stream(0, "x"))
    found, z, _ = masked(net, x)
    assert torch.allclose(found, net(x * z.view(4, 1, 1)), rtol=0, atol=1e-12)


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True).double()

    def forward(self, x):
        return self.lstm(x)[0]


def test_noise_on_the_inputs_and_states_of_a_recurrent_layer_equals_noise_on_its_gates():
    net, x = Gates(), torch.randn(2, 6, 3, dtype=torch.float64, generator=stream(0, "x"))
    found, z, units = masked(net, x)
    assert [site.units for site in units.sites] == [3, 4]
    h, c = torch.zeros(2, 2, 4, dtype=torch.float64).unbind()
    w, v = net.lstm.weight_ih_l0, net.lstm.weight_hh_l0
    for t in range(6):  # the same factors at every time step
        gates = (x[:, t] * z[:3]) @ w.T + net.lstm.bias_ih_l0 + (h * z[3:]) @ v.T + net.lstm.bias_hh_l0
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        assert torch.allclose(found[:, t], h, rtol=0, atol=1e-12)


def test_a_draw_drops_whole_units_at_the_rate_and_keeps_the_mean():
    model, data = classification()
    posterior = pr.fit(model, data, pr.Dropout(0.25), steps=20)
    weight, mean = posterior.sample(8000)["2.weight"], posterior.mean["2.weight"]
    ratio = weight / mean
    kept = ratio > 0.5
    assert bool((kept == kept[:, :1]).all())  # all outputs of a unit together
    assert torch.allclose(ratio[kept], torch.tensor(4 / 3), rtol=1e-5)
    # 32,000 units at rate 1/4; 5 standard errors (false alarms: 1e-6).
    assert abs(float(kept[:, 0].float().mean()) - 0.75) < 5 * math.sqrt(0.25 * 0.75 / 32_000)
    assert torch.equal(posterior.sample(3)["0.weight"][0], posterior.mean["0.weight"])
    assert posterior.rates == {"2.weight": pytest.approx(0.25)}


# The loss.


def tiny(method, prior=0.7, **tempered):
    model = pr.Model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double(), pr.Categorical(), prior=prior)
    X, y = classification()[1]
    data = Data.of((X.double(), (y > 0).long()), batch_size=8).prepared(model.prepare)
    target, generator = make_target(model, data, **tempered, drops=True), stream(0, "loss")
    return target, method.init(target, method.plan(target, data, 10, 0), generator), data


def kl_of(method, target, loc, logits, units):
    """Return -E_q[log p(w)] - H as the method computes them."""
    cross, entropy = method._parts(target, loc, logits, units)
    return float(cross - entropy)


@pytest.mark.parametrize(("temperature", "tempers"), [(1.0, "likelihood"), (0.25, "likelihood"), (0.25, "posterior")])
def test_the_loss_is_the_bound_by_enumeration_of_masks(temperature, tempers):
    method = pr.Dropout(0.3)
    target, state, data = tiny(method, temperature=temperature, tempers=tempers)
    units, size, p = state.masks.units, target.size, 0.3
    loc = state.theta[0, :size]
    cross = entropy = 0.0
    for dropped in itertools.product([0, 1], repeat=3):  # KL = -H(q) - E_q[log p(w)], over eight masks
        prob = math.prod(p if d else 1 - p for d in dropped)
        z = torch.tensor([0.0 if d else 1 / (1 - p) for d in dropped], dtype=torch.float64)
        cross -= prob * float(target.log_prior(loc * units.spread(z)))
        entropy -= prob * math.log(prob)
    _, info = method.step(target, state, next(data.batches(0, 0)), stream(1, "loss"))
    assert float(info.metrics["kl"]) == pytest.approx(cross - entropy, rel=1e-12)
    # T KL, or with the whole posterior tempered -E_q[log p(w)] - T H(q)
    penalty = (temperature if tempers == "likelihood" else 1.0) * cross - temperature * entropy
    assert float(info.metrics["loss"]) == pytest.approx(float(info.metrics["nll"]) + penalty, rel=1e-12)


def test_the_kl_equals_the_weight_decay_of_the_lectures():
    method = pr.Dropout(0.3)
    target, state, _ = tiny(method)
    size, units = target.size, state.masks.units
    loc = state.theta[:, :size]
    gal = torch.where(units.masked, loc / 0.7, loc)  # M without the factor of the kept units
    decay = 0.5 / 0.49 * torch.where(units.masked, 0.7 * gal.square(), gal.square()).sum()
    entropy = -3 * (0.3 * math.log(0.3) + 0.7 * math.log(0.7))
    found = kl_of(method, target, loc, state.theta[:, size:], units)
    assert found == pytest.approx(float(decay) - entropy - target.prior.log_normaliser, rel=1e-12)


@pytest.mark.parametrize("prior", [0.7, torch.distributions.Laplace(0.1, 0.7)], ids=["normal", "laplace"])
@pytest.mark.parametrize(("rate", "noise"), [("learn", "bernoulli"), (0.3, "bernoulli"), (0.3, "gaussian")])
@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
def test_the_step_follows_the_gradient_of_the_bound_in_means_and_rates(rate, noise, prior, tempers):
    method = pr.Dropout(rate, noise=noise, samples=2)
    target, state, data = tiny(method, prior, temperature=0.25, tempers=tempers)
    batch, size, units = next(data.batches(0, 0)), target.size, state.masks.units
    before = state.theta.clone()

    def loss(theta):
        loc, logits = theta[..., :size], theta[..., size:] if rate == "learn" else theta[..., size:].detach()
        z = method._factors(logits, units, len(batch[0]), stream(5, "u"))
        vectors = (loc * units.spread(z[..., i]) for i in range(len(batch[0])))  # each row has its own weights
        rows = zip(*(part.split(1) for part in batch), strict=True)
        each = [target.differentiable(v, row) for w, row in zip(vectors, rows, strict=True) for v in w.view(2, -1)]
        a, p = units.spread(logits.exp()[..., units.site]) * units.masked, logits.sigmoid()
        if prior == 0.7:
            cross = 0.5 / 0.49 * (loc.square() * (1 + a)).sum()
        else:
            cross = (
                -prior.log_prob(loc * units.spread(z[..., 0])).sum() / 2
            )  # from two draws, with the mask of the first row
        entropy = -3 * (p * p.log() + (1 - p) * (1 - p).log()).sum() if noise == "bernoulli" else 0.0
        penalty = target.prior_weight * cross - target.entropy_weight * entropy
        return penalty - torch.stack(each).mean()  # one row is scaled to all rows

    (wanted,) = torch.autograd.grad(loss(leaf := before.clone().requires_grad_()), leaf)
    method.step(target, state, batch, stream(5, "u"))
    # after one step Adam's first moment is a tenth of the gradient
    assert torch.allclose(10 * state.adam.first, wanted, rtol=1e-9, atol=1e-10)


def test_learnt_gaussian_factors_have_the_log_uniform_prior_with_a_warning():
    with pytest.warns(pr.PrioryWarning, match="improper prior"):
        method, (target, state, _) = pr.Dropout("learn", noise="gaussian"), tiny(pr.Dropout("learn", noise="gaussian"))
    size, units = target.size, state.masks.units
    alpha = state.theta[0, size:].exp()
    each = pr.kl(torch.distributions.Normal(torch.ones_like(alpha), alpha.sqrt()), pr.distributions.LogUniform()).value
    loc = state.theta[:, :size]
    rest = 0.5 / 0.49 * loc[:, ~units.masked].square().sum() - target.prior.log_normaliser
    found = kl_of(method, target, loc, state.theta[:, size:], units)
    assert found == pytest.approx(float(rest + 3 * each.sum()), rel=1e-10)


def test_a_learnt_rate_falls_with_data_and_approaches_one_half_without():
    X = torch.randn(400, 3, generator=stream(0, "x"))
    y = X @ torch.tensor([1.0, -1.0, 0.5])
    model = pr.Model(nn.Linear(3, 1), pr.Gaussian(0.1), prior=1.0)
    sure = pr.fit(model, (X, y), pr.Dropout("learn", inputs=True, learning_rate=0.05), steps=800)
    assert sure.rates["weight"] < 0.02
    loose = pr.Model(nn.Linear(3, 1), pr.Gaussian(100.0), prior=10.0)
    free = pr.fit(loose, (X[:5], y[:5]), pr.Dropout("learn", inputs=True, learning_rate=0.05), steps=800)
    assert 0.3 < free.rates["weight"] < 0.6


def test_rates_are_chosen_by_held_out_rows():
    X = torch.randn(300, 5, generator=stream(0, "x"))
    y = X.sum(-1)
    model = pr.Model(nn.Linear(5, 1), pr.Gaussian(0.2), prior=1.0)
    posterior = pr.fit(model, (X, y), pr.Dropout((0.6, 0.001, 0.3), inputs=True), steps=400)
    assert posterior.rates["weight"] == pytest.approx(0.001)


# Networks with dropout layers.


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = functional.dropout(torch.relu(self.first(x)), 0.4, self.training)
        return self.second(x)


@pytest.mark.parametrize(
    ("net", "rates"),
    [
        (nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3)), {"3.weight": 0.2}),
        (nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 4), nn.Dropout(0.3), nn.ReLU(), nn.Linear(4, 3)), None),
        (Functional(), {"second.weight": 0.4}),
    ],
    ids=["module", "two", "function"],
)
def test_the_dropout_of_a_network_determines_the_layers_and_the_rates(net, rates):
    _, data = classification()
    net.train()
    before = torch.get_rng_state()
    posterior = pr.fit(pr.Model(net, pr.Categorical()), data, pr.Dropout(), steps=20)
    assert posterior.rates == pytest.approx(rates or {"1.weight": 0.1, "4.weight": 0.3})
    assert torch.equal(before, torch.get_rng_state())  # the global generator isn't used
    other = pr.fit(pr.Model(net, pr.Categorical()), data, pr.Dropout(0.5), steps=20)
    assert set(other.rates.values()) == {0.5}


class StoredDropout(nn.Module):
    """Stores a module as `dropout`, where recurrent layers store a rate, and has dropout in its attention."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.relu(self.first(x))[:, None]
        p = 0.5 if self.training else 0.0
        h = functional.scaled_dot_product_attention(h, h, h, None, p) + functional.scaled_dot_product_attention(
            h, h, h, dropout_p=p
        )
        return self.second(self.dropout(h[:, 0]))


def test_a_module_named_dropout_is_accepted_and_attention_dropout_is_disabled_with_a_warning():
    _, data = classification()
    with pytest.warns(pr.PrioryWarning, match="dropout of attention weights is disabled"):
        posterior = pr.fit(pr.Model(StoredDropout().train(), pr.Categorical()), data, pr.Dropout(), steps=5)
    assert posterior.rates == pytest.approx({"second.weight": 0.3})


def test_dropout_on_channels_belongs_to_the_next_convolution():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(4, 2, 3), nn.Flatten())
    sites = sites_in_network(Network(net), (torch.randn(2, 1, 6, 6),))
    assert [(site.parameters, site.units, site.rate) for site in sites] == [(("3.weight",), 4, 0.3)]


def test_dropout_that_no_layer_follows_is_refused():
    _, data = classification()
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(pr.InputError, match="must come right before linear, convolutional or recurrent layers"):
        pr.fit(pr.Model(net, pr.Categorical()), data, pr.Dropout(), steps=2)


def test_other_methods_refuse_active_dropout():
    _, data = classification()
    model = pr.Model(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 3)).train(), pr.Categorical())
    pr.fit(model, data, pr.Dropout(), steps=2)
    with pytest.raises(pr.InputError, match=r"or fit with Dropout\(\)"):
        pr.fit(model, data, pr.MAP(), steps=2)


@pytest.mark.parametrize("samples", [1, 2])
def test_batch_normalisation_in_training_mode_updates_its_statistics(samples):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    X = torch.randn(60, 4, generator=stream(0, "x"))
    model = pr.Model(net, pr.Gaussian(0.1), prior=1.0)
    posterior = pr.fit(model, (X, X[:, 0]), pr.Dropout(samples=samples), steps=30)
    assert int(posterior.buffers["1.num_batches_tracked"]) == 30 * samples
    assert posterior.buffers["1.running_mean"].shape == (8,)
    features = X @ posterior.mean["0.weight"].T + posterior.mean["0.bias"]
    assert torch.allclose(posterior.buffers["1.running_mean"], features.mean(0), atol=0.1)  # running means lag behind
    members = pr.fit(model, (X, X[:, 0]), pr.Ensemble(pr.Dropout(samples=samples), 2), steps=30).members
    assert not torch.equal(members[0].buffers["1.running_mean"], members[1].buffers["1.running_mean"])


def test_an_ensemble_of_dropout_has_members_with_rates():
    model, data = regression(torch.float32)
    posterior = pr.fit(model, data, pr.Ensemble(pr.Dropout("learn"), 2), steps=10)
    assert len({member.rates["2.weight"] for member in posterior.members}) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "The 'rate' argument of Dropout must lie between 0 and 1, got 0.0."),
        (
            {"rate": "all"},
            "The 'rate' argument of Dropout must be a number, a sequence of numbers, or 'learn', got 'all'.",
        ),
        (
            {"rate": True},
            "The 'rate' argument of Dropout must be a number, a sequence of numbers, or 'learn', got True.",
        ),
        (
            {"rate": {"a": 1}},
            "The 'rate' argument of Dropout must be a number, a sequence of numbers, or 'learn', got {'a': 1}.",
        ),
        (
            {"rate": torch.tensor(0.5)},
            "The 'rate' argument of Dropout must be a number, a sequence of numbers, or 'learn', got tensor(0.5000).",
        ),
        (
            {"rate": [0.1, None]},
            "The 'rate' argument of Dropout must be a number, a sequence of numbers, or 'learn', got None.",
        ),
        ({"rate": (0.1,)}, "The 'rate' argument of Dropout must be two rates or more if it is a list, got (0.1,)."),
        ({"rate": [0.1, 2]}, "The 'rate' argument of Dropout must lie between 0 and 1, got 2."),
        ({"noise": "beta"}, "The 'noise' argument of Dropout must be 'bernoulli' or 'gaussian', got 'beta'."),
        ({"inputs": 1}, "The 'inputs' argument of Dropout must be True or False, got 1."),
        ({"samples": 0}, "The 'samples' argument of Dropout must be an integer >= 1, got 0."),
        ({"holdout": 2.0}, "The 'holdout' argument of Dropout must lie between 0 and 1, got 2.0."),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(pr.InputError) as error:
        pr.Dropout(**options)
    assert str(error.value) == message


def test_numbers_of_other_libraries_are_accepted_as_rates():
    assert pr.Dropout(np.float32(0.25)).rate == 0.25
    assert pr.Dropout((np.float32(0.25), 0.5)).rate == (0.25, 0.5)


def test_a_density_is_refused():
    density = pr.Density(lambda p: -(p["x"] ** 2), {"x": pr.Param()})
    with pytest.raises(pr.InputError, match="Dropout needs a Model"):
        pr.fit(density, None, pr.Dropout(), steps=2)


def test_the_first_layer_is_the_first_of_all_layers():
    _, data = classification()
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), normed)
    with pytest.raises(
        pr.InputError, match="after its first layer, a linear, convolutional or recurrent layer with trained weights"
    ):
        pr.fit(pr.Model(net, pr.Categorical()), data, pr.Dropout(0.2), steps=2)
    given = pr.fit(pr.Model(net, pr.Categorical()), data, pr.Dropout(0.2, inputs=True), steps=2)
    assert list(given.rates) == ["0.weight"]
    frozen = nn.Sequential(nn.Linear(2, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 3))
    assert list(pr.fit(pr.Model(frozen, pr.Categorical()), data, pr.Dropout(0.2), steps=2).rates) == ["2.weight"]
    alone = pr.fit(pr.Model(nn.Linear(2, 3), pr.Categorical()), data, pr.Dropout(0.2), steps=2)
    assert list(alone.rates) == ["weight"]


def test_a_search_that_is_stopped_early_has_the_best_rate_on_held_out_rows():
    """On nearly noiseless data any rate below one half predicts better."""
    X = torch.linspace(-1, 1, 100)[:, None]
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    model = pr.Model(net, pr.Gaussian(0.05), prior=1.0)
    seen = []
    stop = lambda moment: seen.append(moment.posterior().rates["2.weight"]) or moment.step >= 200  # noqa: E731
    posterior = pr.fit(
        model, (X, X[:, 0]), pr.Dropout(rate=(0.9, 0.01)), steps=1000, batch_size=25, callbacks=[stop], progress=False
    )
    assert len(posterior.history["loss"]) < 300
    assert posterior.rates["2.weight"] == seen[-1] == pytest.approx(0.01)
