"""Six ways through three problems: each finds what it should, and averages differ from what is plugged in."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from priory.diagnostics import mcse_mean


@pytest.fixture(scope="module")
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("six_ways")


@pytest.fixture(scope="module")
def effort(example: ModuleType):
    return example.Effort(steps=600, draws=40, chains=32)


@pytest.fixture(scope="module")
def coin(example: ModuleType, effort):
    return example.coin(effort)


@pytest.fixture(scope="module")
def line(example: ModuleType, effort):
    return example.regression(effort)


@pytest.fixture(scope="module")
def network(example: ModuleType, effort):
    return example.network(effort)


def test_the_points_of_the_coin_are_its_two_modes(example: ModuleType, coin):
    assert float(coin["MLE"].mean["p"]) == pytest.approx(5 / 6, abs=0.01)
    assert float(coin["MAP"].mean["p"]) == pytest.approx(example.COIN.mode, abs=0.01)


def test_nuts_has_the_mean_of_the_coins_posterior(example: ModuleType, coin):
    p = coin["NUTS"].draws["p"]
    assert abs(float(p.mean()) - float(example.COIN.posterior.mean)) < 4 * float(mcse_mean(p))  # false alarm: 6e-5


def test_five_heads_are_more_probable_averaged_than_plugged_in(example: ModuleType, coin):
    plug, averaged = example.exact_heads_in_a_row()
    assert averaged > plug + 0.03
    for name in example.AVERAGES:
        found = example.heads_in_a_row(coin[name])
        assert found[1] > found[0] + 0.02
        assert found[1] == pytest.approx(averaged, abs=0.05)
    for name in example.POINTS:
        found = example.heads_in_a_row(coin[name], samples=2)
        assert found[0] == pytest.approx(found[1])


def test_least_squares_and_ridge_are_the_points_of_the_line(example: ModuleType, line):
    problem = example.line()
    design = problem.design(problem.X)
    best = torch.linalg.lstsq(design, problem.y[:, None]).solution[:, 0]
    for name, expected in (("MLE", best), ("MAP", problem.posterior.loc)):
        torch.testing.assert_close(example.weights(line[name], 1)[0], expected, rtol=0.02, atol=0.02)


def test_laplace_is_exact_on_the_line_and_mean_field_is_overconfident_far_away(example: ModuleType, line):
    x = torch.tensor([[3.0]], dtype=torch.float64)
    exact = example.line().predictive(x).stddev.item()
    assert example.spread(line["Laplace"], x).item() == pytest.approx(exact, rel=1e-3)
    assert example.spread(line["NUTS"], x).item() == pytest.approx(exact, rel=0.1)
    assert example.spread(line["VI"], x).item() < 0.95 * exact


def test_a_point_estimate_is_equally_confident_everywhere_and_an_average_is_not(example: ModuleType, line, network):
    inside, outside = (torch.full((1, 1), x, dtype=torch.float64) for x in (1.0, 3.0))
    for fits in (line, network):
        for name in example.POINTS:
            here, there = (example.spread(fits[name], x).item() for x in (inside, outside))
            assert here == pytest.approx(there)
        for name in ("Laplace", "NUTS"):
            assert example.spread(fits[name], outside) > 1.3 * example.spread(fits[name], inside)


def test_a_factorised_gaussian_is_more_confident_far_away_than_nuts(example: ModuleType, network):
    far = torch.tensor([[-3.0], [3.0]], dtype=torch.float64)
    assert bool((example.spread(network["VI"], far) < 0.8 * example.spread(network["NUTS"], far)).all())


def test_the_script_prints_every_way_and_draws_one_picture(
    example: ModuleType,
    coin,
    line,
    network,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name, fits in (("coin", coin), ("regression", line), ("network", network)):
        monkeypatch.setattr(example, name, lambda effort, fits=fits: fits)
    example.main(tmp_path)
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*example.POINTS, *example.AVERAGES, "exact"))
    assert 5_000 < (tmp_path / "six_ways.png").stat().st_size < 80_000
