"""Variational posteriors: importance ratios, k-hat and files."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.errors import PrioryWarning
from priory.diagnostics import psis
from priory.posteriors.variational import Importance

F64 = torch.float64


def unit(size: int = 3) -> pr.Density:
    return pr.Density(lambda v: -0.5 * v["x"].square().sum(), {"x": pr.Param((size,))})


def fit(model: Any, method: Any, data: Any = None, **options: Any) -> Any:
    return pr.fit(model, data, method, progress=False, **options)


def test_importance_has_draws_ratios_weights_and_k_hat_by_name() -> None:
    found = fit(unit(), pr.MeanField(), steps=50).importance(samples=200)
    assert isinstance(found, Importance)
    assert found.draws.shape == (200, 3)
    assert found.log_ratios.shape == (200,)
    smoothed, shape = psis(found.log_ratios)
    assert torch.equal(found.log_weights, smoothed)
    assert found.k_hat == shape
    draws, log_ratios = found
    assert draws is found.draws
    assert log_ratios is found.log_ratios


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (pr.MeanField(samples=8, estimator="sticking", learning_rate=0.1), 300),
        (pr.FullRank(), 400),
        (pr.Pathfinder(), None),
    ],
)
def test_k_hat_is_minus_infinity_where_q_is_exact(method: Any, steps: int | None) -> None:
    assert fit(unit(), method, steps=steps).k_hat == -math.inf


def test_a_loaded_density_without_rows_has_evidence_and_k_hat(tmp_path: Path) -> None:
    posterior = fit(unit(), pr.MeanField(), steps=50)
    posterior.save(tmp_path / "q")
    loaded: Any = pr.load(tmp_path / "q", unit())
    assert loaded.k_hat == posterior.k_hat
    assert loaded.log_evidence == posterior.log_evidence


def test_a_loaded_network_gives_evidence_and_k_hat_for_given_data() -> None:
    X = torch.linspace(-1, 1, 12, dtype=F64)[:, None]
    model = pr.Model(nn.Linear(1, 1, dtype=F64), pr.Gaussian(0.3))
    posterior = fit(model, pr.MeanField(), (X, X[:, 0].sin()), steps=50)
    assert posterior.importance((X, X[:, 0].sin())).k_hat == posterior.k_hat


# Improper densities.

PARAMS = {"a": pr.Param(()), "b": pr.Param(())}


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (pr.MeanField(), 600),
        (pr.MeanField(samples=4, estimator="sticking", learning_rate=0.1), 200),
        (pr.FullRank(), 300),
        (pr.NaturalGradient(), 600),
        (pr.Pathfinder(), None),
    ],
)
def test_a_flat_coordinate_gives_a_warning(method: Any, steps: int | None) -> None:
    flat = pr.Density(lambda v: -0.5 * v["a"] ** 2, PARAMS)
    with pytest.warns(PrioryWarning, match=r"'b'.*The density seems to be improper there: give it a prior"):
        fit(flat, method, steps=steps)


@pytest.mark.parametrize(("method", "steps"), [(pr.FullRank(), 300), (pr.Pathfinder(), None)])
def test_a_flat_direction_across_two_parameters_gives_a_warning(method: Any, steps: int | None) -> None:
    tilted = pr.Density(lambda v: -0.5 * (v["a"] - v["b"]) ** 2, PARAMS)
    with pytest.warns(PrioryWarning, match="improper"):
        fit(tilted, method, steps=steps)


@pytest.mark.parametrize("method", [pr.MeanField(learning_rate=0.1), pr.FullRank(), pr.Pathfinder()])
def test_a_wide_density_gives_no_warning(method: Any) -> None:
    """Warnings are errors here; the scale of q grows by a factor of 500."""
    wide = pr.Density(lambda v: -0.5 * v["a"] ** 2 - 0.5 * (v["b"] / 10) ** 2, PARAMS)
    posterior = fit(wide, method, steps=300)
    assert 8 < float(posterior.sample(4000)["b"].std()) < 12
