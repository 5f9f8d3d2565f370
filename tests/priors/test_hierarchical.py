"""Learnt precisions against Normal x Gamma, maxima found by scipy, and linear regression whose optimum is known."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import integrate, optimize
from torch import Tensor, distributions, nn

import priory as pr
from priory.core.data import Data
from priory.families import DiagonalFamily
from priory.fitting.prepare import make_target
from priory.priors import Hierarchical
from priory.testing import assert_mean_close
from priory.testing.contract import resumes_with_the_same_bits

F64 = torch.float64
EXACT_TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
PRECISION_NAMES = ["prior.0.weight.precision", "prior.2.weight.precision"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def model_with(prior: object, likelihood: Any = None) -> pr.Model:
    return pr.Model(small_net(), likelihood or pr.Gaussian(0.5), prior=prior)


# The density.


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
@pytest.mark.parametrize("jacobian", [True, False])
def test_the_joint_density_is_normal_times_gamma_and_the_log_determinant(lead: tuple[int, ...], jacobian: bool) -> None:
    model = model_with({"*.weight": Hierarchical(2.5, 0.7), "*": "flat"}, pr.Gaussian(0.5))
    w = normal(*lead, model.layout.size)
    params = model.layout.constrain(w)
    expected = torch.zeros(lead, dtype=F64)
    for name in ("0.weight", "2.weight"):
        tau = params[f"prior.{name}.precision"]
        scale = tau.rsqrt()[..., None, None]
        expected = expected + distributions.Normal(torch.zeros_like(scale), scale).log_prob(params[name]).sum((-1, -2))
        expected = expected + distributions.Gamma(torch.tensor(2.5, dtype=F64), 0.7).log_prob(tau)
        expected = expected + (tau.log() if jacobian else 0.0)
    torch.testing.assert_close(model.prior.log_prob_of_others(w, jacobian), expected, **EXACT_TOLERANCE)
    if jacobian:
        torch.testing.assert_close(model.prior.log_prob(w), expected, **EXACT_TOLERANCE)


def test_the_gradient_of_the_joint_density_matches_its_closed_form() -> None:
    model = pr.Model(nn.Linear(5, 1, bias=False).double(), pr.Gaussian(0.5), Hierarchical(2.5, 0.7))
    target = make_target(model, Data.of((normal(4, 5), normal(4))).prepared(model.prepare), 1.0, "likelihood")
    w = normal(3, 6)
    tau = w[:, 5:].exp()
    balance = 2.5 + 5 / 2 - tau * (0.7 + 0.5 * w[:, :5].square().sum(-1, keepdim=True))
    _, gradient = target.log_prior_and_grad(w)
    torch.testing.assert_close(gradient, torch.cat([-tau * w[:, :5], balance], -1), **EXACT_TOLERANCE)


def test_the_weights_with_the_precision_integrated_out_have_a_multivariate_student_t() -> None:
    """Integrating exp(log p(w, log tau)) over log tau gives a Student t with 2 shape degrees of freedom."""
    model = pr.Model(nn.Linear(3, 1, bias=False).double(), pr.Gaussian(0.5), Hierarchical(2.0, 0.5))
    w, a, b, n = torch.tensor([0.3, -1.0, 0.4], dtype=F64), 2.0, 0.5, 3

    def density(u: float) -> float:
        return float(model.prior.log_prob(torch.cat([w, torch.tensor([u], dtype=F64)])).exp())

    found = integrate.quad(density, -30, 12, epsabs=1e-14, epsrel=1e-12, limit=200)[0]
    expected = math.lgamma(a + n / 2) - math.lgamma(a) + a * math.log(b) - n / 2 * math.log(2 * math.pi)
    expected -= (a + n / 2) * math.log(b + 0.5 * float(w @ w))
    assert math.log(found) == pytest.approx(expected, abs=1e-9)


# Names and starting values.


def test_each_parameter_that_a_pattern_matches_has_a_precision_after_the_likelihoods_parameters() -> None:
    model = model_with({"2.*": 1.0, "*.weight": Hierarchical(), "*": Hierarchical(3.0, 1.0)}, pr.Gaussian())
    assert model.layout.names == (
        *("0.weight", "0.bias", "2.weight", "2.bias", "likelihood.noise"),
        *("prior.0.weight.precision", "prior.0.bias.precision"),
    )
    assert model.layout.names[4] == "likelihood.noise"
    assert model.learnt == slice(11, 12)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_precision_starts_at_the_mean_of_its_gamma(shape: tuple[int, ...]) -> None:
    # the second pattern comes first in the network: each start must reach its own parameter
    model = model_with({"2.weight": Hierarchical(3.0, 0.5), "0.weight": Hierarchical(2.0, 8.0), "*": 1.0})
    w = model.start(normal(6), torch.Size(shape), torch.Generator().manual_seed(0))
    params = model.layout.constrain(w)
    for name, start in zip(PRECISION_NAMES, (0.25, 6.0), strict=True):
        torch.testing.assert_close(params[name], torch.full(shape, start, dtype=F64), **EXACT_TOLERANCE)


def test_typical_scales_are_those_of_the_starting_precision_and_of_log_tau_given_the_weights() -> None:
    model = model_with({"0.weight": Hierarchical(2.0, 0.5), "*": 3.0})
    scale = model.layout.constrain(model.prior.typical_scale())
    torch.testing.assert_close(scale["0.weight"], torch.full((2, 3), 0.5, dtype=F64), **EXACT_TOLERANCE)
    assert float(model.prior.typical_scale()[-1]) == pytest.approx((2.0 + 6 / 2) ** -0.5)
    assert float(scale["0.bias"][0]) == pytest.approx(3.0)


def test_a_network_with_a_parameter_named_like_the_precision_is_rejected() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.prior = nn.Parameter(torch.zeros(2)), nn.Module()
            self.prior.weight = nn.Module()
            self.prior.weight.precision = nn.Parameter(torch.zeros(()))

    with pytest.raises(pr.InputError, match="have no parameter of the likelihood's or the prior's name"):
        pr.Model(Net(), pr.Gaussian(0.5), {"weight": Hierarchical(), "*": 1.0})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shape": 0.0}, "The 'shape' argument of Hierarchical must be a positive number, got 0.0."),
        ({"shape": True}, "The 'shape' argument of Hierarchical must be a positive number, got True."),
        ({"shape": "1"}, "The 'shape' argument of Hierarchical must be a positive number, got 1."),
        ({"rate": 0.0}, "The 'rate' argument of Hierarchical must be a positive number, got 0.0."),
        ({"rate": math.inf}, "The 'rate' argument of Hierarchical must be a positive number, got inf."),
        ({"infer": "map"}, "The 'infer' argument of Hierarchical must be 'variational' or 'empirical', got 'map'."),
        ({"rate": -1.0, "infer": "empirical"}, "The 'rate' argument of Hierarchical must be a positive number, or 0"),
        (
            {"shape": 2.0, "rate": 0.0, "infer": "empirical"},
            "The 'shape' argument of Hierarchical must be 1 if the rate is 0",
        ),
        ({"shape": 0.4, "infer": "empirical"}, "The 'shape' argument of Hierarchical must be above 0.5"),
    ],
)
def test_invalid_options_are_rejected_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(pr.InputError) as caught:
        Hierarchical(**options)
    assert sentence in str(caught.value)


# The best precision under a q.

Q_MEAN, Q_VARIANCE = normal(7, seed=1), normal(7, seed=2).exp()
EXPECTED_SQUARES = float((Q_MEAN.square() + Q_VARIANCE).sum())


def best(function: Callable[[float], float]) -> float:
    """Return the maximiser of a function of log tau."""
    return optimize.minimize_scalar(
        lambda u: -function(u), bounds=(-10, 10), method="bounded", options={"xatol": 1e-11}
    ).x


@pytest.mark.parametrize(("shape", "rate"), [(1.0, 0.0), (2.5, 0.7), (0.6, 3.0)])
def test_the_empirical_precision_maximises_the_expected_log_density_plus_log_gamma(shape: float, rate: float) -> None:
    prior = pr.Model(
        nn.Linear(7, 1, bias=False).double(), pr.Gaussian(0.5), Hierarchical(shape, rate, "empirical")
    ).prior
    u = best(lambda u: 3.5 * u - 0.5 * math.exp(u) * EXPECTED_SQUARES + (shape - 1) * u - rate * math.exp(u))
    found = prior.precisions(Q_MEAN, Q_VARIANCE)["prior.weight.precision"]
    assert float(found) == pytest.approx(math.exp(u), rel=1e-7)  # a maximum is flat, so half of the digits are known
    if rate == 0:
        assert float(found) == pytest.approx(7 / EXPECTED_SQUARES, rel=1e-14)


def test_the_variational_precision_is_the_mean_under_the_best_gaussian_of_its_logarithm() -> None:
    """Over q(log tau) = N(m, s^2), E_q[log p(w, log tau)] + log s is maximal where E_q[tau] is the Gamma's mean."""
    hierarchical = Hierarchical(2.5, 0.7)
    prior = pr.Model(nn.Linear(7, 1, bias=False).double(), pr.Gaussian(0.5), hierarchical).prior
    a, b = 2.5 + 3.5, 0.7 + 0.5 * EXPECTED_SQUARES

    def loss(at: Any) -> float:
        return -(a * at[0] - b * math.exp(at[0] + 0.5 * math.exp(2 * at[1])) + at[1])

    m, log_s = optimize.minimize(loss, [0.0, 0.0], method="BFGS", options={"gtol": 1e-9}).x
    found = prior.precisions(torch.cat([Q_MEAN, Q_MEAN[:1]]), torch.cat([Q_VARIANCE, Q_VARIANCE[:1]]))
    assert float(found["prior.weight.precision"]) == pytest.approx(math.exp(m + 0.5 * math.exp(2 * log_s)), rel=1e-7)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_a_settled_prior_is_normal_with_the_optimal_precisions(lead: tuple[int, ...]) -> None:
    empirical = Hierarchical(rate=0.0, infer="empirical")
    model = model_with({"*.weight": empirical, "*": 0.5})
    mean, variance, w = normal(*lead, 11), normal(*lead, 11, seed=1).exp(), normal(5, *lead, 11, seed=2)
    params, spread = model.layout.constrain(mean), model.layout.constrain(variance)
    values = model.layout.constrain(w)
    expected = torch.zeros((5, *lead), dtype=F64)
    for name, value in values.items():
        dims = tuple(range(-len(model.layout[name].shape), 0))
        square = (params[name].square() + spread[name]).sum(dims, keepdim=True)
        scale = (square / math.prod(model.layout[name].shape)).sqrt()
        scale = scale if name.endswith("weight") else torch.full_like(scale, 0.5)
        expected = expected + distributions.Normal(0.0, scale).log_prob(value).sum(dims)
    torch.testing.assert_close(
        model.prior.with_empirical_precisions(mean, variance).log_prob(w), expected, **EXACT_TOLERANCE
    )
    # the prior itself is unchanged: precision 1 without a Gamma prior
    unit = distributions.Normal(0.0, torch.tensor([1.0] * 6 + [0.5] * 2 + [1.0] * 2 + [0.5], dtype=F64))
    torch.testing.assert_close(model.prior.log_prob(w), unit.log_prob(w).sum(-1), **EXACT_TOLERANCE)


def test_settling_a_prior_without_empirical_precisions_returns_itself() -> None:
    for spec in ("glorot", Hierarchical()):
        prior = model_with(spec).prior
        size = prior.layout.size
        assert prior.with_empirical_precisions(normal(size), normal(size).exp()) is prior


def test_an_empirical_precision_is_not_a_coordinate_and_does_not_depend_on_the_initial_weights() -> None:
    """A file or a checkpoint is compared with a model whose network may have other initial weights."""
    empirical = Hierarchical(2.0, 0.5, "empirical")
    models = [pr.Model(small_net(seed), pr.Gaussian(0.5), empirical) for seed in (0, 1)]
    assert models[0].layout.size == 11
    assert models[0].prior.log_prob(torch.ones(11, dtype=F64)) == models[1].prior.log_prob(torch.ones(11, dtype=F64))
    torch.testing.assert_close(models[0].prior.precision, torch.full((11,), 4.0, dtype=F64), **EXACT_TOLERANCE)


# Linear regression: y = X w + noise, w ~ N(0, 1 / tau), where everything but tau is conjugate.

ROW_COUNT, COLUMN_COUNT, NOISE_SD, TRUE_PRECISION = 60, 20, 0.5, 9.0
X = normal(ROW_COUNT, COLUMN_COUNT, seed=3)
Y = X @ (normal(COLUMN_COUNT, seed=4) / TRUE_PRECISION**0.5) + NOISE_SD * normal(ROW_COUNT, seed=5)
DATA_PRECISION, DATA_MOMENT = X.T @ X / NOISE_SD**2, X.T @ Y / NOISE_SD**2


def line(prior: object) -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(COLUMN_COUNT, 1, bias=False).double(), pr.Gaussian(NOISE_SD), prior)


def optimum(tau: float) -> tuple[Tensor, Tensor]:
    """Return the mean and the variances of the best factorised q(w) at this precision."""
    mean = torch.linalg.solve(DATA_PRECISION + tau * torch.eye(COLUMN_COUNT, dtype=F64), DATA_MOMENT)
    return mean, 1 / (DATA_PRECISION.diagonal() + tau)


def bound(log_tau: float) -> float:
    """Return the highest ELBO of a factorised q(w) at this precision, up to a constant."""
    tau, (mean, variance) = math.exp(log_tau), optimum(math.exp(log_tau))
    fit = -0.5 * ((Y - X @ mean).square().sum() / NOISE_SD**2 + (DATA_PRECISION.diagonal() * variance).sum())
    prior = 0.5 * COLUMN_COUNT * log_tau - 0.5 * tau * (mean.square() + variance).sum()
    return float(fit + prior + 0.5 * variance.log().sum())


def test_empirical_precisions_converge_to_the_maximum_of_the_bound() -> None:
    """Alternating between q and tau = n / sum E[w^2] never decreases the bound and converges to scipy's maximum."""
    prior = line(Hierarchical(rate=0.0, infer="empirical")).prior
    tau, values = float(prior.precision[0]), []
    for _ in range(400):
        values.append(bound(math.log(tau)))
        settled = prior.with_empirical_precisions(*optimum(tau))
        tau = float(settled.precision[0])
    assert all(later >= earlier - 1e-10 for earlier, later in itertools.pairwise(values))
    assert tau == pytest.approx(math.exp(best(bound)), rel=1e-6)


def test_the_gradient_at_the_settled_precision_is_that_of_the_bound_maximised_over_it() -> None:
    """No gradient flows through tau, and none is needed: at a maximum over tau the derivative is zero."""
    prior = line(Hierarchical(2.0, 0.3, "empirical")).prior
    loc, log_scale = normal(COLUMN_COUNT, seed=6).requires_grad_(), normal(COLUMN_COUNT, seed=7).requires_grad_()
    family = DiagonalFamily(loc, log_scale)
    square = (loc.square() + (2 * log_scale).exp()).sum()
    profile = (2.0 - 1 + COLUMN_COUNT / 2) * (0.3 + 0.5 * square).log()
    expected = torch.autograd.grad(profile, [loc, log_scale])
    cross = family.cross_entropy(prior.with_empirical_precisions(loc, family.scale.square()))
    for found, wanted in zip(torch.autograd.grad(cross, [loc, log_scale]), expected, strict=True):
        torch.testing.assert_close(found, wanted, **EXACT_TOLERANCE)


def coordinate_ascent(shape: float, rate: float) -> tuple[Tensor, Tensor, float]:
    """Return the fixed point of q(w) q(tau): means and variances of the weights, and E[tau]."""
    tau = shape / rate
    for _ in range(2_000):
        mean, variance = optimum(tau)
        tau = (shape + COLUMN_COUNT / 2) / (rate + 0.5 * float((mean.square() + variance).sum()))
    return mean, variance, tau


@pytest.fixture(scope="module")
def fitted() -> pr.posteriors.Posterior:
    method = pr.MeanField(samples=512, learning_rate=0.1)
    return pr.fit(line(Hierarchical(2.0, 0.3)), (X, Y), method, steps=800, batch_size=ROW_COUNT, progress=False)


def test_the_gradient_of_the_bound_is_zero_on_average_at_the_fixed_point_of_coordinate_ascent() -> None:
    """With g at w = m + s eps, E[g] = 0 and E[g s eps] = -1; five standard errors, 42 entries (false alarms: 3e-5)."""
    mean, variance, tau = coordinate_ascent(2.0, 0.3)
    spread = (2.0 + COLUMN_COUNT / 2) ** -0.5  # standard deviation of log tau
    loc = torch.cat([mean, torch.tensor([math.log(tau) - 0.5 * spread**2], dtype=F64)])
    scale = torch.cat([variance.sqrt(), torch.tensor([spread], dtype=F64)])
    model = line(Hierarchical(2.0, 0.3))
    target = make_target(model, Data.of((X, Y)).prepared(model.prepare), 1.0, "likelihood")
    noise = normal(20_000, COLUMN_COUNT + 1, seed=9)
    _, gradient = target.log_joint_and_grad(loc + scale * noise, model.prepare((X, Y)))
    assert_mean_close(gradient, torch.zeros(COLUMN_COUNT + 1), sigmas=5)
    assert_mean_close(gradient * scale * noise, -torch.ones(COLUMN_COUNT + 1), sigmas=5)


def test_mean_field_reaches_the_fixed_point_of_coordinate_ascent(fitted: Any) -> None:
    """Within 2 percent of a standard deviation in the weights, 3 percent of their spread, 1 percent of E[tau]."""
    mean, variance, tau = coordinate_ascent(2.0, 0.3)
    loc, scale = fitted.family.loc, fitted.family.scale
    assert float(((loc[:-1] - mean) / variance.sqrt()).abs().max()) < 0.02
    assert float((scale[:-1] / variance.sqrt() - 1).abs().max()) < 0.03
    assert float(fitted.mean["prior.weight.precision"]) == pytest.approx(tau, rel=0.01)
    assert float(scale[-1]) == pytest.approx((2.0 + COLUMN_COUNT / 2) ** -0.5, rel=0.03)


def test_the_posterior_of_the_precision_is_close_to_the_exact_one(fitted: Any) -> None:
    """p(tau | D) by quadrature over one dimension; a factorised q is narrower, here by less than a third."""

    def log_joint(u: float) -> float:
        tau = math.exp(u)
        covariance = NOISE_SD**2 * torch.eye(ROW_COUNT, dtype=F64) + X @ X.T / tau
        marginal = distributions.MultivariateNormal(torch.zeros(ROW_COUNT, dtype=F64), covariance).log_prob(Y)
        return float(marginal) + 2.0 * u - 0.3 * tau

    grid = torch.linspace(math.log(TRUE_PRECISION) - 3, math.log(TRUE_PRECISION) + 3, 241, dtype=F64)
    weights = torch.tensor([log_joint(float(u)) for u in grid]).softmax(0)
    mean = float((weights * grid).sum())
    spread = float((weights * (grid - mean).square()).sum().sqrt())
    loc, scale = float(fitted.family.loc[-1]), float(fitted.family.scale[-1])
    assert abs(loc - mean) < 0.3 * spread
    assert 2 / 3 < scale / spread < 1


def test_draws_and_means_hold_the_precision_by_its_name(fitted: Any) -> None:
    draws = fitted.sample(5, seed=0)["prior.weight.precision"]
    assert draws.shape == (5,)
    assert bool((draws > 0).all())
    assert fitted.mean["prior.weight.precision"].shape == ()
    assert fitted.predict(X[:3]).mean.shape == (3,)


class TwoInputGroups(nn.Module):
    """One layer for the relevant inputs, and a wide one for the irrelevant inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted, self.unwanted = nn.Linear(5, 10), nn.Linear(40, 10, bias=False)
        self.top = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.tanh(self.wanted(x[:, :5]) + self.unwanted(x[:, 5:])))


def test_irrelevant_inputs_get_a_higher_precision_in_an_overparametrised_network() -> None:
    torch.manual_seed(0)
    x = normal(150, 45)
    y = torch.sin(x[:, 0]) + x[:, 1] - 0.5 * x[:, 2] + 0.1 * normal(150, seed=1)
    model = pr.Model(TwoInputGroups().double(), pr.Gaussian(0.1), {"*wanted.weight": Hierarchical(), "*": 1.0})
    method = pr.MeanField(learning_rate=0.03)
    posterior = pr.fit(model, (x, y), method, steps=1_000, batch_size=150, progress=False)
    wanted, unwanted = (posterior.mean[f"prior.{name}.weight.precision"] for name in ("wanted", "unwanted"))
    assert unwanted > 10 * wanted
    assert 0.5 < wanted < 50


# Files and checkpoints.


def problem() -> tuple[pr.Model, tuple[Tensor, Tensor]]:
    """Return a model with a learnt precision per layer, and 22 rows."""
    model = model_with({"*.weight": Hierarchical(2.0, 0.3), "*": 1.0}, pr.Gaussian())
    return model, (normal(22, 3), normal(22, seed=1))


def short() -> Any:
    model, data = problem()
    return model, pr.fit(model, data, pr.MeanField(), steps=30, batch_size=8, progress=False)


def test_a_stored_posterior_restores_the_precisions_and_requires_a_hierarchical_model(tmp_path: Path) -> None:
    model, posterior = short()
    posterior.save(tmp_path / "p.priory")
    again = pr.load(tmp_path / "p.priory", model)
    for name in PRECISION_NAMES:
        assert torch.equal(again.mean[name], posterior.mean[name])
    with pytest.raises(
        pr.StoreError, match=r"'prior\.0\.weight\.precision' has the shape \(\) there and no place here"
    ):
        pr.load(tmp_path / "p.priory", model_with("glorot", pr.Gaussian()))
    other = model_with({"*.weight": Hierarchical(2.0, 0.4), "*": 1.0}, pr.Gaussian())
    with pytest.warns(pr.PrioryWarning, match="another prior"):
        pr.load(tmp_path / "p.priory", other)


def test_an_interrupted_fit_resumes_with_the_same_bits() -> None:
    resumes_with_the_same_bits(pr.MeanField(), problem)
