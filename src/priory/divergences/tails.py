"""Whether an integral over the real line converges, from the decay of its integrand towards the ends of the support.

With u the distance to an end of the support of q, in units of the scale of q, and t = |log u|, the integral of f
towards that end is

    int f du = int g dt,    g = u f,    log g = a + b t + c log t + ...

for an infinite end (t = log u) as for a finite one (t = -log u). A power of u contributes to b, a power of log u to c,
and for exponential decay b goes to minus infinity. The integral converges if b < 0. Evaluations at t, 2 t and 4 t
determine b independently of c. Where b is negative but small, as for a Student-t with few degrees of freedom, the
panels must extend further than by default for the remainder to be negligible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.divergences.densities import support_interval
from priory.divergences.quadrature import DEFAULT_REACH, centres, integrate, scale_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributions import Distribution

NUM_SHELLS = 160  # powers of 4 at which the integrand is evaluated: up to 10^96, whose cube does not overflow
MIN_DECAY_RATE = 1e-3  # b > -MIN_DECAY_RATE counts as divergent: a slower decay could not be integrated numerically
REMAINDER_RELATIVE_ERROR = 0.01  # of the power law that estimates the integral beyond the last panel
LOG_NEGLIGIBLE_REMAINDER = math.log(1e-13)  # log of g / |b|, the integral beyond the last panel


@dataclass(frozen=True)
class Tail:
    """The tail of an integrand at one end of the support, (*B,) each."""

    diverges: Tensor
    reach: Tensor  # the power of 4 to which the panels must extend
    remainder: Tensor  # estimated integral beyond the panels, g / |b|
    unresolved: Tensor  # estimated integral next to a finite end, where floats are too coarse for the panels


def improper_integral(
    integrand: Callable[[Tensor], Tensor], log_size: Callable[[Tensor], Tensor], q: Distribution, p: Distribution
) -> tuple[Tensor, Tensor]:
    """Return the integral over the support of q and its error, (*B,) each; infinity where it diverges.

    `log_size` is the logarithm of the absolute value of the integrand, or of a bound that converges for the same pairs.
    """
    with torch.no_grad():
        found = [_tail(log_size, q, p, side) for side in (0, 1)]
    diverges = found[0].diverges | found[1].diverges
    value, error = integrate(integrand, q, p, int(max(tail.reach.max() for tail in found)))
    remainder = found[0].remainder + found[1].remainder  # positive, like the integrand in a slowly falling tail
    no_error = diverges | ~torch.isfinite(value)
    unresolved = found[0].unresolved + found[1].unresolved
    error = torch.where(no_error, 0.0, error + REMAINDER_RELATIVE_ERROR * remainder + unresolved)
    return torch.where(diverges, math.inf, value + remainder), error


def _tail(log_size: Callable[[Tensor], Tensor], q: Distribution, p: Distribution, side: int) -> Tail:
    """The tail at the lower end (side 0) or the upper end (side 1) of the support of q."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    end = (support_interval(q) or ())[side].double().expand(shape)
    scale, centre = (t.double().expand(shape) for t in (scale_of(q), centres(q)[0]))
    infinite_end = end.isinf()
    k = torch.arange(1, NUM_SHELLS + 1, dtype=torch.float64, device=scale.device).reshape(-1, *[1] * len(shape))
    u = scale * 4.0 ** torch.where(infinite_end, k, -k)
    inward = 1.0 if side == 0 else -1.0
    x = torch.where(infinite_end, centre - inward * u, end + inward * u)
    log_g = log_size(x) + u.log()
    # next to a nonzero finite end floats are too coarse to represent a small distance: these shells are skipped
    log_g = torch.where(infinite_end | ((x - end).abs() - u).abs().le(1e-4 * u), log_g, math.nan)
    return _fit_tail(log_g, infinite_end)


def _fit_tail(log_g: Tensor, infinite_end: Tensor) -> Tail:
    """The tail from log g (NUM_SHELLS, *B), with the slope b from the outermost finite shells at t, 2 t and 4 t."""
    finite = log_g.isfinite()
    last = torch.arange(4, NUM_SHELLS + 1, 4, device=log_g.device)
    seen = finite[last - 1] & finite[last // 2 - 1] & finite[last // 4 - 1]  # (L, *B)
    place = last.reshape(-1, *[1] * infinite_end.ndim) * seen
    outermost = place.amax(0)
    known = outermost > 0
    at = torch.where(known, outermost, 4)[None]
    one, two, four = (log_g.gather(0, at // part - 1)[0] for part in (4, 2, 1))
    b = (four - 2 * two + one) / (at[0] / 4 * math.log(4.0))
    diverges = known & (b > -MIN_DECAY_RATE)
    default_remainder = log_g[DEFAULT_REACH - 1] - b.abs().log()  # log of the integral beyond the default panels
    slow = known & infinite_end & ~diverges & (default_remainder > LOG_NEGLIGIBLE_REMAINDER)
    reach = torch.where(slow, torch.maximum(outermost, torch.tensor(DEFAULT_REACH)), DEFAULT_REACH)
    left = torch.where(slow, four - b.abs().log(), -math.inf)
    coarse = known & ~infinite_end & ~diverges
    return Tail(diverges, reach, left.exp(), torch.where(coarse, (four - b.abs().log()).exp(), 0.0))
