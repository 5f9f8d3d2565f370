"""Mixtures of experts: the density, the quadratic lower bound of a linear gate, and fits by EM."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.func import functional_call

from priory.core.errors import InputError
from priory.core.streams import stream
from priory.latent import expect, score
from priory.latent.mixture_of_experts import MixtureOfExperts
from priory.methods.em.em import EM
from priory.posteriors.latent import LatentPoint


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(n: int = 80) -> tuple[Tensor, Tensor]:
    """Draw rows from two lines, chosen by the sign of the standardised first column."""
    x = randn(0, n, 2)
    y = torch.where(x[:, 0] > 0, 2 * x[:, 1] + 3, -x[:, 1]) + 0.3 * randn(1, n)
    return 5 * x + 20, 10 * y - 7


def network(k: int = 2) -> nn.Module:
    gate = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, k)).double()
    for i, p in enumerate(gate.parameters()):
        p.data = 0.5 * randn(10 + i, *p.shape)
    return gate


def prepared_model(k: int = 2, gate: nn.Module | None = None):
    model, rows = MixtureOfExperts(k, gate).meet(data())
    theta = model.begin(model.rows(data()), "random", stream(0, "test"))
    perturbed = {name: t + 0.3 * randn(5, *t.shape) if name.startswith("gate.") else t for name, t in theta.items()}
    return model, rows, perturbed


@pytest.mark.parametrize("gate", [None, network()])
def test_the_density_is_a_mixture_weighted_by_the_gate(gate):
    model, _, theta = prepared_model(2, gate)
    x, y = data()
    scaled = (x - x.mean(0)) / x.std(0, correction=0)
    named = {name.removeprefix("gate."): t for name, t in theta.items() if name.startswith("gate.")}
    logits = functional_call(gate or nn.Linear(2, 2).double(), named, (scaled,))
    means = x @ theta["coefficients"].T + theta["intercepts"]
    exact = MixtureSameFamily(Categorical(logits=logits), Normal(means, theta["variances"].sqrt()))
    torch.testing.assert_close(model.log_marginal(theta, model.rows((x, y))), exact.log_prob(y), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.e_step(theta, model.rows((x, y))).bound, exact.log_prob(y), rtol=1e-9, atol=1e-9)
    weights, found_means, variances = model.predictive(theta, x)
    torch.testing.assert_close(weights, logits.softmax(1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found_means, means, rtol=1e-12, atol=0)
    torch.testing.assert_close(variances, theta["variances"].expand_as(means), rtol=0, atol=0)
    q = model.responsibilities(theta, model.rows((x, y)))
    by_bayes = (logits.log_softmax(1) + Normal(means, theta["variances"].sqrt()).log_prob(y[:, None])).softmax(1)
    torch.testing.assert_close(q, by_bayes, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("gate", [None, network(3)])
def test_fishers_identity_holds_and_the_expected_log_joint_plus_the_entropy_is_the_bound(gate):
    model, rows, theta = prepared_model(3, gate)
    u = model.layout.unconstrain(theta).requires_grad_()
    model.log_marginal(model.layout.constrain(u), model.rows(data())).sum().backward()
    torch.testing.assert_close(score(model, theta, rows), u.grad, rtol=1e-7, atol=1e-6)
    (found,) = expect(model, [theta], rows.blocks(30))
    q = model.responsibilities(theta, model.rows(data()))
    entropy = -torch.xlogy(q, q).sum()
    torch.testing.assert_close(model.complete(theta, found.statistics) + entropy, found.bound, rtol=1e-9, atol=0)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_quadratic_bound_of_a_linear_gate_is_below_and_touches_at_theta(seed):
    model, _, theta = prepared_model(3)
    rows = model.rows(data())
    q = model.responsibilities(theta, rows).mT
    coefficients = model.parabola(theta, rows, q)
    other = {name: t + 2 * randn(seed + i, *t.shape) for i, (name, t) in enumerate(theta.items())}
    for point, touches in ((theta, True), (other, False)):
        w = torch.cat([t.reshape(-1) for t in model.weights(point).values()])
        lower_bound = (
            coefficients["gate"] + coefficients["gate_slope"] @ w - 0.5 * w @ coefficients["gate_curvature"] @ w
        )
        true = (q * model.log_gate(point, rows)).sum()
        assert float(true - lower_bound) > -1e-8
        if touches:
            torch.testing.assert_close(lower_bound, true, rtol=1e-10, atol=1e-10)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(2, 4))
def test_the_bound_never_falls_with_a_linear_gate(seed, k):
    model, rows = MixtureOfExperts(k).meet(data(40))
    theta, before = model.begin(model.rows(data(40)), "random", stream(seed, "begin")), -math.inf
    for _ in range(10):
        (found,) = expect(model, [theta], rows.blocks(100))
        assert float(found.bound) >= before - 1e-10 * abs(float(found.bound))
        before, theta = float(found.bound), model.m_step(found.statistics, theta)


@pytest.mark.parametrize("gate", [None, network()])
def test_em_recovers_which_rows_belong_to_which_line(gate, fit_by_em):
    x, y = data()
    posterior = fit_by_em(MixtureOfExperts(2, gate), (x, y), EM(tolerance=1e-5, restarts=2), steps=60, seed=1)
    expert = posterior.predict_labels((x, y))
    high = x[:, 0] > 20
    agree = float((expert == high).double().mean())
    assert max(agree, 1 - agree) > 0.95
    slopes = sorted(posterior.mean["coefficients"][:, 1].tolist())
    assert slopes == pytest.approx([-2.0, 4.0], abs=0.5)  # -1 and 2 in units of 10 / 5; standard errors are below 0.1
    rebuilt = LatentPoint.of_tensors(posterior.target, posterior.tensors(), {}, **posterior.to_json())
    torch.testing.assert_close(rebuilt.log_likelihood((x, y)), posterior.log_likelihood((x, y)), rtol=0, atol=0)


def test_the_users_gate_is_not_changed(fit_by_em):
    gate = network()
    before = [p.detach().clone() for p in gate.parameters()]
    fit_by_em(MixtureOfExperts(2, gate), data(), steps=3)
    assert all(torch.equal(p, b) for p, b in zip(gate.parameters(), before, strict=True))


def test_a_row_weight_equals_that_many_repetitions_and_known_z_are_kept(fit_by_em):
    x, y = data(40)
    _, _, theta = prepared_model()
    counts = torch.arange(40) % 3
    weighted_fit = fit_by_em(MixtureOfExperts(2, given="weights"), (x, y, counts.double()), EM(start=theta), steps=1)
    model, rows = MixtureOfExperts(2, given="weights").meet((x, y, counts.double()))
    (weighted,) = expect(model, [theta], rows.blocks(100))
    model.given = ()
    (repeated,) = expect(model, [theta], [(x.repeat_interleave(counts, 0), y.repeat_interleave(counts))])
    for name, t in weighted.statistics.items():
        torch.testing.assert_close(repeated.statistics[name], t, rtol=1e-9, atol=1e-9)
    assert weighted_fit.log_evidence.value > float(weighted.bound)
    z = (x[:, 0] > 20).long()
    known, rows = MixtureOfExperts(2, given="z").meet((x, y, z))
    assert torch.equal(known.responsibilities(theta, known.rows((x, y, z))).argmax(1), z)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixtureOfExperts(1), "The 'k' argument of MixtureOfExperts must be an integer >= 2, got 1."),
        (lambda: MixtureOfExperts(2, gate=3), "must be a torch.nn.Module, or None, got 3."),
        (lambda: MixtureOfExperts(2, gate=nn.ReLU()), "The 'gate' argument of MixtureOfExperts must have parameters"),
        (lambda: MixtureOfExperts(2, floor=0), "must lie between 0 and 1"),
        (lambda: MixtureOfExperts(2, given="y"), "must be 'weights', 'z' or both"),
        (lambda: MixtureOfExperts(2, gate=nn.Linear(3, 2)).meet(data()), "must take rows of 2 numbers, got an error"),
        (
            lambda: MixtureOfExperts(3, gate=nn.Linear(2, 2)).meet(data()),
            "must return 3 numbers per row, got the shape (2, 2)",
        ),
        (lambda: MixtureOfExperts(2).meet(data()[0]), "must have 2 parts: x, y, got 1."),
    ],
)
def test_impossible_models_and_data_raise_an_error(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
