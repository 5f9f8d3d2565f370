"""Named, shaped and constrained parameters as one flat vector, with leading batch dimensions.

Every method works on a vector w in R^P. A `Layout` maps it to the named tensors that the user and the network see.
Leading dimensions of w (draws, chains, ensemble members) come first:

    w: (*B, P)  <->  {"0.weight": (*B, 50, 8), "0.bias": (*B, 50), "likelihood.noise": (*B,)}

A constrained parameter (a positive noise, a probability) is stored as unconstrained coordinates u, with x = f(u). Log
densities over u include log |det df/du|.
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
    """Shape and support of one parameter of a density.

    Args:
        shape: Shape of the parameter, a tuple of integers >= 1 or a single one. Default: (), a scalar.
        support: Constraint of the parameter, see `priory.constraints`. Default: `constraints.real`.

    Raises:
        InputError: If the shape is invalid, or if the support is discrete, unknown or does not fit the shape.

    Example:
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
        bijector(self.support, shape)  # raises an InputError if the support does not fit the shape


@dataclass(frozen=True)
class Block:
    """The slice w[..., start:stop] of the flat vector that holds one named parameter."""

    name: str
    bijector: Bijector
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bijector.shape)

    def free(self, w: Tensor) -> Tensor:
        """Return the unconstrained coordinates of this parameter, a view (*B, *free_shape) of w (*B, P)."""
        return w[..., self.start : self.stop].reshape((*w.shape[:-1], *self.bijector.free_shape))


class Layout:
    """The map between the flat vector and named tensors.

    Args:
        params: Shape and support of each parameter by name, in the order of the vector.

    Example:
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
        """The blocks of constrained parameters."""
        return tuple(block for block in self.blocks if not block.bijector.identity)

    def constrain(self, w: Tensor) -> dict[str, Tensor]:
        """Return the named tensors of w (*B, P); unconstrained parameters are views of w."""
        return {
            block.name: block.free(w) if block.bijector.identity else block.bijector.forward(block.free(w))
            for block in self.blocks
        }

    def start(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the vector (P,) at which a fit starts: zero, except where a support has no value at zero."""
        return torch.cat([block.bijector.start(dtype, device).reshape(-1) for block in self.blocks])

    def log_det(self, w: Tensor) -> Tensor:
        """Return log |det dx/du| at w, summed over all constrained parameters, (*B,)."""
        total = w.new_zeros(w.shape[:-1])
        for block in self.constrained:
            u = block.free(w)
            total = total + block.bijector.log_det(u, block.bijector.forward(u))
        return total

    def unconstrain(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the flat vector (*B, P) of named tensors, which share their leading dimensions *B."""
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
                    f"dimensions, got {tuple(x.shape)}."
                )
            u = x if block.bijector.identity else block.bijector.inverse(x)
            pieces.append(u.reshape(*x.shape[:rank], block.stop - block.start))
        leads = {tuple(p.shape[:-1]) for p in pieces}
        require(len(leads) == 1, "params", "the posterior", "share their leading dimensions", sorted(leads))
        return torch.cat(pieces, dim=-1)

    def refuse_auxiliary(self, owner: str) -> None:
        """Raise an error if a parameter has an auxiliary coordinate, over which a density of x would be an integral."""
        names = [block.name for block in self.blocks if not block.bijector.one_to_one]
        if names:
            raise InputError(
                f"{owner} has no density in closed form over '{', '.join(names)}', a unit vector: use its draws."
            )

    def signature(self) -> list[list[object]]:
        """Return names and shapes in order, which a stored file must match."""
        return [[block.name, list(block.shape)] for block in self.blocks]
