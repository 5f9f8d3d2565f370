"""Gaussian variational inference with fixed draws, by Newton steps.

    q(w) = N(m, L L'),    maximise    F(m, L) = mean_s log p(m + L z_s) + log |det L|

The draws z_s stay the same, so that F is an ordinary function with an optimum that can be reached (Giordano, Ingram and
Broderick 2024). Their first and second moments are exactly those of N(0, I) and they are symmetric, so that the optimum
of F for a Gaussian posterior is the exact one. With g_s the gradient of log p at w_s = m + L z_s,

    r = -mean_s L'g_s,     A = -mean_s (L'g_s z_s' + z_s g_s'L) / 2

are the gradient of -F in L^-1 m, and by Stein's lemma the expected Hessian of -log p in the coordinates of z. A step is

    m <- m - rho L A_rho^-1 r,     L <- L A_rho^-1/2,     A_rho = (1 - rho) I + rho A

which for rho = 1 gives the exact posterior if that is Gaussian: the step of the variational online Newton method (Khan
and Rue 2023) with fixed draws. rho is halved until F rises. A mean-field L is diagonal and takes the diagonal of A
only; its mean takes all of A, so that correlations of the posterior don't slow it down. The quantity

    gap = r' A^-1 r / 2 + sum_i (a_i - 1 - log a_i) / 2,      a the eigenvalues of A, or its diagonal,

is the rise of F that is still to come, in nats, if log p is nearly quadratic over q. Computed from draws that q was not
fitted to, it also contains what q has lost to the choice of its draws. No second derivatives of log p are needed, and
each step costs S gradients of log p and O(S P^2 + P^3).

References:
    Giordano, Ingram and Broderick (2024), Black box variational inference with a deterministic objective: faster, more
    accurate, and even more black box.
    Khan and Rue (2023), The Bayesian learning rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from priory.core.linalg import eigh, try_cholesky

LogJoint = Callable[[Tensor], tuple[Tensor, Tensor]]  # log p and its gradient, (S, P) -> (S,), (S, P)

MIN_DRAWS = 512
DRAWS_PER_PARAMETER = 4  # for fewer, draws with exact second moments are far from normal
MAX_DRAWS = 1 << 15
MAX_PARAMETERS = 1_024  # for which a step evaluates 4,096 draws
DRAWS_GROWTH = 4  # factor between rounds whose draws were too few
MAX_STRETCH = 8.0  # of a standard deviation in one step
MAX_HALVINGS = 30  # of rho
MIN_CURVATURE_SHARE = 1e-8  # of the largest eigenvalue of A
FIXED_GAP_NATS, FIXED_SHIFT = 1e-4, 0.005  # to the optimum for fixed draws, below which a round ends
FRESH_GAP_NATS = 0.01  # to the optimum of the family, measured with fresh draws
MAX_MEAN_SHIFT = 0.05  # standard deviations of q by which fresh draws may move a mean
MIN_PROBABILITY = 2.0**-40  # of a quantile
ROUNDING_EPS = 64.0  # differences of F, in eps, that are rounding


@dataclass(frozen=True)
class GaussianQ:
    """N(loc, L L') in float64, with L the root: standard deviations (P,), or a matrix (P, P)."""

    loc: Tensor
    root: Tensor

    @property
    def full(self) -> bool:
        """Whether the covariance is full."""
        return self.root.ndim == 2

    def at(self, z: Tensor) -> Tensor:
        """Return w = m + L z, (S, P)."""
        return self.loc + (z @ self.root.mT if self.full else z * self.root)

    def log_det(self) -> Tensor:
        """Return log |det L|, ()."""
        return torch.linalg.slogdet(self.root).logabsdet if self.full else self.root.log().sum()

    def pulled_back(self, gradient: Tensor) -> Tensor:
        """Return L'g, (S, P)."""
        return gradient @ self.root if self.full else gradient * self.root

    def scales(self) -> Tensor:
        """Return the standard deviation of each coordinate, (P,)."""
        return self.root.square().sum(-1).sqrt() if self.full else self.root

    def covariance(self) -> Tensor:
        """Return L L', (P, P)."""
        return self.root @ self.root.mT if self.full else self.root.square().diag()


@dataclass(frozen=True)
class NewtonPoint:
    """The objective at a Gaussian, and the Newton step from there."""

    q: GaussianQ
    z: Tensor  # (S, P)
    values: Tensor  # log p at the draws, (S,)
    objective: float  # F, in nats
    gradient: Tensor  # r, (P,)
    curvature: Tensor  # eigenvalues of A that the mean takes, (P,), positive
    basis: Tensor  # eigenvectors of A, (P, P)
    spread: Tensor  # what L takes of A: its eigenvalues, or its diagonal, (P,)

    @classmethod
    def at(cls, joint: LogJoint, q: GaussianQ, z: Tensor) -> NewtonPoint | None:
        """Evaluate the objective and its derivatives at q; None where log p is not finite at a draw."""
        values, gradient = joint(q.at(z))
        values, gradient = values.double(), gradient.double()
        objective = float(values.mean() + q.log_det())
        if not math.isfinite(objective) or not bool(torch.isfinite(gradient).all()):
            return None
        pulled = q.pulled_back(gradient)
        product = -(pulled.mT @ z) / len(z)
        eigenvalues, basis = eigh(0.5 * (product + product.mT))
        spread = eigenvalues if q.full else product.diagonal()
        floor = MIN_CURVATURE_SHARE * float(eigenvalues.abs().max())
        curvature = eigenvalues.abs().clamp(min=max(floor, torch.finfo(z.dtype).tiny))
        return cls(q, z, values, objective, -pulled.mean(0), curvature, basis, spread)

    @cached_property
    def gap(self) -> float:
        """The rise of the objective that is still to come, in nats."""
        move = self.basis.mT @ self.gradient
        spread = self.spread.clamp(MAX_STRETCH**-2, MAX_STRETCH**2)
        return 0.5 * float((move.square() / self.curvature).sum() + (spread - 1 - spread.log()).sum())

    @cached_property
    def shift(self) -> float:
        """The largest move of a mean by the full step, in standard deviations of q."""
        step = self.step(1.0)
        return float(((step.loc - self.q.loc) / self.q.scales()).abs().max())

    @property
    def settled(self) -> bool:
        """Whether q is at the optimum for these draws."""
        return self.gap <= FIXED_GAP_NATS and self.shift <= FIXED_SHIFT

    def step(self, rho: float) -> GaussianQ:
        """Return the Gaussian after a step of size rho."""
        mixed = 1 - rho + rho * self.curvature
        d = self.basis @ (self.basis.mT @ self.gradient / mixed) * -rho
        stretch = (1 - rho + rho * self.spread).clamp(MAX_STRETCH**-2, MAX_STRETCH**2).rsqrt()
        q = self.q
        if q.full:
            return GaussianQ(q.loc + q.root @ d, q.root @ (self.basis * stretch) @ self.basis.mT)
        return GaussianQ(q.loc + q.root * d, q.root * stretch)


def ascend(joint: LogJoint, here: NewtonPoint) -> NewtonPoint | None:
    """Take the longest of the steps rho = 1, 1/2, 1/4, ... that raises the objective; None if none does."""
    rounding = ROUNDING_EPS * torch.finfo(here.values.dtype).eps * float(here.values.abs().max())
    rho = 1.0
    for _ in range(MAX_HALVINGS):
        there = NewtonPoint.at(joint, here.step(rho), here.z)
        if there is not None and there.objective > here.objective - rounding:
            return there
        rho /= 2
    return None


def first_draws(size: int) -> int:
    """Return the number of draws of the first round for P coordinates: a power of two."""
    return 1 << (max(MIN_DRAWS, DRAWS_PER_PARAMETER * size) - 1).bit_length()


def sobol(count: int, size: int, seed: int) -> Tensor:
    """Return scrambled Sobol points in pairs u, 1 - u (Owen 1995), (count, size), float64 in (0, 1)."""
    half = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed).draw(count // 2, dtype=torch.float64)
    half = half.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    return torch.cat([half, 1 - half])


def matched_draws(count: int, size: int, seed: int, device: torch.device | None = None) -> Tensor:
    """Return draws of N(0, I) in pairs z, -z with exactly the covariance I, (count, size), float64.

    They are Sobol points through the quantile function. Where there are fewer than four per coordinate, only the
    variances are exact.
    """
    z = torch.special.ndtri(sobol(count, size, seed)).to(device)
    if count >= DRAWS_PER_PARAMETER * size:
        factor, definite = try_cholesky(z.mT @ z / count)
        if bool(definite):
            return torch.linalg.solve_triangular(factor, z.mT, upper=False).mT.contiguous()
    return z / z.square().mean(0).sqrt()
