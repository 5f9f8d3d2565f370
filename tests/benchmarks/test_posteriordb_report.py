"""The report of `benchmarks/posteriordb.py`: distances in standard errors, ratios of times, and the criteria."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from priory.diagnostics import mcse_mean, mcse_sd


@pytest.fixture(scope="module")
def report(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("_posterior_report")


@pytest.fixture(scope="module")
def script(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("posteriordb")


def run(**changes: Any) -> dict[str, Any]:
    plain = {"wall": 1.0, "cpu": 1.0, "z_mean": 1.0, "z_sd": 1.0, "worst_mean": "x", "worst_sd": "x", "r_hat": 1.5}
    more = {"nested_r_hat": 1.005, "status": "converged", "reason": "", "gradients": 200.0, "divergences": 0}
    return {**plain, **more, "ess_bulk": 1000.0, "ess_tail": 800.0, **changes}


def test_distances_are_in_combined_standard_errors(script: ModuleType):
    x = torch.randn(4, 250, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    away = 3.0 * (mcse_mean(x) ** 2 + 0.5**2).sqrt()
    known = {
        "mean": float(x.mean() - away),
        "sd": float(x.flatten().std() + 2 * mcse_sd(x)),
        "mcse_mean": 0.5,
        "mcse_sd": 0.0,
    }
    found = script.compared("a posterior without quantities of its own", {"x": x}, {"x": known})
    assert found["z_mean"] == pytest.approx(3.0, abs=1e-8)
    assert found["z_sd"] == pytest.approx(2.0, abs=1e-8)


def test_a_draw_that_is_not_a_number_is_infinitely_far_away(script: ModuleType):
    x = torch.full((4, 10), torch.nan, dtype=torch.float64)
    known = {"mean": 0.0, "sd": 1.0, "mcse_mean": 0.0, "mcse_sd": 0.0}
    assert script.compared("none", {"x": x}, {"x": known})["z_mean"] == math.inf


def test_the_ratio_is_of_median_seconds(report: ModuleType):
    result = {"ours": [run(wall=1.0), run(wall=9.0), run(wall=2.0)], "numpyro": [run(wall=8.0)]}
    assert report.ratio(result, "wall") == 0.25
    assert report.ratio({**result, "numpyro": []}, "wall") is None


def test_criteria_name_the_posteriors_that_fail(report: ModuleType):
    good = {"ours": [run(wall=1.0)], "numpyro": [run(wall=10.0)]}
    results = {f"posterior {n}": good for n in range(20)}
    results["raw_response"] = {"ours": [run(gradients=401.0)], "numpyro": []}
    results["funnel"] = {"ours": [run(status="doubtful", z_mean=50.0)], "numpyro": []}
    lines = report.criteria(results, "wall")
    assert [line.split()[0] for line in lines] == ["pass"] * 8 + ["FAIL"]
    assert lines[6].endswith("0.100")
    results["wrong"] = {"ours": [run(), run(z_mean=4.1, z_sd=4.2, nested_r_hat=1.02)], "numpyro": [run(wall=0.4)]}
    results["stopped"] = {"ours": [{"wall": 300.0, "cpu": 300.0, "failed": "no answer"}], "numpyro": []}
    results["bimodal"] = {"ours": [run()], "numpyro": []}
    lines = report.criteria(results, "wall")
    for line in lines[:3]:
        assert line.startswith("FAIL")
        assert "wrong (1 of 2), stopped (1 of 1)" in line
        assert "funnel" not in line
    assert lines[4] == "FAIL     time at most twice NumPyro's: wrong (2.50)"
    assert lines[7].endswith("bimodal (1 of 1)")


def test_criteria_that_were_not_run_say_so(report: ModuleType):
    lines = report.criteria({"years": {"ours": [], "numpyro": [run()]}}, "wall")
    assert all(line.startswith("not run") for line in lines)


def test_the_table_shows_the_worst_seed_and_the_reason(report: ModuleType):
    ours = [run(ess_bulk=900.0), run(ess_bulk=1200.0, status="not_converged", reason="Mixes slowly.")]
    lines = report.table({"years": {"ours": ours, "numpyro": [run(wall=2.0, cached=True)]}}, "wall")
    assert "900" in lines[2]
    assert "2.0 cached" in lines[2]
    assert "0.50" in lines[2]
    assert "1 converged, 1 not_converged" in lines[2]
    assert lines[3] == "years: Mixes slowly."
