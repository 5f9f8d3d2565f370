"""Modes of a log density by Newton's method in a trust region, from several starts at once.

At each vector w the log density has the gradient g and the Hessian -H. In coordinates y = S (v - w), where S is
the diagonal of |H|^(1/2), the step maximises the quadratic model within a ball,

    maximise   g'S^-1 y - 1/2 y' A y   subject to |y| <= radius,    A = S^-1 H S^-1

exactly, from the eigenvalues of A (More and Sorensen 1983; Conn, Gould and Toint 2000). The scaling makes the method
invariant to the units of each parameter, and the ball is one of conditional standard deviations. A step is taken if the
log density rises by a share of what the model promises. Where the promise is below the rounding error of the log
density, it is taken if the gradient shrinks. The first ball has no bound, so that the mode of a Gaussian is reached in
one step from any distance. A vector at which the log density is not finite, or can't be evaluated, counts as too far.

A vector is a mode if |H^-1/2 g| <= 1e-6, the distance to the mode in standard deviations, if H is positive definite,
and if the log density falls beyond it. On a tail that rises towards an edge or to infinity |H^-1/2 g| vanishes too, but
the log density keeps rising.

Cost of an iteration: P backward passes over the data and O(P^3) per start, all starts in one batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.linalg import eigh

if TYPE_CHECKING:
    from priory.methods.mode_objective import Derivatives, ModeObjective

POLISHED_DISTANCE = 1e-9  # of |H^-1/2 g|, below which no further step is taken
MIN_GAIN_SHARE, GOOD_GAIN_SHARE, POOR_GAIN_SHARE = 1e-4, 0.75, 0.25  # of the promised gain: to move, to grow, to shrink
RADIUS_GROWTH, RADIUS_SHRINKAGE = 4.0, 0.25
MIN_STEP_EPS = 4.0  # of a coordinate, in machine epsilons: smaller steps don't change it
ROUNDING_EPS = 1e3  # rounding error of a log density, in machine epsilons of its size
MAX_ROUNDING = 1e-6  # of a log density that is partly computed in float32, relative to its size
NEAR_SURFACE = 0.8  # of the radius: a step of this length may be longer next time
MAX_RADIUS = 1e150
MIN_SHIFT = 1e-16  # of the smallest denominator, relative to the largest
HOPELESS_FACTOR = 10.0  # a start is hopeless this many times |log p| below the first
BEYOND_STEP = 6.0  # Newton steps: beyond a mode of order 2 to 6 the log density falls there, on a tail it rises
CORNER_REACH = 1e-5  # standard deviations on either side of a point, between which the slope at a corner jumps
MIN_CORNER_JUMP = 1e-3  # of the slope, per standard deviation; without a corner it changes by 2e-5
MAX_COORDINATE = 1e30  # beyond which the log density rises without bound
SECULAR_BISECTIONS = 60
MAX_START_HALVINGS = 60  # of a start without a finite density


@dataclass(frozen=True)
class Precision:
    """What the arithmetic of the log joint can tell apart."""

    eps: float
    tolerance: float  # of |H^-1/2 g| at a mode
    flat: float  # eigenvalue of A, whose diagonal is one, below which a direction is flat
    safe: float  # eigenvalue of A below which the first step is bounded too; minus this is a saddle


PRECISIONS = {
    torch.float64: Precision(torch.finfo(torch.float64).eps, tolerance=1e-6, flat=1e-13, safe=1e-8),
    torch.float32: Precision(torch.finfo(torch.float32).eps, tolerance=1e-3, flat=1e-6, safe=1e-5),
}
CLIMBING, MODE, TAIL, FLAT, SADDLE, STALLED, RUNAWAY, FAILED = range(8)  # how the search from one start ended


@dataclass
class ModeSearch:
    """The current point of every start, with the derivatives of the log joint there."""

    w: Tensor  # (*B, K, P); as everything here in float64, whatever the dtype of the log joint
    log_likelihood: Tensor  # (*B, K)
    log_prior: Tensor  # (*B, K)
    value: Tensor  # (*B, K), of the tempered log joint
    gradient: Tensor  # (*B, K, p), of the p leading coordinates, which vary
    hessian: Tensor  # (*B, K, p, p)
    radius: Tensor  # (*B, K), of the trust region
    turned: Tensor  # (*B, K), whether the log density was seen to fall beyond the mode
    pinned: Tensor  # (*B, K, p), whether a coordinate lies on a corner of the log density and is held there
    distance: Tensor  # (*B, K), |H^-1/2 g|
    outcome: Tensor  # (*B, K), one of the constants above

    def best(self) -> Tensor:
        """Return the index of the highest mode of each member, or of the highest point if there is none, (*B,)."""
        value = self.value.nan_to_num(nan=-math.inf, posinf=-math.inf)
        modes = value.masked_fill(self.outcome != MODE, -math.inf)
        others = value.masked_fill((self.outcome == RUNAWAY) | (self.outcome == FAILED), -math.inf)
        ranked = torch.stack([value.clamp(min=-torch.finfo(value.dtype).max), others, modes])
        first = (ranked > -math.inf).any(-1).long().cumsum(0).argmax(0)  # the last kind that exists
        return ranked.argmax(-1).gather(0, first[None])[0]

    def at(self, index: Tensor) -> ModeSearch:
        """Return the search of the starts with these indices (*B,), without the dimension of starts."""
        lead = index.ndim

        def pick(t: Tensor) -> Tensor:
            wide = index.reshape(*index.shape, *[1] * (t.ndim - lead)).expand(*index.shape, 1, *t.shape[lead + 1 :])
            return t.gather(lead, wide).squeeze(lead)

        return ModeSearch(**{name: pick(t) for name, t in vars(self).items()})

    def flat(self) -> ModeSearch:
        """Return views with the leading dimensions in one."""
        lead = self.value.ndim
        return ModeSearch(**{name: t.view(-1, *t.shape[lead:]) for name, t in vars(self).items()})


def begin(objective: ModeObjective, w: Tensor) -> ModeSearch:
    """Return the search from starts w (*B, K, P), the first of which is the most trusted of each member.

    A start without a finite density, or with one that is hopelessly below that of the first, moves towards the first.
    """
    shape, size = w.shape[:-1], objective.size
    w = w.double()
    first = w[..., :1, :].expand(w.shape).reshape(-1, w.shape[-1])
    points = w.reshape(first.shape).clone()
    floor = lowest_start(objective.first_order(first).value, size)
    for _ in range(MAX_START_HALVINGS):
        found = objective.first_order(points)
        lost = ~usable(found) | (found.value < floor)
        if not bool(lost.any()):
            break
        points[lost] = 0.5 * (points[lost] + first[lost])
    found = objective.second_order(points)
    assert found.hessian is not None
    failed = ~usable(found)
    zero = lambda t: t.masked_fill(failed.reshape(-1, *[1] * (t.ndim - 1)), 0.0)  # noqa: E731
    value = found.value.masked_fill(failed, -math.inf)
    outcome = torch.where(failed, FAILED, CLIMBING)
    parts = (
        points,
        zero(found.log_likelihood),
        zero(found.log_prior),
        value,
        zero(found.gradient),
        zero(found.hessian),
        torch.full_like(value, math.inf),
        torch.zeros_like(failed),
        torch.zeros_like(found.gradient, dtype=torch.bool),
        torch.full_like(value, math.inf),
        outcome,
    )
    return ModeSearch(*(part.reshape(*shape, *part.shape[1:]).contiguous() for part in parts))


def lowest_start(value: Tensor, size: int) -> Tensor:
    """Return the log density below which a start is hopeless, given those of the first starts, (k,)."""
    return (value - HOPELESS_FACTOR * (value.abs() + size)).nan_to_num(nan=-math.inf, neginf=-math.inf)


def advance(objective: ModeObjective, search: ModeSearch) -> bool:
    """Take one step from every start that has not ended, in place; return whether all have ended."""
    members = search.flat()
    now = (members.outcome == CLIMBING).nonzero()[:, 0]
    if not len(now):
        return True
    here = ModeSearch(**{name: t[now] for name, t in vars(members).items()})
    model = QuadraticModel.of(here, PRECISIONS[objective.dtype])
    here.distance = model.distance(model.slope)
    climb(objective, here, model)
    for name, t in vars(members).items():
        t[now] = getattr(here, name)
    return bool((search.outcome != CLIMBING).all())


@dataclass(frozen=True)
class QuadraticModel:
    """The quadratic model at k points, in the eigenvectors of A."""

    scale: Tensor  # S, (k, p)
    eigenvalues: Tensor  # of A, ascending, (k, p)
    basis: Tensor  # of A, (k, p, p)
    slope: Tensor  # the gradient, (k, p)
    precision: Precision

    @classmethod
    def of(cls, here: ModeSearch, precision: Precision) -> QuadraticModel:
        """Decompose the Hessians of k points."""
        gradient, hessian = unpinned(here)
        scale = curvature_scale(hessian, gradient)
        eigenvalues, basis = eigh(-hessian / (scale[:, :, None] * scale[:, None, :]))
        slope = (basis.mT @ (gradient / scale)[..., None])[..., 0]
        return cls(scale, eigenvalues, basis, slope, precision)

    def slope_of(self, gradient: Tensor) -> Tensor:
        """Return a gradient (k, p) in the model's coordinates, (k, p)."""
        return (self.basis.mT @ (gradient / self.scale)[..., None])[..., 0]

    def step(self, y: Tensor) -> Tensor:
        """Return the step in w of a step in the model's coordinates, (k, p)."""
        return (self.basis @ y[..., None])[..., 0] / self.scale

    def distance(self, slope: Tensor) -> Tensor:
        """Return |H^-1/2 g|, (k,); a flat direction counts with its slope."""
        size, flat = self.eigenvalues.abs(), self.precision.flat
        parts = torch.where(size > flat, slope / size.clamp(min=flat).sqrt(), slope)
        return parts.norm(dim=-1)

    @property
    def lowest(self) -> Tensor:
        """The lowest eigenvalue of A, (k,)."""
        return self.eigenvalues[:, 0]


def climb(objective: ModeObjective, here: ModeSearch, model: QuadraticModel) -> None:
    """Take a step from every start, adapt its radius, and set the outcome of those that have ended, in place."""
    precision, eps, size = model.precision, model.precision.eps, here.value.abs().clamp(min=1.0)
    definite = model.lowest > -precision.safe
    polished = (here.distance <= POLISHED_DISTANCE) & definite
    radius = bounded(here.radius, model)
    y = ball_step(model.slope, model.eigenvalues, radius, precision)
    promise = (model.slope * y - 0.5 * model.eigenvalues * y.square()).sum(-1)
    # a ball is of no use where the gain can't be measured
    near = polished | ((promise <= ROUNDING_EPS * eps * size) & definite)
    y = torch.where(near[:, None], newton_step(model.slope, model.eigenvalues, precision), y)
    step, length = model.step(y), y.norm(dim=-1)
    trial = here.w.clone()
    trial[:, : objective.size] += step
    trial = objective.rounded(trial)

    found = objective.first_order(trial)
    beyond = trial.abs().amax(-1) >= MAX_COORDINATE
    gain = found.value - here.value
    sound = usable(found) & ~beyond & (gain > -MAX_ROUNDING * size)
    rises = (gain > MIN_GAIN_SHARE * promise) & ~near
    ahead = model.slope_of(found.gradient.masked_fill(here.pinned, 0.0))
    shrinks = (model.distance(ahead) < 0.5 * here.distance) & (model.lowest > 0)
    moved = sound & (rises | shrinks) & ~polished

    share = gain / promise.clamp(min=torch.finfo(promise.dtype).tiny)
    worse = ~near & (~moved | (rises & ~shrinks & (share < POOR_GAIN_SHARE)))
    better = moved & rises & (share > GOOD_GAIN_SHARE) & (length > NEAR_SURFACE * radius)
    here.radius = torch.where(worse, RADIUS_SHRINKAGE * length, torch.where(better, RADIUS_GROWTH * radius, radius))
    resolution = MIN_STEP_EPS * eps * here.w[:, : objective.size].abs()
    stuck = ~moved & ~polished & (near | (step.abs() <= resolution).all(-1))
    here.outcome = torch.where(stuck, STALLED, torch.where(beyond, RUNAWAY, here.outcome))
    here.outcome = torch.where(stuck & ~definite, SADDLE, here.outcome)
    close = here.distance <= precision.tolerance
    if bool((close & ~here.turned).any()):
        here.turned = here.turned | (close & turns(objective, here, model))
    kind = torch.where(model.lowest < precision.flat, FLAT, torch.where(here.turned, MODE, TAIL))
    here.outcome = torch.where(polished | (close & (here.outcome == STALLED)), kind, here.outcome)
    if bool(((here.outcome == STALLED) | ((here.outcome != CLIMBING) & here.pinned.any(-1))).any()):
        hold_corners(objective, here, model)
    if bool(moved.any()):
        move(here, moved, trial, objective.second_order(trial[moved]))


def turns(objective: ModeObjective, here: ModeSearch, model: QuadraticModel) -> Tensor:
    """Whether the log density falls beyond the end of Newton's step, and not only rises more slowly, (k,)."""
    y = newton_step(model.slope, model.eigenvalues, model.precision)
    least = model.precision.tolerance / here.distance.clamp(min=torch.finfo(y.dtype).tiny)
    y = y * BEYOND_STEP * torch.where(here.distance > 0, least.clamp(min=1.0), 0.0)[:, None]
    beyond = here.w.clone()
    beyond[:, : objective.size] += model.step(y)
    found = objective.first_order(beyond)
    ahead = (model.slope_of(found.gradient.masked_fill(here.pinned, 0.0)) * y).sum(-1)
    return (ahead < 0) | ~usable(found) | (y == 0).all(-1)


def hold_corners(objective: ModeObjective, here: ModeSearch, model: QuadraticModel) -> None:
    """Hold coordinates on a corner of the log density where the search stalls, and go on, in place.

    On a corner, as at the zero of a Laplace prior, the slope jumps from positive to negative. A search that ends where
    that is no longer so for a coordinate that is held has stalled.
    """
    asked = (here.outcome == STALLED) | ((here.outcome != CLIMBING) & here.pinned.any(-1))
    size, scale = objective.size, model.scale[asked]
    reach = torch.diag_embed(CORNER_REACH / scale)  # (a, p, p)
    slopes = []
    for sign in (1.0, -1.0):
        there = here.w[asked][:, None, :].repeat(1, size, 1)
        there[..., :size] += sign * reach
        found = objective.first_order(there.flatten(0, 1)).gradient.unflatten(0, there.shape[:2])
        slopes.append(found.diagonal(dim1=-2, dim2=-1) / scale)
    above, below = slopes
    jumps = torch.zeros_like(here.pinned)
    jumps[asked] = (above < CORNER_REACH) & (below > -CORNER_REACH) & (below - above > MIN_CORNER_JUMP)
    more = (here.outcome == STALLED) & (jumps & ~here.pinned).any(-1)
    left = asked & (here.pinned & ~jumps).any(-1)
    here.outcome = torch.where(more, CLIMBING, torch.where(left, STALLED, here.outcome))
    here.pinned = torch.where(more[:, None], jumps | here.pinned, here.pinned)
    here.radius = torch.where(more, math.inf, here.radius)


def unpinned(here: ModeSearch) -> tuple[Tensor, Tensor]:
    """Return gradient (..., p) and Hessian (..., p, p) over the coordinates that are not held, minus one for those."""
    both = here.pinned[..., :, None] | here.pinned[..., None, :]
    hessian = here.hessian.masked_fill(both, 0.0) - torch.diag_embed(here.pinned.to(here.hessian))
    return here.gradient.masked_fill(here.pinned, 0.0), hessian


def move(here: ModeSearch, moved: Tensor, trial: Tensor, found: Derivatives) -> None:
    """Move some starts to their trial points, in place; one whose Hessian is not finite there has failed."""
    here.w = torch.where(moved[:, None], trial, here.w)
    for name in ("log_likelihood", "log_prior", "value", "gradient", "hessian"):
        getattr(here, name)[moved] = getattr(found, name)
    broken = ~torch.isfinite(here.hessian).flatten(1).all(-1)
    here.outcome = torch.where(broken, FAILED, here.outcome)
    here.hessian = torch.where(broken[:, None, None], 0.0, here.hessian)


def curvature_scale(hessian: Tensor, gradient: Tensor) -> Tensor:
    """Return S, (k, p): the root of the Hessian's diagonal, or the slope where the log density is linear."""
    diagonal = hessian.diagonal(dim1=-2, dim2=-1).abs()
    tiny = torch.finfo(hessian.dtype).tiny
    linear = torch.where(gradient.abs() > tiny, gradient.abs(), torch.ones_like(gradient))
    return torch.where(diagonal > tiny, diagonal.sqrt(), linear)


def bounded(radius: Tensor, model: QuadraticModel) -> Tensor:
    """Return the radius, (k,), with a bound of one standard deviation per coordinate where H isn't definite."""
    unsafe = torch.isinf(radius) & (model.lowest < model.precision.safe)
    return torch.where(unsafe, math.sqrt(model.slope.shape[-1]), radius)


def newton_step(slope: Tensor, eigenvalues: Tensor, precision: Precision) -> Tensor:
    """Return the y, (k, p), at which the model's slope vanishes; zero along directions that are flat."""
    return torch.where(eigenvalues > precision.flat, slope / eigenvalues.clamp(min=precision.flat), 0.0)


def ball_step(slope: Tensor, eigenvalues: Tensor, radius: Tensor, precision: Precision) -> Tensor:
    """Return the y, (k, p), that maximises slope'y - 1/2 sum eigenvalues y^2 in |y| <= radius.

    y = slope / (eigenvalues + shift), with the smallest shift >= 0 that keeps y in the ball and every denominator
    positive. If the slope vanishes along the lowest eigenvalue, y moves along that to the surface (the hard case).
    """
    lowest, tiny = eigenvalues[:, 0], torch.finfo(slope.dtype).tiny
    newton = newton_step(slope, eigenvalues, precision)
    level = (slope.abs() <= POLISHED_DISTANCE) | (eigenvalues > precision.flat)  # no slope where it is flat
    inside = (lowest > -precision.safe) & level.all(-1) & (newton.norm(dim=-1) <= radius)
    radius = radius.clamp(max=MAX_RADIUS)
    above = eigenvalues - lowest[:, None]  # >= 0
    length = lambda smallest: (slope / (above + smallest[:, None])).norm(dim=-1)  # noqa: E731
    high = slope.norm(dim=-1).clamp(min=tiny) / radius  # of the smallest denominator: there |y| <= radius
    low = torch.maximum(lowest, MIN_SHIFT * torch.maximum(high, above[:, -1])).clamp(min=tiny)
    high = torch.maximum(high, low)
    hard = length(low) < radius
    log_low, log_high = low.log(), high.log()
    for _ in range(SECULAR_BISECTIONS):
        middle = 0.5 * (log_low + log_high)
        far = length(middle.exp()) > radius
        log_low, log_high = torch.where(far, middle, log_low), torch.where(far, log_high, middle)
    y = slope / (above + torch.where(hard, low, log_high.exp())[:, None])
    missing = (radius.square() - y.square().sum(-1)).clamp(min=0.0).sqrt()
    sign = torch.where(slope[:, 0] < 0, -1.0, 1.0)
    y[:, 0] += torch.where(hard & (lowest < -precision.safe), sign * missing, 0.0)
    return torch.where(inside[:, None], newton, y)


def usable(found: Derivatives) -> Tensor:
    """Whether the log joint and its derivatives are finite, (k,)."""
    fine = torch.isfinite(found.value) & torch.isfinite(found.gradient).all(-1)
    return fine if found.hessian is None else fine & torch.isfinite(found.hessian).flatten(1).all(-1)
