"""Ensembles: several fits of one method from starts of their own, as one posterior with equal weights.

    q(w) = (1/M) sum_m q_m(w)

With `MAP()` it is a deep ensemble (Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation
using Deep Ensembles"); any other method gives a mixture of what it finds around several modes (Wilson and Izmailov
2020). Members are one batch dimension of the method's State, so that those of a small network cost little more than
one; members of a method that looks at what another has found (as Laplace does) are fitted one beside the other.

`anchored` makes the members of MAP draws from a posterior: each has a prior that is centred at a draw a_m from the
prior, and targets with noise of their own,

    minimise  -log p(y + s e_m | f(x; w)) - log p(w - a_m),    e_m ~ N(0, 1), a_m ~ p(w)

(Pearce et al. 2020, "Uncertainty in Neural Networks: Approximately Bayesian Ensembling"; with the noise on the targets,
as Osband et al. 2018 have it, "Randomized Prior Functions for Deep Reinforcement Learning"). `anchored="function"` is
their own form, in which the draw is a function that stays beside the network, and not a place in its weights:

    minimise  -log p(y + s e_m | f(x; w) + f(x; a_m)) - log p(w)

For a model that is linear in its weights, with Gaussian noise, the two are the same with w + a_m for w, and each member
is, once it has converged, an exact and independent draw from the posterior. For other networks they differ: an anchor
pulls at weights, a prior function shapes what is predicted far from the data. Labels and counts have no noise to add;
there only the prior is moved. A noise that is learnt is that of the members' mean on held-out rows: what one member
misses by has the noise in it that was added to its targets, and a scale set by it would feed itself. So would one that
the network gives, which is refused.

With a process group of `torch.distributed` each process trains its share of the members (see
`priory.core.distributed`).
Cost of a step: one step of the method for all members together, or one for each; memory grows with M P.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from priory.core.distributed import rank, world
from priory.core.errors import require, whole
from priory.likelihoods import Gaussian
from priory.methods.base import Info, Method, Options, Plan, Traits
from priory.methods.point.map import MAP
from priory.models.target import Target
from priory.posteriors import Draws, Mixture, Posterior
from priory.posteriors.prior_function import PriorFunction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from priory.core.data import Batch, Data


@dataclass
class State:
    """The members as one State with a leading dimension, or a State each; what they see if they are anchored."""

    together: Any
    apart: list[Any]
    seen: Anchored | None = field(metadata={"fixed": True})


@dataclass(frozen=True)
class Ensemble(Options):
    """`size` fits of a method, each from its own start.

    `method` is `MAP()` unless given. The first member doesn't begin at the network's own weights: all are drawn anew by
    the layers' `reset_parameters`. The method's own `start` is fitted once a member. `anchored` is True for members
    whose priors have centres of their own, and "function" for randomised prior functions, whose posterior predicts and
    has no parameters; both need `MAP`, a Gaussian prior over every weight, rows in memory, and Gaussian noise that
    doesn't come from the network, or labels or counts.

    >>> Ensemble(MAP(), size=0)
    Traceback (most recent call last):
    ...
    priory.InputError: The 'size' argument of Ensemble must be an integer >= 1, got 0.
    """

    method: Any = None
    size: int = 8
    anchored: bool | Literal["function"] = False

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", MAP())
        method: Any = self.method
        got = f"the class {method.__name__}: write {method.__name__}()" if isinstance(method, type) else repr(method)
        ok = isinstance(method, Method) and not isinstance(method, type)
        require(ok, "method", "Ensemble", "be a method such as MAP()", got)
        require(not isinstance(method, Ensemble), "method", "Ensemble", "be that of one member, and no Ensemble", got)
        traits: Traits = method.traits
        ok = not traits.chains
        require(ok, "method", "Ensemble", "be one that doesn't sample: a sampler has chains of its own", got)
        ok = not traits.fixed_start
        require(ok, "method", "Ensemble", "find weights of its own for each member: at the network's all are one", got)
        begun = method.start
        ok = not (isinstance(begun, Posterior) and begun.point) or bool(self.anchored)
        must = "begin elsewhere for each member: those that begin at one point stay alike"
        require(ok, "method", "Ensemble", must, got)
        require(whole(self.size, 1), "size", "Ensemble", "be an integer >= 1", repr(self.size))
        ok = isinstance(self.anchored, bool) or self.anchored == "function"
        require(ok, "anchored", "Ensemble", "be True, False or 'function'", repr(self.anchored))
        ok = not self.anchored or traits.finds_mode
        require(ok, "anchored", "Ensemble", "be False unless the method is MAP", repr(method))
        ok = not self.anchored or not traits.sets_prior
        require(ok, "anchored", "Ensemble", "be False where the evidence sets the prior", repr(method))

    @property
    def traits(self) -> Traits:
        """Those of the method, with members that processes share."""
        return dataclasses.replace(self.method.traits, spread=True)

    @property
    def start(self) -> Any:
        """The method's own start, once a member."""
        start = self.method.start
        return Ensemble(start, self.size) if isinstance(start, Method) else start

    def default_start(self, model: Any) -> Any:
        """What the method looks at, once a member."""
        start = self.method.default_start(model)
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
        if self.anchored:
            return self._anchored(target, plan, generator, shape, start)
        method: Any = self.method
        size = share(self.size)
        if not (isinstance(start, Mixture) or method.traits.follows):
            return State(method.init(target, plan, generator, torch.Size([*shape, size]), start), [], None)
        require(shape == (), "shape", "Ensemble", "be () for members that are fitted apart", tuple(shape))
        states = [self._begun(target, plan, generator, own) for own in starts(start, size)]
        return State(None, states, None)

    def _anchored(
        self, target: Target, plan: Plan, generator: torch.Generator, shape: torch.Size, start: Posterior | None
    ) -> State:
        """The members together, and what they see."""
        require(shape == (), "shape", "Ensemble", "be () for anchored members", tuple(shape))
        size, rows = share(self.size), plan.data.unnumbered()
        anchors, noise = drawn_from_prior(target, size, generator), noise_of_targets(target, rows, size, generator)
        seen = Anchored.of(target, rows, anchors, noise, functions=self.anchored == "function")
        one = None if isinstance(start, Mixture) else start
        plan = dataclasses.replace(plan, data=rows)
        inner = self.method.init(target, plan, generator, torch.Size([size]), one)
        if isinstance(start, Mixture):
            for m, own in enumerate(starts(start, size)):
                assert own is not None
                inner.w[m] = own.draw(1, generator)[0]
                for name, b in own.buffers.items():
                    inner.buffers[name][m] = b
        return State(inner, [], seen)

    def _begun(self, target: Target, plan: Plan, generator: torch.Generator, start: Posterior | None) -> Any:
        """The State of one member: where its start is, or at fresh weights."""
        if start is None:
            start = Draws(target, target.start(plan.data, torch.Size([1]), generator))
        return self.method.init(target, plan, generator, torch.Size(), start)

    def step(self, target: Target, state: State, batch: Any, generator: torch.Generator) -> tuple[State, Info]:
        if state.together is not None:
            state.together, info = self.method.step(state.seen or target, state.together, batch, generator)
            return state, dataclasses.replace(info, metrics={n: over_members(v) for n, v in info.metrics.items()})
        infos = []
        for m, own in enumerate(state.apart):
            state.apart[m], info = self.method.step(target, own, batch, generator)
            infos.append(info)
        metrics: dict[str, Tensor | float] = {}
        for name in infos[0].metrics:
            metrics[name] = torch.stack([torch.as_tensor(info.metrics[name]) for info in infos]).mean(0)
        return state, dataclasses.replace(infos[0], metrics=metrics, done=all(info.done for info in infos))

    def posterior(self, target: Target, state: State, draws: Tensor | None = None) -> Mixture:
        states = state.apart
        if state.together is not None:
            states = [member_of(state.together, m) for m in range(share(self.size))]
        if state.seen is not None and state.seen.beside is not None:
            pairs = zip(states, state.seen.anchors, strict=True)
            members: list[Posterior] = [PriorFunction(target, own.w, a, own.buffers) for own, a in pairs]
        else:
            members = [self.method.posterior(target, own) for own in states]
        for member in members:
            member.method = type(self.method).__name__
        return Mixture(members)


def share(size: int) -> int:
    """How many of the members this process trains."""
    require(size % world() == 0, "size", "Ensemble", f"be a multiple of the {world()} processes", size)
    return size // world()


def starts(start: Posterior | None, size: int) -> list[Posterior | None]:
    """Where each member of this process begins: the members of a mixture in turn, or all at the same."""
    if not isinstance(start, Mixture):
        return [start] * size
    first = size * rank()
    return [start.members[(first + m) % len(start.members)] for m in range(size)]


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


@dataclass(frozen=True, kw_only=True)
class Anchored(Target):
    """What anchored members see: a prior with a centre for each, targets with noise for each, or a function beside.

    Batches have the numbers of their rows as a last part. Noise and functions move the outputs of the network, because
    y + s e around f is as likely as y around f - s e.
    """

    anchors: Tensor  # (M, P), draws from the prior
    noise: Tensor | None  # (M, N, *event), standard normal, the same at every step
    beside: Tensor | None  # (M, N, ...), the fixed functions at every row

    @classmethod
    def of(cls, target: Target, data: Data, anchors: Tensor, noise: Tensor | None, functions: bool) -> Anchored:
        """The target as the members see it: centres at the anchors, or functions of them beside."""
        assert data.tensors is not None
        centres, beside = anchors.clone(), None
        if functions:
            centres[:, : target.network_model("Ensemble").network.size] = 0
            beside = target.outputs(anchors, data.tensors[:-1])
        given = {f.name: getattr(target, f.name) for f in dataclasses.fields(target)}
        prior = target.prior.centred_at(centres)
        return cls(**{**given, "prior": prior}, anchors=anchors, noise=noise, beside=beside)

    def outputs(self, w: Tensor, inputs: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """The mean of the members' outputs with their functions, for each member the same, (M, n, ...).

        A learnt noise is set by it: the noise that was added to the targets all but averages out.
        """
        outputs = super().outputs(w, inputs, buffers)
        if self.beside is not None:
            outputs = outputs + super().outputs(self.anchors, inputs)
        return outputs.mean(0, keepdim=True).expand_as(outputs)

    def log_likelihood_and_grad(
        self, w: Tensor, batch: Batch, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """log p(D + noise | w) for members w (M, P), estimated from the batch, and its gradient: (M,), (M, P)."""
        *inputs, y, rows = batch
        model = self.network_model("Ensemble")
        offset = None if self.beside is None else self.beside[:, rows]
        if self.noise is not None:
            moved = -(self.temperature**0.5) * self._scale(w, y) * self.noise[:, rows]
            offset = moved if offset is None else offset + moved
        return model.log_likelihood_and_grad(w, (*inputs, y), self.factor(batch), buffers or {}, offset)

    def _scale(self, w: Tensor, y: Tensor) -> Tensor:
        """The standard deviation of the targets as each member has it, (M, n, *event)."""
        model = self.network_model("Ensemble")
        with torch.no_grad():
            return model.likelihood.variance(y.expand(len(w), *y.shape), model.learnt_at(w)).sqrt()


def check_anchored(target: Target, data: Data) -> None:
    """Refuse what an anchored ensemble can't be of."""
    model, prior = target.network_model("The 'anchored' argument of Ensemble", "has its prior inside"), target.prior
    likelihood = model.likelihood
    ok = likelihood.slope is not None or likelihood.classes or likelihood.discrete
    must = "have Gaussian noise that doesn't come from the network, or labels or counts"
    require(ok, "anchored", "Ensemble", must, repr(likelihood))
    weights = prior.precision[..., : model.network.size]
    gaussian = bool((weights > 0).all()) and not prior.hierarchical
    require(gaussian, "anchored", "Ensemble", "have a Gaussian prior over every weight", repr(model))
    require(data.tensors is not None, "anchored", "Ensemble", "have its data in memory", "a Dataset or a DataLoader")


def drawn_from_prior(target: Target, size: int, generator: torch.Generator) -> Tensor:
    """Centres for the members' priors, (M, P): draws from it for the weights, its own centre for all else."""
    prior, weights = target.prior, slice(0, target.network_model("Ensemble").network.size)
    anchors = prior.loc.expand(size, -1).clone()
    z = torch.randn(anchors[:, weights].shape, generator=generator, dtype=anchors.dtype, device=anchors.device)
    anchors[:, weights] += z * (target.prior_power * prior.precision[..., weights]).rsqrt()
    return anchors


def noise_of_targets(target: Target, data: Data, size: int, generator: torch.Generator) -> Tensor | None:
    """Standard normal numbers for each member and row, (M, N, *event), where the noise is Gaussian; else None."""
    assert data.tensors is not None
    if not isinstance(target.network_model("Ensemble").likelihood, Gaussian):
        return None
    y = data.tensors[-1]
    return torch.randn((size, *y.shape), generator=generator, dtype=y.dtype, device=y.device)
