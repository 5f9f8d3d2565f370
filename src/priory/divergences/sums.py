"""Sums over classes and counts: exact for a finite support, truncated for an infinite one.

Over all integers >= 0, the number of terms is doubled until the second half adds nothing to the first; the size of the
second half is the reported error. If the terms still do not decrease at the end, the sum is infinite: the terms of a
divergence grow or fall at a steady rate by then, such as those of a Poisson against a geometric distribution.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributions import Binomial, constraints

from priory.divergences.densities import dtype_of, is_discrete
from priory.divergences.result import Divergence, exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributions import Distribution

INITIAL_TERMS, MAX_TERMS = 256, 2**16
PEAK_SEARCH_TERMS = 4096  # the largest term is searched among this many counts
MAX_VALUES_AT_ONCE = 2**24  # terms times batch size
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
    return _over_counts(terms, log_size, shape, dtype_of(q))


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
    terms: Callable[[Tensor], Tensor], log_size: Callable[[Tensor], Tensor], shape: torch.Size, dtype: torch.dtype
) -> Divergence:
    """The sum over all counts 0, 1, 2, ..., truncated once it has converged."""
    max_terms = min(MAX_TERMS, MAX_VALUES_AT_ONCE // max(1, shape.numel()))
    count, converged = INITIAL_TERMS, False
    with torch.no_grad():
        while not converged and count < max_terms:
            count *= 2
            second, first = _halves(terms, count, shape)
            converged = bool((second.abs() <= FLOAT64_EPS * first.abs()).all())
        half, last = (log_size(_counts(n, shape)[-1:])[0].expand(shape) for n in (count // 2, count))
        rises = torch.isfinite(last) & (last >= half - 1e-9 * count)
    second, first = _halves(terms, count, shape)
    value = torch.where(rises, math.inf, first + second)
    error = torch.where(torch.isfinite(value), second.abs() + FLOAT64_EPS * first.abs(), 0.0).detach()
    return Divergence(value.to(dtype), "sum", error.to(dtype))


def _halves(terms: Callable[[Tensor], Tensor], count: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Sums of the second half and of the first half of `count` terms, (*B,) each."""
    each: Any = terms(_counts(count, shape))
    return each[count // 2 :].sum(0).expand(shape), each[: count // 2].sum(0).expand(shape)


def _counts(count: int, shape: torch.Size) -> Tensor:
    """The counts 0, ..., count - 1 along a leading dimension, to broadcast with the batch."""
    return torch.arange(count, dtype=torch.float64).reshape(-1, *[1] * len(shape))
