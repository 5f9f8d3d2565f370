"""Learning the noise of a likelihood on held-out rows.

Weights that fit their rows exactly drive the noise to zero. Methods that give point estimates of the weights therefore
set the noise to the value that best predicts rows the weights have not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from priory.core.errors import InputError, require
from priory.methods.base import Plan
from priory.methods.optimise import Adam, rates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from priory.core.data import Batch, Data
    from priory.models.target import Target

NOISE_UPDATE_INTERVALS = (
    25,
    100,
)  # steps of the weights between two noise updates, in the first EARLY_STEPS steps and later
EARLY_STEPS = 500
NOISE_FIT_STEPS = 20  # of Adam per noise update
HELD_ROWS = 4096  # held-out rows used, at most


def fraction_held(data: Data) -> float:
    """Return the default fraction of rows to hold out: a tenth, or up to three tenths of a small data set.

    A noise set on n rows has a relative error of sqrt((k - 1) / 4n), with k the kurtosis of their errors, and costs the
    square of that in nats per row: on 200 rows 0.0025 for Gaussian errors (k = 3), 0.01 for long tails.
    """
    return min(0.3, max(0.1, 200 / (data.num_data or 1)))


def check_holdout(holdout: object, owner: str) -> None:
    """Check the fraction of rows to hold out when the method is built."""
    ok = holdout is None or (isinstance(holdout, (int, float)) and 0 < holdout < 1)
    require(ok, "holdout", owner, "lie between 0 and 1", holdout)


def plan_with_held_rows(
    data: Data, steps: int, holdout: float | None, seed: int, learnt: str = "noise", remedy: str = "as in Gaussian(0.1)"
) -> Plan:
    """Hold out a share of the rows for the first two thirds of the steps, and then read all of them.

    The names of what is learnt from them, and of the remedy, are for the error about data of a single row.
    """
    if data.num_data == 1:
        raise InputError(
            f"The {learnt} is learnt from held-out rows, which needs at least 2 rows, got 1: give it, {remedy}."
        )
    early, held = data.split(holdout or fraction_held(data), seed)
    return Plan(data, steps, turn=max(1, 2 * steps // 3), early=early, held=held)


def learns(target: Target) -> bool:
    """Whether the likelihood has learnt parameters, which a mode must not choose."""
    return target.model.learnt.start < target.model.learnt.stop


def updates_noise(step: int, turn: int) -> bool:
    """Whether this step updates the noise: often at first, and in the last step before `turn`."""
    return step < turn and (step % NOISE_UPDATE_INTERVALS[step >= EARLY_STEPS] == 0 or step == turn - 1)


def learn_from_held_out(target: Target, draws: Tensor, held: Batch, buffers: Mapping[str, Tensor]) -> Tensor:
    """Return the likelihood parameters, (*B, k), with which draws (S, *B, P) best predict the held-out rows.

    They maximise the weighted mean over rows of the log predictive density, averaged over the draws.
    """
    outputs = target.outputs(draws.reshape(-1, draws.shape[-1]), held[:-1], buffers)  # (S x members, n, ...)
    model, lead = target.network_model("A noise that is set on held-out rows"), draws.shape[:-1]
    counts = target.row_weights(held)
    share = None if counts is None else counts / counts.sum().clamp_min(torch.finfo(counts.dtype).tiny)
    weights = draws.reshape(-1, draws.shape[-1])[:, : model.learnt.start]
    tail = draws[0][..., model.learnt].detach().clone()  # (*B, k), one for all draws
    adam = Adam.of(tail, rates("cosine", 0.1, NOISE_FIT_STEPS, "MAP"))
    for _ in range(NOISE_FIT_STEPS):
        leaf = tail.detach().requires_grad_()
        with torch.enable_grad():
            each = leaf.expand(*lead, -1).reshape(len(weights), -1)
            learnt = model.learnt_at(torch.cat([weights, each], -1))
            each_row = model.likelihood.log_prob(outputs, held[-1], learnt).view(*lead, -1)
            together = torch.logsumexp(each_row, 0)
            loss = -(together.mean(-1) if share is None else together @ share).sum()
            (gradient,) = torch.autograd.grad(loss, leaf)
        adam.descend(tail, gradient)
    return tail
