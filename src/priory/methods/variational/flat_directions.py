"""A warning where q grows without bound, because the density is improper in some direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from priory.core.streams import stream
from priory.diagnostics.flatness import FLATNESS_DRAWS, flat_coordinate, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from priory.posteriors.variational import Variational

RUNAWAY_RATIO = 10.0  # scale over initial scale above which q is tested for an improper direction


def warn_if_flat(posterior: Variational, first: Tensor, samples: int, owner: str) -> None:
    """Warn if q is far wider than its initial scale `first`, (P,), in a direction in which the density is flat.

    Args:
        posterior: The posterior with this q.
        first: Initial standard deviations; zeros to test every coordinate.
        samples: Number of draws per evaluation.
        owner: Name of the method, for the message.
    """
    target = posterior.target
    if target.num_data is not None or posterior.theta.ndim > 1:
        return
    w = posterior.draw(FLATNESS_DRAWS, stream(0, "flat", device=target.model.device))
    away = w - w.mean(0)
    wide = away.std(0) > RUNAWAY_RATIO * first
    if not bool(wide.any()):
        return
    # in pieces of `samples` draws, for which a compiled graph exists already
    pieces = w.unbind() if samples == 1 else w[: FLATNESS_DRAWS - FLATNESS_DRAWS % samples].split(samples)
    gradient = torch.cat([target.log_joint_and_grad(piece, ())[1].reshape(-1, target.size) for piece in pieces])
    place = flat_coordinate(away[: len(gradient)], gradient, wide)
    if place is not None:
        sentence = (
            f"The q of {owner} diverges: its standard deviation of '{name_of(target, place)}' is "
            f"{float(away[:, place].std()):.2g} in unconstrained coordinates, and log p doesn't fall over that "
            "width. The density seems to be improper there: give it a prior, or more steps if it is only very wide."
        )
        posterior.doubt(sentence)
