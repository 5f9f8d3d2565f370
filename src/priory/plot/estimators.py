"""A picture of `estimators.variance`: how noisy each estimator of the gradient is, and which are biased."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from priory.plot import BLUE, GREY, INK, VERMILION, _axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from priory.estimators import Variances

BIASED = 1e-6  # the p-value below which an estimator is marked
ALMOST_NONE = 1e-12  # of the largest variance: what is left is rounding


def variances(found: Variances, *, ax: Axes | None = None) -> Axes:
    """Draw a bar for the variance of each estimator, on a logarithmic scale, the least noisy on top.

    The variance of the importance-weighted bound's estimators is drawn in grey, as they estimate something else.
    """
    draws = "one draw" if found.samples == 1 else f"{found.samples} draws"
    ax = _axes(ax, f"Noise of the gradient, from {draws} each", "variance, summed over q's numbers", "")
    rows = found.rows
    largest = max(row.variance for row in rows) or 1.0
    seen = [row.variance for row in rows if row.variance > ALMOST_NONE * largest] or [largest]
    left, right = 10 ** (math.log10(min(seen)) - 0.6), 10 ** (math.log10(max(seen)) + 0.9)
    ax.set_xscale("log")
    ax.set_xlim(left, right)
    for place, row in enumerate(rows):
        none, biased = row.variance <= ALMOST_NONE * largest, row.p_value < BIASED
        colour = VERMILION if biased else BLUE if row.objective == "elbo" else GREY
        ax.barh(place, 0.0 if none else row.variance - left, left=left, color=colour, height=0.62)
        text = "none but rounding" if none else f"{row.variance:.3g}"
        said = f"{text}   biased, {row.bias:.0f} standard errors" if biased else text
        end = left if none else row.variance
        inside = biased and end > math.sqrt(left * right)  # a long label beside a long bar would leave the picture
        shift, align, ink = (-5, "right", "white") if inside else (5, "left", INK)
        ax.annotate(
            said, (end, place), (shift, 0), textcoords="offset points", va="center", ha=align, fontsize=9, color=ink
        )
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    return ax
