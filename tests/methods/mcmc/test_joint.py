"""The recorded log joint is the target's own, whatever was taken out of its graph."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import HalfCauchy, Normal

import priory as pr
from priory import Param, constraints
from priory.core.data import Data
from priory.core.errors import PrioryWarning
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.mcmc.joint import gradients, log_joint
from priory.models.target import Target
from priory.network.recorded_graph import traced, without_value

DOUBLE = torch.float64
Y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=DOUBLE)
SIGMA = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=DOUBLE)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream(0, "joint"), dtype=DOUBLE)


def eight_schools(p: dict[str, Tensor]) -> Tensor:
    """As a user writes it: one draw at a time, with torch's distributions and their checks."""
    prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfCauchy(torch.tensor(5.0, dtype=DOUBLE)).log_prob(p["tau"])
    effects = p["mu"] + p["tau"] * p["z"]
    return prior + Normal(0.0, 1.0).log_prob(p["z"]).sum() + Normal(effects, SIGMA).log_prob(Y).sum()


def schools() -> pr.Density:
    return pr.Density(eight_schools, {"mu": Param(), "tau": Param((), constraints.positive), "z": Param((8,))})


def prior_and_likelihood(batched: bool) -> pr.Density:
    def log_likelihood(p: dict[str, Tensor], y: Tensor) -> Tensor:
        spread = p["s"][..., None]
        return -0.5 * ((y - p["m"][..., None]) / spread).square() - spread.log()

    params = {"m": Param(), "s": Param((), constraints.positive)}
    return pr.Density(
        params=params,
        log_prior=lambda p: -0.5 * p["m"].square() - p["s"],
        log_likelihood=log_likelihood,
        batched=batched,
    )


def one_by_one(target: Target, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    pairs = [target.log_joint_and_grad(v, batch) for v in w.reshape(-1, w.shape[-1])]
    values, slopes = zip(*((v.clone(), g.clone()) for v, g in pairs), strict=True)
    return torch.stack(values).reshape(w.shape[:-1]), torch.stack(slopes).reshape(w.shape)


def test_a_density_with_distributions_is_recorded_and_agrees_with_autograd():
    target, w = Target(schools(), None), randn(2, 3, 10)
    joint = log_joint(target, Data.of(None), w)
    value, gradient = joint(w)
    expected, slope = one_by_one(target, w, ())
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(joint.gradient(w), gradient, rtol=1e-12, atol=1e-12)


def test_the_gradient_alone_needs_fewer_operations():
    graph = traced(gradients(Target(schools(), None), ()), randn(3, 10))
    counts = [len(g.graph.nodes) for g in (graph, without_value(graph))]
    assert counts[1] < 0.8 * counts[0]


def test_what_no_chain_can_change_is_taken_out_of_the_graph():
    target, w = Target(schools(), None), randn(3, 10)
    graph = traced(gradients(target, ()), w).graph
    assert len([node for node in graph.nodes if node.op == "call_function"]) < 60  # of 154


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("temperature", "tempers"), [(1.0, "likelihood"), (2.5, "likelihood"), (2.5, "posterior"), (0.4, "posterior")]
)
def test_a_tempered_target_is_recorded_as_it_is(batched, temperature, tempers):
    model, w = prior_and_likelihood(batched), randn(4, 2)
    rows = Data.of(randn(7), None).prepared(model.prepare)
    target = make_target(model, rows, temperature, tempers)
    assert rows.tensors is not None
    value, gradient = log_joint(target, rows, w)(w)
    expected, slope = one_by_one(target, w, rows.tensors)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [10, 2500])  # recorded, and block by block with an uneven last one
def test_a_network_counts_every_row_once(rows, monkeypatch):
    monkeypatch.setattr("priory.methods.mcmc.joint.BLOCK_NUMBERS", 1 << 13)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = pr.Model(net, pr.Gaussian(), prior=1.0)
    data = Data.of((randn(rows, 2), randn(rows)), None).prepared(model.prepare)
    target = make_target(model, data)
    w = randn(4, target.size)
    assert data.tensors is not None
    value, gradient = log_joint(target, data, w)(w)
    expected, slope = one_by_one(target, w, data.tensors)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-10)


def test_a_density_that_writes_to_its_own_tensors_gives_the_same_twice():
    def in_place(p: dict[str, Tensor]) -> Tensor:
        total = torch.zeros_like(p["a"][0])
        total += -0.5 * p["a"].square().sum()
        return total

    target, w = Target(pr.Density(in_place, {"a": Param((2,))}), None), randn(3, 2)
    joint = log_joint(target, Data.of(None), w)
    for _ in range(3):
        value, gradient = joint(w)
        torch.testing.assert_close(value, -0.5 * w.square().sum(-1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, -w, rtol=1e-12, atol=1e-12)


def test_a_density_that_can_not_be_recorded_is_looped_over_and_said_so():
    def branching(p: dict[str, Tensor]) -> Tensor:
        return -p["a"].square() if float(p["a"].detach()) > 0 else -2 * p["a"].square()

    target, w = Target(pr.Density(branching, {"a": Param()}), None), randn(5, 1)
    joint = log_joint(target, Data.of(None), w)
    with pytest.warns(PrioryWarning, match="runs in a loop"):
        value, gradient = joint(w)
    sign = torch.where(w > 0, 1.0, 2.0)
    torch.testing.assert_close(value, -(sign * w.square())[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, -2 * sign * w, rtol=1e-12, atol=1e-12)


def test_the_checks_of_distributions_are_as_they_were_afterwards():
    before = torch.distributions.Distribution._validate_args
    log_joint(Target(schools(), None), Data.of(None), randn(3, 10))
    assert torch.distributions.Distribution._validate_args == before


def test_a_graph_that_can_not_be_compiled_runs_as_it_is_and_says_so(monkeypatch):
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.compile", fails)
    target, w = Target(schools(), None), randn(3, 10)
    with pytest.warns(PrioryWarning, match="can't be compiled.*no compiler"):
        value, _ = log_joint(target, Data.of(None), w, compile=True)(w)
    torch.testing.assert_close(value, one_by_one(target, w, ())[0], rtol=1e-12, atol=1e-12)
