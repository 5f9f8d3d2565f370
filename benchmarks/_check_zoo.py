"""Planted failures and healthy fits for `check.py`: each makes a posterior, and the rows that were held out.

A failure has the items of which at least one must fail, and healthy fits must be believed (points: their mean). Data
and fits depend on the seed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, StudentT

import priory as pr

DOUBLE = torch.float64
Rows = tuple[Tensor, Tensor]
positive = pr.constraints.positive


@dataclass(frozen=True)
class Case:
    """A fit with its held-out rows, and what a check of it must say."""

    make: Callable[[int], tuple[Any, Rows | None]]
    failing: tuple[str, ...] = ()  # one of these items must fail; none for a healthy fit
    verdict: str = "Believe it"  # how the verdict of a healthy fit begins


def fit(model: Any, data: Any, method: Any, seed: int, **options: Any) -> Any:
    """Fit without progress or warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pr.fit(model, data, method, seed=seed, progress=False, **options)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


# Densities.


def gaussian(size: int, correlation: float, mean: float = 0.0) -> pr.Density:
    covariance = (1 - correlation) * torch.eye(size, dtype=DOUBLE) + correlation
    q = MultivariateNormal(torch.full((size,), mean, dtype=DOUBLE), covariance)
    return pr.Density(lambda p: q.log_prob(p["x"]), {"x": pr.Param((size,))})


def two_modes(weight: float, distance: float) -> pr.Density:
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        left, right = (Normal(m, 1.0).log_prob(p["x"]) for m in (-distance, distance))
        return torch.logaddexp(left + math.log(weight), right + math.log(1 - weight))

    return pr.Density(log_prob, {"x": pr.Param()})


def log_gamma(shape: float) -> pr.Density:
    return pr.Density(lambda p: shape * p["x"] - p["x"].exp(), {"x": pr.Param()})


def boundary() -> pr.Density:
    """A scale whose density is largest at zero."""
    return pr.Density(lambda p: -p["s"], {"s": pr.Param((), positive)})


def funnel() -> pr.Density:
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        return Normal(0.0, 3.0).log_prob(p["v"]) + Normal(0.0, (p["v"] / 2).exp()).log_prob(p["x"]).sum()

    return pr.Density(log_prob, {"v": pr.Param(), "x": pr.Param((9,))})


def labels_that_switch() -> pr.Density:
    y = torch.cat([torch.linspace(-5, -3, 30, dtype=DOUBLE), torch.linspace(3, 5, 30, dtype=DOUBLE)])

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        each = Normal(p["mu"], 1.0).log_prob(y[:, None]).logsumexp(-1).sum()
        return each + Normal(0.0, 10.0).log_prob(p["mu"]).sum()

    return pr.Density(log_prob, {"mu": pr.Param((2,))})


def student() -> pr.Density:
    return pr.Density(lambda p: StudentT(30.0).log_prob(p["x"]).sum(), {"x": pr.Param((3,))})


def of_density(density: Callable[[], pr.Density], method: Any, **options: Any) -> Callable[[int], tuple[Any, None]]:
    return lambda seed: (fit(density(), None, method, seed, **options), None)


def chains_of(density: pr.Density, w: Tensor) -> Any:
    """Chains with given draws (K, S, P) of a density."""
    template = fit(density, None, pr.NUTS(chains=4, warmup=2), 0, steps=4)
    return type(template)(template.target, w)


def stuck_chains(seed: int) -> tuple[Any, None]:
    w = torch.randn(8, 200, 2, generator=generator(seed), dtype=DOUBLE)
    w[2] = w[2, :1]
    return chains_of(gaussian(2, 0.0), w), None


# Networks.


def line_rows(seed: int, n: int = 400, noise: Callable[[Tensor], Tensor] | None = None, tails: bool = False) -> Rows:
    """A line in three inputs with noise, which may depend on the first input or have outliers."""
    g = generator(seed)
    x = torch.randn(n, 3, generator=g, dtype=DOUBLE)
    e = torch.randn(n, generator=g, dtype=DOUBLE)
    if tails:
        far = torch.rand(n, generator=g, dtype=DOUBLE) < 0.03
        e = torch.where(far, 10 * e, e)
    return x, x @ torch.tensor([1.0, -1.0, 0.5], dtype=DOUBLE) + 0.5 * e * (1.0 if noise is None else noise(x[:, 0]))


def wave_rows(seed: int, n: int = 400) -> Rows:
    g = generator(seed)
    x = 2 * torch.rand(n, 1, generator=g, dtype=DOUBLE) - 1
    return x, torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(n, generator=g, dtype=DOUBLE)


def label_rows(seed: int, n: int = 600) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    x = torch.randn(n, 2, generator=g, dtype=DOUBLE)
    return x, (torch.rand(n, generator=g, dtype=DOUBLE) < torch.sigmoid(2 * x[:, 0])).long()


def line(noise: Any = 0.5, prior: Any = 1.0, bias: bool = True) -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(3, 1, bias=bias).double(), pr.Gaussian(noise), prior)


def small_network(inputs: int = 1, outputs: int = 1, likelihood: Any = None, prior: Any = 1.0) -> pr.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    return pr.Model(net, likelihood or pr.Gaussian(0.2), prior)


def with_rows(
    model: Callable[[], pr.Model], rows: Callable[[int], Rows], method: Any, **options: Any
) -> Callable[[int], tuple[Any, Rows]]:
    """A fit to half of the rows, with the other half held out."""

    def make(seed: int) -> tuple[Any, Rows]:
        x, y = rows(seed)
        half = len(x) // 2
        return fit(model(), (x[:half], y[:half]), method, seed, **options), (x[half:], y[half:])

    return make


def of_copies(seed: int) -> tuple[Any, Rows]:
    """An ensemble whose members are one network."""
    (x, y), (new, target) = wave_rows(seed), wave_rows(seed + 500)
    one = fit(small_network(), (x, y), pr.MAP(), seed, steps=1500)
    return pr.stack([one, one], (new, target)), (new, target)


def few_rows(seed: int) -> Rows:
    return wave_rows(seed, 30)


def interpolated(seed: int) -> tuple[Any, Rows]:
    """A large network without a prior, fitted to a few noisy rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 1)).double()
    posterior = fit(pr.Model(net, pr.Gaussian(0.02), 10.0), few_rows(seed), pr.MAP(), seed, steps=3000)
    return posterior, wave_rows(seed + 500)


FAILURES: dict[str, Case] = {
    "mean-field on a correlated target": Case(of_density(lambda: gaussian(5, 0.95), pr.MeanField()), ("spread",)),
    "Laplace on a skewed target": Case(of_density(lambda: log_gamma(0.1), pr.Laplace()), ("shape", "k-hat")),
    "Laplace at the edge of a support": Case(
        of_density(boundary, pr.Laplace()), ("shape", "k-hat", "convergence", "spread")
    ),
    "Laplace at one of two modes": Case(of_density(lambda: two_modes(0.6, 4.0), pr.Laplace()), ("convergence",)),
    "too few steps": Case(
        of_density(lambda: gaussian(3, 0.2, 5.0), pr.MeanField(), steps=100), ("mean", "convergence")
    ),
    "funnel by mean-field": Case(of_density(funnel, pr.MeanField()), ("k-hat", "spread", "mean")),
    "funnel by NUTS": Case(of_density(funnel, pr.NUTS()), ("divergences", "nested R-hat", "E-BFMI", "bulk ESS")),
    "two modes of unequal weight": Case(of_density(lambda: two_modes(0.8, 8.0), pr.NUTS()), ("modes", "nested R-hat")),
    "label switching": Case(of_density(labels_that_switch, pr.NUTS()), ("modes", "nested R-hat")),
    "stuck chain": Case(stuck_chains, ("stuck chains",)),
    "a cold posterior": Case(with_rows(line, line_rows, pr.FullRank(), temperature=0.01), ("temperature",)),
    "noise too small": Case(with_rows(lambda: line(0.1), line_rows, pr.FullRank()), ("calibration",)),
    "noise too large": Case(with_rows(lambda: line(2.0), line_rows, pr.FullRank()), ("calibration",)),
    "noise that depends on an input": Case(
        with_rows(lambda: line("learn"), lambda s: line_rows(s, 1000, torch.exp), pr.Laplace()), ("noise",)
    ),
    "outliers": Case(
        with_rows(lambda: line("learn"), lambda s: line_rows(s, 1000, tails=True), pr.Laplace()),
        ("outliers", "calibration"),
    ),
    "prior too narrow": Case(
        with_rows(lambda: line(0.5, 0.01), line_rows, pr.FullRank()), ("prior", "residuals", "calibration", "bias")
    ),
    "prior too wide": Case(with_rows(lambda: small_network(prior=1e4), wave_rows, pr.MeanField()), ("prior",)),
    "an overfit MAP": Case(interpolated, ("calibration", "spread")),
    "a rate that is too large": Case(
        with_rows(line, line_rows, pr.MeanField(learning_rate=5.0, schedule="constant"), steps=600),
        ("mean", "spread", "convergence", "oscillation", "better than a constant"),
    ),
    "a network that learnt nothing": Case(
        with_rows(lambda: small_network(prior=1e-3), wave_rows, pr.MeanField(), steps=600), ("better than a constant",)
    ),
    "dropout at a rate near zero": Case(
        with_rows(small_network, wave_rows, pr.Dropout(1e-9), steps=1500), ("epistemic share",)
    ),
    "an ensemble of copies": Case(of_copies, ("epistemic share",)),
    "a line through a wave": Case(
        with_rows(
            lambda: pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.2)),
            lambda s: (lambda x: (x, torch.sin(9 * x[:, 0])))(wave_rows(s)[0]),
            pr.FullRank(),
        ),
        ("residuals", "calibration"),
    ),
}
HEALTHY: dict[str, Case] = {
    "mean-field on independent coordinates": Case(of_density(lambda: gaussian(5, 0.0, 2.0), pr.MeanField())),
    "mean-field on weak correlation": Case(of_density(lambda: gaussian(3, 0.3), pr.MeanField())),
    "full-rank on a correlated target": Case(of_density(lambda: gaussian(5, 0.95, 3.0), pr.FullRank())),
    "Laplace on a Gaussian": Case(of_density(lambda: gaussian(8, 0.5, -4.0), pr.Laplace())),
    "Laplace on a nearly symmetric target": Case(of_density(lambda: log_gamma(100.0), pr.Laplace())),
    "NUTS on a correlated target": Case(of_density(lambda: gaussian(5, 0.9), pr.NUTS())),
    "NUTS on Student-t": Case(of_density(student, pr.NUTS())),
    "HMC on a skewed target": Case(of_density(lambda: log_gamma(0.5), pr.HMC())),
    "full-rank on a line": Case(with_rows(line, line_rows, pr.FullRank())),
    "mean-field on a line": Case(with_rows(line, line_rows, pr.MeanField())),
    "Laplace on a line with learnt noise": Case(with_rows(lambda: line("learn"), line_rows, pr.Laplace())),
    "NUTS on a line": Case(with_rows(line, line_rows, pr.NUTS())),
    "MAP on a line": Case(with_rows(line, line_rows, pr.MAP()), verdict="Believe the mean"),
    "Laplace on a wave": Case(with_rows(small_network, wave_rows, pr.Laplace(), steps=3000)),
    "an ensemble on a wave": Case(with_rows(small_network, wave_rows, pr.Ensemble(pr.MAP(), 5), steps=3000)),
    "mean-field on a wave": Case(with_rows(small_network, wave_rows, pr.MeanField(), steps=6000)),
    "full-rank on labels": Case(
        with_rows(lambda: pr.Model(nn.Linear(2, 2).double(), pr.Categorical()), label_rows, pr.FullRank())
    ),
    "NUTS on labels": Case(
        with_rows(lambda: pr.Model(nn.Linear(2, 2).double(), pr.Categorical()), label_rows, pr.NUTS())
    ),
    "Laplace on labels of a network": Case(
        with_rows(lambda: small_network(2, 2, pr.Categorical()), label_rows, pr.Laplace(), steps=1500)
    ),
    "last layer on a wave": Case(with_rows(small_network, wave_rows, pr.LastLayer(), steps=3000)),
}
