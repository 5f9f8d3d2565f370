"""A picture of an `Equivalence`: the penalty on the left, its prior on the right, the verdict below."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import torch

from priory.core.errors import extra, require
from priory.penalties.equivalence.result import Equivalence
from priory.plot import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, VERMILION, _axes, _list

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALES = (0.25, 0.5, 1.0, 2.0)  # in widths of the prior
KEEP = (0.2, 0.5, 0.8)
REACH = 4.0
MARKS = {"valid": GREEN, "nearly valid": ORANGE}
TITLES = {
    "valid": "The prior that it is",
    "entropy missing": "The prior, with the entropy added",
    "tempered": "The prior, with T divided out",
    "not integrable": "The density, up to a factor",
}


def equivalence(found: Equivalence, *, title: str | None = None) -> Figure:
    """Draw what `prior_from_penalty` found, on a figure of its own.

    Left: the penalty against the location, a line for each scale, dashed where the nearest Bayesian penalty differs.
    Right: the density of the prior. Below: the verdict, green if the penalty is valid, and red if it is not.
    """
    ok = isinstance(found, Equivalence)
    require(ok, "found", "plot.penalties.equivalence", "be an Equivalence", type(found).__name__)
    figure = extra("matplotlib.figure", "plot").Figure(figsize=(9.6, 4.6), dpi=120, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.2, 1, 0.8))  # room for the verdict
    left, right = figure.subplots(1, 2)
    _penalty(_axes(left, title or "The penalty", "location", "nats"), found)
    kind = found.certificate.kind
    _prior(_axes(right, TITLES.get(kind, "The nearest prior"), "w", "density"), found)
    head, _, rest = found.certificate.verdict.partition(": ")
    colour = MARKS.get(kind, VERMILION)
    figure.text(0.02, 0.16, head, color=colour, fontsize=12, fontweight="bold", va="top")
    said = "\n".join(textwrap.wrap(rest[:1].upper() + rest[1:], 128))
    figure.text(0.02, 0.105, said, color=INK, fontsize=9, va="top")
    return figure


def _penalty(ax: Axes, found: Equivalence) -> None:
    mu = _line(found)
    for colour, (label, rest) in zip(COLOURS, _cases(found), strict=False):
        with torch.no_grad():
            given = found.penalty(mu, *(torch.full_like(mu, r) for r in rest))
            closest = found.nearest(mu, *(torch.full_like(mu, r) for r in rest))
        ax.plot(_list(mu), _list(given), color=colour, linewidth=2, label=label)
        if float((given - closest).abs().max()) > 1e-3:
            ax.plot(_list(mu), _list(closest), color=colour, linewidth=1.2, linestyle="--")
    if not found.certificate.valid:
        ax.plot([], [], color=GREY, linewidth=1.2, linestyle="--", label="nearest Bayesian")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8)


def _prior(ax: Axes, found: Equivalence) -> None:
    w = _line(found)
    with torch.no_grad():
        density = found.log_prior(w).exp()
    ax.fill_between(_list(w), _list(density), color=BLUE, alpha=0.25, linewidth=0)
    ax.plot(_list(w), _list(density), color=BLUE, linewidth=2)
    if found.spike is not None:
        ax.annotate(f"0 with probability {found.spike:.2f}", (0.03, 0.93), xycoords="axes fraction", fontsize=9)
    ax.set_ylim(bottom=0)


def _line(found: Equivalence) -> torch.Tensor:
    reach = REACH * found.unit
    # an even number of points, so that none is at the spike or the pole that a prior may have in its centre
    return found.centre + torch.linspace(-reach, reach, 400, dtype=torch.float64)


def _cases(found: Equivalence) -> list[tuple[str | None, tuple[float, ...]]]:
    """The lines to draw: a label, and what the penalty takes beside the location."""
    if found.family == "dirac":
        return [(None, ())]
    if found.family == "dropout":
        return [(f"keep {p:g}", (p,)) for p in (KEEP if found.scale is None else (found.scale,))]
    if found.scale is not None:
        return [(f"scale {found.scale:.3g}", (found.scale,))]
    scales = [s * found.unit for s in SCALES]
    if found.family == "spike_slab":
        return [(f"scale {s:.2g}, kept 0.5", (s, 0.5)) for s in scales]
    return [(f"scale {s:.2g}", (s,)) for s in scales]
