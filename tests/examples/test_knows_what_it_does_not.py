"""Which method knows what it doesn't know: points do not, and what averages over weights does, in the gap."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("knows_what_it_does_not")


@pytest.fixture(scope="module")
def fits(example: ModuleType):
    return example.fits(example.Effort(steps=500, draws=15, chains=4, members=4))


def unsure(example: ModuleType, posterior, kind: str) -> float:
    """The mean variance of rows of a kind that more data would remove."""
    return float(posterior.predict(example.rows(kind, 100, 1)[0], samples=100).epistemic.mean())


def test_no_row_of_the_fit_lies_in_the_gap_or_beyond(example: ModuleType):
    X, y = example.train()
    assert float(X[:, 0].abs().min()) > 0.7
    assert float(X[:, 0].abs().max()) < 2.0
    # the noise around the truth, at 4.5 standard errors of a standard deviation: a false alarm in 100,000 seeds
    assert float((y - example.truth(X)).std()) == pytest.approx(example.NOISE, rel=4.5 / (2 * 160) ** 0.5)


def test_a_point_estimate_is_as_confident_in_the_gap_as_among_the_data(example: ModuleType, fits):
    assert unsure(example, fits["MAP"], "gap") == 0
    assert fits["MAP"].predict(example.rows("gap", 5, 1)[0]).std.tolist() == pytest.approx([example.NOISE] * 5)


@pytest.mark.parametrize("name", ["anchored Ensemble", "Laplace", "NUTS"])
def test_methods_that_average_over_weights_are_less_confident_in_the_gap(example: ModuleType, fits, name):
    assert unsure(example, fits[name], "gap") > 1.5 * unsure(example, fits[name], "among")
    inside = example.scores(fits[name], "gap")[1]
    assert inside > example.scores(fits["MAP"], "gap")[1] + 0.1


def test_anchors_make_members_disagree_where_there_are_no_data(example: ModuleType, fits):
    plain, anchored = (unsure(example, fits[name], "gap") for name in ("Ensemble", "anchored Ensemble"))
    assert anchored > 1.5 * plain


def test_randomised_priors_are_a_mixture_whose_members_have_their_own_functions(example: ModuleType):
    mixture = example.randomised(example.train(), members=2, steps=20)
    first, second = (member.predict(torch.zeros(1, 4, dtype=torch.float64)).mean for member in mixture.members)
    assert float(first) != float(second)


def test_the_table_and_the_picture_have_every_method(
    example: ModuleType,
    fits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "fits", lambda effort: fits)
    monkeypatch.setattr(example, "randomised", lambda data, members, steps: fits["Ensemble"])
    example.main(tmp_path)
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in (*fits, "randomised priors", "stack of the nine"))
    assert 5_000 < (tmp_path / "knows_what_it_does_not.png").stat().st_size < 150_000
