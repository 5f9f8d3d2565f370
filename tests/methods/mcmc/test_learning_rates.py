"""The learning rate that SGLD and SGHMC read from their target."""

import itertools
import math

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import DivergedError
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.mcmc import learning_rates
from priory.methods.mcmc.learning_rates import ReadRate
from priory.methods.mcmc.schedules import Timetable
from priory.models.target import Target
from priory.posteriors.chains import Chains
from priory.testing.contract import keeps_members_apart, resumes_with_the_same_bits

DOUBLE = torch.float64
NOISES = (0.01, 0.1, 1.0, 10.0)


def rows_of(count: int, noise: float, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a plane in three dimensions, with scales from 1 / spread to spread and noise of the given scale."""
    generator = stream(0, "plane", count)
    scales = torch.tensor([spread, 1.0, 1 / spread], dtype=DOUBLE)
    X = torch.randn(count, 3, generator=generator, dtype=DOUBLE) * scales
    slopes = torch.tensor([1.0, -0.5, 2.0], dtype=DOUBLE)
    return X, X @ slopes + noise * torch.randn(count, generator=generator, dtype=DOUBLE)


def linear(noise: float) -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(3, 1, bias=False).double(), pr.Gaussian(noise), prior=2.0)


def linear_target(noise: float = 0.3, count: int = 40, batch_size: int = 40, **options) -> tuple[Target, Data]:
    model, rows = linear(noise).bind(rows_of(count, noise), batch_size)
    return make_target(model, rows, **options), rows


def start_of(target: Target, rows: Data, *shape: int) -> torch.Tensor:
    return target.start(rows, torch.Size(shape), stream(0, "start"))


def read_of(rate: torch.Tensor, curvature: torch.Tensor, noise: torch.Tensor, epoch_steps: int) -> ReadRate:
    nothing = torch.zeros(0)
    return ReadRate(rate, curvature, noise, nothing, nothing, nothing, nothing, nothing, epoch_steps)


# Curvature.


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_curvature_is_the_largest_eigenvalue_of_the_hessian_of_the_mean_loss(temperature, tempers):
    """Eigenvalues of about 4 : 1 : 1/4, so that twelve products leave an error of 4^-24."""
    target, rows = linear_target(temperature=temperature, tempers=tempers)
    (batch,) = rows.batches(0, 0)
    w = start_of(target, rows, 2, 3)
    read = ReadRate.at(target, w, batch, 1)
    prior = torch.eye(3, dtype=DOUBLE) / 4 * (temperature if tempers == "likelihood" else 1.0)
    hessian = (batch[0].T @ batch[0] / 0.3**2 + prior) / 40
    expected = torch.linalg.eigvalsh(hessian)[-1].expand(2)
    torch.testing.assert_close(read.curvature, expected, rtol=1e-8, atol=0)


def test_the_curvature_of_a_preconditioned_step_is_that_of_the_scaled_hessian():
    target, rows = linear_target()
    (batch,) = rows.batches(0, 0)
    scale = torch.tensor([[0.1, 0.5, 3.0]], dtype=DOUBLE)
    read = ReadRate.at(target, start_of(target, rows, 2), batch, 1, scale)
    hessian = (batch[0].T @ batch[0] / 0.3**2 + torch.eye(3, dtype=DOUBLE) / 4) / 40
    expected = torch.linalg.eigvalsh(scale[0].diag() @ hessian @ scale[0].diag())[-1]
    torch.testing.assert_close(read.curvature, expected, rtol=1e-6, atol=0)


def test_the_curvature_of_a_network_is_that_of_autograd():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    X, y = rows_of(40, 0.3)
    model, rows = pr.Model(net, pr.Gaussian(0.3), prior=1.0).bind((X, y))
    target = make_target(model, rows)
    (batch,) = rows.batches(0, 0)
    w = start_of(target, rows, 1)
    log_joint = lambda v: target.differentiable(v, batch) + target.log_prior(v)  # noqa: E731
    hessian = torch.autograd.functional.hessian(log_joint, w[0]) / 40
    read = ReadRate.at(target, w, batch, 1)
    expected = torch.linalg.eigvalsh(hessian).abs().max()
    torch.testing.assert_close(read.curvature, expected, rtol=0.01, atol=0)  # differences, and twelve products


# Noise of minibatches.


def test_the_halves_of_minibatches_have_the_variance_of_their_gradients():
    """All 360 minibatches of 4 of 6 rows: the mean of the estimates is the variance of the gradients."""
    target, rows = linear_target(count=6, batch_size=4)
    X, y = rows.tensors or ()
    w = start_of(target, rows, 1)
    read = ReadRate.at(target, w, (X, y), 2)
    found, gradients = [], []
    for chosen in itertools.permutations(range(6), 4):
        batch = (X[list(chosen)], y[list(chosen)])
        gradient = target.log_joint_and_grad(w, batch)[1]
        found.append(read.gradient_noise(target, w, gradient, batch, None))
        gradients.append((gradient * read.direction).sum())
    expected = torch.stack(gradients).var(correction=0) / 6
    torch.testing.assert_close(torch.stack(found).mean(), expected, rtol=1e-8, atol=0)
    assert float(read.gradient_noise(target, w, gradient, (X, y), None)) == 0  # all rows: no noise


def added_by_recursion(nominal: float, pull: float, batches: int) -> float:
    """Added variance of SGLD over the places of an epoch, whose batches sum to a constant, by its linear recursion."""
    keep = 1 - pull
    covariance = (batches * torch.eye(batches, dtype=DOUBLE) - 1) / (batches - 1)
    powers = keep ** torch.arange(batches - 1, -1, -1, dtype=DOUBLE)
    start = float(powers @ covariance @ powers) / (1 - keep ** (2 * batches))
    total = 0.0
    for place in range(1, batches + 1):
        some = powers[batches - place :]
        total += keep ** (2 * place) * start + float(some @ covariance[:place, :place] @ some)
    return 2 * nominal * pull * total / batches


@pytest.mark.parametrize("batches", [4, 8, 20, 68])
@pytest.mark.parametrize("passes", [0.05, 0.2, 1.0, 4.0])
def test_the_added_variance_is_that_of_the_recursion_within_a_factor(batches, passes):
    """x / (2 + x) is a fit to the recursion, right within 55 % below and 30 % above."""
    pull = min(passes / batches, 0.2)  # the largest, at a tenth of the stable rate
    one = torch.ones((), dtype=DOUBLE)
    read = read_of(pull * one, one, 2 / pull * one, batches)
    ratio = added_by_recursion(1.0, pull, batches) / float(read.added_variance(1.0))
    assert 0.65 < ratio < 1.55


@pytest.mark.parametrize("friction", [0.1, 1.0])
def test_the_rate_is_a_share_of_the_stable_one_and_leaves_the_noise_its_share(friction):
    one = torch.ones(2, dtype=DOUBLE)
    read = read_of(one, 50 * one, torch.tensor([0.0, 3e4], dtype=DOUBLE), 20)
    read.choose(friction)
    torch.testing.assert_close(read.rate, 0.1 * 2 * (2 - friction) / 50 * one, rtol=1e-12, atol=0)
    read.choose(friction, kept_steps=10**9)
    assert float(read.rate[0]) == pytest.approx(0.1 * 2 * (2 - friction) / 50, rel=1e-12)  # no noise, no limit
    assert float(read.added_variance(friction)[1]) == pytest.approx(0.25, rel=1e-10)
    read.choose(friction, kept_steps=1000)  # 20 relaxation times a / (rate 50) in 1,000 steps
    assert float(read.rate[1]) == pytest.approx(20 * friction / (1000 * 50), rel=1e-12)


def test_a_density_without_curvature_has_a_rate_all_the_same():
    read = read_of(torch.zeros(1), torch.zeros(1), torch.zeros(1), 1)
    read.choose(1.0)
    assert float(read.rate) == pytest.approx(learning_rates.UNKNOWN_RATE)


# The posterior of a linear model, at any noise.


METHODS = {"SGLD": pr.SGLD(chains=8), "SGHMC": pr.SGHMC(chains=8)}


@pytest.mark.filterwarnings("ignore:The targets have mean")  # a noise of 10 is far from unit scale, on purpose
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("batch_size", [100, 20])
def test_a_linear_model_has_its_posterior_at_any_noise(name, noise, batch_size):
    """Means within 0.3 posterior sds, and sds between 0.85 and 1.25 of the exact ones.

    The stiffest direction may have a variance too large by 11 % for its step and by 25 % for its minibatches. There are
    200 effective draws or more in every direction, so that 0.3 sds are 4 standard errors of a mean, and 15 % are 3 of
    an sd; with fixed seeds there are no false alarms.
    """
    X, y = rows_of(100, noise, spread=1.3)
    posterior = pr.fit(linear(noise), (X, y), METHODS[name], steps=2000, batch_size=batch_size, progress=False)
    assert isinstance(posterior, Chains)
    precision = X.T @ X / noise**2 + torch.eye(3, dtype=DOUBLE) / 4
    mean, sd = torch.linalg.solve(precision, X.T @ y / noise**2), torch.linalg.inv(precision).diagonal().sqrt()
    w = posterior.w.flatten(0, 1)
    assert float(((w.mean(0) - mean) / sd).abs().max()) < 0.3
    ratio = w.std(0) / sd
    assert float(ratio.min()) > 0.85, ratio
    assert float(ratio.max()) < 1.25, ratio


def test_a_density_of_a_large_scale_is_crossed():
    density = pr.Density(lambda p: -0.5 * (p["x"] / 100).square(), {"x": pr.Param()}, batched=True)
    posterior = pr.fit(density, None, pr.SGLD(chains=64), steps=400, progress=False)
    x = posterior.draws["x"]
    assert float(x.std() / 100) == pytest.approx(1.0, abs=0.15)  # 64 chains of 20 effective draws
    assert float(x.mean()) == pytest.approx(0.0, abs=15.0)


# Networks, at any noise.


CASES = [("SGLD", nn.Tanh), ("SGHMC", nn.Tanh), ("SGHMC", nn.ReLU)]


@pytest.mark.parametrize(("name", "activation"), CASES)
@pytest.mark.parametrize("noise", NOISES)
def test_a_draw_of_a_network_scores_above_half_way_from_the_prior_to_the_mode(name, activation, noise):
    """The score is the mean log-likelihood per new row and draw; 500 steps of burn-in and 500 more."""
    generator = stream(0, "sine")
    X = 4 * torch.rand(150, 1, generator=generator) - 2
    y = X[:, 0].sin() + 0.1 * torch.randn(150, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), activation(), nn.Linear(16, 1))
    model, train = pr.Model(net, pr.Gaussian(noise), prior=1.0), (X[:100], y[:100])
    found = pr.fit(model, train, METHODS[name], steps=1000, batch_size=50, progress=False)
    mode = pr.fit(model, train, pr.MAP(), steps=1000, progress=False)
    score = lambda w: float(found.target.pointwise(w, (X[100:], y[100:])).mean())  # noqa: E731
    low = score(torch.randn(1000, found.target.size, generator=stream(0, "prior")))
    high = score(mode.draw(1, stream(0, "mode")))
    assert low < high
    assert score(found.w.flatten(0, 1)) > 0.5 * (low + high)
    assert all(bool(torch.isfinite(values).all()) for values in found.history.values())


def test_the_rate_follows_the_curvature_of_a_noise_that_is_learnt():
    X, y = rows_of(100, 0.1)
    torch.manual_seed(0)
    model = pr.Model(nn.Linear(3, 1).double(), pr.Gaussian(), prior=2.0)
    posterior = pr.fit(model, (X, y), pr.SGHMC(), steps=4000, progress=False)
    rate, noise = posterior.history["learning_rate"], posterior.draws["likelihood.noise"]
    assert float(noise.mean()) == pytest.approx(0.1, rel=0.2)
    curvature = torch.linalg.eigvalsh(X.T @ X / 100)[-1] / 0.1**2
    assert float(rate[-1]) == pytest.approx(0.1 * 2 * 1.9 / float(curvature), rel=0.5)
    assert float(rate[-1]) < 0.5 * float(rate[0])


# Fixed after the burn-in, kept in checkpoints, of each member.


@pytest.mark.parametrize("method", [pr.SGLD(), pr.SGHMC(), pr.SGLD(precondition=True)], ids=lambda m: repr(m)[:5])
def test_the_rate_is_fixed_after_the_burn_in(method):
    posterior = pr.fit(linear(0.3), rows_of(200, 0.3), method, steps=400, batch_size=20, progress=False)
    rate = posterior.history["learning_rate"]
    assert rate.shape == (400,)
    assert len(rate[:200].unique()) > 1
    assert len(rate[199:].unique()) == 1


@pytest.mark.parametrize("clause", [keeps_members_apart, resumes_with_the_same_bits], ids=lambda c: c.__name__)
@pytest.mark.parametrize("schedule", ["constant", pr.Cyclical(cycles=2, exploring=0.5)], ids=["constant", "cyclical"])
def test_members_stay_apart_and_a_fit_resumes(clause, schedule):
    clause(pr.SGHMC(schedule=schedule))


def test_each_member_has_a_rate_of_its_own():
    target, rows = linear_target(count=40, batch_size=10)
    method = pr.SGHMC(chains=2)
    state = method.init(target, method.plan(target, rows, 60, 0), stream(0, "noise"), torch.Size([3]))
    assert state.read is not None
    assert state.read.rate.shape == (3,)
    with torch.no_grad():
        state.read.ceiling[1] = -math.inf  # every loss of the second member has exploded
    before = state.read.rate.clone()
    state, info = method.step(target, state, next(rows.batches(0, 0)), stream(1, "noise"))
    assert state.read.halvings.tolist() == [0, 1, 0]
    assert float(info.metrics["learning_rate"][1]) < 0.75 * float(before[1])
    torch.testing.assert_close(info.metrics["learning_rate"][::2], before[::2], rtol=0.6, atol=0)


def test_a_given_rate_is_used_as_it_is():
    posterior = pr.fit(linear(0.3), rows_of(40, 0.3), pr.SGHMC(1e-3), steps=40, progress=False)
    assert "learning_rate" not in posterior.history
    assert "learning rate" not in repr(posterior)


def test_a_cycle_ends_at_a_share_of_the_rate_that_was_read():
    table = Timetable.of(pr.SGLD(schedule=pr.Cyclical(cycles=2, exploring=0.5)), 40)
    assert table.rates[0] == 1.0
    assert not any(table.settles)
    schedule = pr.Cyclical(cycles=2)
    posterior = pr.fit(linear(0.01), rows_of(60, 0.01), pr.SGHMC(schedule=schedule), steps=400, progress=False)
    assert bool(torch.isfinite(posterior.w).all())


# Explosions.


def cliff() -> pr.Density:
    """Counts of 5 under a log rate that starts near -12: there the curvature is 1e-5 and the slope is 5."""

    def log_prob(p):
        log_rate = p["x"] - 12
        return 40 * (5 * log_rate - log_rate.exp())

    return pr.Density(log_prob, {"x": pr.Param()}, batched=True)


@pytest.mark.parametrize("method", [pr.SGLD(chains=16), pr.SGHMC(chains=16)], ids=["SGLD", "SGHMC"])
def test_a_chain_that_explodes_in_the_burn_in_goes_back_at_half_the_rate(method):
    posterior = pr.fit(cliff(), None, method, steps=4000, progress=False)
    assert float(posterior.history["halvings"][-1]) > 0
    assert bool(torch.isfinite(posterior.history["loss"]).all())
    rate = (posterior.draws["x"] - 12).exp()  # Gamma(200, 40): mean 5 and sd 0.35
    assert float(rate.mean()) == pytest.approx(5.0, abs=0.1)
    assert float(rate.std()) == pytest.approx(math.sqrt(200) / 40, rel=0.2)
    assert "halved" in repr(posterior)


def test_a_chain_that_explodes_after_the_burn_in_is_an_error():
    density = pr.Density(lambda p: -(p["x"] ** 6), {"x": pr.Param()}, batched=True)
    table = Timetable.of(pr.SGLD(burn_in=0), 50)
    assert not any(table.adapts)
    start = pr.fit(density, None, pr.MAP(), steps=500, progress=False)  # flat there, and steep farther out
    with pytest.raises(DivergedError):
        pr.fit(density, None, pr.SGLD(burn_in=0, start=start), steps=2000, progress=False)


# The status and the text of a posterior.


def test_the_rate_is_in_the_repr_and_the_summary():
    posterior = pr.fit(linear(0.3), rows_of(40, 0.3), pr.SGHMC(), steps=400, progress=False)
    said = f"learning rate {float(posterior.history['learning_rate'][-1]):.2g}, read from the curvature in the burn-in"
    assert said in repr(posterior)
    assert f"L{said[1:]}." in str(posterior.summary())


def test_minibatches_that_drown_the_noise_of_the_sampler_are_named():
    """Rows that differ by 0.3 under a noise of 0.01: the gradients of minibatches have 900 times the variance."""
    X, y = rows_of(400, 0.3)
    posterior = pr.fit(linear(0.01), (X, y), pr.SGLD(), steps=400, batch_size=10, progress=False)
    assert "Minibatches add about" in posterior.status.reason or posterior.status.name == "not_converged"
    given = posterior.stored_status()
    assert given is not None
    assert "raise batch_size" in given["reason"]
    whole = pr.fit(linear(0.01), (X, y), pr.SGLD(), steps=400, batch_size=400, progress=False)
    assert whole.stored_status() is None
