"""Maximum a posteriori: the mode of p(w|D), by Adam (Kingma and Ba 2015); under a flat prior, maximum likelihood.

    minimise   loss = -log p(D|w) - T log p(w)        (T = 1 is the posterior's own mode)

The mode is the one in the person's own parameters: no log-determinant. A noise that the likelihood learns is never
maximised jointly with the weights, because the joint density is unbounded there: a network that fits its data exactly
wants no noise at all. It is set instead on rows held out from the weights (until then the others stand for all); in the
last third of the fit the weights see every row and the noise stays. Cost of a step: one pass of the network and O(P).
Where a log prior has a corner, as those behind the lasso and its groups do, it enters by a proximal step
(`penalties.proximal`), which leaves weights at the corner exactly.

With `evidence_every=k` no row is held out. Every k epochs the curvature at the present weights gives the evidence of a
Laplace approximation there, and its maximum the precision of each layer's prior and the noise (Immer et al. 2021,
"Scalable Marginal Likelihood Estimation for Model Selection in Deep Learning"). In between the weights descend under
that prior and that noise: where both rest, prior and noise are those of type-II maximum likelihood. Each time costs one
pass over the data for the curvature (a backward pass an output), one for the residuals, and a few of its Gaussians.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import require, whole
from priory.curvature import STRUCTURES, Pass, select
from priory.curvature.tuning import tune
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.methods.point.held_out import HELD_ROWS, learns, plan_with_held_rows, settled_at, settles
from priory.penalties.as_prior.proximal import ProximalBlock, proximal_blocks
from priory.posteriors import Point, Posterior

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.core.data import Batch, Data
    from priory.models.target import Target

BURN_IN = 0.1  # of the steps, before the evidence is first asked: weights that fit nothing say nothing of a prior
UPDATES = 10  # of prior and noise each time; the next time goes on from there


@dataclass
class State:
    """The vector and Adam's moments; the held-out rows while the noise is being set, or what the evidence set."""

    w: Tensor  # (*B, P)
    adam: Adam
    buffers: dict[str, Tensor]
    factors: dict[str, Tensor]  # on the prior's precisions, by name, (*B, 1)
    held: Batch | None = field(metadata={"fixed": True})
    turn: int = field(metadata={"fixed": True})  # the step from which the noise stays
    data: Data | None = field(metadata={"fixed": True})  # what the evidence is of
    first: int = field(metadata={"fixed": True})  # the step from which the evidence is asked
    every: int = field(metadata={"fixed": True})  # steps between two times
    corners: list[ProximalBlock] = field(metadata={"fixed": True})  # where the prior enters by a proximal step


@dataclass(frozen=True)
class MAP(Options):
    """The mode of the posterior, by minibatch gradients.

    `holdout` is the fraction of rows that set a learnt noise during the first two thirds of the fit; unless given, a
    tenth, or up to three tenths of a small set. `schedule` is as in MeanField.

    `evidence_every` is how many epochs lie between two times that the evidence sets the prior's precisions, a factor a
    layer, and a learnt noise; then no rows are held out. `structure` is that of its curvature: "kron", "diag" or
    "full". The posterior's model has the prior that was found, which `Laplace(at=posterior)` goes on with.

    >>> MAP(learning_rate=0.0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'learning_rate' argument of MAP must be a positive number, got 0.0.
    """

    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    holdout: float | None = None
    evidence_every: int | None = None
    structure: str = "kron"
    start: Any = None

    def __post_init__(self) -> None:
        check_rate(self.learning_rate, self.schedule, "MAP")
        ok = self.holdout is None or (isinstance(self.holdout, (int, float)) and 0 < self.holdout < 1)
        require(ok, "holdout", "MAP", "lie between 0 and 1", self.holdout)
        ok = self.evidence_every is None or whole(self.evidence_every, 1)
        require(ok, "evidence_every", "MAP", "be an integer >= 1, or None", repr(self.evidence_every))
        ok = self.holdout is None or self.evidence_every is None
        require(ok, "holdout", "MAP", "be left out when the evidence sets the noise", self.holdout)
        known = self.structure in ("kron", "diag", "full")
        require(known, "structure", "MAP", "be 'kron', 'diag' or 'full'", repr(self.structure))

    @property
    def traits(self) -> Traits:
        return Traits(finds_mode=True, sets_prior=self.evidence_every is not None)

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=100, least=2_000, most=50_000)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        if not learns(target) or self.evidence_every is not None:
            return Plan(data, steps)
        return plan_with_held_rows(data, steps, self.holdout, seed)

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
        buffers, factors, data, every = target.buffers(shape, start), {}, None, 0
        if self.evidence_every is not None:
            factors, data = factors_of(target, shape), plan.data
            every = self.evidence_every * plan.data.steps_per_epoch
        first = max(1, int(BURN_IN * plan.steps))
        meets = [corner for corner in proximal_blocks(target.prior) if corner.stop <= target.model.learnt.start]
        return State(w, Adam.of(w, learning), buffers, factors, held, plan.turn, data, first, every, meets)

    def step(self, target: Target, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        if state.held is not None and settles(state.adam.step, state.turn):
            settle(target, state)
        if state.data is not None and state.adam.step >= state.first and state.adam.step % state.every == 0:
            retune(target, state, state.data, self.structure)
        value, gradient = target.log_likelihood_and_grad(state.w, batch, state.buffers)
        return self.update(target, state, value, gradient)

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Point:
        return Point(target.scaled(state.factors), state.w, state.buffers)

    def update(self, target: Target, state: State, value: Tensor, gradient: Tensor) -> tuple[State, Info]:
        """Descend the loss, given log p(D|w) and its gradient at state.w."""
        # A mode is one in the person's own parameters; where only a noise is constrained, it is not moved here.
        believed = target.scaled(state.factors)
        log_prior, prior_gradient = believed.log_prior_and_grad(state.w, jacobian=learns(target))
        for corner in state.corners:
            prior_gradient[..., corner.start : corner.stop] = 0
        down = torch.add(gradient, prior_gradient, alpha=target.prior_weight).neg_()
        down[..., target.model.learnt.start :] = 0  # set on held-out rows or by the evidence, or left as they are
        loss = -value - target.prior_weight * log_prior
        state.adam.descend(state.w, down)
        if state.corners:
            stride = state.adam.stride()
            for corner in state.corners:
                corner.step(state.w, stride, target.prior_weight)
        return state, Info({"loss": loss, "nll": -value, "log_prior": log_prior})


def settle(target: Target, state: State) -> None:
    """Move the likelihood's own parameters to where they predict the held-out rows best, with the weights fixed."""
    assert state.held is not None
    outputs = target.outputs(state.w.reshape(-1, target.size), state.held[:-1], state.buffers)
    state.w[..., target.model.learnt] = settled_at(target, state.w[None], outputs, state.held)


def factors_of(target: Target, shape: torch.Size) -> dict[str, Tensor]:
    """A factor of one for each parameter of the network whose prior the evidence can scale, (*shape, 1)."""
    model = target.network_model("The 'evidence_every' argument of MAP", "has its prior inside")
    prior = target.prior
    names = [block.name for block in prior.gaussian if block.name in model.network.params]
    ok = bool(names) or learns(target) or bool(prior.hierarchical)
    require(ok, "evidence_every", "MAP", "have a Gaussian prior or a noise to set", "a model with neither")
    return {name: model.network.initial.new_ones((*shape, 1)) for name in names}


def retune(target: Target, state: State, data: Data, structure: str) -> None:
    """Set each member's factors, and what is learnt beside its weights, to where the evidence there is highest."""
    model = target.network_model("MAP")
    selection, tail = select(model), slice(model.network.size, model.layout.size)
    by = "layer" if state.factors or target.prior.hierarchical else None
    for i, w in enumerate(state.w.view(-1, model.layout.size)):
        if not bool(torch.isfinite(w).all()):
            continue  # the driver says where it broke
        own, buffers = {n: f.reshape(-1)[i] for n, f in state.factors.items()}, model.member(state.buffers, i)
        here = target.scaled(own)
        curvature = lambda v, here=here, buffers=buffers: STRUCTURES[structure].of(  # noqa: E731
            Pass(here, v, data, selection, buffers=buffers)
        )
        found = tune(here, w, curvature(w), data, buffers, by, again=curvature, steps=UPDATES)
        w[tail] = found.w[tail]
        for name, factor in found.factors.items():
            state.factors[name].view(-1)[i] *= factor
