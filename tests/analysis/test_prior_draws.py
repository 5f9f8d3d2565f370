"""Draws from priors: exact for networks and distributions, by NUTS for functions, refused for improper ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Gamma,
    HalfNormal,
    Laplace,
    MultivariateNormal,
    Normal,
    Uniform,
)

import priory as pr
from priory import constraints
from priory.core.errors import InputError
from priory.models.named_prior import NamedPrior

DOUBLE = torch.float64


def rows(p: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    return Normal(p["mu"], 1.0).log_prob(batch[0])


def density(log_prior: object, **params: pr.Param) -> pr.Density:
    return pr.Density(params=params, log_prior=log_prior, log_likelihood=rows)  # pyright: ignore[reportArgumentType]


def assert_moments(x: Tensor, mean: float, variance: float) -> None:
    """Mean and variance of independent draws (n,) within 5 standard errors: one false alarm in 1.7 million."""
    x = x.double()
    assert abs(float(x.mean()) - mean) < 5 * math.sqrt(variance / len(x))
    square = (x - mean).square()
    assert abs(float(square.mean()) - variance) < 5 * float(square.std()) / math.sqrt(len(x))


SCHOOLS = {
    "mu": pr.Param(),
    "tau": pr.Param((), constraints.positive),
    "theta": pr.Param((8,)),
}
HIERARCHY = {"mu": Normal(1.0, 2.0), "tau": HalfNormal(3.0), "theta": lambda p: Normal(p["mu"], p["tau"])}


def test_a_prior_of_distributions_is_drawn_one_parameter_after_the_other() -> None:
    draws = pr.prior_draws(density(HIERARCHY, **SCHOOLS), 20_000)
    assert {name: tuple(x.shape) for name, x in draws.items()} == {
        "mu": (20_000,),
        "tau": (20_000,),
        "theta": (20_000, 8),
    }
    assert_moments(draws["mu"], 1.0, 4.0)
    assert_moments(draws["tau"], 3.0 * math.sqrt(2 / math.pi), 9.0 * (1 - 2 / math.pi))
    assert_moments((draws["theta"][:, 3] - draws["mu"]) / draws["tau"], 0.0, 1.0)
    z = (draws["theta"] - draws["mu"][:, None]) / draws["tau"][:, None]
    assert_moments(z[:, 0] * z[:, 1], 0.0, 1.0)  # entries have their own noise, and so have draws
    assert_moments(z[:-1, 0] * z[1:, 0], 0.0, 1.0)


def test_the_log_prior_of_distributions_is_the_sum_of_their_log_densities() -> None:
    model = density(HIERARCHY, **SCHOOLS)
    theta = torch.linspace(-1, 2, 8, dtype=DOUBLE)
    point = {"mu": torch.tensor(0.3, dtype=DOUBLE), "tau": torch.tensor(1.7, dtype=DOUBLE), "theta": theta}
    expected = -0.5 * math.log(2 * math.pi * 4) - (0.3 - 1) ** 2 / 8
    expected += math.log(2) - 0.5 * math.log(2 * math.pi * 9) - 1.7**2 / 18
    expected += sum(-0.5 * math.log(2 * math.pi * 1.7**2) - (t - 0.3) ** 2 / (2 * 1.7**2) for t in theta.tolist())
    assert model.log_prior is not None
    assert float(model.log_prior(point)) == pytest.approx(expected, abs=1e-12)


def test_a_batched_prior_of_distributions_sums_over_parameters_and_not_over_draws() -> None:
    factors = {"a": Normal(0.0, 1.0), "b": MultivariateNormal(torch.zeros(3), torch.eye(3))}
    model = density(factors, a=pr.Param((2,)), b=pr.Param((3,)))
    assert isinstance(model.log_prior, NamedPrior)
    generator = torch.Generator().manual_seed(0)
    p = {"a": torch.randn(5, 4, 2, generator=generator), "b": torch.randn(5, 4, 3, generator=generator)}
    expected = -0.5 * (p["a"].square().sum(-1) + p["b"].square().sum(-1)) - 2.5 * math.log(2 * math.pi)
    torch.testing.assert_close(model.log_prior(p), expected.double(), rtol=1e-5, atol=1e-5, check_dtype=False)


def test_a_density_with_a_prior_of_distributions_has_the_conjugate_posterior() -> None:
    y = torch.tensor([1.0, 2.0, 4.0], dtype=DOUBLE)
    model = density({"mu": Normal(0.0, 2.0)}, mu=pr.Param())
    posterior = pr.fit(model, (y,), pr.Laplace(), progress=False)
    precision = 3 + 0.25
    assert float(posterior.mean["mu"]) == pytest.approx(7 / precision, abs=1e-6)
    log_evidence = MultivariateNormal(torch.zeros(3, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE) + 4.0).log_prob(y)
    assert posterior.log_evidence.value == pytest.approx(float(log_evidence), abs=1e-6)


def test_the_same_seed_gives_the_same_draws_and_leaves_the_global_state_alone() -> None:
    model = density(HIERARCHY, **SCHOOLS)
    before = torch.random.get_rng_state()
    first, second, other = (pr.prior_draws(model, 5, seed=seed)["theta"] for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_network_is_drawn_from_its_prior_with_its_noise() -> None:
    net = nn.Linear(2, 1).double()
    prior = {"weight": Laplace(1.0, 0.5), "bias": 3.0}
    model = pr.Model(net, pr.Gaussian(prior=Gamma(4.0, 2.0)), prior=prior)
    draws = pr.prior_draws(model, 20_000)
    assert tuple(draws["weight"].shape) == (20_000, 1, 2)
    assert_moments(draws["weight"][:, 0, 1], 1.0, 0.5)
    assert_moments(draws["bias"][:, 0], 0.0, 9.0)
    assert_moments(draws["likelihood.noise"], 2.0, 1.0)


def test_a_prior_that_is_a_function_is_sampled_to_the_same_moments() -> None:
    def log_prior(p: dict[str, Tensor]) -> Tensor:
        return Normal(1.0, 2.0).log_prob(p["mu"]) + Gamma(6.0, 2.0).log_prob(p["tau"])

    model = density(log_prior, mu=pr.Param(), tau=pr.Param((), constraints.positive))
    draws = pr.prior_draws(model, 2_000)
    assert {name: tuple(x.shape) for name, x in draws.items()} == {"mu": (2_000,), "tau": (2_000,)}
    # 2,000 of 12,800 draws of chains, nearly independent: within 7 standard errors of independent draws
    assert abs(float(draws["mu"].mean()) - 1.0) < 7 * 2.0 / math.sqrt(2_000)
    assert abs(float(draws["tau"].mean()) - 3.0) < 7 * math.sqrt(1.5 / 2_000)
    assert abs(float(draws["mu"].var()) / 4.0 - 1) < 7 * math.sqrt(2 / 2_000)


def test_a_distribution_on_the_line_restricted_by_its_parameter_is_sampled() -> None:
    model = density({"mu": Normal(0.0, 1.0)}, mu=pr.Param((3,), constraints.ordered))
    assert isinstance(model.log_prior, NamedPrior)
    assert model.log_prior.restricted == ["mu"]
    x = pr.prior_draws(model, 1_000)["mu"]
    assert bool((x.diff(dim=-1) > 0).all())
    expected = 1.5 / math.sqrt(math.pi)  # the mean of the largest of three standard normals
    assert abs(float(x[:, 2].mean()) - expected) < 7 * 0.75 / math.sqrt(1_000)


def test_an_improper_prior_is_refused() -> None:
    flat = density(lambda p: 0.0 * p["mu"], mu=pr.Param())
    with pytest.raises(InputError, match=r"must be proper, but can't be drawn from.*improper in 'mu'"):
        pr.prior_draws(flat, 10)
    model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1), prior={"weight": 1.0, "bias": "flat"})
    with pytest.raises(InputError, match="of which every prior is a proper distribution, got a prior of 'bias'"):
        pr.prior_draws(model, 10)


def test_a_model_without_a_separate_prior_is_refused() -> None:
    model = pr.Density(lambda p: -p["w"].square(), {"w": pr.Param()})
    with pytest.raises(InputError, match="Density with log_prior and log_likelihood, got a Density that is one log_p"):
        pr.prior_draws(model, 10)
    with pytest.raises(InputError, match=r"must be a Model, or a Density .* got GaussianMixture"):
        pr.prior_draws(pr.latent.GaussianMixture(2), 10)
    with pytest.raises(InputError, match="The 'n' argument of prior_draws must be an integer >= 1, got 0"):
        pr.prior_draws(density(HIERARCHY, **SCHOOLS), 0)


@pytest.mark.parametrize(
    ("factor", "param", "message"),
    [
        (HalfNormal(1.0), pr.Param(), "support of its parameter 'mu', got HalfNormal on .*give the same support"),
        (Beta(1.0, 2.0), pr.Param((), constraints.positive), "support of its parameter 'mu', got Beta"),
        (Uniform(0.0, 2.0), pr.Param((), constraints.unit_interval), "support of its parameter 'mu', got Uniform"),
        (Bernoulli(0.5), pr.Param(), "support of its parameter 'mu', got Bernoulli"),
        (Normal(torch.zeros(4), 1.0), pr.Param((3,)), r"'prior' argument of 'mu' must broadcast to its shape \(3,\)"),
        (
            MultivariateNormal(torch.zeros(6), torch.eye(6)),
            pr.Param((2, 3)),
            r"'prior' argument of 'mu' must have events of its shape \(2, 3\), got \(6,\)",
        ),
        (lambda p: Normal(p["tau"], 1.0), pr.Param(), "'log_prior' of 'mu' must be .*listed before it.* KeyError"),
        (3.0, pr.Param(), "'log_prior' of 'mu' must be a distribution, .* got TypeError"),
        (lambda p: 3.0, pr.Param(), "'log_prior' of 'mu' must be a distribution, .* got float"),
    ],
)
def test_a_distribution_that_does_not_fit_its_parameter_is_refused(factor: object, param: pr.Param, message: str):
    with pytest.raises(InputError, match=message):
        density({"mu": factor}, mu=param)


def test_names_that_are_not_those_of_the_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="'log_prior' argument of Density must have the names mu, tau, got mu"):
        density({"mu": Normal(0.0, 1.0)}, mu=pr.Param(), tau=pr.Param())


def test_bounds_that_differ_by_rounding_are_the_same_support() -> None:
    model = density({"mu": Uniform(0.0, 0.1)}, mu=pr.Param((2,), constraints.interval(0.0, 0.1)))
    assert isinstance(model.log_prior, NamedPrior)
    assert model.log_prior.restricted == []
    assert_moments(pr.prior_draws(model, 5_000)["mu"][:, 0], 0.05, 0.01 / 12)
