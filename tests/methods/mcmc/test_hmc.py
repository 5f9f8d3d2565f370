"""Hamiltonian Monte Carlo keeps the contract, and its length is what ChEES wants on a Gaussian."""

import math

import pytest
import torch
from torch import Tensor

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.mcmc import HMC
from priory.methods.mcmc.adaptation import windows
from priory.models.target import Target


def standard(p: dict[str, Tensor]) -> Tensor:
    return -0.5 * p["w"].square().sum(-1)


def test_the_length_ends_where_chees_is_largest_for_a_gaussian():
    """E[d^2] of a unit Gaussian is in proportion to sin^2 t, for t uniform from 3/4 of T to all of it."""
    target, data = Target(pr.Density(standard, {"w": Param((20,))}, batched=True), None), Data.of(None)
    method = HMC(chains=128, warmup=400, accept=0.95)
    generator = stream(0, "hmc")
    state = method.init(target, method.plan(target, data, 1, 0), generator)
    for _ in range(400):
        state, _ = method.step(target, state, data, generator)
    parts = torch.linspace(0.75, 1, 101, dtype=torch.float64)
    lengths = torch.linspace(1, 2, 501, dtype=torch.float64)
    best = lengths[(lengths[:, None] * parts).sin().square().mean(-1).argmax()]
    assert float(state.length.log.exp()) == pytest.approx(float(best), rel=0.15)


def lengths_of(method: HMC, rho: float, size: int) -> list[float]:
    """T after each transition of the warm-up, on a walk whose every step is rho of the last: a diagonal metric sees
    none of the dependence.
    """

    def walk(p: dict[str, Tensor]) -> Tensor:
        x = p["w"]
        return -0.5 * x[..., 0].square() - 0.5 * (x[..., 1:] - rho * x[..., :-1]).square().sum(-1) / (1 - rho**2)

    target, data = Target(pr.Density(walk, {"w": Param((size,))}, batched=True), None), Data.of(None)
    generator, lengths = stream(0, "hmc"), []
    state = method.init(target, method.plan(target, data, 1, 0), generator)
    for _ in range(state.warmup):
        state, _ = method.step(target, state, data, generator)
        lengths.append(float(state.length.log.exp()))
    return lengths


def test_what_is_learnt_of_the_length_in_a_metric_is_kept_when_the_metric_is_learnt_again():
    lengths = lengths_of(HMC(chains=32, warmup=200, metric="diagonal"), 0.99, 50)
    first, *later = windows(200)
    assert lengths[first - 1] == pytest.approx(math.pi / 2, rel=1e-12)  # before, there is no unit of length
    for end in later:  # one more step of Adam, of 0.025 / sqrt(0.05) at most
        assert lengths[end - 1] == pytest.approx(lengths[end - 2], rel=0.12)
    assert lengths[-1] > 4


def test_a_chain_that_is_alone_learns_the_length_about_the_mean_of_its_past():
    """32 chains find 6.8 to 7.4, one chain 6.0 to 8.2, of five seeds each."""
    assert 5 < lengths_of(HMC(chains=1, warmup=900, metric="diagonal"), 0.95, 20)[-1] < 10


def test_a_fixed_trajectory_takes_the_steps_that_its_length_needs():
    target, data = Target(pr.Density(standard, {"w": Param((2,))}, batched=True), None), Data.of(None)
    method = HMC(chains=8, warmup=0, trajectory=3.0, integrator="leapfrog")
    generator = stream(0, "hmc")
    state = method.init(target, method.plan(target, data, 4, 0), generator)
    state.step_size.log = torch.tensor(math.log(0.1), dtype=torch.float64)
    steps = [int(method.step(target, state, data, generator)[1].metrics["gradients"]) for _ in range(4)]
    assert steps == [26, 28, 24, 29]  # of lengths 2.625, 2.8125, 2.4375, 2.90625: Halton's sequence


def test_a_trajectory_of_too_many_steps_is_shorter_and_its_steps_no_longer():
    """A unit of length takes some 10,000 steps on a Gaussian this narrow; in 1,000 each would be ten times too long."""
    narrow = pr.Density(lambda p: standard({"w": p["w"] / 1e-4}), {"w": Param((2,))}, batched=True)
    target, data = Target(narrow, None), Data.of(None)
    method = HMC(chains=8, warmup=0, trajectory=1.0)
    generator = stream(0, "hmc")
    state = method.init(target, method.plan(target, data, 5, 0), generator)
    moves = [method.transition(state, generator) for _ in range(5)]
    assert all(int(move.steps.max()) == method.stages * method.longest for move in moves)
    assert min(float(move.acceptance.mean()) for move in moves) > 0.5


def test_members_of_different_lengths_do_not_meet():
    """Two members in one batch, of which the second needs a tenth of the step, move as each would alone."""
    scale = torch.tensor([1.0, 0.1], dtype=torch.float64)
    target, data = Target(pr.Density(standard, {"w": Param((2,))}, batched=True), None), Data.of(None)
    method = HMC(chains=3, warmup=0, trajectory=1.0)
    ends = []
    for members in ([0, 1], [0], [1]):
        state = method.init(target, method.plan(target, data, 1, 0), stream(0, "hmc"), torch.Size([len(members)]))
        noise = torch.randn(2, 3, 2, generator=stream(1, "hmc"), dtype=torch.float64)
        state.w = noise[members]
        state.value, state.gradient = state.joint(state.w)
        step = scale[members]
        ends.append(method.follow(state, noise.flip(0)[members], step, (1.0 / step).ceil())[0])
    torch.testing.assert_close(ends[0], torch.cat(ends[1:]), rtol=1e-12, atol=1e-12)


def test_what_a_chain_keeps_is_open_to_autograd():
    target, data = Target(pr.Density(standard, {"w": Param((2,))}, batched=True), None), Data.of(None)
    method, generator = HMC(chains=4, warmup=2), stream(0, "hmc")
    state = method.init(target, method.plan(target, data, 2, 0), generator)
    for _ in range(3):
        state, _ = method.step(target, state, data, generator)
    state, info = method.step(target, state, data, generator)
    assert state.joint.recorded
    kept = (state.w, state.value, state.gradient, info.draw, *state.statistics.values())
    assert not any(t is not None and t.is_inference() for t in kept)


def test_a_state_in_another_order_in_memory_moves_in_the_same_way():
    """As one that comes from a checkpoint, in the usual order."""
    target, data = Target(pr.Density(standard, {"w": Param((3,))}), None), Data.of(None)
    method, ends = HMC(chains=5, warmup=6), []
    for change in (False, True):
        generator = stream(0, "hmc")
        state = method.init(target, method.plan(target, data, 1, 0), generator)
        for _ in range(4):
            state, _ = method.step(target, state, data, generator)
            if change:
                state.w, state.gradient = state.w.contiguous(), state.gradient.contiguous()
        ends.append((state.w, state.gradient, state.length.log))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
