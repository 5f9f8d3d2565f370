"""Factorised location-scale families other than the Gaussian: w_i = m_i + s_i z_i, with independent z_i.

    base        density of z                    variance    entropy
    laplace     exp(-|z|) / 2                   2           1 + log 2
    logistic    exp(-z) / (1 + exp(-z))^2       pi^2 / 3    2
    uniform     1/2 on (-1, 1)                  1/3         log 2

The entropy is H(q) = sum_i log s_i + P H(z). Noise is drawn from independent exponential variables E1 and E2:
E1 - E2 is Laplace, and log E1 - log E2 is logistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import require
from priory.families.base import Family, FixedNoise, Form


@dataclass(frozen=True)
class BaseDistribution:
    """The distribution of z: its sampler, quantile function, log density, variance and entropy in nats."""

    draw: Callable[[int, Tensor, torch.Generator], Tensor]
    quantile: Callable[[Tensor], Tensor]
    log_prob: Callable[[Tensor], Tensor]
    variance: float
    entropy: float


def exponential(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw positive exponential variables of rate one, (n, *like.shape)."""
    noise = like.new_empty(n, *like.shape).exponential_(generator=generator)
    return noise.clamp(min=torch.finfo(like.dtype).tiny)


def laplace_noise(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw Laplace noise E1 - E2, (n, *like.shape)."""
    return exponential(n, like, generator) - exponential(n, like, generator)


def logistic_noise(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw logistic noise log E1 - log E2, (n, *like.shape)."""
    return exponential(n, like, generator).log() - exponential(n, like, generator).log()


def uniform_noise(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw uniform noise on (-1, 1), (n, *like.shape)."""
    return 2 * torch.rand(n, *like.shape, generator=generator, dtype=like.dtype, device=like.device) - 1


def logistic_log_prob(z: Tensor) -> Tensor:
    """Return the logistic log density in its symmetric form, which does not overflow."""
    return -z.abs() - 2 * torch.log1p((-z.abs()).exp())


def laplace_quantile(u: Tensor) -> Tensor:
    """Return the quantile of the Laplace distribution at probabilities u."""
    return torch.sign(u - 0.5) * -torch.log1p(-2 * (u - 0.5).abs())


BASE_DISTRIBUTIONS = {
    "laplace": BaseDistribution(
        laplace_noise, laplace_quantile, lambda z: -z.abs() - math.log(2), 2.0, 1 + math.log(2)
    ),
    "logistic": BaseDistribution(logistic_noise, torch.logit, logistic_log_prob, math.pi**2 / 3, 2.0),
    # 0 * z gives the constant density a gradient of zero
    "uniform": BaseDistribution(uniform_noise, lambda u: 2 * u - 1, lambda z: 0 * z - math.log(2), 1 / 3, math.log(2)),
}


@dataclass(frozen=True, eq=False)
class Factorised(Family):
    """Factorised location-scale distribution, w_i = m_i + s_i z_i.

    Args:
        loc: Locations m, (*B, P).
        log_scale: Log scales log s, (*B, P).
        base: Distribution of z: "laplace", "logistic" or "uniform".

    Example:
        >>> round(Factorised(torch.zeros(1), torch.zeros(1), "logistic").entropy().item(), 4)
        2.0
    """

    loc: Tensor
    log_scale: Tensor
    base: str

    @property
    def size(self) -> int:
        return self.loc.shape[-1]

    @property
    def scale(self) -> Tensor:
        """The scales s, (*B, P), which differ from the standard deviations by a factor."""
        return self.log_scale.exp()

    def sample(self, n: int, generator: Any) -> Tensor:
        base = BASE_DISTRIBUTIONS[self.base]
        if isinstance(generator, FixedNoise):
            return self.loc + self.scale * base.quantile(generator.take(generator.uniform, self.loc))
        return self.loc + self.scale * base.draw(n, self.loc, generator)

    def log_prob(self, w: Tensor) -> Tensor:
        deviation = w - self.loc
        each = BASE_DISTRIBUTIONS[self.base].log_prob(deviation / self.scale)
        if self.base == "uniform":  # widened by rounding error, so that every draw has a positive density
            rounding = 2 * torch.finfo(w.dtype).eps * (self.loc.abs() + self.scale)
            each = each.where(deviation.abs() <= self.scale + rounding, -torch.inf)
        return (each - self.log_scale).sum(-1)

    def entropy(self) -> Tensor:
        return self.log_scale.sum(-1) + BASE_DISTRIBUTIONS[self.base].entropy * self.size

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, BASE_DISTRIBUTIONS[self.base].variance * self.scale.square()


@dataclass(frozen=True)
class FactorisedForm(Form):
    """Parametrisation of a factorised location-scale distribution, theta = [loc, log_scale].

    Args:
        size: Length P of the flat vector.
        base: Distribution of z: "laplace" (default), "logistic" or "uniform".

    Example:
        >>> FactorisedForm(3, "laplace").length
        6
    """

    kind: ClassVar[str] = "factorised"
    base: str = "laplace"

    def __post_init__(self) -> None:
        super().__post_init__()
        must = f"be one of {', '.join(BASE_DISTRIBUTIONS)}"
        require(self.base in BASE_DISTRIBUTIONS, "base", "FactorisedForm", must, repr(self.base))

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size, self.size)

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        unit = math.sqrt(BASE_DISTRIBUTIONS[self.base].variance)
        return torch.cat([loc, (self.expanded_scale(loc, scale) / unit).log()], -1)

    def family(self, theta: Tensor) -> Factorised:
        loc, log_scale = self.split(theta)
        return Factorised(loc, log_scale, self.base)

    def moved(self, theta: Tensor, centre: Tensor, root: Tensor) -> Tensor | None:
        loc, log_scale = self.split(theta)
        return torch.cat([centre + root * loc, log_scale + root.log()], -1) if root.ndim == 1 else None
