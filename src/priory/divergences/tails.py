"""Whether an integral over a line exists: how its integrand falls towards the ends of q's support.

With u the distance to an end, in units of q's scale, and t = |log u|, the integral of f towards that end is

    int f du = int g dt,    g = u f,    log g = a + b t + c log t + ...

at an end at infinity (t = log u) as at a finite one (t = -log u): powers of u fall as b t, logarithms as c log t, and
what falls exponentially has a b that goes to minus infinity. The integral exists where b < 0. Three points at t, 2 t
and 4 t give b without c. Where b is negative but small, as for a Student-t of few degrees of freedom, panels must reach
further out than usual for the rest to be nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.divergences.densities import interval
from priory.divergences.quadrature import REACH, centres, integrate, scale_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributions import Distribution

SHELLS = 160  # powers of 4 that are looked at: 10^96, whose square and cube are still numbers
FLAT = 1e-3  # a b from -FLAT on is none: slower than that nothing could be integrated
DOUBT = 0.01  # how far off the law of powers may be for what panels leave out, as a share of it
REST = math.log(1e-13)  # of g / |b|, beyond the last panel


@dataclass(frozen=True)
class Tail:
    """What was seen at one end, (*B,) each."""

    diverges: Tensor
    reach: Tensor  # the power of 4 up to which panels are to go
    rest: Tensor  # what they leave out, g / |b|


def improper_integral(
    integrand: Callable[[Tensor], Tensor], log_size: Callable[[Tensor], Tensor], q: Distribution, p: Distribution
) -> tuple[Tensor, Tensor]:
    """The integral over q's support and its error, (*B,) each, or infinity where it doesn't exist.

    `log_size` is the logarithm of the integrand's size, or of a bound whose integral exists for the same pairs.
    """
    with torch.no_grad():
        found = [_tail(log_size, q, p, side) for side in (0, 1)]
    diverges = found[0].diverges | found[1].diverges
    value, error = integrate(integrand, q, p, int(max(tail.reach.max() for tail in found)))
    rest = found[0].rest + found[1].rest  # of the sign that the integrand has there, which is +: else it would be small
    lost = diverges | ~torch.isfinite(value)
    return torch.where(diverges, math.inf, value + rest), torch.where(lost, 0.0, error + DOUBT * rest)


def _tail(log_size: Callable[[Tensor], Tensor], q: Distribution, p: Distribution, side: int) -> Tail:
    """Look at one end: the lower one for side 0, the upper one for side 1."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    end = (interval(q) or ())[side].double().expand(shape)
    scale, centre = (t.double().expand(shape) for t in (scale_of(q), centres(q)[0]))
    far = end.isinf()
    k = torch.arange(1, SHELLS + 1, dtype=torch.float64, device=scale.device).reshape(-1, *[1] * len(shape))
    u = scale * 4.0 ** torch.where(far, k, -k)
    inward = 1.0 if side == 0 else -1.0
    x = torch.where(far, centre - inward * u, end + inward * u)
    log_g = log_size(x) + u.log()
    # near an end that is not zero the numbers are too coarse to stand at a small distance
    log_g = torch.where(far | ((x - end).abs() - u).abs().le(1e-4 * u), log_g, math.nan)
    return _judged(log_g, far)


def _judged(log_g: Tensor, far: Tensor) -> Tail:
    """The slope b from the outermost three shells with numbers, and what follows, for log g (SHELLS, *B)."""
    finite = log_g.isfinite()
    last = torch.arange(4, SHELLS + 1, 4, device=log_g.device)
    seen = finite[last - 1] & finite[last // 2 - 1] & finite[last // 4 - 1]  # (L, *B)
    place = last.reshape(-1, *[1] * far.ndim) * seen
    outer = place.amax(0)
    known = outer > 0
    at = torch.where(known, outer, 4)[None]
    one, two, four = (log_g.gather(0, at // part - 1)[0] for part in (4, 2, 1))
    b = (four - 2 * two + one) / (at[0] / 4 * math.log(4.0))
    diverges = known & (b > -FLAT)
    usual = log_g[REACH - 1] - b.abs().log()  # what panels to the usual distance leave out
    slow = known & far & ~diverges & (usual > REST)
    reach = torch.where(slow, torch.maximum(outer, torch.tensor(REACH)), REACH)
    left = torch.where(slow, four - b.abs().log(), -math.inf)
    return Tail(diverges, reach, left.exp())
