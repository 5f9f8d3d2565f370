"""The log joint and its gradient at all chains, for a sampler.

It is a recorded graph (`priory.network.recorded_graph`) where all rows fit into one evaluation, and otherwise a sum
over blocks of rows.

A chain at which the evaluation fails, because a matrix has no Cholesky factor or a function is outside its domain, has
log p = NaN there, which every sampler rejects. The other chains don't notice. Failures are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from priory.core.errors import DivergedError, InputError
from priory.models.base import has_network
from priory.network.failures import EVALUATION_ERRORS, failures_as_nan
from priory.network.operation_recorder import LongFunctionError
from priory.network.recorded_graph import (
    NATIVE_OPERATIONS,
    GraphCost,
    by_coordinate,
    by_vector,
    cost_of_long_graph,
    record,
)
from priory.network.vectorise import unchecked

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.core.data import Batch, Data
    from priory.models.target import Target

BLOCK_NUMBERS = 1 << 23  # rows x chains that are evaluated together
FATAL_ERRORS = (InputError, DivergedError, torch.OutOfMemoryError)  # errors that are not about one vector


@dataclass
class Failures:
    """Evaluations of a log joint that gave no finite value, in all chains together.

    Args:
        count: Number of values that were NaN or infinite.
        reason: The first line of the first error that an evaluation raised; empty if none did.
    """

    count: int = 0
    reason: str = ""

    def record(self, value: Tensor) -> None:
        """Count the values that are not finite; a finite sum, which is cheaper to look at, has none."""
        if not math.isfinite(float(value.detach().sum())):
            self.count += int((~torch.isfinite(value)).sum())

    def record_error(self, error: Exception) -> None:
        """Keep the message of the first error; an error that is not about one vector is raised again."""
        if isinstance(error, FATAL_ERRORS):
            raise error
        self.reason = self.reason or f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]


@dataclass(frozen=True)
class Joint:
    """log p(w, D) and its gradient, for vectors of one shape.

    Where an evaluation fails the value is NaN, or minus infinity, and the gradient is arbitrary.
    """

    both: Callable[[Tensor], tuple[Tensor, Tensor]]  # (*B, K, P) -> (*B, K), (*B, K, P)
    gradient: Callable[[Tensor], Tensor]  # (*B, K, P) -> (*B, K, P)
    order: Callable[[Tensor], Tensor] = by_vector  # brings vectors into its preferred memory layout
    recorded: bool = False  # whether it is a recorded graph, which needs no autograd
    failures: Failures = field(default_factory=Failures)
    cost: GraphCost | None = None  # of one call, if it is recorded

    def __call__(self, w: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.both(w)
        self.failures.record(value)
        return value, gradient


def log_joint(target: Target, data: Data, w: Tensor, compile: bool = False, longest: int | None = None) -> Joint:
    """The tempered log joint over all rows and its gradient, as a function of vectors in the shape of w (*B, K, P).

    The function is recorded where all rows fit into one evaluation and recording works. Otherwise it averages over
    blocks of rows, each scaled to the whole data, in proportion to their numbers of rows.
    `longest` is that of `record`.
    """
    rows = max(1, BLOCK_NUMBERS // w[..., 0].numel())
    batch = whole(target, data, rows)
    if batch is None:
        return blockwise(target, data, rows)
    # a network multiplies matrices that are views of its vectors, which must be contiguous
    orders = (by_vector,) if has_network(target.model) else (by_coordinate, by_vector)
    graph = record(gradients(target, batch), w, orders, compile, getattr(target.model, "origin", None), longest)
    if graph is None:
        return blockwise(target, data, rows)
    failures = Failures()
    both = guarded(graph.values_and_grads, lambda w: by_halves(graph.values_and_grads, w, failures))
    slope = guarded(graph.grads, lambda w: both(w)[1])
    return Joint(both, slope, graph.order, recorded=True, failures=failures, cost=graph.cost)


def cost_of_gradient(target: Target, data: Data, w: Tensor) -> GraphCost | None:
    """The cost of the log joint and its gradient, from recording it at the first two vectors of w (*B, P).

    The numbers do not depend on how many vectors are evaluated at once, so a number of chains can be chosen by them.
    Of a long graph only the beginning is recorded here, because the whole takes seconds.

    Returns:
        The cost, or None if the function cannot be recorded or the data do not fit into one evaluation.
    """
    two = w.reshape(-1, w.shape[-1])[:2]
    try:
        return log_joint(target, data, two, longest=NATIVE_OPERATIONS).cost
    except LongFunctionError as beginning:
        return cost_of_long_graph(beginning, two)


def values_alone(joint: Joint) -> Joint:
    """The log joint with a gradient of zero, for samplers that need values only."""
    return replace(joint, both=lambda w: (joint.both(w)[0], torch.zeros_like(w)), gradient=torch.zeros_like)


def whole(target: Target, data: Data, rows: int) -> Batch | None:
    """All rows as one batch, if they fit and the model evaluates many vectors in one pass; otherwise None."""
    if data.num_data is None:
        return ()
    if data.tensors is None or data.num_data > rows:
        return None
    return data.in_memory() if target.model.in_one_pass(data.tensors) else None


def blockwise(target: Target, data: Data, rows: int) -> Joint:
    """The log joint and its gradient, accumulated over blocks of rows."""

    def plain(w: Tensor) -> tuple[Tensor, Tensor]:
        return target.whole_log_joint_and_grad(w, data, min(rows, 1024))

    def both(w: Tensor) -> tuple[Tensor, Tensor]:
        with unchecked():
            return guarded(plain, guarded(failures_as_nan(plain), lambda w: one_by_one(plain, w, failures)))(w)

    failures = Failures()
    return Joint(both, lambda w: both(w)[1], failures=failures)


# Evaluations that raise an error.


def guarded(run: Callable[[Tensor], Any], instead: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A function that calls another one where an evaluation of the first fails."""

    def call(w: Tensor) -> Any:
        try:
            return run(w)
        except EVALUATION_ERRORS as error:
            if isinstance(error, FATAL_ERRORS):
                raise
            return instead(w)

    return call


def by_halves(both: Callable[[Tensor], tuple[Tensor, Tensor]], w: Tensor, failures: Failures) -> tuple[Tensor, Tensor]:
    """Values and gradients by a function of one shape that fails at some vectors of w (*B, P), with NaN for those.

    The vectors are halved until each part works or is a single vector. A part is repeated to the shape of w.
    """
    flat = w.reshape(-1, w.shape[-1])
    value, gradient = torch.full_like(flat[:, 0], math.nan), torch.full_like(flat, math.nan)
    parts = [torch.arange(len(flat), device=w.device)]
    while parts:
        part = parts.pop()
        repeated = part.repeat(-(-len(flat) // len(part)))[: len(flat)]
        try:
            found, slope = both(flat[repeated].reshape(w.shape))
        except EVALUATION_ERRORS as error:
            failures.record_error(error)
            if len(part) > 1:
                parts += part.tensor_split(2)
            continue
        value[part] = found.reshape(-1)[: len(part)]
        gradient[part] = slope.reshape(flat.shape)[: len(part)]
    return value.reshape(w.shape[:-1]), gradient.reshape(w.shape)


def one_by_one(both: Callable[[Tensor], tuple[Tensor, Tensor]], w: Tensor, failures: Failures) -> tuple[Tensor, Tensor]:
    """Values and gradients by a function of any shape that fails at some vectors of w (*B, P), with NaN for those."""
    flat = w.reshape(-1, w.shape[-1])
    value, gradient = torch.full_like(flat[:, 0], math.nan), torch.full_like(flat, math.nan)
    for i, vector in enumerate(flat):
        try:
            value[i], gradient[i] = both(vector)
        except EVALUATION_ERRORS as error:
            failures.record_error(error)
    return value.reshape(w.shape[:-1]), gradient.reshape(w.shape)


def gradients(target: Target, batch: Batch) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Gradients and values of the tempered log joint at vectors (S, P), as a function to be recorded."""

    def tempered(w: Tensor) -> Tensor:
        return target.log_joint(w, target.differentiable(w, batch), target.log_prior(w))

    # as vmap of torch.func.grad, which records the same graph but takes a second to import torch's compiler
    values = tempered if target.model.capabilities.batched else vmap(tempered)

    def summed(w: Tensor) -> tuple[Tensor, Tensor]:
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            value = values(leaf)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return gradient, value.detach()

    return summed
