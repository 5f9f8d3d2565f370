"""The priors behind penalties that `torch.distributions` and `priory.distributions` lack.

    group penalty   p(w) = prod_g e^{-lambda ||w_g||} / Z_n     over a tensor that is cut into groups
    elastic net     p(w) = e^{-a|w| - b w^2} / Z                with Z = sqrt(pi / b) erfcx(a / (2 sqrt(b)))
    any function    p(w) = e^{-lambda r(w)} / Z                 with a Z that nobody knows

where erfcx(x) = e^{x^2} erfc(x). |w| of an elastic net is N(-a / 2b, 1 / 2b) above zero, so that with t = a / sqrt(2b)
and the hazard h = sqrt(2 / pi) / erfcx(t / sqrt(2)) its variance is (1 + t^2 - t h) / 2b.
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
VARIANCE_SERIES_START = (
    40.0  # from this t on the variance is a series in 1 / t^2: the difference 1 + t^2 - t h loses its digits
)


class GroupNormDensity(Distribution):
    """e^{-rate ||w_g||} over each group of a tensor.

    >>> from priory.penalties.as_prior.parameters import WeightGroups
    >>> GroupNormDensity(2.0, WeightGroups((4, 3), 1, 4, 3, rows=True)).variance[0]
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
        """The distribution of one group, in the type of a tensor."""
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
    """e^{-a|w| - b w^2} / Z; `l1` is a and `l2` is b.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(ElasticNetDensity(1e-9 * one, 0.5 * one).variance.item(), 6)  # all but a standard normal
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
    """y with P(z > t + y | z > t) = u for a standard normal z and t from 0, by Newton's method on the logarithm.

    Its steps stay to the right of the root, as the logarithm is concave; written with erfcx it loses nothing far out.
    """
    root, y = math.sqrt(2), torch.zeros_like(u)
    for _ in range(NEWTON_STEPS):
        ratio = torch.special.erfcx((t + y) / root) / torch.special.erfcx(t / root)
        gap = ratio.log() - y * (t + y / 2) - u.log()
        y = y + gap * torch.special.erfcx((t + y) / root) / math.sqrt(2 / math.pi)
    return y


class UnnormalisedDensity(Distribution):
    """e^{-factor r(w)} over a tensor, for a function r of the tensor; its constant is unknown, and left out."""

    arg_constraints: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleMethodOverride]
    improper = True  # evidence is then given up to a constant

    def __init__(self, function: Callable[[Tensor], Any], factor: float, shape: tuple[int, ...]) -> None:
        self.function, self.factor = function, float(factor)
        super().__init__(torch.Size(), torch.Size(shape), validate_args=False)

    @property
    def support(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return constraints.independent(constraints.real, len(self.event_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return -self.factor * map_members(lambda w: self.function(w).sum(), self.event_shape, value)


def map_members(function: Callable[..., Tensor], shape: torch.Size, *tensors: Tensor) -> Tensor:
    """A number for each member of tensors (*B, *shape), by a function of one member: (*B,)."""
    lead = tensors[0].shape[: tensors[0].ndim - len(shape)]
    if not lead:
        return function(*tensors).to(tensors[0])
    flat = [t.reshape(-1, *shape) for t in tensors]
    try:
        values = torch.vmap(function)(*flat)
    except RuntimeError:  # a function that looks at values to decide, which only one member at a time can do
        values = torch.stack([function(*member) for member in zip(*flat, strict=True)])
    return values.to(tensors[0]).reshape(lead)
