"""Ensembles: several fits of one method from starts of their own, as one posterior with equal weights.

    q(w) = (1/M) sum_m q_m(w)

With `MAP()` it is a deep ensemble (Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation
using Deep Ensembles"); any other method gives a mixture of what it finds around several modes (Wilson and Izmailov
2020). Members are one batch dimension of the method's State, so that those of a small network cost little more than
one; members of a method that looks at what another has found (as Laplace does) are fitted one beside the other.

`anchored` makes the members of MAP draws from a posterior: each has a prior that is centred at a draw a_m from the
prior, and targets with noise of their own,

    minimise  -log p(y + s e_m | w) - log p(w - a_m),    e_m ~ N(0, 1), a_m ~ p(w)

(Pearce et al. 2020, "Uncertainty in Neural Networks: Approximately Bayesian Ensembling"; with the noise on the targets,
as Osband et al. 2018 have it, "Randomized Prior Functions for Deep Reinforcement Learning"). For a model that is linear
in its weights, with Gaussian noise, each member is an exact and independent draw from the posterior. Labels have no
noise to add; there only the prior is moved.

With a process group of `torch.distributed` each process trains its share of the members (see `priory.distributed`).
Cost of a step: one step of the method for all members together, or one for each; memory grows with M P.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from priory.distributed import rank, world
from priory.errors import InputError, require, whole
from priory.likelihoods import Gaussian
from priory.methods.base import After, Info, Method, Options, Plan
from priory.methods.map import MAP
from priory.model import Model
from priory.posteriors import Draws, Mixture, Posterior

if TYPE_CHECKING:
    from priory.data import Batch, Data
    from priory.target import Target


@dataclass
class State:
    """The members as one State with a leading dimension, or a State each; what their prior and targets are moved by."""

    together: Any
    apart: list[Any]
    anchors: Tensor | None = field(metadata={"fixed": True})  # (M, P)
    noise: Tensor | None = field(metadata={"fixed": True})  # (M, N, *event), standard normal


@dataclass(frozen=True)
class Ensemble(Options):
    """`size` fits of a method, each from its own start.

    `method` is `MAP()` unless given. The first member doesn't begin at the network's own weights: all are drawn anew by
    the layers' `reset_parameters`. The method's own `start` is fitted once a member.

    >>> Ensemble(MAP(), size=0)
    Traceback (most recent call last):
    ...
    priory.errors.InputError: The 'size' of Ensemble must be a whole number from 1. Got 0 instead.
    """

    method: Any = None
    size: int = 8
    anchored: bool = False

    reads: ClassVar[Literal["batch", "pass"]] = "batch"

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", MAP())
        method: Any = self.method
        got = f"the class {method.__name__}: write {method.__name__}()" if isinstance(method, type) else repr(method)
        ok = isinstance(method, Method) and not isinstance(method, (type, Ensemble))
        require(ok, "method", "Ensemble", "be a method such as MAP()", got)
        ok = not hasattr(method, "chains")
        require(ok, "method", "Ensemble", "be one that doesn't sample: a sampler has chains of its own", got)
        require(whole(self.size, 1), "size", "Ensemble", "be a whole number from 1", repr(self.size))
        require(isinstance(self.anchored, bool), "anchored", "Ensemble", "be True or False", repr(self.anchored))
        ok = not self.anchored or isinstance(method, MAP)
        require(ok, "anchored", "Ensemble", "be False unless the method is MAP", repr(method))
        object.__setattr__(self, "reads", method.reads)

    @property
    def start(self) -> Any:
        """The method's own start, once a member."""
        start = self.method.start
        return Ensemble(start, self.size) if isinstance(start, Method) else start

    @property
    def inner(self) -> Any:
        """Whose steps these are."""
        return self.method

    def default_start(self, model: Any) -> Any:
        """What the method looks at, once a member."""
        start = self.method.default_start(model) if isinstance(self.method, After) else None
        return Ensemble(start, self.size) if isinstance(start, Method) else start

    def length(self, data: Data) -> int:
        return self.method.length(data)

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        if not self.anchored:
            return self.method.plan(target, data, steps, seed)
        check_anchored(target, data)
        plan = self.method.plan(target, data.numbered(), steps, seed)
        return dataclasses.replace(plan, held=None if plan.held is None else plan.held.unnumbered())

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> State:
        size = share(self.size)
        if self.anchored:
            plan = dataclasses.replace(plan, data=plan.data.unnumbered())
        method: Any = self.method
        if not (self.anchored or isinstance(start, Mixture) or isinstance(method, After)):
            inner = method.init(target, plan, generator, torch.Size([*shape, size]), start)
            return State(inner, [], None, None)
        require(shape == (), "shape", "Ensemble", "be () for members that are fitted apart", tuple(shape))
        anchors = noise = None
        if self.anchored:
            anchors = drawn_from_prior(target, size, generator)
            noise = noise_of_targets(target, plan.data, size, generator)
        states, first = [], size * rank()
        for m in range(size):
            own = start.members[(first + m) % len(start.members)] if isinstance(start, Mixture) else start
            states.append(self._begun(target, plan, generator, own))
        return State(None, states, anchors, noise)

    def _begun(self, target: Target, plan: Plan, generator: torch.Generator, start: Posterior | None) -> Any:
        """The State of one member: where its start is, or at fresh weights."""
        if start is None:
            start = Draws(target, target.start(plan.data, torch.Size([1]), generator))
        return self.method.init(target, plan, generator, torch.Size(), start)

    def step(self, target: Target, state: State, batch: Any, generator: torch.Generator) -> tuple[State, Info]:
        if state.together is not None:
            state.together, info = self.method.step(target, state.together, batch, generator)
            return state, dataclasses.replace(info, metrics={n: over_members(v) for n, v in info.metrics.items()})
        infos = []
        for m, own in enumerate(state.apart):
            believed, rows = (target, batch) if state.anchors is None else anchored(target, state, m, batch)
            state.apart[m], info = self.method.step(believed, own, rows, generator)
            infos.append(info)
        metrics: dict[str, Tensor | float] = {}
        for name in infos[0].metrics:
            metrics[name] = torch.stack([torch.as_tensor(info.metrics[name]) for info in infos]).mean(0)
        return state, Info(metrics, done=all(info.done for info in infos))

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Mixture:
        states = state.apart
        if state.together is not None:
            states = [member_of(state.together, m) for m in range(share(self.size))]
        return Mixture([self.method.posterior(target, own) for own in states])


def share(size: int) -> int:
    """How many of the members this process trains."""
    require(size % world() == 0, "size", "Ensemble", f"be a multiple of the {world()} processes", size)
    return size // world()


def over_members(value: Tensor | float) -> Tensor | float:
    """The mean over the last of the leading dimensions, which is that of members."""
    return value.mean(-1) if isinstance(value, Tensor) and value.ndim > 0 else value


def member_of(state: Any, m: int, lead: int = 0) -> Any:
    """Member m of a State with one leading dimension; what has none is everybody's."""
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        changed = {
            f.name: member_of(getattr(state, f.name), m, f.metadata.get("lead", lead))
            for f in dataclasses.fields(state)
            if not (f.metadata.get("fixed") or f.metadata.get("scratch"))
        }
        return dataclasses.replace(state, **changed)
    if isinstance(state, dict):
        return {key: member_of(value, m, lead) for key, value in state.items()}
    if isinstance(state, (tuple, list)):
        return type(state)(member_of(value, m, lead) for value in state)
    return state.select(lead, m) if isinstance(state, Tensor) and state.ndim > lead else state


# Anchored members.


def check_anchored(target: Target, data: Data) -> None:
    """Refuse what an anchored ensemble can't be of."""
    model = target.model
    if not isinstance(model, Model):
        raise InputError("The 'anchored' of Ensemble needs a Model: a Density has its prior inside.")
    weights = model.prior.precision[..., : model.network.size]
    gaussian = bool((weights > 0).all()) and not model.prior.hierarchical
    require(gaussian, "anchored", "Ensemble", "have a Gaussian prior over every weight", repr(model))
    require(data.tensors is not None, "anchored", "Ensemble", "have its data in memory", "a Dataset or a DataLoader")


def drawn_from_prior(target: Target, size: int, generator: torch.Generator) -> Tensor:
    """Centres for the members' priors, (M, P): draws from it for the weights, its own centre for all else."""
    model = target.model
    assert isinstance(model, Model)
    prior, weights = model.prior, slice(0, model.network.size)
    anchors = prior.loc.expand(size, -1).clone()
    z = torch.randn(anchors[:, weights].shape, generator=generator, dtype=anchors.dtype, device=anchors.device)
    wider = target.temperature / target.prior_weight  # T where the whole posterior is tempered
    anchors[:, weights] += z * (wider / prior.precision[..., weights]).sqrt()
    return anchors


def noise_of_targets(target: Target, data: Data, size: int, generator: torch.Generator) -> Tensor | None:
    """Standard normal numbers for each member and row, (M, N, *event), where the noise is Gaussian; else None."""
    model = target.model
    assert isinstance(model, Model)
    assert data.tensors is not None
    if not isinstance(model.likelihood, Gaussian):
        return None
    y = data.tensors[-1]
    return torch.randn((size, *y.shape), generator=generator, dtype=y.dtype, device=y.device)


def anchored(target: Target, state: State, m: int, batch: Batch) -> tuple[Target, Batch]:
    """The target and the rows as member m sees them."""
    model = copy.copy(target.model)
    assert isinstance(model, Model)
    assert state.anchors is not None
    model.prior = copy.copy(model.prior)
    model.prior.loc = state.anchors[m]
    *inputs, y, rows = batch
    if state.noise is not None:
        y = y + target.temperature**0.5 * noise_at(model, state.apart[m], tuple(inputs), y) * state.noise[m, rows]
    return dataclasses.replace(target, model=model), (*inputs, y)


def noise_at(model: Model, state: Any, inputs: Batch, y: Tensor) -> Tensor:
    """The standard deviation of the targets as a member's vector has it, for each row."""
    w = state.w[None]
    with torch.no_grad():
        varies = model.likelihood.slope is None  # it comes from the network
        outputs = model.outputs(w, inputs, state.buffers, y.shape[1:]) if varies else y[None]
        return model.likelihood.variance(outputs, model.learnt_at(w))[0].sqrt()
