"""Detached draws have a gradient of mean zero; the score function and the path have the right one."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy.integrate import quad

from priory.testing import assert_mean_close

DRAWS = 20_000


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("gradients")


@pytest.fixture(scope="module")
def theta(example: ModuleType) -> torch.Tensor:
    return torch.tensor(example.START, dtype=torch.float64)


@pytest.fixture(scope="module")
def right(example: ModuleType) -> torch.Tensor:
    return example.fitted()


def log_normal(z: float, loc: float, scale: float) -> float:
    return -0.5 * ((z - loc) / scale) ** 2 - math.log(scale) - 0.5 * math.log(2 * math.pi)


def kl_by_scipy(loc: float, scale: float) -> float:
    def integrand(z: float) -> float:
        log_q = log_normal(z, loc, scale)
        log_p = math.log(0.5 * math.exp(log_normal(z, -0.2, 0.4)) + 0.5 * math.exp(log_normal(z, 1.0, 0.5)))
        return math.exp(log_q) * (log_q - log_p)

    return quad(integrand, loc - 10 * scale, loc + 10 * scale, epsabs=1e-12, limit=200)[0]


def test_the_divergence_is_the_integral_and_its_gradient_the_slope_of_it(example: ModuleType, theta: torch.Tensor):
    loc, scale = example.START
    assert example.kl(theta).item() == pytest.approx(kl_by_scipy(loc, scale), abs=1e-8)
    h = 1e-4
    slopes = [
        (kl_by_scipy(loc + h, scale) - kl_by_scipy(loc - h, scale)) / (2 * h),
        (kl_by_scipy(loc, scale + h) - kl_by_scipy(loc, scale - h)) / (2 * h),
    ]
    assert example.exact_gradient(theta).tolist() == pytest.approx(slopes, abs=1e-5)


def test_the_gradient_of_detached_draws_is_zero_on_average(example: ModuleType, theta: torch.Tensor):
    found = example.gradients(example.detached, theta, DRAWS)
    assert_mean_close(found, 0.0)  # false alarm: 1e-6
    assert example.exact_gradient(theta).abs().min() > 2  # far from it


def test_the_gradient_of_a_detached_draw_is_the_score_of_q_and_does_not_depend_on_p(
    example: ModuleType, theta: torch.Tensor
):
    eps = torch.randn(7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(example.detached), (None, 0))(theta, eps)
    score = torch.stack([eps, eps.square() - 1], 1) / theta[1]
    torch.testing.assert_close(found, score, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["score function", "pathwise"])
def test_the_other_two_are_unbiased(example: ModuleType, theta: torch.Tensor, name: str):
    found = example.gradients(example.ESTIMATORS[name], theta, DRAWS)
    assert_mean_close(found, example.exact_gradient(theta))  # false alarm: 1e-6


def test_the_path_has_a_quarter_of_the_scores_noise(example: ModuleType, theta: torch.Tensor):
    score, path = (
        example.gradients(example.ESTIMATORS[n], theta, DRAWS).std(0) for n in ("score function", "pathwise")
    )
    assert (path < score / 3).all()


def test_the_fit_ends_at_the_lowest_divergence(example: ModuleType, right: torch.Tensor):
    best = example.best()
    assert example.exact_gradient(best).abs().max() < 1e-10
    assert example.kl(right[-1]).item() - example.kl(best).item() < 2e-3
    assert example.kl(right[0]).item() > 5


def test_detached_draws_learn_nothing(example: ModuleType, theta: torch.Tensor):
    path = example.descend(example.detached, 100)
    assert (path[:, 0] - theta[0]).abs().max() < 0.5  # p's nearer mode is at 1.3 from there
    learnt = example.descend(example.pathwise, 100)
    assert example.kl(learnt[-1]) < 0.2 < 3 < example.kl(path[-1])


def test_the_script_prints_the_table_and_draws_graphs_noise_and_frames(
    example: ModuleType,
    right: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "fitted", lambda: right)
    example.main(tmp_path)
    printed = capsys.readouterr().out
    assert all(name in printed for name in example.ESTIMATORS)
    for name in ("graph", "noise", "frames"):
        assert 5_000 < (tmp_path / f"gradients_{name}.png").stat().st_size < 80_000
