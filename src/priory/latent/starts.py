"""Initialisation of mixtures: k-means++ (Arthur and Vassilvitskii, 2007) and a few iterations of Lloyd's k-means.

k-means++ draws each centre with a probability proportional to the squared distance from the closest previous centre, so
distant clusters are likely to get one.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LLOYD_ITERATIONS = 10


def clusters(
    x: Tensor, k: int, how: str, generator: torch.Generator, weights: Tensor | None = None, z: Tensor | None = None
) -> Tensor:
    """Assign each row of x (n, d) to a cluster, (n,), by "k-means++" or by "random" centres; known z are kept."""
    weights = x.new_ones(len(x)) if weights is None else weights
    known = None if z is None else torch.where(z >= 0, z, -1)
    centres = seeds(x, k, how, generator, weights, known)
    assigned = nearest(x, centres, known)
    for _ in range(MAX_LLOYD_ITERATIONS if how == "k-means++" else 0):
        moved = nearest(x, centroids(x, assigned, centres, weights), known)
        if torch.equal(moved, assigned):
            break
        centres = centroids(x, assigned, centres, weights)
        assigned = moved
    return assigned


def seeds(x: Tensor, k: int, how: str, generator: torch.Generator, weights: Tensor, known: Tensor | None) -> Tensor:
    """Return the first centres, (k, d): means of rows with known z, and rows drawn by distance or at random."""
    centres = x.new_zeros(k, x.shape[1])
    far = x.new_full((len(x),), float("inf"))
    named = torch.zeros(k, dtype=torch.bool)
    if known is not None:
        for j in range(k):
            known_rows = (known == j) & (weights > 0)
            if bool(known_rows.any()):
                centres[j], named[j] = x[known_rows].mean(0), True
                far = torch.minimum(far, (x - centres[j]).square().sum(1))
    for j in (~named).nonzero()[:, 0].tolist():
        chance = weights if how == "random" or bool(torch.isinf(far).any()) else weights * far
        chance = chance if bool(chance.sum() > 0) else torch.ones_like(weights)  # every row is at a centre
        row = int(torch.multinomial(chance.double(), 1, generator=generator))
        centres[j] = x[row]
        far = torch.minimum(far, (x - centres[j]).square().sum(1))
    return centres


def nearest(x: Tensor, centres: Tensor, known: Tensor | None) -> Tensor:
    """Return the nearest centre of each row, or the known one, (n,)."""
    closest = torch.cdist(x, centres).argmin(1)
    return closest if known is None else torch.where(known >= 0, known, closest)


def centroids(x: Tensor, assigned: Tensor, centres: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of each cluster's rows, (k, d); a cluster without rows keeps its centre."""
    sums = torch.zeros_like(centres).index_add_(0, assigned, x * weights[:, None])
    counts = weights.new_zeros(len(centres)).index_add_(0, assigned, weights)[:, None]
    return torch.where(counts > 0, sums / counts.clamp_min(torch.finfo(x.dtype).tiny), centres)
