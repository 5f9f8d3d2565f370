"""A normalising flow of affine couplings, real NVP (Dinh, Sohl-Dickstein and Bengio 2017, "Density Estimation using
Real NVP").

A standard normal z passes through a sequence of couplings. Each coupling transforms half of the coordinates (b) by
functions of the other half (a). A location and a scale per coordinate follow:

    x_b <- x_b exp(s(x_a)) + t(x_a),    w = m + exp(l) x,    log q(w) = log N(z; 0, I) - sum s - sum_i l_i

With `linear`, correlations follow too: w = m + (I + A) D x, with A strictly lower-triangular and D = diag(exp(l)).

s and t are networks with one hidden tanh layer. s is bounded to (-2, 2) by 2 tanh(. / 2), so that no coupling
overflows. The halves are drawn at random from the form's seed and swap roles from one coupling to the next. Initially
s = t = 0, and q is the factorised Gaussian. With a single coordinate there are no couplings, and q is Gaussian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from priory.core.streams import stream
from priory.families.base import Family, Form, normal_noise
from priory.families.diagonal import DiagonalFamily, DiagonalForm
from priory.families.full_rank import FullRankFamily, FullRankForm, columns

if TYPE_CHECKING:
    from torch import Tensor

LOG_SCALE_BOUND = 2.0  # bound on |s|, the log scale of a coupling


@dataclass(frozen=True, eq=False)
class FlowFamily(Family):
    """Normalising flow of affine couplings.

    Args:
        form: Size, number of couplings, hidden units and seed of the flow.
        theta: Parameters of the flow, (*B, K).
    """

    form: FlowForm
    theta: Tensor

    @property
    def size(self) -> int:
        return self.form.size

    def sample(self, n: int, generator: Any) -> Tensor:
        affine, couplings = self.form.parts(self.theta)
        loc = affine.loc
        x = normal_noise(n, loc, generator).movedim(0, -2)  # (*B, n, P): one matrix product per member for all n draws
        for part, (given, moved) in zip(couplings, self.form.halves(loc.device), strict=True):
            log_stretch, shift = self._coupling(part, x, given, moved)
            x = x.index_copy(-1, moved, x.index_select(-1, moved) * log_stretch.exp() + shift)
        if isinstance(affine, FullRankFamily):
            return loc + (x @ affine.tril.mT).movedim(-2, 0)
        return loc + affine.scale * x.movedim(-2, 0)

    def log_prob(self, w: Tensor) -> Tensor:
        affine, couplings = self.form.parts(self.theta)
        loc = affine.loc
        if isinstance(affine, FullRankFamily):
            solved = torch.linalg.solve_triangular(affine.tril, columns(w - loc, loc.ndim), upper=False)
            x, log_det = solved.mT, affine.tril.diagonal(0, -2, -1).log().sum(-1, keepdim=True)  # (*B, n, P)
        else:
            x = ((w - loc) / affine.scale).reshape(-1, *loc.shape).movedim(0, -2)  # (*B, n, P)
            log_det = affine.log_scale.sum(-1, keepdim=True)
        halves = self.form.halves(loc.device)
        for part, (given, moved) in zip(reversed(couplings), reversed(halves), strict=True):
            log_stretch, shift = self._coupling(part, x, given, moved)
            x = x.index_copy(-1, moved, (x.index_select(-1, moved) - shift) * (-log_stretch).exp())
            log_det = log_det + log_stretch.sum(-1)
        value = -0.5 * x.square().sum(-1) - 0.5 * math.log(2 * math.pi) * self.size - log_det  # (*B, n)
        return value.movedim(-1, 0).reshape(w.shape[:-1])

    def _coupling(self, part: Tensor, x: Tensor, given: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """s and t of one coupling, (*B, n, len(moved)) each, from its parameters (*B, k) and x (*B, n, P)."""
        shapes = weight_shapes(len(given), len(moved), self.form.hidden)
        flat = torch.split(part, [math.prod(shape) for shape in shapes], -1)
        inward, bias, outward, offset = (t.unflatten(-1, shape) for t, shape in zip(flat, shapes, strict=True))
        hidden = torch.tanh(x.index_select(-1, given) @ inward + bias)
        raw, shift = (hidden @ outward + offset).chunk(2, -1)
        return LOG_SCALE_BOUND * torch.tanh(raw / LOG_SCALE_BOUND), shift


@dataclass(frozen=True)
class FlowForm(Form):
    """Parametrisation of a normalising flow, theta = [loc, log_scale, the weights of each coupling].

    With `linear`, the parameters of a `FullRankForm` take the place of loc and log_scale.

    Args:
        size: Length P of the flat vector.
        layers: Number of couplings. Default: 6.
        hidden: Number of hidden units of each coupling. Default: 32.
        seed: Seed of the random halves. Default: 0.
        linear: Whether the last layer is a lower-triangular matrix, and not a scale per coordinate. Default: False.

    Example:
        >>> FlowForm(size=2, layers=2, hidden=8).length
        72
    """

    kind: ClassVar[str] = "flow"
    layers: int = 6
    hidden: int = 32
    seed: int = 0
    linear: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer("layers", 1)
        self.require_integer("hidden", 1)
        self.require_integer("seed", 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.affine.sizes, *(sum(map(math.prod, shapes)) for shapes in self._shapes))

    @property
    def affine(self) -> DiagonalForm | FullRankForm:
        """The form of the last layer."""
        return FullRankForm(self.size) if self.linear else DiagonalForm(self.size)

    def parts(self, theta: Tensor) -> tuple[DiagonalFamily | FullRankFamily, tuple[Tensor, ...]]:
        """Return the Gaussian that the last layer makes of a standard normal, and the weights of each coupling."""
        split, last = self.split(theta), len(self.affine.sizes)
        return self.affine.family(theta[..., : self.affine.length]), split[last:]

    def moved(self, theta: Tensor, centre: Tensor, root: Tensor) -> Tensor | None:
        first = self.affine.moved(theta[..., : self.affine.length], centre, root)
        return None if first is None else torch.cat([first, theta[..., self.affine.length :]], -1)

    def initial(self, loc: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        """Return theta with random first layers and zero last layers, so that every coupling is the identity."""
        self.expanded_scale(loc, scale)
        parts = [self.affine.initial(loc, scale, generator)]
        for inward, bias, outward, offset in self._shapes:
            spreads = (inward[0] ** -0.5, 1.0, 0.0, 0.0)
            for shape, spread in zip((inward, bias, outward, offset), spreads, strict=True):
                many = (*loc.shape[:-1], math.prod(shape))
                noise = torch.randn(many, generator=generator, dtype=loc.dtype, device=loc.device)
                parts.append(spread * noise)
        return torch.cat(parts, -1)

    def family(self, theta: Tensor) -> FlowFamily:
        self.split(theta)
        return FlowFamily(self, theta)

    def halves(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return, for each coupling, the indices that it reads and those that it transforms."""
        return tuple((a.to(device), b.to(device)) for a, b in halves(self.size, self.layers, self.seed))

    @cached_property
    def _shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """The shapes of the weights of each coupling."""
        cpu = torch.device("cpu")
        return [weight_shapes(len(given), len(moved), self.hidden) for given, moved in self.halves(cpu)]


def weight_shapes(given: int, moved: int, hidden: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a coupling's first-layer weights and biases, and of its last-layer weights and biases."""
    return (given, hidden), (1, hidden), (hidden, 2 * moved), (1, 2 * moved)


@lru_cache(maxsize=16)
def halves(size: int, layers: int, seed: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return, for each coupling, the indices that it reads and those that it transforms; a pair transforms all."""
    if size == 1:
        return ()
    generator, couplings = stream(seed, "couplings"), []
    while len(couplings) < layers:
        order = torch.randperm(size, generator=generator)
        first, second = order[: size // 2], order[size // 2 :]
        couplings += [(first, second), (second, first)]
    return tuple(couplings[:layers])
