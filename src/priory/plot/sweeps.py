"""Pictures of a temperature sweep, and of what pruning costs."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from priory.analysis.pruning import PruningCurve
from priory.analysis.sweeps import TITLES, TemperatureSweep
from priory.core.errors import extra, require
from priory.plot import BLUE, GREEN, GREY, INK, VERMILION, _axes, _list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HIGHER = {"accuracy"}


def temperatures(sweep: TemperatureSweep) -> Figure:
    """Draw each score against T, on a figure of its own: two standard errors, T = 1, T*, and the certificate below."""
    ok = isinstance(sweep, TemperatureSweep)
    require(ok, "sweep", "plot.sweeps.temperatures", "be a TemperatureSweep", type(sweep).__name__)
    figure, panels = _sheet(len(sweep.scores), 0.22)
    for ax, name in zip(panels, sweep.scores, strict=True):
        _curve(ax, name, _list(sweep.T), sweep.scores, sweep.errors, "temperature T")
        ax.axvline(1.0, color=GREY, linestyle="--", linewidth=1, label="T = 1")
        ax.axvline(sweep.best, color=VERMILION, linewidth=1, label=f"T* = {sweep.best:g}")
        ax.set_xscale("log")
    panels[0].legend(frameon=False, fontsize=9)
    said = "\n".join(textwrap.wrap(f"{sweep.verdict} {sweep.statement}", 58 * len(panels)))
    figure.text(0.01, 0.19, said, color=INK, fontsize=8.5, va="top")
    return figure


def pruning(curve: PruningCurve) -> Figure:
    """Draw each score against the share of weights that is kept, with two standard errors."""
    ok = isinstance(curve, PruningCurve)
    require(ok, "curve", "plot.sweeps.pruning", "be a PruningCurve", type(curve).__name__)
    figure, panels = _sheet(len(curve.scores), 0.0)
    for ax, name in zip(panels, curve.scores, strict=True):
        _curve(ax, name, [100 * share for share in curve.shares], curve.scores, curve.errors, "weights kept, %")
        ax.axvline(100 * curve.smallest, color=GREEN, linewidth=1, label=f"{100 * curve.smallest:g} % do as well")
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def _sheet(count: int, below: float) -> tuple[Figure, Sequence[Axes]]:
    figure = extra("matplotlib.figure", "plot").Figure(figsize=(4.0 * count, 3.9), dpi=120, layout="constrained")
    figure.get_layout_engine().set(rect=(0, below, 1, 1 - below))  # room for words
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _curve(
    ax: Axes,
    name: str,
    x: Sequence[float],
    scores: Mapping[str, Sequence[float]],
    errors: Mapping[str, Sequence[float]],
    along: str,
) -> None:
    better = "higher" if name in HIGHER else "lower"
    _axes(ax, f"{TITLES[name]} ({better} is better)", along, TITLES[name])
    both = [2 * error for error in errors[name]]
    ax.errorbar(x, scores[name], yerr=both, color=BLUE, marker="o", markersize=4, linewidth=1.5, capsize=2)
