"""All samplers: detailed balance, exact moments, statistics, starts, warm-up, and errors and warnings."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import priory as pr
from priory import Param
from priory.core.data import Data
from priory.core.errors import DivergedError, InputError, PrioryWarning
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.mcmc import HMC, MALA, NUTS, RandomWalk
from priory.methods.mcmc.adaptation import StepSize
from priory.methods.mcmc.drift import warn_of_divergences, warn_of_drift
from priory.methods.mcmc.metrics import METRICS, DenseMetric, DiagonalMetric, LowRankMetric
from priory.methods.mcmc.sampler import Sampler, State
from priory.models.target import Target
from priory.posteriors import Draws
from priory.testing import assert_covariance_close, assert_mean_close

DOUBLE = torch.float64
KERNELS = (
    HMC(warmup=0, trajectory=1.7, integrator="leapfrog"),
    HMC(warmup=0, trajectory=1.7, integrator="two_stage"),
    NUTS(warmup=0, max_depth=4),
    MALA(warmup=0),
    RandomWalk(warmup=0),
)


def skewed() -> pr.Density:
    """Logarithms of two gamma variables of shapes 2 and 5, the second scaled by three: a skewed density."""

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        a, b = p["w"][..., 0], p["w"][..., 1] / 3
        return 2 * a - a.exp() + 5 * b - b.exp()

    return pr.Density(log_prob, {"w": Param((2,))}, batched=True)


def exact_draws(n: int) -> Tensor:
    generator = stream(0, "samplers", "exact")
    two, five = (
        -torch.rand(n, k, generator=generator, dtype=DOUBLE).log().sum(-1) for k in (2, 5)
    )  # a gamma variable of integer shape is a sum of exponentials
    return torch.stack([two.log(), 3 * five.log()], -1)


def state_at(method: Sampler, density: pr.Density, w: Tensor, step: float, metric: Any = None) -> State:
    """Return a state after warm-up with chains at w, this step size and this metric."""
    target, data = Target(density, None), Data.of(None)
    method = type(method)(**{**vars(method), "chains": len(w)})
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "samplers"))
    state.w, (state.value, state.gradient) = w, state.joint(w)
    state.step_size.log = torch.tensor(math.log(step), dtype=DOUBLE)
    state.metric = state.metric if metric is None else metric
    return state


def metric_of(name: str) -> Any:
    scale, basis = torch.tensor([[0.8, 4.0]], dtype=DOUBLE), torch.tensor([[0.6], [0.8]], dtype=DOUBLE)
    if name == "diagonal":
        return DiagonalMetric(scale)
    if name == "low_rank":
        return LowRankMetric(scale.sqrt(), basis, torch.tensor([[2.5]], dtype=DOUBLE))
    covariance = torch.tensor([[0.9, 0.4], [0.4, 3.0]], dtype=DOUBLE)
    return DenseMetric(covariance, torch.linalg.cholesky(covariance))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("method", KERNELS, ids=repr)
def test_transitions_satisfy_detailed_balance(method, metric):
    """From exact draws, (start, end) and (end, start) have the same distribution: E[f(a) g(b) - g(a) f(b)] = 0.

    Six comparisons of 4000 independent chains at 5 standard errors, in 15 cases: false alarms at 5e-5.
    """
    start = exact_draws(4000)
    state = state_at(method, skewed(), start, 0.6, metric_of(metric))
    move = method.transition(state, stream(1, "samplers"))
    end, energy = move.w, move.energy
    assert bool(torch.isfinite(energy).all())
    assert float((end != start).any(-1).double().mean()) > 0.3
    f = (start, end)
    functions = [lambda w: w[:, 0], lambda w: w[:, 1] / 3, lambda w: w[:, 0] ** 2, lambda w: (w[:, 0] > 0.3).double()]
    pairs = [(i, j) for i in range(4) for j in range(i)]
    differences = [functions[i](f[0]) * functions[j](f[1]) - functions[j](f[0]) * functions[i](f[1]) for i, j in pairs]
    assert_mean_close(torch.stack(differences, -1), 0.0)


@pytest.mark.parametrize("method", KERNELS, ids=repr)
def test_transitions_preserve_the_moments_of_exact_draws(method):
    """Five transitions from exact draws. The logarithm of a gamma variable has mean psi(k) and variance psi'(k).

    5 comparisons of 4000 independent chains at 5 standard errors in 5 cases: false alarms at 1.5e-5.
    """
    state = state_at(method, skewed(), exact_draws(4000), 0.9, metric_of("dense"))
    generator = stream(2, "samplers")
    for _ in range(5):
        move = method.transition(state, generator)
        state.w, state.value, state.gradient = move.w, move.value, move.gradient
        state.step += 1
    shapes = torch.tensor([2.0, 5.0], dtype=DOUBLE)
    mean = torch.special.digamma(shapes) * torch.tensor([1.0, 3.0])
    variance = torch.special.polygamma(1, shapes) * torch.tensor([1.0, 9.0])
    assert_mean_close(state.w, mean)
    assert_covariance_close(state.w, variance.diag())
    torch.testing.assert_close(state.joint(state.w)[0], state.value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.joint(state.w)[1], state.gradient, rtol=1e-10, atol=1e-10)


def gaussian(size: int = 3) -> tuple[pr.Density, Tensor, Tensor]:
    root = torch.randn(size, size, generator=stream(3, "samplers"), dtype=DOUBLE)
    covariance = root @ root.mT + 0.1 * torch.eye(size, dtype=DOUBLE)
    mean, precision = torch.arange(1.0, size + 1, dtype=DOUBLE), torch.linalg.inv(covariance)

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        d = p["w"] - mean
        return -0.5 * (d @ precision * d).sum(-1)

    return pr.Density(log_prob, {"w": Param((size,))}, batched=True), mean, covariance


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("method", [HMC, NUTS])
def test_a_fit_has_the_moments_of_a_gaussian(method, metric):
    """The means of chains are independent. 3 + 6 comparisons of 64 chains at 5 standard errors, in 6 cases:
    false alarms at 3e-5.
    """
    density, mean, covariance = gaussian()
    posterior: Any = pr.fit(density, None, method(chains=64, warmup=120, metric=metric), steps=40, progress=False)
    w = posterior.w
    assert w.shape == (64, 40, 3)
    assert_mean_close(w.mean(1), mean)
    products = (w - mean)[..., :, None] * (w - mean)[..., None, :]
    assert_mean_close(products.mean(1), covariance)


def test_a_temperature_multiplies_the_covariance():
    density, mean, covariance = gaussian()
    method = HMC(chains=64, warmup=120)
    options: dict[str, Any] = {"temperature": 3.0, "tempers": "posterior"}
    posterior: Any = pr.fit(density, None, method, steps=40, progress=False, **options)
    products = (posterior.w - mean)[..., :, None] * (posterior.w - mean)[..., None, :]
    assert_mean_close(products.mean(1), 3 * covariance)  # 6 comparisons: false alarms at 3.5e-6


def test_the_warm_up_learns_the_metric_and_reaches_the_wanted_acceptance():
    density, _, covariance = gaussian()
    target, data = Target(density, None), Data.of(None)
    method = HMC(
        chains=64, warmup=200, trajectory=4.0, integrator="leapfrog"
    )  # a fixed length, so that the acceptance depends on the step size alone
    generator = stream(4, "samplers")
    state = method.init(target, method.plan(target, data, 30, 0), generator)
    accepted = []
    for _ in range(230):
        state, info = method.step(target, state, data, generator)
        accepted.append(float(torch.as_tensor(info.metrics["acceptance"])))
        assert (info.draw is None) == (len(accepted) <= 200)
    assert isinstance(state.metric, DenseMetric)
    ratio = torch.linalg.eigvals(torch.linalg.solve(covariance, state.metric.covariance)).real
    assert 0.6 < float(ratio.min()) < float(ratio.max()) < 1.7
    assert 0.9 < sum(accepted[200:]) / 30 < 0.985  # the target is 0.95


@pytest.mark.parametrize("method", [HMC, NUTS, MALA, RandomWalk])
def test_every_draw_has_its_statistics(method):
    density, *_ = gaussian()
    posterior: Any = pr.fit(density, None, method(chains=4, warmup=20, thin=2), steps=7, progress=False)
    found = posterior.statistics
    assert {"energy", "acceptance", "divergent", "steps"} <= found.keys()
    assert ("tree_depth" in found) == (method is NUTS)
    assert all(t.shape == (4, 7) for t in found.values())
    assert len(posterior.history["acceptance"]) == 20 + 2 * 7
    value = Target(density, None).log_joint_and_grad(posterior.w, ())[0]
    assert bool((found["energy"] >= -value - 1e-9).all())  # the kinetic energy is not negative
    assert not bool(found["divergent"].any())


@pytest.mark.parametrize(
    "method",
    [HMC(chains=3, warmup=24), NUTS(chains=3, warmup=24), HMC(chains=3, warmup=24, metric="low_rank")],
    ids=repr,
)
def test_an_interrupted_fit_resumes_with_the_same_draws(method, tmp_path):
    """Interrupted early and late in the warm-up, and after it."""
    density, *_ = gaussian()
    whole: Any = pr.fit(density, None, method, steps=10, progress=False)
    for stop in (3, 15, 29):
        keep = pr.Checkpoint(tmp_path / f"{stop}", every=1)

        def interrupt(moment: Any, stop: int = stop) -> None:
            if moment.step >= stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pr.fit(density, None, method, steps=10, progress=False, checkpoint=keep, callbacks=[interrupt])
        again: Any = pr.fit(density, None, method, steps=10, progress=False, checkpoint=keep)
        assert torch.equal(again.w, whole.w)
        assert all(torch.equal(again.statistics[n], t) for n, t in whole.statistics.items())


def test_chains_start_at_draws_of_pathfinder(monkeypatch):
    """Its draws follow the Gaussian: 3 means of 16 chains at 5 standard errors, false alarms at 2e-6."""
    density, mean, covariance = gaussian()
    starts, init = [], HMC.init

    def recording_init(self, target, plan, noise, shape, start):
        state = init(self, target, plan, noise, shape, start)
        starts.append((start, state.w.clone()))
        return state

    monkeypatch.setattr(HMC, "init", recording_init)
    method = HMC(chains=16, warmup=30, start=pr.Pathfinder(paths=2, draws=100))
    assert pr.fit(density, None, method, steps=5, progress=False).sample(2)["w"].shape == (2, 3)
    ((start, w),) = starts
    assert start.method == "Pathfinder(paths=2, draws=100)"
    assert bool((w[:, None] == start.w.reshape(-1, 3)).all(-1).any(-1).all())
    assert bool(((w.mean(0) - mean).abs() < 5 * (covariance.diagonal() / 16).sqrt()).all())


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("method", [HMC, NUTS, MALA, RandomWalk])
def test_chains_start_at_the_draws_of_a_given_posterior(method, shape):
    """With as many draws as chains, each draw is the start of one chain."""
    density, mean, _ = gaussian()
    target, data = Target(density, None), Data.of(None)
    count = 8 * math.prod(shape)
    w = mean + 30 + torch.randn(count, 3, generator=stream(5, "samplers"), dtype=DOUBLE)  # far from the default starts
    sampler = method(chains=8)
    plan = sampler.plan(target, data, 1, 0)
    state = sampler.init(target, plan, stream(0, "samplers"), torch.Size(shape), Draws(target, w))
    assert state.w.shape == (*shape, 8, 3)
    chain_starts = state.w.reshape(count, 3)
    assert torch.equal(chain_starts[chain_starts[:, 0].argsort()], w[w[:, 0].argsort()])


def test_the_first_metric_is_that_of_the_posterior_that_chains_start_from():
    """The variance of coordinate i is sqrt(C_ii / (C^-1)_ii).

    Those of 256 exact draws at 5 standard errors of sqrt(2 / 256): false alarms at 2e-6.
    """
    density, _, covariance = gaussian()
    start = pr.fit(density, None, pr.Pathfinder(), progress=False)
    target, data = Target(density, None), Data.of(None)
    method = HMC(chains=32, metric="diagonal")
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "samplers"), start=start)
    assert isinstance(state.metric, DiagonalMetric)
    ratio = state.metric.variance.squeeze() / (covariance.diagonal() / torch.linalg.inv(covariance).diagonal()).sqrt()
    assert float((ratio - 1).abs().max()) < 5 * math.sqrt(2 / 256)
    assert state.warmup.learnt


def test_a_point_as_start_leaves_the_metric_at_one():
    density, _, _ = gaussian()
    start = pr.fit(density, None, pr.MAP(), steps=50, progress=False)
    target, data = Target(density, None), Data.of(None)
    method = HMC(chains=32, metric="diagonal")
    state = method.init(target, method.plan(target, data, 1, 0), stream(0, "samplers"), start=start)
    assert isinstance(state.metric, DiagonalMetric)
    assert bool((state.metric.variance == 1).all())
    assert not state.warmup.learnt


def test_the_default_number_of_chains_depends_on_the_cost_of_a_gradient():
    """A density of many rows takes fewer chains than one of few, whether it has them inside or as data."""
    many = torch.randn(5000, 3, generator=stream(9, "samplers"), dtype=DOUBLE)
    density, *_ = gaussian()

    def heavy(p: dict[str, Tensor]) -> Tensor:
        return -(many @ p["w"]).square().sum() - p["w"].square().sum()

    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))
    rows = (torch.zeros(1000, 8), torch.zeros(1000, 1))
    cases = [
        (density, None, 256),
        (pr.Density(heavy, {"w": Param((3,))}), None, 64),  # 15,016 elements in 11 operations
        (pr.Model(net, pr.Gaussian(1.0)), rows, 16),
    ]
    for model, data, chains in cases:
        bound, prepared = model.bind(data, None, None)
        target, method = make_target(bound, prepared), HMC(warmup=0)
        state = method.init(target, method.plan(target, prepared, 1, 0), stream(0, "samplers"))
        assert state.w.shape[0] == chains


# Warnings and errors.


def density_of(log_prob: Any, size: int = 1) -> pr.Density:
    return pr.Density(log_prob, {"w": Param((size,))}, batched=True)


def test_divergences_are_counted_and_located():
    """The neck of a funnel, where the scale is small, is too narrow for the step size of the rest."""

    def funnel(p: dict[str, Tensor]) -> Tensor:
        scale, rest = p["w"][..., 0], p["w"][..., 1:]
        return -scale.square() / 18 - 0.5 * (rest.square().sum(-1) * (-scale).exp()) - 0.5 * 9 * scale

    method = HMC(chains=32, warmup=100, accept=0.6)
    with pytest.warns(PrioryWarning, match=r"of the 1,600 transitions of HMC diverged, most where 'w\[0\]' is low"):
        posterior: Any = pr.fit(density_of(funnel, 10), None, method, steps=50, progress=False)
    assert int(posterior.statistics["divergent"].sum()) > 0


def test_divergences_of_thinned_transitions_are_reported_with_the_next_draw():
    """Trajectories that leave the support (-1, 1) diverge; every fourth draw is kept."""
    edge = density_of(lambda p: torch.where(p["w"].abs() < 1, 0.0, -math.inf).sum(-1) - 0.5 * p["w"].square().sum(-1))
    target, data, method = Target(edge, None), Data.of(None), HMC(chains=6, warmup=10, thin=4)
    generator = stream(8, "samplers")
    state = method.init(target, method.plan(target, data, 5, 0), generator)
    wanted = torch.zeros(6, 5, dtype=torch.bool)
    for step in range(30):
        before = generator.get_state()
        move = method.transition(state, generator)
        generator.set_state(before)
        state, _ = method.step(target, state, data, generator)
        if step >= 10:
            wanted[:, (step - 10) // 4] |= move.divergent
    assert torch.equal(state.statistics["divergent"], wanted)
    assert 0 < int(wanted.sum()) < 30


def test_the_divergence_warning_says_when_no_chain_has_moved():
    target = Target(density_of(lambda p: -p["w"].square().sum(-1)), None)
    stuck = torch.full((2, 5, 1), 0.1, dtype=torch.float64)
    everywhere = torch.ones(2, 5, dtype=torch.bool)
    with pytest.warns(PrioryWarning, match=r"^10 of the 10 transitions of HMC diverged, and no chain has moved"):
        warn_of_divergences(target, stuck, everywhere, "HMC", 0.8)


def ridge(slope: float, curvature: float) -> pr.Density:
    """A density that is improper along a + b, although each coordinate given the other is normal."""
    return density_of(
        lambda p: slope * p["w"].sum(-1) - 0.5 * curvature * (p["w"][..., 0] - p["w"][..., 1]).square(), 2
    )


def test_a_warning_names_the_coordinates_of_a_flat_direction():
    with pytest.warns(PrioryWarning, match=r"still spread.*'w\[\d\]'.*improper"):
        pr.fit(ridge(0.0, 1.0), None, HMC(chains=32, warmup=40, metric="diagonal"), steps=400, progress=False)


def test_a_warning_names_the_coordinates_in_which_chains_drift_together():
    """A random walk up an endless slope, too slow to raise the error and hardly wider at the end."""
    with pytest.warns(PrioryWarning, match=r"RandomWalk still move.*'w\[\d\]'.*improper"):
        pr.fit(ridge(4.0, 1.0), None, RandomWalk(chains=32, warmup=0), steps=200, progress=False)


def test_slow_chains_without_a_common_drift_give_no_warning():
    """Each chain moves in one direction, but their mean doesn't."""
    density = density_of(lambda p: -0.5 * p["w"].square().sum(-1), 4)
    target, wave = Target(density, None), torch.linspace(-1, 1, 100, dtype=DOUBLE)
    place, way = torch.randn(2, 64, 1, 4, generator=stream(6, "samplers"), dtype=DOUBLE)
    slow = place + way * wave[:, None]
    warn_of_drift(target, slow, "HMC")  # a warning is an error here
    with pytest.warns(PrioryWarning, match="still move"):
        warn_of_drift(target, slow + 2 * wave[:, None], "HMC")


@pytest.mark.parametrize("method", [HMC(warmup=100), NUTS(warmup=100, max_depth=6), HMC(warmup=0), MALA()], ids=repr)
def test_chains_that_drift_to_infinity_raise_an_error(method):
    """Both when the metric grows during the warm-up and when chains drift after it."""
    method = type(method)(**{**vars(method), "chains": 32})
    with pytest.raises(DivergedError, match=r"chains of \w+ drift off: 'w\[\d\]' has reached .* improper"):
        pr.fit(ridge(1.0, 1e-6), None, method, steps=3000, progress=False)


def test_a_density_that_is_infinite_at_all_starts_is_refused_with_the_parameters():
    """It is finite at zero, which is tried first, and nowhere else."""
    density = density_of(lambda p: torch.where(p["w"] == 0, 0.0, -math.inf).sum(-1) + 0 * p["w"].sum(-1), 2)
    with pytest.raises(InputError, match=r"must be finite where NUTS starts, as at {'w': \[.*got -inf there"):
        pr.fit(density, None, NUTS(chains=4), steps=5, progress=False)


def test_a_start_without_a_finite_value_is_moved_towards_zero():
    density = density_of(lambda p: torch.where(p["w"].abs() < 0.1, -50 * p["w"].square(), -math.inf).sum(-1))
    posterior: Any = pr.fit(density, None, MALA(chains=16, warmup=60), steps=20, progress=False)
    assert float(posterior.w.abs().max()) < 0.1
    assert float(posterior.w.std()) > 0.02


def test_a_density_of_the_wrong_shape_is_refused():
    with pytest.raises(InputError, match="must return a single number"):
        pr.fit(pr.Density(lambda p: -p["w"].square(), {"w": Param((3,))}), None, HMC(), progress=False)


def test_a_density_that_is_not_differentiable_is_refused():
    with pytest.raises(InputError, match="must be differentiable"):
        pr.fit(pr.Density(lambda p: -p["w"].detach().square(), {"w": Param()}), None, HMC(), progress=False)


def test_a_network_with_running_statistics_is_refused():
    model = pr.Model(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), pr.Gaussian(0.1))
    with pytest.raises(InputError, match="'model' argument of HMC must have no buffers that training writes"):
        pr.fit(model, (torch.randn(8, 1), torch.randn(8)), HMC(), steps=1, progress=False)


@pytest.mark.parametrize("method", [HMC, NUTS, MALA, RandomWalk])
@pytest.mark.parametrize(
    ("option", "value", "must"),
    [
        ("chains", 0, "an integer >= 1"),
        ("chains", 2.5, "an integer >= 1"),
        ("warmup", -1, "an integer >= 0"),
        ("thin", 0, "an integer >= 1"),
        ("accept", 1.0, "a number between 0 and 1"),
        ("accept", "high", "a number between 0 and 1"),
        ("metric", "kronecker", "one of diagonal, dense, low_rank"),
        ("compile", 1, "True or False"),
    ],
)
def test_invalid_options_of_all_samplers_are_refused(method, option, value, must):
    with pytest.raises(InputError, match=f"The '{option}' argument of {method.__name__} must be {must}"):
        method(**{option: value})


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [(HMC, "trajectory", 0), (HMC, "trajectory", "long"), (HMC, "integrator", "euler"), (NUTS, "max_depth", 0)],
)
def test_invalid_options_of_one_sampler_are_refused(method, option, value):
    with pytest.raises(InputError, match=f"The '{option}' argument of {method.__name__} must be"):
        method(**{option: value})


def test_members_have_their_own_step_sizes_and_metrics():
    density, *_ = gaussian()
    target, data = make_target(density, Data.of(None)), Data.of(None)
    method = HMC(chains=4, warmup=4)
    state = method.init(target, method.plan(target, data, 2, 0), stream(5, "samplers"), torch.Size([2]))
    assert state.w.shape == (2, 4, 3)
    assert state.step_size.log.shape == (2,)
    assert isinstance(state.metric, DenseMetric)
    assert state.metric.covariance.shape == (2, 3, 3)


def test_members_learn_their_step_sizes_and_metrics_from_their_own_chains():
    density, *_ = gaussian()
    target, data = make_target(density, Data.of(None)), Data.of(None)
    method, noise = NUTS(chains=4, warmup=40, metric="diagonal"), stream(5, "samplers")
    state = method.init(target, method.plan(target, data, 2, 0), noise, torch.Size([2]))
    snapshots: list[tuple[Tensor, Tensor]] = []
    alone: list[StepSize] = []
    for now in range(1, 21):
        state, info = method.step(target, state, data, noise)
        acceptance = torch.as_tensor(info.metrics["acceptance"])
        assert acceptance[0] != acceptance[1]
        snapshots.append((state.w.clone(), state.gradient.clone()))
        if not alone:
            alone = [StepSize.at(step) for step in state.step_size.anchor.exp()]
        for member in range(2):
            alone[member].record(acceptance[member], state.warmup.accept, torch.tensor(math.inf))
            torch.testing.assert_close(state.step_size.log[member], alone[member].log, rtol=1e-12, atol=1e-12)
        if now in (8, 20):  # the later half of the transitions so far
            later = snapshots[now // 2 :]
            for member in range(2):
                x, g = (torch.cat([pair[i][member] for pair in later]) for i in (0, 1))
                wanted = (x.var(0) / g.var(0)).sqrt()
                assert isinstance(state.metric, DiagonalMetric)
                torch.testing.assert_close(state.metric.variance[member, 0], wanted, rtol=1e-10, atol=0)


def test_no_chain_stays_stuck_when_a_scale_starts_far_too_small() -> None:
    """In a regression log sigma may start at -2, where the gradient is ten thousand times that of other chains."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    y = X @ torch.tensor([10.0, -20.0, 5.0], dtype=torch.float64) + 18 * torch.randn(
        400, generator=generator, dtype=torch.float64
    )

    def log_prob(v: dict[str, torch.Tensor]) -> torch.Tensor:
        error = y - X @ v["beta"]
        return -0.5 * (error / v["sigma"]).square().sum() - 400 * v["sigma"].log()

    params = {"beta": pr.Param((3,)), "sigma": pr.Param((), pr.constraints.positive)}
    posterior: Any = pr.fit(pr.Density(log_prob, params), None, pr.HMC(chains=32), steps=50, progress=False)
    assert float(posterior.draws["sigma"].min()) > 14  # sigma is 18; six standard errors, in every chain


@pytest.mark.parametrize("warmup", [20, 100, 200, 300])
def test_a_stuck_chain_is_replaced_in_a_warm_up_of_any_length(warmup) -> None:
    """One chain starts at 1e4, where the gradient is 1e12 times that of the others; their step size can't move it."""
    target, data = Target(density_of(lambda p: -p["w"].pow(4).sum(-1)), None), Data.of(None)
    method, generator = HMC(chains=8, warmup=warmup), stream(7, "samplers")
    state = method.init(target, method.plan(target, data, 1, 0), generator)
    state.w[0] = 1e4
    state.value, state.gradient = state.joint(state.w)
    state, _ = method.step(target, state, data, generator)
    assert float(state.w.abs().max()) < 10
    assert isinstance(state.metric, DenseMetric)
    assert float(state.metric.covariance) < 10  # the position of the stuck chain isn't counted
