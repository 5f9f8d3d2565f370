"""Parameters as one flat vector: named, shaped, constrained, with leading batch dimensions.

A `Layout` is the map between the vector w in R^P that every method works on and the tensors, by name, that a
person or a network reads. Leading dimensions of w (draws, chains, ensemble members) stay in front of
everything:

    w: (*B, P)  <->  {"0.weight": (*B, 50, 8), "0.bias": (*B, 50), "likelihood.noise": (*B,)}

A constrained parameter (a positive noise, a probability) is stored in unconstrained coordinates u and read as
x = f(u); densities over it then carry log |det df/du|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import constraints as torch_constraints

from priory.constraints import Bijector, bijector
from priory.core.errors import InputError, require

if TYPE_CHECKING:
    from torch.distributions.constraints import Constraint


@dataclass(frozen=True)
class Param:
    """One parameter of a density: its shape and where it may lie.

    >>> Param((3,), torch_constraints.positive).shape
    (3,)
    """

    shape: tuple[int, ...] = ()
    support: Constraint = field(default_factory=lambda: torch_constraints.real)

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        require(
            all(isinstance(s, int) and s > 0 for s in shape),
            "shape",
            "Param",
            "hold positive integers",
            self.shape,
        )
        object.__setattr__(self, "shape", shape)
        bijector(self.support, shape)  # refuses a support that has no such draws


@dataclass(frozen=True)
class Block:
    """One named piece of the vector: w[..., start:stop], free_shape inside, shape outside."""

    name: str
    bijector: Bijector
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bijector.shape)

    def free(self, w: Tensor) -> Tensor:
        """The block's unconstrained coordinates, a view (*B, *free_shape)."""
        return w[..., self.start : self.stop].reshape((*w.shape[:-1], *self.bijector.free_shape))


class Layout:
    """Where each named parameter lies in the flat vector.

    >>> layout = Layout({"weight": Param((2, 3)), "noise": Param((), torch_constraints.positive)})
    >>> layout.size
    7
    >>> {name: tuple(t.shape) for name, t in layout.constrain(torch.zeros(5, 7)).items()}
    {'weight': (5, 2, 3), 'noise': (5,)}
    """

    def __init__(self, params: Mapping[str, Param]) -> None:
        require(len(params) > 0, "params", "Layout", "name at least one parameter", dict(params))
        blocks, start = [], 0
        for name, param in params.items():
            b = bijector(param.support, param.shape)
            stop = start + math.prod(b.free_shape)
            blocks.append(Block(name, b, start, stop))
            start = stop
        self.blocks: tuple[Block, ...] = tuple(blocks)
        self.size: int = start

    def __getitem__(self, name: str) -> Block:
        return next(block for block in self.blocks if block.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)

    @property
    def constrained(self) -> tuple[Block, ...]:
        """The blocks whose map is not the identity."""
        return tuple(block for block in self.blocks if not block.bijector.identity)

    def constrain(self, w: Tensor) -> dict[str, Tensor]:
        """The named tensors that w (*B, P) stands for; views where a parameter is free."""
        return {
            block.name: block.free(w) if block.bijector.identity else block.bijector.forward(block.free(w))
            for block in self.blocks
        }

    def log_det(self, w: Tensor) -> Tensor:
        """log |det dx/du| at w, summed over all constrained parameters, (*B,)."""
        total = w.new_zeros(w.shape[:-1])
        for block in self.constrained:
            u = block.free(w)
            total = total + block.bijector.log_det(u, block.bijector.forward(u))
        return total

    def unconstrain(self, params: Mapping[str, Tensor]) -> Tensor:
        """The flat vector (*B, P) of named tensors, each with the same leading dimensions."""
        mapping = isinstance(params, Mapping)
        require(mapping, "params", "the posterior", "be a dict from names to tensors", type(params).__name__)
        unknown = [name for name in params if name not in self.names]
        require(not unknown, "params", "the posterior", f"be among {', '.join(self.names)}", unknown)
        missing = [name for name in self.names if name not in params]
        require(not missing, "params", "the posterior", f"hold every parameter; missing {missing}", list(params))
        pieces = []
        for block in self.blocks:
            x = params[block.name]
            rank = x.ndim - len(block.shape)
            if rank < 0 or tuple(x.shape[rank:]) != block.shape:
                raise InputError(
                    f"The '{block.name}' argument of params must have the shape {block.shape}, after any leading "
                    f"dimensions, "
                    f"got {tuple(x.shape)}."
                )
            u = x if block.bijector.identity else block.bijector.inverse(x)
            pieces.append(u.reshape(*x.shape[:rank], block.stop - block.start))
        leads = {tuple(p.shape[:-1]) for p in pieces}
        require(len(leads) == 1, "params", "the posterior", "share their leading dimensions", sorted(leads))
        return torch.cat(pieces, dim=-1)

    def signature(self) -> list[list[object]]:
        """What a file must agree with: names and shapes, in order."""
        return [[block.name, list(block.shape)] for block in self.blocks]
