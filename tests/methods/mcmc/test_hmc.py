"""Hamiltonian Monte Carlo: the length of trajectories, members, and the layout of tensors."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.mcmc import HMC
from priory.models.target import Target


def standard(p: dict[str, Tensor]) -> Tensor:
    return -0.5 * p["w"].square().sum(-1)


def test_the_length_converges_to_the_maximum_of_chees_on_a_gaussian():
    """On a unit Gaussian E[d^2] is proportional to the mean of sin^2 t, with t uniform on (3/4 T, T)."""
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
    """Return T after each transition of the warm-up, on a first-order autoregression with correlation rho, which a
    diagonal metric can't represent.
    """

    def walk(p: dict[str, Tensor]) -> Tensor:
        x = p["w"]
        return -0.5 * x[..., 0].square() - 0.5 * (x[..., 1:] - rho * x[..., :-1]).square().sum(-1) / (1 - rho**2)

    target, data = Target(pr.Density(walk, {"w": Param((size,))}, batched=True), None), Data.of(None)
    generator, lengths = stream(0, "hmc"), []
    state = method.init(target, method.plan(target, data, 1, 0), generator)
    while not state.warmup.frozen:
        state, _ = method.step(target, state, data, generator)
        lengths.append(float(state.length.log.exp()))
    return lengths


def test_the_length_changes_by_one_step_of_adam_when_the_metric_is_learnt():
    lengths = lengths_of(HMC(chains=32, warmup=200, metric="diagonal"), 0.99, 50)
    for before, after in itertools.pairwise(lengths[:-1]):
        assert abs(math.log(after / before)) < 0.025 / math.sqrt(0.05) + 1e-9
    assert lengths[-1] > 4


def test_a_single_chain_adapts_the_length_around_the_mean_of_its_past():
    """In units of the marginal deviations, 32 chains reach lengths from 6.8 to 7.4 over five seeds.

    The precision has the diagonal (1 + rho^2) / (1 - rho^2) = 19.5, so the metric's unit is 19.5^(-1/4) of these.
    """
    found = lengths_of(HMC(chains=1, warmup=900, metric="diagonal"), 0.95, 20)[-1] * 19.5**-0.25
    assert 5 < found < 10


def test_a_fixed_trajectory_takes_length_over_step_size_steps():
    target, data = Target(pr.Density(standard, {"w": Param((2,))}, batched=True), None), Data.of(None)
    method = HMC(chains=8, warmup=0, trajectory=3.0, integrator="leapfrog")
    generator = stream(0, "hmc")
    state = method.init(target, method.plan(target, data, 4, 0), generator)
    state.step_size.log = torch.tensor(math.log(0.1), dtype=torch.float64)
    steps = [int(method.step(target, state, data, generator)[1].metrics["gradients"]) for _ in range(4)]
    assert steps == [26, 28, 24, 29]  # lengths 2.625, 2.8125, 2.4375, 2.90625, jittered by Halton's sequence


def test_the_limit_on_steps_shortens_a_trajectory_instead_of_lengthening_its_steps():
    """A length of 1 needs some 10,000 steps on this narrow Gaussian; 1,000 steps would each be ten times too long."""
    narrow = pr.Density(lambda p: standard({"w": p["w"] / 1e-4}), {"w": Param((2,))}, batched=True)
    target, data = Target(narrow, None), Data.of(None)
    method = HMC(chains=8, warmup=0, trajectory=1.0)
    generator = stream(0, "hmc")
    state = method.init(target, method.plan(target, data, 5, 0), generator)
    moves = [method.transition(state, generator) for _ in range(5)]
    assert all(int(move.steps.max()) == 2 * method.longest for move in moves)
    assert min(float(move.acceptance.mean()) for move in moves) > 0.5


def test_members_with_different_numbers_of_steps_do_not_interact():
    """Two members in one batch, of which the second has a tenth of the step size, move as each does alone."""
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


def test_the_state_and_the_draws_are_not_inference_tensors():
    target, data = Target(pr.Density(standard, {"w": Param((2,))}, batched=True), None), Data.of(None)
    method, generator = HMC(chains=4, warmup=2), stream(0, "hmc")
    state = method.init(target, method.plan(target, data, 2, 0), generator)
    for _ in range(3):
        state, _ = method.step(target, state, data, generator)
    state, info = method.step(target, state, data, generator)
    assert state.joint.recorded
    kept = (state.w, state.value, state.gradient, info.draw, *state.statistics.values())
    assert not any(t is not None and t.is_inference() for t in kept)


def test_the_memory_layout_of_the_state_does_not_change_the_result():
    """A state that is loaded from a checkpoint is contiguous."""
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
