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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from priory.core.data import Data
from priory.core.errors import require, whole
from priory.curvature import KINDS, STRUCTURES, select
from priory.curvature.budget import Budget, budget
from priory.methods.base import Info, Method, Options, Plan, Traits, centre_of, factors_of
from priory.methods.laplace.density_expansion import NewtonState, first_state, newton_step, posterior_at_mode
from priory.methods.laplace.network_expansion import METRICS, LocalGaussian, NetworkState, check_batch_norm, expand_at
from priory.methods.point.map import MAP
from priory.models.base import BaseModel, has_network
from priory.models.model import Model
from priory.models.target import Target
from priory.posteriors import Posterior
from priory.posteriors.laplace import LaplacePosterior

if TYPE_CHECKING:
    pass


LIMIT = 4 << 30  # bytes that a curvature may take
NEWTON_STEPS = 200


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
    ) -> NewtonState | NetworkState:
        model = target.model
        if not has_network(model):
            return first_state(target, plan.data, generator, shape, start)
        begun = target.start(plan.data, shape, generator) if start is None else centre_of(start, "Laplace")
        w = begun.expand(*shape, -1).clone()
        buffers = target.buffers(shape, start)
        check_batch_norm(model, buffers)
        target = target.scaled(factors_of(start))  # the prior that its mode was found under
        around: list[LocalGaussian | None] = []
        for i, v in enumerate(w.view(-1, target.size)):
            own = model.member(buffers, i)
            around.append(expand_at(self, target, v, plan.data, own, generator) if bool(v.isfinite().all()) else None)
        return NetworkState(w, buffers, around, plan.data)

    def step(
        self, target: Target, state: NewtonState | NetworkState, batch: Data, generator: torch.Generator
    ) -> tuple[NewtonState | NetworkState, Info]:
        if isinstance(state, NewtonState):
            return newton_step(target, state, batch)
        shape = state.w.shape[:-1]
        told = [dict.fromkeys(METRICS, math.nan) if one is None else one.metrics(target) for one in state.around]
        metrics = {name: state.w.new_tensor([one[name] for one in told]).reshape(shape) for name in METRICS}
        return state, Info({**metrics}, unchecked=("gradient",), done=True)

    def posterior(
        self, target: Target, state: NewtonState | NetworkState, draws: Tensor | None = None
    ) -> LaplacePosterior:
        require(state.w.ndim == 1, "state", "Laplace", "be of one member", f"the shape {tuple(state.w.shape[:-1])}")
        if isinstance(state, NewtonState):
            diagonal = self.structure_for(target.model) == "diag"
            return posterior_at_mode(target, state, self.over, diagonal, self._advice(target.model))
        around = state.around[0]
        finite = around is not None
        require(finite, "weights", "Laplace", "be finite at the mode", "NaN or infinity")
        assert around is not None
        around.mode.warn(self._advice(target.model))
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
        posterior.know(around.mode.status(self._advice(target.model)), warned=True)
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
        tuned = has_network(model) and self.tunes(model)
        return budget(model, data, structure, over, self.curvature, self.samples, self.rank, self.limit, tuned)

    def structure_for(self, model: BaseModel) -> str:
        """The structure that was named, or the one that fits the model."""
        if self.structure is not None:
            return self.structure
        coordinates = isinstance(self.over, (Subnetwork, Tensor))
        return "kron" if has_network(model) and not coordinates else "full"

    @property
    def subnetwork_size(self) -> int | None:
        """How many weights a `Subnetwork` has; None for another `over`."""
        return self.over.size if isinstance(self.over, Subnetwork) else None

    def tunes(self, model: Model) -> bool:
        """Whether the evidence chooses a prior or a noise."""
        learnt = model.learnt.start < model.learnt.stop
        return self.tune is not None or (learnt and isinstance(self.at, str))
