"""Hidden Markov models against all paths, one by one, and against hmmlearn."""

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
SPREAD = FACTOR @ FACTOR.T

# Each kind of emission: the model, its parameters, sequences with ends and holes, and log p(y_t | k) by SciPy.

PAIRS = tensor(
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
WHOLE = tensor([[0, 3, NAN, 2], [1, 1, NAN, NAN], [NAN, 2, 3, NAN]])
HALF = torch.where(torch.arange(24).reshape(3, 4, 2) % 7 == 1, torch.nan, PAIRS)
VARIANCES = tensor([[1.0, 0.5], [0.7, 1.2], [2.0, 0.4]])
NARROW = tensor([0.3, 1.0, 2.0])
CASES = {
    "full": (
        HiddenMarkov(3),
        {"means": MEANS, "covariances": torch.stack([SPREAD, 2 * SPREAD, SPREAD + torch.eye(2)])},
        PAIRS,
        gaussian_log_density(lambda k: [SPREAD, 2 * SPREAD, SPREAD + torch.eye(2)][k].numpy()),
    ),
    "tied": (
        HiddenMarkov(3, covariance="tied"),
        {"means": MEANS, "covariances": SPREAD},
        PAIRS,
        gaussian_log_density(lambda k: SPREAD.numpy()),
    ),
    "full with holes": (
        HiddenMarkov(3),
        {"means": MEANS, "covariances": torch.stack([SPREAD, 2 * SPREAD, SPREAD + torch.eye(2)])},
        HALF,
        gaussian_log_density(lambda k: [SPREAD, 2 * SPREAD, SPREAD + torch.eye(2)][k].numpy()),
    ),
    "tied with holes": (
        HiddenMarkov(3, covariance="tied"),
        {"means": MEANS, "covariances": SPREAD},
        HALF,
        gaussian_log_density(lambda k: SPREAD.numpy()),
    ),
    "diagonal": (
        HiddenMarkov(3, covariance="diagonal"),
        {"means": MEANS, "covariances": VARIANCES},
        HALF,
        gaussian_log_density(lambda k: np.diag(VARIANCES[k].numpy())),
    ),
    "spherical": (
        HiddenMarkov(3, covariance="spherical"),
        {"means": MEANS, "covariances": NARROW},
        HALF,
        gaussian_log_density(lambda k: NARROW[k].item() * np.eye(2)),
    ),
    "univariate": (
        HiddenMarkov(3),
        {"means": MEANS[:, 0].clone(), "covariances": NARROW},
        PAIRS[..., 0].clone(),
        single(lambda y, k: scipy.stats.norm(MEANS[k, 0].item(), NARROW[k].sqrt().item()).logpdf(y)),
    ),
    "poisson": (
        HiddenMarkov(3, emissions="poisson"),
        {"rates": RATES},
        WHOLE,
        single(lambda y, k: scipy.stats.poisson(RATES[k].item()).logpmf(y)),
    ),
    "categorical": (
        HiddenMarkov(3, emissions="categorical", categories=4),
        {"probs": PROBS},
        WHOLE,
        single(lambda y, k: math.log(PROBS[k, int(y)])),
    ),
}


def all_paths(y: Any, log_density, power: float = 1.0) -> dict[str, np.ndarray]:
    """log p(y); of q(z) ~ p(y, z)^power its states, pairs, likeliest path, entropy and E[log p(y, z)], by all paths."""
    pi, a, steps = INITIAL.numpy(), TRANSITIONS.numpy(), len(y)
    log_b = np.array([[log_density(y_t, k) for k in range(3)] for y_t in y])
    q, pairs, each, log_p, best = np.zeros((steps, 3)), np.zeros((3, 3)), [], [], (-1.0, ())
    for path in itertools.product(range(3), repeat=steps):
        p = pi[path[0]] * np.prod([a[i, j] for i, j in itertools.pairwise(path)])
        p *= math.exp(sum(log_b[t, k] for t, k in enumerate(path)))
        log_p.append(math.log(p) if p > 0 else -1e9)
        p = p**power
        best = max(best, (p, path))
        each.append(p)
        for t, k in enumerate(path):
            q[t, k] += p
        for i, j in itertools.pairwise(path):
            pairs[i, j] += p
    total = sum(each)
    entropy = scipy.stats.entropy(each)
    mean = np.dot(each, log_p) / total
    log = scipy.special.logsumexp(log_p)
    found = {"log": log, "entropy": entropy, "q": q / total, "pairs": pairs / total, "path": np.array(best[1])}
    return found | {"mean": mean}


@pytest.mark.parametrize("kind", CASES)
def test_likelihood_states_pairs_and_path_are_those_of_all_paths(kind):
    model, emitted, y, log_density = CASES[kind]
    model, _ = model.meet(y)
    theta, rows = CHAIN | emitted, model.rows((y,))
    found, hidden = model.e_step(theta, rows), model.hidden(theta, rows)
    pairs, first, entropy = np.zeros((3, 3)), np.zeros(3), 0.0
    for n, sequence in enumerate(y.numpy()):
        length = int((~np.isnan(sequence.reshape(4, -1)).all(1)).nonzero()[0].max()) + 1
        exact = all_paths(sequence[:length], log_density)
        assert float(found.bound[n]) == pytest.approx(exact["log"], rel=1e-12, abs=1e-12)
        assert float(model.log_marginal(theta, rows)[n]) == pytest.approx(exact["log"], rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(hidden["responsibilities"][n, :length], exact["q"], rtol=1e-10, atol=1e-12)
        assert bool(hidden["responsibilities"][n, length:].isnan().all())
        assert hidden["path"][n].tolist() == [*exact["path"], *[-1] * (4 - length)]
        pairs, first, entropy = pairs + exact["pairs"], first + exact["q"][0], entropy + exact["entropy"]
    np.testing.assert_allclose(found.statistics["transitions"], pairs, rtol=1e-10)
    np.testing.assert_allclose(found.statistics["initial"], first, rtol=1e-10)
    if "holes" not in kind:  # what a covariance fills in is hidden too, and has an entropy of its own
        bound = float(model.complete(theta, found.statistics)) + entropy
        assert float(found.bound.sum()) == pytest.approx(bound, rel=1e-10)


@pytest.mark.parametrize("kind", ["full", "tied with holes", "diagonal", "poisson", "categorical"])
def test_a_flattened_q_has_the_counts_the_bound_and_the_gap_of_all_paths(kind):
    model, emitted, y, log_density = CASES[kind]
    model, _ = model.meet(y)
    theta, weights = CHAIN | emitted, tensor([1.0, 0.0, 2.5])
    found = model.e_step(theta, replace(model.rows((y,)), temperature=3.0, weights=weights))
    pairs, first, visits = np.zeros((3, 3)), np.zeros(3), np.zeros(3)
    for n, sequence in enumerate(y.numpy()):
        length = int((~np.isnan(sequence.reshape(4, -1)).all(1)).nonzero()[0].max()) + 1
        exact = all_paths(sequence[:length], log_density, power=1 / 3)
        bound = exact["mean"] + exact["entropy"]
        assert float(found.bound[n]) == pytest.approx(bound, rel=1e-12, abs=1e-12)
        assert float(found.gap[n]) == pytest.approx(exact["log"] - bound, rel=1e-10)
        w = weights[n].item()
        seen = ~np.isnan(sequence[:length].reshape(length, -1)).all(1)
        pairs, first, visits = (
            pairs + w * exact["pairs"],
            first + w * exact["q"][0],
            visits + w * exact["q"][seen].sum(0),
        )
    np.testing.assert_allclose(found.statistics["transitions"], pairs, rtol=1e-10)
    np.testing.assert_allclose(found.statistics["initial"], first, rtol=1e-10)
    np.testing.assert_allclose(found.statistics["sums"][:, -1], visits, rtol=1e-10)


def test_draws_of_paths_stand_for_q_on_average():
    model, emitted, y, _ = CASES["full"]
    model, _ = model.meet(y)
    theta, weights, draws = CHAIN | emitted, tensor([1.0, 0.5, 2.0]), 20_000
    rows = replace(model.rows((y,)), weights=weights)
    exact = model.e_step(theta, rows)
    found = model.e_step(theta, replace(rows, draws=draws, generator=stream(0, "test")))
    torch.testing.assert_close(found.bound, exact.bound, rtol=1e-12, atol=0)
    assert found.gap is None
    error = 0.5 * (weights.square().sum().item() / draws) ** 0.5  # of a share, at most, for one pair of steps
    for name, times in (("initial", 1), ("transitions", 3)):
        off = (found.statistics[name] - exact.statistics[name]).abs().max()
        assert off < 4.5 * times * error  # false alarms: below 1e-4 for all twelve numbers
        assert found.statistics[name].sum() == pytest.approx(exact.statistics[name].sum().item(), rel=1e-12)
    off = (found.statistics["sums"][:, -1] - exact.statistics["sums"][:, -1]).abs().max()
    assert off < 4.5 * 4 * error


def test_annealing_and_draws_lead_to_the_maximum(fit_by_em):
    made, _ = HiddenMarkov(2).meet(torch.zeros(1, 2).double())[0], None
    theta = {"initial": tensor([0.5, 0.5]), "transitions": tensor([[0.9, 0.1], [0.2, 0.8]])}
    theta |= {"means": tensor([0.0, 3.0]), "covariances": tensor([1.0, 0.5])}
    y = made.generate(theta, 20, stream(0, "test"), 40).y
    plain = fit_by_em(HiddenMarkov(2), y, EM(tolerance=1e-10))
    cooled = fit_by_em(HiddenMarkov(2), y, EM(tolerance=1e-10, annealing=(4, 2)))
    assert cooled.log_evidence.value == pytest.approx(plain.log_evidence.value, abs=1e-5)
    drawn = fit_by_em(HiddenMarkov(2), y, EM(draws=50), steps=40)
    assert drawn.log_evidence.value > plain.log_evidence.value - 1  # draws leave theta about a standard error / 7 away


@pytest.mark.parametrize("kind", CASES)
def test_fishers_identity_holds_and_the_m_step_is_where_q_is_flat(kind):
    model, emitted, y, _ = CASES[kind]
    y = torch.cat([y, y.flip(0).roll(1, 1)])  # enough steps for each state to have a covariance
    model, data = model.meet(y)
    theta = CHAIN | emitted
    u = model.layout.unconstrain(theta).requires_grad_()
    model.log_marginal(model.layout.constrain(u), model.rows((y,))).sum().backward()
    torch.testing.assert_close(score(model, theta, data), u.grad, rtol=1e-8, atol=1e-8)

    (found,) = expect(model, [theta], data.blocks(2))
    best = model.layout.unconstrain(model.m_step(found.statistics, theta)).requires_grad_()
    model.complete(model.layout.constrain(best), found.statistics).backward()
    assert best.grad is not None
    assert float(best.grad.abs().max()) < 1e-6


# Cutting.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_give_the_messages_of_whole_sequences(dtype):
    generator = torch.Generator().manual_seed(0)
    log_b = 8 * torch.randn(3, 24, 2, generator=generator, dtype=dtype)
    pi, a, faint = INITIAL.to(dtype), TRANSITIONS.to(dtype), 1e-260 if dtype == torch.float64 else 1e-28
    whole = smooth(pi, a, log_b.clone(), 1, faint)
    length = torch.tensor([24, 24])
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for chunks in (2, 4, 8, 24):
        cut = log_b.unflatten(1, (chunks, -1)).transpose(1, 2).reshape(3, 24 // chunks, 2 * chunks).clone()
        found = smooth(pi, a, cut, chunks, faint)
        back = found.marginals().unflatten(2, (chunks, 2)).transpose(1, 2).flatten(1, 2)
        torch.testing.assert_close(back, whole.marginals(), **close)
        torch.testing.assert_close(found.pairs(), whole.pairs(), **close)
        torch.testing.assert_close(found.log_evidence(length), whole.log_evidence(length), **close)


@pytest.mark.parametrize("kind", ["full", "poisson"])
def test_one_long_sequence_of_odd_length_with_holes_is_cut_without_a_trace(kind):
    model, emitted, y, _ = CASES[kind]
    generator = torch.Generator().manual_seed(1)
    long = y[0, torch.randint(4, (1, 1013), generator=generator)]
    model, _ = model.meet(long)
    theta, rows = CHAIN | emitted, model.rows((long,))
    found = model.e_step(theta, rows)
    torch.testing.assert_close(found.bound, model.log_marginal(theta, rows), rtol=1e-12, atol=0)
    steps = int((~(long.isnan().all(-1) if long.ndim == 3 else long.isnan())).nonzero()[:, 1].max()) + 1
    assert float(found.statistics["transitions"].sum()) == pytest.approx(steps - 1, rel=1e-12)
    many = long.expand(2000, *long.shape[1:])[:200]  # too many to be cut
    beside = model.e_step(theta, model.rows((many,)))
    for name, t in found.statistics.items():
        torch.testing.assert_close(200 * t, beside.statistics[name], rtol=1e-9, atol=1e-9)


def test_far_outliers_and_sharp_states_keep_every_digit():
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
    assert model.most_likely(theta, model.rows((y,)))[0].tolist() == [int(bit) for bit in f"{best:08b}"]


# EM.


def lengths_of(y: np.ndarray) -> list[Tensor]:
    return list(tensor(y).split([40, 25, 33]))


def sequences(kind: str) -> list[Tensor]:
    t = np.arange(98)
    z = (np.floor(t / 7) + (t % 11 == 3)).astype(int) % 3
    if kind == "poisson":
        return lengths_of(np.floor(1.5 + 3.0 * z + 2.0 * np.sin(12.9898 * t * t)).clip(0))
    if kind == "categorical":
        return lengths_of((z + (np.sin(12.9898 * t * t) > 0.5)) % 4)
    first, second = 2.0 * z + np.sin(12.9898 * t * t + 1), z % 2 + 0.7 * np.cos(78.233 * t * t) - 0.3 * z
    return lengths_of(np.stack([first, second], 1))


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


# After 50 iterations of hmmlearn 0.3.3: log p(y), the first row of A, and the first state's mean, rate or chances.
PEER = {
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


@pytest.mark.parametrize("kind", PEER)
def test_fifty_iterations_from_the_same_start_are_hmmlearns(kind, fit_by_em):
    model, start = model_and_start(kind)
    posterior = fit_by_em(model, sequences(kind), EM(tolerance=0.0, start=start), steps=50)
    log_likelihood, row, first = PEER[kind]
    assert posterior.log_evidence.value == pytest.approx(log_likelihood, rel=1e-9)
    torch.testing.assert_close(posterior.mean["transitions"][0], tensor(row), rtol=1e-6, atol=1e-9)
    name = {"poisson": "rates", "categorical": "probs"}.get(kind, "means")
    torch.testing.assert_close(posterior.mean[name][0].reshape(-1), tensor(first), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("covariance", ["full", "tied", "diagonal", "spherical"])
def test_hmmlearn_itself_says_the_same(covariance, fit_by_em):
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
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(list(PEER)), how=st.sampled_from(["k-means++", "random"]))
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


def test_weights_are_repetitions_and_padding_is_nothing(fit_by_em):
    model, start = model_and_start("full")
    y = padded(sequences("full"))
    weighted = HiddenMarkov(3, given="weights")
    method = EM(tolerance=0.0, start=start)
    counted = fit_by_em(weighted, (y, torch.tensor([2.0, 1.0, 0.0])), method, 5)
    listed = fit_by_em(weighted, (sequences("full"), torch.tensor([2.0, 1.0, 0.0])), method, 5)
    repeated = fit_by_em(model, torch.cat([y[[0, 0, 1]], torch.full((3, 5, 2), NAN).double()], 1), method, 5)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(counted.mean[name], t, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(listed.mean[name], counted.mean[name], rtol=0, atol=0)
    assert counted.log_evidence.value == pytest.approx(repeated.log_evidence.value, rel=1e-12)


def test_a_posterior_scores_sequences_of_other_lengths_and_comes_back_from_its_tensors(fit_by_em):
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
    same = LatentPoint.of_tensors(posterior.target, posterior.tensors(), {}, **posterior.own())
    torch.testing.assert_close(same.log_likelihood(y).sum(), total, rtol=1e-12, atol=0)


def test_single_precision_follows_double(fit_by_em):
    model, start = model_and_start("full")
    y = padded(sequences("full"))
    double = fit_by_em(model, y, EM(tolerance=0.0, start=start), steps=10)
    single = fit_by_em(model, y.float(), EM(tolerance=0.0, start=start), steps=10)
    assert single.mean["means"].dtype == torch.float32
    torch.testing.assert_close(single.mean["means"].double(), double.mean["means"], rtol=1e-3, atol=1e-3)


def test_a_state_on_one_value_is_held_at_the_floor_and_one_never_visited_is_told(fit_by_em):
    y = torch.cat([torch.zeros(1, 10), torch.ones(1, 10)], 1).double()
    with pytest.warns(PrioryWarning, match=r"of HiddenMarkov\(2, covariance='full'\) would have a singular covariance"):
        posterior = fit_by_em(HiddenMarkov(2), y)
    assert float(posterior.history["bound"].diff().min()) > -1e-8
    assert sorted(posterior.mean["means"].round(decimals=6).tolist()) == [0.0, 1.0]


# Known states.


@pytest.mark.parametrize("kind", CASES)
def test_known_states_leave_only_the_paths_through_them(kind):
    model, emitted, y, log_density = CASES[kind]
    told = HiddenMarkov(3, model.emissions, getattr(model.emission, "covariance", "full"), model.categories, given="z")
    z = torch.tensor([[-1, 2, 0, -1], [1, -1, -1, -1], [-1, -1, 2, -1]])
    met, data = told.meet((y, z))
    theta = CHAIN | emitted
    rows = met.rows((y, z))
    found, q, path = met.e_step(theta, rows), met.responsibilities(theta, rows), met.most_likely(theta, rows)
    torch.testing.assert_close(met.log_marginal(theta, rows), found.bound, rtol=1e-10, atol=1e-10)
    pairs = np.zeros((3, 3))
    for n, steps in enumerate((4, 2, 3)):
        each = list(zip(y[n, :steps].numpy(), z[n, :steps].tolist(), strict=True))
        exact = all_paths(each, lambda s, k: log_density(s[0], k) if s[1] in (-1, k) else -math.inf)
        assert float(found.bound[n]) == pytest.approx(exact["log"], rel=1e-10)
        torch.testing.assert_close(q[n, :steps], tensor(exact["q"]), rtol=1e-9, atol=1e-12)
        assert path[n, :steps].tolist() == exact["path"].tolist()
        pairs += exact["pairs"]
    torch.testing.assert_close(found.statistics["transitions"], tensor(pairs), rtol=1e-9, atol=1e-12)
    u = met.layout.unconstrain(theta).requires_grad_()
    met.log_marginal(met.layout.constrain(u), rows).sum().backward()
    torch.testing.assert_close(score(met, theta, data), u.grad, rtol=1e-8, atol=1e-8)


def chain(n: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """States that stay a while, and what they emit."""
    generator = torch.Generator().manual_seed(seed)
    z = (torch.rand(n, steps, generator=generator) < 0.3).cumsum(1) % 3
    return 3.0 * z + torch.randn(n, steps, generator=generator, dtype=torch.float64), z


@pytest.mark.parametrize("length", [30, 700])  # of which the longer is cut into chunks
def test_with_all_states_known_one_iteration_is_complete_data_maximum_likelihood(length, fit_by_em):
    y, z = chain(2, length)
    told = HiddenMarkov(3, given="z")
    once, more = (fit_by_em(told, (y, z), EM(tolerance=0.0), steps=steps) for steps in (1, 3))
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
    """log p(y, the known z), q of each state (T, 3), and the sum of q over pairs (3, 3), by a plain recursion."""
    emitted = torch.distributions.Normal(theta["means"], theta["covariances"].sqrt()).log_prob(y[:, None]).exp()
    emitted = torch.where((z[:, None] < 0) | (z[:, None] == torch.arange(3)), emitted, 0.0)
    A, ahead, behind = theta["transitions"], [theta["initial"] * emitted[0]], [torch.ones(3).double()]
    for e in emitted[1:]:
        ahead.append(ahead[-1] @ A * e)
    for e in emitted[1:].flip(0):
        behind.append(A @ (e * behind[-1]))
    a, b = torch.stack(ahead), torch.stack(behind[::-1])
    p = a[-1].sum()
    return float(p.log()), a * b / p, torch.einsum("ti,ij,tj->ij", a[:-1], A, emitted[1:] * b[1:]) / p


def test_some_known_states_name_the_others_and_the_bound_never_falls(fit_by_em):
    y, z = chain(3, 40)
    known = torch.where(torch.arange(40) < 8, z, -1)
    lists = ([y[0], y[1, :30], y[2, :20]], [known[0], known[1, :30], known[2, :20]])
    for data in ((y, known), lists):
        posterior = fit_by_em(HiddenMarkov(3, given="z"), data)
        torch.testing.assert_close(posterior.mean["means"], torch.tensor([0.0, 3.0, 6.0]).double(), atol=1.0, rtol=0)
        history = posterior.history["bound"]
        assert float((history.diff() / history[1:].abs()).min()) >= -1e-10
        # and exactly: the end is a fixed point of EM as it is in textbooks
        end = fit_by_em(HiddenMarkov(3, given="z"), data, EM(tolerance=1e-15), steps=2000)
        theta, given_z = end.mean, list(zip(*data, strict=True))
        logs, q, pairs = zip(*(forward_and_backward(theta, *each) for each in given_z), strict=True)
        assert end.log_evidence.value == pytest.approx(sum(logs), rel=1e-10)
        every, values = torch.cat(q), torch.cat([each[0] for each in given_z])[:, None]
        means = (every * values).sum(0) / every.sum(0)
        wanted = {
            "initial": torch.stack([each[0] for each in q]).mean(0),
            "transitions": sum(pairs) / sum(pairs).sum(1, keepdim=True),
            "means": means,
            "covariances": (every * (values - means).square()).sum(0) / every.sum(0),
        }
        for name, t in wanted.items():
            torch.testing.assert_close(theta[name].reshape(t.shape), t, rtol=1e-6, atol=1e-6)
    weighted = (y, torch.tensor([1.0, 2.0, 0.0]), known)
    counted = fit_by_em(HiddenMarkov(3, given=("weights", "z")), weighted, steps=5)
    assert bool(torch.isfinite(counted.history["bound"]).all())
    start = EM(start=dict(counted.mean), tolerance=0.0)
    counted = fit_by_em(HiddenMarkov(3, given=("weights", "z")), weighted, start, steps=5)
    repeated = fit_by_em(HiddenMarkov(3, given="z"), (y[[0, 1, 1]], known[[0, 1, 1]]), start, steps=5)
    torch.testing.assert_close(counted.history["bound"], repeated.history["bound"], rtol=1e-10, atol=1e-10)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(counted.mean[name], t, rtol=1e-9, atol=1e-9)


def test_a_posterior_takes_lists_of_sequences_of_unequal_length(fit_by_em):
    model, start = model_and_start("full")
    posterior = fit_by_em(model, sequences("full"), EM(start=start), steps=3)
    listed, whole = sequences("full"), padded(sequences("full"))
    assert torch.equal(posterior.log_likelihood(listed), posterior.log_likelihood(whole))
    assert torch.equal(posterior.predict_labels(listed), posterior.predict_labels(whole))
    hidden = posterior.hidden(listed)
    torch.testing.assert_close(hidden["responsibilities"], posterior.responsibilities(listed), equal_nan=True)
    assert torch.equal(hidden["path"], posterior.predict_labels(listed))
    one = posterior.responsibilities([listed[1]])
    torch.testing.assert_close(one[0], hidden["responsibilities"][1, : len(listed[1])], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["diagonal", "univariate", "poisson", "categorical"])
def test_sequences_from_the_model_have_its_chances_and_its_emissions(kind):
    model, emitted, y, _ = CASES[kind]
    met = model.meet(y)[0]
    drawn, z = met.generate(CHAIN | emitted, 400, stream(0, "test"), 20)
    assert drawn.shape == (400, 20, *y.shape[2:])
    assert z.shape == (400, 20)
    moves = torch.zeros(3, 3).index_put_((z[:, :-1].flatten(), z[:, 1:].flatten()), torch.ones(()), accumulate=True)
    share = (moves / moves.sum(1, keepdim=True)).double()
    error = (TRANSITIONS * (1 - TRANSITIONS) / moves.sum(1, keepdim=True)).sqrt()
    assert bool(((share - TRANSITIONS).abs() < 5 * error).all())  # 9 numbers: false alarms below 1e-5
    assert float((z[:, 0] == 0).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 20)
    name = next(iter(emitted))
    for k in range(3):
        own = drawn[z == k]
        mean = emitted[name][k] if name != "probs" else (emitted[name][k] * torch.arange(4)).sum()
        assert bool(((own.mean(0) - mean).abs() < 5 * own.std(0) / len(own) ** 0.5).all())
    assert met.generate(CHAIN | emitted, 2, stream(0, "test")).y.shape[:2] == (2, 4)


TOLD = HiddenMarkov(2, given="z")


@pytest.mark.parametrize(
    ("make", "sentence"),
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
        (lambda: TOLD.meet((WHOLE, torch.zeros(3).long())), "must be integers, one per step, -1 where it is hidden"),
        (lambda: TOLD.meet((WHOLE, torch.zeros(3, 4))), "must be integers, one per step, -1 where it is hidden"),
        (lambda: TOLD.meet(([torch.ones(2)], [[0.5, 1.0]])), "must be integers, one per step"),
        (
            lambda: TOLD.meet((torch.ones(1, 2), torch.tensor([[0, 2]]))),
            "must be from 0 to 1, or -1 where it is hidden",
        ),
        (lambda: TOLD.meet((WHOLE, torch.zeros(3, 4).long())), "must be -1 after the last value of a sequence"),
        (lambda: HiddenMarkov(2).meet(torch.ones(5)), "must be (n, T) or (n, T, D), got rows of the shape ()"),
        (lambda: HiddenMarkov(2).meet(torch.ones(2, 3, 4, 5)), "must be (n, T) or (n, T, D)"),
        (lambda: HiddenMarkov(2).meet([torch.ones(2), torch.ones(2, 2)]), "the same D in all"),
        (lambda: HiddenMarkov(2).meet([]), "The 'data' argument of fit must have at least one sequence, got none."),
        (lambda: HiddenMarkov(2).meet(torch.full((2, 3), NAN)), "must have a value, got only NaN."),
        (
            lambda: HiddenMarkov(2, emissions="poisson").meet(-WHOLE),
            "The 'y' argument of HiddenMarkov(2, emissions='poisson') must be integers >= 0",
        ),
        (
            lambda: HiddenMarkov(2).meet(1e200 * WHOLE),
            "The 'y' argument of HiddenMarkov(2, covariance='full') must have columns that spread by",
        ),
        (
            lambda: HiddenMarkov(2, emissions="categorical", categories=3).meet(WHOLE),
            "The 'y' argument of HiddenMarkov(2, emissions='categorical', categories=3) must be integers from 0 to 2",
        ),
        (
            lambda: HiddenMarkov(2, emissions="categorical", categories=3).meet(PAIRS),
            "must be (n, T), one number per step",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(InputError) as caught:
        make()
    assert sentence in str(caught.value)


def test_a_posterior_scores_narrow_states_to_the_last_digits(fit_by_em):
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


def test_what_is_said_of_steps_and_sequences_names_the_chain():
    with pytest.warns(PrioryWarning) as told:
        HiddenMarkov(4).meet([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([NAN])])
    said = [str(w.message) for w in told]
    assert said == [
        "1 sequence has no value, and says nothing of HiddenMarkov(4, covariance='full').",
        "HiddenMarkov(4, covariance='full') has more states than there are steps, 3: some say the same, or nothing.",
    ]
    assert told[0].filename == __file__


def test_sequences_that_count_nothing_change_neither_frame_nor_start():
    y = torch.randn(3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    far = torch.cat([y, 100 + y])
    weights = torch.tensor([1, 2, 1, 0, 0, 0])
    counted, data = HiddenMarkov(2, given="weights").meet((far, weights))
    repeated, again = HiddenMarkov(2).meet(y[[0, 1, 1, 2]])
    for name, t in counted.frame.items():
        torch.testing.assert_close(t, repeated.frame[name], rtol=1e-12, atol=1e-12)
    one = counted.begin(counted.rows(data.some(6)), "k-means++", stream(5, "test"))
    assert float(one["means"].max()) < 10
    assert again.num_data == 4
