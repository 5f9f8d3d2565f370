"""Full-rank variational inference against Gaussian posteriors, which it must reach accurately."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

import priory as pr
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.methods.variational.full_rank import STRIP_COLUMNS, lower_of_transposed_product, lower_product, natural_step
from priory.testing import LinearRegression

F64 = torch.float64
FULL_BATCH = {"batch_size": 10**6, "progress": False}


def gaussian(posterior):
    return MultivariateNormal(posterior.family.loc, scale_tril=posterior.family.tril)


def assert_equal_gaussians(found, exact, tolerance):
    """Compare means and covariances in units of the exact standard deviations."""
    sd = exact.variance.sqrt()
    assert float(((found.loc - exact.loc) / sd).abs().max()) < tolerance
    off = (found.covariance_matrix - exact.covariance_matrix) / sd[:, None] / sd
    assert float(off.abs().max()) < tolerance


@pytest.mark.parametrize("build", ["model", "density"])
def test_posterior_and_bound_of_linear_regression_are_exact(build):
    """To 1e-3 of a standard deviation and 0.01 nat."""
    exact = LinearRegression.make(0)
    posterior = pr.fit(getattr(exact, build)(), exact.data, pr.FullRank(learning_rate=0.2), steps=200, **FULL_BATCH)
    assert_equal_gaussians(gaussian(posterior), exact.posterior, 1e-5)
    assert posterior.log_evidence.value == pytest.approx(exact.log_evidence, abs=1e-6)
    assert posterior.k_hat < 0.7


def test_the_posterior_of_fifty_correlated_coordinates_is_found():
    """rho = 0.95, to 1e-3 of a standard deviation; the bound to 0.01 nat of the evidence."""
    size, rho = 50, 0.95
    covariance = rho * torch.ones(size, size, dtype=F64) + (1 - rho) * torch.eye(size, dtype=F64)
    exact = MultivariateNormal(torch.linspace(-2, 2, size, dtype=F64), covariance)
    model = pr.Density(lambda p: exact.log_prob(p["w"]) + 3.0, {"w": pr.Param((size,))}, batched=True)
    posterior = pr.fit(model, None, pr.FullRank(samples=50, learning_rate=0.2), steps=320, progress=False)
    assert_equal_gaussians(gaussian(posterior), exact, 1e-3)
    assert posterior.log_evidence.value == pytest.approx(3.0, abs=0.01)
    assert posterior.k_hat < 0.7


def test_the_bound_plus_the_divergence_is_the_evidence_at_any_q():
    """20,000 draws, 4 standard errors (false alarms: 6e-5), at a q that has not converged."""
    exact = LinearRegression.make(1)
    posterior = pr.fit(exact.model(), exact.data, pr.FullRank(), steps=15, **FULL_BATCH)
    gap = float(kl_divergence(gaussian(posterior), exact.posterior))
    bound = posterior.elbo(samples=20_000)
    assert gap > 0.3
    assert abs(bound.value + gap - exact.log_evidence) < 4 * bound.error < 0.2


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
@pytest.mark.parametrize("temperature", [0.05, 20.0])
def test_a_tempered_posterior_has_the_exact_precision_in_no_more_steps(temperature, tempers):
    """The precision is X'X / (T noise^2) + I / scale^2, or all of it divided by T; only the first changes the mean."""
    exact = LinearRegression.make(2)
    posterior = pr.fit(
        exact.model(),
        exact.data,
        pr.FullRank(learning_rate=0.2),
        steps=200,
        temperature=temperature,
        tempers=tempers,
        **FULL_BATCH,
    )
    X = exact.design(exact.X)
    prior = torch.eye(X.shape[1], dtype=F64) * exact.prior_scale**-2
    weight = 1.0 if tempers == "likelihood" else 1 / temperature
    precision = X.T @ X / (temperature * exact.noise**2) + weight * prior
    loc = torch.linalg.solve(precision, X.T @ exact.y / (temperature * exact.noise**2))
    assert_equal_gaussians(gaussian(posterior), MultivariateNormal(loc, precision_matrix=precision), 1e-4)


def random_problem(size=4):
    generator = stream(0, "natural step")
    loc, grad_mean = torch.randn(2, size, generator=generator, dtype=F64)
    grad_scale = torch.randn(size, size, generator=generator, dtype=F64).tril()
    tril = 0.3 * torch.randn(size, size, generator=generator, dtype=F64).tril(-1) + torch.eye(size, dtype=F64)
    return loc, tril, grad_mean, grad_scale, generator


def test_a_step_is_the_natural_gradient():
    """The Fisher information is the Hessian of KL(q(d, M) || q(0, 0)) in the local coordinates d and M, by autograd."""
    size, rate = 4, 1e-6  # so small that the second order of exp(S) is negligible
    loc, tril, grad_mean, grad_scale, _ = random_problem(size)
    rows, columns = torch.tril_indices(size, size)

    def moved(local):
        matrix = torch.zeros(size, size, dtype=F64).index_put((rows, columns), local[size:])
        return loc + tril @ local[:size], tril @ (torch.eye(size, dtype=F64) + matrix)

    def divergence(local):
        m, root = moved(local)
        return kl_divergence(
            MultivariateNormal(m, scale_tril=root, validate_args=False), MultivariateNormal(loc, scale_tril=tril)
        )

    def loss(local):
        m, root = moved(local)
        return (grad_mean * m).sum() + (grad_scale * root).sum()

    origin = torch.zeros(size + len(rows), dtype=F64)
    fisher = torch.autograd.functional.hessian(divergence, origin)
    gradient = torch.autograd.functional.jacobian(loss, origin)
    wanted = moved(-rate * torch.linalg.solve(fisher, gradient))
    found = natural_step(loc, tril, grad_mean, grad_scale, rate, samples=size)
    for one, other, before in zip(found, wanted, (loc, tril), strict=True):
        torch.testing.assert_close((one - before) / rate, (other - before) / rate, rtol=1e-4, atol=1e-4)


def test_a_step_is_invariant_under_affine_maps():
    """A step after w -> A w + b, with A lower triangular, equals the mapped step."""
    loc, tril, grad_mean, grad_scale, generator = random_problem()
    A = 5 * torch.randn(4, 4, generator=generator, dtype=F64).tril(-1) + torch.diag(
        torch.tensor([100.0, 0.01, 3.0, 1.0], dtype=F64)
    )
    back = torch.linalg.inv(A).mT  # maps gradients
    here = natural_step(loc, tril, grad_mean, grad_scale, 0.3, samples=2)
    there = natural_step(A @ loc + 1, A @ tril, back @ grad_mean, (back @ grad_scale).tril(), 0.3, samples=2)
    torch.testing.assert_close(there[0], A @ here[0] + 1, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(there[1], A @ here[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, STRIP_COLUMNS - 1, STRIP_COLUMNS, STRIP_COLUMNS + 1, 2 * STRIP_COLUMNS + 3])
def test_products_by_strips_equal_dense_products(size):
    generator = torch.Generator().manual_seed(size)
    a, b = torch.randn(2, 3, size, size, generator=generator, dtype=F64)
    a, lower = a.tril(), b.tril()
    torch.testing.assert_close(lower_product(a, lower), a @ lower, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lower_of_transposed_product(a, b), (a.mT @ b).tril(), rtol=1e-12, atol=1e-12)


def test_a_step_of_any_size_keeps_the_diagonal_positive():
    loc, tril, grad_mean, grad_scale, _ = random_problem()
    for size in (1e3, -1e3, 1e9):
        _, root = natural_step(loc, tril, grad_mean, size * grad_scale, 1.0, samples=4)
        assert bool((root.diagonal() > 0).all())
        assert torch.equal(root, root.tril())


def test_a_loaded_posterior_equals_the_saved_one(tmp_path):
    exact = LinearRegression.make(0)
    posterior = pr.fit(exact.model(), exact.data, pr.FullRank(), steps=20, **FULL_BATCH)
    posterior.save(tmp_path / "full_rank")
    loaded = pr.load(tmp_path / "full_rank", exact.model())
    assert torch.equal(loaded.theta, posterior.theta)
    assert torch.equal(loaded.sample(3, seed=1)["weight"], posterior.sample(3, seed=1)["weight"])
    assert loaded.elbo(exact.data).value == posterior.elbo().value


def test_too_many_parameters_are_refused_with_a_remedy():
    model = pr.Density(lambda p: -p["w"].square().sum(-1), {"w": pr.Param((5_001,))}, batched=True)
    with pytest.raises(InputError, match=r"at most 5,000 parameters \(LowRank takes more\), got 5001"):
        pr.fit(model, None, pr.FullRank(), steps=1, progress=False)
