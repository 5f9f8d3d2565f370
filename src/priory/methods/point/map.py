"""Maximum a posteriori (MAP): the mode of p(w|D), by Newton's method or by Adam (Kingma and Ba 2015).

    minimise   loss = -log p(D|w) - T log p(w)        (T = 1: the mode of the posterior)

Under a flat prior this is maximum likelihood. The mode is taken in the user's parameters, without the log-determinant
of a transformation.

The mode of a density, or of a network that is affine in a few weights, is found by Newton's method in a trust region,
from several starts (`priory.methods.mode_search`). Other fits, and those whose length or learning rate the user gives,
descend by Adam. Cost of a step: one pass of the network and O(P).

The noise that a likelihood learns is never maximised jointly with the weights, because the joint density is unbounded:
a network that fits its data exactly drives the noise to zero. The noise is set on held-out rows instead. In the last
third of the fit the weights see every row, and the noise stays fixed.

Where a log prior has a corner, as the lasso and the group lasso do, it enters by a proximal step
(`penalties.as_prior.proximal`), which puts weights exactly at the corner.

With `evidence_every=k` no rows are held out. Every k epochs, the curvature at the current weights gives the evidence of
a Laplace approximation, which is maximised over the precision of each layer's prior and over the noise (Immer et al.
2021, "Scalable Marginal Likelihood Estimation for Model Selection in Deep Learning"). In between, the weights descend
under that prior and noise. At a fixed point prior and noise are type-II maximum likelihood estimates. Each update costs
one pass over the data for the curvature (one backward pass per output), one for the residuals, and a few
factorisations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.curvature import STRUCTURES, Pass, select
from priory.curvature.tuning import tune
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.mode_fit import MAX_SEARCH_STEPS, SearchState, first_state, search_step, within_reach
from priory.methods.mode_report import mode_of, status_of
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.methods.point.held_out import (
    HELD_ROWS,
    check_holdout,
    learn_from_held_out,
    learns,
    plan_with_held_rows,
    updates_noise,
)
from priory.penalties.as_prior.proximal import ProximalBlock, proximal_blocks
from priory.posteriors import Point, Posterior

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.core.data import Batch, Data
    from priory.models.target import Target

BURN_IN_FRACTION = 0.1  # of the steps before the first evidence update: untrained weights carry no information
EVIDENCE_UPDATES = 10  # of prior and noise each time; the next time continues from there


@dataclass
class MAPState:
    """Weights, Adam's moments, and what sets the noise: held-out rows, or the data of the evidence."""

    w: Tensor  # (*B, P)
    adam: Adam
    buffers: dict[str, Tensor]
    factors: dict[str, Tensor]  # on the prior's precisions, by name, (*B, 1)
    held: Batch | None = field(metadata={"fixed": True})
    turn: int = field(metadata={"fixed": True})  # the step from which the noise is fixed
    data: Data | None = field(metadata={"fixed": True})  # of the evidence, with `evidence_every`
    first: int = field(metadata={"fixed": True})  # the first step that may update by the evidence
    every: int = field(metadata={"fixed": True})  # steps between two evidence updates
    corners: list[ProximalBlock] = field(metadata={"fixed": True})  # blocks whose prior enters by a proximal step


@dataclass(frozen=True)
class MAP(Options):
    """Maximum a posteriori: the mode of the posterior.

    Minimises

        loss = -log p(D|w) - T log p(w)

    Under a flat prior this is maximum likelihood. The mode of a `Density`, and of a `Model` whose outputs are affine in
    at most 200 weights and whose rows are in memory, is found by Newton's method in a trust region, from several
    starts, to a millionth of a standard deviation; `posterior.mode` reports the gradient, the condition number and the
    number of modes. Other models, and fits with `epochs`, `steps`, `batch_size` or options other than `start`, descend
    by Adam on minibatches. A noise that the likelihood learns is set on held-out rows, or by the evidence, because its
    joint maximum with the weights is unbounded.

    Args:
        learning_rate: Learning rate of Adam. Default: 0.01.
        schedule: "cosine" (decay to zero), "constant", or a function from an optimizer to a
            `torch.optim.lr_scheduler`. Default: "cosine".
        holdout: Fraction of rows that set a learnt noise during the first two thirds of the fit. Default: None, a
            tenth, or up to three tenths of a small data set.
        evidence_every: Number of epochs between updates of the prior's precisions (one factor per layer) and of a
            learnt noise by the evidence of a Laplace approximation; no rows are held out then. `Laplace(at=posterior)`
            uses the prior that was found. Default: None, no such updates.
        structure: Structure of the curvature for `evidence_every`: "kron", "diag" or "full". Default: "kron".
        start: Method to fit first, or posterior to start from. Default: None, the model's initial values.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.MAP(), steps=1000, progress=False)
        >>> round(posterior.mean["weight"].item(), 1)
        1.0

    References:
        Kingma and Ba (2015), Adam: a method for stochastic optimization.
        Immer et al. (2021), Scalable marginal likelihood estimation for model selection in deep learning.
    """

    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    holdout: float | None = None
    evidence_every: int | None = None
    structure: str = "kron"
    start: Any = None

    def __post_init__(self) -> None:
        check_rate(self.learning_rate, self.schedule, "MAP")
        check_holdout(self.holdout, "MAP")
        ok = self.evidence_every is None or is_integer(self.evidence_every, 1)
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

    def default_plan(self, target: Target, data: Data, seed: int) -> Plan:
        if self._descends(target) or not within_reach(target, data):
            return super().default_plan(target, data, seed)
        plan = Plan(data.in_one_batch(), MAX_SEARCH_STEPS, open_ended=True, search=True)
        if not learns(target):
            return plan
        held = plan_with_held_rows(data, MAX_SEARCH_STEPS, None, seed)
        return replace(plan, early=held.early, held=held.held)

    def _descends(self, target: Target) -> bool:
        """Whether the options, or the model, need the descent by Adam."""
        chosen = replace(self, start=None) != MAP()
        corners = bool(proximal_blocks(target.prior))
        return chosen or corners or bool(target.buffers()) or target.empirical

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> MAPState | SearchState:
        if plan.search:
            return first_state(target, plan, generator, shape, start, jacobian=False)
        w = target.start(plan.data, shape, generator, start)
        learning = rates(self.schedule, self.learning_rate, plan.steps, "MAP")
        held = None if plan.held is None else plan.held.some(HELD_ROWS)
        buffers, factors, data, every = target.buffers(shape, start), {}, None, 0
        if self.evidence_every is not None:
            factors, data = factors_of(target, shape), plan.data
            every = self.evidence_every * plan.data.steps_per_epoch
        first = max(1, int(BURN_IN_FRACTION * plan.steps))
        meets = [corner for corner in proximal_blocks(target.prior) if corner.stop <= target.model.learnt.start]
        return MAPState(w, Adam.of(w, learning), buffers, factors, held, plan.turn, data, first, every, meets)

    def step(
        self, target: Target, state: MAPState | SearchState, batch: Batch, generator: torch.Generator
    ) -> tuple[MAPState | SearchState, Info]:
        if isinstance(state, SearchState):
            return search_step(target, state)
        if state.held is not None and updates_noise(state.adam.step, state.turn):
            fit_noise_on_held_out(target, state)
        if state.data is not None and state.adam.step >= state.first and state.adam.step % state.every == 0:
            retune(target, state, state.data, self.structure)
        value, gradient = target.log_likelihood_and_grad(state.w, batch, state.buffers)
        return self.update(target, state, value, gradient)

    def posterior(self, target: Target, state: MAPState | SearchState, draws: Tensor | None = None) -> Point:
        if isinstance(state, SearchState):
            found = Point(target, state.best.w.to(target.model.dtype), mode=mode_of(state.search))
            found.know(status_of(state.objective, state.search))
            return found
        return Point(target.scaled(state.factors), state.w, state.buffers)

    def update(self, target: Target, state: MAPState, value: Tensor, gradient: Tensor) -> tuple[MAPState, Info]:
        """Descend the loss, given log p(D|w) and its gradient at state.w."""
        # The mode is taken in the user's parameters; where only a noise is constrained, it is not moved here.
        scaled_target = target.scaled(state.factors)
        log_prior, prior_gradient = scaled_target.log_prior_and_grad(state.w, jacobian=learns(target))
        for corner in state.corners:
            prior_gradient[..., corner.start : corner.stop] = 0
        down = torch.add(gradient, prior_gradient, alpha=target.prior_weight).neg_()
        down[..., target.model.learnt.start :] = 0  # set on held-out rows or by the evidence, or kept
        loss = -value - target.prior_weight * log_prior
        state.adam.descend(state.w, down)
        if state.corners:
            stride = state.adam.stride()
            for corner in state.corners:
                corner.step(state.w, stride, target.prior_weight)
        return state, Info({"loss": loss, "nll": -value, "log_prior": log_prior})


def fit_noise_on_held_out(target: Target, state: MAPState) -> None:
    """Set the likelihood parameters to those that best predict the held-out rows, with the weights fixed."""
    assert state.held is not None
    state.w[..., target.model.learnt] = learn_from_held_out(target, state.w[None], state.held, state.buffers)


def factors_of(target: Target, shape: torch.Size) -> dict[str, Tensor]:
    """Return a factor of one for each network parameter whose prior the evidence can scale, (*shape, 1)."""
    model = target.network_model("The 'evidence_every' argument of MAP", "has its prior inside")
    prior = target.prior
    names = [block.name for block in prior.gaussian if block.name in model.network.params]
    ok = bool(names) or learns(target) or bool(prior.hierarchical)
    require(ok, "evidence_every", "MAP", "have a Gaussian prior or a noise to set", "a model with neither")
    return {name: model.network.initial.new_ones((*shape, 1)) for name in names}


def retune(target: Target, state: MAPState, data: Data, structure: str) -> None:
    """Maximise each member's evidence over the prior factors and the learnt parameters of the likelihood."""
    model = target.network_model("MAP")
    selection, tail = select(model), slice(model.network.size, model.layout.size)
    by = "layer" if state.factors or target.prior.hierarchical else None
    for i, w in enumerate(state.w.view(-1, model.layout.size)):
        if not bool(torch.isfinite(w).all()):
            continue  # the driver reports the divergence
        factors, buffers = {n: f.reshape(-1)[i] for n, f in state.factors.items()}, model.member(state.buffers, i)
        here = target.scaled(factors)
        curvature = lambda v, here=here, buffers=buffers: STRUCTURES[structure].of(  # noqa: E731
            Pass(here, v, data, selection, buffers=buffers)
        )
        found = tune(here, w, curvature(w), data, buffers, by, again=curvature, steps=EVIDENCE_UPDATES)
        w[tail] = found.w[tail]
        for name, factor in found.factors.items():
            state.factors[name].view(-1)[i] *= factor
