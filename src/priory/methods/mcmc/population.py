"""The chains as a population: they climb to the posterior together, and together learn its metric.

K chains at one moment are K points with K gradients, from which `priory.methods.mcmc.metrics` learns the covariance of
a Gaussian posterior exactly, wherever the points lie. This module has what a warm-up does with that:

**Arrive.** All chains ascend log p by w <- w + t C g, with C learnt from the better half of the chains at each step,
and a step t per chain that doubles when log p rises and is quartered when it does not. Chains that fall far behind
are replaced by others. The ascent ends below the modes, because the typical set of P coordinates lies about P / 2 nats
below a mode. Each chain stays in its own basin.

**Disperse.** The chains are divided into superchains with a common start each: arrived points as far from each other as
possible, moved by twice the metric's standard deviations. Nested R-hat then tells whether the starts are forgotten.

**Settle.** Transitions follow, with the metric learnt anew from the recent positions and gradients of all chains
(`Window`), until the superchains agree.

References:
    Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2024), Nested R-hat: assessing the convergence of
    Markov chain Monte Carlo when running many short chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from priory.methods.draw_policy import MIN_SUPERCHAIN_CHAINS, superchain_ids
from priory.methods.finite_starts import usable
from priory.methods.mcmc.starts import replaced

if TYPE_CHECKING:
    from priory.methods.mcmc.joint import Joint
    from priory.methods.mcmc.metrics import Metric

MAX_ASCENT_STEPS = 200
MAX_ASCENT_FACTOR = 4.0  # of t
REPLACE_EVERY = 5  # steps of the ascent
STUCK_CHAIN_NATS = (20.0, 5.0)  # a chain is stuck this far below the better chains: a constant, and per coordinate
ARRIVED_NATS = 2.0  # distance of the median chain from the best, per coordinate
SLOW_NATS = 0.5  # gain of the median chain in one step, per coordinate
MIN_SCATTER_NATS = 0.01  # range of log p of points that say more about the posterior than about rounding
DISPERSION = 2.0  # standard deviations of the metric by which superchains are moved apart
DISPERSION_HALVINGS = 8
NEGLIGIBLE_NATS = (10.0, 4.0)  # log share of the posterior below which a region is left: a constant, and per root of P
MODE_SNAPSHOTS = 8  # of a chain, from which the share of its region is estimated
MIN_TAIL = 1.0  # of momenta: below it they stay normal
MIN_FREEDOM = 16.0  # degrees of freedom of heavy-tailed momenta: the speeds of chains then vary by a fifth
WINDOW_SNAPSHOTS = 32  # positions of all chains that a window holds at most
LEARNING_POINTS = 1024  # points that a metric is learnt from, at least 8 per coordinate


@dataclass
class Window:
    """Recent positions and gradients of all chains, (*B, R, K, P), the latest last.

    It records every `stride`-th transition. When it is full, every second snapshot is dropped and the stride doubles,
    so that a window of any length of time has between R / 2 and R snapshots.
    """

    x: Tensor
    g: Tensor  # empty for samplers without gradients
    values: Tensor  # of log p, (*B, R, K)
    count: int = 0
    stride: int = 1
    seen: int = 0  # transitions since it was emptied

    @classmethod
    def empty(cls, w: Tensor, slopes: bool) -> Window:
        """A window for chains w (*B, K, P)."""
        shape = (*w.shape[:-2], WINDOW_SNAPSHOTS, *w.shape[-2:])
        return cls(w.new_zeros(shape), w.new_zeros(shape if slopes else (*w.shape[:-2], 0)), w.new_zeros(shape[:-1]))

    def record(self, w: Tensor, value: Tensor, gradient: Tensor) -> None:
        """Add the chains after one transition."""
        self.seen += 1
        if self.seen % self.stride:
            return
        if self.count == WINDOW_SNAPSHOTS:
            half = WINDOW_SNAPSHOTS // 2
            for t in self._tensors():
                t[..., :half, :, :] = t[..., 1::2, :, :].clone()
            self.values[..., :half, :] = self.values[..., 1::2, :].clone()
            self.count, self.stride = half, 2 * self.stride
            if self.seen % self.stride:
                return
        self.x[..., self.count, :, :] = w
        self.values[..., self.count, :] = value
        if self.g.ndim == self.x.ndim:
            self.g[..., self.count, :, :] = gradient
        self.count += 1

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self.x, self.g) if t.ndim == self.x.ndim]

    def recent(self) -> Tensor:
        """The later half of the snapshots, (*B, K, R / 2, P)."""
        return self.x[..., self.count // 2 : self.count, :, :].transpose(-3, -2)

    def points(self) -> tuple[Tensor, Tensor | None]:
        """Points and gradients of the later half of the window, (*B, n, P), evenly thinned."""
        first = self.count // 2
        size = self.x.shape[-1]
        found = [t[..., first : self.count, :, :].flatten(-3, -2) for t in self._tensors()]
        every = max(1, found[0].shape[-2] // max(LEARNING_POINTS, 8 * size))
        x, *rest = (t[..., ::every, :] for t in found)
        return x, rest[0] if rest else None


def momentum_tail(window: Window) -> Tensor | None:
    """How heavy the tails of momenta are to be, (*B, 1), for kinetic and potential energies to vary alike.

    0, and None if that is so for all members, where normal momenta do, as with a Gaussian posterior, whose log p has
    the variance P / 2. The variance is that of a normal distribution with the same central 68 %, so that a few chains
    that have not arrived don't count. The degrees of freedom, P / tail, are an integer.
    """
    size = window.x.shape[-1]
    values = window.values[..., window.count // 2 : window.count, :].flatten(-2)
    low, high = values.nan_to_num().quantile(values.new_tensor([0.16, 0.84]), dim=-1)
    tail = (2 * ((high - low) / 2).square() / size - 1).clamp(max=size / MIN_FREEDOM)
    if not bool((tail > MIN_TAIL).any()):
        return None
    freedom = (size / tail.clamp(min=MIN_TAIL)).round()
    return torch.where(tail > MIN_TAIL, size / freedom, 0.0)[..., None]


def ascend(
    joint: Joint, metric: Metric, w: Tensor, value: Tensor, gradient: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Metric, Tensor]:
    """Move chains w (*B, K, P) up to near the posterior, and learn its metric on the way.

    Returns:
        Positions, values, gradients, the metric, and the gradient evaluations of each member's chains, (*B,).
    """
    chains, size = w.shape[-2:]
    better = min(chains, max(chains // 2, size + 16))
    # a separate stream: however long one member ascends, the others see the same numbers
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    noise = torch.Generator(device=generator.device).manual_seed(seed)
    step, climbing = torch.ones_like(value), torch.ones_like(value[..., 0], dtype=torch.bool)
    taken = torch.zeros_like(value[..., 0])
    for now in range(1, MAX_ASCENT_STEPS + 1):
        taken = taken + climbing
        top, best = value.topk(better, dim=-1)
        scattered = climbing & (top[..., 0] - top[..., -1] > MIN_SCATTER_NATS)
        if chains > 1 and bool(scattered.any()):
            best = best[..., None].expand(*best.shape, size)
            metric = where(scattered, metric.learnt(w.gather(-2, best), gradient.gather(-2, best)), metric)
        ahead = w + step[..., None] * metric.velocity(gradient)
        there, slope = joint(ahead)
        up = usable(there, slope) & (there > value) & climbing[..., None]
        gain = torch.where(up, there - value, 0.0)
        w, gradient = (torch.where(up[..., None], new, old) for new, old in ((ahead, w), (slope, gradient)))
        value = torch.where(up, there, value)
        step = torch.where(up, (2 * step).clamp(max=MAX_ASCENT_FACTOR), step / 4)
        behind = value.max(-1).values - value.median(-1).values
        climbing = climbing & ~((behind < ARRIVED_NATS * size) & (gain.median(-1).values < SLOW_NATS * size))
        climbing = climbing & torch.isfinite(value).any(-1)
        if not bool(climbing.any()):
            break
        if now % REPLACE_EVERY == 0:
            fresh = torch.rand(step.shape, generator=noise, dtype=step.dtype, device=step.device)
            alive = keeps_up(value, size) | ~climbing[..., None]
            w, value, gradient = replaced(alive, w, value, gradient)
            step = torch.where(alive, step, fresh)  # copies must part
    return w, value, gradient, metric, taken


def keeps_up(value: Tensor, size: int) -> Tensor:
    """Whether the density of each chain is not hopelessly below that of the better half, (*B, K)."""
    upper = value.topk(max(1, value.shape[-1] // 2), dim=-1).values.median(-1, keepdim=True).values
    return (value > upper - (STUCK_CHAIN_NATS[0] + STUCK_CHAIN_NATS[1] * size)) | ~torch.isfinite(upper)


def where(members: Tensor, new: Metric, old: Metric) -> Metric:
    """The new metric for some members, (*B,), and the old one for the others."""
    if bool(members.all()):
        return new
    chosen = members[..., None, None]
    parts = {f.name: torch.where(chosen, getattr(new, f.name), getattr(old, f.name)) for f in fields(old)}
    return replace(old, **parts)


def disperse(
    joint: Joint, metric: Metric, w: Tensor, value: Tensor, gradient: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the chains of each superchain a common start, the starts being far apart."""
    chains, size = w.shape[-2:]
    ids = superchain_ids(chains)
    if ids is None:
        return w, value, gradient
    count = int(ids[-1]) + 1
    alive = keeps_up(value, size)
    places = far_apart(metric, w, alive, count)  # (*B, count)
    starts = w.gather(-2, places[..., None].expand(*places.shape, size))
    noise = torch.randn(starts.shape, generator=generator, dtype=w.dtype, device=w.device)
    reach = DISPERSION * metric.velocity(metric.momentum(noise))
    floor = value.gather(-1, places) - (STUCK_CHAIN_NATS[0] + STUCK_CHAIN_NATS[1] * size)
    ids = ids.to(w.device)
    w = starts[..., ids, :]
    found = None
    for _ in range(DISPERSION_HALVINGS):
        moved = (starts + reach)[..., ids, :].contiguous()
        there, slope = joint(moved)
        sound = usable(there, slope) & (there > floor[..., ids])
        found = (moved, there, slope)
        if bool(sound.all()):
            break
        reach = torch.where(sound[..., first_of(ids), None], reach, reach / 2)
    assert found is not None
    moved, there, slope = found
    bad = ~(usable(there, slope) & (there > floor[..., ids]))
    here, gentle = (
        value.gather(-1, places)[..., ids],
        gradient.gather(-2, places[..., None].expand(*places.shape, size)),
    )
    return (
        torch.where(bad[..., None], w, moved),
        torch.where(bad, here, there),
        torch.where(bad[..., None], gentle[..., ids, :], slope),
    )


def first_of(ids: Tensor) -> Tensor:
    """The first chain of each superchain."""
    return torch.searchsorted(ids, torch.arange(int(ids[-1]) + 1, device=ids.device))


def far_apart(metric: Metric, w: Tensor, alive: Tensor, count: int) -> Tensor:
    """Indices of `count` chains (*B, count) far from each other in the metric, each the farthest from those before."""
    distance = torch.where(alive, math.inf, -1.0)
    place = alive.to(torch.int8).argmax(-1, keepdim=True)
    found = []
    for _ in range(count):
        found.append(place)
        here = w.gather(-2, place[..., None].expand(*place.shape, w.shape[-1]))
        distance = torch.minimum(distance, metric.square(w - here).to(distance.dtype))
        distance = torch.where(alive, distance, -1.0)
        place = distance.argmax(-1, keepdim=True)
    return torch.cat(found, -1)


def leave_negligible_modes(
    window: Window, metric: Metric, w: Tensor, value: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Replace chains that stay in a region with a negligible share of the posterior; None if there are none.

    A chain that samples one region has log integral p = E[log p] + H, with H the entropy of its draws there. H is at
    most that of independent normal coordinates with the same variances, here in coordinates in which the metric is the
    identity, so the estimate errs in favour of wide regions. Chains with far less than the median chain are replaced by
    others, of their own superchain if possible.
    """
    chains, size = w.shape[-2:]
    recent = window.recent()  # (*B, K, S, P)
    if chains < MIN_SUPERCHAIN_CHAINS or recent.shape[-2] < MODE_SNAPSHOTS:
        return None
    white = metric.whitened(recent.flatten(-3, -2)).unflatten(-2, recent.shape[-3:-1])
    variance = white.var(-2).clamp(min=torch.finfo(w.dtype).tiny)
    mass = window.values[..., window.count // 2 : window.count, :].mean(-2) + 0.5 * variance.log().sum(-1)  # (*B, K)
    middle = mass.nanmedian(-1, keepdim=True).values
    alive = (mass > middle - (NEGLIGIBLE_NATS[0] + NEGLIGIBLE_NATS[1] * math.sqrt(size))) | ~torch.isfinite(middle)
    if bool(alive.all()):
        return None
    ids = superchain_ids(chains)
    parts = w, value, gradient
    if ids is not None:
        shape = (int(ids[-1]) + 1, -1)
        split = alive.unflatten(-1, shape)
        found = replaced(split, w.unflatten(-2, shape), value.unflatten(-1, shape), gradient.unflatten(-2, shape))
        parts = found[0].flatten(-3, -2), found[1].flatten(-2, -1), found[2].flatten(-3, -2)
        alive = split.any(-1, keepdim=True).expand(split.shape).flatten(-2, -1)
    return replaced(alive, *parts)
