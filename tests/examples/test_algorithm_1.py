"""Twenty bare lines and one line give the same numbers."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("algorithm_1")


@pytest.fixture(scope="module")
def both(example: ModuleType):
    return example.both(example.rows())


def test_algorithm_1_takes_twenty_lines(example: ModuleType):
    assert example.lines_of_code(example.bare) == 20


def test_both_end_at_the_same_means_and_scales(both):
    (m, s, _), q = both
    torch.testing.assert_close(q.family.loc, m, rtol=0, atol=1e-10)
    torch.testing.assert_close(q.family.scale, s, rtol=0, atol=1e-10)


def test_the_loss_of_every_step_is_the_same(example: ModuleType, both):
    (_, _, losses), q = both
    assert len(losses) == example.STEPS
    torch.testing.assert_close(q.history["loss"], torch.tensor(losses, dtype=torch.float64), rtol=0, atol=1e-10)


def test_they_end_near_the_closest_factorised_gaussian(example: ModuleType, both):
    (m, s, _), _ = both
    best = example.rows().best_mean_field()
    assert ((m - best.loc).abs() < 0.5 * best.scale).all()
    assert ((s / best.scale).log().abs() < 0.25).all()  # single draws of ten rows leave this much


def test_the_script_prints_the_same_digits_twice_and_draws_the_losses(
    example: ModuleType,
    both,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "both", lambda problem: both)
    example.main(tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("m_", "s_"))]
    assert len(rows) == 6
    for _, bare, ours, _ in rows:
        assert float(bare) == pytest.approx(float(ours), abs=1e-10)
    assert 5_000 < (tmp_path / "algorithm_1.png").stat().st_size < 80_000
