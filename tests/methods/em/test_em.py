"""EM: where it ends, by which ways, what it tells on the way, and how it resumes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, Normal

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


def started(
    model: Latent, data: Any, method: EM, steps: int = 200, seed: int = 0, batch_size: int | None = None
) -> Run:
    model, rows = model.meet(data, batch_size)
    target = make_target(model, rows)
    return Run(target, method, method.plan(target, rows, steps, seed), seed, None)


def fitted(model: Latent, data: Any, method: EM | None = None, **options: Any) -> LatentPoint:
    run = started(model, data, method or EM(), **options)
    run.run(False, [])
    posterior = run.posterior()
    assert isinstance(posterior, LatentPoint)
    return posterior


def lecture(rows: int = 300, apart: float = 2.5) -> tuple[Tensor, Tensor]:
    """y from two Gaussians, and z that says from which."""
    generator = torch.Generator().manual_seed(0)
    z = (torch.rand(rows, generator=generator) < 0.4).long()
    return torch.randn(rows, generator=generator, dtype=torch.float64) * (1 + z) / 2 + apart * z, z


def test_the_lectures_problem_with_z_observed_and_then_hidden():
    y, z = lecture(2000, apart=4.0)
    seen = fitted(GaussianMixture(2, given="z"), (y, z), steps=3)
    for k in range(2):
        assert float(seen.mean["means"][k]) == pytest.approx(float(y[z == k].mean()), rel=1e-10)
        assert float(seen.mean["covariances"][k]) == pytest.approx(float(y[z == k].var(correction=0)), rel=1e-10)
    hidden = fitted(GaussianMixture(2), y, EM(restarts=3, tolerance=1e-10))
    order = hidden.mean["means"].argsort()
    # hidden z cost little where the clouds are apart: a tenth of a standard deviation, 3 standard errors of 800 rows
    torch.testing.assert_close(hidden.mean["means"][order], seen.mean["means"], atol=0.1, rtol=0)
    assert hidden.converged
    assert hidden.method == "EM(restarts=3, tolerance=1e-10)"


def test_the_end_is_a_place_without_slope():
    y, _ = lecture()
    posterior = fitted(GaussianMixture(2), y, EM(tolerance=1e-15), steps=3000)
    slope = score(posterior.latent, posterior.theta, posterior.latent.meet(y)[1])
    assert float(slope.abs().max()) < 1e-4


def test_every_way_ends_at_the_same_maximum():
    y, _ = lecture(100)
    plain = fitted(GaussianMixture(2), y, EM(tolerance=1e-8), steps=1000)
    fast = fitted(GaussianMixture(2), y, EM(tolerance=1e-8, accelerate=True), steps=1000)
    warm = fitted(GaussianMixture(2), y, EM(tolerance=1e-8, annealing=(3.0, 2.0, 1.5)), steps=1000)
    steep = fitted(GaussianMixture(2), y, EM(tolerance=1e-8, gradient_steps=1), steps=1000)
    climbing = fitted(GaussianMixture(2), y, EM(tolerance=1e-8, gradient_steps=10), steps=1000)
    for other in (fast, warm, steep, climbing):
        assert other.log_evidence.value == pytest.approx(plain.log_evidence.value, abs=1e-4)
    for other in (fast, steep, climbing):
        assert float(other.history["bound"].diff().min()) >= -1e-10 * abs(plain.log_evidence.value)
    assert len(fast.history["bound"]) < 0.5 * len(plain.history["bound"])


def test_the_history_is_the_textbooks_picture():
    y, _ = lecture()
    run = started(GaussianMixture(2), y, EM(tolerance=0.0))
    model, method, rows = run.target.model, run.method, run.plan.data
    assert isinstance(model, GaussianMixture)
    for _ in range(4):
        before = {name: t[0].clone() for name, t in run.state.theta.items()}
        run.state, info = method.step(run.target, run.state, rows, run.generator)
        (there,) = expect(model, [before], rows.blocks(100))
        after = {name: t[0] for name, t in run.state.theta.items()}
        q = model.log_joint(before, model.rows((y,))).softmax(0)
        entropy = -(q * q.log()).sum()
        joint = model.log_joint(after, model.rows((y,)))
        divergence = (q * (q.log() - joint.log_softmax(0))).sum()
        torch.testing.assert_close(info.metrics["Q"], (q * joint).sum(), rtol=1e-10, atol=1e-9)
        torch.testing.assert_close(info.metrics["gap"], divergence, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(info.metrics["bound"], joint.logsumexp(0).sum(), rtol=1e-10, atol=1e-9)
        assert float(there.bound) <= float(info.metrics["Q"] + entropy) <= float(info.metrics["bound"])


def test_e_and_m_steps_by_hand_are_an_iteration():
    y, _ = lecture()
    run = started(GaussianMixture(2), y, EM())
    model, rows = run.target.model, run.plan.data
    assert isinstance(model, Latent)
    theta = {name: t[0].clone() for name, t in run.state.theta.items()}
    for _ in range(3):
        (found,) = expect(model, [theta], rows.blocks(100))
        theta = model.m_step(found.statistics, theta)
        run.state, _ = run.method.step(run.target, run.state, rows, run.generator)
    for name, t in theta.items():
        torch.testing.assert_close(run.state.theta[name][0], t, rtol=1e-9, atol=1e-9)


def test_the_best_restart_is_kept_and_a_restart_is_a_member_of_its_own():
    y, _ = lecture()
    run = started(GaussianMixture(4), y, EM(restarts=5, start="random", tolerance=1e-9), steps=40)
    run.run(False, [])
    best = run.posterior()
    assert best.log_evidence.value == float(run.state.bound.max())
    assert run.state.bound.unique().numel() > 1
    assert float(best.history["bound"].diff().min()) >= -1e-10 * abs(best.log_evidence.value)


def test_members_lead_every_tensor_of_the_state():
    y, _ = lecture()
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
def test_a_member_goes_its_way_as_it_would_alone(accelerate: bool):
    y, _ = lecture()
    model, rows = GaussianMixture(2).meet(y)
    target, method = make_target(model, rows), EM(restarts=2, start="random", accelerate=accelerate)

    def of(value: Any, member: int) -> Any:
        if isinstance(value, dict):
            return {name: t[member].clone() for name, t in value.items()}
        return value[member].clone() if isinstance(value, Tensor) else value

    state = method.init(target, Plan(rows, 5), stream(1, "test"), torch.Size([3]))
    assert state.bound.unique().numel() == 6
    fields = [field.name for field in dataclasses.fields(state)]
    alone = [dataclasses.replace(state, **{f: of(getattr(state, f), m) for f in fields}) for m in range(3)]
    for _ in range(4):
        state, info = method.step(target, state, rows, stream(0, "test"))
        for member in range(3):
            alone[member], told = method.step(target, alone[member], rows, stream(0, "test"))
            for name in fields:
                wanted = getattr(alone[member], name)
                torch.testing.assert_close(of(getattr(state, name), member), wanted, rtol=1e-10, atol=1e-10)
            for name, value in told.metrics.items():
                torch.testing.assert_close(of(info.metrics[name], member), value, rtol=1e-10, atol=1e-10)


def test_minibatches_come_near_to_the_maximum_and_all_rows_at_rate_one_are_plain_em():
    y, _ = lecture(4000)
    whole = fitted(GaussianMixture(2), y, EM(tolerance=1e-8))
    online = fitted(GaussianMixture(2), y, EM(online=0.7), steps=400, batch_size=100)
    gap = float(whole.log_likelihood(y).sum() - online.log_likelihood(y).sum())
    assert 0 <= gap < 4.0  # of 4,000 rows: as near as the maximum itself is to the truth (5 parameters, 2.5 nats)
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
    moved = model.m_step(found.statistics, first)
    (next_,) = expect(model, [moved], rows.blocks(4000))
    blend = (1 - rate) * found.statistics["sums"] + rate * next_.statistics["sums"]
    torch.testing.assert_close(after.statistics["sums"][0], blend, rtol=1e-9, atol=1e-9)


def test_draws_of_z_lead_near_the_maximum():
    y, _ = lecture(2000)
    whole = fitted(GaussianMixture(2), y, EM(tolerance=1e-8))
    drawn = fitted(GaussianMixture(2), y, EM(draws=20), steps=60)
    assert abs(whole.log_evidence.value - drawn.log_evidence.value) < 2.0
    assert not drawn.converged


def test_weighted_rows_are_fitted_as_repeated_ones():
    y, _ = lecture(60)
    times = 1 + torch.arange(60) % 3
    start = {"weights": [0.5, 0.5], "means": [0.0, 2.0], "covariances": [1.0, 1.0]}
    method = EM(tolerance=0.0, start={name: torch.tensor(values).double() for name, values in start.items()})
    weighted = fitted(GaussianMixture(2, given="weights"), (y, times), method, steps=20)
    repeated = fitted(GaussianMixture(2), y.repeat_interleave(times), method, steps=20)
    for name, t in repeated.mean.items():
        torch.testing.assert_close(weighted.mean[name], t, rtol=1e-9, atol=1e-9)
    assert weighted.log_evidence.value == pytest.approx(repeated.log_evidence.value, rel=1e-10)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-5])
def test_the_tolerance_is_a_row_so_that_repeated_rows_end_where_one_of_each_does(tolerance: float):
    y, _ = lecture(100)
    start = {"weights": [0.5, 0.5], "means": [0.0, 2.0], "covariances": [1.0, 1.0]}
    method = EM(tolerance=tolerance, start={name: torch.tensor(values).double() for name, values in start.items()})
    one, many = (fitted(GaussianMixture(2), rows, method) for rows in (y, y.repeat(1000)))
    assert one.converged
    assert many.converged
    bound = one.history["bound"]
    torch.testing.assert_close(many.history["bound"], 1000 * bound, rtol=1e-10, atol=0)  # as many iterations
    rises = bound.diff() / 100
    assert float(rises[:-1].min()) >= tolerance > float(rises[-1])
    for name, t in one.mean.items():
        torch.testing.assert_close(many.mean[name], t, rtol=1e-9, atol=1e-9)


def test_the_evidence_at_a_mode_is_that_of_the_rows_without_the_prior():
    """Nothing is hidden here: the mode and both densities are known."""
    y, _ = lecture(30)
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


def test_two_lines_that_cross_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(300, 1, generator=generator, dtype=torch.float64) + 10
    z = torch.arange(300) % 2
    line = torch.where(z == 0, 3 * x[:, 0] - 30, -2 * x[:, 0] + 30)
    y = line + 0.2 * torch.randn(300, generator=generator, dtype=torch.float64)
    found = fitted(RegressionMixture(2), (x, y), EM(restarts=5, tolerance=1e-14), steps=1000).mean
    order = found["coefficients"][:, 0].argsort()
    wanted = torch.tensor([-2.0, 3.0], dtype=torch.float64)
    # 0.2 / sqrt(150 * 16 / 12) is 0.014; 5 standard errors
    torch.testing.assert_close(found["coefficients"][order, 0], wanted, atol=0.07, rtol=0)
    torch.testing.assert_close(found["intercepts"][order], torch.tensor([30.0, -30.0]).double(), atol=0.9, rtol=0)
    torch.testing.assert_close(found["variances"], torch.full((2,), 0.04).double(), rtol=0.6, atol=0)
    # and exactly: at the maximum each line is the least squares of the rows, weighted by q
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


def test_a_latent_model_is_a_density_for_other_methods():
    y, _ = lecture()
    by_em = fitted(PoissonMixture(2), y.abs().round(), EM(tolerance=1e-12), steps=2000)
    model, rows = PoissonMixture(2).meet(y.abs().round(), 300)
    by_map = fit(model, rows, MAP(learning_rate=0.05), steps=300, progress=False)
    value = model.log_marginal(by_map.mean, model.rows((y.abs().round(),))).sum()
    assert float(value) == pytest.approx(by_em.log_evidence.value, abs=0.05)


def test_the_one_driver_fits_a_model_that_has_met_its_data():
    y, _ = lecture()
    model, rows = GaussianMixture(2).meet(y)
    posterior = fit(model, rows, EM(restarts=2), steps=50, progress=False)
    assert set(posterior.mean) == {"weights", "means", "covariances"}
    assert posterior.log_evidence.value == pytest.approx(float(posterior.history["bound"][-1]), rel=1e-12)
    again = fit(model, rows, EM(start=posterior), steps=5, progress=False)
    assert float(again.history["bound"][0]) >= posterior.log_evidence.value - 1e-9


def test_the_same_seed_gives_the_same_bits_and_another_gives_others():
    y, _ = lecture()
    first, second, third = (
        fitted(GaussianMixture(3), y, EM(start="random", draws=2), steps=5, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first.mean["means"], second.mean["means"])
    assert not torch.equal(first.mean["means"], third.mean["means"])


@pytest.mark.parametrize("method", [EM(tolerance=0.0, accelerate=True), EM(draws=2, restarts=2), EM(online=0.6)])
def test_a_fit_that_was_killed_goes_on_with_the_same_bits(method: EM, tmp_path: Path):
    y, _ = lecture()
    model, rows = GaussianMixture(2).meet(y, 50)
    whole = fit(model, rows, method, steps=14, progress=False)
    keep = Checkpoint(tmp_path / "fit", every=3)

    def interrupt(moment: Any) -> None:
        if moment.step >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, rows, method, steps=14, progress=False, checkpoint=keep, callbacks=[interrupt])
    resumed = fit(model, rows, method, steps=14, progress=False, checkpoint=keep)
    for name, t in resumed.mean.items():
        assert torch.equal(t, whole.mean[name]), name
    assert torch.equal(resumed.history["bound"], whole.history["bound"])


def test_single_precision_and_other_models_stay_in_their_type():
    y, _ = lecture()
    posterior = fitted(BernoulliMixture(2), (y > 1).float(), EM(restarts=2), steps=20)
    assert all(t.dtype == torch.float32 for t in posterior.mean.values())


def test_squarem_goes_to_the_end_of_a_path_that_shrinks_evenly():
    end, start = torch.tensor([1.0, -2.0]), torch.tensor([5.0, 4.0])
    path = [end + 0.9**t * (start - end) for t in range(3)]
    torch.testing.assert_close(squared(*path), end, rtol=1e-4, atol=1e-4)
    assert squared(start, start, start) is None


def test_a_given_start_is_written_by_its_names_and_what_it_hashes_to():
    start = {"means": torch.zeros(2), "weights": [0.5, 0.5]}
    assert "start=<means, weights: " in repr(EM(start=start))
    assert repr(EM(start=start)) == repr(EM(start=dict(start))) != repr(EM(start=start | {"means": torch.ones(2)}))


def test_em_is_a_frozen_method():
    method = EM()
    assert isinstance(method, Method)
    assert (method.traits.reads, EM(online=0.6).traits.reads) == ("pass", "batch")
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.restarts = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("options", "sentence"),
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
def test_wrong_options_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(InputError) as caught:
        EM(**options)
    assert sentence in str(caught.value)


def test_wrong_starts_and_models_are_refused_in_one_sentence():
    y, _ = lecture()
    with pytest.raises(InputError, match=r"be one of k-means\+\+, random for GaussianMixture"):
        fitted(GaussianMixture(2), y, EM(start="kmeans"))
    with pytest.raises(InputError, match=r"missing \['weights'"):
        fitted(GaussianMixture(2), y, EM(start={"means": torch.zeros(2)}))
    bad = {"weights": torch.tensor([0.5, 0.5]), "means": torch.zeros(2), "covariances": torch.tensor([1.0, -1.0])}
    with pytest.raises(InputError, match=r"hold parameters of GaussianMixture.* inside their supports"):
        fitted(GaussianMixture(2), y, EM(start=bad))
    heavy = {"weights": torch.tensor([1.5, 0.5]), "means": torch.zeros(2), "covariances": torch.ones(2)}
    with pytest.raises(InputError, match=r"hold parameters of GaussianMixture.* inside their supports"):
        fitted(GaussianMixture(2), y, EM(start=heavy))
    for model in (Model(nn.Linear(1, 1), Gaussian(1.0)), Density(lambda p: -p["x"].square(), {"x": Param(())})):
        data = (y[:, None].float(), y.float()) if isinstance(model, Model) else None
        with pytest.raises(InputError, match="must be a latent model, such as"):
            fit(model, data, EM(), progress=False)
    model, rows = GaussianMixture(2).meet(y)
    with pytest.raises(InputError, match="The 'temperature' argument of EM must be 1"):
        fit(model, rows, EM(), temperature=2.0, progress=False)


def test_rounded_weights_of_a_start_are_made_to_add_up_to_one():
    y, _ = lecture()
    rounded = {"weights": torch.tensor([0.33333, 0.66666]), "means": torch.tensor([0.0, 2.0])}
    exact = rounded | {"weights": torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)}
    both = [fitted(GaussianMixture(2), y, EM(start=s | {"covariances": torch.ones(2)})) for s in (rounded, exact)]
    assert both[0].log_evidence.value == pytest.approx(both[1].log_evidence.value, abs=1e-3)


def test_a_warning_points_at_the_line_that_fits():
    with pytest.warns(PrioryWarning) as told:
        fit(GaussianMixture(3), torch.ones(9).double(), EM(), progress=False)
    assert {w.filename for w in told} == {__file__}
