"""Hierarchical priors: Gaussians whose precision is learnt from the data (MacKay 1992; Neal 1996).

    w_i | tau ~ N(0, 1 / tau) for the n weights of a parameter,    tau ~ Gamma(shape, rate)

    log p(w, tau) = n/2 log(tau / 2 pi) - tau/2 sum_i w_i^2 + log Gamma(tau; shape, rate)

Let S = sum_i E_q[w_i^2], the squared means plus the variances of q(w). The precision is then

    variational Bayes   E_q[tau] = (shape + n/2) / (rate + S/2)      q(tau) a Gamma, or the best Gaussian of log tau
    empirical Bayes     tau = (shape - 1 + n/2) / (rate + S/2)       maximises the bound plus log Gamma(tau)

and n / S without a Gamma prior (shape 1, rate 0), which is type-II maximum likelihood.

For a point estimate the variances are missing. S = sum_i w_i^2 would then maximise the joint density of w and tau,
which is unbounded as the weights shrink to zero. A point estimate therefore keeps the precision that it starts with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from priory.core.errors import require

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Hierarchical:
    """A Gaussian prior around zero with a learnt precision, one per named parameter.

    The precision has the prior Gamma(shape, rate).

    Args:
        shape: Shape of the Gamma prior, positive; above 0.5 for empirical Bayes. Default: 1.0.
        rate: Rate of the Gamma prior, positive. With `infer="empirical"` and shape 1, the rate may be 0, which means no
            Gamma prior. Default: 0.1.
        infer: How the precision is inferred.

            - "variational" (default): it is a parameter of the model, "prior.0.weight.precision" for "0.weight", which
              every method samples or approximates like a weight. Point estimates keep it at shape / rate.
            - "empirical": it is a number that each step sets to its optimum under the mean and the variance of q.
              Bounds are on log p(D | precision). Samplers and `SVGD`, which have no such moments, refuse it; point
              estimates keep it at shape / rate, or at 1 without a Gamma.

    Example:
        >>> Hierarchical(shape=2.0, rate=1.0).start
        2.0
        >>> Hierarchical(rate=0.0)
        Traceback (most recent call last):
        ...
        priory.InputError: The 'rate' argument of Hierarchical must be a positive number, got 0.0.

    References:
        MacKay (1992), A practical Bayesian framework for backpropagation networks.
        Neal (1996), Bayesian learning for neural networks.
    """

    shape: float = 1.0
    rate: float = 0.1
    infer: Literal["variational", "empirical"] = "variational"

    def __post_init__(self) -> None:
        known = self.infer in ("variational", "empirical")
        require(known, "infer", "Hierarchical", "be 'variational' or 'empirical'", repr(self.infer))
        require(_positive(self.shape), "shape", "Hierarchical", "be a positive number", self.shape)
        if not self.empirical:
            require(_positive(self.rate), "rate", "Hierarchical", "be a positive number", self.rate)
            return
        ok = self.rate == 0 or _positive(self.rate)
        require(ok, "rate", "Hierarchical", "be a positive number, or 0 for no Gamma prior", self.rate)
        consistent = self.rate > 0 or self.shape == 1
        require(consistent, "shape", "Hierarchical", "be 1 if the rate is 0, which means no Gamma prior", self.shape)
        # for a single weight the numerator is shape - 1/2, which must be positive
        require(self.shape > 0.5, "shape", "Hierarchical", "be above 0.5 for empirical Bayes", self.shape)

    @property
    def empirical(self) -> bool:
        """Whether the precision is set by empirical Bayes rather than being a parameter of the model."""
        return self.infer == "empirical"

    @property
    def start(self) -> float:
        """Initial precision: the mean of the Gamma prior, or 1 without one."""
        return self.shape / self.rate if self.rate > 0 else 1.0

    def precision(self, count: int, square: Tensor) -> Tensor:
        """Return the optimal precision under q, (*B,).

        Args:
            count: Number n of weights.
            square: Sum of their expected squares S, (*B,).
        """
        return (self.shape - self.empirical + count / 2) / (self.rate + square / 2)

    def log_prob(self, w: Tensor, log_precision: Tensor, jacobian: bool) -> Tensor:
        """Return log p(w, tau), (*B,).

        Args:
            w: Weights, (*B, n).
            log_precision: log tau, (*B,).
            jacobian: Whether to return the density over log tau instead of tau.
        """
        count = w.shape[-1]
        exponent = self.shape - (0 if jacobian else 1) + count / 2
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape) - 0.5 * count * math.log(2 * math.pi)
        return constant + exponent * log_precision - log_precision.exp() * (self.rate + 0.5 * w.square().sum(-1))


def precision_name(name: str) -> str:
    """Return the name of the precision of a parameter's prior.

    >>> precision_name("0.weight")
    'prior.0.weight.precision'
    """
    return f"prior.{name}.precision"


def _positive(value: object) -> bool:
    """Return whether a value is a positive, finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
