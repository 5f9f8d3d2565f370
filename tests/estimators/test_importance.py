"""The importance-weighted bound and the doubly-reparameterised estimator, against formulas by hand and quadrature."""

import math

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.estimators.gradients import estimate
from priory.estimators.importance import importance_weighted
from priory.families import DiagonalForm, MixtureForm
from priory.fitting.prepare import make_target
from priory.testing import GaussianMean, LinearRegression, assert_mean_close

F64 = torch.float64
THETA = torch.tensor([0.4, -0.3], dtype=F64)  # mean and log standard deviation of q


def log_joint(w):
    """A skewed density in one dimension, up to no constant: its evidence is found by quadrature."""
    return -0.5 * w.square() - 0.3 * (w - 1).pow(4) + 0.5 * w - 1.2


def one_dimension():
    model = pr.Density(lambda p: log_joint(p["w"]), {"w": pr.Param()}, batched=True)
    return make_target(model, Data.of(None).prepared(model.prepare))


def log_evidence():
    w = torch.linspace(-8, 8, 20_001, dtype=F64)
    return float((log_joint(w).exp().sum() * (w[1] - w[0])).log())


def gradient_of(target, form, theta, batch, generator, samples, estimator="doubly"):
    theta = theta.detach().requires_grad_()
    found = importance_weighted(target, form.family(theta), batch, {}, generator, samples, estimator)
    return -torch.autograd.grad(found.loss.sum(), theta)[0], found


def slopes(w):
    """d log p / dw, by hand."""
    return -w - 1.2 * (w - 1).pow(3) + 0.5


def test_at_known_noise_both_estimators_are_the_formulas_derived_by_hand():
    noise = torch.randn(5, 1, generator=stream(1, "noise"), dtype=F64)[:, 0]
    m, s = THETA[0], THETA[1].exp()
    w = m + s * noise
    log_q = -0.5 * noise.square() - THETA[1] - 0.5 * math.log(2 * math.pi)
    ratio = (log_joint(w) - log_q).exp()
    v = ratio / ratio.sum()
    along = slopes(w) + noise / s  # d log r / dw: log q falls as w leaves m
    path = torch.stack([along, along * s * noise])  # in m and in log s, at fixed q
    doubly = (v.square() * path).sum(-1)
    score = torch.stack([noise / s, noise.square() - 1])
    pathwise = (v * (path - score)).sum(-1)
    for name, wanted in (("doubly", doubly), ("pathwise", pathwise)):
        found, told = gradient_of(one_dimension(), DiagonalForm(1), THETA, (), stream(1, "noise"), 5, name)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(told.weighted, ratio.mean().log(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(told.bound.value, ratio.log().mean(), rtol=1e-10, atol=1e-10)


def exact_bound_of_two(theta):
    """E log (r_1 + r_2) / 2 over both draws, by the trapezoid rule in two dimensions."""
    eps = torch.linspace(-9, 9, 1_201, dtype=F64)
    weight = (-0.5 * eps.square()).exp() / math.sqrt(2 * math.pi) * (eps[1] - eps[0])
    w = theta[0] + theta[1].exp() * eps
    log_r = log_joint(w) + 0.5 * eps.square() + theta[1] + 0.5 * math.log(2 * math.pi)
    both = torch.logaddexp(log_r[:, None], log_r) - math.log(2)
    return (weight[:, None] * weight * both).sum()


@pytest.mark.parametrize("estimator", ["doubly", "pathwise"])
def test_it_is_unbiased(estimator):
    """20,000 estimates from two draws each, within 5 standard errors (false alarms: 6e-7 a number)."""
    leaf = THETA.clone().requires_grad_()
    bound = exact_bound_of_two(leaf)
    (wanted,) = torch.autograd.grad(bound, leaf)
    many = THETA.expand(20_000, 2)
    found, told = gradient_of(one_dimension(), DiagonalForm(1), many, (), stream(2, "noise"), 2, estimator)
    assert_mean_close(found, wanted)
    assert_mean_close(told.weighted, bound.detach())
    (elbo,) = torch.autograd.grad(one_draw(leaf), leaf)
    error = found.std(0) / math.sqrt(len(found))
    assert bool(((wanted - elbo).abs() > 20 * error).any())  # the gradient of the ELBO would be seen


def one_draw(theta):
    """The ELBO, by the trapezoid rule."""
    eps = torch.linspace(-9, 9, 1_201, dtype=F64)
    weight = (-0.5 * eps.square()).exp() / math.sqrt(2 * math.pi) * (eps[1] - eps[0])
    log_r = log_joint(theta[0] + theta[1].exp() * eps) + 0.5 * eps.square() + theta[1] + 0.5 * math.log(2 * math.pi)
    return (weight * log_r).sum()


def test_of_a_single_draw_it_is_the_elbo_and_its_gradient_sticks_the_landing():
    target, form = one_dimension(), DiagonalForm(1)
    found, told = gradient_of(target, form, THETA, (), stream(3, "noise"), 1)
    leaf = THETA.clone().requires_grad_()
    plain = estimate(target, form.family(leaf), (), {}, stream(3, "noise"), 1, "sticking")
    torch.testing.assert_close(told.weighted, plain.bound.value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, -torch.autograd.grad(plain.loss, leaf)[0], rtol=1e-12, atol=1e-12)


def test_it_rises_with_the_draws_from_the_elbo_towards_the_evidence():
    """Means of 20,000 estimates: each step up is over 4 standard errors, the top below log p + 4 (6e-5 each)."""
    many, evidence = THETA.expand(20_000, 2), log_evidence()
    leaf = THETA.clone()
    values, errors = [float(one_draw(leaf))], [0.0]
    for samples in (2, 4, 16, 64):
        _, told = gradient_of(one_dimension(), DiagonalForm(1), many, (), stream(4, samples), samples)
        values.append(float(told.weighted.mean()))
        errors.append(float(told.weighted.std()) / math.sqrt(len(many)))
    for k in range(4):
        assert values[k + 1] - values[k] > 4 * math.hypot(errors[k], errors[k + 1])
    assert values[-1] < evidence + 4 * errors[-1]
    assert evidence - values[-1] < 0.1 * (evidence - values[0])


def test_the_signal_of_the_doubly_reparameterised_estimator_does_not_drown_as_draws_are_added():
    """From 2 to 128 draws the plain one's signal-to-noise falls, by theory 8-fold; the other's rises, 8-fold.

    Ratios of 20,000 estimates are known to 2 %: false alarms are out of the question.
    """
    many = THETA.expand(20_000, 2)

    def signal(estimator, samples):
        found, _ = gradient_of(one_dimension(), DiagonalForm(1), many, (), stream(5, samples), samples, estimator)
        return float((found.mean(0).abs() / found.std(0)).max())

    assert signal("doubly", 128) > 1.5 * signal("doubly", 2)
    assert signal("pathwise", 128) < 0.7 * signal("pathwise", 2)


def test_weighted_draws_of_a_mixture_bound_the_evidence_too():
    """20,000 estimates, gradient and value against quadrature over one draw of each of two components (6e-7 each)."""
    form = MixtureForm(1, 2)
    theta = torch.tensor([0.4, -0.1, -0.3, -0.5, 0.9, -0.2], dtype=F64)
    leaf = theta.clone().requires_grad_()
    eps = torch.linspace(-9, 9, 1_201, dtype=F64)
    weight = (-0.5 * eps.square()).exp() / math.sqrt(2 * math.pi) * (eps[1] - eps[0])
    log_pi, (m1, l1, m2, l2) = leaf[:2].log_softmax(0), leaf[2:]

    def log_component(w, m, log_s):
        return -0.5 * ((w - m) / log_s.exp()).square() - log_s - 0.5 * math.log(2 * math.pi)

    def log_r(w):
        parts = torch.stack([log_pi[0] + log_component(w, m1, l1), log_pi[1] + log_component(w, m2, l2)])
        return log_joint(w) - parts.logsumexp(0)

    first, second = log_pi[0] + log_r(m1 + l1.exp() * eps), log_pi[1] + log_r(m2 + l2.exp() * eps)
    bound = (weight[:, None] * weight * torch.logaddexp(first[:, None], second)).sum()
    (wanted,) = torch.autograd.grad(bound, leaf)
    found, told = gradient_of(one_dimension(), form, theta.expand(20_000, 6), (), stream(6, "mixture"), 2, "pathwise")
    assert_mean_close(found, wanted)
    assert_mean_close(told.weighted, bound.detach())
    with pytest.raises(InputError, match="be 'pathwise' for draws that are weighted"):
        gradient_of(one_dimension(), form, theta, (), stream(6, "mixture"), 2, "doubly")


def test_a_minibatch_and_a_temperature_are_refused_in_one_sentence():
    exact = LinearRegression.make(0)
    model = exact.model()
    method = pr.MeanField(objective="iwae", estimator="doubly", samples=4)
    with pytest.raises(InputError, match=r"needs every row at each step, got 7 of 20 rows"):
        pr.fit(model, exact.data, method, steps=5, batch_size=7, progress=False)
    with pytest.raises(InputError, match=r"'temperature' of the 'iwae' objective must be 1, got 0.5"):
        pr.fit(model, exact.data, method, steps=5, temperature=0.5, progress=False)


@pytest.mark.parametrize("estimator", ["sticking", "score", "local"])
def test_other_estimators_of_it_are_refused(estimator):
    with pytest.raises(
        InputError, match="'estimator' argument of MeanField must be one of pathwise, doubly for the objective"
    ):
        pr.MeanField(objective="iwae", samples=4, estimator=estimator)
    with pytest.raises(InputError, match="'estimator' of the 'iwae' objective must be 'pathwise' or 'doubly'"):
        gradient_of(one_dimension(), DiagonalForm(1), THETA, (), stream(0, "n"), 2, estimator)


def test_it_needs_two_draws_and_the_objective_of_its_name():
    with pytest.raises(InputError, match="'samples' argument of MeanField must be at least 2"):
        pr.MeanField(objective="iwae", estimator="doubly")
    with pytest.raises(InputError, match="for the objective 'elbo'"):
        pr.MeanField(estimator="doubly", samples=4)
    with pytest.raises(
        InputError, match="'antithetic' argument of MeanField must be left out for the objective 'iwae'"
    ):
        pr.MeanField(objective="iwae", estimator="doubly", samples=4, antithetic=True)


def test_a_fit_records_both_bounds_and_the_weighted_one_is_tighter():
    """q is one Gaussian for two correlated weights: there is a gap to close, and the posterior stays Gaussian."""
    X = torch.randn(12, 2, generator=stream(0, "x"), dtype=F64)
    X[:, 1] = 0.9 * X[:, 0] + 0.3 * X[:, 1]
    exact = LinearRegression(X, X.sum(1), noise=0.5, prior_scale=1.0)
    method = pr.MeanField(objective="iwae", estimator="doubly", samples=32, learning_rate=0.05)
    posterior = pr.fit(exact.model(), exact.data, method, steps=500, progress=False)
    last = {name: float(values[-100:].mean()) for name, values in posterior.history.items()}
    assert last["loss"] == pytest.approx(-last["iwae"], rel=1e-9)
    assert last["elbo"] + 0.1 < last["iwae"] < exact.log_evidence + 0.05
    # the weighted bound rewards a q that covers: wider than the best of the ELBO
    assert bool((posterior.family.scale > 1.1 * exact.best_mean_field().scale).all())


def test_on_a_gaussian_posterior_both_bounds_meet_the_evidence():
    exact = GaussianMean.make(0)
    method = pr.MeanField(objective="iwae", estimator="doubly", samples=8, learning_rate=0.05)
    posterior = pr.fit(exact.density(), exact.data, method, steps=800, batch_size=10**6, progress=False)
    assert float((posterior.family.loc - exact.posterior.mean).abs() / exact.posterior.stddev) < 1e-3
    assert float(posterior.history["iwae"][-1]) == pytest.approx(exact.log_evidence, abs=1e-3)


def test_members_do_not_meet():
    """A bound of two members is the bounds of each at their own noise."""
    target, form = one_dimension(), DiagonalForm(1)
    theta = torch.stack([THETA, THETA + 0.5])
    found, told = gradient_of(target, form, theta, (), stream(7, "noise"), 3)
    noise = torch.randn(3, 2, 1, generator=stream(7, "noise"), dtype=F64)
    for i in range(2):
        w = theta[i, 0] + theta[i, 1].exp() * noise[:, i, 0]
        log_q = -0.5 * noise[:, i, 0].square() - theta[i, 1] - 0.5 * math.log(2 * math.pi)
        wanted = (log_joint(w) - log_q).logsumexp(0) - math.log(3)
        torch.testing.assert_close(told.weighted[i], wanted, rtol=1e-10, atol=1e-10)
    assert found.shape == (2, 2)


def test_a_network_is_asked_for_the_whole_data():
    """The bound of a Model over every row, against its pointwise log-likelihoods."""
    X = torch.randn(6, 2, generator=stream(0, "x"), dtype=F64)
    model = pr.Model(nn.Linear(2, 1).to(F64), pr.Gaussian(0.7), prior=1.0)
    data = Data.of((X, X[:, 0])).prepared(model.prepare)
    target, form = make_target(model, data), DiagonalForm(3)
    theta = form.initial(torch.zeros(3, dtype=F64), torch.full((3,), 0.5, dtype=F64), stream(0, "q"))
    _, told = gradient_of(target, form, theta, data.tensors, stream(8, "noise"), 3)
    q = form.family(theta)
    w = q.sample(3, stream(8, "noise"))
    ratios = target.pointwise(w, data.tensors).sum(-1) + target.log_prior(w) - q.log_prob(w)
    torch.testing.assert_close(told.weighted, ratios.logsumexp(0) - math.log(3), rtol=1e-10, atol=1e-10)
