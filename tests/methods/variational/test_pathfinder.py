import math
from typing import Any

import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor
from torch.distributions import MultivariateNormal

import priory as pr
from priory.core.data import Data
from priory.core.errors import DivergedError, PrioryWarning
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.variational.pathfinder import (
    Normal,
    Pathfinder,
    PathfinderState,
    approximation,
    line_search,
    log_joint,
    log_ratio,
    mixture,
    next_diagonal,
)
from priory.models.target import Target
from priory.posteriors.draws import Draws
from priory.testing import assert_covariance_close, assert_mean_close

DOUBLE = torch.float64


def randn(*shape: int, name: str = "noise") -> Tensor:
    return torch.randn(*shape, generator=stream(0, "pathfinder", name), dtype=DOUBLE)


def fit(density: pr.Density | pr.Model, method: Any = None, data: Any = None, **options: Any) -> Any:
    return pr.fit(density, data, method or Pathfinder(), progress=False, **options)


# The inverse Hessian.


def history(*shape: int, places: int, pairs: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return steps, the changes of a convex function's gradient (with empty leading slots), and a diagonal."""
    moves = randn(*shape, places, size, name="moves")
    root = randn(*shape, size, size, name="root")
    hessian = root @ root.mT + torch.eye(size, dtype=DOUBLE)
    changes = moves @ hessian
    changes, moves = changes.clone(), moves.clone()
    changes[..., : places - pairs, :] = moves[..., : places - pairs, :] = 0
    return moves, changes, randn(*shape, size, name="diagonal").exp()


def recursion(diagonal: Tensor, moves: Tensor, changes: Tensor) -> Tensor:
    """Apply the inverse BFGS update step by step, for one path."""
    H, one = diagonal.diag(), torch.eye(len(diagonal), dtype=DOUBLE)
    for s, z in zip(moves, changes, strict=True):
        if float(s @ z) > 0:
            left = one - torch.outer(s, z) / (s @ z)
            H = left @ H @ left.mT + torch.outer(s, s) / (s @ z)
    return H


def covariance(normal: Normal) -> Tensor:
    """Return the covariance of one normal, from its draws at unit vectors of noise."""
    factor = normal.draw(torch.eye(len(normal.loc), dtype=DOUBLE)) - normal.loc
    return factor.mT @ factor


@pytest.mark.parametrize(("places", "pairs", "size"), [(3, 3, 10), (6, 2, 10), (6, 6, 4), (5, 0, 3), (1, 1, 1)])
def test_the_compact_inverse_hessian_equals_the_dense_recursion(places, pairs, size):
    moves, changes, diagonal = history(2, places=places, pairs=pairs, size=size)
    w, gradient = randn(2, size, name="w"), randn(2, size, name="gradient")
    normal = approximation(w, gradient, diagonal, moves, changes)
    for k in range(2):
        H = recursion(diagonal[k], moves[k], changes[k])
        one = Normal(normal.loc[k], normal.scale[k], normal.basis[k], normal.factor[k])
        torch.testing.assert_close(covariance(one), H, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.loc, w[k] + H @ gradient[k], rtol=1e-10, atol=1e-10)
        assert abs(float(one.log_det() - torch.linalg.slogdet(H).logabsdet)) < 1e-10


def test_log_prob_of_draws_equals_that_of_the_dense_normal():
    moves, changes, diagonal = history(2, places=4, pairs=3, size=12)
    normal = approximation(randn(2, 12, name="w"), randn(2, 12, name="g"), diagonal, moves, changes)
    w = normal.draw(randn(7, 2, 12, name="draws"))
    for k in range(2):
        one = MultivariateNormal(normal.loc[k], recursion(diagonal[k], moves[k], changes[k]))
        torch.testing.assert_close(normal.log_prob(w)[:, k], one.log_prob(w[:, k]), rtol=1e-10, atol=1e-10)
    dense = torch.stack(
        [
            MultivariateNormal(normal.loc[k], recursion(diagonal[k], moves[k], changes[k])).log_prob(w[:, 0])
            for k in range(2)
        ]
    )
    expected = torch.from_numpy(logsumexp(dense.numpy(), axis=0)) - math.log(2)
    torch.testing.assert_close(mixture(normal, w[:, 0]), expected, rtol=1e-10, atol=1e-10)


def test_the_next_diagonal_equals_that_of_the_scaled_dense_update():
    """B' = c B - c B s s'B / s'B s + z z' / s'z with B = diag(1/a) and c = z'diag(a) z / s'z; the diagonal of it."""
    s, z, a = randn(6, name="s"), randn(6, name="z"), randn(6, name="a").exp()
    z = z * torch.sign(s @ z)
    hessian, c = (1 / a).diag(), (z * a) @ z / (s @ z)
    pushed = hessian @ s
    dense = c * hessian - c * torch.outer(pushed, pushed) / (s @ pushed) + torch.outer(z, z) / (s @ z)
    torch.testing.assert_close(next_diagonal(a, s, z), 1 / dense.diagonal(), rtol=1e-10, atol=1e-10)


# The line search.


def started(density: pr.Density, method: Pathfinder) -> tuple[PathfinderState, Target]:
    rows = Data.of(None).prepared(density.prepare)
    target = make_target(density, rows)
    return method.init(target, method.plan(target, rows, 10, 0), stream(0), torch.Size()), target


def test_steps_satisfy_the_wolfe_conditions_on_every_path():
    density = pr.Density(lambda p: -(p["x"].cosh().log() + p["x"] ** 4 / 10).sum(), {"x": pr.Param((3,))})
    state, target = started(density, Pathfinder(paths=20))

    def function(w):
        return target.log_joint_and_grad(w, ())

    direction = state.normal.loc - state.w
    w, value, gradient, moved = line_search(function, state)
    assert bool(moved.all())
    slope = (direction * state.gradient).sum(-1)
    length = ((w - state.w) * direction).sum(-1) / direction.square().sum(-1)
    assert bool((value >= state.value + 1e-4 * length * slope).all())
    assert bool(((gradient * direction).sum(-1) <= 0.9 * slope).all())


def test_a_density_with_nan_outside_its_support_is_optimised_inside():
    """(1 + x)^29 (1 - x)^59, the density of 2 Beta(30, 60) - 1, is NaN beyond 1, where half of the starts are."""
    density = pr.Density(lambda p: 29 * (1 + p["x"]).log() + 59 * (1 - p["x"]).log(), {"x": pr.Param()})
    posterior = fit(density, Pathfinder(draws=4000))
    sd = 2 * math.sqrt(30 * 60 / (90**2 * 91))
    assert abs(float(posterior.mean["x"]) - (60 / 90 - 1)) < 5 * sd / math.sqrt(4000)  # false alarms below 6e-7
    beta = math.lgamma(30) + math.lgamma(60) - math.lgamma(90) + 89 * math.log(2)
    evidence = posterior.log_evidence
    assert abs(evidence.value - beta) < 5 * evidence.error
    assert evidence.error < 0.01


# Against exact posteriors.


def gaussian(size: int, constant: float = 0.0) -> tuple[pr.Density, MultivariateNormal]:
    root = randn(size, size, name="gaussian")
    spread = root @ root.mT / size + 0.3 * torch.eye(size, dtype=DOUBLE)
    exact = MultivariateNormal(torch.linspace(-3, 5, size, dtype=DOUBLE), spread)
    precision, mean = torch.linalg.inv(spread), exact.mean

    def log_prob(p):
        d = p["x"] - mean
        return constant - 0.5 * d @ precision @ d

    return pr.Density(log_prob, {"x": pr.Param((size,))}), exact


def test_on_a_gaussian_the_paths_find_its_covariance():
    """Quasi-Newton estimates converge to the inverse Hessian along the directions of the path, here to 10 %."""
    density, exact = gaussian(5)
    method = Pathfinder()
    state, target = started(density, method)
    rows, generator = state.data, stream(1)
    done = False
    while not done:
        state, info = method.step(target, state, rows, generator)
        done = info.done
    torch.testing.assert_close(state.w, exact.mean.expand_as(state.w), rtol=0, atol=1e-5)
    whiten = torch.linalg.inv(torch.linalg.cholesky(exact.covariance_matrix))
    for k in range(method.paths):
        one = Normal(state.normal.loc[k], state.normal.scale[k], state.normal.basis[k], state.normal.factor[k])
        relative = torch.linalg.eigvalsh(whiten @ covariance(one) @ whiten.mT)
        assert float((relative - 1).abs().max()) < 0.1
    w = state.normal.draw(randn(4000, method.paths, 5, name="elbo"))
    ratio = log_ratio(target, rows, w, state.normal.log_prob(w))
    normaliser = 2.5 * math.log(2 * math.pi) + 0.5 * exact.covariance_matrix.logdet()
    error = ratio.std(0) / math.sqrt(4000)
    # KL(q || p) of such covariances is below 5 x 0.1^2 / 4
    assert bool(((ratio.mean(0) - normaliser).abs() < 5 * error + 0.0125).all())  # 8 comparisons: 5e-6


def test_on_a_gaussian_draws_and_evidence_are_exact():
    """5 standard errors: 5 means, 15 covariances and the evidence, false alarms at 1.2e-5."""
    density, exact = gaussian(5, constant=7.0)
    posterior = fit(density, Pathfinder(draws=2000))
    assert isinstance(posterior, Draws)
    assert posterior.k_hat is not None
    assert posterior.k_hat < 0.5
    assert_mean_close(posterior.w, exact.mean)
    assert_covariance_close(posterior.w, exact.covariance_matrix)
    normaliser = 7.0 + 2.5 * math.log(2 * math.pi) + 0.5 * float(exact.covariance_matrix.logdet())
    evidence = posterior.log_evidence
    assert abs(evidence.value - normaliser) < max(5 * evidence.error, 1e-9)
    assert evidence.error < 0.01
    assert "importance estimate of log p(D)" in evidence.kind
    assert posterior.history["elbo"].shape == posterior.history["loss"].shape
    assert bool((posterior.history["elbo"].diff() >= 0).all())


def test_a_halved_log_density_has_twice_the_covariance():
    density, exact = gaussian(3)
    posterior = fit(density, Pathfinder(draws=2000), temperature=2.0, tempers="posterior")
    assert_covariance_close(posterior.w, 2 * exact.covariance_matrix)  # 6 comparisons: false alarms at 4e-6
    evidence = posterior.log_evidence
    assert evidence.kind.startswith("importance estimate of the tempered log p(D), T = 2")
    assert abs(evidence.value - 1.5 * math.log(4 * math.pi) - 0.5 * float(exact.covariance_matrix.logdet())) < 1e-2


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_every_row_counts_once_in_blocks(temperature):
    """2,500 rows are more than two blocks; y ~ N(m, 1), m ~ N(0, 4), in closed form, with a likelihood to the 1/T."""
    y = 1.5 + randn(2500, name="rows")
    density = pr.Density(
        params={"m": pr.Param()},
        log_prior=lambda p: -0.5 * p["m"] ** 2 / 4 - 0.5 * math.log(2 * math.pi * 4),
        log_likelihood=lambda p, batch: -0.5 * (batch - p["m"]) ** 2 - 0.5 * math.log(2 * math.pi),
    )
    rows = Data.of(y).prepared(density.prepare)
    target, w = make_target(density, rows, temperature), randn(3, 1, name="blocks")
    for found, expected in zip(log_joint(target, rows)(w), target.log_joint_and_grad(w, (y,)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    posterior = fit(density, data=y, temperature=temperature)
    n, t = len(y), temperature
    precision = n / t + 0.25
    mean = float(y.sum()) / t / precision
    exact = (
        -0.5 * n / t * math.log(2 * math.pi)
        - 0.5 * float(y.square().sum()) / t
        + 0.5 * mean**2 * precision
        - 0.5 * math.log(4 * precision)
    )
    assert_mean_close(posterior.w, mean)
    assert abs(posterior.log_evidence.value - exact) < 1e-3 + 5 * posterior.log_evidence.error


def test_the_mean_of_a_constrained_parameter_is_exact():
    """Gamma(5, rate 2), of mean 2.5 and standard deviation 1.118: 5 standard errors, false alarms at 6e-7."""
    density = pr.Density(lambda p: 4 * p["x"].log() - 2 * p["x"], {"x": pr.Param((), pr.constraints.positive)})
    posterior = fit(density, Pathfinder(draws=4000))
    assert abs(float(posterior.mean["x"]) - 2.5) < 5 * 1.118 / math.sqrt(4000)
    evidence = posterior.log_evidence
    assert abs(evidence.value - (math.lgamma(5) - 5 * math.log(2))) < 5 * evidence.error


def test_many_paths_find_both_modes_and_their_weights():
    """0.3 N(-4, 1) + 0.7 N(4, 1) in the first coordinate; 0.075 is 5 standard errors of 1000 draws."""

    def log_prob(p):
        x = p["x"]
        each = torch.stack([math.log(0.3) - 0.5 * (x[0] + 4) ** 2, math.log(0.7) - 0.5 * (x[0] - 4) ** 2])
        return each.logsumexp(0) - 0.5 * x[1] ** 2

    posterior = fit(pr.Density(log_prob, {"x": pr.Param((2,))}), Pathfinder(paths=16))
    assert abs(float((posterior.w[:, 0] < 0).double().mean()) - 0.3) < 0.075
    assert posterior.k_hat is not None
    assert posterior.k_hat < 0.7


@pytest.mark.parametrize(("seed", "share"), [(8, 80), (85, 20)])  # whose eight paths all end in one mode
def test_a_mode_that_no_path_reaches_is_reported_with_its_share(seed, share):
    def log_prob(p):
        x = p["x"]
        return torch.logaddexp(math.log(0.8) - 0.5 * (x + 6) ** 2, math.log(0.2) - 0.5 * (x - 6) ** 2)

    density = pr.Density(log_prob, {"x": pr.Param()})
    with pytest.warns(PrioryWarning, match=f"another mode with about {share} % of the posterior, which no path"):
        posterior = fit(density, Pathfinder(), seed=seed)
    assert posterior.status.name == "doubtful"
    assert fit(density, Pathfinder(paths=32), seed=seed).status.name == "converged"


def test_the_standard_deviations_of_a_normal_are_the_roots_of_its_variances():
    basis = torch.linalg.qr(randn(3, 6, 2, name="basis")).Q
    factor = randn(3, 2, 2, name="factor").tril() + 2 * torch.eye(2, dtype=DOUBLE)
    normal = Normal(randn(3, 6), randn(3, 6, name="scale").exp(), basis, factor)
    root = normal.scale[..., None] * (
        torch.eye(6, dtype=DOUBLE) + basis @ (factor - torch.eye(2, dtype=DOUBLE)) @ basis.mT
    )
    exact = (root @ root.mT).diagonal(dim1=-2, dim2=-1).sqrt()
    torch.testing.assert_close(normal.standard_deviations(), exact, rtol=1e-12, atol=0)


def test_a_funnel_is_reported_by_its_k_hat():
    """v ~ N(0, 9), 25 x ~ N(0, e^v): a normal has only one width, so k-hat is high for every seed."""

    def log_prob(p):
        v = p["v"]
        return -0.5 * (v / 3) ** 2 - 0.5 * p["x"].square().sum(-1) * (-v).exp() - 12.5 * v

    density = pr.Density(log_prob, {"v": pr.Param(), "x": pr.Param((25,))}, batched=True, dtype=DOUBLE)
    for seed in range(2):
        assert fit(density, Pathfinder(iterations=40), seed=seed).k_hat > 0.7


def test_without_resampling_draws_come_from_the_normals():
    """On a Student-t with df = 2, draws of the normals vary less than resampled ones; k-hat is the same."""
    density = pr.Density(lambda p: -1.5 * torch.log1p(p["x"] ** 2 / 2), {"x": pr.Param()})
    plain, weighted = (fit(density, Pathfinder(resample=r)) for r in (False, True))
    assert plain.k_hat == weighted.k_hat
    assert float(plain.w.std()) < float(weighted.w.std())
    assert len(plain.w) == len(plain.w.unique(dim=0)) == 1000
    assert len(weighted.w.unique(dim=0)) < 1000


def test_a_method_can_start_from_pathfinder():
    density, exact = gaussian(5)
    found = fit(density, pr.MeanField(start=Pathfinder(), learning_rate=1e-6), steps=1)
    distance = found.family.loc - exact.mean
    # A chi-squared variable with 5 degrees of freedom exceeds 35 with probability 1.4e-6; zero is in the hundreds.
    assert float(distance @ torch.linalg.solve(exact.covariance_matrix, distance)) < 35
    assert float(exact.mean @ torch.linalg.solve(exact.covariance_matrix, exact.mean)) > 35


def test_members_have_their_own_paths():
    density, exact = gaussian(3)
    method = Pathfinder(paths=2)
    rows = Data.of(None)
    target = make_target(density, rows)
    state = method.init(target, method.plan(target, rows, 10, 0), stream(0), torch.Size([3]))
    assert state.w.shape == (3, 2, 3)
    for _ in range(15):
        state, info = method.step(target, state, rows, stream(1))
        assert torch.as_tensor(info.metrics["elbo"]).shape == (3,)
    assert_mean_close(method.posterior(target, state).w, exact.mean)  # 3 comparisons: false alarms at 2e-6


# Failures and invalid arguments.


def test_failed_paths_are_dropped_with_a_warning():
    """NaN for positive x, where about half of the eight starts lie; halving them doesn't reach zero."""
    density = pr.Density(lambda p: torch.where(p["x"] > 1e-4, math.nan, -200 * (p["x"] + 1) ** 2), {"x": pr.Param()})
    with pytest.warns(PrioryWarning, match=r"[1-7] of the 8 paths of Pathfinder found no approximation"):
        posterior = fit(density)
    assert abs(float(posterior.mean["x"]) + 1) < 0.02


def test_an_error_is_raised_if_all_paths_fail():
    density = pr.Density(lambda p: torch.where(p["x"].abs() > 1e-9, math.nan, -(p["x"] ** 2)), {"x": pr.Param()})
    with pytest.raises(DivergedError, match="None of the 8 paths of Pathfinder found an approximation"):
        fit(density)


def test_a_network_with_running_statistics_is_refused():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    with pytest.raises(
        pr.InputError, match="The 'model' argument of Pathfinder must have no buffers that training writes"
    ):
        fit(pr.Model(net, pr.Gaussian(1.0)), data=(torch.randn(8, 2), torch.randn(8)))


@pytest.mark.parametrize("name", ["paths", "draws", "history", "elbo_draws", "iterations"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many", None])
def test_invalid_counts_are_refused(name, value):
    with pytest.raises(pr.InputError, match=f"The '{name}' argument of Pathfinder must be an integer >= 1"):
        Pathfinder(**{name: value})


def test_a_resample_that_is_not_a_bool_is_refused():
    with pytest.raises(pr.InputError, match="The 'resample' argument of Pathfinder must be True or False"):
        Pathfinder(resample=1)  # pyright: ignore[reportArgumentType]
