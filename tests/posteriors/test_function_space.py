"""Chains of a network are compared by their predictions, which decide the status, the summary and the end of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.diagnostics import ess_bulk, nested_r_hat, r_hat
from priory.fitting.draws_store import KeptDraws
from priory.fitting.prepare import prepare
from priory.methods.draw_policy import quality_of, smallest_ess, superchain_ids
from priory.methods.mcmc import HMC
from priory.models.target import Target
from priory.posteriors import Chains
from priory.posteriors.function_space import MAX_INPUTS, MAX_PREDICTIONS, FunctionSpace, function_space

DOUBLE = torch.float64
X = torch.linspace(-1, 1, 50, dtype=DOUBLE)[:, None]
MIRRORED = torch.tensor([1.0, 2.0, 0.5, -0.5, 1.0, -1.0], dtype=DOUBLE)  # weights, biases and outputs of two tanh units


def bound(model: pr.Model, data: Any) -> tuple[Target, Data]:
    rows = Data.of(data).prepared(model.prepare)
    return Target(model, rows.num_data), rows


def two_units() -> pr.Model:
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1, bias=False)).double()
    return pr.Model(net, pr.Gaussian(0.1), prior=1.0)


def mirrored(shift: float = 0.0) -> Chains:
    """Four chains at weights of both signs, which are the same function; `shift` moves that of the first chain."""
    target, rows = bound(two_units(), (X, X[:, 0]))
    w = MIRRORED + 0.1 * torch.randn(4, 500, 6, generator=stream(0, "mirror"), dtype=DOUBLE)
    w[0, :, 4:] += shift
    w[1::2] = -w[1::2]  # tanh is odd
    posterior = Chains(target, w)
    posterior.data = rows
    return posterior


def outputs(w: Tensor, x: Tensor) -> Tensor:
    """The predictions of two tanh units by hand, (..., rows)."""
    weight, bias, out = w.split(2, -1)
    return (torch.tanh(weight[..., None, :] * x + bias[..., None, :]) * out[..., None, :]).sum(-1)


def test_predictions_that_agree_decide_where_weights_disagree() -> None:
    posterior = mirrored()
    summary = posterior.summary()
    assert float(summary["r_hat"].max()) > 1.5
    assert posterior.status.name == "converged"
    assert summary.predictions is not None
    assert float(summary.predictions["r_hat"].max()) < 1.01
    assert summary.verdict == []


def test_predictions_that_disagree_are_not_converged() -> None:
    posterior = mirrored(shift=0.5)
    assert posterior.status.name == "not_converged"
    assert "of 32 predictions, and largest" in posterior.status.reason
    assert posterior.quick_status().name == "not_converged"


def test_the_summary_prints_predictions_first() -> None:
    text = str(mirrored().summary())
    assert text.index("Mean predictions at 32 of 50 training inputs") < text.index("0.weight[0, 0]")
    assert "Status: converged" in text
    assert mirrored().summary()._repr_html_().count("<table>") == 2


def test_without_inputs_the_status_of_weights_is_doubtful() -> None:
    posterior = mirrored()
    posterior.data = None
    assert posterior.summary().predictions is None
    assert posterior.status.name == "doubtful"
    assert "function_space(x)" in posterior.status.reason


def test_a_file_keeps_the_inputs_that_decide(tmp_path: Any) -> None:
    posterior = mirrored(shift=0.5)
    posterior.save(tmp_path / "chains.priory")
    again: Any = pr.load(tmp_path / "chains.priory", two_units())
    assert again.status == posterior.status
    assert str(again.summary()) == str(posterior.summary())


def test_compared_are_evenly_spaced_predictions_and_learnt_parameters() -> None:
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1, bias=False)).double()
    target, rows = bound(pr.Model(net, pr.Gaussian(), prior=1.0), (X, X[:, 0]))
    functions = function_space(target, rows, {})
    assert functions is not None
    w = torch.randn(3, 5, 7, generator=stream(1), dtype=DOUBLE)
    found = functions(w)
    chosen = X[torch.linspace(0, 49, MAX_INPUTS).round().long()]
    torch.testing.assert_close(found[..., :-1], outputs(w[..., :6], chosen), rtol=1e-12, atol=1e-12)
    assert torch.equal(found[..., -1], w[..., -1])
    assert functions.names(w[0, 0])[-2:] == ["y[31]", "likelihood.noise"]


def test_the_weights_of_a_single_layer_are_compared_too() -> None:
    target, rows = bound(pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.1)), (X, X[:, 0]))
    functions = function_space(target, rows, {})
    assert functions is not None
    assert functions.hidden_layers == 0
    assert functions.coordinates.tolist() == [0, 1]
    density = Target(pr.Density(lambda p: -p["x"].square(), {"x": pr.Param()}), None)
    assert function_space(density, Data.of(None), {}) is None


def test_of_many_classes_some_probabilities_are_compared() -> None:
    target, rows = bound(
        pr.Model(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 10)).double(), pr.Categorical()),
        (X, torch.arange(50) % 10),
    )
    functions = function_space(target, rows, {})
    assert functions is not None
    w = torch.randn(4, target.size, generator=stream(2), dtype=DOUBLE)
    assert functions(w).shape == (4, MAX_PREDICTIONS)
    assert len(set(functions.names(w[0]))) == MAX_PREDICTIONS


def test_draws_are_enough_by_the_quantities_that_are_compared() -> None:
    target, rows = bound(two_units(), (X, X[:, 0]))
    functions = function_space(target, rows, {})
    kept, w = KeptDraws(), mirrored().w[:, :40].repeat(8, 1, 1)
    for draw in w.unbind(1):
        kept.append(draw)
    assert functions is not None
    y = functions(w)
    assert smallest_ess(kept, False, functions) == pytest.approx(float(ess_bulk(y).min()), rel=1e-12)
    assert smallest_ess(kept, False, functions) > 10 * smallest_ess(kept)
    quality, ids = quality_of(kept, False, functions), superchain_ids(32)
    assert ids is not None
    assert quality.r_hat >= float(nested_r_hat(y, ids).max())
    assert quality.r_hat < 1.1 < float(r_hat(w).max())


# The length of trajectories.


def hmc_state(positions: Tensor) -> tuple[HMC, Any]:
    """A state of HMC on two tanh units whose window holds these positions, (transition, chain, coordinate)."""
    method = HMC(chains=positions.shape[1])
    problem = prepare(two_units(), (X, X[:, 0]), method, None, _settings())
    target, rows = problem.target, problem.rows
    state = method.init(target, method.plan(target, rows, 10, 0), stream(0, "chains"))
    for w in positions:
        state.window.record(w, torch.zeros(len(w), dtype=DOUBLE), torch.zeros_like(w))
    return method, state


def _settings() -> Any:
    from priory.fitting.settings import Settings

    return Settings(None, 10, 0, 1.0, "likelihood", False, None, ())


@pytest.mark.parametrize(("persistence", "factor"), [(0.0, (0.7, 1.3)), (0.9, (2.0, 3.0))])
def test_trajectories_lengthen_while_predictions_are_correlated(persistence, factor) -> None:
    """With an autocorrelation r there are (1 + r) / (1 - r) transitions per effective draw: 1, or 19 and the limit."""
    noise = torch.randn(30, 16, 6, generator=stream(3), dtype=DOUBLE)
    for i in range(1, 30):
        noise[i] = persistence * noise[i - 1] + (1 - persistence**2) ** 0.5 * noise[i]
    method, state = hmc_state(MIRRORED + 0.1 * noise)
    before = float(state.length.log.exp())
    state.step_size.log = state.step_size.log * 0
    method.learn_length(state, stream(4))
    low, high = factor
    assert low - 1e-9 <= float(state.length.log.exp()) / before <= high + 1e-9


def test_networks_with_hidden_layers_take_leapfrogs_and_a_diagonal_metric() -> None:
    method, state = hmc_state(MIRRORED.expand(2, 16, 6).clone())
    assert method.integrator_for(state) == "leapfrog"
    assert type(state.metric).__name__ == "DiagonalMetric"
    assert isinstance(state.functions, FunctionSpace)


@pytest.mark.filterwarnings("ignore::priory.core.errors.PrioryWarning")  # a few transitions may diverge
def test_a_fit_of_a_network_resumes_with_the_same_bits(tmp_path: Any) -> None:
    method = HMC(chains=16)
    data = (X[:10], X[:10, 0].sin())
    whole: Any = pr.fit(two_units(), data, method, progress=False)

    def interrupt(now: Any) -> None:
        if now.step == 55:
            raise InterruptedError

    checkpoint = pr.Checkpoint(tmp_path / "fit.checkpoint", every=10)
    with pytest.raises(InterruptedError):
        pr.fit(two_units(), data, method, progress=False, checkpoint=checkpoint, callbacks=[interrupt])
    again: Any = pr.fit(two_units(), data, method, progress=False, checkpoint=checkpoint)
    assert torch.equal(again.w, whole.w)
    assert again.status == whole.status
