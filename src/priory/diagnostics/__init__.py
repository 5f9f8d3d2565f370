"""How far draws can be believed: of importance sampling, and of Markov chains."""

from priory.diagnostics.convergence import (
    bfmi,
    ess_bulk,
    ess_mean,
    ess_quantile,
    ess_sd,
    ess_tail,
    mcse_mean,
    mcse_quantile,
    mcse_sd,
    nested_r_hat,
    quantile,
    r_hat,
)
from priory.diagnostics.importance import importance_resample, k_hat, psis

__all__ = [
    "bfmi",
    "ess_bulk",
    "ess_mean",
    "ess_quantile",
    "ess_sd",
    "ess_tail",
    "importance_resample",
    "k_hat",
    "mcse_mean",
    "mcse_quantile",
    "mcse_sd",
    "nested_r_hat",
    "psis",
    "quantile",
    "r_hat",
]
