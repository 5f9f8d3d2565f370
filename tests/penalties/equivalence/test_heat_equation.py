"""The heat equation of penalties, in one and in several dimensions."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from priory.core.errors import InputError
from priory.distributions import GroupLasso
from priory.penalties.equivalence.from_prior import penalty_from_prior
from priory.penalties.equivalence.heat_equation import heat_residual, heat_residual_matrix

from .cases import PRIORS, d, grid

MU, SCALE = grid(-2, 2, 9)[:, None], d([0.2, 0.5, 1.0])


@pytest.mark.parametrize("name", PRIORS)
def test_the_kl_to_any_prior_satisfies_the_heat_equation(name: str) -> None:
    rho = heat_residual(penalty_from_prior(PRIORS[name]), MU, SCALE)
    assert float(rho.abs().max()) < (2e-3 if name == "bimodal" else 1e-4)  # the error of the finite differences


@pytest.mark.parametrize("temperature", [0.1, 0.5, 10.0])
def test_a_tempered_kl_has_the_residual_one_minus_t_everywhere(temperature: float) -> None:
    forward = penalty_from_prior(PRIORS["student"])
    rho = heat_residual(lambda m, s: temperature * forward(m, s), MU, SCALE)
    assert torch.allclose(rho, torch.full_like(rho, 1 - temperature), atol=1e-5)


def test_a_square_has_the_residual_one_minus_two_lambda_variance() -> None:
    rho = heat_residual(lambda m, s: 0.7 * m**2 + 0 * s, MU, SCALE)
    assert torch.allclose(rho, (1 - 2 * 0.7 * SCALE**2).expand_as(rho), atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_kl_to_a_group_lasso_prior_satisfies_the_heat_equation_in_n_dimensions_and_half_of_it_does_not(
    n: int,
) -> None:
    forward = penalty_from_prior(GroupLasso(d(2.0), n))
    mu = torch.randn(3, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = d([[0.3], [0.5], [1.0]])
    assert float(heat_residual(forward, mu, scale, vector=True).abs().max()) < 1e-5
    rho = heat_residual(lambda m, s: 0.5 * forward(m, s), mu, scale, vector=True)
    assert torch.allclose(rho, torch.full_like(rho, 0.5), atol=1e-5)


def test_one_scale_per_coordinate_is_tested_as_a_sum() -> None:
    forward = penalty_from_prior(PRIORS["laplace"])
    mu, scale = d([[0.3, -1.0, 2.0]]), d([[0.2, 0.5, 0.9]])
    assert float(heat_residual(lambda m, s: forward(m, s).sum(-1), mu, scale, vector=True).abs()) < 1e-6


FULL_COVARIANCE = d(
    [[[1.0, 0.5, 0.0], [0.5, 0.8, -0.3], [0.0, -0.3, 0.5]], [[0.3, 0.1, 0.1], [0.1, 0.2, 0.0], [0.1, 0.0, 2.0]]]
)
FULL_PRIOR = MultivariateNormal(d([0.3, 0.0, -1.0]), d([[2.0, 0.4, 0.0], [0.4, 1.0, 0.2], [0.0, 0.2, 0.7]]))


def full(mu: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    return kl_divergence(MultivariateNormal(mu, covariance), FULL_PRIOR)


@pytest.mark.parametrize(
    ("penalty", "residual"),
    [
        (full, 0.0),
        (lambda m, v: 0.3 * full(m, v), 0.7),
        (lambda m, v: full(m, v) + 0.5 * v.logdet(), 1.0),  # without the entropy term
    ],
    ids=["KL", "tempered", "entropy missing"],
)
def test_a_full_covariance_is_tested_as_a_matrix(penalty, residual: float) -> None:
    mu = d([[0.5, -1.0, 2.0], [0.0, 0.2, 0.1]])
    found = heat_residual_matrix(penalty, mu, FULL_COVARIANCE)
    assert torch.allclose(found, residual * torch.eye(3, dtype=torch.float64).expand(2, 3, 3), atol=1e-5)


def test_a_penalty_on_the_variances_only_has_off_diagonal_residuals() -> None:
    """The entropy of a factorised Gaussian replaces the joint entropy, which is right for diagonal V only."""

    def penalty(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        variances = v.diagonal(dim1=-2, dim2=-1)
        return full(m, v) + 0.5 * v.logdet() - 0.5 * variances.log().sum(-1)

    mu = d([0.5, -1.0, 2.0])
    found = heat_residual_matrix(penalty, mu, FULL_COVARIANCE)
    factor = torch.linalg.cholesky(FULL_COVARIANCE)
    wanted = torch.eye(3, dtype=torch.float64) - factor.mT @ (
        factor / FULL_COVARIANCE.diagonal(dim1=1, dim2=2)[..., None]
    )
    assert torch.allclose(found, wanted, atol=1e-5)
    variances = torch.diag(d([0.3, 0.8, 2.0]))
    assert float(heat_residual_matrix(penalty, mu, variances).abs().max()) < 1e-5


def test_an_invalid_covariance_is_rejected() -> None:
    with pytest.raises(
        InputError, match=r"The 'covariance' argument of heat_residual_matrix must have the shape \(\.\.\., 3, 3\)"
    ):
        heat_residual_matrix(full, d([0.0, 0.0, 0.0]), torch.eye(2))
    with pytest.raises(InputError, match="The 'covariance' argument of heat_residual_matrix must be positive definite"):
        heat_residual_matrix(full, d([0.0, 0.0, 0.0]), -torch.eye(3))
    with pytest.raises(InputError, match="The 'r' argument of heat_residual_matrix must be a function"):
        heat_residual_matrix(1.0, d([0.0]), torch.eye(1))


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(InputError, match="The 'r' argument of heat_residual must be a function"):
        heat_residual(3.0, 0.0, 1.0)
    with pytest.raises(InputError, match="The 'scale' argument of heat_residual must be positive"):
        heat_residual(lambda m, s: m, 0.0, 0.0)
    with pytest.raises(InputError, match="The 'mu' argument of heat_residual must have at least one dimension"):
        heat_residual(lambda m, s: m, 0.0, 1.0, vector=True)
