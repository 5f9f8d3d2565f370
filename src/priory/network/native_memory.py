"""The memory of a native program: a fixed place for each result, used again once the result has been read."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx.node import Node


class Memory:
    """The places of all results, each used again once nothing that lives in it will be read.

    Args:
        vectors: Number of vectors. A result whose first dimension has this size is laid out with it innermost, so
            that the entries of the other dimensions are contiguous over vectors.
    """

    def __init__(self, vectors: int) -> None:
        self._vectors = vectors
        self._free: dict[Any, list[Tensor]] = defaultdict(list)
        self._places: dict[Node, list[Tensor]] = {}  # of a node, and of those that look at it
        self._readers: dict[int, int] = defaultdict(int)  # number of nodes that will still be read, by place
        self._kept: list[Tensor] = []
        self._scratch: dict[Any, Tensor] = {}
        self._constants: dict[Any, Tensor] = {}

    def take(self, node: Node, shape: Any, dtype: torch.dtype, plain: bool = False) -> Tensor:
        """A place for the result of a node; `plain` lays it out as torch does."""
        size = torch.Size(shape).numel()
        free = self._free[size, dtype]
        place = free.pop() if free else self._new(size, dtype)
        self._places.setdefault(node, []).append(place)
        self._readers[id(place)] += 1
        return self._shaped(place, shape, plain)

    def share(self, node: Node, other: Any) -> None:
        """Note that a node lives in the place of another one; a constant has none."""
        self._places[node] = places = self._places.get(other, [])
        for place in places:
            self._readers[id(place)] += 1

    def release(self, node: Node) -> None:
        """Note that a node will not be read again."""
        for place in self._places.get(node, ()):
            self._readers[id(place)] -= 1
            if self._readers[id(place)] == 0:
                self._free[place.numel(), place.dtype].append(place)

    def scratch(self, shape: Any, dtype: torch.dtype, which: int = 0) -> Tensor:
        """A place that is used within one operation; `which` tells apart those in use at the same time."""
        key = torch.Size(shape), dtype, which
        if key not in self._scratch:
            self._scratch[key] = self._shaped(self._new(torch.Size(shape).numel(), dtype), shape)
        return self._scratch[key]

    def keep(self, constant: Tensor) -> Tensor:
        """A constant of one entry, kept for as long as the program."""
        key = repr(float(constant)), constant.dtype
        return self._constants.setdefault(key, constant)

    def _new(self, size: int, dtype: torch.dtype) -> Tensor:
        self._kept.append(torch.zeros(size, dtype=dtype))
        return self._kept[-1]

    def _shaped(self, place: Tensor, shape: Any, plain: bool = False) -> Tensor:
        if plain or len(shape) < 2 or shape[0] != self._vectors:
            return place.view(shape)
        return place.view(*shape[1:], shape[0]).movedim(-1, 0)
