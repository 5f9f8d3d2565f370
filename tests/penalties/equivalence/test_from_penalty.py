"""Priors of penalties: round trips of five families and seven priors, and every verdict of the certificate."""

import math

import pytest
import torch
from torch.distributions import Gumbel, Normal

from priory.core.errors import InputError
from priory.distributions import LogUniform
from priory.penalties.as_prior.norms import L1
from priory.penalties.equivalence.families import FAMILIES
from priory.penalties.equivalence.from_penalty import prior_from_penalty
from priory.penalties.equivalence.from_prior import penalty_from_prior

from .cases import PRIORS, d, grid

THETA_GRID = grid(-3, 3, 121)
CORNER_ERROR = 2e-4  # 0.622 s0 E|Z| J / 2 at the smallest scale of the ladder, 1e-4, for a logistic posterior


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_prior_is_recovered_with_its_constant_and_certified(family: str, prior: str) -> None:
    forward, constant = penalty_from_prior(PRIORS[prior], family), 0.37
    found = prior_from_penalty(lambda mu, s: forward(mu, s) + constant, family)
    off = (found.log_prior(THETA_GRID) - PRIORS[prior].log_prob(THETA_GRID)).abs()
    assert found.certificate.valid, found.certificate.verdict
    assert found.certificate.verdict.startswith("Valid: the penalty is the KL to a prior plus K = 0.3700")
    assert found.certificate.round_trip < 5.4e-5
    assert found.constant == pytest.approx(constant, abs=1e-8)
    assert float(off[THETA_GRID.abs() > 1e-6].max()) < 1e-7
    assert float(off.max()) < (CORNER_ERROR if prior in ("laplace", "generalised") else 1e-7)
    # the estimated error is an upper bound, up to rounding
    assert bool((off <= 3 * found.error(THETA_GRID) + 1e-8).all())


def gaussian(mu: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return 0.5 * (mu**2 + s**2 - 1) - s.log()


def sparse(mu: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Return the approximation of Molchanov, Ashukha and Vetrov (2017) to the KL to a log-uniform prior."""
    log_ratio = 2 * s.log() - (mu**2 + 1e-30).log()
    return 0.5 * torch.log1p((-log_ratio).exp()) - 0.63576 * torch.sigmoid(1.87320 + 1.48695 * log_ratio)


PENALTY_CASES = {
    "KL to N(0, 1)": (gaussian, "valid", (0, 0)),
    "an oscillating prior": (lambda m, s: gaussian(m, s) + 0.1 * (-4.5 * s**2).exp() * (3 * m).cos(), "valid", (0, 0)),
    "KL + 0.1 cos 3 mu": (lambda m, s: gaussian(m, s) + 0.1 * (3 * m).cos(), "no prior", (-3.6, 3.6)),
    "mu^2 / 2": (lambda m, s: 0.5 * m**2, "no prior", (-3, 0.9375)),  # rho = 1 - 2 lambda s^2
    "(mu^2 + s^2) / 2": (lambda m, s: 0.5 * (m**2 + s**2), "entropy missing", (1, 1)),
    "0.1 KL": (lambda m, s: 0.1 * gaussian(m, s), "tempered", (0.9, 0.9)),
    "10 KL": (lambda m, s: 10 * gaussian(m, s), "tempered", (-9, -9)),
    "reverse KL": (lambda m, s: s.log() + (1 + m**2) / (2 * s**2) - 0.5, "no prior", (-591, 0.75)),
    "Wasserstein": (lambda m, s: m**2 + (s - 1) ** 2, "no prior", (-3, 0.5)),
    "automatic relevance": (lambda m, s: 0.5 * torch.log1p(m**2 / s**2), "no prior", (0, 0.5)),
    "sparse dropout": (sparse, "nearly valid", (-0.041, 0.041)),
    "KL to 1 / |w|": (penalty_from_prior(LogUniform()), "not integrable", (0, 0)),
    "KL to a flat prior": (lambda m, s: -s.log(), "not integrable", (0, 0)),
}


@pytest.mark.parametrize("name", PENALTY_CASES)
def test_each_penalty_has_the_expected_verdict_and_heat_residual(name: str) -> None:
    penalty, kind, heat = PENALTY_CASES[name]
    certificate = prior_from_penalty(penalty, "gaussian").certificate
    assert certificate.kind == kind, certificate.verdict
    assert certificate.valid == (kind == "valid")
    assert certificate.heat == pytest.approx(heat, abs=1e-5, rel=0.02)
    for value in (certificate.round_trip, certificate.semigroup):
        assert value < 1e-4 if heat == (0, 0) else value > 3e-3


def test_an_absolute_value_has_no_prior_for_a_learnt_scale() -> None:
    found = prior_from_penalty(L1(1.0), "gaussian")
    assert found.certificate.kind == "no prior"
    assert found.certificate.verdict.startswith("No prior exists for a learnt scale")
    assert found.certificate.heat is not None
    assert found.certificate.heat[1] == pytest.approx(1, abs=1e-6)  # away from the corner


def test_a_missing_entropy_is_detected_and_added() -> None:
    found = prior_from_penalty(lambda mu, s: 2 * (mu**2 + s**2), "gaussian")
    assert found.certificate.missing_entropy == pytest.approx(1, abs=1e-6)
    assert found.certificate.semigroup == pytest.approx(math.log(2), abs=1e-6)  # each scale is twice the previous one
    assert found.certificate.verdict.startswith("The entropy term is missing")
    assert torch.allclose(found.log_prior(THETA_GRID), Normal(d(0.0), d(0.5)).log_prob(THETA_GRID), atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tempered_kl_is_detected_with_its_temperature_in_every_family(family: str) -> None:
    forward = penalty_from_prior(PRIORS["gaussian"], family)
    found = prior_from_penalty(lambda mu, s: 0.3 * forward(mu, s), family)
    assert found.certificate.kind == "tempered"
    assert found.certificate.temperature == pytest.approx(0.3, abs=1e-6)
    assert "T = 0.3 times the KL" in found.certificate.verdict
    assert torch.allclose(found.log_prior(THETA_GRID), PRIORS["gaussian"].log_prob(THETA_GRID), atol=1e-5)


def test_the_prior_of_a_penalty_that_is_not_integrable_is_given_up_to_a_factor() -> None:
    found = prior_from_penalty(penalty_from_prior(LogUniform()), "gaussian")
    assert found.certificate.tails == pytest.approx((-1, -1), abs=1e-6)
    assert found.certificate.kappa == math.inf
    assert found.constant == -math.inf
    assert "falls only like |w|^-1.00" in found.certificate.verdict
    theta = d([0.5, 1.0, 2.0])
    assert torch.allclose(found.log_prior(theta), -theta.log(), atol=1e-8)
    rising = prior_from_penalty(lambda mu, s: -2 * gaussian(mu, s) - 3 * s.log(), "gaussian")
    assert "a density that grows like an exponential or faster" in rising.certificate.verdict


def test_the_remainder_is_the_difference_from_the_nearest_bayesian_penalty() -> None:
    found = prior_from_penalty(lambda m, s: gaussian(m, s) + 0.1 * (3 * m).cos(), "gaussian")
    mu, s = grid(-3, 3, 31)[:, None], d([0.5, 1.0, 2.0])
    left = found.remainder(mu, s)
    assert torch.allclose(left + found.nearest(mu, s), found.penalty(mu, s))
    assert 0.02 < float(left.abs().max()) < 0.13
    # the nearest penalty is itself a KL and therefore valid
    assert prior_from_penalty(found.nearest, "gaussian", width=1.0).certificate.round_trip < 5e-3
    valid = prior_from_penalty(gaussian, "gaussian")
    assert float(valid.remainder(mu, s).abs().max()) == 0


def test_the_entropy_has_a_minus_and_the_density_is_mirrored() -> None:
    """A skewed posterior distinguishes beta(x) from beta(-x): the KL is no convolution with beta itself."""
    forward = penalty_from_prior(PRIORS["student"], "gumbel")
    found = prior_from_penalty(forward, "gumbel")
    mu, s = d([0.4, -1.0]), d([0.5, 0.8])
    z, weights = FAMILIES["gumbel"].quadrature
    entropy = Gumbel(d([0.0, 0.0]), s).entropy()
    for sign, same in ((1, True), (-1, False)):
        smoothed = (weights * found.log_prior(mu[:, None] + sign * s[:, None] * z)).sum(-1)
        off = (-entropy - smoothed + found.constant - forward(mu, s)).abs()
        assert bool((off < 1e-6).all()) == same
    assert float((forward(mu, s) - (entropy - smoothed)).abs().min()) > 1e-2


def test_functions_of_plain_numbers_and_of_the_location_only_are_accepted() -> None:
    found = prior_from_penalty(lambda mu, s: 0.5 * (mu * mu + s * s - 1) - math.log(s), "gaussian")
    assert found.certificate.valid
    assert prior_from_penalty(lambda mu: mu**2, "gaussian").certificate.kind == "no prior"


def test_narrow_and_wide_priors_are_found_automatically_and_shifted_ones_by_their_centre() -> None:
    for scale in (1e-12, 0.01, 300.0):
        found = prior_from_penalty(penalty_from_prior(Normal(d(0.0), d(scale))), "gaussian")
        assert found.certificate.valid
        assert found.constant == pytest.approx(0, abs=1e-8)
    shifted = Normal(d(50.0), d(2.0))
    found = prior_from_penalty(penalty_from_prior(shifted), "gaussian", centre=50.0)
    assert found.certificate.valid
    assert torch.allclose(found.log_prior(50 + THETA_GRID), shifted.log_prob(50 + THETA_GRID), atol=1e-8)


def test_the_log_prior_is_differentiable_and_keeps_the_dtype_of_its_input() -> None:
    found = prior_from_penalty(gaussian, "gaussian")
    theta = d([0.5, -1.0]).requires_grad_()
    (gradient,) = torch.autograd.grad(found.log_prior(theta).sum(), theta)
    assert torch.allclose(gradient, -theta.detach(), atol=1e-8)
    assert found.log_prior(torch.zeros(2)).dtype == torch.float32
    assert found.log_prior(0.0).dtype == torch.float64  # pyright: ignore[reportArgumentType]
    assert str(found) == found.certificate.verdict == str(found.certificate)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"r": 3.0}, "The 'r' argument of prior_from_penalty must be a function of a location and a scale"),
        ({"family": "cauchy"}, "The 'family' argument of prior_from_penalty must be one of gaussian"),
        ({"scale": -1.0}, "The 'scale' argument of prior_from_penalty must be a positive number, got -1.0"),
        ({"width": 0}, "The 'width' argument of prior_from_penalty must be a positive number, got 0"),
        ({"centre": math.nan}, "The 'centre' argument of prior_from_penalty must be a finite number, got nan"),
        ({"tolerance": 0.0}, "The 'tolerance' argument of prior_from_penalty must be a positive number"),
        ({"slab": "cauchy"}, "The 'slab' argument of prior_from_penalty must be one of gaussian"),
        ({"r": lambda mu, s: mu.log()}, "The 'r' argument of prior_from_penalty must be finite around its centre"),
        ({"r": lambda mu, s: "a word"}, "The 'r' argument of prior_from_penalty must return one number"),
        ({"r": lambda mu, s: (mu**2 - s.log()).sum()}, "The 'r' argument of prior_from_penalty must return one number"),
        (
            {"r": lambda mu, s: gaussian(mu - 100, s)},
            "The 'centre' argument of prior_from_penalty must lie within 8 widths",
        ),
        ({"r": lambda w: (w - 100) ** 2, "family": "dirac"}, "within 8 widths of the prior's peak, which is near"),
        ({"r": lambda: 0.0}, "The 'r' argument of prior_from_penalty must take a location"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_sentence(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prior_from_penalty(**{"r": gaussian, "family": "gaussian", **arguments})
