"""The benchmark chooses on held-out rows alone, counts what a row began with once, and has a row for every method."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import priory as pr


@pytest.fixture(scope="module")
def vision(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("vision")


@pytest.fixture
def lab(vision: ModuleType) -> Any:
    rows = vision.Rows(torch.zeros(40, 784), torch.arange(40) % 10)
    return vision.Lab(rows, rows.part(0, 10), epochs=1, seed=0)


def saying(vision: ModuleType, chance: float, **more: Any) -> Any:
    """A fit that gives the right label of the ten held-out rows this probability."""
    probs = torch.full((10, 10), (1 - chance) / 9).fill_diagonal_(chance)
    return vision.Fit(lambda x: SimpleNamespace(probs=probs), None, 1.0, **more)


def test_the_setting_with_the_lowest_nll_of_held_out_rows_is_kept(vision: ModuleType, lab: Any):
    chances = {"a": 0.5, "b": 0.9, "c": 0.2}
    chosen = lab.best("letter", chances, lambda letter: saying(vision, chances[letter]))
    assert chosen.option == "b"
    assert chosen.tried == "NLL of held-out images by letter: a: 0.6931, b: 0.1054, c: 1.6094"


def test_a_setting_that_diverges_is_left_out_with_a_message(vision: ModuleType, lab: Any):
    def run(rate: float) -> Any:
        if rate > 1:
            raise pr.DivergedError("too far")
        return saying(vision, 0.5)

    chosen = lab.best("rate", (2.0, 0.1), run)
    assert chosen.option == 0.1
    assert "2.0: diverged" in chosen.tried


def test_time_shared_by_several_parts_of_a_row_is_counted_once(vision: ModuleType, lab: Any):
    lab.fits["start"] = saying(vision, 0.5)
    lab.fits["one"] = saying(vision, 0.5, needs=("start",))
    lab.fits["two"] = saying(vision, 0.5, needs=("start",))
    lab.fits["both"] = saying(vision, 0.5, needs=("one", "two"))
    assert [lab.cost(name) for name in ("start", "one", "both")] == [1, 2, 4]


def test_scores_are_those_of_evaluate(vision: ModuleType):
    probs = torch.rand(50, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    labels = torch.arange(50) % 10
    right, nll, entropy = vision.Scores.of(probs, labels).means
    assert right == pytest.approx(pr.evaluate.accuracy(probs, labels), abs=1e-12)
    assert nll == pytest.approx(torch.nn.functional.nll_loss(probs.log(), labels).item(), abs=1e-12)
    assert entropy == pytest.approx(torch.distributions.Categorical(probs).entropy().mean().item(), abs=1e-12)


@pytest.mark.reference
@pytest.mark.slow
def test_every_method_has_a_row_and_the_picture_is_drawn(
    vision: ModuleType, shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = vision.main(["--data", str(shared_data), "--rows", "300", "--epochs", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert list(found) == list(vision.METHODS), printed
    assert all(0 <= row.entropy <= 1 and row.training > 0 for row in found.values())
    assert all(name in printed for name in vision.METHODS)
    assert (tmp_path / "vision.png").stat().st_size > 10_000
