"""Linear regression with known noise (Gaussian posterior) and with unknown noise (normal-gamma posterior)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, StudentT

from priory import constraints
from priory.core.errors import require
from priory.core.flat import Param
from priory.core.linalg import try_cholesky
from priory.core.streams import stream
from priory.likelihoods import Gaussian
from priory.models.density import Density
from priory.models.model import Model
from priory.testing.exact.inputs import (
    LOG_2PI,
    Optimum,
    check_design_and_targets,
    check_positive,
    checked_rows,
    correlated_rows,
    log_normal,
)


@dataclass(frozen=True, eq=False)
class LinearRegression:
    """Linear regression with known noise: w ~ N(0, prior_scale^2 I), y_n ~ N(w'x_n, noise^2).

    Args:
        X: The inputs, (n, d).
        y: The targets, (n,).
        noise: Standard deviation of a target.
        prior_scale: Standard deviation of the prior of each weight.
        intercept: Whether to append a column of ones to the inputs; its weight is the last. Default: False.
    """

    X: Tensor
    y: Tensor
    noise: float
    prior_scale: float
    intercept: bool = False
    name: ClassVar[str] = "linear regression"

    def __post_init__(self) -> None:
        check_design_and_targets(self)
        check_positive(self, "noise", "prior_scale")

    @classmethod
    def make(cls, seed: int = 0) -> LinearRegression:
        """Draw twenty rows of three correlated inputs, with an intercept."""
        X, y = correlated_rows(stream(seed, "linear regression"))
        return cls(X, y + 0.7, noise=0.5, prior_scale=1.5, intercept=True)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The inputs (n, d) and the targets (n,)."""
        return self.X, self.y

    @property
    def precision(self) -> Tensor:
        """The posterior's precision matrix, X'X / noise^2 + I / prior_scale^2."""
        X = self.design(self.X)
        return X.T @ X * self.noise**-2 + torch.eye(X.shape[1], dtype=X.dtype) * self.prior_scale**-2

    @property
    def posterior(self) -> MultivariateNormal:
        """The posterior of the weights."""
        loc = torch.linalg.solve(self.precision, self.design(self.X).T @ self.y * self.noise**-2)
        return MultivariateNormal(loc, precision_matrix=self.precision)

    @property
    def log_evidence(self) -> float:
        """Log p(y) = log p(y | w) + log p(w) - log p(w | y), at any w: here the posterior mean."""
        w = self.posterior.loc
        log_likelihood = log_normal(self.y, self.design(self.X) @ w, self.noise).sum()
        log_posterior = 0.5 * torch.logdet(self.precision) - 0.5 * len(w) * LOG_2PI
        return float(log_likelihood + log_normal(w, 0.0, self.prior_scale).sum() - log_posterior)

    def predictive(self, X: Tensor) -> Normal:
        """Return the predictive distribution of the target at each row of X, (n, d)."""
        X = self.design(checked_rows(X, "X", "predictive", 2))
        variance = (X * torch.linalg.solve(self.precision, X.T).T).sum(-1)
        return Normal(X @ self.posterior.loc, (self.noise**2 + variance).sqrt())

    def best_mean_field(self) -> Optimum:
        """Return the factorised Gaussian closest to the posterior: its mean, and scale_i = precision_ii^(-1/2).

        The gap is KL(q || p) = (sum_i log precision_ii - log det precision) / 2.

        Returns:
            The mean, the scales and the ELBO of that Gaussian.
        """
        diagonal = self.precision.diagonal()
        gap = 0.5 * float(diagonal.log().sum() - torch.logdet(self.precision))
        return Optimum(self.posterior.loc, diagonal.rsqrt(), self.log_evidence - gap)

    def model(self) -> Model:
        """Return the problem as a `Model` with one linear layer, initialised to zero."""
        net = nn.utils.skip_init(nn.Linear, self.X.shape[1], 1, bias=self.intercept, dtype=torch.float64)
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        scale = torch.tensor(self.prior_scale, dtype=torch.float64)
        return Model(net, Gaussian(noise=self.noise), prior=Normal(torch.zeros_like(scale), scale))

    def density(self) -> Density:
        """Return the problem as a `Density` of the parameter "weights"."""

        def log_prior(params: dict[str, Tensor]) -> Tensor:
            return log_normal(params["weights"], 0.0, self.prior_scale).sum(-1)

        def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
            X, y = batch
            return log_normal(y, self.design(X) @ params["weights"], self.noise)

        params = {"weights": Param((self.X.shape[1] + self.intercept,))}
        return Density(params=params, log_prior=log_prior, log_likelihood=log_likelihood)

    def design(self, X: Tensor) -> Tensor:
        """Append the column of ones, if there is an intercept."""
        return torch.cat([X, torch.ones_like(X[:, :1])], 1) if self.intercept else X


class NormalGammaPosterior(NamedTuple):
    """The distribution w | tau ~ N(loc, (tau precision)^-1), tau ~ Gamma(a, b), with noise = tau^(-1/2).

    Attributes:
        loc: Mean of the weights, (d,).
        precision: Precision matrix of the weights for tau = 1, (d, d).
        a: Shape of the Gamma distribution.
        b: Rate of the Gamma distribution.
    """

    loc: Tensor
    precision: Tensor
    a: float
    b: float

    @property
    def mean(self) -> dict[str, Tensor]:
        """The means of the weights and of the noise, a standard deviation: E[tau^(-1/2)]."""
        noise = math.sqrt(self.b) * math.exp(math.lgamma(self.a - 0.5) - math.lgamma(self.a))
        return {"weights": self.loc, "noise": torch.tensor(noise, dtype=torch.float64)}

    @property
    def covariance(self) -> Tensor:
        """The covariance of the weights, E[1 / tau] precision^-1; finite for a > 1."""
        return self.b / (self.a - 1) * torch.linalg.inv(self.precision)

    def log_prob(self, weights: Tensor, noise: Tensor) -> Tensor:
        """Return the log density over (weights, noise), including |d tau / d noise| = 2 noise^-3.

        Args:
            weights: The weights, (*B, d).
            noise: The standard deviation of the noise, (*B,).

        Returns:
            The log density, (*B,).
        """
        deviation = weights - self.loc
        log_weights = 0.5 * torch.logdet(self.precision) - len(self.loc) * (0.5 * LOG_2PI + noise.log())
        log_weights = log_weights - 0.5 * (deviation @ self.precision * deviation).sum(-1) / noise**2
        log_tau = self.a * math.log(self.b) - math.lgamma(self.a) - 2 * (self.a - 1) * noise.log()
        return log_weights + log_tau - self.b / noise**2 + math.log(2) - 3 * noise.log()


@dataclass(frozen=True, eq=False)
class NormalGamma:
    """Linear regression with unknown noise: tau ~ Gamma(a, b), w | tau ~ N(0, (tau prior_precision)^-1).

    The targets are y_n ~ N(w'x_n, 1 / tau).

    Args:
        X: The inputs, (n, d).
        y: The targets, (n,).
        prior_precision: Precision matrix of the weights for tau = 1, (d, d), or a number that multiplies the identity.
        a: Shape of the Gamma prior of tau.
        b: Rate of the Gamma prior of tau.
    """

    X: Tensor
    y: Tensor
    prior_precision: Any
    a: float
    b: float
    name: ClassVar[str] = "normal gamma"

    def __post_init__(self) -> None:
        check_design_and_targets(self)
        check_positive(self, "a", "b")
        d = self.X.shape[1]
        precision = torch.as_tensor(self.prior_precision, dtype=torch.float64)
        precision = precision * torch.eye(d, dtype=torch.float64) if precision.ndim == 0 else precision
        fits = precision.shape == (d, d) and bool(try_cholesky(precision)[1])
        must = f"be a positive number or a positive-definite {d} x {d} matrix"
        require(fits, "prior_precision", "NormalGamma", must, self.prior_precision)
        object.__setattr__(self, "prior_precision", precision)

    @classmethod
    def make(cls, seed: int = 0) -> NormalGamma:
        """Draw twenty rows of three correlated inputs."""
        X, y = correlated_rows(stream(seed, "normal gamma"))
        return cls(X, y, prior_precision=0.5, a=2.0, b=1.0)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The inputs (n, d) and the targets (n,)."""
        return self.X, self.y

    @property
    def prior(self) -> NormalGammaPosterior:
        """The prior, in the form of the posterior."""
        loc = torch.zeros(self.X.shape[1], dtype=torch.float64)
        return NormalGammaPosterior(loc, self.prior_precision, float(self.a), float(self.b))

    @property
    def posterior(self) -> NormalGammaPosterior:
        """The posterior of the weights and the noise."""
        precision = self.prior_precision + self.X.T @ self.X
        loc = torch.linalg.solve(precision, self.X.T @ self.y)
        # unlike y'y - loc' precision loc, this form doesn't lose digits by cancellation
        misfit = (self.y - self.X @ loc).square().sum() + loc @ self.prior_precision @ loc
        return NormalGammaPosterior(loc, precision, self.a + 0.5 * len(self.y), self.b + 0.5 * float(misfit))

    @property
    def log_evidence(self) -> float:
        """Log p(y): the ratio of the posterior's normalising constant to the prior's."""

        def log_constant(belief: NormalGammaPosterior) -> float:
            log_gamma = math.lgamma(belief.a) - belief.a * math.log(belief.b)
            return log_gamma - 0.5 * float(torch.logdet(belief.precision))

        return log_constant(self.posterior) - log_constant(self.prior) - 0.5 * len(self.y) * LOG_2PI

    def predictive(self, X: Tensor) -> StudentT:
        """Return the predictive distribution of the target at each row of X, (n, d)."""
        X, posterior = checked_rows(X, "X", "predictive", 2), self.posterior
        spread = 1 + (X * torch.linalg.solve(posterior.precision, X.T).T).sum(-1)
        return StudentT(2 * posterior.a, X @ posterior.loc, (posterior.b / posterior.a * spread).sqrt())

    def density(self) -> Density:
        """Return the problem as a `Density` of "weights" and "noise", a standard deviation."""
        prior = self.prior

        def log_prior(params: dict[str, Tensor]) -> Tensor:
            return prior.log_prob(params["weights"], params["noise"])

        def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
            X, y = batch
            return log_normal(y, X @ params["weights"], params["noise"])

        params = {"weights": Param((self.X.shape[1],)), "noise": Param((), constraints.positive)}
        return Density(params=params, log_prior=log_prior, log_likelihood=log_likelihood)
