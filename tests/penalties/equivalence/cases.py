"""Seven priors shared by the tests of penalties, in double precision."""

import math

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Laplace, MixtureSameFamily, Normal, StudentT

from priory.distributions import GeneralisedGaussian, Logistic, ScaleMixture


def d(x: float | list[float]) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def grid(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


PRIORS: dict[str, Distribution] = {
    "gaussian": Normal(d(0.0), d(1.0)),
    "laplace": Laplace(d(0.0), d(0.7)),
    "student": StudentT(d(3.0)),
    "logistic": Logistic(d(0.0), d(0.6)),
    "mixture": ScaleMixture(d(0.5), d(1.0), d(math.exp(-2))),
    "bimodal": MixtureSameFamily(Categorical(d([0.5, 0.5])), Normal(d([-1.5, 1.5]), d([0.5, 0.5]))),
    "generalised": GeneralisedGaussian(d(1.0), d(1.5)),
}
