"""The dropout inside a network is translated into masks of weights, and refused where that is impossible."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import priory as pr
from priory.core.streams import stream
from priory.network.dropout_sites import DropoutUnits, sites_by_layer
from priory.network.skeleton import Network
from priory.network.traced_dropout import CHANNEL_DROPOUT, DROPOUT_FUNCTIONS, sites_in_network


class FixedDropoutMasks(TorchFunctionMode):
    """Replace dropout by the given masks, one mask per call with one entry per unit, shared by all rows."""

    def __init__(self, masks):
        super().__init__()
        self.masks = iter(masks)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in DROPOUT_FUNCTIONS:
            return func(*args, **(kwargs or {}))
        x, z = args[0], next(self.masks)
        return x * (z.view(1, -1, *[1] * (x.ndim - 2)) if func in CHANNEL_DROPOUT else z.view(1, *x.shape[1:]))


def module_of(forward, **layers):
    """Build a float64 module from named layers and a forward function."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)

        def forward(self, x):
            return forward(self, x)

    torch.manual_seed(0)
    net = Net()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net.double()


def rows(*shape, n=3):
    return torch.randn(n, *shape, dtype=torch.float64, generator=stream(0, "x"))


def sites_of(net, x):
    return [(site.parameters, site.units, site.rate) for site in sites_in_network(Network(net), (x[:2],))]


TRANSLATED = {
    "two heads": (
        module_of(
            lambda m, x: m.b(h := m.d(torch.relu(m.a(x)))) + m.c(h).tanh(),
            **{"a": nn.Linear(4, 5), "b": nn.Linear(5, 1), "c": nn.Linear(5, 1), "d": nn.Dropout(0.3)},
        ),
        rows(4),
        [(("b.weight", "c.weight"), 5, 0.3)],
    ),
    "the same layer twice on the same units": (
        module_of(lambda m, x: m.b(h := m.d(m.a(x))) * m.b(h), a=nn.Linear(4, 5), b=nn.Linear(5, 1), d=nn.Dropout(0.3)),
        rows(4),
        [(("b.weight",), 5, 0.3)],
    ),
    "channels that are flattened into features": (
        nn.Sequential(
            *(nn.Conv2d(1, 3, 3), nn.Dropout2d(0.2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
        ).double(),
        rows(1, 6, 6),
        [(("5.weight",), 3, 0.2)],
    ),
    "channels that are averaged": (
        module_of(
            lambda m, x: m.b(m.d(m.a(x)).mean((2, 3))),
            **{"a": nn.Conv2d(1, 3, 3), "b": nn.Linear(3, 2), "d": nn.Dropout2d(0.2)},
        ),
        rows(1, 6, 6),
        [(("b.weight",), 3, 0.2)],
    ),
    "channels of a grouped convolution and of a head": (
        module_of(
            lambda m, x: m.c(h := m.d(m.a(x))).mean((2, 3)) + m.b(functional.adaptive_avg_pool2d(h, 1).flatten(1)),
            **{"a": nn.Conv2d(1, 4, 3), "b": nn.Linear(4, 2), "c": nn.Conv2d(4, 2, 3, groups=2)},
            d=nn.Dropout2d(0.2),
        ),
        rows(1, 6, 6),
        [(("c.weight", "b.weight"), 4, 0.2)],
    ),
    "entries that are flattened": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(32, 2)).double(),
        rows(1, 6, 6),
        [(("4.weight",), 32, 0.2)],
    ),
    "channels that become the last dimension": (
        module_of(
            lambda m, x: m.b(m.d(x.transpose(1, 2)).transpose(1, 2)).mean(1),
            **{"b": nn.Linear(3, 2), "d": nn.Dropout1d(0.4)},
        ),
        rows(5, 3),
        [(("b.weight",), 3, 0.4)],
    ),
    "in place": (
        nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3, inplace=True), nn.ReLU(inplace=True), nn.Linear(5, 1)).double(),
        rows(4),
        [(("3.weight",), 5, 0.3)],
    ),
}


@pytest.mark.parametrize("case", TRANSLATED)
def test_masks_of_weights_give_the_outputs_of_the_networks_own_dropout(case):
    net, x, wanted = TRANSLATED[case]
    network = Network(net.eval())
    sites = sites_in_network(network, (x[:2],))
    assert [(site.parameters, site.units, site.rate) for site in sites] == wanted
    units = DropoutUnits.of(network, sites, network.size)
    z = (torch.rand(len(units.site), generator=stream(1, "z"), dtype=torch.float64) > 0.4).double() / 0.6
    assert 0 < int((z == 0).sum()) < len(z)
    with FixedDropoutMasks([z]):
        dropped = net(x.clone())
    masked = network(network.initial * units.spread(z), (x,), {}, train=False)
    assert torch.allclose(masked, dropped, rtol=0, atol=1e-12)


def test_tracing_draws_no_random_numbers_and_leaves_the_network_unchanged():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(3, 1)).double()
    network, before = Network(net), torch.get_rng_state()
    assert sites_of(net, rows(4)) == [(("4.weight",), 3, 0.3)]
    sites_in_network(network, (rows(4),))
    assert torch.equal(before, torch.get_rng_state())
    assert (network.silent, network.quiet) == (False, False)
    assert torch.equal(network(network.initial, (rows(4),), {}, train=False), net.eval()(rows(4)))


NOT_BEFORE_A_LAYER = "must come right before linear, convolutional or recurrent layers"
DIFFERENT_UNITS = "must always read the same dropped units"
REFUSED = {
    "a layer and a skip connection": (
        module_of(
            lambda m, x: m.o((h := m.d(torch.relu(m.a(x)))) + torch.relu(m.b(h))),
            **{"a": nn.Linear(4, 5), "b": nn.Linear(5, 5), "o": nn.Linear(5, 1), "d": nn.Dropout(0.3)},
        ),
        rows(4),
        NOT_BEFORE_A_LAYER,
    ),
    "one of two uses of a layer": (
        module_of(lambda m, x: m.a(m.d(torch.relu(m.a(x)))), a=nn.Linear(4, 4), d=nn.Dropout(0.3)),
        rows(4),
        DIFFERENT_UNITS,
    ),
    "a weight that is also read directly": (
        module_of(lambda m, x: m.a(m.d(x)) @ m.a.weight, a=nn.Linear(4, 4), d=nn.Dropout(0.3)),
        rows(4),
        DIFFERENT_UNITS,
    ),
    "two rates for a layer": (
        module_of(
            lambda m, x: m.a(m.e(m.a(m.d(x)))),
            **{"a": nn.Linear(4, 4), "d": nn.Dropout(0.1), "e": nn.Dropout(0.5)},
        ),
        rows(4),
        DIFFERENT_UNITS,
    ),
    "alpha dropout": (
        nn.Sequential(nn.Linear(4, 5), nn.AlphaDropout(0.3), nn.Linear(5, 1)).double(),
        rows(4),
        "alpha dropout",
    ),
    "alpha dropout of features": (
        nn.Sequential(nn.Conv1d(4, 5, 1), nn.FeatureAlphaDropout(0.3), nn.Conv1d(5, 1, 1), nn.Flatten()).double(),
        rows(4, 3),
        "alpha dropout",
    ),
    "single entries before a convolution": (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.Dropout(0.2), nn.Conv2d(3, 1, 3), nn.Flatten()).double(),
        rows(1, 6, 6),
        "must drop whole channels.*'2.weight'.*use nn.Dropout2d",
    ),
    "whole steps of a sequence": (
        nn.Sequential(nn.Dropout1d(0.2), nn.Linear(3, 1)).double(),
        rows(5, 3),
        "'1.weight', which doesn't read the units that it drops",
    ),
    "whole rows": (nn.Sequential(nn.Dropout1d(0.2), nn.Linear(4, 1)).double(), rows(4), "drop units of every row"),
    "single entries that are pooled": (
        nn.Sequential(nn.Dropout(0.2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9, 1)).double(),
        rows(1, 6, 6),
        NOT_BEFORE_A_LAYER,
    ),
    "before a layer norm": (
        nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.LayerNorm(5), nn.Linear(5, 1)).double(),
        rows(4),
        "'layer_norm'",
    ),
    "the output": (nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.2)).double(), rows(4), "the network's output"),
    "before another dropout": (
        nn.Sequential(nn.Dropout(0.2), nn.Dropout(0.3), nn.Linear(4, 1)).double(),
        rows(4),
        "rate 0.2 that goes into another dropout",
    ),
    "dropout of weights": (
        module_of(lambda m, x: functional.linear(x, functional.dropout(m.a.weight, 0.2)), a=nn.Linear(4, 1)),
        rows(4),
        "'linear'",
    ),
    "a rate of one": (nn.Sequential(nn.Dropout(1.0), nn.Linear(4, 1)).double(), rows(4), "have a rate below 1, got 1"),
    "a rate of one between recurrent layers": (
        module_of(lambda m, x: m.r(x)[0].mean((1, 2)), r=nn.GRU(4, 3, 2, dropout=1.0, batch_first=True)),
        rows(5, 4),
        "have a rate below 1, got 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_dropout_that_is_not_a_mask_of_weights_is_refused(case):
    net, x, message = REFUSED[case]
    with pytest.raises(pr.InputError, match=message):
        sites_of(net, x)


def test_setting_the_rates_to_zero_gives_masks_by_layer_as_the_error_suggests():
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 1))
    data = (rows(4, n=20).float(), rows(n=20).float())
    with pytest.raises(pr.InputError, match="set every p to 0 to let Dropout place its masks by layer"):
        pr.fit(pr.Model(net, pr.Gaussian(0.1)), data, pr.Dropout(0.1), steps=2)
    net[1].p = 0.0
    assert pr.fit(pr.Model(net, pr.Gaussian(0.1)), data, pr.Dropout(0.1), steps=2).rates == {
        "3.weight": pytest.approx(0.1)
    }


def test_dropout_before_a_frozen_layer_is_refused():
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 1).requires_grad_(False)).double()
    with pytest.raises(pr.InputError, match="layers that are trained"):
        sites_of(net, rows(4))


def test_unused_dropout_is_refused_and_a_rate_of_zero_is_ignored():
    unused = module_of(lambda m, x: (m.d(x), m.a(x))[1], a=nn.Linear(4, 1), d=nn.Dropout(0.3))
    with pytest.raises(pr.InputError, match="goes into nothing that can be followed"):
        sites_of(unused, rows(4))
    assert sites_of(nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 1)).double(), rows(4)) == []


def test_dropout_before_a_frozen_recurrent_layer_is_refused():
    def net(frozen, **dropout):
        built = module_of(
            lambda m, x: m.o(m.r(m.d(x))[0][:, -1]),
            **{"r": nn.GRU(3, 4, 2, batch_first=True, bidirectional=True, **dropout), "o": nn.Linear(8, 1)},
            d=nn.Dropout(0.0 if dropout else 0.2),
        )
        built.r.get_parameter(frozen).requires_grad_(False)
        return built

    with pytest.raises(pr.InputError, match=r"rate 0\.2 that goes into 'gru'"):
        sites_of(net("weight_ih_l0_reverse"), rows(5, 3))
    with pytest.raises(pr.InputError, match=r"rate 0\.3 that goes into a recurrent layer that isn't trained"):
        sites_of(net("weight_ih_l1", dropout=0.3), rows(5, 3))


# Sequences: all positions share one mask.


def test_all_positions_of_a_sequence_share_one_mask_with_a_warning():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)).double()
    with pytest.warns(pr.PrioryWarning, match="the same units at all positions"):
        assert sites_of(net, rows(5, 3)) == [(("2.weight",), 4, 0.2)]
    assert sites_of(net, rows(1, 3)) == [(("2.weight",), 4, 0.2)]  # one position: no warning


def test_positions_that_are_reshaped_into_rows_warn_too():
    net = module_of(
        lambda m, x: m.b(m.d(m.a(x.reshape(-1, 3)))).reshape(len(x), -1),
        **{"a": nn.Linear(3, 4), "b": nn.Linear(4, 1), "d": nn.Dropout(0.2)},
    )
    with pytest.warns(pr.PrioryWarning, match="the same units at all positions"):
        assert sites_of(net, rows(5, 3)) == [(("b.weight",), 4, 0.2)]


def test_a_sequence_read_both_per_position_and_flattened_is_refused():
    net = module_of(
        lambda m, x: m.b(h := m.d(x)).mean(1) + m.c(h.flatten(1)),
        **{"b": nn.Linear(3, 1), "c": nn.Linear(15, 1), "d": nn.Dropout(0.2)},
    )
    with pytest.raises(pr.InputError, match=DIFFERENT_UNITS):
        sites_of(net, rows(5, 3))


@pytest.mark.parametrize("bidirectional", [False, True], ids=["unidirectional", "bidirectional"])
def test_dropout_between_recurrent_layers_masks_the_inputs_of_the_later_layer(bidirectional):
    layer = nn.LSTM(3, 4, 3, dropout=0.3, batch_first=True, bidirectional=bidirectional)
    net = module_of(
        lambda m, x: m.o(m.r(m.d(x))[0][:, -1]), r=layer, d=nn.Dropout(0.1), o=nn.Linear(8 if bidirectional else 4, 1)
    )
    wanted = []
    for depth, (units, rate) in enumerate(
        [(3, 0.1), (8 if bidirectional else 4, 0.3), (8 if bidirectional else 4, 0.3)]
    ):
        names = (f"r.weight_ih_l{depth}", f"r.weight_ih_l{depth}_reverse")
        wanted.append((names if bidirectional else names[:1], units, rate))
    with pytest.warns(pr.PrioryWarning, match="the same units at all positions"):
        assert sites_of(net, rows(5, 3)) == wanted


def test_dropout_between_recurrent_layers_is_found_with_packed_sequences():
    def forward(m, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [5] * len(x), batch_first=True)
        return m.r(packed)[1][-1]

    net = module_of(forward, r=nn.GRU(3, 4, 2, dropout=0.3, batch_first=True))
    with pytest.warns(pr.PrioryWarning, match="the same units at all positions"):
        assert sites_of(net, rows(5, 3)) == [(("r.weight_ih_l1",), 4, 0.3)]


# From fit to prediction.


def test_epistemic_variance_equals_that_of_the_network_with_dropout_on():
    net = module_of(
        lambda m, x: m.b(h := m.d(torch.relu(m.a(x)))) + m.c(h),
        **{"a": nn.Linear(4, 8), "b": nn.Linear(8, 1), "c": nn.Linear(8, 1), "d": nn.Dropout(0.3)},
    )
    X = rows(4, n=40)
    posterior = pr.fit(pr.Model(net, pr.Gaussian(0.1), prior=1.0), (X, X[:, 0]), pr.Dropout(), steps=30)
    found = posterior.predict(X[:3], samples=4000).epistemic
    net.load_state_dict(posterior.mean)
    z = (torch.rand(4000, 1, 8, generator=stream(1, "z"), dtype=torch.float64) > 0.3) / 0.7
    with torch.no_grad():
        h = torch.relu(net.a(X[:3])) * z
        wanted = (net.b(h) + net.c(h)).squeeze(-1).var(0)
        independent_heads = net.b(h).squeeze(-1).var(0) + net.c(h).squeeze(-1).var(0)  # if each head had its own mask
    # Ratio of two variances, each from 4,000 draws with kurtosis 3: 5 standard errors (false alarms: 1e-6).
    error = 5 * math.sqrt(2 * 2 / 4000)
    assert bool(((found / wanted - 1).abs() < error).all())
    assert bool(((independent_heads / wanted - 1).abs() > 2 * error).any())


def test_dropout_that_ignores_the_mode_is_switched_off_in_fits_and_predictions():
    net = module_of(
        lambda m, x: m.b(functional.dropout(torch.relu(m.a(x)), 0.3, training=True)),
        **{"a": nn.Linear(4, 8), "b": nn.Linear(8, 1)},
    )
    X, before = rows(4, n=40), torch.get_rng_state()
    model = pr.Model(net, pr.Gaussian(), prior=1.0)
    for method in (pr.Dropout(), pr.Dropout((0.1, 0.3)), pr.Ensemble(pr.Dropout(), 2)):
        posterior = pr.fit(model, (X, X[:, 0]), method, steps=30)
        a, b = (posterior.predict(X[:5], seed=1).mean for _ in range(2))
        assert torch.equal(a, b)
    assert torch.equal(before, torch.get_rng_state())


def test_sums_over_a_site_include_the_weights_of_every_layer_that_reads_it():
    def forward(net, x):
        h = functional.dropout(torch.relu(net.first(x)), 0.3, net.training)
        return net.left(h) + net.right(h)

    net = module_of(forward, first=nn.Linear(3, 4), left=nn.Linear(4, 2), right=nn.Linear(4, 2))
    network = Network(net)
    units = DropoutUnits.of(network, sites_in_network(network, (torch.randn(5, 3, dtype=torch.float64),)), network.size)
    values = torch.randn(2, network.size, dtype=torch.float64, generator=stream(0, "values"))
    wanted = values[:, units.masked].sum(-1, keepdim=True)  # one site
    assert units.sums(values).shape == (2, 1)
    assert torch.allclose(units.sums(values), wanted, rtol=1e-12)
    assert int(units.masked.sum()) == 16


def test_the_first_layer_is_the_one_called_first():
    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(5, 1), nn.Linear(2, 5)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    network = pr.Model(HeadFirst(), pr.Gaussian(0.1)).network
    (site,) = sites_by_layer(network, inputs=False, some=(torch.zeros(3, 2),))
    assert site.parameters == ("head.weight",)
    bidirectional = sites_by_layer(network, inputs=True, some=(torch.zeros(3, 2),))
    assert [site.parameters for site in bidirectional] == [("body.weight",), ("head.weight",)]
    assert not any(module._forward_pre_hooks for module in network.skeleton.modules())
