"""The targets of `convergence.py`: 29 log densities as users write them, on raw scales, and what is known of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _posteriors as posteriors
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Gamma, HalfNormal, Normal, Poisson, StudentT

import priory as pr
from priory import Param, constraints

DOUBLE = torch.float64
Params = dict[str, Tensor]


def autoregressive(size: int, correlation: float) -> Tensor:
    """A covariance with entries correlation^|i - j|."""
    places = torch.arange(size, dtype=DOUBLE)
    return correlation ** (places[:, None] - places).abs()


def diagonal(*variances: float) -> Tensor:
    """A diagonal covariance."""
    return torch.tensor(variances, dtype=DOUBLE).diag()


GAUSSIANS: dict[str, tuple[Tensor, Tensor]] = {
    "far": (torch.tensor([30.0, 1e4], dtype=DOUBLE), autoregressive(2, 0.0)),
    "very_far": (torch.tensor([1e6, -1e6], dtype=DOUBLE), autoregressive(2, 0.5)),
    "narrow": (torch.tensor([1.0, 2.0], dtype=DOUBLE), 1e-12 * autoregressive(2, 0.5)),
    "wide": (torch.tensor([1e6, 2.0], dtype=DOUBLE), 1e12 * autoregressive(2, -0.5)),
    "scales": (torch.full((4,), 3.0, dtype=DOUBLE), diagonal(1e-12, 1e-4, 1e4, 1e12)),
    "correlated": (torch.tensor([5.0, -5.0], dtype=DOUBLE), autoregressive(2, 0.9999)),
    "gaussian_10": (torch.full((10,), 5.0, dtype=DOUBLE), autoregressive(10, 0.99)),
    "gaussian_50": (torch.full((50,), 3.0, dtype=DOUBLE), autoregressive(50, 0.95)),
    "gaussian_200": (torch.full((200,), -3.0, dtype=DOUBLE), autoregressive(200, 0.5)),
    "gaussian_500": (torch.full((500,), 3.0, dtype=DOUBLE), autoregressive(500, 0.9)),
}


def gaussian(name: str) -> pr.Density:
    """A Gaussian without its normalising constant."""
    mean, covariance = GAUSSIANS[name]
    precision = torch.linalg.inv(covariance)

    def log_prob(p: Params) -> Tensor:
        away = p["x"] - mean
        return -0.5 * (away * (away @ precision)).sum(-1)

    return pr.Density(log_prob, {"x": Param((len(mean),))})


def design() -> tuple[Tensor, Tensor, torch.Generator]:
    """Raw inputs: an intercept, a covariate of 98 +- 5 and one of 0 +- 1,000; and a linear predictor."""
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 300, generator=generator, dtype=DOUBLE)
    X = torch.stack([torch.ones(300, dtype=DOUBLE), 98 + 5 * first, 1e3 * second], 1)
    return X, X @ torch.tensor([-8.0, 0.09, 5e-4], dtype=DOUBLE), generator


def linear() -> pr.Density:
    """A response of 35 +- 7 with unknown noise."""
    X, eta, generator = design()
    y = 35 + 30 * (eta - eta.mean()) + 5 * torch.randn(300, generator=generator, dtype=DOUBLE)

    def log_prob(p: Params) -> Tensor:
        prior = Normal(0.0, 1e3).log_prob(p["b"]).sum() + HalfNormal(50.0).log_prob(p["s"])
        return prior + Normal(X @ p["b"], p["s"]).log_prob(y).sum()

    return pr.Density(log_prob, {"b": Param((3,)), "s": Param((), constraints.positive)})


def logistic() -> pr.Density:
    X, eta, generator = design()
    y = torch.bernoulli(torch.sigmoid(eta), generator=generator)

    def log_prob(p: Params) -> Tensor:
        return Normal(0.0, 100.0).log_prob(p["b"]).sum() + Bernoulli(logits=X @ p["b"]).log_prob(y).sum()

    return pr.Density(log_prob, {"b": Param((3,))})


def counts() -> pr.Density:
    X, eta, generator = design()
    y = torch.poisson(torch.exp(eta), generator=generator)

    def log_prob(p: Params) -> Tensor:
        return Normal(0.0, 100.0).log_prob(p["b"]).sum() + Poisson(torch.exp(X @ p["b"])).log_prob(y).sum()

    return pr.Density(log_prob, {"b": Param((3,))})


def two_modes() -> pr.Density:
    def log_prob(p: Params) -> Tensor:
        one, other = Normal(-6.0, 1.0).log_prob(p["x"]), Normal(6.0, 1.0).log_prob(p["x"])
        return torch.logaddexp(math.log(0.8) + one, math.log(0.2) + other)

    return pr.Density(log_prob, {"x": Param()})


def targets(folder: Path | None) -> dict[str, Callable[[], pr.Density]]:
    """Every target by name; the reference posteriors need the folder with their data."""
    found: dict[str, Callable[[], pr.Density]] = {name: partial(gaussian, name) for name in GAUSSIANS}
    found |= {"raw_linear": linear, "raw_logistic": logistic, "raw_poisson": counts}
    found["student_t"] = lambda: pr.Density(lambda p: StudentT(5.0).log_prob(p["x"]).sum(), {"x": Param((3,))})
    positive = Param((3,), constraints.positive)
    found["skewed"] = lambda: pr.Density(lambda p: Gamma(3.0, 1.0).log_prob(p["x"]).sum(), {"x": positive})
    found["two_modes"] = two_modes
    if folder is not None:
        found |= {name: partial(posteriors.density, name, folder) for name in posteriors.MODELS}
    return found
