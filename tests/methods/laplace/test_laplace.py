"""Laplace's method on networks: exact linear regression, selections, tuning, warnings and errors."""

import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributions import Laplace as LaplaceDistribution
from torch.distributions import MultivariateNormal, Normal, StudentT
from torch.nn.utils.parametrizations import weight_norm

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError, PrioryWarning
from priory.core.streams import stream
from priory.curvature import STRUCTURES, select
from priory.fitting.prepare import make_target
from priory.methods.laplace import mode_gradient
from priory.methods.laplace.laplace import Laplace, Subnetwork
from priory.posteriors import Draws, Point
from priory.testing import LinearRegression
from priory.testing.contract import seeded

F64 = torch.float64
LINE = LinearRegression.make(0)
EXACT = ["full", "kron", "lowrank"]  # for one linear layer with Gaussian noise; its rank is below 64


def at(model, data, w, **options):
    """Return a point posterior of the model at w."""
    rows = Data.of(data).prepared(model.prepare)
    return Point(make_target(model, rows, **options), w)


def on_the_line(structure, **options):
    """Laplace at the exact mode of linear regression."""
    model = LINE.model()
    start = at(model, LINE.data, LINE.posterior.mean)
    return pr.fit(model, LINE.data, Laplace(structure, at=start, **options), progress=False)


def network(prior=1.0, likelihood=None, seed=0):
    """Return a small classification network at fixed random weights, and data."""
    generator = stream(seed, "laplace")
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).to(F64)
    seeded(net, generator)
    X = torch.randn(12, 2, generator=generator, dtype=F64)
    return pr.Model(net, likelihood or pr.Categorical(), prior=prior), (X, torch.arange(12) % 3)


@pytest.fixture(scope="module")
def trained():
    model, data = network()
    return pr.fit(model, data, pr.MAP(), steps=1500, progress=False)


def around(trained, structure=None, **options):
    """Laplace at the mode of the small network."""
    return pr.fit(*network(), Laplace(structure, at=trained, **options), progress=False)


# Linear regression.


@pytest.mark.parametrize("structure", EXACT)
def test_posterior_and_evidence_of_linear_regression_are_exact(structure):
    posterior, exact = on_the_line(structure), LINE.posterior
    covariance = posterior.gaussian.solve(torch.eye(4, dtype=F64))
    torch.testing.assert_close(covariance, exact.covariance_matrix, rtol=1e-9, atol=1e-12)
    assert posterior.log_evidence.value == pytest.approx(LINE.log_evidence, abs=1e-9)
    assert posterior.log_evidence.kind == "Laplace approximation of log p(D)"
    w = exact.mean + torch.tensor([0.1, -0.2, 0.3, 0.05], dtype=F64)
    params = {"weight": w[None, :3], "bias": w[3:]}
    assert float(posterior.log_prob(params)) == pytest.approx(float(exact.log_prob(w)), abs=1e-9)


@pytest.mark.parametrize("structure", EXACT)
def test_predictions_of_linear_regression_are_exact(structure):
    X = torch.randn(7, 3, generator=stream(0, "new"), dtype=F64)
    y = torch.randn(7, generator=stream(1, "new"), dtype=F64)
    prediction, exact = on_the_line(structure).predict(X), LINE.predictive(X)
    torch.testing.assert_close(prediction.mean, exact.mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(prediction.variance, exact.variance, rtol=1e-9, atol=0)
    torch.testing.assert_close(prediction.log_prob(y), exact.log_prob(y), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", [*EXACT, "diag"])
def test_the_precision_is_the_sum_over_the_data_plus_that_of_the_prior(structure):
    once = on_the_line(structure).gaussian
    X = LINE.design(LINE.X)
    diagonal = X.square().sum(0) / LINE.noise**2 + LINE.prior_scale**-2
    wanted = 1 / diagonal if structure == "diag" else LINE.posterior.variance
    torch.testing.assert_close(once.variance(), wanted, rtol=1e-9, atol=0)
    twice = LinearRegression(LINE.X.repeat(2, 1), LINE.y.repeat(2), LINE.noise, LINE.prior_scale, intercept=True)
    model = twice.model()
    start = at(model, twice.data, twice.posterior.mean)
    found = pr.fit(model, twice.data, Laplace(structure, at=start), progress=False).gaussian
    assert float(found.log_det) == pytest.approx(
        float((2 * diagonal - LINE.prior_scale**-2).log().sum() if structure == "diag" else twice.precision.logdet()),
        abs=1e-8,
    )


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
def test_the_temperature_scales_the_likelihood_or_the_whole_posterior(structure, tempers):
    T, X = 3.0, LINE.design(LINE.X)
    b = 1.0 if tempers == "likelihood" else 1 / T
    H, prior = X.T @ X / LINE.noise**2, torch.eye(4, dtype=F64) / LINE.prior_scale**2
    precision = H / T + b * prior
    w = torch.linalg.solve(precision, X.T @ LINE.y / LINE.noise**2 / T)
    model = LINE.model()
    start = at(model, LINE.data, w, temperature=T, tempers=tempers)
    options = {"temperature": T, "tempers": tempers, "progress": False}
    posterior = pr.fit(model, LINE.data, Laplace(structure, at=start), **options)
    torch.testing.assert_close(posterior.gaussian.solve(torch.eye(4, dtype=F64)), torch.linalg.inv(precision))
    noise, width = (torch.tensor(scale, dtype=F64) for scale in (LINE.noise, LINE.prior_scale))
    log_likelihood = Normal(X @ w, noise).log_prob(LINE.y).sum()
    log_prior = Normal(0 * width, width).log_prob(w).sum()
    wanted = log_likelihood / T + b * log_prior + 2 * math.log(2 * math.pi) - 0.5 * precision.logdet()
    assert posterior.log_evidence.value == pytest.approx(float(wanted), abs=1e-8)
    assert posterior.log_evidence.kind.startswith("tempered Laplace evidence, T = 3.0")


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_the_hessian_of_a_linear_model_is_its_ggn(kind):
    posterior = on_the_line("full", curvature=kind)
    torch.testing.assert_close(posterior.curvature.dense(), LINE.precision - torch.eye(4, dtype=F64) / 1.5**2)


def test_a_sampled_fisher_converges_to_the_ggn():
    posterior = on_the_line("full", curvature="fisher", samples=2_000)
    exact = on_the_line("full").curvature.dense()
    off = (posterior.curvature.dense() - exact).abs().max() / exact.diagonal().max()
    # Each label adds a square of relative variance 2: six standard errors of 2,000 labels are 0.19 if one row
    # dominates and 0.04 for twenty equal rows (false alarms: below 1e-8 for five).
    assert float(off) < 0.085


# The mode.


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
def test_without_a_mode_map_runs_first_with_the_given_steps():
    model, data = network()
    seen = []
    posterior = pr.fit(model, data, Laplace(), steps=200, progress=False, callbacks=[lambda m: seen.append(m.step)])
    wanted = pr.fit(model, data, pr.MAP(), steps=200, seed=1, progress=False)
    assert torch.equal(posterior.w, wanted.w)
    assert len(seen) == 200
    assert posterior.history.keys() == {"loss", "nll", "log_prior", "gradient"}
    target = posterior.target
    loss = -float(target.log_likelihood(posterior.w, posterior.data) + target.log_prior(posterior.w))
    assert float(posterior.history["loss"]) == pytest.approx(loss, rel=1e-10)


def test_a_custom_loop_may_start_at_the_current_weights():
    model, data = network()
    rows = Data.of(data).prepared(model.prepare)
    target, method = make_target(model, rows), Laplace("full")
    state = method.init(target, method.plan(target, rows, 1, 0), stream(0))
    assert torch.equal(state.w, model.network.initial)
    state, info = method.step(target, state, rows, stream(0))
    assert info.done
    assert float(info.metrics["nll"]) == pytest.approx(-float(target.log_likelihood(state.w, rows)), rel=1e-12)


def test_a_posterior_without_a_centre_is_refused_as_mode(trained):
    model, data = network()
    draws = Draws(trained.target, trained.w[None])
    with pytest.raises(
        InputError, match="'at' argument of Laplace must be a posterior with a centre, such as the result of MAP"
    ):
        pr.fit(model, data, Laplace(at=draws), progress=False)


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
def test_laplace_uses_the_prior_that_its_mode_was_fitted_with():
    model, data = network()
    start = pr.fit(model, data, pr.MAP(evidence_every=20, structure="diag"), steps=200, progress=False)
    factors = start.model.prior.factors
    assert factors
    posterior = pr.fit(model, data, Laplace("full", at=start), progress=False)
    wanted = start.model.prior.precision[posterior.selection.places]
    torch.testing.assert_close(posterior.precision, wanted)
    torch.testing.assert_close(posterior.model.prior.precision, start.model.prior.precision)


# Selections.


def test_over_the_last_layer_the_other_layers_are_fixed(trained):
    posterior = around(trained, "full", over="last")
    assert posterior.selection.names == ("2.weight", "2.bias")
    draws = posterior.sample(4)
    assert bool((draws["0.weight"] == draws["0.weight"][0]).all())
    assert not bool((draws["2.weight"][1:] == draws["2.weight"][0]).any())
    whole = around(trained, "full").curvature.dense()
    torch.testing.assert_close(posterior.curvature.dense(), whole[12:, 12:])
    assert posterior.log_evidence.kind == "Laplace approximation of log p(D | 0.weight, 0.bias)"


def test_the_evidence_of_some_layers_excludes_the_prior_of_the_others(trained):
    posterior = around(trained, "full", over=["2.*"])
    w = posterior.w
    target = posterior.target
    log_likelihood = float(target.log_likelihood(w, posterior.data))
    log_prior = float(Normal(0.0, 1.0).log_prob(w[12:]).sum())
    wanted = log_likelihood + log_prior + 7.5 * math.log(2 * math.pi) - 0.5 * float(posterior.gaussian.log_det)
    assert posterior.log_evidence.value == pytest.approx(wanted, abs=1e-9)


def test_a_subnetwork_has_the_weights_with_the_largest_diagonal_variances(trained):
    diagonal = around(trained, "diag")
    posterior = around(trained, over=Subnetwork(6))
    assert posterior.curvature.structure == "full"
    wanted = diagonal.gaussian.variance().topk(6).indices.sort().values
    assert torch.equal(posterior.selection.places, wanted)
    whole = around(trained, "full").curvature.dense()
    torch.testing.assert_close(posterior.curvature.dense(), whole[wanted[:, None], wanted])
    assert "the coordinates held fixed" in posterior.log_evidence.kind


def test_single_coordinates_may_be_selected(trained):
    places = torch.tensor([1, 5, 20])
    posterior = around(trained, over=places)
    assert torch.equal(posterior.selection.places, places)
    moved = (posterior.draw(3, stream(0)) != posterior.w).any(0).nonzero().flatten()
    assert torch.equal(moved, places)


# Tuning by the evidence.


@pytest.mark.parametrize("by", ["scalar", "layer", "parameter"])
def test_tuning_raises_the_evidence_and_the_posterior_has_the_tuned_prior(by, trained):
    before = around(trained, "full")
    posterior = around(trained, "full", tune=by)
    assert posterior.log_evidence.value > before.log_evidence.value
    assert posterior.model.prior.factors.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    torch.testing.assert_close(posterior.precision, posterior.model.prior.precision)
    dense = posterior.curvature.dense() + torch.diag(posterior.precision)
    target, w = posterior.target, posterior.w
    log_joint = float(target.log_likelihood(w, posterior.data) + target.log_prior(w))
    wanted = log_joint + 13.5 * math.log(2 * math.pi) - 0.5 * float(dense.logdet())
    assert posterior.log_evidence.value == pytest.approx(wanted, abs=1e-8)
    assert trained.model.prior.factors == {}


def test_one_factor_per_weight_is_refused_for_kron(trained):
    with pytest.raises(
        InputError, match=r"'structure' argument of Laplace must be 'diag' or 'full' for tune='parameter', got 'kron'"
    ):
        around(trained, tune="parameter")


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
def test_shared_weights_may_be_expanded_or_reduced():
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 1)).to(F64)
    X = torch.randn(8, 1, 4, generator=stream(2, "x"), dtype=F64)
    model = pr.Model(net, pr.Gaussian(0.5), prior=1.0)
    start = at(model, (X, X[:, 0, 0]), model.network.initial)
    fits = [Laplace("kron", sharing=how, at=start) for how in ("expand", "reduce")]
    expand, reduce = (pr.fit(model, (X, X[:, 0, 0]), method, progress=False).curvature.dense() for method in fits)
    assert not torch.allclose(expand[:6, :6], reduce[:6, :6])
    torch.testing.assert_close(expand[6:, 6:], reduce[6:, 6:])


def test_a_learnt_noise_is_changed_only_by_tuning():
    net = nn.Linear(3, 1).to(F64)
    model = pr.Model(net, pr.Gaussian(), prior=1.0)
    w = torch.cat([LINE.posterior.mean, torch.tensor([0.0], dtype=F64)])  # noise 1
    start = at(model, LINE.data, w)
    alone = pr.fit(model, LINE.data, Laplace("full", at=start), progress=False)
    assert float(alone.mean["likelihood.noise"]) == 1.0
    assert alone.log_evidence.kind == "Laplace approximation of log p(D | likelihood.noise)"
    tuned = pr.fit(model, LINE.data, Laplace("full", at=start, tune="scalar"), progress=False)
    noise = float(tuned.mean["likelihood.noise"])
    assert 0.3 < noise < 0.7  # the true noise is 0.5
    X = LINE.design(LINE.X)
    wanted = torch.linalg.inv(X.T @ X / noise**2 + torch.diag(tuned.precision))
    torch.testing.assert_close(tuned.gaussian.solve(torch.eye(4, dtype=F64)), wanted, rtol=1e-7, atol=1e-9)
    assert bool((tuned.predict(LINE.X).aleatoric == noise**2).all())


# Members.


def test_members_have_their_own_curvatures():
    model, data = network()
    rows = Data.of(data).prepared(model.prepare)
    target, method = make_target(model, rows), Laplace("kron")
    plan = method.plan(target, rows, 1, 0)
    state = method.init(target, plan, stream(0), torch.Size([2, 2]))
    state, info = method.step(target, state, rows, stream(0))
    for index, w in enumerate(state.w.reshape(4, -1)):
        alone = method.init(target, plan, stream(0), torch.Size(), at(model, data, w))
        _, wanted = method.step(target, alone, rows, stream(0))
        for name, value in wanted.metrics.items():
            assert float(info.metrics[name].flatten()[index]) == pytest.approx(float(value), rel=1e-9)
        pair = state.around[index].gaussian, alone.around[0].gaussian
        assert float(pair[0].log_det) == pytest.approx(float(pair[1].log_det), rel=1e-12)
    with pytest.raises(InputError, match="'state' argument of Laplace must be of one member"):
        method.posterior(target, state)


# Warnings and notes on the mode, the prior and the network.


def test_a_point_that_is_not_a_mode_gives_a_warning_with_the_norm_of_the_gradient():
    model, data = network()
    w = model.network.initial
    target = make_target(model, Data.of(data).prepared(model.prepare))
    norm = float(target.log_joint_and_grad(w, target.model.prepare(data))[1].norm())
    message = f"gradient of the log joint has the norm {norm:.3g} where Laplace expects a mode, which lies about"
    with pytest.warns(PrioryWarning, match=re.escape(message)) as said:
        pr.fit(model, data, Laplace("full", at=at(model, data, w)), progress=False)
    assert str(said[0].message).endswith("standard deviations away: give the fit that found it more steps.")
    assert said[0].filename == __file__  # the user's own line
    with pytest.warns(PrioryWarning, match="name the prior that the network was trained under"):
        pr.fit(model, data, Laplace("full", at="network"), progress=False)


def test_a_point_within_the_spread_of_the_gaussian_gives_no_warning():
    root = torch.linalg.cholesky(LINE.precision)
    step = torch.linalg.solve_triangular(root.mT, torch.ones(4, 1, dtype=F64), upper=True)[
        :, 0
    ]  # one standard deviation in each direction
    model = LINE.model()
    for far in (0.99, 1.01):
        start = at(model, LINE.data, LINE.posterior.mean + far * step)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            pr.fit(model, LINE.data, Laplace("full", at=start), progress=False)
        assert len(said) == (far > 1)


def record_row_sets(monkeypatch) -> list:
    """Record the sets of rows that are used to check whether a point is a mode, one entry per check."""
    kept, make = [], mode_gradient.sets_of_rows

    def sets_of_rows(data, size):
        kept.append([list(rows) for rows in make(data, size)])
        return kept[-1]

    monkeypatch.setattr(mode_gradient, "sets_of_rows", sets_of_rows)
    return kept


@pytest.mark.parametrize("loaded", [False, True], ids=["tensors", "loader"])
def test_a_few_of_many_rows_distinguish_a_mode_from_another_point(monkeypatch, loaded):
    monkeypatch.setattr(mode_gradient, "MAX_ROWS_TIMES_WEIGHTS", 0)
    generator = stream(7, "rows")
    X = torch.randn(3000, 2, generator=generator, dtype=F64)
    y = X @ torch.tensor([1.0, -1.0], dtype=F64) + 0.5 * torch.randn(3000, generator=generator, dtype=F64)
    problem = LinearRegression(X, y, noise=0.5, prior_scale=1.0)
    model, data = problem.model(), problem.data
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=100) if loaded else data
    there = at(model, data, problem.posterior.mean)
    kept = record_row_sets(monkeypatch)
    posterior = pr.fit(model, rows, Laplace("full", at=there), progress=False)  # warnings are errors
    assert posterior.log_evidence.value == pytest.approx(problem.log_evidence, abs=1e-7)
    exact = -float(posterior.target.log_likelihood(posterior.w, posterior.data))
    assert float(posterior.history["nll"]) == pytest.approx(exact, rel=0.35)  # 200 rows or more; 5 standard errors
    ((first, last),) = kept
    seen, targets = (torch.cat([batch[i] for batch in first + last]) for i in (0, -1))
    assert len(targets) == (400 if loaded else 256)
    assert len(seen.unique(dim=0)) == len(seen)  # no row is in both sets
    outputs = problem.design(seen) @ problem.posterior.mean
    own = Normal(outputs, torch.tensor(0.5, dtype=F64)).log_prob(targets.reshape(-1)).mean()
    assert float(posterior.history["nll"]) == pytest.approx(-3000 * float(own), rel=1e-9)
    away = at(model, data, problem.posterior.mean + 0.5)
    with pytest.warns(PrioryWarning, match="which lies about"):
        pr.fit(model, rows, Laplace("full", at=away), progress=False)


def test_the_distance_estimated_from_some_rows_is_unbiased(monkeypatch):
    monkeypatch.setattr(mode_gradient, "MAX_ROWS_TIMES_WEIGHTS", 0)
    monkeypatch.setattr(mode_gradient, "ROWS_PER_SET", 10)
    w = LINE.posterior.mean + 3.0
    model = LINE.model()
    rows = Data.of(LINE.data).prepared(model.prepare)  # all twenty rows, in two sets
    target, gaussian = make_target(model, rows), on_the_line("full").gaussian
    kept = record_row_sets(monkeypatch)
    found = mode_gradient.ModeGradient.of(target, w, rows, {}, gaussian, torch.arange(4))
    monkeypatch.setattr(mode_gradient, "MAX_ROWS_TIMES_WEIGHTS", 1 << 29)
    exact = mode_gradient.ModeGradient.of(target, w, rows, {}, gaussian, torch.arange(4))
    assert found.log_likelihood == pytest.approx(exact.log_likelihood, rel=1e-10)  # the mean of the two halves
    away = torch.full((4,), 3.0, dtype=F64)
    assert exact.distance == pytest.approx(float(away @ LINE.precision @ away / 4) ** 0.5)
    assert found.distance == pytest.approx(exact.distance, rel=0.3)
    # With gradients g + d and g - d of the halves, the estimate is g' Q^-1 g - d' Q^-1 d.
    inputs, targets = kept[0][0][0]
    design = LINE.design(inputs)
    first = 2 * design.mT @ (targets.reshape(-1) - design @ w) / LINE.noise**2 - w / LINE.prior_scale**2
    apart = first + LINE.precision @ away
    square = away @ LINE.precision @ away - apart @ torch.linalg.solve(LINE.precision, apart)
    assert found.distance == pytest.approx(float(square / 4) ** 0.5, rel=1e-8)
    assert exact.gradient == pytest.approx(float((LINE.precision @ away).norm()))


def test_a_mode_gives_no_warning(trained):
    found = around(trained, "full")
    assert found.history["gradient"].shape == (1,)
    assert float(found.history["gradient"]) < 1


@pytest.mark.parametrize("structure", ["full", "lowrank"])
def test_an_indefinite_hessian_is_refused_with_its_eigenvalue(structure):
    model, data = network(prior=3.0)
    start = at(model, data, model.network.initial)
    with pytest.raises(
        InputError, match=r"curvature of kind 'hessian' .* positive definite, got a smallest eigenvalue"
    ):
        pr.fit(model, data, Laplace(structure, at=start, curvature="hessian"), progress=False)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_a_flat_prior_with_a_singular_curvature_is_refused(structure):
    X = torch.zeros(6, 2, dtype=F64)
    X[:, 0] = torch.arange(6)  # the second input is constant zero
    model = pr.Model(nn.Linear(2, 1).to(F64), pr.Gaussian(1.0), prior="flat")
    start = at(model, (X, X[:, 0]), torch.tensor([1.0, 0.0, 0.0], dtype=F64))
    with pytest.raises(InputError, match="prior's precision must be above zero"):
        pr.fit(model, (X, X[:, 0]), Laplace(structure, at=start), progress=False)


def test_a_flat_prior_with_a_curvature_of_full_rank_is_least_squares():
    model = pr.Model(LINE.model().net, pr.Gaussian(LINE.noise), prior="flat")
    X = LINE.design(LINE.X)
    w = torch.linalg.lstsq(X, LINE.y[:, None]).solution[:, 0]
    posterior = pr.fit(model, LINE.data, Laplace("full", at=at(model, LINE.data, w)), progress=False)
    wanted = LINE.noise**2 * torch.linalg.inv(X.T @ X)
    torch.testing.assert_close(posterior.gaussian.solve(torch.eye(4, dtype=F64)), wanted)
    assert "improper" in posterior.log_evidence.kind


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
def test_a_prior_that_is_not_gaussian_contributes_its_curvature_with_a_note():
    model, data = network(prior={"0.*": StudentT(4.0), "*": 1.0})
    posterior = pr.fit(
        model, data, Laplace("diag", at=at(model, data, torch.full((27,), 0.3, dtype=F64))), progress=False
    )
    # -d2 log t_4 / dw2 at 0.3: (df + 1) (df - w^2) / (df + w^2)^2
    assert float(posterior.precision[0]) == pytest.approx(5 * (4 - 0.09) / (4 + 0.09) ** 2, rel=1e-10)
    assert float(posterior.precision[-1]) == 1.0
    stands = "and minus the second derivative of its logarithm at the mode stands for a precision."
    assert posterior.notes[0] == f"0.weight: its prior is the distribution StudentT, {stands}"
    assert "0.bias: its prior is" in repr(posterior)


def test_a_log_prior_that_is_convex_at_the_mode_is_refused():
    model, data = network(prior=StudentT(4.0))
    start = at(model, data, torch.full((27,), 3.0, dtype=F64))
    message = (
        r"log prior of '0\.weight' must curve down at the mode.*got the distribution StudentT with -0\.148 at the wei"
    )
    with pytest.raises(InputError, match=message):
        pr.fit(model, data, Laplace("full", at=start), progress=False)


def test_a_joint_prior_over_all_weights_is_refused():
    joint = MultivariateNormal(torch.zeros(8, dtype=F64), torch.eye(8, dtype=F64))
    model, data = network(prior={"0.weight": joint, "*": 1.0})
    with pytest.raises(InputError, match=r"prior of '0\.weight' must be a product over single weights"):
        pr.fit(model, data, Laplace("full", at=at(model, data, model.network.initial)), progress=False)


def test_a_prior_with_a_kink_is_refused_by_name():
    model, data = network(prior={"0.*": LaplaceDistribution(0.0, 1.0), "*": 1.0})
    message = r"log prior of '0\.weight' must curve down at the mode.*got the distribution Laplace with 0 at the weight"
    with pytest.raises(InputError, match=message):
        pr.fit(model, data, Laplace("diag", at=at(model, data, model.network.initial + 0.1)), progress=False)


def test_a_prior_with_a_kink_is_accepted_outside_the_selection():
    model, data = network(prior={"0.*": LaplaceDistribution(0.0, 1.0), "*": 1e-2})
    start = at(model, data, model.network.initial)
    with pytest.warns(PrioryWarning, match="The gradient of the log joint"):
        posterior = pr.fit(model, data, Laplace("full", over="last", at=start), progress=False)
    assert posterior.precision.tolist() == [1e4] * 15


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
def test_a_hierarchical_prior_uses_its_current_precision():
    model, data = network(prior=pr.priors.Hierarchical(shape=2.0, rate=0.5))
    rows = Data.of(data).prepared(model.prepare)
    w = make_target(model, rows).start(rows, torch.Size(), stream(0))
    posterior = pr.fit(model, data, Laplace("kron", at=at(model, data, w)), progress=False)
    torch.testing.assert_close(posterior.precision, torch.full((27,), 4.0, dtype=F64))


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
def test_dropout_left_in_training_mode_is_refused():
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 3)).to(F64)
    with pytest.raises(InputError, match=r"must not draw random numbers of its own, got dropout in training mode"):
        pr.fit(pr.Model(net, pr.Categorical()), network()[1], Laplace(), progress=False)
    model = pr.Model(net.eval(), pr.Categorical())
    posterior = pr.fit(model, network()[1], Laplace(), steps=50, progress=False)
    assert posterior.predict(network()[1][0]).probs.shape == (12, 3)


def normalised(**options):
    generator = stream(3, "laplace")
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, **options), nn.Tanh(), nn.Linear(4, 3)).to(F64)
    seeded(net, generator)
    return net


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
def test_batch_normalisation_uses_its_running_statistics():
    model, data = pr.Model(normalised(), pr.Categorical(), prior=1.0), network()[1]
    start = pr.fit(model, data, pr.MAP(), steps=100, progress=False)
    posterior = pr.fit(model, data, Laplace("full", at=start), progress=False)
    assert int(posterior.buffers["1.num_batches_tracked"]) == int(start.buffers["1.num_batches_tracked"]) > 0
    for name, buffer in start.buffers.items():
        assert torch.equal(posterior.buffers[name], buffer)
    net = normalised()
    net.load_state_dict({**net.state_dict(), **start.buffers, **start.mean})
    mean, _ = posterior.outputs(data[0])
    torch.testing.assert_close(mean, net.eval()(data[0]).detach())
    one, _ = posterior.outputs(data[0][:1])
    torch.testing.assert_close(one, mean[:1])


@pytest.mark.filterwarnings("ignore:The gradient of the log joint")
def test_running_statistics_that_were_never_updated_give_a_warning():
    model, data = pr.Model(normalised(), pr.Categorical(), prior=1.0), network()[1]
    start = at(model, data, model.network.initial)
    with pytest.warns(PrioryWarning, match="batch normalisation '1' has never updated the running statistics"):
        pr.fit(model, data, Laplace("full", at=start), progress=False)


def test_batch_normalisation_without_running_statistics_is_refused():
    model, data = pr.Model(normalised(track_running_stats=False), pr.Categorical(), prior=1.0), network()[1]
    start = at(model, data, model.network.initial)
    with pytest.raises(InputError, match="batch normalisation '1' must keep running statistics for Laplace"):
        pr.fit(model, data, Laplace("full", at=start), progress=False)


def test_weights_that_are_not_finite_are_not_a_mode():
    model, data = network()
    start = at(model, data, torch.full((27,), math.nan, dtype=F64))
    with pytest.raises((InputError, pr.DivergedError), match="finite"):
        pr.fit(model, data, Laplace(at=start), progress=False)


# Invalid arguments.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"structure": "round"},
            "'structure' argument of Laplace must be among diag, full, kron, lowrank, got 'round'",
        ),
        (
            {"over": "first"},
            "'over' argument of Laplace must be 'all', 'last', names, a Subnetwork or a LongTensor, got 'first'",
        ),
        ({"over": []}, "'over' argument of Laplace must be 'all', 'last', names, a Subnetwork or a LongTensor, got []"),
        ({"over": Subnetwork(3), "structure": "kron"}, "be 'full', 'lowrank' or 'diag' over a Subnetwork, got 'kron'"),
        (
            {"curvature": "flat"},
            "'curvature' argument of Laplace must be among ggn, fisher, empirical, hessian, got 'flat'",
        ),
        ({"samples": 0}, "'samples' argument of Laplace must be an integer >= 1, got 0"),
        ({"tune": "all"}, "'tune' argument of Laplace must be None, 'scalar', 'layer' or 'parameter', got 'all'"),
        (
            {"predictive": "quadratic"},
            "'predictive' argument of Laplace must be 'linear' or 'network', got 'quadratic'",
        ),
        ({"rank": 4}, "'rank' argument of Laplace must be an integer >= 1, with structure='lowrank', got 4"),
        ({"sharing": "none"}, "'sharing' argument of Laplace must be 'expand' or 'reduce', got 'none'"),
        ({"limit": 0.5}, "'limit' argument of Laplace must be an integer of bytes, got 0.5"),
        ({"size": 3}, "options of Laplace must be among structure, over, at"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Laplace(**options)


def test_invalid_sizes_of_a_subnetwork_are_refused():
    with pytest.raises(InputError, match=r"'size' argument of Subnetwork must be an integer >= 1, got 1\.5"):
        Subnetwork(1.5)
    model, data = network()
    with pytest.raises(InputError, match=r"'size' argument of Subnetwork must be at most 27, got 28"):
        pr.fit(model, data, Laplace(over=Subnetwork(28), at=at(model, data, model.network.initial)), progress=False)


def test_the_registry_has_four_structures():
    assert set(STRUCTURES) == {"full", "kron", "diag", "lowrank"}
    assert select(network()[0]).size == 27


# The contract.


def test_at_network_uses_the_current_weights_as_mode() -> None:
    net, X, y = nn.Linear(2, 1).double(), torch.randn(30, 2, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.linalg.lstsq(X, y[:, None] + X @ torch.ones(2, 1, dtype=torch.float64)).solution.T)
        net.bias.zero_()
    target = (X @ torch.ones(2, dtype=torch.float64)) + 0.1 * torch.sin(torch.arange(30.0, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrioryWarning)  # not quite the mode under this prior
        posterior = pr.fit(pr.Model(net, pr.Gaussian(), prior=1.0), (X, target), Laplace(at="network"), progress=False)
        pr.fit(pr.Model(net, pr.Gaussian(0.1)), (X, target), Laplace(at="network"), epochs=3, progress=False)
    assert torch.equal(posterior.mean["weight"], net.weight.detach())
    residual = (target - net(X).squeeze(-1)).detach()
    noise = float(posterior.mean["likelihood.noise"])
    assert 1.0 < noise / float(residual.square().mean().sqrt()) < 1.2  # RSS / (N - gamma)


@pytest.mark.parametrize("at", [3, "map", pr.MAP])
def test_an_invalid_at_is_refused(at: object) -> None:
    with pytest.raises(InputError, match="The 'at' argument of Laplace must be 'network', a posterior or a method"):
        Laplace(at=at)


def test_a_subnetwork_larger_than_the_network_is_refused() -> None:
    net, X = nn.Linear(2, 1), torch.zeros(4, 2)
    with pytest.raises(InputError, match=r"The 'size' argument of Subnetwork must be at most 3, got 4"):
        pr.fit(pr.Model(net, pr.Gaussian(1.0)), (X, X[:, 0]), Laplace(over=Subnetwork(4)), progress=False)


def test_a_posterior_of_another_model_is_refused_as_at() -> None:
    other = at(LINE.model(), LINE.data, LINE.posterior.mean)
    with pytest.raises(InputError, match="The 'at' argument of Laplace must be a posterior of the same model"):
        pr.fit(*network(), Laplace("full", at=other), progress=False)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_weight_norm_gives_no_warnings_of_torch(structure: str) -> None:
    generator = stream(4, "norm")
    torch.manual_seed(0)
    net = nn.Sequential(weight_norm(nn.Linear(2, 3)), nn.Tanh(), nn.Linear(3, 2)).to(F64)
    X = torch.randn(6, 2, generator=generator, dtype=F64)
    model = pr.Model(net, pr.Categorical(), prior=0.1)
    posterior = pr.fit(model, (X, torch.arange(6) % 2), Laplace(structure), steps=300, progress=False)
    network = posterior.model.network
    slopes = torch.autograd.functional.jacobian(lambda w: network.functional(w, (X,), {}), posterior.w)
    spread = posterior.gaussian.solve(torch.eye(posterior.selection.size, dtype=F64))
    torch.testing.assert_close(posterior.outputs(X)[1], slopes @ spread @ slopes.mT, rtol=1e-8, atol=1e-10)
