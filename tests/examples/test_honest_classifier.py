"""Laplace makes a trained classifier less sure of what it has never seen, and keeps what it says of what it knows."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("honest_classifier")


@pytest.fixture(scope="module")
def problem(example: ModuleType):
    return example.digits()


@pytest.fixture(scope="module")
def net(example: ModuleType, problem):
    return example.trained(problem)


@pytest.fixture(scope="module")
def verdicts(example: ModuleType, problem, net):
    return example.verdicts(problem, net)


def test_no_out_of_distribution_digit_is_in_the_training_data(problem):
    assert problem.train[1].unique().tolist() == problem.test[1].unique().tolist() == [0, 1, 2, 3, 4]
    assert len(problem.train[0]) + len(problem.test[0]) + len(problem.outside) == 1797  # all of scikit-learn's


def test_the_trained_network_is_accurate_and_confident_even_on_unseen_digits(verdicts):
    plain = verdicts["as trained"]
    assert plain.accuracy > 0.97
    assert plain.inside.mean() > 0.95
    assert plain.outside.mean() > 0.7


def test_laplace_over_all_layers_lowers_confidence_outside_by_a_third_and_more_than_over_the_last(verdicts):
    plain, last, everything = (verdict.outside.mean() for verdict in verdicts.values())
    assert everything < 2 / 3 * plain
    assert everything < last < plain


def test_laplace_keeps_the_accuracy_and_detects_unseen_digits_as_well(verdicts):
    plain = verdicts["as trained"]
    for name in ("Laplace, last layer", "Laplace, all layers"):
        assert verdicts[name].accuracy > plain.accuracy - 0.01
        assert verdicts[name].auroc > plain.auroc - 0.01
        assert verdicts[name].inside.mean() > verdicts[name].outside.mean() + 0.2


@pytest.mark.usefixtures("verdicts")
def test_the_network_is_left_as_it_was_trained(example: ModuleType, problem, net):
    for own, again in zip(net.parameters(), example.trained(problem).parameters(), strict=True):
        assert torch.equal(own, again)


def test_auroc_counts_ties_as_half(example: ModuleType):
    verdict = example.Verdict(1.0, 0.0, torch.tensor([0.9, 0.5]), torch.tensor([0.5, 0.4, 0.95]))
    assert verdict.auroc == pytest.approx((2 + 1.5) / 6)


def test_the_script_prints_every_row_and_draws_the_picture(
    example: ModuleType,
    verdicts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "trained", lambda _: None)
    monkeypatch.setattr(example, "verdicts", lambda *_: verdicts)
    example.main(tmp_path)
    printed = capsys.readouterr().out
    assert all(name in printed for name in verdicts)
    assert 5_000 < (tmp_path / "honest_classifier.png").stat().st_size < 80_000
