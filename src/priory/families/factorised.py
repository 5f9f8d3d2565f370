"""Factorised families of a location and a scale other than the Gaussian: w_i = m_i + s_i z_i, with independent z_i.

    base        density of z                    variance    entropy
    laplace     exp(-|z|) / 2                   2           1 + log 2
    logistic    exp(-z) / (1 + exp(-z))^2       pi^2 / 3    2
    uniform     1/2 on (-1, 1)                  1/3         log 2

and H(q) = sum_i log s_i + P H(z). Noise is made of exponential numbers E: E1 - E2 is Laplace, log E1 - log E2 logistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from priory.core.errors import require
from priory.families.base import Family, Form


@dataclass(frozen=True)
class Base:
    """The distribution of z: how it is drawn, its log density, its variance and its entropy."""

    draw: Callable[[int, Tensor, torch.Generator], Tensor]
    log_prob: Callable[[Tensor], Tensor]
    variance: float
    entropy: float


def exponential(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Exponential numbers of rate one, (n, *like.shape), above zero."""
    noise = like.new_empty(n, *like.shape).exponential_(generator=generator)
    return noise.clamp(min=torch.finfo(like.dtype).tiny)


def laplace_noise(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """E1 - E2, (n, *like.shape)."""
    return exponential(n, like, generator) - exponential(n, like, generator)


def logistic_noise(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """log E1 - log E2, (n, *like.shape)."""
    return exponential(n, like, generator).log() - exponential(n, like, generator).log()


def uniform_noise(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers on (-1, 1), (n, *like.shape)."""
    return 2 * torch.rand(n, *like.shape, generator=generator, dtype=like.dtype, device=like.device) - 1


def logistic_log_prob(z: Tensor) -> Tensor:
    """The symmetric form of the log density, which doesn't overflow."""
    return -z.abs() - 2 * torch.log1p((-z.abs()).exp())


BASES = {
    "laplace": Base(laplace_noise, lambda z: -z.abs() - math.log(2), 2.0, 1 + math.log(2)),
    "logistic": Base(logistic_noise, logistic_log_prob, math.pi**2 / 3, 2.0),
    "uniform": Base(uniform_noise, lambda z: 0 * z - math.log(2), 1 / 3, math.log(2)),  # flat, with a gradient of zero
}


@dataclass(frozen=True, eq=False)
class Factorised(Family):
    """Locations and log scales, (*B, P), and the name of the base.

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
        """The scales s, which are not the standard deviations."""
        return self.log_scale.exp()

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return self.loc + self.scale * BASES[self.base].draw(n, self.loc, generator)

    def log_prob(self, w: Tensor) -> Tensor:
        deviation = w - self.loc
        each = BASES[self.base].log_prob(deviation / self.scale)
        if self.base == "uniform":  # its edges are as wide as rounding, so that every draw has a density
            rounding = 2 * torch.finfo(w.dtype).eps * (self.loc.abs() + self.scale)
            each = each.where(deviation.abs() <= self.scale + rounding, -torch.inf)
        return (each - self.log_scale).sum(-1)

    def entropy(self) -> Tensor:
        return self.log_scale.sum(-1) + BASES[self.base].entropy * self.size

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, BASES[self.base].variance * self.scale.square()


@dataclass(frozen=True)
class FactorisedForm(Form):
    """theta = [loc, log_scale], with the `base` "laplace", "logistic" or "uniform".

    >>> FactorisedForm(3, "laplace").length
    6
    """

    kind: ClassVar[str] = "factorised"
    base: str = "laplace"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.base in BASES, "base", "FactorisedForm", f"be one of {', '.join(BASES)}", repr(self.base))

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size, self.size)

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        unit = math.sqrt(BASES[self.base].variance)
        return torch.cat([loc, (self.spread(loc, scale) / unit).log()], -1)

    def family(self, theta: Tensor) -> Factorised:
        loc, log_scale = self.split(theta)
        return Factorised(loc, log_scale, self.base)
