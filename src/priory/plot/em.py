"""Plots of EM: the bound that touches the log-likelihood, Jensen's inequality, mixture components and their number.

`turns` computes iterations of EM along one or two entries of theta, for any latent model (`priory.plot.em_turns` has
the equations). `bound` plots one turn, an E-step and an M-step; `frames` plots several turns side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Normal

from priory.core.data import tensor_of
from priory.core.errors import extra, is_integer, require
from priory.core.tables import counted
from priory.latent import GaussianMixture
from priory.plot.em_turns import Turn, entries, summit, turns
from priory.plot.style import BLUE, COLOURS, GREEN, GREY, INK, VERMILION, _axes, _list

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from priory.latent.base import Theta

__all__ = [
    "Turn",
    "bound",
    "components",
    "covariances",
    "ellipse",
    "entries",
    "evidence",
    "frames",
    "jensen",
    "summit",
    "turns",
]

MAX_ROWS = 2_000  # rows plotted: more would hide each other
LIKELIHOOD_LABEL, BOUND_LABEL = r"$\log p(y \mid \theta)$", r"the bound $Q(\theta, \theta_t) + H(q_t)$"
CURRENT_LABEL, NEXT_LABEL = r"$\theta_t$, where they touch", r"$\theta_{t+1}$, above the bound's top"
GAP_LABEL = r"KL$(q_t\,\Vert\,p(z \mid y, \theta_{t+1}))$, on top"


def bound(turn: Turn, names: Sequence[str] = (r"$\theta$",), *, title: str = "", ax: Axes | None = None) -> Axes:
    """Plot one turn: the log-likelihood, the bound that touches it at theta_t, and theta_{t+1} at its maximum.

    Along two entries of theta both are shown as contours, with an arrow from theta_t to theta_{t+1}.

    Args:
        turn: A turn, as `turns` returns.
        names: Axis label of each entry of u.
        title: Title of the plot. Default: a description.
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.

    Raises:
        InputError: If there is not one name per entry of u.
    """
    must = f"be {len(turn.here)}, one per entry of u"
    require(len(names) == len(turn.here), "names", "plot.em.bound", must, list(names))
    if len(turn.here) == 2:
        return _contours(turn, names, title or "One EM iteration", ax)
    title = title or "One EM iteration: maximising the bound raises the log-likelihood"
    ax = _axes(ax, title, names[0], "nats, whole data")
    (grid,), here, after = turn.grids, float(turn.here), float(turn.after)
    ax.plot(_list(grid), _list(turn.log_likelihood), color=INK, linewidth=2, label=LIKELIHOOD_LABEL)
    ax.plot(_list(grid), _list(turn.bound), color=VERMILION, linewidth=2, label=BOUND_LABEL)
    ax.fill_between(
        _list(grid), _list(turn.bound), _list(turn.log_likelihood), color=VERMILION, alpha=0.08, linewidth=0
    )
    low, high = float(turn.log_likelihood.min()), float(turn.log_likelihood.max())
    room = (high - low) or 1.0
    ax.set_ylim(low - 0.25 * room, high + 0.12 * room)
    foot = low - 0.25 * room
    for u, value in ((here, turn.at_here), (after, turn.at_after)):
        ax.plot([u, u], [foot, value], ":", color=GREY, linewidth=1.2)
    gap = {"color": GREEN, "linewidth": 3.5, "solid_capstyle": "butt", "label": GAP_LABEL}
    ax.plot([after, after], [turn.top, turn.at_after], **gap)
    ax.plot([here], [turn.at_here], "o", color=VERMILION, markersize=8, label=CURRENT_LABEL, zorder=4)
    ax.plot([after], [turn.top], "^", color=VERMILION, markersize=7, zorder=4)
    ax.plot([after], [turn.at_after], "D", color=BLUE, markersize=7, label=NEXT_LABEL, zorder=4)
    ax.legend(frameon=False, fontsize=9)
    return ax


def frames(found: Sequence[Turn], names: Sequence[str] = (r"$\theta$",), columns: int = 3) -> Figure:
    """Plot turns side by side, with shared axes.

    Args:
        found: Turns, as `turns` returns.
        names: Axis label of each entry of u.
        columns: Number of panels per row. Default: 3.

    Returns:
        A new figure.

    Raises:
        InputError: If there are no turns.
    """
    require(len(found) > 0, "found", "plot.em.frames", "hold at least one turn", "none")
    columns = min(columns, len(found))
    rows = -(-len(found) // columns)
    size = (4.2 * columns, 3.9 * rows)
    figure = extra("matplotlib.figure", "plot").Figure(figsize=size, dpi=110, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for t, (turn, ax) in enumerate(zip(found, panels.flat, strict=False)):
        rise = turn.at_after - turn.at_here
        bound(turn, names, title=f"Turn {t + 1}: up by {rise:.{1 if rise >= 0.1 else 4}f} nats", ax=ax)
        ax.label_outer()
        ax.get_legend().remove()
    for ax in list(panels.flat)[len(found) :]:
        ax.remove()
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _contours(turn: Turn, names: Sequence[str], title: str, ax: Axes | None) -> Axes:
    """Plot the log-likelihood in grey, contours of the bound, and an arrow from theta_t to theta_{t+1}."""
    ax = _axes(ax, title, names[0], names[1])
    first, second = (_list(grid) for grid in turn.grids)
    high = float(turn.log_likelihood.max())
    depth = high - float(turn.log_likelihood.quantile(0.15))
    # Levels are denser near the maximum, so that its neighbourhood is resolved as well as the slopes.
    levels = [high - depth * (1 - k / 12) ** 2 for k in range(12)] + [high + 1e-9 * depth]
    ax.contourf(first, second, turn.log_likelihood.T.tolist(), levels, cmap="Greys_r", alpha=0.6, extend="min")
    bound_levels = [turn.top - depth * (1 - k / 6) ** 2 for k in range(6)]
    ax.contour(first, second, turn.bound.T.tolist(), bound_levels, colors=VERMILION, linewidths=1.2, linestyles="solid")
    here, after = tuple(turn.here.tolist()), tuple(turn.after.tolist())
    arrow = {"arrowstyle": "-|>", "color": BLUE, "linewidth": 1.8, "shrinkA": 6, "shrinkB": 6}
    ax.annotate("", after, here, arrowprops=arrow)
    label = f"{LIKELIHOOD_LABEL}, lighter is higher"
    ax.plot([], [], "s", color="#d9d9d9", markeredgecolor=GREY, markersize=9, label=label)
    ax.plot([], [], color=VERMILION, linewidth=1.2, label=BOUND_LABEL)
    ax.plot([here[0]], [here[1]], "o", color=VERMILION, markersize=8, label=CURRENT_LABEL)
    ax.plot([after[0]], [after[1]], "D", color=BLUE, markersize=7, label=NEXT_LABEL)
    ax.legend(frameon=True, framealpha=0.85, edgecolor="white", fontsize=9, loc="upper left")
    return ax


def jensen(
    values: Sequence[float] = (0.3, 3.2), weights: Sequence[float] = (0.55, 0.45), *, ax: Axes | None = None
) -> Axes:
    """Plot Jensen's inequality for the logarithm, log E[x] >= E[log x].

    In EM the values are p(y, z) / q(z) and the weights are q(z). For q = p(z | y) all values are equal, and the gap is
    zero.

    Args:
        values: At least two positive numbers x.
        weights: Their probabilities, which sum to 1.
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.

    Raises:
        InputError: If the values are not positive, or if the weights are not probabilities.
    """
    x, q = (torch.as_tensor(t, dtype=torch.float64) for t in (values, weights))
    ok = x.ndim == 1 and len(x) > 1 and bool((x > 0).all())
    require(ok, "values", "plot.em.jensen", "be at least two positive numbers", values)
    ok = q.shape == x.shape and bool((q >= 0).all()) and abs(float(q.sum()) - 1) < 1e-9
    require(ok, "weights", "plot.em.jensen", "be one per value, >= 0, and sum to 1", weights)
    mean, inside = float(q @ x), float(q @ x.log())
    low, high = float(x.min()), float(x.max())
    room = (high - low) or high
    grid = torch.linspace(max(low - 0.15 * room, 0.25 * low), high + 0.15 * room, 300, dtype=torch.float64)
    ax = _axes(ax, "Jensen: the log of a mean is at least the mean of the logs", "x", "log x")
    ax.plot(_list(grid), _list(grid.log()), color=INK, linewidth=2, label="log x (concave)")
    order = x.argsort()
    ring = torch.cat([order, order[:1]])
    ax.plot(_list(x[ring]), _list(x.log()[ring]), color=VERMILION, linewidth=1.4, label="averages of (x, log x)")
    ax.fill(_list(x[order]), _list(x.log()[order]), color=VERMILION, alpha=0.08, linewidth=0)
    area = [40 + 260 * share for share in q.tolist()]
    ax.scatter(_list(x), _list(x.log()), s=area, color=GREY, zorder=3, label="values x, area by q")
    ax.plot([mean, mean], [inside, math.log(mean)], color=GREEN, linewidth=3.5, solid_capstyle="butt")
    ax.plot([mean], [math.log(mean)], "D", color=BLUE, markersize=8, zorder=4, label="log E[x]")
    ax.plot([mean], [inside], "o", color=VERMILION, markersize=8, zorder=4, label="E[log x]")
    gap = math.log(mean) - inside
    place = (mean, inside + 0.85 * gap)
    ax.annotate(f"gap {gap:.3g}", place, xytext=(8, -4), textcoords="offset points", color=GREEN, fontsize=9)
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    return ax


def components(posterior: Any, data: Any, columns: tuple[int, int] = (0, 1), *, ax: Axes | None = None) -> Axes:
    """Plot the components of a Gaussian mixture over the data, with rows coloured by their responsibilities.

    With one column of data, the plot shows the density of each component, with the rows below the axis. With more, it
    shows ellipses of one and two standard deviations in two columns; rows with a missing value there are left out.

    Args:
        posterior: A posterior of a Gaussian mixture.
        data: Rows to plot.
        columns: Two column indices to plot. Default: (0, 1).
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.

    Raises:
        InputError: If the posterior is not of a Gaussian mixture, or if the columns are invalid.
    """
    model = getattr(posterior, "latent", None)
    must = "be of a Gaussian mixture"
    require(isinstance(model, GaussianMixture), "posterior", "plot.em.components", must, repr(posterior))
    assert isinstance(model, GaussianMixture)
    theta = posterior.mean
    weights, means = theta["weights"].double().cpu(), theta["means"].reshape(model.k, -1).double().cpu()
    spread = covariances(model, theta).double().cpu()
    y = tensor_of(data, "The 'data' of plot.em.components").to(model.dtype)
    q = posterior.responsibilities(y).double().cpu()
    one = y.ndim == 1 or y.shape[1] == 1
    rows = y.reshape(len(y), -1).double().cpu()
    ok = one or (len(set(columns)) == 2 and all(is_integer(c, 0) and c < rows.shape[1] for c in columns))
    require(ok, "columns", "plot.em.components", f"be two different integers from 0 to {rows.shape[1] - 1}", columns)
    pick = rows if one else rows[:, list(columns)]
    seen = (~pick.isnan().any(1)).nonzero()[:, 0]
    some = seen[:: max(1, -(-len(seen) // MAX_ROWS))]
    colours = blended(q[some])
    if one:
        return _densities(pick[some, 0], colours, weights, means[:, 0], spread[:, 0, 0], ax)
    title = f"{counted(len(weights), 'component')}, at one and two standard deviations"
    ax = _axes(ax, title, f"column {columns[0]}", f"column {columns[1]}")
    x, second = (_list(t) for t in pick[some].T)
    ax.scatter(x, second, s=14, c=colours, linewidths=0, alpha=0.8)
    index = torch.tensor(columns)
    for k, colour in zip(range(len(weights)), _many(len(weights)), strict=True):
        for deviations, width in ((1, 2.2), (2, 1.2)):
            outline = ellipse(means[k, index], spread[k][index[:, None], index], deviations)
            ax.plot(*outline, color=colour, linewidth=width)
        place = means[k, index].tolist()
        style = {"ha": "center", "va": "center", "fontsize": 9, "color": INK}
        box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": colour, "alpha": 0.85}
        ax.annotate(f"{float(weights[k]):.2f}", place, bbox=box, **style)
    return ax


def _densities(y: Tensor, colours: list[Any], weights: Tensor, means: Tensor, spread: Tensor, ax: Axes | None) -> Axes:
    """Plot the densities of the components along one column, with the rows below the axis."""
    ax = _axes(ax, f"{counted(len(weights), 'component')}, and the rows by responsibility", "y", "density")
    low, high = float(y.min()), float(y.max())
    grid = torch.linspace(low - 0.1 * (high - low), high + 0.1 * (high - low), 400, dtype=torch.float64)
    each = weights * Normal(means, spread.sqrt()).log_prob(grid[:, None]).exp()  # (G, K)
    for k, colour in zip(range(len(weights)), _many(len(weights)), strict=True):
        label = f"component {k}: {float(weights[k]):.2f}"
        ax.fill_between(_list(grid), _list(each[:, k]), color=colour, alpha=0.25, linewidth=0)
        ax.plot(_list(grid), _list(each[:, k]), color=colour, linewidth=1.8, label=label)
    ax.plot(_list(grid), _list(each.sum(1)), color=INK, linewidth=1.4, linestyle="--", label="the mixture")
    foot = -0.05 * float(each.sum(1).max())
    ax.scatter(_list(y), [foot] * len(y), s=40, c=colours, marker="|", linewidths=1)
    ax.legend(frameon=False, fontsize=9)
    return ax


def evidence(posteriors: Mapping[int, Any], *, ax: Axes | None = None) -> Axes:
    """Plot the lower bound on log p(y) against the number of components, and mark the highest.

    The bound is `log_evidence_of_labels`. The best value is annotated, and for all others the difference from it.

    Args:
        posteriors: Posteriors of `VariationalEM` by their number of components.
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.

    Raises:
        InputError: If there are no posteriors, or if one is not of `VariationalEM`.
    """
    ok = len(posteriors) > 0 and all(hasattr(one, "log_evidence_of_labels") for one in posteriors.values())
    require(ok, "posteriors", "plot.em.evidence", "be of VariationalEM, by their number of components", posteriors)
    numbers = sorted(posteriors)
    values = [posteriors[k].log_evidence_of_labels.value for k in numbers]
    best = max(range(len(values)), key=values.__getitem__)
    title = f"The bound is highest with {numbers[best]} component{'s' * (numbers[best] != 1)}"
    ax = _axes(ax, title, "components", "lower bound of log p(y), nats")
    ax.plot(numbers, values, color=BLUE, linewidth=1.6, marker="o", markersize=6)
    ax.plot([numbers[best]], [values[best]], "D", color=VERMILION, markersize=9)
    for k, value in zip(numbers, values, strict=True):
        text = f"{value:.1f}" if value == values[best] else f"{value - values[best]:.1f}"
        ax.annotate(text, (k, value), xytext=(0, 10), textcoords="offset points", ha="center", fontsize=9, color=INK)
    ax.set_xticks(numbers)
    ax.margins(0.1, 0.12)
    return ax


# Helpers.


def covariances(model: GaussianMixture, theta: Theta) -> Tensor:
    """Return the covariance of each component, (K, D, D), for every covariance structure."""
    _, spread = model.standard(theta)
    scale = model.frame["scale"]
    return (spread.diag_embed() if spread.ndim == 2 else spread) * scale[:, None] * scale


def ellipse(mean: Tensor, covariance: Tensor, deviations: float) -> tuple[list[float], list[float]]:
    """Return the outline of a Gaussian in the plane, at the given number of standard deviations from its mean."""
    angle = torch.linspace(0, 2 * math.pi, 120, dtype=mean.dtype)
    circle = torch.stack([angle.cos(), angle.sin()])
    x, y = mean[:, None] + deviations * torch.linalg.cholesky(covariance) @ circle
    return _list(x), _list(y)


def blended(q: Tensor) -> list[list[float]]:
    """Return one colour per row, the colours of the components mixed by responsibilities (n, K)."""
    codes = [[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in _many(q.shape[1])]
    return (q @ torch.tensor(codes, dtype=q.dtype)).clamp(0, 1).tolist()


def _many(count: int) -> list[str]:
    """The first `count` colours of the palette, repeated if necessary."""
    return [COLOURS[k % len(COLOURS)] for k in range(count)]
