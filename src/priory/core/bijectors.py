"""Smooth maps from unconstrained coordinates onto numbers and vectors in a support.

The maps are those of the Stan reference manual ("Constraint Transforms"), written in logarithms, because a product of
many sigmoids underflows and a difference of nearly equal numbers cancels. They are plain tensor functions, so that
`torch.vmap`, `torch.func.grad` and `make_fx` work on them. They stay strictly inside a bounded support, so that a log
density stays finite where u is far from zero. `priory.constraints.bijector` chooses the map of a support. Maps onto
matrices are in `priory.core.matrix_bijectors`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

RADIUS_POWER = 8.0  # of the auxiliary length of a unit vector: its relative spread is about 1 / sqrt(2 (m + K))


@dataclass(frozen=True, eq=False)
class Bijector(ABC):
    """Base class of smooth maps x = f(u) from unconstrained coordinates onto a support.

    Args:
        shape: Shape of one value of x. Its last `event_dim` dimensions are mapped jointly, the other dimensions
            independently.
    """

    shape: tuple[int, ...]
    event_dim: ClassVar[int] = 0
    elementwise: ClassVar[bool] = False  # whether each entry of x depends only on the same entry of u
    identity: ClassVar[bool] = False  # whether f is the identity, x = u
    one_to_one: ClassVar[bool] = True  # whether x determines u; if not, u holds an auxiliary variable

    @property
    def free_shape(self) -> tuple[int, ...]:
        """The shape of one value of u."""
        return self.shape

    @property
    def exponential(self) -> bool:
        """Whether x = exp(u), so that u is normal where x is log-normal."""
        return False

    def start(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the coordinates at which a fit of one vector starts, the origin in most maps: (*free_shape)."""
        return torch.zeros(self.free_shape, dtype=dtype, device=device)

    @abstractmethod
    def forward(self, u: Tensor) -> Tensor:
        """Map u to x = f(u): (*B, *free_shape) -> (*B, *shape)."""

    @abstractmethod
    def inverse(self, x: Tensor) -> Tensor:
        """Map x back to u: (*B, *shape) -> (*B, *free_shape)."""

    @abstractmethod
    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        """Return log |det df/du| at u, where x = f(u), summed over the whole value: (*B,)."""

    def _total(self, values: Tensor) -> Tensor:
        """Sum values (*B, *batch) over the dimensions of `shape` that are mapped independently."""
        dims = len(self.shape) - self.event_dim
        return values.sum(tuple(range(-dims, 0))) if dims else values


class IdentityMap(Bijector):
    """The real line: x = u."""

    elementwise = True
    identity = True

    def forward(self, u: Tensor) -> Tensor:
        return u

    def inverse(self, x: Tensor) -> Tensor:
        return x

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        return self._total(torch.zeros_like(u))


@dataclass(frozen=True, eq=False)
class HalfLineMap(Bijector):
    """A half-line: x = bound + sign exp(u)."""

    elementwise = True
    bound: float | Tensor
    sign: int

    @property
    def exponential(self) -> bool:
        return isinstance(self.bound, float) and self.bound == 0.0 and self.sign > 0

    def forward(self, u: Tensor) -> Tensor:
        bound = bound_like(self.bound, u)
        distance = u.exp().clamp(min=_step_from(bound, u.dtype))
        return distance if self.exponential else bound + self.sign * distance

    def inverse(self, x: Tensor) -> Tensor:
        return (self.sign * (x - bound_like(self.bound, x))).log()

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        return self._total(u)


@dataclass(frozen=True, eq=False)
class IntervalMap(Bijector):
    """An interval: x = low + (high - low) sigmoid(u)."""

    elementwise = True
    low: float | Tensor
    high: float | Tensor

    def forward(self, u: Tensor) -> Tensor:
        low, high = bound_like(self.low, u), bound_like(self.high, u)
        x = low + (high - low) * u.sigmoid()
        # two calls, since clamp does not take a number and a tensor together
        return x.clamp(min=low + _step_from(low, u.dtype)).clamp(max=high - _step_from(high, u.dtype))

    def inverse(self, x: Tensor) -> Tensor:
        return (x - bound_like(self.low, x)).log() - (bound_like(self.high, x) - x).log()

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        width = bound_like(self.high, u) - bound_like(self.low, u)
        log_width = width.log() if isinstance(width, Tensor) else math.log(width)
        return self._total(logsigmoid(u) + logsigmoid(-u) + log_width)


def bound_like(bound: float | Tensor, u: Tensor) -> Any:
    """A bound in the dtype and on the device of u; numbers stay numbers."""
    return bound.to(u) if isinstance(bound, Tensor) else bound


def _step_from(bound: Any, dtype: torch.dtype) -> Any:
    """The smallest distance from a bound that survives rounding."""
    tiny, step = torch.finfo(dtype).tiny, 2 * torch.finfo(dtype).eps * abs(bound)
    return step.clamp(min=tiny) if isinstance(step, Tensor) else max(tiny, step)


class StickBreakingMap(Bijector):
    """A simplex: x_k = z_k prod_{j<k} (1 - z_j) with z_k = sigmoid(u_k - log(K - k)), so that u = 0 is the centre."""

    event_dim = 1

    @property
    def free_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] - 1)

    def forward(self, u: Tensor) -> Tensor:
        log_broken, _, log_left = self._logs(u)
        x = (pad(log_broken, (0, 1)) + log_left).exp()  # the last piece is the rest of the stick
        return x.clamp(min=torch.finfo(u.dtype).tiny)

    def inverse(self, x: Tensor) -> Tensor:
        after = x.flip(-1).cumsum(-1).flip(-1)[..., 1:]  # a sum of positive numbers, since 1 - cumsum would cancel
        return x[..., :-1].log() - after.log() + self.centre(x)

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        log_broken, log_rest, log_left = self._logs(u)
        return self._total((log_broken + log_rest + log_left[..., :-1]).sum(-1))

    def centre(self, like: Tensor) -> Tensor:
        """Return the offsets log(K - k) that make u = 0 the centre of the simplex: (K - 1,)."""
        return torch.arange(self.shape[-1] - 1, 0, -1, dtype=like.dtype, device=like.device).log()

    def _logs(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log z and log(1 - z), (*, K - 1) each, and the log of the stick left before each piece, (*, K)."""
        logit = u - self.centre(u)
        log_rest = logsigmoid(-logit)
        return logsigmoid(logit), log_rest, pad(log_rest.cumsum(-1), (1, 0))


class OrderedMap(Bijector):
    """An ordered vector: x_1 = u_1, x_k = x_{k-1} + exp(u_k)."""

    event_dim = 1

    def forward(self, u: Tensor) -> Tensor:
        return torch.cat([u[..., :1], u[..., 1:].exp()], -1).cumsum(-1)

    def inverse(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :1], x.diff(dim=-1).log()], -1)

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        return self._total(u[..., 1:].sum(-1))


class PositiveOrderedMap(Bijector):
    """A positive ordered vector: x_1 = exp(u_1), x_k = x_{k-1} + exp(u_k)."""

    event_dim = 1

    def forward(self, u: Tensor) -> Tensor:
        return u.exp().cumsum(-1).clamp(min=torch.finfo(u.dtype).tiny)

    def inverse(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :1], x.diff(dim=-1)], -1).log()

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        return self._total(u.sum(-1))


class ZeroSumMap(Bijector):
    """A vector with sum zero, by an orthonormal basis of the hyperplane, so that lengths and volumes are preserved.

    With w_n = u_n / sqrt(n (n + 1)) for n = 1, ..., K - 1, x_k = sum_{n >= k} w_n - (k - 1) w_{k-1}. A standard normal
    u is a standard normal vector conditioned on the sum zero, with variances 1 - 1/K.
    """

    event_dim = 1

    @property
    def free_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] - 1)

    def forward(self, u: Tensor) -> Tensor:
        n, length = self._basis(u)
        w = u / length
        return pad(w.flip(-1).cumsum(-1).flip(-1), (0, 1)) - pad(n * w, (1, 0))

    def inverse(self, x: Tensor) -> Tensor:
        n, length = self._basis(x)
        return (x[..., :-1].cumsum(-1) - n * x[..., 1:]) / length

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        return self._total(torch.zeros_like(u).sum(-1))

    def _basis(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return n = 1, ..., K - 1 and the lengths sqrt(n (n + 1)) of the basis vectors before scaling, (K - 1,)."""
        n = torch.arange(1, self.shape[-1], dtype=like.dtype, device=like.device)
        return n, (n * (n + 1)).sqrt()


class UnitVectorMap(Bijector):
    """A point on the unit sphere, x = u / |u|; the length r = |u| is an auxiliary variable independent of x.

    No smooth map from R^(K-1) covers a sphere, so u has K coordinates. The term in the place of the log-determinant is

        m log r - m r^2 / 2 - log Z,    Z = 1/2 (2 / m)^((m + K) / 2) Gamma((m + K) / 2),

    with m = `RADIUS_POWER`. It is normalised: the density of x in surface area is p(x), and m r^2 is chi-squared with
    m + K degrees of freedom. Stan has m = 0 in the first term, where r comes close to zero. There a density over a
    small part of the sphere is a narrow cone in u, in which samplers diverge.
    """

    event_dim = 1
    one_to_one = False

    def start(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return equal coordinates of length one, because the origin has no direction."""
        return torch.full(self.free_shape, self.shape[-1] ** -0.5, dtype=dtype, device=device)

    def forward(self, u: Tensor) -> Tensor:
        return u / self._length(u)

    def inverse(self, x: Tensor) -> Tensor:
        """Return x itself: of all u with this direction, the one of the most probable length."""
        return x

    def log_det(self, u: Tensor, x: Tensor) -> Tensor:
        m, degrees = RADIUS_POWER, RADIUS_POWER + self.shape[-1]
        log_constant = math.lgamma(degrees / 2) + 0.5 * degrees * math.log(2 / m) - math.log(2)
        return self._total(m * (self._length(u).squeeze(-1).log() - 0.5 * u.square().sum(-1)) - log_constant)

    def _length(self, u: Tensor) -> Tensor:
        """Return |u|, (*, 1)."""
        return u.square().sum(-1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny).sqrt()
