"""Bounds on the KL of Gaussian mixtures, against quadrature."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Laplace, MixtureSameFamily, MultivariateNormal, Normal

import priory as pr
from priory.divergences import kl_bounds


def double(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def mixture(seed: int, k: int, spread: float) -> MixtureSameFamily:
    g = torch.Generator().manual_seed(seed)
    weights, locs, scales = (torch.rand(k, generator=g).double() for _ in range(3))
    return MixtureSameFamily(Categorical(weights), Normal(spread * (locs - 0.5), 0.3 + scales))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_the_bounds_bracket_the_integral(seed: int, spread: float) -> None:
    q, p = mixture(seed, 1 + seed % 4, spread), mixture(100 + seed, 1 + seed % 3, spread)
    value, bounds = float(pr.kl(q, p)), kl_bounds(q, p)
    assert 0 <= float(bounds.lower) <= value + 1e-12
    assert value <= float(bounds.upper) + 1e-12


def test_the_bounds_are_tight_for_well_separated_components() -> None:
    scales = double([1.0, 1.0])
    q = MixtureSameFamily(Categorical(double([0.3, 0.7])), Normal(double([-50.0, 50.0]), scales))
    p = MixtureSameFamily(Categorical(double([0.6, 0.4])), Normal(double([-50.0, 50.0]), scales))
    value = 0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4)
    bounds = kl_bounds(q, p)
    assert float(pr.kl(q, p)) == pytest.approx(value, abs=1e-10)
    assert float(bounds.upper) == pytest.approx(value, abs=1e-8)
    # Jensen's gap of one component against itself: E log q_i - log E q_i = -(1 - log 2) / 2
    assert float(bounds.lower) == pytest.approx(max(0, value - 0.5 * (1 - math.log(2))), abs=1e-8)


def test_the_upper_bound_is_exact_for_two_gaussians_and_zero_for_a_mixture_with_itself() -> None:
    q, p = Normal(double([0.0, 1.0]), double(1.0)), Normal(double(2.0), double(3.0))
    torch.testing.assert_close(kl_bounds(q, p).upper, pr.kl(q, p).value)
    own = mixture(0, 4, 3.0)
    assert kl_bounds(own, own).lower.item() == 0
    assert kl_bounds(own, own).upper.item() == pytest.approx(0, abs=1e-12)


def test_vectors_are_bracketed_within_four_standard_errors() -> None:
    g = torch.Generator().manual_seed(0)
    root = torch.randn(3, 2, 2, generator=g).double()
    joint = MultivariateNormal(torch.randn(3, 2, generator=g).double(), root @ root.mT + 0.5 * torch.eye(2))
    q = MixtureSameFamily(Categorical(double([0.2, 0.3, 0.5])), joint)
    p = MixtureSameFamily(
        Categorical(double([0.5, 0.5])), Independent(Normal(double([[0.0, 0.0], [1.0, 2.0]]), 1.0), 1)
    )
    found, bounds = pr.kl(q, p, samples=20_000), kl_bounds(q, p)
    assert found.kind == "Monte Carlo"
    # 4 standard errors, one side each: false-alarm rate 6.3e-5
    assert float(bounds.lower) < float(found) + 4 * float(found.error)
    assert float(bounds.upper) > float(found) - 4 * float(found.error)


def test_bounds_follow_the_batch_and_the_parameters() -> None:
    locs = double([[-1.0, 1.0], [0.0, 3.0]]).requires_grad_()
    q = MixtureSameFamily(Categorical(double([[0.5, 0.5], [0.2, 0.8]])), Normal(locs, double(1.0)))
    bounds = kl_bounds(q, Normal(double(0.0), double(2.0)))
    assert bounds.lower.shape == bounds.upper.shape == (2,)
    (gradient,) = torch.autograd.grad(bounds.upper.sum(), locs)
    assert bool((gradient != 0).any())


@pytest.mark.parametrize("name", ["q", "p"])
def test_kl_bounds_requires_mixtures_of_gaussians(name: str) -> None:
    sides = {"q": Normal(0.0, 1.0), "p": Normal(0.0, 1.0), name: Laplace(0.0, 1.0)}
    with pytest.raises(
        pr.InputError, match=f"The '{name}' argument of kl_bounds must be Gaussian or a mixture of Gaussians"
    ):
        kl_bounds(**sides)
