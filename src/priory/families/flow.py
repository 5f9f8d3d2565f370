"""A normalizing flow of affine couplings, real NVP (Dinh, Sohl-Dickstein and Bengio 2017, "Density Estimation using
Real NVP").

A standard normal z passes through couplings, each of which moves half of the coordinates (b) by functions of the
other half (a), and then through a location and a scale a coordinate:

    x_b <- x_b exp(s(x_a)) + t(x_a),    w = m + exp(l) x,    log q(w) = log N(z; 0, I) - sum s - sum_i l_i

s and t come from one hidden layer of tanh; s is bounded by BOUND tanh(. / BOUND), so that no coupling overflows. The
halves are drawn from the form's seed and change places from one coupling to the next. At the start s = t = 0 and q is
the factorised Gaussian. One coordinate has no halves: its flow is the affine map alone, a Gaussian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch

from priory.core.streams import stream
from priory.families.base import Family, Form, normal_noise

if TYPE_CHECKING:
    from torch import Tensor

BOUND = 2.0  # on a coupling's log scale


@dataclass(frozen=True, eq=False)
class Flow(Family):
    """A form and its numbers theta, (*B, K)."""

    form: FlowForm
    theta: Tensor

    @property
    def size(self) -> int:
        return self.form.size

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        loc, log_scale, *couplings = self.form.split(self.theta)
        x = normal_noise(n, loc, generator).movedim(0, -2)  # (*B, n, P): all n through a member's weights at once
        for part, (given, moved) in zip(couplings, self.form.halves(loc.device), strict=True):
            log_stretch, shift = self._coupling(part, x, given, moved)
            x = x.index_copy(-1, moved, x.index_select(-1, moved) * log_stretch.exp() + shift)
        return loc + log_scale.exp() * x.movedim(-2, 0)

    def log_prob(self, w: Tensor) -> Tensor:
        loc, log_scale, *couplings = self.form.split(self.theta)
        standard = (w - loc) / log_scale.exp()  # (..., *B, P)
        x = standard.reshape(-1, *loc.shape).movedim(0, -2)  # (*B, n, P)
        log_det = log_scale.sum(-1, keepdim=True)
        halves = self.form.halves(loc.device)
        for part, (given, moved) in zip(reversed(couplings), reversed(halves), strict=True):
            log_stretch, shift = self._coupling(part, x, given, moved)
            x = x.index_copy(-1, moved, (x.index_select(-1, moved) - shift) * (-log_stretch).exp())
            log_det = log_det + log_stretch.sum(-1)
        value = -0.5 * x.square().sum(-1) - 0.5 * math.log(2 * math.pi) * self.size - log_det  # (*B, n)
        return value.movedim(-1, 0).reshape(standard.shape[:-1])

    def _coupling(self, part: Tensor, x: Tensor, given: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """The s and t of one coupling, (*B, n, len(moved)) both, from its numbers (*B, k) and x (*B, n, P)."""
        shapes = weight_shapes(len(given), len(moved), self.form.hidden)
        flat = torch.split(part, [math.prod(shape) for shape in shapes], -1)
        inward, bias, outward, offset = (t.unflatten(-1, shape) for t, shape in zip(flat, shapes, strict=True))
        hidden = torch.tanh(x.index_select(-1, given) @ inward + bias)
        raw, shift = (hidden @ outward + offset).chunk(2, -1)
        return BOUND * torch.tanh(raw / BOUND), shift


@dataclass(frozen=True)
class FlowForm(Form):
    """theta = [loc, log_scale, the weights of each coupling]: `layers` couplings of `hidden` units.

    >>> FlowForm(size=2, layers=2, hidden=8).length
    72
    """

    kind: ClassVar[str] = "flow"
    layers: int = 6
    hidden: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.must_be_whole("layers", 1)
        self.must_be_whole("hidden", 1)
        self.must_be_whole("seed", 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size, self.size, *(sum(map(math.prod, shapes)) for shapes in self._shapes))

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        """Random first layers, and last layers of zero, so that every coupling is the identity."""
        parts = [loc, self.spread(loc, scale).log()]
        for inward, bias, outward, offset in self._shapes:
            spreads = (inward[0] ** -0.5, 1.0, 0.0, 0.0)
            for shape, spread in zip((inward, bias, outward, offset), spreads, strict=True):
                many = (*loc.shape[:-1], math.prod(shape))
                noise = torch.randn(many, generator=generator, dtype=loc.dtype, device=loc.device)
                parts.append(spread * noise)
        return torch.cat(parts, -1)

    def family(self, theta: Tensor) -> Flow:
        self.split(theta)
        return Flow(self, theta)

    def halves(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each coupling, the coordinates it reads and those it moves."""
        return tuple((a.to(device), b.to(device)) for a, b in halves(self.size, self.layers, self.seed))

    @cached_property
    def _shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        cpu = torch.device("cpu")
        return [weight_shapes(len(given), len(moved), self.hidden) for given, moved in self.halves(cpu)]


def weight_shapes(given: int, moved: int, hidden: int) -> tuple[tuple[int, ...], ...]:
    """Of a coupling: inward weights and biases, and outward weights and offsets of s and t, for rows of x."""
    return (given, hidden), (1, hidden), (hidden, 2 * moved), (1, 2 * moved)


@lru_cache(maxsize=16)
def halves(size: int, layers: int, seed: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """For each coupling, the coordinates that it reads and those that it moves; a pair of couplings moves them all."""
    if size == 1:
        return ()
    generator, couplings = stream(seed, "couplings"), []
    while len(couplings) < layers:
        order = torch.randperm(size, generator=generator)
        first, second = order[: size // 2], order[size // 2 :]
        couplings += [(first, second), (second, first)]
    return tuple(couplings[:layers])
