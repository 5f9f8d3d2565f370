"""Calibration: whether events that are given a probability p happen with frequency p.

For numbers, by central intervals and the probability integral transform (Gneiting, Balabdaoui and Raftery,
2007); for classes, by the confidence of the most probable class in bins (Guo et al., 2017, "On Calibration
of Modern Neural Networks").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import require
from priory.evaluate.scores import matched, top_class

if TYPE_CHECKING:
    from priory.predictive import Prediction

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def coverage(prediction: Prediction, y: Any, levels: Sequence[float] = LEVELS) -> Tensor:
    """Fraction of the targets inside the central interval of each level.

    A calibrated prediction gives the levels themselves.
    """
    require(not prediction.classes, "prediction", "coverage", "be of numbers, not of classes", "classes")
    y = matched(y, prediction.mean, "coverage")
    inside = []
    for level in levels:
        require(0 < level < 1, "levels", "coverage", "lie strictly between 0 and 1", level)
        low, high = prediction.interval(level)
        inside.append(((low <= y) & (y <= high)).double().mean())
    require(len(inside) > 0, "levels", "coverage", "hold at least one level", list(levels))
    return torch.stack(inside)


def pit(prediction: Prediction, y: Any) -> Tensor:
    """Probability integral transform: the predictive's distribution function at each target, in y's shape.

    Uniform on (0, 1) if the prediction is calibrated: a hump says that it is too wide, a U that it is too
    narrow, a slope that it is biased. For counts it is the middle of the step, (F(y - 1) + F(y)) / 2.
    """
    require(not prediction.classes, "prediction", "pit", "be of numbers, not of classes", "classes")
    y = matched(y, prediction.mean, "pit")
    if prediction.likelihood.discrete:
        return 0.5 * (prediction.cdf(y - 1) + prediction.cdf(y))
    return prediction.cdf(y)


@dataclass(frozen=True)
class Reliability:
    """A reliability curve: what was promised and what happened, in bins of equal width; empty bins hold NaN.

    `edges` (bins + 1,), and for each bin `count`, `confidence` (mean probability of the most probable
    class) and `frequency` (how often that class was right).
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    frequency: Tensor


def reliability(probs: Prediction | Tensor, y: Any, bins: int = 15) -> Reliability:
    """Confidence against frequency of being right, in `bins` bins `(low, high]` of the confidence."""
    require(bins >= 1, "bins", "reliability", "be at least 1", bins)
    confidence, correct = top_class(probs, y, "reliability")
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    place = torch.bucketize(confidence, edges[1:-1])  # a value on an edge belongs to the bin below
    count = torch.bincount(place, minlength=bins)
    promised = torch.bincount(place, weights=confidence, minlength=bins) / count
    happened = torch.bincount(place, weights=correct.double(), minlength=bins) / count
    return Reliability(edges, count, promised, happened)


def expected_calibration_error(probs: Prediction | Tensor, y: Any, bins: int = 15) -> float:
    """Mean distance between confidence and frequency, `sum_b (n_b / n) |frequency_b - confidence_b|`."""
    curve = reliability(probs, y, bins)
    gap = (curve.frequency - curve.confidence).abs().nan_to_num(0.0)
    return float((gap * curve.count).sum() / curve.count.sum())


def calibration_error(prediction: Prediction, y: Any) -> float:
    """One number for both kinds: 0 is perfect, lower is better.

    Numbers: the mean of `|coverage - level|` over the levels 0.1, 0.2, ..., 0.9. Classes: the expected
    calibration error in 15 bins.
    """
    if prediction.classes:
        return expected_calibration_error(prediction, y)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    return float((coverage(prediction, y).cpu() - levels).abs().mean())
