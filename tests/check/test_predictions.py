"""Predictions of a network: calibrated ones pass, and what is wrong with others is named."""

import math

import pytest
import torch
from torch import nn

import priory as pr
from priory.check.predictions import (
    bias,
    calibration,
    chance_errors,
    errors_by_chance,
    outliers,
    pattern_items,
    ranges,
)
from priory.core.streams import stream
from priory.evaluate import expected_calibration_error

DOUBLE = torch.float64


def uniform(n, seed=0):
    return torch.rand(n, generator=stream(seed, "u"), dtype=DOUBLE)


def test_chance_errors_are_those_of_bonferroni():
    assert chance_errors(1) == pytest.approx(3.2905, abs=1e-4)
    assert chance_errors(50) == pytest.approx(4.2649, abs=1e-4)


def test_the_distance_from_uniform_is_that_of_kolmogorov_and_smirnov():
    u = torch.tensor([0.1, 0.2, 0.9], dtype=DOUBLE)
    assert calibration(u, 3, True).value == pytest.approx(2 / 3 - 0.2, abs=1e-12)


def test_uniform_transforms_pass_and_others_fail():
    rate = sum(calibration(uniform(300, s), 300, True).failed for s in range(300)) / 300
    assert rate < 0.02  # expected 0.001: six of 300 happen by chance once in 30,000
    assert not bias(uniform(300), 300, True).failed
    assert bias(uniform(300).sqrt(), 300, True).failed
    narrow = torch.cat([0.02 * uniform(150), 1 - 0.02 * uniform(150)])
    found = calibration(narrow, 300, True)
    assert found.failed
    assert "too narrow" in found.finding
    assert "too wide" in calibration(0.4 + 0.2 * uniform(300), 300, True).finding


def test_outliers_are_counted_against_a_poisson_law():
    u = uniform(1000).clamp(0.01, 0.99)
    assert outliers(u, 1000).passed
    u[:3] = 1e-6  # three where one is expected: p = 0.08
    assert outliers(u, 1000).passed
    u[:8] = 1e-6  # eight where one is expected: p = 1e-5
    assert outliers(u, 1000).failed


def test_a_pattern_of_the_residuals_is_found_in_its_input():
    x = torch.linspace(-1, 1, 800, dtype=DOUBLE)
    other = uniform(800, 3)
    r = torch.randn(800, generator=stream(0, "r"), dtype=DOUBLE)
    columns = {"input 0": x, "input 1": other}
    assert [item.passed for item in pattern_items(r, columns)] == [True, True]
    level, noise = pattern_items(r + torch.sin(3 * x), columns)
    assert level.failed
    assert "input 0" in level.finding
    assert noise.passed
    level, noise = pattern_items(r * (1 + x.abs()), columns)
    assert level.passed
    assert noise.failed
    assert "input 0" in noise.finding


def test_ranges_have_equally_many_rows():
    x = torch.linspace(0, 1, 400, dtype=DOUBLE).square()
    assert [len(part) for part in ranges(x, x)] == [50] * 8


def test_a_network_that_learnt_nothing_is_named():
    x = torch.linspace(-1, 1, 100, dtype=DOUBLE)[:, None]
    torch.manual_seed(0)
    model = pr.Model(nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double(), pr.Gaussian(0.1), 1e-4)
    posterior = pr.fit(model, (x, 3 * x[:, 0]), pr.MeanField(), steps=200, progress=False)
    check = posterior.check((x, 3 * x[:, 0]))
    assert check["better than a constant"].failed
    assert check.verdict.startswith("Believe nothing")


def test_a_few_rows_say_nothing_about_predictions():
    x = torch.linspace(-1, 1, 50, dtype=DOUBLE)[:, None]
    posterior = pr.fit(
        pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.5)), (x, x[:, 0]), pr.FullRank(), progress=False
    )
    check = posterior.check((x[:3], x[:3, 0]))
    assert check["calibration"].outcome == "not known"
    assert "better than a constant" not in check
    assert not check.failures


def test_labels_are_calibrated_against_labels_drawn_from_the_predictions():
    generator = stream(0, "labels")
    x = torch.randn(2000, 1, generator=generator, dtype=DOUBLE)
    y = (torch.rand(2000, generator=generator, dtype=DOUBLE) < torch.sigmoid(2 * x[:, 0])).to(DOUBLE)
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(1, 1).double(), pr.Bernoulli(), 10.0)
    posterior = pr.fit(model, (x, y), pr.MAP(), steps=1500, progress=False)
    new = torch.randn(2000, 1, generator=generator, dtype=DOUBLE)
    labels = (torch.rand(2000, generator=generator, dtype=DOUBLE) < torch.sigmoid(2 * new[:, 0])).to(DOUBLE)
    noise = (torch.rand(2000, generator=generator, dtype=DOUBLE) < 0.5).to(DOUBLE)
    assert posterior.check((new, labels))["calibration"].passed
    found = posterior.check((new, noise))["calibration"]
    assert found.failed
    assert "too confident" in found.finding


def test_errors_by_chance_are_those_of_labels_drawn_from_the_confidence():
    generator = stream(1, "labels")
    confidence = 0.5 + 0.5 * torch.rand(400, generator=generator, dtype=DOUBLE)
    probs = torch.stack([confidence, 1 - confidence], 1)
    drawn = [
        expected_calibration_error(probs, (torch.rand(400, generator=generator, dtype=DOUBLE) > confidence).long())
        for _ in range(200)
    ]
    found = errors_by_chance(confidence, generator)
    assert float(found.mean()) == pytest.approx(sum(drawn) / 200, rel=0.1)  # five standard errors


def test_counts_have_uniform_transforms():
    generator = stream(0, "counts")
    x = torch.randn(1500, 1, generator=generator, dtype=DOUBLE)
    y = torch.poisson((0.5 * x[:, 0]).exp(), generator=generator)
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(1, 1).double(), pr.Poisson(), 10.0)
    posterior = pr.fit(model, (x, y), pr.MAP(), steps=1500, progress=False)
    check = posterior.check((x, y))
    assert check["calibration"].passed
    assert check["bias"].passed
    assert math.isfinite(check["calibration"].value)
