"""Expected predictive accuracy for new rows, estimated from the rows of the fit: PSIS-LOO and WAIC.

Both estimate the expected log pointwise predictive density (elpd) from the log-likelihood of each row at draws of the
posterior, log p(y_n | w_s), without fitting again. Leave-one-out cross-validation reweights the draws by
1 / p(y_n | w_s), so that they represent the posterior without row n, and smooths the largest weights r (PSIS):

    elpd_loo = sum_n log sum_s r_ns p(y_n | w_s),    sum_s r_ns = 1

WAIC subtracts the variance of the log-likelihood instead:

    elpd_waic = sum_n (log 1/S sum_s p(y_n | w_s) - Var_s log p(y_n | w_s))

The effective number of parameters p is the difference between the log density of the fitted rows, summed, and elpd. The
standard error is sqrt(N Var_n elpd_n). Prefer LOO: its Pareto k-hat reports the rows for which it fails. Values equal
those of ArviZ. Cost: O(N S).

References:
    Vehtari, Gelman and Gabry (2017), Practical Bayesian model evaluation using leave-one-out cross-validation and WAIC.
    Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling.
    Watanabe (2010), Asymptotic equivalence of Bayes cross validation and widely applicable information criterion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.core.tables import counted, text_table
from priory.diagnostics import psis
from priory.posteriors.status import MAX_K_HAT

if TYPE_CHECKING:
    from priory.posteriors import Posterior

MAX_WAIC_VARIANCE = 0.4  # of the log-likelihood of a row
MIN_DRAWS = 2


@dataclass(frozen=True)
class ELPD:
    """An estimate of the expected log predictive density of as many new rows, in nats. `float(elpd)` is its value.

    Attributes:
        value: The estimate, summed over the rows; higher is better.
        error: Its standard error.
        p: Effective number of parameters.
        pointwise: The terms of the sum, (n,).
        kind: "PSIS-LOO" or "WAIC".
        draws: Number of draws of the posterior.
        k_hat: Pareto k-hat of each row, (n,); None for WAIC. An estimate is good for rows below `max_k_hat`.
        variance: Variance over the draws of the log-likelihood of each row, (n,).

    Example:
        >>> log_likelihood = torch.tensor([[-1.0, -2.0], [-1.2, -1.6]])  # (draw, row)
        >>> print(waic(log_likelihood))
        WAIC: 2 rows, 2 draws
              estimate  error
        elpd     -2.93   0.51
        p         0.05
    """

    value: float
    error: float
    p: float
    pointwise: Tensor
    kind: str
    draws: int
    k_hat: Tensor | None
    variance: Tensor

    def __float__(self) -> float:
        return self.value

    @property
    def max_k_hat(self) -> float:
        """The largest reliable k-hat: 0.7, or 1 - 1 / log10(S) for fewer than 2,200 draws."""
        return min(MAX_K_HAT, 1 - 1 / math.log10(self.draws)) if self.draws > 1 else 0.0

    @property
    def verdict(self) -> str:
        """A sentence about rows for which the estimate is unreliable; empty if there are none."""
        if self.k_hat is not None:
            bad, rule = self.k_hat > self.max_k_hat, f"a Pareto k-hat above {self.max_k_hat:.2g}"
            remedy = "leave these out by fitting again, or use a model with heavier tails"
        else:
            bad, rule = self.variance > MAX_WAIC_VARIANCE, f"a log-likelihood of variance above {MAX_WAIC_VARIANCE}"
            remedy = "use loo, whose k-hat reports whether it can be trusted"
        if not bool(bad.any()):
            return ""
        count = int(bad.sum())
        has = "has" if count == 1 else "have"
        return f"{count} of {counted(len(bad), 'row')} {has} {rule}, so the estimate is unreliable: {remedy}."

    def difference(self, other: ELPD) -> tuple[float, float]:
        """Compare two models of the same rows.

        Args:
            other: The estimate of the other model, by the same criterion.

        Returns:
            elpd of this model minus that of the other, and the standard error of the paired difference.
        """
        same = isinstance(other, ELPD) and other.kind == self.kind and len(other.pointwise) == len(self.pointwise)
        must = f"be a {self.kind} estimate of the same {counted(len(self.pointwise), 'row')}"
        got = f"{other.kind} of {counted(len(other.pointwise), 'row')}" if isinstance(other, ELPD) else repr(other)
        require(same, "other", "difference", must, got)
        gap = self.pointwise - other.pointwise.to(self.pointwise.device)
        return float(gap.sum()), summed_error(gap)

    def __str__(self) -> str:
        elpd = ["elpd", f"{self.value:.2f}", f"{self.error:.2f}"]
        rows = [["", "estimate", "error"], elpd, ["p", f"{self.p:.2f}", ""]]
        head = f"{self.kind}: {counted(len(self.pointwise), 'row')}, {counted(self.draws, 'draw')}"
        lines = [head, *(line.rstrip() for line in text_table(rows))]
        return "\n".join([*lines, *([self.verdict] if self.verdict else [])])

    __repr__ = __str__


def loo(
    posterior: Posterior | Tensor,
    data: Any = None,
    *,
    samples: int | None = None,
    seed: int = 0,
    relative_efficiency: float | None = None,
) -> ELPD:
    """Approximate leave-one-out cross-validation by Pareto-smoothed importance sampling (PSIS-LOO).

    Args:
        posterior: A posterior with draws, or a log-likelihood, (chain, draw, row) or (draw, row).
        data: The data of the fit. Default: None, those that the posterior holds; a posterior from a file has none.
        samples: Number of draws. Default: None, all stored draws, or 1,000 if none are stored.
        seed: Seed of the draws. Default: 0.
        relative_efficiency: Effective draws per draw, which determines how many weights are smoothed. Default: None,
            the mean over the parameters of ESS / S for chains, and 1 otherwise.

    Returns:
        An `ELPD`, with the k-hat of each row. `print` it; `a.difference(b)` compares two models.

    Raises:
        InputError: If the posterior is a point, or its likelihood has no terms per row.

    Example:
        >>> y = torch.tensor([0.1, -0.4, 0.5, 1.3])
        >>> mean = torch.randn(4000, generator=torch.Generator().manual_seed(0)) / 2 + y.mean()
        >>> found = loo(torch.distributions.Normal(mean[:, None], 1.0).log_prob(y))
        >>> round(found.value, 1), found.verdict  # in closed form -5.28
        (-5.3, '')
    """
    log_likelihood, efficiency = likelihoods(posterior, data, samples, seed, "loo")
    efficiency = efficiency if relative_efficiency is None else relative_efficiency
    values, shapes = [], []
    for row in log_likelihood.T.contiguous():
        smoothed, shape = psis(-row, efficiency)
        values.append((smoothed + row).logsumexp(0))
        shapes.append(shape)
    k_hat = torch.tensor(shapes, dtype=torch.float64, device=log_likelihood.device)
    return estimate(log_likelihood, torch.stack(values), "PSIS-LOO", k_hat)


def waic(posterior: Posterior | Tensor, data: Any = None, *, samples: int | None = None, seed: int = 0) -> ELPD:
    """Compute the widely applicable information criterion (WAIC) on the scale of log densities.

    Args:
        posterior: A posterior with draws, or a log-likelihood, (chain, draw, row) or (draw, row).
        data: The data of the fit. Default: None, those that the posterior holds; a posterior from a file has none.
        samples: Number of draws. Default: None, all stored draws, or 1,000 if none are stored.
        seed: Seed of the draws. Default: 0.

    Returns:
        An `ELPD`. Multiply it by -2 for the deviance scale.

    Raises:
        InputError: If the posterior is a point, or its likelihood has no terms per row.
    """
    log_likelihood, _ = likelihoods(posterior, data, samples, seed, "waic")
    return estimate(log_likelihood, log_density(log_likelihood) - log_likelihood.var(0, correction=0), "WAIC", None)


def likelihoods(posterior: Any, data: Any, samples: int | None, seed: int, owner: str) -> tuple[Tensor, float]:
    """The log-likelihood in float64, (draw, row), and the relative efficiency of the draws."""
    require(samples is None or is_integer(samples, MIN_DRAWS), "samples", owner, "be an integer >= 2", repr(samples))
    if isinstance(posterior, Tensor):
        require(data is None, "data", owner, "be left out beside a log-likelihood", type(data).__name__)
        values, efficiency = posterior, 1.0
    else:
        posteriors = "be a posterior with draws, or a tensor of log-likelihoods (draw, row)"
        draws = callable(getattr(posterior, "log_likelihood", None)) and not posterior.point
        require(draws, "posterior", owner, posteriors, getattr(posterior, "method", None) or type(posterior).__name__)
        values = posterior.log_likelihood(data, samples, seed)
        efficiency = posterior.relative_efficiency
    ok = values.ndim in (2, 3) and values.numel() > 0 and values.shape[:-1].numel() >= MIN_DRAWS
    must = "have a log-likelihood (draw, row) or (chain, draw, row) of 2 draws or more"
    require(ok, "posterior", owner, must, f"the shape {tuple(values.shape)}")
    values = values.detach().double().reshape(-1, values.shape[-1])
    odd = ~torch.isfinite(values).all(0)
    must = "give each row a finite log-likelihood at every draw"
    require(not bool(odd.any()), "posterior", owner, must, f"another in row {int(odd.byte().argmax())}")
    return values, efficiency


def estimate(log_likelihood: Tensor, pointwise: Tensor, kind: str, k_hat: Tensor | None) -> ELPD:
    """The sum over rows of an estimate, with its error and the effective number of parameters."""
    value, variance = float(pointwise.sum()), log_likelihood.var(0, correction=0)
    p = float(log_density(log_likelihood).sum()) - value
    return ELPD(value, summed_error(pointwise), p, pointwise, kind, len(log_likelihood), k_hat, variance)


def log_density(log_likelihood: Tensor) -> Tensor:
    """log 1/S sum_s p(y_n | w_s) of each row, (n,), from (S, n)."""
    return log_likelihood.logsumexp(0) - math.log(len(log_likelihood))


def summed_error(pointwise: Tensor) -> float:
    """The standard error of the sum of n terms, sqrt(n Var)."""
    return math.sqrt(len(pointwise) * float(pointwise.var(correction=0)))
