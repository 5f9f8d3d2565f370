"""Every strategy gives the same outputs, values and gradients, and shapes and layer types alone choose among them."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.network import SharedInputs
from priory.network.evaluation import Evaluation
from priory.network.skeleton import BATCHED_WORK, SMALL_WORK

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2))


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def evaluation_of(net: nn.Module) -> Evaluation:
    model = pr.Model(net.double(), pr.Gaussian())
    model.check((rows(5), torch.zeros(5, 2, dtype=F64)))
    return model.evaluation


def rows(n: int) -> torch.Tensor:
    return torch.linspace(-1, 2, 3 * n, dtype=F64).sin().reshape(n, 3)


def vectors(evaluation: Evaluation, count: int) -> torch.Tensor:
    noise = torch.randn(count, evaluation.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    return 0.5 * noise


def test_shapes_and_layer_types_choose_the_strategy() -> None:
    found = {}
    for build in (chain, normed, convolution, batch_normed):
        e = evaluation_of(build())
        small, many = (rows(5),), (rows(BATCHED_WORK // e.network.size + 1),)
        for gradients in (False, True):
            chosen = [e.strategy(inputs, 2, {}, gradients) for inputs in (small, many)]
            found[build.__name__, gradients] = [type(s).__name__ for s in chosen]
    assert found == {
        ("chain", False): ["Layers", "Layers"],
        ("chain", True): ["Layers", "Plain"],
        ("normed", False): ["Vmap", "Plain"],
        ("normed", True): ["Vmap", "Plain"],
        ("convolution", False): ["Plain", "Plain"],
        ("convolution", True): ["Plain", "Plain"],
        ("batch_normed", False): ["Plain", "Plain"],
        ("batch_normed", True): ["Plain", "Plain"],
    }


def test_one_vector_and_more_rows_than_vmap_pays_for_run_the_network_itself() -> None:
    e = evaluation_of(normed())
    assert e.strategy((rows(5),), 1, {}, gradients=False) is e.plain
    limit = SMALL_WORK // e.network.size
    assert e.strategy((rows(limit),), 2, {}, gradients=False) is e.vmap
    assert e.strategy((rows(limit + 1),), 2, {}, gradients=False) is e.plain


def test_inputs_of_another_type_or_shape_are_not_a_chain() -> None:
    e = evaluation_of(chain())
    assert e.is_chain((rows(5),))
    for inputs in ((rows(5).float(),), (rows(5)[:, None],), (rows(5), rows(5))):
        assert not e.is_chain(inputs)


@pytest.mark.parametrize("build", [chain, normed])
@pytest.mark.parametrize("offset", [False, True])
def test_every_strategy_gives_the_same_outputs_values_and_gradients(build, offset: bool) -> None:
    e, x, y = evaluation_of(build()), rows(6), rows(6)[:, :2].cos()
    w = vectors(e, 4)
    moved = vectors(e, 4)[:, :12].reshape(4, 6, 2) if offset else None
    strategies = [e.plain, e.vmap, *([e.layers] if e.network.layer_chain else [])]
    e.network.set_mode(train=False)
    outputs = [s.outputs(w, (x,), {}, 0, SharedInputs()) for s in strategies]
    pairs = [s.values_and_grads(w, (x, y), 2.5, {}, moved) for s in strategies]
    for found, (values, gradients) in zip(outputs[1:], pairs[1:], strict=True):
        torch.testing.assert_close(found, outputs[0], **EXACT)
        torch.testing.assert_close(values, pairs[0][0], **EXACT)
        torch.testing.assert_close(gradients, pairs[0][1], **EXACT)
    chosen = e.values_and_grads(
        w.reshape(2, 2, -1), (x, y), 2.5, {}, None if moved is None else moved.unflatten(0, (2, 2))
    )
    torch.testing.assert_close(chosen[0], pairs[0][0].reshape(2, 2), **EXACT)
    torch.testing.assert_close(chosen[1], pairs[0][1].reshape(2, 2, -1), **EXACT)


@pytest.mark.parametrize("build", [chain, normed, convolution])
@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
def test_chunks_of_rows_and_vectors_give_the_outputs_of_one_pass(build, limit: int) -> None:
    e, x = evaluation_of(build()), rows(7)
    w = vectors(e, 4)
    each = torch.stack([e.network(v, (x,), {}, train=False).detach() for v in w])
    mirrored = torch.cat([w, 2 * e.network.initial.new_ones(e.size) - w])
    with torch.no_grad():
        torch.testing.assert_close(e.outputs(w, (x,), {}, limit), each, **EXACT)
        centre = SharedInputs(torch.ones(e.size, dtype=F64))
        found = e.outputs(mirrored, (x,), {}, limit, centre)
    torch.testing.assert_close(found[:4], each, **EXACT)
    torch.testing.assert_close(found[4], e.network(mirrored[4], (x,), {}, train=False).detach(), **EXACT)
