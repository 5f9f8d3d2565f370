"""What variational methods share: options, a flat tensor of variational parameters, and a step on any objective.

A method says which `Form` its q has; `Form.family` turns the flat tensor theta (*B, K) into a distribution, an
estimator gives a loss whose gradient in theta is found by autograd through the family alone, and Adam descends it. The
network itself is asked for one value and one gradient a draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from priory.core.errors import require, warn, whole
from priory.core.streams import stream
from priory.diagnostics.flatness import DRAWS, flat_place, name_of
from priory.estimators.evidence_bound import assemble
from priory.estimators.gradients import LAYERS, PATHS, SCORES, Estimate, estimate
from priory.estimators.importance import importance_weighted
from priory.families.diagonal import LOG_2_PI_E
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.optimise import Adam, check_rate, default_steps, rates
from priory.models.base import has_network
from priory.posteriors.status import Status
from priory.posteriors.variational import Variational

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from priory.core.data import Batch, Data
    from priory.families import Form
    from priory.models.target import Target
    from priory.posteriors import Posterior

NARROW = 0.02  # of the prior's standard deviations: the first steps see the network and not the noise
WIDE = 1.0  # for a density, whose scale is not known: what is to bend or to split must first cover
RUN_OFF = 10.0  # times its first scale, from which q is asked whether it has somewhere to go
BASELINE = 0.9  # how much of the average over earlier steps a step keeps


@dataclass
class State:
    """The variational parameters and Adam's moments; an average of f, as the baseline of score functions."""

    theta: Tensor  # (*B, K)
    adam: Adam
    buffers: dict[str, Tensor]
    baseline: Tensor  # (*B,)
    form: Form = field(metadata={"fixed": True})


@dataclass(frozen=True)
class Objective:
    """Which bound, by which estimator, from how many draws.

    `objective` is "elbo", or "iwae" for the importance-weighted bound over `samples` draws; `estimator` is one of those
    of `priory.estimators`; `divergence` replaces KL(q || p) by another one to the prior, from `priory.divergences`.
    """

    samples: int
    estimator: str
    objective: str
    divergence: Any
    antithetic: bool | None

    def check(self, owner: str, layers: bool) -> None:
        """Refuse what doesn't go together."""
        require(whole(self.samples, 1), "samples", owner, "be an integer >= 1", self.samples)
        known = (*PATHS, *SCORES, *(LAYERS if layers else ()))
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
        drawn = not self.antithetic or (self.estimator not in (*SCORES, *LAYERS) and not weighted)
        of = "the objective 'iwae'" if weighted else f"the estimator {self.estimator!r}"
        require(drawn, "antithetic", owner, f"be left out for {of}", self.antithetic)

    def estimate(self, target: Target, family: Any, batch: Batch, state: Any, generator: torch.Generator) -> Estimate:
        """One estimate from fresh draws."""
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
    """The engine of the methods whose q is a `Form`: they differ in that form, and in their defaults."""

    samples: int = 1
    estimator: str | None = None
    objective: str = "elbo"
    divergence: Any = None
    antithetic: bool | None = None
    learning_rate: float = 1e-2
    schedule: str | Callable[[Optimizer], LRScheduler] = "cosine"
    initial_scale: float | None = None
    start: Any = None

    usual: ClassVar[str] = "sticking"  # the estimator of the ELBO unless one is named
    usual_weighted: ClassVar[str] = "doubly"  # and of the importance-weighted bound
    narrow: ClassVar[bool] = True  # whether q starts narrow for a density too
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
        """What is maximised, and how."""
        return Objective(self.samples, self.chosen, self.objective, self.divergence, self.antithetic)

    @property
    def chosen(self) -> str:
        """The estimator: the one that is named, or else the usual one, if it fits what is maximised."""
        if self.estimator is not None or self.usual == "pathwise":
            return self.estimator or self.usual
        if self.objective == "iwae":
            return self.usual_weighted
        return self.usual if self.divergence is None else "pathwise"

    def form(self, target: Target) -> Form:
        """The form of q for this target."""
        raise NotImplementedError

    def first_scale(self, target: Target) -> Tensor:
        """The standard deviations that q starts with, (P,)."""
        usual = NARROW if self.narrow or has_network(target.model) else WIDE
        return (self.initial_scale or usual) * target.prior.typical_scale()

    @property
    def traits(self) -> Traits:
        return Traits(trains_buffers=self.chosen not in SCORES)  # score functions run the network in evaluation mode

    def length(self, data: Data) -> int:
        return default_steps(data.steps_per_epoch, epochs=200, least=4_000, most=50_000)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> Any:
        loc = target.start(plan.data, shape, generator, start)
        form, scale = self.form(target), self.first_scale(target)
        theta = form.initial(loc, scale, generator)
        learning = rates(self.schedule, self.learning_rate, plan.steps, type(self).__name__)
        return State(theta, Adam.of(theta, learning), target.buffers(shape, start), loc.new_zeros(shape), form)

    def step(self, target: Target, state: Any, batch: Batch, generator: torch.Generator) -> tuple[Any, Info]:
        theta = state.theta.detach().requires_grad_()
        with torch.enable_grad():
            family = state.form.family(theta)
            found = self.estimate(target, family, batch, state, generator)
            (gradient,) = torch.autograd.grad(found.loss.sum(), theta)  # members don't meet
        state.adam.descend(state.theta, gradient)
        state.baseline = moved_average(state.baseline, found, first=state.adam.step == 1)
        return state, Info(told(found))

    def estimate(self, target: Target, family: Any, batch: Batch, state: Any, generator: torch.Generator) -> Estimate:
        """One estimate of the loss, from fresh draws."""
        return self.bound.estimate(target, family, batch, state, generator)

    def posterior(self, target: Target, state: Any, draws: Tensor | None = None) -> Variational:
        found = Variational(target, state.form, state.theta, state.buffers)
        self.warn_if_flat(found)
        return found

    def warn_if_flat(self, posterior: Variational) -> None:
        """Say when q runs off: wider than it began, where the density (with its data inside) doesn't fall."""
        warn_if_flat(posterior, self.first_scale(posterior.target), self.samples, type(self).__name__)


def warn_if_flat(posterior: Variational, first: Tensor, samples: int, owner: str) -> None:
    """Say when q is far wider than its first scale, (P,), in a direction in which the density doesn't fall."""
    target = posterior.target
    if target.num_data is not None or posterior.theta.ndim > 1:
        return
    w = posterior.draw(DRAWS, stream(0, "flat", device=target.model.device))
    away = w - w.mean(0)
    wide = away.std(0) > RUN_OFF * first
    if not bool(wide.any()):
        return
    # as many at once as a step has, whose graph is there already
    pieces = w.unbind() if samples == 1 else w[: DRAWS - DRAWS % samples].split(samples)
    gradient = torch.cat([target.log_joint_and_grad(piece, ())[1].reshape(-1, target.size) for piece in pieces])
    place = flat_place(away[: len(gradient)], gradient, wide)
    if place is not None:
        sentence = (
            f"The q of {owner} runs off: its standard deviation of '{name_of(target, place)}' is "
            f"{float(away[:, place].std()):.2g} in unconstrained coordinates, and log p doesn't fall over it. "
            f"The density seems "
            "to be improper in it: give it a prior, or more steps if it is only very wide."
        )
        warn(sentence)
        posterior.know(Status("doubtful", sentence), warned=True)


def moved_average(baseline: Tensor, found: Estimate, first: bool) -> Tensor:
    """The baseline, moved towards this step's mean of f; the first step's is all there is."""
    mean = found.each.mean(0)
    return mean if first else torch.lerp(mean, baseline, BASELINE)


def told(found: Estimate) -> dict[str, Tensor | float]:
    """The bound and its parts, for the history."""
    bound = found.bound
    metrics: dict[str, Tensor | float] = {"elbo": bound.value, "nll": bound.nll, "kl": bound.kl, "loss": bound.loss}
    if found.weighted is not None:
        metrics |= {"iwae": found.weighted, "loss": -found.weighted}
    return metrics


# The closed form of a Gaussian q, for the methods that step in place.


def parts(
    target: Target, value: Tensor, square: Tensor, log_scales: Tensor, others: Tensor | None, volume: Tensor | None
) -> dict[str, Tensor | float]:
    """The bound and its parts, from sum_i lambda_i E_q[(w - m0)^2] and sum_i log s_i (or half the log determinant).

    One member on the CPU is counted in plain numbers, which cost a tenth of tensors.
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
