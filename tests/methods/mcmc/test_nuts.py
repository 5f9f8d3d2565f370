"""The iterative trees of NUTS equal those of the recursion, leaf by leaf; straggling chains are stopped exactly."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.mcmc import NUTS, nuts
from priory.methods.mcmc.integrators import integrate, kinetic
from priory.methods.mcmc.joint import Joint
from priory.methods.mcmc.metrics import DiagonalMetric
from priory.methods.mcmc.nuts import level, walk
from priory.methods.mcmc.sampler import State
from priory.models.target import Target
from priory.testing import assert_mean_close

DOUBLE = torch.float64
CHAINS, MAX_DEPTH = 24, 6


class Recursion:
    """The tree of one chain, built recursively as in the papers; points are (w, p, gradient, value)."""

    def __init__(self, state: State, chain: int, p: Tensor, noise: torch.Generator) -> None:
        self.state, self.chain, self.noise = state, chain, noise
        self.first = self.last = (state.w[chain], p[chain], state.gradient[chain], state.value[chain])
        self.start = self.energy(self.first)
        self.points = [self.first]  # in the order of time
        self.chosen, self.weight, self.steps, self.depth, self.divergent = self.first, 0.0, 0, 0, False
        self.last_turns = (False, False, False)  # of the last completed doubling

    def energy(self, point: Any) -> float:
        return float(kinetic(self.state.metric, point[1][None])[0] - point[3])

    def turned(self, points: list[Any], a: Tensor, b: Tensor) -> bool:
        total = torch.stack([point[1] for point in points]).sum(0)
        velocity = self.state.metric.velocity(total[None])[0]
        return bool(velocity @ a <= 0) or bool(velocity @ b <= 0)

    def any_turn(self, left: list[Any], right: list[Any]) -> bool:
        """Return whether any of the three stretches of `turns` has turned."""
        return any(self.turns(left, right))

    def turns(self, left: list[Any], right: list[Any]) -> tuple[bool, bool, bool]:
        """Return which have turned: both subtrees together, and each with the nearest point of the other."""
        return (
            self.turned(left + right, left[0][1], right[-1][1]),
            self.turned([*left, right[0]], left[0][1], right[0][1]),
            self.turned([left[-1], *right], left[-1][1], right[-1][1]),
        )

    def build(self, edge: Any, depth: int, sign: float) -> tuple[list[Any], bool]:
        """Return the points beyond an edge, outwards, and whether none of their subtrees has turned or diverged."""
        if depth == 0:
            step = sign * self.state.step_size.log.exp()
            w, p, value, gradient = integrate(
                "leapfrog",
                Joint(self.one, lambda v: self.one(v)[1]),
                self.state.metric,
                edge[0][None],
                edge[1][None],
                edge[2][None],
                step,
            )
            point = (w[0], p[0], gradient[0], value[0])
            self.steps += 1
            gain = self.start - self.energy(point)
            self.divergent = self.divergent or not gain > -1000
            uniform = self.logs[len(self.gains), self.chain]
            self.gains.append(gain)
            if not self.divergent and float(uniform) < gain - float(torch.tensor(self.gains).double().logsumexp(0)):
                self.proposal = point
            return [point], not self.divergent
        left, sound = self.build(edge, depth - 1, sign)
        if not sound:
            return left, False
        right, sound = self.build(left[-1], depth - 1, sign)
        return left + right, sound and not self.any_turn(left, right)

    def one(self, w: Tensor) -> tuple[Tensor, Tensor]:
        every = self.state.w.clone()
        every[self.chain] = w[0]
        value, gradient = self.state.joint(every)
        return value[self.chain, None], gradient[self.chain, None]

    def run(self, deepest: int) -> None:
        for depth in range(deepest):
            coins = torch.rand(2, CHAINS, generator=self.noise, dtype=DOUBLE)
            self.logs = torch.rand(2**depth, CHAINS, generator=self.noise, dtype=DOUBLE).log()
            self.gains: list[float] = []
            self.depth += 1
            forward = bool(coins[0, self.chain] < 0.5)
            edge = self.points[-1] if forward else self.points[0]
            new, sound = self.build(edge, depth, 1.0 if forward else -1.0)
            if not sound:
                return
            weight = float(torch.tensor(self.gains).double().logsumexp(0))
            if math.log(float(coins[1, self.chain])) < weight - self.weight:
                self.chosen = self.proposal
            self.weight = float(torch.logaddexp(torch.tensor(self.weight), torch.tensor(weight)))
            old = self.points if forward else self.points[::-1]  # ordered so that the new points follow
            self.last_turns = self.turns(old, new)
            self.points = [*self.points, *new] if forward else [*new[::-1], *self.points]
            if any(self.last_turns):
                return


def banana(p: dict[str, Tensor]) -> Tensor:
    x, y, z = p["w"].unbind(-1)
    return -0.5 * (x.square() + 4 * (y - x.square()).square() + 0.1 * z.square())


def ellipse(p: dict[str, Tensor]) -> Tensor:
    return -0.5 * (p["w"].square() * torch.tensor([1.0, 4.0, 10.0], dtype=DOUBLE)).sum(-1)


@pytest.mark.parametrize("step", [0.03, 0.12, 0.7])  # deep trees, shallow trees, and divergences
def test_trees_equal_those_of_the_recursion(step):
    compare_trees(banana, step)


def test_a_turn_of_one_half_with_the_nearest_point_of_the_other_ends_a_tree():
    """The coordinates oscillate at different speeds, so in some trees only the old half turns, in some only the new."""
    ends = [recursion.last_turns for recursion in compare_trees(ellipse, 0.12)]
    assert (False, True, False) in ends
    assert (False, False, True) in ends


def compare_trees(log_prob: Any, step: float) -> list[Recursion]:
    """Assert that the trees of all chains equal those of the recursion, and return the latter."""
    density = pr.Density(log_prob, {"w": Param((3,))}, batched=True)
    target, data = Target(density, None), Data.of(None)
    method = NUTS(chains=CHAINS, warmup=0)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "nuts"))
    state.w = torch.randn(CHAINS, 3, generator=stream(1, "nuts"), dtype=DOUBLE)
    state.value, state.gradient = state.joint(state.w)
    state.step_size.log = torch.tensor(math.log(step), dtype=DOUBLE)
    state.metric = DiagonalMetric(torch.tensor([[1.0, 2.0, 5.0]], dtype=DOUBLE))
    p = state.metric.momentum(torch.randn(CHAINS, 3, generator=stream(2, "nuts"), dtype=DOUBLE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nuts, "STRAGGLER_SHARE", CHAINS + 1)  # no chain is stopped early
        patch.setattr(nuts, "LONG_TREE_SHARE", CHAINS + 1)
        tree = walk(state, p, MAX_DEPTH, stream(3, "nuts"))
    move = tree.move()
    found = []
    for chain in range(CHAINS):
        recursion = Recursion(state, chain, p, stream(3, "nuts"))
        recursion.run(MAX_DEPTH)
        assert int(move.steps[chain]) == recursion.steps
        assert move.depth is not None
        assert int(move.depth[chain]) == recursion.depth
        assert bool(move.divergent[chain]) == recursion.divergent
        torch.testing.assert_close(move.w[chain], recursion.chosen[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(move.value[chain], recursion.chosen[3], rtol=1e-10, atol=1e-10)
        found.append(recursion)
    assert len({recursion.depth for recursion in found}) > 1
    assert step < 0.5 or bool(move.divergent.any())
    return found


def test_points_that_are_still_needed_are_not_overwritten():
    """For each subtree that ends at an odd point, its first and middle points are the last stored at their levels."""
    last: dict[int, int] = {}
    for n in range(1024):
        if n % 2 == 0:
            last[level(n)] = n
            continue
        length = 2
        while (n + 1) % length == 0:
            assert last[level(n + 1 - length)] == n + 1 - length
            if length > 2:
                assert last[level(n + 1 - length // 2)] == n + 1 - length // 2
            length *= 2


def test_the_depth_is_limited_by_max_depth_and_early_in_the_warm_up():
    density = pr.Density(lambda p: -0.5 * p["w"].square().sum(-1), {"w": Param((2,))}, batched=True)
    target, data = Target(density, None), Data.of(None)
    for method, expected in ((NUTS(chains=4, warmup=0, max_depth=3), 3), (NUTS(chains=4, warmup=100), 5)):
        state = method.init(target, method.plan(target, data, 1, 0), stream(0, "nuts"))
        state.step_size.log = torch.tensor(math.log(1e-3), dtype=DOUBLE)
        move = method.transition(state, stream(1, "nuts"))
        assert move.depth is not None
        assert move.depth.tolist() == [expected] * 4
        assert move.steps.tolist() == [2**expected - 1] * 4


# Straggling chains.


def heavy(p: dict[str, Tensor]) -> Tensor:
    return -torch.log1p(p["w"].square()).sum(-1)


@pytest.mark.parametrize(("far", "expected"), [(2, None), (3, 6), (8, 6), (9, 8)])
def test_few_chains_are_stopped_when_the_others_have_finished(far, expected):
    """Of 64 chains some are so far out that they don't turn: 2 stop at once, 8 at depth 6, and 9 are not stopped."""
    target, data = Target(pr.Density(heavy, {"w": Param()}, batched=True), None), Data.of(None)
    method = NUTS(chains=64, warmup=0, max_depth=8)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "nuts"))
    state.w[:far] = 1e6
    state.value, state.gradient = state.joint(state.w)
    state.step_size.log = torch.tensor(math.log(0.5), dtype=DOUBLE)
    depth = method.transition(state, stream(1, "nuts")).depth
    assert depth is not None
    last = int(depth[far:].max())
    assert last < 6
    assert depth[:far].tolist() == [expected or last] * far


def test_members_do_not_stop_the_chains_of_other_members():
    """Members whose chains turn early don't shorten the trajectories of a member whose chains don't turn."""
    target, data = Target(pr.Density(heavy, {"w": Param()}, batched=True), None), Data.of(None)
    method = NUTS(chains=2, warmup=0, max_depth=8)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "nuts"), torch.Size([40]))
    state.w[0] = 1e6
    state.value, state.gradient = state.joint(state.w)
    state.step_size.log = torch.full((40,), math.log(0.9), dtype=DOUBLE)
    depth = method.transition(state, stream(1, "nuts")).depth
    assert depth is not None
    assert int(depth[1:].max()) < 8
    assert depth[0].tolist() == [8, 8]


def test_stopping_chains_early_keeps_detailed_balance(monkeypatch: pytest.MonkeyPatch):
    """Of four chains two are stopped early; (start, end) and (end, start) must have the same distribution.

    The starts are exact draws, so f(a) g(b) - g(a) f(b) has mean zero; its means over four chains are independent
    across the 2000 members. Six comparisons at 5 standard errors: false alarms at 3.5e-6.
    """

    def log_prob(p: dict[str, Tensor]) -> Tensor:  # the logarithm of a gamma variable of shape 2
        return 2 * p["w"] - p["w"].exp()

    monkeypatch.setattr(nuts, "STRAGGLER_SHARE", 2)
    target, data = Target(pr.Density(log_prob, {"w": Param()}, batched=True), None), Data.of(None)
    method = NUTS(chains=4, warmup=0, max_depth=6)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "nuts"), torch.Size([2000]))
    uniform = torch.rand(2000, 4, 1, 2, generator=stream(1, "nuts"), dtype=DOUBLE)
    start = (-uniform.log().sum(-1)).log()
    state.w, (state.value, state.gradient) = start, state.joint(start)
    state.step_size.log = torch.full((2000,), math.log(0.25), dtype=DOUBLE)
    move = method.transition(state, stream(2, "nuts"))
    assert move.depth is not None
    assert int((move.depth.amax(-1) - move.depth.amin(-1)).max()) > 1
    a, b = start[..., 0], move.w[..., 0]
    functions = [lambda w: w, lambda w: w.square(), lambda w: (w > 0.3).double(), lambda w: (w < -1).double()]
    pairs = [(f, g) for i, f in enumerate(functions) for g in functions[:i]]
    assert_mean_close(torch.stack([(f(a) * g(b) - g(a) * f(b)).mean(-1) for f, g in pairs], -1), 0.0)


# Momenta with heavy tails.


def scale_and_coordinates(p: dict[str, Tensor]) -> Tensor:
    """log scale ~ N(0, 0.25^2), and 60 coordinates ~ N(0, scale^2)."""
    log_scale, x = p["log_scale"], p["x"]
    return -8 * log_scale.square() - 0.5 * (x / log_scale.exp()[..., None]).square().sum(-1) - 60 * log_scale


def test_a_scale_common_to_many_coordinates_is_sampled_at_the_defaults():
    """With normal momenta E-BFMI is below 0.3, and the fit takes twice as many gradients.

    Two comparisons at 4.5 standard errors: false alarms at 1.4e-5.
    """
    density = pr.Density(scale_and_coordinates, {"log_scale": Param(), "x": Param((60,))}, batched=True)
    posterior = pr.fit(density, None, NUTS(chains=128), progress=False)
    assert posterior.status.name == "converged", posterior.status.reason
    assert len(posterior.divergences) == 0
    scale = posterior.draws["log_scale"]
    assert abs(float(scale.mean())) < 4.5 * float(pr.diagnostics.mcse_mean(scale))
    assert abs(float(scale.std()) - 0.25) < 4.5 * float(pr.diagnostics.mcse_sd(scale))


def test_an_interrupted_fit_resumes_with_heavy_tailed_momenta(tmp_path: Path):
    density = pr.Density(scale_and_coordinates, {"log_scale": Param(), "x": Param((60,))}, batched=True)
    method, keep = NUTS(chains=16, warmup=12), pr.Checkpoint(tmp_path / "heavy", every=1)
    whole = pr.fit(density, None, method, steps=3, progress=False)

    def interrupt(moment: Any) -> None:
        if moment.step >= 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pr.fit(density, None, method, steps=3, progress=False, checkpoint=keep, callbacks=[interrupt])
    again = pr.fit(density, None, method, steps=3, progress=False, checkpoint=keep)
    assert torch.equal(again.w, whole.w)


def test_heavy_tailed_momenta_keep_detailed_balance():
    """From exact draws, (start, end) and (end, start) have the same distribution.

    Six comparisons, of independent chains, at 5 standard errors: false alarms at 3.5e-6.
    """
    target, data = (
        Target(pr.Density(lambda p: -0.5 * p["w"].square().sum(-1), {"w": Param((3,))}, batched=True), None),
        Data.of(None),
    )
    method = NUTS(chains=8000, warmup=0, max_depth=2)
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "nuts"))
    start = torch.randn(8000, 3, generator=stream(1, "nuts"), dtype=DOUBLE)
    state.w, (state.value, state.gradient) = start, state.joint(start)
    state.step_size.log = torch.tensor(math.log(0.9), dtype=DOUBLE)
    state.tail = torch.tensor([1.0], dtype=DOUBLE)
    move = method.transition(state, stream(2, "nuts"))
    a, b = start.square().sum(-1), move.w.square().sum(-1)
    functions = [lambda r: r, lambda r: r.square(), lambda r: (r > 4).double(), lambda r: (r < 1).double()]
    pairs = [(f, g) for i, f in enumerate(functions) for g in functions[:i]]
    assert_mean_close(torch.stack([f(a) * g(b) - g(a) * f(b) for f, g in pairs], -1), 0.0)
    assert_mean_close(torch.stack([f(b) for f in functions[:2]], -1), torch.tensor([3.0, 15.0], dtype=DOUBLE))
