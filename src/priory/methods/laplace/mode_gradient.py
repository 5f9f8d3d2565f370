"""A check that a point is a mode: the gradient of the log joint, and the distance to the mode that it implies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.data import split_rows, weighted_sum
from priory.core.errors import warn
from priory.core.streams import stream
from priory.network.skeleton import MEMORY_LIMIT
from priory.posteriors.status import CONVERGED, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from priory.core.data import Batch, Data
    from priory.curvature import PrecisionGaussian
    from priory.models.target import Target

BLOCK_ROWS = 1024  # rows read at a time
MAX_ROWS_TIMES_WEIGHTS = 1 << 29  # above which the check uses random rows
ROWS_PER_SET = 128
MAX_MODE_DISTANCE = 1.0  # standard deviations per coordinate, the distance of a typical draw from the mean


@dataclass(frozen=True)
class ModeGradient:
    """The gradient of the log joint at w, and the distance to the mode that it implies."""

    log_likelihood: float  # log p(D|w), estimated from random rows for large data
    gradient: float  # norm of the gradient of the tempered log joint over the selected coordinates
    distance: float  # to the mode, in standard deviations: sqrt(g' Q^-1 g / p); 0 if within noise

    @classmethod
    def of(
        cls,
        target: Target,
        w: Tensor,
        data: Data,
        buffers: Mapping[str, Tensor],
        gaussian: PrecisionGaussian,
        at: Tensor,
    ) -> ModeGradient:
        """Compute it from every row, or from the gradients g_1 and g_2 of two sets of random rows.

        The two sets are independent, so g_1' Q^-1 g_2 has the mean g' Q^-1 g. With n rows per set its standard error is
        about sqrt(p) N / (n T), because the covariance of the gradients is H.
        """
        a, b = target.likelihood_power, target.prior_power
        prior = target.log_prior_and_grad(w)[1][at]
        values, gradients, factor = [], [], 0.0
        for rows in sets_of_rows(data, target.size):
            value, gradient, seen = log_likelihood_and_grad(target, w, rows, buffers)
            factor = target.scale(seen)
            values.append(factor * value)
            gradients.append(a * factor * gradient[at] + b * prior)
        first, last, p = gradients[0], gradients[-1], len(at)
        error = 0.0 if first is last else a * factor * math.sqrt(p)
        square, far = float(first @ last), float(first @ gaussian.solve(last))
        distance = math.sqrt(far / p) if far > 4 * error else 0.0
        return cls(sum(values) / len(values), math.sqrt(max(0.0, square)), distance)

    def status(self, advice: str) -> Status:
        """Return the status: converged, or not converged with a reason and this advice."""
        if self.distance <= MAX_MODE_DISTANCE:
            return CONVERGED
        return Status(
            "not_converged",
            f"The gradient of the log joint has the norm {self.gradient:.3g} where Laplace expects a mode, which "
            f"lies about {self.distance:.2g} standard deviations away: {advice}.",
        )

    def warn(self, advice: str) -> None:
        """Warn if the point is not a mode, with this advice."""
        status = self.status(advice)
        if status.reason:
            warn(status.reason)


def sets_of_rows(data: Data, size: int) -> list[Iterable[Batch]]:
    """Return all rows, or two random sets where rows times `size` weights would take too long."""
    assert data.num_data is not None
    if data.num_data * size <= MAX_ROWS_TIMES_WEIGHTS:
        return [data.blocks(BLOCK_ROWS)]
    if data.tensors is not None:
        order = torch.randperm(data.num_data, generator=stream(0, "mode"))[: 2 * ROWS_PER_SET]
        return [[data.take(rows)] for rows in order.split(ROWS_PER_SET)]
    sets: tuple[list[Batch], list[Batch]] = ([], [])
    for index, batch in enumerate(data.batches(0, 0)):
        sets[index % 2].append(batch)
        if index % 2 and sum(len(b[0]) for b in sets[1]) >= ROWS_PER_SET:
            break
    return [rows for rows in sets if rows]


def log_likelihood_and_grad(
    target: Target, w: Tensor, rows: Iterable[Batch], buffers: Mapping[str, Tensor]
) -> tuple[float, Tensor, int]:
    """Return log p of some rows, its gradient (P,) and the number of rows, with the network in evaluation mode."""
    model, value, gradient, seen = target.network_model("Laplace"), 0.0, torch.zeros_like(w), 0
    for batch in rows:
        each = model.network.activations(batch[:-1], buffers) * w.element_size()
        for some in split_rows(batch, max(1, MEMORY_LIMIT // max(1, each))):
            *inputs, targets = some
            weights = target.row_weights(some)
            model.network.set_mode(train=False)
            leaf = w.detach().requires_grad_()
            with torch.enable_grad():
                outputs = model.network.functional(leaf, tuple(inputs), buffers)
                arranged = model.likelihood.arrange(outputs, targets.shape[1:])
                values = model.likelihood.log_prob(arranged, targets, model.learnt_at(w))
                total = weighted_sum(values, weights)
            gradient += torch.autograd.grad(total, leaf)[0]
            value += float(total.detach())
        seen += len(batch[0])
    return value, gradient, seen
