"""Of three penalties one is a divergence, one lacks its entropy, one is cold; each has its verdict and its picture."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributions import Normal

import priory as pr


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("penalties_and_priors")


@pytest.fixture(scope="module")
def found(example: ModuleType) -> dict[str, pr.Equivalence]:
    return example.priors()


def test_each_penalty_has_its_verdict(example: ModuleType, found: dict[str, pr.Equivalence]):
    kinds = {name: one.certificate.kind for name, one in found.items()}
    assert list(kinds.values()) == ["valid", "entropy missing", "tempered"]
    forgotten = found["the entropy forgotten"].certificate
    assert forgotten.missing_entropy == pytest.approx(1, abs=1e-6)
    assert found["a cold divergence"].certificate.temperature == pytest.approx(example.COLD, abs=1e-6)


def test_all_three_penalties_relate_to_the_standard_normal(found: dict[str, pr.Equivalence]):
    w = torch.linspace(-3, 3, 13, dtype=torch.float64)
    for one in found.values():
        torch.testing.assert_close(one.log_prior(w), Normal(0.0, 1.0).log_prob(w), rtol=0, atol=1e-6)


def test_the_script_prints_the_verdicts_and_draws_three_pictures(
    example: ModuleType,
    found: dict[str, pr.Equivalence],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "priors", lambda: found)
    example.main(tmp_path)
    printed = capsys.readouterr().out
    assert all(one.certificate.verdict in printed for one in found.values())
    pictures = sorted(tmp_path.glob("penalty_*.png"))
    assert len(pictures) == 3
    assert all(5_000 < picture.stat().st_size < 80_000 for picture in pictures)
