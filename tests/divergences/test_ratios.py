"""Divergences from log ratios at draws, against closed forms and quadrature, in standard errors."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import priory as pr
from priory.divergences import KL, ForwardKL, JensenShannon, Renyi, jensen_shannon, renyi
from priory.testing import assert_mean_close


def double(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


Q, P = Normal(double(0.3), double(0.8)), Normal(double(-0.2), double(1.0))
ALL = {
    "KL": (KL(), lambda q, p: pr.kl(q, p)),
    "Renyi 0.5": (Renyi(0.5), lambda q, p: renyi(q, p, 0.5)),
    "Renyi 1.4": (Renyi(1.4), lambda q, p: renyi(q, p, 1.4)),
    "forward KL": (ForwardKL(), lambda q, p: pr.kl(p, q)),
    "Jensen-Shannon": (JensenShannon(), lambda q, p: jensen_shannon(q, p)),
    "Jensen-Shannon 0.2": (JensenShannon(0.2), lambda q, p: jensen_shannon(q, p, 0.2)),
}


def ratios(draws: int, repeats: int, loc: Tensor = Q.loc) -> Tensor:
    noise = torch.randn(draws, repeats, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = loc + Q.scale * noise
    return Normal(loc, Q.scale).log_prob(w) - P.log_prob(w)


@pytest.mark.parametrize("name", ALL)
def test_the_estimate_is_the_divergence_on_average(name: str) -> None:
    divergence, value = ALL[name]
    estimates = divergence.of_ratios(ratios(20_000, 100))
    # 5 standard errors of 100 repeats: false-alarm rate 5.7e-7; the bias of 20,000 draws is below a tenth of one
    assert_mean_close(estimates, value(Q, P).value)


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_is_that_of_the_divergence_on_average(name: str) -> None:
    divergence, value = ALL[name]
    loc = Q.loc.expand(100).clone().requires_grad_()
    (found,) = torch.autograd.grad(divergence.of_ratios(ratios(20_000, 100, loc)).sum(), loc)
    centre = Q.loc.clone().requires_grad_()
    (expected,) = torch.autograd.grad(value(Normal(centre, Q.scale), P).value, centre)
    # 5 standard errors of 100 repeats: false-alarm rate 5.7e-7; the bias of 20,000 draws is below a tenth of one
    assert_mean_close(found, expected)


@pytest.mark.parametrize("name", ALL)
def test_equal_weights_change_nothing_and_a_draw_of_weight_two_counts_twice(name: str) -> None:
    divergence, _ = ALL[name]
    r = ratios(6, 3)
    equal = divergence.of_ratios(r, torch.full((6, 3), 1 / 6).double())
    torch.testing.assert_close(equal, divergence.of_ratios(r))
    weights = double([2, 1, 1, 1]).div(5).unsqueeze(1).expand(4, 3)
    twice = divergence.of_ratios(torch.cat([r[:1], r[:4]]))
    torch.testing.assert_close(divergence.of_ratios(r[:4], weights), twice)


@pytest.mark.parametrize("name", ALL)
def test_ratios_of_a_thousand_nats_do_not_overflow(name: str) -> None:
    divergence, _ = ALL[name]
    for r in (double([1e3, -1e3, 5.0]), double([-1e3, -1e3, -2e3])):
        r.requires_grad_()
        value = divergence.of_ratios(r)
        (gradient,) = torch.autograd.grad(value, r)
        assert math.isfinite(value.item())
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", [n for n in ALL if "Jensen" not in n])
def test_the_closed_form_of_each_coordinate_sums_to_that_of_the_vector(name: str) -> None:
    divergence, value = ALL[name]
    q, p = Normal(double([0.0, 1.0, -2.0]), double([1.0, 0.5, 1.1])), Normal(double(0.3), double([1.2, 2.0, 1.0]))
    each = divergence.between(q, p)
    assert each.shape == (3,)
    torch.testing.assert_close(each, value(q, p).value)


def test_jensen_shannon_has_no_closed_form() -> None:
    assert JensenShannon().between(Q, P) is None


def test_self_normalised_estimates_do_not_depend_on_the_constant_of_p() -> None:
    r = ratios(50, 2)
    for divergence in (ForwardKL(), JensenShannon(0.3)):
        torch.testing.assert_close(divergence.of_ratios(r + 7.0), divergence.of_ratios(r))
    torch.testing.assert_close(KL().of_ratios(r + 7.0), KL().of_ratios(r) + 7.0)
    torch.testing.assert_close(Renyi(0.5).of_ratios(r + 7.0), Renyi(0.5).of_ratios(r) + 7.0)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: Renyi(1),
            r"The 'alpha' argument of Renyi must be a positive number other than 1 \(for 1 use the KL\), got 1",
        ),
        (lambda: Renyi(-0.5), "The 'alpha' argument of Renyi must be"),
        (lambda: Renyi("2"), "The 'alpha' argument of Renyi must be"),
        (
            lambda: JensenShannon(0.0),
            "The 'weight' argument of JensenShannon must be a number between 0 and 1, got 0.0.",
        ),
    ],
)
def test_invalid_arguments_raise_an_error_that_names_them(build: object, sentence: str) -> None:
    with pytest.raises(pr.InputError, match=sentence):
        build()
