"""The network's band is right among the data and wider outside."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("network_band")


@pytest.fixture(scope="module")
def posterior(example: ModuleType):
    return example.fit()


def test_nine_in_ten_fresh_rows_lie_inside_the_ninety_percent_interval(example: ModuleType, posterior):
    x, y = example.rows(1000, "fresh")
    found = example.inside(posterior.predict(x, samples=200), y)
    assert found == pytest.approx(0.9, abs=0.04)  # sixty rows can't make it exact; chance alone moves it by 0.009


def test_the_mean_is_closer_to_the_truth_than_the_noise_is_wide(example: ModuleType, posterior):
    x, _ = example.rows(1000, "fresh")
    error = posterior.predict(x, samples=200).mean - example.truth(x[:, 0])
    assert error.square().mean().sqrt() < 0.6 * example.NOISE


def test_epistemic_uncertainty_grows_away_from_the_data(posterior):
    among, near, far = posterior.predict(torch.tensor([[1.3], [3.0], [4.0]]), samples=1000).epistemic.sqrt()
    assert among < 0.15
    assert near > 2 * among
    assert far > 1.5 * near


def test_the_noise_is_the_rest_of_the_band(example: ModuleType, posterior):
    prediction = posterior.predict(torch.linspace(-3, 3, 7)[:, None], samples=200)
    assert prediction.aleatoric.tolist() == pytest.approx([example.NOISE**2] * 7, rel=1e-5)
    torch.testing.assert_close(prediction.variance, prediction.epistemic + prediction.aleatoric)


def test_single_networks_have_the_mean_and_variance_of_the_prediction(example: ModuleType, posterior):
    x = torch.tensor([[-2.5], [0.0], [1.3]])
    curves, prediction = example.curves(posterior, x, 4000), posterior.predict(x, samples=2000)
    error = (2 * prediction.epistemic / 4000).sqrt()
    assert ((curves.mean(0) - prediction.mean).abs() < 5 * error).all()  # false alarm: 2e-6
    torch.testing.assert_close(curves.var(0), prediction.epistemic, rtol=0.25, atol=0)
    curves, prediction = example.curves(posterior, x, 40_000), posterior.predict(x, samples=40_000)
    # a variance's standard error is sqrt(2 / 40,000) of it for a Gaussian, and there are two; 5 of them
    torch.testing.assert_close(curves.var(0), prediction.epistemic, rtol=0.05, atol=0)
    draws = posterior.sample(5, seed=1)
    for i, curve in enumerate(example.curves(posterior, x, 5)):
        net = nn.Sequential(nn.Linear(1, 30), nn.ReLU(), nn.Linear(30, 1))
        net.load_state_dict({name: draw[i] for name, draw in draws.items()})
        torch.testing.assert_close(curve, net(x)[:, 0].detach(), rtol=1e-5, atol=1e-5)


def test_the_script_prints_the_widths_and_draws_the_band(
    example: ModuleType,
    posterior,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(example, "fit", lambda: posterior)
    example.main(tmp_path)
    assert "fresh rows lie inside the 90 % interval" in capsys.readouterr().out
    assert 5_000 < (tmp_path / "network_band.png").stat().st_size < 80_000
