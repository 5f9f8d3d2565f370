"""What goes into an E-step and what comes out of it: rows by name, expected statistics, generated rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

Theta = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """A block of rows as an E-step gets it: the parts of the data by name, and what else is known or asked."""

    parts: dict[str, Tensor]  # each (n, ...)
    weights: Tensor | None = None  # (n,), how often each row counts; None: once
    z: Tensor | None = None  # (n,), where it is known; -1 where it is hidden
    temperature: float = 1.0  # q is p(z | y)^(1/T), made to add up to one
    draws: int = 0  # of z, from q, that stand for it in the statistics; 0: q itself
    generator: torch.Generator | None = None  # of those draws

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def counted(self, values: Tensor) -> Tensor:
        """Values a row, (n, ...), each times the row's weight."""
        return values if self.weights is None else values * self.weights.reshape(-1, *[1] * (values.ndim - 1))

    def at(self, index: Tensor | slice) -> Rows:
        """Some of the rows."""
        pick = lambda t: None if t is None else t[index]  # noqa: E731
        parts = {name: t[index] for name, t in self.parts.items()}
        return replace(self, parts=parts, weights=pick(self.weights), z=pick(self.z))


@dataclass(frozen=True)
class Expectation:
    """What an E-step finds: S, and the bound L(q, theta) a row, (n,), or for all of the data, ()."""

    statistics: dict[str, Tensor]  # sums over the rows, each times its weight
    bound: Tensor  # a row, not yet times its weight
    gap: Tensor | None = None  # KL(q || p(z | y, theta)), likewise; None where q is exact and there is none

    @property
    def log_likelihood(self) -> Tensor:
        """log p(y | theta) = bound + gap."""
        return self.bound if self.gap is None else self.bound + self.gap


class Generated(NamedTuple):
    """Rows that a model has made, and the hidden z that each came from."""

    y: Tensor
    z: Tensor
