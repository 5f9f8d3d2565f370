"""Calibration: whether events predicted with probability p occur with frequency p.

Predictions of numbers are checked by central intervals and the probability integral transform (Gneiting, Balabdaoui and
Raftery, 2007, "Probabilistic Forecasts, Calibration and Sharpness"). Predictions of classes are checked by the
confidence in the most probable class, in bins (Guo et al., 2017, "On Calibration of Modern Neural Networks").
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
    """Compute the fraction of targets inside the central interval of each level.

    For a calibrated prediction it equals the level.

    Args:
        prediction: A prediction of numbers.
        y: Targets, in the shape of the predictive mean.
        levels: Probabilities of the intervals, between 0 and 1. Default: 0.1, 0.2, ..., 0.9.

    Returns:
        One fraction per level, in float64.

    Raises:
        InputError: If the prediction is of classes, if the shapes differ, or if a level is not between 0 and 1.
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
    """Compute the probability integral transform: the predictive cumulative distribution function at each target.

    For a calibrated prediction it is uniform on (0, 1). A hump means that the prediction is too wide, a U shape that it
    is too narrow, a slope that it is biased. For counts it is the middle of the step, (F(y - 1) + F(y)) / 2.

    Args:
        prediction: A prediction of numbers.
        y: Targets, in the shape of the predictive mean.

    Returns:
        Values in [0, 1], in the shape of the targets.

    Raises:
        InputError: If the prediction is of classes, or if the shapes differ.

    References:
        Gneiting, Balabdaoui and Raftery (2007), Probabilistic forecasts, calibration and sharpness.
    """
    require(not prediction.classes, "prediction", "pit", "be of numbers, not of classes", "classes")
    y = matched(y, prediction.mean, "pit")
    if prediction.likelihood.discrete:
        return 0.5 * (prediction.cdf(y - 1) + prediction.cdf(y))
    return prediction.cdf(y)


@dataclass(frozen=True)
class Reliability:
    """A reliability curve: confidence against accuracy, in bins of equal width. Empty bins hold NaN.

    Attributes:
        edges: Edges of the bins, (bins + 1,).
        count: Number of targets per bin.
        confidence: Mean probability of the most probable class per bin.
        frequency: Fraction of targets per bin for which that class is correct.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    frequency: Tensor


def reliability(probs: Prediction | Tensor, y: Any, bins: int = 15) -> Reliability:
    """Compute the reliability curve: confidence against accuracy, in bins `(low, high]` of the confidence.

    Args:
        probs: A prediction of classes; or probabilities, (n, K) of classes or (n, ...) of label 1.
        y: Class indices (n,), or binary labels in the shape of the probabilities.
        bins: Number of bins of equal width. Default: 15.

    Returns:
        The curve.

    Raises:
        InputError: If the prediction is of numbers, if the targets do not fit it, or if `bins` is below 1.

    References:
        Guo, Pleiss, Sun and Weinberger (2017), On calibration of modern neural networks.
    """
    require(bins >= 1, "bins", "reliability", "be an integer >= 1", bins)
    confidence, correct = top_class(probs, y, "reliability")
    edges = bin_edges(bins, confidence.device)
    bin_index = reliability_bins(confidence, bins)
    count = torch.bincount(bin_index, minlength=bins)
    confidences = torch.bincount(bin_index, weights=confidence, minlength=bins) / count
    frequencies = torch.bincount(bin_index, weights=correct.double(), minlength=bins) / count
    return Reliability(edges, count, confidences, frequencies)


def bin_edges(bins: int, device: torch.device) -> Tensor:
    """The edges of bins of equal width from 0 to 1, (bins + 1,)."""
    return torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=device)


def reliability_bins(confidence: Tensor, bins: int = 15) -> Tensor:
    """The bin of each confidence; a value on an edge belongs to the bin below."""
    return torch.bucketize(confidence, bin_edges(bins, confidence.device)[1:-1])


def expected_calibration_error(probs: Prediction | Tensor, y: Any, bins: int = 15) -> float:
    """Compute the expected calibration error, `sum_b (n_b / n) |frequency_b - confidence_b|`; lower is better.

    Args:
        probs: A prediction of classes; or probabilities, (n, K) of classes or (n, ...) of label 1.
        y: Class indices (n,), or binary labels in the shape of the probabilities.
        bins: Number of bins of equal width. Default: 15.

    Returns:
        The error, between 0 and 1.

    References:
        Guo, Pleiss, Sun and Weinberger (2017), On calibration of modern neural networks.
    """
    curve = reliability(probs, y, bins)
    gap = (curve.frequency - curve.confidence).abs().nan_to_num(0.0)
    return float((gap * curve.count).sum() / curve.count.sum())


def calibration_error(prediction: Prediction, y: Any) -> float:
    """Compute one calibration error for predictions of numbers or classes; 0 is perfect, lower is better.

    For numbers it is the mean of `|coverage - level|` over the levels 0.1, 0.2, ..., 0.9, for classes the expected
    calibration error in 15 bins.

    Args:
        prediction: A prediction of numbers or classes.
        y: Targets, one per row of the prediction.

    Returns:
        The error, between 0 and 1.
    """
    if prediction.classes:
        return expected_calibration_error(prediction, y)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    return float((coverage(prediction, y).cpu() - levels).abs().mean())
