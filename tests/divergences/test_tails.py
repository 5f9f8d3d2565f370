"""Integrals that don't exist are infinite, and those that hardly exist are found."""

import math

import pytest
import torch
from scipy import special, stats
from torch import Tensor
from torch.distributions import (
    Cauchy,
    Distribution,
    Exponential,
    HalfCauchy,
    HalfNormal,
    InverseGamma,
    Laplace,
    LogNormal,
    Normal,
    StudentT,
)

import priory as pr
from priory.distributions import GeneralisedGaussian, Horseshoe


def double(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


ONE = double(1.0)
UNIT = Normal(0 * ONE, ONE)

INFINITE: dict[str, tuple[Distribution, Distribution]] = {
    "Cauchy || Laplace": (Cauchy(0 * ONE, ONE), Laplace(0 * ONE, ONE)),
    "Cauchy || Normal": (Cauchy(0 * ONE, ONE), UNIT),
    "StudentT(1.5) || Normal": (StudentT(1.5 * ONE), UNIT),
    "StudentT(2) || Normal": (StudentT(2 * ONE), UNIT),  # its variance is infinite by a logarithm
    "HalfCauchy || HalfNormal": (HalfCauchy(ONE), HalfNormal(ONE)),
    "Horseshoe || Laplace": (Horseshoe(ONE), Laplace(0 * ONE, ONE)),
    "StudentT(3.5) || power 4": (StudentT(3.5 * ONE), GeneralisedGaussian(ONE, 4.0)),
    "Exponential || InverseGamma": (Exponential(ONE), InverseGamma(ONE, ONE)),  # E[1/x], at the end 0
    "a Cauchy far away": (Cauchy(1e3 * ONE, 1e-3 * ONE), UNIT),
}


@pytest.mark.parametrize("name", INFINITE)
def test_kl_is_infinite_where_tails_of_q_are_too_heavy_for_p(name: str) -> None:
    found = pr.kl(*INFINITE[name])
    assert float(found) == math.inf
    assert found.kind == "quadrature"
    assert float(found.error) == 0


def exact(q: float, distance: float) -> float:
    """KL of a Student-t from its entropy and the mean of -log p."""
    return distance - float(stats.t(q).entropy())


FINITE: dict[str, tuple[Distribution, Distribution, float]] = {
    "StudentT(3) || Normal": (StudentT(3 * ONE), UNIT, exact(3, 1.5 + 0.5 * math.log(2 * math.pi))),
    "StudentT(2.1) || Normal": (StudentT(2.1 * ONE), UNIT, exact(2.1, 10.5 + 0.5 * math.log(2 * math.pi))),
    "StudentT(1.5) || Laplace": (
        StudentT(1.5 * ONE),
        Laplace(0 * ONE, ONE),
        exact(1.5, math.log(2) + 2 * 1.5**0.5 / (0.5 * special.beta(0.75, 0.5))),
    ),
    "StudentT(9) || power 4": (
        StudentT(9 * ONE),
        GeneralisedGaussian(ONE, 4.0),
        exact(9, math.log(2) + math.lgamma(1.25) + stats.t(9).moment(4)),
    ),
    # the tails of a Cauchy of another scale: log((s + 1)^2 / (4 s))
    "Cauchy || Cauchy(5)": (Cauchy(0 * ONE, ONE), Cauchy(0 * ONE, 5 * ONE), math.log(36 / 20)),
    "StudentT(0.6) || Cauchy": (StudentT(0.6 * ONE), Cauchy(0 * ONE, ONE), 0.0860026874942920),
}


@pytest.mark.parametrize("name", FINITE)
def test_kl_of_heavy_tails_is_correct_where_it_is_finite(name: str) -> None:
    q, p, expected = FINITE[name]
    found = pr.kl(q, p)
    assert abs(float(found) - expected) < 1e-8
    assert float(found.error) < 1e-8


def test_the_mean_of_a_logarithm_squared_exists() -> None:
    """-log p of a log-normal grows as log^2 x, which a Pareto of any order allows: of order 1, E[log^2 x] = 2."""
    q, p = torch.distributions.Pareto(ONE, ONE), LogNormal(0 * ONE, ONE)
    # E log q = -2 E log x = -2; E -log p = E log x + E log^2 x / 2 + log(2 pi) / 2
    assert abs(float(pr.kl(q, p)) - (-2 + 1 + 1 + 0.5 * math.log(2 * math.pi))) < 1e-8


def test_a_partly_infinite_batch_keeps_its_gradient() -> None:
    df = double([1.5, 3.0]).requires_grad_()
    found = pr.kl(StudentT(df), UNIT)
    assert found.value.isinf().tolist() == [True, False]
    (slope,) = torch.autograd.grad(found.value[1], df)
    step = 1e-5
    ends = [float(pr.kl(StudentT(double(3 + sign * step)), UNIT)) for sign in (1, -1)]
    assert abs(float(slope[1]) - (ends[0] - ends[1]) / (2 * step)) < 1e-6


@pytest.mark.parametrize(("heavier", "infinite"), [(9.0, True), (6.0, True), (5.9, False), (5.0, False)])
def test_renyi_of_order_two_needs_twice_qs_tail_to_fall_faster_than_ps(heavier: float, infinite: bool) -> None:
    """q^2 / p of Student-t's falls as x^(-2 (3 + 1) + df + 1), whose integral exists for df < 6."""
    found = pr.renyi(StudentT(3 * ONE), StudentT(heavier * ONE), 2.0)
    assert math.isinf(float(found)) == infinite
    assert found.kind == "quadrature"
    assert float(found.error) < 1e-8


def test_renyi_of_order_below_one_is_finite_for_every_tail() -> None:
    """int q^(1/2) p^(1/2) of a Laplace and a Cauchy of any tails is at most 1."""
    assert 0 < float(pr.renyi(Cauchy(0 * ONE, ONE), UNIT, 0.5)) < 1


def test_renyi_of_two_laplaces_is_infinite_from_twice_the_rate_on() -> None:
    """q^2 / p = b_p / (2 b_q^2) e^(-(2 / b_q - 1 / b_p) |x|): D = log(b_p / (b_q^2 (2 / b_q - 1 / b_p)))."""
    q = Laplace(0 * ONE, ONE)
    assert float(pr.renyi(q, Laplace(0 * ONE, 0.5 * ONE), 2.0)) == math.inf
    near = float(pr.renyi(q, Laplace(0 * ONE, 0.51 * ONE), 2.0))
    assert abs(near - math.log(0.51 / (2 - 1 / 0.51))) < 1e-8
