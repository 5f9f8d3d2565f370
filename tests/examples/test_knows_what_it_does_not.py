"""Which method knows what it doesn't know: points do not, and what averages over weights does, in the gap."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import priory as pr
from priory.streams import stream


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


def test_a_point_is_as_sure_in_the_gap_as_among_the_data(example: ModuleType, fits):
    assert unsure(example, fits["MAP"], "gap") == 0
    assert fits["MAP"].predict(example.rows("gap", 5, 1)[0]).std.tolist() == pytest.approx([example.NOISE] * 5)


@pytest.mark.parametrize("name", ["anchored Ensemble", "Laplace", "NUTS"])
def test_what_averages_over_weights_is_less_sure_in_the_gap(example: ModuleType, fits, name):
    assert unsure(example, fits[name], "gap") > 1.5 * unsure(example, fits[name], "among")
    inside = example.scores(fits[name], "gap")[1]
    assert inside > example.scores(fits["MAP"], "gap")[1] + 0.1


def test_anchors_make_members_disagree_where_there_are_no_data(example: ModuleType, fits):
    plain, anchored = (unsure(example, fits[name], "gap") for name in ("Ensemble", "anchored Ensemble"))
    assert anchored > 1.5 * plain


def test_with_randomised_priors_a_linear_model_is_an_anchored_member(example: ModuleType):
    X, y = example.train()
    net, generator = nn.Linear(example.COLUMNS, 1, dtype=torch.float64), stream(3, "linear")
    frozen = example.from_prior(pr.Model(net, pr.Gaussian(example.NOISE), prior=0.5), generator)
    noisy = y + example.NOISE * torch.randn(len(y), generator=generator, dtype=y.dtype)
    model = pr.Model(example.RandomisedPrior(net, frozen), pr.Gaussian(example.NOISE), prior=0.5)
    found = pr.fit(model, (X, noisy), pr.MAP(learning_rate=0.1), steps=800, batch_size=160, progress=False).mean
    together = torch.cat([found["net.weight"][0] + frozen.weight[0], found["net.bias"] + frozen.bias])
    # where an anchored member is: |y + s e - f|^2 / (2 s^2) + |w - a|^2 / (2 0.5^2) is least
    design = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    anchor = torch.cat([frozen.weight[0], frozen.bias]).detach()
    precision = design.T @ design / example.NOISE**2 + 4 * torch.eye(5, dtype=X.dtype)
    expected = torch.linalg.solve(precision, design.T @ noisy / example.NOISE**2 + 4 * anchor)
    assert torch.allclose(together.detach(), expected, rtol=0, atol=1e-7)


def test_frozen_networks_have_the_priors_scale(example: ModuleType):
    model, generator = example.model_of(example.network()), stream(0, "frozen")
    drawn = [example.from_prior(model, generator) for _ in range(100)]
    first = torch.stack([net[0].weight for net in drawn]).detach()
    last = torch.stack([net[2].weight for net in drawn]).detach()
    # 8,000 and 2,000 numbers, at 5 standard errors of a standard deviation: a false alarm in a million seeds
    assert float(first.std()) == pytest.approx(1.0, rel=5 / (2 * 8000) ** 0.5)
    assert float(last.std()) == pytest.approx(0.5, rel=5 / (2 * 2000) ** 0.5)


def test_randomised_priors_are_a_mixture_whose_members_have_frozen_networks_of_their_own(example: ModuleType):
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
