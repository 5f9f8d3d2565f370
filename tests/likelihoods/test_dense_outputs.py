"""Outputs with places of their own: labels of pixels and tokens, and images of numbers, from fit to prediction."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

import priory as pr
from priory import evaluate
from priory.core.streams import stream
from priory.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from priory.predictive import Prediction
from priory.testing import assert_mean_close

EXACT = {"rtol": 0, "atol": 1e-10}
ROWS, CLASSES, PLACES = 6, 3, (2, 4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(seed))


def seeded(net: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return net.double()


def segmenter(outputs: int = CLASSES) -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, outputs, 1)))


def made(outputs: Tensor, event: tuple[int, ...]) -> Prediction:
    prepare = lambda y: Categorical().prepare(y, outputs.dtype)  # noqa: E731
    return Prediction.of_draws(Categorical(), outputs, {}, torch.Size(event), prepare)


# One label per position.


@pytest.mark.parametrize("places", [(5,), PLACES, (2, 1, 3)])
def test_logits_of_positions_are_moved_last_and_scored_as_by_torch(places: tuple[int, ...]) -> None:
    raw, y = normal(ROWS, CLASSES, *places), labels(ROWS, *places)
    arranged = Categorical().arrange(raw, torch.Size(places))
    assert arranged.shape == (ROWS, *places, CLASSES)
    found = Categorical().log_prob(arranged, y, {})
    wanted = -cross_entropy(raw, y, reduction="none").flatten(1).sum(1)
    torch.testing.assert_close(found, wanted, **EXACT)


def test_leading_draws_are_scored_one_by_one() -> None:
    outputs, y = normal(2, 5, ROWS, *PLACES, CLASSES), labels(ROWS, *PLACES)
    found = Categorical().log_prob(outputs, y, {})
    assert found.shape == (2, 5, ROWS)
    torch.testing.assert_close(found[1, 3], Categorical().log_prob(outputs[1, 3], y, {}), **EXACT)
    by_hand = sum(log_softmax(outputs[0, 2, 1, i, j], -1)[y[1, i, j]] for i in range(2) for j in range(4))
    torch.testing.assert_close(found[0, 2, 1], by_hand, **EXACT)


def test_a_column_of_labels_is_one_label_per_row() -> None:
    column = labels(ROWS, 1)
    prepared = Categorical().prepare(column, torch.float64)
    assert prepared.shape == (ROWS,)
    for raw in (normal(ROWS, CLASSES), normal(ROWS, CLASSES, 1)):
        arranged = Categorical().arrange(raw, prepared.shape[1:])
        assert arranged.shape == (ROWS, CLASSES)
    net = seeded(nn.Linear(2, CLASSES))
    posterior = pr.fit(pr.Model(net, Categorical()), (normal(ROWS, 2), column), pr.MAP(), steps=2, progress=False)
    prediction = posterior.predict(normal(ROWS, 2))
    assert prediction.probs.shape == (ROWS, CLASSES)
    assert torch.equal(prediction.log_prob(column), prediction.log_prob(column[:, 0]))


def test_the_mean_variance_and_entropy_are_those_of_each_position() -> None:
    outputs = normal(ROWS, *PLACES, CLASSES)
    p = outputs.softmax(-1)
    torch.testing.assert_close(Categorical().mean(outputs, {}), p, **EXACT)
    torch.testing.assert_close(Categorical().variance(outputs, {}), p * (1 - p), **EXACT)
    wanted = torch.distributions.Categorical(probs=p).entropy().sum((1, 2))
    torch.testing.assert_close(Categorical().entropy(p, 2), wanted, **EXACT)


def test_draws_of_labels_have_the_probabilities_of_their_position() -> None:
    outputs = normal(2, 3, CLASSES)
    draws = Categorical().draw(outputs.expand(4000, *outputs.shape), {}, stream(0, "y"))
    assert draws.shape == (4000, 2, 3)
    # 18 comparisons at five standard errors: false alarm below 2e-5
    assert_mean_close(nn.functional.one_hot(draws, CLASSES).double(), outputs.softmax(-1))


def test_a_mixture_scores_the_labels_of_a_row_jointly() -> None:
    outputs, y = normal(5, ROWS, *PLACES, CLASSES), labels(ROWS, *PLACES)
    prediction = made(outputs, PLACES)
    each = torch.stack([Categorical().log_prob(o, y, {}) for o in outputs])
    torch.testing.assert_close(prediction.log_prob(y), each.logsumexp(0) - math.log(5), **EXACT)
    assert prediction.probs.shape == (ROWS, *PLACES, CLASSES)
    assert prediction.samples.shape == (5, ROWS, *PLACES)
    p = outputs.softmax(-1)
    entropy = lambda q: torch.special.entr(q).sum(-1).flatten(-2).sum(-1)  # noqa: E731
    torch.testing.assert_close(prediction.entropy, entropy(p.mean(0)), **EXACT)
    torch.testing.assert_close(prediction.mutual_information, entropy(p.mean(0)) - entropy(p).mean(0), **EXACT)
    # the variance between five draws is estimated with the divisor four
    torch.testing.assert_close(prediction.variance, p.mean(0) * (1 - p.mean(0)) + p.var(0) / 5, **EXACT)


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField()])
def test_a_segmentation_is_fitted_predicted_and_scored(method: Any) -> None:
    x = normal(40, 2, *PLACES)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = pr.Model(segmenter(), Categorical())
    posterior = pr.fit(model, (x, y), method, epochs=60, batch_size=20, progress=False)
    prediction = posterior.predict(x, samples=8)
    assert prediction.probs.shape == (40, *PLACES, CLASSES)
    assert evaluate.accuracy(prediction, y) > 0.6  # a third by chance, half for the most frequent class
    assert evaluate.nll(prediction, y) < 8 * math.log(3)
    assert 0 < evaluate.brier(prediction, y) < 2 / 3
    assert 0 <= evaluate.calibration_error(prediction, y) < 1
    assert prediction.entropy.shape == prediction.mutual_information.shape == (40,)


def test_the_loss_of_a_segmentation_is_torchs_summed_over_rows_and_positions() -> None:
    x, y, net = normal(10, 2, *PLACES), labels(10, *PLACES), segmenter()
    model = pr.Model(net, Categorical(), prior="flat")
    posterior = pr.fit(model, (x, y), pr.MAP(), steps=1, batch_size=10, progress=False)
    wanted = cross_entropy(net(x), y, reduction="sum").detach()
    assert float(posterior.history["nll"][0]) == pytest.approx(float(wanted), abs=1e-8)


def test_a_segmentation_can_be_saved_and_loaded(tmp_path: Any) -> None:
    x, y = normal(10, 2, *PLACES), labels(10, *PLACES)
    model = pr.Model(segmenter(), Categorical())
    posterior = pr.fit(model, (x, y), pr.MeanField(), steps=2, progress=False)
    posterior.save(tmp_path / "segments.priory")
    again = pr.load(tmp_path / "segments.priory", model)
    assert torch.equal(again.predict(x).log_prob(y), posterior.predict(x).log_prob(y))


WRONG = {
    "one-hot labels": (
        normal(5, CLASSES),
        (CLASSES,),
        r"have one label per row \(use y.argmax\(1\) for one-hot labels\), got the shape \(5, 3\)",
    ),
    "other places": (normal(5, CLASSES, 4, 2), PLACES, r"\(rows, classes, 2, 4\).*got \(rows, 3, 4, 2\)"),
    "a channel too many": (normal(5, CLASSES, 2, 4), (1, 2, 4), r"\(rows, classes, 1, 2, 4\).*got \(rows, 3, 2, 4\)"),
    "classes last": (normal(5, 2, 4, CLASSES), PLACES, r"\(rows, classes, 2, 4\).*got \(rows, 2, 4, 3\)"),
    "no places": (normal(5, CLASSES, 2, 4), (), r"\(rows, classes\).*got \(rows, 3, 2, 4\)"),
    "one class": (normal(5, 1, 2, 4), PLACES, "at least two classes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_outputs_that_do_not_fit_the_labels_raise_an_error(name: str) -> None:
    outputs, event, text = WRONG[name]
    with pytest.raises(pr.InputError, match=text):
        Categorical().arrange(outputs, torch.Size(event))


def test_labels_of_another_shape_or_too_large_raise_an_error() -> None:
    prediction = made(normal(5, ROWS, *PLACES, CLASSES), PLACES)
    with pytest.raises(pr.InputError, match=r"must have the shape \(6, 2, 4\)"):
        prediction.log_prob(labels(ROWS, 4, 2))
    with pytest.raises(pr.InputError, match="labels below 3"):
        prediction.log_prob(labels(ROWS, *PLACES) + 1)


# Images of numbers.

IMAGES: dict[str, tuple[Likelihood, Tensor, int]] = {
    "gaussian": (Gaussian(), normal(20, 3, *PLACES, seed=2), 3),
    "gaussian, given": (Gaussian(0.5), normal(20, 3, *PLACES, seed=2), 3),
    "bernoulli": (Bernoulli(), (normal(20, 1, *PLACES, seed=2) > 0).double(), 1),
    "poisson": (Poisson(), labels(20, 2, *PLACES).double(), 2),
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField()])
def test_images_are_fitted_and_predicted_in_their_own_shape(name: str, method: Any) -> None:
    likelihood, y, channels = IMAGES[name]
    x = normal(20, 2, *PLACES)
    posterior = pr.fit(pr.Model(segmenter(channels), likelihood), (x, y), method, steps=3, progress=False)
    prediction = posterior.predict(x, samples=4)
    assert prediction.mean.shape == prediction.variance.shape == y.shape
    assert prediction.samples.shape[1:] == y.shape
    values = likelihood.log_prob(prediction.outputs, y, prediction.distribution.learnt)
    assert prediction.log_prob(y).shape == (20,)
    torch.testing.assert_close(prediction.log_prob(y), values.logsumexp(0) - math.log(len(values)), **EXACT)
    if likelihood.classes:
        assert prediction.entropy.shape == (20,)
        assert 0 <= evaluate.accuracy(prediction, y) <= 1
        return
    low, high = prediction.interval(0.9)
    assert low.shape == high.shape == y.shape
    within = prediction.cdf(high) - (prediction.cdf(low - 1) if likelihood.discrete else prediction.cdf(low))
    if likelihood.discrete:
        assert bool((within >= 0.9 - 1e-9).all())
    else:
        torch.testing.assert_close(within, torch.full_like(within, 0.9), rtol=0, atol=1e-8)


def test_a_pixels_log_prob_is_that_of_its_own_mean_and_noise() -> None:
    likelihood, y, _ = IMAGES["gaussian, given"]
    f = normal(20, 3, *PLACES)
    wanted = torch.distributions.Normal(f, 0.5).log_prob(y).sum((1, 2, 3))
    torch.testing.assert_close(likelihood.log_prob(f, y, {}), wanted, **EXACT)
