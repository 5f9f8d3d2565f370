"""The search for modes: its subproblem, its derivatives, and its verdicts, against closed forms."""

import math

import pytest
import torch
from torch.distributions import Normal, constraints

import priory as pr
from priory.core.data import Data
from priory.fitting.prepare import make_target
from priory.methods.mode_objective import ModeObjective
from priory.methods.mode_search import PRECISIONS, ball_step
from priory.testing import LinearRegression

F64 = torch.float64


def density(function, shape=(), support=constraints.real):
    return pr.Density(function, {"x": pr.Param(shape, support)})


def mode_of(function, shape=(), support=constraints.real, method=None):
    return pr.fit(density(function, shape, support), None, method or pr.MAP(), progress=False)


# The step in a ball.


def test_a_step_in_a_ball_solves_the_subproblem():
    """Against the conditions of More and Sorensen: (A + shift) y = slope, |y| = radius, A + shift positive definite."""
    generator = torch.Generator().manual_seed(0)
    eigenvalues = torch.randn(50, 6, generator=generator, dtype=F64).sort(-1).values
    slope = torch.randn(50, 6, generator=generator, dtype=F64)
    radius = torch.rand(50, generator=generator, dtype=F64) + 0.1
    y = ball_step(slope, eigenvalues, radius, PRECISIONS[F64])
    torch.testing.assert_close(y.norm(dim=-1), radius, rtol=1e-10, atol=0)
    shift = (slope / y) - eigenvalues
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift), rtol=0, atol=1e-6)
    assert bool((shift[:, 0] + eigenvalues[:, 0] > 0).all())


def test_a_step_that_fits_in_the_ball_is_newtons():
    eigenvalues, slope = torch.tensor([[1.0, 4.0]], dtype=F64), torch.tensor([[1.0, -2.0]], dtype=F64)
    y = ball_step(slope, eigenvalues, torch.tensor([math.inf], dtype=F64), PRECISIONS[F64])
    torch.testing.assert_close(y, slope / eigenvalues, rtol=0, atol=1e-15)


def test_a_step_from_a_saddle_point_goes_to_the_surface_of_the_ball():
    eigenvalues, slope = torch.tensor([[-1.0, 2.0]], dtype=F64), torch.zeros(1, 2, dtype=F64)
    y = ball_step(slope, eigenvalues, torch.tensor([3.0], dtype=F64), PRECISIONS[F64])
    torch.testing.assert_close(y.abs(), torch.tensor([[3.0, 0.0]], dtype=F64))


def test_a_flat_direction_without_a_slope_is_not_followed():
    eigenvalues, slope = torch.tensor([[1e-16, 2.0]], dtype=F64), torch.tensor([[1e-17, 2.0]], dtype=F64)
    y = ball_step(slope, eigenvalues, torch.tensor([3.0], dtype=F64), PRECISIONS[F64])
    torch.testing.assert_close(y, torch.tensor([[0.0, 1.0]], dtype=F64), rtol=0, atol=1e-15)


# Derivatives.


@pytest.mark.parametrize("jacobian", [True, False])
def test_hessians_at_many_vectors_are_those_of_autograd(jacobian):
    log_prob = lambda p: -p["x"].exp().sum() - (p["s"] * p["x"].prod()) ** 2 + 3 * p["s"].log()  # noqa: E731
    built = pr.Density(log_prob, {"x": pr.Param((2,)), "s": pr.Param((), constraints.positive)})
    target = make_target(built, Data.of(None))
    w = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = ModeObjective(target, Data.of(None), jacobian).second_order(w)

    def joint(u):
        return log_prob({"x": u[:2], "s": u[2].exp()}) + (u[2] if jacobian else 0.0)

    for i, v in enumerate(w):
        assert float(found.value[i]) == pytest.approx(float(joint(v)), abs=1e-12)
        torch.testing.assert_close(found.gradient[i], torch.autograd.functional.jacobian(joint, v))
        torch.testing.assert_close(found.hessian[i], torch.autograd.functional.hessian(joint, v))


def test_a_vector_at_which_the_density_fails_has_nan_and_leaves_the_others_alone():
    built = density(
        lambda p: -0.5 * torch.linalg.cholesky(p["x"]).diagonal().log().sum() - p["x"].square().sum(), (2, 2)
    )
    target = make_target(density(lambda p: -p["x"].square().sum(), (2, 2)), Data.of(None))
    target = target.of_model(built)
    w = torch.stack([torch.eye(2, dtype=F64).flatten(), -torch.eye(2, dtype=F64).flatten()])
    found = ModeObjective(target, Data.of(None), True).second_order(w)
    assert found.value.isnan().tolist() == [False, True]
    assert bool(found.hessian[0].isfinite().all())


# Modes that are exact.


@pytest.mark.parametrize("method", [pr.MAP(), pr.Laplace()], ids=["MAP", "Laplace"])
@pytest.mark.parametrize(("mean", "scale"), [(30.0, 1.0), (1e6, 1.0), (-1e6, 1e3), (0.5, 1e-6), (1e-6, 1e6)])
def test_the_mode_of_a_normal_is_its_mean_on_any_scale(mean, scale, method):
    found = mode_of(lambda p: -0.5 * ((p["x"] - mean) / scale) ** 2, method=method)
    assert abs(float(found.w) - mean) / scale < 1e-8
    assert found.status.name == "converged"
    assert found.mode.distance < 1e-8
    assert found.mode.condition_number == pytest.approx(1.0)


@pytest.mark.parametrize("method", [pr.MAP(), pr.Laplace()], ids=["MAP", "Laplace"])
def test_scales_from_a_millionth_to_a_million_are_found_together(method):
    scale, mean = torch.logspace(-6, 6, 13, dtype=F64), torch.linspace(-5, 5, 13, dtype=F64)
    found = mode_of(lambda p: -0.5 * ((p["x"] - mean) / scale).square().sum(), (13,), method=method)
    assert float(((found.w - mean) / scale).abs().max()) < 1e-8
    assert found.status.name == "converged"


@pytest.mark.parametrize("size", [2, 50, 500])
def test_the_mode_of_strongly_correlated_coordinates_is_exact(size):
    correlation = 0.9999
    covariance = correlation * torch.ones(size, size, dtype=F64) + (1 - correlation) * torch.eye(size, dtype=F64)
    precision, mean = torch.linalg.inv(covariance), torch.linspace(50, 100, size, dtype=F64)
    found = mode_of(lambda p: -0.5 * (p["x"] - mean) @ precision @ (p["x"] - mean), (size,))
    assert float((found.w - mean).abs().max()) < 1e-8
    assert found.status.name == "converged"
    exact = (1 + (size - 1) * correlation) / (1 - correlation)
    assert found.mode.condition_number == pytest.approx(exact, rel=1e-6)


def test_the_gradient_norm_and_the_distance_are_those_of_the_log_density():
    slope = torch.tensor([3.0, -4.0], dtype=F64)  # of a Gaussian with precisions 9 and 16, one step short of its mode
    built = density(lambda p: slope @ p["x"] - 0.5 * (torch.tensor([9.0, 16.0], dtype=F64) * p["x"] ** 2).sum(), (2,))
    target = make_target(built, Data.of(None))
    from priory.methods.mode_report import mode_of as report
    from priory.methods.mode_search import advance, begin

    objective = ModeObjective(target, Data.of(None), False)
    search = begin(objective, torch.zeros(1, 2, dtype=F64))
    before = search.flat()
    assert float(before.gradient.norm()) == pytest.approx(5.0)
    advance(objective, search)
    assert float(search.distance) == pytest.approx(math.sqrt(3**2 / 9 + 4**2 / 16))
    advance(objective, search)
    found = report(search)
    assert found.gradient_norm < 1e-12
    assert found.distance < 1e-12


# Several modes, edges, tails, and densities without a mode.


def test_the_best_of_several_modes_is_returned_and_the_others_are_counted():
    log_prob = lambda p: torch.logsumexp(  # noqa: E731
        torch.stack(
            [Normal(6.0, 1.0).log_prob(p["x"]) + math.log(0.8), Normal(-6.0, 1.0).log_prob(p["x"]) + math.log(0.2)]
        ),
        0,
    )
    found = mode_of(log_prob)
    assert float(found.w) == pytest.approx(6.0, abs=1e-8)
    assert found.status.name == "converged"
    assert found.mode.modes == 2
    assert found.mode.next_mode_nats == pytest.approx(math.log(4), abs=1e-8)
    assert "the best of 2 modes" in repr(found)


def two_normals(share: float, place: float, narrow: float = 1.0):
    """Return a log density with modes at plus and minus `place`, the first with this share and width."""
    return lambda p: torch.logaddexp(
        Normal(place, narrow).log_prob(p["x"]) + math.log(share),
        Normal(-place, 1.0).log_prob(p["x"]) + math.log1p(-share),
    )


def test_a_mode_that_is_not_unique_or_has_little_mass_around_it_is_doubtful():
    for share, narrow in ((0.5, 1.0), (0.4, 0.5)):
        found = mode_of(two_normals(share, 4.0, narrow))
        assert float(found.w.abs()) == pytest.approx(4.0, abs=1e-6)
        assert found.status.name == "doubtful"
        assert f"the highest of 2 modes, but only about {share:.0%} of the mass of all" in found.status.reason
    assert mode_of(two_normals(0.6, 6.0)).status.name == "converged"


def test_second_derivatives_that_are_not_finite_are_taken_as_differences():
    """The second derivative of torch.logaddexp is NaN where its arguments differ by 710 nats or more."""
    found = mode_of(two_normals(0.7, 30.0))
    assert float(found.w) == pytest.approx(30.0, abs=1e-8)
    assert found.mode.modes == 2
    gaussian = mode_of(two_normals(0.7, 30.0), method=pr.Laplace())
    assert float(gaussian.gaussian_coordinates()[1]) == pytest.approx(1.0, rel=1e-8)
    assert gaussian.log_evidence.value == pytest.approx(math.log(0.7), abs=1e-8)


def test_a_density_that_rises_to_the_edge_of_its_support_says_so():
    found = mode_of(lambda p: 3 * p["x"], (), constraints.unit_interval)
    assert float(found.mean["x"]) == pytest.approx(1.0, abs=1e-12)
    assert found.status.name == "doubtful"
    assert "The mode of 'x' lies at the edge of its support" in found.status.reason
    found = mode_of(lambda p: -1e-6 * p["x"], (), constraints.positive)
    assert float(found.mean["x"]) < 1e-8
    assert "edge of its support" in found.status.reason


@pytest.mark.parametrize(
    ("log_prob", "support", "words"),
    [
        (lambda p: p["x"], constraints.real, "rises without bound as 'x' grows"),
        (lambda p: p["x"] ** 2, constraints.real, "rises without bound as 'x' grows"),
        (lambda p: -0.5 * p["x"].log(), constraints.positive, "rises without bound as 'x' nears the edge"),
        (lambda p: -torch.exp(-p["x"]), constraints.real, "rises for ever along a direction that involves 'x'"),
        (lambda p: 0 * p["x"], constraints.real, "flat along a direction that involves 'x'"),
    ],
    ids=["linear", "convex", "singular", "asymptote", "flat"],
)
@pytest.mark.filterwarnings("ignore:The fit by MAP")
def test_a_density_without_a_mode_says_why(log_prob, support, words):
    found = mode_of(log_prob, (), support)
    assert found.status.name in ("not_converged", "doubtful")
    assert words in found.status.reason


def test_a_mode_on_corners_is_the_soft_threshold_of_the_lasso():
    centre, curvature, weight = torch.tensor([3.0, -2.0, 0.2, 0.1], dtype=F64), torch.tensor([1.0, 4.0, 9.0, 2.0]), 2.5
    log_prob = lambda p: -0.5 * (curvature * (p["x"] - centre) ** 2).sum() - weight * p["x"].abs().sum()  # noqa: E731
    exact = centre.sign() * (centre.abs() - weight / curvature).clamp(min=0)
    found = mode_of(log_prob, (4,))
    torch.testing.assert_close(found.w, exact, rtol=0, atol=1e-8)
    assert found.status.name == "converged"
    assert found.mode.corners == 2
    assert "2 coordinates on a corner" in repr(found)
    gaussian = mode_of(log_prob, (4,), method=pr.Laplace())
    assert gaussian.status.name == "doubtful"
    assert "lies on a corner of the log density in 'x'" in gaussian.status.reason


def test_a_gaussian_at_one_of_two_modes_is_doubtful_with_its_share_of_the_mass():
    both = lambda p: torch.stack(  # noqa: E731
        [Normal(6.0, 1.0).log_prob(p["x"]) + math.log(0.7), Normal(-6.0, 1.5).log_prob(p["x"]) + math.log(0.3)]
    )
    found = mode_of(lambda p: torch.logsumexp(both(p), 0), method=pr.Laplace())
    assert found.status.name == "doubtful"
    assert "the highest of 2 modes, which has about 70% of the mass of all" in found.status.reason


def test_a_sum_that_alone_is_known_leaves_a_flat_direction():
    found = mode_of(lambda p: -((p["x"].sum() - 3) ** 2), (2,))
    assert float(found.w.sum()) == pytest.approx(3.0, abs=1e-8)
    assert found.status.name == "doubtful"
    assert "so its mode is not unique" in found.status.reason
    assert found.mode.condition_number == math.inf


def test_a_fit_without_convergence_warns():
    with pytest.warns(pr.PrioryWarning, match=r"The fit by MAP\(\) has not converged. The log density rises without"):
        mode_of(lambda p: p["x"])


# Options that keep the descent by Adam.


def test_steps_epochs_and_learning_rates_of_the_user_are_those_of_adam():
    normal = density(lambda p: Normal(30.0, 1.0).log_prob(p["x"]))
    for method, options in ((pr.MAP(), {"steps": 7}), (pr.MAP(), {"epochs": 7}), (pr.MAP(learning_rate=0.1), {})):
        found = pr.fit(normal, None, method, progress=False, **options)
        assert found.mode is None
        assert len(found.history["loss"]) == (7 if options else 2000)


def test_a_network_with_few_weights_on_raw_scales_reaches_its_mode_in_float32():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 2, generator=generator) * torch.tensor([7.0, 300.0]) + torch.tensor([98.0, 5000.0])
    y = 35 + 0.5 * (X[:, 0] - 98) + torch.randn(200, generator=generator)
    net = torch.nn.Linear(2, 1)
    model = pr.Model(net, pr.Gaussian(1.0), prior=100.0)
    with pytest.warns(pr.PrioryWarning, match="standardise"):
        found = pr.fit(model, (X, y), pr.MAP(), progress=False)
    design = torch.cat([X, torch.ones(200, 1)], 1).double()
    precision = design.T @ design + 1e-4 * torch.eye(3, dtype=F64)
    exact = torch.linalg.solve(precision, design.T @ y.double())
    error = found.w.double() - exact
    assert found.status.name == "converged"
    assert float(error @ precision @ error) ** 0.5 < 0.02  # rounding of the weights to float32; 1e-6 in float64
    assert found.w.dtype == torch.float32
    wide = pr.Model(torch.nn.Linear(2, 1).double(), pr.Gaussian(1.0), prior=100.0)
    with pytest.warns(pr.PrioryWarning, match="standardise"):
        found = pr.fit(wide, (X, y), pr.MAP(), progress=False)
    error = found.w - exact
    assert float(error @ precision @ error) ** 0.5 < 1e-6


@pytest.mark.filterwarnings("ignore:The inputs", "ignore:The targets")
def test_a_learnt_noise_is_set_on_held_out_rows_and_the_weights_are_the_mode_given_it():
    generator = torch.Generator().manual_seed(1)
    X = (torch.randn(300, 2, generator=generator, dtype=F64) * 5 + 98).contiguous()
    y = 35 + 7 * (X[:, 0] - 98) / 5 + 2 * torch.randn(300, generator=generator, dtype=F64)
    model = pr.Model(torch.nn.Linear(2, 1).double(), pr.Gaussian(), prior=1000.0)
    found = pr.fit(model, (X, y), pr.MAP(), progress=False)
    noise = float(found.mean["likelihood.noise"])
    assert noise == pytest.approx(2.0, rel=0.25)  # 90 held-out rows: a standard error of 0.075 of it, and 3.4 of those
    design = torch.cat([X, torch.ones(300, 1, dtype=F64)], 1)
    precision = design.T @ design / noise**2 + 1e-6 * torch.eye(3, dtype=F64)
    error = found.w[:3] - torch.linalg.solve(precision, design.T @ y / noise**2)
    assert float(error @ precision @ error) ** 0.5 < 1e-6
    assert found.status.name == "converged"
    centre = X.mean(0, keepdim=True)
    assert float(found.predict(centre).mean) == pytest.approx(float(y.mean()), abs=0.5)


def test_networks_that_are_not_affine_in_their_weights_descend_by_adam():
    line = LinearRegression.make(0)
    X, y = line.data
    hidden = torch.nn.Sequential(torch.nn.Linear(X.shape[1], 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)).double()
    assert pr.fit(pr.Model(hidden, pr.Gaussian(0.5)), (X, y), pr.MAP(), progress=False).mode is None


def test_a_search_resumes_with_the_same_bits(tmp_path):
    banana = density(lambda p: -((1 - p["x"][0]) ** 2) - 100 * (p["x"][1] - p["x"][0] ** 2) ** 2, (2,))
    whole = pr.fit(banana, None, pr.MAP(), progress=False)
    kept = pr.Checkpoint(tmp_path / "other", every=1)

    class InterruptedError(Exception):
        pass

    def fail(now):
        if now.step == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pr.fit(banana, None, pr.MAP(), progress=False, checkpoint=kept, callbacks=[fail])
    resumed = pr.fit(banana, None, pr.MAP(), progress=False, checkpoint=kept)
    assert torch.equal(resumed.w, whole.w)
    assert len(resumed.history["loss"]) == len(whole.history["loss"])


def test_minibatches_keep_the_descent_by_adam():
    line = LinearRegression.make(0)
    assert pr.fit(line.model(), line.data, pr.MAP(), progress=False).mode is not None
    assert pr.fit(line.model(), line.data, pr.MAP(), batch_size=5, progress=False).mode is None


def test_members_of_an_ensemble_each_reach_a_mode():
    log_prob = lambda p: torch.logsumexp(torch.stack([-2 * (p["x"] - 3) ** 2, -2 * (p["x"] + 3) ** 2]), 0)  # noqa: E731
    found = pr.fit(density(log_prob), None, pr.Ensemble(pr.MAP(), size=8), progress=False)
    modes = torch.stack([member.w for member in found.members])
    torch.testing.assert_close(modes.abs(), torch.full_like(modes, 3.0), rtol=0, atol=1e-8)
    assert found.status.name == "converged"


def test_a_fitted_mode_is_stored_with_its_report(tmp_path):
    normal = density(lambda p: Normal(30.0, 1.0).log_prob(p["x"]))
    found = pr.fit(normal, None, pr.MAP(), progress=False)
    found.save(tmp_path / "mode")
    loaded = pr.load(tmp_path / "mode", normal)
    assert loaded.mode == found.mode
    assert loaded.status == found.status
    assert repr(loaded) == repr(found)


def test_a_standardised_model_reaches_the_mode_of_its_own_units():
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(100, 1, generator=generator) * 50 + 900
    y = 3 * X[:, 0] + 20 * torch.randn(100, generator=generator)
    found = []
    for dtype in (torch.float32, F64):
        model = pr.Model(torch.nn.Linear(1, 1).to(dtype), pr.Gaussian(0.5), standardise=True)
        found.append(pr.fit(model, (X.to(dtype), y.to(dtype)), pr.MAP(), progress=False))
    assert [one.status.name for one in found] == ["converged", "converged"]
    torch.testing.assert_close(found[0].w.double(), found[1].w, rtol=0, atol=1e-4)
