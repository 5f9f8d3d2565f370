"""Tools for testing an inference method: problems with exact answers, and assertions in standard errors."""

from __future__ import annotations

from priory.testing.exact import (
    Coin,
    GaussianMean,
    LinearRegression,
    NormalGamma,
    NormalGammaPosterior,
    Optimum,
)
from priory.testing.statistics import (
    assert_covariance_close,
    assert_mean_close,
    assert_uniform_ranks,
    false_alarm,
)

__all__ = [
    "Coin",
    "GaussianMean",
    "LinearRegression",
    "NormalGamma",
    "NormalGammaPosterior",
    "Optimum",
    "assert_covariance_close",
    "assert_mean_close",
    "assert_uniform_ranks",
    "false_alarm",
]
