"""The Gaussian around the mode of a log density.

The search for the mode (`priory.methods.mode_search`) works in unconstrained coordinates, including the log-determinant
of their transformation. It finds the mode of the density that the Gaussian approximates, whereas MAP gives the mode in
the user's parameters. The precision Q is minus the Hessian of the whole log joint, prior and log-determinant included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from priory.core.errors import InputError
from priory.curvature import select
from priory.curvature.diagonal import DiagonalCurvature
from priory.curvature.evidence import log_evidence
from priory.curvature.full import Full
from priory.methods.laplace.mode_gradient import ModeGradient
from priory.methods.mode_report import mode_of, status_of
from priory.posteriors.laplace import LaplacePosterior

if TYPE_CHECKING:
    from priory.methods.mode_fit import SearchState
    from priory.models.target import Target


def posterior_at_mode(target: Target, state: SearchState, over: Any, diagonal: bool, advice: str) -> LaplacePosterior:
    """Return the posterior at the mode, whose curvature is that of the whole tempered log joint, prior included."""
    selection, best = select(target.model, over), state.best
    w = best.w.to(target.model.dtype)
    negative_hessian = -best.hessian[selection.places][:, selection.places]
    curvature = (
        DiagonalCurvature(selection, negative_hessian.diagonal().to(w))
        if diagonal
        else Full(selection, negative_hessian, "hessian")
    )
    none = torch.zeros_like(w[selection.places])
    status = status_of(state.objective, state.search, gaussian=True)
    try:
        gaussian = curvature.gaussian(none)
    except InputError as error:
        why = f" {status.reason}" if status.reason else ""
        raise InputError(
            f"The curvature of the log density must not be singular where Laplace fits it.{why}"
        ) from error
    evidence = float(log_evidence(target, w, gaussian, best.log_likelihood.to(w), selection))
    gradient = best.gradient[selection.places].to(w)
    distance = math.sqrt(max(0.0, float(gradient @ gaussian.solve(gradient))) / len(gradient))
    mode = ModeGradient(float(best.log_likelihood), float(gradient.norm()), distance)
    mode.warn(advice)
    posterior = LaplacePosterior(target, w, curvature, none, 1.0, gaussian, evidence, mode=mode_of(state.search))
    posterior.know(mode.status(advice), warned=True)
    posterior.know(status)
    return posterior
