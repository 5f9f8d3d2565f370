"""Scores and calibration of predictions, and leave-one-out cross-validation of posteriors.

Each score is a function of a prediction and the targets; `loo` and `waic` are functions of a posterior and its data.

>>> import torch
>>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
>>> accuracy(probs, torch.tensor([0, 0]))
0.5
"""

from priory.evaluate.calibration import (
    LEVELS,
    Reliability,
    calibration_error,
    coverage,
    expected_calibration_error,
    pit,
    reliability,
)
from priory.evaluate.cross_validation import ELPD, loo, waic
from priory.evaluate.scores import accuracy, brier, crps, crps_gaussian_mixture, log_score, nll, rmse

__all__ = [
    "ELPD",
    "LEVELS",
    "Reliability",
    "accuracy",
    "brier",
    "calibration_error",
    "coverage",
    "crps",
    "crps_gaussian_mixture",
    "expected_calibration_error",
    "log_score",
    "loo",
    "nll",
    "pit",
    "reliability",
    "rmse",
    "waic",
]
