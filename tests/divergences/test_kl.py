"""KL divergences against closed forms, quadrature and their own standard errors."""

import math

import pytest
import torch
from scipy import integrate
from torch import Tensor, distributions
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Exponential,
    Gamma,
    Independent,
    Laplace,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Poisson,
    StudentT,
    TransformedDistribution,
    Uniform,
    Weibull,
)

import priory as pr
from priory.distributions import LogUniform, SpikeAndSlab
from priory.testing import assert_mean_close

EXACT = {"rtol": 0, "atol": 1e-10}


def double(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def mixture(weights: list[float], locs: list[float], scales: list[float]) -> MixtureSameFamily:
    return MixtureSameFamily(Categorical(double(weights)), Normal(double(locs), double(scales)))


def by_quadrature(q: distributions.Distribution, p: distributions.Distribution, low: float, high: float) -> float:
    def integrand(x: float) -> float:
        at = double(x)
        log_q = q.log_prob(at)
        return float(log_q.exp() * (log_q - p.log_prob(at)))

    return integrate.quad(integrand, low, high, epsabs=1e-13, epsrel=1e-13, limit=500)[0]


def test_kl_of_two_normals_is_the_closed_form() -> None:
    m_q, s_q, m_p, s_p = double([0.0, 1.0, -2.0]), double([1.0, 0.1, 3.0]), double([1.0, 1.0, 5.0]), double([2.0] * 3)
    expected = torch.log(s_p / s_q) + (s_q**2 + (m_q - m_p) ** 2) / (2 * s_p**2) - 0.5
    found = pr.kl(Normal(m_q, s_q), Normal(m_p, s_p))
    assert found.kind == "exact"
    assert found.error.tolist() == [0.0] * 3
    torch.testing.assert_close(found.value, expected, **EXACT)


def test_kl_of_two_correlated_normals_is_the_closed_form() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 3, generator=g, dtype=torch.float64) for _ in range(2))
    cov_q, cov_p = a @ a.T + torch.eye(3), b @ b.T + torch.eye(3)
    m = torch.randn(3, generator=g, dtype=torch.float64)
    found = pr.kl(MultivariateNormal(torch.zeros(3).double(), cov_q), MultivariateNormal(m, cov_p))
    precision = torch.linalg.inv(cov_p)
    expected = 0.5 * (
        torch.trace(precision @ cov_q) + m @ precision @ m - 3 + torch.logdet(cov_p) - torch.logdet(cov_q)
    )
    assert found.kind == "exact"
    torch.testing.assert_close(found.value, expected, **EXACT)


@pytest.mark.parametrize(
    ("q", "p", "low", "high"),
    [
        (Laplace(double(0.3), double(0.5)), Laplace(double(-1.0), double(2.0)), -20.0, 20.0),
        (Laplace(double(0.3), double(0.5)), Normal(double(-1.0), double(2.0)), -20.0, 20.0),
        (Gamma(double(2.0), double(3.0)), Gamma(double(4.0), double(1.0)), 1e-12, 20.0),
        (Beta(double(2.0), double(3.0)), Beta(double(4.0), double(1.5)), 1e-12, 1 - 1e-12),
        (Exponential(double(2.0)), Exponential(double(0.5)), 0.0, 40.0),
    ],
    ids=lambda d: type(d).__name__,
)
def test_kl_is_the_integral_of_q_log_q_over_p(
    q: distributions.Distribution, p: distributions.Distribution, low: float, high: float
) -> None:
    if isinstance(q, Laplace):  # the corner is an end of two pieces
        expected = by_quadrature(q, p, low, 0.3) + by_quadrature(q, p, 0.3, high)
        if isinstance(p, Laplace):
            expected = sum(by_quadrature(q, p, a, b) for a, b in ((low, -1.0), (-1.0, 0.3), (0.3, high)))
    else:
        expected = by_quadrature(q, p, low, high)
    found = pr.kl(q, p)
    assert found.kind == "exact"
    assert float(found) == pytest.approx(expected, abs=1e-10)


def test_kl_of_classes_and_counts_is_the_sum_over_them() -> None:
    q, p = double([0.2, 0.5, 0.3]), double([0.6, 0.1, 0.3])
    found = pr.kl(Categorical(q), Categorical(p))
    torch.testing.assert_close(found.value, (q * (q / p).log()).sum(), **EXACT)
    found = pr.kl(Bernoulli(double(0.2)), Bernoulli(double(0.7)))
    assert float(found) == pytest.approx(0.2 * math.log(0.2 / 0.7) + 0.8 * math.log(0.8 / 0.3), abs=1e-10)
    counts = torch.arange(80).double()
    a, b = Poisson(double(3.0)), Poisson(double(5.0))
    expected = (a.log_prob(counts).exp() * (a.log_prob(counts) - b.log_prob(counts))).sum()
    torch.testing.assert_close(pr.kl(a, b).value, expected, **EXACT)


def test_kl_of_independent_entries_is_their_sum() -> None:
    q, p = Normal(torch.zeros(2, 3).double(), double(1.0)), Normal(torch.ones(2, 3).double(), double(2.0))
    found = pr.kl(Independent(q, 1), Independent(p, 1))
    assert found.value.shape == (2,)
    torch.testing.assert_close(found.value, pr.kl(q, p).value.sum(-1), **EXACT)


def test_kl_of_a_distribution_with_itself_is_zero() -> None:
    for d in (Normal(double(1.0), double(2.0)), Gamma(double(2.0), double(3.0)), Dirichlet(double([1.0, 2.0, 3.0]))):
        assert float(pr.kl(d, d)) == pytest.approx(0.0, abs=1e-12)
    own = StudentT(double(5.0))
    found = pr.kl(own, own)
    assert (found.kind, float(found), found.error.item()) == ("quadrature", 0.0, 0.0)
    joint = in_the_plane(own)
    found = pr.kl(joint, joint)
    assert (found.kind, float(found), found.error.item()) == ("Monte Carlo", 0.0, 0.0)


def in_the_plane(d: distributions.Distribution) -> MixtureSameFamily:
    """Independent pairs of d, as a mixture of one component, which only draws can handle."""
    return MixtureSameFamily(Categorical(torch.ones(1).double()), Independent(d.expand((1, 2)), 1))


def many_in_the_plane(loc: Tensor) -> MixtureSameFamily:
    """As many pairs of Normals of deviation 1, side by side."""
    pairs = Independent(Normal(loc[:, None, None].expand(-1, 1, 2), double(1.0)), 1)
    return MixtureSameFamily(Categorical(torch.ones(len(loc), 1).double()), pairs)


PAIRS = {
    "mixture to normal": (mixture([0.4, 0.6], [-2.0, 1.0], [0.5, 1.0]), Normal(double(0.0), double(2.0)), 15.0),
    "normal to mixture": (Normal(double(0.0), double(1.0)), mixture([0.4, 0.6], [-2.0, 1.0], [0.5, 1.0]), 12.0),
    "student to student": (StudentT(double(9.0), double(0.0), double(1.0)), StudentT(double(3.0), double(1.0)), 400.0),
    "normal to student": (Normal(double(0.0), double(1.0)), StudentT(double(3.0), double(1.0)), 12.0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_scalar_kl_without_a_closed_form_is_an_integral(name: str) -> None:
    q, p, edge = PAIRS[name]
    found = pr.kl(q, p)
    expected = by_quadrature(q, p, -edge, 0.0) + by_quadrature(q, p, 0.0, edge)
    assert found.kind == "quadrature"
    assert float(found) == pytest.approx(expected, abs=1e-10)
    assert 0 < float(found.error) < 1e-10


@pytest.mark.parametrize("name", PAIRS)
def test_a_monte_carlo_kl_is_within_four_of_its_own_standard_errors_of_quadrature(name: str) -> None:
    q, p, _ = PAIRS[name]
    found = pr.kl(in_the_plane(q), in_the_plane(p), samples=20_000)
    expected = 2 * float(pr.kl(q, p))
    assert found.kind == "Monte Carlo"
    assert float(found.error) > 0
    # 4 standard errors: false-alarm rate 6.3e-5 per pair
    assert abs(float(found) - expected) < 4 * float(found.error)


def test_the_standard_error_of_a_monte_carlo_kl_falls_with_the_root_of_the_samples() -> None:
    q, p = (in_the_plane(d) for d in PAIRS["normal to student"][:2])
    few, many = pr.kl(q, p, samples=1_000), pr.kl(q, p, samples=64_000)
    # the ratio is 8 within 4 relative standard errors of the smaller sample's spread, about 5 % each
    assert float(few.error / many.error) == pytest.approx(8, rel=0.25)


def test_the_stated_error_is_the_spread_of_repeated_estimates() -> None:
    wide = many_in_the_plane(torch.zeros(500).double())
    found = pr.kl(wide, in_the_plane(StudentT(double(3.0), double(1.0))), samples=400)  # 500 estimates side by side
    assert found.kind == "Monte Carlo"
    assert found.value.shape == found.error.shape == (500,)
    ratio = float(found.value.std() / found.error.square().mean().sqrt())
    # the spread of 500 estimates has a relative standard error of 3.2 %: 5 of them, false-alarm rate 5.7e-7
    assert ratio == pytest.approx(1, abs=0.16)


def unresolved() -> TransformedDistribution:
    """N(1e6, 0.001^2) as a transform, of which torch knows neither the mean nor the scale."""
    return TransformedDistribution(Normal(double(0.0), double(1.0)), [AffineTransform(double(1e6), double(1e-3))])


def test_the_stated_error_of_spikes_and_slabs_is_the_spread_of_repeated_estimates() -> None:
    q, p = SpikeAndSlab(double(0.2), unresolved()), SpikeAndSlab(double(0.6), Normal(double(0.0), double(1e6)))
    found = pr.kl(q.expand((100,)), p.expand((100,)), samples=200)  # 100 estimates side by side
    assert found.kind == "Monte Carlo"
    assert found.value.shape == found.error.shape == (100,)
    ratio = float(found.value.std() / found.error.square().mean().sqrt())
    # the spread of 100 estimates has a relative standard error of 7.1 %: 5 of them, false-alarm rate 5.7e-7
    assert ratio == pytest.approx(1, abs=0.36)


def test_the_error_of_spikes_and_slabs_is_that_of_the_slabs_by_the_weight_of_q() -> None:
    slab_q, slab_p = Normal(double(1.0), double(0.5)), StudentT(double(3.0), double(0.0), double(1.0))
    slabs, weight = pr.kl(slab_q.expand((3,)), slab_p.expand((3,))), double([0.0, 0.2, 1.0])
    found = pr.kl(SpikeAndSlab(weight, slab_q), SpikeAndSlab(double(0.6), slab_p))
    assert found.kind == slabs.kind == "quadrature"
    assert float(slabs.error.min()) > 0
    torch.testing.assert_close(found.error, weight * slabs.error, rtol=1e-12, atol=0)


def test_a_monte_carlo_kl_is_reproducible_and_leaves_the_global_generator_unchanged() -> None:
    q, p = (in_the_plane(d) for d in PAIRS["normal to student"][:2])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = pr.kl(q, p)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first.value, pr.kl(q, p).value)
    assert not torch.equal(first.value, pr.kl(q, p, seed=1).value)


def test_a_monte_carlo_kl_has_an_unbiased_gradient_without_reparameterisation() -> None:
    m = torch.zeros(200, dtype=torch.float64, requires_grad=True)
    found = pr.kl(many_in_the_plane(m), in_the_plane(Normal(double(1.0), double(2.0))), samples=2_000)
    (gradients,) = torch.autograd.grad(found.value.sum(), m)
    # d/dm of two entries' (m - 1)^2 / 8; 200 independent estimates, 5 standard errors: false-alarm rate 5.7e-7
    assert_mean_close(gradients, -0.5)


def test_kl_of_a_transformed_distribution_is_that_of_its_base() -> None:
    q, p = LogNormal(double(0.0), double(1.0)), LogNormal(double(1.0), double(2.0))
    found = pr.kl(q, p)
    assert found.kind == "exact"
    torch.testing.assert_close(
        found.value, pr.kl(Normal(*map(double, (0.0, 1.0))), Normal(*map(double, (1.0, 2.0)))).value
    )


def test_kl_is_infinite_where_q_has_mass_outside_the_support_of_p() -> None:
    outside = [
        (Normal(double(0.0), double(1.0)), Exponential(double(1.0))),
        (StudentT(double(5.0)), Exponential(double(1.0))),
        (Uniform(double(0.0), double(2.0)), Beta(double(2.0), double(2.0))),
        (Laplace(double(0.0), double(1.0)), Uniform(double(-1.0), double(1.0))),
        (Normal(double(0.0), double(1.0)), Poisson(double(1.0))),
        (Poisson(double(1.0)), Normal(double(0.0), double(1.0))),
    ]
    for q, p in outside:
        found = pr.kl(q, p)
        assert (found.kind, float(found), found.error.item()) == ("exact", math.inf, 0.0)


def test_a_batch_may_be_partly_outside_the_support() -> None:
    q = Uniform(double([0.0, -1.0]), double([1.0, 1.0]))
    found = pr.kl(q, torch.distributions.HalfCauchy(double(1.0)))
    expected = integrate.quad(lambda x: math.log(math.pi / 2 * (1 + x * x)), 0, 1)[0]
    assert found.value.tolist() == pytest.approx([expected, math.inf], abs=1e-10)


def test_gradients_flow_through_the_closed_form() -> None:
    m = double(0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(pr.kl(Normal(m, double(1.0)), Normal(double(0.0), double(2.0))).value, m)
    assert gradient.item() == pytest.approx(0.5 / 4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1.0, Normal(0.0, 1.0)), "The 'q' argument of kl must be a torch distribution, got float."),
        ((Normal(0.0, 1.0), Normal), "The 'p' argument of kl must be a torch distribution"),
        ((StudentT(5.0), Normal(0.0, 1.0), 1), "The 'samples' argument of kl must be an integer >= 2, got 1."),
        ((LogUniform(), Normal(0.0, 1.0)), "The 'q' argument of kl must be a proper distribution"),
        ((StudentT(5.0), Normal(0.0, 1.0), 10.5), "The 'samples' argument of kl must be an integer >= 2"),
    ],
)
def test_invalid_arguments_of_kl_raise_an_error_that_names_them(arguments: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(pr.InputError, match=sentence):
        pr.kl(*arguments)


def test_distributions_with_different_event_shapes_raise_an_error() -> None:
    vector = MultivariateNormal(torch.zeros(3), torch.eye(3))
    with pytest.raises(pr.InputError, match="kl"):
        pr.kl(Normal(torch.zeros(3), torch.ones(3)), vector)
    with pytest.raises(pr.InputError, match="kl"):
        pr.kl(StudentT(5.0), vector)


def test_a_density_that_the_panels_do_not_resolve_is_estimated_by_monte_carlo() -> None:
    found = pr.kl(unresolved(), Normal(double(0.0), double(1e6)), samples=20_000)
    expected = math.log(1e9)
    assert found.kind == "Monte Carlo"
    # 4 standard errors: false-alarm rate 6.3e-5
    assert abs(float(found) - expected) < 4 * float(found.error)


def test_a_pole_at_the_end_of_the_support_is_integrated() -> None:
    # against an exponential of rate 1, from the entropy and the mean of a gamma distribution
    q = Gamma(double(0.3), double(1.0))
    found = pr.kl(q, Weibull(double(1.0), double(1.0)))
    assert found.kind == "quadrature"
    assert float(found) == pytest.approx(0.3 - float(q.entropy()), abs=1e-8)
