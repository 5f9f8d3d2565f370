"""Sums over labels and counts: exact where the support is finite, and cut off where the rest is nothing elsewhere.

Over all integers >= 0, twice as many terms are taken until the second half of them adds nothing to the first,
which is the stated error. A sum whose terms still don't fall at the last of them is infinite: a divergence's terms fall
or rise at a rate that is settled by then, as those of a Poisson against a geometric distribution.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributions import Binomial, constraints

from priory.divergences.densities import discrete, dtype_of
from priory.divergences.result import Divergence, exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributions import Distribution

FIRST, MOST = 256, 2**16  # counts
PEAKS = 4096  # counts among which the largest term is looked for
AT_ONCE = 2**24  # numbers, for the whole batch
EPS = torch.finfo(torch.float64).eps


def over_labels(
    terms: Callable[[Tensor], Tensor], log_size: Callable[[Tensor], Tensor], q: Distribution, p: Distribution
) -> Divergence | None:
    """The sum of the terms over q's support, or None where that can't be listed.

    `log_size` is the logarithm of the terms' size, or of a bound that falls or rises with them.
    """
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    labels = _labels(q, shape)
    if labels is not None:
        return exact(terms(labels).sum(0).expand(shape))
    if q.event_shape != () or q.support is not constraints.nonnegative_integer or not discrete(p):
        return None
    return _over_counts(terms, log_size, shape, dtype_of(q))


def peak(log_size: Callable[[Tensor], Tensor], q: Distribution, p: Distribution) -> Tensor | float:
    """The largest logarithm of a term, (*B,), to be taken out of a sum that might overflow; 0 where there are none."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    labels = _labels(q, shape)
    if labels is None and q.support is not constraints.nonnegative_integer:
        return 0.0
    with torch.no_grad():
        largest = log_size(_counts(PEAKS, shape) if labels is None else labels).amax(0)
    return torch.where(largest.isfinite(), largest, 0.0)


def _labels(q: Distribution, shape: torch.Size) -> Tensor | None:
    """All values that q may have, to broadcast with the batch, or None where they can't be listed."""
    if isinstance(q, Binomial):
        return _counts(int(q.total_count.max()) + 1, shape)  # an entry of fewer trials has no mass at the last
    if not q.has_enumerate_support:
        return None
    try:
        labels = q.enumerate_support(expand=False)
    except NotImplementedError:  # several labels together
        return None
    return labels.reshape(len(labels), *[1] * len(shape), *q.event_shape)


def _over_counts(
    terms: Callable[[Tensor], Tensor], log_size: Callable[[Tensor], Tensor], shape: torch.Size, dtype: torch.dtype
) -> Divergence:
    most = min(MOST, AT_ONCE // max(1, shape.numel()))
    count, settled = FIRST, False
    with torch.no_grad():
        while not settled and count < most:
            count *= 2
            second, first = _halves(terms, count, shape)
            settled = bool((second.abs() <= EPS * first.abs()).all())
        half, last = (log_size(_counts(n, shape)[-1:])[0].expand(shape) for n in (count // 2, count))
        rises = torch.isfinite(last) & (last >= half - 1e-9 * count)
    second, first = _halves(terms, count, shape)
    value = torch.where(rises, math.inf, first + second)
    error = torch.where(torch.isfinite(value), second.abs() + EPS * first.abs(), 0.0).detach()
    return Divergence(value.to(dtype), "sum", error.to(dtype))


def _halves(terms: Callable[[Tensor], Tensor], count: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The sums of the second and of the first half of `count` terms, (*B,) each."""
    each: Any = terms(_counts(count, shape))
    return each[count // 2 :].sum(0).expand(shape), each[: count // 2].sum(0).expand(shape)


def _counts(count: int, shape: torch.Size) -> Tensor:
    return torch.arange(count, dtype=torch.float64).reshape(-1, *[1] * len(shape))
