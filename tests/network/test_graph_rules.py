"""A simplified graph gives the same values, infinities and NaNs as the recorded function."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import HalfCauchy, Normal
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import softplus

import priory as pr
from priory import Param, constraints
from priory.core.data import Data
from priory.core.streams import stream
from priory.methods.mcmc.joint import log_joint
from priory.models.target import Target
from priory.network.graph_function import function
from priory.network.graph_slices import simplify_graph
from priory.network.recorded_graph import by_coordinate, by_vector

DOUBLE = torch.float64
SPECIAL_VALUES = [0.0, -0.0, 1.0, -2.5, 700.0, -800.0, 1e200, -1e200, 1e-200, math.inf, -math.inf, math.nan]
ROW = torch.tensor([0.5, 2.0, -3.0, 4.0], dtype=DOUBLE)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream(0, "graphs"), dtype=DOUBLE)


def special_inputs(columns: int) -> Tensor:
    """Return rows with every pair of special values, and rows of ordinary numbers, (n, columns)."""
    values = torch.tensor(SPECIAL_VALUES, dtype=DOUBLE)
    pairs = torch.cartesian_prod(values, values)
    return torch.cat([pairs.repeat(1, columns)[:, :columns], randn(8, columns)])


def num_operations(module: GraphModule) -> int:
    return sum(node.op == "call_function" for node in module.graph.nodes)


def slices_of_a_gradient(w: Tensor) -> Tensor:
    """Compute what autograd records for a vector that is read in slices: each slice padded with zeros, summed."""
    back, sizes = torch.ops.aten.slice_backward.default, list(w.shape)
    pieces = back(w[:, 1:3] * w[:, :2], sizes, 1, 1, 3, 1) + back(w[:, :1].exp(), sizes, 1, 0, 1, 1)
    return pieces + torch.zeros_like(w).index_fill(1, torch.tensor([1]), 1.0)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # function, number of operations after simplification
    "factors": (lambda w: -((w * 2.0) * ROW / 4.0) * ROW, 1),
    "factors of products": (lambda w: (w * 2.0) * (w[:, :1] * 3.0) / (w.exp() * 4.0) * 5.0, 5),
    "a factor that is used twice": (lambda w: (w * 2.0).exp() + (w * 2.0).sin(), 4),
    "terms": (lambda w: ((w + 1.0) - ROW) + 5.0, 1),
    "terms that cancel": (lambda w: (w + 1.0) - 1.0, 2),
    "powers and ones": (lambda w: (w**1 * 1.0 + 0.0) ** 2, 1),
    "large factors": (lambda w: (w * 1e200) * 1e-200, 2),
    "small factors": (lambda w: (w * 1e-200) / 1e-200, 2),
    "a factor of zero": (lambda w: (w * 0.0) * 2.0, 2),
    "an infinite factor": (lambda w: (w * math.inf) * 2.0, 2),
    "a product that broadcasts": (lambda w: w[:, :1] * ROW * 2.0, 3),
    "where with constants": (lambda w: -torch.where(w > 0, ROW, 2 * ROW) * 3.0, 3),
    "where with a variable": (lambda w: -torch.where(w > 0, w, 2 * ROW) * 3.0, 3),
    "changes of shape": (lambda w: w[:, 1:2].squeeze(1).unsqueeze(1).sum(1) * w[:, 2], 4),
    "a repeated function": (lambda w: w.exp() * w.exp() + w.exp(), 3),
    "a repeated product": (lambda w: (w * w) + (w * w), 2),
    "an outer product": (lambda w: torch.bmm(w[:, :, None], w[:, None, :]), 3),
    "two transposes": (lambda w: w[:, :, None].transpose(1, 2).transpose(1, 2) * w[:, None, :], 5),
    "sums of products": (lambda w: w + w * w.exp() - w * ROW, 5),
    "slices": (slices_of_a_gradient, 7),
    "other dtypes": (lambda w: ((w.float() / 3.0) * 2.0).double() * w, 4),
    "bounds": (lambda w: w.clamp(min=0.5) * (w >= 1.0) + w.exp().clamp(max=3.0), 6),
}


@pytest.mark.parametrize("order", [by_coordinate, by_vector])
@pytest.mark.parametrize("case", CASES)
def test_simplified_graphs_keep_values_infinities_and_nans(case, order):
    recorded_function, num_left = CASES[case]
    w = order(special_inputs(4))
    module = make_fx(recorded_function)(w)
    simplify_graph(module)
    assert num_operations(module) == num_left
    found, expected = function(module, w)(w), recorded_function(w)
    tolerance = 1e-6 if case == "other dtypes" else 1e-12
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(
        module(w), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )  # the module that is handed to a compiler


def test_gradients_of_overlapping_slices_are_summed():
    def overlapping(w: Tensor) -> Tensor:
        back = torch.ops.aten.slice_backward.default
        return back(w[:, :3], [5, 4], 1, 0, 3, 1) + back(w[:, 1:], [5, 4], 1, 1, 4, 1)

    w = randn(5, 4)
    module = make_fx(overlapping)(w)
    simplify_graph(module)
    torch.testing.assert_close(function(module, w)(w), overlapping(w), rtol=0, atol=0)


def test_coordinates_between_slices_have_zero_gradient():
    def gaps(w: Tensor) -> Tensor:
        back = torch.ops.aten.slice_backward.default
        return back(w[:, 1:2], [5, 6], 1, 1, 2, 1) + back(w[:, 3:5], [5, 6], 1, 3, 5, 1) + w

    w = randn(5, 6)
    module = make_fx(gaps)(w)
    simplify_graph(module)
    for order in (by_coordinate, by_vector):
        torch.testing.assert_close(function(module, order(w))(order(w)), gaps(w), rtol=0, atol=0)


# Densities, compared with autograd at one vector at a time.

X, Y = randn(30, 3), (randn(30) > 0).double()


def schools(p: dict[str, Tensor]) -> Tensor:
    tau = HalfCauchy(torch.tensor(5.0, dtype=DOUBLE)).log_prob(p["tau"])
    prior = Normal(0.0, 5.0).log_prob(p["mu"]) + tau + Normal(0.0, 1.0).log_prob(p["z"]).sum(-1)
    effects = p["mu"][..., None] + p["tau"][..., None] * p["z"]
    return prior + Normal(effects, torch.tensor([15.0, 10.0, 16.0], dtype=DOUBLE)).log_prob(Y[:3]).sum(-1)


def regression(p: dict[str, Tensor]) -> Tensor:
    z = p["beta"] @ X.T + p["a"][..., None]
    noise = -p["s"] - 2 * p["s"].log()
    return noise - 0.5 * (p["beta"] / p["s"][..., None]).square().sum(-1) + (Y * z - softplus(z)).sum(-1)


def partly_undefined(p: dict[str, Tensor]) -> Tensor:
    """A density of zero for x < -1/2, and NaN for y < 0."""
    inside = torch.where(p["x"] > -0.5, -0.5 * p["x"].square(), -torch.inf)
    return inside + p["y"].log() - p["y"] + (p["x"] + p["x"]) * 0.25


def matrices(p: dict[str, Tensor]) -> Tensor:
    product = p["m"] @ p["m"].mT + torch.eye(2, dtype=DOUBLE)
    return -0.5 * product.diagonal(dim1=-2, dim2=-1).sum(-1) - product.logdet() - (p["v"] - 1).abs().sum(-1) / 3.0


positive = constraints.positive
DENSITIES = {
    "schools": (schools, {"mu": Param(), "tau": Param((), positive), "z": Param((3,))}),
    "regression": (regression, {"beta": Param((3,)), "a": Param(), "s": Param((), positive)}),
    "partly undefined": (partly_undefined, {"x": Param(), "unread": Param((2,)), "y": Param()}),
    "matrices": (matrices, {"m": Param((2, 2)), "v": Param((3,))}),
    "bounded": (lambda p: 2 * p["p"].log() + 3 * torch.log1p(-p["p"]), {"p": Param((), constraints.unit_interval)}),
}


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 5)])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", DENSITIES)
def test_a_density_and_its_gradient_equal_those_of_autograd(name, batched, shape):
    recorded_function, params = DENSITIES[name]
    target = Target(pr.Density(recorded_function, params, batched=batched), None)
    w = 1.5 * randn(*shape, target.size)
    joint = log_joint(target, Data.of(None), w)
    assert joint.recorded
    found, slope = joint(w)
    for i, one in enumerate(w.reshape(-1, target.size)):
        leaf = one.clone().requires_grad_()
        value = recorded_function(target.model.layout.constrain(leaf)) + target.model.layout.log_det(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, materialize_grads=True)
        tolerance = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True}
        torch.testing.assert_close(found.flatten()[i], value.detach(), **tolerance)
        torch.testing.assert_close(slope.reshape(-1, target.size)[i], gradient, **tolerance)
        torch.testing.assert_close(joint.gradient(w).reshape(-1, target.size)[i], gradient, **tolerance)


def test_the_memory_layout_of_the_input_does_not_change_the_result():
    recorded_function, params = DENSITIES["schools"]
    target, w = Target(pr.Density(recorded_function, params), None), randn(6, 5)
    joint = log_joint(target, Data.of(None), w)
    for a, b in zip(joint(by_vector(w)), joint(by_coordinate(w)), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(joint.gradient(by_vector(w)), joint.gradient(by_coordinate(w)))
    assert joint.order(w).mT.is_contiguous()


def test_a_function_that_needs_contiguous_vectors_gets_them():
    def viewed(p: dict[str, Tensor]) -> Tensor:
        return -0.5 * p["w"].view(-1).square().reshape(p["w"].shape).sum(-1)

    target, w = Target(pr.Density(viewed, {"w": Param((3,))}, batched=True), None), randn(5, 3)
    joint = log_joint(target, Data.of(None), w)
    assert joint.recorded
    assert joint.order(w).is_contiguous()
    torch.testing.assert_close(joint.gradient(w), -w, rtol=1e-12, atol=1e-12)
