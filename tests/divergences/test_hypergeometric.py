"""Kummer's function and the log moment against mpmath, in value and in slope."""

import mpmath
import pytest
import torch
from torch import Tensor

from priory.divergences.hypergeometric import SWITCH, kummer, log_moment

XS = [0.0, 1e-12, 1e-3, 0.1, 1.0, 5.0, 20.0, SWITCH - 1e-9, SWITCH, 41.0, 60.0, 1e3, 1e6, 5e11]
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
