"""Penalties of priors: closed forms, quadrature, gradients, and the accepted forms of a prior."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import HalfNormal, Independent, Laplace, Normal, StudentT

import priory as pr
from priory.core.errors import InputError
from priory.distributions import GroupLasso, SpikeAndSlab
from priory.penalties.as_prior.norms import L1, L2
from priory.penalties.equivalence.families import FAMILIES
from priory.penalties.equivalence.from_penalty import prior_from_penalty
from priory.penalties.equivalence.from_prior import bernoulli_entropy, penalty_from_prior

from .cases import PRIORS, d

MU, SCALE = d([0.3, -1.2, 2.0]), d([0.4, 0.15, 1.1])


SCIPY_FAMILIES = {
    "gaussian": stats.norm,
    "laplace": stats.laplace,
    "logistic": stats.logistic,
    "gumbel": stats.gumbel_r,
    "uniform": stats.uniform(-1, 2),
}
SCIPY_PRIORS = {
    "gaussian": stats.norm.logpdf,
    "laplace": stats.laplace(scale=0.7).logpdf,
    "student": stats.t(3).logpdf,
    "logistic": stats.logistic(scale=0.6).logpdf,
    "mixture": lambda w: np.logaddexp(stats.norm.logpdf(w), stats.norm(scale=math.exp(-2)).logpdf(w)) - math.log(2),
    "bimodal": lambda w: np.logaddexp(stats.norm(-1.5, 0.5).logpdf(w), stats.norm(1.5, 0.5).logpdf(w)) - math.log(2),
    "generalised": stats.gennorm(1.5).logpdf,
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_penalty_is_the_kl_integrated_by_numpy(family: str, prior: str) -> None:
    r, q = penalty_from_prior(PRIORS[prior], family)(MU, SCALE), SCIPY_FAMILIES[family]
    nodes, weights = np.polynomial.legendre.leggauss(20)
    reach = {"gaussian": (-9, 9), "uniform": (-1, 1), "gumbel": (-4, 40)}.get(family, (-40, 40))
    for mu, s, value in zip(MU.tolist(), SCALE.tolist(), r.tolist(), strict=True):
        corners = [z for z in (0.0, -mu / s) if reach[0] < z < reach[1]]
        edges = np.unique(np.concatenate([np.linspace(*reach, 200), corners]))
        half, middle = np.diff(edges)[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
        z = middle + half * nodes
        density = q.pdf(z)
        log_ratio = np.log(np.where(density > 0, density, 1.0) / s) - SCIPY_PRIORS[prior](mu + s * z)
        assert value == pytest.approx(float((weights * half * density * log_ratio).sum()), abs=2e-8)


def test_the_corollary_has_a_and_b_exchanged_on_the_slides() -> None:
    mu, variance, prior_variance = 1.3, 0.4, 1.7
    constant = 1 / (2 * prior_variance)
    varying = 0.5 * (variance / prior_variance + math.log(prior_variance / variance) - 1)
    r = penalty_from_prior(Normal(d(0.0), d(prior_variance).sqrt()), "gaussian")
    true = float(r(mu, math.sqrt(variance)))
    assert true == pytest.approx(0.838165, abs=5e-7)
    assert varying + constant * mu**2 == pytest.approx(true, abs=1e-12)
    assert constant + varying * mu**2 == pytest.approx(0.870588, abs=5e-7)


@pytest.mark.parametrize("prior", ["gaussian", "laplace", "student", "bimodal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_in_location_and_scale_matches_finite_differences(family: str, prior: str) -> None:
    r = penalty_from_prior(PRIORS[prior], family)
    mu, s = d([0.37, -1.1]).requires_grad_(), d([0.45, 0.8]).requires_grad_()
    in_mu, in_s = torch.autograd.grad(r(mu, s).sum(), (mu, s))
    with torch.no_grad():
        h = 1e-5
        assert torch.allclose(in_mu, (r(mu + h, s) - r(mu - h, s)) / (2 * h), atol=1e-8)
        assert torch.allclose(in_s, (r(mu, s + h) - r(mu, s - h)) / (2 * h), atol=1e-8)


def test_a_variational_loss_with_the_penalty_equals_the_one_with_the_kl_in_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=generator, dtype=torch.float64), torch.randn(20, generator=generator).double()
    noise = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    for prior in (PRIORS["student"], PRIORS["laplace"], PRIORS["mixture"]):
        r, values = penalty_from_prior(prior, "gaussian"), []
        for penalty in (r, lambda m, s, p=prior: pr.kl(Normal(m, s), p).value):
            mu, rho = d([0.2, -0.7, 1.5]).requires_grad_(), d([-1.0, 0.1, -0.4]).requires_grad_()
            w = mu + rho.exp() * noise
            loss = 0.5 * (y - w @ x.T).square().sum(-1).mean() + penalty(mu, rho.exp()).sum()
            values.append((loss.detach(), *torch.autograd.grad(loss, (mu, rho))))
        for one, other in zip(*values, strict=True):
            assert torch.allclose(one, other, atol=1e-9)


def test_the_dirac_penalty_is_the_negative_log_density() -> None:
    r = penalty_from_prior(PRIORS["student"], "dirac")
    assert torch.equal(r(MU), -PRIORS["student"].log_prob(MU))
    assert torch.equal(r(MU, SCALE), r(MU))


def test_the_dropout_penalty_has_a_term_per_atom_minus_the_bernoulli_entropy() -> None:
    r = penalty_from_prior(PRIORS["laplace"], "dropout")
    p, log = d(0.3), PRIORS["laplace"].log_prob
    expected = p.log() * p + (1 - p).log() * (1 - p) - p * log(MU) - (1 - p) * log(d(0.0))
    assert torch.allclose(r(MU, p), expected, atol=1e-14)
    assert float(bernoulli_entropy(d(0.5))) == pytest.approx(math.log(2))
    assert bernoulli_entropy(d([0.0, 1.0])).tolist() == [0.0, 0.0]


def test_the_spike_and_slab_penalty_is_the_bernoulli_kl_plus_the_weighted_slab_kl() -> None:
    prior = SpikeAndSlab(d(0.3), Normal(d(0.0), d(1.5)))
    r = penalty_from_prior(prior, "spike_slab")
    slab = penalty_from_prior(Normal(d(0.0), d(1.5)))(MU, SCALE)
    coin = 0.6 * math.log(0.6 / 0.3) + 0.4 * math.log(0.4 / 0.7)
    assert torch.allclose(r(MU, SCALE, 0.6), coin + 0.6 * slab, atol=1e-13)
    # a posterior without an atom pays -log pi for the slab only
    assert torch.allclose(penalty_from_prior(prior)(MU, SCALE), slab - math.log(0.3), atol=1e-13)


def test_a_prior_over_vectors_accepts_a_vector_of_means_and_one_scale() -> None:
    prior = GroupLasso(d(2.0), 4)
    r, mu = penalty_from_prior(prior), torch.arange(8, dtype=torch.float64).reshape(2, 4) / 5
    q = Independent(Normal(mu, d(0.3).expand(2, 4)), 1)
    assert torch.allclose(r(mu, d([[0.3]])), pr.kl(q, prior).value, atol=1e-12)
    assert torch.allclose(penalty_from_prior(prior, "dirac")(mu), -prior.log_prob(mu))
    with pytest.raises(InputError, match="The 'family' argument of penalty_from_prior must be 'gaussian' or 'dirac'"):
        penalty_from_prior(prior, "laplace")


def test_a_function_an_equivalence_and_a_penalty_are_accepted_as_priors() -> None:
    exact = penalty_from_prior(Laplace(d(0.0), d(0.5)))(MU, SCALE)
    by_function = penalty_from_prior(lambda w: -2 * w.abs(), "gaussian")
    assert torch.allclose(by_function(MU, SCALE), exact, atol=1e-12)  # log(2 b) is 0
    assert torch.allclose(penalty_from_prior(L1(2.0))(MU, SCALE), exact, atol=1e-12)
    found = prior_from_penalty(by_function, "gaussian")
    assert torch.allclose(penalty_from_prior(found)(MU, SCALE), exact, atol=1e-4)
    assert torch.allclose(
        penalty_from_prior(L2(2.0))(MU, SCALE), penalty_from_prior(Normal(d(0.0), d(0.5)))(MU, SCALE), atol=1e-14
    )


def test_numbers_are_read_in_double_precision_and_float32_stays_float32() -> None:
    r = penalty_from_prior(StudentT(3.0))
    assert r(0.3, 0.4).dtype == torch.float64
    single = r(MU.float(), SCALE.float())
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), r(MU, SCALE), atol=1e-5)
    assert r(torch.zeros(4, 1), torch.ones(3)).shape == (4, 3)


def test_where_the_prior_has_no_mass_the_penalty_is_infinite() -> None:
    r = penalty_from_prior(HalfNormal(d(1.0)), "uniform")
    assert float(r(0.2, 0.5)) == math.inf
    assert math.isfinite(float(r(2.0, 0.5)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: penalty_from_prior(3.0),
            "The 'prior' argument of penalty_from_prior must be a distribution, an Equivalence",
        ),
        (
            lambda: penalty_from_prior(PRIORS["gaussian"], "cauchy"),
            "The 'family' argument of penalty_from_prior must be one of",
        ),
        (
            lambda: penalty_from_prior(PRIORS["gaussian"])(0.0, -1.0),
            "The 'scale' argument of penalty_from_prior must be positive",
        ),
        (lambda: penalty_from_prior(PRIORS["gaussian"], "spike_slab"), "must be a SpikeAndSlab for the family"),
        (lambda: penalty_from_prior(L2("glorot")), "must have a number as its factor, since no network is given"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_sentence(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
