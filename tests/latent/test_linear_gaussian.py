"""The Kalman filter and smoother against the dense joint Gaussian of all states and values, and EM."""

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


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def square(seed: int, k: int) -> Tensor:
    factor = randn(seed, k, k)
    return factor @ factor.T / k + 0.2 * torch.eye(k)


THETA = {
    "initial_mean": randn(0, 2),
    "initial_covariance": square(1, 2),
    "transition": torch.tensor([[0.9, 0.3], [-0.2, 0.7]]).double(),
    "transition_noise": square(2, 2),
    "loadings": randn(3, 3, 2),
    "offset": torch.tensor([1.0, -2.0, 0.5]).double(),
    "variances": torch.tensor([0.3, 0.5, 0.2]).double(),
}


def draw_sequences(seed: int, n: int, steps: int) -> Tensor:
    """Draw sequences from the model at THETA."""
    root = lambda name: torch.linalg.cholesky(THETA[name])  # noqa: E731
    z = THETA["initial_mean"] + randn(seed, n, 2) @ root("initial_covariance").T
    rows = []
    for t in range(steps):
        noise = THETA["variances"].sqrt() * randn(seed + 1000 + t, n, 3)
        rows.append(z @ THETA["loadings"].T + THETA["offset"] + noise)
        z = z @ THETA["transition"].T + randn(seed + 2000 + t, n, 2) @ root("transition_noise").T
    return torch.stack(rows, 1)


def with_missing(y: Tensor) -> Tensor:
    y = y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(7)) < 0.2, NAN)
    y[1, -2:] = NAN
    y[0, 2] = NAN
    return y


def dense(steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean and covariance of (z_1 .. z_T), (2 T,), and the matrix that maps it to (y_1 .. y_T), (3 T, 2 T)."""
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


@pytest.mark.parametrize("missing", [False, True])
def test_filter_and_smoother_equal_the_conditional_of_the_dense_gaussian(missing):
    y = with_missing(draw_sequences(0, 3, 6)) if missing else draw_sequences(0, 3, 6)
    model, _ = LinearGaussian(2).meet(y)
    rows = model.rows((y,))
    found, hidden = model.e_step(THETA, rows), model.hidden(THETA, rows)
    torch.testing.assert_close(model.log_marginal(THETA, rows), found.bound, rtol=1e-12, atol=1e-12)
    mean, spread, loadings = dense(6)
    pairs, after, entropy = np.zeros((2, 2)), np.zeros((2, 2)), 0.0
    for n, sequence in enumerate(y.numpy()):
        s = ~np.isnan(sequence.reshape(-1))
        length = 4 if missing and n == 1 else 6
        offset, psi = np.tile(THETA["offset"], 6), np.tile(THETA["variances"], 6)
        cross = spread @ loadings[s].T
        innovation = loadings[s] @ cross + np.diag(psi[s])
        difference = sequence.reshape(-1)[s] - loadings[s] @ mean - offset[s]
        value = scipy.stats.multivariate_normal(np.zeros(s.sum()), innovation).logpdf(difference)
        assert float(found.bound[n]) == pytest.approx(value, rel=1e-9)
        states = mean + cross @ np.linalg.solve(innovation, difference)
        conditional = spread - cross @ np.linalg.solve(innovation, cross.T)
        np.testing.assert_allclose(hidden["mean"][n, :length].reshape(-1), states[: 2 * length], rtol=1e-8, atol=1e-9)
        assert bool(hidden["mean"][n, length:].isnan().all())
        for t in range(length):
            now, before = slice(2 * t, 2 * t + 2), slice(2 * t - 2, 2 * t)
            np.testing.assert_allclose(hidden["covariance"][n, t], conditional[now, now], rtol=1e-8, atol=1e-9)
            if t:
                pairs += conditional[now, before] + np.outer(states[now], states[before])
                after += conditional[now, now] + np.outer(states[now], states[now])
        sequence_covariance = conditional[: 2 * length, : 2 * length]
        entropy += 0.5 * np.linalg.slogdet(2 * math.pi * math.e * sequence_covariance)[1]
    np.testing.assert_allclose(found.statistics["pairs"], pairs, rtol=1e-8)
    np.testing.assert_allclose(found.statistics["after"], after, rtol=1e-8)
    assert float(found.bound.sum()) == pytest.approx(float(model.complete(THETA, found.statistics)) + entropy, rel=1e-9)


def test_fishers_identity_holds_and_the_gradient_of_q_is_zero_at_the_m_step():
    y = with_missing(draw_sequences(1, 8, 5))
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
@given(seed=st.integers(0, 10**6), k=st.integers(1, 4), missing=st.booleans(), one_column=st.booleans())
def test_the_bound_never_falls(seed, k, missing, one_column):
    y = with_missing(draw_sequences(2, 4, 8)) if missing else draw_sequences(2, 4, 8)
    y = y[:, :, 0].contiguous() if one_column else y
    model, data = LinearGaussian(k, floor=1e-3).meet(y)
    theta, before = model.begin(model.rows((y,)), "random", stream(seed, "begin")), -math.inf
    for _ in range(8):
        (found,) = expect(model, [theta], data.blocks(10))
        assert float(found.bound) >= before - 1e-10 * abs(float(found.bound))
        before, theta = float(found.bound), model.m_step(found.statistics, theta)


def test_the_likelihood_at_the_result_exceeds_that_of_the_truth_by_the_expected_amount(fit_by_em):
    y = draw_sequences(3, 20, 12)
    posterior = fit_by_em(LinearGaussian(2), y, EM(start=THETA, tolerance=1e-4), steps=30)
    model = posterior.latent
    true_value = float(model.log_marginal(THETA, model.rows((y,))).sum())
    # Twice the gain is about chi-squared; of 24 parameters, 4 only choose the basis of the state (false alarms: 1e-4).
    gain = 2 * (posterior.log_evidence.value - true_value)
    assert 0 < gain < 20 + 5 * 40**0.5


def test_a_sequence_weight_equals_that_many_repetitions_and_lists_are_padded(fit_by_em):
    y = with_missing(draw_sequences(4, 3, 6))
    method = EM(start=THETA, tolerance=0.0)
    weighted_fit = fit_by_em(LinearGaussian(2, given="weights"), (y, torch.tensor([2.0, 1.0, 0.0])), method, steps=2)
    sequences = [y[0], y[0], y[1, :4]]
    repeated = fit_by_em(LinearGaussian(2), sequences, method, steps=2)
    assert padded(sequences).shape == (3, 6, 3)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(weighted_fit.mean[name], t, rtol=1e-7, atol=1e-9)


def test_a_posterior_takes_lists_and_generates_sequences_with_its_moments(fit_by_em):
    y = randn(3, 4, 12, 2).cumsum(1)
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
        difference = z[:, t] - mean
        # 2 means and 4 covariances in 3 steps, at 5 standard errors: false alarms below 1e-4
        assert bool((difference.mean(0).abs() < 5 * (spread.diagonal() / 4000).sqrt()).all())
        size = spread.diagonal().sqrt()
        assert bool(((difference.T.cov() - spread).abs() < 5 * (2 / 4000) ** 0.5 * size[:, None] * size).all())
        left = drawn[:, t] - z[:, t] @ c.T - theta["offset"]
        assert bool((left.var(0) / theta["variances"] - 1).abs().max() < 5 * (2 / 4000) ** 0.5)
        mean, spread = a @ mean, a @ spread @ a.T + q


def test_a_posterior_is_rebuilt_from_its_tensors_and_float32_agrees_with_float64(fit_by_em):
    y = draw_sequences(5, 6, 8)
    posterior = fit_by_em(LinearGaussian(2), y, EM(start=THETA), steps=4)
    rebuilt = LatentPoint.of_tensors(posterior.target, posterior.tensors(), {}, **posterior.to_json())
    torch.testing.assert_close(rebuilt.log_likelihood(y[:, :5]), posterior.log_likelihood(y[:, :5]), rtol=0, atol=0)
    single = fit_by_em(LinearGaussian(2), y.float(), EM(start=THETA), steps=4)
    assert single.log_evidence.value == pytest.approx(posterior.log_evidence.value, rel=1e-3)


def test_the_noise_of_a_noiseless_column_is_held_at_the_floor_with_a_warning(fit_by_em):
    y = torch.full((1, 6, 2), 3.0).double()
    y[0, :, 1] = torch.arange(6.0)
    with pytest.warns(PrioryWarning, match=r"The state of LinearGaussian\(2\) explains columns? .* completely"):
        fit_by_em(LinearGaussian(2, floor=1e-2), y, steps=60)


@pytest.mark.parametrize(
    ("make", "message"),
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
def test_impossible_models_and_data_raise_an_error(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
