"""KL divergences of posteriors: closed forms against torch, and Monte Carlo against quadrature."""

import math

import pytest
import torch
from torch.distributions import Beta, Independent, LogNormal, MultivariateNormal, Normal, StudentT, kl_divergence

import priory as pr
from priory.core.streams import stream
from priory.families import DiagonalFamily
from priory.models.target import Target
from priory.posteriors import DiagonalGaussian, Posterior
from priory.posteriors.chains import Chains

DOUBLE = torch.float64
REAL = pr.Density(
    lambda p: -0.5 * p["mu"].square() - 0.5 * (p["theta"] - p["mu"]).square().sum(-1),
    {"mu": pr.Param(), "theta": pr.Param((2,))},
)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


LOC, SCALE = numbers(0.3, -1.0, 0.5), numbers(0.7, 1.5, 0.2)


def diagonal(density: pr.Density, loc: torch.Tensor = LOC, scale: torch.Tensor = SCALE) -> DiagonalGaussian:
    return DiagonalGaussian(Target(density, None), DiagonalFamily(loc, scale.log()))


def positive() -> pr.Density:
    return pr.Density(
        lambda p: -p["s"] - p["x"].square(), {"x": pr.Param(), "s": pr.Param((), pr.constraints.positive)}
    )


def test_a_factorised_gaussian_has_the_sum_of_its_parameters_divergences():
    p = {"mu": Normal(numbers(1.0)[0], 2.0), "theta": Normal(numbers(0.0, 1.0), 1.0)}
    found = pr.kl(diagonal(REAL), p)
    wanted = kl_divergence(Normal(LOC, SCALE), Normal(numbers(1.0, 0.0, 1.0), numbers(2.0, 1.0, 1.0))).sum()
    assert found.kind == "exact"
    assert abs(float(found) - float(wanted)) < 1e-12
    assert float(found.error) == 0
    # a distribution over one entry is that of every entry
    same = pr.kl(diagonal(REAL), {"mu": Normal(0.0, 1.0), "theta": Normal(0.0, 1.0)})
    assert abs(float(same) - float(kl_divergence(Normal(LOC, SCALE), Normal(0.0, 1.0)).sum())) < 1e-6


def test_a_positive_parameter_is_log_normal():
    loc, scale = LOC[:2], SCALE[:2]
    found = pr.kl(diagonal(positive(), loc, scale), {"x": Normal(0.0, 1.0), "s": LogNormal(0.5, 1.0)})
    wanted = kl_divergence(Normal(loc, scale), Normal(numbers(0.0, 0.5), 1.0)).sum()
    assert found.kind == "exact"
    assert abs(float(found) - float(wanted)) < 1e-6


def test_without_a_closed_form_a_factor_is_integrated():
    found = pr.kl(diagonal(REAL), {"mu": StudentT(numbers(3.0)[0]), "theta": Normal(numbers(0.0, 0.0), 1.0)})
    assert found.kind == "quadrature"
    u = torch.linspace(-12, 12, 200_001, dtype=DOUBLE)
    x = LOC[0] + SCALE[0] * u
    density = Normal(LOC[0], SCALE[0]).log_prob(x)
    first = torch.trapezoid(density.exp() * (density - StudentT(numbers(3.0)[0]).log_prob(x)), x)
    wanted = first + kl_divergence(Normal(LOC[1:], SCALE[1:]), Normal(numbers(0.0, 0.0), 1.0)).sum()
    assert abs(float(found) - float(wanted)) < 1e-8


@pytest.mark.parametrize("method", [pr.FullRank(), pr.LowRank(2), pr.MeanField(), pr.Laplace()], ids=str)
def test_a_gaussian_over_real_parameters_is_exact_against_one_over_their_vector(method):
    steps = None if isinstance(method, pr.Laplace) else 20
    posterior = pr.fit(REAL, None, method, steps=steps, progress=False)
    p = MultivariateNormal(numbers(0.0, 0.1, 0.2), numbers(1, 0.5, 0.5, 0.5, 2, 0.5, 0.5, 0.5, 2).reshape(3, 3))
    found = pr.kl(posterior, p)
    assert found.kind == "exact"
    # 5 standard errors of the average over draws, false alarms at 6e-7
    drawn = posterior.sample(20_000, seed=0)
    x = torch.cat([drawn["mu"][:, None], drawn["theta"]], 1)
    each = posterior.log_prob(drawn) - p.log_prob(x)
    assert abs(float(found) - float(each.mean())) < 5 * float(each.std()) / math.sqrt(20_000) + 1e-9


def test_laplace_of_a_gaussian_density_has_no_divergence_from_it():
    precision = numbers(3, -1, -1, -1, 1, 0, -1, 0, 1).reshape(3, 3)
    posterior = pr.fit(REAL, None, pr.Laplace(), progress=False)
    assert abs(float(pr.kl(posterior, MultivariateNormal(numbers(0.0, 0.0, 0.0), precision_matrix=precision)))) < 1e-8


def test_a_bounded_parameter_is_averaged_over_draws_with_its_error():
    density = pr.Density(lambda p: -p["r"], {"r": pr.Param((), pr.constraints.unit_interval)})
    q = diagonal(density, LOC[:1], SCALE[:1])
    found = pr.kl(q, Beta(numbers(2.0)[0], 3.0), samples=20_000)
    assert found.kind == "Monte Carlo"
    u = torch.linspace(-12, 12, 200_001, dtype=DOUBLE) * SCALE[0] + LOC[0]
    r = u.sigmoid()
    log_q = Normal(LOC[0], SCALE[0]).log_prob(u)
    log_p = Beta(numbers(2.0)[0], 3.0).log_prob(r) + r.log() + torch.log1p(-r)
    wanted = torch.trapezoid(log_q.exp() * (log_q - log_p), u)
    assert float(found.error) > 0
    assert abs(float(found) - float(wanted)) < 5 * float(found.error)  # false alarms at 6e-7


def test_two_posteriors_of_the_same_parameters_are_compared_by_draws():
    q, p = diagonal(REAL), diagonal(REAL, LOC + 1, 2 * SCALE)
    assert float(pr.kl(q, q)) == 0
    found = pr.kl(q, p, samples=20_000)
    wanted = kl_divergence(Normal(LOC, SCALE), Normal(LOC + 1, 2 * SCALE)).sum()
    assert found.kind == "Monte Carlo"
    assert abs(float(found) - float(wanted)) < 5 * float(found.error)  # false alarms at 6e-7


def test_mass_outside_the_support_is_infinitely_far():
    assert (
        float(pr.kl(diagonal(positive(), LOC[:2], SCALE[:2]), {"x": LogNormal(0.0, 1.0), "s": Beta(2.0, 2.0)}))
        == math.inf
    )


def chains() -> Posterior:
    return Chains(Target(REAL, None), torch.randn(2, 10, 3, generator=stream(0), dtype=DOUBLE))


@pytest.mark.parametrize(
    ("q", "p", "message"),
    [
        (chains, Independent(Normal(torch.zeros(3), 1.0), 1), "The posterior of Chains has no density"),
        (lambda: diagonal(REAL), Normal(0.0, 1.0), "The 'p' argument of kl must have the event shape"),
        (lambda: diagonal(REAL), {"mu": Normal(0.0, 1.0)}, "The 'p' argument of kl must name the parameters mu, theta"),
        (
            lambda: diagonal(REAL),
            {"mu": Normal(0.0, 1.0), "theta": Normal(torch.zeros(3), 1.0)},
            r"argument of kl must have the shape \(2,\) of the parameter, got \(3,\)",
        ),
        (lambda: diagonal(REAL), {"mu": 1.0, "theta": 2.0}, "argument of kl must be a torch distribution, got float"),
        (
            lambda: diagonal(REAL),
            3.0,
            "The 'p' argument of kl must be a torch distribution over the parameters, a dict",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(q, p, message):
    with pytest.raises(pr.InputError, match=message):
        pr.kl(q(), p)


def test_the_number_of_draws_is_an_integer_of_two_or_more():
    with pytest.raises(pr.InputError, match="The 'samples' argument of kl must be an integer >= 2"):
        pr.kl(diagonal(REAL), diagonal(REAL), samples=1)
