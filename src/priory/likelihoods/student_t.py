"""Student-t noise: y = f(x) + scale t with t ~ Student(df), a likelihood that is robust to outliers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from priory.core.errors import require
from priory.core.special import student_cdf
from priory.likelihoods.base import per_datum
from priory.likelihoods.scale import LocationScale

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.distributions import Distribution


class StudentT(LocationScale):
    """Student-t likelihood for regression with outliers: y = f + scale t with t ~ Student(df).

    The variance is infinite for df <= 2, and the mean is undefined (NaN) for df <= 1.

    Args:
        df: Degrees of freedom, a positive number.
        scale: Scale of the noise. "learn" (default) for a positive parameter with a prior, a positive
            number, a tensor with one value per output, or "network" if the network gives 2d values per row: d
            locations, then d raw scales, with scale = softplus(raw).
        outputs: Number of learnt scales: 1 (default) for one shared by all outputs, or the number of outputs for one
            scale per output.
        prior: Prior of a learnt scale, a distribution over positive numbers. Default: LogNormal(0, 3).

    Raises:
        InputError: If an argument is out of range.

    Example:
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
        z, log_scale = self.residuals(outputs, targets, learnt)
        df = self.df
        constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
        return per_datum(constant - log_scale - (df + 1) / 2 * torch.log1p(z * z / df), targets)

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
