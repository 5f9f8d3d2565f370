"""What a density is refused for before a fit: failures at every start, randomness, and walls in declared supports."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Dirichlet,
    Exponential,
    Gamma,
    HalfNormal,
    Independent,
    LogNormal,
    Normal,
    TransformedDistribution,
    Uniform,
    constraints,
)
from torch.distributions.transforms import ExpTransform

import priory as pr
from priory import InputError, Param

DOUBLE = torch.float64
ONE = torch.tensor(1.0, dtype=DOUBLE)


def checked(log_prob, support=constraints.real, shape=(), **more: Param) -> pr.Density:
    density = pr.Density(log_prob, {"x": Param(shape, support), **more})
    density.check(())
    return density


def uniform(low, high):
    return lambda p: Uniform(low * ONE, high * ONE).log_prob(p["x"]).sum()


# Supports.


@pytest.mark.parametrize(
    ("distribution", "written"),
    [
        (Uniform(0.0, 1.0), r"constraints\.unit_interval"),
        (Uniform(-1.5, 2.0), r"constraints\.interval\(-1\.5, 2\)"),
        (Uniform(-1e6, 1e6), r"constraints\.interval\(-1e\+06, 1e\+06\)"),
        (Beta(ONE, ONE), r"constraints\.unit_interval"),
        (Gamma(ONE, ONE), r"constraints\.positive"),
        (Exponential(ONE), r"constraints\.positive"),
        (HalfNormal(ONE), r"constraints\.positive"),
        (LogNormal(ONE, ONE), r"constraints\.positive"),
        (TransformedDistribution(Normal(ONE, ONE), [ExpTransform()]), r"constraints\.positive"),
    ],
    ids=lambda d: type(d).__name__ if not isinstance(d, str) else d,
)
def test_a_distribution_with_an_end_on_a_parameter_declared_real_is_refused_with_its_support(distribution, written):
    name = type(distribution).__name__
    must = rf"must declare 'x' with the support of its {name} distribution, {written}, got constraints\.real\."
    with pytest.raises(InputError, match=f"The 'params' argument of Density {must}"):
        checked(lambda p: distribution.log_prob(p["x"]))


@pytest.mark.parametrize(
    "method", [pr.NUTS(), pr.MAP(), pr.MeanField(), pr.RandomWalk()], ids=lambda m: type(m).__name__
)
def test_every_method_refuses_a_uniform_prior_on_a_parameter_declared_real(method):
    density = pr.Density(uniform(0.0, 3.0), {"x": Param()})
    with pytest.raises(InputError, match=r"declare 'x' .* constraints\.interval\(0, 3\), got constraints\.real"):
        pr.fit(density, None, method, progress=False)


@pytest.mark.parametrize(
    ("support", "got"),
    [
        (constraints.positive, "constraints.positive"),
        (constraints.greater_than(-1.0), r"constraints.greater_than\(-1\)"),
        (constraints.interval(0.0, 11.0), r"constraints.interval\(0, 11\)"),
        (constraints.less_than(10.0), r"constraints.less_than\(10\)"),
    ],
    ids=["positive", "above", "interval", "below"],
)
def test_a_declared_support_that_is_too_wide_is_refused(support, got):
    with pytest.raises(InputError, match=rf"constraints\.interval\(0, 10\), got {got}"):
        checked(uniform(0.0, 10.0), support)


@pytest.mark.parametrize(
    ("log_prob", "support", "shape"),
    [
        (uniform(0.0, 10.0), constraints.interval(0.0, 10.0), ()),
        (lambda p: Uniform(0.0, 0.7).log_prob(p["x"]), constraints.interval(0.0, 0.7), ()),  # rounded to float32
        (uniform(0.0, 10.0), constraints.interval(1.0, 9.0), ()),
        (lambda p: Gamma(ONE, ONE).log_prob(p["x"]), constraints.positive, ()),
        (lambda p: HalfNormal(ONE).log_prob(p["x"]), constraints.positive, ()),
        (lambda p: Normal(ONE, ONE).log_prob(p["x"]), constraints.real, ()),
        (lambda p: Normal(ONE, ONE).log_prob(p["x"]), constraints.positive, ()),  # a truncated normal
        (lambda p: LogNormal(ONE, ONE).log_prob(p["x"].exp()) + p["x"], constraints.real, ()),
        (lambda p: Dirichlet(torch.ones(3, dtype=DOUBLE)).log_prob(p["x"]), constraints.simplex, (3,)),
        (lambda p: Independent(Normal(torch.zeros(3, dtype=DOUBLE), 1.0), 1).log_prob(p["x"]), constraints.real, (3,)),
    ],
)
def test_a_support_that_is_that_of_the_distribution_or_narrower_is_taken(log_prob, support, shape):
    checked(log_prob, support, shape)


def test_an_entry_of_a_parameter_is_found_by_its_name():
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        return Normal(ONE, ONE).log_prob(p["x"]).sum() + Uniform(-ONE, ONE).log_prob(p["y"][1]) - p["y"][0].square()

    with pytest.raises(InputError, match=r"declare 'y' .* Uniform distribution, constraints\.interval\(-1, 1\)"):
        checked(log_prob, shape=(2,), y=Param((2,)))


def test_bounds_that_are_parameters_are_left_to_the_chains():
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        return Uniform(-p["y"], p["y"]).log_prob(p["x"]) - p["y"]

    checked(log_prob, y=Param((), constraints.positive))


def test_different_bounds_are_written_as_a_tensor():
    high = torch.tensor([1.0, 2.0], dtype=DOUBLE)
    with pytest.raises(InputError, match=r"constraints\.interval\(-1, torch\.tensor\(\[1, 2\]\)\)"):
        checked(lambda p: Uniform(-ONE, high).log_prob(p["x"]).sum(), shape=(2,))


def test_the_checks_of_distributions_are_as_they_were_afterwards():
    before = torch.distributions.Distribution._validate_sample
    with pytest.raises(InputError):
        checked(uniform(0.0, 1.0))
    assert torch.distributions.Distribution._validate_sample is before


# Randomness.


@pytest.mark.parametrize("batched", [False, True])
def test_randomness_inside_a_density_is_refused(batched):
    density = pr.Density(lambda p: -p["x"].square() + torch.randn(()), {"x": Param()}, batched=batched)
    with pytest.raises(
        InputError, match=r"'log_prob' argument of Density must be a function without randomness, got -?\d"
    ):
        pr.fit(density, None, pr.NUTS(), progress=False)


def test_randomness_inside_a_likelihood_is_refused():
    density = pr.Density(
        params={"x": Param()},
        log_prior=lambda p: -p["x"].square(),
        log_likelihood=lambda p, y: -(y - p["x"] + 0.1 * torch.rand(len(y))).square(),
    )
    with pytest.raises(InputError, match="'log_likelihood' argument of Density must be a function without randomness"):
        pr.fit(density, torch.arange(5.0), pr.NUTS(), progress=False)


def test_random_numbers_that_change_nothing_are_allowed():
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        noise = torch.rand(3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
        return -(p["x"] - noise).square().sum()

    checked(log_prob)


# Failures.


def test_a_density_that_fails_at_the_origin_begins_at_another_start():
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        return torch.linalg.cholesky(p["x"] * torch.eye(2, dtype=DOUBLE)).diagonal().log().sum() - p["x"]

    assert float(checked(log_prob).origin) > 0


@pytest.mark.parametrize(
    ("log_prob", "reason"),
    [
        (lambda p: torch.linalg.cholesky(-p["x"].square() * torch.eye(2, dtype=DOUBLE)).sum(), "LinAlgError.*definite"),
        (lambda p: p["x"] * math.log(-1 - float(p["x"].detach()) ** 2), "ValueError"),
        (lambda p: p["y"], "KeyError: 'y'"),
    ],
)
def test_a_density_that_fails_at_every_start_is_refused_with_the_reason_from_inside(log_prob, reason):
    with pytest.raises(InputError, match=rf"The 'log_prob' argument of Density .*{reason}"):
        pr.fit(pr.Density(log_prob, {"x": Param()}), None, pr.NUTS(), progress=False)
