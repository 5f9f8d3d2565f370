"""Diagnostics of draws: Pareto-smoothed importance sampling, and convergence of Markov chains."""

from priory.diagnostics.convergence import (
    Measures,
    bfmi,
    ess_bulk,
    ess_mean,
    ess_quantile,
    ess_sd,
    ess_tail,
    hdi,
    mcse_mean,
    mcse_quantile,
    mcse_sd,
    measures,
    nested_r_hat,
    quantile,
    r_hat,
)
from priory.diagnostics.importance import importance_resample, k_hat, psis
from priory.diagnostics.summary import Summary

__all__ = [
    "Measures",
    "Summary",
    "bfmi",
    "ess_bulk",
    "ess_mean",
    "ess_quantile",
    "ess_sd",
    "ess_tail",
    "hdi",
    "importance_resample",
    "k_hat",
    "mcse_mean",
    "mcse_quantile",
    "mcse_sd",
    "measures",
    "nested_r_hat",
    "psis",
    "quantile",
    "r_hat",
]
