"""Calibration against scipy, scikit-learn and counts by hand."""

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn.calibration import calibration_curve

from priory import evaluate
from priory.core.errors import InputError
from priory.likelihoods import Categorical, Gaussian, Likelihood, Poisson
from priory.predictive import Prediction


def prediction(likelihood: Likelihood, outputs: torch.Tensor) -> Prediction:
    def prepare(y: torch.Tensor) -> torch.Tensor:
        return likelihood.prepare(y, torch.float64)

    return Prediction.of_draws(likelihood, outputs, {}, torch.Size(), prepare)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_coverage_counts_the_targets_inside_the_central_intervals() -> None:
    f, y, levels = normal(1, 40), 2 * normal(40, seed=1), [0.05, 0.5, 0.99]
    inside = evaluate.coverage(prediction(Gaussian(noise=1.3), f), y, levels)
    for level, fraction in zip(levels, inside.tolist(), strict=True):
        low, high = stats.norm.interval(level, f[0].numpy(), 1.3)
        assert fraction == ((low <= y.numpy()) & (y.numpy() <= high)).mean()


def test_the_calibration_error_of_numbers_is_the_mean_distance_of_coverage_from_level() -> None:
    # All targets at the median: every interval holds them all, so the distances are 0.9, 0.8, ..., 0.1.
    f = normal(1, 10)
    assert evaluate.calibration_error(prediction(Gaussian(noise=0.5), f), f[0]) == pytest.approx(0.5, abs=1e-12)


def test_pit_is_the_cdf_of_the_mixture() -> None:
    f, y = normal(4, 30), normal(30, seed=1)
    expected = stats.norm.cdf(y.numpy(), f.numpy(), 0.7).mean(0)
    np.testing.assert_allclose(evaluate.pit(prediction(Gaussian(noise=0.7), f), y), expected, rtol=1e-10)


def test_pit_of_counts_is_the_middle_of_the_step() -> None:
    f, y = normal(4, 30), torch.arange(30) % 5
    rate = torch.exp(f).numpy()
    steps = stats.poisson.cdf(y.numpy() - 1, rate) + stats.poisson.cdf(y.numpy(), rate)
    np.testing.assert_allclose(evaluate.pit(prediction(Poisson(), f), y), steps.mean(0) / 2, rtol=1e-8)


def test_the_reliability_curve_agrees_with_scikit_learn() -> None:
    logits, y = 2 * normal(3, 200, 4), torch.arange(200) % 4
    probs = special.softmax(logits.numpy(), axis=-1).mean(0)
    right = probs.argmax(-1) == y.numpy()
    frequency, confidence = calibration_curve(right, probs.max(-1), n_bins=12)
    curve = evaluate.reliability(prediction(Categorical(), logits), y, bins=12)
    full = curve.count > 0
    np.testing.assert_allclose(curve.frequency[full], frequency, rtol=1e-12)
    np.testing.assert_allclose(curve.confidence[full], confidence, rtol=1e-12)
    assert curve.count.sum() == 200
    assert curve.frequency[~full].isnan().all()


def test_the_expected_calibration_error_is_the_weighted_mean_gap() -> None:
    # Two bins: (0, 0.5] holds 0.4 wrong and 0.5 right; (0.5, 1] holds 0.8 right and 0.9 wrong. With 0.5 in the bin
    # above it would be 0.15.
    probs = torch.tensor([[0.4, 0.3, 0.3], [0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.05, 0.05, 0.9]], dtype=torch.float64)
    y = torch.tensor([1, 0, 1, 0])
    gap = 0.5 * abs(0.5 - 0.45) + 0.5 * abs(0.5 - 0.85)
    assert gap == pytest.approx(0.2, abs=1e-12)
    assert evaluate.expected_calibration_error(probs, y, bins=2) == pytest.approx(gap, abs=1e-12)


def test_a_confidence_on_an_edge_is_counted_in_the_bin_below() -> None:
    # Bins (0, 0.25], (0.25, 0.5], (0.5, 0.75] and (0.75, 1], whose edges are exact in binary.
    top = torch.tensor([0.25, 0.5, 0.5, 0.625, 0.75, 0.75, 0.75, 1.0], dtype=torch.float64)
    probs = torch.cat([top[:, None], ((1 - top) / 3)[:, None].expand(-1, 3)], 1)
    curve = evaluate.reliability(probs, torch.zeros(8, dtype=torch.long), bins=4)
    assert curve.count.tolist() == [1, 2, 4, 1]
    assert curve.confidence.tolist() == pytest.approx([0.25, 0.5, 2.875 / 4, 1.0], abs=1e-12)


def test_the_calibration_error_of_classes_is_the_expected_calibration_error() -> None:
    classes, y = prediction(Categorical(), normal(3, 60, 4)), torch.arange(60) % 4
    assert evaluate.calibration_error(classes, y) == evaluate.expected_calibration_error(classes.probs, y, bins=15)


def test_binary_labels_count_as_two_classes() -> None:
    p, y = (
        torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        torch.arange(50) % 2,
    )
    both = torch.stack([1 - p, p], dim=-1)
    one = evaluate.expected_calibration_error(p, y)
    assert one == pytest.approx(evaluate.expected_calibration_error(both, y), abs=1e-12)


def test_certain_and_correct_predictions_are_perfectly_calibrated() -> None:
    assert evaluate.expected_calibration_error(torch.eye(3), torch.arange(3)) == 0


def test_invalid_levels_and_bins_raise_an_error() -> None:
    numbers, y = prediction(Gaussian(noise=0.7), normal(1, 5)), normal(5)
    with pytest.raises(InputError, match=r"'levels' argument of coverage must lie strictly between 0 and 1, got 90"):
        evaluate.coverage(numbers, y, [90])
    with pytest.raises(InputError, match="hold at least one level"):
        evaluate.coverage(numbers, y, [])
    with pytest.raises(InputError, match=r"'bins' argument of reliability must be an integer >= 1, got 0"):
        evaluate.reliability(torch.eye(2), torch.arange(2), bins=0)
