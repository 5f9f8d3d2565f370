"""The sigma term is the divergence's, lowest at the prior's scale, and pulls q there."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributions import Normal

import priory as pr


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("sigma_term")


@pytest.fixture(scope="module")
def runs(example: ModuleType) -> dict[float, torch.Tensor]:
    return {initial: example.train(initial) for initial in (0.1, 1.0, 4.0)}


@pytest.mark.parametrize("precision", [0.25, 1.0, 4.0, 16.0])
def test_the_term_is_the_divergence_at_mean_zero_up_to_its_constant(example: ModuleType, precision: float):
    scale = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    exact = pr.kl(Normal(zero, scale), Normal(zero, zero + precision**-0.5)).value
    found = example.term(scale, precision) - 0.5 * (1 + math.log(precision))
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", [0.25, 1.0, 4.0, 16.0])
def test_it_is_lowest_at_the_priors_scale(example: ModuleType, precision: float):
    where, value = example.lowest(precision)
    assert where == pytest.approx(1 / math.sqrt(precision), abs=1e-12)
    assert value == pytest.approx(0.5 + 0.5 * math.log(precision), abs=1e-12)
    scale = torch.tensor(where, dtype=torch.float64)
    slope, bend = torch.func.grad(example.term), torch.func.grad(torch.func.grad(example.term))
    assert abs(slope(scale, precision).item()) < 1e-12
    assert bend(scale, precision).item() == pytest.approx(2 * precision, abs=1e-10)  # lambda + 1 / s^2


@pytest.mark.parametrize("initial", [0.1, 1.0, 4.0])
def test_a_weight_that_the_data_do_not_see_gets_the_priors_scale(
    example: ModuleType, runs: dict[float, torch.Tensor], initial: float
):
    assert runs[initial][-1, 1].item() == pytest.approx(example.PRIOR_SCALE, abs=2e-3)


def test_a_weight_that_they_see_gets_the_posteriors_scale(example: ModuleType, runs: dict[float, torch.Tensor]):
    X, _ = example.data()
    exact = (4 + X[:, 0].square().sum().item()) ** -0.5
    assert example.exact_scales().tolist() == pytest.approx([exact, 0.5], abs=1e-12)
    for run in runs.values():
        assert run[-1, 0].item() == pytest.approx(exact, rel=0.05)


def test_the_script_prints_the_minima_and_draws_them(
    example: ModuleType,
    runs: dict[float, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "train", runs.__getitem__)
    example.main(tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:5]]
    assert [row[1] for row in rows] == [row[2] for row in rows] == ["2.0000", "1.0000", "0.5000", "0.2500"]
    assert 5_000 < (tmp_path / "sigma_term.png").stat().st_size < 80_000
