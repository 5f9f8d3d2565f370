"""A search for modes as a fit: its State, its starts, its steps, and the models for which it is within reach.

A noise that the likelihood learns is set on held-out rows, in rounds: the mode of the weights given the noise on the
other rows, then the noise given the weights, until the noise stays the same. The last search is over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.data import WeightedBatch
from priory.core.streams import stream
from priory.methods.base import Info
from priory.methods.mode_objective import ModeObjective
from priory.methods.mode_search import MODE, ModeSearch, advance, begin
from priory.methods.point.held_out import HELD_ROWS, learn_from_held_out
from priory.models.base import has_network

if TYPE_CHECKING:
    from priory.core.data import Batch, Data
    from priory.methods.base import Plan
    from priory.models.target import Target
    from priory.posteriors import Posterior

MAX_SEARCH_STEPS = 1000
MAX_LATE_STEPS = 100  # of slower starts, once a mode is reached
MAX_STARTS = 8
MAX_START_NUMBERS = 1 << 19  # starts x coordinates^2 of the Hessians
MAX_DENSITY_COORDINATES = 1000  # of which the Hessian is computed
MAX_NETWORK_COORDINATES = 200
MAX_HESSIAN_WORK = 1 << 29  # rows x coordinates^2
AFFINE_TRIAL_ROWS = 8
AFFINE_TOLERANCE = 1e-3  # of the outputs, relative to their size; float32 rounds them to 1e-6
MAX_NOISE_ROUNDS = 30
SAME_NOISE = 1e-3  # change of the noise's coordinates in one round, far below their statistical error
UNCHECKED_METRICS = ("loss", "nll", "log_prior", "distance")  # not finite where no start has a density


@dataclass
class SearchState:
    """The search from every start, (*B, K, ...), and the log joint that it climbs."""

    search: ModeSearch
    objective: ModeObjective = field(metadata={"fixed": True})  # over all rows
    early: ModeObjective | None = field(default=None, metadata={"fixed": True})  # without the rows that set the noise
    held: Batch | None = field(default=None, metadata={"fixed": True})  # the rows that set the noise
    rounds: int = 0  # updates of the noise
    noise_is_set: bool = True
    late: int = 0  # steps since every member has reached a mode from some start

    @property
    def best(self) -> ModeSearch:
        """The best point of each member, (*B, ...)."""
        return self.search.at(self.search.best())


def within_reach(target: Target, data: Data) -> bool:
    """Whether a density, or an affine network, has few enough parameters and rows for Hessians over all rows."""
    size, rows = target.model.learnt.start, data.num_data or 1
    most = MAX_NETWORK_COORDINATES if has_network(target.model) else MAX_DENSITY_COORDINATES
    in_memory = data.num_data is None or (data.tensors is not None and not data.minibatches)
    few = in_memory and size <= most and rows * size**2 <= MAX_HESSIAN_WORK
    return few and (not has_network(target.model) or is_affine(target, data))


def is_affine(target: Target, data: Data) -> bool:
    """Whether the outputs of a network are affine in its weights, f(v + w) + f(0) = f(v) + f(w), at a few rows.

    Other networks have many modes that are equally good, and many have corners, where Newton's method stalls.
    """
    size, weights = target.size, target.model.learnt.start
    w = torch.zeros(4, size, dtype=target.model.dtype, device=target.model.device)
    noise = stream(0, "affine", device=w.device)
    w[2:, :weights] = torch.randn(2, weights, generator=noise, dtype=w.dtype, device=w.device)
    w[1] = w[2] + w[3]
    none, both, first, second = target.outputs(w, data.some(AFFINE_TRIAL_ROWS)[:-1])
    most = torch.stack([none, both, first, second]).abs().max()
    return bool((both + none - first - second).abs().max() <= AFFINE_TOLERANCE * most)


def number_of_starts(size: int) -> int:
    """Return the number of starts of a search over this many coordinates."""
    return max(1, min(MAX_STARTS, MAX_START_NUMBERS // size**2))


def first_state(
    target: Target,
    plan: Plan,
    generator: torch.Generator,
    shape: torch.Size,
    start: Posterior | None,
    jacobian: bool,
) -> SearchState:
    """Return the search from the model's own start and random ones, or from a posterior; one start per member."""
    data, size = plan.data, target.model.learnt.start
    w = target.start(data, shape, generator, start)[..., None, :]
    if shape == () and not (start is not None and start.point):
        w = torch.cat([w, further_starts(target, data, number_of_starts(target.size) - 1, start)])
    objective = ModeObjective(target, data, jacobian, size)
    if plan.held is None or plan.early is None:
        return SearchState(begin(objective, w), objective)
    early = ModeObjective(target, plan.early, jacobian, size)
    rows = plan.held.some(HELD_ROWS)
    wide = tuple(t.to(early.dtype) if t.is_floating_point() else t for t in rows)
    held = WeightedBatch(wide, rows.weights) if isinstance(rows, WeightedBatch) else wide
    return SearchState(begin(early, w), objective, early, held, noise_is_set=False)


def further_starts(target: Target, data: Data, count: int, start: Posterior | None) -> Tensor:
    """Return random starts, (count, P), whatever the seed of the fit; those of a density in pairs w and -w."""
    noise = stream(0, "starts", device=target.model.device)
    w = target.start(data, torch.Size([count]), noise, start)
    return w if start is not None or has_network(target.model) else torch.stack([w, -w], 1).flatten(0, 1)[:count]


def search_step(target: Target, state: SearchState) -> tuple[SearchState, Info]:
    """Take one step from every start; the fit is done when all have ended, and the noise is set."""
    done = advance(state.objective if state.noise_is_set or state.early is None else state.early, state.search)
    if bool((state.search.outcome == MODE).any(-1).all()):
        state.late += 1
        done = done or state.late > MAX_LATE_STEPS
    if done and not state.noise_is_set:
        set_noise(state)
        done = False
    best = state.best
    metrics: dict[str, Tensor | float] = {
        "loss": target.loss(best.value),
        "nll": -best.log_likelihood,
        "log_prior": best.log_prior,
        "distance": best.distance,
    }
    return state, Info(metrics, done=done, unchecked=UNCHECKED_METRICS)


def set_noise(state: SearchState) -> None:
    """Set the noise on the held-out rows at the modes, and begin the next search from there, in place."""
    early, held, w = state.early, state.held, state.search.w
    assert early is not None
    assert held is not None
    learnt = early.target.model.learnt
    found = w.clone()
    found[..., learnt] = learn_from_held_out(early.target, w[None], held, {}).to(w)
    state.rounds, state.late = state.rounds + 1, 0
    same = float((found[..., learnt] - w[..., learnt]).abs().max()) <= SAME_NOISE
    state.noise_is_set = same or state.rounds >= MAX_NOISE_ROUNDS
    state.search = begin(state.objective if state.noise_is_set else early, found)
