"""Plot of `estimators.variance`: the variance of each gradient estimator, with biased ones marked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from priory.plot.style import BLUE, GREY, INK, VERMILION, _axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from priory.estimators import Variances

BIAS_P_VALUE = 1e-6  # p-value below which an estimator is marked as biased
ROUNDING_SHARE = 1e-12  # of the largest variance; a smaller variance is rounding error


def variances(found: Variances, *, ax: Axes | None = None) -> Axes:
    """Plot the variance of each estimator as a bar on a logarithmic scale, the lowest on top.

    Biased estimators are red. Estimators of the importance-weighted bound are grey, since they estimate the gradient of
    another objective.

    Args:
        found: The result of `estimators.variance`.
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.
    """
    draws = "one draw" if found.samples == 1 else f"{found.samples} draws"
    ax = _axes(ax, f"Variance of the gradient, from {draws} each", "variance, summed over the parameters of q", "")
    rows = found.rows
    largest = max(row.variance for row in rows) or 1.0
    seen = [row.variance for row in rows if row.variance > ROUNDING_SHARE * largest] or [largest]
    left, right = 10 ** (math.log10(min(seen)) - 0.6), 10 ** (math.log10(max(seen)) + 0.9)
    ax.set_xscale("log")
    ax.set_xlim(left, right)
    for place, row in enumerate(rows):
        negligible, biased = row.variance <= ROUNDING_SHARE * largest, row.p_value < BIAS_P_VALUE
        colour = VERMILION if biased else BLUE if row.objective == "elbo" else GREY
        ax.barh(place, 0.0 if negligible else row.variance - left, left=left, color=colour, height=0.62)
        text = "rounding error only" if negligible else f"{row.variance:.3g}"
        label = f"{text}   biased, {row.bias:.0f} standard errors" if biased else text
        end = left if negligible else row.variance
        inside = biased and end > math.sqrt(left * right)  # a long label beside a long bar would not fit
        shift, align, ink = (-5, "right", "white") if inside else (5, "left", INK)
        ax.annotate(
            label, (end, place), (shift, 0), textcoords="offset points", va="center", ha=align, fontsize=9, color=ink
        )
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    return ax
