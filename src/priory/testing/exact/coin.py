"""A coin with a beta prior: the posterior is a beta distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import Beta
from torch.nn.functional import logsigmoid

from priory import constraints
from priory.core.errors import require
from priory.core.flat import Param
from priory.core.streams import stream
from priory.models.density import Density
from priory.testing.exact.inputs import (
    LOG_2PI,
    Optimum,
    log_beta,
    ones,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Coin:
    """Tosses of a coin: p ~ Beta(a, b), each toss is heads with probability p.

    p | D ~ Beta(a + heads, b + tails), and the evidence of the tosses in their order is
    B(a + heads, b + tails) / B(a, b).

    Args:
        heads: Number of heads, an integer >= 0.
        tails: Number of tails, an integer >= 0.
        a: First shape of the prior. Default: 1.0.
        b: Second shape of the prior. Default: 1.0.
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
        """Toss a coin with a random bias thirty times."""
        generator = stream(seed, "coin")
        bias = 0.2 + 0.6 * torch.rand((), generator=generator, dtype=torch.float64)
        heads = int((torch.rand(30, generator=generator, dtype=torch.float64) < bias).sum())
        return cls(heads, 30 - heads, a=2.0, b=3.0)

    @property
    def data(self) -> tuple[Tensor]:
        """The tosses, heads first, 1 for a head: (heads + tails,)."""
        return (torch.cat([ones(self.heads), 0 * ones(self.tails)]),)

    @property
    def posterior(self) -> Beta:
        """The posterior of p."""
        alpha, beta = torch.tensor(self._updated, dtype=torch.float64)
        return Beta(alpha, beta)

    @property
    def log_evidence(self) -> float:
        """The log probability of the tosses in their order."""
        return log_beta(*self._updated) - log_beta(self.a, self.b)

    @property
    def mode(self) -> float:
        """The mode of the posterior density over p."""
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
        """Return the problem as a `Density` of the parameter "p"."""
        log_normaliser = log_beta(self.a, self.b)

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

        which is concave in u, so E[f] + log scale is concave in (loc, scale).

        Returns:
            The mean and the scale of the Gaussian over u, and its ELBO.
        """
        alpha, beta = self._updated
        loc = torch.tensor(math.log(alpha / beta), dtype=torch.float64)
        scale = torch.tensor(math.sqrt(1 / alpha + 1 / beta), dtype=torch.float64)  # the Laplace approximation
        entropy, log_normaliser = 0.5 * (LOG_2PI + 1), log_beta(self.a, self.b)

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
            least = least - 1e-13 * (1 + least.abs())  # bound on the rounding error
            while scale + step[1] <= 0 or elbo(loc + step[0], scale + step[1]) < least:
                step = 0.5 * step
            loc, scale = loc + step[0], scale + step[1]
            if float(step.abs().max()) < 1e-13:
                break
        return Optimum(loc, scale, float(elbo(loc, scale)))

    @property
    def _updated(self) -> tuple[float, float]:
        return float(self.a + self.heads), float(self.b + self.tails)
