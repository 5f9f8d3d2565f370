"""The mean of a Gaussian of known variance: the posterior is Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Normal

from priory.core.flat import Param
from priory.core.streams import stream
from priory.models.density import Density
from priory.testing.exact.inputs import (
    Optimum,
    check_positive,
    checked_rows,
    log_normal,
)


@dataclass(frozen=True, eq=False)
class GaussianMean:
    """The mean of a Gaussian with known noise: mean ~ N(prior_loc, prior_scale^2), y_n ~ N(mean, noise^2).

    Args:
        y: The values, (n,).
        noise: Standard deviation of a value.
        prior_loc: Mean of the prior.
        prior_scale: Standard deviation of the prior.
    """

    y: Tensor
    noise: float
    prior_loc: float
    prior_scale: float
    name: ClassVar[str] = "gaussian mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", checked_rows(self.y, "y", "GaussianMean", 1))
        check_positive(self, "noise", "prior_scale")

    @classmethod
    def make(cls, seed: int = 0) -> GaussianMean:
        """Draw twelve values."""
        y = 1.5 + 0.8 * torch.randn(12, generator=stream(seed, "gaussian mean"), dtype=torch.float64)
        return cls(y, noise=0.8, prior_loc=-0.5, prior_scale=2.0)

    @property
    def data(self) -> tuple[Tensor]:
        """The values, (n,)."""
        return (self.y,)

    @property
    def posterior(self) -> Normal:
        """The posterior of the mean, whose precision is the sum of the precisions of the prior and the data."""
        precision = self.prior_scale**-2 + len(self.y) * self.noise**-2
        loc = (self.prior_loc * self.prior_scale**-2 + self.y.sum() * self.noise**-2) / precision
        return Normal(loc, torch.full_like(loc, precision**-0.5))

    @property
    def log_evidence(self) -> float:
        """Log p(y) = log p(y | m) + log p(m) - log p(m | y), at any m: here the posterior mean."""
        m = self.posterior.loc
        joint = log_normal(self.y, m, self.noise).sum() + log_normal(m, self.prior_loc, self.prior_scale)
        return float(joint - self.posterior.log_prob(m))

    @property
    def predictive(self) -> Normal:
        """The distribution of the next value."""
        return Normal(self.posterior.loc, (self.posterior.variance + self.noise**2).sqrt())

    def density(self) -> Density:
        """Return the problem as a `Density` of the parameter "mean"."""

        def log_prior(params: dict[str, Tensor]) -> Tensor:
            return log_normal(params["mean"], self.prior_loc, self.prior_scale)

        def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor]) -> Tensor:
            return log_normal(batch[0], params["mean"], self.noise)

        return Density(params={"mean": Param()}, log_prior=log_prior, log_likelihood=log_likelihood)

    def best_mean_field(self) -> Optimum:
        """Return the posterior itself, which is Gaussian, so the gap between ELBO and evidence is zero."""
        return Optimum(self.posterior.loc, self.posterior.scale, self.log_evidence)
