"""Hierarchical precision: how wide the prior of some weights is, learnt from the data (MacKay 1992; Neal 1996).

    w_i | tau ~ N(0, 1 / tau) for the n weights of a parameter,    tau ~ Gamma(shape, rate)

    log p(w, tau) = n/2 log(tau / 2 pi) - tau/2 sum_i w_i^2 + log Gamma(tau; shape, rate)

Under a q(w) with S = sum_i E_q[w_i^2], that is the squares of its means and its variances, the precision is

    variational Bayes   E_q[tau] = (shape + n/2) / (rate + S/2)      q(tau) a Gamma, or the best Gaussian of log tau
    empirical Bayes     tau = (shape - 1 + n/2) / (rate + S/2)       the maximum of the bound plus log Gamma(tau)

and n / S with no Gamma at all (shape 1, rate 0): the type-II maximum likelihood. Without the variances, S = sum_i w_i^2
and the second line climbs the joint density of w and tau, which rewards weights of zero with any precision. A point
therefore learns no precision, and keeps the one that it starts with.
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
    """Weights around zero whose precision is learnt, one for each named parameter that it is the prior of.

    The precision has the prior Gamma(shape, rate). With `infer="variational"` it is a parameter of the model,
    "prior.0.weight.precision" for "0.weight", that every method draws or approximates like a weight; a point leaves it
    at shape / rate. With `infer="empirical"` it is a number, the best one under the mean and the variance of q at every
    step, and bounds are on log p(D | precision); rate 0 (and shape 1) is then no Gamma at all. Methods that have no
    such moments leave it at shape / rate, or at 1 without a Gamma.

    >>> Hierarchical(shape=2.0, rate=1.0).start
    2.0
    >>> Hierarchical(rate=0.0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'rate' argument of Hierarchical must be a positive number, got 0.0.
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
        require(ok, "rate", "Hierarchical", "be a positive number, or 0 for no Gamma", self.rate)
        alone = self.rate > 0 or self.shape == 1
        require(alone, "shape", "Hierarchical", "be 1 where the rate is 0, which means no Gamma", self.shape)
        # one weight alone has the exponent shape - 1/2: below it the best precision would be negative
        require(self.shape > 0.5, "shape", "Hierarchical", "be above 0.5 for empirical Bayes", self.shape)

    @property
    def empirical(self) -> bool:
        """Whether the precision is a number that a fit sets, and no coordinate."""
        return self.infer == "empirical"

    @property
    def start(self) -> float:
        """The precision before any data: the Gamma's mean, or 1 without a Gamma."""
        return self.shape / self.rate if self.rate > 0 else 1.0

    def precision(self, count: int, square: Tensor) -> Tensor:
        """The precision of `count` weights whose expected squares sum to `square`, (*B,), by the lines above."""
        return (self.shape - self.empirical + count / 2) / (self.rate + square / 2)

    def log_prob(self, w: Tensor, log_precision: Tensor, jacobian: bool) -> Tensor:
        """log p(w, tau) for w (*B, n) and log tau (*B,); with `jacobian`, as a density over log tau."""
        count = w.shape[-1]
        exponent = self.shape - (0 if jacobian else 1) + count / 2
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape) - 0.5 * count * math.log(2 * math.pi)
        return constant + exponent * log_precision - log_precision.exp() * (self.rate + 0.5 * w.square().sum(-1))


def precision_name(name: str) -> str:
    """What the precision of a parameter's prior is called.

    >>> precision_name("0.weight")
    'prior.0.weight.precision'
    """
    return f"prior.{name}.precision"


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
