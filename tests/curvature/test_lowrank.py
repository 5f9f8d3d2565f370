"""The low-rank curvature against the dense one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.curvature import Full, LowRankCurvature, Pass, select
from priory.curvature.base import Kind
from priory.curvature.layer_jacobians import jacobian_rows
from priory.fitting.prepare import make_target
from priory.likelihoods import Categorical, Gaussian
from priory.testing import assert_covariance_close, assert_mean_close


def numbers(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(n: int = 6, dtype: torch.dtype = torch.float64):
    """Return a problem whose curvature has rank 2 n at most, over 50 coordinates."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)).to(dtype)
    model = pr.Model(net, Categorical(), prior=1.0)
    data = Data.of((3 * numbers(n, 3).to(dtype), torch.arange(n) % 3)).prepared(model.prepare)
    return make_target(model, data), data, model.network.initial


def test_a_sufficient_rank_gives_the_dense_curvature() -> None:
    target, data, w = problem()
    selection = select(target.model)
    full = Full.of(Pass(target, w, data, selection)).dense()
    found = LowRankCurvature.of(Pass(target, w, data, selection), rank=20)
    assert found.values.shape == (12,)  # two directions per row with three classes
    torch.testing.assert_close(found.dense(), full, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.diagonal(), full.diagonal(), rtol=1e-8, atol=1e-10)
    unit = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(found.vectors.mT @ found.vectors, unit, rtol=0, atol=1e-12)


def test_a_lower_rank_keeps_the_largest_eigenvalues_from_below() -> None:
    target, data, w = problem(n=12)
    selection = select(target.model)
    exact = torch.linalg.eigvalsh(Full.of(Pass(target, w, data, selection)).dense()).flip(0)[:4]
    found = LowRankCurvature.of(Pass(target, w, data, selection), rank=4, iterations=8)
    torch.testing.assert_close(found.values, exact, rtol=1e-6, atol=0)
    once = LowRankCurvature.of(Pass(target, w, data, selection), rank=4, iterations=1)
    assert (once.values <= exact * (1 + 1e-10)).all()  # Ritz values are lower bounds
    assert (found.values >= once.values).all()


def test_the_diagonal_remainder_makes_the_diagonal_exact() -> None:
    target, data, w = problem(n=12)
    selection = select(target.model)
    full = Full.of(Pass(target, w, data, selection))
    found = LowRankCurvature.of(Pass(target, w, data, selection), rank=4, iterations=8, rest=True)
    torch.testing.assert_close(found.diagonal(), full.diagonal(), rtol=1e-8, atol=1e-10)
    assert (found.rest >= 0).all()
    precision = torch.ones(selection.size, dtype=torch.float64)
    wide = LowRankCurvature.of(Pass(target, w, data, selection), rank=4, iterations=8).gaussian(precision).variance()
    assert (wide >= found.gaussian(precision).variance() - 1e-12).all()
    assert (wide >= full.gaussian(precision).variance() - 1e-8).all()


def test_a_sampled_fisher_has_the_same_labels_in_every_pass() -> None:
    target, data, w = problem()
    selection = select(target.model)
    found = LowRankCurvature.of(
        Pass(target, w, data, selection, "fisher", 2, torch.Generator().manual_seed(3)), rank=20
    )
    same = Full.of(Pass(target, w, data, selection, "fisher", 2, torch.Generator().manual_seed(3)))
    torch.testing.assert_close(found.dense(), same.dense(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["ggn", "empirical", "hessian"])
def test_a_rank_equal_to_the_size_gives_the_full_matrix(kind: Kind, dtype: torch.dtype) -> None:
    target, data, w = problem(dtype=dtype)
    selection = select(target.model)
    found = LowRankCurvature.of(Pass(target, w, data, selection, kind), rank=50)
    full = Full.of(Pass(target, w, data, selection, kind))
    torch.testing.assert_close(found.dense(), full.dense(), rtol=1e-8, atol=1e-10)
    precision = torch.full((50,), 30.0, dtype=dtype)  # more than minus the lowest eigenvalue of the Hessian
    v, this, that = numbers(3, 50), found.gaussian(precision), full.gaussian(precision)
    torch.testing.assert_close(this.solve(v), that.solve(v), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(this.log_det, that.log_det, rtol=1e-10, atol=0)
    assert found.notes() == []


def test_negative_eigenvalues_of_the_hessian_count_by_their_magnitude() -> None:
    target, data, w = problem()
    selection = select(target.model)
    values, vectors = torch.linalg.eigh(Full.of(Pass(target, w, data, selection, kind="hessian")).dense())
    order = values.abs().argsort(descending=True)[:45]
    assert values[order][:8].min() < -0.1
    found = LowRankCurvature.of(
        Pass(target, w, data, selection, kind="hessian"), rank=45
    )  # with ten more directions it is exact
    matrix = (vectors[:, order] * values[order]) @ vectors[:, order].mT
    torch.testing.assert_close(found.dense(), matrix, rtol=1e-7, atol=1e-9)
    precision, v = 30.0 + numbers(50, seed=2).square(), numbers(3, 50)
    gaussian, matrix = found.gaussian(precision), matrix + torch.diag(precision)
    torch.testing.assert_close(gaussian.solve(v), v @ torch.linalg.inv(matrix), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(gaussian.log_det, torch.logdet(matrix), rtol=1e-10, atol=0)


def test_an_indefinite_hessian_is_refused_with_the_smallest_eigenvalue() -> None:
    target, data, w = problem()
    selection = select(target.model)
    precision = 0.05 + 0.02 * numbers(50, seed=2).square()
    matrix = Full.of(Pass(target, w, data, selection, kind="hessian")).dense() + torch.diag(precision)
    low = float(torch.linalg.eigvalsh(matrix)[0])
    assert low < 0
    message = f"The curvature of kind 'hessian' plus .*got a smallest eigenvalue of {low:.3g}: w is not a mode"
    for rank in (45, 50):
        with pytest.raises(InputError, match=message):
            LowRankCurvature.of(Pass(target, w, data, selection, kind="hessian"), rank=rank).gaussian(precision)


def test_a_lower_rank_reports_the_omitted_fraction_of_the_trace() -> None:
    target, data, w = problem(n=30)
    selection = select(target.model)
    values = torch.linalg.eigvalsh(Full.of(Pass(target, w, data, selection)).dense()).flip(0)
    found = LowRankCurvature.of(Pass(target, w, data, selection), rank=41)  # with ten more directions it is exact
    share = float(values[41:].sum() / values.sum())
    assert found.share == pytest.approx(share, rel=1e-8)
    assert found.notes() == [f"rank 41 leaves out about {100 * share:.2g} % of the curvature's trace."]


def test_the_omitted_fraction_is_estimated_by_random_directions() -> None:
    target, data, w = problem(n=30)
    selection = select(target.model)
    values = torch.linalg.eigvalsh(Full.of(Pass(target, w, data, selection)).dense()).flip(0)
    found = LowRankCurvature.of(Pass(target, w, data, selection), rank=3)
    outside, trace = values[13:], values.sum()
    error = float((2 * outside.square().sum() / 10).sqrt() / trace)  # ten Gaussian probes
    assert found.share == pytest.approx(float(values[3:].sum() / trace), abs=4 * error + 1e-3)  # false alarm 1e-4
    assert error < 0.2 * found.share


@pytest.mark.parametrize("rest", [False, True])
def test_the_precision_of_the_gaussian_is_scale_times_h_plus_the_prior_precision(rest: bool) -> None:
    target, data, w = problem(n=12)
    curvature = LowRankCurvature.of(Pass(target, w, data, select(target.model)), rank=5, rest=rest)
    precision = 0.5 + numbers(curvature.selection.size, seed=2).square()
    gaussian = curvature.gaussian(precision, scale=0.25)
    matrix = 0.25 * curvature.dense() + torch.diag(precision)
    inverse, p = torch.linalg.inv(matrix), len(precision)
    torch.testing.assert_close(gaussian.log_det, torch.logdet(matrix), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gaussian.variance(), inverse.diagonal(), rtol=1e-9, atol=0)
    v = numbers(2, 3, p)
    torch.testing.assert_close(gaussian.solve(v), v @ inverse, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gaussian.quadratic(v), torch.einsum("abp,pq,abq->ab", v, matrix, v), rtol=1e-9, atol=0)
    assert data.tensors is not None
    (part,) = jacobian_rows(target, w, data.tensors[:-1], curvature.selection)
    jacobian = part.dense()
    assert jacobian.shape == (12, 3, p)
    found = gaussian.output_covariance(part)
    torch.testing.assert_close(found, jacobian @ inverse @ jacobian.mT, rtol=1e-9, atol=1e-10)


def test_draws_have_the_covariance_of_the_gaussian() -> None:
    torch.manual_seed(0)
    model = pr.Model(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double(), Gaussian(0.2), prior=1.0)
    data = Data.of((numbers(5, 2), numbers(5))).prepared(model.prepare)
    target = make_target(model, data)
    curvature = LowRankCurvature.of(Pass(target, model.network.initial, data, select(model)), rank=3)
    precision = 0.5 + numbers(9, seed=2).square()
    draws = curvature.gaussian(precision).draw(20_000, torch.Generator().manual_seed(9))
    inverse = torch.linalg.inv(curvature.dense() + torch.diag(precision))
    assert_mean_close(draws, torch.zeros(9).double(), sigmas=5)  # 9 means: false alarm below 1e-5
    assert_covariance_close(draws, inverse, sigmas=6)  # 45 entries: false alarm below 1e-6


def test_draws_are_a_root_of_the_covariance_times_noise() -> None:
    """Noise e gives the draw R e with R R' = Q^-1."""
    target, data, w = problem()
    curvature = LowRankCurvature.of(Pass(target, w, data, select(target.model)), rank=20)
    p = curvature.selection.size
    precision = 0.5 + numbers(p, seed=2).square()
    gaussian = curvature.gaussian(precision)
    draws = gaussian.draw(p, torch.Generator().manual_seed(4))
    noise = torch.randn(p, p, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    root = torch.linalg.solve(noise, draws).mT
    inverse = torch.linalg.inv(curvature.dense() + torch.diag(precision))
    torch.testing.assert_close(root @ root.mT, inverse, rtol=1e-7, atol=1e-9)


def test_large_and_small_eigenvalues_stay_accurate_in_float32() -> None:
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(4, 1, bias=False), Gaussian(1e-3), prior=1.0)
    x = torch.randn(20, 4)
    data = Data.of((x, torch.randn(20))).prepared(model.prepare)
    target = make_target(model, data)
    curvature = LowRankCurvature.of(Pass(target, model.network.initial, data, select(model)))
    variance = curvature.gaussian(torch.ones(4)).variance()
    exact = torch.linalg.inv(1e6 * x.double().mT @ x.double() + torch.eye(4, dtype=torch.float64)).diagonal()
    assert variance.dtype == torch.float32
    torch.testing.assert_close(variance.double(), exact, rtol=0.05, atol=0)


def test_a_saved_curvature_loads_unchanged() -> None:
    target, data, w = problem()
    curvature = LowRankCurvature.of(Pass(target, w, data, select(target.model), kind="hessian"), rank=5)
    again = LowRankCurvature.of_tensors(curvature.selection, curvature.tensors(), **curvature.to_json())
    precision = torch.full((curvature.selection.size,), 30.0, dtype=torch.float64)
    assert torch.equal(again.gaussian(precision).variance(), curvature.gaussian(precision).variance())
    assert again.notes() == curvature.notes() != []


def test_a_prior_of_zero_precision_is_refused() -> None:
    target, data, w = problem()
    curvature = LowRankCurvature.of(Pass(target, w, data, select(target.model)), rank=20)
    precision = torch.ones(curvature.selection.size, dtype=torch.float64)
    precision[:2] = 0
    message = "structure='lowrank', which has curvature in 12 of 50 directions only, got zero at 2 coordinates"
    with pytest.raises(InputError, match=message):
        curvature.gaussian(precision)


def test_weights_that_are_not_finite_are_refused() -> None:
    target, data, w = problem()
    with pytest.raises(
        InputError,
        match=r"'curvature' argument of Laplace must be finite at the weights, got "
        r"NaN or infinity",
    ):
        LowRankCurvature.of(Pass(target, torch.full_like(w, torch.nan), data, select(target.model)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "The 'rank' argument of LowRank must be an integer >= 1, got 0"),
        ({"iterations": 1.5}, "The 'iterations' argument of LowRank must be an integer >= 1, got 1.5"),
        ({"rest": True, "kind": "hessian"}, "The 'rest' argument of LowRank must be False for the Hessian"),
        ({"kind": "newton"}, "The 'curvature' argument of Laplace must be among"),
    ],
)
def test_invalid_options_are_refused(options, message: str) -> None:
    target, data, w = problem()
    with pytest.raises(InputError, match=message):
        LowRankCurvature.of(Pass(target, w, data, kind=options.pop("kind", "ggn")), **options)
