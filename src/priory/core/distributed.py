"""Chains on several processes, through `torch.distributed`.

Start the same script on each process (`torchrun --nproc-per-node 4 script.py`) and call
`torch.distributed.init_process_group("gloo")` in it, with a backend that takes tensors of the model's device. A fit by
a sampler then runs its number of `chains` on each process, with noise of its own, and every process ends with the
posterior of all of them. The members of an `Ensemble` are shared among the processes, and every process ends with all
of them. Any other method does on each process what it does on one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from priory.core.streams import stream

if TYPE_CHECKING:
    from typing import Any


def world() -> int:
    """How many processes work together; 1 where there is no process group.

    >>> world(), rank()
    (1, 0)
    """
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return distributed.get_rank() if world() > 1 else 0


def spread(method: Any) -> bool:
    """Whether a method's chains or members are shared among several processes, as its traits declare."""
    return world() > 1 and method.traits.spread


def own_stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """One stream a process; that of the first is the stream of a process alone."""
    return stream(seed, *names, *([rank()] if rank() else []), device=device)


def gather(t: Tensor) -> Tensor:
    """The tensors of all processes, of one shape each, in the order of the processes along the first dimension.

    Every process must call it, and every process gets all of them.

    >>> gather(torch.arange(3))
    tensor([0, 1, 2])
    """
    if world() == 1:
        return t
    t = t.contiguous()
    found = [torch.empty_like(t) for _ in range(world())]
    distributed.all_gather(found, t)
    return torch.cat(found)
