"""Plots of chains: that they show the draws, ranks, densities and energies that they should."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

import priory as pr
from priory import constraints, plot
from priory.core.errors import InputError
from priory.models.target import Target
from priory.plot.chains import MAX_SCATTER_POINTS, chosen_entries, density_of, furthest_chain, rank_deviations
from priory.posteriors import Chains, Draws

DOUBLE = torch.float64
PARAMS = {"mu": pr.Param(), "tau": pr.Param((), constraints.positive), "r": pr.Param((2, 2), constraints.corr_matrix)}
TARGET = Target(pr.Density(lambda p: -p["mu"].square() - p["tau"] + p["r"].sum(), PARAMS), 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def chains(count: int = 4, draws: int = 200, divergent: tuple[tuple[int, int], ...] = ((1, 7), (2, 90))) -> Chains:
    bad = torch.zeros(count, draws, dtype=torch.bool)
    for place in divergent:
        bad[place] = True
    statistics = {"energy": normal(count, draws, seed=1).cumsum(1), "divergent": bad}
    return Chains(TARGET, normal(count, draws, 3), statistics=statistics)


def rendered(figure: Figure) -> Any:
    figure.savefig(io.BytesIO(), format="png")  # warnings are errors: the layout fits
    return figure


def titles(figure: Figure) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def data_of(lines: list[Any], colour: str | None = None) -> list[list[float]]:
    return [list(line.get_ydata()) for line in lines if colour is None or line.get_color() == colour]


def test_a_trace_of_few_chains_has_the_draws_of_each() -> None:
    posterior = chains()
    figure = rendered(plot.trace(posterior))
    assert titles(figure)[::2] == ["mu", "tau", "r[0, 1]", "r[1, 0]"]  # a correlation's diagonal does not vary
    for row, x in ((0, posterior.draws["mu"]), (1, posterior.draws["tau"]), (2, posterior.draws["r"][..., 0, 1])):
        *paths, ticks = figure.axes[2 * row + 1].get_lines()
        assert data_of(paths) == x.tolist()
        assert list(ticks.get_xdata()) == [7, 90]
        densities = figure.axes[2 * row].get_lines()
        assert data_of(densities) == [density_of(path)[1].tolist() for path in x]
    assert figure.get_suptitle() == "4 chains of 200 draws, 2 divergent"


def test_a_trace_of_many_chains_has_their_quantiles_and_the_furthest_chain() -> None:
    posterior = chains(256, 100)
    x = posterior.draws["mu"]
    figure = rendered(plot.trace(posterior, "mu"))
    furthest, median = figure.axes[1].get_lines()
    chain = int((x.mean(1) - x.mean(1).median()).abs().argmax())
    assert list(furthest.get_ydata()) == x[chain].tolist()
    assert furthest.get_label() == f"furthest (chain {chain})"
    assert list(median.get_ydata()) == pytest.approx(x.quantile(0.5, 0).tolist(), abs=1e-12)
    outer = figure.axes[1].collections[0].get_paths()[0].vertices  # around the band of 90 %
    assert float(outer[:, 1].max()) == pytest.approx(float(x.quantile(0.95, 0).max()), abs=1e-12)
    assert float(outer[:, 1].min()) == pytest.approx(float(x.quantile(0.05, 0).min()), abs=1e-12)
    assert figure.legends[0].get_texts()[0].get_text() == "90 % of the chains"


def test_a_long_trace_is_thinned_evenly() -> None:
    posterior = chains(2, 5_000, ())
    (first, *_) = rendered(plot.trace(posterior, ["tau"])).axes[1].get_lines()
    assert list(first.get_xdata()) == list(range(0, 5_000, 5))
    assert list(first.get_ydata()) == posterior.draws["tau"][0, ::5].tolist()


def test_the_furthest_chain_is_the_one_whose_mean_is_off() -> None:
    x = normal(20, 50)
    x[13] += 3
    assert furthest_chain(x) == 13


def test_a_density_integrates_to_one_and_agrees_with_the_kernel_sum() -> None:
    x = normal(2_000).exp()
    grid, height = density_of(x)
    step = float(grid[1] - grid[0])
    assert float(height.sum()) * step == pytest.approx(1.0, abs=1e-10)
    assert float(grid[0] - 0.5 * step) == pytest.approx(float(x.min()), abs=1e-10)  # nothing below the smallest draw
    y = normal(2_000, seed=3)
    grid, height = density_of(y)
    quartiles = y.sort().values[[500, 1_500]]
    width = 0.9 * min(float(y.std()), float(quartiles[1] - quartiles[0]) / 1.34) * 2_000**-0.2
    kernel = (-0.5 * ((grid[:, None] - y) / width).square()).exp().sum(1) / (2_000 * width * math.sqrt(2 * math.pi))
    middle = slice(40, 216)  # away from the mirrors at the extremes
    torch.testing.assert_close(height[middle], kernel[middle], rtol=0, atol=2e-3)


def test_a_chain_that_never_moves_has_a_density_that_can_be_drawn() -> None:
    posterior = chains()
    posterior.w[1] = 0.5
    rendered(plot.trace(posterior))
    rendered(plot.rank(posterior))


def test_ranks_are_counted_among_the_draws_of_all_chains() -> None:
    x = torch.stack([torch.arange(100.0), 100 + torch.arange(100.0)]).double()  # one chain below the other
    deviation, _ = rank_deviations(x)
    assert deviation.shape == (2, 20)
    assert deviation[0].tolist() == [5.0] * 10 + [-5.0] * 10
    assert torch.equal(deviation[1], -deviation[0])


def test_ranks_of_independent_draws_deviate_by_their_standard_error() -> None:
    deviation, error = rank_deviations(normal(64, 500))
    # 64 x 20 counts around 25; the effective sample size is estimated, with an error of a few percent
    assert error == pytest.approx(math.sqrt(25 * 0.95), rel=0.1)
    ratio = float(deviation.square().mean()) / error**2
    assert ratio == pytest.approx(1.0, abs=0.2)


def test_the_bars_of_few_chains_are_their_deviations_to_scale() -> None:
    posterior = chains()
    figure = rendered(plot.rank(posterior, ["mu"]))
    deviation, error = rank_deviations(posterior.draws["mu"])
    heights = torch.tensor([bar.get_height() for group in figure.axes[0].containers for bar in group]).double()
    scale = 0.45 / max(float(deviation.abs().max()), 2.5 * error)
    torch.testing.assert_close(heights, scale * deviation.reshape(-1), rtol=1e-12, atol=1e-12)
    assert float(heights.abs().max()) < 0.5


def test_the_map_of_many_chains_has_one_line_per_chain_in_the_order_of_their_means() -> None:
    posterior = chains(100, 60, ())
    figure = rendered(plot.rank(posterior, ["mu", "tau"]))
    x = posterior.draws["mu"]
    deviation, error = rank_deviations(x)
    shown = torch.as_tensor(figure.axes[0].images[0].get_array().tolist(), dtype=DOUBLE)
    expected = (deviation / error)[x.mean(1).argsort()].clamp(-5, 5)
    torch.testing.assert_close(shown, expected, rtol=1e-12, atol=1e-12)


def test_pairs_show_draws_below_the_diagonal_and_divergences_on_top() -> None:
    posterior = chains()
    figure = rendered(plot.pair(posterior, ["tau", "mu"]))
    first, hidden, panel, last = figure.axes
    assert not hidden.get_visible()
    usual, divergent = panel.get_lines()
    mu, tau = posterior.draws["mu"], posterior.draws["tau"]
    bad = posterior.statistics["divergent"]
    assert list(usual.get_xdata()) == tau[~bad].tolist()
    assert list(usual.get_ydata()) == mu[~bad].tolist()
    assert list(divergent.get_xdata()) == tau[bad].tolist()
    assert panel.get_xlabel() == "tau"
    assert panel.get_ylabel() == "mu"
    assert data_of(list(first.get_lines())) == [density_of(tau.reshape(-1))[1].tolist()]
    assert data_of(list(last.get_lines())) == [density_of(mu.reshape(-1))[1].tolist()]
    assert figure.get_suptitle() == "800 draws, 2 divergent, in orange"


def test_pairs_of_many_draws_are_thinned_but_every_divergence_is_shown() -> None:
    posterior = chains(256, 50, tuple((k, 3) for k in range(40)))
    figure = rendered(plot.pair(posterior, ["mu", "tau"]))
    usual, divergent = figure.axes[2].get_lines()
    assert MAX_SCATTER_POINTS - 40 <= len(usual.get_xdata()) <= MAX_SCATTER_POINTS
    assert len(divergent.get_xdata()) == 40
    assert figure.get_suptitle().endswith("of 12,800 draws, 40 divergent, in orange")


def test_energies_are_shown_beside_their_changes_with_the_smallest_bfmi() -> None:
    posterior = chains()
    energy = posterior.statistics["energy"]
    ax: Any = plot.energy(posterior)
    draws, changes = ax.get_lines()
    assert list(draws.get_ydata()) == density_of((energy - energy.mean()).reshape(-1))[1].tolist()
    assert list(changes.get_ydata()) == density_of(energy.diff(dim=1).reshape(-1))[1].tolist()
    least = float((energy.diff(dim=1).square().mean(1) / energy.var(1)).min())
    assert ax.get_title(loc="left") == f"Energy; E-BFMI is {least:.2f} at the least"
    own = Figure().subplots()
    assert plot.energy(posterior, ax=own) is own


def test_entries_are_chosen_by_name_in_the_given_order() -> None:
    posterior = chains()
    assert list(chosen_entries(posterior, ["r[1, 0]", "mu"], 8, "plot.trace")) == ["r[1, 0]", "mu"]
    assert list(chosen_entries(posterior, "r", 8, "plot.trace")) == ["r[0, 1]", "r[1, 0]"]
    assert list(chosen_entries(posterior, None, 2, "plot.trace")) == ["mu", "tau"]


def test_what_can_not_be_plotted_is_refused_with_a_reason() -> None:
    posterior = chains()
    with pytest.raises(
        InputError, match=r"'names' argument of plot.rank must be names .* such as mu, tau, r, got \['x'\]"
    ):
        plot.rank(posterior, ["x"])
    with pytest.raises(InputError, match=r"'posterior' argument of plot.trace must be that of a sampler, got Draws"):
        plot.trace(Draws(TARGET, normal(5, 3)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"'names' argument of plot.pair must name two entries"):
        plot.pair(posterior, ["mu"])
    with pytest.raises(InputError, match=r"'posterior' argument of plot.energy must have energies"):
        plot.energy(Chains(TARGET, normal(2, 9, 3)))
    walk = Chains(TARGET, normal(2, 9, 3), statistics={"energy": normal(2, 9)}, momenta=False)
    with pytest.raises(InputError, match=r"'posterior' argument of plot.energy must have energies"):
        plot.energy(walk)
