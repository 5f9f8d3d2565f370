"""Random streams: an explicit generator for each use, from one seed.

A generator's seed is a hash of (seed, names): stream (0, "noise", 1) has nothing in common with (1, "noise",
0), although a CPU generator keeps only 32 bits of what it is given.
"""

from __future__ import annotations

import hashlib

import torch


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one use of randomness, the same for the same seed and names.

    >>> torch.equal(torch.rand(3, generator=stream(0, "noise")), torch.rand(3, generator=stream(0, "noise")))
    True
    """
    key = "\x1f".join(map(str, (seed, *names))).encode()
    hashed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return torch.Generator(device=device).manual_seed(hashed >> 1)  # torch takes 63 bits without a sign
