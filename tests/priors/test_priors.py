"""Priors against torch.distributions, scale rules by hand, and priors that correspond to penalties."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions, nn

import priory as pr
from priory.core.data import Data
from priory.distributions import ScaleMixture
from priory.fitting.prepare import make_target
from priory.priors.rules import by_rule

EXACT_TOLERANCE = {"rtol": 0, "atol": 1e-10}
BATCH_SHAPES = [(), (4,), (2, 3)]


def double(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def model_with(prior: object, likelihood: object = None) -> pr.Model:
    return pr.Model(small_net(), likelihood or pr.Gaussian(0.5), prior=prior)


# One distribution for all parameters.

SINGLE_PRIORS = {
    "Normal": distributions.Normal(double(0.3), double(1.7)),
    "Laplace": distributions.Laplace(double(-0.2), double(0.6)),
    "StudentT": distributions.StudentT(double(3.5), double(0.1), double(0.8)),
    "Cauchy": distributions.Cauchy(double(0.0), double(2.0)),
    "Gumbel": distributions.Gumbel(double(0.0), double(2.0)),
    "mixture": distributions.MixtureSameFamily(
        distributions.Categorical(double([0.3, 0.7])), distributions.Normal(double([0.0, 0.0]), double([0.1, 2.0]))
    ),
    "scale mixture": ScaleMixture(double(0.5), double(1.0), double(0.0025)),
}


@pytest.mark.parametrize("lead", BATCH_SHAPES)
@pytest.mark.parametrize("name", SINGLE_PRIORS)
def test_log_prob_is_the_sum_of_the_log_probs_of_the_entries(name: str, lead: tuple[int, ...]) -> None:
    model, w = model_with(SINGLE_PRIORS[name]), normal(*lead, 11)
    found = model.prior.log_prob(w)
    assert found.shape == lead
    torch.testing.assert_close(found, SINGLE_PRIORS[name].log_prob(w).sum(-1), **EXACT_TOLERANCE)


@pytest.mark.parametrize("lead", BATCH_SHAPES)
def test_log_prob_of_a_correlated_normal_is_over_the_flattened_weight(lead: tuple[int, ...]) -> None:
    root = normal(6, 6, seed=5)
    joint = distributions.MultivariateNormal(normal(6, seed=6), root @ root.T + torch.eye(6))
    rest = distributions.Normal(double(0.0), double(1.0))
    model, w = model_with({"0.weight": joint, "*": rest}), normal(*lead, 11)
    expected = joint.log_prob(w[..., :6]) + rest.log_prob(w[..., 6:]).sum(-1)
    torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)


@pytest.mark.parametrize("lead", BATCH_SHAPES)
def test_a_joint_distribution_of_a_row_is_over_every_row(lead: tuple[int, ...]) -> None:
    root = normal(3, 3, seed=5)
    joint = distributions.MultivariateNormal(normal(3, seed=6), root @ root.T + torch.eye(3))
    model, w = model_with({"0.weight": joint, "*": 1.0}), normal(*lead, 11)
    expected = joint.log_prob(w[..., :6].unflatten(-1, (2, 3))).sum(-1)
    expected = expected + distributions.Normal(double(0.0), double(1.0)).log_prob(w[..., 6:]).sum(-1)
    torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)


@pytest.mark.parametrize("kind", [distributions.Normal, distributions.Laplace])
def test_locations_and_scales_may_differ_by_entry(kind: type[distributions.Distribution]) -> None:
    entrywise = kind(normal(2, 3, seed=1), normal(2, 3, seed=2).exp())
    row = kind(normal(2, seed=3), normal(2, seed=4).exp())
    model, w = model_with({"0.weight": entrywise, "2.weight": row, "*": 1.0}), normal(5, 11)
    params = model.layout.constrain(w)
    unit = distributions.Normal(double(0.0), double(1.0))
    expected = entrywise.log_prob(params["0.weight"]).sum((-1, -2)) + row.log_prob(params["2.weight"]).sum((-1, -2))
    expected = expected + sum(unit.log_prob(params[name]).sum(-1) for name in ("0.bias", "2.bias"))
    torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)


@pytest.mark.parametrize("dims", [1, 2])
def test_independent_does_not_change_the_log_prob(dims: int) -> None:
    base = distributions.Normal(torch.zeros(2, 3).double(), 0.7 * torch.ones(2, 3).double())
    wrapped = distributions.Independent(base, dims)
    w = normal(4, 11)
    one = model_with({"0.weight": base, "*": 1.0}).prior.log_prob(w)
    other = model_with({"0.weight": wrapped, "*": 1.0}).prior.log_prob(w)
    torch.testing.assert_close(one, other, **EXACT_TOLERANCE)
    laplace = distributions.Laplace(base.loc, base.scale)
    one = model_with({"0.weight": laplace, "*": 1.0}).prior.log_prob(w)
    other = model_with({"0.weight": distributions.Independent(laplace, dims), "*": 1.0}).prior.log_prob(w)
    torch.testing.assert_close(one, other, **EXACT_TOLERANCE)


def test_a_number_is_the_scale_of_a_centred_normal() -> None:
    w = normal(4, 11)
    expected = distributions.Normal(double(0.0), double(0.3)).log_prob(w).sum(-1)
    torch.testing.assert_close(model_with(0.3).prior.log_prob(w), expected, **EXACT_TOLERANCE)
    torch.testing.assert_close(
        model_with(2).prior.log_prob(w),
        distributions.Normal(double(0.0), double(2.0)).log_prob(w).sum(-1),
        **EXACT_TOLERANCE,
    )


class Scaled(distributions.Distribution):
    """A user-defined distribution whose constructor has a default argument."""

    arg_constraints: dict[str, object] = {}  # noqa: RUF012 - as in torch
    support = distributions.constraints.real

    def __init__(self, scale: float = 1.0, validate_args: bool | None = None) -> None:
        self.inner = distributions.Laplace(double(0.0), double(scale))
        super().__init__(validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.inner.log_prob(value)


def test_a_user_defined_distribution_is_used_unchanged() -> None:
    w = normal(4, 11)
    expected = distributions.Laplace(double(0.0), double(5.0)).log_prob(w).sum(-1)
    torch.testing.assert_close(model_with(Scaled(5.0)).prior.log_prob(w), expected, **EXACT_TOLERANCE)


@pytest.mark.parametrize("name", SINGLE_PRIORS)
def test_the_gradient_of_the_log_prior_matches_autograd(name: str) -> None:
    model = model_with(SINGLE_PRIORS[name])
    target = make_target(model, Data.of((normal(5, 3), normal(5))).prepared(model.prepare), 1.0, "likelihood")
    for shape in ((11,), (3, 11)):
        w = normal(*shape).requires_grad_()
        value, gradient = target.log_prior_and_grad(w.detach())
        expected = SINGLE_PRIORS[name].log_prob(w).sum(-1)
        torch.testing.assert_close(value, expected.detach(), **EXACT_TOLERANCE)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), w)[0], **EXACT_TOLERANCE)


def test_a_scale_mixture_is_the_sum_of_two_normals_by_pattern() -> None:
    """Blundell's prior on the weights only agrees with torch's mixture, in float32 up to its precision."""
    mixture = distributions.MixtureSameFamily(
        distributions.Categorical(double([0.25, 0.75])), distributions.Normal(double([0.0, 0.0]), double([0.5, 0.01]))
    )
    by_pattern = {"*.weight": ScaleMixture(double(0.25), double(0.5), double(0.01)), "*": 2.0}
    model, w = model_with(by_pattern), 0.1 * normal(5, 11)
    params = model.layout.constrain(w)
    expected = sum(mixture.log_prob(params[f"{i}.weight"]).sum((-1, -2)) for i in (0, 2))
    unit = distributions.Normal(double(0.0), double(2.0))
    expected = expected + sum(unit.log_prob(params[f"{i}.bias"]).sum(-1) for i in (0, 2))
    torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)
    single = pr.Model(small_net().float(), pr.Gaussian(0.5), prior=by_pattern)
    found = single.prior.log_prob(w.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


# Patterns.


def test_the_first_matching_pattern_applies() -> None:
    prior = model_with({"0.*": 0.1, "*.weight": 2.0, "*": 5.0}).prior
    scale = prior.layout.constrain(prior.precision.rsqrt())
    assert {name: sorted(set(t.flatten().tolist())) for name, t in scale.items()} == {
        "0.weight": [pytest.approx(0.1)],
        "0.bias": [pytest.approx(0.1)],
        "2.weight": [pytest.approx(2.0)],
        "2.bias": [pytest.approx(5.0)],
    }


def test_patterns_accept_rules_distributions_numbers_and_flat() -> None:
    laplace = distributions.Laplace(double(0.0), double(1.0))
    model, w = model_with({"0.weight": "he", "0.bias": "flat", "2.weight": laplace, "*": 3.0}), normal(11)
    p = model.layout.constrain(w)
    he, three = distributions.Normal(double(0.0), double(2 / 3).sqrt()), distributions.Normal(double(0.0), double(3.0))
    expected = he.log_prob(p["0.weight"]).sum() + laplace.log_prob(p["2.weight"]).sum()
    torch.testing.assert_close(model.prior.log_prob(w), expected + three.log_prob(p["2.bias"]).sum(), **EXACT_TOLERANCE)
    assert model.prior.improper


@pytest.mark.parametrize(
    ("prior", "sentence"),
    [
        ({}, "name at least one pattern"),
        ({"weights": 1.0, "*": 1.0}, "must use names of the network: 0.weight, 0.bias, 2.weight, 2.bias"),
        ({"*.weight": 1.0}, "cover every parameter"),
        ("xavier", "'glorot'"),
        (0.0, "have a scale above zero"),
        (-1.0, "have a scale above zero"),
        (True, "be a distribution, a number"),
        (None, "be a distribution, a number"),
        (distributions.Poisson(double(1.0)), "over real numbers"),
        (distributions.Gamma(double(1.0), double(1.0)), "over the whole line"),
        (distributions.Normal(torch.zeros(7).double(), torch.ones(7).double()), "broadcast to its shape"),
        (distributions.Laplace(torch.zeros(7).double(), torch.ones(7).double()), "broadcast to its shape"),
        ({"0.weight": distributions.MultivariateNormal(torch.zeros(5), torch.eye(5)), "*": 1.0}, "broadcast"),
    ],
)
def test_an_invalid_prior_is_rejected(prior: object, sentence: str) -> None:
    with pytest.raises(pr.InputError, match=sentence):
        model_with(prior)


# Scale rules: (fan-in, fan-out) of each weight by hand; None for a bias, N(0, 1), and "norm" for N(1, 1).

LAYERS: dict[str, tuple[Callable[[], nn.Module], dict[str, object]]] = {
    "Linear": (lambda: nn.Linear(4, 3), {"weight": (4, 3), "bias": None}),
    "Bilinear": (lambda: nn.Bilinear(4, 5, 3), {"weight": (20, 15), "bias": None}),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 5), {"weight": (20, 30), "bias": None}),
    "Conv2d": (lambda: nn.Conv2d(4, 6, (3, 5)), {"weight": (60, 90), "bias": None}),
    # each output sees only the inputs of its group, and each input feeds only the outputs of its group
    "Conv2d in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), {"weight": (18, 27), "bias": None}),
    "Conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), {"weight": (9, 9), "bias": None}),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), {"weight": (36, 54), "bias": None}),
    "ConvTranspose2d in groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), {"weight": (18, 27), "bias": None}),
    # one gate, not the four that are stacked
    "LSTM": (
        lambda: nn.LSTM(3, 5),
        {"weight_ih_l0": (3, 5), "weight_hh_l0": (5, 5), "bias_ih_l0": None, "bias_hh_l0": None},
    ),
    "LSTM with a projection": (
        lambda: nn.LSTM(3, 5, proj_size=2, bias=False),
        {"weight_ih_l0": (3, 5), "weight_hh_l0": (2, 5), "weight_hr_l0": (5, 2)},
    ),
    "GRU": (lambda: nn.GRU(3, 5, bias=False), {"weight_ih_l0": (3, 5), "weight_hh_l0": (5, 5)}),
    "RNN": (lambda: nn.RNN(3, 5, bias=False), {"weight_ih_l0": (3, 5), "weight_hh_l0": (5, 5)}),
    "LSTMCell": (
        lambda: nn.LSTMCell(3, 5),
        {"weight_ih": (3, 5), "weight_hh": (5, 5), "bias_ih": None, "bias_hh": None},
    ),
    "GRUCell": (lambda: nn.GRUCell(3, 5, bias=False), {"weight_ih": (3, 5), "weight_hh": (5, 5)}),
    # one of query, key and value
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": (8, 8), "in_proj_bias": None, "out_proj.weight": (8, 8), "out_proj.bias": None},
    ),
    "MultiheadAttention of other keys": (
        lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=3, bias=False),
        {"q_proj_weight": (8, 8), "k_proj_weight": (5, 8), "v_proj_weight": (3, 8), "out_proj.weight": (8, 8)},
    ),
    "MultiheadAttention with key biases": (
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, bias=False),
        {"in_proj_weight": (8, 8), "out_proj.weight": (8, 8), "bias_k": None, "bias_v": None},
    ),
    "Embedding": (lambda: nn.Embedding(10, 4), {"weight": None}),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4), {"weight": None}),
    "LayerNorm": (lambda: nn.LayerNorm((2, 3)), {"weight": "norm", "bias": None}),
    "RMSNorm": (lambda: nn.RMSNorm(3), {"weight": "norm"}),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), {"weight": "norm", "bias": None}),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), {"weight": "norm", "bias": None}),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), {"weight": "norm", "bias": None}),
    "PReLU": (lambda: nn.PReLU(3), {"weight": None}),
}
RULE_VARIANCES = {
    "fan_in": lambda fan_in, fan_out: 1 / fan_in,
    "glorot": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "he": lambda fan_in, fan_out: 2 / fan_in,
}


@pytest.mark.parametrize("rule", RULE_VARIANCES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_rule_gives_each_parameter_the_variance_of_its_fans(layer: str, rule: str) -> None:
    build, fans = LAYERS[layer]
    found = by_rule(rule, build(), torch.float64)
    expected = {}
    for name, fan in fans.items():
        mean = 1.0 if fan == "norm" else 0.0
        expected[name] = (mean, RULE_VARIANCES[rule](*fan) if isinstance(fan, tuple) else 1.0)
    assert {name: (p.mean.item(), p.variance.item()) for name, p in found.items()} == {
        name: (mean, pytest.approx(variance, rel=1e-12)) for name, (mean, variance) in expected.items()
    }


@pytest.mark.parametrize("rule", RULE_VARIANCES)
def test_a_models_prior_by_rule_is_the_product_of_its_layers_normals(rule: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.LayerNorm(9), nn.Linear(9, 1)).double()
    model = pr.Model(net, pr.Gaussian(0.5), prior=rule)
    w, expected = normal(4, model.layout.size), 0.0
    for name, d in by_rule(rule, net, torch.float64).items():
        expected = expected + d.log_prob(model.layout.constrain(w)[name]).flatten(1).sum(-1)
    torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)


def test_a_frozen_parameter_has_no_prior() -> None:
    net = small_net()
    net[0].weight.requires_grad_(False)
    assert list(by_rule("glorot", net, torch.float64)) == ["0.bias", "2.weight", "2.bias"]
    model = pr.Model(net, pr.Gaussian(0.5), prior=1.0)
    w = normal(model.layout.size)
    expected = distributions.Normal(double(0.0), double(1.0)).log_prob(w).sum()
    torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)


def test_a_shared_parameter_is_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False)
            self.two = nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    model = pr.Model(Tied().double(), pr.Gaussian(0.5), prior="he")
    w = normal(9)
    assert model.layout.names == ("one.weight",)
    expected = distributions.Normal(double(0.0), double(2 / 3).sqrt()).log_prob(w).sum()
    torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)


# Flat: maximum likelihood.


def test_a_flat_prior_has_log_density_zero_and_no_gradient() -> None:
    model = model_with("flat")
    target = make_target(model, Data.of((normal(5, 3), normal(5))).prepared(model.prepare), 1.0, "likelihood")
    value, gradient = target.log_prior_and_grad(100 * normal(4, 11))
    assert value.tolist() == [0.0] * 4
    assert not bool(gradient.any())


def test_map_under_a_flat_prior_is_the_least_squares_solution() -> None:
    X, y = normal(60, 3), normal(60, seed=1)
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(3, 1).double(), pr.Gaussian(0.5), prior="flat")
    posterior = pr.fit(model, (X, y), pr.MAP(learning_rate=0.05), steps=1500, progress=False)
    design = torch.cat([X, torch.ones(60, 1).double()], 1)
    solution = torch.linalg.lstsq(design, y).solution
    found = torch.cat([posterior.mean["weight"][0], posterior.mean["bias"]])
    torch.testing.assert_close(found, solution, rtol=0, atol=1e-8)


# Weight decay and other penalties.


@pytest.mark.parametrize("batch", [40, 10])
def test_the_gradient_under_weight_decay_is_that_of_mean_loss_plus_half_wd_times_the_squares(batch: int) -> None:
    X, y, decay, net = normal(40, 3), torch.arange(40) % 3, 0.03, nn.Linear(3, 3).double()
    model = pr.Model(net, pr.Categorical(), prior=pr.priors.weight_decay(decay, 40))
    rows = Data.of((X, y)).prepared(model.prepare)
    target = make_target(model, rows, 1.0, "likelihood")
    w = normal(12, seed=9)
    _, gradient = target.log_joint_and_grad(w, (X[:batch], y[:batch]))
    leaf = w.clone().requires_grad_()
    outputs = X[:batch] @ leaf[:9].view(3, 3).T + leaf[9:]
    objective = nn.functional.cross_entropy(outputs, y[:batch]) + decay / 2 * leaf.square().sum()
    (expected,) = torch.autograd.grad(objective, leaf)
    torch.testing.assert_close(gradient, -40 * expected, **EXACT_TOLERANCE)


def test_map_under_weight_decay_is_the_ridge_solution() -> None:
    X, y, decay = normal(50, 4), normal(50, seed=1), 0.2
    model = pr.Model(nn.Linear(4, 1, bias=False).double(), pr.Gaussian(1.0), prior=pr.priors.weight_decay(decay, 50))
    posterior = pr.fit(model, (X, y), pr.MAP(learning_rate=0.05), steps=1500, progress=False)
    # mean of (y - Xw)^2 / 2 + decay/2 w'w
    expected = torch.linalg.solve(X.T @ X / 50 + decay * torch.eye(4).double(), X.T @ y / 50)
    torch.testing.assert_close(posterior.mean["weight"][0], expected, rtol=0, atol=1e-8)


def test_weight_decay_is_the_normal_of_precision_n_times_wd() -> None:
    prior = pr.priors.weight_decay(1e-3, 1234)
    assert prior.scale.item() ** -2 == pytest.approx(1.234, rel=1e-12)
    assert prior.loc.item() == 0
    for wd, n, sentence in ((0.0, 5, "positive number"), (-1.0, 5, "positive number"), (0.1, 0, "an integer >= 1")):
        with pytest.raises(pr.InputError, match=sentence):
            pr.priors.weight_decay(wd, n)


def test_a_penalty_of_lambda_times_the_squares_is_the_normal_prior_of_precision_two_lambda() -> None:
    penalty, X, y = 0.7, normal(20, 3), normal(20, seed=1)
    model = model_with((2 * penalty) ** -0.5)
    target = make_target(model, Data.of((X, y)).prepared(model.prepare), 1.0, "likelihood")
    for seed in range(3):
        w, v = normal(11, seed=seed), normal(11, seed=seed + 10)
        torch.testing.assert_close(target.log_prior_and_grad(w)[1], -2 * penalty * w, **EXACT_TOLERANCE)
        change = target.log_prior(w) - target.log_prior(v)
        torch.testing.assert_close(change, penalty * (v.square().sum() - w.square().sum()), **EXACT_TOLERANCE)


def test_a_penalty_of_lambda_times_the_sizes_is_the_laplace_prior_of_scale_one_over_lambda() -> None:
    penalty = 0.7
    prior = model_with(distributions.Laplace(double(0.0), double(1 / penalty))).prior
    w, v = normal(11), normal(11, seed=1)
    torch.testing.assert_close(
        prior.log_prob(w) - prior.log_prob(v), penalty * (v.abs().sum() - w.abs().sum()), **EXACT_TOLERANCE
    )


# Priors of a learnt noise, whose unconstrained coordinate is its logarithm.


@pytest.mark.parametrize("lead", BATCH_SHAPES)
@pytest.mark.parametrize(
    "noise",
    [
        distributions.LogNormal(double(-0.5), double(0.8)),
        distributions.Gamma(double(2.0), double(3.0)),
        distributions.Exponential(double(2.0)),
        distributions.HalfNormal(double(1.5)),
        distributions.HalfCauchy(double(1.5)),
    ],
    ids=lambda d: type(d).__name__,
)
def test_a_noise_prior_carries_the_log_determinant_of_its_logarithm(
    noise: distributions.Distribution, lead: tuple[int, ...]
) -> None:
    model = model_with("flat", pr.Gaussian(prior=noise))
    w = normal(*lead, 12)
    u = w[..., -1]
    torch.testing.assert_close(model.layout.constrain(w)["likelihood.noise"], u.exp(), **EXACT_TOLERANCE)
    torch.testing.assert_close(model.prior.log_prob(w), noise.log_prob(u.exp()) + u, **EXACT_TOLERANCE)


def test_a_lognormal_noise_prior_is_a_normal_in_closed_form() -> None:
    model = model_with(0.5, pr.Gaussian(prior=distributions.LogNormal(double(-0.5), double(0.8))))
    assert model.prior.others == []
    assert model.prior.loc[-1].item() == pytest.approx(-0.5)
    assert model.prior.precision[-1].item() == pytest.approx(0.8**-2)


def test_the_default_prior_of_each_output_noise_is_lognormal_0_3() -> None:
    net = nn.Linear(3, 2).double()
    model = pr.Model(net, pr.Gaussian(outputs=2), prior="flat")
    w = normal(4, 10)
    u = w[..., -2:]
    expected = (distributions.LogNormal(double(0.0), double(3.0)).log_prob(u.exp()) + u).sum(-1)
    torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)


def test_the_density_of_a_noise_over_the_whole_line_integrates_to_one() -> None:
    model = model_with("flat", pr.Gaussian(prior=distributions.Gamma(double(2.0), double(3.0))))
    u = torch.linspace(-25, 8, 20_001, dtype=torch.float64)
    w = torch.cat([torch.zeros(len(u), 11).double(), u[:, None]], 1)
    assert torch.trapezoid(model.prior.log_prob(w).exp(), u).item() == pytest.approx(1.0, abs=1e-8)


def test_patterns_of_the_networks_prior_do_not_reach_the_noise() -> None:
    model = model_with({"*": 0.1}, pr.Gaussian())
    assert model.prior.precision[-1].item() == pytest.approx(1 / 9)
    with pytest.raises(pr.InputError, match="must use names of the network"):
        model_with({"likelihood.*": 0.1, "*": 1.0}, pr.Gaussian())


def test_typical_scales_are_the_priors_standard_deviations() -> None:
    laplace = distributions.Laplace(double(0.0), double(3.0))
    cauchy = distributions.Cauchy(double(0.0), double(3.0))
    model = model_with({"0.weight": laplace, "0.bias": 0.2, "2.weight": "flat", "2.bias": cauchy})
    scale = model.layout.constrain(model.prior.typical_scale())
    assert scale["0.weight"].flatten().tolist() == pytest.approx([3 * math.sqrt(2)] * 6)
    assert scale["0.bias"].tolist() == pytest.approx([0.2] * 2)
    assert scale["2.weight"].flatten().tolist() == [1.0, 1.0]
    assert scale["2.bias"].tolist() == [1.0]


def test_a_prior_takes_the_type_of_the_network() -> None:
    model = pr.Model(small_net().float(), pr.Gaussian(0.5), prior=SINGLE_PRIORS["StudentT"])
    assert model.prior.log_prob(torch.zeros(11)).dtype == torch.float32
    wrapped = distributions.Independent(distributions.Laplace(torch.zeros(2).double(), torch.ones(2).double()), 1)
    model = pr.Model(small_net().float(), pr.Gaussian(0.5), prior={"0.bias": wrapped, "*": 1.0})
    assert model.prior.log_prob(torch.zeros(11)).dtype == torch.float32
