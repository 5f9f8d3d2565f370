"""The Kalman filter and smoother against one dense Gaussian of all states and values, and EM over them."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from priory.core.errors import InputError, PrioryWarning
from priory.core.streams import stream
from priory.latent import expect, score
from priory.latent.linear_gaussian import LinearGaussian
from priory.latent.sequences import padded
from priory.methods.em.em import EM
from priory.posteriors.latent import LatentPoint

NAN = float("nan")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def square(seed: int, k: int) -> Tensor:
    factor = random(seed, k, k)
    return factor @ factor.T / k + 0.2 * torch.eye(k)


THETA = {
    "initial_mean": random(0, 2),
    "initial_covariance": square(1, 2),
    "transition": torch.tensor([[0.9, 0.3], [-0.2, 0.7]]).double(),
    "transition_noise": square(2, 2),
    "loadings": random(3, 3, 2),
    "offset": torch.tensor([1.0, -2.0, 0.5]).double(),
    "variances": torch.tensor([0.3, 0.5, 0.2]).double(),
}


def drawn(seed: int, n: int, steps: int) -> Tensor:
    """Sequences from the model at THETA."""
    root = lambda name: torch.linalg.cholesky(THETA[name])  # noqa: E731
    z = THETA["initial_mean"] + random(seed, n, 2) @ root("initial_covariance").T
    rows = []
    for t in range(steps):
        noise = THETA["variances"].sqrt() * random(seed + 1000 + t, n, 3)
        rows.append(z @ THETA["loadings"].T + THETA["offset"] + noise)
        z = z @ THETA["transition"].T + random(seed + 2000 + t, n, 2) @ root("transition_noise").T
    return torch.stack(rows, 1)


def with_holes(y: Tensor) -> Tensor:
    y = y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(7)) < 0.2, NAN)
    y[1, -2:] = NAN
    y[0, 2] = NAN
    return y


def dense(steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean and covariance of (z_1 .. z_T), (2 T,), and the map from it to (y_1 .. y_T), (3 T, 2 T)."""
    theta = {name: t.numpy() for name, t in THETA.items()}
    a, mean, spread = theta["transition"], np.zeros(2 * steps), np.zeros((2 * steps, 2 * steps))
    mean[:2], spread[:2, :2] = theta["initial_mean"], theta["initial_covariance"]
    for t in range(1, steps):
        now, past = slice(2 * t, 2 * t + 2), slice(0, 2 * t)
        before = slice(2 * t - 2, 2 * t)
        mean[now] = a @ mean[before]
        spread[now, past] = a @ spread[before, past]
        spread[past, now] = spread[now, past].T
        spread[now, now] = a @ spread[before, before] @ a.T + theta["transition_noise"]
    return mean, spread, np.kron(np.eye(steps), theta["loadings"])


@pytest.mark.parametrize("holes", [False, True])
def test_filter_and_smoother_are_the_dense_gaussians_conditional(holes):
    y = with_holes(drawn(0, 3, 6)) if holes else drawn(0, 3, 6)
    model, _ = LinearGaussian(2).meet(y)
    rows = model.rows((y,))
    found, hidden = model.e_step(THETA, rows), model.hidden(THETA, rows)
    torch.testing.assert_close(model.log_marginal(THETA, rows), found.bound, rtol=1e-12, atol=1e-12)
    mean, spread, loadings = dense(6)
    pairs, after, entropy = np.zeros((2, 2)), np.zeros((2, 2)), 0.0
    for n, sequence in enumerate(y.numpy()):
        s = ~np.isnan(sequence.reshape(-1))
        length = 4 if holes and n == 1 else 6
        offset, psi = np.tile(THETA["offset"], 6), np.tile(THETA["variances"], 6)
        seen = spread @ loadings[s].T
        inner = loadings[s] @ seen + np.diag(psi[s])
        away = sequence.reshape(-1)[s] - loadings[s] @ mean - offset[s]
        value = scipy.stats.multivariate_normal(np.zeros(s.sum()), inner).logpdf(away)
        assert float(found.bound[n]) == pytest.approx(value, rel=1e-9)
        states = mean + seen @ np.linalg.solve(inner, away)
        left = spread - seen @ np.linalg.solve(inner, seen.T)
        np.testing.assert_allclose(hidden["mean"][n, :length].reshape(-1), states[: 2 * length], rtol=1e-8, atol=1e-9)
        assert bool(hidden["mean"][n, length:].isnan().all())
        for t in range(length):
            now, before = slice(2 * t, 2 * t + 2), slice(2 * t - 2, 2 * t)
            np.testing.assert_allclose(hidden["covariance"][n, t], left[now, now], rtol=1e-8, atol=1e-9)
            if t:
                pairs += left[now, before] + np.outer(states[now], states[before])
                after += left[now, now] + np.outer(states[now], states[now])
        own = left[: 2 * length, : 2 * length]
        entropy += 0.5 * np.linalg.slogdet(2 * math.pi * math.e * own)[1]
    np.testing.assert_allclose(found.statistics["pairs"], pairs, rtol=1e-8)
    np.testing.assert_allclose(found.statistics["after"], after, rtol=1e-8)
    assert float(found.bound.sum()) == pytest.approx(float(model.complete(THETA, found.statistics)) + entropy, rel=1e-9)


def test_fishers_identity_holds_and_the_m_step_is_where_q_is_flat():
    y = with_holes(drawn(1, 8, 5))
    model, data = LinearGaussian(2).meet(y)
    u = model.layout.unconstrain(THETA).requires_grad_()
    model.log_marginal(model.layout.constrain(u), model.rows((y,))).sum().backward()
    torch.testing.assert_close(score(model, THETA, data), u.grad, rtol=1e-8, atol=1e-7)
    (found,) = expect(model, [THETA], data.blocks(3))
    best = model.layout.unconstrain(model.m_step(found.statistics, THETA)).requires_grad_()
    model.complete(model.layout.constrain(best), found.statistics).backward()
    assert best.grad is not None
    assert float(best.grad.abs().max()) < 1e-6


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 4), holes=st.booleans(), one=st.booleans())
def test_the_bound_never_falls(seed, k, holes, one):
    y = with_holes(drawn(2, 4, 8)) if holes else drawn(2, 4, 8)
    y = y[:, :, 0].contiguous() if one else y
    model, data = LinearGaussian(k, floor=1e-3).meet(y)
    theta, before = model.begin(model.rows((y,)), "random", stream(seed, "begin")), -math.inf
    for _ in range(8):
        (found,) = expect(model, [theta], data.blocks(10))
        assert float(found.bound) >= before - 1e-10 * abs(float(found.bound))
        before, theta = float(found.bound), model.m_step(found.statistics, theta)


def test_em_ends_where_the_likelihood_of_the_truth_is_exceeded(fit_by_em):
    y = drawn(3, 20, 12)
    posterior = fit_by_em(LinearGaussian(2), y, EM(start=THETA, tolerance=1e-4), steps=30)
    model = posterior.latent
    true = float(model.log_marginal(THETA, model.rows((y,))).sum())
    # twice the gain is about chi-squared with 24 parameters less 4 for the state's coordinates: false alarms 1e-4
    gain = 2 * (posterior.log_evidence.value - true)
    assert 0 < gain < 20 + 5 * 40**0.5


def test_weights_are_repetitions_and_a_list_is_padded(fit_by_em):
    y = with_holes(drawn(4, 3, 6))
    method = EM(start=THETA, tolerance=0.0)
    counted = fit_by_em(LinearGaussian(2, given="weights"), (y, torch.tensor([2.0, 1.0, 0.0])), method, steps=2)
    sequences = [y[0], y[0], y[1, :4]]
    repeated = fit_by_em(LinearGaussian(2), sequences, method, steps=2)
    assert padded(sequences).shape == (3, 6, 3)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(counted.mean[name], t, rtol=1e-7, atol=1e-9)


def test_a_posterior_takes_lists_and_makes_sequences_like_its_own(fit_by_em):
    y = random(3, 4, 12, 2).cumsum(1)
    posterior = fit_by_em(LinearGaussian(2), [y[0], y[1, :7], y[2], y[3, :9]], steps=5)
    assert posterior.log_likelihood([y[1, :7]]).shape == (1,)
    hidden = posterior.hidden([y[1, :7], y[2]])
    assert hidden["mean"].shape == (2, 12, 2)
    assert bool(hidden["mean"][0, 7:].isnan().all())
    drawn, z = posterior.generate(4000, steps=3)
    assert (drawn.shape, z.shape) == ((4000, 3, 2), (4000, 3, 2))
    theta = posterior.mean
    a, q, c = theta["transition"], theta["transition_noise"], theta["loadings"]
    mean, spread = theta["initial_mean"], theta["initial_covariance"]
    for t in range(3):
        away = z[:, t] - mean
        # 2 means and 4 covariances in 3 steps, at 5 standard errors: false alarms below 1e-4
        assert bool((away.mean(0).abs() < 5 * (spread.diagonal() / 4000).sqrt()).all())
        size = spread.diagonal().sqrt()
        assert bool(((away.T.cov() - spread).abs() < 5 * (2 / 4000) ** 0.5 * size[:, None] * size).all())
        left = drawn[:, t] - z[:, t] @ c.T - theta["offset"]
        assert bool((left.var(0) / theta["variances"] - 1).abs().max() < 5 * (2 / 4000) ** 0.5)
        mean, spread = a @ mean, a @ spread @ a.T + q


def test_a_posterior_comes_back_from_its_tensors_and_single_precision_follows(fit_by_em):
    y = drawn(5, 6, 8)
    posterior = fit_by_em(LinearGaussian(2), y, EM(start=THETA), steps=4)
    same = LatentPoint.of_tensors(posterior.target, posterior.tensors(), {}, **posterior.own())
    torch.testing.assert_close(same.log_likelihood(y[:, :5]), posterior.log_likelihood(y[:, :5]), rtol=0, atol=0)
    single = fit_by_em(LinearGaussian(2), y.float(), EM(start=THETA), steps=4)
    assert single.log_evidence.value == pytest.approx(posterior.log_evidence.value, rel=1e-3)


def test_a_column_without_noise_is_held_at_the_floor_and_said_to_be(fit_by_em):
    y = torch.full((1, 6, 2), 3.0).double()
    y[0, :, 1] = torch.arange(6.0)
    with pytest.warns(PrioryWarning, match=r"The state of LinearGaussian\(2\) explains columns? .* whole"):
        fit_by_em(LinearGaussian(2, floor=1e-2), y, steps=60)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LinearGaussian(True), "The 'k' argument of LinearGaussian must be an integer >= 1, got True."),
        (lambda: LinearGaussian(1, floor=0), "The 'floor' argument of LinearGaussian must lie between 0 and 1, got 0."),
        (
            lambda: LinearGaussian(1, given="z"),
            "The 'given' argument of LinearGaussian must be 'weights' or left out, got 'z'",
        ),
        (lambda: LinearGaussian(1).meet(torch.ones(5)), "must be (n, T) or (n, T, D), got rows of the shape ()"),
        (
            lambda: LinearGaussian(1).meet(torch.full((2, 3), NAN)),
            "have a value in each column, got only NaN in column 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(InputError) as caught:
        make()
    assert sentence in str(caught.value)
