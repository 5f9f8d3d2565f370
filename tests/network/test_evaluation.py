"""All evaluation strategies give the same outputs, values and gradients; shapes and layer types choose the strategy."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.network import SharedInputs
from priory.network.evaluation import Evaluation
from priory.network.skeleton import MAX_BATCHED_WORK, MAX_VMAP_WORK

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def layer_normed() -> nn.Module:
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
    for build in (chain, layer_normed, convolution, batch_normed):
        evaluation = evaluation_of(build())
        few_rows, many_rows = (rows(5),), (rows(MAX_BATCHED_WORK // evaluation.network.size + 1),)
        for gradients in (False, True):
            chosen = [evaluation.strategy(inputs, 2, {}, gradients) for inputs in (few_rows, many_rows)]
            found[build.__name__, gradients] = [type(s).__name__ for s in chosen]
    assert found == {
        ("chain", False): ["Layers", "Layers"],
        ("chain", True): ["Layers", "Plain"],
        ("layer_normed", False): ["Vmap", "Plain"],
        ("layer_normed", True): ["Vmap", "Plain"],
        ("convolution", False): ["Plain", "Plain"],
        ("convolution", True): ["Plain", "Plain"],
        ("batch_normed", False): ["Plain", "Plain"],
        ("batch_normed", True): ["Plain", "Plain"],
    }


def test_one_vector_or_many_rows_use_the_plain_strategy() -> None:
    evaluation = evaluation_of(layer_normed())
    assert evaluation.strategy((rows(5),), 1, {}, gradients=False) is evaluation.plain
    limit = MAX_VMAP_WORK // evaluation.network.size
    assert evaluation.strategy((rows(limit),), 2, {}, gradients=False) is evaluation.vmap
    assert evaluation.strategy((rows(limit + 1),), 2, {}, gradients=False) is evaluation.plain


def test_inputs_of_another_dtype_shape_or_number_are_not_a_chain() -> None:
    evaluation = evaluation_of(chain())
    assert evaluation.is_chain((rows(5),))
    for inputs in ((rows(5).float(),), (rows(5)[:, None],), (rows(5), rows(5))):
        assert not evaluation.is_chain(inputs)


@pytest.mark.parametrize("build", [chain, layer_normed])
@pytest.mark.parametrize("offset", [False, True])
def test_every_strategy_gives_the_same_outputs_values_and_gradients(build, offset: bool) -> None:
    evaluation, x, y = evaluation_of(build()), rows(6), rows(6)[:, :2].cos()
    w = vectors(evaluation, 4)
    offsets = vectors(evaluation, 4)[:, :12].reshape(4, 6, 2) if offset else None
    strategies = [evaluation.plain, evaluation.vmap, *([evaluation.layers] if evaluation.network.layer_chain else [])]
    evaluation.network.set_mode(train=False)
    outputs = [s.outputs(w, (x,), {}, 0, SharedInputs()) for s in strategies]
    pairs = [s.values_and_grads(w, (x, y), 2.5, {}, offsets) for s in strategies]
    for found, (values, gradients) in zip(outputs[1:], pairs[1:], strict=True):
        torch.testing.assert_close(found, outputs[0], **EXACT)
        torch.testing.assert_close(values, pairs[0][0], **EXACT)
        torch.testing.assert_close(gradients, pairs[0][1], **EXACT)
    chosen = evaluation.values_and_grads(
        w.reshape(2, 2, -1), (x, y), 2.5, {}, None if offsets is None else offsets.unflatten(0, (2, 2))
    )
    torch.testing.assert_close(chosen[0], pairs[0][0].reshape(2, 2), **EXACT)
    torch.testing.assert_close(chosen[1], pairs[0][1].reshape(2, 2, -1), **EXACT)


@pytest.mark.parametrize("build", [chain, layer_normed, convolution])
@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
def test_chunks_of_rows_and_vectors_give_the_outputs_of_one_pass(build, limit: int) -> None:
    evaluation, x = evaluation_of(build()), rows(7)
    w = vectors(evaluation, 4)
    each = torch.stack([evaluation.network(v, (x,), {}, train=False).detach() for v in w])
    mirrored = torch.cat([w, 2 * evaluation.network.initial.new_ones(evaluation.size) - w])
    with torch.no_grad():
        torch.testing.assert_close(evaluation.outputs(w, (x,), {}, limit), each, **EXACT)
        centre = SharedInputs(torch.ones(evaluation.size, dtype=F64))
        found = evaluation.outputs(mirrored, (x,), {}, limit, centre)
    torch.testing.assert_close(found[:4], each, **EXACT)
    torch.testing.assert_close(found[4], evaluation.network(mirrored[4], (x,), {}, train=False).detach(), **EXACT)
