"""Sums over classes and counts: exact for a finite support, truncated for an infinite one.

Over all integers >= 0, the number of terms is doubled until the bulk of both distributions is covered and the second
half adds nothing to the first. The reported error is the size of the second half, and the rounding of the terms: the
logarithm of a probability at the count k is a difference of terms of size k log k. If the terms still do not decrease
at the end, the sum is infinite: the terms of a divergence grow or fall at a steady rate by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributions import Binomial, constraints

from priory.divergences.densities import dtype_of, is_discrete, log_density
from priory.divergences.result import Divergence, exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributions import Distribution

INITIAL_TERMS = 256
BULK_DEVIATIONS = 8.0  # standard deviations above the mean, where the bulk of a distribution of counts ends
PEAK_SEARCH_TERMS = 4096  # the largest term is searched among this many counts
MAX_VALUES = 2**23  # terms times batch size
TERMS_PER_BLOCK = 2**18  # times batch size, which bounds the memory of one evaluation
MAX_REMAINDER_SHARE = 1e-9  # of the second half of the terms, at the largest number of them
FLOAT64_EPS = torch.finfo(torch.float64).eps


def over_labels(
    terms: Callable[[Tensor], Tensor], log_size: Callable[[Tensor], Tensor], q: Distribution, p: Distribution
) -> Divergence | None:
    """Return the sum of the terms over the support of q, or None if the support cannot be listed.

    `log_size` is the logarithm of the absolute value of the terms, or of a bound that grows and falls with them.
    """
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    labels = _labels(q, shape)
    if labels is not None:
        return exact(terms(labels).sum(0).expand(shape))
    if q.event_shape != () or q.support is not constraints.nonnegative_integer or not is_discrete(p):
        return None
    return _over_counts(terms, log_size, q, p, shape)


def log_peak(log_size: Callable[[Tensor], Tensor], q: Distribution, p: Distribution) -> Tensor | float:
    """Return the largest log term, (*B,), by which a sum can be rescaled to avoid overflow; 0 if it is not finite."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    labels = _labels(q, shape)
    if labels is None and q.support is not constraints.nonnegative_integer:
        return 0.0
    with torch.no_grad():
        largest = log_size(_counts(PEAK_SEARCH_TERMS, shape) if labels is None else labels).amax(0)
    return torch.where(largest.isfinite(), largest, 0.0)


def _labels(q: Distribution, shape: torch.Size) -> Tensor | None:
    """All values in the support of q, shaped to broadcast with the batch, or None if they cannot be listed."""
    if isinstance(q, Binomial):
        # entries with fewer trials than the maximum have probability 0 at larger counts
        return _counts(int(q.total_count.max()) + 1, shape)
    if not q.has_enumerate_support:
        return None
    try:
        labels = q.enumerate_support(expand=False)
    except NotImplementedError:  # a joint distribution of several labels
        return None
    return labels.reshape(len(labels), *[1] * len(shape), *q.event_shape)


def _over_counts(
    terms: Callable[[Tensor], Tensor],
    log_size: Callable[[Tensor], Tensor],
    q: Distribution,
    p: Distribution,
    shape: torch.Size,
) -> Divergence | None:
    """The sum over all counts 0, 1, 2, ..., truncated once it has converged; None if that takes too many terms."""
    max_terms = MAX_VALUES // max(1, shape.numel())
    count, beyond, converged = INITIAL_TERMS, _bulk_end(q, p), False
    with torch.no_grad():
        second, first = _halves(terms, count, shape)
        while not converged and count < max_terms:
            count *= 2
            second, first = _halves(terms, count, shape)
            converged = count >= beyond and bool((second.abs() <= FLOAT64_EPS * first.abs()).all())
        half, last = (log_size(_counts(n, shape)[-1:])[0].expand(shape) for n in (count // 2, count))
        rises = torch.isfinite(last) & (last >= half - 1e-9 * count)
        falls = bool((rises | (second.abs() <= MAX_REMAINDER_SHARE * first.abs())).all())
    if not converged and (count < beyond or not falls):
        return None
    second, first = _halves(terms, count, shape)
    value = torch.where(rises, math.inf, first + second)
    with torch.no_grad():

        def rounding(k: Tensor) -> Tensor:
            return FLOAT64_EPS * (terms(k).abs() + log_density(q, k).exp()) * (1 + k.xlogy(k + 1))

        rounded = sum(_halves(rounding, count, shape))
    error = torch.where(torch.isfinite(value), second.abs() + rounded, 0.0).detach()
    return Divergence(value.to(dtype_of(q)), "sum", error.to(dtype_of(q)))


def _bulk_end(q: Distribution, p: Distribution) -> float:
    """The count beyond the bulk of q and p, from which on their terms only fall."""
    try:
        return max(float((d.mean + BULK_DEVIATIONS * d.stddev).detach().max()) for d in (q, p))
    except NotImplementedError:
        return 0.0


def _halves(terms: Callable[[Tensor], Tensor], count: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Sums of the second half and of the first half of `count` terms, (*B,) each, a block of terms at a time."""
    first, second = _counts(count, shape).chunk(2)
    size = max(1, TERMS_PER_BLOCK // max(1, shape.numel()))
    sums = [torch.stack([terms(block).sum(0) for block in half.split(size)]).sum(0) for half in (first, second)]
    return sums[1].expand(shape), sums[0].expand(shape)


def _counts(count: int, shape: torch.Size) -> Tensor:
    """The counts 0, ..., count - 1 along a leading dimension, to broadcast with the batch."""
    return torch.arange(count, dtype=torch.float64).reshape(-1, *[1] * len(shape))
