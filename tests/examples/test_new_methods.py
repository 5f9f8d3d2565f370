"""The skeletons of CONTRIBUTING.md, a point, a q and a sampler, keep the contract that they teach."""

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import priory as pr
from priory.fitting.prepare import make_target
from priory.testing import LinearRegression
from priory.testing.contract import CLAUSES, batch_normalised

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SKELETONS = {"new_point_method": "SGDPoint", "new_variational_method": "FactorisedGaussian", "new_sampler": "Langevin"}


def skeleton(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def method(name: str, **options: Any) -> Any:
    return vars(skeleton(name))[SKELETONS[name]](**options)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
@pytest.mark.parametrize("name", SKELETONS)
def test_a_skeleton_keeps_the_contract(name: str, clause: Callable[..., None]):
    clause(method(name))


def exact_target() -> tuple[LinearRegression, Any, Any]:
    exact = LinearRegression.make(0)
    model, rows = exact.model().bind(exact.data, len(exact.y))
    return exact, make_target(model, rows), rows.some(len(exact.y))


def slope(exact: LinearRegression, w: torch.Tensor) -> torch.Tensor:
    """d log p(w, D) / dw, in closed form."""
    return (exact.posterior.mean - w) @ exact.precision


def test_one_step_of_the_point_is_the_gradient_of_the_log_joint_times_the_rate_over_n():
    exact = LinearRegression.make(0)
    posterior = pr.fit(
        exact.model(),
        exact.data,
        method("new_point_method", learning_rate=0.2, decay=0.0),
        steps=1,
        progress=False,
    )
    gradient = slope(exact, torch.zeros_like(exact.posterior.mean))
    found = torch.cat([posterior.mean["weight"].reshape(-1), posterior.mean["bias"].reshape(-1)])
    torch.testing.assert_close(found, 0.2 / len(exact.y) * gradient, rtol=0, atol=1e-12)


def test_the_point_begins_where_its_start_ended_with_its_buffers():
    model, data = batch_normalised()
    first = pr.fit(model, data, pr.MAP(), steps=20, progress=False)
    second = pr.fit(model, data, method("new_point_method", learning_rate=1e-30, start=first), steps=1, progress=False)
    assert torch.equal(second.w, first.w)
    counted = {name: b for name, b in second.buffers.items() if name.endswith("num_batches_tracked")}
    assert {name: int(b - first.buffers[name]) for name, b in counted.items()} == dict.fromkeys(counted, 1)


def test_the_gradient_of_the_q_is_that_of_the_elbo_at_the_draw():
    exact, target, batch = exact_target()
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(3, 2 * target.size, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, target.size, generator=generator, dtype=torch.float64)
    loc, log_scale = theta.chunk(2, -1)
    g = slope(exact, loc + log_scale.exp() * noise)
    elbo, gradient = skeleton("new_variational_method").elbo_and_grad(target, theta, noise, batch, {})
    wanted = torch.cat([g, g * log_scale.exp() * noise + 1], -1)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)
    value, _ = target.log_joint_and_grad(loc + log_scale.exp() * noise, batch)
    entropy = torch.distributions.Normal(loc, log_scale.exp()).entropy().sum(-1)
    torch.testing.assert_close(elbo, value + entropy, rtol=1e-12, atol=1e-12)


def test_one_step_of_the_sampler_is_a_gradient_and_noise_of_variance_twice_the_step():
    exact, target, batch = exact_target()
    sampler, size = method("new_sampler", chains=3, learning_rate=0.1), 0.1 / len(exact.y)
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(3, target.size, generator=generator, dtype=torch.float64)
    same = torch.Generator().manual_seed(2)
    state, _ = sampler.step(target, skeleton("new_sampler").State(w.clone(), 0, 0), batch, same)
    noise = torch.randn(w.shape, generator=same.manual_seed(2), dtype=torch.float64)
    wanted = w + size * slope(exact, w) + math.sqrt(2 * size) * noise
    torch.testing.assert_close(state.w, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SKELETONS)
def test_a_skeleton_runs_and_finds_the_exact_posterior(name: str, capsys: pytest.CaptureFixture[str]):
    skeleton(name).main()
    found, exact = (
        [float(n) for n in re.findall(r"-?\d+\.\d+", line)] for line in capsys.readouterr().out.splitlines()
    )
    assert found == pytest.approx(exact, abs=0.01)
