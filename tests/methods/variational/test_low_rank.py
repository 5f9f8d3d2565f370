"""Low-rank variational inference between the factorised Gaussian and the full one."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

import priory as pr
from priory.core.errors import InputError
from priory.testing import LinearRegression

F64 = torch.float64
FULL_BATCH = {"batch_size": 10**6, "progress": False}


def gaussian(posterior):
    q = posterior.family
    return MultivariateNormal(q.loc, q.factor @ q.factor.mT + torch.diag((2 * q.log_diag).exp()))


def test_with_full_rank_the_posterior_is_exact():
    """To 1e-3 of a standard deviation and 1e-3 nat."""
    exact = LinearRegression.make(0)
    method = pr.LowRank(rank=4, samples=8, learning_rate=0.05)
    posterior = pr.fit(exact.model(), exact.data, method, steps=600, **FULL_BATCH)
    found, sd = gaussian(posterior), exact.posterior.variance.sqrt()
    assert float(((found.loc - exact.posterior.loc) / sd).abs().max()) < 1e-3
    off = (found.covariance_matrix - exact.posterior.covariance_matrix) / sd[:, None] / sd
    assert float(off.abs().max()) < 1e-3
    assert posterior.log_evidence.value == pytest.approx(exact.log_evidence, abs=1e-3)
    assert posterior.k_hat < 0.7


def test_rank_one_finds_the_common_direction():
    """The covariance I/4 + f f' is in the family; the bound of the factorised Gaussian is far below."""
    size = 6
    direction = torch.linspace(-1.5, 2, size, dtype=F64)
    exact = MultivariateNormal(torch.ones(size, dtype=F64), torch.outer(direction, direction) + torch.eye(size) / 4)
    model = pr.Density(lambda p: exact.log_prob(p["w"]), {"w": pr.Param((size,))}, batched=True)
    method = pr.LowRank(rank=1, samples=8, learning_rate=0.05)
    posterior = pr.fit(model, None, method, steps=600, progress=False)
    assert posterior.log_evidence.value == pytest.approx(0.0, abs=0.02)
    precision = exact.precision_matrix
    best_factorised = -0.5 * float(precision.diagonal().log().sum() - torch.logdet(precision))
    assert best_factorised < -1


def test_the_bound_rises_with_the_rank_from_the_factorised_one_to_the_evidence():
    """Each within 4 standard errors of its order (6e-5); the identity log p = elbo + KL holds at each."""
    exact = LinearRegression.make(3)
    bounds = [exact.best_mean_field().elbo]
    for rank in (1, 4):
        method = pr.LowRank(rank=rank, samples=8, learning_rate=0.05)
        posterior = pr.fit(exact.model(), exact.data, method, steps=400, **FULL_BATCH)
        bound = posterior.elbo(samples=4_000)
        gap = float(kl_divergence(gaussian(posterior), exact.posterior))
        assert abs(bound.value + gap - exact.log_evidence) < 4 * bound.error + 1e-6
        bounds.append(bound.value)
    assert bounds[0] + 0.1 < bounds[1] < bounds[2] + 0.01
    assert bounds[2] == pytest.approx(exact.log_evidence, abs=0.01)


def test_the_rank_is_at_most_the_number_of_coordinates():
    exact = LinearRegression.make(0)
    posterior = pr.fit(exact.model(), exact.data, pr.LowRank(rank=50), steps=3, **FULL_BATCH)
    assert posterior.form.rank == 4


@pytest.mark.parametrize("rank", [0, -1, 2.0, True, "2"])
def test_a_rank_that_is_not_a_positive_integer_is_refused(rank):
    with pytest.raises(InputError, match="'rank' argument of LowRank must be an integer >= 1"):
        pr.LowRank(rank=rank)


def test_a_loaded_posterior_equals_the_saved_one(tmp_path):
    exact = LinearRegression.make(0)
    posterior = pr.fit(exact.model(), exact.data, pr.LowRank(rank=2), steps=20, **FULL_BATCH)
    posterior.save(tmp_path / "low_rank")
    loaded = pr.load(tmp_path / "low_rank", exact.model())
    assert torch.equal(loaded.theta, posterior.theta)
    assert loaded.form == posterior.form
    assert torch.equal(loaded.sample(3, seed=1)["weight"], posterior.sample(3, seed=1)["weight"])
