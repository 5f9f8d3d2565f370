"""Student-t noise: y = f(x) + scale t, t ~ Student(df): a likelihood that outliers don't move."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from priory.core.errors import require
from priory.likelihoods.base import per_datum
from priory.likelihoods.scale import LocationScale

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.distributions import Distribution


class StudentT(LocationScale):
    """y = f + scale t with t ~ Student(df).

    `df` is given; `scale` is as the noise of Gaussian. Below df = 2 the variance is infinite, and below 1
    there is no mean.

    >>> StudentT(0.0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'df' argument of StudentT must be a positive number, got 0.0.
    """

    def __init__(
        self,
        df: float,
        scale: float | str | Tensor = "learn",
        *,
        outputs: int = 1,
        prior: Distribution | None = None,
    ) -> None:
        require(isinstance(df, (int, float)) and 0 < df < math.inf, "df", "StudentT", "be a positive number", df)
        super().__init__(scale, "scale", outputs, prior)
        self.df = float(df)

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(df={self.df}, ", 1)

    @property
    def information(self) -> tuple[float, float]:
        return (self.df + 1) / (self.df + 3), 2 * self.df / (self.df + 3)

    def log_prob(self, outputs: Tensor, targets: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        location, scale = self.location_and_scale(outputs, learnt)
        z, df = (targets - location) / scale, self.df
        constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
        return per_datum(constant - torch.log(scale) - (df + 1) / 2 * torch.log1p(z * z / df), targets)

    def mean(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        location = self.location_and_scale(outputs, learnt)[0]
        return location if self.df > 1 else torch.full_like(location, math.nan)

    def variance(self, outputs: Tensor, learnt: dict[str, Tensor]) -> Tensor:
        location, scale = self.location_and_scale(outputs, learnt)
        factor = self.df / (self.df - 2) if self.df > 2 else math.inf
        return (factor * scale * scale).expand_as(location)

    def draw(self, outputs: Tensor, learnt: dict[str, Tensor], generator: Generator) -> Tensor:
        location, scale = self.location_and_scale(outputs, learnt)
        normal = torch.randn(location.shape, dtype=location.dtype, device=location.device, generator=generator)
        half = torch.full_like(location, self.df / 2)
        chi_squared = 2 * torch._standard_gamma(half, generator=generator)  # pyright: ignore[reportPrivateImportUsage]
        return location + scale * normal * (self.df / chi_squared).sqrt()

    def cdf(self, outputs: Tensor, learnt: dict[str, Tensor], value: Tensor) -> Tensor:
        location, scale = self.location_and_scale(outputs, learnt)
        return student_cdf((value - location) / scale, self.df)


def student_cdf(t: Tensor, df: float) -> Tensor:
    """P(T <= t) = 1 - I_x(df/2, 1/2) / 2 for t > 0, with x = df / (df + t^2) and I the regularised incomplete beta."""
    whole = df + t * t
    rest = torch.where(torch.isinf(whole), torch.ones_like(t), t * t / whole)
    tail = 0.5 * incomplete_beta(df / 2, 0.5, df / whole, rest)
    return torch.where(t > 0, 1 - tail, tail)


def incomplete_beta(a: float, b: float, x: Tensor, y: Tensor | None = None) -> Tensor:
    """I_x(a, b) by the continued fraction of Numerical Recipes (6.4), on the side where it converges fast.

    y is 1 - x, which a caller who has it gives, because it loses its digits when x is rounded first.
    """
    y = 1 - x if y is None else y
    swap = x > (a + 1) / (a + b + 2)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    direct = _beta_fraction(a, b, torch.where(swap, zero, x), torch.where(swap, one, y))
    mirrored = 1 - _beta_fraction(b, a, torch.where(swap, y, zero), torch.where(swap, x, one))
    return torch.where(swap, mirrored, direct)


def _beta_fraction(a: float, b: float, x: Tensor, y: Tensor, terms: int = 200) -> Tensor:
    tiny = 1e-300 if x.dtype == torch.float64 else 1e-30
    keep = lambda v: torch.where(v.abs() < tiny, torch.full_like(v, tiny), v)  # noqa: E731 - Lentz: never divide by zero
    log_front = a * torch.log(x) + b * torch.log(y) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    c, d = torch.ones_like(x), 1 / keep(1 - (a + b) * x / (a + 1))
    h = d
    for m in range(1, terms + 1):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / keep(1 + numerator * d), keep(1 + numerator / c)
            h = h * d * c
        if bool(((d * c - 1).abs() < torch.finfo(x.dtype).eps * 4).all()):
            break
    return torch.exp(log_front) * h / a
