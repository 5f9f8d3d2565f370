"""Every row of docs/errata.md: the right form holds in float64, and the form as printed does not.

Expectations under a Gaussian are Gauss-Hermite sums, exact for the polynomials used here, so nothing below is
sampled unless it says so.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gumbel, Normal, kl_divergence

import priory as pr

F64 = torch.float64


def nodes(count: int = 80) -> tuple[Tensor, Tensor]:
    """Nodes and weights with sum_i w_i f(z_i) = E f(z) for z ~ N(0, 1)."""
    z, w = np.polynomial.hermite_e.hermegauss(count)
    return torch.tensor(z), torch.tensor(w / w.sum())


def expect(q: Normal, function) -> Tensor:
    """E_q f, for q with scalar location and scale."""
    z, w = nodes()
    return (w * function(q.loc + q.scale * z)).sum()


def normal(loc: float, scale: float) -> Normal:
    return Normal(torch.tensor(loc, dtype=F64), torch.tensor(scale, dtype=F64))


def spread(values: list[Tensor]) -> float:
    """Largest minus smallest: zero for a constant."""
    stacked = torch.stack(values)
    return float(stacked.max() - stacked.min())


class Conjugate:
    """y_n ~ N(w, s^2), w ~ N(0, t^2): posterior, evidence and expected log-likelihood in closed form."""

    y = torch.tensor([0.3, 1.9, -0.4, 1.1, 0.8], dtype=F64)
    noise = 0.7
    prior = normal(0.0, 1.5)

    @property
    def posterior(self) -> Normal:
        precision = 1 / self.prior.variance + len(self.y) / self.noise**2
        return Normal(self.y.sum() / self.noise**2 / precision, precision**-0.5)

    @property
    def log_evidence(self) -> Tensor:
        n = len(self.y)
        covariance = self.noise**2 * torch.eye(n, dtype=F64) + self.prior.variance * torch.ones(n, n, dtype=F64)
        return torch.distributions.MultivariateNormal(torch.zeros(n, dtype=F64), covariance).log_prob(self.y)

    def log_likelihood(self, w: Tensor) -> Tensor:
        return Normal(w.unsqueeze(-1), self.noise).log_prob(self.y).sum(-1)

    def loss(self, q: Normal) -> Tensor:
        """E_q[-log p(D|w)] + KL(q || p(w))."""
        return -expect(q, self.log_likelihood) + kl_divergence(q, self.prior)


QS = [normal(0.2, 0.3), normal(-0.7, 0.9), normal(1.4, 0.15)]


class Mixture:
    """Two Gaussian components and seven values, with the joint log p(y_n, z) as a table (n, z)."""

    y = torch.tensor([4.3, 6.0, 7.2, 3.9, 4.8, 6.6, 5.1], dtype=F64)
    theta = torch.tensor([0.4, 4.0, 6.5, 0.8, 0.6], dtype=F64)  # pi, mu_1, mu_2, sigma_1, sigma_2

    def joint(self, theta: Tensor) -> Tensor:
        weight = torch.stack([theta[0], 1 - theta[0]])
        return weight.log() + Normal(theta[1:3], theta[3:5], validate_args=False).log_prob(self.y.unsqueeze(-1))

    def log_likelihood(self, theta: Tensor) -> Tensor:
        return self.joint(theta).logsumexp(-1).sum()

    def responsibilities(self, theta: Tensor) -> Tensor:
        return self.joint(theta).softmax(-1)

    def bound(self, q: Tensor, theta: Tensor) -> Tensor:
        return (q * (self.joint(theta) - q.log())).sum()


# Explaining approximation of parameter posterior


def test_half_lambda_w_squared_is_the_penalty_of_prior_variance_one_over_lambda():
    lam = 2.5
    w = torch.linspace(-2, 2, 9, dtype=F64)
    minus_log_prior = -normal(0.0, lam**-0.5).log_prob(w)
    assert spread(list(minus_log_prior - 0.5 * lam * w**2)) < 1e-14
    assert spread(list(-normal(0.0, (2 * lam) ** -0.5).log_prob(w) - lam * w**2)) < 1e-14
    assert spread(list(minus_log_prior - lam * w**2)) == pytest.approx(0.5 * lam * 4)


@pytest.mark.parametrize("q", QS, ids=str)
def test_the_constant_of_the_kl_objective_is_the_log_evidence_and_stands_in_the_second_line(q: Normal):
    problem = Conjugate()
    divergence = kl_divergence(q, problem.posterior)
    first_line = expect(q, lambda w: q.log_prob(w) - problem.posterior.log_prob(w))
    assert torch.isclose(first_line, divergence, rtol=0, atol=1e-10)  # no constant is missing
    assert torch.isclose(problem.loss(q) + problem.log_evidence, divergence, rtol=0, atol=1e-10)
    assert abs(problem.loss(q) - divergence) > 5  # the second line as printed


def test_the_sum_over_weights_covers_all_three_terms_of_the_gaussian_kl():
    lam = 2.5
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(6, 3, dtype=F64, generator=generator)
    sigma = torch.rand(6, 3, dtype=F64, generator=generator) + 0.1
    divergence = kl_divergence(Normal(mu, sigma), normal(0.0, lam**-0.5)).sum(-1)
    right = (-sigma.log() + 0.5 * lam * sigma**2 + 0.5 * lam * mu**2).sum(-1)
    printed = -sigma.log().sum(-1) + 0.5 * lam * sigma[:, 0] ** 2 + 0.5 * lam * mu[:, 0] ** 2
    assert spread(list(divergence - right)) < 1e-12
    assert spread(list(divergence - printed)) > 1


# Approximate Inference for Neural Networks


def test_one_q_for_every_datum_reaches_the_evidence_and_a_shared_q_stays_nats_below():
    problem = Mixture()
    evidence = problem.log_likelihood(problem.theta)
    own = problem.bound(problem.responsibilities(problem.theta), problem.theta)
    shared = problem.joint(problem.theta).mean(0).softmax(-1)  # the best q(z) that knows no n
    below = problem.bound(shared.expand(len(problem.y), 2), problem.theta)
    nudge = torch.tensor([0.02, -0.02], dtype=F64)
    for other in (shared + nudge, shared - nudge):
        assert problem.bound(other.expand(len(problem.y), 2), problem.theta) < below
    assert torch.isclose(own, evidence, rtol=0, atol=1e-12)
    assert evidence - below > 5


def test_the_entropy_term_of_the_em_bound_is_summed_over_the_data_too():
    problem = Mixture()
    theta, q = problem.theta, problem.responsibilities(problem.theta)
    prior = torch.stack([theta[0], 1 - theta[0]])
    fit = (q * Normal(theta[1:3], theta[3:5]).log_prob(problem.y.unsqueeze(-1))).sum()
    divergences = (q * (prior / q).log()).sum(-1)  # minus KL(q_n || p(z)), one value per row
    evidence = problem.log_likelihood(theta)
    assert torch.isclose(fit + divergences.sum(), evidence, rtol=0, atol=1e-12)
    assert all(fit + one > evidence + 1 for one in divergences)  # with one term it is not even a bound
    joint = (q * problem.joint(theta)).sum()
    entropies = -(q * q.log()).sum(-1)
    assert torch.isclose(joint + entropies.sum(), evidence, rtol=0, atol=1e-12)
    assert all(abs(joint + one - evidence) > 0.1 for one in entropies)


def test_the_gradient_of_the_mixture_has_a_closed_form_and_its_root_has_none():
    problem = Mixture()
    theta = problem.theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.log_likelihood(theta), theta)
    r = problem.responsibilities(problem.theta)
    pi, mu, sigma = problem.theta[0], problem.theta[1:3], problem.theta[3:5]
    apart = problem.y.unsqueeze(-1) - mu
    fisher = torch.cat(
        [
            (r[:, 0] / pi - r[:, 1] / (1 - pi)).sum().unsqueeze(0),
            (r * apart / sigma**2).sum(0),
            (r * (apart**2 / sigma**3 - 1 / sigma)).sum(0),
        ]
    )
    assert torch.allclose(gradient, fisher, rtol=0, atol=1e-12)
    # Setting it to zero with r held gives the M step, which is no root: r moves with theta.
    moved = problem.theta.clone()
    moved[1:3] = (r * problem.y.unsqueeze(-1)).sum(0) / r.sum(0)
    moved.requires_grad_()
    (after,) = torch.autograd.grad(problem.log_likelihood(moved), moved)
    assert after[1:3].abs().max() > 0.01


def test_em_maximises_the_expected_log_joint_and_not_the_expected_joint():
    problem = Mixture()
    theta = torch.tensor([0.4, 4.0, 6.5, 0.4, 0.6], dtype=F64)
    r = problem.responsibilities(theta)
    grid = torch.linspace(2, 8, 6001, dtype=F64)
    tables = torch.vmap(lambda m: problem.joint(torch.cat([theta[:1], m.unsqueeze(0), theta[2:]])))(grid)
    of_log_joint = grid[(r * tables).sum((-1, -2)).argmax()]
    of_joint = grid[(r * tables.exp()).sum((-1, -2)).argmax()]
    m_step = (r[:, 0] * problem.y).sum() / r[:, 0].sum()
    assert abs(of_log_joint - m_step) < 1e-3  # the grid's step
    assert abs(of_joint - m_step) > 0.05


def test_the_monte_carlo_mean_does_not_weigh_its_draws_by_q_again():
    q, target = normal(0.4, 0.6), normal(1.0, 1.0)
    truth = expect(q, target.log_prob)
    closed = -0.5 * math.log(2 * math.pi) - 0.5 * (0.6**2 + 0.6**2)
    assert truth.item() == pytest.approx(closed, abs=1e-12)
    printed = expect(q, lambda w: q.log_prob(w).exp() * target.log_prob(w))  # what (1/M) sum q(w_m) log p converges to
    assert abs(printed - truth) > 0.5
    draws = q.loc + q.scale * torch.randn(10_000, dtype=F64, generator=torch.Generator().manual_seed(0))
    values = target.log_prob(draws)
    error = values.std() / len(draws) ** 0.5
    assert abs(values.mean() - truth) < 4 * error  # false alarm: 6e-5
    assert abs(values.mean() - printed) > 40 * error


def test_a_step_against_the_gradient_lowers_the_variational_loss_and_a_step_along_it_raises_it():
    problem = Conjugate()
    phi = torch.tensor([0.2, math.log(0.4)], dtype=F64, requires_grad=True)

    def loss(phi: Tensor) -> Tensor:
        return problem.loss(Normal(phi[0], phi[1].exp()))

    (gradient,) = torch.autograd.grad(loss(phi), phi)
    assert loss(phi - 1e-3 * gradient) < loss(phi) < loss(phi + 1e-3 * gradient)


def test_the_minibatch_size_and_the_number_of_draws_are_two_numbers():
    problem = Conjugate()
    q, n, draws = normal(0.2, 0.3), 2, 3
    count = len(problem.y)
    z, weights = nodes(draws)  # exact for the quadratic log-likelihood
    terms = Normal(q.loc + q.scale * z, problem.noise).log_prob(problem.y.unsqueeze(-1))  # (N, S)
    subsets = torch.combinations(torch.arange(count), n)
    right = torch.stack([count / n * (terms[s] * weights).sum() for s in subsets]).mean()
    truth = expect(q, problem.log_likelihood)
    assert torch.isclose(right, truth, rtol=0, atol=1e-12)
    one_number = torch.stack([count / draws * (terms[s] * weights).sum() for s in subsets]).mean()
    assert torch.isclose(one_number, truth * n / draws, rtol=0, atol=1e-12)
    assert abs(one_number - truth) > 1


def test_the_laplace_precision_is_the_summed_hessian_plus_the_prior_precision():
    problem = Conjugate()
    mode = problem.posterior.loc

    def hessian(function) -> Tensor:
        return torch.autograd.functional.hessian(function, mode)

    summed = hessian(lambda w: -problem.log_likelihood(w) - problem.prior.log_prob(w))
    exact = 1 / problem.posterior.variance
    assert torch.isclose(summed, exact, rtol=1e-12)
    average = hessian(lambda w: (-problem.log_likelihood(w) - problem.prior.log_prob(w)) / len(problem.y))
    assert torch.isclose(average, exact / len(problem.y), rtol=1e-12)
    without_prior = hessian(lambda w: -problem.log_likelihood(w))
    assert torch.isclose(exact - without_prior, 1 / problem.prior.variance, rtol=1e-10)


def test_the_kl_to_the_posterior_equals_the_loss_up_to_a_constant_and_not_up_to_a_factor():
    problem = Conjugate()
    divergences = [kl_divergence(q, problem.posterior) for q in QS]
    losses = [problem.loss(q) for q in QS]
    assert spread([d - loss for d, loss in zip(divergences, losses, strict=True)]) < 1e-10
    assert spread([d / loss for d, loss in zip(divergences, losses, strict=True)]) > 0.1


def test_one_hidden_layer_is_tractable_with_gaussian_noise_and_not_with_a_sigmoid():
    # f(x) = v relu(w x) with v ~ N(a, b^2), w ~ N(c, d^2) and x = 1.
    a, b, c, d, y, noise = 0.8, 0.5, 0.3, 0.9, 0.6, 0.7
    gate = Normal(0.0, 1.0).cdf(torch.tensor(c / d, dtype=F64))
    bump = Normal(0.0, 1.0).log_prob(torch.tensor(c / d, dtype=F64)).exp()
    mean = a * (c * gate + d * bump)
    square = (a**2 + b**2) * ((c**2 + d**2) * gate + c * d * bump)
    closed = -0.5 * math.log(2 * math.pi * noise**2) - (y**2 - 2 * y * mean + square) / (2 * noise**2)

    z, weights = nodes()
    steps = 40_000  # Simpson on w > 0, where relu is smooth; f = 0 on the rest, of mass 1 - gate
    w = torch.linspace(0, c + 12 * d, steps + 1, dtype=F64)
    simpson = torch.ones(steps + 1, dtype=F64)
    simpson[1:-1:2], simpson[2:-1:2] = 4, 2
    density = simpson * (c + 12 * d) / steps / 3 * normal(c, d).log_prob(w).exp()
    f = (a + b * z).unsqueeze(-1) * w

    def expected(function) -> Tensor:
        return (weights @ function(f)) @ density + (1 - gate) * function(torch.zeros(1, dtype=F64))[0]

    assert expected(torch.ones_like).item() == pytest.approx(1, abs=1e-10)
    assert expected(lambda f: Normal(f, noise).log_prob(torch.tensor(y, dtype=F64))).item() == pytest.approx(
        closed.item(), abs=1e-9
    )
    # The Gaussian case needs two moments of f. A sigmoid needs more: another law with the same two differs.
    same_moments = expect(normal(mean.item(), (square - mean**2).sqrt().item()), nn.functional.logsigmoid)
    assert abs(expected(nn.functional.logsigmoid) - same_moments) > 1e-3


# Variational Inference, the lab meeting


def test_the_labs_loss_is_twice_the_negative_elbo_only_at_noise_variance_one_with_the_error_summed():
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(20, dtype=F64, generator=generator)
    points = [torch.rand(5, dtype=F64, generator=generator) + 0.2 for _ in range(8)]  # m, s, s, m, prediction

    def labs(m: Tensor, s: Tensor, error: Tensor) -> Tensor:
        return -(1 + (s**2).log() - m**2 - s**2).sum() + error

    def elbo_apart(noise_variance: float, labs_error, kl_factor: float = 1.0) -> float:
        apart = []
        for point in points:
            m, s, prediction = point[:2], point[2:4], point[4]
            divergence = kl_divergence(Normal(m, s), normal(0.0, 1.0)).sum()
            nll = -Normal(prediction, noise_variance**0.5).log_prob(y).sum()
            kl_part = labs(m, s, torch.tensor(0.0, dtype=F64))
            assert torch.isclose(kl_part, 2 * divergence, rtol=1e-12)  # the sum is twice the KL
            apart.append(kl_factor * kl_part + labs_error(prediction) - 2 * (divergence + nll))
        return spread(apart)

    def summed(prediction: Tensor) -> Tensor:
        return ((y - prediction) ** 2).sum()

    assert elbo_apart(1.0, summed) < 1e-11
    assert elbo_apart(0.5, summed) > 1
    assert elbo_apart(0.25, summed) > 1
    assert elbo_apart(1.0, lambda prediction: summed(prediction) / len(y)) > 1  # the mean error: KL counted N times
    # With the KL halved, or the error doubled, the noise variance is a half.
    assert elbo_apart(0.5, lambda prediction: 2 * summed(prediction)) < 1e-11
    assert elbo_apart(1.0, lambda prediction: 2 * summed(prediction)) > 1


def test_log_p_of_the_data_is_a_constant_and_the_expected_log_likelihood_is_not_the_maximum():
    problem = Conjugate()
    q = QS[0]
    assert torch.isclose(
        kl_divergence(q, problem.posterior), problem.loss(q) + problem.log_evidence, rtol=0, atol=1e-10
    )
    assert abs(problem.log_evidence) > 5  # so the equals sign without it is off by this much
    best = problem.log_likelihood(problem.y.mean())
    expected = expect(q, problem.log_likelihood)
    closed = problem.log_likelihood(q.loc) - 0.5 * len(problem.y) * q.variance / problem.noise**2
    assert torch.isclose(expected, closed, rtol=0, atol=1e-10)
    assert best - expected > 1


# An Equivalence between Bayesian Priors and Penalties in Variational Inference


def test_the_corollarys_a_and_b_are_exchanged():
    mu, variance, prior_variance = 1.3, 0.4, 1.7
    constant = 1 / (2 * prior_variance)
    of_variance = 0.5 * (variance / prior_variance + math.log(prior_variance / variance) - 1)
    truth = pr.kl(normal(mu, variance**0.5), normal(0.0, prior_variance**0.5))
    assert float(truth.value) == pytest.approx(0.838165, abs=5e-7)
    assert of_variance + constant * mu**2 == pytest.approx(float(truth.value), abs=1e-12)
    assert constant + of_variance * mu**2 == pytest.approx(0.870588, abs=5e-7)  # a and b as printed


def test_lambda_mu_squared_is_a_gaussian_prior_at_fixed_scale_only():
    lam = 0.8
    prior = normal(0.0, (2 * lam) ** -0.5)
    mus = [-1.5, 0.0, 0.4, 2.0]

    def apart(mu: float, sigma: float) -> Tensor:
        return lam * mu**2 - kl_divergence(normal(mu, sigma), prior)

    assert spread([apart(mu, 0.3) for mu in mus]) < 1e-12
    assert spread([apart(0.4, sigma) for sigma in (0.1, 0.3, 1.0)]) > 1
    # A_nu = -(1/2) log(2 pi e nu) + lam nu - lam theta^2 depends on nu; the term a(nu) takes that away.
    nu = torch.tensor([0.01, 0.1, 1.0], dtype=F64)
    entropy = 0.5 * (2 * math.pi * math.e * nu).log()
    assert spread(list(-entropy + lam * nu)) > 1
    a = 0.5 * (2 * lam * nu - (2 * lam * nu).log() - 1)
    assert spread(list(-entropy + lam * nu - a)) < 1e-12


def test_the_fourier_transform_in_the_denominator_is_that_of_the_mirrored_density():
    # log alpha = cos(theta), which is periodic, through a Gumbel beta: r(mu) = -Ent - E log alpha(mu + x).
    beta = Gumbel(torch.tensor(0.0, dtype=F64), torch.tensor(0.8, dtype=F64))
    x = torch.linspace(-6, 40, 200_001, dtype=F64)
    weight = beta.log_prob(x).exp() * (x[1] - x[0])
    entropy = beta.entropy()
    mu = torch.arange(16, dtype=F64) * 2 * math.pi / 16
    r = torch.stack([-entropy - (weight * torch.cos(m + x)).sum() for m in mu])
    transform = (weight * torch.exp(-1j * x)).sum()  # F beta at frequency 1

    def recover(at_one: Tensor) -> Tensor:
        components = torch.fft.fft(r)
        keep = torch.zeros_like(components)
        keep[0] = components[0]
        keep[1], keep[-1] = components[1] / at_one, components[-1] / at_one.conj()
        return -entropy - torch.fft.ifft(keep).real

    assert torch.allclose(recover(transform.conj()), torch.cos(mu), rtol=0, atol=1e-9)  # F of the mirrored beta
    assert (recover(transform) - torch.cos(mu)).abs().max() > 0.1


@pytest.mark.parametrize("q", QS, ids=str)
def test_l_vi_is_minus_the_elbo_and_bounds_the_evidence_from_the_other_side(q: Normal):
    problem = Conjugate()
    elbo = expect(q, lambda w: problem.log_likelihood(w) + problem.prior.log_prob(w) - q.log_prob(w))
    assert torch.isclose(problem.loss(q), -elbo, rtol=0, atol=1e-10)
    assert elbo < problem.log_evidence
    assert problem.loss(q) > problem.log_evidence  # L_VI itself is no lower bound


def test_one_over_p_is_the_fan_in_rule_and_glorot_has_both_fans():
    fan_in, fan_out = 8, 50
    layer = nn.Linear(fan_in, fan_out)
    nn.init.xavier_uniform_(layer.weight, generator=torch.Generator().manual_seed(0))
    edge = layer.weight.abs().max().item()  # a uniform law on (-e, e) has variance e^2 / 3
    assert edge**2 / 3 == pytest.approx(2 / (fan_in + fan_out), rel=0.02)

    def variance(rule: str) -> float:
        model = pr.Model(layer.double(), pr.Gaussian(1.0), prior=rule)
        return 1 / model.prior.precision[model.layout["weight"].start].item()

    assert variance("glorot") == pytest.approx(2 / (fan_in + fan_out), rel=1e-12)
    assert variance("fan_in") == pytest.approx(1 / fan_in, rel=1e-12)


def test_kappa_must_be_finite_too():
    # The KL to a flat prior satisfies (*)(i) with A = 0, and exp(A) integrates to every number asked for.
    def kappa(log_density, half_width: float) -> float:
        grid = torch.linspace(-half_width, half_width, 20_001, dtype=F64)
        return torch.trapezoid(log_density(grid).exp(), grid).item()

    assert kappa(lambda t: -(t**2) / 2, 20) == pytest.approx(math.sqrt(2 * math.pi), abs=1e-10)
    assert kappa(lambda t: -(t**2) / 2, 40) == pytest.approx(kappa(lambda t: -(t**2) / 2, 20), abs=1e-10)
    assert kappa(torch.zeros_like, 20) > 0
    assert kappa(torch.zeros_like, 40) == pytest.approx(2 * kappa(torch.zeros_like, 20))


def test_lambda_is_one_over_n_with_the_mean_negative_log_likelihood():
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(30, 3, dtype=F64, generator=generator)
    y = torch.randn(30, dtype=F64, generator=generator)
    count = len(y)
    # Noise variance 1 and prior N(0, I), so r(w) = ||w||^2 / 2 and the mode solves (X'X + I) w = X'y.
    mode = torch.linalg.solve(features.T @ features + torch.eye(3, dtype=F64), features.T @ y).requires_grad_()

    def gradient(scale: float, lam: float) -> Tensor:
        nll = 0.5 * ((y - features @ mode) ** 2).sum()
        return torch.autograd.grad(scale * nll + lam * 0.5 * (mode**2).sum(), mode)[0]

    assert gradient(1 / count, 1 / count).abs().max() < 1e-14
    assert gradient(1.0, 1 / count).abs().max() > 0.01


# Variational Inference, the course


def test_the_original_formulation_has_expected_gradient_zero():
    p = normal(1.0, 0.7)
    phi = torch.tensor([0.2, 0.5], dtype=F64, requires_grad=True)
    q = Normal(phi[0], phi[1])
    z, weights = nodes()
    fixed = (phi[0] + phi[1] * z).detach()  # samples without a gradient

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, phi, retain_graph=True)[0]

    truth = gradient(kl_divergence(q, p))
    assert gradient((weights * (q.log_prob(fixed) - p.log_prob(fixed))).sum()).abs().max() < 1e-12
    assert truth.abs().min() > 0.5
    ratio = (q.log_prob(fixed) - p.log_prob(fixed)).detach()
    assert torch.allclose(gradient((weights * q.log_prob(fixed) * ratio).sum()), truth, rtol=0, atol=1e-10)
    moving = phi[0] + phi[1] * z  # the reparameterised samples
    assert torch.allclose(
        gradient((weights * (q.log_prob(moving) - p.log_prob(moving))).sum()), truth, rtol=0, atol=1e-10
    )


def test_in_the_answer_one_is_q_and_two_is_p():
    q, p = normal(0.3, 0.5), normal(-0.8, 1.9)

    def answer(first: Normal, second: Normal) -> float:
        ratio = (first.variance + (first.loc - second.loc) ** 2) / second.variance
        return float(0.5 * ((second.variance / first.variance).log() + ratio - 1))

    truth = expect(q, lambda w: q.log_prob(w) - p.log_prob(w)).item()
    assert answer(q, p) == pytest.approx(truth, abs=1e-10)
    assert float(pr.kl(q, p).value) == pytest.approx(truth, abs=1e-10)
    assert abs(answer(p, q) - truth) > 1
