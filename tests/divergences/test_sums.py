"""Divergences of labels and counts are sums."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Binomial,
    Categorical,
    Geometric,
    Independent,
    NegativeBinomial,
    OneHotCategorical,
    Poisson,
)

import priory as pr


def double(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


Q, P = double([0.2, 0.3, 0.5]), double([0.6, 0.3, 0.1])


def renyi(q: Tensor, p: Tensor, alpha: float) -> float:
    return float((q**alpha * p ** (1 - alpha)).sum().log() / (alpha - 1))


def jensen(q: Tensor, p: Tensor) -> float:
    m = (q + p) / 2
    return float(0.5 * (q * (q / m).log()).sum() + 0.5 * (p * (p / m).log()).sum())


@pytest.mark.parametrize("kind", [Categorical, OneHotCategorical])
def test_renyi_and_jensen_shannon_of_classes_are_exact_sums(kind: type) -> None:
    for alpha in (0.5, 2.0):
        found = pr.renyi(kind(Q), kind(P), alpha)
        assert found.kind == "exact"
        assert abs(float(found) - renyi(Q, P, alpha)) < 1e-14
    found = pr.jensen_shannon(kind(Q), kind(P))
    assert found.kind == "exact"
    assert abs(float(found) - jensen(Q, P)) < 1e-14


def test_a_batch_of_bernoullis_is_exact_and_independent_entries_add_up() -> None:
    q, p = double([0.3, 0.9]), double([0.6, 0.5])
    each = [renyi(torch.stack([1 - a, a]), torch.stack([1 - b, b]), 2.0) for a, b in zip(q, p, strict=True)]
    torch.testing.assert_close(pr.renyi(Bernoulli(q), Bernoulli(p), 2.0).value, double(each), rtol=0, atol=1e-14)
    together = pr.renyi(Independent(Bernoulli(q), 1), Independent(Bernoulli(p), 1), 2.0)
    assert together.kind == "exact"
    assert abs(float(together) - sum(each)) < 1e-14


def test_binomials_of_different_numbers_of_trials_are_exact() -> None:
    q, p = Binomial(double([3, 4]), double(0.3)), Binomial(double([3, 4]), double(0.4))
    found = pr.renyi(q, p, 2.0)
    assert found.kind == "exact"
    for i, n in enumerate((3, 4)):
        mass = [double([math.comb(n, k) * c**k * (1 - c) ** (n - k) for k in range(n + 1)]) for c in (0.3, 0.4)]
        assert abs(float(found.value[i]) - renyi(mass[0], mass[1], 2.0)) < 1e-13


def test_sums_over_counts_continue_until_the_remainder_is_negligible() -> None:
    k = range(400)
    q = double([math.exp(i * math.log(3) - 3 - math.lgamma(i + 1)) for i in k])
    p = double([0.3 * 0.7**i for i in k])
    found = pr.kl(Poisson(double(3.0)), Geometric(double(0.3)))
    assert found.kind == "sum"
    assert abs(float(found) - float(torch.special.xlogy(q, q).sum() - torch.special.xlogy(q, p).sum())) < 1e-12
    assert float(found.error) < 1e-14
    there = q > 0
    found = pr.renyi(Poisson(double(3.0)), Geometric(double(0.3)), 2.0)
    assert abs(float(found) - renyi(q[there], p[there], 2.0)) < 1e-12
    found = pr.jensen_shannon(Poisson(double(3.0)), Geometric(double(0.3)))
    assert abs(float(found) - jensen(q[there], p[there])) < 1e-12


def test_renyi_of_poissons_is_its_closed_form_even_where_the_sum_overflows() -> None:
    """D = log(e^(q^a p^(1 - a) - a q - (1 - a) p)) / (a - 1), here 900 - 60 + 1."""
    found = pr.renyi(Poisson(double(30.0)), Poisson(double(1.0)), 2.0)
    assert found.kind == "sum"
    assert abs(float(found) - 841) < 1e-9


def test_a_sum_whose_terms_do_not_fall_is_infinite() -> None:
    assert float(pr.renyi(Geometric(double(0.3)), Poisson(double(3.0)), 2.0)) == math.inf
    assert float(pr.renyi(Geometric(double(0.5)), Geometric(double(0.75)), 2.0)) == math.inf  # q^2 / p is constant
    assert math.isfinite(float(pr.renyi(Geometric(double(0.5)), Geometric(double(0.7)), 2.0)))
    assert float(pr.kl(Bernoulli(double(0.5)), Poisson(double(0.0)))) == math.inf


def test_a_sum_over_counts_has_the_gradient_of_its_terms() -> None:
    rate = double(2.0).requires_grad_()
    (slope,) = torch.autograd.grad(pr.kl(NegativeBinomial(double(3.0), double(0.4)), Poisson(rate)).value, rate)
    # d/dr E[r - k log r] = 1 - E[k] / r, with E[k] = 3 * 0.4 / 0.6
    assert abs(float(slope) - (1 - 2.0 / 2.0)) < 1e-12


@pytest.mark.parametrize("divergence", [pr.kl, pr.jensen_shannon, lambda q, p: pr.renyi(q, p, 2.0)])
def test_shapes_that_do_not_match_raise_an_error(divergence: object) -> None:
    assert callable(divergence)
    with pytest.raises(pr.InputError, match=r"must have as many classes as q, got \(3, 2\)\."):
        divergence(Categorical(Q), Categorical(P[:2]))
    with pytest.raises(pr.InputError, match=r"batch shape that broadcasts with q's, got \(\(2,\), \(3,\)\)\."):
        divergence(Bernoulli(Q[:2]), Bernoulli(P))
    wide = torch.distributions.Normal(torch.zeros(2), 1.0), torch.distributions.Normal(torch.zeros(3), 1.0)
    with pytest.raises(pr.InputError, match="batch shape that broadcasts"):
        divergence(*wide)
    with pytest.raises(pr.InputError, match=r"The 'p' argument of explain_kl must have a batch shape"):
        pr.explain_kl(*wide)
