"""One direction of the divergence seeks a mode, the other covers the mass."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy.integrate import quad
from torch.distributions import MultivariateNormal, Normal, kl_divergence


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("kl_directions")


def normal(loc: float, scale: float) -> Normal:
    return Normal(*torch.tensor([loc, scale], dtype=torch.float64))


def test_both_divergences_are_the_integrals(example: ModuleType):
    p, q = example.target(), normal(0.5, 1.7)

    def log_ratio(x: float) -> tuple[float, float]:
        at = torch.tensor(x, dtype=torch.float64)
        return q.log_prob(at).item(), p.log_prob(at).item()

    def of_q(x: float) -> float:
        log_q, log_p = log_ratio(x)
        return torch.tensor(log_q).double().exp().item() * (log_q - log_p)

    def of_p(x: float) -> float:
        log_q, log_p = log_ratio(x)
        return torch.tensor(log_p).double().exp().item() * (log_p - log_q)

    assert example.kl_q_p(q).item() == pytest.approx(quad(of_q, -17, 17, limit=200)[0], abs=1e-6)
    assert example.kl_p_q(q).item() == pytest.approx(quad(of_p, -12, 12, limit=200)[0], abs=1e-6)


def test_the_covering_gaussian_has_the_targets_mean_and_variance_and_no_slope(example: ModuleType):
    cover = example.mass_covering()
    assert cover.loc.item() == pytest.approx(0.6 * -2.5 + 0.4 * 2.5, abs=1e-12)
    variance = 0.6 * (0.36 + 2.5**2) + 0.4 * (0.64 + 2.5**2) - 0.5**2
    assert cover.variance.item() == pytest.approx(variance, abs=1e-12)
    theta = torch.stack([cover.loc, cover.scale])
    slope = torch.func.grad(lambda t: example.kl_p_q(Normal(t[0], t[1], validate_args=False)))(theta)
    assert slope.abs().max() < 1e-10


@pytest.mark.parametrize(("start", "mean", "scale", "weight"), [(-3.0, -2.5, 0.6, 0.6), (3.0, 2.5, 0.8, 0.4)])
def test_the_seeking_gaussian_is_close_to_one_component(
    example: ModuleType, start: float, mean: float, scale: float, weight: float
):
    q = example.mode_seeking(start)
    theta = torch.stack([q.loc, q.scale])
    slope = torch.func.grad(lambda t: example.kl_q_p(Normal(t[0], t[1], validate_args=False)))(theta)
    assert slope.abs().max() < 1e-6
    assert (q.loc.item(), q.scale.item()) == pytest.approx((mean, scale), abs=0.01)
    # where one component is all that q sees, log p is its log density plus log weight
    assert example.kl_q_p(q).item() == pytest.approx(-torch.tensor(weight).log().item(), abs=0.01)


def test_each_is_best_in_its_own_direction(example: ModuleType):
    seek, cover = example.mode_seeking(-3.0), example.mass_covering()
    assert example.kl_q_p(seek) < example.kl_q_p(cover) - 1
    assert example.kl_p_q(cover) < example.kl_p_q(seek) - 10


@pytest.mark.parametrize("start", [-3.0, 3.0])
def test_mean_field_seeks_a_mode(example: ModuleType, start: float):
    found, exact = example.fitted(start), example.mode_seeking(start)
    assert found.loc.item() == pytest.approx(exact.loc.item(), abs=0.03)
    assert found.scale.item() == pytest.approx(exact.scale.item(), abs=0.03)


def test_a_factorised_gaussian_is_narrow_in_one_direction_and_wide_in_the_other(example: ModuleType):
    seek, cover = example.factorised(example.COVARIANCE)
    assert seek.tolist() == pytest.approx([(1 - 0.85**2) ** 0.5] * 2, abs=1e-12)
    assert cover.tolist() == pytest.approx([1.0, 1.0], abs=1e-12)
    p = MultivariateNormal(torch.zeros(2, dtype=torch.float64), example.COVARIANCE)

    def q(scale: torch.Tensor) -> MultivariateNormal:
        return MultivariateNormal(torch.zeros_like(scale), scale_tril=scale.diag(), validate_args=False)

    assert torch.func.grad(lambda s: kl_divergence(q(s), p))(seek).abs().max() < 1e-10
    assert torch.func.grad(lambda s: kl_divergence(p, q(s)))(cover).abs().max() < 1e-10


def test_the_script_prints_both_divergences_and_draws_them(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(example, "fitted", lambda start: normal(start, 1.0))
    example.main(tmp_path)
    assert "covers                -0.5000   2.5440     1.7728     0.6570" in capsys.readouterr().out
    assert 5_000 < (tmp_path / "kl_directions.png").stat().st_size < 80_000
