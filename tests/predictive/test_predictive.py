"""Predictions: moments, quantiles, densities and entropies of the mixture over posterior draws."""

import copy
import math

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical
from torch.func import functional_call

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.families import DiagonalFamily
from priory.fitting.prepare import make_target
from priory.likelihoods import Likelihood
from priory.network.layer_chain import SharedInputs
from priory.network.skeleton import ELEMENTWISE_LAYERS
from priory.posteriors import DiagonalGaussian, Point
from priory.predictive import Prediction, predict
from priory.predictive.draws import MixtureOfDraws
from priory.testing import assert_covariance_close, assert_mean_close

EXACT = {"rtol": 0, "atol": 1e-10}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_prediction(
    likelihood: Likelihood, outputs: Tensor, learnt: dict[str, Tensor] | None = None, event: tuple = ()
):
    """Return a prediction from given outputs (S, n, ...)."""
    prepare = lambda y: likelihood.prepare(y, outputs.dtype)  # noqa: E731
    return Prediction.of_draws(likelihood, outputs, learnt or {}, torch.Size(event), prepare)


def gaussian() -> tuple[Prediction, Tensor, Tensor]:
    f, noise = 2 * normal(6, 5), normal(6, seed=1).exp()
    return make_prediction(pr.Gaussian(), f, {"noise": noise}), f, noise[:, None].expand(6, 5)


# Moments.


def test_the_moments_of_a_gaussian_mixture_follow_the_formulas() -> None:
    prediction, f, s = gaussian()
    mean, second = f.mean(0), (f.square() + s.square()).mean(0)
    torch.testing.assert_close(prediction.mean, mean, **EXACT)
    between = f.square().mean(0) - mean.square()
    torch.testing.assert_close(prediction.variance, second - mean.square() + between / 5, **EXACT)
    torch.testing.assert_close(prediction.epistemic, 6 / 5 * between, **EXACT)
    torch.testing.assert_close(prediction.aleatoric, s.square().mean(0), **EXACT)
    torch.testing.assert_close(prediction.std, prediction.variance.sqrt(), **EXACT)
    assert torch.equal(prediction.variance, prediction.epistemic + prediction.aleatoric)


def test_the_moments_of_student_and_poisson_mixtures_follow_the_formulas() -> None:
    f = normal(6, 5)
    student = make_prediction(pr.StudentT(5.0, 0.7), f)
    torch.testing.assert_close(student.aleatoric, torch.full((5,), 0.49 * 5 / 3, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(student.variance, student.aleatoric + f.var(0), **EXACT)
    counts, rate = make_prediction(pr.Poisson(), f), f.exp()
    torch.testing.assert_close(counts.mean, rate.mean(0), **EXACT)
    torch.testing.assert_close(counts.variance, rate.mean(0) + rate.var(0), **EXACT)


def test_the_variance_of_labels_estimates_p_times_one_minus_p_without_bias() -> None:
    """E[p (1 - p)] for p the mean of S draws is too low by the variance of p, epistemic / S."""
    for prediction in (
        make_prediction(pr.Bernoulli(), normal(6, 5)),
        make_prediction(pr.Categorical(), normal(6, 5, 3)),
    ):
        p = prediction.probs
        torch.testing.assert_close(prediction.variance, p * (1 - p) + prediction.epistemic / 6, **EXACT)


def f_means(likelihood: Likelihood, f: Tensor) -> Tensor:
    """E[y | f] of each draw."""
    return likelihood.mean(f, {})


@pytest.mark.parametrize("kind", ["gaussian", "poisson", "student", "bernoulli"])
def test_the_moments_agree_with_many_draws_from_the_mixture(kind: str) -> None:
    f = normal(3, 4)
    likelihood = {
        "gaussian": pr.Gaussian(0.7),
        "poisson": pr.Poisson(),
        "student": pr.StudentT(20.0, 0.7),
        "bernoulli": pr.Bernoulli(),
    }[kind]
    hand = make_prediction(likelihood, f)
    many = make_prediction(likelihood, f.repeat(4_000, 1))  # 12,000 draws, equal numbers from each component
    y = many.samples
    # Stratified draws vary less than the errors assume, so 5.7e-7 per entry is an upper bound; 4 entries.
    assert_mean_close(y, hand.mean)
    assert_mean_close((y - hand.mean).square(), many.variance)  # `hand` allows for a mean of three draws only
    torch.testing.assert_close(hand.variance, hand.aleatoric + f_means(likelihood, f).var(0), rtol=1e-6, atol=1e-6)


# The density of the mixture.


def test_log_prob_is_the_log_of_the_mean_density() -> None:
    prediction, f, s = gaussian()
    y = normal(5, seed=7)
    expected = torch.as_tensor(np.log(scipy.stats.norm.pdf(y.numpy(), f.numpy(), s.numpy()).mean(0)))
    torch.testing.assert_close(prediction.log_prob(y), expected, **EXACT)
    labels = make_prediction(pr.Categorical(), normal(6, 5, 3))
    chosen = torch.tensor([0, 1, 2, 0, 1])
    torch.testing.assert_close(labels.log_prob(chosen), labels.probs[torch.arange(5), chosen].log(), **EXACT)


def test_log_prob_of_several_outputs_is_joint_over_the_row() -> None:
    f, y = normal(6, 5, 2), normal(5, 2, seed=3)
    prediction = make_prediction(pr.Gaussian(0.5), f, event=(2,))
    rows = scipy.stats.norm.logpdf(y.numpy(), f.numpy(), 0.5).sum(-1)  # (S, n)
    expected = torch.as_tensor(np.log(np.exp(rows).mean(0)))
    assert prediction.log_prob(y).shape == (5,)
    torch.testing.assert_close(prediction.log_prob(y), expected, **EXACT)


def test_log_prob_is_finite_far_from_all_draws() -> None:
    prediction = make_prediction(pr.Gaussian(1e-3), torch.zeros(4, 1, dtype=torch.float64))
    found = prediction.log_prob(torch.tensor([1e3], dtype=torch.float64))
    assert found.item() == pytest.approx(-0.5e12 - math.log(1e-3) - 0.5 * math.log(2 * math.pi), rel=1e-12)


def test_log_prob_takes_columns_arrays_and_integers_and_refuses_other_shapes() -> None:
    prediction, _, _ = gaussian()
    y = torch.arange(5).double()
    wanted = prediction.log_prob(y)
    assert torch.equal(prediction.log_prob(y[:, None]), wanted)
    assert torch.equal(prediction.log_prob(torch.arange(5)), wanted)
    for wrong in (y[:4], y[:, None].expand(5, 2)):
        with pytest.raises(pr.InputError, match=r"The 'y' argument of log_prob must have the shape \(5,\)"):
            prediction.log_prob(wrong)
    with pytest.raises(pr.InputError, match="labels below 3"):
        make_prediction(pr.Categorical(), normal(6, 5, 3)).log_prob(torch.tensor([0, 1, 2, 3, 0]))


def test_log_prob_takes_an_array_as_predict_does() -> None:
    prediction, _, _ = gaussian()
    y = torch.arange(5).double()
    assert torch.equal(prediction.log_prob(y.numpy()), prediction.log_prob(y))


# Quantiles.

LEVELS = [0.001, 0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975, 0.999]


def root(cdf: object, q: float, low: float = -1e6, high: float = 1e6) -> float:
    return brentq(lambda v: cdf(v).mean() - q, low, high, xtol=1e-12, rtol=1e-14, maxiter=500)


@pytest.mark.parametrize("q", LEVELS)
def test_quantiles_of_a_gaussian_mixture_are_roots_of_its_distribution_function(q: float) -> None:
    prediction, f, s = gaussian()
    expected = [root(lambda v, i=i: scipy.stats.norm.cdf(v, f[:, i].numpy(), s[:, i].numpy()), q) for i in range(5)]
    np.testing.assert_allclose(prediction.quantile(q).numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("df", [0.7, 1.0, 1.5, 3.0, 30.0])
@pytest.mark.parametrize("q", LEVELS)
def test_quantiles_of_a_student_mixture_are_roots_of_its_distribution_function(q: float, df: float) -> None:
    f = 2 * normal(6, 5)
    prediction = make_prediction(pr.StudentT(df, 0.7), f)
    expected = [root(lambda v, i=i: scipy.stats.t.cdf(v, df, f[:, i].numpy(), 0.7), q) for i in range(5)]
    np.testing.assert_allclose(prediction.quantile(q).numpy(), expected, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("q", LEVELS)
def test_quantiles_of_counts_are_the_smallest_counts_that_reach_q(q: float) -> None:
    f = 1.5 * normal(6, 9)
    found = make_prediction(pr.Poisson(), f).quantile(q)
    counts = np.arange(2_000)
    for i in range(9):
        below = scipy.stats.poisson.cdf(counts[:, None], f[:, i].exp().numpy()).mean(1)
        assert found[i].item() == counts[np.argmax(below >= q)]


@pytest.mark.parametrize("q", [0.05, 0.3, 0.5, 0.7, 0.95])
def test_quantiles_of_two_separate_modes_are_not_those_of_a_gaussian_fit(q: float) -> None:
    f = torch.tensor([[-10.0], [-10.0], [-10.0], [10.0]], dtype=torch.float64)
    prediction = make_prediction(pr.Gaussian(0.5), f)
    expected = root(lambda v: scipy.stats.norm.cdf(v, f[:, 0].numpy(), 0.5), q)
    assert prediction.quantile(q).item() == pytest.approx(expected, abs=1e-6)
    fitted = prediction.mean + (0.25 + f.var(0, correction=0)).sqrt() * scipy.stats.norm.ppf(q)
    assert abs(float(fitted) - expected) > 0.5


@pytest.mark.parametrize("df", [1.0, 3.0])
def test_quantiles_work_with_a_scale_from_the_network(df: float) -> None:
    pairs = normal(6, 5, 2)
    for prediction, cdf in (
        (make_prediction(pr.Gaussian("network"), pairs), scipy.stats.norm.cdf),
        (make_prediction(pr.StudentT(df, "network"), pairs), lambda v, m, s: scipy.stats.t.cdf(v, df, m, s)),
    ):
        scale = torch.nn.functional.softplus(pairs[..., 1]) + 1e-6
        found = prediction.quantile(0.8)
        assert found.shape == (5,)
        expected = [root(lambda v, i=i: cdf(v, pairs[:, i, 0].numpy(), scale[:, i].numpy()), 0.8) for i in range(5)]  # noqa: B023
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)


def test_an_interval_has_its_two_quantiles_and_its_probability() -> None:
    prediction, f, s = gaussian()
    low, high = prediction.interval(0.9)
    torch.testing.assert_close(low, prediction.quantile(0.05), **EXACT)
    torch.testing.assert_close(high, prediction.quantile(0.95), **EXACT)
    inside = scipy.stats.norm.cdf(high.numpy(), f.numpy(), s.numpy()) - scipy.stats.norm.cdf(
        low.numpy(), f.numpy(), s.numpy()
    )
    np.testing.assert_allclose(inside.mean(0), 0.9, rtol=0, atol=1e-10)
    default = prediction.interval()
    assert torch.equal(default[0], prediction.interval(0.95)[0])


def test_quantiles_of_one_draw_are_those_of_its_distribution() -> None:
    point = make_prediction(pr.Gaussian(0.5), torch.full((1, 1), 3.0, dtype=torch.float64))
    assert point.quantile(0.975).item() == pytest.approx(3 + 0.5 * scipy.stats.norm.ppf(0.975), abs=1e-10)


def test_quantiles_keep_float32_and_the_shape_of_the_targets() -> None:
    prediction = make_prediction(
        pr.Gaussian(0.5), torch.randn(6, 5, 2, generator=torch.Generator().manual_seed(0)), event=(2,)
    )
    found = prediction.quantile(0.3)
    assert found.dtype == torch.float32
    assert found.shape == (5, 2)
    expected = make_prediction(pr.Gaussian(0.5), prediction.outputs.double(), event=(2,)).quantile(0.3)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_a_level_outside_of_zero_to_one_is_refused(q: float) -> None:
    prediction, _, _ = gaussian()
    with pytest.raises(pr.InputError, match="The 'q' argument of quantile must lie between 0 and 1"):
        prediction.quantile(q)
    with pytest.raises(pr.InputError, match="The 'level' argument of interval must lie between 0 and 1"):
        prediction.interval(q)


def test_quantiles_are_refused_for_labels_and_probabilities_for_numbers() -> None:
    labels, (numbers, _, _) = make_prediction(pr.Categorical(), normal(6, 5, 3)), gaussian()
    with pytest.raises(pr.InputError, match="no quantiles"):
        labels.quantile(0.5)
    for name in ("probs", "entropy", "mutual_information"):
        with pytest.raises(pr.InputError, match=f"'{name}' of a prediction needs labels"):
            getattr(numbers, name)
    assert labels.classes
    assert not numbers.classes


# Entropy and mutual information.


def test_the_entropies_of_classes_follow_the_formulas() -> None:
    f = 2 * normal(6, 5, 3)
    prediction, p = make_prediction(pr.Categorical(), f), torch.softmax(f, -1)
    total = Categorical(probs=p.mean(0)).entropy()
    torch.testing.assert_close(prediction.probs, p.mean(0), **EXACT)
    torch.testing.assert_close(prediction.entropy, total, **EXACT)
    within = Categorical(probs=p).entropy().mean(0)
    torch.testing.assert_close(prediction.mutual_information, total - within, **EXACT)


@pytest.mark.parametrize("event", [(), (1,), (4,)])
def test_the_entropies_of_labels_are_summed_over_the_labels(event: tuple[int, ...]) -> None:
    f = 2 * normal(6, 5, *event)
    prediction, p = make_prediction(pr.Bernoulli(), f, event=event), torch.sigmoid(f)
    rows = lambda t: t.reshape(*t.shape[: t.ndim - len(event)], -1).sum(-1) if event else t  # noqa: E731
    total, within = rows(Bernoulli(probs=p.mean(0)).entropy()), rows(Bernoulli(probs=p).entropy()).mean(0)
    assert prediction.probs.shape == (5, *event)
    assert prediction.entropy.shape == prediction.mutual_information.shape == (5,)
    torch.testing.assert_close(prediction.entropy, total, **EXACT)
    torch.testing.assert_close(prediction.mutual_information, total - within, **EXACT)


def test_mutual_information_is_zero_for_equal_draws_and_the_entropy_for_certain_ones() -> None:
    agree = make_prediction(pr.Categorical(), normal(1, 5, 3).expand(6, 5, 3))
    torch.testing.assert_close(agree.mutual_information, torch.zeros(5).double(), **EXACT)
    differ = make_prediction(pr.Categorical(), 1e4 * torch.eye(3, dtype=torch.float64)[:, None, :])
    assert differ.mutual_information.item() == pytest.approx(math.log(3), abs=1e-12)
    assert differ.entropy.item() == pytest.approx(math.log(3), abs=1e-12)


# Draws of y.


def test_samples_are_one_per_draw_and_reproducible() -> None:
    for prediction, shape in (
        (gaussian()[0], (6, 5)),
        (make_prediction(pr.Categorical(), normal(6, 5, 3)), (6, 5)),
        (make_prediction(pr.Bernoulli(), normal(6, 5, 2), event=(2,)), (6, 5, 2)),
        (make_prediction(pr.Poisson(), normal(6, 5, 1), event=(1,)), (6, 5, 1)),
    ):
        assert prediction.samples.shape == shape
        again = Prediction.of_draws(
            prediction.likelihood,
            prediction.outputs,
            prediction.distribution.learnt,
            prediction.event,
            prediction.prepare,
        )
        assert torch.equal(prediction.samples, again.samples)


# Through a posterior.


def posterior_of(
    likelihood: Likelihood, event: tuple[int, ...], outputs: int, kind: str = "dense"
) -> tuple[DiagonalGaussian, Tensor]:
    """Return a factorised Gaussian around random weights, for targets of this event shape."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    if kind == "convolution":
        net = nn.Sequential(
            nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, outputs)
        ).double()
    model = pr.Model(net, likelihood)
    X = normal(20, 3)
    y = (normal(20, *event) > 0).long() if likelihood.classes or likelihood.discrete else normal(20, *event)
    rows = Data.of((X, y)).prepared(model.prepare)
    target = make_target(model, rows, 1.0, "likelihood")
    w = model.start(rows.some(20)[-1], torch.Size(), torch.Generator())
    return DiagonalGaussian(target, DiagonalFamily(w, torch.full_like(w, -1.0))), X


CASES = [
    (pr.Gaussian(), (), 1),
    (pr.Gaussian(), (1,), 1),
    (pr.Gaussian(outputs=2), (2,), 2),
    (pr.Gaussian("network"), (), 2),
    (pr.Gaussian("network"), (2,), 4),
    (pr.StudentT(4.0), (), 1),
    (pr.Poisson(), (), 1),
    (pr.Poisson(), (3,), 3),
    (pr.Bernoulli(), (), 1),
    (pr.Bernoulli(), (1,), 1),
    (pr.Bernoulli(), (3,), 3),
]


@pytest.mark.parametrize(("likelihood", "event", "outputs"), CASES, ids=str)
def test_the_shapes_of_a_prediction_follow_the_targets(
    likelihood: Likelihood, event: tuple[int, ...], outputs: int
) -> None:
    posterior, X = posterior_of(likelihood, event, outputs)
    prediction = posterior.predict(X[:7], samples=5)
    for name in ("mean", "variance", "epistemic", "aleatoric", "std"):
        assert getattr(prediction, name).shape == (7, *event)
    assert prediction.samples.shape == (5, 7, *event)
    assert prediction.log_prob(torch.ones(7, *event)).shape == (7,)
    if not likelihood.classes:
        assert all(bound.shape == (7, *event) for bound in prediction.interval(0.9))


def test_the_probabilities_have_one_column_per_class() -> None:
    posterior, X = posterior_of(pr.Categorical(), (), 3)
    prediction = posterior.predict(X[:7], samples=5)
    assert prediction.probs.shape == (7, 3)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(7).double(), **EXACT)
    assert prediction.entropy.shape == (7,)


def test_a_prediction_is_the_mixture_over_the_draws_of_the_posterior() -> None:
    posterior, X = posterior_of(pr.Gaussian(), (), 1)
    prediction = posterior.predict(X[:7], samples=5, seed=4)
    w = posterior.draw_for_prediction(5, stream(4, "predict"))
    named = posterior.model.layout.constrain(w)
    net = posterior.model.net
    outputs = torch.stack(
        [
            torch.func.functional_call(net, {k: v[s] for k, v in named.items() if k[:2] != "li"}, X[:7])[:, 0]
            for s in range(5)
        ]
    )
    torch.testing.assert_close(prediction.mean, outputs.mean(0), **EXACT)
    noise = named["likelihood.noise"]
    torch.testing.assert_close(prediction.aleatoric, noise.square().mean().expand(7), **EXACT)


@pytest.mark.parametrize("kind", ["dense", "convolution"])
@pytest.mark.parametrize("limit", [1, 100, 2_000, 10_000])
def test_chunks_under_a_memory_limit_give_the_same_prediction(limit: int, kind: str) -> None:
    posterior, X = posterior_of(pr.Gaussian(outputs=2), (2,), 2, kind)
    w = posterior.draw(6, torch.Generator().manual_seed(0))
    arguments = (posterior.model, [w], (X,), {}, torch.Size([2]), 0)
    whole, pieces = predict(*arguments), predict(*arguments, limit=limit)
    torch.testing.assert_close(pieces.outputs, whole.outputs, **EXACT)
    torch.testing.assert_close(pieces.variance, whole.variance, **EXACT)
    torch.testing.assert_close(pieces.quantile(0.3), whole.quantile(0.3), **EXACT)
    torch.testing.assert_close(pieces.samples, whole.samples, **EXACT)


@pytest.mark.parametrize(("likelihood", "event", "outputs"), [*CASES, (pr.Categorical(), (), 3)], ids=str)
def test_outputs_of_many_vectors_equal_those_of_each(
    likelihood: Likelihood, event: tuple[int, ...], outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batched matrix products, under vmap, and in a loop."""
    posterior, X = posterior_of(likelihood, event, outputs)
    network = posterior.model.network
    assert network.layer_chain
    chained = posterior.predict(X, samples=6)
    monkeypatch.setattr(network, "layer_chain", ())
    mapped = posterior.predict(X, samples=6)
    monkeypatch.setattr(network, "dense", False)
    monkeypatch.setattr(network, "functional", None)  # a loop doesn't use it
    looped = posterior.predict(X, samples=6)
    for together in (chained, mapped):
        torch.testing.assert_close(together.outputs, looped.outputs, **EXACT)
        torch.testing.assert_close(together.mean, looped.mean, **EXACT)
        torch.testing.assert_close(together.variance, looped.variance, **EXACT)


ACTIVATIONS = [*ELEMENTWISE_LAYERS, nn.Softmax, nn.PReLU, nn.Dropout]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.__name__)
def test_a_chain_gives_the_outputs_of_the_network_for_every_activation(activation: type[nn.Module]) -> None:
    """Also with a shared layer, a frozen layer, a layer without bias, and antithetic draws around a centre."""
    shared, frozen = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)
    arguments = {"dim": -1} if activation is nn.Softmax else {}
    layers = [nn.Linear(3, 5), activation(**arguments), shared, frozen, activation(**arguments), shared]
    net = nn.Sequential(*layers, nn.Identity(), nn.Linear(5, 2, bias=False)).to(torch.float64).eval()
    model, X = pr.Model(net, pr.Gaussian(0.5)), torch.randn(9, 3, dtype=torch.float64)
    w = model.network.initial + 0.3 * torch.randn(7, model.network.size, dtype=torch.float64)
    before, centre = X.clone(), model.network.initial
    mirrored = torch.cat([w, 2 * centre - w])
    assert bool(model.network.layer_chain) is (activation in ELEMENTWISE_LAYERS)
    kept = SharedInputs(
        centre
    )  # shared by several calls, as in a prediction in chunks; an odd chunk has no antithetic pairs
    for vectors, given in ((w, None), (mirrored, kept), (mirrored[[0, 1, 7, 8]], kept), (w, kept)):
        outputs = model.outputs(vectors, (X,), {}, torch.Size([2]), shared=given)
        assert torch.equal(X, before)
        for v, found in zip(vectors, outputs, strict=True):
            wanted = functional_call(copy.deepcopy(net), model.layout.constrain(v), (X,))
            torch.testing.assert_close(found, wanted, **EXACT)


def test_a_network_with_hooks_is_not_a_chain() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    net[0].register_forward_hook(lambda module, args, output: 2 * output)
    assert not pr.Model(net, pr.Gaussian()).network.layer_chain


def test_draws_of_a_prediction_are_antithetic_pairs_also_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, X = posterior_of(pr.Gaussian(), (), 1)
    w = posterior.draw_for_prediction(7, torch.Generator().manual_seed(0))
    torch.testing.assert_close(0.5 * (w[:3] + w[4:]), posterior.family.loc.expand(3, -1), **EXACT)
    whole = posterior.predict(X, samples=7)
    monkeypatch.setattr("priory.posteriors.base.BLOCK_ELEMENTS", 1)  # two draws per chunk
    pieces = posterior.predict(X, samples=7)
    assert pieces.outputs.shape == whole.outputs.shape
    assert len(pieces.outputs.unique(dim=0)) == 7
    assert torch.equal(pieces.outputs, posterior.predict(X, samples=7).outputs)


def test_the_same_seed_gives_the_same_prediction_and_another_seed_does_not() -> None:
    posterior, X = posterior_of(pr.Gaussian(), (), 1)
    one, two, other = (posterior.predict(X, samples=6, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.outputs, two.outputs)
    assert torch.equal(one.samples, two.samples)
    assert not torch.equal(one.outputs, other.outputs)
    assert not torch.equal(one.samples, other.samples)
    first, second = ((p.samples - p.outputs) / p.distribution.learnt["noise"][:, None] for p in (one, other))
    assert float((first - second).abs().min()) > 1e-8  # the noise differs too, not only the outputs


def test_samples_of_a_point_have_independent_noise_per_seed() -> None:
    """Moments of the noises and of their product over 2,000 rows, 5 comparisons at 5 standard errors: 2.9e-6."""
    target = posterior_of(pr.Gaussian(0.7), (), 1)[0].target
    point, X = Point(target, normal(target.size)), normal(2_000, 3)
    one, two, other = (point.predict(X, samples=1, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.outputs, other.outputs)
    assert torch.equal(one.samples, two.samples)
    first, second = (((p.samples - p.outputs) / 0.7).flatten() for p in (one, other))
    assert_mean_close(torch.stack([first, second], 1), 0.0)
    assert_covariance_close(torch.stack([first, second], 1), torch.eye(2))


def test_predict_takes_arrays_and_leaves_the_global_generator_and_the_network_unchanged() -> None:
    posterior, X = posterior_of(pr.Gaussian(), (), 1)
    net = posterior.model.net
    weights, before = [p.clone() for p in net.parameters()], torch.get_rng_state()
    prediction = posterior.predict(X.numpy(), samples=6)
    assert torch.equal(prediction.samples, posterior.predict(X, samples=6).samples)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))


def test_a_prediction_carries_no_gradient() -> None:
    posterior, X = posterior_of(pr.Gaussian(), (), 1)
    assert not posterior.predict(X, samples=3).mean.requires_grad


@pytest.mark.parametrize(
    ("x", "samples", "message"),
    [
        (torch.zeros(3, 4), 5, "The network must take the inputs"),
        (torch.full((3, 3), math.nan), 5, "must be finite"),
        (torch.zeros(0, 3), 5, "have one row or more"),
        (torch.zeros(3, 3), 0, "The 'samples' argument of predict must be an integer >= 1"),
        ([["a"]], 5, "numbers in a tensor or an array"),
    ],
)
def test_invalid_inputs_of_predict_are_refused(x: object, samples: int, message: str) -> None:
    posterior, _ = posterior_of(pr.Gaussian(), (), 1)
    with pytest.raises(pr.InputError, match=message):
        posterior.predict(x, samples=samples)


class Branches(nn.Module):
    """Branches on a value, which vmap doesn't support."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h if h.sum() > 0 else -h)


@pytest.mark.parametrize(
    "method",
    [
        pr.MeanField(),
        pr.SWAG(snapshots=4, rank=2, every=1),
        pr.Ensemble(size=2),
        pr.Ensemble(size=2, anchored="function"),
    ],
    ids=lambda method: type(method).__name__,
)
def test_predictions_of_a_network_that_vmap_refuses_run_in_a_loop_with_one_warning(method):
    X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    model = pr.Model(Branches(), pr.Gaussian(0.1), prior=1.0)
    with pytest.warns(pr.PrioryWarning, match="runs in a loop") as warned:
        outputs = pr.fit(model, (X, X[:, 0]), method, steps=4).predict(X[:5], samples=3).outputs
    assert len(warned) == 1
    assert outputs.shape[1:] == (5,)


def test_a_prediction_in_a_loop_has_the_outputs_of_each_draw():
    X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    model = pr.Model(Branches(), pr.Gaussian(0.1), prior=1.0)
    w = torch.stack([model.network.fresh(torch.Generator().manual_seed(seed)) for seed in range(3)])
    with pytest.warns(pr.PrioryWarning, match="runs in a loop"):
        outputs = model.outputs(w, (X,), {}, torch.Size())
    for v, found in zip(w, outputs, strict=True):
        wanted = torch.func.functional_call(model.net, model.layout.constrain(v), (X,))[:, 0]
        assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("draws", [2, 4, 64])
def test_the_epistemic_variance_is_unbiased_in_the_number_of_draws(draws: int) -> None:
    """4,000 predictions of S draws of N(0, 1): 5 standard errors (false alarms: 6e-7). Dividing by S gives 1 - 1/S."""
    outputs = torch.randn(draws, 4000, 1, generator=torch.Generator().manual_seed(draws), dtype=torch.float64)
    found = MixtureOfDraws(pr.Gaussian(0.5), outputs, {}, torch.Size([1]))
    epistemic = found.epistemic[:, 0]
    assert abs(float(epistemic.mean()) - 1) < 5 * float(epistemic.std()) / 4000**0.5
    torch.testing.assert_close(found.epistemic, outputs.var(0), rtol=1e-12, atol=0)


def test_one_draw_has_no_epistemic_variance() -> None:
    found = MixtureOfDraws(pr.Gaussian(0.5), torch.ones(1, 3, 1), {}, torch.Size([1]))
    assert torch.equal(found.epistemic, torch.zeros(3, 1))
