"""Inside `FailuresAsNaN` a matrix that torch.linalg can't handle gives NaN, and the others what they give alone."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Wishart
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from priory.core.streams import stream
from priory.network.failures import FailuresAsNaN, failures_as_nan
from priory.network.vectorise import Vectorised, unchecked, value_and_grad

DOUBLE = torch.float64
ROOT = torch.randn(4, 4, generator=stream(0, "failures"), dtype=DOUBLE)
GRAM, COLUMN = ROOT @ ROOT.T, ROOT[:, :1]
ZERO = torch.zeros(4, dtype=DOUBLE)


def matrix(w: Tensor) -> Tensor:
    """Positive definite for positive w, indefinite or negative for negative ones, singular for zeros."""
    return w[0] * torch.eye(4, dtype=DOUBLE) + 0.1 * w[1] * GRAM


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": lambda w: torch.linalg.cholesky(matrix(w)).diagonal().log().sum(),
    "upper cholesky": lambda w: torch.linalg.cholesky(matrix(w), upper=True).sum(),
    "cholesky_solve": lambda w: torch.cholesky_solve(COLUMN, torch.linalg.cholesky(matrix(w))).sum(),
    "cholesky_inverse": lambda w: torch.cholesky_inverse(torch.linalg.cholesky(matrix(w))).sum(),
    "inv": lambda w: torch.linalg.inv(matrix(w)).sum(),
    "matrix_power": lambda w: torch.linalg.matrix_power(matrix(w), -2).sum(),
    "solve a vector": lambda w: torch.linalg.solve(matrix(w), ROOT[0]).sum(),
    "solve a matrix": lambda w: torch.linalg.solve(matrix(w), ROOT).sum(),
    "solve many": lambda w: torch.linalg.solve(matrix(w), ROOT.expand(3, 4, 4)).sum(),
    "slogdet": lambda w: torch.linalg.slogdet(matrix(w))[1],
    "lu_factor": lambda w: torch.linalg.lu_factor(matrix(w))[0].sum(),
    "eigh": lambda w: torch.linalg.eigh(matrix(w))[0].log().sum(),
    "eigvalsh": lambda w: torch.linalg.eigvalsh(matrix(w)).log().sum(),
    "eigvals": lambda w: torch.linalg.eigvals(matrix(w)).abs().sum(),
    "svd": lambda w: torch.linalg.svd(matrix(w))[1].log().sum(),
    "pinv": lambda w: torch.linalg.pinv(matrix(w)).sum(),
    "lstsq": lambda w: torch.linalg.lstsq(matrix(w), COLUMN).solution.sum(),
    "det": lambda w: torch.linalg.det(matrix(w)),
    "covariance": lambda w: MultivariateNormal(ZERO, matrix(w)).log_prob(ROOT[0]),
    "precision": lambda w: MultivariateNormal(ZERO, precision_matrix=matrix(w)).log_prob(ROOT[0]),
    "wishart": lambda w: Wishart(torch.tensor(5.0, dtype=DOUBLE), matrix(w)).log_prob(GRAM),
}
SOUND = torch.tensor([[1.0, 0.5], [2.0, 1.0]], dtype=DOUBLE)
BAD = torch.tensor([[1.0, 0.5], [-2.0, -1.0], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [2.0, 1.0]], dtype=DOUBLE)


@pytest.mark.parametrize("recorded_at", [SOUND[[0, 1, 0, 1, 0, 1]], BAD], ids=["sound", "bad"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_vectors_do_not_notice_a_failure(name, recorded_at):
    function = FUNCTIONS[name]
    with unchecked():
        graph = make_fx(failures_as_nan(vmap(grad_and_value(function))))(recorded_at)
        expected, slope = (
            torch.stack(parts) for parts in zip(*(value_and_grad(function, w) for w in SOUND), strict=True)
        )
    gradient, value = graph(BAD)
    torch.testing.assert_close(value[[0, -1]], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient[[0, -1]], slope, rtol=1e-10, atol=1e-10)
    assert not bool(torch.isfinite(value[3:5]).any())  # of a matrix with NaN or infinities


@pytest.mark.parametrize("name", ["cholesky", "cholesky_solve", "covariance", "precision", "wishart"])
def test_a_matrix_without_a_cholesky_factor_has_no_density_and_no_slope(name):
    with unchecked(), FailuresAsNaN():
        gradient, value = vmap(grad_and_value(FUNCTIONS[name]))(BAD)
    assert torch.isnan(value).tolist() == [False, True, True, True, True, False]
    assert torch.isnan(gradient).all(-1).tolist() == [False, True, True, True, True, False]


@pytest.mark.parametrize("name", ["inv", "solve a vector", "solve a matrix", "solve many", "lu_factor"])
def test_a_singular_matrix_has_no_inverse(name):
    with FailuresAsNaN():
        _, value = vmap(grad_and_value(FUNCTIONS[name]))(BAD)
    assert torch.isnan(value).tolist() == [False, False, True, True, True, False]


def test_a_function_that_reads_the_error_codes_gets_the_results_of_torch():
    def with_jitter(w: Tensor) -> Tensor:
        factor, code = torch.linalg.cholesky_ex(matrix(w))
        other = torch.linalg.cholesky(torch.eye(4, dtype=DOUBLE) * (1 + w[1].square()))
        return torch.where(code == 0, factor, other).diagonal().log().sum()

    graph = make_fx(failures_as_nan(vmap(grad_and_value(with_jitter))))(BAD[:2])
    gradient, value = graph(BAD[:2])
    expected, slope = (
        torch.stack(parts) for parts in zip(*(value_and_grad(with_jitter, w) for w in BAD[:2]), strict=True)
    )
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)


def test_outside_the_context_torch_raises_as_before():
    with FailuresAsNaN():
        torch.linalg.cholesky(-torch.eye(2))
    with pytest.raises(RuntimeError, match="positive-definite"):
        torch.linalg.cholesky(-torch.eye(2))


def test_a_vectorised_function_is_not_looped_over_because_of_one_vector(recwarn):
    many = Vectorised(FUNCTIONS["cholesky"], "the example")
    values = many.values(BAD)
    found, _ = many.values_and_grads(BAD)
    torch.testing.assert_close(values, found, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert torch.isnan(values).tolist() == [False, True, True, True, True, False]
    assert not many.loop
    assert not recwarn.list
