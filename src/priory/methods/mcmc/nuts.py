"""The No-U-Turn Sampler: trajectories that double until they turn, with all chains in step.

A trajectory starts at (w, p) with p ~ N(0, C^-1) and doubles, forwards or backwards in time with equal probability,
until it turns, diverges, or has 2^max_depth points. A stretch of it with momenta p_a ... p_b and their sum r has turned
if

    r' C p_a <= 0    or    r' C p_b <= 0.

This is checked for every subtree that doubling makes, and for each half extended by the first momentum of the other
half, which catches a turn between the halves. The next state is drawn from the points of the trajectory with
probability proportional to exp(-H): progressively within a new half, and with a bias towards the new half between the
two halves.

The tree is built without recursion. All chains double together, so the index of a point within its half determines
which subtrees it ends, and one stored point per level is enough to check them (Phan, Pradhan and Jankowiak 2019; Lao
and Dillon 2019): at an even point its momentum, the momentum before it, and the sum up to it. A chain that has stopped
is masked.

A transition takes as long as the longest of its chains, and in a heavy tail a single chain may need a thousand steps.
So once at most one chain in 32 is still active, or in 8 with long trees, it stops with its trajectory as it is: another
doubling would cost all chains as much as the whole transition so far. The draws stay exact: the same chains are left
after each doubling, whichever point of its trajectory each chain starts from.

Where log p varies more than a Gaussian's, momenta have heavy tails (`priory.methods.mcmc.integrators`). Their velocity
is C p times a positive number, so a stretch turns by the same rule.

References:
    Hoffman and Gelman (2014), The No-U-Turn Sampler.
    Betancourt (2017), A conceptual introduction to Hamiltonian Monte Carlo.
    Livingstone, Faulkner and Roberts (2019), Kinetic energy choice in Hamiltonian/hybrid Monte Carlo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from priory.core.errors import is_integer, require
from priory.methods.mcmc.integrators import energy_of_square, heavy, integrate, kinetic
from priory.methods.mcmc.sampler import DIVERGENCE_NATS, Move, Sampler, State, normal, probability, wide

if TYPE_CHECKING:
    from torch import Tensor

    from priory.methods.mcmc.metrics import Metric

EARLY_STEPS, EARLY_MAX_DEPTH = 8, 5  # in the first transitions, before the scales are known, the depth is capped
CHECK_EVERY = 4  # points between two checks of whether any chain is still active
STRAGGLER_SHARE = 32  # once no more than one chain in this many is active, it is stopped
LONG_TREE_DEPTH, LONG_TREE_SHARE = 6, 8  # the same for trees from this depth on, where a doubling costs more


@dataclass(frozen=True)
class NUTS(Sampler):
    """The No-U-Turn Sampler, with multinomial sampling of the points of its trajectories.

    Args:
        max_depth: A trajectory has at most 2^max_depth points. Default: 10.

    Example:
        >>> import priory as pr
        >>> density = pr.Density(lambda p: -0.5 * (p["x"] - 3).square(), {"x": pr.Param()})
        >>> posterior = pr.fit(density, None, pr.NUTS(), progress=False)
        >>> posterior.status.name, abs(posterior.mean["x"].item() - 3) < 0.2
        ('converged', True)

    References:
        Hoffman and Gelman (2014), The No-U-Turn Sampler.
        Betancourt (2017), A conceptual introduction to Hamiltonian Monte Carlo.
    """

    max_depth: int = 10

    trees: ClassVar[bool] = True
    heavy_tails: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_integer(self.max_depth, 1), "max_depth", "NUTS", "be an integer >= 1", self.max_depth)

    def transition(self, state: State, generator: torch.Generator) -> Move:
        p = state.metric.momentum(normal(state.w, generator))
        # a separate stream: however many numbers a member takes from it, the next transition stays the same
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        noise = torch.Generator(device=generator.device).manual_seed(seed)
        early = state.step < EARLY_STEPS and not state.warmup.frozen
        deepest = min(self.max_depth, EARLY_MAX_DEPTH) if early else self.max_depth
        if state.tail is not None:
            p = heavy(p, state.tail, torch.Generator(device=generator.device).manual_seed(seed ^ 1))
        return walk(state, p, deepest, noise).move()


@dataclass
class Tree:
    """The trajectory of each chain: its end points, sum of momenta, selected point and statistics, (*B, K)."""

    first: Tensor  # the points of earliest and latest time, as `packed` makes them
    last: Tensor
    total: Tensor  # the sum of momenta, (*B, K, P)
    chosen: Tensor
    weight: Tensor  # log of the sum of exp(start - energy) over points
    start: Tensor  # the energy at the start
    active: Tensor  # whether it is still doubling
    divergent: Tensor
    acceptance: Tensor  # summed over points
    steps: Tensor
    depth: Tensor

    def move(self) -> Move:
        """The result of the transition."""
        w, _, gradient, value, energy = unpacked(self.chosen)
        acceptance = self.acceptance / self.steps.clamp(min=1)
        return Move(w, value, gradient, acceptance, energy, self.divergent, self.steps, self.depth)


@dataclass
class Half:
    """The points that one doubling adds: first momentum, last point, and the rest as in `Tree`."""

    near: Tensor
    end: Tensor
    total: Tensor
    chosen: Tensor
    weight: Tensor
    whole: Tensor  # whether it was completed without a turn or a divergence


def walk(state: State, p: Tensor, deepest: int, noise: torch.Generator) -> Tree:
    """Double the trajectories from momenta p (*B, K, P) until every chain has stopped."""
    energy = kinetic(state.metric, p, state.tail) - state.value
    point = packed(state.w, p, state.gradient, state.value, energy)
    none, active = torch.zeros_like(energy), torch.isfinite(energy)
    tree = Tree(point, point, p, point, none, energy, active, ~active, none, none, none)
    for depth in range(deepest):
        coins = torch.rand(2, *energy.shape, generator=noise, dtype=energy.dtype, device=energy.device)
        double(tree, state, depth, coins[0] < 0.5, coins[1], noise)
        share = LONG_TREE_SHARE if depth + 1 >= LONG_TREE_DEPTH else STRAGGLER_SHARE
        tree.active = tree.active & (tree.active.sum(-1, keepdim=True) > energy.shape[-1] // share)
        if not bool(tree.active.any()):
            break
    return tree


def double(tree: Tree, state: State, depth: int, forward: Tensor, coin: Tensor, noise: torch.Generator) -> None:
    """Double the trajectory of every active chain once, each in its own direction."""
    rows = forward[..., None]
    edge, far = torch.where(rows, tree.last, tree.first), torch.where(rows, tree.first, tree.last)
    tree.depth = tree.depth + tree.active
    half = grow(tree, state, depth, edge, forward, noise)
    edge_p, far_p, end_p = momentum_of(edge), momentum_of(far), momentum_of(half.end)
    total = tree.total + half.total
    stretches = [(total, far_p, end_p)]
    if depth > 0:  # two points have only one stretch
        stretches += [(tree.total + half.near, far_p, half.near), (half.total + edge_p, edge_p, end_p)]
    turned = has_turned(state.metric, stretches)
    # biased towards the new half: taken with the ratio of its weight to the old one's, if that is below one
    taken = half.whole & (coin.log() < half.weight - tree.weight)
    tree.chosen = torch.where(taken[..., None], half.chosen, tree.chosen)
    tree.weight = torch.logaddexp(tree.weight, half.weight)
    tree.first = torch.where(rows, tree.first, half.end)
    tree.last = torch.where(rows, half.end, tree.last)
    tree.total, tree.active = total, half.whole & ~turned


def grow(tree: Tree, state: State, depth: int, edge: Tensor, forward: Tensor, noise: torch.Generator) -> Half:
    """Extend the trajectories by 2^depth points beyond an edge, and check every subtree for a turn.

    Values that are written for a chain after it has stopped are never read: `going` masks them.
    """
    size = torch.where(forward, 1.0, -1.0).to(edge.dtype)[..., None] * wide(state.step_size.log.exp())
    w, p, gradient, _, _ = unpacked(edge)
    logs = torch.rand(2**depth, *forward.shape, generator=noise, dtype=w.dtype, device=w.device).log_()
    going, weight, total = tree.active, torch.full_like(tree.start, -torch.inf), torch.zeros_like(p)
    chosen, point, near, before = edge, edge, p, p
    highest = DIVERGENCE_NATS if state.tail is None else energy_of_square(2 * DIVERGENCE_NATS, w.shape[-1], state.tail)
    marks: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by level: a momentum, the one before, the sum up to it
    for n in range(2**depth):
        w, p, value, gradient = integrate("leapfrog", state.joint, state.metric, w, p, gradient, size, 1, state.tail)
        energy = kinetic(state.metric, p, state.tail) - value
        gain = tree.start - energy
        point = packed(w, p, gradient, value, energy)
        tree.acceptance = torch.where(going, tree.acceptance + probability(gain), tree.acceptance)
        tree.steps = tree.steps + going
        sound = gain > -highest
        tree.divergent = tree.divergent | (going & ~sound)
        going = going & sound
        weight = torch.logaddexp(weight, gain)
        chosen = torch.where((going & (logs[n] < gain - weight))[..., None], point, chosen)
        if n % 2 == 0:
            marks[level(n)] = (p, before, total)
            near = p if n == 0 else near
        total = total + p
        if n % 2 == 1:
            going = going & ~has_turned(state.metric, stretches(n, p, total, marks))
        before = p
        if n % CHECK_EVERY == CHECK_EVERY - 1 and not bool(going.any()):
            break
    return Half(near, point, total, chosen, weight, going)


def stretches(
    n: int, p: Tensor, total: Tensor, marks: dict[int, tuple[Tensor, Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The stretches to check where point n ends subtrees: each subtree, and each half extended by one point."""
    found, length = [], 2
    while (n + 1) % length == 0:
        first, _, up_to_first = marks[level(n + 1 - length)]
        found.append((total - up_to_first, first, p))
        if length > 2:
            middle, before, up_to_middle = marks[level(n + 1 - length // 2)]
            found.append((up_to_middle - up_to_first + middle, first, middle))
            found.append((total - up_to_middle + before, before, p))
        length *= 2
    return found


def level(n: int) -> int:
    """The slot in which an even point is stored; no other point that is still needed has the same slot."""
    return (n // 2).bit_count()


def has_turned(metric: Metric, stretches: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Whether any stretch, given as (sum of momenta, first momentum, last momentum), has turned, (*B, K)."""
    if len(stretches) == 1:
        ((total, first, last),) = stretches
        velocity = metric.velocity(total)
        return torch.minimum((velocity * first).sum(-1), (velocity * last).sum(-1)) <= 0
    total, first, last = (torch.stack(parts) for parts in zip(*stretches, strict=True))
    velocity = metric.velocity(total)
    return (torch.minimum((velocity * first).sum(-1), (velocity * last).sum(-1)) <= 0).any(0)


# The points of all chains are one tensor, so that selecting between points is one operation.


def packed(w: Tensor, p: Tensor, gradient: Tensor, value: Tensor, energy: Tensor) -> Tensor:
    """Concatenate w, p, gradient, log p(w, D) and the energy, (*B, K, 3P + 2)."""
    return torch.cat([w, p, gradient, value[..., None], energy[..., None]], -1)


def unpacked(point: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Split what `packed` concatenated, with contiguous vectors."""
    size = point.shape[-1] // 3
    w, p, gradient, numbers = point.split((size, size, size, 2), -1)
    return w.contiguous(), p.contiguous(), gradient.contiguous(), numbers[..., 0], numbers[..., 1]


def momentum_of(point: Tensor) -> Tensor:
    """The momenta of packed points, (*B, K, P)."""
    size = point.shape[-1] // 3
    return point[..., size : 2 * size]
