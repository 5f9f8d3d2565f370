"""Stein variational gradient descent against autograd, a double loop, and fixed points in closed form."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory.core.streams import stream
from priory.methods.variational.svgd import direction, jittered, median_rule, squared_distances
from priory.models.target import Target
from priory.posteriors import Draws

DOUBLE = torch.float64
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
MEAN = torch.tensor([1.0, -2.0], dtype=DOUBLE)
COVARIANCE = torch.tensor([[1.0, 0.3], [0.3, 0.25]], dtype=DOUBLE)


def randn(*shape: int, name: str = "noise") -> Tensor:
    return torch.randn(*shape, generator=stream(0, "svgd", name), dtype=DOUBLE)


def gaussian() -> pr.Density:
    """The unnormalised density N(MEAN, COVARIANCE)."""
    precision = COVARIANCE.inverse()

    def log_prob(p: Any) -> Tensor:
        away = p["x"] - MEAN
        return -0.5 * away @ precision @ away

    return pr.Density(log_prob, {"x": pr.Param((2,))}, dtype=DOUBLE)


def line() -> tuple[pr.Model, tuple[Tensor, Tensor]]:
    """A linear regression of 30 rows with known noise."""
    torch.manual_seed(0)
    X = randn(30, 3, name="inputs")
    y = X @ torch.tensor([1.0, -0.5, 0.2], dtype=DOUBLE) + 0.3 * randn(30, name="targets")
    return pr.Model(nn.Linear(3, 1).double(), pr.Gaussian(0.3), prior=1.0), (X, y)


def fit(model: Any, data: Any, method: Any, **options: Any) -> Any:
    return pr.fit(model, data, method, progress=False, **options)


def kernel(w: Tensor, v: Tensor, h: float) -> Tensor:
    return torch.exp(-(w - v).square().sum() / h)


def double_loop(w: Tensor, score: Tensor, h: float) -> Tensor:
    """Return phi from its definition, pair by pair, with the gradient of the kernel by autograd."""
    phi = torch.zeros_like(w)
    for i in range(len(w)):
        for j in range(len(w)):
            moved = w[j].clone().requires_grad_()
            k = kernel(moved, w[i], h)
            (slope,) = torch.autograd.grad(k, moved)
            phi[i] += (k.detach() * score[j] + slope) / len(w)
    return phi


# The direction.


@pytest.mark.parametrize("h", [0.3, 4.0])
def test_the_direction_equals_a_double_loop_over_pairs(h):
    w, score = 5 + randn(6, 3, name="w"), randn(6, 3, name="score")
    torch.testing.assert_close(direction(w, score, h), double_loop(w, score, h), **EXACT)


def test_the_default_bandwidth_is_the_median_squared_distance_over_log_n():
    w, score = randn(6, 3, name="w"), randn(6, 3, name="score")  # 15 pairs
    distances = sorted(float((w[i] - w[j]).norm()) for i in range(6) for j in range(i))
    h = distances[7] ** 2 / math.log(6)
    torch.testing.assert_close(direction(w, score), double_loop(w, score, h), **EXACT)


def test_members_have_their_own_directions():
    w, score = randn(2, 4, 5, 3, name="w"), randn(2, 4, 5, 3, name="score")
    for bandwidth in (None, 0.7):
        each = [direction(a, b, bandwidth) for a, b in zip(w.flatten(0, 1), score.flatten(0, 1), strict=True)]
        torch.testing.assert_close(direction(w, score, bandwidth).flatten(0, 1), torch.stack(each), **EXACT)


def test_the_direction_of_one_particle_is_its_gradient():
    w, score = randn(1, 4, name="w"), randn(1, 4, name="score")
    for bandwidth in (None, 0.7):
        torch.testing.assert_close(direction(w, score, bandwidth), score, **EXACT)


def test_the_direction_is_invariant_under_translation():
    w, score = randn(6, 3, name="w"), randn(6, 3, name="score")
    torch.testing.assert_close(direction(w + 1e3, score), direction(w, score), rtol=1e-9, atol=1e-9)


def test_the_direction_of_coinciding_particles_is_finite():
    w, score = torch.zeros(5, 2, dtype=DOUBLE), randn(5, 2, name="score")
    torch.testing.assert_close(direction(w, score), score.mean(0).expand(5, -1), **EXACT)
    w[0] = 1.0  # 4 of 10 pairs are apart, so that their median distance is zero and their mean squared distance 0.8
    assert float(median_rule(squared_distances(w))) == pytest.approx(0.8 / math.log(5), rel=1e-12)
    torch.testing.assert_close(direction(w, score), double_loop(w, score, 0.8 / math.log(5)), **EXACT)


# One particle, and two.


def test_one_particle_takes_the_same_steps_as_map():
    model, data = line()
    first = fit(model, data, pr.MAP(), steps=5)
    options: dict[str, Any] = {"steps": 300, "batch_size": 7}
    mode = fit(model, data, pr.MAP(start=first), **options)
    particle = fit(model, data, pr.SVGD(particles=1, start=first), **options)
    torch.testing.assert_close(particle.w[0], mode.w, **EXACT)
    torch.testing.assert_close(particle.history["loss"], mode.history["loss"], rtol=1e-10, atol=1e-8)


def two_particles(h: float | None, sd: float) -> float:
    """Return half the distance of two converged particles on N(m, sd^2), from phi = 0.

    With k = exp(-4 a^2 / h), phi(m + a) = 1/2 [-a/sd^2 (1 - k) + 4 a k / h]. The median rule makes k = 1/2.
    """
    return sd * math.sqrt(math.log(2)) if h is None else math.sqrt(h / 4 * math.log(1 + 4 * sd**2 / h))


@pytest.mark.parametrize("h", [None, 0.5, 20.0])
@pytest.mark.parametrize("T", [1.0, 4.0])
def test_two_particles_on_a_gaussian_converge_to_the_fixed_point_at_any_temperature(h, T):
    sd = 0.7
    density = pr.Density(lambda p: -0.5 * ((p["x"] - 3) / sd).square(), {"x": pr.Param()}, dtype=DOUBLE)
    a = two_particles(h, sd * math.sqrt(T))
    rest = torch.tensor([[3 - a], [3 + a]], dtype=DOUBLE)
    target = Target(density, None, temperature=T, tempers="posterior")
    phi = direction(rest, target.log_joint_and_grad(rest, ())[1], h)
    torch.testing.assert_close(phi, torch.zeros_like(phi), **EXACT)
    method = pr.SVGD(particles=2, bandwidth=h, learning_rate=0.05)
    found = fit(density, None, method, steps=1500, temperature=T, tempers="posterior").w
    torch.testing.assert_close(found.sort(0).values, rest, rtol=0, atol=1e-4)


# Many particles.


def test_converged_particles_on_a_gaussian_satisfy_the_moment_equations():
    """At convergence sum phi_i and sum phi_i w_i' are zero, which fixes two kernel-weighted moments of the particles.

    With K the kernel: sum_ij k_ij (w_j - m) = 0, and
    sum_ij k_ij (w_j - m)(w_i - m)' = C (1/h) sum_ij k_ij (w_i - w_j)(w_i - w_j)'.
    """
    h = 0.5
    w = fit(gaussian(), None, pr.SVGD(particles=20, bandwidth=h, learning_rate=0.05), steps=3000).w
    k = torch.stack([torch.stack([kernel(a, b, h) for b in w]) for a in w])
    mean = (k.sum(0)[:, None] * w).sum(0) / k.sum()
    torch.testing.assert_close(mean, MEAN, rtol=0, atol=1e-3)
    away = w - MEAN
    moments = torch.einsum("ij,jp,iq->pq", k, away, away)
    apart_by = w[:, None] - w[None]
    spread = torch.einsum("ij,ijp,ijq->pq", k, apart_by, apart_by) / h
    torch.testing.assert_close(moments @ spread.inverse(), COVARIANCE, rtol=0, atol=2e-3)


def test_particles_with_the_median_rule_have_the_mean_and_most_of_the_variance():
    found = fit(gaussian(), None, pr.SVGD(learning_rate=0.05), steps=2000)
    sd = COVARIANCE.diagonal().sqrt()
    assert bool(((found.mean["x"] - MEAN).abs() < 0.01 * sd).all())
    ratio = found.w.var(0, correction=0) / COVARIANCE.diagonal()
    assert bool(((ratio > 0.85) & (ratio < 1.0)).all()), ratio
    correlation = float(torch.corrcoef(found.w.T)[0, 1])
    assert correlation == pytest.approx(0.6, abs=0.02)


def test_minibatches_and_temperature_give_the_mean_of_the_tempered_linear_regression():
    model, (X, y) = line()
    found = fit(model, (X, y), pr.SVGD(particles=16, learning_rate=0.05), steps=2000, batch_size=10, temperature=2.0)
    features = torch.cat([X, torch.ones(30, 1, dtype=DOUBLE)], 1)
    precision = features.T @ features / (2 * 0.3**2) + torch.eye(4, dtype=DOUBLE)
    exact = torch.linalg.solve(precision, features.T @ y / (2 * 0.3**2))
    sd = precision.inverse().diagonal().sqrt()
    off = (found.w.mean(0) - exact) / sd
    assert float(off.abs().max()) < 0.1, off  # an error of a factor of two in N/n or T changes it by more than one half


# Starts, status and invalid arguments.


def test_particles_that_start_at_one_point_separate():
    first = fit(gaussian(), None, pr.MAP(), steps=500)
    found = fit(gaussian(), None, pr.SVGD(particles=8, learning_rate=0.05, start=first), steps=1000)
    assert float(found.w.var(0).min()) > 0.05
    w = torch.zeros(2, 3, 2, dtype=DOUBLE)
    w[:, 2] = 1.0
    moved = jittered(w, torch.ones(2, dtype=DOUBLE), stream(0, "apart"))
    assert torch.equal((moved != w).any(-1), torch.tensor([[False, True, False]] * 2))


def test_the_posterior_is_a_set_of_draws_with_a_status_and_citations(tmp_path, capsys):
    model, data = line()
    short = fit(model, data, pr.SVGD(particles=5), steps=30)
    assert isinstance(short, Draws)
    assert short.w.shape == (5, 4)
    assert short.status.name == "not_converged"
    short.save(tmp_path / "particles")
    loaded = pr.load(tmp_path / "particles", model)
    assert torch.equal(loaded.tensors()["w"], short.w)
    assert loaded.status == short.status
    assert "liu2016stein" in pr.cite(short)
    assert len(fit(model, data, pr.Ensemble(pr.SVGD(particles=3), 2), steps=5).members) == 2


def test_a_prediction_uses_every_particle_once():
    model, (X, y) = line()
    found = fit(model, (X, y), pr.SVGD(), steps=5)
    assert len(found.predict(X).outputs[:, 0].unique()) == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"particles": 0}, "The 'particles' argument of SVGD must be an integer >= 1, got 0."),
        ({"bandwidth": 0.0}, "The 'bandwidth' argument of SVGD must be a positive number, or None, got 0.0."),
        ({"bandwidth": True}, "The 'bandwidth' argument of SVGD must be a positive number, or None, got True."),
        ({"learning_rate": -1.0}, "The 'learning_rate' argument of SVGD must be a positive number, got -1.0."),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(pr.InputError) as refused:
        pr.SVGD(**options)
    assert str(refused.value) == message
