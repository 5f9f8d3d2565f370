"""A function of one draw of named parameters, evaluated at many draws.

`torch.vmap` evaluates the draws of a block together; a function that vmap does not support runs in a loop, with a
warning. Random numbers that the function takes from torch's global state differ between draws. Blocks are as large as a
limit on memory allows: the bytes of one draw are counted while the function is evaluated at it.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from priory.core.errors import InputError, require, warn
from priory.core.streams import stream
from priory.network.dispatch_mode import DispatchMode
from priory.network.vectorise import unchecked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

MEMORY_LIMIT_BYTES = 1 << 29  # tensors that one block of draws may allocate
# vmap warns of these for some random numbers, whose values are correct
IGNORED_WARNINGS = ("There is a performance drop", "An output with one or more elements was resized")


class DrawMap:
    """A function of one dict of parameters and further arguments, mapped over draws (n, ...) of the parameters.

    Args:
        function: Takes the parameters of one draw and `arguments`, and returns a tensor, or a dict, list or tuple of
            tensors.
        arguments: Further arguments, the same for every draw.
        owner: Name of the public function that the user called, for messages.
        limit: Bytes that the tensors of one block may take.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        owner: str = "generate",
        limit: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        self.function, self.arguments, self.owner, self.limit = function, arguments, owner, limit
        self.loop = False

    def block_size(self, params: Mapping[str, Tensor]) -> int:
        """Evaluate the function at one draw, check what it returns, and return the number of draws per block."""
        with AllocatedBytes() as allocated:
            found = self.function(dict(params), *self.arguments)
        leaves = tree_leaves(found)
        wrong = next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)), None)
        ok = len(leaves) > 0 and wrong is None
        require(ok, "function", self.owner, "return tensors, alone or in a dict, list or tuple", wrong or "nothing")
        own = sum(t.numel() * t.element_size() for t in (*params.values(), *leaves))
        return max(1, self.limit // max(1, own + allocated.total))

    def __call__(self, params: Mapping[str, Tensor]) -> Any:
        """Return the function's value at each of the draws, stacked in front: (n, ...)."""
        if not self.loop:
            try:
                with unchecked(), warnings.catch_warnings():
                    for message in IGNORED_WARNINGS:
                        warnings.filterwarnings("ignore", message)
                    return vmap(lambda one: self.function(one, *self.arguments), randomness="different")(dict(params))
            except InputError:
                raise
            except (RuntimeError, TypeError, ValueError) as error:
                self.loop = True
                reason = str(error).strip().split("\n")[0][:160]
                warn(f"The function of {self.owner} can't be vectorised by vmap and runs in a loop ({reason}).")
        count = len(next(iter(params.values())))
        rows = [self.function({n: x[i] for n, x in params.items()}, *self.arguments) for i in range(count)]
        return stacked(rows, torch.stack)


class AllocatedBytes(DispatchMode):
    """Counts the bytes of all tensors that operations return, an upper bound on what they hold at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.total += sum(t.numel() * t.element_size() for t in tree_leaves(found) if isinstance(t, Tensor))
        return found


def joined(parts: Iterable[Any]) -> Any:
    """Concatenate the values of blocks along the draws."""
    return stacked(list(parts), torch.cat)


def stacked(trees: list[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Join values of the same structure leaf by leaf."""
    spec = tree_flatten(trees[0])[1]
    columns = zip(*(tree_leaves(tree) for tree in trees), strict=True)
    return tree_unflatten([join(list(column)) for column in columns], spec)


@contextmanager
def seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed torch's global random state for one use, without gradients, and restore it afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(stream(seed, name).initial_seed())
        yield
