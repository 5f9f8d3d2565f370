"""Inputs and outputs of an E-step: rows by name, expected statistics and generated rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

Theta = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """A block of n rows, as an E-step receives it.

    Args:
        parts: The parts of the data by name, each (n, ...).
        weights: How often each row counts, (n,). Default: None, once.
        z: Known hidden variables, (n,), -1 where hidden. Default: None, all are hidden.
        temperature: T of q, which is proportional to p(z | y)^(1/T). Default: 1.0.
        draws: Number of draws of z that replace q in the statistics. Default: 0, q itself is used.
        generator: Generator of the draws. Default: None.
    """

    parts: dict[str, Tensor]
    weights: Tensor | None = None
    z: Tensor | None = None
    temperature: float = 1.0
    draws: int = 0
    generator: torch.Generator | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def counted(self, values: Tensor) -> Tensor:
        """Multiply values per row, (n, ...), by the weight of each row."""
        return values if self.weights is None else values * self.weights.reshape(-1, *[1] * (values.ndim - 1))

    def at(self, index: Tensor | slice) -> Rows:
        """Return some of the rows."""
        pick = lambda t: None if t is None else t[index]  # noqa: E731
        parts = {name: t[index] for name, t in self.parts.items()}
        return replace(self, parts=parts, weights=pick(self.weights), z=pick(self.z))


@dataclass(frozen=True)
class Expectation:
    """The result of an E-step.

    Attributes:
        statistics: The expected statistics S by name, weighted sums over rows.
        bound: The bound L(q, theta) per row, (n,), not multiplied by the weights; or for all rows, ().
        gap: KL(q || p(z | y, theta)) in the same form; None if q is exact, so that it is zero.
    """

    statistics: dict[str, Tensor]
    bound: Tensor
    gap: Tensor | None = None

    @property
    def log_likelihood(self) -> Tensor:
        """log p(y | theta) = bound + gap."""
        return self.bound if self.gap is None else self.bound + self.gap


class Generated(NamedTuple):
    """Rows drawn from a model.

    Attributes:
        y: The generated rows, (n, ...).
        z: The hidden variables that they were generated from, (n, ...).
    """

    y: Tensor
    z: Tensor
