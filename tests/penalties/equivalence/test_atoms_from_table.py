"""Tables of penalties for the Dirac family, dropout, and spike and slab."""

import math

import pytest
import torch
from torch.distributions import Normal

from priory.core.errors import InputError
from priory.distributions import SpikeAndSlab
from priory.penalties.equivalence.atoms_from_table import fit_affine_in_keep
from priory.penalties.equivalence.from_penalty import prior_from_penalty
from priory.penalties.equivalence.from_prior import penalty_from_prior
from priory.penalties.equivalence.inputs import Table

from .cases import PRIORS, d, grid

MU, KEEP, THETA = grid(-8, 8, 321), d([0.2, 0.5, 0.9, 1.0]), grid(-3, 3, 120)
SLAB_SCALES = d([0.1, 0.2, 0.4])


def noise_like(values: torch.Tensor, noise: float) -> torch.Tensor:
    return noise * torch.randn(values.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_a_dirac_table_is_the_negative_log_prior_at_and_between_its_locations() -> None:
    square = prior_from_penalty((MU, None, 0.5 * MU**2 + 0.25), "dirac")
    assert torch.allclose(square.log_prior(THETA), PRIORS["gaussian"].log_prob(THETA), atol=1e-9)
    assert square.constant == pytest.approx(0.25 - 0.5 * math.log(2 * math.pi), abs=1e-9)
    assert square.certificate.valid
    assert square.certificate.tails[0] == pytest.approx(square.certificate.tails[1], rel=1e-9)
    bimodal = prior_from_penalty(Table(MU, None, -PRIORS["bimodal"].log_prob(MU)), "dirac")
    off = (bimodal.log_prior(THETA) - PRIORS["bimodal"].log_prob(THETA)).abs().max()
    # the error of a cubic spline is h^4 / 384 times the fourth derivative, which is at most 2 * 6^4 for log cosh 6 x
    assert 3e-5 < float(off) < 5e-5 < bimodal.certificate.error
    assert bimodal.certificate.error < 1e-3
    assert torch.allclose(bimodal.remainder(MU), torch.zeros_like(MU), atol=1e-9)


def test_a_dirac_table_with_heavy_tails_is_not_integrable() -> None:
    found = prior_from_penalty((MU, None, 0.25 * torch.log1p(MU**2)), "dirac")
    assert found.certificate.kind == "not integrable"
    assert found.constant == -math.inf


def test_a_noisy_dirac_table_is_smoothed() -> None:
    values = 0.5 * MU**2
    found = prior_from_penalty((MU, None, values + noise_like(values, 1e-2), 1e-2), "dirac")
    off = found.log_prior(THETA) - PRIORS["gaussian"].log_prob(THETA)
    # about five parameters from 321 values: 4 standard errors of at most 1e-2 * sqrt(5 / 321) = 1.2e-3
    assert float(off.abs().max()) < 5e-3
    assert found.certificate.error == pytest.approx(1e-2, rel=0.2)


@pytest.mark.parametrize(
    ("name", "atol"), [("gaussian", 1e-9), ("logistic", 5e-6)]
)  # the tails beyond 8 are extrapolated
def test_a_dropout_table_gives_back_its_prior_and_its_constant(name: str, atol: float) -> None:
    values = penalty_from_prior(PRIORS[name], "dropout")(MU[:, None], KEEP) + 0.25
    found = prior_from_penalty((MU, KEEP, values), "dropout")
    assert found.certificate.valid, found.certificate.verdict
    assert found.certificate.round_trip < 1e-12
    assert found.constant == pytest.approx(0.25, abs=atol)
    assert torch.allclose(found.log_prior(THETA), PRIORS[name].log_prob(THETA), atol=atol)
    assert torch.allclose(found.nearest(MU[:, None], KEEP), values, atol=1e-9)


def test_a_table_and_a_function_of_dropout_get_the_same_verdict() -> None:
    for penalty, kind in (
        (lambda m, p: p * m**2, "entropy missing"),
        (lambda m, p: m**2 + 0 * p, "no prior"),
        (lambda m, p: p * torch.log1p(m.abs()) / 2 + p * p.log() + torch.special.xlogy(1 - p, 1 - p), "not integrable"),
    ):
        table = prior_from_penalty((MU, KEEP, penalty(MU[:, None], KEEP)), "dropout")
        assert table.certificate.kind == prior_from_penalty(penalty, "dropout").certificate.kind == kind


def test_a_penalty_for_dropping_that_differs_from_that_of_a_weight_at_zero_has_no_prior() -> None:
    coin = torch.special.xlogy(KEEP, KEEP) + torch.special.xlogy(1 - KEEP, 1 - KEEP)
    values = coin + KEEP * MU[:, None] ** 2 + (1 - KEEP) * 0.7
    found = prior_from_penalty((MU, KEEP, values), "dropout")
    assert found.certificate.kind == "no prior"
    assert found.certificate.round_trip == pytest.approx(0.7, abs=1e-9)


def test_weight_decay_tabulated_at_one_keep_rate_is_a_gaussian_of_variance_p_over_two_lambda() -> None:
    found = prior_from_penalty((MU, [0.8], 3.0 * MU[:, None] ** 2), "dropout")
    exact = prior_from_penalty(lambda m: 3.0 * m**2, "dropout", scale=0.8)
    assert found.certificate.valid
    assert torch.allclose(found.log_prior(THETA), Normal(d(0.0), d(0.8 / 6).sqrt()).log_prob(THETA), atol=1e-8)
    assert found.constant == pytest.approx(exact.constant, abs=1e-8)
    assert found.scale == 0.8
    assert f"K = {found.constant:.4f}" in found.certificate.verdict
    assert torch.allclose(found.nearest(MU), 3.0 * MU**2, atol=1e-9)


def test_a_noisy_dropout_table_gives_its_prior_within_the_noise() -> None:
    values = penalty_from_prior(PRIORS["logistic"], "dropout")(MU[:, None], KEEP)
    found = prior_from_penalty((MU, KEEP, values + noise_like(values, 1e-3), 1e-3), "dropout")
    assert found.certificate.valid, found.certificate.verdict
    off = found.log_prior(THETA) - PRIORS["logistic"].log_prob(THETA)
    assert float(off.abs().max()) < 2e-3


@pytest.mark.parametrize(("name", "noise", "atol"), [("gaussian", 0.0, 1e-7), ("gaussian", 1e-3, 2e-3)])
def test_a_spike_and_slab_table_gives_back_the_slab_and_the_spike(name: str, noise: float, atol: float) -> None:
    keep, prior = 0.3, PRIORS[name]
    p, s, mu = KEEP, SLAB_SCALES[:, None], MU[::4, None, None]
    coin = torch.special.xlogy(p, p / keep) + torch.special.xlogy(1 - p, (1 - p) / (1 - keep))
    values = coin + p * penalty_from_prior(prior)(mu, s) + 0.25
    found = prior_from_penalty((MU[::4], SLAB_SCALES, values + noise_like(values, noise), noise, KEEP), "spike_slab")
    assert found.certificate.valid, found.certificate.verdict
    assert found.spike == pytest.approx(0.7, abs=atol)
    assert found.constant == pytest.approx(0.25, abs=atol)
    at = torch.cat([d([0.0]), THETA])
    assert torch.allclose(found.log_prior(at), SpikeAndSlab(d(keep), prior).log_prob(at), atol=2 * atol)
    assert torch.allclose(found.nearest(mu, s, p), values, atol=20 * atol)


def test_a_spike_and_slab_table_without_the_bernoulli_entropy_has_no_prior() -> None:
    values = KEEP * penalty_from_prior(PRIORS["gaussian"])(MU[::4, None, None], SLAB_SCALES[:, None])
    found = prior_from_penalty(Table(MU[::4], SLAB_SCALES, values, keep=KEEP), "spike_slab")
    assert found.certificate.kind == "no prior"
    assert "must be affine in p" in found.certificate.verdict


def test_the_affine_fit_of_a_table_is_the_least_squares_solution() -> None:
    values = noise_like(torch.zeros(3, 4), 1.0)
    found = fit_affine_in_keep(values, KEEP, 0.5)
    design = torch.zeros(3, 4, 4, dtype=torch.float64)  # three values of v, and c_0
    for i in range(3):
        design[i, :, i], design[i, :, 3] = KEEP, 1 - KEEP
    exact = torch.linalg.lstsq(design.reshape(12, 4), values.reshape(12, 1)).solution[:, 0]
    assert torch.allclose(torch.cat([found.at_one, d([found.at_zero])]), exact, atol=1e-12)


@pytest.mark.parametrize(
    ("table", "family", "message"),
    [
        ((MU, KEEP, torch.zeros(321, 4)), "dirac", r"with None as scales for 'dirac', got scales for 'dirac'"),
        ((MU, None, torch.zeros(321)), "gaussian", "be a table with scales.*got no scales for 'gaussian'"),
        (
            (MU, KEEP, torch.zeros(321, 4)),
            "spike_slab",
            "be a table with `keep` for 'spike_slab', and only for it, got no keep rates",
        ),
        (
            (MU, KEEP, torch.zeros(321, 4, 2), 0.0, [0.1, 0.2]),
            "gaussian",
            "for 'spike_slab', and only for it, got keep rates",
        ),
        (
            (MU, 2 * KEEP, torch.zeros(321, 4)),
            "dropout",
            r"The 'scales' argument of Table must be probabilities in \(0, 1\] for",
        ),
        (
            (MU, KEEP, torch.zeros(321, 4, 1), 0.0, [1.5]),
            "spike_slab",
            "The 'keep' argument of Table must be probabilities",
        ),
        (
            (MU, KEEP, torch.zeros(321, 4, 1), 0.0, [0.5]),
            "spike_slab",
            "The 'keep' argument of Table must have at least two probab",
        ),
        (
            (MU, KEEP, torch.zeros(321, 4, 2), 0.0, [0.5, 0.5]),
            "spike_slab",
            "The 'keep' argument of Table must be distinct",
        ),
        ((MU, KEEP, torch.zeros(321, 4), 0.0, KEEP), "spike_slab", r"must have the shape \(321, 4, 4\)"),
        ((MU, None, torch.zeros(321, 1)), "dirac", r"must have the shape \(321,\)"),
    ],
)
def test_a_table_that_does_not_fit_its_family_is_rejected_in_one_sentence(
    table: tuple, family: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prior_from_penalty(table, family)
