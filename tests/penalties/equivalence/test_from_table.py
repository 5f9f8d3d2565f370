"""Penalties known as tables, at several scales with noise, and at one scale that is not learnt."""

import math

import pytest
import torch
from torch.distributions import Normal

from priory.core.errors import InputError
from priory.penalties.equivalence.from_penalty import Equivalence, prior_from_penalty
from priory.penalties.equivalence.from_prior import penalty_from_prior
from priory.penalties.equivalence.inputs import Table
from priory.penalties.equivalence.spline import NaturalSpline, interpolate

from .cases import PRIORS, d, grid

MU, SCALES, THETA = grid(-6, 6, 481), d([0.05, 0.1, 0.2, 0.4, 0.8]), grid(-3, 3, 121)
# largest error of the log prior on |theta| <= 3 after removing its mean: exact tables, noise 1e-3, noise 1e-2
ERROR_BOUNDS = {
    "gaussian": (8e-8, 7.4e-4, 3.7e-3),
    "laplace": (2.7e-2, 2.9e-2, 6.9e-2),
    "student": (3.7e-6, 4.7e-4, 4.7e-3),
    "logistic": (2.7e-6, 4.5e-4, 3.5e-3),
    "mixture": (9.6e-3, 1.3e-2, 4e-2),
    "bimodal": (8.2e-4, 2e-3, 3e-2),
    "generalised": (5e-3, 1e-2, 3e-2),
}


def from_noise(name: str, noise: float, factor: float = 1.0) -> Equivalence:
    values = factor * penalty_from_prior(PRIORS[name])(MU[:, None], SCALES)
    generator = torch.Generator().manual_seed(1)
    values = values + noise * torch.randn(values.shape, generator=generator, dtype=torch.float64)
    return prior_from_penalty((MU, SCALES, values, noise), "gaussian")


@pytest.mark.parametrize("name", ERROR_BOUNDS)
def test_a_table_gives_back_its_prior_within_its_noise(name: str) -> None:
    for noise, bound in zip((0.0, 1e-3, 1e-2), ERROR_BOUNDS[name], strict=True):
        found = from_noise(name, noise)
        off = found.log_prior(THETA) - PRIORS[name].log_prob(THETA)
        assert float((off - off.mean()).abs().max()) < bound
        assert found.certificate.valid, found.certificate.verdict
        assert found.constant == pytest.approx(0, abs=5e-3)  # the tails beyond the table are extrapolated


def test_a_tempered_table_is_detected_with_its_temperature() -> None:
    found = from_noise("gaussian", 1e-3, 0.25)
    assert found.certificate.kind == "tempered"
    assert found.certificate.temperature == pytest.approx(0.25, abs=2e-3)
    assert torch.allclose(found.log_prior(THETA), PRIORS["gaussian"].log_prob(THETA), atol=2e-2)


@pytest.mark.parametrize("temperature", [0.01, 1.01])
def test_temperatures_near_zero_and_one_are_detected_in_tables_and_functions(temperature: float) -> None:
    forward = penalty_from_prior(PRIORS["gaussian"])
    table = from_noise("gaussian", 0.0, temperature)
    function = prior_from_penalty(lambda mu, s: temperature * forward(mu, s), "gaussian")
    for found in (table, function):
        assert found.certificate.kind == "tempered"
        assert found.certificate.temperature == pytest.approx(temperature, abs=1e-8)
        assert torch.allclose(found.log_prior(THETA), PRIORS["gaussian"].log_prob(THETA), atol=1e-6)


def test_a_small_temperature_is_distinguished_from_a_missing_entropy_despite_noise() -> None:
    assert from_noise("gaussian", 1e-4, 0.01).certificate.kind == "tempered"
    values = 0.5 * (MU[:, None] ** 2 + SCALES**2)
    values = values + 1e-2 * torch.randn(values.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert prior_from_penalty((MU, SCALES, values, 1e-2), "gaussian").certificate.kind == "entropy missing"


def test_a_table_without_its_entropy_is_detected_and_repaired() -> None:
    values = 0.5 * (MU[:, None] ** 2 + SCALES**2)
    found = prior_from_penalty(Table(MU, SCALES, values), "gaussian")
    assert found.certificate.kind == "entropy missing"
    assert torch.allclose(found.log_prior(THETA), PRIORS["gaussian"].log_prob(THETA), atol=1e-6)


def test_a_table_without_a_prior_gets_the_nearest_bayesian_penalty() -> None:
    forward = penalty_from_prior(PRIORS["gaussian"])
    values = forward(MU[:, None], SCALES) + 0.3 * (3 * MU[:, None]).cos() * SCALES
    found = prior_from_penalty((MU, SCALES, values), "gaussian")
    assert found.certificate.kind == "no prior"
    left = found.remainder(MU[:, None], SCALES)
    assert torch.allclose(left, values - found.nearest(MU[:, None], SCALES), atol=1e-9)
    assert 0.05 < float(left.abs().max()) < 0.3


def test_an_absolute_value_at_a_fixed_gaussian_scale_has_no_prior() -> None:
    """On the L-curve, the residual decreases only while the curvature of the log prior keeps growing."""
    found = prior_from_penalty(lambda mu: math.sqrt(2) * mu.abs(), "gaussian", scale=0.4)
    assert found.certificate.kind == "no prior"
    assert found.certificate.verdict.startswith("No prior exists at the fixed scale 0.4")
    exists = prior_from_penalty(penalty_from_prior(PRIORS["laplace"]), "gaussian", scale=0.4)
    assert exists.certificate.valid
    assert exists.certificate.round_trip < 1e-5


def test_a_square_at_a_fixed_scale_is_a_gaussian_prior_in_every_family() -> None:
    """The example of the slides, which fails if the scale is learnt."""
    for family, variance in (("gaussian", 1.0), ("laplace", 2.0), ("uniform", 1 / 3)):
        found = prior_from_penalty(lambda mu: 2 * mu**2, family, scale=0.4)
        assert found.certificate.valid
        assert torch.allclose(found.log_prior(THETA), Normal(d(0.0), d(0.5)).log_prob(THETA), atol=1e-6)
        # r = KL + K, and the KL contains 2 (mu^2 + variance s^2)
        kl = penalty_from_prior(Normal(d(0.0), d(0.5)), family)
        assert found.constant == pytest.approx(float(2 * 0.3**2 - kl(0.3, 0.4)), abs=1e-6)
        assert variance > 0
    assert prior_from_penalty(lambda mu: 2 * mu**2, "gaussian").certificate.kind == "no prior"


def test_the_spline_integrates_its_squared_third_derivative_which_is_zero_for_parabolas() -> None:
    knots = d([-2.0, -0.5, 0.0, 1.0, 1.5, 3.0])
    spline, y = NaturalSpline(knots), d([1.0, -1.0, 0.5, 2.0, 0.0, 1.0])
    t = grid(-2, 3, 50_001)
    third = (spline.basis(t[:, None]) @ y).diff(n=3) / (t[1] - t[0]) ** 3
    exact = float((third**2).sum() * (t[1] - t[0]))
    assert float((spline.third_derivative_root @ y).square().sum()) == pytest.approx(exact, rel=1e-3)
    parabola = interpolate(knots, 3 * knots**2 - knots + 2)
    assert torch.allclose(parabola(THETA), 3 * THETA**2 - THETA + 2, atol=1e-12)
    assert torch.allclose(interpolate(knots, y)(knots), y, atol=1e-12)


def test_the_spline_is_natural_interpolates_and_integrates_its_squared_curvature() -> None:
    knots = d([-2.0, -0.5, 0.0, 1.0, 1.5, 3.0])
    spline, y = NaturalSpline(knots), d([1.0, -1.0, 0.5, 2.0, 0.0, 1.0])
    at = spline.basis(knots[:, None]) @ y
    assert torch.allclose(at, y, atol=1e-12)
    t = grid(-4, 5, 90_001)
    values = spline.basis(t[:, None]) @ y
    bend = values.diff().diff() / (t[1] - t[0]) ** 2
    assert float(bend[t[1:-1] < -2.001].abs().max()) < 1e-5
    assert float((bend**2).sum() * (t[1] - t[0])) == pytest.approx(
        float((spline.second_derivative_root @ y).square().sum()), rel=1e-4
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((MU, SCALES), r"be \(mu, scales, values\)"),
        (
            (MU.flip(0), SCALES, torch.zeros(481, 5)),
            "The 'mu' argument of Table must be at least 10 locations in increasing",
        ),
        ((MU, -SCALES, torch.zeros(481, 5)), "The 'scales' argument of Table must be positive"),
        ((MU, d([0.1, 0.1]), torch.zeros(481, 2)), "The 'scales' argument of Table must be distinct"),
        ((MU, SCALES, torch.zeros(5, 481)), r"The 'values' argument of Table must have the shape \(481, 5\)"),
        ((MU, SCALES, torch.full((481, 5), math.nan)), "The 'values' argument of Table must be finite"),
        ((MU, SCALES, torch.zeros(481, 5), -1.0), "The 'noise' argument of Table must be a standard deviation >= 0"),
    ],
)
def test_an_invalid_table_is_rejected_in_one_sentence(table: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prior_from_penalty(table, "gaussian")


def test_lists_are_read_in_double_precision_and_a_table_accepts_no_fixed_scale() -> None:
    values = 0.5 * (MU[:, None] ** 2 + SCALES**2) - SCALES.log()
    listed = Table(MU.tolist(), SCALES.tolist(), values.tolist())
    assert torch.equal(listed.values, values)
    with pytest.raises(InputError, match="The 'scale' argument of prior_from_penalty must be left out for a table"):
        prior_from_penalty(listed, "gaussian", scale=0.4)
