"""The result of one transition of all chains, and the statistics that are kept of it for each draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Move:
    """The result of one transition: the new position of each chain, and its statistics, (*B, K)."""

    w: Tensor  # (*B, K, P)
    value: Tensor
    gradient: Tensor  # (*B, K, P)
    acceptance: Tensor  # the probability with which the proposal was taken, or its mean over a trajectory
    energy: Tensor  # of the state that was kept, with its momentum
    divergent: Tensor
    steps: Tensor  # gradients, or values where there is no gradient
    depth: Tensor | None = None  # of a tree
    slope: Tensor | None = None  # of the trajectory length's criterion, (*B,)


def blank_statistics(value: Tensor, kept: int, trees: bool) -> dict[str, Tensor]:
    """Allocate one value of each statistic per draw, (*B, K, S)."""
    room = value.new_zeros(*value.shape[:-1], kept, value.shape[-1]).mT  # the chains of one draw are contiguous
    found = {"energy": room, "acceptance": room.clone(), "divergent": room.bool(), "steps": room.int()}
    return {**found, "tree_depth": room.int()} if trees else found


def write(statistics: dict[str, Tensor], move: Move, kept: int, last: bool) -> None:
    """Record the statistics of a kept draw, the `last` of those that thinning makes one; divergences count in all."""
    if kept >= statistics["energy"].shape[-1]:
        for name, s in statistics.items():
            statistics[name] = torch.cat([s.mT, torch.zeros_like(s.mT)], -2).mT
    statistics["divergent"][..., kept] |= move.divergent
    if last:
        statistics["energy"][..., kept] = move.energy
        statistics["acceptance"][..., kept] = move.acceptance
        statistics["steps"][..., kept] = move.steps
        if move.depth is not None:
            statistics["tree_depth"][..., kept] = move.depth
