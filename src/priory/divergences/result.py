"""The result of a divergence: its value in nats, how it was computed, and its error; and checks of the arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from priory.core.errors import is_integer, require

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_SAMPLES = 10_000
KINDS_BY_ACCURACY = ("exact", "quadrature", "sum", "Monte Carlo")  # most accurate first


@dataclass(frozen=True)
class Divergence:
    """A divergence, how it was computed, and its error. `float(divergence)` is its value.

    Attributes:
        value: Divergence in nats, (*B,), differentiable in the parameters of the distributions.
        kind: How it was computed: "exact", "quadrature", "sum" or "Monte Carlo".
        error: Error in nats, (*B,): 0 for "exact", a bound for "quadrature" (from the difference between two rules) and
            "sum" (truncation and rounding), and one standard error for "Monte Carlo". It is 0 where the value is
            infinite.
    """

    value: Tensor
    kind: str
    error: Tensor

    def __float__(self) -> float:
        return float(self.value.detach())

    def map(self, value: Callable[[Tensor], Tensor], error: Callable[[Tensor], Tensor]) -> Divergence:
        """Apply one function to the value and another to the error, keeping the kind.

        Args:
            value: Function of the value.
            error: Function of the error.

        Returns:
            A new result of the same kind.
        """
        return Divergence(value(self.value), self.kind, error(self.error))


class ComputesKL(ABC):
    """Base class of distributions that are not torch's and compute their own KL divergence, such as posteriors."""

    @abstractmethod
    def kl_to(self, p: Any, samples: int, seed: int) -> Divergence:
        """Return KL(self || p); for the arguments see `priory.kl`."""


def exact(value: Tensor) -> Divergence:
    """Return a result of kind "exact", with error 0."""
    return Divergence(value, "exact", torch.zeros_like(value))


def check_pair(owner: str, q: object, p: object, samples: object) -> None:
    """Raise an InputError unless q and p are torch distributions over the same space, and `samples` >= 2."""
    for name, d in (("q", q), ("p", p)):
        require(isinstance(d, Distribution), name, owner, "be a torch distribution", type(d).__name__)
    assert isinstance(q, Distribution)
    assert isinstance(p, Distribution)
    require(not getattr(q, "improper", False), "q", owner, "be a proper distribution, which can be sampled", repr(q))
    require(is_integer(samples, 2), "samples", owner, "be an integer >= 2", samples)
    shapes = (tuple(q.event_shape), tuple(p.event_shape))
    same = shapes[0] == shapes[1]
    require(same, "p", owner, "have the same event shape as q", shapes)
    classes = [d.param_shape[-1] for d in (q, p) if isinstance(d, Categorical)]
    require(len(set(classes)) < 2, "p", owner, "have as many classes as q", tuple(classes))
    check_batches(owner, q, p)


def check_batches(owner: str, q: Distribution, p: Distribution) -> None:
    """Raise an InputError unless the batch shapes of q and p broadcast."""
    shapes = (tuple(q.batch_shape), tuple(p.batch_shape))
    fits = all(a == b or 1 in (a, b) for a, b in zip(shapes[0][::-1], shapes[1][::-1], strict=False))
    require(fits, "p", owner, "have a batch shape that broadcasts with q's", shapes)
