"""The Jacobian in parts, one per layer, against autograd, for every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import priory as pr
from priory.curvature import Pass, select
from priory.curvature.jacobian_parts import DensePart, EmbeddingPart, JacobianRows, LayerPart
from priory.curvature.layer_jacobians import LayerJacobians, curvature_rows, jacobian_rows

EXACT: Any = {"rtol": 1e-9, "atol": 1e-10}


def test_the_parts_equal_the_jacobian_of_autograd(problem: Any) -> None:
    found = torch.cat([r.dense() for r in jacobian_rows(problem.target, problem.w, problem.inputs, problem.selection)])
    torch.testing.assert_close(found, problem.jacobian(), **EXACT)


def test_the_layers_without_a_rule_are_those_expected(problem: Any) -> None:
    taps = LayerJacobians(problem.target, problem.w, problem.inputs, problem.selection)
    assert set(taps.plan.plain) == problem.plain


def single_block(found: Any) -> JacobianRows:
    (one,) = found
    return one


@pytest.fixture
def chain(make_problem: Any) -> Any:
    """A plain sequence whose ReLU runs in place after a convolution."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)).double()
    return make_problem(net, pr.Categorical(), torch.randn(6, 1, 4).double(), torch.arange(6) % 3)


# Chunks, cotangents and selections.


def test_chunks_under_a_small_limit_give_the_same_rows(chain: Any) -> None:
    few = list(jacobian_rows(chain.target, chain.w, chain.inputs, chain.selection, limit=1500))
    assert len(few) > 2
    torch.testing.assert_close(torch.cat([r.dense() for r in few]), chain.jacobian(), **EXACT)


def test_chunks_for_the_dense_jacobian_give_the_same_rows(problem: Any) -> None:
    found = single_block(jacobian_rows(problem.target, problem.w, problem.inputs, problem.selection))
    few = list(found.chunks(limit=1))
    assert [len(r) for r in few] == [1, 1, 1]
    torch.testing.assert_close(torch.cat([r.dense() for r in few]), found.dense(), **EXACT)
    assert torch.equal(torch.cat([r.outputs for r in few]), found.outputs)


def test_cotangents_multiply_the_jacobian(chain: Any) -> None:
    given = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0)).double()
    seen: list[torch.Tensor] = []

    def cotangents(outputs: torch.Tensor, some: slice) -> torch.Tensor:
        seen.append(outputs)
        return given[:, some]

    found = jacobian_rows(chain.target, chain.w, chain.inputs, chain.selection, cotangents, limit=1500)
    expected = torch.einsum("dnc,ncp->ndp", given, chain.jacobian())
    torch.testing.assert_close(torch.cat([r.dense() for r in found]), expected, **EXACT)
    torch.testing.assert_close(torch.cat(seen), chain.target.model.net(*chain.inputs).detach(), **EXACT)


@pytest.mark.parametrize("over", ["last", ["0.bias"], ["0.weight"], ["*.bias"], ["3.weight", "0.*"]])
def test_a_selection_gives_the_selected_columns_of_the_jacobian(chain: Any, over: Any) -> None:
    selection = select(chain.target.model, over)
    found = single_block(jacobian_rows(chain.target, chain.w, chain.inputs, selection))
    torch.testing.assert_close(found.dense(), chain.jacobian()[..., selection.places], **EXACT)


def test_one_row_gives_the_same_jacobian(problem: Any) -> None:
    one = tuple(x[:1] for x in problem.inputs)
    found = single_block(jacobian_rows(problem.target, problem.w, one, problem.selection))
    torch.testing.assert_close(found.dense(), problem.jacobian(one), **EXACT)


def test_the_buffers_of_a_fit_are_used(make_problem: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    made = make_problem(net, pr.Gaussian(noise=1.0), torch.randn(4, 2).double(), torch.randn(4, 1).double())
    given = {name: b.clone() for name, b in made.target.model.network.given.items()}
    before = single_block(jacobian_rows(made.target, made.w, made.inputs, made.selection, buffers=given)).dense()
    given["1.running_var"] *= 4
    after = single_block(jacobian_rows(made.target, made.w, made.inputs, made.selection, buffers=given)).dense()
    first = made.selection.spans()["0.weight"]
    torch.testing.assert_close(after[..., first] * 2, before[..., first], rtol=1e-4, atol=1e-8)


def test_parts_are_kept_as_factors(problem: Any) -> None:
    found = single_block(jacobian_rows(problem.target, problem.w, problem.inputs, problem.selection))
    names = {part.name for part in found.parts if isinstance(part, DensePart)}
    assert names == problem.plain
    assert all(isinstance(part, (LayerPart, EmbeddingPart, DensePart)) for part in found.parts)


def test_roots_of_the_likelihood_give_the_dense_curvature(chain: Any) -> None:
    jacobian = chain.jacobian()
    p = torch.softmax(chain.target.model.net(*chain.inputs).detach(), -1)
    information = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    expected = torch.einsum("nci,ncd,ndj->ij", jacobian, information, jacobian)
    dense = torch.cat(
        [r.dense() for r in curvature_rows(Pass(chain.target, chain.w, chain.data, chain.selection))]
    ).flatten(0, 1)
    torch.testing.assert_close(dense.mT @ dense, expected, **EXACT)


# Hooks and settings are restored.


def traces(network: Any) -> list[Any]:
    modules = list(network.skeleton.modules())
    return [
        [len(m._forward_hooks) for m in modules],
        [getattr(m, "inplace", None) for m in modules],
        [p.requires_grad for p in network.skeleton.parameters()],
    ]


def test_hooks_and_settings_are_restored(chain: Any) -> None:
    network, net = chain.target.model.network, chain.target.model.net
    before, theirs = traces(network), {name: t.clone() for name, t in net.state_dict().items()}
    assert True in before[1]
    list(jacobian_rows(chain.target, chain.w, chain.inputs, select(chain.target.model, "last")))
    assert traces(network) == before
    assert all(torch.equal(t, theirs[name]) for name, t in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())


def test_hooks_are_removed_after_an_exception(chain: Any) -> None:
    network = chain.target.model.network
    before = traces(network)

    def broken(outputs: torch.Tensor, some: slice) -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        list(jacobian_rows(chain.target, chain.w, chain.inputs, chain.selection, broken))
    with pytest.raises(RuntimeError):
        list(jacobian_rows(chain.target, chain.w, (torch.randn(6, 1, 9).double(),), chain.selection))
    assert traces(network) == before


def test_hooks_are_removed_when_an_iterator_is_abandoned(chain: Any) -> None:
    before = traces(chain.target.model.network)
    next(jacobian_rows(chain.target, chain.w, chain.inputs, chain.selection, limit=1500))
    assert traces(chain.target.model.network) == before


def test_a_users_hook_that_changes_an_output_is_respected(make_problem: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    net[0].register_forward_hook(lambda _module, _args, out: out**2)
    net[2].register_forward_pre_hook(lambda _module, args: (args[0] * 3,))
    made = make_problem(net, pr.Gaussian(noise=1.0), torch.randn(4, 2).double(), torch.randn(4, 2).double())
    found = single_block(jacobian_rows(made.target, made.w, made.inputs, made.selection))
    assert not any(isinstance(part, DensePart) for part in found.parts)
    torch.testing.assert_close(found.dense(), made.jacobian(), **EXACT)
