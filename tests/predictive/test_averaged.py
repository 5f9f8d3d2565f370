"""Averages of predictions: mixtures of their distributions, with weights from stacking or from the evidence."""

import math

import pytest
import torch
from scipy.optimize import brentq
from torch import nn

import priory as pr
from priory.analysis.stacking import best_weights
from priory.families import DiagonalFamily
from priory.posteriors import DiagonalGaussian, Mixture
from priory.testing.contract import classification


def points(weights, prior=1.0):
    """Return point posteriors of the lines y = w x, each fitted to its own data."""
    X = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    model = pr.Model(nn.Linear(1, 1, bias=False, dtype=torch.float64), pr.Gaussian(0.2), prior=prior)
    fits = [pr.fit(model, (X, w * X[:, 0]), pr.MAP(learning_rate=0.05), steps=400) for w in weights]
    return model, X, fits


def test_moments_and_densities_of_an_average_equal_those_of_the_mixture():
    _, X, fits = points([1.0, -0.5, 2.0])
    a = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    prediction = Mixture(fits, a).predict(X[:4])
    means = torch.stack([fit.predict(X[:4]).mean for fit in fits])
    mean = a @ means
    assert torch.allclose(prediction.mean, mean, atol=1e-12)
    assert torch.allclose(prediction.epistemic, a @ (means - mean).square(), atol=1e-12)
    assert torch.allclose(prediction.aleatoric, torch.full((4,), 0.04, dtype=torch.float64), atol=1e-12)
    y = torch.zeros(4, dtype=torch.float64)
    components = torch.distributions.Normal(means.T, 0.2)
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(a.expand(4, 3)), components)
    assert torch.allclose(prediction.log_prob(y), mixture.log_prob(y), atol=1e-12)
    low, high = prediction.interval(0.9)
    assert torch.allclose(mixture.cdf(high) - mixture.cdf(low), torch.full((4,), 0.9, dtype=torch.float64), atol=1e-9)
    assert prediction.samples.shape == (3, 4)


def test_disagreement_between_members_is_mutual_information():
    model, data = classification()
    fits = [pr.fit(model, data, pr.MeanField(), steps=10, seed=seed) for seed in range(2)]
    prediction = Mixture(fits).predict(data[0], samples=8)
    p = torch.cat(
        [part.means for part in prediction.distribution.parts]
    )  # equal weights, so one mixture over all draws

    def entropy(p):
        return -(p * p.log()).sum(-1)

    assert torch.allclose(prediction.mutual_information, entropy(p.mean(0)) - entropy(p).mean(0), atol=1e-6)


def test_a_mixture_has_the_mean_and_the_density_of_its_members():
    model, data = classification()
    fits = [pr.fit(model, data, pr.MeanField(), steps=10, seed=seed) for seed in range(2)]
    mixture = Mixture(fits, [0.25, 0.75])
    at = fits[0].sample(3, seed=0)
    each = torch.stack([fit.log_prob(at) for fit in fits])
    assert torch.allclose(mixture.log_prob(at), torch.logsumexp(each + torch.tensor([[0.25], [0.75]]).log(), 0))
    name = "0.weight"
    assert torch.allclose(mixture.mean[name], 0.25 * fits[0].mean[name] + 0.75 * fits[1].mean[name])
    assert mixture.sample(7)[name].shape == (7, 4, 2)


def test_stacking_finds_the_best_weights_and_drops_useless_members():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    scores[2] = scores[0] - 5  # always worse than the first
    a = best_weights(scores)

    def value(a):
        return torch.logsumexp(scores + a.log()[:, None], 0).mean()

    assert float(a[2]) == 0
    grid = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    best = max(float(value(torch.stack([g, 1 - g, 0 * g]))) for g in grid)
    assert float(value(a)) >= best - 1e-12
    assert abs(float(value(a)) - best) < 1e-5


def test_stacking_weights_two_lines_by_their_fractions_of_rows():
    _, X, fits = points([1.0, -1.0])
    y = X[:, 0].clone()
    y[::3] *= -1  # a third of the rows lie on the second line
    far = X[:, 0].abs() > 0.9
    mixture = pr.stack(fits, (X[far], y[far]))
    share = float((y[far] == X[far, 0]).double().mean())
    assert float(mixture.weights[0]) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("seed", [0, 3])
def test_stacking_scores_the_draws_of_the_given_seed(seed):
    """For two members, the weight is the root of the derivative of the mean log density, found by SciPy."""
    _, X, (one, two) = points([1.0, -1.0])
    scale = torch.full_like(one.w, -1.0)
    fits = [DiagonalGaussian(fit.target, DiagonalFamily(fit.w, scale)) for fit in (one, two)]
    y = X[:, 0].clone()
    y[::3] *= -1
    outputs = [fit.predict(X, samples=3, seed=seed).outputs for fit in fits]  # (S, n) each
    p = [torch.distributions.Normal(f, 0.2).log_prob(y).exp().mean(0) for f in outputs]
    best = brentq(lambda a: float(((p[0] - p[1]) / (a * p[0] + (1 - a) * p[1])).mean()), 1e-6, 1 - 1e-6, xtol=1e-14)
    found = pr.stack(fits, (X, y), samples=3, seed=seed).weights
    assert found.tolist() == pytest.approx([best, 1 - best], abs=1e-8)
    assert not torch.allclose(found, pr.stack(fits, (X, y), samples=3, seed=seed + 1).weights, rtol=0, atol=1e-6)


def test_averaging_by_evidence_follows_bayes_rule():
    X = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    y = 0.8 * X[:, 0]
    models = [pr.Model(nn.Linear(1, 1, bias=False, dtype=X.dtype), pr.Gaussian(0.3), prior=s) for s in (0.1, 1.0, 10.0)]
    fits = [pr.fit(model, (X, y), pr.Laplace("full", at=pr.MAP(learning_rate=0.05)), steps=400) for model in models]
    logs = torch.stack(
        [
            torch.distributions.MultivariateNormal(
                torch.zeros(20, dtype=X.dtype), 0.09 * torch.eye(20, dtype=X.dtype) + s**2 * X @ X.T
            ).log_prob(y)
            for s in (0.1, 1.0, 10.0)
        ]
    )
    assert torch.allclose(pr.average(fits).weights, torch.softmax(logs, 0), atol=1e-6)
    model_probabilities = torch.tensor([0.9, 0.05, 0.05], dtype=X.dtype)
    assert torch.allclose(
        pr.average(fits, model_probabilities.tolist()).weights,
        torch.softmax(logs + model_probabilities.log(), 0),
        atol=1e-6,
    )


@pytest.mark.parametrize("temperatures", [(1.0, 10.0), (10.0, 10.0)])
def test_tempered_evidence_is_refused(temperatures):
    X = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    model = pr.Model(nn.Linear(1, 1, dtype=X.dtype), pr.Gaussian(0.1), prior=1.0)
    last = pr.LastLayer(at="network")
    fits = [pr.fit(model, (X, X[:, 0].sin()), last, temperature=t) for t in temperatures]
    with pytest.raises(pr.InputError, match=r"must be fitted at temperature 1, .*got T = 10"):
        pr.average(fits)


def test_posteriors_of_different_networks_are_stacked_without_draws_and_files(tmp_path):
    _, X, (line, _) = points([1.0, 0.5])
    wide = pr.Model(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double(), pr.Gaussian(0.2))
    other = pr.fit(wide, (X, X[:, 0]), pr.MAP(), steps=50)
    mixture = pr.stack([line, other], (X, X[:, 0]))
    assert mixture.predict(X).mean.shape == (30,)
    for ask in (lambda: mixture.sample(2), lambda: mixture.mean, lambda: mixture.save(tmp_path / "m")):
        with pytest.raises(pr.InputError, match="A mixture over different models has no"):
            ask()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda fits: pr.stack([], None), "The 'posteriors' argument of stack must be a list of posteriors"),
        (
            lambda fits: pr.stack(fits, None),
            "The 'data' argument of stack must be inputs and targets, such as (X, y), or held-out rows, got None",
        ),
        (lambda fits: pr.stack(fits, torch.zeros(3, 1)), "The 'data' argument of stack must be inputs and targets"),
        (
            lambda fits: pr.stack(fits, (torch.zeros(3, 1), torch.zeros(2))),
            "The 'data' argument of stack must have the same number of rows in each part",
        ),
        (
            lambda fits: pr.average(fits, prior="a"),
            "The 'prior' argument of average must be 2 numbers >= 0, not all of them 0",
        ),
        (lambda fits: pr.average(fits[0]), "The 'posteriors' argument of average must be a list of posteriors"),
        (lambda fits: pr.average(fits), "gives no evidence"),
        (lambda fits: Mixture(fits, [0.5]), "The 'weights' argument of Mixture must be 2 numbers >= 0 that add"),
        (
            lambda fits: Mixture(fits, [0.9, 0.9]),
            "The 'weights' argument of Mixture must be 2 numbers >= 0 that add",
        ),
    ],
)
def test_invalid_arguments_are_refused(ask, message):
    _, _, fits = points([1.0, -1.0])
    with pytest.raises(pr.InputError) as error:
        ask(fits)
    assert message in str(error.value)


def test_a_row_with_zero_density_under_all_posteriors_is_named():
    with pytest.raises(pr.InputError, match="got row 1, which has none"):
        best_weights(torch.tensor([[0.0, -math.inf], [0.0, -math.inf]]))


def test_evidence_under_an_improper_prior_is_refused():
    X = torch.linspace(-1, 1, 20)[:, None]
    fits = [
        pr.fit(pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1), prior=prior), (X, X[:, 0]), pr.MeanField(), steps=20)
        for prior in ("flat", 1.0)
    ]
    with pytest.raises(pr.InputError, match="The 'posteriors' argument of average must have proper priors"):
        pr.average(fits)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_posteriors_of_different_dtypes_predict_in_the_wider_one(kinds):
    X = torch.linspace(-1, 1, 20)[:, None]
    fits = [
        pr.fit(pr.Model(nn.Linear(1, 1).to(kind), pr.Gaussian(0.1)), (X.to(kind), X[:, 0].to(kind)), pr.MAP(), steps=50)
        for kind in kinds
    ]
    prediction = Mixture(fits, [0.3, 0.7]).predict(X)
    wanted = sum(a * fit.predict(X).mean.double() for a, fit in zip((0.3, 0.7), fits, strict=True))
    assert torch.allclose(prediction.mean, wanted, rtol=1e-6)  # weights may be in float32
    assert prediction.std.dtype == prediction.log_prob(X[:, 0]).dtype == prediction.samples.dtype == torch.float64


def test_bernoulli_and_categorical_are_not_stacked():
    X, y = torch.linspace(-1, 1, 20)[:, None], torch.arange(20) // 10
    kinds = ((1, pr.Bernoulli()), (2, pr.Categorical()))
    fits = [pr.fit(pr.Model(nn.Linear(1, n), kind), (X, y), pr.MAP(), steps=20) for n, kind in kinds]
    with pytest.raises(pr.InputError, match="must predict means of one shape, which Bernoulli and Categorical don't"):
        pr.stack(fits, (X, y))
