"""Renyi's and Jensen's divergences against closed forms, scipy's integrals and their own standard errors."""

import math
from itertools import pairwise

import pytest
import torch
from scipy import integrate
from torch import Tensor
from torch.distributions import (
    Categorical,
    Distribution,
    Exponential,
    Independent,
    Laplace,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
    Uniform,
)

import priory as pr
from priory.distributions import LogUniform
from priory.divergences import jensen_shannon, renyi
from priory.testing import assert_mean_close

EXACT = {"rtol": 0, "atol": 1e-10}


def double(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def over(f: object, edges: list[float]) -> float:
    return math.fsum(integrate.quad(f, a, b, epsabs=1e-14, limit=300)[0] for a, b in pairwise(edges))


def at(d: Distribution, x: float) -> float:
    return float(d.log_prob(double(x)))


def in_the_plane(d: Distribution) -> MixtureSameFamily:
    return MixtureSameFamily(Categorical(torch.ones(1).double()), Independent(d.expand((1, 2)), 1))


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.999, 1.2, 2.0])
def test_renyi_of_two_normals_is_its_integral(alpha: float) -> None:
    q, p = Normal(double(0.4), double(0.8)), Normal(double(-0.5), double(1.3))
    affinity = over(lambda x: math.exp(alpha * at(q, x) + (1 - alpha) * at(p, x)), [-15.0, -3.0, 0.0, 3.0, 15.0])
    found = renyi(q, p, alpha)
    assert found.kind == "exact"
    assert float(found) == pytest.approx(math.log(affinity) / (alpha - 1), abs=1e-9)


def test_renyi_is_infinite_where_the_tails_of_q_are_too_heavy_for_the_order() -> None:
    # alpha s_p^2 + (1 - alpha) s_q^2 is 2 - 4 < 0
    found = renyi(Normal(double([0.0, 0.0]), double([2.0, 1.0])), Normal(double(0.0), double(1.0)), 2.0)
    assert found.value.tolist() == [math.inf, 0.0]
    joint = renyi(
        MultivariateNormal(double([0.0, 0.0]), torch.diag(double([4.0, 1.0]))),
        MultivariateNormal(double([0.0, 0.0]), torch.eye(2).double()),
        2.0,
    )
    assert float(joint) == math.inf


@pytest.mark.parametrize("alpha", [0.5, 1.5])
def test_renyi_of_gaussian_vectors_of_every_kind_has_one_formula(alpha: float) -> None:
    s = double([0.8, 1.1])
    m = double([0.3, -0.4])
    sides = [
        Independent(Normal(m, s), 1),
        MultivariateNormal(m, torch.diag(s.square())),
        LowRankMultivariateNormal(m, torch.zeros(2, 1).double(), s.square()),
    ]
    p = Normal(double([0.0, 0.0]), double([1.0, 1.5]))
    expected = renyi(Normal(m, s), p, alpha).value.sum()
    for q in sides:
        for other in (Independent(p, 1), MultivariateNormal(p.mean, torch.diag(p.variance))):
            torch.testing.assert_close(renyi(q, other, alpha).value, expected, **EXACT)


def test_renyi_of_correlated_gaussians_is_that_of_their_rotated_axes() -> None:
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()).Q
    m, v, w = double([0.3, -0.4, 1.0]), double([0.5, 1.0, 2.0]), double([1.0, 1.2, 1.9])
    q = MultivariateNormal(turn @ m, turn @ torch.diag(v) @ turn.T)
    p = MultivariateNormal(torch.zeros(3).double(), turn @ torch.diag(w) @ turn.T)
    expected = renyi(Normal(m, v.sqrt()), Normal(double(0.0), w.sqrt()), 1.7).value.sum()
    torch.testing.assert_close(renyi(q, p, 1.7).value, expected, **EXACT)


@pytest.mark.parametrize("alpha", [0.4, 1.6])
def test_renyi_of_scalars_agrees_with_scipys_integral(alpha: float) -> None:
    q, p = Laplace(double(0.3), double(0.5)), StudentT(double(3.0), double(-1.0), double(0.7))
    affinity = over(lambda x: math.exp(alpha * at(q, x) + (1 - alpha) * at(p, x)), [-60.0, -9.0, -1.0, 0.3, 4.0, 60.0])
    found = renyi(q, p, alpha)
    assert found.kind == "quadrature"
    assert float(found) == pytest.approx(math.log(affinity) / (alpha - 1), abs=1e-10)
    assert 0 < float(found.error) < 1e-10
    pair = renyi(Independent(q.expand((2,)), 1), Independent(p.expand((2,)), 1), alpha)
    assert (pair.kind, float(pair)) == ("quadrature", pytest.approx(2 * float(found)))


def test_renyi_of_scalars_is_infinite_where_q_is_not_covered() -> None:
    assert float(renyi(StudentT(double(3.0)), Normal(double(0.0), double(1.0)), 1.5)) == math.inf
    assert float(renyi(Laplace(double(0.0), double(1.0)), Normal(double(0.0), double(1.0)), 1.001)) == math.inf
    assert float(renyi(Normal(double(0.0), double(1.0)), Exponential(double(1.0)), 1.5)) == math.inf
    # below 1 what q has alone is forgiven
    assert math.isfinite(float(renyi(Normal(double(0.0), double(1.0)), Exponential(double(1.0)), 0.5)))


@pytest.mark.parametrize("alpha", [0.5, 1.3])
def test_a_monte_carlo_renyi_is_within_four_standard_errors(alpha: float) -> None:
    q, p = Normal(double(0.4), double(0.8)), Normal(double(-0.5), double(1.3))
    found = renyi(in_the_plane(q), in_the_plane(p), alpha, samples=20_000)
    assert found.kind == "Monte Carlo"
    # 4 standard errors: false-alarm rate 6.3e-5
    assert 0 < abs(float(found) - 2 * float(renyi(q, p, alpha))) < 4 * float(found.error) < 0.1


@pytest.mark.parametrize("alpha", [0.5, 1.3])
def test_the_stated_error_of_a_monte_carlo_renyi_is_the_spread_of_repeated_estimates(alpha: float) -> None:
    pairs = Independent(Normal(double(0.5), double(1.0)).expand((500, 1, 2)), 1)
    q = MixtureSameFamily(Categorical(torch.ones(500, 1).double()), pairs)
    found = renyi(q, in_the_plane(Normal(double(0.0), double(1.0))), alpha, samples=1000)  # 500 estimates side by side
    assert found.kind == "Monte Carlo"
    assert found.value.shape == found.error.shape == (500,)
    ratio = float(found.value.std() / found.error.square().mean().sqrt())
    # the spread of 500 estimates has a relative standard error of 3.2 %: 5 of them, false-alarm rate 5.7e-7
    assert ratio == pytest.approx(1, abs=0.16)


def test_renyi_near_one_is_the_kl_and_grows_with_the_order() -> None:
    q, p = Normal(double(-1.0), double(2.0)), Laplace(double(0.3), double(0.5))
    assert float(renyi(q, p, 1 + 1e-5)) == pytest.approx(float(pr.kl(q, p)), abs=1e-4)
    values = [float(renyi(q, p, a)) for a in (0.2, 0.5, 0.9, 1.1, 2.0)]
    assert values == sorted(values)


def test_gradients_of_renyi_and_jensen_of_scalars_agree_with_finite_differences() -> None:
    b = double(0.5).requires_grad_()
    p = StudentT(double(3.0), double(-1.0), double(0.7))
    for f in (lambda b: renyi(Laplace(double(0.3), b), p, 1.6), lambda b: jensen_shannon(Laplace(double(0.3), b), p)):
        (gradient,) = torch.autograd.grad(f(b).value, b)
        slope = (float(f(double(0.5 + 1e-5))) - float(f(double(0.5 - 1e-5)))) / 2e-5
        assert gradient.item() == pytest.approx(slope, abs=1e-7)


def test_a_monte_carlo_renyi_has_an_unbiased_gradient_without_reparameterisation() -> None:
    m = torch.zeros(200, dtype=torch.float64, requires_grad=True)
    pairs = Independent(Normal(m[:, None, None].expand(-1, 1, 2), double(1.0)), 1)
    q = MixtureSameFamily(Categorical(torch.ones(200, 1).double()), pairs)
    found = renyi(q, in_the_plane(Normal(double(0.5), double(1.0))), 0.5, samples=4_000)
    (gradients,) = torch.autograd.grad(found.value.sum(), m)
    # d/dm of two entries' (m - 0.5)^2 / 4; 200 independent estimates, 5 standard errors: false-alarm rate 5.7e-7
    assert_mean_close(gradients, -0.5)


@pytest.mark.parametrize("weight", [0.5, 0.2])
def test_jensen_shannon_of_scalars_agrees_with_scipys_integral(weight: float) -> None:
    q, p = Laplace(double(0.3), double(0.5)), StudentT(double(3.0), double(-1.0), double(0.7))

    def integrand(x: float) -> float:
        a, b = math.exp(at(q, x)), math.exp(at(p, x))
        m = weight * a + (1 - weight) * b
        return (weight * a * math.log(a / m) if a > 0 else 0.0) + (1 - weight) * b * math.log(b / m)

    edges = [-1e4, -300.0, -30.0, -9.0, -1.0, 0.3, 4.0, 30.0, 300.0]
    # beyond the edges q is 0 and p adds its mass times -log(1 - weight)
    expected = over(integrand, edges) - (1 - weight) * math.log(1 - weight) * (
        integrate.quad(lambda x: math.exp(at(p, x)), -math.inf, -1e4)[0]
        + integrate.quad(lambda x: math.exp(at(p, x)), 300.0, math.inf)[0]
    )
    found = jensen_shannon(q, p, weight)
    assert found.kind == "quadrature"
    assert float(found) == pytest.approx(expected, abs=1e-9)
    assert float(found.error) < 1e-9


def test_jensen_shannon_is_symmetric_and_bounded_and_zero_for_itself() -> None:
    q, p = Normal(double(0.0), double(1.0)), Uniform(double(0.0), double(3.0))
    assert float(jensen_shannon(q, p)) == pytest.approx(float(jensen_shannon(p, q)), abs=1e-12)
    assert float(jensen_shannon(q, p, 0.3)) == pytest.approx(float(jensen_shannon(p, q, 0.7)), abs=1e-12)
    assert float(jensen_shannon(q, q)) == pytest.approx(0, abs=1e-14)
    apart = jensen_shannon(q, Normal(double(1e3), double(1.0)))
    assert float(apart) == pytest.approx(math.log(2), abs=1e-10)


def test_a_monte_carlo_jensen_shannon_is_within_four_standard_errors() -> None:
    # along a line through both centres two round Gaussians differ, across it they agree
    q = MultivariateNormal(double([0.0, 0.0]), torch.eye(2).double())
    p = MultivariateNormal(double([1.2, 1.6]), torch.eye(2).double())
    expected = float(jensen_shannon(Normal(double(0.0), double(1.0)), Normal(double(2.0), double(1.0)), 0.3))
    found = jensen_shannon(q, p, 0.3, samples=20_000)
    assert found.kind == "Monte Carlo"
    # 4 standard errors: false-alarm rate 6.3e-5
    assert 0 < abs(float(found) - expected) < 4 * float(found.error) < 0.05


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda q: renyi(q, q, 1.0), "The 'alpha' argument of renyi must be a positive number other than 1"),
        (lambda q: renyi(q, q, 0), "The 'alpha' argument of renyi must be"),
        (lambda q: renyi(q, 3, 2.0), "The 'p' argument of renyi must be a torch distribution, got int."),
        (lambda q: renyi(q, q, 2.0, samples=1), "The 'samples' argument of renyi must be an integer >= 2, got 1."),
        (
            lambda q: jensen_shannon(q, q, 1.0),
            "The 'weight' argument of jensen_shannon must be a number between 0 and 1",
        ),
        (lambda q: jensen_shannon(q, LogUniform()), "The 'p' argument of jensen_shannon must be a proper distribution"),
        (lambda q: jensen_shannon("q", q), "The 'q' argument of jensen_shannon must be a torch distribution"),
    ],
)
def test_invalid_arguments_raise_an_error_that_names_them(call: object, sentence: str) -> None:
    with pytest.raises(pr.InputError, match=sentence):
        call(Normal(0.0, 1.0))
