"""The coin's Beta reaches the posterior, and its Gaussian the best that a Gaussian can do."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("coin")


@pytest.fixture(scope="module")
def beta(example: ModuleType):
    return example.as_beta()


@pytest.fixture(scope="module")
def gaussian(example: ModuleType):
    return example.as_gaussian()


def test_the_beta_is_the_posterior(example: ModuleType, beta):
    assert example.shapes(beta) == pytest.approx((22.0, 16.0), abs=1e-3)
    p = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
    exact = example.COIN.posterior.log_prob(p).exp()
    torch.testing.assert_close(example.density(beta, p), exact, rtol=0, atol=1e-4)


def test_its_bound_is_the_evidence(beta):
    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    exact = log_beta(22, 16) - log_beta(5, 3)
    assert exact == pytest.approx(-21.3972, abs=5e-5)
    assert beta.log_evidence.value == pytest.approx(exact, abs=1e-4)


def test_the_gaussian_in_the_logit_comes_close_from_below(example: ModuleType, gaussian):
    best = example.COIN.best_gaussian()
    assert 1e-4 < example.COIN.log_evidence - best.elbo < 1e-3
    loc, scale = gaussian.family.loc.item(), gaussian.family.scale.item()
    assert loc == pytest.approx(best.loc.item(), abs=0.005)  # a seventieth of the scale
    assert scale == pytest.approx(best.scale.item(), abs=0.005)
    bound = gaussian.elbo(samples=4000)
    assert bound.value == pytest.approx(best.elbo, abs=5 * bound.error + 1e-4)  # false alarm: 6e-7


def test_the_script_prints_both_and_draws_them(
    example: ModuleType,
    beta,
    gaussian,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "as_beta", lambda: beta)
    monkeypatch.setattr(example, "as_gaussian", lambda: gaussian)
    example.main(tmp_path)
    printed = capsys.readouterr().out
    assert "Beta(22.0000, 16.0000)" in printed
    assert printed.count("-21.3972") == 2
    assert 5_000 < (tmp_path / "coin.png").stat().st_size < 80_000
