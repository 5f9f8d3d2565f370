"""Pathfinder: the best normal approximation along quasi-Newton paths from several starts.

After Zhang, Carpenter, Gelman and Vehtari (2022). L-BFGS climbs log p(w, D) from random starts. At each point w of a
path, with gradient g, the L-BFGS estimate of the inverse Hessian is the covariance of a normal approximation, centred
at the end of the Newton step:

    q = N(w + C g, C),    C = diag(a) + B G B',    B = [diag(a) Z, S]

        G = [      0                      -R^-1           ]     S = (s_1 ... s_J)   the last J moves,
            [   -R^-T    R^-T (D + Z' diag(a) Z) R^-1     ]     Z = (z_1 ... z_J)   their changes of -g,

with R the upper triangle of S'Z and D its diagonal (Byrd, Nocedal and Schnabel 1994), and the diagonal a updated with
each move (Gilbert and Lemarechal 1989). Each path keeps its approximation with the highest ELBO. The draws of all paths
are weighted by p / q, with q the uniform mixture of the paths' approximations; the weights are smoothed (PSIS), and the
draws resampled. k-hat diagnoses the weights, and a population of further starts (`priory.methods.variational.arrival`)
looks for modes that no path reached. The paper divides by the q of the draw's own path instead; the mixture
gives no large weight to a draw that another path covers.

A path starts outside the bulk of the posterior, ends at its mode, and passes through the typical set in between. The
draws are therefore a fast start for MCMC and for variational methods. Cost of an iteration: two or three gradients and
`elbo_draws` values of log p per path, all paths in one batch, and O(J^2 P).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from priory.core.errors import DivergedError, is_integer, require, warn
from priory.core.linalg import try_cholesky
from priory.core.streams import stream
from priory.diagnostics.flatness import FLATNESS_DRAWS, flat_coordinate, name_of
from priory.diagnostics.importance import importance_resample, k_hat, psis
from priory.estimators.evidence_bound import assemble
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.finite_starts import halved_until_finite, usable
from priory.methods.variational.arrival import Search, missed_modes, searchable
from priory.methods.variational.gaussian_newton import GaussianQ
from priory.methods.variational.path_normals import Normal, chosen, each_log_prob, mixture
from priory.models.base import has_network
from priory.posteriors import Evidence, Posterior
from priory.posteriors.draws import Draws
from priory.posteriors.status import MAX_K_HAT, of_cap

if TYPE_CHECKING:
    from collections.abc import Callable

    from priory.core.data import Data
    from priory.models.target import Target

    Joint = Callable[[Tensor], tuple[Tensor, Tensor]]  # log p and its gradient, (*B, P) -> (*B,), (*B, P)

WOLFE_GAIN, WOLFE_SLOPE = 1e-4, 0.9  # Wolfe conditions: least share of the promised gain, largest share of the slope
MAX_TRIALS = 40  # points per line search
MIN_CURVATURE = 1e-12  # s'z / z'z above which a move updates the curvature
CONVERGED_GAIN_EPS = 500  # gain of log p, in machine epsilons, below which a path has converged
MAX_DRAW_ELEMENTS = 1 << 24  # numbers (coordinates x rows) of draws that are evaluated together
BLOCK_ROWS = 1024  # rows read at a time
UNCHECKED_METRICS = ("elbo", "loss")  # minus infinity until a path finds a finite value


@dataclass
class PathfinderState:
    """Position, curvature estimate and best approximation so far of each path."""

    w: Tensor  # (*B, K, P)
    value: Tensor  # log p(w, D), (*B, K)
    gradient: Tensor  # (*B, K, P)
    diagonal: Tensor  # a, (*B, K, P)
    moves: Tensor  # S, newest last, zero-padded, (*B, K, J, P)
    changes: Tensor  # Z, newest last, zero-padded, (*B, K, J, P)
    normal: Normal  # the approximation at w
    best: Normal
    elbo: Tensor  # of the best, (*B, K)
    active: Tensor  # (*B, K), whether a path has not converged
    seed: int  # of the draws that `posterior` makes
    data: Data = field(metadata={"fixed": True})


@dataclass(frozen=True)
class Pathfinder(Options):
    """Pathfinder: draws from the best normal approximations along several quasi-Newton paths.

    L-BFGS climbs log p(w, D) from random starts. At each point w of a path, with gradient g,

        q = N(w + C g, C)

    with C the L-BFGS estimate of the inverse Hessian. Each path keeps the q with the highest ELBO; the draws of all
    paths are resampled by importance weights. Every step reads all of the data. The posterior's k-hat diagnoses the
    weights; it is minus infinity where the approximation is exact and the weights are equal. The "elbo" in the history
    is the highest estimate so far, and therefore slightly too high.

    Args:
        paths: Number of paths. Default: 8.
        draws: Number of draws that the posterior keeps, and that each path proposes. Default: 1000.
        history: Number J of moves that the inverse Hessian is built from. More than P captures strong correlations;
            memory is 6 J P numbers per path. Default: 40.
        elbo_draws: Number of draws that estimate the ELBO of each approximation. Default: 10.
        iterations: Largest number of iterations of a path. Default: 300.
        resample: Whether to resample the draws by their importance weights. If False, equally many draws of each path
            are kept as they are; k-hat is computed all the same. Default: True.
        start: Method to fit first, or posterior to start from. Default: None, the model's initial values.

    Example:
        >>> import priory as pr
        >>> density = pr.Density(lambda p: -0.5 * (p["x"] - 3).square(), {"x": pr.Param()})
        >>> posterior = pr.fit(density, None, pr.Pathfinder(), progress=False)
        >>> abs(posterior.mean["x"].item() - 3) < 0.2
        True

    References:
        Zhang, Carpenter, Gelman and Vehtari (2022), Pathfinder: parallel quasi-Newton variational inference.
        Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling.
    """

    paths: int = 8
    draws: int = 1000
    history: int = 40
    elbo_draws: int = 10
    iterations: int = 300
    resample: bool = True
    start: Any = None

    def __post_init__(self) -> None:
        for name in ("paths", "draws", "history", "elbo_draws", "iterations"):
            require(is_integer(getattr(self, name), 1), name, "Pathfinder", "be an integer >= 1", getattr(self, name))
        require(isinstance(self.resample, bool), "resample", "Pathfinder", "be True or False", self.resample)

    @property
    def traits(self) -> Traits:
        return Traits(reads="pass", trains_buffers=False)

    def length(self, data: Data) -> int:
        return self.iterations

    def init(
        self,
        target: Target,
        plan: Plan,
        generator: torch.Generator,
        shape: torch.Size = torch.Size(),
        start: Posterior | None = None,
    ) -> PathfinderState:
        w = target.start(plan.data, torch.Size([*shape, self.paths]), generator, start).double()
        w, value, gradient, alive = usable_starts(log_joint(target, plan.data), w)
        none = w.new_zeros(*w.shape[:-1], self.history, w.shape[-1])
        diagonal = torch.ones_like(w)
        return PathfinderState(
            w,
            value,
            gradient,
            diagonal,
            moves=none,
            changes=none.clone(),
            normal=approximation(w, gradient, diagonal, none, none),
            best=approximation(w, gradient, diagonal, none, none),
            elbo=torch.full_like(value, -math.inf),
            active=alive,
            seed=int(torch.randint(2**62, (), generator=generator, device=w.device)),
            data=plan.data,
        )

    def step(
        self, target: Target, state: PathfinderState, batch: Data, generator: torch.Generator
    ) -> tuple[PathfinderState, Info]:
        w, value, gradient, moved = line_search(log_joint(target, batch), state)
        gain = value - state.value
        state.diagonal, state.moves, state.changes = updated_history(
            state, w - state.w, state.gradient - gradient, moved
        )
        state.w, state.value, state.gradient = w, value, gradient
        state.normal = approximation(w, gradient, state.diagonal, state.moves, state.changes)

        noise = torch.randn(self.elbo_draws, *w.shape, generator=generator, dtype=w.dtype, device=w.device)
        draws = state.normal.draw(noise)
        elbo = log_ratio(target, batch, draws, state.normal.log_prob(draws)).mean(0)
        better = moved & (elbo > state.elbo)
        state.elbo = torch.where(better, elbo, state.elbo)
        state.best = chosen(better, state.normal, state.best)

        rounding = CONVERGED_GAIN_EPS * torch.finfo(target.model.dtype).eps * value.abs().clamp(min=1.0)
        state.active = moved & (gain > rounding)
        metrics: dict[str, Tensor | float] = {
            "elbo": state.elbo.amax(-1),
            "loss": -value.amax(-1),
        }
        return state, Info(metrics, done=not bool(state.active.any()), unchecked=UNCHECKED_METRICS)

    def posterior(self, target: Target, state: PathfinderState, draws: Tensor | None = None) -> Draws:
        best = best_of_paths(state)
        flat = flat_sentence(target, state.data, best, state.seed)
        generator = stream(state.seed, "draws", device=state.w.device)
        noise = torch.randn(
            self.draws, *best.loc.shape, generator=generator, dtype=best.loc.dtype, device=best.loc.device
        )
        w = best.draw(noise).flatten(0, 1)  # (draws K, P), paths interleaved
        w = w.to(target.model.dtype).double()  # as they are kept
        log_weights = log_ratio(target, state.data, w, mixture(best, w))
        places = slice(self.draws)
        if self.resample:
            places = importance_resample(psis(log_weights)[0], self.draws, generator)
        found = Draws(
            target, w[places].to(target.model.dtype), k_hat=k_hat(log_weights), evidence=evidence(target, log_weights)
        )
        found.know(of_cap(not bool(state.active.all()), None, "Every path of Pathfinder"))
        missed = ""
        if self.start is None and found.k_hat is not None and found.k_hat <= MAX_K_HAT:  # else log p(D) is unreliable
            missed = missed_sentence(target, state.data, best, float(found.log_evidence), state.seed)
        if missed:
            found.doubt(missed)
        if flat:
            found.doubt(flat)
        return found


# The log joint at many vectors.


def log_joint(target: Target, data: Data) -> Joint:
    """Return a function for the tempered log joint over all rows and its gradient, (*B, P) -> (*B,), (*B, P).

    It is evaluated in the model's floating type, and its results are float64: differences of gradients and the algebra
    of the paths would lose what float32 has on raw scales.
    """

    def both(w: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = target.whole_log_joint_and_grad(w.to(target.model.dtype), data, BLOCK_ROWS)
        return value.double(), gradient.double()

    return both


def log_ratio(target: Target, data: Data, w: Tensor, log_q: Tensor) -> Tensor:
    """Return the tempered log joint minus log q at draws w (n, *B, P), (n, *B); minus infinity where not finite."""
    each = w[0].numel() * max(1, min(BLOCK_ROWS, data.num_data or 1))
    parts = []
    with torch.no_grad():
        for v, q in zip(
            w.split(max(1, MAX_DRAW_ELEMENTS // each)), log_q.split(max(1, MAX_DRAW_ELEMENTS // each)), strict=True
        ):
            v = v.to(target.model.dtype)
            volume = target.model.layout.log_det(v)
            bound = assemble(target, target.log_likelihood(v, data, rows=BLOCK_ROWS), -target.log_prior(v), -q, volume)
            parts.append(target.likelihood_power * bound.value)
    return torch.cat(parts).nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)


# L-BFGS, all paths at once.


def usable_starts(function: Joint, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return starts with finite log densities, their values and gradients, and whether each start is usable.

    A start without a finite density is halved until it has one: the density was checked at zero before the fit.
    """
    w, value, gradient = halved_until_finite(function, w)
    alive = usable(value, gradient)
    failed = ~alive[..., None]
    w, gradient = w.masked_fill(failed, 0.0), gradient.masked_fill(failed, 0.0)
    return w, value.masked_fill(~alive, -math.inf), gradient, alive


def line_search(function: Joint, state: PathfinderState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Search along the Newton direction; return the new point, its value and gradient, and whether the path moved.

    The step length t is bisected (Lewis and Overton 2013) until both Wolfe conditions hold. Where log p is not finite,
    t counts as too long.
    """
    direction = state.normal.loc - state.w
    slope = (direction * state.gradient).sum(-1)
    searching = state.active & (slope > 0)
    low, high = torch.zeros_like(slope), torch.full_like(slope, math.inf)
    unknown = ~known(state.moves, state.changes).any(-1)  # no curvature yet: a step of at most unit length
    length = torch.where(unknown, direction.norm(dim=-1).clamp(min=1.0).reciprocal(), torch.ones_like(slope))
    w, value, gradient = state.w, state.value, state.gradient
    for _ in range(MAX_TRIALS):
        trial = state.w + length[..., None] * direction
        trial_value, trial_gradient = function(trial)
        gained = usable(trial_value, trial_gradient) & (trial_value >= state.value + WOLFE_GAIN * length * slope)
        longer = searching & gained
        w, gradient = (torch.where(longer[..., None], a, b) for a, b in ((trial, w), (trial_gradient, gradient)))
        value = torch.where(longer, trial_value, value)
        low, high = torch.where(longer, length, low), torch.where(searching & ~gained, length, high)
        searching = searching & ~(gained & ((trial_gradient * direction).sum(-1) <= WOLFE_SLOPE * slope))
        if not bool(searching.any()):
            break
        length = torch.where(searching, torch.where(high.isinf(), 2 * length, (low + high) / 2), length)
    return w, value, gradient, low > 0


def updated_history(state: PathfinderState, s: Tensor, z: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add a pair (s, z) to the diagonal, the moves and the changes where its curvature is positive."""
    diagonal = next_diagonal(state.diagonal, s, z)
    curved = (s * z).sum(-1) > MIN_CURVATURE * z.square().sum(-1)
    accepted = moved & curved & (torch.isfinite(diagonal) & (diagonal > 0)).all(-1)
    rows = accepted[..., None, None]
    moves = torch.where(rows, torch.cat([state.moves[..., 1:, :], s[..., None, :]], -2), state.moves)
    changes = torch.where(rows, torch.cat([state.changes[..., 1:, :], z[..., None, :]], -2), state.changes)
    return torch.where(accepted[..., None], diagonal, state.diagonal), moves, changes


def next_diagonal(a: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """Update the diagonal of the inverse Hessian for a move s that changed -g by z, (*B, P)."""
    zaz, sz, sas = ((x * y).sum(-1, keepdim=True) for x, y in ((a * z, z), (s, z), (s / a, s)))
    return (zaz / (sz * a) + z.square() / sz - zaz * (s / a).square() / (sz * sas)).reciprocal()


def known(moves: Tensor, changes: Tensor) -> Tensor:
    """Whether each slot of the history holds a pair, (*B, J)."""
    return (moves * changes).sum(-1) > 0


def approximation(w: Tensor, gradient: Tensor, diagonal: Tensor, moves: Tensor, changes: Tensor) -> Normal:
    """Build N(w + C g, C) from the compact form of C.

    With diag(a)^(-1/2) B = Q U, C = diag(a)^(1/2) (I + Q U G U' Q') diag(a)^(1/2), and L L' = I + U G U'.
    """
    scale = diagonal.sqrt()
    basis, triangle = torch.linalg.qr(torch.cat([scale[..., None, :] * changes, moves / scale[..., None, :]], -2).mT)
    inside = triangle @ middle(diagonal, moves, changes) @ triangle.mT
    one = torch.eye(inside.shape[-1], dtype=w.dtype, device=w.device)
    factor, definite = try_cholesky(one + inside)
    # rounding can make an ill-conditioned estimate indefinite: fall back to the diagonal
    factor = torch.where(definite[..., None, None], factor, one)
    here = Normal(w, scale, basis, factor)
    return Normal(here.newton(gradient), scale, basis, factor)


def middle(diagonal: Tensor, moves: Tensor, changes: Tensor) -> Tensor:
    """Return G of the compact form, (*B, 2J, 2J); empty slots have zeros in B and a one in R, and no effect."""
    empty = torch.where(known(moves, changes), 0.0, 1.0).to(moves.dtype)
    upper = (moves @ changes.mT).triu() + empty.diag_embed()  # R
    one = torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device).expand_as(upper)
    inverse = torch.linalg.solve_triangular(upper, one, upper=True)
    inside = upper.diagonal(dim1=-2, dim2=-1).diag_embed() + (changes * diagonal[..., None, :]) @ changes.mT
    top = torch.cat([torch.zeros_like(upper), -inverse], -1)
    return torch.cat([top, torch.cat([-inverse.mT, inverse.mT @ inside @ inverse], -1)], -2)


# From the paths to draws.


def best_of_paths(state: PathfinderState) -> Normal:
    """Return the best approximations of the paths that found one, over all members, (K, P)."""
    found = torch.isfinite(state.elbo)
    failed, all_ = int((~found).sum()), found.numel()
    if failed == all_:
        raise DivergedError(
            f"None of the {all_} paths of Pathfinder found an approximation whose draws have a density. Try parameters "
            "of about unit scale, more elbo_draws, or a start."
        )
    if failed:
        warn(
            f"{failed} of the {all_} paths of Pathfinder found no approximation whose draws have a density, and are "
            "left out."
        )
    best = state.best
    return Normal(best.loc[found], best.scale[found], best.basis[found], best.factor[found])


def flat_sentence(target: Target, data: Data, paths: Normal, seed: int) -> str:
    """Return a sentence that names a parameter in which log p is flat over the width of the approximations (K, P).

    It is empty if there is none.
    """
    if has_network(target.model) and not target.prior.improper:
        return ""
    generator, function = stream(seed, "flat", device=paths.loc.device), log_joint(target, data)
    each = max(1, FLATNESS_DRAWS // len(paths.loc))
    noise = torch.randn(each, *paths.loc.shape, generator=generator, dtype=paths.loc.dtype, device=paths.loc.device)
    w = paths.draw(noise)
    gradient = torch.stack([function(v)[1] for v in w]).flatten(0, 1)
    away = (w - paths.loc).flatten(0, 1)
    place = flat_coordinate(away, gradient, torch.ones_like(away[0], dtype=torch.bool))
    if place is None:
        return ""
    return (
        f"The paths of Pathfinder found no width in '{name_of(target, place)}': log p doesn't fall over that of "
        "their approximations. The density seems to be improper there: give it a prior."
    )


def missed_sentence(target: Target, data: Data, paths: Normal, log_evidence: float, seed: int) -> str:
    """Return a sentence on the modes that further starts find and the paths (K, P) miss; empty if there are none."""
    if not searchable(target, data) or not math.isfinite(log_evidence):
        return ""
    search = Search(target, data, stream(seed, "modes", device=paths.loc.device), owner="Pathfinder")
    known = [GaussianQ(loc, scales) for loc, scales in zip(paths.loc, paths.standard_deviations(), strict=True)]
    return missed_modes(search, known, lambda w: each_log_prob(paths, w).amax(0), log_evidence)


def evidence(target: Target, log_weights: Tensor) -> Evidence:
    """Estimate log p(D) = log E_q[p(w, D) / q(w)] from the unsmoothed weights."""
    n, weights = len(log_weights), (log_weights - log_weights.max()).exp()
    kind = f"importance estimate of log p(D) ({n} draws)"
    if target.prior.improper:
        kind = f"importance estimate of log p(D) with an improper prior, up to a constant ({n} draws)"
    if target.temperature != 1:
        kind = f"importance estimate of the tempered log p(D), T = {target.temperature} ({n} draws)"
    value = float(log_weights.logsumexp(0)) - math.log(n)
    return Evidence(value, kind, float(weights.std() / weights.mean()) / math.sqrt(n))
