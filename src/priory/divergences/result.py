"""What a divergence is given as: a value in nats, how it was found, and how far it may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from priory.core.errors import require, whole

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = 10_000
KINDS = ("exact", "quadrature", "sum", "Monte Carlo")  # from the surest


@dataclass(frozen=True)
class Divergence:
    """A divergence in nats, how it was found, and how far it may be off.

    `kind` is "exact", "quadrature", "sum" or "Monte Carlo". The `error` is 0 if exact, the difference between two rules
    for quadrature, what is left out for a sum over all integers, and one standard error for Monte Carlo. It is 0
    where the divergence is infinite.
    """

    value: Tensor
    kind: str
    error: Tensor

    def __float__(self) -> float:
        return float(self.value.detach())

    def map(self, value: Callable[[Tensor], Tensor], error: Callable[[Tensor], Tensor]) -> Divergence:
        """The same kind of result with another value and another error."""
        return Divergence(value(self.value), self.kind, error(self.error))


def exact(value: Tensor) -> Divergence:
    """A result without an error."""
    return Divergence(value, "exact", torch.zeros_like(value))


def check_pair(owner: str, q: object, p: object, samples: object) -> None:
    """Refuse what is not two distributions over the same things."""
    for name, d in (("q", q), ("p", p)):
        require(isinstance(d, Distribution), name, owner, "be a torch distribution", type(d).__name__)
    assert isinstance(q, Distribution)
    assert isinstance(p, Distribution)
    require(not getattr(q, "improper", False), "q", owner, "be proper, with draws to average over", repr(q))
    require(whole(samples, 2), "samples", owner, "be an integer >= 2", samples)
    shapes = (tuple(q.event_shape), tuple(p.event_shape))
    same = shapes[0] == shapes[1]
    require(same, "p", owner, "be over the same things as q, with the same event shape", shapes)
    labels = [d.param_shape[-1] for d in (q, p) if isinstance(d, Categorical)]
    require(len(set(labels)) < 2, "p", owner, "have as many labels as q", tuple(labels))
    check_batches(owner, q, p)


def check_batches(owner: str, q: Distribution, p: Distribution) -> None:
    """Refuse batches that don't broadcast."""
    shapes = (tuple(q.batch_shape), tuple(p.batch_shape))
    fits = all(a == b or 1 in (a, b) for a, b in zip(shapes[0][::-1], shapes[1][::-1], strict=False))
    require(fits, "p", owner, "have a batch shape that broadcasts with q's", shapes)
