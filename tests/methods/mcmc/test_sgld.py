import math

import pytest
import torch

import priory as pr
from priory.core.data import Data
from priory.core.errors import DivergedError
from priory.core.streams import stream
from priory.diagnostics import r_hat
from priory.fitting.prepare import make_target
from priory.methods.mcmc import sgld
from priory.methods.mcmc.schedules import Cyclical, Timetable
from priory.methods.mcmc.sgld import SGLD
from priory.models.target import Target
from priory.posteriors.chains import Chains
from priory.testing import GaussianMean, LinearRegression, assert_covariance_close, assert_mean_close
from priory.testing.contract import classification, keeps_members_apart, resumes_with_the_same_bits

DOUBLE = torch.float64


@pytest.mark.parametrize("clause", [keeps_members_apart, resumes_with_the_same_bits], ids=lambda c: c.__name__)
def test_the_contract_holds_with_a_preconditioner(clause):
    clause(SGLD(precondition=True))


# The stationary distribution on a Gaussian of precision Q. One full-batch step is
#   w' = w - e Q (w - mean) + sqrt(2 e) xi,
# whose covariance S solves S = (I - e Q) S (I - e Q) + 2 e I: S = Q^-1 (I - e Q / 2)^-1.


def line(rows: int) -> LinearRegression:
    """Return a regression on two correlated inputs; X'X / N, and so the rate, is about the same for any N."""
    generator = stream(0, "line", rows)
    own, shared = (torch.randn(rows, k, generator=generator, dtype=DOUBLE) for k in (2, 1))
    X = 0.8 * own + 0.6 * shared
    y = X @ torch.tensor([1.0, -0.5], dtype=DOUBLE) + torch.randn(rows, generator=generator, dtype=DOUBLE)
    return LinearRegression(X, y, noise=1.0, prior_scale=2.0)


def batched(exact: LinearRegression) -> pr.Density:
    """Return the model as a density that takes all chains in one call."""

    def log_prior(p):
        return -0.5 * (p["w"] / exact.prior_scale).square().sum(-1)

    def log_likelihood(p, batch):
        return -0.5 * ((batch[1] - p["w"] @ batch[0].T) / exact.noise).square()

    return pr.Density(params={"w": pr.Param((2,))}, log_prior=log_prior, log_likelihood=log_likelihood, batched=True)


def last_draws(exact: LinearRegression, method: SGLD, steps: int, **options) -> torch.Tensor:
    """Return the last draw of many independent chains, (K, 2)."""
    all_rows = len(exact.y)  # no minibatches
    posterior = pr.fit(batched(exact), exact.data, method, steps=steps, batch_size=all_rows, progress=False, **options)
    assert isinstance(posterior, Chains)
    return posterior.w[:, -1]


def stationary(exact: LinearRegression, rate: float, temperature: float = 1.0) -> torch.Tensor:
    """Return the covariance of the draws with the discretisation error; T tempers the whole posterior."""
    shrunk = torch.eye(2, dtype=DOUBLE) - 0.5 * rate / len(exact.y) * exact.precision
    return temperature * torch.linalg.inv(exact.precision @ shrunk)


def check_stationary(rows: int, rate: float, steps: int = 60, **options) -> None:
    """Mean and covariance of 4,000 chains, 5 comparisons at 5 standard errors: false alarms at 3e-6."""
    exact = line(rows)
    draws = last_draws(exact, SGLD(rate, chains=4000, burn_in=steps - 1), steps, **options)
    assert_mean_close(draws, exact.posterior.loc)
    assert_covariance_close(draws, stationary(exact, rate, options.get("temperature", 1.0)))


@pytest.mark.parametrize("rows", [20, 60])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_the_stationary_covariance_has_the_known_discretisation_error(rows, rate):
    check_stationary(rows, rate)


def test_the_discretisation_bias_of_a_large_step_is_detected():
    exact = line(20)
    draws = last_draws(exact, SGLD(1.0, chains=4000, burn_in=59), 60)
    with pytest.raises(AssertionError, match="covariance"):
        assert_covariance_close(draws, exact.posterior.covariance_matrix)


@pytest.mark.parametrize("temperature", [0.25, 3.0])
def test_a_tempered_posterior_is_tempered_once(temperature):
    check_stationary(20, 0.5, temperature=temperature, tempers="posterior")


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_noise_of_the_wrong_variance_is_detected(scale, monkeypatch):
    normal = sgld.standard_normal
    monkeypatch.setattr(sgld, "standard_normal", lambda like, generator: math.sqrt(scale) * normal(like, generator))
    with pytest.raises(AssertionError, match="covariance"):
        check_stationary(20, 0.3)


def test_a_gradient_without_the_factor_n_is_detected(monkeypatch):
    """The gradient is the mean over the batch and the noise is unchanged, a known bug of other libraries."""
    monkeypatch.setattr(Target, "factor", lambda self, batch: 1.0 / len(batch[0]))
    with pytest.raises(AssertionError):
        check_stationary(20, 0.3)


def test_the_frozen_preconditioner_gives_the_known_stationary_covariance():
    """With steps e G the covariance is (Q - e Q G Q / 2)^-1; 4,000 chains, 5 comparisons, false alarms at 3e-6."""
    exact, steps = line(40), 160
    model = batched(exact)
    rows = Data.of(exact.data).prepared(model.prepare)
    target, method = make_target(model, rows), SGLD(0.1, precondition=True, chains=4000, burn_in=60)
    generator = stream(0, "frozen")
    state = method.init(target, method.plan(target, rows, steps, 0), generator)
    (batch,) = rows.batches(0, 0)
    frozen = None
    for k in range(steps):
        state, _ = method.step(target, state, batch, generator)
        if k == 59:
            frozen = sgld.preconditioner(state)
    metric, precision = sgld.preconditioner(state), exact.precision
    assert torch.equal(metric, frozen)
    assert float(metric.std() / metric.mean()) > 0.005  # the coordinates have different step sizes
    assert_mean_close(state.w, exact.posterior.loc)
    expected = torch.linalg.inv(precision - 0.5 * (0.1 / 40) * precision @ metric[0].diag() @ precision)
    assert_covariance_close(state.w, expected)


# Minibatches.


def test_minibatch_noise_has_the_predicted_variance():
    """N = 24 values in 4 batches without replacement; the mean over chains follows the minibatch noise.

    With a = 1 - e / v the mean after an epoch is a^4 mean + e sum_j a^(3-j) g_j, where the gradients g_j of the four
    batches have the variance s = (N/n)^2 n (1 - n/N) var(y) / noise^4 and, as they sum to a constant, the covariance
    -s / 3. The noise of the chains adds 2 e / (1 - a^2), divided by their number. 150 draws, 8 steps apart, have
    correlations of a^8 = 0.004; one comparison at 5 standard errors, false alarms at 6e-7.
    """
    y = 1.0 + torch.randn(24, generator=stream(0, "values"), dtype=DOUBLE)
    exact = GaussianMean(y, noise=1.0, prior_loc=0.0, prior_scale=10.0)

    def log_prior(p):
        return -0.5 * (p["m"] / 10).square()

    def log_likelihood(p, batch):
        return -0.5 * (batch[0] - p["m"][..., None]).square()

    density = pr.Density(params={"m": pr.Param()}, log_prior=log_prior, log_likelihood=log_likelihood, batched=True)
    rate, chains = 0.5, 256
    method = SGLD(rate, chains=chains, burn_in=16, thin=8)
    posterior = pr.fit(density, exact.data, method, steps=16 + 8 * 150, batch_size=6, progress=False)
    assert isinstance(posterior, Chains)
    e, variance = rate / 24, float(exact.posterior.variance)
    a = 1 - e / variance
    s = 4**2 * 6 * (1 - 6 / 24) * float(y.var())
    weights = torch.tensor([a**3, a**2, a, 1.0], dtype=DOUBLE)
    covariance = s * (4 / 3 * torch.eye(4, dtype=DOUBLE) - 1 / 3)
    shared = e**2 * float(weights @ covariance @ weights) / (1 - a**8)
    own = 2 * e / (1 - a**2)
    means = posterior.w[..., 0].mean(0)
    assert shared > 2 * own / chains  # so the test is sensitive to the minibatch noise
    assert_mean_close(means, exact.posterior.loc)
    assert_covariance_close(means, shared + own / chains)
    # Around their common mean, chains have only their own noise, with 256 x 150 draws.
    within = posterior.w[..., 0].var(0).mean()
    assert abs(float(within) / own - 1) < 5 * math.sqrt(2 / (chains * 150))


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_one_step_follows_the_formula(tempers, temperature):
    """The drift is rate / N times the gradient with N/n, and the noise has the variance 2 rate T / N exactly."""
    exact = line(20)
    model = batched(exact)
    rows = Data.of(exact.data, batch_size=5).prepared(model.prepare)
    target = make_target(model, rows, temperature, tempers)
    method = SGLD(0.2, chains=3)
    state = method.init(target, method.plan(target, rows, 10, 0), stream(0, "start"))
    before = state.w.clone()
    X, y = batch = next(iter(rows.batches(0, 0)))
    state, info = method.step(target, state, batch, stream(1, "noise"))
    likelihood = 20 / 5 * (y - before @ X.T) @ X
    prior = -before / 4 * (temperature if tempers == "likelihood" else 1.0)
    noise = torch.randn(3, 2, generator=stream(1, "noise"), dtype=DOUBLE)
    expected = before + 0.2 / 20 * (likelihood + prior) + math.sqrt(2 * 0.2 * temperature / 20) * noise
    torch.testing.assert_close(state.w, expected, rtol=1e-12, atol=1e-12)
    loss = 20 / 5 * 0.5 * (y - before @ X.T).square().sum(-1)
    loss = loss + (temperature if tempers == "likelihood" else 1.0) * before.square().sum(-1) / 8
    torch.testing.assert_close(info.metrics["loss"], loss.mean(), rtol=1e-10, atol=1e-10)


def test_the_first_preconditioned_step_divides_by_the_root_mean_square_over_chains():
    exact = line(20)
    model = batched(exact)
    rows = Data.of(exact.data).prepared(model.prepare)
    target, method = make_target(model, rows), SGLD(0.1, precondition=True, chains=3)
    state = method.init(target, method.plan(target, rows, 10, 0), stream(0, "start"))
    before = state.w.clone()
    (batch,) = rows.batches(0, 0)
    _, gradient = target.log_joint_and_grad(before, batch)
    state, _ = method.step(target, state, batch, stream(1, "noise"))
    metric = 1 / (1e-5 + (gradient / 20).square().mean(0).sqrt())
    noise = torch.randn(3, 2, generator=stream(1, "noise"), dtype=DOUBLE)
    expected = before + 0.1 / 20 * metric * gradient + (2 * 0.1 / 20 * metric).sqrt() * noise
    torch.testing.assert_close(state.w, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
@pytest.mark.parametrize("temperature", [0.3, 4.0])
def test_the_preconditioner_does_not_depend_on_the_temperature(tempers, temperature):
    """Three steps follow the formula; in the last one the preconditioner is frozen."""
    exact = line(20)
    model = batched(exact)
    rows = Data.of(exact.data).prepared(model.prepare)
    target = make_target(model, rows, temperature, tempers)
    method = SGLD(0.1, precondition=True, chains=3, burn_in=2, thin=1)
    state = method.init(target, method.plan(target, rows, 3, 0), stream(0, "start"))
    w, squares, seen = state.w.clone(), torch.zeros(1, 2, dtype=DOUBLE), 0
    (batch,) = rows.batches(0, 0)
    X, y = batch
    generator, noises = stream(1, "noise"), stream(1, "noise")
    weight = temperature if tempers == "likelihood" else 1.0
    for step in range(3):
        slope = (y - w @ X.T) @ X - weight * w / 4  # of minus the loss, which isn't divided by the temperature
        if step < 2:
            squares, seen = 0.99 * squares + 0.01 * (slope / 20).square().mean(0), seen + 1
        metric = 1 / (1e-5 + (squares / (1 - 0.99**seen)).sqrt())
        noise = torch.randn(3, 2, generator=noises, dtype=DOUBLE)
        w = w + 0.1 / 20 * metric * slope + (2 * 0.1 * temperature / 20 * metric).sqrt() * noise
        state, _ = method.step(target, state, batch, generator)
        torch.testing.assert_close(state.w, w, rtol=1e-10, atol=1e-10)


# Which draws are kept.


def test_draws_are_kept_after_burn_in_at_the_thinning_interval():
    exact = line(20)
    posterior = pr.fit(batched(exact), exact.data, SGLD(chains=2, burn_in=10, thin=3), steps=30, progress=False)
    assert isinstance(posterior, Chains)
    assert posterior.draws["w"].shape == (2, 6, 2)
    assert posterior.history["loss"].shape == (30,)
    table = Timetable.of(SGLD(burn_in=10, thin=3), 30)
    assert [k for k, keeps in enumerate(table.keeps) if keeps] == [12, 15, 18, 21, 24, 27]
    assert table.noisy == [True] * 30
    assert table.adapts == [True] * 10 + [False] * 20


def test_by_default_half_of_the_steps_are_burn_in_and_at_most_1000_draws_are_kept():
    assert sum(Timetable.of(SGLD(), 100).keeps) == 50
    assert 900 < sum(Timetable.of(SGLD(), 20_000).keeps) <= 1000


def test_a_cyclical_schedule_follows_the_formula():
    table = Timetable.of(SGLD(0.4, schedule=Cyclical(cycles=3, exploring=0.5)), 30)
    cycle = [0.2 * (1 + math.cos(math.pi * k / 10)) for k in range(10)]
    assert table.rates == pytest.approx(3 * cycle, rel=1e-12)
    assert table.noisy == 3 * ([False] * 5 + [True] * 5)
    assert table.keeps == table.noisy
    uneven = Timetable.of(SGLD(schedule=Cyclical(cycles=4, exploring=0)), 10)
    assert [k for k, rate in enumerate(uneven.rates) if rate == 1.0] == [0, 3, 6, 9]  # ceil(10 / 4) = 3


def test_exploring_steps_of_a_cycle_are_gradient_ascent_without_noise():
    exact = line(20)
    model = batched(exact)
    rows = Data.of(exact.data).prepared(model.prepare)
    target, method = make_target(model, rows), SGLD(0.3, chains=2, schedule=Cyclical(cycles=1, exploring=0.9))
    state = method.init(target, method.plan(target, rows, 10, 0), stream(0, "start"))
    w = state.w.clone()
    (batch,) = rows.batches(0, 0)
    for k in range(9):
        state, info = method.step(target, state, batch, stream(k))
        assert info.draw is None
        rate = 0.15 * (1 + math.cos(math.pi * k / 10))
        w = w + rate / 20 * target.log_joint_and_grad(w, batch)[1]
    torch.testing.assert_close(state.w, w, rtol=1e-10, atol=1e-10)
    _, info = method.step(target, state, batch, stream(9))
    assert info.draw is not None


def test_cycles_reach_both_modes_of_a_mixture_and_a_constant_rate_only_one():
    def log_prob(p):
        return torch.logaddexp(-12.5 * (p["x"] - 1).square(), -12.5 * (p["x"] + 1).square())

    density = pr.Density(log_prob, {"x": pr.Param()}, batched=True)
    constant = pr.fit(density, None, SGLD(0.005, chains=8), steps=800, progress=False)
    assert float(r_hat(constant.draws["x"])) > 1.5
    schedule = Cyclical(cycles=16, exploring=0.5)
    cyclical = pr.fit(density, None, SGLD(0.09, chains=8, schedule=schedule), steps=1600, progress=False)
    x = cyclical.draws["x"]
    assert bool(((x > 0.5).any(1) & (x < -0.5).any(1)).all())


def test_chains_start_at_draws_of_a_given_posterior():
    exact = line(20)
    start = pr.fit(batched(exact), exact.data, pr.MAP(), steps=300, progress=False)
    posterior = pr.fit(
        batched(exact), exact.data, SGLD(1e-9, chains=3, burn_in=0, start=start), steps=1, progress=False
    )
    assert isinstance(posterior, Chains)
    assert float((posterior.w - start.mean["w"]).abs().max()) < 1e-3


def test_a_network_is_sampled_and_its_predictions_have_diagnostics():
    model, (X, y) = classification()
    posterior = pr.fit(model, (X, y), SGLD(chains=2), steps=40, batch_size=7, progress=False)
    assert isinstance(posterior, Chains)
    draws = {name: w.double() for name, w in posterior.draws.items()}
    hidden = (X.double() @ draws["0.weight"].mT + draws["0.bias"][:, :, None]).tanh()
    probs = (hidden @ draws["2.weight"].mT + draws["2.bias"][:, :, None]).softmax(-1)  # (2, draws, 20, 3)
    summary = posterior.function_space(X)
    r_hats = summary["r_hat"]
    assert r_hats.shape == (60,)
    torch.testing.assert_close(r_hats.double(), r_hat(probs.flatten(2)), rtol=1e-3, atol=0)  # float32
    torch.testing.assert_close(summary["mean"].double(), probs.mean((0, 1)).flatten(), rtol=0, atol=1e-6)
    assert posterior.predict(X).probs.shape == (20, 3)
    everything = posterior.predict(X, samples=probs.shape[0] * probs.shape[1])
    torch.testing.assert_close(everything.probs.double(), probs.mean((0, 1)), rtol=0, atol=1e-6)


# Invalid options and models.


def test_a_learning_rate_that_is_too_large_raises_an_error_with_a_remedy():
    exact = line(20)
    with pytest.raises(DivergedError, match="Try a smaller learning_rate") as caught:
        pr.fit(batched(exact), exact.data, SGLD(100.0), steps=2000, progress=False)
    assert isinstance(caught.value.posterior, Chains)


def test_batch_normalisation_in_training_mode_is_refused():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    _, data = classification()
    with pytest.raises(pr.InputError, match="The 'model' argument of SGLD must have no buffers that training writes"):
        pr.fit(pr.Model(net, pr.Categorical()), data, SGLD(), steps=10, progress=False)
    pr.fit(pr.Model(net.eval(), pr.Categorical()), data, SGLD(), steps=10, progress=False)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"learning_rate": -1}, "The 'learning_rate' argument of SGLD must be a positive number, got -1"),
        ({"learning_rate": "fast"}, "The 'learning_rate' argument of SGLD must be a positive number, got 'fast'"),
        ({"chains": 0}, "The 'chains' argument of SGLD must be an integer >= 1, got 0"),
        ({"burn_in": -1}, "The 'burn_in' argument of SGLD must be an integer >= 0, got -1"),
        ({"burn_in": 0.5}, "The 'burn_in' argument of SGLD must be an integer >= 0, got 0.5"),
        ({"thin": 0}, "The 'thin' argument of SGLD must be an integer >= 1, got 0"),
        ({"schedule": "cosine"}, r"The 'schedule' argument of SGLD must be 'constant' or Cyclical\(\), got 'cosine'"),
        ({"precondition": "rmsprop"}, "The 'precondition' argument of SGLD must be True or False"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(pr.InputError, match=sentence):
        SGLD(**options)


@pytest.mark.parametrize("options", [{"burn_in": 10}, {"burn_in": 5, "thin": 6}, {"burn_in": 100}])
def test_options_that_leave_nothing_to_keep_are_refused(options):
    exact = line(20)
    with pytest.raises(pr.InputError, match="The 'burn_in' argument of SGLD must leave a draw of 10 steps to keep"):
        pr.fit(batched(exact), exact.data, SGLD(**options), steps=10, progress=False)


def test_cycles_too_short_to_draw_in_are_refused():
    exact = line(20)
    with pytest.raises(
        pr.InputError, match="The 'schedule' argument of SGLD must have steps left to draw in: a cycle of 3 ends"
    ):
        pr.fit(batched(exact), exact.data, SGLD(schedule=Cyclical(cycles=4)), steps=10, progress=False)


def test_a_preconditioner_without_burn_in_is_refused():
    exact = line(20)
    with pytest.raises(
        pr.InputError, match="The 'burn_in' argument of SGLD must be 1 or more, to learn the preconditioner in"
    ):
        pr.fit(batched(exact), exact.data, SGLD(precondition=True, burn_in=0), steps=10, progress=False)


@pytest.mark.parametrize("exploring", [1, -0.1, "most"])
def test_an_exploring_fraction_outside_its_range_is_refused(exploring):
    with pytest.raises(pr.InputError, match="The 'exploring' argument of Cyclical must be a number from 0 and below 1"):
        Cyclical(exploring=exploring)
