"""Starts of chains: draws of the prior, and errors about discrete parameters and improper posteriors."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Laplace, LogNormal, MultivariateNormal, Normal, Poisson, StudentT
from torch.distributions import constraints as whole

import priory as pr
from priory import Param, constraints
from priory.core.data import Data
from priory.core.errors import DivergedError, InputError
from priory.core.streams import stream
from priory.methods.mcmc import HMC, MALA, NUTS, RandomWalk
from priory.methods.mcmc.starts import from_prior, side_by_side
from priory.models.target import Target
from priory.testing import assert_mean_close

X, Y = torch.linspace(-1, 1, 8)[:, None].double(), torch.linspace(-2, 1, 8).double()


def drawn(prior: Any, n: int = 4000, likelihood: Any = None) -> tuple[pr.Model, Tensor]:
    model = pr.Model(nn.Linear(1, 2).double(), likelihood or pr.Gaussian(0.3), prior=prior)
    target = Target(model, 8)
    return model, from_prior(target, torch.Size([n]), stream(0, "starts"), "HMC")


def test_draws_of_gaussian_priors_have_their_moments():
    """4 means and 4 mean squares at 5 standard errors: false alarms at 5e-6."""
    _, w = drawn({"weight": Normal(3.0, 2.0), "bias": 0.5})
    weight, bias = w[:, :2], w[:, 2:]
    assert_mean_close(weight, 3.0)
    assert_mean_close((weight - 3).square(), 4.0)
    assert_mean_close(bias, 0.0)
    assert_mean_close(bias.square(), 0.25)


def test_draws_of_other_priors_have_their_moments():
    """E|x| of a Laplace prior is its scale; a joint normal has its covariance. 7 comparisons: false alarms at 4e-6."""
    covariance = torch.tensor([[2.0, 0.6], [0.6, 1.0]]).double()
    _, w = drawn({"weight": Laplace(0.0, 1.5), "bias": MultivariateNormal(torch.zeros(2).double(), covariance)})
    assert_mean_close(w[:, :2].abs(), 1.5)
    assert_mean_close(w[:, :2].sign(), 0.0)
    bias = w[:, 2:]
    assert_mean_close(bias[:, :, None] * bias[:, None, :], covariance)


def test_learnt_noise_is_drawn_from_its_prior():
    """If u = log noise follows its prior density p, E[d log p / du] = 0; checked at 5 standard errors."""
    model, w = drawn(1.0, likelihood=pr.Gaussian())
    target = Target(model, 8)
    assert model.layout.names[-1] == "likelihood.noise"
    assert float(w[:, -1].std()) > 0.1
    assert_mean_close(target.log_prior_and_grad(w)[1], 0.0)


def test_a_hierarchical_precision_is_drawn_with_its_weights():
    """With tau ~ Gamma(3, 2): E[tau] = 3/2, E[w^2] = E[1 / tau] = 1 and E[tau w^2] = 1; false alarms at 4e-6."""
    model, w = drawn({"weight": pr.priors.Hierarchical(shape=3.0, rate=2.0), "bias": 1.0}, 20_000)
    values = model.layout.constrain(w)
    tau, weight = values["prior.weight.precision"], values["weight"].squeeze(-1)
    assert_mean_close(tau, 1.5)
    assert_mean_close(tau[:, None] * weight.square(), 1.0)
    assert_mean_close(weight.square(), 1.0)


def test_drawing_from_the_prior_leaves_the_global_generator_unchanged():
    target = Target(pr.Model(nn.Linear(1, 2), pr.Gaussian(0.3), prior=StudentT(4.0)), 8)
    before = torch.get_rng_state()
    first, second = (from_prior(target, torch.Size([5]), stream(0, "starts"), "HMC") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)


@pytest.mark.parametrize("method", [HMC, NUTS, MALA, RandomWalk])
def test_chains_start_at_draws_of_the_prior(method):
    model = pr.Model(nn.Linear(1, 2).double(), pr.Gaussian(0.3), prior=Normal(100.0, 1e-3))
    target, data = Target(model, 8), Data.of((X, Y[:, None].expand(-1, 2)))
    sampler = method(chains=8, start="prior")
    state = sampler.init(target, sampler.plan(target, data, 1, 0), stream(0, "starts"))
    assert bool(((state.w - 100).abs() < 0.01).all())


def test_a_fit_may_start_at_the_prior(monkeypatch):
    """From N(5, 1/4) to the conjugate posterior. 2 + 2 + 2 comparisons of 64 chains at 5 standard errors: false alarms
    at 4e-6.
    """
    begun, init = [], HMC.init

    def watched(self, *args, **options):
        state = init(self, *args, **options)
        begun.append(state.w.clone())
        return state

    monkeypatch.setattr(HMC, "init", watched)
    model = pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.3), prior=Normal(5.0, 0.5))
    posterior: Any = pr.fit(model, (X, Y), HMC(chains=64, warmup=60, start="prior"), steps=20, progress=False)
    assert posterior.w.shape == (64, 20, 2)
    (start,) = begun
    assert_mean_close(start, 5.0)
    assert_mean_close((start - 5).square(), 0.25)
    design = torch.cat([X, torch.ones_like(X)], 1)
    precision = design.mT @ design / 0.3**2 + 4 * torch.eye(2).double()
    assert_mean_close(posterior.w.mean(1), torch.linalg.solve(precision, design.mT @ Y / 0.3**2 + 4 * 5.0))


def scaled_density(log_prior: Any) -> pr.Density:
    params = {"s": Param((), constraints.positive), "x": Param((2,))}
    return pr.Density(
        params=params, log_prior=log_prior, log_likelihood=lambda p, batch: Normal(p["x"].sum(), 1.0).log_prob(batch[0])
    )


@pytest.mark.parametrize("form", ["distributions", "function"])
def test_chains_of_a_density_start_at_draws_of_its_prior(form):
    """log s ~ N(3, 0.1^2), x ~ N(50, s): three means of 256 chains at 5 standard errors, false alarms at 2e-6 each."""
    by_name = {"s": LogNormal(3.0, 0.1), "x": lambda p: Normal(50.0, p["s"]).expand((2,))}
    whole = lambda p: LogNormal(3.0, 0.1).log_prob(p["s"]) + Normal(50.0, p["s"]).log_prob(p["x"]).sum()  # noqa: E731
    density = scaled_density(by_name if form == "distributions" else whole)
    target, data = Target(density, 4), Data.of(torch.zeros(4, dtype=torch.float64))
    sampler = HMC(chains=256, start="prior")
    state = sampler.init(target, sampler.plan(target, data, 1, 0), stream(0, "starts"))
    assert state.w.shape == (256, 3)
    assert_mean_close(state.w[:, 0], 3.0)
    assert_mean_close(state.w[:, 1:], 50.0)
    assert_mean_close(((state.w[:, 1:] - 50) / state.w[:, :1].exp()).square(), 1.0)


def test_a_density_without_a_separate_prior_has_no_draws_of_it():
    density = pr.Density(lambda p: -p["w"].square(), {"w": Param()})
    with pytest.raises(InputError, match="'start' argument of HMC must be a method or a posterior for a model without"):
        pr.fit(density, None, HMC(start="prior"), progress=False)


def test_chains_of_a_deep_network_start_at_an_ensemble_of_modes():
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    deep = pr.Model(net, pr.Gaussian(0.3), prior=1.0)
    shallow = pr.Model(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double(), pr.Gaussian(0.3))
    assert NUTS().default_start(shallow) is None
    assert NUTS(warmup=0).default_start(deep) is None
    assert HMC().default_start(deep) == pr.Ensemble(pr.MAP(), size=8)
    posterior: Any = pr.fit(deep, (X, Y), HMC(chains=16, warmup=2, trajectory=0.5), steps=2, progress=False)
    assert "start=Ensemble(" in posterior.method


def test_chains_that_start_at_the_same_member_are_neighbours():
    members = torch.arange(4.0)[:, None]
    w = members[torch.arange(12) % 4]
    assert side_by_side(w, 4)[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert side_by_side(w, 5) is w


def test_a_flat_prior_cannot_be_drawn_from():
    with pytest.raises(InputError, match=r"'start' argument of HMC must be 'prior' only where .*proper.*'bias'"):
        drawn({"weight": 1.0, "bias": "flat"})


def test_a_prior_without_draws_is_refused():
    with pytest.raises(
        InputError,
        match=r"'start' argument of HMC must be 'prior' only where .*drawn "
        r"from.*LogUniform",
    ):
        drawn({"weight": pr.distributions.LogUniform(), "bias": 1.0})


@pytest.mark.parametrize("start", ["posterior", {"w": 0.0}])
def test_another_name_for_a_start_is_refused(start):
    with pytest.raises(InputError, match="The 'start' argument of NUTS must be 'prior', a method or a posterior"):
        NUTS(start=start)


# Discrete parameters.


@pytest.mark.parametrize(
    "support",
    [whole.boolean, whole.nonnegative_integer, whole.integer_interval(0, 3), whole.one_hot],
    ids=str,
)
def test_a_discrete_support_is_refused(support):
    with pytest.raises(InputError, match="The 'support' argument of Param must be continuous"):
        Param((3,), support)


@pytest.mark.parametrize(
    ("distribution", "has"),
    [(Poisson(3.0), "integers"), (Bernoulli(0.3), "zero and one")],
    ids=["Poisson", "coin"],
)
def test_a_parameter_with_a_discrete_distribution_is_refused(distribution, has):
    """Both have a finite log density at zero, which is tried first."""
    density = pr.Density(lambda p: distribution.log_prob(p["k"]) - p["w"].square(), {"w": Param(), "k": Param()})
    with pytest.raises(InputError, match=rf"parameters of NUTS must be continuous, got one that has {has}"):
        pr.fit(density, None, NUTS(chains=4, warmup=4), steps=2, progress=False)


@pytest.mark.parametrize("support", [constraints.real, constraints.interval(0.0, 8.0)], ids=["line", "interval"])
@pytest.mark.parametrize("batched", [False, True])
def test_a_parameter_that_is_rounded_is_refused_by_name(support, batched):
    def log_prob(p: dict[str, Tensor]) -> Tensor:
        return -0.3 * p["k"].floor().square() - 0.5 * (p["w"] - p["k"].round()).square()

    density = pr.Density(log_prob, {"w": Param(), "k": Param((), support)}, batched=batched)
    with pytest.raises(InputError, match=r"parameters of HMC must be continuous, got 'k'"):
        pr.fit(density, None, HMC(chains=8, warmup=4), steps=2, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_parameter_with_a_uniform_prior_is_continuous_in_either_type(dtype, seed):
    """Its density is constant except for the volume element and rounding, which must not look like steps."""
    uniform = Beta(torch.ones((), dtype=dtype), torch.ones((), dtype=dtype))
    density = pr.Density(
        lambda p: -1.65 * p["w"].square().sum() + uniform.log_prob(p["u"]),
        {"w": Param((3,)), "u": Param((), constraints.unit_interval)},
        dtype=dtype,
    )
    target, data, method = Target(density, None), Data.of(None), HMC(chains=8)
    state = method.init(target, method.plan(target, data, 1, 0), stream(seed, "starts"))
    assert bool(torch.isfinite(state.value).all())


def test_a_parameter_that_is_rounded_is_refused_in_float32_too():
    density = pr.Density(
        lambda p: -0.3 * p["k"].floor().square() - 0.5 * (p["w"] - p["k"].round()).square(),
        {"w": Param(), "k": Param()},
        dtype=torch.float32,
    )
    with pytest.raises(InputError, match=r"parameters of HMC must be continuous, got 'k'"):
        pr.fit(density, None, HMC(chains=8, warmup=4), steps=2, progress=False)


def test_a_random_walk_samples_a_piecewise_constant_density():
    """Densities 1 and 3 on the two halves of (0, 1): P(upper half) = 3/4, at 5 standard errors over chains."""
    density = pr.Density(
        lambda p: torch.where(p["u"] < 0.5, 0.0, math.log(3.0)),
        {"u": Param((), constraints.unit_interval)},
        batched=True,
    )
    posterior: Any = pr.fit(density, None, RandomWalk(chains=64, warmup=100), steps=100, progress=False)
    assert_mean_close((posterior.draws["u"] > 0.5).double().mean(1), 0.75)


# Improper posteriors.

SAMPLERS = [HMC, NUTS, MALA, RandomWalk]
IMPROPER = {
    "constant": (lambda w: 0 * w, constraints.real),
    "rising": (lambda w: w, constraints.real),
    "falling": (lambda w: -w, constraints.real),
    "square": (lambda w: w.square(), constraints.real),
    "tail of |w|^-1/2": (lambda w: -0.5 * torch.log1p(w.abs()), constraints.real),
    "tail of 1 / |w|": (lambda w: -0.5 * torch.log1p(w.square()), constraints.real),
    "one tail": (lambda w: torch.where(w > 0, -0.5 * torch.log1p(w.abs()), -0.5 * w.square()), constraints.real),
    "constant on a half-line": (lambda w: 0 * w, constraints.positive),
    "1 / w on a half-line": (lambda w: -w.log(), constraints.positive),
    "1 / (1 + w) on a half-line": (lambda w: -torch.log1p(w), constraints.positive),
    "1 / w on an interval": (lambda w: -w.log(), constraints.unit_interval),
}
PROPER = {
    "Cauchy": (lambda w: -torch.log1p(w.square()), constraints.real),
    "Student-t of 2": (lambda w: -1.5 * torch.log1p(w.square() / 2), constraints.real),
    "tail of |w|^-1.01": (lambda w: -1.01 * torch.log1p(w.abs()), constraints.real),
    "Cauchy far from the starts": (lambda w: -torch.log1p((w - 1e6).square()), constraints.real),
    "wide normal": (lambda w: -0.5 * (w / 1e6).square(), constraints.real),
    "half-Cauchy": (lambda w: -torch.log1p(w.square()), constraints.positive),
    "1 / (w log^2 w) on a half-line": (lambda w: -w.log() - torch.log1p(w.log().square()), constraints.positive),
    "Gamma of 0.001": (lambda w: -0.999 * w.log() - 0.001 * w, constraints.positive),
    "uniform": (lambda w: 0 * w, constraints.unit_interval),
}


def on_a_line(case: tuple[Any, Any], **options: Any) -> pr.Density:
    log_prob, support = case
    return pr.Density(lambda p: log_prob(p["w"]), {"w": Param((), support)}, batched=True, **options)


@pytest.mark.parametrize("warmup", [None, 60])
@pytest.mark.parametrize("method", SAMPLERS)
@pytest.mark.parametrize("case", IMPROPER.values(), ids=IMPROPER.keys())
def test_an_improper_posterior_is_refused_before_the_first_draw(case, method, warmup):
    with pytest.raises(DivergedError, match=rf"that {method.__name__} is to draw from seems to be improper in 'w'"):
        pr.fit(on_a_line(case), None, method(warmup=warmup), progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", IMPROPER.values(), ids=IMPROPER.keys())
def test_an_improper_posterior_is_refused_in_either_type(case, dtype):
    with pytest.raises(DivergedError, match="seems to be improper in 'w'"):
        pr.fit(on_a_line(case, dtype=dtype), None, HMC(chains=1, warmup=0), steps=1, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", PROPER.values(), ids=PROPER.keys())
def test_a_proper_posterior_is_not_refused_however_heavy_its_tails(case, dtype):
    target, data = Target(on_a_line(case, dtype=dtype), None), Data.of(None)
    for sampler in (method(chains=32) for method in SAMPLERS):
        sampler.init(target, sampler.plan(target, data, 1, 0), stream(0, "starts"))


@pytest.mark.parametrize("method", [HMC(warmup=60), NUTS(warmup=60, max_depth=5), MALA(), RandomWalk()], ids=repr)
@pytest.mark.parametrize("name", ["Cauchy", "Student-t of 2"])
def test_draws_of_heavy_tailed_densities_have_their_quartiles(name, method):
    """P(|x| < 1) = 1/2 for a Cauchy, and P(|t| < sqrt(2 / 3)) = 1/2 for a t with two degrees of freedom.

    The fractions of the 64 chains are independent; 8 comparisons at 5 standard errors, false alarms at 5e-6.
    """
    method = replace(method, chains=64)
    posterior: Any = pr.fit(on_a_line(PROPER[name]), None, method, steps=100, progress=False)
    half = {"Cauchy": 1.0, "Student-t of 2": math.sqrt(2 / 3)}[name]
    assert_mean_close((posterior.w[..., 0].abs() < half).double().mean(1), 0.5)


@pytest.mark.parametrize("chains", [1, 4, 64])
def test_the_error_names_the_improper_coordinate(chains):
    """With more and with fewer chains than coordinates."""
    bound = torch.tensor([1, 1, 1, 1, 0, 1, 1])
    density = pr.Density(
        lambda p: -0.5 * (p["a"].square().sum(-1) + (bound * p["b"]).square().sum(-1)),
        {"a": Param((3,)), "b": Param((7,))},
        batched=True,
    )
    with pytest.raises(DivergedError, match=r"improper in 'b\[4\]': .* is -\d.* at 1e\+10 and -\d.* at 1e\+12\. Give"):
        pr.fit(density, None, HMC(chains=chains, warmup=0), steps=1, progress=False)


def test_a_scale_with_an_improper_prior_is_refused():
    """In a hierarchy of standard normals the likelihood is finite at tau = 0, so 1 / tau can't be its prior."""
    y = torch.tensor([1.0, -0.5, 2.0]).double()

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        return -0.5 * (p["z"].square() + (y - p["tau"] * p["z"]).square()).sum() - p["tau"].log()

    density = pr.Density(log_prob, {"z": Param((3,)), "tau": Param((), constraints.positive)})
    with pytest.raises(DivergedError, match="improper in 'tau'"):
        pr.fit(density, None, NUTS(chains=8, warmup=0), steps=1, progress=False)


def test_a_tail_that_is_flat_by_rounding_is_not_refused():
    """log(probability) underflows at -708 and looks flat beyond."""
    density = pr.Density(
        lambda p: (p["w"].sigmoid() + 1e-300).log() + ((-p["w"]).sigmoid() + 1e-300).log(), {"w": Param()}, batched=True
    )
    posterior: Any = pr.fit(density, None, HMC(chains=32, warmup=60), steps=50, progress=False)
    assert_mean_close(posterior.w.mean(1), 0.0)  # of the logistic distribution; one comparison, false alarms at 6e-7


def test_a_density_that_raises_far_out_is_not_refused():
    """A matrix that is positive definite only for |w| < 1e9 has no Cholesky factor beyond."""

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        one = torch.ones_like(p["w"])
        matrix = torch.stack([torch.stack([one, p["w"] / 1e9], -1), torch.stack([p["w"] / 1e9, one], -1)], -2)
        return torch.linalg.cholesky(matrix)[..., 0, 0] - 0.5 * p["w"].square()

    density = pr.Density(log_prob, {"w": Param()}, batched=True)
    pr.fit(density, None, HMC(chains=4, warmup=0), steps=1, progress=False)


@pytest.mark.parametrize(("value", "got"), [(math.nan, "nan"), (-math.inf, "-inf")])
def test_a_start_without_a_finite_value_is_refused_with_its_parameters(value, got):
    density = pr.Density(lambda p: value + 0 * p["w"].sum() + p["s"], {"w": Param((2,)), "s": Param()})
    with pytest.raises(InputError, match=rf"be finite at the start .*'w': .*'s': .*{got}"):
        pr.fit(density, None, NUTS(), progress=False)


def zero_at_origin():
    """A proper density that is zero at the origin: w^2 exp(-w^2 / 2), whose modes are at w^2 = 2."""
    return pr.Density(lambda p: (2 * p["w"].abs().log() - 0.5 * p["w"] ** 2).sum(), {"w": Param((2,))})


def test_a_density_that_is_zero_at_the_origin_is_fitted_and_sampled():
    mode = pr.fit(zero_at_origin(), None, pr.MAP(learning_rate=0.05), steps=600, progress=False).mean["w"]
    assert torch.allclose(mode.square(), torch.full((2,), 2.0, dtype=mode.dtype), atol=1e-6)
    draws = pr.fit(zero_at_origin(), None, pr.RandomWalk(chains=16, warmup=200), steps=400, progress=False).draws["w"]
    assert bool((draws.square().mean((0, 1)) - 3).abs().max() < 0.6)  # four standard errors of 300 draws


def test_a_density_that_is_finite_at_some_starts_begins_at_one_of_them():
    beyond = pr.Density(lambda p: torch.where(p["w"] > 1, -p["w"], -math.inf).sum(), {"w": Param()})
    beyond.check(())
    start = beyond.start(None, torch.Size(), torch.Generator())
    assert float(start) > 1
    assert (
        float(zero_at_origin().start(None, torch.Size(), torch.Generator()).abs().sum()) == 0
    )  # the start hasn't been searched yet


def test_a_density_without_a_number_at_any_start_is_refused_where_it_was_tried():
    density = pr.Density(lambda p: -math.inf + 0 * p["w"].sum(), {"w": Param((2,))})
    with pytest.raises(InputError, match=r"be finite at the start \{'w': \[0.0, 0.0\]\}, got \[-inf\]"):
        pr.fit(density, None, NUTS(), progress=False)


@pytest.mark.filterwarnings("ignore:.*transitions of .* diverged")
def test_a_density_without_a_number_at_some_starts_is_drawn_from():
    """w^2 exp(-w) on a half-line that was not declared: Gamma(3, 1), of mean 3; 64 chains at 5 standard errors."""
    density = pr.Density(lambda p: 2 * p["w"].log() - p["w"], {"w": Param()}, batched=True)
    posterior: Any = pr.fit(density, None, NUTS(chains=64, warmup=60), steps=100, progress=False)
    assert_mean_close(posterior.w.mean(1), 3.0)
