"""Plots of a temperature sweep, and of scores against the share of weights kept by pruning."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from priory.analysis.comparison_table import HIGHER_IS_BETTER
from priory.analysis.pruning import PruningCurve
from priory.analysis.sweeps import SCORE_TITLES, TemperatureSweep
from priory.core.errors import extra, require
from priory.plot.style import BLUE, GREEN, GREY, INK, VERMILION, _axes, _list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def temperatures(sweep: TemperatureSweep) -> Figure:
    """Plot each score against the temperature T, with two standard errors, T = 1 and T*, and the certificate below.

    Args:
        sweep: The result of `temperature_sweep`.

    Returns:
        A new figure with one panel per score.

    Raises:
        InputError: If `sweep` is not a `TemperatureSweep`.
    """
    ok = isinstance(sweep, TemperatureSweep)
    require(ok, "sweep", "plot.sweeps.temperatures", "be a TemperatureSweep", type(sweep).__name__)
    figure, panels = _sheet(len(sweep.scores), 0.22)
    for ax, name in zip(panels, sweep.scores, strict=True):
        _curve(ax, name, _list(sweep.T), sweep.scores, sweep.errors, "temperature T")
        ax.axvline(1.0, color=GREY, linestyle="--", linewidth=1, label="T = 1")
        ax.axvline(sweep.best, color=VERMILION, linewidth=1, label=f"T* = {sweep.best:g}")
        ax.set_xscale("log")
    panels[0].legend(frameon=False, fontsize=9)
    text = "\n".join(textwrap.wrap(f"{sweep.verdict} {sweep.statement}", 58 * len(panels)))
    figure.text(0.01, 0.19, text, color=INK, fontsize=8.5, va="top")
    return figure


def pruning(curve: PruningCurve) -> Figure:
    """Plot each score against the share of weights kept, with two standard errors.

    Args:
        curve: The result of `prune_weights`.

    Returns:
        A new figure with one panel per score.

    Raises:
        InputError: If `curve` is not a `PruningCurve`.
    """
    ok = isinstance(curve, PruningCurve)
    require(ok, "curve", "plot.sweeps.pruning", "be a PruningCurve", type(curve).__name__)
    figure, panels = _sheet(len(curve.scores), 0.0)
    for ax, name in zip(panels, curve.scores, strict=True):
        _curve(ax, name, [100 * share for share in curve.shares], curve.scores, curve.errors, "weights kept, %")
        ax.axvline(100 * curve.smallest, color=GREEN, linewidth=1, label=f"{100 * curve.smallest:g} % score as well")
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def _sheet(count: int, below: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure with `count` panels in a row, and a share `below` of its height left free for text."""
    figure = extra("matplotlib.figure", "plot").Figure(figsize=(4.0 * count, 3.9), dpi=120, layout="constrained")
    figure.get_layout_engine().set(rect=(0, below, 1, 1 - below))  # room for text
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _curve(
    ax: Axes,
    name: str,
    x: Sequence[float],
    scores: Mapping[str, Sequence[float]],
    errors: Mapping[str, Sequence[float]],
    along: str,
) -> None:
    """Plot one score with two standard errors."""
    better = "higher" if name in HIGHER_IS_BETTER else "lower"
    _axes(ax, f"{SCORE_TITLES[name]} ({better} is better)", along, SCORE_TITLES[name])
    both = [2 * error for error in errors[name]]
    ax.errorbar(x, scores[name], yerr=both, color=BLUE, marker="o", markersize=4, linewidth=1.5, capsize=2)
