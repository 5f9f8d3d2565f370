"""Laplace's method on a Density, against closed forms: coins, Gaussians and difficult optimisations."""

import math

import pytest
import torch
from torch.distributions import constraints

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError, PrioryWarning
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.laplace.laplace import Laplace, Subnetwork
from priory.posteriors import Point
from priory.posteriors.laplace import LaplacePosterior
from priory.testing import Coin, GaussianMean, LinearRegression, NormalGamma

F64 = torch.float64
COIN = Coin(17, 13, 5, 3)  # p | D ~ Beta(22, 16)


def fitted(problem, method=None, **options):
    return pr.fit(problem.density(), problem.data, method or Laplace(), progress=False, **options)


def test_laplace_of_a_coin_is_at_the_mode_in_the_logit_and_map_at_the_mode_in_p():
    a, b = 22.0, 16.0
    posterior = fitted(COIN)
    p = torch.sigmoid(posterior.w)
    assert float(p) == pytest.approx(a / (a + b), abs=1e-12)  # of p^a (1 - p)^b: the log-determinant is p (1 - p)
    # -d2/du2 of a log p + b log(1 - p) is (a + b) p (1 - p)
    variance = (a + b) / (a * b)
    assert float(posterior.gaussian.variance()) == pytest.approx(variance, rel=1e-10)
    mode = float(pr.fit(COIN.density(), COIN.data, pr.MAP(), steps=300, progress=False).mean["p"])
    assert mode == pytest.approx((a - 1) / (a + b - 2), abs=1e-5)
    assert abs(mode - float(p)) > 1e-3


def test_the_evidence_of_a_coin_is_stirlings_approximation_of_the_beta_function():
    a, b = 22.0, 16.0
    p = a / (a + b)
    prior = math.lgamma(5) + math.lgamma(3) - math.lgamma(8)
    wanted = a * math.log(p) + b * math.log(1 - p) - prior + 0.5 * math.log(2 * math.pi * (a + b) / (a * b))
    found = fitted(COIN).log_evidence
    assert found.value == pytest.approx(wanted, abs=1e-10)
    assert found.value == pytest.approx(
        COIN.log_evidence, abs=0.02
    )  # the error of Stirling's formula is about 1 / (12 a)
    assert found.kind == "Laplace approximation of log p(D)"


def test_the_tempered_posterior_of_a_coin_is_exact():
    T = 4.0
    posterior = fitted(COIN, temperature=T)  # p^(5 + 17/T) (1 - p)^(3 + 13/T) in the logit
    a, b = 5 + 17 / T, 3 + 13 / T
    assert float(posterior.w.sigmoid()) == pytest.approx(a / (a + b), abs=1e-12)
    assert float(posterior.gaussian.variance()) == pytest.approx((a + b) / (a * b), rel=1e-10)
    assert "T = 4.0" in posterior.log_evidence.kind
    whole = fitted(COIN, temperature=T, tempers="posterior")  # (p^21 (1 - p)^15)^(1/T), then the volume p (1 - p)
    a, b = 21 / T + 1, 15 / T + 1
    assert float(whole.w.sigmoid()) == pytest.approx(a / (a + b), abs=1e-12)
    assert float(whole.gaussian.variance()) == pytest.approx((a + b) / (a * b), rel=1e-10)
    p = a / (a + b)
    prior = math.lgamma(5) + math.lgamma(3) - math.lgamma(8)
    value = (21 * math.log(p) + 15 * math.log(1 - p) - prior) / T + math.log(p * (1 - p))
    wanted = value + 0.5 * math.log(2 * math.pi * (a + b) / (a * b))
    assert whole.log_evidence.value == pytest.approx(wanted, abs=1e-10)
    assert float(whole.history["loss"][-1]) == pytest.approx(-T * value, abs=1e-10)


@pytest.mark.parametrize("problem", [GaussianMean.make(0), LinearRegression.make(0)], ids=lambda p: p.name)
def test_a_gaussian_posterior_is_found_exactly_with_its_evidence(problem):
    posterior = fitted(problem)
    exact = problem.posterior
    torch.testing.assert_close(posterior.w, exact.mean.reshape(-1), rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.gaussian.variance(), exact.variance.reshape(-1), rtol=1e-10, atol=0)
    assert posterior.log_evidence.value == pytest.approx(problem.log_evidence, abs=1e-9)
    (name,) = posterior.mean
    at = exact.mean + 0.3
    params = {name: at.reshape(problem.density().layout[name].shape)}
    assert float(posterior.log_prob(params)) == pytest.approx(float(exact.log_prob(at)), abs=1e-9)
    assert len(posterior.history["loss"]) <= 3  # a quadratic takes one step, and one more to detect convergence


def test_a_mean_over_the_data_instead_of_a_sum_would_be_detected():
    problem = GaussianMean.make(0)
    doubled = GaussianMean(torch.cat([problem.y, problem.y]), problem.noise, problem.prior_loc, problem.prior_scale)
    precision = [1 / float(fitted(p).gaussian.variance()) for p in (problem, doubled)]
    assert precision[1] - precision[0] == pytest.approx(len(problem.y) / problem.noise**2, rel=1e-10)


def test_the_rows_of_a_loader_that_drops_some_at_random_all_count():
    problem = GaussianMean.make(0)  # twelve values
    rows = torch.utils.data.TensorDataset(problem.y)
    loader = torch.utils.data.DataLoader(rows, batch_size=5, shuffle=True, drop_last=True)
    posterior = pr.fit(problem.density(), loader, Laplace(), progress=False)
    precision = problem.prior_scale**-2 + 12 * problem.noise**-2
    assert 1 / float(posterior.gaussian.variance()) == pytest.approx(precision, rel=1e-10)


def test_correlated_parameters_with_a_constraint_have_the_hessian_of_the_log_joint():
    problem = NormalGamma.make(0)
    posterior = fitted(problem)

    def joint(u):
        noise = u[-1].exp()
        weights = u[:-1]
        z = (problem.y - problem.X @ weights) / noise
        likelihood = (-0.5 * z**2 - noise.log() - 0.5 * math.log(2 * math.pi)).sum()
        return likelihood + problem.prior.log_prob(weights, noise) + u[-1]

    hessian = torch.autograd.functional.hessian(joint, posterior.w)
    torch.testing.assert_close(posterior.curvature.dense(), -hessian, rtol=1e-9, atol=1e-9)
    assert float(torch.autograd.functional.jacobian(joint, posterior.w).abs().max()) < 1e-9
    draws = posterior.draw(200_000, stream(0))  # tolerances above 6 standard errors
    torch.testing.assert_close(
        draws.T.cov(), torch.linalg.inv(-hessian), rtol=0.03, atol=5e-4
    )  # over 6 standard errors


def test_the_mean_of_a_positive_parameter_is_that_of_a_log_normal():
    posterior = fitted(NormalGamma.make(0))
    m, v = posterior.w[-1], posterior.gaussian.variance()[-1]
    assert float(posterior.mean["noise"]) == pytest.approx(float((m + 0.5 * v).exp()), rel=1e-12)


def test_the_density_over_the_constrained_parameters_integrates_to_one():
    posterior = fitted(COIN)
    p = torch.linspace(1e-6, 1 - 1e-6, 20_001, dtype=F64)
    density = posterior.log_prob({"p": p}).exp()
    assert float(torch.trapezoid(density, p)) == pytest.approx(1.0, abs=1e-6)
    assert float(posterior.log_prob({"p": torch.tensor(1.5, dtype=F64)})) == -math.inf


def test_members_are_optimised_separately_from_their_own_starts():
    problem, method = NormalGamma.make(0), Laplace()
    density = problem.density()
    rows = Data.of(problem.data).prepared(density.prepare)
    target = make_target(density, rows)
    state = method.init(target, method.plan(target, rows, 60, 0), stream(0), torch.Size([2, 3]))
    for _ in range(60):
        state, info = method.step(target, state, rows, stream(0))
        assert info.metrics["loss"].shape == (2, 3)
    single = fitted(problem)
    torch.testing.assert_close(state.best.w, single.w.expand(2, 3, 4), rtol=0, atol=1e-8)
    torch.testing.assert_close(-state.best.hessian[1, 2], single.curvature.dense(), rtol=1e-7, atol=1e-7)
    assert info.done


def test_the_mode_is_found_from_a_convex_region():
    heavy = pr.Density(lambda p: -2.5 * torch.log1p((p["x"] - 30.0) ** 2 / 4), {"x": pr.Param()})
    posterior = pr.fit(heavy, None, Laplace(), progress=False)  # Student's t, convex at the start 0
    assert float(posterior.w) == pytest.approx(30.0, abs=1e-9)
    assert float(posterior.gaussian.variance()) == pytest.approx(1 / (2 * 2.5 / 4), rel=1e-9)


def test_the_optimiser_leaves_a_saddle_point():
    two = pr.Density(lambda p: -((p["x"][0] ** 2 - 1) ** 2) - p["x"][1] ** 2, {"x": pr.Param((2,))})
    posterior = pr.fit(two, None, Laplace(), progress=False)  # modes at +-1, a saddle at the start 0
    assert float(posterior.w[0].abs()) == pytest.approx(1.0, abs=1e-8)
    torch.testing.assert_close(posterior.gaussian.variance(), torch.tensor([1 / 8, 1 / 2], dtype=F64))


def test_the_mode_of_a_curved_ridge_is_found():
    banana = pr.Density(
        lambda p: -((1 - p["x"][0]) ** 2) - 100 * (p["x"][1] - p["x"][0] ** 2) ** 2, {"x": pr.Param((2,))}
    )
    posterior = pr.fit(banana, None, Laplace(), progress=False)
    torch.testing.assert_close(posterior.w, torch.ones(2, dtype=F64), rtol=0, atol=1e-8)


def test_diag_keeps_the_diagonal_of_the_hessian():
    problem = LinearRegression.make(0)
    posterior = fitted(problem, Laplace(structure="diag"))
    torch.testing.assert_close(posterior.gaussian.variance(), 1 / problem.precision.diagonal(), rtol=1e-9, atol=0)


def test_over_some_parameters_the_others_stay_at_the_mode():
    problem = NormalGamma.make(0)
    posterior = fitted(problem, Laplace(over=["weights"]))
    whole = fitted(problem)
    torch.testing.assert_close(posterior.w, whole.w)
    torch.testing.assert_close(posterior.curvature.dense(), whole.curvature.dense()[:3, :3])
    draws = posterior.sample(3)
    assert len(draws["noise"].unique()) == 1
    assert posterior.log_evidence.kind == "Laplace approximation of log p(D | noise)"


def test_the_mode_is_accurate_in_float32():
    y = torch.tensor([1.0, 2.0, 3.0])
    params = {"x": pr.Param((), constraints.positive)}
    density = pr.Density(lambda p: -0.5 * ((y - p["x"]) ** 2).sum(), params, dtype=torch.float32)
    posterior = pr.fit(density, None, Laplace(), progress=False)
    # in u = log x: -x (3 x - 6) + 1 = 0
    assert float(posterior.w.exp()) == pytest.approx((6 + math.sqrt(48)) / 6, rel=1e-5)
    assert posterior.sample(2)["x"].dtype == torch.float32


def test_a_posterior_or_a_method_may_be_the_starting_point():
    map_ = pr.fit(COIN.density(), COIN.data, pr.MAP(), steps=50, progress=False)
    for at in (map_, pr.MAP()):
        posterior = fitted(COIN, Laplace(at=at), steps=50)  # the steps of MAP
        assert float(posterior.w.sigmoid()) == pytest.approx(22 / 38, abs=1e-12)
        assert len(posterior.history["loss"]) < 6


def test_a_loaded_posterior_equals_the_saved_one(tmp_path):
    posterior = fitted(NormalGamma.make(0))
    assert isinstance(posterior, LaplacePosterior)
    posterior.save(tmp_path / "p")
    other = pr.load(tmp_path / "p", NormalGamma.make(0).density())
    assert torch.equal(posterior.draw(5, stream(1)), other.draw(5, stream(1)))
    assert other.log_evidence == posterior.log_evidence
    assert repr(other) == repr(posterior)


# Invalid arguments and warnings.


@pytest.mark.parametrize("structure", ["kron", "lowrank"])
def test_structures_of_layers_are_refused_for_a_density(structure):
    with pytest.raises(InputError, match="'structure' argument of Laplace must be 'full' or 'diag' for a Density"):
        fitted(COIN, Laplace(structure=structure))


def test_selections_and_tuning_of_networks_are_refused_for_a_density():
    with pytest.raises(InputError, match="'over' argument of Laplace must be 'all' or names for a Density"):
        fitted(COIN, Laplace(over=Subnetwork(1)))
    with pytest.raises(InputError, match="'over' argument of Laplace must be 'all' or names for a Density"):
        fitted(COIN, Laplace(over="last"))
    with pytest.raises(InputError, match="'tune' argument of Laplace must be None for a Density"):
        fitted(COIN, Laplace(tune="scalar"))
    with pytest.raises(InputError, match="match parameters among p"):
        fitted(COIN, Laplace(over=["q"]))


def test_a_fit_that_ends_before_the_mode_warns_with_the_norm_of_the_gradient():
    lucky = Coin(1000, 1)  # one Newton step from p = 1/2 ends at the logit 1.99, where the gradient is 1001 - 1003 p
    slope = 1001 - 1003 / (1 + math.exp(-2 * 999 / 1003))
    density, data = lucky.density(), lucky.data
    rows = Data.of(data).prepared(density.prepare)
    target, method = make_target(density, rows), Laplace()
    start = Point(target, torch.zeros(1, dtype=F64))
    state = method.init(target, method.plan(target, rows, 1, 0), stream(0), start=start)
    state, _ = method.step(target, state, rows, stream(0))
    with pytest.warns(PrioryWarning, match=f"gradient of the log joint has the norm {slope:.3g} where Laplace expects"):
        posterior = method.posterior(target, state)
    assert posterior.status.name == "not_converged"


def test_a_flat_direction_is_refused():
    flat = pr.Density(lambda p: -(p["x"][0] ** 2), {"x": pr.Param((2,))})
    with pytest.raises(InputError, match="singular"):
        pr.fit(flat, None, Laplace(), progress=False)


def test_a_density_without_a_mode_is_refused():
    rising = pr.Density(lambda p: p["x"], {"x": pr.Param()})
    with pytest.raises(InputError, match="singular"):
        pr.fit(rising, None, Laplace(), progress=False, steps=5)


def test_a_density_gives_no_predictions():
    with pytest.raises(InputError, match="no network to predict with"):
        fitted(COIN).predict(torch.zeros(1, 1))
    with pytest.raises(InputError, match="no network to predict with"):
        fitted(COIN).outputs(torch.zeros(1, 1))


def test_the_memory_estimate_is_that_of_a_dense_hessian():
    found = Laplace().plan(LinearRegression.make(0).density(), LinearRegression.make(0).data)
    assert found.needs["full"].memory == 4 * 8 * 4**2
    assert found.advice == "full"
    with pytest.raises(InputError, match=r"must stay under 100 bytes, got full: 512 bytes"):
        fitted(LinearRegression.make(0), Laplace(limit=100))
