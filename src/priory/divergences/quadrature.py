"""Integrals over the real line by adaptive Gauss-Legendre panels, graded around the centres of q and p.

Panel edges are placed wherever a density may have a corner or a pole. From there the panel widths grow geometrically,
out to 10^15 times the scale of q (further for slowly falling tails, see `tails`), so that both narrow peaks and heavy
tails are resolved. Each panel is integrated with 20 and with 10 nodes, and halved where the two results differ. Their
difference is the reported error; it is the error of the 10-node rule, so it overestimates that of the 20-node rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Distribution, MixtureSameFamily, TransformedDistribution

from priory.core.special import legendre
from priory.divergences.densities import log_density, support_interval

if TYPE_CHECKING:
    from collections.abc import Callable

NODES_PER_PANEL = 20
# Distances of panel edges from a centre or an end of the support, as powers of 4 in units of q's scale.
DEFAULT_REACH = 25
NEAREST_TO_CENTRE = -24
NEAREST_TO_END = -64  # a density may have a pole at an end, which is often 0, where floats are dense
MAX_REFINEMENTS = 60
MAX_PANELS = 4096
MAX_VALUES_AT_ONCE = 2**22  # bounds the memory of one evaluation of the integrand
FLOAT64_EPS = torch.finfo(torch.float64).eps


def over_a_line(q: Distribution, p: Distribution) -> bool:
    """Whether q and p are over single real numbers and the panels resolve the density of q, which integrates to 1."""
    if q.event_shape != () or support_interval(q) is None or support_interval(p) is None:
        return False
    with torch.no_grad():
        mass, _ = integrate(lambda x: log_density(q, x).exp(), q, p)
    return bool((mass - 1).abs().le(1e-7).all())


def integrate(
    integrand: Callable[[Tensor], Tensor], q: Distribution, p: Distribution, reach: int = DEFAULT_REACH
) -> tuple[Tensor, Tensor]:
    """Return the integral over the support of q and its error, in float64, (*B,) each.

    The integrand takes nodes (K, *B). Gradients flow through the integrand and through the ends of the support of q.
    Panels extend to 4^`reach` times the scale of q.
    """
    low, high, edges, inside = _graded(q, p, reach)
    with torch.no_grad():
        left, right = _refined(integrand, edges[:-1], edges[1:], inside)
    left, right = (_snapped(t, low, high) for t in (left, right))
    chunk = max(1, MAX_VALUES_AT_ONCE // (NODES_PER_PANEL * max(1, left[0].numel())))
    value, error = torch.zeros_like(inside), torch.zeros_like(inside)
    for a, b in zip(left.split(chunk), right.split(chunk), strict=True):
        fine, off, size = _both_rules(integrand, a, b, inside)
        value = value + fine.sum(0)
        error = error + (off + 4 * FLOAT64_EPS * size).sum(0).detach()
    return value, torch.where(torch.isfinite(value), error, 0.0)


def _snapped(edges: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Move edges that round to an end of the support onto that end, and give them its gradient."""
    slack = 1e-12 * torch.where(low.isfinite(), low, 0.0).abs().detach()
    edges = torch.where(edges <= low + slack, low, edges)
    slack = 1e-12 * torch.where(high.isfinite(), high, 0.0).abs().detach()
    return torch.where(edges >= high - slack, high, edges)


def _both_rules(
    integrand: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, inside: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Per panel: the integral, its difference from the rule with half the nodes, the integral of |f|; (K, *B) each."""
    half, middle = (right - left) / 2, (right + left) / 2
    sums, size = [], torch.zeros_like(middle)
    for n in (NODES_PER_PANEL, NODES_PER_PANEL // 2):
        points, weights = (t.to(left.device).reshape(-1, *[1] * left.ndim) for t in legendre(n))
        # a panel of width 0 is evaluated at an interior point, since there may be a pole at its ends
        x = torch.where(half > 0, middle + half * points, inside)
        values = integrand(x.flatten(0, 1)).reshape(x.shape) * (weights * half)
        sums.append(values.sum(0))
        size = size if n < NODES_PER_PANEL else values.abs().sum(0).detach()
    return sums[0], (sums[0] - sums[1]).abs(), size


def _refined(
    integrand: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, inside: Tensor
) -> tuple[Tensor, Tensor]:
    """Halve panels until both rules agree in each panel for the whole batch; return the left and right edges."""
    kept: list[tuple[Tensor, Tensor]] = []
    total = None
    for _ in range(MAX_REFINEMENTS):
        value, off, size = _both_rules(integrand, left, right, inside)
        total = size.sum(0) if total is None else total
        rough = torch.isfinite(value) & (off > 1e-13 * size + 1e-15 * total)
        rough = rough.reshape(len(rough), -1).any(1)
        kept.append((left[~rough], right[~rough]))
        left, right = left[rough], right[rough]
        if len(left) == 0 or sum(len(a) for a, _ in kept) + 2 * len(left) > MAX_PANELS:
            break
        middle = (left + right) / 2
        left, right = torch.cat([left, middle]), torch.cat([middle, right])
    kept.append((left, right))
    return torch.cat([a for a, _ in kept]), torch.cat([b for _, b in kept])


def _graded(q: Distribution, p: Distribution, reach: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ends of the support of q, the initial panel edges (E, *B), and an interior point, all in float64."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    low, high = (end.double().expand(shape) for end in support_interval(q) or ())
    with torch.no_grad():
        scale = scale_of(q).double().expand(shape)
        peaks = [(mark, NEAREST_TO_CENTRE) for d in (q, p) for mark in centres(d)]
        ends = [
            (end, NEAREST_TO_END) for d in (q, p) for end in support_interval(d) or () if bool(end.isfinite().all())
        ]
        marks = [(mark.double().expand(shape), range(least, reach + 1)) for mark, least in (*peaks, *ends)]
        edges = torch.cat([low[None], high[None], *(mark + _steps(levels, scale) for mark, levels in marks)])
        edges = torch.minimum(torch.maximum(edges, low), high).sort(0).values
        edges = edges[edges.isfinite().reshape(len(edges), -1).all(1)]
        inside = torch.where(low.isfinite(), low + scale, torch.where(high.isfinite(), high - scale, marks[0][0]))
        inside = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, inside)
    return low, high, edges, inside


def _steps(levels: range, scale: Tensor) -> Tensor:
    """Signed distances from a centre or an end to both sides, and 0."""
    reach = 4.0 ** torch.tensor(levels, dtype=torch.float64, device=scale.device)
    return torch.cat([-reach, torch.zeros_like(reach[:1]), reach]).reshape(-1, *[1] * scale.ndim) * scale


def centres(d: Distribution) -> tuple[Tensor, ...]:
    """Return the points where a density may have peaks or corners, (*B,) each."""
    if isinstance(d, MixtureSameFamily):
        components = d.component_distribution
        return tuple(c for peak in centres(components) for c in peak.expand(components.batch_shape).unbind(-1))
    loc = None if isinstance(d, TransformedDistribution) else getattr(d, "loc", None)
    if loc is None:
        loc = _or_none(d, "mean")
    return (torch.zeros(d.batch_shape) if loc is None else torch.where(loc.isfinite(), loc, 0.0),)


def scale_of(d: Distribution) -> Tensor:
    """Return the width of a distribution, to within a few orders of magnitude."""
    scale = None if isinstance(d, TransformedDistribution) else getattr(d, "scale", None)
    if scale is None:
        scale = _or_none(d, "stddev")
    return torch.ones(d.batch_shape) if scale is None else torch.where(scale.isfinite() & (scale > 0), scale, 1.0)


def _or_none(d: Distribution, name: str) -> Tensor | None:
    """A moment of a distribution by name, or None if torch does not implement it."""
    try:
        return getattr(d, name)
    except NotImplementedError:
        return None
