"""The Laplace approximation: a Gaussian at the mode, with the curvature there as its precision.

    p(w | D) ~ N(w*, Q^-1),    Q = (H + prior_weight Lambda) / T        (T = 1: the posterior itself)

H is the curvature of -log p(D|w), summed over all the data, and Lambda is minus the second derivative of the log prior.
After MacKay (1992) and Daxberger et al. (2021, "Laplace Redux").

For a network, w* is the result of MAP or of the user's own training, H is the generalised Gauss-Newton matrix in one of
the structures of `priory.curvature`, and Lambda is diagonal. Cost: one pass over the data with one backward pass per
output, and the cost of the structure. `Laplace.plan` estimates memory and time before anything is allocated.

For a `Density`, Newton's method in a trust region (`priory.methods.mode_search`) finds w* in unconstrained coordinates,
from several starts, including the log-determinant of their transformation. This is the mode of the density that the
Gaussian approximates, whereas MAP gives the mode in the user's parameters. Q is minus the Hessian of the whole log
joint. Cost of a step: P backward passes over the data and O(P^3) per start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from priory.core.data import Data
from priory.core.errors import is_integer, require
from priory.curvature import KINDS, STRUCTURES, select
from priory.curvature.budget import Budget, budget
from priory.methods.base import Info, Method, Options, Plan, Traits, centre_of, factors_of
from priory.methods.laplace.density_expansion import posterior_at_mode
from priory.methods.laplace.network_expansion import (
    METRIC_NAMES,
    LocalGaussian,
    NetworkState,
    check_batch_norm,
    expand_at,
)
from priory.methods.mode_fit import MAX_SEARCH_STEPS, SearchState, first_state, search_step
from priory.methods.point.map import MAP
from priory.models.base import BaseModel, has_network
from priory.models.model import Model
from priory.models.target import Target
from priory.posteriors import Posterior
from priory.posteriors.laplace import LaplacePosterior
from priory.posteriors.status import CONVERGED, of_start

MEMORY_LIMIT_BYTES = 4 << 30  # default limit on the memory of a curvature


@dataclass(frozen=True)
class Subnetwork:
    """The weights of largest marginal variance under a diagonal Laplace approximation, for `Laplace(over=...)`.

    Args:
        size: Number of weights.

    Example:
        >>> import priory as pr
        >>> pr.Laplace("full", over=pr.Subnetwork(100)).over
        Subnetwork(size=100)

    References:
        Daxberger et al. (2021), Bayesian deep learning via subnetwork inference.
    """

    size: int

    def __post_init__(self) -> None:
        require(is_integer(self.size, 1), "size", "Subnetwork", "be an integer >= 1", repr(self.size))


@dataclass(frozen=True)
class Laplace(Options):
    """The Laplace approximation: a Gaussian at the mode w*, with the curvature there as its precision.

        p(w | D) ~ N(w*, Q^-1),    Q = (H + prior_weight Lambda) / T

    H is the curvature of -log p(D|w) over all the data, Lambda minus the second derivative of the log prior. Costs one
    pass over the data with one backward pass per output, plus the cost of the structure; `plan` estimates both.

    Args:
        structure: Structure of H: "kron", "diag", "full" or "lowrank". Default: None, "kron" for a network, "full" for
            a `Density` and for selected coordinates.
        over: Weights that the Gaussian is over; the rest stay at the mode. "all", "last" (the last layer), a list of
            names or patterns of names, a `Subnetwork`, or a LongTensor of coordinates. Default: "all".
        at: The mode: a posterior that holds it, the method that finds it, or "network" for the weights of a network
            that is already trained (a learnt noise is then set by the evidence). Default: None, `MAP()` for a
            network, Newton's method for a `Density`.
        curvature: Kind of H: "ggn" (generalised Gauss-Newton), "fisher" (labels drawn from the model), "empirical"
            (observed labels) or "hessian". Default: "ggn".
        samples: Number of labels drawn per row for "fisher". Default: 1.
        tune: Scales the prior's precisions to maximise the evidence, by one factor ("scalar"), one per layer ("layer")
            or one per weight ("parameter", for "diag" and "full"), and sets a learnt noise. Default: None, no tuning.
        predictive: Default of `predict`: "linear" for the network linearised at the mode, "network" for the network
            itself. Default: "linear".
        rank: Rank of "lowrank". Default: None, 64.
        sharing: How "kron" treats weights that act at several positions: "expand" or "reduce". Default: "expand".
        limit: Limit on the memory of the curvature, in bytes. Default: 4 GiB.

    Example:
        >>> import torch
        >>> import priory as pr
        >>> X = torch.linspace(-1, 1, 50)[:, None]
        >>> model = pr.Model(torch.nn.Linear(1, 1), pr.Gaussian(0.1))
        >>> posterior = pr.fit(model, (X, X[:, 0]), pr.Laplace(), steps=1000, progress=False)
        >>> posterior.log_evidence.kind
        'Laplace approximation of log p(D)'

    References:
        MacKay (1992), A practical Bayesian framework for backpropagation networks.
        Daxberger et al. (2021), Laplace redux: effortless Bayesian deep learning.
        Immer, Korzepa and Bauer (2021), Improving predictions of Bayesian neural nets via local linearization.
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
    limit: int = MEMORY_LIMIT_BYTES

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
        require(is_integer(self.samples, 1), "samples", "Laplace", "be an integer >= 1", repr(self.samples))
        ok = self.tune in (None, "scalar", "layer", "parameter")
        require(ok, "tune", "Laplace", "be None, 'scalar', 'layer' or 'parameter'", repr(self.tune))
        ok = self.predictive in ("linear", "network")
        require(ok, "predictive", "Laplace", "be 'linear' or 'network'", repr(self.predictive))
        ok = self.rank is None or (is_integer(self.rank, 1) and self.structure == "lowrank")
        require(ok, "rank", "Laplace", "be an integer >= 1, with structure='lowrank'", repr(self.rank))
        ok = self.sharing in ("expand", "reduce")
        require(ok, "sharing", "Laplace", "be 'expand' or 'reduce'", repr(self.sharing))
        require(is_integer(self.limit, 1), "limit", "Laplace", "be an integer of bytes", repr(self.limit))

    @property
    def traits(self) -> Traits:
        return Traits(reads="pass", follows=True, fixed_start=isinstance(self.at, str))

    @property
    def start(self) -> Any:
        """The posterior that holds the mode, or the method that finds it; None if `at` names neither."""
        return None if isinstance(self.at, str) else self.at

    def default_start(self, model: BaseModel) -> MAP | None:
        """Return MAP for a network without `at`; None otherwise: Newton's method finds the mode of a density."""
        return MAP() if has_network(model) and self.at is None else None

    def length(self, data: Data) -> int:
        return MAX_SEARCH_STEPS

    @overload
    def plan(self, target: BaseModel, data: Any) -> Budget: ...
    @overload
    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan: ...
    def plan(self, target: Any, data: Any, steps: int | None = None, seed: int = 0) -> Budget | Plan:
        """Estimate memory and time before a fit, from shapes alone.

        The user calls `plan(model, data)` and gets a `Budget` to print. The driver calls it with a target, steps and a
        seed, and gets the `Plan` of the rows that each step reads.

        Args:
            target: A `Model` or `Density`; a `Target` when the driver calls it.
            data: The data, as `fit` takes them.
            steps: Number of steps; for the driver only.
            seed: Seed of the fit; for the driver only.

        Returns:
            A `Budget` with memory and time of each structure, or a `Plan` for the driver.

        Raises:
            InputError: If the driver calls it and the curvature would exceed `limit`.
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
    ) -> SearchState | NetworkState:
        model = target.model
        if not has_network(model):
            return first_state(target, plan, generator, shape, start, jacobian=True)
        begun = target.start(plan.data, shape, generator) if start is None else centre_of(start, "Laplace")
        w = begun.expand(*shape, -1).clone()
        buffers = target.buffers(shape, start)
        check_batch_norm(model, buffers)
        target = target.scaled(factors_of(start))  # the prior that the mode was found under
        around: list[LocalGaussian | None] = []
        for i, v in enumerate(w.view(-1, target.size)):
            member_buffers = model.member(buffers, i)
            around.append(
                expand_at(self, target, v, plan.data, member_buffers, generator) if bool(v.isfinite().all()) else None
            )
        status = CONVERGED if start is None else of_start(start.status, "The mode comes")
        return NetworkState(w, buffers, around, plan.data, status)

    def step(
        self, target: Target, state: SearchState | NetworkState, batch: Data, generator: torch.Generator
    ) -> tuple[SearchState | NetworkState, Info]:
        if isinstance(state, SearchState):
            return search_step(target, state)
        shape = state.w.shape[:-1]
        each = [dict.fromkeys(METRIC_NAMES, math.nan) if one is None else one.metrics(target) for one in state.around]
        metrics = {name: state.w.new_tensor([one[name] for one in each]).reshape(shape) for name in METRIC_NAMES}
        return state, Info({**metrics}, unchecked=("gradient",), done=True)

    def posterior(
        self, target: Target, state: SearchState | NetworkState, draws: Tensor | None = None
    ) -> LaplacePosterior:
        shape = state.search.value.shape[:-1] if isinstance(state, SearchState) else state.w.shape[:-1]
        require(shape == (), "state", "Laplace", "be of one member", f"the shape {tuple(shape)}")
        if isinstance(state, SearchState):
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
        posterior.know(state.begun)
        return posterior

    def _advice(self, model: BaseModel) -> str:
        """Return the remedy for a point that is not a mode."""
        if not has_network(model):
            return "give the fit more steps"
        if isinstance(self.at, str):
            return "name the prior that the network was trained under, train it further, or leave 'at' out to run MAP"
        return "give the fit that found it more steps"

    def _budget(self, model: BaseModel, data: Data) -> Budget:
        """Return the budget; raise InputError for options that don't fit the model, before anything is computed."""
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
        """Return the given structure, or the default for the model."""
        if self.structure is not None:
            return self.structure
        coordinates = isinstance(self.over, (Subnetwork, Tensor))
        return "kron" if has_network(model) and not coordinates else "full"

    @property
    def subnetwork_size(self) -> int | None:
        """The size of a `Subnetwork`; None for any other `over`."""
        return self.over.size if isinstance(self.over, Subnetwork) else None

    def tunes(self, model: Model) -> bool:
        """Whether the evidence sets a prior or a noise."""
        learnt = model.learnt.start < model.learnt.stop
        return self.tune is not None or (learnt and isinstance(self.at, str))
