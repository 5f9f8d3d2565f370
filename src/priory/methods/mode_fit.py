"""A search for modes as a fit: its State, its starts, its steps, and the models for which it is within reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.streams import stream
from priory.methods.base import Info
from priory.methods.mode_objective import ModeObjective
from priory.methods.mode_search import ModeSearch, advance, begin
from priory.models.base import has_network

if TYPE_CHECKING:
    from priory.core.data import Data
    from priory.models.target import Target
    from priory.posteriors import Posterior

MAX_SEARCH_STEPS = 300
MAX_STARTS = 8
MAX_START_NUMBERS = 1 << 19  # starts x coordinates^2 of the Hessians
MAX_DENSITY_COORDINATES = 1000  # of which the Hessian is computed
MAX_NETWORK_COORDINATES = 200
MAX_HESSIAN_WORK = 1 << 29  # rows x coordinates^2
UNCHECKED_METRICS = ("loss", "nll", "log_prior", "distance")  # not finite where no start has a density


@dataclass
class SearchState:
    """The search from every start, (*B, K, ...), and the log joint that it climbs."""

    search: ModeSearch
    objective: ModeObjective = field(metadata={"fixed": True})

    @property
    def best(self) -> ModeSearch:
        """The best point of each member, (*B, ...)."""
        return self.search.at(self.search.best())


def within_reach(target: Target, data: Data) -> bool:
    """Whether there are few enough parameters and rows for Hessians over all rows; a rule of counts alone."""
    size, rows = target.model.learnt.start, data.num_data or 1
    most = MAX_NETWORK_COORDINATES if has_network(target.model) else MAX_DENSITY_COORDINATES
    in_memory = data.num_data is None or (data.tensors is not None and not data.minibatches)
    return in_memory and size <= most and rows * size**2 <= MAX_HESSIAN_WORK


def number_of_starts(size: int) -> int:
    """Return the number of starts of a search over this many coordinates."""
    return max(1, min(MAX_STARTS, MAX_START_NUMBERS // size**2))


def first_state(
    target: Target,
    data: Data,
    generator: torch.Generator,
    shape: torch.Size,
    start: Posterior | None,
    jacobian: bool,
) -> SearchState:
    """Return the search from the model's own start and random ones, or from a posterior; one start per member."""
    w = target.start(data, shape, generator, start)[..., None, :]
    if shape == () and not (start is not None and start.point):
        w = torch.cat([w, further_starts(target, data, number_of_starts(target.size) - 1, start)])
    objective = ModeObjective(target, data, jacobian, target.model.learnt.start)
    return SearchState(begin(objective, w), objective)


def further_starts(target: Target, data: Data, count: int, start: Posterior | None) -> Tensor:
    """Return random starts, (count, P), whatever the seed of the fit; those of a density in pairs w and -w."""
    noise = stream(0, "starts", device=target.model.device)
    w = target.start(data, torch.Size([count]), noise, start)
    return w if start is not None or has_network(target.model) else torch.stack([w, -w], 1).flatten(0, 1)[:count]


def search_step(target: Target, state: SearchState) -> tuple[SearchState, Info]:
    """Take one step from every start; the fit is done when all have ended."""
    done = advance(state.objective, state.search)
    best = state.best
    metrics: dict[str, Tensor | float] = {
        "loss": target.loss(best.value),
        "nll": -best.log_likelihood,
        "log_prior": best.log_prior,
        "distance": best.distance,
    }
    return state, Info(metrics, done=done, unchecked=UNCHECKED_METRICS)
