"""Kronecker factors where they are exact, and their Gaussian against dense matrices."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.curvature import Full, Pass, select
from priory.curvature.kronecker import Kronecker, outer
from priory.curvature.layer_jacobians import jacobian_rows
from priory.testing import assert_covariance_close, assert_mean_close

EXACT: Any = {"rtol": 1e-8, "atol": 1e-10}


def by_parameter(selection: Any) -> Tensor:
    """Return a different precision for each parameter."""
    sizes = selection.sizes
    return torch.cat([torch.full((k,), 0.5 + 0.3 * i, dtype=torch.float64) for i, k in enumerate(sizes)])


def fitted(problem: Any, **options: Any) -> Kronecker:
    own = {name: options.pop(name) for name in ("sharing",) if name in options}
    return Kronecker.of(Pass(problem.target, problem.w, problem.data, problem.selection, **options), **own)


# Cases in which the factorisation is exact.


def test_it_equals_the_dense_curvature_of_a_linear_model_with_gaussian_noise(make_problem: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    made = make_problem(nn.Linear(3, 2).double(), pr.Gaussian(noise=torch.tensor([0.5, 2.0]).double()), x, y)
    full = Full.of(Pass(made.target, made.w, made.data, made.selection))
    torch.testing.assert_close(fitted(made).dense(), full.dense(), **EXACT)


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Rows that can only be read in order, so that a pass sees those of the loader's batches."""

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts[0])

    def __iter__(self) -> Any:
        return zip(*self.parts, strict=True)


def test_the_rows_that_a_stream_yields_are_scaled_to_all_rows(make_problem: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    made = make_problem(nn.Linear(3, 2).double(), pr.Gaussian(noise=0.5), x, y)
    loader = torch.utils.data.DataLoader(Streamed(x, y), batch_size=2, drop_last=True)
    data = Data.of(loader).prepared(made.target.model.prepare)
    jacobian = made.jacobian()[:6] / 0.5
    found = Kronecker.of(Pass(made.target, made.w, data, made.selection)).dense()
    torch.testing.assert_close(found, 7 / 6 * torch.einsum("nci,ncj->ij", jacobian, jacobian), **EXACT)


LIKELIHOODS = {
    "gaussian": (pr.Gaussian(noise=0.3), 2, torch.randn(1, 2).double()),
    "noise from the network": (pr.Gaussian(noise="network"), 2, torch.randn(1).double()),
    "student": (pr.StudentT(df=4.0, scale=0.7), 2, torch.randn(1, 2).double()),
    "categorical": (pr.Categorical(), 3, torch.tensor([1])),
    "bernoulli": (pr.Bernoulli(), 2, torch.tensor([[1.0, 0.0]]).double()),
    "poisson": (pr.Poisson(), 2, torch.tensor([[1.0, 4.0]]).double()),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_it_equals_the_dense_curvature_of_one_layer_and_one_row(make_problem: Any, name: str) -> None:
    torch.manual_seed(0)
    likelihood, outputs, y = LIKELIHOODS[name]
    made = make_problem(nn.Linear(3, outputs).double(), likelihood, torch.randn(1, 3).double(), y)
    full = Full.of(Pass(made.target, made.w, made.data, made.selection))
    torch.testing.assert_close(fitted(made).dense(), full.dense(), **EXACT)


class Pooled(nn.Module):
    """A linear layer at each position, and the sum over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum(1)


def test_expanding_is_exact_for_linear_outputs_at_every_position(make_problem: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, 3).double(), torch.randn(5, 4, 2).double()
    made = make_problem(nn.Linear(3, 2).double(), pr.Gaussian(noise=0.5), x, y)
    full = Full.of(Pass(made.target, made.w, made.data, made.selection))
    torch.testing.assert_close(fitted(made).dense(), full.dense(), **EXACT)


def test_reducing_is_exact_for_a_linear_layer_summed_over_positions(make_problem: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, 3).double(), torch.randn(5, 2).double()
    made = make_problem(Pooled().double(), pr.Gaussian(noise=0.5), x, y)
    full = Full.of(Pass(made.target, made.w, made.data, made.selection))
    torch.testing.assert_close(fitted(made, sharing="reduce").dense(), full.dense(), **EXACT)


def test_it_is_exact_for_an_embedding_of_one_word(make_problem: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(4, 3, padding_idx=2), nn.Flatten()).double()
    x = torch.tensor([[0], [1], [2], [1], [3]])
    made = make_problem(net, pr.Gaussian(noise=0.5), x, torch.randn(5, 3).double())
    full = Full.of(Pass(made.target, made.w, made.data, made.selection))
    torch.testing.assert_close(fitted(made).dense(), full.dense(), **EXACT)


def test_parameters_without_a_rule_have_exact_blocks(problem: Any) -> None:
    curvature = fitted(problem)
    found, jacobian = curvature.dense(), problem.jacobian() / 0.5
    for name in problem.plain:
        span = problem.selection.spans()[name]
        block = torch.einsum("nci,ncj->ij", jacobian[..., span], jacobian[..., span])
        torch.testing.assert_close(found[span, span], block, **EXACT)
    assert {text.split(" of ")[0] for text in curvature.notes()} == problem.plain


def test_a_large_parameter_without_a_rule_has_an_exact_diagonal(make_problem: Any) -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raw = nn.Parameter(torch.randn(2, 600))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.raw[:, :2]) + self.raw.mean()

    torch.manual_seed(0)
    made = make_problem(Raw().double(), pr.Gaussian(noise=0.5), torch.randn(2, 2).double(), torch.zeros(2, 2).double())
    curvature = fitted(made)
    expected = (made.jacobian() / 0.5).square().sum((0, 1))
    torch.testing.assert_close(curvature.diagonal(), expected, **EXACT)
    torch.testing.assert_close(curvature.dense(), torch.diag(expected), **EXACT)
    assert curvature.notes() == ["raw of Raw: exact diagonal, no Kronecker rule"]


# The Gaussian.


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_covariance_of_outputs_equals_that_with_the_dense_jacobian(problem: Any, sharing: str) -> None:
    curvature = fitted(problem, sharing=sharing)
    precision = by_parameter(problem.selection)
    gaussian = curvature.gaussian(precision, scale=0.7)
    q, jacobian = 0.7 * curvature.dense() + torch.diag(precision), problem.jacobian()
    some = jacobian_rows(problem.target, problem.w, problem.inputs, problem.selection)
    found = torch.cat([gaussian.output_covariance(r) for r in some])
    torch.testing.assert_close(found, jacobian @ torch.linalg.inv(q) @ jacobian.mT, **EXACT)


def test_the_gaussian_agrees_with_the_dense_precision(problem: Any) -> None:
    curvature, precision = fitted(problem), by_parameter(problem.selection)
    assert_gaussian_agrees(curvature, precision, 0.7)


def assert_gaussian_agrees(curvature: Kronecker, precision: Tensor, scale: float) -> None:
    gaussian = curvature.gaussian(precision, scale)
    q = scale * curvature.dense() + torch.diag(precision)
    v = torch.randn(2, 3, len(q), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inverse = torch.linalg.inv(q)
    torch.testing.assert_close(curvature.diagonal(), curvature.dense().diagonal(), **EXACT)
    torch.testing.assert_close(gaussian.log_det, torch.logdet(q), **EXACT)
    torch.testing.assert_close(gaussian.variance(), inverse.diagonal(), **EXACT)
    torch.testing.assert_close(gaussian.solve(v), v @ inverse, **EXACT)
    torch.testing.assert_close(gaussian.quadratic(v), ((v @ q) * v).sum(-1), **EXACT)


@pytest.fixture
def small(make_problem: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return make_problem(net, pr.Categorical(), torch.randn(40, 3).double(), torch.arange(40) % 3)


def test_draws_have_the_inverse_precision_as_covariance(small: Any) -> None:
    # 31 means and 496 covariances at 5 standard errors (false alarms: 3e-4).
    curvature, precision = fitted(small), by_parameter(small.selection)
    draws = curvature.gaussian(precision).draw(4000, torch.Generator().manual_seed(0))
    assert_mean_close(draws, 0.0)
    assert_covariance_close(draws, torch.linalg.inv(curvature.dense() + torch.diag(precision)))


def test_a_precision_that_is_an_outer_product_of_rows_and_columns_is_exact(small: Any) -> None:
    ends = (torch.linspace(*pair, 4, dtype=torch.float64) for pair in ((1, 2), (3, 5)))
    rising = torch.outer(*ends)  # for a weight with its bias as last column
    tail = by_parameter(small.selection)[16:]
    assert_gaussian_agrees(fitted(small), torch.cat([rising[:, :3].flatten(), rising[:, 3], tail]), 1.3)


def test_a_flat_prior_on_the_biases_is_exact(small: Any) -> None:
    precision = by_parameter(small.selection)
    precision[small.selection.spans()["0.bias"]] = 0.0
    assert_gaussian_agrees(fitted(small), precision, 0.7)


def test_a_flat_prior_adds_nothing_to_the_curvature(make_problem: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    made = make_problem(nn.Linear(3, 2).double(), pr.Gaussian(noise=0.5), x, y)
    assert_gaussian_agrees(fitted(made), torch.zeros(8).double(), 1.0)


def test_a_multiple_of_a_precision_reuses_the_decomposition(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    precision, curvature = by_parameter(small.selection), fitted(small)
    precision[small.selection.spans()["0.bias"]] = 0.0
    curvature.gaussian(precision)
    fresh = fitted(small).gaussian(7.3 * precision, scale=0.9)
    monkeypatch.setattr(torch.linalg, "eigh", None)
    again = curvature.gaussian(7.3 * precision, scale=0.9)
    torch.testing.assert_close(again.log_det, fresh.log_det, **EXACT)
    torch.testing.assert_close(again.variance(), fresh.variance(), **EXACT)


def test_a_precision_that_is_not_a_multiple_is_decomposed_again(small: Any) -> None:
    precision, curvature = by_parameter(small.selection), fitted(small)
    curvature.gaussian(precision)
    precision[small.selection.spans()["0.bias"]] = 9.0
    assert_gaussian_agrees(curvature, precision, 1.0)


def test_the_mean_of_sampled_fishers_is_exact_where_the_factors_are(make_problem: Any) -> None:
    # 9 x 10 / 2 entries at 5 standard errors (false alarms: 3e-5).
    torch.manual_seed(0)
    made = make_problem(nn.Linear(2, 3).double(), pr.Categorical(), torch.randn(1, 2).double(), torch.tensor([2]))
    generator = torch.Generator().manual_seed(1)
    several = torch.stack([fitted(made, kind="fisher", samples=2, generator=generator).dense() for _ in range(400)])
    upper = torch.triu_indices(9, 9)
    assert_mean_close(several[:, upper[0], upper[1]], fitted(made).dense()[upper[0], upper[1]])


def test_the_empirical_fisher_of_one_row_is_the_outer_product_of_its_gradient(make_problem: Any) -> None:
    torch.manual_seed(0)
    made = make_problem(nn.Linear(2, 3).double(), pr.Categorical(), torch.randn(1, 2).double(), torch.tensor([2]))
    gradient = made.target.model.log_likelihood_and_grad(made.w, made.data.tensors, 1.0, {})[1]
    torch.testing.assert_close(fitted(made, kind="empirical").dense(), torch.outer(gradient, gradient), **EXACT)


def test_float32_stays_accurate_with_many_rows(make_problem: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3000, 20), torch.randint(3, (3000,))
    net = nn.Sequential(nn.Linear(20, 150), nn.ReLU(), nn.Linear(150, 3))
    single = make_problem(net, pr.Categorical(), x, y)
    double = make_problem(net.double(), pr.Categorical(), x.double(), y)
    precision = by_parameter(single.selection)
    low = fitted(single).gaussian(precision.float())
    high = fitted(double).gaussian(precision)
    torch.testing.assert_close(low.variance().double(), high.variance(), rtol=2e-4, atol=0)
    torch.testing.assert_close(low.log_det, high.log_det, rtol=1e-5, atol=0)
    (few,) = jacobian_rows(single.target, single.w, (x[:50],), single.selection)
    (exact,) = jacobian_rows(double.target, double.w, (x[:50].double(),), double.selection)
    found, right = low.output_covariance(few).double(), high.output_covariance(exact)
    torch.testing.assert_close(found, right, rtol=2e-3, atol=1e-4 * float(right.abs().max()))


def test_a_saved_curvature_loads_unchanged(problem: Any) -> None:
    curvature, precision = fitted(problem), by_parameter(problem.selection)
    own = json.loads(json.dumps(curvature.to_json()))
    again = Kronecker.of_tensors(problem.selection, curvature.tensors(), **own)
    assert torch.equal(again.dense(), curvature.dense())
    assert torch.equal(again.gaussian(precision).variance(), curvature.gaussian(precision).variance())
    assert again.notes() == curvature.notes()


# Invalid arguments.


def test_a_precision_that_is_not_an_outer_product_is_refused(small: Any) -> None:
    precision = torch.linspace(0.5, 3.0, small.selection.size, dtype=torch.float64)
    with pytest.raises(InputError, match="use structure='diag'"):
        fitted(small).gaussian(precision)


def test_a_flat_prior_over_unidentified_directions_is_refused(small: Any, make_problem: Any) -> None:
    with pytest.raises(InputError, match="above zero where the curvature is zero"):
        fitted(small).gaussian(
            torch.zeros(small.selection.size).double()
        )  # softmax doesn't change when all logits are shifted
    x = torch.zeros(2, 2).double()
    made = make_problem(nn.Linear(2, 1).double(), pr.Gaussian(noise=1.0), x, x[:, :1])
    with pytest.raises(InputError, match="above zero where the curvature is zero"):
        fitted(made).gaussian(torch.tensor([0.0, 0.0, 1.0]).double())


def test_single_coordinates_are_refused(small: Any) -> None:
    selection = select(small.target.model, torch.tensor([0, 2]))
    with pytest.raises(InputError, match="'over' argument of Laplace must name whole parameters for structure='kron'"):
        Kronecker.of(Pass(small.target, small.w, small.data, selection))


def test_an_unknown_value_of_sharing_is_refused(small: Any) -> None:
    with pytest.raises(InputError, match="'sharing' argument of Kronecker must be 'expand' or 'reduce'"):
        fitted(small, sharing="add")


def test_the_hessian_is_refused(small: Any) -> None:
    with pytest.raises(InputError, match="'curvature' argument of Laplace must be 'ggn', 'fisher' or 'empirical'"):
        fitted(small, kind="hessian")


def test_outer_products_are_distinguished_from_other_matrices() -> None:
    found = outer(torch.tensor([[2.0, 4.0], [1.0, 2.0]]))
    assert found is not None
    assert found[0] == 4.0
    assert [v.tolist() for v in found[1:]] == [[1.0, 0.5], [0.5, 1.0]]
    assert outer(torch.tensor([[2.0, 4.0], [1.0, 3.0]])) is None
    assert outer(torch.tensor([[2.0, 4.0], [0.0, 0.0]])) is None
