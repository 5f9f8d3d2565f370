"""Bound and gap add up to the evidence at every step of the fit."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributions import Normal

from priory.testing import assert_mean_close


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("evidence_bars")


@pytest.fixture(scope="module")
def frames(example: ModuleType):
    return example.train(example.line())


def test_the_sum_of_bound_and_gap_is_the_evidence_at_every_step(example: ModuleType, frames):
    assert [frame.step for frame in frames] == list(range(1, 201))
    for frame in frames:
        assert frame.elbo + frame.kl == pytest.approx(example.line().log_evidence, abs=1e-8)
        assert frame.kl > 0


def test_training_moves_nats_from_the_gap_to_the_bound(frames):
    shown = [frames[step - 1].elbo for step in (1, 5, 10, 20, 40, 200)]
    assert shown == sorted(shown)
    assert shown[-1] - shown[0] > 10


def test_what_is_left_is_the_gap_of_the_best_factorised_gaussian(example: ModuleType, frames):
    line = example.line()
    assert frames[-1].kl == pytest.approx(line.log_evidence - line.best_mean_field().elbo, abs=0.01)
    best = line.best_mean_field()
    assert example.elbo(line, (best.loc, best.scale)) == pytest.approx(best.elbo, abs=1e-10)


def test_the_closed_bound_is_the_mean_of_log_joint_minus_log_q(example: ModuleType):
    line = example.line()
    m, s = (torch.tensor(v, dtype=torch.float64) for v in ((0.3, -0.2), (0.4, 0.7)))
    generator = torch.Generator().manual_seed(0)
    w = m + s * torch.randn(20_000, 2, generator=generator, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    likelihood = Normal(w @ line.design(line.X).T, line.noise).log_prob(line.y).sum(-1)
    each = likelihood + Normal(zero, line.prior_scale).log_prob(w).sum(-1) - Normal(m, s).log_prob(w).sum(-1)
    assert_mean_close(each, example.elbo(line, (m, s)))  # false alarm: 6e-7


def test_the_script_prints_the_table_and_draws_it(
    example: ModuleType,
    frames,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "train", lambda problem: frames)
    example.main(tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
    assert [int(row[0]) for row in rows] == list(example.FRAMES)
    assert len({row[3] for row in rows}) == 1
    assert 5_000 < (tmp_path / "evidence_bars.png").stat().st_size < 80_000
