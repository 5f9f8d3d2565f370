"""A method's functions in a plain loop: the numbers of `fit`, in parts of a batch, in half precision."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target


def problem(dtype=torch.float64):
    generator = stream(0, "own loop")
    X = torch.randn(30, 2, generator=generator, dtype=dtype)
    y = X[:, 0] - X[:, 1].sin()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    return pr.Model(net, pr.Gaussian(0.1), prior=1.0), (X, y)


def begun(method, model, rows, batch_size=30, steps=12):
    data = Data.of(rows, batch_size=batch_size).prepared(model.prepare)
    target, generator = make_target(model, data), stream(0, "noise")
    plan = method.plan(target, data, steps, 0)
    return target, plan, generator, method.init(target, plan, generator)


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField(), pr.NaturalGradient()], ids=repr)
def test_a_custom_loop_gives_the_same_values_as_fit(method):
    model, rows = problem()
    target, plan, generator, state = begun(method, model, rows, batch_size=10)
    for epoch in range(4):
        for batch in plan.data.batches(seed=0, epoch=epoch):
            state, _ = method.step(target, state, batch, generator)
    ours = method.posterior(target, state)
    fitted = pr.fit(problem()[0], rows, method, steps=12, batch_size=10, progress=False)
    for name, value in fitted.tensors().items():
        assert torch.equal(value, ours.tensors()[name]), name


@pytest.mark.parametrize("method", [pr.MeanField(), pr.MeanField(samples=2), pr.NaturalGradient()], ids=repr)
def test_accumulated_parts_of_a_batch_at_one_draw_give_the_step_of_the_whole_batch(method):
    model, (X, y) = problem()
    target, _, generator, state = begun(method, model, (X, y))
    whole, _, other, expected = begun(method, problem()[0], (X, y))
    for _ in range(3):
        w = method.draw(state, generator)
        value, gradient = torch.zeros(w.shape[:-1], dtype=w.dtype), torch.zeros_like(w)
        for part in (slice(0, 20), slice(20, 30)):
            piece, slope = target.log_likelihood_and_grad(w, (X[part], y[part]))
            share = (part.stop - part.start) / 30
            value, gradient = value + share * piece, gradient + share * slope
        state, _ = method.update(target, state, w, value, gradient)
        expected, _ = method.step(whole, expected, (X, y), other)
    found, wanted = method.posterior(target, state), method.posterior(whole, expected)
    for name, value in wanted.tensors().items():
        assert torch.allclose(value, found.tensors()[name], rtol=1e-9, atol=1e-10), name


def test_one_autocast_block_per_draw_uses_the_current_weights_in_half_precision():
    method = pr.MeanField()
    model, rows = problem(torch.float32)
    target, _, generator, state = begun(method, model, rows)
    for _ in range(2):
        w = method.draw(state, generator).clone()
        exact, slope = target.log_likelihood_and_grad(w, rows)
        slope = slope.clone()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value, gradient = target.log_likelihood_and_grad(w, rows)
        assert gradient.dtype == torch.float32
        assert float(value) != float(exact)
        assert float(value) == pytest.approx(float(exact), rel=0.05)
        assert float((gradient - slope).norm()) < 0.05 * float(slope.norm())
        state, _ = method.update(target, state, w, value, gradient)
