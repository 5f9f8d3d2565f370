"""The diagonal of the curvature and its Gaussian, against dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.curvature import Pass, select
from priory.curvature.diagonal import DiagonalCurvature
from priory.curvature.layer_jacobians import jacobian_rows
from priory.testing import assert_covariance_close, assert_mean_close

EXACT: Any = {"rtol": 1e-8, "atol": 1e-10}


def distinct_precisions(p: int) -> torch.Tensor:
    """Return precisions that all differ."""
    return torch.linspace(0.5, 3.0, p, dtype=torch.float64)


def test_the_diagonal_equals_that_of_the_dense_curvature(problem: Any) -> None:
    jacobian = problem.jacobian()
    found = DiagonalCurvature.of(Pass(problem.target, problem.w, problem.data, problem.selection)).diagonal()
    torch.testing.assert_close(found, (jacobian / 0.5).square().sum((0, 1)), **EXACT)


def test_the_covariance_of_outputs_equals_that_with_the_dense_jacobian(problem: Any) -> None:
    curvature = DiagonalCurvature.of(Pass(problem.target, problem.w, problem.data, problem.selection))
    gaussian = curvature.gaussian(distinct_precisions(problem.selection.size), scale=0.7)
    jacobian = problem.jacobian()
    some = jacobian_rows(problem.target, problem.w, problem.inputs, problem.selection)
    found = torch.cat([gaussian.output_covariance(r) for r in some])
    expected = (jacobian / (0.7 * curvature.diagonal() + distinct_precisions(problem.selection.size))) @ jacobian.mT
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.fixture
def small(make_problem: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return make_problem(net, pr.Categorical(), torch.randn(7, 3).double(), torch.arange(7) % 3)


def test_the_gaussian_agrees_with_the_dense_precision(small: Any) -> None:
    p = small.selection.size
    curvature = DiagonalCurvature.of(Pass(small.target, small.w, small.data, small.selection))
    gaussian = curvature.gaussian(distinct_precisions(p), scale=0.7)
    q = 0.7 * curvature.dense() + torch.diag(distinct_precisions(p))
    v = torch.randn(2, 3, p, dtype=torch.float64)
    torch.testing.assert_close(gaussian.log_det, torch.logdet(q), **EXACT)
    torch.testing.assert_close(gaussian.variance(), torch.linalg.inv(q).diagonal(), **EXACT)
    torch.testing.assert_close(gaussian.solve(v), v @ torch.linalg.inv(q), **EXACT)
    torch.testing.assert_close(gaussian.quadratic(v), ((v @ q) * v).sum(-1), **EXACT)


def test_draws_have_the_inverse_precision_as_covariance(small: Any) -> None:
    # 31 means and 496 covariances at 5 standard errors (false alarms: 3e-4).
    curvature = DiagonalCurvature.of(Pass(small.target, small.w, small.data, small.selection))
    gaussian = curvature.gaussian(distinct_precisions(small.selection.size))
    draws = gaussian.draw(4000, torch.Generator().manual_seed(0))
    assert_mean_close(draws, 0.0)
    assert_covariance_close(draws, torch.diag(gaussian.variance()))


def test_single_coordinates_have_the_same_values(small: Any) -> None:
    over = torch.tensor([0, 3, 13, 18, 29])
    selection = select(small.target.model, over)
    part = DiagonalCurvature.of(Pass(small.target, small.w, small.data, selection))
    every = DiagonalCurvature.of(Pass(small.target, small.w, small.data, small.selection))
    torch.testing.assert_close(part.diagonal(), every.diagonal()[over], **EXACT)
    gaussian = part.gaussian(distinct_precisions(5))
    jacobian = small.jacobian()[..., over]
    (found,) = jacobian_rows(small.target, small.w, small.inputs, selection)
    torch.testing.assert_close(found.dense(), jacobian, **EXACT)
    expected = (jacobian * gaussian.variance()) @ jacobian.mT
    torch.testing.assert_close(gaussian.output_covariance(found), expected, **EXACT)


def test_the_mean_of_sampled_fishers_is_the_exact_fisher(small: Any) -> None:
    # 31 entries at 5 standard errors (false alarms: 2e-5).
    generator = torch.Generator().manual_seed(1)
    exact = DiagonalCurvature.of(Pass(small.target, small.w, small.data, small.selection)).diagonal()
    several = [
        DiagonalCurvature.of(
            Pass(small.target, small.w, small.data, small.selection, "fisher", 2, generator)
        ).diagonal()
        for _ in range(300)
    ]
    assert_mean_close(torch.stack(several), exact)


def test_the_empirical_fisher_is_the_sum_of_squared_gradients_at_the_observed_labels(small: Any) -> None:
    found = DiagonalCurvature.of(Pass(small.target, small.w, small.data, small.selection, "empirical")).diagonal()
    gradients = []
    for row in range(7):
        batch = tuple(t[row : row + 1] for t in small.data.tensors)
        gradients.append(small.target.model.log_likelihood_and_grad(small.w, batch, 1.0, {})[1].clone())
    torch.testing.assert_close(found, torch.stack(gradients).square().sum(0), **EXACT)


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Rows that can only be read in order, so that a pass sees those of the loader's batches."""

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts[0])

    def __iter__(self) -> Any:
        return zip(*self.parts, strict=True)


def test_the_rows_that_a_stream_yields_are_scaled_to_all_rows(small: Any) -> None:
    loader = torch.utils.data.DataLoader(Streamed(*small.data.tensors), batch_size=2, drop_last=True)
    data = Data.of(loader).prepared(small.target.model.prepare)
    found = DiagonalCurvature.of(Pass(small.target, small.w, data, small.selection)).diagonal()
    jacobian, p = small.jacobian()[:6], torch.softmax(small.target.model.net(*small.inputs).detach()[:6], -1)
    information = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    expected = 7 / 6 * torch.einsum("nci,ncd,ndi->i", jacobian, information, jacobian)
    torch.testing.assert_close(found, expected, **EXACT)


def test_a_flat_prior_over_unidentified_coordinates_is_refused(make_problem: Any) -> None:
    x = torch.tensor([[1.0, 0.0]]).double()
    made = make_problem(nn.Linear(2, 1).double(), pr.Gaussian(noise=1.0), x, x[:, :1])
    curvature = DiagonalCurvature.of(Pass(made.target, made.w, made.data, made.selection))
    with pytest.raises(InputError, match="zero at 1 of 3 coordinates"):
        curvature.gaussian(torch.zeros(3).double())


def test_the_hessian_is_refused(small: Any) -> None:
    with pytest.raises(InputError, match="'curvature' argument of Laplace must be 'ggn', 'fisher' or 'empirical'"):
        DiagonalCurvature.of(Pass(small.target, small.w, small.data, small.selection, "hessian"))


def test_a_saved_curvature_loads_unchanged(small: Any) -> None:
    curvature = DiagonalCurvature.of(Pass(small.target, small.w, small.data, small.selection))
    again = DiagonalCurvature.of_tensors(small.selection, curvature.tensors(), **curvature.to_json())
    assert torch.equal(again.diagonal(), curvature.diagonal())
