"""NUTS on a small network agrees with itself about predictions, and shows what VI and Laplace miss."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("ground_truth")


@pytest.fixture(scope="module")
def truth(example: ModuleType):
    return example.by_nuts(chains=32, draws=60, warmup=60)


@pytest.fixture(scope="module")
def vi(example: ModuleType):
    return example.by_vi(1500)


@pytest.fixture(scope="module")
def laplace(example: ModuleType):
    return example.by_laplace(1500)


def test_chains_agree_about_predictions_and_not_about_weights(example: ModuleType, truth):
    functions = truth.function_space(example.along(9))
    assert (
        functions["r_hat"].max() < 1.05
    )  # 60 draws per chain; the script has 120, twice as many chains, and reaches 1.01
    assert functions["ess_bulk"].min() > 200
    assert truth.summary()["r_hat"].max() > 1.1


def test_vi_is_overconfident_outside_the_data_and_laplace_underconfident(example: ModuleType, truth, vi, laplace):
    """The ratios are 0.35 and 1.8, and each band's width is known to some percent."""
    assert example.distance(vi, truth, *example.PLACES["outside"]).width < 0.6
    assert example.distance(laplace, truth, *example.PLACES["outside"]).width > 1.3


def test_all_three_agree_where_the_data_are(example: ModuleType, truth, vi, laplace):
    for other in (vi, laplace):
        assert example.distance(other, truth, *example.PLACES["among the data"]).mean < 0.3


def test_the_distance_of_a_posterior_from_itself_is_zero(example: ModuleType, truth):
    found = example.distance(truth, truth, -1.0, 1.0, samples=100)
    assert found == example.Distance(0.0, 1.0)


def test_a_distance_is_counted_in_the_true_standard_deviations(example: ModuleType, truth):
    class Shifted:
        def predict(self, x: torch.Tensor, samples: int):
            true = truth.predict(x, samples=samples)
            return type("Off", (), {"mean": true.mean + 0.5 * true.std, "epistemic": 4 * true.epistemic})

    found = example.distance(Shifted(), truth, -1.0, 1.0, samples=100)
    assert (found.mean, found.width) == (pytest.approx(0.5), pytest.approx(2.0))


def test_the_script_prints_the_distances_and_draws_the_bands(
    example: ModuleType,
    truth,
    vi,
    laplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name, posterior in (("by_nuts", truth), ("by_vi", vi), ("by_laplace", laplace)):
        monkeypatch.setattr(example, name, lambda posterior=posterior: posterior)
    example.main(tmp_path)
    assert "of a prediction" in capsys.readouterr().out
    assert 5_000 < (tmp_path / "ground_truth.png").stat().st_size < 80_000
