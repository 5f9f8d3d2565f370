"""The engine shared by the variational methods: options, a flat tensor of variational parameters, and the step.

A method names the `Form` of its q. `Form.family` turns the flat tensor theta (*B, K) into a distribution. An estimator
gives a loss, whose gradient in theta comes from autograd through the family alone, and Adam descends it. The network is
evaluated once per draw, with its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import is_integer, require
from priory.core.linalg import cholesky
from priory.estimators.evidence_bound import assemble
from priory.estimators.gradients import LAYER_ESTIMATORS, PATH_ESTIMATORS, SCORE_ESTIMATORS, Estimate, estimate
from priory.estimators.importance import importance_weighted
from priory.families import DiagonalFamily, FullRankFamily
from priory.families.diagonal import LOG_2_PI_E
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.methods.variational.arrival import (
    ArrivalState,
    Search,
    arrival_step,
    arrived_posterior,
    arrives,
    begin_arrival,
    best_gaussian,
)
from priory.methods.variational.fixed_draws import FixedDrawsState, fixed_draws_posterior, fixed_draws_step
from priory.methods.variational.flat_directions import warn_if_flat
from priory.methods.variational.frame import Frame, framed
from priory.methods.variational.gaussian_newton import GaussianQ
from priory.methods.variational.plateau import Plateau
from priory.models.base import has_network
from priory.posteriors.status import CONVERGED, Status, of_cap, worst
from priory.posteriors.variational import Variational

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.core.data import Batch, Data
    from priory.families import Family, Form
    from priory.models.target import Target
    from priory.posteriors import Posterior

NARROW_SCALE = 0.02  # initial scale in prior standard deviations, so narrow that noise doesn't hide the network
WIDE_SCALE = 1.0  # initial scale of flows and mixtures for a density, which must cover it before they adapt
MAX_STOCHASTIC_GAP_NATS = 0.1  # below the optimum of the family, from which a fit by stochastic steps counts as missed
BASELINE_DECAY = 0.9  # of the moving average of f per step


@dataclass
class VariationalState:
    """Variational parameters, Adam's moments, and the moving average of f that score functions use as a baseline."""

    theta: Tensor  # (*B, K)
    adam: Adam
    buffers: dict[str, Tensor]
    baseline: Tensor  # (*B,)
    form: Form = field(metadata={"fixed": True})
    frame: Frame | None = field(default=None, metadata={"fixed": True})  # the coordinates of theta, if not those of w
    search: Search | None = field(default=None, metadata={"fixed": True})  # from which the fit has arrived
    given: Status = field(default=CONVERGED, metadata={"fixed": True})  # of the start: whether it covers the posterior
    plateau: Plateau | None = None  # for a fit that ends when the bound stops rising


@dataclass(frozen=True)
class Objective:
    """The bound to maximise, the estimator of its gradient, and the number of draws.

    Args:
        samples: Number of draws per step.
        estimator: One of `priory.estimators.ESTIMATORS`.
        objective: "elbo", or "iwae" for the importance-weighted bound over `samples` draws.
        divergence: A divergence to the prior from `priory.divergences` that replaces KL(q || p), or None for KL.
        antithetic: Whether draws come in pairs; None for pairs where they are possible.
    """

    samples: int
    estimator: str
    objective: str
    divergence: Any
    antithetic: bool | None

    def check(self, owner: str, layers: bool) -> None:
        """Raise InputError for options that can't be combined."""
        require(is_integer(self.samples, 1), "samples", owner, "be an integer >= 1", self.samples)
        known = (*PATH_ESTIMATORS, *SCORE_ESTIMATORS, *(LAYER_ESTIMATORS if layers else ()))
        require(self.estimator in known, "estimator", owner, f"be one of {', '.join(known)}", repr(self.estimator))
        require(self.objective in ("elbo", "iwae"), "objective", owner, "be 'elbo' or 'iwae'", repr(self.objective))
        weighted = self.objective == "iwae"
        fits = ("pathwise", "doubly") if weighted else tuple(name for name in known if name != "doubly")
        named = f"be one of {', '.join(fits)} for the objective '{self.objective}'"
        require(self.estimator in fits, "estimator", owner, named, repr(self.estimator))
        several = self.estimator in ("leave_one_out", "vargrad") or weighted
        of = "the objective 'iwae'" if weighted else self.estimator
        require(self.samples > 1 or not several, "samples", owner, f"be at least 2 for {of}", self.samples)
        known = self.divergence is None or callable(getattr(self.divergence, "of_ratios", None))
        require(known, "divergence", owner, "be one such as Renyi(0.5), or None for KL", repr(self.divergence))
        alone = self.divergence is None or (self.estimator == "pathwise" and not weighted)
        require(
            alone, "divergence", owner, "be left out unless the estimator is 'pathwise' of the elbo", self.divergence
        )

        ok = self.antithetic in (None, True, False)
        require(ok, "antithetic", owner, "be True, False or None", repr(self.antithetic))
        drawn = not self.antithetic or (self.estimator not in (*SCORE_ESTIMATORS, *LAYER_ESTIMATORS) and not weighted)
        of = "the objective 'iwae'" if weighted else f"the estimator {self.estimator!r}"
        require(drawn, "antithetic", owner, f"be left out for {of}", self.antithetic)

    def estimate(self, target: Target, family: Any, batch: Batch, state: Any, generator: torch.Generator) -> Estimate:
        """Estimate the loss from fresh draws."""
        if self.objective == "iwae":
            return importance_weighted(target, family, batch, state.buffers, generator, self.samples, self.estimator)
        return estimate(
            target,
            family,
            batch,
            state.buffers,
            generator,
            self.samples,
            self.estimator,
            state.baseline,
            self.divergence,
            self.antithetic,
        )


@dataclass(frozen=True, kw_only=True)
class VariationalMethod(Options):
    """Base class of the variational methods whose q is a `Form`; subclasses name the form and change defaults.

    Args:
        samples: Number of draws of w per step. Default: 1.
        estimator: Gradient estimator, one of `priory.estimators.ESTIMATORS` except "local" and "flipout".
            Default: None, "sticking" for the ELBO, "doubly" for "iwae", and "pathwise" with a `divergence`.
        objective: "elbo", or "iwae" for the importance-weighted bound over `samples` draws. Default: "elbo".
        divergence: Replaces KL(q || p) by another divergence to the prior, such as `priory.divergences.Renyi(0.5)`.
            Default: None, KL.
        antithetic: Whether draws come in pairs eps, -eps, whose odd errors cancel. Default: None, pairs where `samples`
            is even and q is symmetric.
        learning_rate: Learning rate of Adam. Default: 0.01.
        schedule: "cosine" (decay to zero, so that the last steps average the noise away), "constant", or a function
            from an optimizer to a `torch.optim.lr_scheduler`. Default: "cosine".
        initial_scale: Initial standard deviations of q, in standard deviations of the prior. Default: None, 0.02.
        start: Method to fit first, or posterior to start from. Default: None, the model's initial values.
    """

    samples: int = 1
    estimator: str | None = None
    objective: str = "elbo"
    divergence: Any = None
    antithetic: bool | None = None
    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    initial_scale: float | None = None
    start: Any = None

    usual: ClassVar[str] = "sticking"  # default estimator of the ELBO
    usual_weighted: ClassVar[str] = "doubly"  # default estimator of the importance-weighted bound
    narrow: ClassVar[bool] = True  # whether q starts narrow for a density too
    correlated: ClassVar[bool] = False  # whether q takes correlations from the Gaussian that it starts from
    longest: ClassVar[int] = 4_000  # steps of a fit that ends when the bound stops rising
    layered: ClassVar[bool] = False  # whether noise may be drawn at the layers

    def __post_init__(self) -> None:
        owner = type(self).__name__
        self.bound.check(owner, self.layered)
        check_rate(self.learning_rate, self.schedule, owner)
        given = self.initial_scale
        ok = given is None or (isinstance(given, (int, float)) and 0 < given < float("inf"))
        require(ok, "initial_scale", owner, "be a positive number", given)

    @property
    def bound(self) -> Objective:
        """The objective with its estimator."""
        return Objective(self.samples, self.chosen, self.objective, self.divergence, self.antithetic)

    @property
    def chosen(self) -> str:
        """The estimator given by the user, or the default for this objective and divergence."""
        if self.estimator is not None or self.usual == "pathwise":
            return self.estimator or self.usual
        if self.objective == "iwae":
            return self.usual_weighted
        return self.usual if self.divergence is None else "pathwise"

    def form(self, target: Target) -> Form:
        """Return the form of q for this target."""
        raise NotImplementedError

    def first_scale(self, target: Target) -> Tensor:
        """Return the initial standard deviations of q, (P,)."""
        usual = NARROW_SCALE if self.narrow or has_network(target.model) else WIDE_SCALE
        return (self.initial_scale or usual) * target.prior.typical_scale()

    @property
    def traits(self) -> Traits:
        return Traits(
            trains_buffers=self.chosen not in SCORE_ESTIMATORS
        )  # score functions run the network in evaluation mode

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=4_000, most=50_000)

    @property
    def gaussian(self) -> str | None:
        """Covariance of q if q is Gaussian and can be fitted by Newton steps with fixed draws: "diagonal" or "full"."""
        return None

    @property
    def adjusted(self) -> bool:
        """Whether the user has chosen how the optimiser steps, or another objective."""
        defaults = {f.name: f.default for f in fields(self)}
        names = ("estimator", "objective", "divergence", "learning_rate", "schedule")
        return any(getattr(self, name) != defaults[name] for name in names)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> Any:
        if self.divergence is None and arrives(target, plan):
            search = Search(target, plan.data, generator, start, type(self).__name__)
            return self.arrive(target, search, plan, generator, shape)
        loc = target.start(plan.data, shape, generator, start)
        form, scale = self.form(target), self.first_scale(target)
        theta = form.initial(loc, scale, generator)
        learning = rates(self.schedule, self.learning_rate, plan.steps, type(self).__name__)
        return VariationalState(
            theta, Adam.of(theta, learning), target.buffers(shape, start), loc.new_zeros(shape), form
        )

    def arrive(self, target: Target, search: Search, plan: Plan, generator: torch.Generator, shape: torch.Size) -> Any:
        """Return the first state of a fit of a density that starts where the mass is."""
        if self.gaussian is not None and not self.adjusted:
            return begin_arrival(search, shape, self.gaussian == "full")
        begun = None if self.adjusted else self.begin_fixed(target, search, generator, shape)
        if begun is not None:
            return begun
        best = best_gaussian(search, self.correlated)
        form, dtype = self.arrived_form(target), target.model.dtype
        root = cholesky(best.q.covariance(), "covariance of q") if self.correlated else best.q.root
        frame = Frame(best.q.loc.to(dtype), root.to(dtype))
        zero = torch.zeros(*shape, target.size, dtype=dtype, device=target.model.device)
        theta = form.initial(zero, torch.ones_like(frame.centre), generator)
        if form.moved(theta, frame.centre, frame.root) is None:
            theta = form.initial(frame.centre.expand_as(zero), best.q.scales().to(dtype), generator)
            frame = None
        learning = rates(self.schedule, self.learning_rate, plan.steps, type(self).__name__)
        plateau = None if self.adjusted else Plateau()
        return VariationalState(
            theta, Adam.of(theta, learning), {}, zero[..., 0], form, frame, search, best.status_of_rivals(), plateau
        )

    def begin_fixed(self, target: Target, search: Search, generator: torch.Generator, shape: torch.Size) -> Any:
        """Return the first state of a fit by fixed draws, or None for families that are fitted by fresh draws."""
        return None

    def arrived_form(self, target: Target) -> Form:
        """Return the form of q for a fit that starts from the best Gaussian."""
        return self.form(target)

    def step(self, target: Target, state: Any, batch: Batch, generator: torch.Generator) -> tuple[Any, Info]:
        if isinstance(state, ArrivalState):
            return arrival_step(state)
        if isinstance(state, FixedDrawsState):
            return fixed_draws_step(state)
        if state.frame is not None:
            target = framed(target, state.frame)
        theta = state.theta.detach().requires_grad_()
        with torch.enable_grad():
            family = state.form.family(theta)
            found = self.estimate(target, family, batch, state, generator)
            (gradient,) = torch.autograd.grad(found.loss.sum(), theta)  # members are independent
        metrics = bound_metrics(found, self.divergence is not None)
        if state.frame is not None:
            metrics = outside(metrics, state.frame.log_det(), target.entropy_weight)
        if state.plateau is not None:
            state.adam.rates = torch.tensor([self.learning_rate * state.plateau.factor], dtype=torch.float64)
            state.plateau.record(float(torch.as_tensor(metrics["elbo"]).mean()), self.longest)
        state.adam.descend(state.theta, gradient)
        state.baseline = updated_baseline(state.baseline, found, first=state.adam.step == 1)
        return state, Info(metrics, done=state.plateau is not None and state.plateau.ended)

    def estimate(self, target: Target, family: Any, batch: Batch, state: Any, generator: torch.Generator) -> Estimate:
        """Estimate the loss from fresh draws."""
        return self.bound.estimate(target, family, batch, state, generator)

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> Variational:
        if isinstance(state, ArrivalState):
            return arrived_posterior(target, state, type(self).__name__)
        if isinstance(state, FixedDrawsState):
            return fixed_draws_posterior(target, state, type(self).__name__)
        theta = state.theta
        if state.frame is not None:
            theta = state.form.moved(theta, state.frame.centre, state.frame.root)
        found = Variational(target, state.form, theta, state.buffers)
        if state.search is not None:
            self.judge(found, state)
        self.warn_if_flat(found)
        return found

    def judge(self, posterior: Variational, state: VariationalState) -> None:
        """Give a posterior whose fit began where the mass is its status, and its k-hat once the fit has ended."""
        assert state.search is not None
        plateau, rows = state.plateau, state.search.data
        if plateau is not None:
            status = of_cap(not plateau.risen, plateau.steps, "The bound")
            posterior.end_by_rule(worst([status, state.given]), rows if plateau.ended else None)
        elif state.adam.step >= len(state.adam.rates):
            posterior.know(worst([state.given, status_of_gap(posterior.family, state.search, self.chosen)]))
            posterior.compute_k_hat(rows)

    def warn_if_flat(self, posterior: Variational) -> None:
        """Warn if q has grown without bound along a direction in which the density is flat."""
        warn_if_flat(posterior, self.first_scale(posterior.target), self.samples, type(self).__name__)


def status_of_gap(family: Family, search: Search, estimator: str) -> Status:
    """Return the status of a Gaussian q by the rise of the bound that Newton steps could still gain."""
    if isinstance(family, DiagonalFamily):
        q = GaussianQ(family.loc.double(), family.scale.double())
    elif isinstance(family, FullRankFamily):
        q = GaussianQ(family.loc.double(), family.tril.double())
    else:
        return CONVERGED
    here = search.at(q, 1, search.count)
    if here is not None and here.gap <= MAX_STOCHASTIC_GAP_NATS:
        return CONVERGED
    gap = "far" if here is None else f"{here.gap:.2g} nats"
    what = f"The bound is {gap} below its optimum, because the estimator '{estimator}' is too noisy"
    return Status("not_converged", f"{what}: leave out the estimator, or use 'leave_one_out' with more samples.")


def updated_baseline(baseline: Tensor, found: Estimate, first: bool) -> Tensor:
    """Update the moving average of f with the mean of this step; the first step sets it."""
    mean = found.each.mean(0)
    return mean if first else torch.lerp(mean, baseline, BASELINE_DECAY)


def outside(metrics: dict[str, Tensor | float], log_det: float, t: float) -> dict[str, Tensor | float]:
    """Return metrics of the coordinates w, given those in a frame with this log |det root|; t weights the entropy."""
    shifts = {"elbo": t * log_det, "loss": -t * log_det, "kl": -log_det, "iwae": log_det}
    return {name: value + shifts.get(name, 0.0) for name, value in metrics.items()}


def bound_metrics(found: Estimate, generalised: bool = False) -> dict[str, Tensor | float]:
    """Return the bound and its parts as metrics of the history; with another divergence there is no bound."""
    bound = found.bound
    if generalised:
        return {"nll": bound.nll, "divergence": bound.kl, "loss": bound.loss}
    metrics: dict[str, Tensor | float] = {"elbo": bound.value, "nll": bound.nll, "kl": bound.kl, "loss": bound.loss}
    if found.weighted is not None:
        metrics |= {"iwae": found.weighted, "loss": -found.weighted}
    return metrics


# The closed form of a Gaussian q, for the methods that step in place.


def parts(
    target: Target, value: Tensor, square: Tensor, log_scales: Tensor, others: Tensor | None, volume: Tensor | None
) -> dict[str, Tensor | float]:
    """Return the bound and its parts from sum_i lambda_i E_q[(w - m0)^2] and sum_i log s_i (half the log determinant).

    A single member on the CPU is computed in Python floats, at a tenth of the cost of tensors.
    """
    numbers: list[Any] = [value, square, log_scales, *(0.0 if part is None else part for part in (others, volume))]
    if value.ndim == 0 and value.device.type == "cpu":
        numbers = [float(number) for number in numbers]
    log_likelihood, quadratic, logs, sampled, log_det = numbers
    cross = 0.5 * quadratic - target.prior.log_normaliser - sampled
    entropy = logs + 0.5 * LOG_2_PI_E * target.size
    bound = assemble(target, log_likelihood, cross, entropy, log_det)
    return {"elbo": bound.value, "nll": bound.nll, "kl": bound.kl, "loss": bound.loss}


def inner(x: Tensor, y: Tensor) -> Tensor:
    """sum_i x_i y_i over the last dimension, (*B,)."""
    return torch.dot(x, y) if x.ndim == 1 else torch.linalg.vecdot(x, y)
