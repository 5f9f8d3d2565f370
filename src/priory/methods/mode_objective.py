"""The log joint at several vectors, with gradients and Hessians: what a search for modes evaluates.

All vectors are evaluated together, by `vmap` unless the model takes leading dimensions itself. Row i of all Hessians is
one backward pass through the gradient; several rows are one batch of passes. A network of lower precision is evaluated
by a copy in float64, because rounding hides the gradient near a mode. A vector at which the evaluation fails has NaN.
Where the gradient is finite and automatic second derivatives are not, as for `torch.logaddexp` of numbers far apart,
the Hessian is the central difference of gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import InputError
from priory.models.base import has_network
from priory.network.failures import EVALUATION_ERRORS
from priory.network.vectorise import Vectorised, unchecked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from priory.core.data import Batch, Data
    from priory.models.target import Target

MIN_BLOCK_ROWS = 1024  # rows read at a time, at least
MAX_BLOCK_NUMBERS = 1 << 22  # vectors x rows x coordinates that are evaluated together
FATAL_ERRORS = (InputError, torch.OutOfMemoryError)  # errors that are not about one vector
DIFFERENCE_SHARE = {torch.float64: 1e-5, torch.float32: 1e-2}  # of |w|, or of one if it is smaller: cbrt(eps)
MAX_PASS_NUMBERS = 1 << 24  # vectors x rows x coordinates of the backward passes that run together


@dataclass(frozen=True)
class Derivatives:
    """The parts of the log joint at vectors (K, P), its gradient, and its Hessian where it was asked for."""

    log_likelihood: Tensor  # (K,)
    log_prior: Tensor  # (K,)
    value: Tensor  # (K,), of the tempered log joint
    gradient: Tensor  # (K, P)
    hessian: Tensor | None = None  # (K, P, P)


class ModeObjective:
    """The tempered log joint over all rows, as a function of the coordinates that a mode is taken in.

    Args:
        target: Target of the fit.
        data: All rows, or None for a density that contains its data.
        jacobian: Whether the density is that over the unconstrained coordinates, with their log-determinant, as for
            Laplace's method; otherwise it is that over the user's parameters, as for MAP.
        size: Number of leading coordinates that vary; the others stay where they are. Default: None, all.
    """

    def __init__(self, target: Target, data: Data, jacobian: bool, size: int | None = None) -> None:
        self.target, self.data = in_float64(target, data)
        self.jacobian, self.size = jacobian, target.size if size is None else size
        self.dtype = self.target.model.dtype
        self._rows = Vectorised(self.target.rows_log_likelihood, "This model")

    def rounded(self, w: Tensor) -> Tensor:
        """Return vectors (K, P) as the log joint sees them, in float64."""
        return w.to(self.dtype).double()

    def first_order(self, w: Tensor) -> Derivatives:
        """Return values and gradients at vectors (K, P)."""
        return self._guarded(w, second=False)

    def second_order(self, w: Tensor) -> Derivatives:
        """Return values, gradients and Hessians at vectors (K, P)."""
        found = self._guarded(w, second=True)
        assert found.hessian is not None
        finite = torch.isfinite(found.value) & torch.isfinite(found.gradient).all(-1)
        for i in (finite & ~torch.isfinite(found.hessian).flatten(1).all(-1)).nonzero()[:, 0].tolist():
            found.hessian[i] = self._differences(w[i].double())
        return found

    def _differences(self, w: Tensor) -> Tensor:
        """Return the Hessian at one vector (P,) by central differences of gradients, (size, size)."""
        width = DIFFERENCE_SHARE[self.dtype] * w[: self.size].abs().clamp(min=1.0)
        sides = torch.diag_embed(width, dim1=0, dim2=1)
        points = w.repeat(2, self.size, 1)
        points[0, :, : self.size] += sides
        points[1, :, : self.size] -= sides
        points = self.rounded(points)
        above, below = (self.first_order(side).gradient for side in points)
        hessian = (above - below) / (points[0] - points[1])[:, : self.size].diagonal()[:, None]
        return 0.5 * (hessian + hessian.mT)

    def _guarded(self, w: Tensor, second: bool) -> Derivatives:
        """Evaluate all vectors together, or one by one with NaN where an evaluation raises an error."""
        try:
            return self._evaluate(w, second)
        except EVALUATION_ERRORS as error:
            if isinstance(error, FATAL_ERRORS):
                raise
            if len(w) == 1:
                return failed(w, self.size, second)
        return joined([self._guarded(v[None], second) for v in w])

    def _evaluate(self, w: Tensor, second: bool) -> Derivatives:
        w = w.to(self.dtype)
        target, a, b = self.target, self.target.likelihood_power, self.target.prior_power
        block_rows = max(MIN_BLOCK_ROWS, MAX_BLOCK_NUMBERS // w.numel())
        total, seen = None, 0
        with unchecked():
            for batch in self.data.blocks(block_rows):
                rows = len(batch[0]) if batch else 1
                found = differentiated(
                    lambda v, batch=batch: self._log_likelihood(v, batch), w, self.size, second, rows
                )
                total = found if total is None else [x + y for x, y in zip(total, found, strict=True)]
                seen += rows
            assert total is not None
            log_likelihood, *likelihood_slopes = (target.scale(seen) * part for part in total)
            log_prior, *prior_slopes = differentiated(self._log_prior, w, self.size, second)
            value = a * log_likelihood + b * log_prior
            slopes = [a * x + b * y for x, y in zip(likelihood_slopes, prior_slopes, strict=True)]
            if self.jacobian and b != 1 and target.model.layout.constrained:
                volume, *volume_slopes = differentiated(target.model.layout.log_det, w, self.size, second)
                value = value + (1 - b) * volume
                slopes = [x + (1 - b) * y for x, y in zip(slopes, volume_slopes, strict=True)]
        return Derivatives(*(part.double() for part in (log_likelihood, log_prior, value, *slopes)))

    def _log_likelihood(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the sum over the rows of a batch at each vector, (K,)."""
        if self.target.model.capabilities.batched:
            return self.target.rows_log_likelihood(w, batch)
        return self._rows.values(w, batch)

    def _log_prior(self, w: Tensor) -> Tensor:
        """Return the log prior density in the coordinates of the mode, (K,)."""
        prior = self.target.prior
        deviation = w - prior.loc
        value = prior.log_normaliser - 0.5 * (prior.precision * deviation.square()).sum(-1)
        return value + prior.log_prob_of_others(w, self.jacobian) if prior.others else value


def differentiated(
    function: Callable[[Tensor], Tensor], w: Tensor, size: int, second: bool, rows: int = 1
) -> list[Tensor]:
    """Return values (K,), gradients (K, size) and, if asked for, Hessians (K, size, size) at vectors (K, P).

    Args:
        function: From vectors (K, P) to values (K,), each of which depends on its own vector alone.
        w: The vectors.
        size: Number of leading coordinates to differentiate by.
        second: Whether to return Hessians.
        rows: Number of rows that the function reads, from which the memory of a pass is estimated.
    """
    leaf = w.detach()[:, :size].requires_grad_()
    gradient, hessian = torch.zeros_like(leaf), w.new_zeros(len(w), size, size)
    with torch.enable_grad():
        values = function(leaf if size == w.shape[1] else torch.cat([leaf, w[:, size:]], 1))
        if values.requires_grad:  # a density may have everything in its likelihood
            (gradient,) = torch.autograd.grad(values.sum(), leaf, create_graph=second)
        if second and gradient.requires_grad:
            every = torch.eye(size, dtype=w.dtype, device=w.device)
            together = max(1, MAX_PASS_NUMBERS // (max(rows, size) * len(w)))
            for first in range(0, size, together):
                some = every[first : first + together]
                hessian[:, first : first + together] = hessian_rows(gradient, leaf, some)
    found = [values.detach(), gradient.detach()]
    return [*found, 0.5 * (hessian + hessian.mT)] if second else found


def hessian_rows(gradient: Tensor, leaf: Tensor, some: Tensor) -> Tensor:
    """Return `some` rows (rows, P) of the identity times the Hessian at each vector, (K, rows, P)."""
    passes = some[:, None, :].expand(-1, len(leaf), -1)  # (rows, K, P)
    options = {"retain_graph": True, "allow_unused": True}
    try:
        (found,) = torch.autograd.grad(gradient, leaf, passes, is_grads_batched=True, **options)
    except RuntimeError:  # an operation without a rule for batches
        each = [torch.autograd.grad(gradient, leaf, one, **options)[0] for one in passes]
        found = None if each[0] is None else torch.stack(each)
    return leaf.new_zeros(len(leaf), *some.shape) if found is None else found.movedim(0, 1)


def failed(w: Tensor, size: int, second: bool) -> Derivatives:
    """Return NaN for every value and derivative by `size` coordinates at vectors (K, P)."""
    none = torch.full_like(w[:, 0], math.nan)
    hessian = none[:, None, None].expand(-1, size, size) if second else None
    return Derivatives(none, none, none, none[:, None].expand(-1, size), hessian)


def joined(parts: Iterable[Derivatives]) -> Derivatives:
    """Concatenate the derivatives at several sets of vectors."""
    every = list(parts)
    join = lambda name: torch.cat([getattr(part, name) for part in every])  # noqa: E731
    hessian = None if every[0].hessian is None else join("hessian")
    return Derivatives(join("log_likelihood"), join("log_prior"), join("value"), join("gradient"), hessian)


def in_float64(target: Target, data: Data) -> tuple[Target, Data]:
    """Return a network's target and data in float64; those of any other model, or of another prior, as they are."""
    model = target.model
    if not has_network(model) or model.dtype == torch.float64 or target.prior is not model.prior:
        return target, data
    wide = model.in_float64()
    tensors = None if data.tensors is None else widened(data.tensors)
    return target.of_model(wide), replace(data, tensors=tensors, prepare=wide.prepare)


def widened(batch: Batch) -> Batch:
    """Return a batch of prepared rows with its floating numbers in float64."""
    return tuple(t.double() if t.is_floating_point() else t for t in batch)
