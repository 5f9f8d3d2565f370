"""FullRank is the posterior; MeanField has its mean and the variances of a weight given the others."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

# the lecture's covariate has a mean of 3.5 standard deviations, and its prior is for raw weights
pytestmark = pytest.mark.filterwarnings("ignore:The inputs have mean 1.6")


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("linear_regression")


@pytest.fixture(scope="module")
def mean(example: ModuleType):
    return example.mean_field(example.line())


@pytest.fixture(scope="module")
def full(example: ModuleType):
    return example.full_rank(example.line())


def test_full_rank_is_the_exact_posterior(example: ModuleType, full):
    exact = example.line().posterior
    torch.testing.assert_close(full[0], exact.loc, rtol=0, atol=1e-8)
    torch.testing.assert_close(full[1], exact.covariance_matrix, rtol=0, atol=1e-8)


def test_mean_field_has_the_variances_of_a_weight_when_the_other_is_known(example: ModuleType, mean):
    line = example.line()
    scale = mean[1].diagonal().sqrt()
    assert ((mean[0] - line.posterior.loc).abs() < 0.05 * scale).all()
    torch.testing.assert_close(scale, line.precision.diagonal().rsqrt(), rtol=0.05, atol=0)


def test_mean_field_is_overconfident_of_each_weight_and_away_from_the_data(example: ModuleType, mean):
    exact = example.line().posterior.covariance_matrix
    assert (mean[1].diagonal().sqrt() < exact.diagonal().sqrt() / 3).all()  # the correlation is -0.957
    x = torch.tensor([-1.0, 1.6, 4.0], dtype=torch.float64)
    ratio = example.spread(mean[1], x) / example.spread(exact, x)
    assert ratio[0] < 0.3
    assert 1 < ratio[1] < 1.5  # among the data it is a little less sure than it could be
    assert ratio[2] < 0.6


def test_the_spread_of_the_line_is_that_of_the_exact_predictive(example: ModuleType):
    line = example.line()
    x = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64)
    exact = line.predictive(x[:, None]).variance - line.noise**2
    found = example.spread(line.posterior.covariance_matrix, x).square()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_the_gap_is_that_of_the_docstring(example: ModuleType):
    line = example.line()
    gap = 0.5 * (line.precision.diagonal().log().sum() - torch.logdet(line.precision)).item()
    assert line.log_evidence - line.best_mean_field().elbo == pytest.approx(gap, abs=1e-10)
    assert gap == pytest.approx(1.2332, abs=1e-3)


def test_the_script_prints_the_moments_and_draws_them(
    example: ModuleType,
    mean,
    full,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "mean_field", lambda problem: mean)
    monkeypatch.setattr(example, "full_rank", lambda problem: full)
    example.main(tmp_path)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["FullRank"] == rows["exact"]
    assert rows["MeanField"][-1] == "0.0000"
    assert 5_000 < (tmp_path / "linear_regression.png").stat().st_size < 80_000
