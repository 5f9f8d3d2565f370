"""Location-scale families w = mu + s z, with z from one of five distributions.

    family      density of z                   entropy of z            scale s
    gaussian    exp(-z^2 / 2) / sqrt(2 pi)     log(2 pi e) / 2         standard deviation
    laplace     exp(-|z|) / 2                  1 + log 2               b
    uniform     1/2 on (-1, 1)                 log 2                   half of the width
    logistic    exp(-z) / (1 + exp(-z))^2      2                       s
    gumbel      exp(-z - exp(-z)), skewed      1 + Euler's gamma       beta

The entropy of w is log s plus the entropy of z. Expectations E f(mu + s z) are computed by Gauss-Legendre quadrature
on panels of z, which shrink geometrically towards every point where f may have a corner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Distribution, Gumbel, Laplace, Normal, Uniform

from priory.core.errors import require
from priory.core.special import gauss_legendre_panels
from priory.distributions import Logistic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

POINTS_PER_PANEL = 12
CORNER_LEVELS = range(9)  # exponents k of the panel edges around a corner, at distances 4 * 8^-k scales
EULER_GAMMA = 0.5772156649015329
EXPONENTIAL_TAIL_EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 15.0, 20.0, 28.0, 40.0)
CORNER_REACH_SCALES = 4.0  # corners farther than this outside of the panels are ignored
MIN_PANEL_WIDTH = 1e-10  # in scales; narrower panels are skipped


@dataclass(frozen=True)
class LocationScaleFamily:
    """A location-scale family.

    Attributes:
        name: Name of the family.
        entropy_at_one: Entropy of z, in nats.
        edges: Edges of the quadrature panels in z; the density beyond them is negligible or zero.
        member: Function from location and scale to a distribution.
        mean: Mean of z.
    """

    name: str
    entropy_at_one: float
    edges: tuple[float, ...]
    member: Callable[[Tensor, Tensor], Distribution]
    mean: float = 0.0

    @property
    def symmetric(self) -> bool:
        """Whether z and -z have the same distribution."""
        return self.mean == 0

    def entropy(self, scale: Tensor) -> Tensor:
        """Return the entropy of a member, which depends on the scale only."""
        return scale.log() + self.entropy_at_one

    def density(self, z: Tensor) -> Tensor:
        """Return the density of z, zero outside of the panels."""
        zero = z.new_zeros(())
        density = self.member(zero, zero + 1).log_prob(z).exp()
        return torch.where((z >= self.edges[0]) & (z <= self.edges[-1]), density, 0.0)

    @cached_property
    def quadrature(self) -> tuple[Tensor, Tensor]:
        """Nodes z and weights (K,) for expectations of smooth functions."""
        edges = torch.tensor(self.edges, dtype=torch.float64)
        z, width = gauss_legendre_panels(edges[:-1], edges[1:], POINTS_PER_PANEL)
        return z, self.density(z) * width

    def expectation(
        self, function: Callable[[Tensor], Tensor], loc: Tensor, scale: Tensor, corners: Sequence[Tensor | float] = ()
    ) -> Tensor:
        """Return E f(loc + scale z) for a location and a scale of the same shape.

        `function` is evaluated elementwise. Gradients flow through the location and the scale. Corners out of reach of
        a member add no cost.
        """
        marks = [torch.as_tensor(corner).to(loc).expand_as(loc) for corner in corners]
        with torch.no_grad():
            reached = torch.zeros_like(loc, dtype=torch.bool)
            for mark in marks:
                z = (mark - loc) / scale
                reached |= (z > self.edges[0] - CORNER_REACH_SCALES) & (z < self.edges[-1] + CORNER_REACH_SCALES)
        if not bool(reached.any()):
            return self._smooth_expectation(function, loc, scale)
        if bool(reached.all()):
            return self._panel_expectation(function, loc, scale, marks)
        value = torch.empty_like(loc)
        value = value.masked_scatter(~reached, self._smooth_expectation(function, loc[~reached], scale[~reached]))
        near = [mark[reached] for mark in marks]
        return value.masked_scatter(reached, self._panel_expectation(function, loc[reached], scale[reached], near))

    def _smooth_expectation(self, function: Callable[[Tensor], Tensor], loc: Tensor, scale: Tensor) -> Tensor:
        """Return the expectation of a smooth function by one fixed quadrature rule."""
        z, weights = (t.to(loc).reshape(-1, *[1] * loc.ndim) for t in self.quadrature)
        return (weights * function(loc + scale * z)).sum(0)

    def _panel_expectation(
        self, function: Callable[[Tensor], Tensor], loc: Tensor, scale: Tensor, corners: Sequence[Tensor]
    ) -> Tensor:
        """Return the expectation of a function with corners, panel by panel."""
        total = torch.zeros_like(loc)
        with torch.no_grad():
            edges = self._panel_edges(loc, scale, corners)
        for left, right in pairwise(edges):
            if bool((right - left > MIN_PANEL_WIDTH).any()):
                z, width = gauss_legendre_panels(left[None], right[None], POINTS_PER_PANEL)  # (POINTS_PER_PANEL, *B)
                total = total + (width * self.density(z) * function(loc + scale * z)).sum(0)
        return total

    def _panel_edges(self, loc: Tensor, scale: Tensor, corners: Sequence[Tensor]) -> Tensor:
        """Return panel edges in z, (E, *B): the family's, and distances from 4 to 4 * 8^-8 around each corner."""
        shape = loc.shape
        fixed = torch.tensor(self.edges).to(loc).reshape(-1, *[1] * len(shape)).expand(-1, *shape)
        reach = CORNER_REACH_SCALES * 8.0 ** -torch.tensor(CORNER_LEVELS).to(loc)
        steps = torch.cat([-reach, torch.zeros_like(reach[:1]), reach]).reshape(-1, *[1] * len(shape))
        around = [(corner - loc) / scale + steps for corner in corners]
        return torch.cat([fixed, *around]).clamp(self.edges[0], self.edges[-1]).sort(0).values


def _mirrored(outward: tuple[float, ...]) -> tuple[float, ...]:
    """Return edges on both sides of zero, given those >= 0."""
    return (*(-e for e in reversed(outward[1:])), *outward)


def _uniform(loc: Tensor, half: Tensor) -> Distribution:
    """Return the uniform distribution with this centre and half-width."""
    return Uniform(loc - half, loc + half, validate_args=False)


FAMILIES = {
    family.name: family
    for family in (
        LocationScaleFamily(
            "gaussian",
            0.5 * math.log(2 * math.pi * math.e),
            _mirrored(tuple(float(e) for e in range(10))),
            lambda loc, scale: Normal(loc, scale, validate_args=False),
        ),
        LocationScaleFamily(
            "laplace",
            1 + math.log(2),
            _mirrored(EXPONENTIAL_TAIL_EDGES),
            lambda loc, scale: Laplace(loc, scale, validate_args=False),
        ),
        LocationScaleFamily("uniform", math.log(2), (-1.0, -0.5, 0.0, 0.5, 1.0), _uniform),
        LocationScaleFamily(
            "logistic",
            2.0,
            _mirrored(EXPONENTIAL_TAIL_EDGES),
            lambda loc, scale: Logistic(loc, scale, validate_args=False),
        ),
        LocationScaleFamily(
            "gumbel",
            1 + EULER_GAMMA,
            (-4.0, -3.0, -2.0, -1.0, *EXPONENTIAL_TAIL_EDGES),
            lambda loc, scale: Gumbel(loc, scale, validate_args=False),
            EULER_GAMMA,
        ),
    )
}
WITH_ATOMS = ("dirac", "dropout", "spike_slab")


def check_family(name: object, owner: str) -> str:
    """Return the name of a family, or raise an InputError that lists the known names."""
    names = (*FAMILIES, *WITH_ATOMS)
    require(isinstance(name, str) and name in names, "family", owner, f"be one of {', '.join(names)}", repr(name))
    return str(name)
