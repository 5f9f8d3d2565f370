"""Deconvolution: from a penalty back to its log prior, A = -H(beta_s) - F^-1[F r / F mirrored beta_s].

Dividing in Fourier space would amplify noise by e^(s^2 w^2 / 2). With g_s = -r(., s) - H(beta_s), which equals
E A(mu + s z), each family has an inversion that avoids it:

    gaussian, logistic   g_s = A + c2 s^2 A'' + c4 s^4 A'''' + ...: Richardson extrapolation to s = 0 from s, 2s, 4s,
                         A = (64 g_s - 20 g_2s + g_4s) / 45
    gumbel               odd powers too: extrapolated from s, 2s, 4s, 8s, which cancels s^2, s^3 and s^4, around the
                         mean mu + s E z
    laplace              A = g_s - s^2 g_s'', exact at any scale
    uniform              A(mu + h) = (d/dh + d/dmu) [h g_h(mu)], exact at any scale

The error is estimated from the same formula with one point less or twice the step. It is 4e-15 to 1e-6 for smooth
priors. If the log prior has a corner, the error there is of the order of the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from priory.penalties.equivalence.families import LocationScaleFamily

PenaltyFunction = Callable[[Tensor, Tensor], Tensor]
CANDIDATE_SCALES = (0.2, 0.05, 0.02, 0.005, 0.002, 0.0005, 0.0001)  # in widths of the prior
SMOOTH_RATIO = 16.0  # least ratio of successive extrapolation steps where there is no corner
STEP_SCALES = {"laplace": 2e-3, "uniform": 1e-3}  # step of the differences, in scales


@dataclass(frozen=True)
class Deconvolution:
    """The log prior up to its constant, as a function theta -> (A, estimated error).

    Attributes:
        penalty: The penalty r(mu, s).
        family: Family of posteriors.
        scale: Scale at which the penalty is inverted.
    """

    penalty: PenaltyFunction
    family: LocationScaleFamily
    scale: float

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        if self.family.name == "laplace":
            return self._laplace(theta)
        if self.family.name == "uniform":
            return self._uniform(theta)
        return self._richardson(theta)

    def smoothed(self, theta: Tensor, scale: Tensor) -> Tensor:
        """Return g = -r - H."""
        return -self.penalty(theta, scale) - self.family.entropy(scale)

    def _richardson(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Extrapolate to scale zero."""
        powers = (2, 4) if self.family.symmetric else (2, 3, 4)
        scales = self.scale * 2.0 ** torch.arange(len(powers) + 1, dtype=torch.float64)
        lead = scales.reshape(-1, *[1] * theta.ndim)
        g = self.smoothed(theta - self.family.mean * lead, lead.expand(-1, *theta.shape))
        steps = [torch.tensordot(richardson_weights(powers[:k]), g[: k + 1], 1) for k in range(len(powers) + 1)]
        before, last = ((b - a).abs() for a, b in pairwise(steps[-3:]))
        # near a corner the series contains s itself, and the last step would underestimate the error
        return steps[-1], torch.where(before < SMOOTH_RATIO * last, torch.maximum(2 * before, last), last)

    def _laplace(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Apply A = g - s^2 g'' with differences of fourth order."""
        step = STEP_SCALES["laplace"]
        at = torch.stack([theta + k * step * self.scale for k in (-4, -2, -1, 0, 1, 2, 4)])
        g = self.smoothed(at, torch.full_like(at, self.scale))

        def inverse(far: int, near: int, step: float) -> Tensor:
            sides = 16 * (g[3 - near] + g[3 + near]) - (g[3 - far] + g[3 + far])
            return g[3] - (sides - 30 * g[3]) / (12 * step**2)

        best = inverse(2, 1, step)
        return best, (best - inverse(3, 2, 2 * step)).abs()

    def _uniform(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Average A over a small interval, as the difference of two integrals that share their lower end."""

        def inverse(step: float) -> Tensor:
            mean = []
            for reach in (step, 2 * step):
                half = self.scale * torch.tensor([1 - reach / 2, 1 + reach / 2], dtype=torch.float64)
                half = half.reshape(-1, *[1] * theta.ndim).expand(-1, *theta.shape)
                lower = theta - 2 * self.scale  # both intervals start here and end at theta -+ reach * scale
                areas = half * self.smoothed(lower + half, half)
                mean.append((areas[1] - areas[0]) / (reach * self.scale))
            return (4 * mean[0] - mean[1]) / 3

        best = inverse(STEP_SCALES["uniform"])
        return best, (best - inverse(2 * STEP_SCALES["uniform"])).abs()


def richardson_weights(powers: tuple[int, ...]) -> Tensor:
    """Return weights at the scales 1, 2, 4, ... that sum to 1 and cancel these powers of the scale.

    >>> 45 * richardson_weights((2, 4))
    tensor([ 64., -20.,   1.], dtype=torch.float64)
    """
    scales = 2.0 ** torch.arange(len(powers) + 1, dtype=torch.float64)
    rows = torch.stack([torch.ones_like(scales), *(scales**p for p in powers)])
    right = torch.zeros_like(scales)
    right[0] = 1
    return torch.linalg.solve(rows, right)


def deconvolve(penalty: PenaltyFunction, family: LocationScaleFamily, theta: Tensor, unit: float) -> Deconvolution:
    """Return the deconvolution at the candidate scale with the smallest estimated mean error over `theta`.

    The mean error is compared, since at a pole of the log prior the largest error is the same at every scale.
    """
    tried = [Deconvolution(penalty, family, unit * step) for step in CANDIDATE_SCALES]
    with torch.no_grad():
        errors = torch.stack([one(theta)[1].nan_to_num(torch.inf).mean() for one in tried])
    return tried[int(errors.argmin())]
