"""Predictions of a linearised network: exact for Gaussian noise, by links or draws for other likelihoods."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import Dirichlet, MultivariateNormal, Normal

import priory as pr
from priory import evaluate
from priory.likelihoods import Likelihood
from priory.predictive import Linearised, Prediction
from priory.testing import assert_covariance_close, assert_mean_close
from priory.testing.exact import LinearRegression

EXACT = {"rtol": 0, "atol": 1e-10}
LINKS = ["probit", "extended", "bridge"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def covariances(n: int, size: int, scale: float = 1.0, seed: int = 5) -> Tensor:
    root = normal(n, size, size + 2, seed=seed)
    return scale * root @ root.mT / (size + 2)


def make_prediction(
    likelihood: Likelihood,
    m: Tensor,
    v: Tensor,
    event: tuple[int, ...] = (),
    learnt: dict[str, Tensor] | None = None,
    **options: Any,
) -> Prediction:
    prepare = lambda y: likelihood.prepare(y, m.dtype)  # noqa: E731
    found = Linearised.of(likelihood, m, v, learnt or {}, torch.Size(event), **options)
    return Prediction.of(found, prepare)


# Gaussian noise: exact.


@pytest.mark.parametrize("shape", [(), (1,)])
def test_regression_is_the_exact_bayesian_linear_regression(shape: tuple[int, ...]) -> None:
    exact = LinearRegression.make()
    inputs, y = normal(7, 3, seed=1), normal(7, *shape, seed=2)
    design = exact.design(inputs)
    m, v = design @ exact.posterior.loc, (design @ exact.posterior.covariance_matrix * design).sum(-1)
    prediction = make_prediction(pr.Gaussian(exact.noise), m.reshape(7, *shape), v.reshape(7, 1, 1), shape)
    wanted = exact.predictive(inputs)
    loc, scale = wanted.loc.reshape(7, *shape), wanted.scale.reshape(7, *shape)
    torch.testing.assert_close(prediction.mean, loc, **EXACT)
    torch.testing.assert_close(prediction.std, scale, **EXACT)
    torch.testing.assert_close(prediction.epistemic, scale.square() - exact.noise**2, **EXACT)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(loc, exact.noise**2), **EXACT)
    torch.testing.assert_close(prediction.log_prob(y), Normal(loc, scale).log_prob(y).reshape(7), **EXACT)
    torch.testing.assert_close(prediction.cdf(y), Normal(loc, scale).cdf(y), **EXACT)
    for q, bound in zip((0.025, 0.975), prediction.interval(0.95), strict=True):
        np.testing.assert_allclose(bound, scipy.stats.norm.ppf(q, loc, scale), rtol=0, atol=1e-10)


def test_the_outputs_of_a_row_are_scored_together() -> None:
    m, v, y = normal(4, 3), covariances(4, 3), normal(4, 3, seed=1)
    noise = torch.tensor([0.3, 0.6, 1.1], dtype=torch.float64)
    wanted = MultivariateNormal(m, v + torch.diag(noise.square())).log_prob(y)
    for likelihood, learnt in (
        (pr.Gaussian(noise), {}),
        (pr.Gaussian(outputs=3), {"noise": noise}),
        (pr.Gaussian(outputs=3), {"noise": noise[None]}),
    ):
        prediction = make_prediction(likelihood, m, v, (3,), learnt)
        torch.testing.assert_close(prediction.log_prob(y), wanted, **EXACT)
        torch.testing.assert_close(prediction.variance, v.diagonal(dim1=1, dim2=2) + noise.square(), **EXACT)
        assert torch.equal(prediction.variance, prediction.epistemic + prediction.aleatoric)


def test_an_image_may_have_a_full_covariance_blocks_or_variances() -> None:
    m, y = normal(2, 2, 3), normal(2, 2, 3, seed=1)
    whole = covariances(2, 6)
    inside = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).double()
    blocks = torch.stack([whole[:, :3, :3], whole[:, 3:, 3:]], 1)  # (n, 2, 3, 3)
    variances = whole.diagonal(dim1=1, dim2=2).reshape(2, 2, 3)
    noise = 0.25 * torch.eye(6, dtype=torch.float64)
    for v, dense in ((whole, whole), (blocks, whole * inside), (variances, torch.diag_embed(variances.flatten(1)))):
        prediction = make_prediction(pr.Gaussian(0.5), m, v, (2, 3), samples=4000)
        wanted = MultivariateNormal(m.flatten(1), dense + noise)
        torch.testing.assert_close(prediction.log_prob(y), wanted.log_prob(y.flatten(1)), **EXACT)
        torch.testing.assert_close(prediction.epistemic, variances, **EXACT)
        # 21 comparisons at five standard errors: false alarm below 2e-5
        assert_covariance_close(prediction.samples[:, 0].flatten(1), wanted.covariance_matrix[0])


def test_samples_have_the_predictive_mean_and_covariance() -> None:
    m, v = normal(2, 3), covariances(2, 3)
    prediction = make_prediction(pr.Gaussian(0.5), m, v, (3,), samples=4000)
    assert prediction.samples.shape == prediction.outputs.shape == (4000, 2, 3)
    for row in range(2):  # 2 x (3 + 6 + 6) comparisons at five standard errors: false alarm below 2e-5
        assert_mean_close(prediction.outputs[:, row], m[row])
        assert_covariance_close(prediction.outputs[:, row], v[row])
        assert_covariance_close(prediction.samples[:, row], v[row] + 0.25 * torch.eye(3, dtype=torch.float64))


def test_the_mixture_over_draws_agrees_with_the_closed_form() -> None:
    m, v, y = normal(5), covariances(5, 1), normal(5, seed=1)
    exact = make_prediction(pr.Gaussian(0.5), m, v, samples=4000)
    f = exact.outputs
    densities = Normal(f, 0.5).log_prob(y).exp()
    # 10 comparisons at five standard errors: false alarm below 6e-6
    assert_mean_close(densities, exact.log_prob(y).exp())
    assert_mean_close(Normal(f, 0.5).cdf(y), exact.cdf(y))


def test_the_crps_is_close_to_that_of_the_exact_gaussian() -> None:
    m, v, y = normal(5), covariances(5, 1), normal(5, seed=1)
    prediction = make_prediction(pr.Gaussian(0.5), m, v, samples=400)
    wanted = evaluate.crps_gaussian_mixture(prediction.mean[None], prediction.std[None], y)
    assert evaluate.crps(prediction, y) == pytest.approx(wanted, abs=0.05)
    assert evaluate.rmse(prediction, y) == pytest.approx(float((m - y).square().mean().sqrt()), abs=1e-12)
    assert 0 <= evaluate.calibration_error(prediction, y) <= 1


# Labels: links in closed form.


def integral(m: Tensor, v: Tensor) -> Tensor:
    """Return E[sigmoid(f)] for f ~ N(m, v), by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    f = m[..., None] + v.sqrt()[..., None] * torch.from_numpy(nodes)
    return (torch.sigmoid(f) * torch.from_numpy(weights)).sum(-1) / math.sqrt(2 * math.pi)


def test_the_error_of_the_probit_link_is_at_most_that_of_the_sigmoid() -> None:
    m, v = torch.meshgrid(
        torch.linspace(-6, 6, 25).double(), torch.tensor([0.01, 0.1, 1.0, 4.0, 16.0]).double(), indexing="ij"
    )
    for link in ("probit", "extended"):
        p = make_prediction(pr.Bernoulli(), m.flatten(), v.reshape(-1, 1, 1), link=link).probs
        off = (p - integral(m.flatten(), v.flatten())).abs()
        assert float(off.max()) < 0.018  # max |Phi(x) - sigmoid(x sqrt(8 / pi))| = 0.0177, approached as v grows
        assert float(off.reshape(m.shape)[:, :3].max()) < 5e-3
    torch.testing.assert_close(p[0], torch.sigmoid(m[0, 0] / math.sqrt(1 + math.pi * 0.01 / 8)), rtol=0, atol=1e-8)


def test_the_probit_of_classes_is_the_softmax_of_moderated_logits() -> None:
    m, v = normal(4, 3), covariances(4, 3)
    moderated = m / torch.sqrt(1 + math.pi * v.diagonal(dim1=1, dim2=2) / 8)
    prediction = make_prediction(pr.Categorical(), m, v, link="probit")
    torch.testing.assert_close(prediction.probs, moderated.softmax(-1), **EXACT)


def test_the_extended_probit_follows_its_formula_and_depends_only_on_differences() -> None:
    m, v = normal(4, 3), covariances(4, 3)
    wanted = torch.zeros(4, 3, dtype=torch.float64)
    for n in range(4):
        for c in range(3):
            spread = [v[n, c, c] + v[n, k, k] - 2 * v[n, c, k] for k in range(3)]
            terms = [torch.exp(-(m[n, c] - m[n, k]) / (1 + math.pi / 8 * spread[k]).sqrt()) for k in range(3)]
            wanted[n, c] = 1 / sum(terms)
    wanted /= wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(make_prediction(pr.Categorical(), m, v, link="extended").probs, wanted, **EXACT)
    shifted = make_prediction(pr.Categorical(), m + 3, v + 7, link="extended")  # the same shift of every logit
    torch.testing.assert_close(shifted.probs, wanted, **EXACT)


def test_the_extended_probit_of_two_classes_is_the_probit_of_their_difference() -> None:
    m, v = normal(6, 2), covariances(6, 2, 4.0)
    classes = make_prediction(pr.Categorical(), m, v, link="extended").probs[:, 1]
    difference = (v[:, 0, 0] + v[:, 1, 1] - 2 * v[:, 0, 1])[:, None, None]
    yes = make_prediction(pr.Bernoulli(), m[:, 1] - m[:, 0], difference, link="probit").probs
    torch.testing.assert_close(classes, yes, **EXACT)


def laplace_of_dirichlet(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return mode and covariance of a Dirichlet over logits that sum to zero."""
    classes = alpha.shape[-1]
    plane = torch.eye(classes, dtype=torch.float64) - 1 / classes
    log_density = lambda z: (alpha * torch.log_softmax(z, -1)).sum()  # noqa: E731 - includes the volume element of softmax
    m = alpha.log() @ plane
    curvature = -torch.func.jacrev(torch.func.jacrev(log_density))(m)
    return m, torch.linalg.pinv(plane @ curvature @ plane, hermitian=True)


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_the_bridge_recovers_a_dirichlet_from_its_laplace_approximation(shift: float) -> None:
    for counts in ([2.0, 5.0, 0.5], [30.0, 1.0, 4.0, 9.0, 2.0], [3.0, 8.0]):
        alpha = torch.tensor(counts, dtype=torch.float64)
        m, v = laplace_of_dirichlet(alpha)
        # a common shift of all logits has no effect
        prediction = make_prediction(pr.Categorical(), (m + shift)[None], (v + shift)[None], link="bridge")
        torch.testing.assert_close(prediction.probs[0], alpha / alpha.sum(), **EXACT)


def test_the_bridge_follows_the_formula_of_the_paper() -> None:
    m, v = normal(4, 3), covariances(4, 3)
    one = torch.ones(3, dtype=torch.float64)
    wanted = torch.zeros(4, 3, dtype=torch.float64)
    for n in range(4):
        total = one @ v[n] @ one
        mu = m[n] - v[n] @ one * (one @ m[n]) / total
        sigma = v[n] - torch.outer(v[n] @ one, one @ v[n]) / total
        wanted[n] = (1 - 2 / 3 + mu.exp() * (-mu).exp().sum() / 9) / sigma.diagonal()
    wanted /= wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(make_prediction(pr.Categorical(), m, v, link="bridge").probs, wanted, **EXACT)


def test_the_bridge_agrees_with_draws_for_a_concentrated_dirichlet() -> None:
    alpha = torch.tensor([60.0, 25.0, 90.0]).double()
    m, v = laplace_of_dirichlet(alpha)
    closed = make_prediction(pr.Categorical(), m[None], v[None], link="bridge").probs[0]
    drawn = make_prediction(pr.Categorical(), m[None], v[None], samples=4000)
    of_dirichlet = Dirichlet(alpha).variance
    assert (
        float((drawn.probs[0] - closed).abs().max()) < 5e-3
    )  # the error of the Laplace approximation is of order 1/alpha
    torch.testing.assert_close(drawn.epistemic[0], of_dirichlet, rtol=0.1, atol=0)


def test_the_bridge_of_a_binary_label_equals_that_of_two_classes() -> None:
    m, v = normal(5), covariances(5, 1, 4.0)
    yes = make_prediction(pr.Bernoulli(), m, v, link="bridge").probs
    torch.testing.assert_close(yes, torch.sigmoid(m), **EXACT)
    half = torch.tensor([-0.5, 0.5]).double()
    classes = make_prediction(pr.Categorical(), m[:, None] * half, v * torch.outer(half, half), link="bridge").probs
    torch.testing.assert_close(classes[:, 1], yes, **EXACT)


@pytest.mark.parametrize("link", ["samples", *LINKS])
def test_with_zero_variance_every_link_equals_the_likelihood(link: str) -> None:
    for likelihood, m in ((pr.Categorical(), normal(4, 3)), (pr.Bernoulli(), normal(4))):
        prediction = make_prediction(likelihood, m, torch.zeros(4, m[0].numel(), m[0].numel()).double(), link=link)
        torch.testing.assert_close(prediction.probs, likelihood.mean(m, {}), **EXACT)
        torch.testing.assert_close(prediction.mutual_information, torch.zeros(4).double(), **EXACT)


def test_a_common_variance_of_all_logits_does_not_change_the_probabilities() -> None:
    m, together = normal(4, 3), torch.full((4, 3, 3), 5.0, dtype=torch.float64)
    for link in ("samples", "extended", "bridge"):
        prediction = make_prediction(pr.Categorical(), m, together, link=link)
        torch.testing.assert_close(prediction.probs, m.softmax(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("link", LINKS)
def test_a_closed_form_link_has_every_property_of_a_prediction(link: str) -> None:
    m, v, y = normal(5, 3), covariances(5, 3), torch.tensor([0, 2, 1, 1, 0])
    prediction = make_prediction(pr.Categorical(), m, v, link=link)
    p = prediction.probs
    torch.testing.assert_close(p.sum(-1), torch.ones(5).double(), **EXACT)
    torch.testing.assert_close(prediction.log_prob(y), p[torch.arange(5), y].log(), **EXACT)
    torch.testing.assert_close(prediction.log_prob(y[:, None]), p[torch.arange(5), y].log(), **EXACT)
    torch.testing.assert_close(prediction.entropy, torch.special.entr(p).sum(-1), **EXACT)
    torch.testing.assert_close(prediction.variance, p * (1 - p), **EXACT)
    assert bool((prediction.epistemic >= 0).all())
    assert bool((prediction.aleatoric >= 0).all())
    assert bool((prediction.mutual_information > 0).all())
    assert prediction.samples.shape == (64, 5)
    assert 0 <= evaluate.accuracy(prediction, y) <= 1
    with pytest.raises(pr.InputError, match="no quantiles"):
        prediction.quantile(0.5)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("spread", [1e-4, 1.0, 100.0])
def test_the_mutual_information_of_a_closed_form_link_is_at_most_its_entropy(link: str, spread: float) -> None:
    for likelihood, m in ((pr.Categorical(), 3 * normal(40, 3)), (pr.Bernoulli(), 3 * normal(40))):
        prediction = make_prediction(likelihood, m, covariances(40, m[0].numel(), spread), link=link)
        assert bool((prediction.mutual_information >= 0).all())
        assert bool((prediction.mutual_information <= prediction.entropy).all())


def test_the_mutual_information_of_the_probit_is_its_entropy_minus_the_mean_entropy() -> None:
    """The mean over N(m, V) is computed by quadrature; the error of the probit and of 4,000 draws is within 10 %."""
    m, v = torch.tensor([-1.0, 0.0, 2.0]).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    prediction = make_prediction(pr.Bernoulli(), m, v[:, None, None], link="probit", samples=4000)
    x = torch.linspace(-10, 10, 20001, dtype=torch.float64)[:, None]
    p = torch.sigmoid(m + v.sqrt() * x)
    weight = torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi) * 1e-3
    within = (weight * (torch.special.entr(p) + torch.special.entr(1 - p))).sum(0)
    torch.testing.assert_close(prediction.mutual_information, prediction.entropy - within, rtol=0.1, atol=0)


@pytest.mark.parametrize("link", LINKS)
def test_large_logits_and_variances_stay_finite(link: str) -> None:
    m, v = 1e3 * normal(4, 3), covariances(4, 3, 1e6)
    for dtype in (torch.float32, torch.float64):
        prediction = make_prediction(pr.Categorical(), m.to(dtype), v.to(dtype), link=link)
        assert prediction.probs.dtype == dtype
        assert bool(torch.isfinite(prediction.log_prob(torch.tensor([0, 1, 2, 0]))).all())


@pytest.mark.parametrize("link", LINKS)
def test_dense_labels_accept_each_form_of_the_covariance(link: str) -> None:
    m, y = normal(2, 4, 3), torch.randint(0, 3, (2, 4), generator=torch.Generator().manual_seed(0))
    whole = covariances(2, 12)
    blocks = torch.stack([whole[:, i : i + 3, i : i + 3] for i in range(0, 12, 3)], 1)
    variances = whole.diagonal(dim1=1, dim2=2).reshape(2, 4, 3)
    alone = make_prediction(pr.Categorical(), m.reshape(8, 3), blocks.reshape(8, 3, 3), link=link)
    for v in (whole, blocks):
        prediction = make_prediction(pr.Categorical(), m, v, (4,), link=link)
        torch.testing.assert_close(prediction.probs, alone.probs.reshape(2, 4, 3), **EXACT)
        torch.testing.assert_close(prediction.log_prob(y), alone.log_prob(y.flatten()).reshape(2, 4).sum(1), **EXACT)
        torch.testing.assert_close(prediction.entropy, alone.entropy.reshape(2, 4).sum(1), **EXACT)
        assert prediction.mutual_information.shape == (2,)
        assert prediction.samples.shape == (64, 2, 4)
    diagonal = make_prediction(pr.Categorical(), m, variances, (4,), link=link)
    apart = make_prediction(pr.Categorical(), m, torch.diag_embed(variances), (4,), link=link)
    torch.testing.assert_close(diagonal.probs, apart.probs, **EXACT)


def test_several_binary_labels_are_moderated_separately() -> None:
    m, v, y = normal(4, 3), covariances(4, 3), (normal(4, 3, seed=1) > 0).double()
    prediction = make_prediction(pr.Bernoulli(), m, v, (3,), link="probit")
    p = torch.sigmoid(m / torch.sqrt(1 + math.pi * v.diagonal(dim1=1, dim2=2) / 8))
    torch.testing.assert_close(prediction.probs, p, **EXACT)
    torch.testing.assert_close(prediction.log_prob(y), torch.where(y > 0, p, 1 - p).log().sum(-1), **EXACT)


# Draws of the outputs.


def test_the_samples_link_agrees_with_quadrature() -> None:
    m, v = normal(5), covariances(5, 1, 3.0)
    prediction = make_prediction(pr.Bernoulli(), m, v, samples=4000)
    # 5 comparisons at five standard errors: false alarm below 3e-6
    assert_mean_close(torch.sigmoid(prediction.outputs), integral(m, v[:, 0, 0]))
    torch.testing.assert_close(prediction.probs, torch.sigmoid(prediction.outputs).mean(0), **EXACT)


@pytest.mark.parametrize("name", ["poisson", "student", "gaussian network", "categorical", "bernoulli"])
def test_the_samples_link_is_the_mixture_over_its_draws(name: str) -> None:
    likelihood, rest, learnt = {
        "poisson": (pr.Poisson(), (), {}),
        "student": (pr.StudentT(5.0), (), {"scale": torch.tensor(0.7).double()}),
        "gaussian network": (pr.Gaussian("network"), (2,), {}),
        "categorical": (pr.Categorical(), (3,), {}),
        "bernoulli": (pr.Bernoulli(), (), {}),
    }[name]
    size = max(1, math.prod(rest))
    linear = make_prediction(likelihood, normal(4, *rest), covariances(4, size, 0.3), learnt=learnt, samples=16, seed=3)
    own = {key: value.expand(16) for key, value in learnt.items()}
    mixture = Prediction.of_draws(likelihood, linear.outputs, own, linear.event, linear.prepare, 3)
    y = linear.samples[0]
    names = ["mean", "variance", "epistemic", "aleatoric", "std", "samples"]
    for each in names + (["probs", "entropy", "mutual_information"] if likelihood.classes else []):
        torch.testing.assert_close(getattr(linear, each), getattr(mixture, each), **EXACT)
    torch.testing.assert_close(linear.log_prob(y), mixture.log_prob(y), **EXACT)
    if not likelihood.classes:
        torch.testing.assert_close(linear.quantile(0.3), mixture.quantile(0.3), **EXACT)
        torch.testing.assert_close(linear.cdf(y), mixture.cdf(y), **EXACT)


def test_the_mean_of_a_poisson_rate_is_that_of_a_log_normal() -> None:
    m, v = normal(3), covariances(3, 1, 0.2)
    prediction = make_prediction(pr.Poisson(), m, v, samples=4000)
    # 3 comparisons at five standard errors: false alarm below 2e-6
    assert_mean_close(prediction.outputs.exp(), (m + v[:, 0, 0] / 2).exp())


def test_the_same_seed_gives_the_same_draws_and_another_seed_does_not() -> None:
    m, v = normal(3, 2), covariances(3, 2)
    first, again, other = (make_prediction(pr.Categorical(), m, v, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.outputs, again.outputs)
    assert not torch.equal(first.outputs, other.outputs)


def test_a_copy_with_another_likelihood_keeps_the_other_fields() -> None:
    prediction = make_prediction(pr.Gaussian(0.5), normal(3), covariances(3, 1), samples=8, seed=2)
    distribution: Any = prediction.distribution
    wider = Prediction.of(dataclasses.replace(distribution, likelihood=pr.Gaussian(1.0)), prediction.prepare)
    torch.testing.assert_close(wider.variance - prediction.variance, torch.full((3,), 0.75).double(), **EXACT)
    assert torch.equal(wider.outputs, prediction.outputs)


# Numerics.


def test_draws_of_a_singular_covariance_stay_in_its_range() -> None:
    direction = torch.tensor([1.0, -2.0, 0.5])
    for dtype in (torch.float32, torch.float64):
        v = torch.outer(direction, direction).to(dtype)
        drawn = make_prediction(pr.Categorical(), torch.zeros(1, 3, dtype=dtype), v[None]).outputs[:, 0]
        across = torch.tensor([2.0, 1.0, 0.0], dtype=dtype)
        assert float((drawn @ across).abs().max()) < 10 * torch.finfo(dtype).eps ** 0.25
        assert float(drawn.std(0)[1]) > 1


# Invalid arguments.


def test_invalid_arguments_are_refused() -> None:
    m, v = normal(4, 3), covariances(4, 3)
    likelihood = pr.Categorical()
    for call, text in (
        (
            lambda: make_prediction(likelihood, m, v, samples=0),
            "'samples' argument of Linearised must be an integer >= 1, got 0",
        ),
        (
            lambda: make_prediction(likelihood, m, v, link="logit"),
            "'link' argument of Linearised must be among samples, .*got 'logit'",
        ),
        (
            lambda: make_prediction(pr.Poisson(), m, v, (3,), link="probit"),
            r"'link' argument of Linearised must be 'samples' for Poisson\(\), whose targets are numbers, got 'probit'",
        ),
        (
            lambda: make_prediction(likelihood, m, v[:, :2, :2]),
            r"'covariance' argument of Linearised must have the shape \(4, 3, 3\) or \(4, 3\), got the shape "
            r"\(4, 2, 2\)",
        ),
        (
            lambda: make_prediction(likelihood, m, v * math.nan),
            "'covariance' argument of Linearised must be finite, got NaN",
        ),
        (lambda: make_prediction(likelihood, m / 0, v), "'mean' argument of Linearised must be finite"),
        (
            lambda: make_prediction(likelihood, m, -v).probs,
            "'covariance' argument of Linearised must be positive semi-definite",
        ),
        (lambda: make_prediction(likelihood, m, v).log_prob(torch.zeros(3).long()), r"must have the shape \(4,\)"),
        (lambda: make_prediction(likelihood, m, v).log_prob(torch.full((4,), 3)), "labels below 3"),
        (
            lambda: make_prediction(pr.Gaussian(1.0), m, v, (3,)).quantile(1.0),
            "'q' argument of quantile must lie between 0 and 1",
        ),
        (
            lambda: make_prediction(pr.Gaussian(1.0), m, v, (3,)).interval(0),
            "'level' argument of interval must lie between 0 and 1",
        ),
        (lambda: make_prediction(pr.Gaussian(1.0), m, v, (3,)).probs, "needs labels"),
    ):
        with pytest.raises(pr.InputError, match=text):
            call()


def test_the_repr_says_how_the_prediction_is_computed() -> None:
    m, v = normal(4), covariances(4, 1)
    assert repr(make_prediction(pr.Gaussian(0.5), m, v)) == "RegressionPrediction(4 rows, exact, Gaussian(noise=0.5))"
    assert repr(make_prediction(pr.Poisson(), m, v, samples=8)) == "CountPrediction(4 rows, 8 draws, Poisson())"
    assert repr(make_prediction(pr.Bernoulli(), m, v, link="probit")) == "ClassPrediction(4 rows, probit, Bernoulli())"
