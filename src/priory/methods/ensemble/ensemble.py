"""Ensembles: several fits of one method from independent starts, as one posterior with equal weights.

    q(w) = (1/M) sum_m q_m(w)

With `MAP()` it is a deep ensemble (Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation
using Deep Ensembles"). Any other method gives a mixture of its approximations around several modes (Wilson and Izmailov
2020). Members are a batch dimension of the method's State, so members of a small network cost little more than one.
Members of a method that starts from another method's result (as Laplace does) are fitted one by one.

`anchored` makes the members of MAP draws from a posterior. Each member has a prior centred at a draw a_m from the
prior, and its own noise on the targets:

    minimise  -log p(y + s e_m | f(x; w)) - log p(w - a_m),    e_m ~ N(0, 1), a_m ~ p(w)

(Pearce et al. 2020, "Uncertainty in Neural Networks: Approximately Bayesian Ensembling"; with noise on the targets, as
in Osband et al. 2018, "Randomized Prior Functions for Deep Reinforcement Learning"). `anchored="function"` is the form
of Osband et al., in which the draw is a fixed function added to the network:

    minimise  -log p(y + s e_m | f(x; w) + f(x; a_m)) - log p(w)

For a model that is linear in its weights, with Gaussian noise, the two forms agree with w + a_m in place of w, and each
converged member is an exact and independent draw from the posterior. For other networks they differ: an anchor
regularises weights, while a prior function shapes the predictions far from the data. Labels and counts have no noise to
add; there only the prior is shifted.

A learnt noise scale is set by the residuals of the members' mean on held-out rows. The residuals of a single
member contain the noise that was added to its targets, and a scale set by them would grow by itself. For the same
reason a noise that the network outputs is refused.

With a process group of `torch.distributed` each process trains its share of the members (see
`priory.core.distributed`). Cost of a step: one step of the method for all members together, or one step per member;
memory grows with M P.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from priory.core.distributed import rank, world
from priory.core.errors import is_integer, require
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
class EnsembleState:
    """The members as one State with a leading dimension, or one State each, and the target of anchored members."""

    together: Any
    apart: list[Any]
    seen: Anchored | None = field(metadata={"fixed": True})


@dataclass(frozen=True)
class Ensemble(Options):
    """An ensemble: `size` fits of one method, each from its own start.

    Every member starts at weights drawn anew by the layers' `reset_parameters`; none starts at the network's current
    weights. A `start` of the method is fitted once per member.

    Args:
        method: Method of each member, such as `MAP()` (default), `Laplace()` or `SWAG()`.
        size: Number of members. Default: 8.
        anchored: Whether each member has its own prior, centred at a draw from the prior, and its own noise on the
            targets; "function" adds fixed random functions instead (randomised prior functions), whose posterior
            predicts but has no parameters. Both need `MAP`, a Gaussian prior over every weight, data in memory, and
            Gaussian noise that is not an output of the network, or labels or counts. Default: False.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = pr.Model(net, pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.Ensemble(size=4), steps=1000, progress=False)
        >>> inside, outside = (posterior.predict(x).epistemic.item() for x in (X[:1], X[:1] + 5))
        >>> len(posterior.members), outside > inside
        (4, True)

    References:
        Lakshminarayanan, Pritzel and Blundell (2017), Simple and scalable predictive uncertainty estimation using deep
        ensembles.
        Wilson and Izmailov (2020), Bayesian deep learning and a probabilistic perspective of generalization.
        Pearce, Leibfried and Brintrup (2020), Uncertainty in neural networks: approximately Bayesian ensembling.
        Osband, Aslanides and Cassirer (2018), Randomized prior functions for deep reinforcement learning.
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
        require(
            not isinstance(method, Ensemble), "method", "Ensemble", "be the method of one member, not an Ensemble", got
        )
        traits: Traits = method.traits
        ok = not traits.chains
        require(ok, "method", "Ensemble", "not be a sampler, which runs its own chains", got)
        ok = not traits.fixed_start
        require(
            ok,
            "method",
            "Ensemble",
            "fit separate weights for each member; with the network's weights all are equal",
            got,
        )
        begun = method.start
        ok = not (isinstance(begun, Posterior) and begun.point) or bool(self.anchored)
        must = "have a different start for each member; members that start at one point stay equal"
        require(ok, "method", "Ensemble", must, got)
        require(is_integer(self.size, 1), "size", "Ensemble", "be an integer >= 1", repr(self.size))
        ok = isinstance(self.anchored, bool) or self.anchored == "function"
        require(ok, "anchored", "Ensemble", "be True, False or 'function'", repr(self.anchored))
        ok = not self.anchored or traits.finds_mode
        require(ok, "anchored", "Ensemble", "be False unless the method is MAP", repr(method))
        ok = not self.anchored or not traits.sets_prior
        require(ok, "anchored", "Ensemble", "be False where the evidence sets the prior", repr(method))

    @property
    def traits(self) -> Traits:
        """The traits of the method, with members that processes share."""
        return dataclasses.replace(self.method.traits, spread=True)

    @property
    def start(self) -> Any:
        """The start of the method, fitted once per member."""
        start = self.method.start
        return Ensemble(start, self.size) if isinstance(start, Method) else start

    def default_start(self, model: Any) -> Any:
        """The default start of the method, fitted once per member."""
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

    def default_plan(self, target: Target, data: Data, seed: int) -> Plan:
        return (
            super().default_plan(target, data, seed) if self.anchored else self.method.default_plan(target, data, seed)
        )

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> EnsembleState:
        if self.anchored:
            return self._anchored(target, plan, generator, shape, start)
        method: Any = self.method
        size = share(self.size)
        if not (isinstance(start, Mixture) or method.traits.follows):
            return EnsembleState(method.init(target, plan, generator, torch.Size([*shape, size]), start), [], None)
        require(shape == (), "shape", "Ensemble", "be () for members that are fitted one by one", tuple(shape))
        states = [self._begun(target, plan, generator, member_start) for member_start in starts(start, size)]
        return EnsembleState(None, states, None)

    def _anchored(
        self, target: Target, plan: Plan, generator: torch.Generator, shape: torch.Size, start: Posterior | None
    ) -> EnsembleState:
        """The State of anchored members."""
        require(shape == (), "shape", "Ensemble", "be () for anchored members", tuple(shape))
        size, rows = share(self.size), plan.data.unnumbered()
        anchors, noise = drawn_from_prior(target, size, generator), noise_of_targets(target, rows, size, generator)
        seen = Anchored.of(target, rows, anchors, noise, functions=self.anchored == "function")
        one = None if isinstance(start, Mixture) else start
        plan = dataclasses.replace(plan, data=rows)
        inner = self.method.init(target, plan, generator, torch.Size([size]), one)
        if isinstance(start, Mixture):
            for m, member_start in enumerate(starts(start, size)):
                assert member_start is not None
                inner.w[m] = member_start.draw(1, generator)[0]
                for name, b in member_start.buffers.items():
                    inner.buffers[name][m] = b
        return EnsembleState(inner, [], seen)

    def _begun(self, target: Target, plan: Plan, generator: torch.Generator, start: Posterior | None) -> Any:
        """The State of one member: at its start, or at fresh weights."""
        if start is None:
            start = Draws(target, target.start(plan.data, torch.Size([1]), generator))
        return self.method.init(target, plan, generator, torch.Size(), start)

    def step(
        self, target: Target, state: EnsembleState, batch: Any, generator: torch.Generator
    ) -> tuple[EnsembleState, Info]:
        if state.together is not None:
            state.together, info = self.method.step(state.seen or target, state.together, batch, generator)
            return state, dataclasses.replace(info, metrics={n: over_members(v) for n, v in info.metrics.items()})
        infos = []
        for m, member_state in enumerate(state.apart):
            state.apart[m], info = self.method.step(target, member_state, batch, generator)
            infos.append(info)
        metrics: dict[str, Tensor | float] = {}
        for name in infos[0].metrics:
            metrics[name] = torch.stack([torch.as_tensor(info.metrics[name]) for info in infos]).mean(0)
        return state, dataclasses.replace(infos[0], metrics=metrics, done=all(info.done for info in infos))

    def posterior(self, target: Target, state: EnsembleState, draws: Tensor | None = None) -> Mixture:
        states = state.apart
        if state.together is not None:
            states = [member_of(state.together, m) for m in range(share(self.size))]
        if state.seen is not None and state.seen.beside is not None:
            pairs = zip(states, state.seen.anchors, strict=True)
            members: list[Posterior] = [
                PriorFunction(target, member_state.w, a, member_state.buffers) for member_state, a in pairs
            ]
        else:
            members = [self.method.posterior(target, member_state) for member_state in states]
        for member in members:
            member.method = type(self.method).__name__
        return Mixture(members)


def share(size: int) -> int:
    """The number of members that this process trains."""
    require(size % world() == 0, "size", "Ensemble", f"be a multiple of the {world()} processes", size)
    return size // world()


def starts(start: Posterior | None, size: int) -> list[Posterior | None]:
    """The start of each member of this process: the members of a mixture in turn, or the same for all."""
    if not isinstance(start, Mixture):
        return [start] * size
    first = size * rank()
    return [start.members[(first + m) % len(start.members)] for m in range(size)]


def over_members(value: Tensor | float) -> Tensor | float:
    """The mean over the last leading dimension, that of members."""
    return value.mean(-1) if isinstance(value, Tensor) and value.ndim > 0 else value


def member_of(state: Any, m: int, lead: int = 0) -> Any:
    """Member m of a State with one leading dimension; values without it are shared by all members."""
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
    """The target of anchored members: a prior centre, noise on the targets, or a fixed function for each member.

    Batches have the indices of their rows as their last part. Noise and functions shift the outputs of the network,
    because the likelihood of y + s e around f equals that of y around f - s e.
    """

    anchors: Tensor  # (M, P), draws from the prior
    noise: Tensor | None  # (M, N, *event), standard normal, the same at every step
    beside: Tensor | None  # (M, N, ...), the fixed functions at every row

    @classmethod
    def of(cls, target: Target, data: Data, anchors: Tensor, noise: Tensor | None, functions: bool) -> Anchored:
        """The target of the members: priors centred at the anchors, or fixed functions of them."""
        assert data.tensors is not None
        centres, beside = anchors.clone(), None
        if functions:
            centres[:, : target.network_model("Ensemble").network.size] = 0
            beside = target.outputs(anchors, data.tensors[:-1])
        given = {f.name: getattr(target, f.name) for f in dataclasses.fields(target)}
        prior = target.prior.centred_at(centres)
        return cls(**{**given, "prior": prior}, anchors=anchors, noise=noise, beside=beside)

    def outputs(self, w: Tensor, inputs: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """The mean of the members' outputs, with their functions, repeated for each member, (M, n, ...).

        A learnt noise scale is set by it: the noise that was added to the targets nearly averages out.
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
        """The standard deviation of the targets under each member, in units of the outputs, (M, n, *event)."""
        model = self.network_model("Ensemble")
        slope = model.likelihood.slope
        assert slope is not None
        with torch.no_grad():
            scale = model.likelihood.variance(y.expand(len(w), *y.shape), model.learnt_at(w)).sqrt()
        return scale / (slope.to(scale) if isinstance(slope, Tensor) else slope)


def check_anchored(target: Target, data: Data) -> None:
    """Raise an error for a model, prior or data that an anchored ensemble can't have."""
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
    """Centres of the members' priors, (M, P): draws from the prior for weights, its centre for all else."""
    prior, weights = target.prior, slice(0, target.network_model("Ensemble").network.size)
    anchors = prior.loc.expand(size, -1).clone()
    z = torch.randn(anchors[:, weights].shape, generator=generator, dtype=anchors.dtype, device=anchors.device)
    anchors[:, weights] += z * (target.prior_power * prior.precision[..., weights]).rsqrt()
    return anchors


def noise_of_targets(target: Target, data: Data, size: int, generator: torch.Generator) -> Tensor | None:
    """Standard normal noise for each member and row, (M, N, *event), if the likelihood is Gaussian; else None."""
    assert data.tensors is not None
    if not isinstance(target.network_model("Ensemble").likelihood, Gaussian):
        return None
    y = data.tensors[-1]
    return torch.randn((size, *y.shape), generator=generator, dtype=y.dtype, device=y.device)
