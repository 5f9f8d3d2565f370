"""Penalties under each method: modes with exact zeros, closed-form bounds, draws, and priors that Laplace rejects."""

import math

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn
from torch.distributions import Laplace, Normal

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.base import Plan
from priory.penalties import L1, L2, Bridge, ElasticNet, GroupLasso, Penalty, ReverseGroupLasso
from priory.penalties.as_prior.parameters import describe_parameters
from priory.testing import assert_mean_close

F64 = torch.float64
NOISE_SD, PENALTY_FACTOR = 0.5, 8.0


def problem(outputs: int = 1) -> tuple[Tensor, Tensor]:
    """Return data with orthogonal inputs, so that the mode of each coefficient has a closed form."""
    basis, _ = torch.linalg.qr(torch.randn(30, 6, generator=stream(0, "x"), dtype=F64))
    weights = torch.tensor([2.0, -1.0, 0.4, 0.0, 0.02, -0.1], dtype=F64)
    X = 3 * basis
    y = torch.stack([(X @ weights) / (k + 1) for k in range(outputs)], 1)
    return X, y + 0.1 * torch.randn(y.shape, generator=stream(1, "y"), dtype=F64)


def model(prior: object, outputs: int = 1) -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(6, outputs, bias=False).to(F64), pr.Gaussian(NOISE_SD), prior=prior)


def mode(prior: object, outputs: int = 1, steps: int = 550, temperature: float = 1.0) -> Tensor:
    method, options = pr.MAP(learning_rate=0.1), {"batch_size": 30, "progress": False, "temperature": temperature}
    return pr.fit(model(prior, outputs), problem(outputs), method, steps=steps, **options).mean["weight"]


def least_squares(outputs: int = 1) -> tuple[Tensor, float]:
    """Return the solution without a penalty, (outputs, 6), and the precision of each weight given the data."""
    X, y = problem(outputs)
    return (y.T @ X) / 9, 9 / NOISE_SD**2


# Modes.


def test_the_mode_under_l1_is_the_soft_threshold_with_exact_zeros() -> None:
    solution, precision = least_squares()
    wanted = solution.sign() * (solution.abs() - PENALTY_FACTOR / precision).clamp_min(0)
    found = mode(L1(PENALTY_FACTOR))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)
    assert bool(((found == 0) == (wanted == 0)).all())
    assert 0 < int((found == 0).sum()) < 6


def test_the_mode_under_an_elastic_net_is_the_shrunken_soft_threshold() -> None:
    solution, precision = least_squares()
    soft = solution.sign() * (solution.abs() - 0.5 * PENALTY_FACTOR / precision).clamp_min(0)
    wanted = soft / (1 + 2 * 0.5 * PENALTY_FACTOR / precision)
    found = mode(ElasticNet(PENALTY_FACTOR, l1_ratio=0.5))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)
    assert bool(((found == 0) == (wanted == 0)).all())


@pytest.mark.parametrize(("kind", "dim"), [(GroupLasso, 1), (ReverseGroupLasso, 0)])
def test_the_mode_under_a_group_penalty_is_the_group_threshold_with_whole_groups_at_zero(kind, dim: int) -> None:
    solution, precision = least_squares(3)
    factor = 10.0 if dim == 0 else 40.0
    length = solution.square().sum(dim, keepdim=True).sqrt()
    wanted = solution * (1 - factor / precision / length).clamp_min(0)
    found = mode(kind(factor), 3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)
    zero = (found == 0).all(dim)
    assert 0 < int(zero.sum()) < len(zero)
    assert int((found == 0).sum()) == int(zero.sum()) * found.shape[dim]


@pytest.mark.parametrize(
    ("penalty", "prior"),
    [
        (L1(PENALTY_FACTOR), Laplace(torch.zeros((), dtype=F64), torch.tensor(1 / PENALTY_FACTOR, dtype=F64))),
        (L2(PENALTY_FACTOR), Normal(torch.zeros((), dtype=F64), torch.tensor((2 * PENALTY_FACTOR) ** -0.5, dtype=F64))),
        (L2(PENALTY_FACTOR), Penalty(lambda w: w.square(), factor=PENALTY_FACTOR)),
        (Bridge(1.0, PENALTY_FACTOR), L1(PENALTY_FACTOR)),
    ],
    ids=["L1", "L2", "function", "bridge"],
)
def test_the_mode_under_a_penalty_equals_the_mode_under_its_prior(penalty, prior) -> None:
    torch.testing.assert_close(mode(penalty, steps=100), mode(prior, steps=100), rtol=0, atol=1e-8)


def test_a_tempered_mode_has_its_penalty_multiplied() -> None:
    solution, precision = least_squares()
    wanted = solution.sign() * (solution.abs() - 0.25 * PENALTY_FACTOR / precision).clamp_min(0)
    torch.testing.assert_close(mode(L1(PENALTY_FACTOR), temperature=0.25), wanted, rtol=0, atol=1e-8)


def test_minibatches_leave_exact_zeros_too() -> None:
    found = pr.fit(model(L1(4 * PENALTY_FACTOR)), problem(), pr.MAP(0.05), steps=400, batch_size=10, progress=False)
    assert int((found.mean["weight"] == 0).sum()) >= 3


# Bounds.


def one_step(prior: object, method: pr.MeanField, seed: int = 3):
    built = model(prior)
    data = Data.of(problem(), 30).prepared(built.prepare)
    target = make_target(built, data, 1.0, "likelihood")
    state = method.init(target, Plan(data, 10), stream(0, "start"))
    generator = stream(seed, "noise")
    state, info = method.step(target, state, data.tensors, generator)
    return state, info, target


def test_the_bound_under_l1_has_no_noise_of_the_prior() -> None:
    _, info, _ = one_step(L1(PENALTY_FACTOR), pr.MeanField())
    _, other, _ = one_step(L1(PENALTY_FACTOR), pr.MeanField(), seed=4)
    assert float(info.metrics["kl"]) == pytest.approx(float(other.metrics["kl"]), abs=1e-10)
    assert float(info.metrics["nll"]) != pytest.approx(float(other.metrics["nll"]), abs=1e-6)


@pytest.mark.parametrize("penalty", [L1(PENALTY_FACTOR), ElasticNet(PENALTY_FACTOR, l1_ratio=0.7)], ids=repr)
def test_the_closed_form_divergence_equals_its_integral(penalty) -> None:
    _, info, target = one_step(penalty, pr.MeanField(initial_scale=0.9))
    m, s = target.model.network.initial, 0.9 * target.prior.typical_scale()
    ((_, prior),) = target.prior.others
    total = 0.0
    for mu, sd in zip(m.tolist(), s.tolist(), strict=True):
        q = Normal(torch.tensor(mu, dtype=F64), torch.tensor(sd, dtype=F64))

        def integrand(x: float, q: Normal = q) -> float:
            at = torch.tensor(x, dtype=F64)
            return float(q.log_prob(at).exp() * (q.log_prob(at) - prior.log_prob(at)))

        total += quad(integrand, mu - 12 * sd, mu + 12 * sd, points=[0.0], epsabs=1e-11)[0]
    assert float(info.metrics["kl"]) == pytest.approx(total, abs=1e-7)


def cross_entropy(penalty: object, loc: Tensor, scale: Tensor) -> Tensor:
    """Return lambda E r(w) under N(loc, scale^2): |w| is a folded normal, w^2 follows from its moments."""
    absolute = scale * math.sqrt(2 / math.pi) * (-0.5 * (loc / scale) ** 2).exp() + loc * (loc / scale / 2**0.5).erf()
    l1, l2 = {L1: (1.0, 0.0), L2: (0.0, 1.0), ElasticNet: (0.5, 0.5)}[type(penalty)]
    return PENALTY_FACTOR * (l1 * absolute + l2 * (loc.square() + scale.square())).sum()


@pytest.mark.parametrize("penalty", [L1(PENALTY_FACTOR), ElasticNet(PENALTY_FACTOR), L2(PENALTY_FACTOR)], ids=repr)
def test_the_gradient_of_the_bound_is_that_of_the_loss_by_autograd(penalty) -> None:
    built = model(penalty)
    data = Data.of(problem(), 30).prepared(built.prepare)
    target, method = make_target(built, data, 1.0, "likelihood"), pr.MeanField()
    state = method.init(target, Plan(data, 10), stream(0, "start"))
    start = state.variational.clone()
    state, _ = method.step(target, state, data.tensors, stream(3, "noise"))
    loc, log_scale = (t.clone().requires_grad_() for t in start)
    w = loc + log_scale.exp() * state.noise[0]
    X, y = problem()
    misfit = 0.5 * ((X @ w - y.squeeze(1)) / NOISE_SD).square().sum()
    loss = misfit + cross_entropy(penalty, loc, log_scale.exp()) - log_scale.sum()
    slopes = torch.stack(torch.autograd.grad(loss, [loc, log_scale]))
    torch.testing.assert_close(state.gradient, slopes, rtol=0, atol=1e-8)


def test_the_local_gradient_of_the_bound_is_the_mean_of_the_one_at_draws() -> None:
    built = model(L1(PENALTY_FACTOR))
    data = Data.of(problem(), 30).prepared(built.prepare)
    target, method = make_target(built, data, 1.0, "likelihood"), pr.MeanField(estimator="local")
    start = method.init(target, Plan(data, 10), stream(0, "start"))
    loc, scale = start.variational[0].clone(), start.variational[1].exp()
    n = 4_000
    eps = torch.randn(n, 6, generator=stream(5, "eps"), dtype=F64)
    _, slope = target.log_joint_and_grad(loc + scale * eps, data.tensors)
    local = []
    for seed in range(40):
        start = method.init(target, Plan(data, 10), stream(0, "start"))
        start, _ = method.step(target, start, data.tensors, stream(seed, "noise"))
        local.append(start.gradient.clone())
    mean = torch.stack(local)
    at_draws = torch.stack([-slope, -slope * eps * scale - 1], 1)  # (n, 2, 6)
    error = (mean.var(0) / len(mean) + at_draws.var(0) / n).sqrt()
    # false alarms: 5 standard errors, 12 comparisons, Student's t of 39: 1.5e-4
    assert bool(((mean.mean(0) - at_draws.mean(0)).abs() <= 5 * error + 1e-10).all())


@pytest.mark.parametrize(
    "penalty", [GroupLasso(PENALTY_FACTOR), Bridge(1.5, PENALTY_FACTOR), Penalty(torch.abs)], ids=repr
)
def test_variational_inference_evaluates_the_other_penalties_at_its_draws(penalty) -> None:
    found = pr.fit(model(penalty), problem(), pr.MeanField(), steps=300, batch_size=30, progress=False)
    assert math.isfinite(found.evidence().value)
    assert found.evidence().kind.startswith("ELBO with an improper") == isinstance(penalty, Penalty)


# Draws.


@pytest.mark.parametrize(
    "penalty", [L1(PENALTY_FACTOR), ElasticNet(PENALTY_FACTOR), Bridge(1.5, PENALTY_FACTOR)], ids=repr
)
def test_a_sampler_finds_the_posterior_under_a_penalty(penalty) -> None:
    solution, precision = least_squares()
    found = pr.fit(model(penalty), problem(), pr.HMC(chains=64, warmup=100), steps=60, progress=False)
    draws = found.draws["weight"].reshape(64, -1, 6).mean(1)  # one mean per chain
    prior = penalty.prior(PENALTY_FACTOR, describe_parameters(nn.Linear(6, 1))["weight"], F64)
    wanted = []
    for centre in solution[0].tolist():

        def log_density(x: float, centre: float = centre) -> float:
            return -0.5 * precision * (x - centre) ** 2 + float(prior.log_prob(torch.tensor(x, dtype=F64)))

        reach = 12 / math.sqrt(precision)
        top = max(log_density(x) for x in torch.linspace(centre - reach, centre + reach, 1001, dtype=F64).tolist())
        mass, mean = (
            quad(
                lambda x, k=k, f=log_density, top=top: x**k * math.exp(f(x) - top),
                centre - reach,
                centre + reach,
                points=[0.0],
                epsabs=0,  # a mean near 0 needs a relative tolerance
                epsrel=1e-9,
            )[0]
            for k in (0, 1)
        )
        wanted.append(mean / mass)
    assert_mean_close(draws, torch.tensor(wanted, dtype=F64))  # false alarms: 3e-6


# Laplace.


@pytest.mark.parametrize("penalty", [L1(PENALTY_FACTOR), GroupLasso(PENALTY_FACTOR)], ids=repr)
def test_laplace_rejects_a_prior_without_curvature_in_a_sentence(penalty) -> None:
    at = pr.fit(model(penalty), problem(), pr.MAP(), steps=20, progress=False)
    with pytest.raises(pr.InputError, match="prior of 'weight' must"):
        pr.fit(model(penalty), problem(), pr.Laplace(at=at), progress=False)


def test_laplace_accepts_a_smooth_penalty_as_prior() -> None:
    prior = Normal(torch.zeros((), dtype=F64), torch.tensor((2 * PENALTY_FACTOR) ** -0.5, dtype=F64))
    values = []
    for built in (model(L2(PENALTY_FACTOR)), model(prior)):
        at = pr.fit(built, problem(), pr.MAP(0.1), steps=300, batch_size=30, progress=False)
        values.append(pr.fit(built, problem(), pr.Laplace(at=at), progress=False).evidence().value)
    assert values[0] == pytest.approx(values[1], abs=1e-8)
