"""Factors on the precisions of a prior, against priors built with those precisions."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Laplace, Normal

import priory as pr
from priory.core.streams import stream
from priory.priors import Hierarchical, Prior

F64 = torch.float64


def prior_of(by_name, likelihood=None) -> Prior:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(F64)
    return pr.Model(net, likelihood or pr.Gaussian(), prior=by_name).prior


def normal(loc, scale):
    return Normal(torch.tensor(loc, dtype=F64), torch.tensor(scale, dtype=F64))


def vectors(prior, *shape):
    return torch.randn(*shape, prior.layout.size, generator=stream(0, "w"), dtype=F64)


def test_a_scaled_prior_has_the_scaled_precisions_and_their_normaliser():
    given = prior_of({"0.weight": normal(0.3, 0.7), "*": 1.5})
    wanted = prior_of({"0.weight": normal(0.3, 0.7 / 2), "1.bias": normal(0.0, 1.5 * 3), "*": 1.5})
    w = vectors(given, 5)
    found = given.scaled({"0.weight": 4.0, "1.bias": torch.tensor(1 / 9, dtype=F64)})
    torch.testing.assert_close(found.log_prob(w), wanted.log_prob(w), rtol=0, atol=1e-10)
    assert isinstance(found.log_normaliser, float)
    assert float((given.log_prob(w) - found.log_prob(w)).abs().min()) > 1e-2  # the given prior is unchanged


def test_one_factor_per_coordinate_scales_each_precision():
    given = prior_of(1.0)
    factors = torch.tensor([1.0, 2.0, 4.0, 0.5, 3.0, 9.0], dtype=F64)
    wanted = prior_of(
        {"0.weight": normal([[0.0, 0], [0, 0], [0, 0]], factors.rsqrt().reshape(3, 2).tolist()), "*": 1.0}
    )
    w = vectors(given, 5)
    found = given.scaled({"0.weight": factors})
    torch.testing.assert_close(found.log_prob(w), wanted.log_prob(w), rtol=0, atol=1e-10)


def test_each_member_has_its_own_factors():
    given = prior_of("glorot")
    factors = {"0.weight": torch.tensor([[2.0], [0.5], [7.0]], dtype=F64), "1.weight": torch.tensor(3.0, dtype=F64)}
    w = vectors(given, 4, 3)
    found = given.scaled(factors).log_prob(w)
    for i in range(3):
        alone = given.scaled({"0.weight": float(factors["0.weight"][i]), "1.weight": 3.0})
        torch.testing.assert_close(found[:, i], alone.log_prob(w[:, i]), rtol=0, atol=1e-10)


def test_factors_multiply_and_are_kept_with_the_given_prior():
    given = prior_of(1.0)
    twice = given.scaled({"0.weight": 0.1}).scaled({"0.weight": 30.0, "0.bias": 2.0})
    once = given.scaled(twice.factors)
    assert twice.given is given is given.given
    assert {name: float(t) for name, t in twice.factors.items()} == {"0.weight": pytest.approx(3.0), "0.bias": 2.0}
    assert torch.equal(once.precision, twice.precision)
    assert given.factors == {}
    assert given.scaled({}) is given


def test_empirical_bayes_resets_its_precisions_and_keeps_the_other_factors():
    given = prior_of({"0.weight": Hierarchical(infer="empirical", rate=0.0), "*": 1.0})
    mean, variance = vectors(given), vectors(given).square()
    wanted = given.with_empirical_precisions(mean, variance).scaled({"1.weight": 5.0})
    found = given.scaled({"0.weight": 3.0, "1.weight": 5.0}).with_empirical_precisions(mean, variance)
    w = vectors(given, 3)
    torch.testing.assert_close(found.log_prob(w), wanted.log_prob(w), rtol=0, atol=1e-12)


def test_the_gaussian_parameters_are_those_that_have_a_precision():
    prior = prior_of({"0.weight": Laplace(0.0, 1.0), "0.bias": "flat", "1.weight": Hierarchical(), "1.bias": 2.0})
    assert [block.name for block in prior.gaussian] == ["1.bias", "likelihood.noise"]


@pytest.mark.parametrize(
    ("factors", "sentence"),
    [
        ({"0.weight": 2.0}, "must name parameters with a Gaussian prior, among .*bias.*got '0.weight'"),
        ({"2.weight": 2.0}, "must name parameters with a Gaussian prior"),
        ({"1.bias": 0.0}, "must be positive and finite, got 0.0"),
        ({"1.bias": math.inf}, "must be positive and finite"),
        ({"0.bias": torch.ones(2)}, r"must be one number or 3 for '0.bias', got the shape \(2,\)"),
    ],
)
def test_invalid_factors_are_rejected_in_one_sentence(factors, sentence):
    prior = prior_of({"0.weight": Laplace(0.0, 1.0), "*": 1.0})
    with pytest.raises(pr.InputError, match=f"The 'factors' argument of scaled {sentence}"):
        prior.scaled(factors)
