"""Plot of an `Equivalence`: the penalty on the left, its prior on the right, the verdict below."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import torch

from priory.core.errors import extra, require
from priory.penalties.equivalence.result import Equivalence
from priory.plot.style import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, VERMILION, _axes, _list

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_SCALES = (0.25, 0.5, 1.0, 2.0)  # scales of q to plot, in widths of the prior
KEEP_RATES = (0.2, 0.5, 0.8)  # keep rates of dropout to plot
HALF_WIDTH = 4.0  # of the x axis, in widths of the prior
VERDICT_COLOURS = {"valid": GREEN, "nearly valid": ORANGE}
PRIOR_TITLES = {
    "valid": "The equivalent prior",
    "entropy missing": "The prior, with the entropy added",
    "tempered": "The prior, with T divided out",
    "not integrable": "The density, up to a constant factor",
}


def equivalence(found: Equivalence, *, title: str | None = None) -> Figure:
    """Plot the result of `prior_from_penalty`.

    Left: the penalty against the location, one line per scale, with dashed lines where the nearest Bayesian penalty
    differs. Right: the density of the prior. Below: the verdict, green if the penalty is valid, orange if it is nearly
    valid, red otherwise.

    Args:
        found: The result of `prior_from_penalty`.
        title: Title of the left panel. Default: None, for "The penalty".

    Returns:
        A new figure.

    Raises:
        InputError: If `found` is not an `Equivalence`.
    """
    ok = isinstance(found, Equivalence)
    require(ok, "found", "plot.penalties.equivalence", "be an Equivalence", type(found).__name__)
    figure = extra("matplotlib.figure", "plot").Figure(figsize=(9.6, 4.6), dpi=120, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.2, 1, 0.8))  # room for the verdict
    left, right = figure.subplots(1, 2)
    _penalty(_axes(left, title or "The penalty", "location", "nats"), found)
    kind = found.certificate.kind
    _prior(_axes(right, PRIOR_TITLES.get(kind, "The nearest prior"), "w", "density"), found)
    head, _, rest = found.certificate.verdict.partition(": ")
    colour = VERDICT_COLOURS.get(kind, VERMILION)
    figure.text(0.02, 0.16, head, color=colour, fontsize=12, fontweight="bold", va="top")
    reason = "\n".join(textwrap.wrap(rest[:1].upper() + rest[1:], 128))
    figure.text(0.02, 0.105, reason, color=INK, fontsize=9, va="top")
    return figure


def _penalty(ax: Axes, found: Equivalence) -> None:
    """Plot the penalty and the nearest Bayesian penalty against the location."""
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
    """Plot the density of the prior."""
    w = _line(found)
    with torch.no_grad():
        density = found.log_prior(w).exp()
    ax.fill_between(_list(w), _list(density), color=BLUE, alpha=0.25, linewidth=0)
    ax.plot(_list(w), _list(density), color=BLUE, linewidth=2)
    if found.spike is not None:
        ax.annotate(f"0 with probability {found.spike:.2f}", (0.03, 0.93), xycoords="axes fraction", fontsize=9)
    ax.set_ylim(bottom=0)


def _line(found: Equivalence) -> torch.Tensor:
    """The x values of both panels."""
    half_width = HALF_WIDTH * found.unit
    # an even number of points, so that none is at the centre, where the prior may have a spike or a pole
    return found.centre + torch.linspace(-half_width, half_width, 400, dtype=torch.float64)


def _cases(found: Equivalence) -> list[tuple[str | None, tuple[float, ...]]]:
    """The lines to plot: a label, and the arguments of the penalty after the location."""
    if found.family == "dirac":
        return [(None, ())]
    if found.family == "dropout":
        return [(f"keep {p:g}", (p,)) for p in (KEEP_RATES if found.scale is None else (found.scale,))]
    if found.scale is not None:
        return [(f"scale {found.scale:.3g}", (found.scale,))]
    scales = [s * found.unit for s in CURVE_SCALES]
    if found.family == "spike_slab":
        return [(f"scale {s:.2g}, kept 0.5", (s, 0.5)) for s in scales]
    return [(f"scale {s:.2g}", (s,)) for s in scales]
