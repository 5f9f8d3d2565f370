"""Scores of a prediction against what happened: log score, RMSE, accuracy, Brier, CRPS.

Every score is a plain number, the mean over the rows, in the units of the targets (the log scores in nats a
datum). The log score, the Brier score and the CRPS are proper: no forecast does better in expectation than
the true distribution (Gneiting and Raftery, 2007, "Strictly Proper Scoring Rules, Prediction, and
Estimation").
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
    """Mean log predictive density of the targets, in nats a datum: higher is better."""
    return float(prediction.log_prob(as_targets(y, prediction.mean)).double().mean())


def nll(prediction: Prediction, y: Any) -> float:
    """Mean negative log predictive density, in nats a datum: lower is better."""
    return -log_score(prediction, y)


def rmse(prediction: Prediction, y: Any) -> float:
    """Root of the mean squared distance between predictive mean and targets, in the targets' units."""
    require(
        not prediction.classes,
        "prediction",
        "rmse",
        "be of numbers, not of classes (see accuracy)",
        "classes",
    )
    y = matched(y, prediction.mean, "rmse")
    return math.sqrt(float((prediction.mean.double() - y.double()).square().mean()))


def accuracy(prediction: Prediction | Tensor, y: Any) -> float:
    """Fraction of the targets that are the most probable class; `prediction` may be probabilities alone."""
    _, correct = top_class(prediction, y, "accuracy")
    return float(correct.double().mean())


def brier(prediction: Prediction | Tensor, y: Any) -> float:
    """Brier score: mean squared distance between the probabilities and what happened; lower is better.

    With K classes it is `mean_n sum_k (p_nk - [y_n = k])^2`, between 0 and 2; with probabilities of a yes
    (Bernoulli, also of several labels) it is `mean (p - y)^2`, between 0 and 1.
    """
    probs, y = class_probs(prediction, y, "brier")
    if probs.shape == y.shape:
        return float((probs - y).square().mean())
    happened = torch.nn.functional.one_hot(y.long(), probs.shape[-1])
    return float((probs - happened).square().sum(-1).mean())


def crps(prediction: Prediction, y: Any) -> float:
    """Continuous ranked probability score, in the units of the targets: lower is better.

    `CRPS(F, y) = E|Y - y| - E|Y - Y'| / 2` for independent Y, Y' of the predictive F; for a point forecast it
    is the absolute error. Exact with a Gaussian likelihood (`crps_gaussian_mixture`), else the unbiased
    ("fair") estimate of both expectations from `prediction.samples`.
    """
    require(not prediction.classes, "prediction", "crps", "be of numbers, not of classes (see brier)", "classes")
    y = matched(y, prediction.mean, "crps").double()
    normals = prediction.distribution.normals()
    if normals is not None:
        return crps_gaussian_mixture(normals.means, normals.stds, y, normals.weights)
    draws = prediction.samples.double().sort(0).values  # (S, n, ...)
    size = draws.shape[0]
    require(size >= 2, "prediction", "crps", "hold at least 2 samples", size)
    rank = 2.0 * torch.arange(size, dtype=torch.float64, device=draws.device) - size + 1.0
    # The sum of |a - b| over all pairs of sorted draws is 2 sum_i rank_i a_i: no (S, S) table.
    spread = 2.0 * torch.einsum("s,s...->...", rank, draws) / (size * (size - 1))
    return float(((draws - y).abs().mean(0) - 0.5 * spread).mean())


def crps_gaussian_mixture(means: Tensor, stds: Tensor, y: Any, weights: Tensor | None = None) -> float:
    """Exact CRPS of mixtures of S Gaussians: `means` and `stds` (S, n, ...), y (n, ...).

    With `A(m, v) = m (2 Phi(m / sqrt v) - 1) + 2 sqrt v phi(m / sqrt v)`, the mean of `|N(m, v)|`, and weights a it is
    `sum_s a_s A(y - m_s, v_s) - sum_st a_s a_t A(m_s - m_t, v_s + v_t) / 2` (Grimit et al., 2006).

    Args:
        means: Means of the components.
        stds: Their standard deviations.
        y: Targets.
        weights: Weights of the components, (S, n, ...), adding up to one over S. Default: equal weights.
    """
    means, stds = torch.broadcast_tensors(torch.as_tensor(means).double(), torch.as_tensor(stds).double())
    y = matched(y, means[0], "crps_gaussian_mixture").double()
    a = torch.full_like(means, 1 / len(means)) if weights is None else weights.to(means).expand_as(means)
    distance = (a * _mean_absolute(y - means, stds)).sum(0)
    spread = torch.zeros_like(distance)
    for weight, mean, std in zip(a, means, stds, strict=True):  # a row of the (S, S) table at a time
        spread += weight * (a * _mean_absolute(mean - means, torch.hypot(std, stds))).sum(0)
    return float((distance - 0.5 * spread).mean())


def _mean_absolute(mean: Tensor, std: Tensor) -> Tensor:
    """E|Z| of Z ~ N(mean, std^2)."""
    z = mean / std
    return mean * torch.erf(z / math.sqrt(2.0)) + std * math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * z.square())


def as_targets(y: Any, like: Tensor) -> Tensor:
    """Targets as a tensor beside `like`; real ones take its precision, class numbers stay integers."""
    y = torch.as_tensor(y, device=like.device)
    return y.to(like.dtype) if y.is_floating_point() else y


def matched(y: Any, like: Tensor, owner: str) -> Tensor:
    """Targets of exactly the shape of the prediction; (n,) against (n, 1) would broadcast into nonsense."""
    y = as_targets(y, like)
    y = y.squeeze(-1) if y.shape == (*like.shape, 1) else y
    require(y.shape == like.shape, "y", owner, f"have the prediction's shape {tuple(like.shape)}", tuple(y.shape))
    require(y.numel() > 0, "y", owner, "have at least one row", tuple(y.shape))
    return y


def class_probs(prediction: Prediction | Tensor, y: Any, owner: str) -> tuple[Tensor, Tensor]:
    """Probabilities in float64 and targets, either of one shape (yes or no) or as (n, K) and (n,)."""
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
        f"have the shape {tuple(probs.shape[:-1])} of class numbers or {tuple(probs.shape)} of yes and no",
        tuple(y.shape),
    )
    require(y.numel() > 0, "y", owner, "have at least one row", tuple(y.shape))
    last = 1 if y.shape == probs.shape else probs.shape[-1] - 1
    low, high = y.min().item(), y.max().item()
    require(low >= 0 and high <= last, "y", owner, f"hold classes between 0 and {last}", f"{low:g} to {high:g}")
    return probs, y


def top_class(prediction: Prediction | Tensor, y: Any, owner: str) -> tuple[Tensor, Tensor]:
    """Probability of the most probable class, and whether it came true; one value a target, flat."""
    probs, y = class_probs(prediction, y, owner)
    if probs.shape == y.shape:
        confidence, correct = torch.maximum(probs, 1 - probs), (probs > 0.5) == (y > 0.5)
    else:
        confidence, best = probs.max(-1)
        correct = best == y
    return confidence.reshape(-1), correct.reshape(-1)
