"""The verdict on a search for modes: the best mode, the number of others, and the status with its remedy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.linalg import eigh
from priory.methods.mode_search import (
    CLIMBING,
    FAILED,
    FLAT,
    MODE,
    RUNAWAY,
    SADDLE,
    TAIL,
    ModeSearch,
    curvature_scale,
    unpinned,
)
from priory.posteriors.mode import Mode
from priory.posteriors.status import CONVERGED, Status

if TYPE_CHECKING:
    from priory.core.flat import Block, Layout
    from priory.methods.mode_objective import ModeObjective

SAME_MODE_SDS = 0.1  # distance of two points, in standard deviations, below which they are the same mode
MAX_EDGE_CURVATURE = 1e-4  # of the log density in an unconstrained coordinate of a parameter at the edge of its support
MIN_EDGE_COORDINATE = 5.0  # unconstrained coordinate of such a parameter
EDGE_PROBES = (12.0, 24.0)  # unconstrained coordinates at which the slopes towards an edge are compared
UNBOUNDED_SLOPE_SHARE = 0.5  # of the slope that is left at the second probe if the log density has no bound
MIN_MASS_SHARE = 0.99  # of the mass of all modes that a Gaussian at one of them must have
MIN_POINT_SHARE = 0.51  # of the mass of all modes around a mode that is the answer by itself
FAR_COORDINATE = 20.0  # unconstrained coordinate beyond which a parameter is at the edge, for a search that failed


def mode_of(search: ModeSearch) -> Mode:
    """Return the report of the best point of one member's starts (K, ...)."""
    best = search.at(search.best())
    gradient, hessian = unpinned(best)
    scale = curvature_scale(hessian[None], gradient[None])[0]
    eigenvalues = eigh(-hessian / (scale[:, None] * scale)).values
    singular = float(eigenvalues[0]) <= torch.finfo(eigenvalues.dtype).eps * float(eigenvalues[-1])
    condition = math.inf if singular else float(eigenvalues[-1] / eigenvalues[0])
    others = different_modes(search)
    below = float(search.value[others[0]] - search.value[others[1]]) if len(others) > 1 else None
    norm, starts, corners = float(gradient.norm()), len(search.value), int(best.pinned.sum())
    return Mode(float(best.distance), norm, condition, max(1, len(others)), starts, below, corners)


def different_modes(search: ModeSearch) -> list[int]:
    """Return the indices of one start for each mode that was reached, the highest first."""
    size = search.gradient.shape[-1]
    found: list[int] = []
    for i in search.value.argsort(descending=True).tolist():
        if int(search.outcome[i]) != MODE:
            continue
        moves = [search.w[i, :size] - search.w[j, :size] for j in found]
        squares = [float(-move @ search.hessian[j] @ move) for move, j in zip(moves, found, strict=True)]
        if all(square > SAME_MODE_SDS**2 for square in squares):
            found.append(i)
    return found


def status_of(objective: ModeObjective, search: ModeSearch, gaussian: bool = False) -> Status:
    """Return the status of the best point of one member's starts (K, ...), with the remedy.

    Args:
        objective: The log joint.
        search: The search from the starts.
        gaussian: Whether a Gaussian is put at the mode, which doesn't fit at an edge.
    """
    layout, index = objective.target.model.layout, search.best()
    best = search.at(index)
    outcome = int(best.outcome)
    unbounded = endless_block(objective, search)
    if unbounded is not None:
        where = "nears the edge of its support" if not unbounded.bijector.identity else "grows"
        local = ", and this is only a local mode" if outcome == MODE else ""
        what = f"The log density rises without bound as '{unbounded.name}' {where}{local}"
        return Status("not_converged", f"{what}: give it a prior that falls off there, or change its parameterisation.")
    edge = edge_block(layout, best) if outcome in (MODE, TAIL, FLAT) else None
    if edge is not None:
        fits = ", where no Gaussian fits it" if gaussian else ""
        remedy = ", or use NUTS" if gaussian else " if the edge is not meant"
        what = f"The mode of '{edge.name}' lies at the edge of its support{fits}"
        return Status("doubtful", f"{what}: give it a prior that falls off there{remedy}.")
    if outcome == MODE and gaussian:
        return status_of_gaussian(layout, search, best)
    if outcome == MODE:
        return status_of_point(search)
    name = name_of(layout, steepest(best, outcome))
    if outcome == TAIL:
        what = f"The log density rises for ever along a direction that involves '{name}', as for separable classes"
        return Status("not_converged", f"{what}, and has no mode there: give it a prior, or a narrower one.")
    if outcome == FLAT:
        what = f"The log density is flat along a direction that involves '{name}', so its mode is not unique"
        return Status("doubtful", f"{what}: give it a prior, or remove a parameter.")
    if outcome == SADDLE:
        return Status("doubtful", "The search ended at a saddle point of the log joint: try another start.")
    if outcome == CLIMBING:
        what = f"The search for the mode was still {distance_text(best)} away at its last step"
        return Status("not_converged", f"{what}: let it run to its end, or start it from another fit.")
    if outcome == FAILED:
        what = f"The second derivatives of the log density are not finite where the search stopped, near '{name}'"
        return Status("not_converged", f"{what}: rewrite the density so that they are, or start from another fit.")
    what = f"No step raises the log density, although its gradient puts the mode {distance_text(best)} away"
    why = f"it has a corner in '{name}', or its gradient is wrong or lost in rounding"
    return Status("not_converged", f"{what}: {why}; smooth it, use float64, or give the fit steps.")


def status_of_gaussian(layout: Layout, search: ModeSearch, best: ModeSearch) -> Status:
    """Return the status of a Gaussian at a mode: it fits no corner, and misses the mass of other modes."""
    if bool(best.pinned.any()):
        name = name_of(layout, int(best.pinned.to(torch.int8).argmax()))
        what = f"The mode lies on a corner of the log density in '{name}', where no Gaussian fits it"
        return Status("doubtful", f"{what}: smooth it, or use NUTS.")
    count, share = share_of_mass(search)
    if share >= MIN_MASS_SHARE:
        return CONVERGED
    what = f"The Gaussian is at the highest of {count} modes, which has about {share:.0%} of the mass of all"
    return Status("doubtful", f"{what}: use MixtureOfGaussians or NUTS.")


def status_of_point(search: ModeSearch) -> Status:
    """Return the status of a mode as a point: another may be as high, or a lower one may have more of the mass."""
    count, share = share_of_mass(search)
    if share >= MIN_POINT_SHARE:
        return CONVERGED
    what = f"This is the highest of {count} modes, but only about {share:.0%} of the mass of all lies around it"
    return Status("doubtful", f"{what}: use MixtureOfGaussians or NUTS, or constrain the parameters to one mode.")


def share_of_mass(search: ModeSearch) -> tuple[int, float]:
    """Return the number of modes, and the share of the highest in the mass of all, by Laplace's method."""
    modes = different_modes(search)
    masses = torch.stack([search.value[i] - 0.5 * log_det(search, i) for i in modes])
    return len(modes), float(masses.softmax(0)[0])


def log_det(search: ModeSearch, i: int) -> Tensor:
    """Return the log-determinant of minus the Hessian at one start, over the coordinates on no corner."""
    free = ~search.pinned[i]
    return torch.linalg.slogdet(-search.hessian[i][free][:, free])[1]


def distance_text(best: ModeSearch) -> str:
    """Return the distance to the mode for messages."""
    return f"{float(best.distance):.2g} standard deviations"


def endless_block(objective: ModeObjective, search: ModeSearch) -> Block | None:
    """Return the parameter towards whose edge, or towards whose infinity, the log density has no bound; else None."""
    layout = objective.target.model.layout
    for outcome, w in zip(search.outcome.tolist(), search.w, strict=True):
        far = int(w.abs().argmax())
        block = block_at(layout, far)
        if outcome == RUNAWAY:
            return block
        if block.bijector.identity or float(w[far].abs()) < FAR_COORDINATE:
            continue
        if outcome in (SADDLE, FAILED) or (outcome in (TAIL, FLAT) and steep_at_edge(objective, w, far)):
            return block
    return None


def steep_at_edge(objective: ModeObjective, w: Tensor, place: int) -> bool:
    """Whether the slope in one coordinate stays the same towards the edge, instead of vanishing with the distance."""
    probes = w.repeat(len(EDGE_PROBES), 1)
    probes[:, place] = torch.sign(w[place]) * torch.tensor(EDGE_PROBES, dtype=w.dtype, device=w.device)
    slopes = objective.first_order(probes).gradient[:, place].abs()
    return bool(slopes[1] > UNBOUNDED_SLOPE_SHARE * slopes[0])


def edge_block(layout: Layout, best: ModeSearch) -> Block | None:
    """Return the constrained parameter that is at the edge of its support, where its coordinate has no curvature."""
    size = best.gradient.shape[-1]
    flat = best.hessian.diagonal().abs() < MAX_EDGE_CURVATURE
    flat &= best.w[:size].abs() > MIN_EDGE_COORDINATE
    return next((b for b in layout.constrained if b.stop <= size and bool(flat[b.start : b.stop].any())), None)


def steepest(best: ModeSearch, outcome: int) -> int:
    """Return the coordinate that a message names: of the flattest direction, or of the largest scaled gradient."""
    scale = curvature_scale(best.hessian[None], best.gradient[None])[0]
    if outcome == FLAT:
        return int(eigh(-best.hessian / (scale[:, None] * scale)).vectors[:, 0].abs().argmax())
    return int((best.gradient / scale).abs().argmax())


def block_at(layout: Layout, place: int) -> Block:
    """Return the parameter that a coordinate belongs to."""
    return next(block for block in layout.blocks if block.start <= place < block.stop)


def name_of(layout: Layout, place: int) -> str:
    """Return the name of the parameter that a coordinate belongs to."""
    return block_at(layout, place).name
