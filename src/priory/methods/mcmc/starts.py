"""Initial positions of chains: points of finite density, draws of another posterior, or draws from the prior.

By default a model's chains start at its layers' initialisation, or at an ensemble of modes if it has several hidden
layers, and a density's uniformly on (-2, 2) in unconstrained parameters. From an initialisation, and from draws of the
prior, they ascend to the posterior (`priory.methods.mcmc.population`).
Draws of an approximate posterior need no ascent, and give the first metric.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import DivergedError, InputError, require
from priory.diagnostics.flatness import name_of
from priory.methods.finite_starts import halved_until_finite, usable
from priory.models.base import BaseModel, has_network
from priory.models.target import summed
from priory.priors.draws import draw_prior

if TYPE_CHECKING:
    from priory.core.flat import Layout
    from priory.methods.mcmc.joint import Joint
    from priory.methods.mcmc.metrics import Metric
    from priory.models.target import Target
    from priory.posteriors import Posterior

METRIC_DRAWS = 256  # draws of the start posterior whose covariance is the first metric
MIN_DISTINCT_DRAWS = 16  # half of the distinct draws that such a metric needs, plus one per coordinate
DISCRETE_VALUES = {
    "Integer": "integers",
    "Boolean": "zero and one",
    "OneHot": "one-hot vectors",
    "Multinomial": "counts",
}
ZERO_TOLERANCE = 1e-10  # relative size of a gradient, or of a change, that counts as zero
DENSITY_ROUNDING_EPS = 64  # rounding error of a log density, in eps
MAX_CHECKED_COORDINATES = 128  # up to this many, each is checked for an improper posterior
TAIL_DISTANCES = (1e10, 1e12)  # on the real line: no proper posterior is so wide
MIN_FALL_NATS = 1e-3  # a smaller fall of the log density is rounding
NEGLIGIBLE_TAIL_NATS = 10.0  # a tail this far below the best start is too small for any chain to find


def from_prior(target: Target, shape: torch.Size, generator: torch.Generator, owner: str) -> Tensor:
    """One draw from the model's prior per chain, in unconstrained parameters, (*shape, P)."""
    model = target.model
    if has_network(model):
        return draw_prior(target.prior, shape, generator, argument="start", owner=owner, must="be 'prior' only where")
    must = "be a method or a posterior for a model without a separate prior; give the Density log_prior, log_likelihood"
    require(getattr(model, "log_prior", None) is not None, "start", owner, must, "'prior'")
    from priory.analysis.prior_draws import prior_draws

    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return model.layout.unconstrain(prior_draws(model, shape.numel(), seed)).reshape(*shape, target.size)


def begin(joint: Joint, w: Tensor, target: Target, owner: str) -> tuple[Tensor, Tensor, Tensor]:
    """Initial positions of finite density, with their values and gradients.

    A position without density is halved until it has one, because zero is the most likely place for it. A chain that
    never finds one starts where another chain does. A member none of whose chains has a density stays at zero, with log
    density minus infinity.
    """
    first = w
    w, value, gradient = halved_until_finite(joint, w)
    alive = usable(value, gradient)
    if bool(alive.all()):
        return w, value, gradient
    if not bool(alive.any()):
        raise InputError(no_start(joint, first, target, owner))
    w, value, gradient = replaced(alive, w, value, gradient)
    alive = usable(value, gradient)
    lost = ~alive[..., None]
    return w.masked_fill(lost, 0.0), value.masked_fill(~alive, -math.inf), gradient.masked_fill(lost, 0.0)


def side_by_side(w: Tensor, members: int) -> Tensor:
    """Chains w (*B, K, P) that start at the members of a mixture in turn, ordered by member.

    Superchains are neighbouring chains, and those of one should share a start.
    """
    if members < 2 or w.shape[-2] % members:
        return w
    return w.unflatten(-2, (-1, members)).transpose(-3, -2).flatten(-3, -2).contiguous()


def learnt_from(
    start: Posterior, joint: Joint, metric: Metric, w: Tensor, generator: torch.Generator, slopes: bool
) -> Metric | None:
    """The metric of the posterior that chains w (*B, K, P) start from; None if it has no spread.

    A point has no spread, and neither has a failed importance sample that repeats a few of its draws.
    """
    rounds = -(-METRIC_DRAWS // w.shape[-2])
    draws = start.draw(rounds * w[..., 0].numel(), generator)
    if len(torch.unique(draws, dim=0)) < min(METRIC_DRAWS, 2 * (w.shape[-1] + MIN_DISTINCT_DRAWS)):
        return None
    blocks = draws.reshape(rounds, *w.shape)
    found = [joint(block) for block in blocks] if slopes else []
    x = torch.cat(list(blocks), -2)
    if not slopes:
        return metric.learnt(x)
    g = torch.cat([gradient for _, gradient in found], -2)
    return metric.learnt(x, torch.where(torch.isfinite(g), g, 0.0))


def replaced(alive: Tensor, w: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The chains, with each that is not alive replaced by a copy of one that is, taken in turn."""
    order = alive.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    living = alive.sum(-1, keepdim=True).clamp(min=1)
    turn = order.gather(-1, torch.arange(alive.shape[-1], device=w.device).expand(alive.shape) % living)
    place = torch.where(alive, torch.arange(alive.shape[-1], device=w.device), turn)
    every = place[..., None].expand(w.shape)
    return w.gather(-2, every), value.gather(-1, place), gradient.gather(-2, every)


def no_start(joint: Joint, w: Tensor, target: Target, owner: str) -> str:
    """The error message where no chain could start, with the parameters of the first."""
    value, gradient = joint(w)
    value, gradient, one = value.flatten()[0], gradient.flatten(0, -2)[0], w.flatten(0, -2)[0]
    params = {n: x.tolist() if x.numel() < 6 else "..." for n, x in target.model.layout.constrain(one).items()}
    wrong = [b.name for b in target.model.layout.blocks if not bool(torch.isfinite(gradient[b.start : b.stop]).all())]
    got = f"{float(value):g}" if not math.isfinite(float(value)) else f"no gradient for {', '.join(wrong)}"
    return f"The log density must be finite where {owner} starts, as at {params}, got {got} there, and at every start."


def refuse_discrete(density: BaseModel, joint: Joint, w: Tensor, value: Tensor, gradient: Tensor, owner: str) -> None:
    """Raise an error for a parameter that the density treats as discrete, which has no gradient to follow.

    Two cases are found. A distribution over integers rejects the value when it checks its arguments. Or the density
    rounds the parameter: it changes with the parameter, and apart from the log-determinant has no gradient in it at any
    start. A parameter that the density doesn't read at all is not found here; its chains spread without bound.
    """
    try:
        density.trial(w.flatten(0, -2)[0])
    except ValueError as error:
        kind = next((kind for kind in DISCRETE_VALUES if kind in str(error)), None)
        if kind is not None:
            raise InputError(
                f"The parameters of {owner} must be continuous, got one that has {DISCRETE_VALUES[kind]}: sum it out "
                "of the density."
            ) from error
    volume, slope = summed(density.layout.log_det, w)
    flat = ((gradient - slope).abs() <= ZERO_TOLERANCE * (1 + slope.abs())).flatten(0, -2).all(0)  # (P,)
    least = max(ZERO_TOLERANCE, DENSITY_ROUNDING_EPS * torch.finfo(w.dtype).eps) * (1 + value.abs() + volume.abs())
    for block in density.layout.blocks:
        here = torch.zeros_like(flat)
        here[block.start : block.stop] = flat[block.start : block.stop]
        if not bool(here.any()):
            continue
        moved = torch.where(here, w.roll(1, -2), w)  # to the value of another chain
        change = joint(moved)[0] - density.layout.log_det(moved) - (value - volume)
        if bool((change.abs() > least).any()):
            raise InputError(
                f"The parameters of {owner} must be continuous, got '{block.name}', with which the density "
                "changes though it has no slope in it, as if it were rounded: sum it out of the density."
            )


def refuse_improper(target: Target, joint: Joint, w: Tensor, value: Tensor, owner: str) -> None:
    """Raise an error for a posterior that is improper in one coordinate, given the others of a chain w (*B, K, P).

    If the integral over one coordinate is infinite wherever the other coordinates are in some volume, so is the
    integral over all. On the real line it is infinite if log p falls no faster than -log |w|. Each chain checks another
    coordinate. A posterior that is improper only across coordinates is not found here; its chains drift off.
    """
    size, chains, alive = w.shape[-1], value.numel(), torch.isfinite(value)
    if size > MAX_CHECKED_COORDINATES or not bool(alive.any()):
        return
    near, far, least = tails(target.model.layout, w)
    best = value[alive].max()
    for turn in range(-(-size // chains)):
        place = (torch.arange(chains, device=w.device).view(value.shape) + turn * chains) % size
        for sign in (1, -1):
            there = along(joint, w, place, sign * near)
            seen = there + near[place].log() > best - NEGLIGIBLE_TAIL_NATS
            if not bool(seen.any()):
                continue
            beyond = along(joint, w, place, sign * far)
            endless = seen & torch.isfinite(beyond) & (there - beyond <= least[place])
            if bool(endless.any()):
                at, first, second = (float(x[endless][0]) for x in (place, there, beyond))
                raise DivergedError(
                    f"The posterior that {owner} is to draw from seems to be improper in "
                    f"'{name_of(target, int(at))}': in unconstrained coordinates its log density is {first:.4g} at "
                    f"{sign * float(near[int(at)]):.0e} and {second:.4g} at {sign * float(far[int(at)]):.0e}. Give it "
                    "a prior, or a narrower one."
                )


def tails(layout: Layout, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two distances per coordinate, and the least fall of log p between them under a proper posterior, (P,) each.

    A parameter that is exp or a sigmoid of its coordinate is checked where its square is still finite; there log p must
    fall. Coordinates that are mapped jointly are not checked, and have distance zero.
    """
    near, far, least = (w.new_zeros(w.shape[-1]) for _ in range(3))
    limit = math.log(torch.finfo(w.dtype).max)
    for block in layout.blocks:
        here = slice(block.start, block.stop)
        if block.bijector.identity:
            near[here], far[here] = TAIL_DISTANCES
            least[here] = math.log(TAIL_DISTANCES[1] / TAIL_DISTANCES[0]) + MIN_FALL_NATS
        elif block.bijector.elementwise:
            near[here], far[here], least[here] = limit / 4, limit / 2, MIN_FALL_NATS
    return near, far, least


def along(joint: Joint, w: Tensor, place: Tensor, distance: Tensor) -> Tensor:
    """log p (*B, K) with coordinate `place` (*B, K) of each chain moved by `distance` (P,); NaN if it fails."""
    step = torch.zeros_like(w).scatter(-1, place[..., None], distance[place][..., None])
    try:
        return joint(w + step)[0]
    except RuntimeError:  # a matrix without a Cholesky factor
        return torch.full_like(w[..., 0], math.nan)
