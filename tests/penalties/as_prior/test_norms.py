"""Penalties as priors: values against r, constants against quadrature and known integrals, variances by sampling."""

import math

import mpmath
import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn

import priory as pr
from priory.penalties import (
    L1,
    L2,
    Bridge,
    ElasticNet,
    GroupLasso,
    Penalty,
    ReverseGroupLasso,
    layer_factors,
)
from priory.penalties.as_prior.densities import ElasticNetDensity, GroupNormDensity, truncated_normal_excess
from priory.penalties.as_prior.parameters import describe_parameters
from priory.testing import assert_mean_close

F64 = torch.float64
EXACT_TOLERANCE = {"rtol": 0, "atol": 1e-10}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def model(penalty: object) -> pr.Model:
    return pr.Model(net(), pr.Categorical(), prior=penalty)


def r_of(penalty: object, named: dict[str, Tensor]) -> Tensor:
    """Return r summed over the parameters, computed by hand."""
    total = torch.zeros((), dtype=F64)
    for w in named.values():
        if isinstance(penalty, GroupLasso) and w.ndim == 2:
            dim = 0 if isinstance(penalty, ReverseGroupLasso) else 1
            total = total + w.square().sum(dim).sqrt().sum()
        elif isinstance(penalty, (L1, GroupLasso)):
            total = total + w.abs().sum()
        elif isinstance(penalty, L2):
            total = total + w.square().sum()
        elif isinstance(penalty, Bridge):
            total = total + (w.abs() ** penalty.p).sum()
        elif isinstance(penalty, ElasticNet):
            total = total + (penalty.l1_ratio * w.abs() + (1 - penalty.l1_ratio) * w.square()).sum()
    return total


ALL_PENALTIES = [L2(1.7), L1(1.7), GroupLasso(1.7), ReverseGroupLasso(1.7), Bridge(1.5, 1.7), Bridge(0.5, 1.7)]
ALL_PENALTIES += [ElasticNet(1.7, l1_ratio=0.3)]


@pytest.mark.parametrize("penalty", ALL_PENALTIES, ids=repr)
def test_minus_the_log_prior_is_the_factor_times_the_penalty_up_to_a_constant(penalty) -> None:
    built = model(penalty)
    w = draws(2, built.layout.size)
    a, b = (r_of(penalty, built.layout.constrain(v)) for v in w)
    found = built.prior.log_prob(w)
    torch.testing.assert_close(found[0] - found[1], -1.7 * (a - b), **EXACT_TOLERANCE)


@pytest.mark.parametrize("penalty", [L2(1.7), L1(1.7), Bridge(1.5, 1.7), Bridge(0.5, 1.7), ElasticNet(1.7)], ids=repr)
def test_the_constant_makes_the_prior_of_a_weight_integrate_to_one(penalty) -> None:
    prior = penalty.prior(1.7, describe_parameters(nn.Linear(1, 1))["weight"], F64)
    mass = 2 * quad(lambda x: math.exp(prior.log_prob(torch.tensor(x, dtype=F64))), 0, math.inf, epsabs=1e-12)[0]
    assert mass == pytest.approx(1, abs=1e-8)


def test_the_constant_of_a_group_of_two_makes_its_prior_integrate_to_one() -> None:
    prior = GroupLasso().prior(1.7, describe_parameters(nn.Linear(2, 1))["weight"], F64)
    point = torch.zeros(1, 2, dtype=F64)

    def ring(x: float) -> float:
        point[0, 0] = x
        return 2 * math.pi * x * math.exp(prior.log_prob(point))

    assert quad(ring, 0, math.inf, epsabs=1e-12)[0] == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize(("a", "b"), [(0.3, 2.0), (1.0, 1.0), (30.0, 0.5), (60.0, 0.9), (1e4, 1.0)])
def test_the_variance_of_an_elastic_net_is_its_integral(a: float, b: float) -> None:
    found = float(ElasticNetDensity(torch.tensor(a, dtype=F64), torch.tensor(b, dtype=F64)).variance)
    unit = 1 / max(a, math.sqrt(b))
    top = [quad(lambda x, k=k: x**k * math.exp(-a * x - b * x * x), 0, 60 * unit, epsabs=0)[0] for k in (0, 2)]
    assert found == pytest.approx(top[1] / top[0], rel=1e-8)


def test_a_rule_gives_l2_the_prior_of_that_rule() -> None:
    w = draws(3, model("he").layout.size)
    for rule in ("glorot", "he", "fan_in"):
        torch.testing.assert_close(model(L2(rule)).prior.log_prob(w), model(rule).prior.log_prob(w), **EXACT_TOLERANCE)


def test_a_number_penalises_biases_too_and_a_rule_leaves_them_a_standard_normal() -> None:
    one, by_rule = model(L1(3.0)).prior, model(L1("glorot")).prior
    assert {block.name for block, _ in one.others} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {block.name for block, _ in by_rule.others} == {"0.weight", "2.weight"}
    for name in ("0.bias", "2.bias"):
        block = by_rule.layout[name]
        assert bool((by_rule.precision[block.start : block.stop] == 1).all())


def test_a_dict_of_factors_names_the_penalised_parameters() -> None:
    factors = layer_factors(net(), "l1", "he")
    w = draws(2, model("he").layout.size)
    torch.testing.assert_close(
        model(L1(factors)).prior.log_prob(w), model(L1("he")).prior.log_prob(w), **EXACT_TOLERANCE
    )


def test_a_penalty_can_be_used_in_a_dict_of_patterns() -> None:
    prior = model({"0.*": L1(2.0), "*": "flat"}).prior
    assert [block.name for block, _ in prior.others] == ["0.weight", "0.bias"]


# Groups of weights.


@pytest.mark.parametrize(
    ("layer", "incoming", "outgoing"),
    [
        (nn.Linear(5, 7), (7, 5), (5, 7)),
        (nn.Conv2d(3, 8, 2), (8, 12), (3, 32)),
        (nn.Conv2d(4, 6, 3, groups=2), (6, 18), (4, 27)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (6, 18), (4, 27)),
        (nn.Conv1d(3, 5, 4), (5, 12), (3, 20)),
    ],
    ids=["linear", "conv", "grouped", "transposed", "1d"],
)
def test_a_group_holds_the_incoming_weights_of_a_unit_or_the_outgoing_weights_of_an_input(
    layer, incoming, outgoing
) -> None:
    place, w = describe_parameters(layer)["weight"], draws(*layer.weight.shape)
    for kind, wanted in ((True, incoming), (False, outgoing)):
        groups = place.groups(kind)
        cut = groups.split(w)
        assert tuple(cut.shape) == wanted
        torch.testing.assert_close(groups.join(cut), w)
        torch.testing.assert_close(groups.split(torch.stack([w, 2 * w])), torch.stack([cut, 2 * cut]))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_an_input_channel_affects_the_outputs_through_its_outgoing_group_only(kind) -> None:
    layer = kind(4, 6, 2, groups=2, bias=False).to(F64)
    groups = describe_parameters(layer)["weight"].groups(incoming=False)
    x = draws(1, 4, 5, 5)
    for channel in range(4):
        cut = groups.split(layer.weight.detach().clone())
        cut[channel] = 0
        silent = x.clone()
        silent[:, channel] = 0
        wanted = layer(silent)
        with torch.no_grad():
            kept = layer.weight.clone()
            layer.weight.copy_(groups.join(cut))
        torch.testing.assert_close(layer(x), wanted, **EXACT_TOLERANCE)
        with torch.no_grad():
            layer.weight.copy_(kept)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_an_output_channel_without_its_incoming_group_is_zero(kind) -> None:
    layer = kind(4, 6, 2, groups=2, bias=False).to(F64)
    groups = describe_parameters(layer)["weight"].groups(incoming=True)
    cut = groups.split(layer.weight.detach().clone())
    cut[3] = 0
    with torch.no_grad():
        layer.weight.copy_(groups.join(cut))
    outputs = layer(draws(1, 4, 5, 5)).detach().abs().amax((0, 2, 3))
    assert float(outputs[3]) == 0
    assert int((outputs > 0).sum()) == 5


# Factors.


@pytest.mark.parametrize(
    "penalty",
    [L2(), L1(), GroupLasso(), ReverseGroupLasso(), Bridge(0.5), Bridge(1.5), Bridge(3.0), ElasticNet()],
    ids=repr,
)
def test_weights_drawn_from_the_prior_have_the_variance_that_its_factor_was_chosen_for(penalty) -> None:
    layer = nn.Linear(20, 6).to(F64)
    place = describe_parameters(layer)["weight"]
    factor = layer_factors(layer, penalty, "fan_in")["weight"]
    prior = penalty.prior(factor, place, F64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        shape = (4000,) if isinstance(prior, GroupNormDensity) else (4000, *place.shape)
        w = prior.sample(shape).to(F64).reshape(4000, -1)
    assert_mean_close(w.square().mean(-1) * 20, 1.0)  # false alarms: 6e-7
    assert_mean_close(w.mean(-1), 0.0)
    assert penalty.variance(factor, place) == pytest.approx(1 / 20, rel=1e-10)


def test_the_expected_penalty_under_its_prior_is_n_over_p() -> None:
    layer = nn.Linear(10, 5).to(F64)
    place = describe_parameters(layer)["weight"]
    for penalty, degree in ((GroupLasso(), 1), (Bridge(1.5), 1.5)):
        prior = penalty.prior(2.0, place, F64)
        with torch.random.fork_rng():
            torch.manual_seed(2)
            w = prior.sample((4000,) if isinstance(prior, GroupNormDensity) else (4000, 5, 10)).to(F64)
        r = w.square().sum(-1).sqrt().sum(-1) if degree == 1 else (w.abs() ** 1.5).sum((-1, -2))
        assert_mean_close(2.0 * r, 50 / degree)  # equipartition; false alarms: 6e-7


# User-defined functions.


@pytest.mark.parametrize("function", [lambda w: w.square().log1p(), lambda w: w.square().log1p().sum()])
def test_a_user_defined_function_is_a_log_prior_up_to_a_constant_and_marked_improper(function) -> None:
    built = model(Penalty(function, factor=0.7))
    w = draws(2, 3, built.layout.size)
    torch.testing.assert_close(built.prior.log_prob(w), -0.7 * w.square().log1p().sum(-1), **EXACT_TOLERANCE)
    assert built.prior.improper


# Invalid arguments.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: L1(0.0), "The 'factor' argument of L1 must be a positive number, got 0.0."),
        (lambda: L2(-1), "The 'factor' argument of L2 must be a positive number"),
        (lambda: L1(True), "The 'factor' argument of L1 must be a positive number"),
        (lambda: L1("glorto"), "The 'factor' argument of L1 must be one of fan_in, glorot, he"),
        (lambda: L1({}), "must name at least one parameter"),
        (lambda: L1({"0.weight": -1.0}), "must be positive for every parameter"),
        (lambda: Bridge(0), "The 'p' argument of Bridge must be a number above 0"),
        (
            lambda: ElasticNet(1.0, l1_ratio=1.0),
            "The 'l1_ratio' argument of ElasticNet must lie strictly between 0 and 1",
        ),
        (lambda: Penalty(3), "The 'function' argument of Penalty must be a function"),
        (lambda: model(L1({"9.weight": 1.0})), "must be among the parameters 0.weight"),
        (lambda: model(Penalty(lambda w: w.mean(0))), "must return a scalar or one value per weight"),
        (
            lambda: model(Penalty(lambda w: w.nothing())),
            "The 'function' argument of Penalty must accept the tensor of '0.weight'",
        ),
        (lambda: model(Penalty(lambda w: w, "glorot")), "The variance of a weight under Penalty is not known"),
        (lambda: model(L1), "The 'prior' argument of Model must be"),
    ],
)
def test_invalid_penalties_are_rejected_in_a_sentence(make, says: str) -> None:
    with pytest.raises(pr.InputError) as error:
        make()
    assert says in str(error.value)


@pytest.mark.parametrize("t", [0.01, 1.0, 50.0, 1e4])
def test_draws_from_an_elastic_net_follow_its_quantiles_at_any_steepness(t: float) -> None:
    """P(z > t + y | z > t) = u, compared in logarithms, where mpmath does not run out of digits."""
    u = torch.tensor([1e-30, 1e-6, 0.3, 0.999], dtype=torch.float64)
    y = truncated_normal_excess(torch.tensor(t, dtype=torch.float64), u)
    for share, found in zip(u.tolist(), y.tolist(), strict=True):
        with mpmath.workdps(60):
            ratio = mpmath.erfc((t + mpmath.mpf(found)) / mpmath.sqrt(2)) / mpmath.erfc(t / mpmath.sqrt(2))
        assert float(mpmath.log(ratio)) == pytest.approx(math.log(share), rel=1e-9)
    steep = ElasticNetDensity(torch.tensor(1e4), torch.tensor(0.5)).sample(torch.Size([1000]))
    assert bool(steep.isfinite().all())
    assert float(steep.std()) == pytest.approx(math.sqrt(2) * 1e-4, rel=0.3)  # 4 standard errors
