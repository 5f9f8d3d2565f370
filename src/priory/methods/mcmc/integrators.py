"""Integrators of Hamilton's equations: reversible, of volume one, and so exact after a Metropolis correction.

For the energy H = -log p(w) + p' C p / 2, with gradient g of log p and step e, kicks and drifts alternate:

    p <- p + b_i e g(w),        w <- w + a_i e C p,        ...,        p <- p + b_n e g(w)

The coefficients are palindromes that sum to one, which makes the map its own inverse after the momentum is turned. Each
kick and each drift moves one half by a function of the other: their determinants are one. `leapfrog` needs one gradient
a step; `two_stage` needs two, and its error is smaller at the same cost where a posterior is nearly Gaussian
(McLachlan 1995; Blanes, Casas and Sanz-Serna 2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from priory.methods.mcmc.joint import Joint
    from priory.methods.mcmc.metrics import Metric

MCLACHLAN = 0.1931833275037836  # the kick that makes the third-order error least
INTEGRATORS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "leapfrog": ((0.5, 0.5), (1.0,)),
    "two_stage": ((MCLACHLAN, 1 - 2 * MCLACHLAN, MCLACHLAN), (0.5, 0.5)),
}


def integrate(
    integrator: str, joint: Joint, metric: Metric, w: Tensor, p: Tensor, gradient: Tensor, step: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step: position, momentum, log p and its gradient after it; `step` (*B, 1 or K, 1), may be negative."""
    kicks, drifts = INTEGRATORS[integrator]
    p = torch.addcmul(p, gradient, step, value=kicks[0])
    value = gradient  # no integrator is without a drift
    for kick, drift in zip(kicks[1:], drifts, strict=True):
        w = torch.addcmul(w, metric.velocity(p), step, value=drift)
        value, gradient = joint(w)
        p = torch.addcmul(p, gradient, step, value=kick)
    return w, p, value, gradient


def kinetic(metric: Metric, p: Tensor) -> Tensor:
    """p' C p / 2, (*B, K)."""
    return 0.5 * (p * metric.velocity(p)).sum(-1)
