"""A graph that runs as a native program gives the numbers of torch, infinities and NaNs included."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.mcmc.joint import cost_of_gradient, log_joint
from priory.models.target import Target
from priory.network import native_library, recorded_graph
from priory.network.graph_function import native
from priory.network.graph_slices import simplify_graph
from priory.network.native_program import NATIVE_ELEMENTS, NativeProgram
from priory.network.operation_recorder import recorded
from priory.network.recorded_graph import by_coordinate, by_vector

DOUBLE = torch.float64
needs_compiler = pytest.mark.skipif(native_library.native_library(DOUBLE) is None, reason="there is no C compiler")
SPECIAL_VALUES = [0.0, -0.0, 1.0, -2.5, 0.5, 700.0, -800.0, 1e200, 1e-200, math.inf, -math.inf, math.nan]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "native"), dtype=DOUBLE)


TABLE = randn(5, 4)


def with_gradient(one: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def both(w: Tensor) -> tuple[Tensor, Tensor]:
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            values = vmap(one)(leaf)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        return gradient, values.detach()

    return both


def program(function: Callable[[Tensor], object], w: Tensor, value: bool = True) -> NativeProgram:
    graph = recorded(function, w)
    simplify_graph(graph)
    found = native(graph, w, value)
    assert isinstance(found, NativeProgram)
    return found


def runge_kutta(w: Tensor) -> Tensor:
    """Twenty steps of two coupled equations with a clamp, read entry by entry."""

    def slope(y: Tensor) -> Tensor:
        return torch.stack([y[1] * w[2], -torch.sin(y[0]) * w[3].exp()])

    y, seen = torch.stack([w[0], w[1]]), []
    for _ in range(20):
        first = slope(y)
        y = y + 0.1 * slope(y + 0.05 * first)
        seen.append(torch.where(y[0] > 0, y[0], 0.5 * y[0]))
    return -torch.stack(seen).square().sum()


def forward_algorithm(w: Tensor) -> Tensor:
    rows = TABLE[:, :3] * w[:3] + w[3]
    state = rows[0]
    for t in range(1, 5):
        state = torch.logsumexp(state[:, None] + w[:3].tanh(), 0) + rows[t]
    return torch.logsumexp(state, 0)


def kalman_filter(w: Tensor) -> Tensor:
    """Products of small matrices, a division and a logarithm per step."""
    move = torch.stack([w[0], w[1], -w[1], w[0]]).reshape(2, 2).tanh()
    mean, covariance, total = w[2:], torch.eye(2, dtype=DOUBLE), 0.0
    for y in TABLE[:, 0]:
        mean, covariance = move @ mean, move @ covariance @ move.T + 0.3 * torch.eye(2, dtype=DOUBLE)
        gain, error = covariance[:, 0] / (covariance[0, 0] + 0.5), y - mean[0]
        total = total - 0.5 * error.square() / (covariance[0, 0] + 0.5) - 0.5 * (covariance[0, 0] + 0.5).log()
        mean, covariance = mean + gain * error, covariance - gain[:, None] * covariance[:1]
    return torch.as_tensor(total)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Runge and Kutta": runge_kutta,
    "forward algorithm": forward_algorithm,
    "Kalman filter": kalman_filter,
    "torch between two parts": lambda w: (torch.lgamma(w.exp()).cumsum(0) * w.exp()).sum() + w.topk(2).values.prod(),
    "several results": lambda w: torch.linalg.slogdet(torch.diag(w.exp()) + 0.1).logabsdet + w.sum(),
    "changes of shape": lambda w: (
        ((w[:, None] * TABLE.T).reshape(-1)[3:15].reshape(3, 4).T @ TABLE[:3]).flip(0)[1].sum()
    ),
    "powers": lambda w: (w.exp() ** 1.5).sum() + (w**3).prod() + (1 - w).abs().sum() + w.square().sum().sqrt(),
    "lists": lambda w: torch.cat([w, w[:1].sigmoid(), TABLE[0]]).square().log1p().sum() - w.split(2)[1].cos().sum(),
}


@needs_compiler
@pytest.mark.parametrize("order", [by_coordinate, by_vector])
@pytest.mark.parametrize("vectors", [1, 33])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_native_program_is_its_function_at_other_inputs(name, vectors, order):
    both = with_gradient(FUNCTIONS[name])
    run = program(both, order(randn(vectors, 4)))
    alone = program(both, order(randn(vectors, 4)), value=False)
    for seed in (1, 2):
        w = order(randn(vectors, 4, seed=seed))
        gradient, values = both(w)
        found, numbers = run(w)
        torch.testing.assert_close(numbers, values, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(alone(w), gradient, rtol=1e-11, atol=1e-11)


@needs_compiler
def test_a_result_stays_when_the_program_runs_again():
    run = program(lambda w: (w * 2.0, w.exp().sum(1)), randn(3, 4))
    first, second = run(torch.ones(3, 4, dtype=DOUBLE)), run(torch.zeros(3, 4, dtype=DOUBLE))
    assert float(first[0][0, 0]) == 2.0
    assert float(second[0][0, 0]) == 0.0


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: lambda x, y, name=name: getattr(torch, name)(x) for name in ("neg", "exp", "log", "log1p", "sqrt", "tanh")
    },
    **{name: lambda x, y, name=name: getattr(torch, name)(x) for name in ("sigmoid", "abs", "sin", "cos")},
    **{name: lambda x, y, name=name: getattr(torch, name)(x, y) for name in ("add", "sub", "mul", "div", "pow")},
    **{name: lambda x, y, name=name: getattr(torch, name)(x, y) for name in ("maximum", "minimum")},
    **{
        name: lambda x, y, name=name: torch.where(getattr(torch, name)(x, y), x, y)
        for name in ("ge", "gt", "le", "lt", "eq", "ne")
    },
    "a number": lambda x, y: 2.0 - x / 3.0,
    "a sum and a product": lambda x, y: x + y * x,
    "sum": lambda x, y: torch.stack([x, y, x]).sum(0),
    "logsumexp": lambda x, y: torch.logsumexp(torch.stack([x, y, y]), 0),
}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_infinities_and_nans_of_torch(name, dtype):
    values = torch.tensor(SPECIAL_VALUES, dtype=dtype)
    w = torch.cat([torch.cartesian_prod(values, values), randn(17, 2).to(dtype)])

    def function(w: Tensor) -> Tensor:
        return OPERATIONS[name](w[:, 0], w[:, 1])

    run = program(function, w)
    assert len(run._steps) == 1  # nothing is left to torch
    tolerance = 1e-12 if dtype == DOUBLE else 1e-5
    torch.testing.assert_close(run(w), function(w), rtol=tolerance, atol=0.0 if name != "sin" else 1e-6, equal_nan=True)


@needs_compiler
def test_a_large_operation_is_left_to_torch():
    wide = torch.ones(NATIVE_ELEMENTS, dtype=DOUBLE)
    run = program(lambda w: (w[:, :1] * wide).exp().sum(1) * 2.0 + w[:, 0], randn(2, 2))
    assert len(run._steps) > 1
    w = randn(2, 2, seed=1)
    torch.testing.assert_close(run(w), w[:, 0].exp() * 2.0 * NATIVE_ELEMENTS + w[:, 0], rtol=1e-12, atol=0.0)


@needs_compiler
def test_memory_is_used_again_once_a_result_has_been_read():
    def loop(w: Tensor) -> Tensor:
        for _ in range(200):
            w = (w * w).sin() + 1.0
        return w

    assert len(program(loop, randn(3, 4))._memory._kept) <= 6


def walk(steps: int) -> pr.Density:
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        x, total = p["x"][0], torch.zeros((), dtype=DOUBLE)
        for i in range(steps):
            x = x + 0.1 * torch.sin(x * p["x"][1] + i)
            total = total - x * x
        return total / steps - p["x"].square().sum()

    return pr.Density(log_prob, {"x": Param((2,))})


def bound(density: pr.Density) -> tuple[Target, Data]:
    return Target(density, None), Data.of(None)


@needs_compiler
def test_a_long_density_runs_natively_and_a_short_one_does_not(monkeypatch):
    target, data = bound(walk(400))
    w = randn(8, 2)
    joint = log_joint(target, data, w)
    value, gradient = joint(w)
    monkeypatch.setattr(recorded_graph, "NATIVE_OPERATIONS", 1 << 40)
    plain = log_joint(target, data, w)
    assert plain.cost is not None
    assert joint.cost is not None
    assert plain.cost.operations > 20 * joint.cost.operations
    torch.testing.assert_close(plain(w)[0], value, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(plain(w)[1], gradient, rtol=1e-11, atol=1e-11)


def test_a_long_density_has_the_same_numbers_without_a_compiler(monkeypatch):
    target, data = bound(walk(400))
    w = randn(8, 2)
    value, gradient = log_joint(target, data, w)(w)
    monkeypatch.setenv("CC", "no-such-compiler")
    native_library.native_library.cache_clear()
    try:
        joint = log_joint(target, data, w)
        assert joint.cost is not None
        assert joint.cost.operations > 1000
        torch.testing.assert_close(joint(w)[0], value, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(joint(w)[1], gradient, rtol=1e-11, atol=1e-11)
    finally:
        native_library.native_library.cache_clear()


def test_the_cost_of_a_long_density_is_read_from_its_beginning():
    target, data = bound(walk(2000))
    w = randn(4, 2)
    whole = log_joint(target, data, w).cost
    beginning = cost_of_gradient(target, data, w)
    assert whole is not None
    assert beginning is not None
    ratio = (beginning.elements / beginning.operations) / (whole.elements / whole.operations)
    assert 0.5 < ratio < 2.0
    assert beginning.operations < whole.operations
