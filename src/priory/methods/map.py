"""Maximum a posteriori: the mode of p(w|D), by Adam (Kingma and Ba 2015); under a flat prior, maximum likelihood.

    minimise   loss = -log p(D|w) - T log p(w)        (T = 1 is the posterior's own mode)

The mode is the one in the person's own parameters: no log-determinant. A noise that the likelihood learns is never
maximised jointly with the weights, because the joint density is unbounded there: a network that fits its data exactly
wants no noise at all. It is set instead on rows held out from the weights (until then the others stand for all); in the
last third of the fit the weights see every row and the noise stays. Cost of a step: one pass of the network and O(P).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from priory.errors import require
from priory.methods.base import Info, Options, Plan
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.model import Model
from priory.posteriors import Point, Posterior

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.data import Batch, Data
    from priory.target import Target

SETTLE_EVERY = 25  # steps of the weights between two looks at the held-out rows
SETTLE_STEPS = 20
HELD_ROWS = 4096  # held-out rows looked at, at most


@dataclass
class State:
    """The vector and Adam's moments; the held-out rows while the noise is being set."""

    w: Tensor  # (*B, P)
    adam: Adam
    buffers: dict[str, Tensor]
    held: Batch | None = field(metadata={"fixed": True})
    turn: int = field(metadata={"fixed": True})  # the step from which the noise stays


@dataclass(frozen=True)
class MAP(Options):
    """The mode of the posterior, by minibatch gradients.

    `holdout` is the fraction of rows that set a learnt noise during the first two thirds of the fit; unless given, a
    tenth, or up to three tenths of a small set. `schedule` is as in MeanField.

    >>> MAP(learning_rate=0.0)
    Traceback (most recent call last):
    ...
    priory.errors.InputError: The 'learning_rate' of MAP must be a positive number. Got 0.0 instead.
    """

    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    holdout: float | None = None
    start: Any = None

    reads: ClassVar[Literal["batch", "pass"]] = "batch"

    def __post_init__(self) -> None:
        check_rate(self.learning_rate, self.schedule, "MAP")
        ok = self.holdout is None or (isinstance(self.holdout, (int, float)) and 0 < self.holdout < 1)
        require(ok, "holdout", "MAP", "lie between 0 and 1", self.holdout)

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=100, least=2_000, most=50_000)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        if not learns(target):
            return Plan(data, steps)
        early, held = data.split(self.holdout or fraction_held(data), seed)
        return Plan(data, steps, turn=max(1, 2 * steps // 3), early=early, held=held)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        w = target.start(plan.data, shape, generator, start)
        learning = rates(self.schedule, self.learning_rate, plan.steps, "MAP")
        held = None if plan.held is None else plan.held.some(HELD_ROWS)
        return State(w, Adam.of(w, learning), target.buffers(shape, start), held, plan.turn)

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        if state.held is not None and state.adam.step < state.turn and state.adam.step % SETTLE_EVERY == 0:
            settle(target, state)
        value, gradient = target.log_likelihood_and_grad(state.w, batch, state.buffers)
        return self.update(target, state, value, gradient)

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Point:
        return Point(target, state.w, state.buffers)

    def update(self, target: Target, state: State, value: Tensor, gradient: Tensor) -> tuple[State, Info]:
        """Descend the loss, given log p(D|w) and its gradient at state.w."""
        # A mode is one in the person's own parameters; where only a noise is constrained, it is not moved here.
        log_prior, prior_gradient = target.log_prior_and_grad(state.w, jacobian=learns(target))
        down = torch.add(gradient, prior_gradient, alpha=target.prior_weight).neg_()
        down[..., target.model.learnt.start :] = 0  # a noise is set on held-out rows; a prior precision stays
        loss = -value - target.prior_weight * log_prior
        state.adam.descend(state.w, down)
        return state, Info({"loss": loss, "nll": -value, "log_prior": log_prior})


def fraction_held(data: Data) -> float:
    """A tenth of the rows, or more of a small set: a noise set on 100 rows is right to seven percent."""
    return min(0.3, max(0.1, 100 / (data.num_data or 1)))


def learns(target: Target) -> bool:
    """Whether the model has parameters that a mode must not choose."""
    return target.model.learnt.start < target.model.learnt.stop


def settle(target: Target, state: State) -> None:
    """Move the likelihood's own parameters to where they predict the held-out rows best, with the weights fixed."""
    model, held = target.model, state.held
    assert isinstance(model, Model)
    assert held is not None
    flat, event = state.w.reshape(-1, model.layout.size), held[-1].shape[1:]
    with torch.no_grad():
        outputs = model.outputs(flat, held[:-1], state.buffers, event)
    tail = flat[:, model.learnt].detach().clone()
    adam = Adam.of(tail, rates("cosine", 0.1, SETTLE_STEPS, "MAP"))
    for _ in range(SETTLE_STEPS):
        leaf = tail.detach().requires_grad_()
        with torch.enable_grad():
            learnt = model.learnt_at(torch.cat([flat[:, : model.learnt.start], leaf], -1))
            loss = -model.likelihood.log_prob(outputs, held[-1], learnt).mean(-1).sum()
            (gradient,) = torch.autograd.grad(loss, leaf)
        adam.descend(tail, gradient)
    state.w[..., model.learnt] = tail.reshape(*state.w.shape[:-1], -1)
