"""Where a penalty meets a network: each parameter with its fans and its groups.

A weight tensor is seen as (blocks, a, b, window): blocks of a grouped convolution, rows a and columns b within one, and
the entries of a window. Of a linear layer or a convolution (C_out, C_in, k, k) a row is the incoming weights of a
neuron or of an output channel, and a column the outgoing weights of an input; of a transposed convolution it is the
other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from priory.priors.rules import TRANSPOSED, fans, is_weight, trainable

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter: its shape, whether it is a weight (not a bias, an embedding, a normalisation), fans and blocks."""

    name: str
    shape: tuple[int, ...]
    is_weight: bool
    fan_in: int
    fan_out: int
    blocks: int
    transposed: bool

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def groups(self, incoming: bool) -> WeightGroups:
        """The incoming or the outgoing weights of each unit; each entry alone where there is no matrix."""
        if len(self.shape) < 2:
            return WeightGroups(self.shape, 1, self.size, 1, rows=True)
        a, b = self.shape[0] // self.blocks, self.shape[1]
        return WeightGroups(self.shape, self.blocks, a, b, rows=incoming != self.transposed)


@dataclass(frozen=True)
class WeightGroups:
    """A tensor of this shape as groups: (blocks, a, b, window), grouped by rows (block, a) or by columns (block, b)."""

    shape: tuple[int, ...]
    blocks: int
    a: int
    b: int
    rows: bool

    @property
    def size(self) -> int:
        """n, the weights of one group."""
        return math.prod(self.shape) // (self.blocks * (self.a if self.rows else self.b))

    def split(self, x: Tensor) -> Tensor:
        """The groups of x (*B, *shape): (*B, groups, n)."""
        lead = x.shape[: x.ndim - len(self.shape)]
        cells = x.reshape(*lead, self.blocks, self.a, self.b, -1)
        if not self.rows:
            cells = cells.transpose(-3, -2)
        return cells.reshape(*lead, -1, self.size)

    def join(self, groups: Tensor) -> Tensor:
        """The tensor (*B, *shape) of its groups (*B, groups, n)."""
        lead = groups.shape[:-2]
        if self.rows:
            return groups.reshape(*lead, *self.shape)
        cells = groups.reshape(*lead, self.blocks, self.b, self.a, -1)
        return cells.transpose(-3, -2).reshape(*lead, *self.shape)


def describe_parameters(net: nn.Module) -> dict[str, ParameterInfo]:
    """Each trainable parameter of a network, by its name.

    >>> from torch import nn
    >>> describe_parameters(nn.Conv2d(3, 8, 5))["weight"].groups(incoming=False).size
    200
    """
    found, seen = {}, set()
    for name, module, key, p in trainable(net):
        if id(p) in seen:  # a weight that two layers share is one, under the first of its names
            continue
        seen.add(id(p))
        weight = is_weight(module, key, p)
        fan_in, fan_out = fans(module, key, p) if weight else (1, 1)
        blocks = int(getattr(module, "groups", 1)) if weight else 1
        found[name] = ParameterInfo(
            name, tuple(p.shape), weight, fan_in, fan_out, blocks, isinstance(module, TRANSPOSED)
        )
    return found
