"""Laplace's method: a Gaussian around the mode, as wide as the curvature there lets it be (MacKay 1992; Daxberger et
al. 2021, "Laplace Redux").

    p(w | D) ~ N(w*, Q^-1),    Q = (H + prior_weight Lambda) / T        (T = 1: the posterior itself)

H is the curvature of -log p(D|w), a sum over all the data, and Lambda minus the second derivative of the log prior.

Of a network w* is where MAP, or a training of the person's own, ended, H the generalised Gauss-Newton matrix in one of
the structures of `priory.curvature`, and Lambda a diagonal. Cost: one pass over the data with a backward pass for each
output, and what the structure adds; `Laplace.plan` says how much before anything is allocated.

Of a `Density` w* is found here, by Newton's method with a line search, in unconstrained coordinates with the
log-determinant of their map: this is the mode of the density that the Gaussian approximates, whereas MAP gives the mode
in the person's own parameters. There Q is minus the Hessian of the whole log joint, prior and log-determinant included.
Cost of a step: P backward passes over the data and O(P^3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent

from priory.core.data import Data, split_rows, weighted_sum
from priory.core.errors import InputError, require, warn, whole
from priory.core.linalg import eigh
from priory.core.streams import stream
from priory.curvature import KINDS, STRUCTURES, Curvature, Gaussian, Pass, Selection, select
from priory.curvature.budget import Budget, budget
from priory.curvature.diagonal import Diagonal
from priory.curvature.evidence import log_evidence, prior_precision, prior_second_derivative, tune
from priory.curvature.full import Full
from priory.methods.base import Info, Method, Options, Plan, Traits, centre_of, factors_of
from priory.methods.point.map import MAP
from priory.models.base import BaseModel, has_network
from priory.models.model import Model
from priory.models.target import Target
from priory.network.skeleton import MEMORY_LIMIT
from priory.penalties.as_prior.proximal import proximal_blocks
from priory.posteriors import Posterior
from priory.posteriors.laplace import LaplacePosterior
from priory.posteriors.status import CONVERGED, Status, of_cap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from priory.core.data import Batch
    from priory.core.flat import Block


LIMIT = 4 << 30  # bytes that a curvature may take
NEWTON_STEPS = 200
BLOCK = 1024  # rows read at a time
ALL_ROWS = 1 << 29  # rows x weights, above which some rows say whether a point is a mode
SOME_ROWS = 128
METRICS = ("loss", "nll", "log_prior", "gradient")
FAR = 1.0  # standard deviations a coordinate, as far as a draw of the Gaussian lies from its centre: beyond, no mode
NEAR = 0.1  # the same, below which Newton's method has arrived whatever its last step was
EDGE = 20.0  # unconstrained coordinates from which a bounded parameter is at its bound


@dataclass(frozen=True)
class Subnetwork:
    """The `size` weights that are least certain: those of largest marginal variance under a diagonal Laplace.

    (Daxberger et al. 2021, "Bayesian Deep Learning via Subnetwork Inference".)

    >>> Subnetwork(0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'size' argument of Subnetwork must be an integer >= 1, got 0.
    """

    size: int

    def __post_init__(self) -> None:
        require(whole(self.size, 1), "size", "Subnetwork", "be an integer >= 1", repr(self.size))


@dataclass
class Climb:
    """A Density's vector on its way to the mode, with the log joint, its gradient and its Hessian there."""

    w: Tensor  # (*B, P)
    log_likelihood: Tensor  # (*B,)
    log_prior: Tensor  # (*B,)
    gradient: Tensor  # (*B, P), of the tempered log joint
    hessian: Tensor  # (*B, P, P)
    there: Tensor  # (*B,), whether the mode is reached


@dataclass
class Expansion:
    """A network's vector and its curvature; the pass over the data is `init`'s, so that a step has nothing to keep."""

    w: Tensor  # (*B, P)
    buffers: dict[str, Tensor]
    around: list[Around | None] = field(metadata={"fixed": True})  # a member each; None for one that is not finite
    data: Data = field(metadata={"fixed": True})


@dataclass(frozen=True)
class Around:
    """What is known around one vector: the Gaussian there, the parts that it is made of, and how good a mode it is."""

    curvature: Curvature
    precision: Tensor  # (p,), of the prior, with its temperature
    scale: float  # of the curvature: 1/T, and what a tuned noise makes of it
    gaussian: Gaussian
    slope: Slope  # before a prior or a noise was tuned
    log_prior: float
    notes: tuple[str, ...]
    factors: dict[str, Tensor]  # what the prior's precisions were multiplied by
    log_evidence: float | None = None  # where it was worked out on the way

    def told(self, target: Target) -> dict[str, float]:
        """What a step reports."""
        nll = -self.slope.log_likelihood
        values = (nll - target.prior_weight * self.log_prior, nll, self.log_prior, self.slope.gradient)
        return dict(zip(METRICS, values, strict=True))


@dataclass(frozen=True)
class Laplace(Options):
    """A Gaussian around the mode, from the curvature there.

    `structure` is "kron", "diag", "full" or "lowrank": unless given, "kron" for a network, and "full" for a Density and
    for chosen coordinates. `over` is "all", "last", names or patterns of names, a `Subnetwork`, or a LongTensor of
    coordinates. `at` is a posterior whose point is the mode, the method that finds it (MAP unless given, for a
    network), or "network" for a network that is trained already: its weights are the mode, and a noise that is learnt
    is set by the evidence. `curvature` is "ggn", "fisher" (with `samples` labels a datum drawn from the model),
    "empirical" or "hessian". `tune` lets the evidence choose the prior's precisions, by one factor ("scalar"), one a
    layer or one a weight ("parameter"), and a learnt noise. `predictive` says what `predict` goes through unless told:
    the "linear" network or the "network". `rank` is that of "lowrank", `sharing` says how "kron" treats weights that
    act at several positions, and `limit` is how many bytes the curvature may take.

    >>> Laplace(structure="round")
    Traceback (most recent call last):
    ...
    priory.InputError: The 'structure' argument of Laplace must be among diag, full, kron, lowrank, got 'round'.
    """

    structure: str | None = None
    over: Any = "all"
    at: Any = None
    curvature: Literal["ggn", "fisher", "empirical", "hessian"] = "ggn"
    samples: int = 1
    tune: Literal["scalar", "layer", "parameter"] | None = None
    predictive: Literal["linear", "network"] = "linear"
    rank: int | None = None
    sharing: Literal["expand", "reduce"] = "expand"
    limit: int = LIMIT

    def __post_init__(self) -> None:
        known = sorted(STRUCTURES)
        ok = self.structure is None or self.structure in known
        require(ok, "structure", "Laplace", f"be among {', '.join(known)}", repr(self.structure))
        names = isinstance(self.over, (list, tuple)) and all(isinstance(name, str) for name in self.over)
        names = names and len(self.over) > 0
        ok = isinstance(self.over, (Subnetwork, Tensor)) or names or self.over in ("all", "last")
        require(ok, "over", "Laplace", "be 'all', 'last', names, a Subnetwork or a LongTensor", repr(self.over))
        chosen = isinstance(self.over, Subnetwork)
        ok = not chosen or self.structure in (None, "full", "diag", "lowrank")
        require(ok, "structure", "Laplace", "be 'full', 'lowrank' or 'diag' over a Subnetwork", repr(self.structure))
        ok = self.at is None or (isinstance(self.at, (Method, Posterior)) and not isinstance(self.at, type))
        ok = ok or (isinstance(self.at, str) and self.at == "network")
        require(ok, "at", "Laplace", "be 'network', a posterior or a method such as MAP()", repr(self.at))
        require(self.curvature in KINDS, "curvature", "Laplace", f"be among {', '.join(KINDS)}", repr(self.curvature))
        require(whole(self.samples, 1), "samples", "Laplace", "be an integer >= 1", repr(self.samples))
        ok = self.tune in (None, "scalar", "layer", "parameter")
        require(ok, "tune", "Laplace", "be None, 'scalar', 'layer' or 'parameter'", repr(self.tune))
        ok = self.predictive in ("linear", "network")
        require(ok, "predictive", "Laplace", "be 'linear' or 'network'", repr(self.predictive))
        ok = self.rank is None or (whole(self.rank, 1) and self.structure == "lowrank")
        require(ok, "rank", "Laplace", "be an integer >= 1, with structure='lowrank'", repr(self.rank))
        ok = self.sharing in ("expand", "reduce")
        require(ok, "sharing", "Laplace", "be 'expand' or 'reduce'", repr(self.sharing))
        require(whole(self.limit, 1), "limit", "Laplace", "be an integer of bytes", repr(self.limit))

    @property
    def traits(self) -> Traits:
        return Traits(reads="pass", follows=True, fixed_start=isinstance(self.at, str))

    @property
    def start(self) -> Any:
        """A posterior whose point is the mode, or the method that finds it, if one was named."""
        return None if isinstance(self.at, str) else self.at

    def default_start(self, model: BaseModel) -> MAP | None:
        """What finds the mode where nothing was named: MAP of a network; a density's is found here."""
        return MAP() if has_network(model) and self.at is None else None

    def length(self, data: Data) -> int:
        return NEWTON_STEPS

    @overload
    def plan(self, target: BaseModel, data: Any) -> Budget: ...
    @overload
    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan: ...
    def plan(self, target: Any, data: Any, steps: int | None = None, seed: int = 0) -> Budget | Plan:
        """What the method needs, and which rows each step reads.

        A person calls it with a model and data, and gets a `Budget` to print: memory and time of each structure, from
        shapes alone. The driver calls it with a target, and is refused here what exceeds the limit.
        """
        if isinstance(target, BaseModel):
            target, rows = target.bind(data)
            if has_network(target):
                require(rows.num_data is not None, "data", "plan", "be inputs and targets, such as (X, y)", None)
                target.check(rows.some(128))
            return self._budget(target, rows)
        require(isinstance(target, Target), "target", "plan", "be a Model or a Density", type(target).__name__)
        assert steps is not None
        if isinstance(self.at, Posterior):
            same = self.at.model.layout.signature() == target.model.layout.signature()
            require(same, "at", "Laplace", "be a posterior of the same model", repr(self.at))
        self._budget(target.model, data).refuse()
        return Plan(data, steps)

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> Climb | Expansion:
        model = target.model
        if not has_network(model):
            return self._foot(target, plan, generator, shape, start)
        begun = target.start(plan.data, shape, generator) if start is None else centre_of(start, "Laplace")
        w = begun.expand(*shape, -1).clone()
        buffers = target.buffers(shape, start)
        check_batch_norm(model, buffers)
        target = target.scaled(factors_of(start))  # the prior that its mode was found under
        around: list[Around | None] = []
        for i, v in enumerate(w.view(-1, target.size)):
            own = model.member(buffers, i)
            around.append(self._expand(target, v, plan.data, own, generator) if bool(v.isfinite().all()) else None)
        return Expansion(w, buffers, around, plan.data)

    def step(
        self, target: Target, state: Climb | Expansion, batch: Data, generator: torch.Generator
    ) -> tuple[Climb | Expansion, Info]:
        if isinstance(state, Climb):
            return self._climb(target, state, batch)
        shape = state.w.shape[:-1]
        told = [dict.fromkeys(METRICS, math.nan) if one is None else one.told(target) for one in state.around]
        metrics = {name: state.w.new_tensor([one[name] for one in told]).reshape(shape) for name in METRICS}
        return state, Info({**metrics}, unchecked=("gradient",), done=True)

    def posterior(self, target: Target, state: Climb | Expansion, draws: Tensor | None = None) -> LaplacePosterior:
        require(state.w.ndim == 1, "state", "Laplace", "be of one member", f"the shape {tuple(state.w.shape[:-1])}")
        if isinstance(state, Climb):
            return self._at_the_top(target, state)
        around = state.around[0]
        finite = around is not None
        require(finite, "weights", "Laplace", "be finite at the mode", "NaN or infinity")
        assert around is not None
        around.slope.warn(self._advice(target.model))
        posterior = LaplacePosterior(
            target.scaled(around.factors),
            state.w,
            around.curvature,
            around.precision,
            around.scale,
            around.gaussian,
            around.log_evidence,
            state.buffers,
            self.predictive,
            around.notes,
        )
        posterior.data = state.data
        posterior.know(around.slope.status(self._advice(target.model)), warned=True)
        return posterior

    def _advice(self, model: BaseModel) -> str:
        """What to do about a point that is no mode."""
        if not has_network(model):
            return "give the fit more steps"
        if isinstance(self.at, str):
            return "name the prior that the network was trained under, train it further, or leave 'at' out: MAP goes on"
        return "give the fit that found it more epochs"

    def _budget(self, model: BaseModel, data: Data) -> Budget:
        """What this needs; options that don't go with the model are refused here, before anything is computed."""
        structure = self.structure_for(model)
        ok = self.tune != "parameter" or structure in ("full", "diag")
        require(ok, "structure", "Laplace", "be 'diag' or 'full' for tune='parameter'", repr(structure))
        if not has_network(model):
            ok = structure in ("full", "diag")
            require(ok, "structure", "Laplace", "be 'full' or 'diag' for a Density", repr(structure))
            ok = not isinstance(self.over, Subnetwork)
            require(ok, "over", "Laplace", "be 'all' or names for a Density", repr(self.over))
            require(self.tune is None, "tune", "Laplace", "be None for a Density, whose prior is inside", self.tune)
            select(model, self.over)
            require(not isinstance(self.at, str), "at", "Laplace", "be None, a method or a posterior", repr(self.at))
        over = self.over
        if isinstance(over, Subnetwork):
            most = select(model).size
            require(over.size <= most, "size", "Subnetwork", f"be at most {most}", over.size)
            over = over.size
        tuned = has_network(model) and self._tunes(model)
        return budget(model, data, structure, over, self.curvature, self.samples, self.rank, self.limit, tuned)

    # A network: one pass over the data.

    def structure_for(self, model: BaseModel) -> str:
        """The structure that was named, or the one that fits the model."""
        if self.structure is not None:
            return self.structure
        coordinates = isinstance(self.over, (Subnetwork, Tensor))
        return "kron" if has_network(model) and not coordinates else "full"

    def _tunes(self, model: Model) -> bool:
        """Whether the evidence chooses a prior or a noise."""
        learnt = model.learnt.start < model.learnt.stop
        return self.tune is not None or (learnt and isinstance(self.at, str))

    def _expand(
        self, target: Target, w: Tensor, data: Data, buffers: Mapping[str, Tensor], generator: torch.Generator
    ) -> Around:
        """What is known around one vector, in which a noise that the evidence sets is overwritten."""
        model = target.network_model("Laplace")
        selection = self._select(target, w, data, buffers, generator)
        check_prior(target, w, selection)
        of = lambda v: self._curvature(self.structure_for(model), target, v, data, selection, buffers, generator)  # noqa: E731
        curvature, scale = of(w), target.likelihood_power
        precision = target.prior_power * prior_precision(target, w)[selection.places]
        gaussian = curvature.gaussian(precision, scale)
        slope = Slope.of(target, w, data, buffers, gaussian, selection.places)
        notes = (*curvature.notes(), *notes_on_prior(target, selection))
        log_prior = float(target.log_prior(w))
        found = Around(curvature, precision, scale, gaussian, slope, log_prior, notes, target.prior.factors)
        if not self._tunes(model):
            return found
        tuned = tune(target, w, curvature, data, buffers, self.tune, kind=self.curvature, again=of)
        w.copy_(tuned.w)
        # made anew, as a file makes it: a basis that was kept from another prior may differ in its signs
        curvature = type(curvature).of_tensors(selection, tuned.curvature.tensors(), **tuned.curvature.own())
        return Around(
            curvature,
            tuned.precision,
            tuned.scale,
            curvature.gaussian(tuned.precision, tuned.scale),
            slope,
            float(tuned.target.log_prior(w)),
            (*notes, *tuned.notes),
            tuned.target.prior.factors,
            tuned.log_evidence,
        )

    def _select(
        self, target: Target, w: Tensor, data: Data, buffers: Mapping[str, Tensor], generator: torch.Generator
    ) -> Selection:
        """The coordinates that `over` means at w."""
        model = target.model
        if not isinstance(self.over, Subnetwork):
            return select(model, self.over, data.some(2)[:-1])
        everything, size = select(model), self.over.size
        rough = self._curvature("diag", target, w, data, everything, buffers, generator).diagonal()
        precision = rough + target.prior_weight * prior_precision(target, w)[everything.places].to(rough)
        return select(model, everything.places[torch.topk(-precision, size).indices])

    def _curvature(
        self,
        structure: str,
        target: Target,
        w: Tensor,
        data: Data,
        selection: Selection,
        buffers: Mapping[str, Tensor],
        generator: torch.Generator,
    ) -> Curvature:
        options: dict[str, Any] = {"sharing": self.sharing} if structure == "kron" else {}
        if structure == "lowrank" and self.rank is not None:
            options["rank"] = self.rank
        given = Pass(target, w, data, selection, self.curvature, self.samples, generator, buffers)
        return STRUCTURES[structure].of(given, **options)

    # A density: Newton's method to the mode.

    def _foot(
        self, target: Target, plan: Plan, generator: torch.Generator, shape: torch.Size, start: Posterior | None
    ) -> Climb:
        """Where the climb begins."""
        w = target.start(plan.data, shape, generator, start)
        found = [derivatives(target, v, plan.data) for v in w.reshape(-1, target.size)]
        parts = [torch.stack(part).reshape((*shape, *part[0].shape)) for part in zip(*found, strict=True)]
        return Climb(w, *parts, there=torch.zeros(shape, dtype=torch.bool, device=w.device))

    def _climb(self, target: Target, state: Climb, data: Data) -> tuple[Climb, Info]:
        """One Newton step of every member that is not there yet."""
        size = target.size
        members = zip(
            state.w.view(-1, size),
            state.log_likelihood.view(-1),
            state.log_prior.view(-1),
            state.gradient.view(-1, size),
            state.hessian.view(-1, size, size),
            state.there.view(-1),
            strict=True,
        )
        for w, log_likelihood, log_prior, gradient, hessian, there in members:
            if bool(there) or not bool(hessian.isfinite().all()):
                continue
            value = target.log_joint(w, log_likelihood, log_prior)
            move, last = newton_move(lambda v: log_joint(target, v, data), w, value, gradient, hessian)
            w += move
            there |= last
            found = derivatives(target, w, data)
            for old, new in zip((log_likelihood, log_prior, gradient, hessian), found, strict=True):
                old.copy_(new)
        joint = target.log_joint(state.w, state.log_likelihood, state.log_prior)
        metrics = {
            "loss": target.loss(joint),
            "nll": -state.log_likelihood.clone(),
            "log_prior": state.log_prior.clone(),
        }
        return state, Info({**metrics}, done=bool((state.there | ~state.w.isfinite().all(-1)).all()))

    def _at_the_top(self, target: Target, state: Climb) -> LaplacePosterior:
        """The Gaussian of a density: its curvature is that of the whole tempered log joint, prior included."""
        selection = select(target.model, self.over)
        bend = -state.hessian[selection.places][:, selection.places]
        diagonal = self.structure_for(target.model) == "diag"
        curvature = Diagonal(selection, bend.diagonal()) if diagonal else Full(selection, bend.double(), "hessian")
        none = torch.zeros_like(state.w[selection.places])
        gaussian = curvature.gaussian(none)
        evidence = float(log_evidence(target, state.w, gaussian, state.log_likelihood, selection))
        gradient = state.gradient[selection.places]
        distance = math.sqrt(max(0.0, float(gradient @ gaussian.solve(gradient))) / len(gradient))
        slope = Slope(float(state.log_likelihood), float(gradient.norm()), distance)
        slope.warn(self._advice(target.model))
        posterior = LaplacePosterior(target, state.w, curvature, none, 1.0, gaussian, evidence)
        posterior.know(slope.status(self._advice(target.model)), warned=True)
        posterior.know(status_of_mode(target, state, there=bool(state.there) or distance < NEAR))
        return posterior


# The mode of a density.


def status_of_mode(target: Target, state: Climb, there: bool) -> Status:
    """Whether Newton's steps ended at a mode inside the support, and not on the way, at a saddle or at an edge."""
    if not there:
        return of_cap(False, None, "Newton's method")
    bend = eigh(-state.hessian).values
    if float(bend[0]) < -math.sqrt(torch.finfo(bend.dtype).eps) * float(bend.abs().max()):
        return Status("doubtful", "The log joint curves upward at the point found, a saddle: try another start.")
    for block in target.model.layout.constrained:
        if float(state.w[block.start : block.stop].abs().max()) > EDGE:
            where = f"The mode of '{block.name}' lies at the edge of its support, where no Gaussian fits it"
            return Status("doubtful", f"{where}: give it a prior that falls off there, or use NUTS.")
    return CONVERGED


def log_joint(target: Target, w: Tensor, data: Data) -> Tensor:
    """The tempered log joint over every row at one vector, ()."""
    with torch.no_grad():
        return target.log_joint(w, target.log_likelihood(w, data), target.log_prior(w))


def derivatives(target: Target, w: Tensor, data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log p(D|w), log p(w), and the gradient and Hessian of the tempered log joint, over every row at one vector."""
    a, b = target.likelihood_power, target.prior_power
    layout, total, seen = target.model.layout, None, 0
    for batch in data.blocks(BLOCK):
        found = second_order(lambda u, rows=batch: target.rows_log_likelihood(u, rows), w)
        total = found if total is None else tuple(x + y for x, y in zip(total, found, strict=True))
        seen += len(batch[0]) if batch else 0
    assert total is not None
    log_likelihood, gradient, hessian = (target.scale(seen) * part for part in total)
    log_prior, prior_gradient, prior_hessian = second_order(target.log_prior, w)
    gradient, hessian = a * gradient + b * prior_gradient, a * hessian + b * prior_hessian
    if b != 1:
        _, volume_gradient, volume_hessian = second_order(layout.log_det, w)
        gradient, hessian = gradient + (1 - b) * volume_gradient, hessian + (1 - b) * volume_hessian
    return log_likelihood, log_prior, gradient, hessian


def second_order(function: Callable[[Tensor], Tensor], w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A function's value, gradient (P,) and Hessian (P, P) at one vector, a backward pass a row of the Hessian."""
    leaf = w.detach().requires_grad_()
    hessian = w.new_zeros(len(w), len(w))
    with torch.enable_grad():
        value = function(leaf)
        if not value.requires_grad:  # a density with everything in its likelihood
            return value, torch.zeros_like(w), hessian
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        if gradient.requires_grad:
            for i, slope in enumerate(gradient):
                (row,) = torch.autograd.grad(slope, leaf, retain_graph=True, allow_unused=True)
                if row is not None:
                    hessian[i] = row
    return value.detach(), gradient.detach(), 0.5 * (hessian + hessian.T)


def newton_move(
    value_at: Callable[[Tensor], Tensor], w: Tensor, value: Tensor, gradient: Tensor, hessian: Tensor
) -> tuple[Tensor, bool]:
    """The step uphill from w, (P,), and whether it is the last.

    Newton's, with the curvature's absolute values: a direction in which the density curves upward is climbed, not
    descended (Dauphin et al. 2014). On a ridge without a slope it is the direction that curves upward most.
    """
    eps = torch.finfo(w.dtype).eps
    bend, basis = eigh(-hessian)
    floor = math.sqrt(eps) * float(bend.abs().max()) or 1.0
    slope = basis.T @ gradient
    move = basis @ (slope / bend.abs().clamp_min(floor))
    promise = float(gradient @ move)  # twice the nats that the step should gain
    if promise < eps:
        if float(bend[0]) >= -floor:
            return move, True
        move = basis[:, 0] * float(bend[0].abs()) ** -0.5
        promise = 0.0
    elif promise < math.sqrt(eps):
        return move, False  # values are equal to their last digits here, and no line search can tell them apart
    for _ in range(60):
        if bool(value_at(w + move) >= value + 1e-4 * promise):
            return move, False
        move, promise = 0.5 * move, 0.5 * promise
    return torch.zeros_like(w), True


# A network at its mode.


@dataclass(frozen=True)
class Slope:
    """How steep the log joint is at w, and how far that says the mode is."""

    log_likelihood: float  # log p(D|w), estimated where the rows are too many
    gradient: float  # the norm of the tempered log joint's, over the selected coordinates
    distance: float  # to the mode, in standard deviations: sqrt(g' Q^-1 g / p); 0 where noise explains it

    @classmethod
    def of(
        cls, target: Target, w: Tensor, data: Data, buffers: Mapping[str, Tensor], gaussian: Gaussian, at: Tensor
    ) -> Slope:
        """From every row, or from two sets of random rows, g_1 and g_2.

        The noise of one set is independent of the other's, so that g_1' Q^-1 g_2 has the mean g' Q^-1 g. With n rows a
        set its standard error is about sqrt(p) N / (n T), as the gradients' covariance is H.
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
        """Whether the point is near enough to a mode, and what to do if it is not."""
        if self.distance <= FAR:
            return CONVERGED
        return Status(
            "not_converged",
            f"The gradient of the log joint has the norm {self.gradient:.3g} where Laplace expects a mode, which "
            f"lies about {self.distance:.2g} standard deviations away: {advice}.",
        )

    def warn(self, advice: str) -> None:
        """Say that a point is no mode, and what to do."""
        status = self.status(advice)
        if status.reason:
            warn(status.reason)


def sets_of_rows(data: Data, size: int) -> list[Iterable[Batch]]:
    """All rows, or two sets of some at random where a network of so many weights would take long for all."""
    assert data.num_data is not None
    if data.num_data * size <= ALL_ROWS:
        return [data.blocks(BLOCK)]
    if data.tensors is not None:
        order = torch.randperm(data.num_data, generator=stream(0, "mode"))[: 2 * SOME_ROWS]
        return [[data.take(rows)] for rows in order.split(SOME_ROWS)]
    sets: tuple[list[Batch], list[Batch]] = ([], [])
    for index, batch in enumerate(data.batches(0, 0)):
        sets[index % 2].append(batch)
        if index % 2 and sum(len(b[0]) for b in sets[1]) >= SOME_ROWS:
            break
    return [rows for rows in sets if rows]


def log_likelihood_and_grad(
    target: Target, w: Tensor, rows: Iterable[Batch], buffers: Mapping[str, Tensor]
) -> tuple[float, Tensor, int]:
    """log p of some rows, its gradient (P,), and their number; with the network in evaluation mode, as it predicts."""
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


def check_batch_norm(model: Model, buffers: Mapping[str, Tensor]) -> None:
    """Batch normalisation runs on its running statistics: say where they were never updated, refuse where none are."""
    for name, module in model.network.skeleton.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.running_mean is None:
            raise InputError(
                f"The batch normalisation '{name}' must keep running statistics for Laplace, or data would depend on "
                "each other, got track_running_stats=False."
            )
        key = f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        count = buffers[key] if key in buffers else model.network.given[key]
        if not bool(count.all()):
            warn(
                f"The batch normalisation '{name}' has never updated the running statistics that Laplace runs it on: "
                "train the network in training mode first."
            )


def others_of(target: Target, selection: Selection) -> list[tuple[Block, Distribution]]:
    """The selected parameters whose prior is not Gaussian."""
    return [(b, d) for b, d in target.prior.others if b.name in selection.names and isinstance(d, Distribution)]


def check_prior(target: Target, w: Tensor, selection: Selection) -> None:
    """Refuse a prior that is convex or straight at the mode: minus its second derivative is no precision."""
    others = others_of(target, selection)
    if not others:
        return
    free = torch.full_like(w, -math.inf)
    free[selection.places] = prior_second_derivative(target, w)[selection.places]
    for block, believed in others:
        at = block.start + int(free[block.start : block.stop].argmax())
        if float(free[at]) >= 0:
            raise InputError(
                f"The log prior of '{block.name}' must curve down at the mode, where minus its second derivative "
                f"stands for a precision, got {name_of(believed)} with {0 - float(free[at]):.3g} at the weight "
                f"{float(w[at]):.3g}: use a Normal prior."
            )
    chosen = torch.zeros_like(w, dtype=torch.bool)
    chosen[selection.places] = True
    meets = proximal_blocks(target.prior)
    held = sum(int((chosen & (w == 0))[block.start : block.stop].sum()) for block in meets)
    if held:
        warn(
            f"{held} weights lie on the corner of their prior at zero, where it has no second derivative: Laplace says "
            "nothing of the corner, and its evidence leaves it out."
        )


def notes_on_prior(target: Target, selection: Selection) -> list[str]:
    """What stands for the precision of priors that have none."""
    what = "minus the second derivative of its logarithm at the mode stands for a precision"
    return [f"{block.name}: its prior is {name_of(d)}, and {what}." for block, d in others_of(target, selection)]


def name_of(distribution: Distribution) -> str:
    """How a sentence calls a distribution."""
    base = distribution.base_dist if isinstance(distribution, Independent) else distribution
    return f"the distribution {type(base).__name__}"
