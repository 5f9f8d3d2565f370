"""Random streams: an explicit generator for each use of randomness, all derived from one seed.

The seed of a generator is a hash of (seed, names), so the streams (0, "noise", 1) and (1, "noise", 0) are unrelated,
although a CPU generator keeps only 32 bits of its seed.
"""

from __future__ import annotations

import hashlib

import torch


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for one use of randomness, determined by the seed and the names.

    Args:
        seed: The seed of the fit or the call.
        names: Strings and integers that identify the use.
        device: Device of the generator. Default: "cpu".

    Returns:
        A new generator, seeded with a hash of `seed` and `names`.

    Example:
        >>> torch.equal(torch.rand(3, generator=stream(0, "noise")), torch.rand(3, generator=stream(0, "noise")))
        True
    """
    key = "\x1f".join(map(str, (seed, *names))).encode()
    hashed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return torch.Generator(device=device).manual_seed(hashed >> 1)  # torch takes a signed 64-bit seed
