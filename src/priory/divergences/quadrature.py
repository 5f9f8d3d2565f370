"""Integrals over a line by Gauss-Legendre panels, graded around the centres of q and p, and halved where too coarse.

A panel ends wherever a density may have a corner or a pole, and the panels grow geometrically from there, inward and
outward to 10^15 of q's scale (further for slow tails, as `tails` says), so that spikes and heavy tails are both met.
Each panel is computed with 20 and with 10 points; where the two differ it is halved. Their difference is the stated
error, which is the 10-point rule's and so an upper estimate.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Distribution, MixtureSameFamily, TransformedDistribution

from priory.core.linalg import eigh
from priory.divergences.densities import interval, log_density

if TYPE_CHECKING:
    from collections.abc import Callable

POINTS = 20
REACH = 25  # how far out panels go unless told, in powers of 4
AT_A_CENTRE = -24  # the least distance from a centre, likewise
AT_AN_END = -64  # a density may have a pole there, and the end is often 0, where numbers are dense
ROUNDS = 60
MOST_PANELS = 4096
CHUNK = 2**22  # numbers at once
EPS = torch.finfo(torch.float64).eps


def over_a_line(q: Distribution, p: Distribution) -> bool:
    """Whether the pair is over single real numbers and q's density is caught by the panels: it integrates to 1."""
    if q.event_shape != () or interval(q) is None or interval(p) is None:
        return False
    with torch.no_grad():
        mass, _ = integrate(lambda x: log_density(q, x).exp(), q, p)
    return bool((mass - 1).abs().le(1e-7).all())


def integrate(
    integrand: Callable[[Tensor], Tensor], q: Distribution, p: Distribution, reach: int = REACH
) -> tuple[Tensor, Tensor]:
    """The integral over q's support, and its error, in double precision, in the shape of the pair's batch.

    The integrand takes points (K, *B). Gradients pass through it and through the ends of q's support. Panels go out to
    4^`reach` of q's scale.
    """
    low, high, edges, inside = _graded(q, p, reach)
    with torch.no_grad():
        left, right = _refined(integrand, edges[:-1], edges[1:], inside)
    left, right = (_snapped(t, low, high) for t in (left, right))
    chunk = max(1, CHUNK // (POINTS * max(1, left[0].numel())))
    value, error = torch.zeros_like(inside), torch.zeros_like(inside)
    for a, b in zip(left.split(chunk), right.split(chunk), strict=True):
        fine, off, size = _both_rules(integrand, a, b, inside)
        value = value + fine.sum(0)
        error = error + (off + 4 * EPS * size).sum(0).detach()
    return value, torch.where(torch.isfinite(value), error, 0.0)


def _snapped(edges: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The edges next to an end of the support moved to it, with its gradient: nearer by, points would round onto it."""
    slack = 1e-12 * torch.where(low.isfinite(), low, 0.0).abs().detach()
    edges = torch.where(edges <= low + slack, low, edges)
    slack = 1e-12 * torch.where(high.isfinite(), high, 0.0).abs().detach()
    return torch.where(edges >= high - slack, high, edges)


@lru_cache
def legendre(n: int) -> tuple[Tensor, Tensor]:
    """Points and weights of the n-point rule on [-1, 1] (Golub and Welsch, 1969)."""
    k = torch.arange(1, n, dtype=torch.float64)
    off = k / (4 * k * k - 1).sqrt()
    points, vectors = eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return points, 2 * vectors[0].square()


def _both_rules(
    integrand: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, inside: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each panel's integral, its difference from half the points, and the integral of the size, (K, *B) each."""
    half, middle = (right - left) / 2, (right + left) / 2
    sums, size = [], torch.zeros_like(middle)
    for n in (POINTS, POINTS // 2):
        points, weights = (t.to(left.device).reshape(-1, *[1] * left.ndim) for t in legendre(n))
        # a panel without width is evaluated elsewhere, since a pole may sit at its ends
        x = torch.where(half > 0, middle + half * points, inside)
        values = integrand(x.flatten(0, 1)).reshape(x.shape) * (weights * half)
        sums.append(values.sum(0))
        size = size if n < POINTS else values.abs().sum(0).detach()
    return sums[0], (sums[0] - sums[1]).abs(), size


def _refined(
    integrand: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, inside: Tensor
) -> tuple[Tensor, Tensor]:
    """Panels halved until the two rules agree in each, for the whole batch."""
    kept: list[tuple[Tensor, Tensor]] = []
    total = None
    for _ in range(ROUNDS):
        value, off, size = _both_rules(integrand, left, right, inside)
        total = size.sum(0) if total is None else total
        rough = torch.isfinite(value) & (off > 1e-13 * size + 1e-15 * total)
        rough = rough.reshape(len(rough), -1).any(1)
        kept.append((left[~rough], right[~rough]))
        left, right = left[rough], right[rough]
        if len(left) == 0 or sum(len(a) for a, _ in kept) + 2 * len(left) > MOST_PANELS:
            break
        middle = (left + right) / 2
        left, right = torch.cat([left, middle]), torch.cat([middle, right])
    kept.append((left, right))
    return torch.cat([a for a, _ in kept]), torch.cat([b for _, b in kept])


def _graded(q: Distribution, p: Distribution, reach: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ends of q's support, the first panels' edges (E, *B), and a point inside, each in double precision."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    low, high = (end.double().expand(shape) for end in interval(q) or ())
    with torch.no_grad():
        scale = scale_of(q).double().expand(shape)
        peaks = [(mark, AT_A_CENTRE) for d in (q, p) for mark in centres(d)]
        ends = [(end, AT_AN_END) for d in (q, p) for end in interval(d) or () if bool(end.isfinite().all())]
        marks = [(mark.double().expand(shape), range(least, reach + 1)) for mark, least in (*peaks, *ends)]
        edges = torch.cat([low[None], high[None], *(mark + _steps(levels, scale) for mark, levels in marks)])
        edges = torch.minimum(torch.maximum(edges, low), high).sort(0).values
        edges = edges[edges.isfinite().reshape(len(edges), -1).all(1)]
        inside = torch.where(low.isfinite(), low + scale, torch.where(high.isfinite(), high - scale, marks[0][0]))
        inside = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, inside)
    return low, high, edges, inside


def _steps(levels: range, scale: Tensor) -> Tensor:
    """Distances from a mark to both sides, and 0."""
    reach = 4.0 ** torch.tensor(levels, dtype=torch.float64, device=scale.device)
    return torch.cat([-reach, torch.zeros_like(reach[:1]), reach]).reshape(-1, *[1] * scale.ndim) * scale


def centres(d: Distribution) -> tuple[Tensor, ...]:
    """Where a density has its peaks and corners, (*B,) each."""
    if isinstance(d, MixtureSameFamily):
        components = d.component_distribution
        return tuple(c for peak in centres(components) for c in peak.expand(components.batch_shape).unbind(-1))
    loc = None if isinstance(d, TransformedDistribution) else getattr(d, "loc", None)
    if loc is None:
        loc = _or_none(d, "mean")
    return (torch.zeros(d.batch_shape) if loc is None else torch.where(loc.isfinite(), loc, 0.0),)


def scale_of(d: Distribution) -> Tensor:
    """How wide a distribution is, to within a few orders of magnitude."""
    scale = None if isinstance(d, TransformedDistribution) else getattr(d, "scale", None)
    if scale is None:
        scale = _or_none(d, "stddev")
    return torch.ones(d.batch_shape) if scale is None else torch.where(scale.isfinite() & (scale > 0), scale, 1.0)


def _or_none(d: Distribution, name: str) -> Tensor | None:
    try:
        return getattr(d, name)
    except NotImplementedError:
        return None
