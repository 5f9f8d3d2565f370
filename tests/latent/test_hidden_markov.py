"""Hidden Markov models against enumeration of all paths and against hmmlearn."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from priory.core.errors import InputError, PrioryWarning
from priory.core.streams import stream
from priory.latent import expect, score
from priory.latent.forward_backward import smooth
from priory.latent.hidden_markov import HiddenMarkov
from priory.latent.sequences import padded
from priory.methods.em.em import EM
from priory.posteriors.latent import LatentPoint

NAN = float("nan")


def tensor(values) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


INITIAL, TRANSITIONS = tensor([0.5, 0.3, 0.2]), tensor([[0.7, 0.2, 0.1], [0.15, 0.6, 0.25], [0.2, 0.25, 0.55]])
CHAIN = {"initial": INITIAL, "transitions": TRANSITIONS}
FACTOR = tensor([[1.0, 0.0], [0.5, 0.8]])
COVARIANCE = FACTOR @ FACTOR.T

# Per kind of emission: model, parameters, sequences of unequal length with missing values, log p(y_t | k) by SciPy.

TWO_COLUMNS = tensor(
    [
        [[0.3, -1.0], [2.0, 0.5], [NAN, NAN], [4.1, 0.2]],
        [[1.0, 1.0], [0.0, 0.3], [NAN, NAN], [NAN, NAN]],
        [[NAN, NAN], [3.0, 2.0], [5.0, -1.0], [NAN, NAN]],
    ]
)
MEANS = tensor([[0.0, 0.0], [2.0, 1.0], [4.0, -1.0]])


def gaussian_log_density(spread):
    def value(y, k):
        there = ~np.isnan(y)
        if not there.any():
            return 0.0
        full = spread(k)
        return scipy.stats.multivariate_normal(MEANS[k].numpy()[there], full[np.ix_(there, there)]).logpdf(y[there])

    return value


def single(log_density):
    return lambda y, k: 0.0 if np.isnan(y) else float(log_density(float(y), k))


RATES, PROBS = tensor([1.0, 4.0, 8.0]), tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2], [0.2, 0.1, 0.4, 0.3]])
INTEGERS = tensor([[0, 3, NAN, 2], [1, 1, NAN, NAN], [NAN, 2, 3, NAN]])
PARTLY_MISSING = torch.where(torch.arange(24).reshape(3, 4, 2) % 7 == 1, torch.nan, TWO_COLUMNS)
VARIANCES = tensor([[1.0, 0.5], [0.7, 1.2], [2.0, 0.4]])
SPHERICAL_VARIANCES = tensor([0.3, 1.0, 2.0])
CASES = {
    "full": (
        HiddenMarkov(3),
        {"means": MEANS, "covariances": torch.stack([COVARIANCE, 2 * COVARIANCE, COVARIANCE + torch.eye(2)])},
        TWO_COLUMNS,
        gaussian_log_density(lambda k: [COVARIANCE, 2 * COVARIANCE, COVARIANCE + torch.eye(2)][k].numpy()),
    ),
    "tied": (
        HiddenMarkov(3, covariance="tied"),
        {"means": MEANS, "covariances": COVARIANCE},
        TWO_COLUMNS,
        gaussian_log_density(lambda k: COVARIANCE.numpy()),
    ),
    "full with missing values": (
        HiddenMarkov(3),
        {"means": MEANS, "covariances": torch.stack([COVARIANCE, 2 * COVARIANCE, COVARIANCE + torch.eye(2)])},
        PARTLY_MISSING,
        gaussian_log_density(lambda k: [COVARIANCE, 2 * COVARIANCE, COVARIANCE + torch.eye(2)][k].numpy()),
    ),
    "tied with missing values": (
        HiddenMarkov(3, covariance="tied"),
        {"means": MEANS, "covariances": COVARIANCE},
        PARTLY_MISSING,
        gaussian_log_density(lambda k: COVARIANCE.numpy()),
    ),
    "diagonal": (
        HiddenMarkov(3, covariance="diagonal"),
        {"means": MEANS, "covariances": VARIANCES},
        PARTLY_MISSING,
        gaussian_log_density(lambda k: np.diag(VARIANCES[k].numpy())),
    ),
    "spherical": (
        HiddenMarkov(3, covariance="spherical"),
        {"means": MEANS, "covariances": SPHERICAL_VARIANCES},
        PARTLY_MISSING,
        gaussian_log_density(lambda k: SPHERICAL_VARIANCES[k].item() * np.eye(2)),
    ),
    "univariate": (
        HiddenMarkov(3),
        {"means": MEANS[:, 0].clone(), "covariances": SPHERICAL_VARIANCES},
        TWO_COLUMNS[..., 0].clone(),
        single(lambda y, k: scipy.stats.norm(MEANS[k, 0].item(), SPHERICAL_VARIANCES[k].sqrt().item()).logpdf(y)),
    ),
    "poisson": (
        HiddenMarkov(3, emissions="poisson"),
        {"rates": RATES},
        INTEGERS,
        single(lambda y, k: scipy.stats.poisson(RATES[k].item()).logpmf(y)),
    ),
    "categorical": (
        HiddenMarkov(3, emissions="categorical", categories=4),
        {"probs": PROBS},
        INTEGERS,
        single(lambda y, k: math.log(PROBS[k, int(y)])),
    ),
}


def all_paths(y: Any, log_density, power: float = 1.0) -> dict[str, np.ndarray]:
    """Return log p(y), and states, pairs, mode, entropy and E[log p(y, z)] of q(z) ~ p(y, z)^power, by enumeration."""
    pi, a, steps = INITIAL.numpy(), TRANSITIONS.numpy(), len(y)
    log_b = np.array([[log_density(y_t, k) for k in range(3)] for y_t in y])
    q, pairs, powers, log_p, best = np.zeros((steps, 3)), np.zeros((3, 3)), [], [], (-1.0, ())
    for path in itertools.product(range(3), repeat=steps):
        p = pi[path[0]] * np.prod([a[i, j] for i, j in itertools.pairwise(path)])
        p *= math.exp(sum(log_b[t, k] for t, k in enumerate(path)))
        log_p.append(math.log(p) if p > 0 else -1e9)
        p = p**power
        best = max(best, (p, path))
        powers.append(p)
        for t, k in enumerate(path):
            q[t, k] += p
        for i, j in itertools.pairwise(path):
            pairs[i, j] += p
    total = sum(powers)
    entropy = scipy.stats.entropy(powers)
    mean = np.dot(powers, log_p) / total
    log = scipy.special.logsumexp(log_p)
    found = {"log": log, "entropy": entropy, "q": q / total, "pairs": pairs / total, "path": np.array(best[1])}
    return found | {"mean": mean}


@pytest.mark.parametrize("kind", CASES)
def test_likelihood_states_pairs_and_path_equal_those_by_enumeration(kind):
    model, emission_params, y, log_density = CASES[kind]
    model, _ = model.meet(y)
    theta, rows = CHAIN | emission_params, model.rows((y,))
    found, latent = model.e_step(theta, rows), model.hidden(theta, rows)
    pairs, first, entropy = np.zeros((3, 3)), np.zeros(3), 0.0
    for n, sequence in enumerate(y.numpy()):
        length = int((~np.isnan(sequence.reshape(4, -1)).all(1)).nonzero()[0].max()) + 1
        exact = all_paths(sequence[:length], log_density)
        assert float(found.bound[n]) == pytest.approx(exact["log"], rel=1e-12, abs=1e-12)
        assert float(model.log_marginal(theta, rows)[n]) == pytest.approx(exact["log"], rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(latent["responsibilities"][n, :length], exact["q"], rtol=1e-10, atol=1e-12)
        assert bool(latent["responsibilities"][n, length:].isnan().all())
        assert latent["path"][n].tolist() == [*exact["path"], *[-1] * (4 - length)]
        pairs, first, entropy = pairs + exact["pairs"], first + exact["q"][0], entropy + exact["entropy"]
    np.testing.assert_allclose(found.statistics["transitions"], pairs, rtol=1e-10)
    np.testing.assert_allclose(found.statistics["initial"], first, rtol=1e-10)
    if "missing" not in kind:  # missing values under a covariance are latent too, and add their entropy to the bound
        bound = float(model.complete(theta, found.statistics)) + entropy
        assert float(found.bound.sum()) == pytest.approx(bound, rel=1e-10)


@pytest.mark.parametrize("kind", ["full", "tied with missing values", "diagonal", "poisson", "categorical"])
def test_counts_bound_and_gap_of_a_tempered_q_equal_those_by_enumeration(kind):
    model, emission_params, y, log_density = CASES[kind]
    model, _ = model.meet(y)
    theta, weights = CHAIN | emission_params, tensor([1.0, 0.0, 2.5])
    found = model.e_step(theta, replace(model.rows((y,)), temperature=3.0, weights=weights))
    pairs, first, visits = np.zeros((3, 3)), np.zeros(3), np.zeros(3)
    for n, sequence in enumerate(y.numpy()):
        length = int((~np.isnan(sequence.reshape(4, -1)).all(1)).nonzero()[0].max()) + 1
        exact = all_paths(sequence[:length], log_density, power=1 / 3)
        bound = exact["mean"] + exact["entropy"]
        assert float(found.bound[n]) == pytest.approx(bound, rel=1e-12, abs=1e-12)
        assert float(found.gap[n]) == pytest.approx(exact["log"] - bound, rel=1e-10)
        w = weights[n].item()
        observed = ~np.isnan(sequence[:length].reshape(length, -1)).all(1)
        pairs, first, visits = (
            pairs + w * exact["pairs"],
            first + w * exact["q"][0],
            visits + w * exact["q"][observed].sum(0),
        )
    np.testing.assert_allclose(found.statistics["transitions"], pairs, rtol=1e-10)
    np.testing.assert_allclose(found.statistics["initial"], first, rtol=1e-10)
    np.testing.assert_allclose(found.statistics["sums"][:, -1], visits, rtol=1e-10)


def test_draws_of_paths_have_the_mean_of_q():
    model, emission_params, y, _ = CASES["full"]
    model, _ = model.meet(y)
    theta, weights, draws = CHAIN | emission_params, tensor([1.0, 0.5, 2.0]), 20_000
    rows = replace(model.rows((y,)), weights=weights)
    exact = model.e_step(theta, rows)
    found = model.e_step(theta, replace(rows, draws=draws, generator=stream(0, "test")))
    torch.testing.assert_close(found.bound, exact.bound, rtol=1e-12, atol=0)
    assert found.gap is None
    error = (
        0.5 * (weights.square().sum().item() / draws) ** 0.5
    )  # upper bound of the standard error for one pair of steps
    for name, num_steps in (("initial", 1), ("transitions", 3)):
        deviation = (found.statistics[name] - exact.statistics[name]).abs().max()
        assert deviation < 4.5 * num_steps * error  # false alarms: below 1e-4 for all twelve numbers
        assert found.statistics[name].sum() == pytest.approx(exact.statistics[name].sum().item(), rel=1e-12)
    deviation = (found.statistics["sums"][:, -1] - exact.statistics["sums"][:, -1]).abs().max()
    assert deviation < 4.5 * 4 * error


def test_annealing_and_draws_reach_the_maximum(fit_by_em):
    model = HiddenMarkov(2).meet(torch.zeros(1, 2).double())[0]
    theta = {"initial": tensor([0.5, 0.5]), "transitions": tensor([[0.9, 0.1], [0.2, 0.8]])}
    theta |= {"means": tensor([0.0, 3.0]), "covariances": tensor([1.0, 0.5])}
    y = model.generate(theta, 20, stream(0, "test"), 40).y
    plain = fit_by_em(HiddenMarkov(2), y, EM(tolerance=1e-10))
    annealed = fit_by_em(HiddenMarkov(2), y, EM(tolerance=1e-10, annealing=(4, 2)))
    assert annealed.log_evidence.value == pytest.approx(plain.log_evidence.value, abs=1e-5)
    drawn = fit_by_em(HiddenMarkov(2), y, EM(draws=50), steps=40)
    assert drawn.log_evidence.value > plain.log_evidence.value - 1  # 50 draws: theta is within 1/7 standard error


@pytest.mark.parametrize("kind", CASES)
def test_fishers_identity_holds_and_the_gradient_of_q_is_zero_at_the_m_step(kind):
    model, emission_params, y, _ = CASES[kind]
    y = torch.cat([y, y.flip(0).roll(1, 1)])  # enough steps for a covariance per state
    model, data = model.meet(y)
    theta = CHAIN | emission_params
    u = model.layout.unconstrain(theta).requires_grad_()
    model.log_marginal(model.layout.constrain(u), model.rows((y,))).sum().backward()
    torch.testing.assert_close(score(model, theta, data), u.grad, rtol=1e-8, atol=1e-8)

    (found,) = expect(model, [theta], data.blocks(2))
    best = model.layout.unconstrain(model.m_step(found.statistics, theta)).requires_grad_()
    model.complete(model.layout.constrain(best), found.statistics).backward()
    assert best.grad is not None
    assert float(best.grad.abs().max()) < 1e-6


# Long sequences are split into chunks.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_give_the_messages_of_unsplit_sequences(dtype):
    generator = torch.Generator().manual_seed(0)
    log_b = 8 * torch.randn(3, 24, 2, generator=generator, dtype=dtype)
    pi, a, smallest = INITIAL.to(dtype), TRANSITIONS.to(dtype), 1e-260 if dtype == torch.float64 else 1e-28
    unsplit = smooth(pi, a, log_b.clone(), 1, smallest)
    length = torch.tensor([24, 24])
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for chunks in (2, 4, 8, 24):
        chunked = log_b.unflatten(1, (chunks, -1)).transpose(1, 2).reshape(3, 24 // chunks, 2 * chunks).clone()
        found = smooth(pi, a, chunked, chunks, smallest)
        marginals = found.marginals().unflatten(2, (chunks, 2)).transpose(1, 2).flatten(1, 2)
        torch.testing.assert_close(marginals, unsplit.marginals(), **tolerance)
        torch.testing.assert_close(found.pairs(), unsplit.pairs(), **tolerance)
        torch.testing.assert_close(found.log_evidence(length), unsplit.log_evidence(length), **tolerance)


@pytest.mark.parametrize("kind", ["full", "poisson"])
def test_splitting_a_long_sequence_with_missing_values_does_not_change_the_statistics(kind):
    model, emission_params, y, _ = CASES[kind]
    generator = torch.Generator().manual_seed(1)
    long = y[0, torch.randint(4, (1, 1013), generator=generator)]
    model, _ = model.meet(long)
    theta, rows = CHAIN | emission_params, model.rows((long,))
    found = model.e_step(theta, rows)
    torch.testing.assert_close(found.bound, model.log_marginal(theta, rows), rtol=1e-12, atol=0)
    steps = int((~(long.isnan().all(-1) if long.ndim == 3 else long.isnan())).nonzero()[:, 1].max()) + 1
    assert float(found.statistics["transitions"].sum()) == pytest.approx(steps - 1, rel=1e-12)
    batch = long.expand(2000, *long.shape[1:])[:200]  # so many sequences are not split
    unsplit = model.e_step(theta, model.rows((batch,)))
    for name, t in found.statistics.items():
        torch.testing.assert_close(200 * t, unsplit.statistics[name], rtol=1e-9, atol=1e-9)


def test_outliers_and_rare_transitions_keep_full_precision():
    y = tensor([[0.0, 0.1, 1e3, 0.2, -5e3, 100.0, 100.1, 0.0]])
    model, _ = HiddenMarkov(2).meet(y)
    theta = {
        "initial": tensor([0.5, 0.5]),
        "transitions": tensor([[0.9, 0.1], [1e-20, 1 - 1e-20]]),
        "means": tensor([0.0, 100.0]),
        "covariances": tensor([1.0, 4.0]),
    }
    log_b = scipy.stats.norm.logpdf(y.T.numpy(), [0.0, 100.0], [1.0, 2.0])
    log_a, each = theta["transitions"].log().numpy(), []
    for path in itertools.product(range(2), repeat=8):
        each.append(math.log(0.5) + sum(log_a[i, j] for i, j in itertools.pairwise(path)))
        each[-1] += sum(log_b[t, k] for t, k in enumerate(path))
    exact = scipy.special.logsumexp(each)
    assert float(model.e_step(theta, model.rows((y,))).bound) == pytest.approx(exact, rel=1e-12)
    best = max(range(len(each)), key=lambda i: each[i])
    assert model.most_likely(theta, model.rows((y,)))[0].tolist() == [int(digit) for digit in f"{best:08b}"]


# EM.


def split_by_length(y: np.ndarray) -> list[Tensor]:
    return list(tensor(y).split([40, 25, 33]))


def sequences(kind: str) -> list[Tensor]:
    t = np.arange(98)
    z = (np.floor(t / 7) + (t % 11 == 3)).astype(int) % 3
    if kind == "poisson":
        return split_by_length(np.floor(1.5 + 3.0 * z + 2.0 * np.sin(12.9898 * t * t)).clip(0))
    if kind == "categorical":
        return split_by_length((z + (np.sin(12.9898 * t * t) > 0.5)) % 4)
    first, second = 2.0 * z + np.sin(12.9898 * t * t + 1), z % 2 + 0.7 * np.cos(78.233 * t * t) - 0.3 * z
    return split_by_length(np.stack([first, second], 1))


def model_and_start(kind: str) -> tuple[HiddenMarkov, dict[str, Tensor]]:
    if kind == "poisson":
        return HiddenMarkov(3, emissions=kind), CHAIN | {"rates": RATES}
    if kind == "categorical":
        return HiddenMarkov(3, emissions=kind, categories=4), CHAIN | {"probs": PROBS}
    spread = torch.cov(torch.cat(sequences(kind)).T, correction=0)
    shaped = {
        "full": spread.expand(3, 2, 2),
        "tied": spread,
        "diagonal": spread.diagonal().expand(3, 2),
        "spherical": spread.diagonal().mean().expand(3),
    }[kind]
    means = tensor([[0.0, 0.0], [2.0, 1.0], [4.0, -1.0]])
    return HiddenMarkov(3, covariance=kind), CHAIN | {"means": means, "covariances": shaped}


# After 50 iterations of hmmlearn 0.3.3: log p(y), the first row of A, and the first state's mean, rate or probs.
HMMLEARN_RESULTS = {
    "full": (
        -239.60543640369843,
        [0.7028820156856735, 0.17135925568514712, 0.12575872862917925],
        [-0.23068447065171174, 0.024915597812328067],
    ),
    "tied": (
        -241.1976965242713,
        [0.6969897089032517, 0.1734422534458102, 0.1295680376509379],
        [-0.2230028632082235, 0.016141008834534877],
    ),
    "diagonal": (
        -242.4639492149699,
        [0.6096263054664416, 0.23902059836619952, 0.15135309616735898],
        [-0.27035863015878964, -0.05958118545780456],
    ),
    "spherical": (
        -247.98582115054955,
        [0.6132037299882234, 0.23911516778600803, 0.14768110222576855],
        [-0.2966216682811032, -0.05216376169878222],
    ),
    "poisson": (
        -210.38833666760848,
        [0.7447703613225182, 0.25498302533814987, 0.0002466133393319569],
        [0.5248767818636262],
    ),
    "categorical": (
        -98.42217302708437,
        [0.823264400093653, 0.17673559990634705, 6.9418304235299e-22],
        [0.8776011822207243, 0.07272204248540028, 0.04967677529387542, 1.0568112457523714e-35],
    ),
}


@pytest.mark.parametrize("kind", HMMLEARN_RESULTS)
def test_fifty_iterations_from_the_same_start_equal_those_of_hmmlearn(kind, fit_by_em):
    model, start = model_and_start(kind)
    posterior = fit_by_em(model, sequences(kind), EM(tolerance=0.0, start=start), steps=50)
    log_likelihood, row, first = HMMLEARN_RESULTS[kind]
    assert posterior.log_evidence.value == pytest.approx(log_likelihood, rel=1e-9)
    torch.testing.assert_close(posterior.mean["transitions"][0], tensor(row), rtol=1e-6, atol=1e-9)
    name = {"poisson": "rates", "categorical": "probs"}.get(kind, "means")
    torch.testing.assert_close(posterior.mean[name][0].reshape(-1), tensor(first), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("covariance", ["full", "tied", "diagonal", "spherical"])
def test_installed_hmmlearn_gives_the_same_result(covariance, fit_by_em):
    hmm = pytest.importorskip("hmmlearn.hmm")
    model, start = model_and_start(covariance)
    named = "diag" if covariance == "diagonal" else covariance
    options = {"n_iter": 20, "tol": -np.inf, "init_params": "", "covars_prior": 0, "covars_weight": 1}
    peer = hmm.GaussianHMM(3, covariance_type=named, **options)
    peer.startprob_, peer.transmat_ = INITIAL.numpy(), TRANSITIONS.numpy()
    peer.means_, peer.covars_ = start["means"].numpy(), start["covariances"].numpy()
    y = torch.cat(sequences(covariance)).numpy()
    peer.fit(y, [40, 25, 33])
    posterior = fit_by_em(model, sequences(covariance), EM(tolerance=0.0, start=start), steps=20)
    assert posterior.log_evidence.value == pytest.approx(peer.score(y, [40, 25, 33]), rel=1e-9)
    torch.testing.assert_close(posterior.mean["transitions"], tensor(peer.transmat_), rtol=1e-6, atol=1e-9)
    states = peer.predict(y, [40, 25, 33])
    path = posterior.predict_labels(padded(sequences(covariance)))
    assert path[path >= 0].tolist() == states.tolist()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(list(HMMLEARN_RESULTS)),
    how=st.sampled_from(["k-means++", "random"]),
)
def test_the_bound_never_falls(seed, kind, how):
    model, _ = model_and_start(kind)
    model, data = model.meet(sequences(kind))
    (y,) = next(iter(data.blocks(10)))
    y = y.masked_fill(torch.rand(y.shape, generator=stream(seed, "holes")) < 0.1, NAN)
    theta = model.begin(model.rows((y,)), how, stream(seed, "begin"))
    before = -math.inf
    for _ in range(12):
        (found,) = expect(model, [theta], [(y,)])
        assert float(found.bound) >= before - 1e-10 * abs(float(found.bound))
        before, theta = float(found.bound), model.m_step(found.statistics, theta)


def test_a_sequence_weight_equals_that_many_repetitions_and_padding_has_no_effect(fit_by_em):
    model, start = model_and_start("full")
    y = padded(sequences("full"))
    weighted = HiddenMarkov(3, given="weights")
    method = EM(tolerance=0.0, start=start)
    weighted_fit = fit_by_em(weighted, (y, torch.tensor([2.0, 1.0, 0.0])), method, 5)
    listed = fit_by_em(weighted, (sequences("full"), torch.tensor([2.0, 1.0, 0.0])), method, 5)
    repeated = fit_by_em(model, torch.cat([y[[0, 0, 1]], torch.full((3, 5, 2), NAN).double()], 1), method, 5)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(weighted_fit.mean[name], t, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(listed.mean[name], weighted_fit.mean[name], rtol=0, atol=0)
    assert weighted_fit.log_evidence.value == pytest.approx(repeated.log_evidence.value, rel=1e-12)


def test_a_posterior_scores_sequences_of_other_lengths_and_is_rebuilt_from_its_tensors(fit_by_em):
    model, start = model_and_start("full")
    posterior = fit_by_em(model, sequences("full"), EM(start=start), steps=5)
    y = padded(sequences("full"))
    longer = torch.cat([y, y], 1)[:1]
    assert posterior.log_likelihood(longer).shape == (1,)
    total = posterior.log_likelihood(y).sum()
    torch.testing.assert_close(
        posterior.log_likelihood(y[1:2, :25]), posterior.log_likelihood(y)[1:2], rtol=1e-12, atol=0
    )
    assert float(total) == pytest.approx(posterior.log_evidence.value, rel=1e-12)
    rebuilt = LatentPoint.of_tensors(posterior.target, posterior.tensors(), {}, **posterior.to_json())
    torch.testing.assert_close(rebuilt.log_likelihood(y).sum(), total, rtol=1e-12, atol=0)


def test_float32_agrees_with_float64(fit_by_em):
    model, start = model_and_start("full")
    y = padded(sequences("full"))
    double = fit_by_em(model, y, EM(tolerance=0.0, start=start), steps=10)
    single = fit_by_em(model, y.float(), EM(tolerance=0.0, start=start), steps=10)
    assert single.mean["means"].dtype == torch.float32
    torch.testing.assert_close(single.mean["means"].double(), double.mean["means"], rtol=1e-3, atol=1e-3)


def test_a_state_with_one_repeated_value_is_held_at_the_floor_with_a_warning(fit_by_em):
    y = torch.cat([torch.zeros(1, 10), torch.ones(1, 10)], 1).double()
    with pytest.warns(PrioryWarning, match=r"of HiddenMarkov\(2, covariance='full'\) would have a singular covariance"):
        posterior = fit_by_em(HiddenMarkov(2), y)
    assert float(posterior.history["bound"].diff().min()) > -1e-8
    assert sorted(posterior.mean["means"].round(decimals=6).tolist()) == [0.0, 1.0]


# Known states.


@pytest.mark.parametrize("kind", CASES)
def test_known_states_restrict_the_paths(kind):
    model, emission_params, y, log_density = CASES[kind]
    with_states = HiddenMarkov(
        3, model.emissions, getattr(model.emission, "covariance", "full"), model.categories, given="z"
    )
    z = torch.tensor([[-1, 2, 0, -1], [1, -1, -1, -1], [-1, -1, 2, -1]])
    prepared, data = with_states.meet((y, z))
    theta = CHAIN | emission_params
    rows = prepared.rows((y, z))
    found, q, path = (
        prepared.e_step(theta, rows),
        prepared.responsibilities(theta, rows),
        prepared.most_likely(theta, rows),
    )
    torch.testing.assert_close(prepared.log_marginal(theta, rows), found.bound, rtol=1e-10, atol=1e-10)
    pairs = np.zeros((3, 3))
    for n, steps in enumerate((4, 2, 3)):
        each = list(zip(y[n, :steps].numpy(), z[n, :steps].tolist(), strict=True))
        exact = all_paths(each, lambda s, k: log_density(s[0], k) if s[1] in (-1, k) else -math.inf)
        assert float(found.bound[n]) == pytest.approx(exact["log"], rel=1e-10)
        torch.testing.assert_close(q[n, :steps], tensor(exact["q"]), rtol=1e-9, atol=1e-12)
        assert path[n, :steps].tolist() == exact["path"].tolist()
        pairs += exact["pairs"]
    torch.testing.assert_close(found.statistics["transitions"], tensor(pairs), rtol=1e-9, atol=1e-12)
    u = prepared.layout.unconstrain(theta).requires_grad_()
    prepared.log_marginal(prepared.layout.constrain(u), rows).sum().backward()
    torch.testing.assert_close(score(prepared, theta, data), u.grad, rtol=1e-8, atol=1e-8)


def draw_chains(n: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw chains whose state changes with probability 0.3, and their emissions."""
    generator = torch.Generator().manual_seed(seed)
    z = (torch.rand(n, steps, generator=generator) < 0.3).cumsum(1) % 3
    return 3.0 * z + torch.randn(n, steps, generator=generator, dtype=torch.float64), z


@pytest.mark.parametrize("length", [30, 700])  # the longer is split into chunks
def test_with_all_states_known_one_iteration_is_complete_data_maximum_likelihood(length, fit_by_em):
    y, z = draw_chains(2, length)
    with_states = HiddenMarkov(3, given="z")
    once, more = (fit_by_em(with_states, (y, z), EM(tolerance=0.0), steps=steps) for steps in (1, 3))
    pairs = torch.zeros(3, 3).double()
    for row in z:
        for i, j in itertools.pairwise(row.tolist()):
            pairs[i, j] += 1
    torch.testing.assert_close(once.mean["transitions"], pairs / pairs.sum(1, keepdim=True), rtol=1e-10, atol=1e-12)
    first = torch.bincount(z[:, 0], minlength=3) / 2
    torch.testing.assert_close(once.mean["initial"], first.double(), rtol=1e-10, atol=1e-12)
    for k in range(3):
        assert float(once.mean["means"][k]) == pytest.approx(float(y[z == k].mean()), rel=1e-10)
        assert float(once.mean["covariances"][k]) == pytest.approx(float(y[z == k].var(correction=0)), rel=1e-9)
    for name, t in once.mean.items():
        torch.testing.assert_close(more.mean[name], t, rtol=1e-10, atol=1e-12)


def forward_and_backward(theta: dict[str, Tensor], y: Tensor, z: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return log p(y, known z), q per step (T, 3) and the sum of q over pairs (3, 3), by the plain recursion."""
    emission_params = torch.distributions.Normal(theta["means"], theta["covariances"].sqrt()).log_prob(y[:, None]).exp()
    emission_params = torch.where((z[:, None] < 0) | (z[:, None] == torch.arange(3)), emission_params, 0.0)
    A, forward, backward = theta["transitions"], [theta["initial"] * emission_params[0]], [torch.ones(3).double()]
    for e in emission_params[1:]:
        forward.append(forward[-1] @ A * e)
    for e in emission_params[1:].flip(0):
        backward.append(A @ (e * backward[-1]))
    a, b = torch.stack(forward), torch.stack(backward[::-1])
    p = a[-1].sum()
    return float(p.log()), a * b / p, torch.einsum("ti,ij,tj->ij", a[:-1], A, emission_params[1:] * b[1:]) / p


def test_known_states_fix_the_order_of_states_and_the_result_is_a_fixed_point(fit_by_em):
    y, z = draw_chains(3, 40)
    known = torch.where(torch.arange(40) < 8, z, -1)
    lists = ([y[0], y[1, :30], y[2, :20]], [known[0], known[1, :30], known[2, :20]])
    for data in ((y, known), lists):
        posterior = fit_by_em(HiddenMarkov(3, given="z"), data)
        torch.testing.assert_close(posterior.mean["means"], torch.tensor([0.0, 3.0, 6.0]).double(), atol=1.0, rtol=0)
        history = posterior.history["bound"]
        assert float((history.diff() / history[1:].abs()).min()) >= -1e-10
        # Exact check: the result is a fixed point of textbook EM.
        result = fit_by_em(HiddenMarkov(3, given="z"), data, EM(tolerance=1e-15), steps=2000)
        theta, given_z = result.mean, list(zip(*data, strict=True))
        logs, q, pairs = zip(*(forward_and_backward(theta, *each) for each in given_z), strict=True)
        assert result.log_evidence.value == pytest.approx(sum(logs), rel=1e-10)
        all_q, values = torch.cat(q), torch.cat([each[0] for each in given_z])[:, None]
        means = (all_q * values).sum(0) / all_q.sum(0)
        wanted = {
            "initial": torch.stack([each[0] for each in q]).mean(0),
            "transitions": sum(pairs) / sum(pairs).sum(1, keepdim=True),
            "means": means,
            "covariances": (all_q * (values - means).square()).sum(0) / all_q.sum(0),
        }
        for name, t in wanted.items():
            torch.testing.assert_close(theta[name].reshape(t.shape), t, rtol=1e-6, atol=1e-6)
    weighted = (y, torch.tensor([1.0, 2.0, 0.0]), known)
    weighted_fit = fit_by_em(HiddenMarkov(3, given=("weights", "z")), weighted, steps=5)
    assert bool(torch.isfinite(weighted_fit.history["bound"]).all())
    start = EM(start=dict(weighted_fit.mean), tolerance=0.0)
    weighted_fit = fit_by_em(HiddenMarkov(3, given=("weights", "z")), weighted, start, steps=5)
    repeated = fit_by_em(HiddenMarkov(3, given="z"), (y[[0, 1, 1]], known[[0, 1, 1]]), start, steps=5)
    torch.testing.assert_close(weighted_fit.history["bound"], repeated.history["bound"], rtol=1e-10, atol=1e-10)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(weighted_fit.mean[name], t, rtol=1e-9, atol=1e-9)


def test_a_posterior_takes_lists_of_sequences_of_unequal_length(fit_by_em):
    model, start = model_and_start("full")
    posterior = fit_by_em(model, sequences("full"), EM(start=start), steps=3)
    listed, whole = sequences("full"), padded(sequences("full"))
    assert torch.equal(posterior.log_likelihood(listed), posterior.log_likelihood(whole))
    assert torch.equal(posterior.predict_labels(listed), posterior.predict_labels(whole))
    latent = posterior.hidden(listed)
    torch.testing.assert_close(latent["responsibilities"], posterior.responsibilities(listed), equal_nan=True)
    assert torch.equal(latent["path"], posterior.predict_labels(listed))
    one = posterior.responsibilities([listed[1]])
    torch.testing.assert_close(one[0], latent["responsibilities"][1, : len(listed[1])], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["diagonal", "univariate", "poisson", "categorical"])
def test_generated_sequences_have_the_transitions_and_emissions_of_the_model(kind):
    model, emission_params, y, _ = CASES[kind]
    prepared = model.meet(y)[0]
    drawn, z = prepared.generate(CHAIN | emission_params, 400, stream(0, "test"), 20)
    assert drawn.shape == (400, 20, *y.shape[2:])
    assert z.shape == (400, 20)
    transition_counts = torch.zeros(3, 3).index_put_(
        (z[:, :-1].flatten(), z[:, 1:].flatten()), torch.ones(()), accumulate=True
    )
    frequencies = (transition_counts / transition_counts.sum(1, keepdim=True)).double()
    error = (TRANSITIONS * (1 - TRANSITIONS) / transition_counts.sum(1, keepdim=True)).sqrt()
    assert bool(((frequencies - TRANSITIONS).abs() < 5 * error).all())  # 9 numbers: false alarms below 1e-5
    assert float((z[:, 0] == 0).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 20)
    name = next(iter(emission_params))
    for k in range(3):
        of_state = drawn[z == k]
        mean = emission_params[name][k] if name != "probs" else (emission_params[name][k] * torch.arange(4)).sum()
        assert bool(((of_state.mean(0) - mean).abs() < 5 * of_state.std(0) / len(of_state) ** 0.5).all())
    assert prepared.generate(CHAIN | emission_params, 2, stream(0, "test")).y.shape[:2] == (2, 4)


WITH_KNOWN_STATES = HiddenMarkov(2, given="z")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HiddenMarkov(0), "The 'k' argument of HiddenMarkov must be an integer >= 1, got 0."),
        (lambda: HiddenMarkov(2, emissions="gamma"), "must be one of gaussian, categorical, poisson, got 'gamma'"),
        (
            lambda: HiddenMarkov(2, emissions="categorical"),
            "'categories' argument of HiddenMarkov must be an integer >= 2",
        ),
        (
            lambda: HiddenMarkov(2, categories=3),
            "The 'categories' argument of HiddenMarkov must be left out without them",
        ),
        (lambda: HiddenMarkov(2, covariance="round"), "must be one of full, tied, diagonal, spherical"),
        (lambda: HiddenMarkov(2, floor=2.0), "must lie between 0 and 1"),
        (
            lambda: HiddenMarkov(2, given="x"),
            "The 'given' argument of HiddenMarkov must be 'weights', 'z' or both, got 'x'",
        ),
        (
            lambda: WITH_KNOWN_STATES.meet((INTEGERS, torch.zeros(3).long())),
            "must be integers, one per step, -1 where it is hidden",
        ),
        (
            lambda: WITH_KNOWN_STATES.meet((INTEGERS, torch.zeros(3, 4))),
            "must be integers, one per step, -1 where it is hidden",
        ),
        (lambda: WITH_KNOWN_STATES.meet(([torch.ones(2)], [[0.5, 1.0]])), "must be integers, one per step"),
        (
            lambda: WITH_KNOWN_STATES.meet((torch.ones(1, 2), torch.tensor([[0, 2]]))),
            "must be from 0 to 1, or -1 where it is hidden",
        ),
        (
            lambda: WITH_KNOWN_STATES.meet((INTEGERS, torch.zeros(3, 4).long())),
            "must be -1 after the last value of a sequence",
        ),
        (lambda: HiddenMarkov(2).meet(torch.ones(5)), "must be (n, T) or (n, T, D), got rows of the shape ()"),
        (lambda: HiddenMarkov(2).meet(torch.ones(2, 3, 4, 5)), "must be (n, T) or (n, T, D)"),
        (lambda: HiddenMarkov(2).meet([torch.ones(2), torch.ones(2, 2)]), "the same D in all"),
        (lambda: HiddenMarkov(2).meet([]), "The 'data' argument of fit must have at least one sequence, got none."),
        (lambda: HiddenMarkov(2).meet(torch.full((2, 3), NAN)), "must have a value, got only NaN."),
        (
            lambda: HiddenMarkov(2, emissions="poisson").meet(-INTEGERS),
            "The 'y' argument of HiddenMarkov(2, emissions='poisson') must be integers >= 0",
        ),
        (
            lambda: HiddenMarkov(2).meet(1e200 * INTEGERS),
            "The 'y' argument of HiddenMarkov(2, covariance='full') must have columns that spread by",
        ),
        (
            lambda: HiddenMarkov(2, emissions="categorical", categories=3).meet(INTEGERS),
            "The 'y' argument of HiddenMarkov(2, emissions='categorical', categories=3) must be integers from 0 to 2",
        ),
        (
            lambda: HiddenMarkov(2, emissions="categorical", categories=3).meet(TWO_COLUMNS),
            "must be (n, T), one number per step",
        ),
    ],
)
def test_impossible_models_and_data_raise_an_error(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)


def test_a_posterior_scores_narrow_states_accurately(fit_by_em):
    noise = torch.randn(3, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = torch.where(torch.arange(30) % 3 == 0, 1000 + 1e-5 * noise, 1003 + noise)
    posterior = fit_by_em(HiddenMarkov(2, floor=1e-14), y, EM(restarts=2), steps=20)
    assert float(posterior.mean["covariances"].min()) < 1e-9
    theta = {name: t.numpy() for name, t in posterior.mean.items()}
    total = 0.0
    for sequence in y.numpy():
        log_b = scipy.stats.norm(theta["means"], theta["covariances"] ** 0.5).logpdf(sequence[:, None])
        message = np.log(theta["initial"]) + log_b[0]
        for row in log_b[1:]:
            message = scipy.special.logsumexp(message[:, None] + np.log(theta["transitions"]), axis=0) + row
        total += scipy.special.logsumexp(message)
    assert float(posterior.log_likelihood(y).sum()) == pytest.approx(total, rel=1e-7)
    assert posterior.log_evidence.value == pytest.approx(total, rel=1e-7)


def test_warnings_about_empty_sequences_and_too_few_steps_name_the_model():
    with pytest.warns(PrioryWarning) as caught:
        HiddenMarkov(4).meet([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([NAN])])
    messages = [str(w.message) for w in caught]
    assert messages == [
        "1 sequence has no value, and says nothing about HiddenMarkov(4, covariance='full').",
        "HiddenMarkov(4, covariance='full') has more states than there are steps, 3: some will be unused or equal.",
    ]
    assert caught[0].filename == __file__


def test_sequences_of_weight_zero_change_neither_the_frame_nor_the_start():
    y = torch.randn(3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    far = torch.cat([y, 100 + y])
    weights = torch.tensor([1, 2, 1, 0, 0, 0])
    weighted_fit, data = HiddenMarkov(2, given="weights").meet((far, weights))
    repeated, again = HiddenMarkov(2).meet(y[[0, 1, 1, 2]])
    for name, t in weighted_fit.frame.items():
        torch.testing.assert_close(t, repeated.frame[name], rtol=1e-12, atol=1e-12)
    one = weighted_fit.begin(weighted_fit.rows(data.some(6)), "k-means++", stream(5, "test"))
    assert float(one["means"].max()) < 10
    assert again.num_data == 4
