"""KL divergences against 30-digit integrals and sums: finite where they are finite, and within their reported error."""

from __future__ import annotations

import math
from typing import Any

import mpmath as mp
import pytest
import torch
from torch.distributions import (
    Beta,
    Gamma,
    Geometric,
    Gumbel,
    Independent,
    Kumaraswamy,
    Laplace,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
    Uniform,
    VonMises,
)

from priory import kl

TYPES = [torch.float32, torch.float64]
DIGITS = 30


def log_beta(x: Any, a: float, b: float) -> Any:
    return (a - 1) * mp.log(x) + (b - 1) * mp.log1p(-x) - mp.log(mp.beta(a, b))


def log_kumaraswamy(x: Any, a: float, b: float) -> Any:
    return mp.log(a * b) + (a - 1) * mp.log(x) + (b - 1) * mp.log1p(-(x**a))


def log_von_mises(x: Any, m: float, k: float) -> Any:
    return k * mp.cos(x - m) - mp.log(2 * mp.pi * mp.besseli(0, k))


def log_student(x: Any, df: float) -> Any:
    normaliser = mp.loggamma((df + 1) / 2) - mp.loggamma(df / 2) - mp.log(df * mp.pi) / 2
    return normaliser - (df + 1) / 2 * mp.log1p(x**2 / df)


def log_normal(x: Any, m: float, s: float) -> Any:
    return -(((x - m) / s) ** 2) / 2 - mp.log(s) - mp.log(2 * mp.pi) / 2


def log_laplace(x: Any, m: float, b: float) -> Any:
    return -abs(x - m) / b - mp.log(2 * b)


def log_gumbel(x: Any, m: float, b: float) -> Any:
    z = (x - m) / b
    return -z - mp.exp(-z) - mp.log(b)


def log_uniform(x: Any, low: float, high: float) -> Any:
    return -mp.log(high - low)


PI = math.pi
# q and p with their parameters, their log densities, and points between which the integrand is smooth
PAIRS: dict[str, Any] = {
    "beta to Kumaraswamy": (Beta, (2.0, 3.0), log_beta, Kumaraswamy, (2.0, 3.0), log_kumaraswamy, [0, 0.5, 1]),
    "uniform to Kumaraswamy": (Uniform, (0.0, 1.0), log_uniform, Kumaraswamy, (0.5, 4.0), log_kumaraswamy, [0, 0.5, 1]),
    "Kumaraswamy to Kumaraswamy": (
        Kumaraswamy,
        (0.5, 0.5),
        log_kumaraswamy,
        Kumaraswamy,
        (3.0, 2.0),
        log_kumaraswamy,
        [0, 0.5, 1],
    ),
    "Kumaraswamy to beta": (Kumaraswamy, (2.0, 0.75), log_kumaraswamy, Beta, (0.5, 2.0), log_beta, [0, 0.5, 1]),
    "von Mises to von Mises": (VonMises, (0.5, 2.0), log_von_mises, VonMises, (-1.0, 8.0), log_von_mises, [-PI, 0, PI]),
    "a narrow von Mises": (VonMises, (0.5, 512.0), log_von_mises, VonMises, (0.0, 1.0), log_von_mises, [-PI, 0.5, PI]),
    "normal to student": (Normal, (1.0, 0.25), log_normal, StudentT, (3.0,), log_student, [-9, 0, 1, 9]),
    "Laplace to Gumbel": (Laplace, (1.0, 0.5), log_laplace, Gumbel, (0.0, 2.0), log_gumbel, [-60, 0, 1, 3, 60]),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", PAIRS)
def test_an_integral_is_within_its_error(name: str, dtype: torch.dtype) -> None:
    q_class, q_parameters, log_q, p_class, p_parameters, log_p, points = PAIRS[name]

    def integrand(x: Any) -> Any:
        at = log_q(x, *q_parameters)
        return mp.exp(at) * (at - log_p(x, *p_parameters))

    with mp.workdps(DIGITS):
        expected = float(mp.quad(integrand, points))
    q, p = (
        d(*(torch.tensor(v, dtype=dtype) for v in parameters))
        for d, parameters in ((q_class, q_parameters), (p_class, p_parameters))
    )
    found = kl(q, p)
    assert found.kind == "quadrature"
    assert abs(float(found) - expected) <= float(found.error) + 4e-16 * expected
    bounded = {Beta, Kumaraswamy} & {q_class, p_class}  # floats next to 1 are too coarse for a pole there
    assert float(found.error) <= (1e-5 if bounded else 1e-6 if dtype == torch.float32 else 1e-12) * max(1.0, expected)


def poisson_entropy(rate: float) -> float:
    """Stirling's series, with an error of 1e-16 from a rate of 2,000."""
    return 0.5 * math.log(2 * PI * math.e * rate) - 1 / (12 * rate) - 1 / (24 * rate**2) - 19 / (360 * rate**3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rate", [2000.0, 1e4, 1e6])
def test_a_poisson_of_a_large_rate_is_not_infinitely_far_from_a_geometric(rate: float, dtype: torch.dtype) -> None:
    found = kl(Poisson(torch.tensor(rate, dtype=dtype)), Geometric(torch.tensor(0.25, dtype=dtype)))
    expected = -poisson_entropy(rate) - math.log(0.25) - rate * math.log(0.75)
    assert found.kind == "sum"
    assert abs(float(found) - expected) <= float(found.error) + 1e-15 * expected
    assert float(found.error) <= (1e-6 if dtype == torch.float32 else 1e-8) * expected


@pytest.mark.parametrize("dtype", TYPES)
def test_a_poisson_of_a_large_rate_is_not_infinitely_far_from_a_negative_binomial(dtype: torch.dtype) -> None:
    rate, failures, success = 1e4, 5.0, 0.5
    found = kl(
        Poisson(torch.tensor(rate, dtype=dtype)),
        NegativeBinomial(torch.tensor(failures, dtype=dtype), torch.tensor(success, dtype=dtype)),
    )
    with mp.workdps(DIGITS):
        counts = range(int(rate - 13 * rate**0.5), int(rate + 13 * rate**0.5))
        at = lambda k: mp.exp(k * mp.log(rate) - rate - mp.loggamma(k + 1))  # noqa: E731
        mean = mp.fsum(at(k) * (mp.loggamma(k + failures) - mp.loggamma(k + 1)) for k in counts)
        log_p = mean - mp.loggamma(failures) + rate * mp.log(success) + failures * mp.log(1 - success)
        expected = float(-poisson_entropy(rate) - log_p)
    assert abs(float(found) - expected) <= float(found.error) + 1e-14 * expected
    assert float(found.error) <= 1e-6 * expected


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("chance", "rate"), [(0.5, 3.0), (2.0**-10, 1e3), (2.0**-17, 1e5)])
def test_a_geometric_with_many_terms_is_summed_to_its_end(chance: float, rate: float, dtype: torch.dtype) -> None:
    found = kl(Geometric(torch.tensor(chance, dtype=dtype)), Poisson(torch.tensor(rate, dtype=dtype)))
    with mp.workdps(DIGITS):
        stay, odds = mp.mpf(1) - chance, (1 - mp.mpf(chance)) / chance
        factorials = mp.nsum(lambda k: stay**k * mp.log(k), [1, mp.inf], method="euler-maclaurin")  # E[log k!]
        expected = float(mp.log(chance) + odds * mp.log(stay) - odds * mp.log(rate) + rate + factorials)
    assert found.kind == "sum"
    assert abs(float(found) - expected) <= float(found.error) + 1e-14 * expected
    assert float(found.error) <= 1e-6 * expected


def test_a_sum_of_too_many_terms_is_an_estimate_with_a_standard_error() -> None:
    """10^9 terms; E[log k!] of a geometric is nearly that of an exponential, k log k - k with a mean of 1 / chance."""
    chance, rate = 1e-8, 1e8
    found = kl(Geometric(torch.tensor(chance).double()), Poisson(torch.tensor(rate).double()))
    mean = 1 / chance
    expected = mean * (math.log(mean) - 0.5772156649 + 1) - mean - mean * math.log(rate) + rate
    assert found.kind == "Monte Carlo"
    assert abs(float(found) - expected) < 5 * float(found.error)  # false alarms: 6e-7


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("concentration", [0.5, 2.0, 50.0])
def test_a_von_mises_and_the_uniform_angle_are_finitely_far_apart(concentration: float, dtype: torch.dtype) -> None:
    k = torch.tensor(concentration, dtype=dtype)
    angle = Uniform(torch.tensor(-PI, dtype=dtype), torch.tensor(PI, dtype=dtype))
    ratio = float(mp.besseli(1, concentration) / mp.besseli(0, concentration))
    log_bessel = float(mp.log(mp.besseli(0, concentration)))
    there, back = kl(VonMises(0 * k, k), angle), kl(angle, VonMises(0 * k, k))
    slack = 2e-7 if dtype == torch.float32 else 0.0  # of pi in float32, of which the angle is uniform
    assert abs(float(there) - (concentration * ratio - log_bessel)) <= float(there.error) + slack + 1e-14
    assert abs(float(back) - log_bessel) <= float(back.error) + slack * concentration + 1e-14 * concentration
    assert math.isinf(float(kl(Normal(0 * k, k), VonMises(0 * k, k))))
    assert math.isinf(float(kl(VonMises(0 * k, k), Uniform(torch.zeros(()), torch.tensor(1.0)))))


@pytest.mark.parametrize("size", [10.0, 1e3, 1e5, 1e7])
def test_closed_forms_keep_their_digits_in_float32(size: float) -> None:
    """The differences of log gamma functions cancel: KL = O(1e-6 size) from terms of size log(size)."""
    one = torch.tensor(1.0)
    pairs = [
        (Gamma(size * one, one), Gamma(1.001 * size * one, one)),
        (Beta(size * one, size * one), Beta(1.001 * size * one, size * one)),
        (Normal(size * one, one), Normal(1.0001 * size * one, one)),
        (Independent(Gamma(size * torch.ones(2), one), 1), Independent(Gamma(1.001 * size * torch.ones(2), one), 1)),
    ]
    for q, p in pairs:
        wide = [d.base_dist if isinstance(d, Independent) else d for d in (q, p)]
        names = list(wide[0].arg_constraints)
        exact = [type(d)(*(getattr(d, n).double() for n in names)) for d in wide]
        expected = torch.distributions.kl_divergence(*exact).sum()
        found = kl(q, p)
        assert found.kind == "exact"
        assert found.value.dtype == torch.float32
        assert float(found) == pytest.approx(float(expected), rel=1e-6)
        assert float(found) >= 0


def test_gradients_in_float32_flow_through_the_wider_computation() -> None:
    a = torch.tensor(1e5, requires_grad=True)
    (slope,) = torch.autograd.grad(
        kl(Gamma(a, torch.tensor(1.0)), Gamma(torch.tensor(1.001e5), torch.tensor(1.0))).value, a
    )
    with mp.workdps(DIGITS):
        expected = float((mp.mpf(100000) - float(torch.tensor(1.001e5))) * mp.polygamma(1, 100000))
    assert slope.dtype == torch.float32
    assert float(slope) == pytest.approx(expected, rel=1e-6)
