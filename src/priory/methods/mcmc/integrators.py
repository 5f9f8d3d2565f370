"""Integrators of Hamilton's equations: reversible and volume-preserving, hence exact after a Metropolis correction.

For the energy H = -log p(w) + p' C p / 2, with gradient g of log p and step e, kicks and drifts alternate:

    p <- p + b_i e g(w),        w <- w + a_i e C p,        ...,        p <- p + b_n e g(w)

The coefficients are palindromic and sum to one, so the map is its own inverse up to the sign of the momentum. Each kick
and each drift shifts one half of (w, p) by a function of the other, so its determinant is one.

`leapfrog` needs one gradient per step. `two_stage` needs two, and stays accurate for steps of more than twice the size:
its coefficients minimise the largest energy error of a Gaussian over all steps up to 2 (Blanes, Casas and Sanz-Serna
2014). One such step turns a Gaussian by a right angle with an acceptance of 0.95 in 25 dimensions, where two leapfrog
steps have 0.65.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from priory.methods.mcmc.joint import Joint
    from priory.methods.mcmc.metrics import Metric

OUTER_KICK = 0.21178  # the first and the last kick of two_stage
INTEGRATORS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "leapfrog": ((0.5, 0.5), (1.0,)),
    "two_stage": ((OUTER_KICK, 1 - 2 * OUTER_KICK, OUTER_KICK), (0.5, 0.5)),
}


def integrate(
    integrator: str,
    joint: Joint,
    metric: Metric,
    w: Tensor,
    p: Tensor,
    gradient: Tensor,
    step: Tensor,
    count: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take `count` steps and return position, momentum, log p and its gradient; `step` (*B, 1 or K, 1) may be negative.

    The last kick of a step is merged with the first of the next, and log p is evaluated only at the end.
    """
    kicks, drifts = INTEGRATORS[integrator]
    inner = [*kicks[1:-1], kicks[-1] + kicks[0]] * count  # the last of them is replaced by the last kick
    with torch.inference_mode(joint.recorded):  # operations are a sixth faster without autograd
        by = {part: part * step for part in {*inner, *kicks, *drifts}}
        p = torch.addcmul(p, gradient, by[kicks[0]])
        for kick, drift in zip(inner[:-1], (drifts * count)[:-1], strict=True):
            w = torch.addcmul(w, metric.velocity(p), by[drift])
            p = torch.addcmul(p, joint.gradient(w), by[kick])
        w = torch.addcmul(w, metric.velocity(p), by[drifts[-1]])
        value, gradient = joint(w)
        return w, torch.addcmul(p, gradient, by[kicks[-1]]), value, gradient


def kinetic(metric: Metric, p: Tensor) -> Tensor:
    """p' C p / 2, (*B, K)."""
    return 0.5 * (p * metric.velocity(p)).sum(-1)
