"""Pictures of a check: one panel for each item that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from priory.core.errors import extra
from priory.evaluate.calibration import reliability
from priory.plot.style import BLUE, GREY, INK, VERMILION, _axes, _list

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from priory.check import Check, Item

PANEL_WIDTH, PANEL_HEIGHT, MAX_COLUMNS = 4.6, 3.4, 3  # of the figure, in inches, and panels side by side
MAX_POINTS = 1000  # of a curve
MAX_BARS = 30  # coordinates whose spread is shown, those that are furthest off


def check(result: Check) -> Figure:
    """Draw a check: a panel with all items, and one panel for each item that has a picture.

    Args:
        result: What `posterior.check()` returned.

    Returns:
        The figure. Items that failed are drawn in vermilion, the others in blue.
    """
    pyplot = extra("matplotlib.pyplot", "plot")
    drawn = [(item, PICTURES[item.name]) for item in result.items if item.name in PICTURES and picture_exists(item)]
    count = 1 + len(drawn)
    columns = min(MAX_COLUMNS, count)
    lines = -(-count // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * lines), squeeze=False, layout="constrained"
    )
    panels = list(axes.flat)
    overview(result, panels[0])
    for (item, picture), ax in zip(drawn, panels[1:], strict=False):
        picture(item, ax, VERMILION if item.failed else BLUE)
    for ax in panels[count:]:
        ax.set_axis_off()
    figure.suptitle(result.verdict, wrap=True, fontsize=11)
    return figure


def picture_exists(item: Item) -> bool:
    """Whether the item kept what its picture shows."""
    return any(value is not None for value in item.details.values())


def overview(result: Check, ax: Axes) -> None:
    """One line per item, with its outcome as a mark and as a word."""
    ax = _axes(ax, f"Check of {result.subject}", "", "")
    ax.set_axis_off()
    colours = {"passed": BLUE, "failed": VERMILION, "not known": GREY}
    for line, item in enumerate(result.items):
        height = 1 - (line + 0.5) / len(result.items)
        ax.text(0.0, height, item.name, transform=ax.transAxes, fontsize=9, va="center")
        ax.text(
            0.72, height, item.outcome, transform=ax.transAxes, fontsize=9, va="center", color=colours[item.outcome]
        )


def history(item: Item, ax: Axes, colour: str) -> None:
    """The objective, step by step."""
    values = item.details["history"]
    every = max(1, len(values) // MAX_POINTS)
    ax = _axes(ax, "Objective (higher is better)", "step", "nats")
    ax.plot(_list(torch.arange(len(values))[::every]), _list(values[::every]), color=colour, linewidth=1)
    low, high = values.quantile(0.05).item(), values.max().item()
    ax.set_ylim(low - 0.1 * (high - low + 1e-9), high + 0.1 * (high - low + 1e-9))


def log_ratios(item: Item, ax: Axes, colour: str) -> None:
    """The importance ratios in order of their size."""
    ordered = item.details["log_ratios"].sort(descending=True).values
    ordered = ordered[ordered.isfinite()]
    every = max(1, len(ordered) // MAX_POINTS)
    ax = _axes(ax, f"Importance ratios, k-hat {item.value:.2f}", "rank", "log p(w, D) - log q(w)")
    ax.plot(_list(1 + torch.arange(len(ordered))[::every]), _list(ordered[::every]), color=colour)
    ax.set_xscale("log")


def bounds(item: Item, ax: Axes, colour: str) -> None:
    """The importance-weighted bounds against the number of draws."""
    ax = _axes(ax, "Bounds on log p(D)", "draws K", "nats")
    ax.plot(item.details["draws"], item.details["bounds"], color=colour, marker="o", markersize=4)
    ax.set_xscale("log")


def ratios(item: Item, ax: Axes, colour: str) -> None:
    """The standard deviations of q over those of the posterior, for the coordinates that are furthest off."""
    values, names = item.details["ratios"], item.details["names"]
    order = values[: len(names)].log().abs().argsort(descending=True)[:MAX_BARS].sort().values
    ax = _axes(ax, "Spread of q / spread of the posterior", "", "ratio")
    ax.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    ax.plot(range(len(order)), _list(values[order]), "o", color=colour, markersize=4)
    ax.set_yscale("log")
    ax.set_xticks(range(len(order)), [names[int(i)] for i in order], rotation=90, fontsize=7)


def shape(item: Item, ax: Axes, colour: str) -> None:
    """The log density along principal directions, and the parabola."""
    reach, height = item.details["reach"], item.details["height"]
    order = reach.argsort()
    ax = _axes(ax, "Along principal directions", "standard deviations", "log p relative to the mode")
    ax.plot(_list(reach[order]), height[order].tolist(), color=colour, alpha=0.5, linewidth=1)
    ax.plot(_list(reach[order]), _list(-0.5 * reach[order].square()), color=INK, linestyle="--", linewidth=1.5)


def quantity(key: str, title: str, level: float) -> Any:
    """A picture of a diagnostic of all quantities in order, with its threshold."""

    def draw(item: Item, ax: Axes, colour: str) -> None:
        values = item.details[key]
        values = values[values.isfinite()].sort().values
        ax = _axes(ax, title, "quantities, in order", "")
        ax.plot(range(len(values)), _list(values), ".", color=colour)
        ax.axhline(level, color=GREY, linestyle="--", linewidth=1)

    return draw


def calibration(item: Item, ax: Axes, colour: str) -> None:
    """The distribution of the transforms u = F(y), or the reliability of labels."""
    if "u" in item.details:
        u = item.details["u"].clamp(0, 1)
        ax = _axes(ax, "Where targets lie in their predictions", "u = F(y)", "rows")
        ax.hist(_list(u), bins=20, range=(0, 1), color=colour, edgecolor="white")
        ax.axhline(len(u) / 20, color=INK, linestyle="--", linewidth=1)
        return
    curve = reliability(item.details["probs"], item.details["labels"], bins=10)
    full = curve.count > 0
    ax = _axes(ax, "Reliability", "confidence", "accuracy")
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    ax.plot(_list(curve.confidence[full]), _list(curve.frequency[full]), "o-", color=colour, markersize=4)


PICTURES = {
    "convergence": history,
    "k-hat": log_ratios,
    "gap of the bound": bounds,
    "spread": ratios,
    "shape": shape,
    "R-hat": quantity("r_hat", "R-hat", 1.01),
    "nested R-hat": quantity("r_hat", "Nested R-hat", 1.01),
    "bulk ESS": quantity("ess_bulk", "Bulk ESS", 400),
    "tail ESS": quantity("ess_tail", "Tail ESS", 400),
    "calibration": calibration,
}
