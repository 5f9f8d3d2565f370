"""Parameters of a network as penalties see them: shape, fans, and groups of weights.

A weight tensor is viewed as (blocks, rows, columns, window): the blocks of a grouped convolution, the rows and columns
of each block, and the entries of a convolution's window. In a linear layer or a convolution (C_out, C_in, k, k), a row
holds the incoming weights of a neuron or output channel, and a column the outgoing weights of an input. In a
transposed convolution, rows and columns are swapped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from priory.priors.rules import TRANSPOSED_CONVOLUTION, fans, is_weight, trainable

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterInfo:
    """Shape, fans and block structure of one trainable parameter.

    Attributes:
        name: Name of the parameter in the network.
        shape: Shape of the tensor.
        is_weight: Whether it is a weight, as opposed to a bias, an embedding or a parameter of a normalisation layer.
        fan_in: Number of inputs of a unit, 1 if the parameter is not a weight.
        fan_out: Number of outputs that an input feeds, 1 if the parameter is not a weight.
        blocks: Number of blocks of a grouped convolution.
        transposed: Whether it belongs to a transposed convolution.
    """

    name: str
    shape: tuple[int, ...]
    is_weight: bool
    fan_in: int
    fan_out: int
    blocks: int
    transposed: bool

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def groups(self, incoming: bool) -> WeightGroups:
        """Return the groups of incoming or outgoing weights of each unit; a vector has groups of one entry."""
        if len(self.shape) < 2:
            return WeightGroups(self.shape, 1, self.size, 1, by_rows=True)
        rows, columns = self.shape[0] // self.blocks, self.shape[1]
        return WeightGroups(self.shape, self.blocks, rows, columns, by_rows=incoming != self.transposed)


@dataclass(frozen=True)
class WeightGroups:
    """Partition of a tensor into groups of weights.

    Attributes:
        shape: Shape of the tensor.
        blocks: Number of blocks of a grouped convolution.
        rows: Number of rows per block.
        columns: Number of columns per block.
        by_rows: Whether a group is one row of a block, or one column.
    """

    shape: tuple[int, ...]
    blocks: int
    rows: int
    columns: int
    by_rows: bool

    @property
    def size(self) -> int:
        """Number n of weights per group."""
        return math.prod(self.shape) // (self.blocks * (self.rows if self.by_rows else self.columns))

    def split(self, x: Tensor) -> Tensor:
        """Cut x (*B, *shape) into its groups (*B, groups, n)."""
        lead = x.shape[: x.ndim - len(self.shape)]
        cells = x.reshape(*lead, self.blocks, self.rows, self.columns, -1)
        if not self.by_rows:
            cells = cells.transpose(-3, -2)
        return cells.reshape(*lead, -1, self.size)

    def join(self, groups: Tensor) -> Tensor:
        """Reassemble the tensor (*B, *shape) from its groups (*B, groups, n); inverse of `split`."""
        lead = groups.shape[:-2]
        if self.by_rows:
            return groups.reshape(*lead, *self.shape)
        cells = groups.reshape(*lead, self.blocks, self.columns, self.rows, -1)
        return cells.transpose(-3, -2).reshape(*lead, *self.shape)


def describe_parameters(net: nn.Module) -> dict[str, ParameterInfo]:
    """Return the description of each trainable parameter of a network, by name.

    >>> from torch import nn
    >>> describe_parameters(nn.Conv2d(3, 8, 5))["weight"].groups(incoming=False).size
    200
    """
    found, seen = {}, set()
    for name, module, key, p in trainable(net):
        if id(p) in seen:  # a weight shared by two layers is listed once, under its first name
            continue
        seen.add(id(p))
        weight = is_weight(module, key, p)
        fan_in, fan_out = fans(module, key, p) if weight else (1, 1)
        blocks = int(getattr(module, "groups", 1)) if weight else 1
        found[name] = ParameterInfo(
            name, tuple(p.shape), weight, fan_in, fan_out, blocks, isinstance(module, TRANSPOSED_CONVOLUTION)
        )
    return found
