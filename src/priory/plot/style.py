"""The colours and axes that all plots share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from priory.core.errors import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
INK, GREY = "#222222", "#8a8a8a"


def _axes(ax: Axes | None, title: str, xlabel: str, ylabel: str) -> Axes:
    """Style the given axes, or those of a new figure."""
    if ax is None:
        figure = extra("matplotlib.figure", "plot").Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
        return _axes(figure.subplots(), title, xlabel, ylabel)
    ax.set_title(title, loc="left", fontsize=11, color=INK)
    ax.set_xlabel(xlabel, fontsize=10)
    ax.set_ylabel(ylabel, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    for axis in (ax.xaxis, ax.yaxis):
        form: Any = axis.get_major_formatter()
        if hasattr(form, "set_useOffset"):  # full tick labels, without a common offset or factor
            form.set_useOffset(False)
            form.set_scientific(False)
    return ax


def _cycle(count: int) -> list[str]:
    """The first `count` colours of the palette, repeated if necessary."""
    return [COLOURS[k % len(COLOURS)] for k in range(count)]


def _list(values: Tensor) -> list[float]:
    """A tensor as a list of numbers, so that matplotlib does not convert torch tensors by numpy."""
    return values.tolist()
