"""A recorded function gives the same numbers at other inputs, and what can't be repeated is not recorded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from priory.core.streams import stream
from priory.network.graph_function import copied, function
from priory.network.graph_slices import simplify_graph
from priory.network.operation_recorder import NotRecordableError, recorded
from priory.network.recorded_graph import by_coordinate, by_vector, record

DOUBLE = torch.float64
TABLE = torch.randn(6, 5, generator=stream(0, "recorder"), dtype=DOUBLE)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "recorder"), dtype=DOUBLE)


def solver(w: Tensor) -> Tensor:
    """Thirty Euler steps of two equations, read entry by entry."""
    y = torch.stack([w[0], w[1]])
    for _ in range(30):
        y = y + 0.1 * torch.stack([y[1] * w[2], -y[0] * w[3]])
    return -y.square().sum()


def forward_algorithm(w: Tensor) -> Tensor:
    """A loop over time with a row of a matrix at each step, and one row that is never read."""
    rows = TABLE[:, :3] * w[:3] + w[3]
    state = rows[0]
    for t in range(1, 5):
        state = torch.logsumexp(state[:, None] + w[:3], 0) + rows[t]
    return torch.logsumexp(state, 0)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "solver": solver,
    "forward algorithm": forward_algorithm,
    "constants": lambda w: (w * (TABLE @ TABLE.T).inverse().sum()).sum() + torch.arange(3.0).double().sum(),
    "several results": lambda w: torch.linalg.slogdet(torch.diag(w.exp()) + 0.1).logabsdet + w.topk(2).values.sum(),
    "lists": lambda w: torch.cat([w, w[:1], TABLE[0]]).cumsum(0).sum() + w.split(2)[1].prod(),
    "options": lambda w: w.to(torch.float32).double().sum() + torch.where(w > 0, w, 0.0).mean(dtype=DOUBLE),
    "columns": lambda w: (TABLE[:4] * w[:, None])[:, 1].sum() * (TABLE[:4] * w[:, None])[:, 3].prod(),
    "indices": lambda w: w[torch.tensor([0, 2, 2])].square().sum() - torch.nn.functional.softplus(w).sum(),
}


@pytest.mark.parametrize("order", [by_coordinate, by_vector])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_recorded_function_is_that_function_at_other_inputs(name, order):
    many = vmap(grad_and_value(FUNCTIONS[name]))
    graph = recorded(many, order(randn(3, 4)))
    simplify_graph(graph)
    w = order(randn(3, 4, seed=1))
    gradient, value = many(w)
    found, values = function(graph, w)(w)
    torch.testing.assert_close(values, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(function(graph, w, value=False)(w), gradient, rtol=1e-12, atol=1e-12)


def test_what_depends_on_no_input_is_no_operation():
    graph = recorded(lambda w: w * (TABLE.exp().sum() + torch.ones_like(w)), randn(3))
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == ["aten.mul.Tensor"]


def test_a_copy_without_values_leaves_the_graph_as_it_was():
    graph = recorded(lambda w: (w * 2.0, w.exp().sum()), randn(3))
    before = len(graph.graph.nodes)
    assert len(copied(graph, value=False).graph.nodes) == 3
    assert len(graph.graph.nodes) == before == 5


def in_place(w: Tensor) -> Tensor:
    total = torch.zeros_like(w)
    total += w
    return total


def through_a_view(w: Tensor) -> Tensor:
    buffer = torch.zeros(3, dtype=DOUBLE)
    buffer[0].add_(w[0])
    return buffer * w


def after_it_was_read(w: Tensor) -> Tensor:
    buffer = torch.ones(3, dtype=DOUBLE)
    first = w * buffer
    buffer.mul_(2.0)
    return first + w * buffer


UNRECORDABLE: dict[str, Callable[[Tensor], Any]] = {
    "in place": in_place,
    "through a view": through_a_view,
    "after it was read": after_it_was_read,
    "a Python number": lambda w: w * float(w.sum()),
    "a branch": lambda w: w if bool((w > 0).all()) else -w,
    "a shape": lambda w: w[w > 0].sum(),
    "noise": lambda w: w + torch.randn(3),
}


@pytest.mark.parametrize("name", UNRECORDABLE)
def test_what_can_not_be_repeated_is_not_recorded(name):
    with pytest.raises(NotRecordableError):
        recorded(UNRECORDABLE[name], randn(3))


def test_a_tensor_of_another_recording_is_a_constant():
    kept: list[Tensor] = []

    def first(w: Tensor) -> Tensor:
        kept.append(w * 2.0)
        return kept[0] + w

    recorded(first, randn(3))
    graph = recorded(lambda w: w * kept[0], randn(3, seed=1))
    w = randn(3, seed=2)
    torch.testing.assert_close(function(graph, w)(w), w * 2.0 * randn(3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seeded", [False, True])
def test_a_function_with_random_numbers_is_not_recorded(seeded):
    """A generator that is made anew in each call gives the same numbers, but a graph would go through its stream."""

    def noisy(w: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0) if seeded else None
        return w, w.sum(-1) + torch.rand(len(w), generator=generator, dtype=DOUBLE)

    assert record(noisy, randn(3, 2), (by_vector,)) is None


def operations(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(("used", "left"), [(range(7), "stack"), (range(1, 6), "stack"), ((2, 5), "cat")])
@pytest.mark.parametrize("dim", [1, 2])
def test_the_gradient_of_entries_is_stacked(used, left, dim):
    def entries(w: Tensor) -> Tensor:
        """With their gradients in the order of a backward pass."""
        parts = [w.select(dim, i).exp() for i in used]
        total: Any = 0.0
        for i, part in zip(reversed(used), reversed(parts), strict=True):
            total = total + torch.ops.aten.select_backward.default(part, list(w.shape), dim, i)
        return total

    w = randn(3, 7, 7)
    graph = recorded(entries, w)
    simplify_graph(graph)
    names = operations(graph)
    assert f"aten.{left}.default" in names
    assert not any("select_backward" in name or "add" in name for name in names)
    torch.testing.assert_close(function(graph, w)(w), entries(w), rtol=0, atol=0)


def test_a_sum_of_thousands_of_entries_is_rewritten_without_recursion():
    def loop(w: Tensor) -> Tensor:
        total = torch.zeros((), dtype=DOUBLE)
        for i in range(2000):
            total = total + w[i].sin()
        return total

    many = vmap(grad_and_value(loop))
    graph = recorded(many, randn(2, 2000))
    simplify_graph(graph)
    w = randn(2, 2000, seed=1)
    found, values = function(graph, w)(w)
    torch.testing.assert_close(values, w.sin().sum(-1), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found, w.cos(), rtol=1e-12, atol=1e-12)
    assert not any("select_backward" in name for name in operations(graph))
