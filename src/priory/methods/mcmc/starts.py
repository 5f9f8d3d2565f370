"""Where chains begin: at starts that have a density, at draws of another posterior, or at draws of the prior.

A model starts its chains by its layers' own initialisation, a density uniformly on (-2, 2) in unconstrained
coordinates. Draws of the prior are further apart, so that R-hat can see a mode that some of them don't reach, and are
of no use where the prior is far wider than the posterior. Draws of a close posterior save the way to it, and teach the
first metric.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.core.errors import DivergedError, InputError, require
from priory.diagnostics.flatness import name_of
from priory.methods.mcmc.adaptation import Moments
from priory.models.base import BaseModel, has_network
from priory.models.target import summed
from priory.priors.base import flattens
from priory.priors.hierarchical import Hierarchical, precision_name

if TYPE_CHECKING:
    from torch.distributions import Distribution

    from priory.core.flat import Block, Layout
    from priory.methods.mcmc.joint import Joint
    from priory.models.target import Target
    from priory.posteriors import Posterior

HALVINGS = 10  # times that a start without density is drawn towards zero
STARTS = 256  # draws of a posterior that chains start from, whose covariance is their first metric
TEACHING = 16  # with the coordinates, half of the different draws without which there is no such metric
WHOLE = {"Integer": "integers", "Boolean": "zero and one", "OneHot": "one-hot vectors", "Multinomial": "counts"}
FLAT = 1e-10  # of a gradient that is none, beside what rounding leaves of it, and of a change that is none
ROUNDED = 64  # times its type's eps, of a density: a change by less is but rounding
ASKED = 128  # coordinates up to which each is asked whether the posterior has an end in it
LINE = (1e10, 1e12)  # distances on the line: no posterior with an end is so wide
BARE = 1e-3  # nats of a fall that are but rounding
UNSEEN = 10.0  # nats below the best start at which a tail is so small that no chain finds it


def from_prior(target: Target, shape: torch.Size, generator: torch.Generator, owner: str) -> Tensor:
    """A draw of the model's prior for each chain, in unconstrained coordinates, (*shape, P)."""
    model = target.model
    require(
        has_network(model),
        "start",
        owner,
        "be a method or a posterior for a Density, whose prior can't be drawn from",
        "'prior'",
    )
    assert has_network(model)
    prior, blocks = target.prior, model.layout.blocks
    noise = torch.randn((*shape, target.size), generator=generator, dtype=model.dtype, device=model.device)
    w = prior.loc + noise * prior.precision.rsqrt()
    others = {block.name: believed for block, believed in prior.others}
    for block in blocks:
        believed = others.get(block.name)
        if isinstance(believed, Hierarchical):
            gamma = torch.full(shape, believed.shape, dtype=w.dtype, device=w.device)
            precision = torch._standard_gamma(gamma, generator=generator) / believed.rate  # pyright: ignore
            at = model.layout[precision_name(block.name)]
            w[..., at.start] = precision.log()
            w[..., block.start : block.stop] = noise[..., block.start : block.stop] * precision.rsqrt()[..., None]
        elif believed is not None:
            w[..., block.start : block.stop] = drawn(believed, block, shape, generator, owner)
    flat = [block.name for block in blocks if not bool(torch.isfinite(w[..., block.start : block.stop]).all())]
    must = "be 'prior' only where every prior is a proper distribution"
    require(not flat, "start", owner, must, f"a prior of '{', '.join(flat)}' that has no finite draws")
    return w


def drawn(believed: Distribution, block: Block, shape: torch.Size, generator: torch.Generator, owner: str) -> Tensor:
    """Draws of one parameter's distribution in unconstrained coordinates, (*shape, n).

    Distributions of torch read its global noise, which is put back afterwards.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    rest = () if flattens(believed, block) else block.shape[: len(block.shape) - len(believed.event_shape)]
    with torch.random.fork_rng(devices=[generator.device] if generator.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            x = believed.expand(rest).sample(shape)
        except NotImplementedError:
            must = "be 'prior' only where every prior can be drawn from"
            require(False, "start", owner, must, f"{type(believed).__name__} for '{block.name}'")
            raise
    return block.bijector.inverse(x.reshape(*shape, *block.shape)).reshape(*shape, -1)


def begin(joint: Joint, w: Tensor, target: Target, owner: str) -> tuple[Tensor, Tensor, Tensor]:
    """Starts that have a density, with their values and gradients.

    A start without is halved until it has: zero is where a density is tried first. One that never has
    begins where another chain does. A member none of whose chains has a density stays where it is, at minus infinity.
    """
    first = w
    value, gradient = joint(w)
    for _ in range(HALVINGS):
        alive = usable(value, gradient)
        if bool(alive.all()):
            return w, value, gradient
        w = torch.where(alive[..., None], w, w / 2)
        value, gradient = joint(w)
    alive = usable(value, gradient)
    if not bool(alive.any()):
        raise InputError(no_start(joint, first, target, owner))
    w, value, gradient = replaced(alive, w, value, gradient)
    alive = usable(value, gradient)
    lost = ~alive[..., None]
    return w.masked_fill(lost, 0.0), value.masked_fill(~alive, -math.inf), gradient.masked_fill(lost, 0.0)


def learnt_from(start: Posterior, metric: str, w: Tensor, generator: torch.Generator) -> Moments | None:
    """The moments of what chains w (*B, K, P) start from, for a first metric; None where it has no spread to speak of.

    A point has none, nor has a sample that repeats a few of its draws, as an importance sample that failed does.
    """
    draws = start.draw(STARTS * w[..., 0, 0].numel(), generator)
    if len(torch.unique(draws, dim=0)) < min(STARTS, 2 * (w.shape[-1] + TEACHING)):
        return None
    moments = Moments.none(w, metric)
    moments.hear(draws.reshape(*w.shape[:-2], STARTS, w.shape[-1]))
    return moments


def replaced(alive: Tensor, w: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The chains, with the place of one that lives for each that doesn't: the k-th living one, taken in turn."""
    order = alive.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    living = alive.sum(-1, keepdim=True).clamp(min=1)
    turn = order.gather(-1, torch.arange(alive.shape[-1], device=w.device).expand(alive.shape) % living)
    place = torch.where(alive, torch.arange(alive.shape[-1], device=w.device), turn)
    every = place[..., None].expand(w.shape)
    return w.gather(-2, every), value.gather(-1, place), gradient.gather(-2, every)


def usable(value: Tensor, gradient: Tensor) -> Tensor:
    """Whether log p and its gradient are numbers, (*B,)."""
    return torch.isfinite(value) & torch.isfinite(gradient).all(-1)


def no_start(joint: Joint, w: Tensor, target: Target, owner: str) -> str:
    """Why no chain could start, with the parameters of the first."""
    value, gradient = joint(w)
    value, gradient, one = value.flatten()[0], gradient.flatten(0, -2)[0], w.flatten(0, -2)[0]
    params = {n: x.tolist() if x.numel() < 6 else "..." for n, x in target.model.layout.constrain(one).items()}
    wrong = [b.name for b in target.model.layout.blocks if not bool(torch.isfinite(gradient[b.start : b.stop]).all())]
    got = f"{float(value):g}" if not math.isfinite(float(value)) else f"no gradient for {', '.join(wrong)}"
    return f"The log density must be finite where {owner} starts, as at {params}, got {got} there, and at every start."


def refuse_discrete(density: BaseModel, joint: Joint, w: Tensor, value: Tensor, gradient: Tensor, owner: str) -> None:
    """Refuse a parameter that is an integer to the density: it has no slope to follow.

    Either a distribution over integers is asked about it, which a check of its arguments tells; or it is rounded,
    so that the density changes with it and has no slope in it at any start, the volume element apart. What a density
    doesn't read at all is left to the chains, which will be seen to spread.
    """
    try:
        density.trial(w.flatten(0, -2)[0])
    except ValueError as error:
        kind = next((kind for kind in WHOLE if kind in str(error)), None)
        if kind is not None:
            raise InputError(
                f"The parameters of {owner} must be continuous, got one that has {WHOLE[kind]}: sum it out of "
                "the density."
            ) from error
    volume, slope = summed(density.layout.log_det, w)
    flat = ((gradient - slope).abs() <= FLAT * (1 + slope.abs())).flatten(0, -2).all(0)  # (P,)
    least = max(FLAT, ROUNDED * torch.finfo(w.dtype).eps) * (1 + value.abs() + volume.abs())
    for block in density.layout.blocks:
        here = torch.zeros_like(flat)
        here[block.start : block.stop] = flat[block.start : block.stop]
        if not bool(here.any()):
            continue
        moved = torch.where(here, w.roll(1, -2), w)  # to where another chain has it
        change = joint(moved)[0] - density.layout.log_det(moved) - (value - volume)
        if bool((change.abs() > least).any()):
            raise InputError(
                f"The parameters of {owner} must be continuous, got '{block.name}', with which the density "
                "changes though it has no slope in it, as if it were rounded: sum it out of the density."
            )


def refuse_improper(target: Target, joint: Joint, w: Tensor, value: Tensor, owner: str) -> None:
    """Refuse a posterior that has no end in one coordinate, the others being where a chain w (*B, K, P) starts.

    If the integral over one coordinate is infinite wherever the others are in some volume, so is that over all. Over a
    line it is infinite if log p falls no faster than -log |w|. Each chain is asked about another coordinate. What is
    improper across coordinates alone is left to the chains, which will be seen to drift off.
    """
    size, chains, alive = w.shape[-1], value.numel(), torch.isfinite(value)
    if size > ASKED or not bool(alive.any()):
        return
    near, far, least = tails(target.model.layout, w)
    best = value[alive].max()
    for turn in range(-(-size // chains)):
        place = (torch.arange(chains, device=w.device).view(value.shape) + turn * chains) % size
        for sign in (1, -1):
            there = along(joint, w, place, sign * near)
            seen = there + near[place].log() > best - UNSEEN
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
    """Two distances for each coordinate and the least fall of log p between them where there is an end, (P,) each.

    A parameter that is exp or a sigmoid of its coordinate is asked about where its square is still a number, and may
    not stay as it is there. Coordinates that are mapped together are not asked about, at no distance.
    """
    near, far, least = (w.new_zeros(w.shape[-1]) for _ in range(3))
    limit = math.log(torch.finfo(w.dtype).max)
    for block in layout.blocks:
        here = slice(block.start, block.stop)
        if block.bijector.identity:
            near[here], far[here] = LINE
            least[here] = math.log(LINE[1] / LINE[0]) + BARE
        elif block.bijector.elementwise:
            near[here], far[here], least[here] = limit / 4, limit / 2, BARE
    return near, far, least


def along(joint: Joint, w: Tensor, place: Tensor, distance: Tensor) -> Tensor:
    """log p (*B, K) where one coordinate of each chain, its `place` (*B, K), is so far away (P,); NaN if it fails."""
    step = torch.zeros_like(w).scatter(-1, place[..., None], distance[place][..., None])
    try:
        return joint(w + step)[0]
    except RuntimeError:  # a matrix without a factor
        return torch.full_like(w[..., 0], math.nan)
