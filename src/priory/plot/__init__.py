"""Plots of a fit, of its chains, of its predictions and of their calibration, as matplotlib Axes or Figures.

Figures are made without pyplot, so no global state is opened or changed. In a notebook end the cell with
`plot.predictive(...).figure`; in a script call `.figure.savefig(path)`. The colours are the palette of Okabe and Ito
(2008), which is safe for all kinds of colour vision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory import evaluate
from priory.core.errors import require
from priory.evaluate.scores import matched, top_class
from priory.plot.chains import energy, pair, rank, trace
from priory.plot.style import (
    BLUE,
    COLOURS,
    GREY,
    INK,
    SKY,
    VERMILION,
    _axes,
    _cycle,
    _list,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from priory.predictive import Prediction

__all__ = ["COLOURS", "calibration", "energy", "history", "pair", "predictive", "rank", "trace"]

MAX_INTERVALS = 120  # more intervals side by side cannot be distinguished
MAX_POINTS = 1_000  # points per curve, about one per pixel of width
HISTORY_TITLES = {
    "elbo": "Evidence lower bound, step by step (higher is better)",
    "loss": "Loss, step by step (lower is better)",
    "nll": "Negative log-likelihood of the fitted rows, step by step",
    "kl": "KL from posterior to prior, step by step",
    "log_prior": "Log prior, step by step",
}


def history(posterior: Any, quantity: str | None = None, *, ax: Axes | None = None) -> Axes:
    """Plot a metric of the fit against the step.

    The faint line shows every step, the strong line a running mean. Values are in nats for the whole data set.

    Args:
        posterior: A posterior, or a dict of posteriors by name.
        quantity: Name of the metric in `posterior.history`. Default: None, for the ELBO, or the loss if there is no
            ELBO.
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.

    Raises:
        InputError: If there is no posterior, or if not every posterior has recorded this metric.
    """
    named = dict(posterior) if isinstance(posterior, Mapping) else {"": posterior}
    require(len(named) > 0, "posterior", "plot.history", "hold at least one posterior", "an empty dict")
    shared = set.intersection(*(set(one.history) for one in named.values()))
    if quantity is None:
        quantity = next((name for name in ("elbo", "loss", *sorted(shared)) if name in shared), None)
    require(quantity in shared, "quantity", "plot.history", f"be one of {sorted(shared)}", quantity)
    name = str(quantity)
    ax = _axes(ax, HISTORY_TITLES.get(name, name), "step", "nats, whole data")

    needed, everything = [], []  # values that must be visible, and all values
    for (label, one), colour in zip(named.items(), _cycle(len(named)), strict=True):
        values = torch.as_tensor(one.history[name]).double().cpu()
        steps = torch.arange(1, len(values) + 1)
        window = max(1, len(values) // 50)
        thinned = slice(None, None, max(1, len(values) // MAX_POINTS))
        if window > 1:
            ax.plot(_list(steps[thinned]), _list(values[thinned]), color=colour, alpha=0.25, linewidth=0.6)
        smooth = values.unfold(0, window, 1).mean(-1)
        ends = steps[window - 1 :]
        ax.plot(_list(ends[thinned]), _list(smooth[thinned]), color=colour, linewidth=1.8, label=label or None)
        needed += _span(values) + _span(smooth[len(smooth) // 5 :], 0.0) + [smooth[-1].item()]
        everything += _span(smooth, 0.0)
    _limit_height(ax, needed, everything)
    if isinstance(posterior, Mapping):
        ax.legend(frameon=False, fontsize=9)
    return ax


def predictive(
    prediction: Prediction, x: Any = None, y: Any = None, *, level: float = 0.9, ax: Axes | None = None
) -> Axes:
    """Plot a prediction with its epistemic uncertainty (from the weights) and its total uncertainty.

    With inputs of one column, the plot shows the mean and its bands along x, and the targets if given. With other
    inputs, or none, it shows the rows in order of their predicted mean, each with its interval and its target. For
    predictions of classes it shows histograms of the confidence in the most probable class, for correct and wrong rows.

    Args:
        prediction: A prediction of numbers or classes.
        x: Inputs of the prediction. Default: None.
        y: Targets. Default: None; required for predictions of classes and unless `x` has one column.
        level: Probability of the intervals, between 0 and 1. Default: 0.9.
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.

    Raises:
        InputError: If `level` is out of range, if targets are missing, or if shapes do not match.
    """
    require(0 < level < 1, "level", "plot.predictive", "lie strictly between 0 and 1", level)
    if prediction.classes:
        require(y is not None, "y", "plot.predictive", "be given for predictions of classes", None)
        return _confidences(prediction, y, ax)
    if y is not None:
        y = matched(y, prediction.mean, "plot.predictive")
    inputs = None if x is None else torch.as_tensor(x)
    if inputs is not None and (inputs.ndim == 1 or (inputs.ndim == 2 and inputs.shape[1] == 1)):
        return _along_input(prediction, inputs.reshape(-1), y, level, ax)
    require(y is not None, "y", "plot.predictive", "be given when the inputs have more than one column", None)
    return _row_by_row(prediction, torch.as_tensor(y), level, ax)


def calibration(prediction: Prediction, y: Any, *, ax: Axes | None = None) -> Axes:
    """Plot predicted probabilities against observed frequencies; a calibrated prediction lies on the diagonal.

    The grey band is two standard errors of a frequency: deviations inside it may be chance. For numbers, the plot shows
    the fraction of targets inside the central interval of each level. For classes, it is a reliability diagram: the
    accuracy of the most probable class against the confidence in it.

    Args:
        prediction: A prediction of numbers or classes.
        y: Targets, one per row of the prediction.
        ax: Axes to draw on. Default: None, for a new figure.

    Returns:
        The axes.
    """
    if prediction.classes:
        return _reliability(prediction, y, ax)
    levels = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    inside = evaluate.coverage(prediction, y, levels.tolist()).cpu()
    error = evaluate.calibration_error(prediction, y)
    title = f"Calibration: intervals are off by {100 * error:.1f} points on average"
    ax = _axes(ax, title, "level of the interval", "fraction of targets inside")
    _diagonal(ax, prediction.mean.numel())
    ax.plot(_list(levels), _list(inside), color=BLUE, marker="o", markersize=4, label="this prediction")
    _unit_square(ax)
    return ax


def _along_input(prediction: Prediction, x: Tensor, y: Tensor | None, level: float, ax: Axes | None) -> Axes:
    """Plot the mean and its bands along one input column."""
    shape = tuple(prediction.mean.shape)
    one = prediction.mean.numel() == len(x)
    require(one, "prediction", "plot.predictive", "have one output for each of its inputs", shape)
    order = x.argsort().cpu()

    def along(values: Tensor) -> list[float]:
        return _list(values.detach().cpu().reshape(-1)[order])

    (low, high), (inner_low, inner_high) = _bands(prediction, level)
    ax = _axes(ax, f"Prediction with {_percent(level)} bands", "x", "y")
    ax.fill_between(along(x), along(low), along(high), color=SKY, alpha=0.35, linewidth=0, label="total")
    label = "epistemic (weights)"
    ax.fill_between(along(x), along(inner_low), along(inner_high), color=BLUE, alpha=0.4, linewidth=0, label=label)
    ax.plot(along(x), along(prediction.mean), color=BLUE, linewidth=2, label="mean")
    if y is not None:
        ax.plot(along(x), along(y), ".", color=INK, markersize=5, label="targets")
    ax.legend(frameon=False, fontsize=9)
    return ax


def _row_by_row(prediction: Prediction, y: Tensor, level: float, ax: Axes | None) -> Axes:
    """Plot the rows in order of their predicted mean, each with its intervals and its target."""
    ends = [end.detach().cpu().reshape(-1) for band in _bands(prediction, level) for end in band]
    low, high, inner_low, inner_high = ends
    mean, y = prediction.mean.detach().cpu().reshape(-1), y.detach().cpu().reshape(-1)
    inside = (low <= y) & (y <= high)
    title = f"{_percent(level)} intervals hold {100 * inside.double().mean():.0f} % of {len(y)} targets"
    shown = min(len(y), MAX_INTERVALS)
    pick = mean.argsort()[torch.linspace(0, len(y) - 1, shown, dtype=torch.float64).round().long()]
    few = "" if shown == len(y) else f" ({shown} of {len(y)} shown)"
    ax = _axes(ax, title, f"rows, by predicted mean{few}", "target")
    rows = torch.arange(shown)
    ax.vlines(_list(rows), _list(low[pick]), _list(high[pick]), color=SKY, alpha=0.6, linewidth=2.5, label="total")
    bottom, top, label = inner_low[pick], inner_high[pick], "epistemic (weights)"
    ax.vlines(_list(rows), _list(bottom), _list(top), color=BLUE, linewidth=2.5, label=label)
    for which, colour, marker, size, label in (
        (inside[pick], INK, "o", 4, "target inside"),
        (~inside[pick], VERMILION, "X", 6, "target outside"),
    ):
        ax.plot(_list(rows[which]), _list(y[pick][which]), marker, color=colour, markersize=size, label=label)
    ax.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top + 0.15 * (top - bottom))  # room for the legend
    return ax


def _confidences(prediction: Prediction, y: Any, ax: Axes | None) -> Axes:
    """Plot a stacked histogram of the confidence in the most probable class, for correct and wrong rows."""
    confidence, correct = (part.cpu() for part in top_class(prediction, y, "plot.predictive"))
    title = f"Confidence; {100 * correct.double().mean():.1f} % of {len(correct)} rows are correct"
    ax = _axes(ax, title, "confidence in the most probable class", "number of rows")
    confidence = confidence.clamp(max=1.0)  # a sum of probabilities can round to more than 1
    edges = [k / 20 for k in range(21)]
    parts = [_list(confidence[correct]), _list(confidence[~correct])]
    ax.hist(parts, bins=edges, stacked=True, color=[BLUE, VERMILION], label=["correct", "wrong"], edgecolor="white")
    ax.set_xlim(min(0.5, math.floor(20 * float(confidence.min())) / 20), 1)  # starts at a bin edge
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    return ax


def _reliability(prediction: Prediction, y: Any, ax: Axes | None) -> Axes:
    """Plot accuracy against confidence in ten bins, with the area of a point by its number of rows."""
    curve = evaluate.reliability(prediction, y, bins=10)
    count, promised, happened = (part.cpu() for part in (curve.count, curve.confidence, curve.frequency))
    title = f"Reliability: expected calibration error {evaluate.expected_calibration_error(prediction, y):.3f}"
    ax = _axes(ax, title, "confidence in the most probable class", "accuracy")
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="perfect")
    full = count > 0
    # Two standard errors of a frequency, from the rows of each bin.
    error = 2 * (promised * (1 - promised) / count).sqrt()
    low, high = (promised - error)[full], (promised + error)[full]
    label = "two standard errors"
    ax.vlines(_list(promised[full]), _list(low), _list(high), color="#cccccc", linewidth=7, label=label)
    area = 30 + 170 * count[full] / count.sum()
    shape = {"s": _list(area), "color": BLUE, "zorder": 3, "clip_on": False}
    ax.scatter(_list(promised[full]), _list(happened[full]), **shape, label="this prediction, area by rows")
    _unit_square(ax)
    return ax


def _diagonal(ax: Axes, rows: int) -> None:
    """Plot the diagonal of perfect calibration and two standard errors of a frequency around it."""
    level = torch.linspace(0, 1, 101, dtype=torch.float64)
    error = 2 * (level * (1 - level) / rows).sqrt()
    low, high = (level - error).clamp(0, 1), (level + error).clamp(0, 1)
    band = f"two standard errors of {rows} rows"
    ax.fill_between(_list(level), _list(low), _list(high), color=GREY, alpha=0.2, linewidth=0, label=band)
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="perfect")


def _unit_square(ax: Axes) -> None:
    """Set both axes to [0, 1] and add a legend."""
    ax.set_xlim(0, 1.02)
    ax.set_ylim(0, 1.02)
    ax.legend(frameon=False, fontsize=9, loc="upper left")


def _span(values: Tensor, tail: float = 0.05) -> list[float]:
    """A lower and an upper quantile of the finite values, so that a few extreme steps do not flatten the rest."""
    values = values[values.isfinite()].sort().values
    last = len(values) - 1
    return [values[round(tail * last)].item(), values[round((1 - tail) * last)].item()] if last >= 0 else []


def _limit_height(ax: Axes, needed: list[float], everything: list[float]) -> None:
    """Limit the height to the needed values, or to all values if that takes at most three times the height."""
    needed = [value for value in needed if math.isfinite(value)]
    if not needed:
        return
    low, high = min(needed), max(needed)
    if max(*everything, high) - min(*everything, low) <= 3 * (high - low):
        low, high = min(*everything, low), max(*everything, high)
    margin = 0.08 * (high - low) or 1.0
    ax.set_ylim(low - margin, high + margin)


def _bands(prediction: Prediction, level: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The ends of the interval, and within it those of a normal with the epistemic variance alone."""
    low, high = prediction.interval(level)
    reach = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item() * prediction.epistemic.sqrt()
    return (low, high), (torch.maximum(low, prediction.mean - reach), torch.minimum(high, prediction.mean + reach))


def _percent(level: float) -> str:
    """A probability as a percentage."""
    return f"{100 * level:g} %"
