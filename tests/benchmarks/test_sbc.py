"""The calibration of `benchmarks/sbc.py` on fewer simulations: samplers with a planted bug must fail it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from priory.methods.mcmc.metrics import DenseMetric
from priory.testing import assert_uniform_ranks

SIMULATIONS, SIGNIFICANCE_LEVEL = 250, 1e-3  # false alarms per calibration; 4e-3 over the four


@pytest.fixture(scope="module")
def sbc(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("sbc")


def ranks(sbc: ModuleType, method: str, model: str, **options: Any) -> Tensor:
    return sbc.ranks(replace(sbc.METHODS[method], **options), sbc.MODELS[model](SIMULATIONS, 1), 1)


def assert_not_calibrated(found: Tensor, top: int) -> None:
    with pytest.raises(AssertionError, match="not uniform"):
        assert_uniform_ranks(found, top, level=SIGNIFICANCE_LEVEL)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hierarchy", "raw regression"])
@pytest.mark.parametrize("method", ["HMC", "NUTS"])
def test_ranks_are_uniform_with_the_default_warm_up(sbc: ModuleType, method: str, model: str) -> None:
    assert_uniform_ranks(ranks(sbc, method, model), sbc.MAX_RANK, level=SIGNIFICANCE_LEVEL)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["HMC", "NUTS"])
def test_momenta_of_the_wrong_covariance_are_detected(
    sbc: ModuleType, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn from N(0, C^-1 / 2) in place of N(0, C^-1): chains have too little energy, and stay near the mode."""
    right = DenseMetric.momentum
    monkeypatch.setattr(DenseMetric, "momentum", lambda self, noise: right(self, noise / 2**0.5))
    assert_not_calibrated(ranks(sbc, method, "hierarchy", warmup=60), sbc.MAX_RANK)
