"""EM: the maximum it reaches with every option, the metrics it reports, and resuming from a checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, Normal

import priory as pr
from priory.core.errors import InputError, PrioryWarning
from priory.core.flat import Param
from priory.core.streams import stream
from priory.fitting.checkpoint import Checkpoint
from priory.fitting.fit import fit
from priory.fitting.prepare import make_target
from priory.fitting.run import Run
from priory.latent import (
    BernoulliMixture,
    GaussianMixture,
    Latent,
    NormalGamma,
    PoissonMixture,
    RegressionMixture,
    expect,
    score,
)
from priory.likelihoods import Gaussian
from priory.methods import MAP
from priory.methods.base import Method, Plan
from priory.methods.em.ascent import squared
from priory.methods.em.em import EM
from priory.models.density import Density
from priory.models.model import Model
from priory.posteriors.latent import LatentPoint


def make_run(
    model: Latent, data: Any, method: EM, steps: int = 200, seed: int = 0, batch_size: int | None = None
) -> Run:
    model, rows = model.meet(data, batch_size)
    target = make_target(model, rows)
    return Run(target, method, method.plan(target, rows, steps, seed), seed, None)


def fitted(model: Latent, data: Any, method: EM | None = None, **options: Any) -> LatentPoint:
    run = make_run(model, data, method or EM(), **options)
    run.run(False, [])
    posterior = run.posterior()
    assert isinstance(posterior, LatentPoint)
    return posterior


def two_gaussians(rows: int = 300, distance: float = 2.5) -> tuple[Tensor, Tensor]:
    """Return y drawn from two Gaussians, and the component z of each row."""
    generator = torch.Generator().manual_seed(0)
    z = (torch.rand(rows, generator=generator) < 0.4).long()
    return torch.randn(rows, generator=generator, dtype=torch.float64) * (1 + z) / 2 + distance * z, z


def test_two_gaussians_are_fitted_with_z_observed_and_with_z_hidden():
    y, z = two_gaussians(2000, distance=4.0)
    observed = fitted(GaussianMixture(2, given="z"), (y, z), steps=3)
    for k in range(2):
        assert float(observed.mean["means"][k]) == pytest.approx(float(y[z == k].mean()), rel=1e-10)
        assert float(observed.mean["covariances"][k]) == pytest.approx(float(y[z == k].var(correction=0)), rel=1e-10)
    hidden = fitted(GaussianMixture(2), y, EM(restarts=3, tolerance=1e-10))
    order = hidden.mean["means"].argsort()
    # The components are well separated, so hiding z costs little: 0.1 is 3 standard errors of the mean of 800 rows.
    torch.testing.assert_close(hidden.mean["means"][order], observed.mean["means"], atol=0.1, rtol=0)
    assert hidden.converged
    assert hidden.method == "EM(restarts=3, tolerance=1e-10)"


def test_the_gradient_is_zero_at_the_result():
    y, _ = two_gaussians()
    posterior = fitted(GaussianMixture(2), y, EM(tolerance=1e-15), steps=3000)
    gradient = score(posterior.latent, posterior.theta, posterior.latent.meet(y)[1])
    assert float(gradient.abs().max()) < 1e-4


def test_all_options_reach_the_same_maximum():
    y, _ = two_gaussians(100)
    plain = fitted(GaussianMixture(2), y, EM(tolerance=1e-8), steps=1000)
    accelerated = fitted(GaussianMixture(2), y, EM(tolerance=1e-8, accelerate=True), steps=1000)
    annealed = fitted(GaussianMixture(2), y, EM(tolerance=1e-8, annealing=(3.0, 2.0, 1.5)), steps=1000)
    one_gradient_step = fitted(GaussianMixture(2), y, EM(tolerance=1e-8, gradient_steps=1), steps=1000)
    ten_gradient_steps = fitted(GaussianMixture(2), y, EM(tolerance=1e-8, gradient_steps=10), steps=1000)
    for other in (accelerated, annealed, one_gradient_step, ten_gradient_steps):
        assert other.log_evidence.value == pytest.approx(plain.log_evidence.value, abs=1e-4)
    for other in (accelerated, one_gradient_step, ten_gradient_steps):
        assert float(other.history["bound"].diff().min()) >= -1e-10 * abs(plain.log_evidence.value)
    assert len(accelerated.history["bound"]) < 0.5 * len(plain.history["bound"])


def test_the_metrics_are_the_expected_log_joint_the_divergence_and_the_bound():
    y, _ = two_gaussians()
    run = make_run(GaussianMixture(2), y, EM(tolerance=0.0))
    model, method, rows = run.target.model, run.method, run.plan.data
    assert isinstance(model, GaussianMixture)
    for _ in range(4):
        before = {name: t[0].clone() for name, t in run.state.theta.items()}
        run.state, info = method.step(run.target, run.state, rows, run.generator)
        (previous,) = expect(model, [before], rows.blocks(100))
        after = {name: t[0] for name, t in run.state.theta.items()}
        q = model.log_joint(before, model.rows((y,))).softmax(0)
        entropy = -(q * q.log()).sum()
        joint = model.log_joint(after, model.rows((y,)))
        divergence = (q * (q.log() - joint.log_softmax(0))).sum()
        torch.testing.assert_close(info.metrics["Q"], (q * joint).sum(), rtol=1e-10, atol=1e-9)
        torch.testing.assert_close(info.metrics["gap"], divergence, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(info.metrics["bound"], joint.logsumexp(0).sum(), rtol=1e-10, atol=1e-9)
        assert float(previous.bound) <= float(info.metrics["Q"] + entropy) <= float(info.metrics["bound"])


def test_an_iteration_equals_an_e_step_followed_by_an_m_step():
    y, _ = two_gaussians()
    run = make_run(GaussianMixture(2), y, EM())
    model, rows = run.target.model, run.plan.data
    assert isinstance(model, Latent)
    theta = {name: t[0].clone() for name, t in run.state.theta.items()}
    for _ in range(3):
        (found,) = expect(model, [theta], rows.blocks(100))
        theta = model.m_step(found.statistics, theta)
        run.state, _ = run.method.step(run.target, run.state, rows, run.generator)
    for name, t in theta.items():
        torch.testing.assert_close(run.state.theta[name][0], t, rtol=1e-9, atol=1e-9)


def test_the_restart_with_the_highest_bound_is_kept():
    y, _ = two_gaussians()
    run = make_run(GaussianMixture(4), y, EM(restarts=5, start="random", tolerance=1e-9), steps=40)
    run.run(False, [])
    best = run.posterior()
    assert best.log_evidence.value == float(run.state.bound.max())
    assert run.state.bound.unique().numel() > 1
    assert float(best.history["bound"].diff().min()) >= -1e-10 * abs(best.log_evidence.value)


def test_members_and_restarts_are_the_leading_dimensions_of_the_state():
    y, _ = two_gaussians()
    model, rows = GaussianMixture(2).meet(y)
    target, method = make_target(model, rows), EM(restarts=2, accelerate=True)
    state = method.init(target, Plan(rows, 5), stream(0, "test"), torch.Size([3]))
    for _ in range(3):
        state, _ = method.step(target, state, rows, stream(0, "test"))
    state, info = method.step(target, state, rows, stream(0, "test"))
    tensors = [*state.theta.values(), *state.statistics.values(), state.bound, state.active, state.past]
    assert all(t.shape[:2] == (3, 2) for t in tensors)
    assert all(torch.as_tensor(value).shape == (3,) for value in info.metrics.values())


@pytest.mark.parametrize("accelerate", [False, True])
def test_a_member_follows_the_same_path_as_a_single_fit(accelerate: bool):
    y, _ = two_gaussians()
    model, rows = GaussianMixture(2).meet(y)
    target, method = make_target(model, rows), EM(restarts=2, start="random", accelerate=accelerate)

    def select(value: Any, member: int) -> Any:
        if isinstance(value, dict):
            return {name: t[member].clone() for name, t in value.items()}
        return value[member].clone() if isinstance(value, Tensor) else value

    state = method.init(target, Plan(rows, 5), stream(1, "test"), torch.Size([3]))
    assert state.bound.unique().numel() == 6
    fields = [field.name for field in dataclasses.fields(state)]
    single = [dataclasses.replace(state, **{f: select(getattr(state, f), m) for f in fields}) for m in range(3)]
    for _ in range(4):
        state, info = method.step(target, state, rows, stream(0, "test"))
        for member in range(3):
            single[member], single_info = method.step(target, single[member], rows, stream(0, "test"))
            for name in fields:
                wanted = getattr(single[member], name)
                torch.testing.assert_close(select(getattr(state, name), member), wanted, rtol=1e-10, atol=1e-10)
            for name, value in single_info.metrics.items():
                torch.testing.assert_close(select(info.metrics[name], member), value, rtol=1e-10, atol=1e-10)


def test_minibatches_approach_the_maximum_and_blend_statistics_at_the_stated_rate():
    y, _ = two_gaussians(4000)
    full_data = fitted(GaussianMixture(2), y, EM(tolerance=1e-8))
    online = fitted(GaussianMixture(2), y, EM(online=0.7), steps=400, batch_size=100)
    gap = float(full_data.log_likelihood(y).sum() - online.log_likelihood(y).sum())
    assert 0 <= gap < 4.0  # nats of 4,000 rows; the maximum exceeds the truth by 2.5 on average (5 parameters)
    assert len(online.history["bound"]) == 400
    start = {"weights": [0.5, 0.5], "means": [0.0, 1.0], "covariances": [1.0, 1.0]}
    first = {name: torch.tensor(values).double() for name, values in start.items()}
    model, rows = GaussianMixture(2).meet(y, 4000)
    (found,) = expect(model, [first], rows.blocks(4000))
    rate = 2**-0.7
    method = EM(online=0.7, start=first)
    target = make_target(model, rows)
    state = method.init(target, Plan(rows, 5), stream(0, "test"))
    assert state.bound.item() == pytest.approx(float(found.bound), rel=1e-10)
    after, _ = method.step(target, state, (y,), stream(0, "test"))
    after_one_step = model.m_step(found.statistics, first)
    (second_step,) = expect(model, [after_one_step], rows.blocks(4000))
    blend = (1 - rate) * found.statistics["sums"] + rate * second_step.statistics["sums"]
    torch.testing.assert_close(after.statistics["sums"][0], blend, rtol=1e-9, atol=1e-9)


def test_monte_carlo_e_steps_approach_the_maximum():
    y, _ = two_gaussians(2000)
    full_data = fitted(GaussianMixture(2), y, EM(tolerance=1e-8))
    drawn = fitted(GaussianMixture(2), y, EM(draws=20), steps=60)
    assert abs(full_data.log_evidence.value - drawn.log_evidence.value) < 2.0
    assert not drawn.converged


def test_a_row_weight_equals_that_many_repetitions():
    y, _ = two_gaussians(60)
    repeats = 1 + torch.arange(60) % 3
    start = {"weights": [0.5, 0.5], "means": [0.0, 2.0], "covariances": [1.0, 1.0]}
    method = EM(tolerance=0.0, start={name: torch.tensor(values).double() for name, values in start.items()})
    weighted = fitted(GaussianMixture(2, given="weights"), (y, repeats), method, steps=20)
    repeated = fitted(GaussianMixture(2), y.repeat_interleave(repeats), method, steps=20)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(weighted.mean[name], t, rtol=1e-9, atol=1e-9)
    assert weighted.log_evidence.value == pytest.approx(repeated.log_evidence.value, rel=1e-10)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-5])
def test_the_tolerance_is_per_row_so_repeating_all_rows_gives_the_same_iterations(tolerance: float):
    y, _ = two_gaussians(100)
    start = {"weights": [0.5, 0.5], "means": [0.0, 2.0], "covariances": [1.0, 1.0]}
    method = EM(tolerance=tolerance, start={name: torch.tensor(values).double() for name, values in start.items()})
    once, repeated = (fitted(GaussianMixture(2), rows, method) for rows in (y, y.repeat(1000)))
    assert once.converged
    assert repeated.converged
    bound = once.history["bound"]
    torch.testing.assert_close(repeated.history["bound"], 1000 * bound, rtol=1e-10, atol=0)  # same number of iterations
    rises = bound.diff() / 100
    left = rises[1:] * (rises[1:] / rises[:-1]) / (1 - rises[1:] / rises[:-1])  # the sum of a geometric series
    enough = (rises[1:] < tolerance) & (left < tolerance) & (left > 0)
    assert enough.nonzero()[:, 0].tolist() == [len(enough) - 1]
    for name, t in once.mean.items():
        torch.testing.assert_close(repeated.mean[name], t, rtol=1e-9, atol=1e-9)


def test_the_log_evidence_at_a_mode_excludes_the_prior():
    """NormalGamma has no latent variables, so the mode and both densities have closed forms."""
    y, _ = two_gaussians(30)
    mu0, strength, shape, rate = 0.5, 3.0, 4.0, 2.0
    found = fitted(NormalGamma(mu0, strength, shape, rate), y, steps=5)
    mean = (strength * mu0 + y.sum()) / (strength + 30)
    spread = (y - mean).square().sum() + strength * (mean - mu0).square() + 2 * rate
    precision = (30 + 1 + 2 * (shape - 1)) / spread
    torch.testing.assert_close(found.mean["mean"], mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.mean["precision"], precision, rtol=1e-10, atol=1e-10)
    log_likelihood = float(Normal(mean, precision.rsqrt()).log_prob(y).sum())
    of_precision = Gamma(torch.tensor(shape).double(), torch.tensor(rate).double())
    log_prior = Normal(mu0, (strength * precision).rsqrt()).log_prob(mean) + of_precision.log_prob(precision)
    assert found.log_evidence.value == pytest.approx(log_likelihood, abs=1e-9)
    assert float(found.history["bound"][-1]) == pytest.approx(log_likelihood + float(log_prior), abs=1e-9)
    assert abs(float(log_prior)) > 0.1


def test_a_regression_mixture_recovers_two_crossing_lines():
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(300, 1, generator=generator, dtype=torch.float64) + 10
    z = torch.arange(300) % 2
    line = torch.where(z == 0, 3 * x[:, 0] - 30, -2 * x[:, 0] + 30)
    y = line + 0.2 * torch.randn(300, generator=generator, dtype=torch.float64)
    found = fitted(RegressionMixture(2), (x, y), EM(restarts=5, tolerance=1e-14), steps=1000).mean
    order = found["coefficients"][:, 0].argsort()
    wanted = torch.tensor([-2.0, 3.0], dtype=torch.float64)
    # The standard error of a slope is 0.2 / sqrt(150 * 16 / 12) = 0.014; 5 of them are allowed.
    torch.testing.assert_close(found["coefficients"][order, 0], wanted, atol=0.07, rtol=0)
    torch.testing.assert_close(found["intercepts"][order], torch.tensor([30.0, -30.0]).double(), atol=0.9, rtol=0)
    torch.testing.assert_close(found["variances"], torch.full((2,), 0.04).double(), rtol=0.6, atol=0)
    # Exact check: at the maximum each line is the least-squares fit of the rows weighted by q.
    lines = found["coefficients"] @ x.T + found["intercepts"][:, None]
    log_joint = found["weights"].log()[:, None] + Normal(lines, found["variances"].sqrt()[:, None]).log_prob(y)
    design = torch.cat([x, torch.ones_like(x)], 1)
    for k, q in enumerate(log_joint.softmax(0)):
        line = torch.linalg.solve(design.T @ (q[:, None] * design), design.T @ (q * y))
        assert float(found["coefficients"][k, 0]) == pytest.approx(float(line[0]), rel=1e-6)
        assert float(found["intercepts"][k]) == pytest.approx(float(line[1]), rel=1e-6)
        variance = (q * (y - design @ line).square()).sum() / q.sum()
        assert float(found["variances"][k]) == pytest.approx(float(variance), rel=1e-6)
        assert float(found["weights"][k]) == pytest.approx(float(q.mean()), rel=1e-6)


def test_map_of_a_latent_model_reaches_the_maximum_of_em():
    y, _ = two_gaussians()
    by_em = fitted(PoissonMixture(2), y.abs().round(), EM(tolerance=1e-12), steps=2000)
    model, rows = PoissonMixture(2).meet(y.abs().round(), 300)
    by_map = fit(model, rows, MAP(learning_rate=0.05), steps=300, progress=False)
    value = model.log_marginal(by_map.mean, model.rows((y.abs().round(),))).sum()
    assert float(value) == pytest.approx(by_em.log_evidence.value, abs=0.05)


def test_fit_takes_a_prepared_model_and_a_posterior_as_its_start():
    y, _ = two_gaussians()
    model, rows = GaussianMixture(2).meet(y)
    posterior = fit(model, rows, EM(restarts=2), steps=50, progress=False)
    assert set(posterior.mean) == {"weights", "means", "covariances"}
    assert posterior.log_evidence.value == pytest.approx(float(posterior.history["bound"][-1]), rel=1e-12)
    again = fit(model, rows, EM(start=posterior), steps=5, progress=False)
    assert float(again.history["bound"][0]) >= posterior.log_evidence.value - 1e-9


def test_the_same_seed_gives_the_same_result_and_another_seed_does_not():
    y, _ = two_gaussians()
    first, second, third = (
        fitted(GaussianMixture(3), y, EM(start="random", draws=2), steps=5, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first.mean["means"], second.mean["means"])
    assert not torch.equal(first.mean["means"], third.mean["means"])


@pytest.mark.parametrize("method", [EM(tolerance=0.0, accelerate=True), EM(draws=2, restarts=2), EM(online=0.6)])
def test_an_interrupted_fit_resumes_with_the_same_result(method: EM, tmp_path: Path):
    y, _ = two_gaussians()
    model, rows = GaussianMixture(2).meet(y, 50)
    uninterrupted = fit(model, rows, method, steps=14, progress=False)
    checkpoint = Checkpoint(tmp_path / "fit", every=3)

    def interrupt(progress: Any) -> None:
        if progress.step >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, rows, method, steps=14, progress=False, checkpoint=checkpoint, callbacks=[interrupt])
    resumed = fit(model, rows, method, steps=14, progress=False, checkpoint=checkpoint)
    for name, t in resumed.mean.items():
        assert torch.equal(t, uninterrupted.mean[name]), name
    assert torch.equal(resumed.history["bound"], uninterrupted.history["bound"])


def test_a_fit_of_float32_data_stays_in_float32():
    y, _ = two_gaussians()
    posterior = fitted(BernoulliMixture(2), (y > 1).float(), EM(restarts=2), steps=20)
    assert all(t.dtype == torch.float32 for t in posterior.mean.values())


def test_squarem_extrapolates_a_geometric_sequence_to_its_limit():
    limit, start = torch.tensor([1.0, -2.0]), torch.tensor([5.0, 4.0])
    path = [limit + 0.9**t * (start - limit) for t in range(3)]
    torch.testing.assert_close(squared(*path), limit, rtol=1e-4, atol=1e-4)
    assert squared(start, start, start) is None


def test_the_repr_of_a_given_start_has_its_names_and_a_hash():
    start = {"means": torch.zeros(2), "weights": [0.5, 0.5]}
    assert "start=<means, weights: " in repr(EM(start=start))
    assert repr(EM(start=start)) == repr(EM(start=dict(start))) != repr(EM(start=start | {"means": torch.ones(2)}))


def test_em_is_a_method_and_a_frozen_dataclass():
    method = EM()
    assert isinstance(method, Method)
    assert (method.traits.reads, EM(online=0.6).traits.reads) == ("pass", "batch")
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.restarts = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"restarts": 1.5}, "The 'restarts' argument of EM must be an integer >= 1, got 1.5."),
        ({"restarts": 2, "start": {}}, "The 'restarts' argument of EM must be 1 where the start is given, got 2."),
        ({"tolerance": -1}, "The 'tolerance' argument of EM must be a number >= 0, got -1."),
        ({"tolerance": "low"}, "The 'tolerance' argument of EM must be a number >= 0, got 'low'."),
        ({"accelerate": 1}, "The 'accelerate' argument of EM must be True or False, got 1."),
        ({"annealing": 2.0}, "The 'annealing' argument of EM must be a tuple of temperatures >= 1, got 2.0."),
        ({"annealing": (0.5,)}, "The 'annealing' argument of EM must be a tuple of temperatures >= 1, got (0.5,)."),
        ({"draws": -1}, "The 'draws' argument of EM must be an integer >= 0, got -1."),
        ({"online": 0.5}, "The 'online' argument of EM must lie above 0.5 and not above 1, or be None, got 0.5."),
        ({"gradient_steps": 0}, "The 'gradient_steps' argument of EM must be an integer >= 1, or None, got 0."),
        (
            {"accelerate": True, "draws": 2},
            "The 'accelerate' argument of EM must be False with online, draws or annealing",
        ),
        ({"momentum": 1}, "The options of EM must be among restarts"),
    ],
)
def test_invalid_options_raise_an_error_that_names_them(options, message):
    with pytest.raises(InputError) as caught:
        EM(**options)
    assert message in str(caught.value)


def test_invalid_starts_and_models_raise_an_error():
    y, _ = two_gaussians()
    with pytest.raises(InputError, match=r"be one of k-means\+\+, random for GaussianMixture"):
        fitted(GaussianMixture(2), y, EM(start="kmeans"))
    with pytest.raises(InputError, match=r"missing \['weights'"):
        fitted(GaussianMixture(2), y, EM(start={"means": torch.zeros(2)}))
    negative_variance = {
        "weights": torch.tensor([0.5, 0.5]),
        "means": torch.zeros(2),
        "covariances": torch.tensor([1.0, -1.0]),
    }
    with pytest.raises(InputError, match=r"hold parameters of GaussianMixture.* inside their supports"):
        fitted(GaussianMixture(2), y, EM(start=negative_variance))
    weights_above_one = {"weights": torch.tensor([1.5, 0.5]), "means": torch.zeros(2), "covariances": torch.ones(2)}
    with pytest.raises(InputError, match=r"hold parameters of GaussianMixture.* inside their supports"):
        fitted(GaussianMixture(2), y, EM(start=weights_above_one))
    for model in (Model(nn.Linear(1, 1), Gaussian(1.0)), Density(lambda p: -p["x"].square(), {"x": Param(())})):
        data = (y[:, None].float(), y.float()) if isinstance(model, Model) else None
        with pytest.raises(InputError, match="must be a latent model, such as"):
            fit(model, data, EM(), progress=False)
    model, rows = GaussianMixture(2).meet(y)
    with pytest.raises(InputError, match="The 'temperature' argument of EM must be 1"):
        fit(model, rows, EM(), temperature=2.0, progress=False)


def test_rounded_weights_of_a_start_are_normalised():
    y, _ = two_gaussians()
    rounded = {"weights": torch.tensor([0.33333, 0.66666]), "means": torch.tensor([0.0, 2.0])}
    exact = rounded | {"weights": torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)}
    posteriors = [fitted(GaussianMixture(2), y, EM(start=s | {"covariances": torch.ones(2)})) for s in (rounded, exact)]
    assert posteriors[0].log_evidence.value == pytest.approx(posteriors[1].log_evidence.value, abs=1e-3)


def test_a_warning_points_at_the_line_that_calls_fit():
    with pytest.warns(PrioryWarning) as caught:
        fit(GaussianMixture(3), torch.ones(9).double(), EM(), progress=False)
    assert {w.filename for w in caught} == {__file__}


@pytest.mark.parametrize(
    ("model", "method"),
    [(pr.latent.GaussianMixture(3), pr.EM), (pr.latent.BayesianGaussianMixture(3), pr.VariationalEM)],
)
def test_a_fit_that_reaches_its_default_cap_warns_once(model, method):
    y = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.warns(pr.PrioryWarning, match="has not converged. The bound was still improving after 1,000") as caught:
        found = pr.fit(model, y, method(tolerance=0.0), progress=False)
    assert len(caught) == 1
    assert found.status.name == "not_converged"
    pr.fit(model, y, method(tolerance=0.0), steps=20, progress=False)  # a chosen length doesn't warn
