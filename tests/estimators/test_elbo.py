"""The bound, its parts and its gradients, against closed forms, all subsets of the data, and hand-derived formulas."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributions import Laplace, MultivariateNormal, Normal, kl_divergence

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.estimators import elbo
from priory.families import DiagonalFamily
from priory.fitting.prepare import make_target
from priory.methods.base import Plan
from priory.testing import LinearRegression

F64 = torch.float64


def normal(scale, loc=0.0):
    return Normal(torch.tensor(loc, dtype=F64), torch.tensor(scale, dtype=F64))


def problem(model=None, rows=10, features=3):
    generator = stream(0, "elbo")
    X = torch.randn(rows, features, generator=generator, dtype=F64)
    y = torch.randn(rows, generator=generator, dtype=F64)
    if model is None:
        model = pr.Model(nn.Linear(features, 1).to(F64), pr.Gaussian(0.7), prior=normal(1.3))
    data = Data.of((X, y), batch_size=rows).prepared(model.prepare)
    return model, data, make_target(model, data, 1.0, "likelihood")


def random_family(size, seed=1):
    generator = stream(seed, "family")
    loc = torch.randn(size, generator=generator, dtype=F64)
    return DiagonalFamily(
        loc.requires_grad_(), (0.3 * torch.randn(size, generator=generator, dtype=F64) - 1).requires_grad_()
    )


def test_kl_part_is_the_closed_form_of_factorised_gaussians():
    _, data, target = problem()
    q = random_family(target.size)
    parts = elbo(target, q, torch.zeros(1, target.size, dtype=F64), data.some(10))
    exact = kl_divergence(Normal(q.loc, q.scale), normal(1.3)).sum()
    torch.testing.assert_close(parts.kl, exact, rtol=0, atol=1e-10)


def test_expected_likelihood_of_a_linear_model_is_reached_by_gauss_hermite_noise():
    """E_q of a quadratic is exact with the nodes +-1 in each coordinate; nll must equal the closed form to 1e-10."""
    exact = LinearRegression.make(2)
    model, data = exact.model(), exact.data
    target = make_target(model, Data.of(data, 10**6).prepared(model.prepare), 1.0, "likelihood")
    q = random_family(target.size)
    corners = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=target.size)), dtype=F64)
    parts = elbo(target, q, corners, data)
    X, y = exact.design(exact.X), exact.y
    noise = exact.noise
    residual = (y - X @ q.loc).square().sum() + (X.square() @ q.scale.square()).sum()
    nll = residual / (2 * noise**2) + len(y) * (math.log(noise) + 0.5 * math.log(2 * math.pi))
    torch.testing.assert_close(parts.nll, nll, rtol=0, atol=1e-10)
    torch.testing.assert_close(parts.value, -nll - parts.kl, rtol=0, atol=1e-10)
    assert (parts.num_data, parts.temperature) == (len(y), 1.0)


def test_evidence_is_the_elbo_plus_the_divergence_to_the_exact_posterior():
    exact = LinearRegression.make(3)
    model = exact.model()
    target = make_target(model, Data.of(exact.data, 10**6).prepared(model.prepare), 1.0, "likelihood")
    q = random_family(target.size)
    corners = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=target.size)), dtype=F64)
    bound = elbo(target, q, corners, exact.data).value
    gap = kl_divergence(MultivariateNormal(q.loc, torch.diag(q.scale.square())), exact.posterior)
    assert float((bound + gap).detach()) == pytest.approx(exact.log_evidence, abs=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_mean_over_all_minibatches_of_a_size_is_the_value_of_the_whole_data(size):
    _, data, target = problem(rows=6)
    X, y = data.tensors
    w = torch.randn(target.size, generator=stream(2, "w"), dtype=F64)
    whole, gradient = (t.clone() for t in target.log_likelihood_and_grad(w, (X, y)))
    values, gradients = [], []
    for rows in itertools.combinations(range(6), size):
        value, g = target.log_likelihood_and_grad(w, (X[list(rows)], y[list(rows)]))
        values.append(value.clone())
        gradients.append(g.clone())
    torch.testing.assert_close(torch.stack(values).mean(), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.stack(gradients).mean(0), gradient, rtol=0, atol=1e-10)


def test_an_uneven_last_batch_is_weighted_by_its_own_size():
    """10 rows in batches of 4, 4, 2: weighted by their rows, the estimates add up to the whole."""
    _, data, target = problem()
    X, y = data.tensors
    w = torch.randn(target.size, generator=stream(2, "w"), dtype=F64)
    whole = target.log_likelihood_and_grad(w, (X, y))[0].clone()
    parts = [(X[a:b], y[a:b]) for a, b in ((0, 4), (4, 8), (8, 10))]
    assert [target.factor(batch) for batch in parts] == [2.5, 2.5, 5.0]
    mean = sum(len(batch[1]) / 10 * target.log_likelihood_and_grad(w, batch)[0].clone() for batch in parts)
    torch.testing.assert_close(mean, whole, rtol=0, atol=1e-10)


NETS = {
    "gaussian": lambda: pr.Model(nn.Linear(3, 1).to(F64), pr.Gaussian(0.7), prior=normal(1.3, 0.2)),
    "laplace": lambda: pr.Model(
        nn.Linear(3, 1).to(F64), pr.Gaussian(0.7), prior=Laplace(normal(1.0).loc, normal(0.8).scale)
    ),
    "learnt noise": lambda: pr.Model(
        nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).to(F64), pr.Gaussian(), prior="glorot"
    ),
    "flat": lambda: pr.Model(nn.Linear(3, 1).to(F64), pr.Gaussian(0.7), prior="flat"),
    "mixed": lambda: pr.Model(
        nn.Linear(3, 1).to(F64),
        pr.StudentT(4.0, prior=torch.distributions.Gamma(normal(1.0).scale * 2, normal(1.0).scale)),
        prior={"weight": "he", "bias": "flat"},
    ),
}


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize(("temperature", "tempers"), [(1.0, "likelihood"), (0.3, "likelihood"), (2.0, "posterior")])
@pytest.mark.parametrize("net", NETS)
def test_the_lean_step_has_the_gradient_and_the_parts_of_the_autograd_elbo(net, temperature, tempers, samples):
    model = NETS[net]()
    _, data, _ = problem(model)
    target = make_target(model, data, temperature, tempers)
    batch = tuple(t[:4] for t in data.tensors)
    method = pr.MeanField(samples=samples)
    generator = stream(5, "noise")
    state = method.init(target, Plan(data, 10), generator, torch.Size())
    start = state.variational.clone().requires_grad_()
    _, info = method.step(target, state, batch, generator)

    parts = elbo(target, DiagonalFamily(*start), state.noise.clone(), batch)
    (gradient,) = torch.autograd.grad(parts.loss, start)
    torch.testing.assert_close(state.gradient, gradient, rtol=1e-10, atol=1e-10)
    for name, value in (("elbo", parts.value), ("nll", parts.nll), ("kl", parts.kl), ("loss", parts.loss)):
        assert float(info.metrics[name]) == pytest.approx(float(value.detach()), rel=1e-10, abs=1e-10)


def test_tempering_multiplies_the_kl_or_the_entropy_alone():
    model, data, _ = problem()
    q, noise = random_family(model.layout.size), torch.zeros(1, model.layout.size, dtype=F64)
    parts = {
        key: elbo(make_target(model, data, *key), q, noise, data.tensors)
        for key in ((1.0, "likelihood"), (0.25, "likelihood"), (0.25, "posterior"))
    }
    plain = parts[1.0, "likelihood"]
    cold = -plain.nll - 0.25 * plain.kl
    torch.testing.assert_close(parts[0.25, "likelihood"].value, cold, rtol=0, atol=1e-10)
    whole = -plain.nll - plain.kl - 0.75 * q.entropy()
    torch.testing.assert_close(parts[0.25, "posterior"].value, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("temperature", "tempers"), [(0.3, "likelihood"), (0.3, "posterior"), (2.0, "posterior")])
def test_the_tempered_log_joint_has_the_gradient_of_its_definition(temperature, tempers):
    """log p(D|x)/T + log p(x) [or /T] + log |det dx/du|: the determinant is never tempered."""
    model, data, _ = problem(NETS["mixed"]())
    target = make_target(model, data, temperature, tempers)
    w = 0.3 * torch.randn(2, target.size, generator=stream(4, "w"), dtype=F64)
    value, gradient = target.log_joint_and_grad(w, data.tensors)
    for row, found, slope in zip(w, value, gradient, strict=True):
        v = row.clone().requires_grad_()
        volume = model.layout.log_det(v)
        weight = 1.0 if tempers == "likelihood" else 1 / temperature
        wanted = target.differentiable(v, data.tensors) / temperature + weight * (target.log_prior(v) - volume) + volume
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(slope, torch.autograd.grad(wanted, v)[0], rtol=1e-10, atol=1e-10)


def test_loss_is_the_nll_plus_the_sigma_terms_of_the_lectures_up_to_a_constant():
    """At precision lambda, loss = nll + sum_i (-log s_i + lambda s_i^2 / 2 + lambda m_i^2 / 2) + constant."""
    precision = 2.5
    X, y = torch.randn(8, 2, generator=stream(0, "x"), dtype=F64), torch.arange(8) % 2
    model = pr.Model(nn.Linear(2, 2).to(F64), pr.Categorical(), prior=normal(precision**-0.5))
    target = make_target(model, Data.of((X, y), 8).prepared(model.prepare), 1.0, "likelihood")
    noise = torch.randn(1, target.size, generator=stream(1, "noise"), dtype=F64)
    constants = []
    for seed in range(3):
        q = random_family(target.size, seed)
        weights = q.draw(noise[0])
        outputs = X @ weights[:4].view(2, 2).T + weights[4:]
        cross_entropy = nn.functional.cross_entropy(outputs, y, reduction="sum")
        terms = (-q.log_scale + 0.5 * precision * q.scale.square() + 0.5 * precision * q.loc.square()).sum()
        constants.append(float((elbo(target, q, noise, (X, y)).loss - cross_entropy - terms).detach()))
    assert constants[1:] == pytest.approx([constants[0]] * 2, abs=1e-10)
    assert constants[0] == pytest.approx(-0.5 * target.size * (1 + math.log(precision)), abs=1e-10)


def lab_loss(q, noise, X, y):
    """The loss printed in one lecture: -sum(1 + log s^2 - m^2 - s^2) + the squared error."""
    error = (y - X @ q.draw(noise[0])).square().sum()
    return -(1 + 2 * q.log_scale - q.loc.square() - q.scale.square()).sum() + error


@pytest.mark.parametrize(("noise_scale", "agrees"), [(1.0, True), (0.5, False)])
def test_a_lecture_loss_is_twice_ours_at_unit_noise_and_wrong_otherwise(noise_scale, agrees):
    X, y = torch.randn(8, 2, generator=stream(0, "x"), dtype=F64), torch.randn(8, generator=stream(1, "y"), dtype=F64)
    model = pr.Model(nn.Linear(2, 1, bias=False).to(F64), pr.Gaussian(noise_scale), prior=normal(1.0))
    target = make_target(model, Data.of((X, y), 8).prepared(model.prepare), 1.0, "likelihood")
    noise = torch.randn(1, 2, generator=stream(2, "noise"), dtype=F64)
    q = random_family(2)
    ours = torch.stack(torch.autograd.grad(elbo(target, q, noise, (X, y)).loss, (q.loc, q.log_scale)))
    theirs = torch.stack(torch.autograd.grad(lab_loss(q, noise, X, y), (q.loc, q.log_scale)))
    assert torch.allclose(theirs, 2 * ours, rtol=0, atol=1e-10) is agrees
