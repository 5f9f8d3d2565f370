"""Penalties of the Dirac family, dropout, and spike and slab: exact inversions and their tests."""

import math

import pytest
import torch
from torch.distributions import Laplace, Normal

from priory.core.errors import InputError
from priory.distributions import SpikeAndSlab
from priory.penalties.as_prior.norms import L1
from priory.penalties.equivalence.from_penalty import prior_from_penalty
from priory.penalties.equivalence.from_prior import penalty_from_prior

from .cases import PRIORS, d, grid

THETA_GRID = grid(-3, 3, 120)


def test_the_penalty_of_the_dirac_family_is_the_negative_log_prior() -> None:
    found = prior_from_penalty(lambda w: 2 * w.abs() + 0.5, "dirac")
    assert found.certificate.valid
    assert torch.allclose(found.log_prior(THETA_GRID), Laplace(d(0.0), d(0.5)).log_prob(THETA_GRID), atol=1e-10)
    assert found.constant == pytest.approx(0.5, abs=1e-10)  # the density at 0 is 1
    assert prior_from_penalty(L1(2.0), "dirac").constant == pytest.approx(0, abs=1e-10)


def test_any_multiple_of_a_dirac_penalty_is_valid_too() -> None:
    """T times a negative log prior is the negative log of a wider prior: tempering shows only if scales are learnt."""
    found = prior_from_penalty(lambda w: 0.1 * 0.5 * w**2, "dirac")
    assert found.certificate.valid
    assert torch.allclose(found.log_prior(THETA_GRID), Normal(d(0.0), d(10.0).sqrt()).log_prob(THETA_GRID), atol=1e-10)


def test_a_penalty_with_a_scale_is_evaluated_near_scale_zero_for_the_dirac_family() -> None:
    forward = penalty_from_prior(PRIORS["student"])
    found = prior_from_penalty(forward, "dirac")
    assert torch.allclose(found.log_prior(THETA_GRID), PRIORS["student"].log_prob(THETA_GRID), atol=1e-8)


def test_a_zero_penalty_and_a_slowly_growing_one_are_not_integrable() -> None:
    for penalty, slope in ((lambda w: 0 * w, 0.0), (lambda w: 0.5 * torch.log1p(w**2), -1.0)):
        found = prior_from_penalty(penalty, "dirac")
        assert found.certificate.kind == "not integrable"
        assert found.certificate.tails == pytest.approx((slope, slope), abs=1e-6)


def test_weight_decay_with_a_fixed_keep_rate_is_a_gaussian_of_variance_p_over_two_lambda() -> None:
    keep, decay = 0.8, 3.0
    found = prior_from_penalty(lambda m: decay * m**2, "dropout", scale=keep)
    prior = Normal(d(0.0), d(keep / (2 * decay)).sqrt())
    assert found.certificate.valid
    assert torch.allclose(found.log_prior(THETA_GRID), prior.log_prob(THETA_GRID), atol=1e-10)
    m = d([0.3, 1.0])
    assert torch.allclose(decay * m**2, penalty_from_prior(prior, "dropout")(m, keep) + found.constant, atol=1e-9)
    assert f"K = {found.constant:.4f}" in found.certificate.verdict


def test_dropout_with_a_learnt_keep_rate_gives_back_its_prior() -> None:
    forward = penalty_from_prior(PRIORS["student"], "dropout")
    found = prior_from_penalty(lambda m, p: forward(m, p) + 0.25, "dropout")
    assert found.certificate.valid
    assert found.constant == pytest.approx(0.25, abs=1e-8)
    assert torch.allclose(found.log_prior(THETA_GRID), PRIORS["student"].log_prob(THETA_GRID), atol=1e-8)


def test_dropout_without_its_entropy_is_distinguished_from_a_penalty_without_prior() -> None:
    missing = prior_from_penalty(lambda m, p: p * m**2, "dropout")
    assert missing.certificate.kind == "entropy missing"
    assert torch.allclose(missing.log_prior(THETA_GRID), Normal(d(0.0), d(0.5).sqrt()).log_prob(THETA_GRID), atol=1e-8)
    assert prior_from_penalty(lambda m, p: m**2, "dropout").certificate.kind == "no prior"


def test_a_penalty_for_dropping_that_differs_from_that_of_a_weight_at_zero_has_no_prior() -> None:
    forward = penalty_from_prior(PRIORS["gaussian"], "dropout")
    found = prior_from_penalty(lambda m, p: forward(m, p) + 0.7 * (1 - p), "dropout")
    assert found.certificate.kind == "no prior"
    assert found.certificate.round_trip == pytest.approx(0.7, abs=1e-9)


def test_an_argument_with_a_default_keeps_it() -> None:
    """Python code binds the value of a loop variable this way."""
    found = prior_from_penalty(lambda mu, rate=2.0: rate * mu.abs(), "dirac")
    assert torch.allclose(found.log_prior(THETA_GRID), Laplace(d(0.0), d(0.5)).log_prob(THETA_GRID), atol=1e-10)
    both = prior_from_penalty(lambda mu=0.0, s=1.0: 0.5 * (mu**2 + s**2) - torch.as_tensor(s).log(), "gaussian")
    assert both.certificate.valid


@pytest.mark.parametrize("slab", ["gaussian", "laplace"])
def test_spike_and_slab_gives_back_the_slab_and_the_probability_of_the_spike(slab: str) -> None:
    prior, keep = PRIORS["gaussian"], 0.3
    inner = penalty_from_prior(prior, slab)

    def penalty(mu: torch.Tensor, s: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        coin = p * (p / keep).log() + (1 - p) * ((1 - p) / (1 - keep)).log()
        return coin + p * inner(mu, s) + 0.25

    found = prior_from_penalty(penalty, "spike_slab", slab=slab)
    assert found.certificate.valid, found.certificate.verdict
    assert found.spike == pytest.approx(0.7, abs=1e-7)
    assert found.constant == pytest.approx(0.25, abs=1e-7)
    exact = SpikeAndSlab(d(keep), prior)
    at = torch.cat([d([0.0]), THETA_GRID])
    assert torch.allclose(found.log_prior(at), exact.log_prob(at), atol=1e-7)
    assert "The spike at 0 has probability 0.7000" in found.certificate.verdict
    assert torch.allclose(found.remainder(0.4, 0.5, 0.6), d(0.0), atol=1e-7)


def test_a_spike_without_the_bernoulli_entropy_has_no_prior() -> None:
    inner = penalty_from_prior(PRIORS["gaussian"])
    found = prior_from_penalty(lambda mu, s, p: p * inner(mu, s), "spike_slab")
    assert found.certificate.kind == "no prior"
    assert "must be affine in p" in found.certificate.verdict
    assert found.certificate.round_trip == pytest.approx(0.24, abs=0.02)


def test_invalid_keep_rates_are_rejected() -> None:
    with pytest.raises(InputError, match=r"must be a probability in \(0, 1\] for 'dropout'"):
        prior_from_penalty(lambda m: m**2, "dropout", scale=1.5)
    with pytest.raises(InputError, match="must be learnt for 'spike_slab'"):
        prior_from_penalty(lambda m: m**2, "spike_slab", scale=math.pi)
