"""Targets whose posterior, evidence and predictive are known in closed form, to test a method against.

Four conjugate problems in float64 (Bishop, 2006, "Pattern Recognition and Machine Learning", chapters 2,
3): a coin, the mean of a Gaussian, linear regression with known noise, and with unknown noise. Each has
its `data`, its beliefs as a `density()` (linear regression also as a `model()`), and the answers. All but
the last know the best that a factorised Gaussian can do, which is what mean-field variational inference
must reach.

>>> coin = Coin(heads=17, tails=13, a=5, b=3)
>>> round(coin.log_evidence, 4)
-21.3972
>>> coin.best_gaussian().elbo < coin.log_evidence
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Beta, MultivariateNormal, Normal, StudentT
from torch.nn.functional import logsigmoid

from priory import constraints
from priory.core.errors import require
from priory.core.flat import Param
from priory.core.linalg import try_cholesky
from priory.core.streams import stream
from priory.likelihoods import Gaussian
from priory.models.density import Density
from priory.models.model import Model

if TYPE_CHECKING:
    from collections.abc import Callable

LOG_2PI = math.log(2 * math.pi)


class Optimum(NamedTuple):
    """The factorised Gaussian with the highest ELBO, in unconstrained coordinates, and that ELBO in nats."""

    loc: Tensor
    scale: Tensor
    elbo: float


@dataclass(frozen=True)
class Coin:
    """Tosses of a coin: p ~ Beta(a, b), each toss a head with probability p.

    p | D ~ Beta(a + heads, b + tails), and the evidence, of the tosses in their order, is
    B(a + heads, b + tails) / B(a, b).
    """

    heads: int
    tails: int
    a: float = 1.0
    b: float = 1.0
    name: ClassVar[str] = "coin"

    def __post_init__(self) -> None:
        for count in ("heads", "tails"):
            value = getattr(self, count)
            require(isinstance(value, int) and value >= 0, count, "Coin", "be an integer >= 0", value)
        for shape in ("a", "b"):
            value = getattr(self, shape)
            require(0 < value < math.inf, shape, "Coin", "be a positive number", value)

    @classmethod
    def make(cls, seed: int = 0) -> Coin:
        """Toss thirty times a coin that the seed chooses."""
        generator = stream(seed, "coin")
        bias = 0.2 + 0.6 * torch.rand((), generator=generator, dtype=torch.float64)
        heads = int((torch.rand(30, generator=generator, dtype=torch.float64) < bias).sum())
        return cls(heads, 30 - heads, a=2.0, b=3.0)

    @property
    def data(self) -> tuple[Tensor]:
        """The tosses, heads first, 1 for a head: (heads + tails,)."""
        return (torch.cat([_ones(self.heads), 0 * _ones(self.tails)]),)

    @property
    def posterior(self) -> Beta:
        """The posterior of p."""
        alpha, beta = torch.tensor(self._updated, dtype=torch.float64)
        return Beta(alpha, beta)

    @property
    def log_evidence(self) -> float:
        """The log probability of the tosses in their order."""
        return _log_beta(*self._updated) - _log_beta(self.a, self.b)

    @property
    def mode(self) -> float:
        """The p of highest posterior density, in p's own coordinate."""
        alpha, beta = self._updated
        must = "leave both shapes of the posterior above 1, or there is no mode inside (0, 1)"
        require(alpha > 1 and beta > 1, "data", "Coin", must, (alpha, beta))
        return (alpha - 1) / (alpha + beta - 2)

    @property
    def predictive(self) -> float:
        """The probability that the next toss is a head."""
        alpha, beta = self._updated
        return alpha / (alpha + beta)

    def density(self) -> Density:
        """Give the log prior of "p" and the log-likelihood of each toss."""
        log_normaliser = _log_beta(self.a, self.b)

        def log_prior(params: dict[str, Tensor]) -> Tensor:
            p = params["p"]
            return (self.a - 1) * p.log() + (self.b - 1) * torch.log1p(-p) - log_normaliser

        def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor]) -> Tensor:
            (tosses,) = batch
            p = params["p"]
            return tosses * p.log() + (1 - tosses) * torch.log1p(-p)

        params = {"p": Param((), constraints.unit_interval)}
        return Density(params=params, log_prior=log_prior, log_likelihood=log_likelihood)

    def best_gaussian(self) -> Optimum:
        """Find the Gaussian over u = logit p with the highest ELBO, by Newton's method on quadratures.

        With alpha = a + heads and beta = b + tails, and dp/du included, the log joint is

            f(u) = alpha log sigmoid(u) + beta log sigmoid(-u) - log B(a, b)

        which is concave in u, so that E[f] + log scale is concave in (loc, scale).
        """
        alpha, beta = self._updated
        loc = torch.tensor(math.log(alpha / beta), dtype=torch.float64)
        scale = torch.tensor(math.sqrt(1 / alpha + 1 / beta), dtype=torch.float64)  # the Laplace approximation
        entropy, log_normaliser = 0.5 * (LOG_2PI + 1), _log_beta(self.a, self.b)

        def elbo(loc: Tensor, scale: Tensor) -> Tensor:
            def log_joint(u: Tensor) -> Tensor:
                return alpha * logsigmoid(u) + beta * logsigmoid(-u)

            return constraints.gaussian_expectation(log_joint, loc, scale) + scale.log() + entropy - log_normaliser

        def newton(loc: Tensor, scale: Tensor) -> Tensor:
            def expect(derivative: Callable[[Tensor], Tensor], power: int) -> Tensor:
                def product(u: Tensor) -> Tensor:
                    return derivative(u) * ((u - loc) / scale) ** power

                return constraints.gaussian_expectation(product, loc, scale)

            def slope(u: Tensor) -> Tensor:
                return alpha - (alpha + beta) * u.sigmoid()

            def bend(u: Tensor) -> Tensor:
                return -(alpha + beta) * u.sigmoid() * (-u).sigmoid()

            gradient = torch.stack([expect(slope, 0), expect(slope, 1) + 1 / scale])
            bends = [expect(bend, 0), expect(bend, 1), expect(bend, 1), expect(bend, 2) - scale**-2]
            return -torch.linalg.solve(torch.stack(bends).reshape(2, 2), gradient)

        for _ in range(100):
            step, least = newton(loc, scale), elbo(loc, scale)
            least = least - 1e-13 * (1 + least.abs())  # what rounding may take away
            while scale + step[1] <= 0 or elbo(loc + step[0], scale + step[1]) < least:
                step = 0.5 * step
            loc, scale = loc + step[0], scale + step[1]
            if float(step.abs().max()) < 1e-13:
                break
        return Optimum(loc, scale, float(elbo(loc, scale)))

    @property
    def _updated(self) -> tuple[float, float]:
        return float(self.a + self.heads), float(self.b + self.tails)


@dataclass(frozen=True, eq=False)
class GaussianMean:
    """The mean of a Gaussian with known noise: mean ~ N(prior_loc, prior_scale^2), y_n ~ N(mean, noise^2)."""

    y: Tensor
    noise: float
    prior_loc: float
    prior_scale: float
    name: ClassVar[str] = "gaussian mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", _rows(self.y, "y", "GaussianMean", 1))
        _positive(self, "noise", "prior_scale")

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
        """The posterior of the mean: precisions add."""
        precision = self.prior_scale**-2 + len(self.y) * self.noise**-2
        loc = (self.prior_loc * self.prior_scale**-2 + self.y.sum() * self.noise**-2) / precision
        return Normal(loc, torch.full_like(loc, precision**-0.5))

    @property
    def log_evidence(self) -> float:
        """Log p(y) = log p(y | m) + log p(m) - log p(m | y), at any m: here the posterior mean."""
        m = self.posterior.loc
        joint = _log_normal(self.y, m, self.noise).sum() + _log_normal(m, self.prior_loc, self.prior_scale)
        return float(joint - self.posterior.log_prob(m))

    @property
    def predictive(self) -> Normal:
        """The distribution of the next value."""
        return Normal(self.posterior.loc, (self.posterior.variance + self.noise**2).sqrt())

    def density(self) -> Density:
        """Give the log prior of "mean" and the log-likelihood of each value."""

        def log_prior(params: dict[str, Tensor]) -> Tensor:
            return _log_normal(params["mean"], self.prior_loc, self.prior_scale)

        def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor]) -> Tensor:
            return _log_normal(batch[0], params["mean"], self.noise)

        return Density(params={"mean": Param()}, log_prior=log_prior, log_likelihood=log_likelihood)

    def best_mean_field(self) -> Optimum:
        """Give the posterior itself: it is one Gaussian, so that the gap is zero."""
        return Optimum(self.posterior.loc, self.posterior.scale, self.log_evidence)


@dataclass(frozen=True, eq=False)
class LinearRegression:
    """Linear regression with known noise: w ~ N(0, prior_scale^2 I), y_n ~ N(w'x_n, noise^2).

    With `intercept` a column of ones stands last, and its weight is last in every vector here.
    """

    X: Tensor
    y: Tensor
    noise: float
    prior_scale: float
    intercept: bool = False
    name: ClassVar[str] = "linear regression"

    def __post_init__(self) -> None:
        _design_and_targets(self)
        _positive(self, "noise", "prior_scale")

    @classmethod
    def make(cls, seed: int = 0) -> LinearRegression:
        """Draw twenty rows of three correlated inputs, with an intercept."""
        X, y = _correlated_rows(stream(seed, "linear regression"))
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
        log_likelihood = _log_normal(self.y, self.design(self.X) @ w, self.noise).sum()
        log_posterior = 0.5 * torch.logdet(self.precision) - 0.5 * len(w) * LOG_2PI
        return float(log_likelihood + _log_normal(w, 0.0, self.prior_scale).sum() - log_posterior)

    def predictive(self, X: Tensor) -> Normal:
        """Give the distribution of the target at each row of X."""
        X = self.design(_rows(X, "X", "predictive", 2))
        variance = (X * torch.linalg.solve(self.precision, X.T).T).sum(-1)
        return Normal(X @ self.posterior.loc, (self.noise**2 + variance).sqrt())

    def best_mean_field(self) -> Optimum:
        """Give the factorised Gaussian nearest the posterior: its mean, and scale_i = precision_ii^(-1/2).

        The gap is KL(q || p) = (sum_i log precision_ii - log det precision) / 2.
        """
        diagonal = self.precision.diagonal()
        gap = 0.5 * float(diagonal.log().sum() - torch.logdet(self.precision))
        return Optimum(self.posterior.loc, diagonal.rsqrt(), self.log_evidence - gap)

    def model(self) -> Model:
        """Give the same beliefs as a network: one linear layer, its weights zero."""
        net = nn.utils.skip_init(nn.Linear, self.X.shape[1], 1, bias=self.intercept, dtype=torch.float64)
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        scale = torch.tensor(self.prior_scale, dtype=torch.float64)
        return Model(net, Gaussian(noise=self.noise), prior=Normal(torch.zeros_like(scale), scale))

    def density(self) -> Density:
        """Give the log prior of "weights" and the log-likelihood of each row."""

        def log_prior(params: dict[str, Tensor]) -> Tensor:
            return _log_normal(params["weights"], 0.0, self.prior_scale).sum(-1)

        def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
            X, y = batch
            return _log_normal(y, self.design(X) @ params["weights"], self.noise)

        params = {"weights": Param((self.X.shape[1] + self.intercept,))}
        return Density(params=params, log_prior=log_prior, log_likelihood=log_likelihood)

    def design(self, X: Tensor) -> Tensor:
        """Append the column of ones, if there is an intercept."""
        return torch.cat([X, torch.ones_like(X[:, :1])], 1) if self.intercept else X


class NormalGammaPosterior(NamedTuple):
    """The belief w | tau ~ N(loc, (tau precision)^-1), tau ~ Gamma(a, b), with noise = tau^(-1/2)."""

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
        """Give the log density over (weights, noise): |d tau / d noise| = 2 noise^-3 is in it."""
        deviation = weights - self.loc
        log_weights = 0.5 * torch.logdet(self.precision) - len(self.loc) * (0.5 * LOG_2PI + noise.log())
        log_weights = log_weights - 0.5 * (deviation @ self.precision * deviation).sum(-1) / noise**2
        log_tau = self.a * math.log(self.b) - math.lgamma(self.a) - 2 * (self.a - 1) * noise.log()
        return log_weights + log_tau - self.b / noise**2 + math.log(2) - 3 * noise.log()


@dataclass(frozen=True, eq=False)
class NormalGamma:
    """Linear regression with unknown noise: tau ~ Gamma(a, b), w | tau ~ N(0, (tau prior_precision)^-1).

    y_n ~ N(w'x_n, 1 / tau). `prior_precision` is a matrix, or a number that multiplies the identity.
    """

    X: Tensor
    y: Tensor
    prior_precision: Any
    a: float
    b: float
    name: ClassVar[str] = "normal gamma"

    def __post_init__(self) -> None:
        _design_and_targets(self)
        _positive(self, "a", "b")
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
        X, y = _correlated_rows(stream(seed, "normal gamma"))
        return cls(X, y, prior_precision=0.5, a=2.0, b=1.0)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The inputs (n, d) and the targets (n,)."""
        return self.X, self.y

    @property
    def prior(self) -> NormalGammaPosterior:
        """What is believed before the data, in the posterior's form."""
        loc = torch.zeros(self.X.shape[1], dtype=torch.float64)
        return NormalGammaPosterior(loc, self.prior_precision, float(self.a), float(self.b))

    @property
    def posterior(self) -> NormalGammaPosterior:
        """The posterior of the weights and the noise."""
        precision = self.prior_precision + self.X.T @ self.X
        loc = torch.linalg.solve(precision, self.X.T @ self.y)
        # in this form nothing cancels, where y'y - loc' precision loc would
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
        """Give the distribution of the target at each row of X."""
        X, posterior = _rows(X, "X", "predictive", 2), self.posterior
        spread = 1 + (X * torch.linalg.solve(posterior.precision, X.T).T).sum(-1)
        return StudentT(2 * posterior.a, X @ posterior.loc, (posterior.b / posterior.a * spread).sqrt())

    def density(self) -> Density:
        """Give the log prior of "weights" and "noise", a standard deviation, and each row's likelihood."""
        prior = self.prior

        def log_prior(params: dict[str, Tensor]) -> Tensor:
            return prior.log_prob(params["weights"], params["noise"])

        def log_likelihood(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
            X, y = batch
            return _log_normal(y, X @ params["weights"], params["noise"])

        params = {"weights": Param((self.X.shape[1],)), "noise": Param((), constraints.positive)}
        return Density(params=params, log_prior=log_prior, log_likelihood=log_likelihood)


def make(seed: int = 0) -> tuple[Coin, GaussianMean, LinearRegression, NormalGamma]:
    """Make one small instance of every exact target.

    >>> [target.name for target in make(seed=0)]
    ['coin', 'gaussian mean', 'linear regression', 'normal gamma']
    """
    return Coin.make(seed), GaussianMean.make(seed), LinearRegression.make(seed), NormalGamma.make(seed)


def _ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.float64)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_normal(x: Tensor, loc: Any, scale: Any) -> Tensor:
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    return -0.5 * ((x - loc) / scale) ** 2 - log_scale - 0.5 * LOG_2PI


def _correlated_rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs that share a factor, so that a factorised posterior has a gap to show."""
    own, shared, noise = (torch.randn(20, k, generator=generator, dtype=torch.float64) for k in (3, 1, 1))
    X = 0.6 * own + 0.8 * shared
    return X, X @ torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64) + 0.5 * noise.squeeze(-1)


def _rows(value: Any, name: str, owner: str, ndim: int) -> Tensor:
    rows = torch.as_tensor(value, dtype=torch.float64)
    must = "hold a row or more of finite numbers" if ndim == 2 else "hold one or more finite numbers"
    ok = rows.ndim == ndim and rows.numel() > 0 and bool(rows.isfinite().all())
    require(ok, name, owner, must, f"the shape {tuple(rows.shape)}" if rows.ndim != ndim else value)
    return rows


def _design_and_targets(problem: LinearRegression | NormalGamma) -> None:
    """Read X and y as float64, and refuse numbers of rows that differ."""
    owner = type(problem).__name__
    X, y = _rows(problem.X, "X", owner, 2), _rows(problem.y, "y", owner, 1)
    require(len(X) == len(y), "y", owner, f"have a value for each of the {len(X)} rows of X", len(y))
    object.__setattr__(problem, "X", X)
    object.__setattr__(problem, "y", y)


def _positive(problem: object, *names: str) -> None:
    for name in names:
        value = getattr(problem, name)
        require(0 < value < math.inf, name, type(problem).__name__, "be a positive number", value)
