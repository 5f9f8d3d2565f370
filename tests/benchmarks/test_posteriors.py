"""The posteriors of `benchmarks/posteriordb.py` are the ones that they are said to be.

Their densities are compared with independent forms: the thirteen, up to a constant, with the batched densities of the
tests, and the models of practice with scipy.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

TEST_FOLDER = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def posteriors(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("_posteriors")


@pytest.fixture(scope="module")
def practice(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("_practice")


@pytest.fixture(scope="module")
def batched() -> ModuleType:
    spec = importlib.util.spec_from_file_location("posteriordb_densities", TEST_FOLDER / "posteriordb.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["posteriordb_densities"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    """Numbers in 64 bits: torch's Gamma and HalfCauchy of Python numbers cast their argument to the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def same_up_to_a_constant(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found - found[0], expected - expected[0], rtol=1e-8, atol=1e-8)


def draws_of(density: Any, count: int = 4) -> tuple[Tensor, list[dict[str, Tensor]]]:
    u = torch.randn(count, density.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2
    return u, [density.layout.constrain(one) for one in u]


POSTERIOR_NAMES = [
    "kidiq-kidscore_interaction",
    "mesquite-logmesquite",
    "nes1980-nes",
    "earnings-logearn_interaction",
    "arK-arK",
    "sblri-blr",
    "diamonds-diamonds",
    "low_dim_gauss_mix-low_dim_gauss_mix",
    "gp_pois_regr-gp_regr",
    "hmm_example-hmm_example",
    "garch-garch11",
    "eight_schools-eight_schools_noncentered",
    "eight_schools-eight_schools_centered",
]


@pytest.mark.reference
@pytest.mark.parametrize("name", POSTERIOR_NAMES)
def test_a_reference_density_is_that_of_the_tests(
    posteriors: ModuleType, batched: ModuleType, shared_data: Path, name: str
):
    density, other = posteriors.density(name, shared_data), batched.problem(name, shared_data).density
    assert density.layout.names == other.layout.names
    u, parameters = draws_of(density)
    expected = other.log_prob(other.layout.constrain(u))
    same_up_to_a_constant(torch.stack([density.log_prob(p) for p in parameters]), expected)


@pytest.mark.reference
@pytest.mark.parametrize("name", POSTERIOR_NAMES)
def test_reference_draws_have_the_quantities_that_are_compared(posteriors: ModuleType, shared_data: Path, name: str):
    density = posteriors.density(name, shared_data)
    draws = density.layout.constrain(torch.zeros(2, 3, density.layout.size, dtype=torch.float64))
    found = posteriors.QUANTITIES.get(name, lambda p: p)(draws)
    known = posteriors.reference(name, shared_data)
    assert {n: x.shape[2:] for n, x in found.items()} == {n: np.shape(known[n]["mean"]) for n in known}


# Models of practice, against scipy, with every constant.


def by_scipy(name: str, p: dict[str, Any], d: dict[str, Any]) -> float:
    normal, half = stats.norm.logpdf, stats.halfnorm.logpdf
    if name == "raw_covariate":
        prior = normal(p["beta"], 0, [100, 10, 10]).sum() + half(p["sigma"], scale=50)
        return prior + normal(d["y"], d["X"] @ p["beta"], p["sigma"]).sum()
    if name == "hierarchical_logit":
        prior = normal(p["mu"], 0, 2) + half(p["tau"]) + normal(p["beta"]).sum() + normal(p["z"]).sum()
        chance = 1 / (1 + np.exp(-(p["mu"] + p["tau"] * p["z"][d["group"]] + d["X"] @ p["beta"])))
        return prior + stats.bernoulli.logpmf(d["y"], chance).sum()
    if name == "horseshoe":
        prior = normal(p["z"]).sum() + stats.halfcauchy.logpdf(p["lambda"]).sum()
        prior += stats.halfcauchy.logpdf(p["tau"], scale=0.1) + stats.halfcauchy.logpdf(p["sigma"])
        return prior + normal(d["y"], d["X"] @ (p["z"] * p["lambda"] * p["tau"]), p["sigma"]).sum()
    if name == "zero_inflated_poisson":
        gate = 1 / (1 + np.exp(-p["zero"][0] - p["zero"][1] * d["x"]))
        count = stats.poisson.pmf(d["y"], np.exp(p["rate"][0] + p["rate"][1] * d["x"]))
        prior = normal(p["rate"], 0, 2).sum() + normal(p["zero"], 0, 2).sum()
        return prior + np.log(gate * (d["y"] == 0) + (1 - gate) * count).sum()
    if name == "censored_weibull":
        law = stats.weibull_min(p["shape"], scale=np.exp(p["alpha"] + d["X"] @ p["beta"]))
        prior = normal(p["alpha"], 0, 5) + normal(p["beta"], 0, 2).sum() + stats.lognorm.logpdf(p["shape"], 1)
        return prior + np.where(d["event"] == 1, law.logpdf(d["time"]), law.logsf(d["time"])).sum()
    if name == "ordered_mixture":
        prior = normal(p["mu"], 0, 3).sum() + half(p["sigma"], scale=2).sum() + stats.beta.logpdf(p["theta"], 2, 2)
        first, second = (stats.norm.pdf(d["y"], p["mu"][k], p["sigma"][k]) for k in (0, 1))
        return prior + np.log(p["theta"] * first + (1 - p["theta"]) * second).sum()
    if name == "gp_cholesky":
        prior = stats.invgamma.logpdf(p["length"], 5, scale=5) + half(p["amplitude"], scale=2) + half(p["noise"])
        K = p["amplitude"] ** 2 * np.exp(-((d["x"][:, None] - d["x"]) ** 2) / (2 * p["length"] ** 2))
        return prior + stats.multivariate_normal.logpdf(d["y"], cov=K + p["noise"] ** 2 * np.eye(60))
    assert name == "ar2_states"
    x, phi = p["x"], p["phi"]
    prior = normal(phi, 0, 0.5).sum() + half(p["sigma"]) + stats.lognorm.logpdf(p["tau"], 0.5, scale=np.exp(-1))
    moves = normal(x[2:], phi[0] * x[1:-1] + phi[1] * x[:-2], p["sigma"]).sum()
    return prior + normal(x[:2], 0, 2).sum() + moves + normal(d["y"], x, p["tau"]).sum()


@pytest.mark.parametrize(
    "name",
    [
        "raw_covariate",
        "hierarchical_logit",
        "horseshoe",
        "zero_inflated_poisson",
        "censored_weibull",
        "ordered_mixture",
        "gp_cholesky",
        "ar2_states",
    ],
)
def test_a_density_of_practice_is_that_of_scipy(practice: ModuleType, name: str):
    simulate, model = practice.PRACTICE[name]
    data = simulate()
    density = model(data)
    _, parameters = draws_of(density)
    found = torch.stack([density.log_prob(p) for p in parameters])
    expected = [by_scipy(name, {n: x.numpy() for n, x in p.items()}, data) for p in parameters]
    # the hazard of a censored Weibull leaves out nothing, so even the constants agree
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-8)


def test_data_of_practice_are_the_same_every_time(practice: ModuleType):
    for simulate, _ in practice.PRACTICE.values():
        first, second = simulate(), simulate()
        assert all(np.array_equal(first[n], second[n]) for n in first)


def test_every_model_of_practice_has_a_reference_for_its_quantities(
    benchmark: Callable[[str], ModuleType], practice: ModuleType
):
    path = Path(practice.__file__ or "").with_name("posteriordb_references.json")
    stored = json.loads(path.read_text())
    assert stored.keys() == practice.PRACTICE.keys()
    for name, (simulate, model) in practice.PRACTICE.items():
        if name == "sir_rk4":  # recording its steps takes long, and its parameters are its quantities
            continue
        layout = model(simulate()).layout
        draws = layout.constrain(torch.zeros(2, 3, layout.size, dtype=torch.float64))
        found = practice.QUANTITIES.get(name, lambda p: p)(draws)
        assert {n: x.shape[2:] for n, x in found.items()} == {n: np.shape(r["mean"]) for n, r in stored[name].items()}
