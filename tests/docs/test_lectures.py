"""What the lectures say and the library does: the tests that docs/lectures.md points to.

Closed forms are compared in float64. Expectations under a Gaussian are Gauss-Hermite sums, exact for the
quadratics used here. A fit is compared with the optimum it should reach.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, MultivariateNormal, Normal, kl_divergence
from torch.distributions.constraints import unit_interval

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.estimators import elbo
from priory.families import DiagonalFamily
from priory.models.target import Target

F64 = torch.float64


def nodes(count: int = 40) -> tuple[Tensor, Tensor]:
    """Nodes and weights with sum_i w_i f(z_i) = E f(z) for z ~ N(0, 1)."""
    z, w = np.polynomial.hermite_e.hermegauss(count)
    return torch.tensor(z), torch.tensor(w / w.sum())


def expect(q: Normal, function) -> Tensor:
    """E_q f, for q with scalar location and scale."""
    z, w = nodes()
    return (w * function(q.loc + q.scale * z)).sum()


def normal(loc: float, scale: float) -> Normal:
    return Normal(torch.tensor(loc, dtype=F64), torch.tensor(scale, dtype=F64))


def spread(values: Tensor) -> float:
    """Largest minus smallest: zero for a constant."""
    return float(values.max() - values.min())


class Line:
    """Linear regression without bias: everything about it is known in closed form."""

    noise, scale, rows = 0.5, 1.2, 10

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.X = torch.randn(self.rows, 2, dtype=F64, generator=generator)
        self.y = self.X @ torch.tensor([1.0, -0.6], dtype=F64) + self.noise * torch.randn(
            self.rows, dtype=F64, generator=generator
        )
        self.net = nn.Linear(2, 1, bias=False, dtype=F64)
        nn.init.zeros_(self.net.weight)
        self.prior = normal(0.0, self.scale)
        self.model = self.with_prior(self.prior)

    def with_prior(self, prior) -> pr.Model:
        return pr.Model(self.net, pr.Gaussian(self.noise), prior=prior)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.X, self.y

    @property
    def target(self) -> Target:
        return Target(self.model, self.rows)

    @property
    def precision(self) -> Tensor:
        return self.X.T @ self.X / self.noise**2 + torch.eye(2, dtype=F64) / self.scale**2

    @property
    def posterior(self) -> MultivariateNormal:
        mean = torch.linalg.solve(self.precision, self.X.T @ self.y / self.noise**2)
        return MultivariateNormal(mean, precision_matrix=self.precision)

    @property
    def mean_field(self) -> Normal:
        """The closest product of Gaussians in KL(q || p): the mean, and the precision's diagonal."""
        return Normal(self.posterior.mean, self.precision.diagonal().rsqrt())

    @property
    def log_evidence(self) -> Tensor:
        covariance = self.noise**2 * torch.eye(self.rows, dtype=F64) + self.scale**2 * self.X @ self.X.T
        return MultivariateNormal(torch.zeros(self.rows, dtype=F64), covariance).log_prob(self.y)

    def expected_log_likelihood(self, q: Normal) -> Tensor:
        error = ((self.y - self.X @ q.loc) ** 2).sum() + (self.X**2 @ q.variance).sum()
        return -0.5 * error / self.noise**2 - self.rows * math.log(self.noise * math.sqrt(2 * math.pi))

    def elbo(self, q: Normal) -> Tensor:
        return self.expected_log_likelihood(q) - kl_divergence(q, self.prior).sum()

    def kl_to_posterior(self, q: Normal) -> Tensor:
        return kl_divergence(MultivariateNormal(q.loc, q.variance.diag()), self.posterior)


QS = [
    Normal(torch.tensor([0.2, 0.4], dtype=F64), torch.tensor([0.3, 0.8], dtype=F64)),
    Normal(torch.tensor([1.1, -0.7], dtype=F64), torch.tensor([0.1, 0.1], dtype=F64)),
    Normal(torch.tensor([-2.0, 0.0], dtype=F64), torch.tensor([1.0, 0.05], dtype=F64)),
]
WS = torch.tensor([[0.0, 0.0], [1.0, -0.5], [-0.3, 2.0], [4.0, 0.1]], dtype=F64)

# Bayes' rule


def test_the_log_joint_is_the_log_likelihood_plus_the_log_prior():
    line = Line()
    by_hand = Normal(WS @ line.X.T, line.noise).log_prob(line.y).sum(-1) + line.prior.log_prob(WS).sum(-1)
    joint, gradient = line.target.log_joint_and_grad(WS, line.data)
    torch.testing.assert_close(joint, by_hand, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        joint,
        line.target.log_likelihood(WS, Data.of(line.data)) + line.target.log_prior(WS),
        rtol=0,
        atol=1e-10,
    )
    torch.testing.assert_close(gradient, (line.posterior.mean - WS) @ line.precision, rtol=0, atol=1e-9)


def test_the_log_joint_differs_from_the_exact_posterior_by_the_log_evidence():
    line = Line()
    joint, _ = line.target.log_joint_and_grad(WS, line.data)
    apart = joint - line.posterior.log_prob(WS)
    torch.testing.assert_close(apart, line.log_evidence.expand(len(WS)), rtol=0, atol=1e-9)


def test_weight_decay_is_the_log_density_of_a_gaussian_prior():
    wd, count = 0.03, 40
    lam = wd * count  # the lecture's lambda: prior variance 1 / lambda
    w = torch.linspace(-2, 2, 7, dtype=F64)
    prior = pr.priors.weight_decay(wd, num_data=count)
    assert float(prior.variance) == pytest.approx(1 / lam, rel=1e-12)
    assert float(prior.mean) == 0
    assert spread(-prior.log_prob(w) - 0.5 * lam * w**2) < 1e-12


# Points


def test_map_is_the_mode_of_the_conjugate_posterior():
    line = Line()
    mode = (
        pr.fit(line.model, line.data, pr.MAP(learning_rate=0.03), steps=600, progress=False).mean["weight"].squeeze(0)
    )
    deviation = line.posterior.covariance_matrix.diagonal().sqrt()
    assert ((mode - line.posterior.mean) / deviation).abs().max() < 0.01


def test_map_under_a_flat_prior_is_maximum_likelihood():
    line = Line()
    fitted = (
        pr.fit(line.with_prior("flat"), line.data, pr.MAP(learning_rate=0.03), steps=600, progress=False)
        .mean["weight"]
        .squeeze(0)
    )
    least_squares = torch.linalg.lstsq(line.X, line.y.unsqueeze(-1)).solution.squeeze(-1)
    deviation = torch.linalg.inv(line.X.T @ line.X / line.noise**2).diagonal().sqrt()
    assert ((fitted - least_squares) / deviation).abs().max() < 0.01
    assert (
        (line.posterior.mean - least_squares) / deviation
    ).abs().max() > 0.05  # and it is not the mode under a prior


def test_the_loss_of_map_is_the_usual_loss_with_weight_decay():
    line = Line()
    wd = 0.07
    model = line.with_prior(pr.priors.weight_decay(wd, num_data=line.rows))
    history = pr.fit(model, line.data, pr.MAP(), steps=5, progress=False).history
    w = line.net.weight.detach().squeeze(0)  # the first step sees the weights as given
    nll = -Normal(line.X @ w, line.noise).log_prob(line.y).sum()
    penalty = 0.5 * wd * line.rows * (w**2).sum()
    normaliser = 2 * 0.5 * math.log(2 * math.pi / (wd * line.rows))
    assert history["nll"][0].item() == pytest.approx(nll.item(), abs=1e-9)
    assert history["loss"][0].item() == pytest.approx((nll + penalty).item() + normaliser, abs=1e-9)


# Divergences


def test_the_kl_of_two_gaussians_is_the_exercises_answer():
    q, p = normal(0.3, 0.5), normal(-0.8, 1.9)
    answer = 0.5 * (math.log(1.9**2 / 0.5**2) + (0.5**2 + 1.1**2) / 1.9**2 - 1)
    second_remark = math.log(1.9 / 0.5) + (0.5**2 + 1.1**2) / (2 * 1.9**2) - 0.5
    result = pr.kl(q, p)
    assert float(result.value) == pytest.approx(answer, abs=1e-12)
    assert answer == pytest.approx(second_remark, abs=1e-12)
    assert result.kind == "exact"


def test_the_seven_terms_of_the_exercise_add_up_to_the_kl():
    mq, sq, mp, sp = 0.3, 0.5, -0.8, 1.9
    q = normal(mq, sq)
    first, second = expect(q, lambda t: t).item(), expect(q, lambda t: t**2).item()
    assert first == pytest.approx(mq, abs=1e-12)  # the aside
    assert second == pytest.approx(sq**2 + mq**2, abs=1e-12)
    terms = [
        math.log(sp / sq),
        -second / (2 * sq**2),
        2 * first * mq / (2 * sq**2),
        -(mq**2) / (2 * sq**2),
        second / (2 * sp**2),
        -2 * first * mp / (2 * sp**2),
        mp**2 / (2 * sp**2),
    ]
    assert sum(terms) == pytest.approx(float(pr.kl(q, normal(mp, sp)).value), abs=1e-12)


def test_the_kl_is_the_integral_of_q_log_q_over_p():
    q, p = normal(0.3, 0.5), normal(-0.8, 1.9)
    grid = torch.linspace(-8, 8, 20_001, dtype=F64)
    integral = torch.trapezoid(q.log_prob(grid).exp() * (q.log_prob(grid) - p.log_prob(grid)), grid)
    assert float(pr.kl(q, p).value) == pytest.approx(integral.item(), abs=1e-10)
    few, other = torch.tensor([0.2, 0.5, 0.3], dtype=F64), torch.tensor([0.6, 0.1, 0.3], dtype=F64)
    summed = (few * (few / other).log()).sum()  # the sum over x of Q(x) log Q(x)/P(x)
    result = pr.kl(torch.distributions.Categorical(few), torch.distributions.Categorical(other))
    assert float(result.value) == pytest.approx(summed.item(), abs=1e-12)


def test_the_kl_from_q_to_p_is_not_the_kl_from_p_to_q():
    narrow, wide = normal(0.0, 0.5), normal(0.0, 2.0)
    assert float(pr.kl(narrow, wide).value) == pytest.approx(math.log(4) + 0.5 * (1 / 16 - 1), abs=1e-12)
    assert float(pr.kl(wide, narrow).value) == pytest.approx(-math.log(4) + 0.5 * (16 - 1), abs=1e-12)


def test_the_kl_to_a_centred_prior_has_the_three_terms_of_equation_8():
    lam = 2.5
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(6, 3, dtype=F64, generator=generator)
    sigma = torch.rand(6, 3, dtype=F64, generator=generator) + 0.1
    values = torch.stack(
        [pr.kl(Normal(m, s), normal(0.0, lam**-0.5)).value.sum() for m, s in zip(mu, sigma, strict=True)]
    )
    terms = (-sigma.log() + 0.5 * lam * sigma**2 + 0.5 * lam * mu**2).sum(-1)
    torch.testing.assert_close(
        values - terms, torch.full((6,), -1.5 * (1 + math.log(lam)), dtype=F64), rtol=0, atol=1e-12
    )


def test_at_fixed_scales_the_kl_is_the_penalty_of_the_mean():
    lam = 2.5
    mus = torch.linspace(-2, 2, 7, dtype=F64)
    values = torch.stack([pr.kl(normal(float(mu), 0.3), normal(0.0, lam**-0.5)).value.sum() for mu in mus])
    assert spread(values - 0.5 * lam * mus**2) < 1e-12


def test_figure_1_is_lowest_where_the_scale_is_the_priors():
    sigma = torch.linspace(0.05, 3, 60, dtype=F64)
    term = 0.5 * sigma**2 - sigma.log()  # lambda = 1
    assert sigma[term.argmin()].item() == pytest.approx(1.0, abs=1e-12)
    values = torch.stack([pr.kl(normal(0.0, float(s)), normal(0.0, 1.0)).value.sum() for s in sigma])
    torch.testing.assert_close(values, term - 0.5, rtol=0, atol=1e-12)
    assert values.min().item() == pytest.approx(0, abs=1e-12)


# The evidence and its bound


@pytest.mark.parametrize("q", QS, ids=range(3))
def test_no_q_has_an_elbo_above_the_log_evidence(q: Normal):
    line = Line()
    assert line.elbo(q) < line.log_evidence
    assert line.elbo(q) <= line.elbo(line.mean_field)


def test_the_elbo_and_the_kl_to_the_posterior_add_up_to_the_log_evidence():
    line = Line()
    for q in QS:  # the identity itself
        assert (line.elbo(q) + line.kl_to_posterior(q)).item() == pytest.approx(line.log_evidence.item(), abs=1e-9)
    fitted = pr.fit(line.model, line.data, pr.MeanField(learning_rate=0.03), steps=1000, progress=False)
    q = fitted_gaussian(fitted)
    evidence = fitted.log_evidence
    error = 4 * float(evidence.error) + 1e-9  # false alarm: 6e-5
    assert float(evidence.value) == pytest.approx(line.elbo(q).item(), abs=error)
    assert float(evidence.value) + line.kl_to_posterior(q).item() == pytest.approx(line.log_evidence.item(), abs=error)


def fitted_gaussian(posterior) -> Normal:
    """The factorised Gaussian of a MeanField posterior over one weight matrix, from its density alone."""
    loc = posterior.mean["weight"].reshape(-1)
    peak = posterior.log_prob({"weight": loc.reshape(1, -1)})
    aside = [
        posterior.log_prob({"weight": (loc + step).reshape(1, -1)}) for step in torch.eye(len(loc), dtype=loc.dtype)
    ]
    return Normal(loc, torch.stack([(2 * (peak - a)).rsqrt() for a in aside]).reshape(-1))


# Variational inference


def test_mean_field_reaches_the_closest_factorised_gaussian():
    line = Line()
    fitted = fitted_gaussian(
        pr.fit(line.model, line.data, pr.MeanField(learning_rate=0.03), steps=1000, progress=False)
    )
    assert ((fitted.loc - line.mean_field.loc) / line.mean_field.scale).abs().max() < 0.1
    assert (fitted.scale / line.mean_field.scale).log().abs().max() < 0.1
    assert line.elbo(line.mean_field) - line.elbo(fitted) < 0.02  # nats left


def test_mean_field_is_a_product_of_gaussians_one_per_weight():
    line = Line()
    posterior = pr.fit(line.model, line.data, pr.MeanField(), steps=50, progress=False)
    q = fitted_gaussian(posterior)
    weights = torch.tensor([[0.3, -1.0], [2.0, 0.0], [-1.0, 1.0]], dtype=F64)
    values = posterior.log_prob({"weight": weights.unsqueeze(1)})
    torch.testing.assert_close(values, q.log_prob(weights).sum(-1), rtol=0, atol=1e-8)
    draws = posterior.sample(4000)["weight"].squeeze(1)
    errors = q.scale / len(draws) ** 0.5
    assert ((draws.mean(0) - q.loc) / errors).abs().max() < 4.5  # false alarm: 1e-5
    assert (draws.T.corrcoef()[0, 1] * len(draws) ** 0.5).abs() < 4.5


def test_the_loss_is_the_negative_log_likelihood_plus_the_kl():
    line = Line()
    history = pr.fit(line.model, line.data, pr.MeanField(), steps=30, progress=False).history
    torch.testing.assert_close(history["loss"], history["nll"] + history["kl"], rtol=0, atol=1e-9)
    torch.testing.assert_close(history["elbo"], -history["loss"], rtol=0, atol=1e-9)
    assert {len(values) for values in history.values()} == {30}
    assert (history["kl"] > 0).all()


def test_the_labs_loss_is_twice_ours_at_unit_noise_and_unit_prior():
    line = Line()
    model = pr.Model(line.net, pr.Gaussian(1.0), prior=normal(0.0, 1.0))
    posterior = pr.fit(model, line.data, pr.MeanField(), steps=200, progress=False)
    q = fitted_gaussian(posterior)
    kl = pr.kl(q, normal(0.0, 1.0)).value.sum()
    for draw in posterior.sample(5)["weight"].squeeze(1):
        error = ((line.y - line.X @ draw) ** 2).sum()
        labs = -(1 + (q.scale**2).log() - q.loc**2 - q.scale**2).sum() + error
        nll = -Target(model, line.rows).log_likelihood(draw, Data.of(line.data))
        constant = line.rows * math.log(2 * math.pi)
        assert labs.item() == pytest.approx((2 * (nll + kl) - constant).item(), abs=1e-7)


def test_minibatches_times_n_over_m_average_to_the_whole_data():
    line = Line()
    whole, gradient = line.target.log_likelihood_and_grad(WS, line.data)
    batches = [tuple(t[rows] for t in line.data) for rows in (slice(0, 4), slice(4, 8), slice(8, 10))]
    sizes = torch.tensor([4.0, 4.0, 2.0], dtype=F64) / line.rows
    parts = [line.target.log_likelihood_and_grad(WS, batch) for batch in batches]
    torch.testing.assert_close(sum(s * v for s, (v, _) in zip(sizes, parts, strict=True)), whole, rtol=0, atol=1e-9)
    torch.testing.assert_close(sum(s * g for s, (_, g) in zip(sizes, parts, strict=True)), gradient, rtol=0, atol=1e-9)


def test_the_monte_carlo_loss_is_unbiased_over_minibatches_and_draws():
    line = Line()
    loc, scale = torch.tensor([0.2, 0.4], dtype=F64), torch.tensor([0.3, 0.8], dtype=F64)
    noise = torch.cartesian_prod(*2 * [torch.tensor([-1.0, 1.0], dtype=F64)])  # E of a quadratic, exactly
    subsets = torch.combinations(torch.arange(line.rows), 3)
    parts = [elbo(line.target, DiagonalFamily(loc, scale.log()), noise, (line.X[s], line.y[s])) for s in subsets]
    exact = Normal(loc, scale)
    losses = torch.stack([part.loss for part in parts])
    assert losses.mean().item() == pytest.approx(-line.elbo(exact).item(), abs=1e-9)
    assert spread(losses) > 10  # each alone is far from it
    nll = torch.stack([part.nll for part in parts]).mean()
    assert nll.item() == pytest.approx(-line.expected_log_likelihood(exact).item(), abs=1e-9)
    assert parts[0].kl.item() == pytest.approx(kl_divergence(exact, line.prior).sum().item(), abs=1e-10)


def test_a_draw_is_mean_plus_scale_times_noise_and_its_gradient_is_pathwise():
    q = DiagonalFamily(
        torch.tensor([0.2, 0.4], dtype=F64, requires_grad=True),
        torch.tensor([-1.0, 0.1], dtype=F64, requires_grad=True),
    )
    noise = torch.tensor([[0.5, -1.0], [2.0, 0.3]], dtype=F64)
    draws = q.draw(noise)
    torch.testing.assert_close(draws, q.loc + q.log_scale.exp() * noise)
    by_loc, by_log_scale = torch.autograd.grad((draws**2).sum(), (q.loc, q.log_scale))
    torch.testing.assert_close(by_loc, (2 * draws).sum(0))
    torch.testing.assert_close(by_log_scale, (2 * draws * q.scale * noise).sum(0))
    # E_q0[f(g(theta, eps))] = E_q[f(w)]: for f = w^2 both are m^2 + s^2.
    z, weights = nodes()
    moved = (weights.unsqueeze(-1) * q.draw(z.unsqueeze(-1).expand(-1, 2)) ** 2).sum(0)
    torch.testing.assert_close(moved, q.loc**2 + q.scale**2, rtol=0, atol=1e-10)


def test_algorithm_1_with_one_draw_and_minibatches_reaches_the_optimum():
    line = Line()
    fitted = fitted_gaussian(
        pr.fit(line.model, line.data, pr.MeanField(samples=1), steps=3000, batch_size=5, progress=False)
    )
    assert line.elbo(line.mean_field) - line.elbo(fitted) < 0.1  # nats left, of the 20 it began with
    start = Normal(line.net.weight.detach().squeeze(0), 0.1)
    assert line.elbo(line.mean_field) - line.elbo(start) > 5


def test_noise_enters_from_outside_so_the_same_seed_gives_the_same_fit():
    line = Line()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, same, other = (
        pr.fit(line.model, line.data, pr.MeanField(), steps=20, batch_size=4, seed=seed, progress=False).history["loss"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
    one, two = (stream(0, "noise") for _ in range(2))
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=two))


def test_the_fan_in_rule_is_the_prior_of_graves():
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 3)).double()
    layout = (model := pr.Model(net, pr.Gaussian(1.0), prior="fan_in")).layout
    for name, inputs in (("0.weight", 8), ("2.weight", 50)):
        block = layout[name]
        assert torch.allclose(1 / model.prior.precision[block.start : block.stop], torch.tensor(1 / inputs, dtype=F64))
        assert (model.prior.loc[block.start : block.stop] == 0).all()


def test_temperature_divides_the_kl_or_the_whole():
    line = Line()
    for tempers in ("likelihood", "posterior"):
        target = Target(line.model, line.rows, temperature=0.25, tempers=tempers)
        joint, _ = target.log_joint_and_grad(WS, line.data)
        likelihood, _ = line.target.log_likelihood_and_grad(WS, line.data)
        prior = line.target.log_prior(WS)
        torch.testing.assert_close(
            joint, 4 * likelihood + (prior if tempers == "likelihood" else 4 * prior), rtol=1e-12, atol=1e-9
        )
    # The volume element of a constrained parameter is no part of the density that is tempered.
    learnt = pr.Model(line.net, pr.Gaussian(), prior=normal(0.0, 1.0))
    w = torch.tensor([[0.3, -0.2, -0.7], [1.0, 0.5, 0.4]], dtype=F64)
    volume = learnt.layout.log_det(w)
    warm, _ = Target(learnt, line.rows).log_joint_and_grad(w, line.data)
    joint, _ = Target(learnt, line.rows, temperature=0.25, tempers="posterior").log_joint_and_grad(w, line.data)
    torch.testing.assert_close(joint - volume, 4 * (warm - volume), rtol=1e-12, atol=1e-9)
    assert volume.abs().min() > 0.1  # not zero, which would test nothing
    # A quarter of the temperature is a quarter of the noise variance: the optimum is known.
    cold = Line()
    cold.noise = line.noise / 2
    fitted = pr.fit(
        line.model, line.data, pr.MeanField(learning_rate=0.03), steps=1000, temperature=0.25, progress=False
    )
    assert (fitted_gaussian(fitted).scale / cold.mean_field.scale).log().abs().max() < 0.1
    history = fitted.history
    torch.testing.assert_close(history["loss"], history["nll"] + 0.25 * history["kl"], rtol=0, atol=1e-9)


# Predictions


def test_a_network_and_a_likelihood_give_a_distribution_over_y():
    net = nn.Linear(2, 3, dtype=F64)
    nn.init.zeros_(net.weight)
    X = Line().X
    labels = torch.arange(len(X)) % 3
    posterior = pr.fit(pr.Model(net, pr.Categorical()), (X, labels), pr.MAP(), steps=5, progress=False)
    prediction = posterior.predict(X)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(len(X), dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        prediction.log_prob(labels).exp(), prediction.probs[torch.arange(len(X)), labels], rtol=0, atol=1e-12
    )


def test_the_prediction_averages_the_likelihood_over_the_posterior():
    line = Line()
    posterior = pr.fit(line.model, line.data, pr.MeanField(), steps=300, progress=False)
    q = fitted_gaussian(posterior)
    X = torch.tensor([[1.0, 0.5], [-2.0, 1.0]], dtype=F64)
    y = torch.tensor([0.4, -4.0], dtype=F64)
    draws = 20_000
    prediction = posterior.predict(X, samples=draws)
    variance = X**2 @ q.variance
    exact = Normal(X @ q.loc, (variance + line.noise**2).sqrt())
    error = (variance / draws).sqrt()
    assert ((prediction.mean - exact.mean) / error).abs().max() < 4.5  # false alarm: 1e-5
    assert (prediction.epistemic / variance - 1).abs().max() < 4.5 * (2 / draws) ** 0.5
    torch.testing.assert_close(prediction.aleatoric, torch.full((2,), line.noise**2, dtype=F64))
    at_a_point = Normal(X @ q.loc, line.noise).log_prob(y)
    assert (prediction.log_prob(y) - exact.log_prob(y)).abs().max() < 0.02
    assert (at_a_point - exact.log_prob(y)).abs().max() > 0.1  # freezing the parameter is another number


def test_the_epistemic_variance_grows_away_from_the_data():
    line = Line()
    posterior = pr.fit(line.model, line.data, pr.MeanField(), steps=300, progress=False)
    q = fitted_gaussian(posterior)
    distances = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0], dtype=F64)
    X = distances.unsqueeze(-1) * torch.tensor([[0.6, 0.8]], dtype=F64)
    epistemic = posterior.predict(X, samples=200).epistemic
    assert (epistemic.diff() > 0).all()
    ratio = epistemic / (X**2 @ q.variance)
    assert spread(ratio) < 1e-10  # the same draws at every input: exactly quadratic in the distance
    assert posterior.predict(X).aleatoric.unique().numel() == 1


# Worked examples


def test_a_gaussian_is_fitted_to_a_given_density():
    density = pr.Density(lambda p: Normal(5.0, 2.0).log_prob(p["x"]), {"x": pr.Param()})
    posterior = pr.fit(density, None, pr.MeanField(learning_rate=0.05), steps=1000, progress=False)
    assert posterior.mean["x"].item() == pytest.approx(5.0, abs=0.2)
    draws = posterior.sample(20_000)["x"]
    assert draws.std().item() == pytest.approx(2.0, abs=0.2)


def test_the_coin_toss_comes_close_to_the_beta_posterior_from_below():
    heads, tails, a, b = 7, 3, 2.0, 2.0
    tosses = torch.tensor([1.0] * heads + [0.0] * tails, dtype=F64)
    prior, exact = Beta(torch.tensor(a, dtype=F64), b), Beta(torch.tensor(a + heads, dtype=F64), b + tails)
    coin = pr.Density(
        params={"p": pr.Param(support=unit_interval)},
        log_prior=lambda p: prior.log_prob(p["p"]),
        log_likelihood=lambda p, toss: Bernoulli(p["p"]).log_prob(toss),
    )

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    log_evidence = log_beta(a + heads, b + tails) - log_beta(a, b)
    posterior = pr.fit(coin, tosses, pr.MeanField(learning_rate=0.05), steps=600, progress=False)
    draws = posterior.sample(20_000)["p"]
    assert draws.mean().item() == pytest.approx(exact.mean.item(), abs=0.02)
    assert draws.std().item() == pytest.approx(exact.stddev.item(), abs=0.02)
    evidence = posterior.log_evidence
    error = 4 * float(evidence.error) + 1e-9
    assert log_evidence - 0.1 - error < float(evidence.value) < log_evidence + error
    mode = pr.fit(coin, tosses, pr.MAP(learning_rate=0.05), steps=400, progress=False).mean["p"]
    assert mode.item() == pytest.approx((a + heads - 1) / (a + b + heads + tails - 2), abs=1e-3)


def test_linear_regression_matches_the_conjugate_posterior_and_predictive():
    line = Line()
    line.X = torch.linalg.qr(line.X).Q * 4  # orthogonal inputs: the posterior factorises, and mean field can be exact
    posterior = pr.fit(line.model, line.data, pr.MeanField(learning_rate=0.03), steps=1000, progress=False)
    exact = line.posterior
    deviation = exact.covariance_matrix.diagonal().sqrt()
    q = fitted_gaussian(posterior)
    assert ((q.loc - exact.mean) / deviation).abs().max() < 0.1
    assert (q.scale / deviation).log().abs().max() < 0.1
    assert line.log_evidence - line.elbo(q) < 0.02
    X = torch.tensor([[1.0, 0.5], [-2.0, 1.0]], dtype=F64)
    prediction = posterior.predict(X, samples=4000)
    variance = (X @ exact.covariance_matrix * X).sum(-1) + line.noise**2
    assert ((prediction.mean - X @ exact.mean) / variance.sqrt()).abs().max() < 0.1
    assert (prediction.variance / variance).log().abs().max() < 0.1


def test_a_neural_network_learns_and_is_more_uncertain_outside_the_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-2, -0.7, 30), torch.linspace(0.7, 2, 30)]).unsqueeze(1)
    y = torch.sin(2 * x.squeeze(1)) + 0.05 * torch.randn(60, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    posterior = pr.fit(
        pr.Model(net, pr.Gaussian(0.05)), (x, y), pr.MeanField(learning_rate=0.03), steps=1000, progress=False
    )
    elbo = posterior.history["elbo"]
    assert elbo[-200:].mean() > elbo[:50].mean() + 1000
    prediction = posterior.predict(x, samples=200)
    assert (prediction.mean - y).square().mean().sqrt() < 0.1
    outside = posterior.predict(torch.tensor([[5.0]]), samples=200)
    assert outside.epistemic.item() > 4 * prediction.epistemic.mean().item()
