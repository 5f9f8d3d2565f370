"""Warm-up adaptation of the step size and the trajectory length, against the formulas."""

import math

import pytest
import torch

from priory.core.streams import stream
from priory.methods.mcmc.adaptation import (
    LENGTH_DECAY,
    LENGTH_RATE,
    Length,
    StepSize,
    chees_slope,
    first_step,
    halton,
)

DOUBLE = torch.float64
NO_LIMIT = torch.tensor(math.inf, dtype=DOUBLE)


def test_dual_averaging_follows_its_recursion():
    step = StepSize.at(torch.tensor([0.5, 2.0], dtype=DOUBLE))
    acceptances = [torch.tensor([0.9, 0.2]), torch.tensor([0.4, 0.6]), torch.tensor([0.7, 0.8])]
    for accepted in acceptances:
        step.record(accepted.double(), 0.8, NO_LIMIT)
    for member, start in enumerate((0.5, 2.0)):
        error, average = 0.0, math.log(start)
        log = average
        for t, accepted in enumerate(acceptances, 1):
            error = (1 - 1 / (t + 10)) * error + (0.8 - float(accepted[member])) / (t + 10)
            log = math.log(start) - error * math.sqrt(t) / 0.05
            average = t**-0.75 * log + (1 - t**-0.75) * average
        assert float(step.log[member]) == pytest.approx(log, rel=1e-6)
        assert float(step.average[member]) == pytest.approx(average, rel=1e-6)
    step.settle()
    assert torch.equal(step.log, step.average)


def test_the_step_size_falls_after_low_and_rises_after_high_acceptance():
    step = StepSize.at(torch.ones(2, dtype=DOUBLE))
    step.record(torch.tensor([0.1, 1.0], dtype=DOUBLE), 0.8, NO_LIMIT)
    assert float(step.log[0]) < 0 < float(step.log[1])


def test_the_step_size_stays_below_its_limit():
    step = StepSize.at(torch.ones(2, dtype=DOUBLE))
    for _ in range(5):
        step.record(torch.ones(2, dtype=DOUBLE), 0.8, torch.tensor([1.5, math.inf], dtype=DOUBLE))
    assert float(step.log[0]) == pytest.approx(math.log(1.5), abs=1e-12)
    assert float(step.log[1]) > 1
    assert float(step.average[0]) <= math.log(1.5)


def test_the_first_step_is_the_largest_power_of_two_that_is_accepted():
    thresholds = torch.tensor([0.3, 5.0, 1000.0], dtype=DOUBLE)  # accepted below, rejected above
    found = first_step(lambda e: (e < thresholds).double(), torch.ones(3, dtype=DOUBLE))
    assert found.tolist() == [0.25, 4.0, 512.0]


def test_halton_is_the_van_der_corput_sequence_in_base_two():
    assert [halton(i) for i in range(1, 8)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]


def test_the_chees_gradient_is_the_derivative_of_its_criterion():
    """The exact flow of a unit Gaussian is w' = w cos t + p sin t; autograd differentiates the criterion E[d^2] / 4."""
    generator = stream(0, "chees")
    w, p = (torch.randn(2, 50, 3, generator=generator, dtype=DOUBLE) for _ in range(2))
    w, p = w - w.mean(-2, keepdim=True), p - p.mean(-2, keepdim=True)
    log_length = torch.tensor([-0.7, 0.4], dtype=DOUBLE, requires_grad=True)

    def change(log: torch.Tensor) -> torch.Tensor:
        t = log.exp()[:, None, None]
        end = w * t.cos() + p * t.sin()
        return (end - end.mean(-2, keepdim=True)).square().sum(-1) - w.square().sum(-1)

    (expected,) = torch.autograd.grad((change(log_length).square().mean(-1) / 4).sum(), log_length)
    t = log_length.detach().exp()
    at = t[:, None, None]
    end, momentum = w * at.cos() + p * at.sin(), p * at.cos() - w * at.sin()
    outward = ((end - end.mean(-2, keepdim=True)) * momentum).sum(-1)
    slope = chees_slope(change(log_length.detach()), outward, t, torch.full((2, 50), 0.8, dtype=DOUBLE))
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-10)


def test_rejected_chains_do_not_contribute_to_the_chees_gradient():
    change, outward = torch.tensor([[1.0, 100.0]]), torch.tensor([[2.0, 100.0]])
    slope = chees_slope(change, outward, torch.tensor([0.5]), torch.tensor([[0.6, 0.0]]))
    assert float(slope) == pytest.approx(1.0)


def test_the_length_is_updated_by_adam_within_its_bounds():
    length = Length.at(torch.tensor([1.0, 1.0], dtype=DOUBLE))
    low, high = torch.tensor([0.1, 0.1], dtype=DOUBLE), torch.tensor([10.0, 1.01], dtype=DOUBLE)
    square = log = 0.0
    for t, slope in enumerate((2.0, -0.5, 3.0), 1):
        length.record(torch.full((2,), slope, dtype=DOUBLE), low, high)
        square = LENGTH_DECAY * square + (1 - LENGTH_DECAY) * slope**2
        log += LENGTH_RATE * slope / math.sqrt(square / (1 - LENGTH_DECAY**t))
    assert float(length.log[0]) == pytest.approx(log, rel=1e-12)
    assert float(length.log[1]) <= math.log(1.01) + 1e-12
