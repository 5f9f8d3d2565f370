"""Priors over the parameters of a network."""

from __future__ import annotations

import math

import torch
from torch.distributions import Normal

from priory.core.errors import require
from priory.priors.base import Prior, declared, read_prior
from priory.priors.edge_of_chaos import EdgeOfChaos, Propagation, edge_of_chaos, propagation
from priory.priors.hierarchical import Hierarchical

__all__ = [
    "EdgeOfChaos",
    "Hierarchical",
    "Prior",
    "Propagation",
    "declared",
    "edge_of_chaos",
    "propagation",
    "read_prior",
    "weight_decay",
]


def weight_decay(wd: float, num_data: int) -> Normal:
    """Return the Gaussian prior that corresponds to a weight decay in PyTorch's convention.

    The mean loss plus wd / 2 sum w^2, multiplied by N, has the penalty (N wd / 2) w^2 = w^2 / (2 s^2): a Gaussian of
    precision N wd.

    Args:
        wd: Weight decay, a positive number.
        num_data: Number of rows N of the data set.

    Returns:
        The prior of a single weight.

    Raises:
        InputError: If an argument is not positive.

    Example:
        >>> round(weight_decay(1e-2, 2500).scale.item(), 12)
        0.2
    """
    require(isinstance(wd, (int, float)) and 0 < wd < math.inf, "wd", "weight_decay", "be a positive number", wd)
    require(
        isinstance(num_data, int) and num_data >= 1,
        "num_data",
        "weight_decay",
        "be an integer >= 1",
        num_data,
    )
    scale = torch.tensor((wd * num_data) ** -0.5, dtype=torch.float64)
    return Normal(torch.zeros_like(scale), scale)
