"""Finds parameters whose distribution has a narrower support than the one that was declared for them.

The prior Uniform(0, 1) of a parameter that was declared real ends at two walls. A gradient doesn't see a wall: chains
run into it and are rejected, and approximations put mass behind it. With the support declared, the walls are at
infinity.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from priory.core.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from priory.core.flat import Param


class Evaluated(NamedTuple):
    """A distribution whose `log_prob` was called at a value."""

    distribution: Distribution
    value: Tensor


@contextmanager
def evaluated_distributions() -> Iterator[list[Evaluated]]:
    """Collect the distributions of torch that validate the value at which their log density is evaluated."""
    found: list[Evaluated] = []
    validated = Distribution._validate_sample

    def watched(self: Distribution, value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(Evaluated(self, value))
        validated(self, value)

    Distribution._validate_sample = watched
    try:
        yield found
    finally:
        Distribution._validate_sample = validated


def refuse_narrower_support(
    declared: Mapping[str, Param], values: Mapping[str, Tensor], found: list[Evaluated]
) -> None:
    """Raise an error for a parameter that was declared with a wider support than that of its distribution.

    Args:
        declared: The parameters by name.
        values: The tensors by name that the density was given.
        found: The distributions that it evaluated.

    Raises:
        InputError: If a distribution was evaluated at a parameter outside whose declared support it has an end.
    """
    for name, param in declared.items():
        for distribution, value in found:
            if not is_part_of(value, values[name]):
                continue
            ends, own = bounds(support_of(distribution)), bounds(param.support)
            if ends is not None and own is not None and is_narrower(ends, own):
                kind = type(distribution).__name__
                must = f"declare '{name}' with the support of its {kind} distribution, {written(*ends)}"
                require(False, "params", "Density", must, written(*own))


def support_of(distribution: Distribution) -> Any:
    """The support of a distribution; None if it is not known."""
    try:
        return distribution.support
    except NotImplementedError:
        return None


def is_narrower(ends: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> bool:
    """Whether an interval ends inside another one, apart from rounding to single precision."""
    inside = (ends[0] > others[0], ends[1] < others[1])
    return any(bool((i & ~torch.isclose(a, b)).any()) for i, a, b in zip(inside, ends, others, strict=True))


def is_part_of(value: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor is a view of a parameter."""
    if value.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        return False
    first = parameter.storage_offset()
    return first <= value.storage_offset() < first + parameter.numel()


def bounds(support: Any) -> tuple[Tensor, Tensor] | None:
    """The ends of an interval, a half-line or the line; None for other supports, and for ends that are parameters."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is None or support.is_discrete:
        return None
    if support not in (constraints.real, constraints.real_vector) and not has_bounds(support):
        return None
    lower, upper = getattr(support, "lower_bound", -math.inf), getattr(support, "upper_bound", math.inf)
    ends = torch.as_tensor(lower), torch.as_tensor(upper)
    return None if any(end.requires_grad for end in ends) else (ends[0].double(), ends[1].double())


def has_bounds(support: Any) -> bool:
    """Whether a support is an interval or a half-line."""
    return hasattr(support, "lower_bound") or hasattr(support, "upper_bound")


def written(lower: Tensor, upper: Tensor) -> str:
    """The constraint with these ends, as it is written in a program."""
    low, high = number(lower), number(upper)
    if low == "-inf":
        return "constraints.real" if high == "inf" else f"constraints.less_than({high})"
    if high == "inf":
        return "constraints.positive" if low == "0" else f"constraints.greater_than({low})"
    return "constraints.unit_interval" if (low, high) == ("0", "1") else f"constraints.interval({low}, {high})"


def number(end: Tensor) -> str:
    """The end of an interval in six digits; several different ends as a tensor."""
    texts = [f"{x:g}" for x in end.flatten().tolist()]
    return texts[0] if len(set(texts)) == 1 else f"torch.tensor([{', '.join(texts)}])"
