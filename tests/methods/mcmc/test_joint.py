"""The recorded and simplified log joint equals that of the target."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, HalfCauchy, MultivariateNormal, Normal

import priory as pr
from priory import Param, constraints
from priory.core.data import Data
from priory.core.errors import PrioryWarning
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.mcmc.joint import cost_of_gradient, gradients, log_joint, values_alone
from priory.models.target import Target
from priory.network.graph_function import copied
from priory.network.recorded_graph import traced

DOUBLE = torch.float64
Y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=DOUBLE)
SIGMA = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=DOUBLE)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream(0, "joint"), dtype=DOUBLE)


def eight_schools(p: dict[str, Tensor]) -> Tensor:
    """Eight schools as a user writes it: for one draw, with torch's distributions and argument validation."""
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


def test_the_graph_of_the_gradient_alone_has_fewer_operations():
    graph = traced(gradients(Target(schools(), None), ()), randn(3, 10))
    counts = [len(g.graph.nodes) for g in (graph, copied(graph, value=False))]
    assert counts[1] < 0.8 * counts[0]


def test_constant_parts_are_removed_from_the_graph():
    target, w = Target(schools(), None), randn(3, 10)
    graph = traced(gradients(target, ()), w).graph
    assert len([node for node in graph.nodes if node.op == "call_function"]) < 60  # of 154


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("temperature", "tempers"), [(1.0, "likelihood"), (2.5, "likelihood"), (2.5, "posterior"), (0.4, "posterior")]
)
def test_a_tempered_target_is_recorded_correctly(batched, temperature, tempers):
    model, w = prior_and_likelihood(batched), randn(4, 2)
    rows = Data.of(randn(7), None).prepared(model.prepare)
    target = make_target(model, rows, temperature, tempers)
    assert rows.tensors is not None
    value, gradient = log_joint(target, rows, w)(w)
    expected, slope = one_by_one(target, w, rows.tensors)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [10, 2500])  # recorded as one graph, and in blocks with a shorter last one
def test_the_log_joint_of_a_network_counts_every_row_once(rows, monkeypatch):
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


def test_a_density_with_in_place_operations_gives_the_same_value_twice():
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


def test_a_logistic_regression_is_recorded_with_the_operations_that_write_in_place():
    # under vmap torch computes exp in place, and reads the result through another view
    y = (randn(40) > 0).double()
    for X in (randn(40, 3), 1e3 * randn(40, 3)):
        density = pr.Density(lambda p, X=X: Bernoulli(logits=X @ p["b"]).log_prob(y).sum(), {"b": Param((3,))})
        w = randn(4, 3)
        value, gradient = log_joint(make_target(density, Data.of(None)), Data.of(None), w)(w)
        for v, found, slope in zip(w, value, gradient, strict=True):
            leaf = v.clone().requires_grad_()
            exact = Bernoulli(logits=X @ leaf).log_prob(y).sum()
            exact.backward()
            torch.testing.assert_close(found, exact.detach(), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(slope, leaf.grad, rtol=1e-10, atol=1e-8)


def test_a_density_that_cannot_be_recorded_runs_in_a_loop_with_a_warning():
    def branching(p: dict[str, Tensor]) -> Tensor:
        return -p["a"].square() if float(p["a"].detach()) > 0 else -2 * p["a"].square()

    target, w = Target(pr.Density(branching, {"a": Param()}), None), randn(5, 1)
    joint = log_joint(target, Data.of(None), w)
    with pytest.warns(PrioryWarning, match="runs in a loop"):
        value, gradient = joint(w)
    sign = torch.where(w > 0, 1.0, 2.0)
    torch.testing.assert_close(value, -(sign * w.square())[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, -2 * sign * w, rtol=1e-12, atol=1e-12)


def test_argument_validation_of_distributions_is_restored():
    before = torch.distributions.Distribution._validate_args
    log_joint(Target(schools(), None), Data.of(None), randn(3, 10))
    assert torch.distributions.Distribution._validate_args == before


def test_a_graph_that_cannot_be_compiled_runs_uncompiled_with_a_warning(monkeypatch):
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.compile", fails)
    target, w = Target(schools(), None), randn(3, 10)
    with pytest.warns(PrioryWarning, match="can't be compiled.*no compiler"):
        value, _ = log_joint(target, Data.of(None), w, compile=True)(w)
    torch.testing.assert_close(value, one_by_one(target, w, ())[0], rtol=1e-12, atol=1e-12)


# The cost of a gradient.


def test_the_cost_of_a_gradient_does_not_depend_on_the_number_of_chains():
    target = Target(schools(), None)
    costs = [log_joint(target, Data.of(None), randn(chains, 10)).cost for chains in (2, 5, 64)]
    found = cost_of_gradient(target, Data.of(None), randn(2, 3, 10))
    assert found is not None
    assert costs[2] is not None
    assert found == costs[0]
    assert found.operations == costs[2].operations
    assert abs(found.elements - costs[2].elements) <= 2  # what is shared by all vectors is divided by their number


def test_the_cost_counts_operations_and_the_elements_that_they_write():
    """For -sum x^2 of 7 entries: the square, its sum, the negative, and the gradient -2x."""
    density = pr.Density(lambda p: -p["x"].square().sum(-1), {"x": Param((7,))}, batched=True)
    cost = cost_of_gradient(Target(density, None), Data.of(None), randn(2, 7))
    assert cost is not None
    assert 3 <= cost.operations <= 5
    assert 7 + 1 + 7 <= cost.elements <= 7 + 7 + 7 + 3


@pytest.mark.parametrize("rows", [10, 1000])
def test_the_cost_grows_with_the_rows_inside_a_density(rows):
    y = randn(rows)
    density = pr.Density(lambda p: -(y - p["x"]).abs().sqrt().sum(), {"x": Param()})
    cost = cost_of_gradient(Target(density, None), Data.of(None), randn(2, 1))
    assert cost is not None
    assert 4 * rows <= cost.elements <= 15 * rows


def test_a_function_that_can_not_be_recorded_has_no_cost():
    density, w, _ = mixed("branch")
    assert cost_of_gradient(Target(density, None), Data.of(None), w) is None


# Evaluations that fail at some chains.

MATRIX = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=DOUBLE)


def correlated(p: dict[str, Tensor]) -> Tensor:
    """A correlation declared real: no Cholesky factor for |r| >= 1."""
    covariance = torch.eye(2, dtype=DOUBLE) + p["r"] * MATRIX
    return MultivariateNormal(p["m"], covariance).log_prob(Y[:2] / 10) - 0.5 * p["m"].square().sum()


def looked_up(p: dict[str, Tensor]) -> Tensor:
    """An index beyond the table, which torch raises an error about when the graph runs."""
    return -p["a"].square() - Y[(p["a"].detach() * 2).long() + 4]


def branching(p: dict[str, Tensor]) -> Tensor:
    """A function that can't be recorded, with a domain error for a < -1."""
    return -p["a"].square() - math.log(float(p["a"].detach()) + 1)


def mixed(name: str) -> tuple[pr.Density, Tensor, Tensor]:
    """A density, chains, and whether the density is finite at each of them."""
    if name == "matrix":
        w = torch.cat([randn(6, 2), torch.tensor([0.5, 1.5, -0.9, 0.0, -3.0, 0.2], dtype=DOUBLE)[:, None]], 1)
        return pr.Density(correlated, {"m": Param((2,)), "r": Param()}), w, w[:, 2].abs() < 1
    a = torch.tensor([0.1, -0.4, 5.0, 1.2, -7.0, 0.3, 2.5], dtype=DOUBLE)[:, None]
    if name == "index":
        return pr.Density(looked_up, {"a": Param()}, batched=True), a, a[:, 0].abs() < 2
    return pr.Density(branching, {"a": Param()}), a, a[:, 0] > -1


@pytest.mark.filterwarnings("ignore:.*runs in a loop")
@pytest.mark.parametrize("lead", [(), (1,), (2, 1)])
@pytest.mark.parametrize("name", ["matrix", "index", "branch"])
def test_a_chain_that_fails_has_no_value_and_the_others_keep_theirs(name, lead):
    density, w, sound = mixed(name)
    w, sound = w.expand(*lead, *w.shape), sound.expand(*lead, *sound.shape)
    target = Target(density, None)
    joint = log_joint(target, Data.of(None), w)
    assert joint.recorded == (name != "branch")
    value, gradient = joint(w)
    assert torch.equal(torch.isfinite(value), sound)
    assert joint.failures.count == int((~sound).sum())
    expected, slope = one_by_one(target, w[sound], ())
    for found, grad in ((value[sound], gradient[sound]), (value[sound], joint.gradient(w)[sound])):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, slope, rtol=1e-12, atol=1e-12)
    assert joint.failures.count == int((~sound).sum())  # gradients alone are not counted twice
    assert bool(torch.isfinite(values_alone(joint)(w)[0]).eq(sound).all())


@pytest.mark.filterwarnings("ignore:.*runs in a loop")
@pytest.mark.parametrize(("name", "reason"), [("index", "IndexError: index"), ("branch", "ValueError: .*")])
def test_the_first_error_is_kept_as_the_reason(name, reason):
    density, w, _ = mixed(name)
    joint = log_joint(Target(density, None), Data.of(None), w)
    joint(w)
    assert re.match(reason, joint.failures.reason)


def test_every_chain_may_fail():
    density, w, sound = mixed("matrix")
    w = w[~sound]
    joint = log_joint(Target(density, None), Data.of(None), w)
    assert bool(torch.isnan(joint(w)[0]).all())
    assert joint.failures.count == len(w)


def test_an_error_that_is_not_about_one_chain_is_raised():
    def too_large(p: dict[str, Tensor]) -> Tensor:
        if float(p["a"].detach()) > 0:
            raise torch.OutOfMemoryError("no memory")
        return -p["a"].square()

    w = torch.tensor([[-1.0], [1.0]], dtype=DOUBLE)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"), pytest.warns(PrioryWarning, match="in a loop"):
        log_joint(Target(pr.Density(too_large, {"a": Param()}), None), Data.of(None), w)(w)


@pytest.mark.filterwarnings("ignore:.*transitions of .* diverged")
@pytest.mark.parametrize("method", [pr.NUTS(chains=64, warmup=60), pr.HMC(chains=64, warmup=60)], ids=["NUTS", "HMC"])
def test_proposals_without_a_cholesky_factor_are_rejected(method):
    """p(r) is proportional to (1 - r^2)^2 on (-1, 1), so E[r] = 0 and E[r^2] = 1/7, with det = 1 - r^2 from the factor.

    Four comparisons of the means of 64 independent chains at 5 standard errors: false alarms at 2e-6.
    """

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        factor = torch.linalg.cholesky(torch.eye(2, dtype=DOUBLE) + p["r"] * MATRIX)
        return 4 * factor.diagonal().log().sum()

    posterior: Any = pr.fit(pr.Density(log_prob, {"r": Param()}), None, method, steps=100, progress=False)
    for moment, expected in ((posterior.draws["r"], 0.0), (posterior.draws["r"].square(), 1 / 7)):
        means = moment.mean(1)
        assert abs(float(means.mean()) - expected) < 5 * float(means.std()) / 8
