"""Special functions against mpmath and scipy, in value and in slope."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

from priory.core.special import (
    KUMMER_ASYMPTOTIC_FROM,
    gauss_legendre_panels,
    incomplete_beta,
    kummer,
    legendre,
    log_moment,
    log_scaled_e1,
    student_cdf,
)

SWITCH = KUMMER_ASYMPTOTIC_FROM
XS = [
    0.0,
    1e-12,
    1e-3,
    0.1,
    1.0,
    5.0,
    20.0,
    KUMMER_ASYMPTOTIC_FROM - 1e-9,
    KUMMER_ASYMPTOTIC_FROM,
    41.0,
    60.0,
    1e3,
    1e6,
    5e11,
]
HALF = torch.tensor(0.5, dtype=torch.float64)


def at(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def off(found: Tensor, expected: list[mpmath.mpf]) -> float:
    """The largest relative error."""
    pairs = zip(found.tolist(), expected, strict=True)
    return max(abs(float(mpmath.mpf(f) / e - 1)) if e != 0 else abs(f) for f, e in pairs)


@pytest.mark.parametrize("power", [0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.3, 20.0])
def test_kummers_function_and_two_slopes_are_right_to_thirteen_digits(power: float) -> None:
    a, x = mpmath.mpf(-power) / 2, at(XS)
    value = kummer(torch.tensor(-power / 2, dtype=torch.float64), HALF, x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    with mpmath.workdps(40):
        assert off(value, [mpmath.hyp1f1(a, 0.5, -mpmath.mpf(t)) for t in XS]) < 1e-13
        assert off(slope, [-2 * a * mpmath.hyp1f1(a + 1, 1.5, -mpmath.mpf(t)) for t in XS]) < 1e-13
        assert off(bend, [4 * a * (a + 1) / 3 * mpmath.hyp1f1(a + 2, 2.5, -mpmath.mpf(t)) for t in XS]) < 1e-13


def test_the_gradient_in_the_first_argument_is_right_too() -> None:
    a = torch.tensor([-0.7, -0.7, -0.7, -0.7], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([0.0, 2.0, 35.0, 300.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(kummer(a, HALF, x).sum(), a)
    with mpmath.workdps(40):
        expected = [mpmath.diff(lambda s, t=t: mpmath.hyp1f1(s, 0.5, -mpmath.mpf(t)), -0.7) for t in x.tolist()]
    torch.testing.assert_close(gradient, torch.tensor([float(e) for e in expected]).double(), rtol=1e-6, atol=1e-14)


def test_the_log_moment_and_its_slope_are_right_to_thirteen_digits() -> None:
    x = at(XS)
    value = log_moment(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    with mpmath.workdps(40):
        assert off(slope, [2 * mpmath.hyp1f1(1, 1.5, -mpmath.mpf(t)) for t in XS]) < 1e-13
        for t, found in zip(XS[3:], value.tolist()[3:], strict=True):
            expected = -mpmath.diff(lambda s, t=t: mpmath.hyp1f1(s, 0.5, -mpmath.mpf(t)), 0)
            assert found == pytest.approx(float(expected), rel=1e-13)


def test_both_pass_through_vmap_and_grad_together() -> None:
    x = torch.tensor([0.3, 3.0, 300.0], dtype=torch.float64)
    a = -1.5 * HALF
    for f in (log_moment, lambda t: kummer(a, HALF, t)):
        expected = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(expected).sum(), expected)
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(x), slope)


def test_single_precision_keeps_its_digits() -> None:
    x = torch.tensor(XS)
    wide = kummer(-1.5 * HALF, HALF, x.double())
    torch.testing.assert_close(kummer(torch.tensor(-0.75), torch.tensor(0.5), x).double(), wide, rtol=2e-5, atol=0)
    torch.testing.assert_close(log_moment(x).double(), log_moment(x.double()), rtol=2e-5, atol=1e-7)


def test_the_exponential_integral_and_its_gradient_are_correct_to_thirteen_digits() -> None:
    us = [1e-300, 1e-20, 1e-5, 0.01, 0.3, 1.0, 1.999, 2.0, 2.5, 5.0, 50.0, 1e3, 1e6, 1e12]
    u = at(us)
    value = log_scaled_e1(u)
    (slope,) = torch.autograd.grad(value.sum(), u)
    for t, found, gradient in zip(us, value.exp().tolist(), slope.tolist(), strict=True):
        with mpmath.workdps(60):
            scaled = mpmath.exp(t) * mpmath.e1(t) if t < 1e5 else mpmath.hyperu(1, 1, t)
            assert found == pytest.approx(float(scaled), rel=1e-13)
            assert gradient == pytest.approx(float(1 - 1 / (mpmath.mpf(t) * scaled)), rel=1e-12)
    inner = at([0.3, 3.0])
    assert torch.autograd.gradgradcheck(log_scaled_e1, inner)


def test_incomplete_beta_is_scipys_over_its_whole_square() -> None:
    x = torch.cat(
        [
            torch.zeros(1),
            torch.logspace(-14, -1, 60),
            torch.linspace(0.1, 0.9, 60),
            1 - torch.logspace(-14, -1, 60),
            torch.ones(1),
        ]
    ).double()
    for a, b in itertools.product((0.25, 0.5, 1.0, 2.5, 10.0, 100.0), repeat=2):
        expected = torch.as_tensor(scipy.special.betainc(a, b, x.numpy()))
        torch.testing.assert_close(incomplete_beta(a, b, x), expected, rtol=0, atol=1e-11)


def test_incomplete_beta_takes_a_parameter_for_each_value() -> None:
    a = torch.tensor([0.5, 3.0, 1e3], dtype=torch.float64)
    b = torch.tensor([2.0, 0.25, 1e5], dtype=torch.float64)
    x = torch.tensor([0.1, 0.9, 0.01], dtype=torch.float64)
    expected = torch.as_tensor(scipy.special.betainc(a.numpy(), b.numpy(), x.numpy()))
    torch.testing.assert_close(incomplete_beta(a, b, x), expected, rtol=1e-10, atol=0)


def test_incomplete_beta_keeps_the_digits_of_a_complement_that_is_given() -> None:
    y = torch.tensor([1e-20, 1e-12], dtype=torch.float64)  # 1 - y rounds to 1 for the first
    found = 1 - incomplete_beta(0.5, 0.5, 1 - y, y)
    torch.testing.assert_close(found, 2 / math.pi * y.sqrt(), rtol=1e-3, atol=1e-15)


def test_incomplete_beta_of_nan_is_nan_and_ends() -> None:
    found = incomplete_beta(2.0, 3.0, torch.tensor([0.5, math.nan], dtype=torch.float64))
    assert float(found[0]) == pytest.approx(0.6875, abs=1e-14)
    assert math.isnan(float(found[1]))


@pytest.mark.parametrize("n", [1, 2, 10, 20, 64])
def test_gauss_legendre_nodes_are_numpys(n: int) -> None:
    nodes, weights = legendre(n)
    wanted_nodes, wanted_weights = (torch.from_numpy(t) for t in np.polynomial.legendre.leggauss(n))
    torch.testing.assert_close(nodes, wanted_nodes, rtol=0, atol=1e-14)
    torch.testing.assert_close(weights, wanted_weights, rtol=0, atol=1e-14)


def test_panels_integrate_polynomials_of_twice_their_points_exactly() -> None:
    edges = torch.tensor([[-1.0, 0.0], [0.5, 0.2], [2.0, 3.0]], dtype=torch.float64)
    x, weights = gauss_legendre_panels(edges[:-1], edges[1:], 4)
    assert x.shape == weights.shape == (8, 2)
    wanted = (edges[-1] ** 8 - edges[0] ** 8) / 8
    torch.testing.assert_close((weights * x**7).sum(0), wanted, rtol=1e-13, atol=0)


def test_the_distribution_function_of_student_with_one_degree_of_freedom_is_cauchys() -> None:
    t = torch.tensor([-1e6, -2.0, 0.0, 0.3, 1e8], dtype=torch.float64)
    torch.testing.assert_close(student_cdf(t, 1.0), 0.5 + t.atan() / math.pi, rtol=0, atol=1e-14)
