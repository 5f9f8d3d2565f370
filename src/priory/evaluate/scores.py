"""Scores of predictions against targets: log score, RMSE, accuracy, Brier score and CRPS.

Every score is a float, the mean over the rows. RMSE and CRPS are in the units of the targets, log scores in nats per
row. The log score, the Brier score and the CRPS are proper: in expectation no forecast scores better than the true
distribution (Gneiting and Raftery, 2007, "Strictly Proper Scoring Rules, Prediction, and Estimation").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import require

if TYPE_CHECKING:
    from priory.predictive import Prediction


def log_score(prediction: Prediction, y: Any) -> float:
    """Compute the mean log predictive density of the targets, in nats per row; higher is better.

    Args:
        prediction: A prediction of numbers or classes.
        y: Targets, one per row of the prediction.

    Returns:
        The mean over the rows.
    """
    return float(prediction.log_prob(as_targets(y, prediction.mean)).double().mean())


def nll(prediction: Prediction, y: Any) -> float:
    """Compute the mean negative log predictive density of the targets, in nats per row; lower is better.

    Args:
        prediction: A prediction of numbers or classes.
        y: Targets, one per row of the prediction.

    Returns:
        The mean over the rows.
    """
    return -log_score(prediction, y)


def rmse(prediction: Prediction, y: Any) -> float:
    """Compute the root mean squared error of the predictive mean, in the units of the targets; lower is better.

    Args:
        prediction: A prediction of numbers.
        y: Targets, in the shape of the predictive mean.

    Returns:
        The root of the mean over rows and outputs.

    Raises:
        InputError: If the prediction is of classes, or if the shapes differ.
    """
    must = "be of numbers, not of classes (use accuracy)"
    require(not prediction.classes, "prediction", "rmse", must, "classes")
    y = matched(y, prediction.mean, "rmse")
    return math.sqrt(float((prediction.mean.double() - y.double()).square().mean()))


def accuracy(prediction: Prediction | Tensor, y: Any) -> float:
    """Compute the fraction of targets that equal the most probable class; higher is better.

    Args:
        prediction: A prediction of classes; or probabilities, (n, K) of classes or (n, ...) of label 1.
        y: Class indices (n,), or binary labels in the shape of the probabilities.

    Returns:
        The mean over rows and labels.

    Raises:
        InputError: If the prediction is of numbers, or if the targets do not fit it.
    """
    _, correct = top_class(prediction, y, "accuracy")
    return float(correct.double().mean())


def brier(prediction: Prediction | Tensor, y: Any) -> float:
    """Compute the Brier score, the mean squared error of the probabilities; lower is better.

    With K classes it is `mean_n sum_k (p_nk - [y_n = k])^2`, between 0 and 2. With binary labels, one or several per
    row, it is `mean (p - y)^2`, between 0 and 1.

    Args:
        prediction: A prediction of classes; or probabilities, (n, K) of classes or (n, ...) of label 1.
        y: Class indices (n,), or binary labels in the shape of the probabilities.

    Returns:
        The mean over rows and labels.

    Raises:
        InputError: If the prediction is of numbers, or if the targets do not fit it.
    """
    probs, y = class_probs(prediction, y, "brier")
    if probs.shape == y.shape:
        return float((probs - y).square().mean())
    one_hot = torch.nn.functional.one_hot(y.long(), probs.shape[-1])
    return float((probs - one_hot).square().sum(-1).mean())


def crps(prediction: Prediction, y: Any) -> float:
    """Compute the continuous ranked probability score, in the units of the targets; lower is better.

    `CRPS(F, y) = E|Y - y| - E|Y - Y'| / 2` for independent draws Y and Y' of the predictive distribution F. For a point
    forecast it is the absolute error. It is exact where the predictive distribution is a mixture of Gaussians
    (`crps_gaussian_mixture`), and otherwise the unbiased ("fair") estimate from `prediction.samples`.

    Args:
        prediction: A prediction of numbers.
        y: Targets, in the shape of the predictive mean.

    Returns:
        The mean over rows and outputs.

    Raises:
        InputError: If the prediction is of classes, if the shapes differ, or if there are fewer than 2 samples.

    References:
        Gneiting and Raftery (2007), Strictly proper scoring rules, prediction, and estimation.
    """
    require(not prediction.classes, "prediction", "crps", "be of numbers, not of classes (use brier)", "classes")
    y = matched(y, prediction.mean, "crps").double()
    normals = prediction.distribution.normals()
    if normals is not None:
        return crps_gaussian_mixture(normals.means, normals.stds, y, normals.weights)
    draws = prediction.samples.double().sort(0).values  # (S, n, ...)
    size = draws.shape[0]
    require(size >= 2, "prediction", "crps", "hold at least 2 samples", size)
    rank = 2.0 * torch.arange(size, dtype=torch.float64, device=draws.device) - size + 1.0
    # The sum of |a - b| over all pairs of sorted draws is 2 sum_i rank_i a_i, which needs no (S, S) table.
    spread = 2.0 * torch.einsum("s,s...->...", rank, draws) / (size * (size - 1))
    return float(((draws - y).abs().mean(0) - 0.5 * spread).mean())


def crps_gaussian_mixture(means: Tensor, stds: Tensor, y: Any, weights: Tensor | None = None) -> float:
    """Compute the exact CRPS of mixtures of S Gaussians, in the units of the targets; lower is better.

    With `A(m, v) = m (2 Phi(m / sqrt v) - 1) + 2 sqrt v phi(m / sqrt v)`, the mean of `|N(m, v)|`, and weights a it is
    `sum_s a_s A(y - m_s, v_s) - sum_st a_s a_t A(m_s - m_t, v_s + v_t) / 2`.

    Args:
        means: Means of the components, (S, n, ...).
        stds: Standard deviations of the components, (S, n, ...).
        y: Targets, (n, ...).
        weights: Weights of the components, (S, n, ...), which sum to 1 over S. Default: equal weights.

    Returns:
        The mean over rows and outputs.

    References:
        Grimit, Gneiting, Berrocal and Johnson (2006), The continuous ranked probability score for circular variables
        and its application to mesoscale forecast ensemble verification.
    """
    means, stds = torch.broadcast_tensors(torch.as_tensor(means).double(), torch.as_tensor(stds).double())
    y = matched(y, means[0], "crps_gaussian_mixture").double()
    a = torch.full_like(means, 1 / len(means)) if weights is None else weights.to(means).expand_as(means)
    distance = (a * _mean_absolute(y - means, stds)).sum(0)
    spread = torch.zeros_like(distance)
    for weight, mean, std in zip(a, means, stds, strict=True):  # one row of the (S, S) table at a time
        spread += weight * (a * _mean_absolute(mean - means, torch.hypot(std, stds))).sum(0)
    return float((distance - 0.5 * spread).mean())


def _mean_absolute(mean: Tensor, std: Tensor) -> Tensor:
    """E|Z| for Z ~ N(mean, std^2)."""
    z = mean / std
    return mean * torch.erf(z / math.sqrt(2.0)) + std * math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * z.square())


def as_targets(y: Any, like: Tensor) -> Tensor:
    """Return targets as a tensor on the device of `like`; floats take its dtype, class indices stay integers."""
    y = torch.as_tensor(y, device=like.device)
    return y.to(like.dtype) if y.is_floating_point() else y


def matched(y: Any, like: Tensor, owner: str) -> Tensor:
    """Return targets in the shape of the prediction; (n,) and (n, 1) would otherwise broadcast to (n, n)."""
    y = as_targets(y, like)
    y = y.squeeze(-1) if y.shape == (*like.shape, 1) else y
    require(y.shape == like.shape, "y", owner, f"have the prediction's shape {tuple(like.shape)}", tuple(y.shape))
    require(y.numel() > 0, "y", owner, "have at least one row", tuple(y.shape))
    return y


def class_probs(prediction: Prediction | Tensor, y: Any, owner: str) -> tuple[Tensor, Tensor]:
    """Return probabilities in float64 and targets, of the same shape (binary labels) or (n, K) and (n,) (classes)."""
    given: Any = prediction
    if hasattr(given, "classes"):
        require(given.classes, "prediction", owner, "be of classes", "a prediction of numbers")
        given = given.probs
    probs = torch.as_tensor(given).double()
    y = torch.as_tensor(y, device=probs.device)
    require(
        y.shape in (probs.shape, probs.shape[:-1]),
        "y",
        owner,
        f"have the shape {tuple(probs.shape[:-1])} of class indices or {tuple(probs.shape)} of binary labels",
        tuple(y.shape),
    )
    require(y.numel() > 0, "y", owner, "have at least one row", tuple(y.shape))
    last = 1 if y.shape == probs.shape else probs.shape[-1] - 1
    low, high = y.min().item(), y.max().item()
    require(low >= 0 and high <= last, "y", owner, f"hold classes between 0 and {last}", f"{low:g} to {high:g}")
    return probs, y


def top_class(prediction: Prediction | Tensor, y: Any, owner: str) -> tuple[Tensor, Tensor]:
    """Return the probability of the most probable class and whether it is correct, one value per target, flattened."""
    probs, y = class_probs(prediction, y, owner)
    if probs.shape == y.shape:
        confidence, correct = torch.maximum(probs, 1 - probs), (probs > 0.5) == (y > 0.5)
    else:
        confidence, best = probs.max(-1)
        correct = best == y
    return confidence.reshape(-1), correct.reshape(-1)
