"""Decompositions agree with exact ones, and survive singular, batched and badly scaled matrices."""

import math

import pytest
import torch
from torch import Tensor

from priory import InputError, PrioryWarning
from priory.core import linalg
from priory.core.linalg import JitterWarning, NotPositiveDefiniteError, cholesky, eigh, svd, try_cholesky

EXACT = {"rtol": 0, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def definite(*shape: int) -> Tensor:
    root = normal(*shape, shape[-1] + 3)
    return root @ root.mT


def dead_units(dtype: torch.dtype) -> Tensor:
    """A Kronecker factor of a layer where most units never fire, over 30 orders of magnitude."""
    scales = torch.logspace(-18, 12, 40, dtype=torch.float64)
    scales[::3] = 0
    root = scales[:, None] * normal(40, 40)
    return (root @ root.mT).to(dtype)


def test_a_definite_matrix_has_the_factor_of_torch_bit_for_bit() -> None:
    for matrix in (definite(5), definite(2, 3, 5), definite(4).float()):
        assert torch.equal(cholesky(matrix), torch.linalg.cholesky(matrix))


def test_the_factor_of_a_known_product_is_found_exactly() -> None:
    lower = torch.tensor([[3.0, 0, 0], [-2, 1, 0], [4, 7, 2]], dtype=torch.float64)
    torch.testing.assert_close(cholesky(lower @ lower.mT), lower, **EXACT)


def test_a_singular_matrix_gets_the_least_jitter_that_makes_it_definite_and_a_typed_warning() -> None:
    matrix = torch.ones(3, 3, dtype=torch.float64)
    with pytest.warns(
        JitterWarning, match="The precision is singular to rounding, so .* use a stronger prior."
    ) as found:
        factor = cholesky(matrix, "precision", remedy="use a stronger prior")
    assert issubclass(found[0].category, PrioryWarning)
    added = (factor @ factor.mT - matrix).diagonal()
    assert 0 < float(added.max()) <= 1e-13
    torch.testing.assert_close(factor @ factor.mT, matrix, **EXACT)


def test_a_matrix_that_may_be_semidefinite_is_factorised_without_a_warning() -> None:
    for dtype in (torch.float32, torch.float64):
        direction = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
        matrix = torch.outer(direction, direction)
        factor = cholesky(matrix, semidefinite=True)
        torch.testing.assert_close(factor @ factor.mT, matrix, rtol=0, atol=10 * torch.finfo(dtype).eps ** 0.5)


def test_only_the_singular_members_of_a_batch_are_changed() -> None:
    matrices = torch.stack([torch.eye(2), torch.ones(2, 2), 1e30 * torch.ones(2, 2), torch.zeros(2, 2)])
    factor = cholesky(matrices, semidefinite=True)
    assert torch.equal(factor[0], torch.eye(2))
    assert bool(torch.isfinite(factor).all())
    torch.testing.assert_close(factor @ factor.mT, matrices, rtol=1e-3, atol=1e-6)
    matrices = matrices[:2].double()
    factor = cholesky(matrices, semidefinite=True)
    assert torch.equal(factor[0], matrices[0])
    torch.testing.assert_close(factor @ factor.mT, matrices, **EXACT)


@pytest.mark.parametrize("matrix", [-torch.eye(2), torch.tensor([[1.0, 2], [2, 1]]), torch.full((2, 2), math.nan)])
def test_a_matrix_with_a_negative_direction_or_nan_is_refused(matrix: Tensor) -> None:
    with pytest.raises(NotPositiveDefiniteError, match="The covariance must be positive definite, got one that is not"):
        cholesky(matrix, "covariance")
    assert issubclass(NotPositiveDefiniteError, InputError)


def test_which_members_have_a_factor_is_reported() -> None:
    matrices = torch.stack([torch.eye(2), -torch.eye(2), torch.full((2, 2), math.nan), 4 * torch.eye(2)])
    factor, ok = try_cholesky(matrices)
    assert ok.tolist() == [True, False, False, True]
    assert torch.equal(factor[3], 2 * torch.eye(2))


def test_eigenvalues_and_vectors_are_those_of_torch_where_it_converges() -> None:
    for matrix in (definite(5), definite(2, 5), definite(4).float()):
        found, wanted = eigh(matrix), torch.linalg.eigh(matrix)
        assert torch.equal(found.values, wanted[0])
        assert torch.equal(found.vectors, wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_with_dead_units_is_decomposed(dtype: torch.dtype) -> None:
    matrix = dead_units(dtype)
    values, vectors = eigh(matrix)
    size, eps = float(matrix.abs().max()), torch.finfo(dtype).eps
    torch.testing.assert_close((vectors * values) @ vectors.mT, matrix, rtol=0, atol=100 * eps * size)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(40, dtype=dtype), rtol=0, atol=100 * eps)


class Failing:
    """A decomposition that fails so many times, as LAPACK's does on some matrices, and then works."""

    def __init__(self, name: str, failures: int) -> None:
        self.function, self.failures, self.dtypes = getattr(torch.linalg, name), failures, []

    def __call__(self, matrix: Tensor, **options: bool):
        self.dtypes.append(matrix.dtype)
        if len(self.dtypes) <= self.failures:
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        return self.function(matrix, **options)


@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize("shape", [(6,), (2, 6)])
def test_what_fails_to_converge_is_decomposed_in_float64(failures: int, shape: tuple[int, ...], monkeypatch) -> None:
    matrix = definite(*shape).float()
    wanted = torch.linalg.eigh(matrix.double())[0]
    failing = Failing("eigh", failures)
    monkeypatch.setattr(linalg.torch.linalg, "eigh", failing)
    values, vectors = eigh(matrix)
    assert failing.dtypes == [torch.float32] + failures * [torch.float64]
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(values.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((vectors * values[..., None, :]) @ vectors.mT, matrix, rtol=1e-5, atol=1e-5)


def test_eigenvalues_that_are_never_found_are_an_error(monkeypatch) -> None:
    monkeypatch.setattr(linalg.torch.linalg, "eigh", Failing("eigh", 99))
    with pytest.raises(InputError, match=r"The eigenvalues of a matrix of shape \(3, 3\) could not be found."):
        eigh(definite(3))


def test_singular_values_fall_back_to_float64(monkeypatch) -> None:
    matrix = normal(5, 3).float()
    exact = svd(matrix.double())
    torch.testing.assert_close((exact.left * exact.values) @ exact.right, matrix.double(), **EXACT)
    monkeypatch.setattr(linalg.torch.linalg, "svd", Failing("svd", 1))
    found = svd(matrix)
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values.double(), exact.values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("decomposition", [eigh, svd])
def test_a_matrix_with_nan_that_cannot_be_decomposed_is_refused(decomposition, monkeypatch) -> None:
    monkeypatch.setattr(linalg.torch.linalg, decomposition.__name__, Failing(decomposition.__name__, 1))
    with pytest.raises(InputError, match="A matrix must be finite"):
        decomposition(torch.full((2, 2), math.nan))
