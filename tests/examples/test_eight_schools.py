"""The two forms of eight schools have one posterior, and divergences tell them apart."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from priory.core.errors import PrioryWarning
from priory.diagnostics import mcse_mean, r_hat

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("eight_schools")


@pytest.fixture(scope="module")
def fits(example: ModuleType):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*diverged", PrioryWarning)
        return {form: example.fit(form) for form in ("centred", "non-centred")}


def test_the_two_forms_are_one_density_in_two_sets_of_coordinates(example: ModuleType):
    """p(z) = p(theta) |dtheta / dz| = p(theta) tau^8, at any place."""
    generator = torch.Generator().manual_seed(0)
    mu, tau, z = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((), (), (8,)))
    tau = tau.exp()
    told = example.centred({"mu": mu, "tau": tau, "theta": mu + tau * z})
    assert float(example.non_centred({"mu": mu, "tau": tau, "z": z})) == pytest.approx(float(told + 8 * tau.log()))


def test_only_the_centred_form_diverges_and_where_tau_is_small(example: ModuleType, fits):
    bad = example.diverged(fits["centred"])
    assert int(bad.sum()) > 5
    assert int(example.diverged(fits["non-centred"]).sum()) == 0
    log_tau = fits["centred"].draws["tau"].log()
    assert log_tau[bad].mean() < log_tau.mean() - 0.5


def test_the_non_centred_chains_agree_and_have_the_known_means(example: ModuleType, fits):
    """The reference has 4.41 for mu, 3.60 for tau and 6.15 for the first school; false alarms of the three: 2e-4."""
    draws = fits["non-centred"].draws
    for x, known in ((draws["mu"], 4.41), (draws["tau"], 3.60), (example.effects(fits["non-centred"])[..., 0], 6.15)):
        assert float(r_hat(x)) < 1.05  # 32 chains of 150 draws
        assert abs(float(x.mean()) - known) < 4 * float(mcse_mean(x)) + 0.05  # the reference's own error


def test_the_script_prints_both_and_draws_them(
    example: ModuleType,
    fits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "fit", fits.__getitem__)
    example.main(tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("% of the draws have tau below 0.5") == 2
    assert "draws diverged" in printed
    assert 5_000 < (tmp_path / "eight_schools.png").stat().st_size < 80_000
