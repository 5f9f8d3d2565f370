"""Scores against scipy, scikit-learn, quadrature and sums written out."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from sklearn import metrics

from priory import evaluate
from priory.core.errors import InputError
from priory.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, StudentT
from priory.predictive import Linearised, Prediction

DRAWS, ROWS = 5, 7


def prediction(likelihood: Likelihood, outputs: torch.Tensor, event: tuple[int, ...] = ()) -> Prediction:
    def prepare(y: torch.Tensor) -> torch.Tensor:
        return likelihood.prepare(y, torch.float64)

    return Prediction.of_draws(likelihood, outputs, {}, torch.Size(event), prepare)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_log_score_is_the_mean_log_density_of_the_mixture() -> None:
    f, y = normal(DRAWS, ROWS), normal(ROWS, seed=1)
    density = stats.norm.logpdf(y.numpy(), f.numpy(), 0.7)
    expected = (special.logsumexp(density, axis=0) - math.log(DRAWS)).mean()
    mixture = prediction(Gaussian(noise=0.7), f)
    assert evaluate.log_score(mixture, y) == pytest.approx(expected, rel=1e-12)
    assert evaluate.nll(mixture, y) == pytest.approx(-expected, rel=1e-12)


def test_scores_take_arrays_lists_and_tensors() -> None:
    mixture, y = prediction(Gaussian(noise=0.7), normal(DRAWS, ROWS)), normal(ROWS, seed=1)
    for score in (evaluate.nll, evaluate.rmse, evaluate.crps, evaluate.calibration_error):
        assert score(mixture, y.numpy()) == score(mixture, y)
        assert score(mixture, y.tolist()) == pytest.approx(score(mixture, y), rel=1e-6)
        assert score(mixture, y[:, None]) == score(mixture, y)


@pytest.mark.parametrize("event", [(), (3,)])
def test_rmse_agrees_with_scikit_learn_over_all_outputs(event: tuple[int, ...]) -> None:
    f, y = normal(DRAWS, ROWS, *event), normal(ROWS, *event, seed=1)
    expected = math.sqrt(metrics.mean_squared_error(y.numpy().ravel(), f.mean(0).numpy().ravel()))
    assert evaluate.rmse(prediction(Gaussian(noise=0.7), f, event), y) == pytest.approx(expected, rel=1e-12)


def test_accuracy_and_brier_of_classes_agree_with_scikit_learn_and_the_formula() -> None:
    logits, y = normal(DRAWS, 50, 4), torch.arange(50) % 4
    probs = special.softmax(logits.numpy(), axis=-1).mean(0)
    classes = prediction(Categorical(), logits)
    assert evaluate.accuracy(classes, y) == metrics.accuracy_score(y, probs.argmax(-1))
    expected = ((probs - np.eye(4)[y.numpy()]) ** 2).sum(-1).mean()
    assert evaluate.brier(classes, y) == pytest.approx(expected, rel=1e-12)
    assert evaluate.brier(torch.as_tensor(probs), y) == pytest.approx(expected, rel=1e-12)


def test_accuracy_and_brier_of_binary_labels_agree_with_scikit_learn() -> None:
    logits, y = normal(DRAWS, 50), torch.arange(50) % 2
    probs = special.expit(logits.numpy()).mean(0)
    binary = prediction(Bernoulli(), logits)
    assert evaluate.accuracy(binary, y) == metrics.accuracy_score(y, probs > 0.5)
    assert evaluate.brier(binary, y) == pytest.approx(metrics.brier_score_loss(y, probs), rel=1e-12)


def test_several_labels_are_scored_separately() -> None:
    probs, y = torch.tensor([[0.9, 0.2], [0.4, 0.6]]), torch.tensor([[1, 1], [0, 1]])
    assert evaluate.accuracy(probs, y) == 0.75
    assert evaluate.brier(probs.double(), y) == pytest.approx((0.01 + 0.64 + 0.16 + 0.16) / 4, rel=1e-6)


def test_crps_of_one_gaussian_is_the_closed_form() -> None:
    f, y, sigma = normal(1, ROWS), normal(ROWS, seed=1), 0.7
    z = (y - f[0]).numpy() / sigma
    each = sigma * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert evaluate.crps(prediction(Gaussian(noise=sigma), f), y) == pytest.approx(each.mean(), rel=1e-10)


def test_crps_of_a_gaussian_mixture_is_the_integral_over_its_cdf() -> None:
    f, y, sigma = normal(3, 2), normal(2, seed=1), 0.7

    def integral(row: int) -> float:
        def squared(value: float, step: float) -> float:
            return float((stats.norm.cdf(value, f[:, row].numpy(), sigma).mean() - step) ** 2)

        target = y[row].item()
        below = integrate.quad(squared, target - 15, target, args=(0.0,), epsabs=1e-12, epsrel=1e-12)
        above = integrate.quad(squared, target, target + 15, args=(1.0,), epsabs=1e-12, epsrel=1e-12)
        return below[0] + above[0]

    expected = (integral(0) + integral(1)) / 2
    assert evaluate.crps(prediction(Gaussian(noise=sigma), f), y) == pytest.approx(expected, rel=1e-9)


def test_crps_from_samples_is_the_fair_estimate_over_all_pairs() -> None:
    mixture, y = prediction(StudentT(df=4.0, scale=0.5), normal(9, ROWS)), normal(ROWS, seed=1)
    draws = mixture.samples.numpy()
    distance = np.abs(draws - y.numpy()).mean(0)
    pairs = np.abs(draws[:, None] - draws[None]).sum((0, 1)) / (9 * 8)
    assert evaluate.crps(mixture, y) == pytest.approx((distance - pairs / 2).mean(), rel=1e-10)


def test_targets_of_another_shape_raise_an_error() -> None:
    mixture = prediction(Gaussian(noise=0.7), normal(DRAWS, ROWS))
    with pytest.raises(
        InputError,
        match=r"The 'y' argument of rmse must have the prediction's shape \(7,\), got "
        r"\(6,\)",
    ):
        evaluate.rmse(mixture, normal(6))
    with pytest.raises(InputError, match="at least one row"):
        evaluate.accuracy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))


def test_scores_of_numbers_and_classes_cannot_be_exchanged() -> None:
    numbers, classes = (
        prediction(Gaussian(noise=0.7), normal(DRAWS, ROWS)),
        prediction(Categorical(), normal(2, 4, 3)),
    )
    labels = torch.tensor([0, 1, 2, 0])
    for score in (evaluate.accuracy, evaluate.brier, evaluate.expected_calibration_error):
        with pytest.raises(InputError, match="must be of classes"):
            score(numbers, normal(ROWS))
    for score in (evaluate.rmse, evaluate.crps, evaluate.coverage, evaluate.pit):
        with pytest.raises(InputError, match="must be of numbers, not of classes"):
            score(classes, labels)


def test_a_class_out_of_range_raises_an_error() -> None:
    probs = torch.full((2, 3), 1 / 3)
    with pytest.raises(InputError, match=r"must hold classes between 0 and 2, got 0 to 3"):
        evaluate.accuracy(probs, torch.tensor([0, 3]))
    with pytest.raises(InputError, match=r"must have the shape \(2,\)"):
        evaluate.accuracy(probs, torch.tensor([0, 1, 2]))


def test_the_crps_of_a_linearised_prediction_is_that_of_its_one_gaussian() -> None:
    mean, variance = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0.3, 2.0], dtype=torch.float64)
    y = torch.tensor([0.4, -1.0], dtype=torch.float64)
    gaussian = Linearised.of(Gaussian(0.5), mean, variance[:, None, None], {}, torch.Size())
    linearised = Prediction.of(gaussian, lambda t: t)
    std = (variance + 0.25).sqrt()
    z = (y - mean) / std
    phi, cdf = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi), torch.special.ndtr(z)
    wanted = (std * (z * (2 * cdf - 1) + 2 * phi - 1 / math.sqrt(math.pi))).mean()  # Gneiting and Raftery 2007
    assert evaluate.crps(linearised, y) == pytest.approx(float(wanted), abs=1e-12)
