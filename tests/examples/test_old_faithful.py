"""The bound finds two kinds of eruptions, EM leaves a poor start, and lost waits are summed out."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from priory.testing import assert_mean_close


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("old_faithful")


@pytest.fixture(scope="module")
def rows(example: ModuleType):
    return example.made()


def test_the_rows_are_of_two_kinds(example: ModuleType):
    y, z = example.made(20_000)  # 7 comparisons at 5 standard errors: false alarms below 5e-6
    assert_mean_close((z == 0).double(), example.SHORT)
    for k in range(2):
        away = y[z == k] - torch.tensor(example.MEANS[k], dtype=torch.float64)
        for i in range(2):
            assert_mean_close(away[:, i], 0.0)
        assert_mean_close(away[:, 0] * away[:, 1], example.COVARIANCES[k][0][1])


def test_em_leaves_a_poor_start_and_comes_near_what_made_the_rows(example: ModuleType, rows):
    begun, ended = example.after(rows[0], 1), example.after(rows[0], 100)
    assert ended.log_evidence.value > begun.log_evidence.value + 100
    theta = example.ordered(ended.mean)
    means, spread = (torch.tensor(t, dtype=torch.float64) for t in (example.MEANS, example.COVARIANCES))
    error = spread.diagonal(dim1=1, dim2=2).sqrt() / (272 * 0.36) ** 0.5
    assert bool(((theta["means"] - means).abs() < 5 * error).all())  # false alarms below 3e-6


def test_with_missing_waits_em_keeps_the_weights_and_complete_rows_do_not(example: ModuleType, rows):
    y, z = rows
    holes = example.with_holes(y)
    lost = holes[:, 1].isnan()
    assert 0.3 < float(lost.double().mean()) < 0.55
    assert torch.equal(holes[:, 0], y[:, 0])
    short = float((z == 0).double().mean())
    share = lambda data: float(example.ordered(example.after(data, 100).mean)["weights"][0])  # noqa: E731
    assert share(holes) == pytest.approx(short, abs=0.01)
    assert share(holes[~lost]) < short - 0.15


def test_the_script_chooses_two_kinds_and_draws_them(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    example.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    bounds = [float(line.split()[-1]) for line in lines[:5]]
    assert bounds.index(max(bounds)) == 1
    assert 10_000 < (tmp_path / "old_faithful.png").stat().st_size < 80_000
