"""Densities of penalties that are missing in `torch.distributions` and `priory.distributions`.

    group penalty   p(w) = prod_g e^{-lambda ||w_g||} / Z_n     over a tensor partitioned into groups of n weights
    elastic net     p(w) = e^{-a|w| - b w^2} / Z                with Z = sqrt(pi / b) erfcx(a / (2 sqrt(b)))
    any function    p(w) = e^{-lambda r(w)} / Z                 with Z unknown

where erfcx(x) = e^{x^2} erfc(x). Under an elastic net, |w| is N(-a / 2b, 1 / 2b) truncated to positive values. With
t = a / sqrt(2b) and the hazard h = sqrt(2 / pi) / erfcx(t / sqrt(2)), its variance is (1 + t^2 - t h) / 2b.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from priory.distributions import GroupLasso
from priory.distributions.base import Parametrised

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.penalties.as_prior.parameters import WeightGroups

NEWTON_STEPS = 12
VARIANCE_SERIES_START = 40.0  # for larger t, 1 + t^2 - t h loses its digits: a series in 1 / t^2 replaces it


class GroupNormDensity(Distribution):
    """Density proportional to e^{-rate ||w_g||} for each group of a tensor, independent between groups.

    >>> from priory.penalties.as_prior.parameters import WeightGroups
    >>> GroupNormDensity(2.0, WeightGroups((4, 3), 1, 4, 3, by_rows=True)).variance[0]
    tensor([1., 1., 1.])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, rate: float, groups: WeightGroups) -> None:
        self.rate, self.groups = float(rate), groups
        self.count = math.prod(groups.shape) // groups.size
        super().__init__(torch.Size(), torch.Size(groups.shape), validate_args=False)

    @property
    def support(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return constraints.independent(constraints.real, len(self.event_shape))

    def group_density(self, like: Tensor) -> GroupLasso:
        """Return the distribution of one group, with the data type and device of `like`."""
        return GroupLasso(torch.as_tensor(self.rate, dtype=like.dtype, device=like.device), self.groups.size, False)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.group_density(value).log_prob(self.groups.split(value)).sum(-1)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = (*torch.Size(sample_shape), self.count)
        return self.groups.join(
            self.group_density(torch.empty(0, dtype=torch.get_default_dtype())).sample(torch.Size(shape))
        )

    @property
    def mean(self) -> Tensor:
        return torch.zeros(self.event_shape)

    @property
    def variance(self) -> Tensor:
        return torch.full(self.event_shape, (self.groups.size + 1) / self.rate**2)


class ElasticNetDensity(Parametrised):
    """Density e^{-l1 |w| - l2 w^2} / Z of one weight.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(ElasticNetDensity(1e-9 * one, 0.5 * one).variance.item(), 6)  # nearly a standard normal
    1.0
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"l1": constraints.positive, "l2": constraints.positive}
    support = constraints.real
    l1: Tensor
    l2: Tensor

    def __init__(self, l1: Any, l2: Any, validate_args: bool | None = None) -> None:
        self._set_parameters(validate_args, l1=l1, l2=l2)

    @property
    def log_normaliser(self) -> Tensor:
        """log Z."""
        return 0.5 * (math.pi / self.l2).log() + torch.special.erfcx(0.5 * self.l1 / self.l2.sqrt()).log()

    def log_prob(self, value: Tensor) -> Tensor:
        return -self.l1 * value.abs() - self.l2 * value.square() - self.log_normaliser

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            u = torch.rand(shape, dtype=self.l1.dtype, device=self.l1.device).clamp_min(torch.finfo(self.l1.dtype).tiny)
            scale = (2 * self.l2.double()).sqrt()
            size = (truncated_normal_excess(self.l1 / scale, u.double()) / scale).to(self.l1)
            sign = torch.randint(0, 2, shape, device=self.l1.device).to(size) * 2 - 1
            return sign * size

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.l1)

    @property
    def variance(self) -> Tensor:
        t = self.l1 / (2 * self.l2).sqrt()
        hazard = math.sqrt(2 / math.pi) / torch.special.erfcx(t / math.sqrt(2))
        s = t.clamp_min(1.0) ** -2
        series = s * (2 - s * (10 - s * (74 - s * (706 - s * 8162))))
        return torch.where(t > VARIANCE_SERIES_START, series, 1 + t * t - t * hazard) / (2 * self.l2)


def truncated_normal_excess(t: Tensor, u: Tensor) -> Tensor:
    """Solve P(z > t + y | z > t) = u for y, where z is standard normal and t >= 0, by Newton's method on the logarithm.

    The logarithm is concave, so the iterates stay to the right of the root. Written with erfcx, no digits are lost for
    large t.
    """
    root, y = math.sqrt(2), torch.zeros_like(u)
    for _ in range(NEWTON_STEPS):
        ratio = torch.special.erfcx((t + y) / root) / torch.special.erfcx(t / root)
        gap = ratio.log() - y * (t + y / 2) - u.log()
        y = y + gap * torch.special.erfcx((t + y) / root) / math.sqrt(2 / math.pi)
    return y


class UnnormalisedDensity(Distribution):
    """Density proportional to e^{-factor r(w)} over a tensor; the constant Z is unknown and left out."""

    arg_constraints: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleMethodOverride]
    improper = True  # the evidence is known up to a constant only

    def __init__(self, function: Callable[[Tensor], Any], factor: float, shape: tuple[int, ...]) -> None:
        self.function, self.factor = function, float(factor)
        super().__init__(torch.Size(), torch.Size(shape), validate_args=False)

    @property
    def support(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return constraints.independent(constraints.real, len(self.event_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return -self.factor * map_members(lambda w: self.function(w).sum(), self.event_shape, value)


def map_members(function: Callable[..., Tensor], shape: torch.Size, *tensors: Tensor) -> Tensor:
    """Apply a scalar function of tensors (*shape) to each member of tensors (*B, *shape), giving (*B,)."""
    lead = tensors[0].shape[: tensors[0].ndim - len(shape)]
    if not lead:
        return function(*tensors).to(tensors[0])
    flat = [t.reshape(-1, *shape) for t in tensors]
    try:
        values = torch.vmap(function)(*flat)
    except RuntimeError:  # control flow that depends on values can't be vectorised
        values = torch.stack([function(*member) for member in zip(*flat, strict=True)])
    return values.to(tensors[0]).reshape(lead)
