"""The mode of a log density by Newton's method, and the Gaussian around it.

Newton's method with a line search works in unconstrained coordinates, including the log-determinant of their
transformation. It finds the mode of the density that the Gaussian approximates, whereas MAP gives the mode in the
user's parameters. The precision Q is minus the Hessian of the whole log joint, prior and log-determinant included. Cost
of a step: P backward passes over the data and O(P^3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.linalg import eigh
from priory.curvature import select
from priory.curvature.diagonal import DiagonalCurvature
from priory.curvature.evidence import log_evidence
from priory.curvature.full import Full
from priory.methods.base import Info
from priory.methods.laplace.mode_gradient import BLOCK_ROWS, ModeGradient
from priory.posteriors.laplace import LaplacePosterior
from priory.posteriors.status import CONVERGED, Status, of_cap

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.core.data import Data
    from priory.models.target import Target
    from priory.posteriors import Posterior

MIN_MODE_DISTANCE = 0.1  # standard deviations per coordinate, below which Newton's method has converged
SUPPORT_EDGE = 20.0  # unconstrained coordinates from which a bounded parameter is at its bound


@dataclass
class NewtonState:
    """The current iterate of Newton's method, with the parts of the log joint, its gradient and its Hessian."""

    w: Tensor  # (*B, P)
    log_likelihood: Tensor  # (*B,)
    log_prior: Tensor  # (*B,)
    gradient: Tensor  # (*B, P), of the tempered log joint
    hessian: Tensor  # (*B, P, P)
    there: Tensor  # (*B,), whether the mode is reached


def first_state(
    target: Target, data: Data, generator: torch.Generator, shape: torch.Size, start: Posterior | None
) -> NewtonState:
    """Return the initial state of Newton's method."""
    w = target.start(data, shape, generator, start)
    found = [derivatives(target, v, data) for v in w.reshape(-1, target.size)]
    parts = [torch.stack(part).reshape((*shape, *part[0].shape)) for part in zip(*found, strict=True)]
    return NewtonState(w, *parts, there=torch.zeros(shape, dtype=torch.bool, device=w.device))


def newton_step(target: Target, state: NewtonState, data: Data) -> tuple[NewtonState, Info]:
    """Take one Newton step of every member that has not converged."""
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


def posterior_at_mode(target: Target, state: NewtonState, over: Any, diagonal: bool, advice: str) -> LaplacePosterior:
    """Return the posterior at the mode, whose curvature is that of the whole tempered log joint, prior included."""
    selection = select(target.model, over)
    negative_hessian = -state.hessian[selection.places][:, selection.places]
    curvature = (
        DiagonalCurvature(selection, negative_hessian.diagonal())
        if diagonal
        else Full(selection, negative_hessian.double(), "hessian")
    )
    none = torch.zeros_like(state.w[selection.places])
    gaussian = curvature.gaussian(none)
    evidence = float(log_evidence(target, state.w, gaussian, state.log_likelihood, selection))
    gradient = state.gradient[selection.places]
    distance = math.sqrt(max(0.0, float(gradient @ gaussian.solve(gradient))) / len(gradient))
    mode = ModeGradient(float(state.log_likelihood), float(gradient.norm()), distance)
    mode.warn(advice)
    posterior = LaplacePosterior(target, state.w, curvature, none, 1.0, gaussian, evidence)
    posterior.know(mode.status(advice), warned=True)
    posterior.know(status_of_mode(target, state, there=bool(state.there) or distance < MIN_MODE_DISTANCE))
    return posterior


def status_of_mode(target: Target, state: NewtonState, there: bool) -> Status:
    """Return the status: converged, step limit reached, saddle point, or mode at the edge of the support."""
    if not there:
        return of_cap(False, None, "Newton's method")
    eigenvalues = eigh(-state.hessian).values
    if float(eigenvalues[0]) < -math.sqrt(torch.finfo(eigenvalues.dtype).eps) * float(eigenvalues.abs().max()):
        return Status("doubtful", "Newton's method ended at a saddle point of the log joint: try another start.")
    for block in target.model.layout.constrained:
        if float(state.w[block.start : block.stop].abs().max()) > SUPPORT_EDGE:
            where = f"The mode of '{block.name}' lies at the edge of its support, where no Gaussian fits it"
            return Status("doubtful", f"{where}: give it a prior that falls off there, or use NUTS.")
    return CONVERGED


def log_joint(target: Target, w: Tensor, data: Data) -> Tensor:
    """Return the tempered log joint over all rows at one vector, ()."""
    with torch.no_grad():
        return target.log_joint(w, target.log_likelihood(w, data), target.log_prior(w))


def derivatives(target: Target, w: Tensor, data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log p(D|w), log p(w), and gradient and Hessian of the tempered log joint over all rows at one vector."""
    a, b = target.likelihood_power, target.prior_power
    layout, total, seen = target.model.layout, None, 0
    for batch in data.blocks(BLOCK_ROWS):
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
    """Return value, gradient (P,) and Hessian (P, P) at one vector, with one backward pass per row of the Hessian."""
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
    """Return the ascent step from w, (P,), and whether it is the last.

    The Newton step uses absolute eigenvalues of the Hessian, so that directions of positive curvature are climbed
    instead of descended (Dauphin et al. 2014). Where the gradient vanishes at a saddle point, the step follows the
    direction of largest positive curvature.
    """
    eps = torch.finfo(w.dtype).eps
    eigenvalues, basis = eigh(-hessian)
    floor = math.sqrt(eps) * float(eigenvalues.abs().max()) or 1.0
    slope = basis.T @ gradient
    move = basis @ (slope / eigenvalues.abs().clamp_min(floor))
    promise = float(gradient @ move)  # twice the nats that the step should gain
    if promise < eps:
        if float(eigenvalues[0]) >= -floor:
            return move, True
        move = basis[:, 0] * float(eigenvalues[0].abs()) ** -0.5
        promise = 0.0
    elif promise < math.sqrt(eps):
        return move, False  # values agree to rounding here, so a line search can't compare them
    for _ in range(60):
        if bool(value_at(w + move) >= value + 1e-4 * promise):
            return move, False
        move, promise = 0.5 * move, 0.5 * promise
    return torch.zeros_like(w), True
