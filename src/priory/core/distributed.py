"""Chains and ensemble members on several processes, through `torch.distributed`.

Start the same script on each process (`torchrun --nproc-per-node 4 script.py`), and call
`torch.distributed.init_process_group("gloo")` in it, with a backend that supports tensors on the model's device. A
sampler then runs `chains` chains on each process, with independent noise, and every process returns the posterior of
all chains. The members of an `Ensemble` are divided among the processes, and every process returns all members. Other
methods run on each process as they would on one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from priory.core.streams import stream

if TYPE_CHECKING:
    from typing import Any


def world() -> int:
    """Return the number of processes, 1 without a process group.

    Example:
        >>> world(), rank()
        (1, 0)
    """
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the index of this process, from 0."""
    return distributed.get_rank() if world() > 1 else 0


def spread(method: Any) -> bool:
    """Whether the chains or members of a method are divided among several processes, as its traits declare."""
    return world() > 1 and method.traits.spread


def own_stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a stream that differs between processes; the first process has the stream of a single process."""
    return stream(seed, *names, *([rank()] if rank() else []), device=device)


def gather(t: Tensor) -> Tensor:
    """Concatenate the tensors of all processes along the first dimension, in the order of the processes.

    Every process must call this function with a tensor of the same shape, and every process gets the result.

    Example:
        >>> gather(torch.arange(3))
        tensor([0, 1, 2])
    """
    if world() == 1:
        return t
    t = t.contiguous()
    found = [torch.empty_like(t) for _ in range(world())]
    distributed.all_gather(found, t)
    return torch.cat(found)
