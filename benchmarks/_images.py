"""Shared helpers of the image benchmarks: reading files, a network, shifted images, and out-of-distribution AUROC.

Rotations and corruptions are those by which MNIST-C (Mu and Gilmer 2019, after Hendrycks and Dietterich 2019) shifts
test images; severities from 1 to 5 are theirs, and 0 leaves an image unchanged.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

LEVELS = {
    "gaussian": (0.08, 0.12, 0.18, 0.26, 0.38),  # standard deviation of what is added
    "shot": (60.0, 25.0, 12.0, 5.0, 3.0),  # photons of a white pixel
    "impulse": (0.03, 0.06, 0.09, 0.17, 0.27),  # share of pixels that turn black or white
    "speckle": (0.15, 0.2, 0.35, 0.45, 0.6),  # standard deviation of what is added, over the pixel
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),  # share of the contrast that is left
}


def read(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Pixels between 0 and 1, (n, 28, 28), and labels, of the idx files "train" or "t10k" of a folder."""
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
        _, n, height, width = struct.unpack(">4I", file.read(16))
        pixels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(n, height, width)
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as file:
        file.read(8)
        labels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    return pixels.float() / 255, labels


def mlp(width: int, seed: int = 0) -> nn.Module:
    """An MLP 784-width-width-10, initialised from the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def rotated(pixels: Tensor, degrees: float) -> Tensor:
    """Images turned about their centre, bilinearly, black outside."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = pixels.new_tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(pixels), 2, 3)
    grid = affine_grid(turn, [len(pixels), 1, *pixels.shape[1:]], align_corners=True)
    return grid_sample(pixels[:, None], grid, align_corners=True)[:, 0]


def corrupted(pixels: Tensor, kind: str, severity: int, generator: torch.Generator) -> Tensor:
    """Images with noise, or with less contrast, as `LEVELS` says."""
    if severity == 0:
        return pixels
    level = LEVELS[kind][severity - 1]
    if kind == "shot":
        return (torch.poisson(level * pixels, generator=generator) / level).clamp(0, 1)
    if kind == "contrast":
        mean = pixels.mean((1, 2), keepdim=True)
        return mean + level * (pixels - mean)
    if kind == "impulse":
        u = torch.rand(pixels.shape, generator=generator, dtype=pixels.dtype)
        return torch.where(u < level / 2, 0.0, torch.where(u < level, 1.0, pixels))
    noise = level * torch.randn(pixels.shape, generator=generator, dtype=pixels.dtype)
    return (pixels + (noise if kind == "gaussian" else noise * pixels)).clamp(0, 1)


def auroc(low: Tensor, high: Tensor) -> float:
    """The probability that a value of `high` is above one of `low`; ties count half."""
    values = torch.cat([high, low]).double()
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - 0.5 * (counts - 1).double())[place]  # from 1, the mean of equal ones
    n, m = len(high), len(low)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))
