"""Densities against scipy, mpmath and their own integrals; draws against moments; all of them as priors."""

import math

import mpmath
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Laplace, MixtureSameFamily, Normal

import priory as pr
from priory.core.loaders import swapped
from priory.distributions import (
    GeneralisedGaussian,
    GroupLasso,
    Horseshoe,
    Logistic,
    LogUniform,
    ScaleMixture,
    SpikeAndSlab,
)
from priory.testing import assert_mean_close


def double(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def draws(d: Distribution, n: int, reparameterised: bool = False) -> Tensor:
    with swapped(torch.Generator().manual_seed(0)):
        return d.rsample((n,)) if reparameterised else d.sample((n,))


ON_THE_LINE = {
    "logistic": Logistic(double(0.3), double(0.7)),
    "generalised Gaussian 0.6": GeneralisedGaussian(double(0.5), double(0.6)),
    "generalised Gaussian 3": GeneralisedGaussian(double(1.5), double(3.0)),
    "scale mixture": ScaleMixture(double(0.25), double(1.0), double(0.05)),
    "horseshoe": Horseshoe(double(0.8)),
}
X = double([-30.0, -1.3, -0.2, -1e-3, 0.01, 0.3, 0.9, 4.0])


@pytest.mark.parametrize("name", ON_THE_LINE)
def test_a_density_integrates_to_one(name: str) -> None:
    d = ON_THE_LINE[name]

    def density(v: float) -> float:  # x = +-e^v, which takes poles and tails
        x = double([math.exp(v), -math.exp(v)])
        return float(d.log_prob(x).exp().sum()) * math.exp(v)

    pieces = [(-100.0, -10.0), (-10.0, -2.0), (-2.0, 1.0), (1.0, 6.0), (6.0, 40.0)]
    total = sum(integrate.quad(density, a, b, epsabs=1e-13, limit=200)[0] for a, b in pieces)
    assert total == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("logistic", stats.logistic(0.3, 0.7)),
        ("generalised Gaussian 0.6", stats.gennorm(0.6, scale=0.5)),
        ("generalised Gaussian 3", stats.gennorm(3.0, scale=1.5)),
    ],
)
def test_density_cdf_moments_and_entropy_agree_with_scipy(name: str, theirs: object) -> None:
    d = ON_THE_LINE[name]
    for found, expected in (
        (d.log_prob(X), theirs.logpdf(X.numpy())),
        (d.cdf(X), theirs.cdf(X.numpy())),
        (d.mean, theirs.mean()),
        (d.variance, theirs.var()),
        (d.entropy(), theirs.entropy()),
    ):
        torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_the_logistic_icdf_inverts_its_cdf() -> None:
    d, u = Logistic(double(0.3), double(0.7)), double([1e-9, 0.2, 0.5, 0.99])
    torch.testing.assert_close(d.cdf(d.icdf(u)), u, rtol=1e-12, atol=0)
    assert d.icdf(double(0.5)).item() == 0.3


def test_the_horseshoe_is_a_normal_with_a_half_cauchy_scale() -> None:
    d = Horseshoe(double(0.8))
    for x in (1e-4, 0.3, 2.0, 50.0):
        with mpmath.workdps(25):
            given = lambda t, x=x: mpmath.npdf(x, 0, 0.8 * t) * 2 / mpmath.pi / (1 + t * t)  # noqa: E731
            expected = mpmath.quad(given, [0, x / 8, x / 2, x, 2 * x, 10 * x, 100 * x + 1, 1e4 * x + 1e4, mpmath.inf])
        assert d.log_prob(double(x)).item() == pytest.approx(float(mpmath.log(expected)), abs=1e-10)


def test_the_scale_mixture_agrees_with_torchs_mixture_of_two_normals() -> None:
    d = ON_THE_LINE["scale mixture"]
    parts = Normal(double([0.0, 0.0]), double([1.0, 0.05]))
    same = MixtureSameFamily(Categorical(double([0.25, 0.75])), parts)
    torch.testing.assert_close(d.log_prob(X), same.log_prob(X), rtol=1e-12, atol=0)
    torch.testing.assert_close(d.cdf(X), same.cdf(X), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(d.variance, same.variance)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_group_lassos_density_integrates_to_one(n: int) -> None:
    d = GroupLasso(double(1.7), n)
    surface = 2 * math.pi ** (n / 2) / math.gamma(n / 2)

    def radial(r: float) -> float:
        w = torch.zeros(n, dtype=torch.float64)
        w[0] = r
        return float(d.log_prob(w).exp()) * surface * r ** (n - 1)

    assert integrate.quad(radial, 0, 60, epsabs=1e-13, limit=200)[0] == pytest.approx(1, abs=1e-10)


def test_a_group_of_one_is_a_laplace_distribution() -> None:
    d, same = GroupLasso(double(1.7), 1), Laplace(double(0.0), double(1 / 1.7))
    torch.testing.assert_close(d.log_prob(X.unsqueeze(-1)), same.log_prob(X), rtol=1e-12, atol=0)
    torch.testing.assert_close(d.entropy(), same.entropy())


@pytest.mark.parametrize("name", [n for n in ON_THE_LINE if n != "horseshoe"])
def test_draws_have_the_stated_mean_and_variance(name: str) -> None:
    d = ON_THE_LINE[name]
    x = draws(d, 20_000)
    # 5 standard errors: false-alarm rate 5.7e-7 each
    assert_mean_close(x, d.mean)
    assert_mean_close((x - d.mean).square(), d.variance)


def test_draws_of_the_horseshoe_agree_with_its_density() -> None:
    d = Horseshoe(double(0.8))
    inside = draws(d, 20_000).abs() < 1
    density = lambda v: 2 * float(d.log_prob(double(math.exp(v))).exp()) * math.exp(v)  # noqa: E731
    expected = integrate.quad(density, -60, 0, limit=200)[0]
    assert_mean_close(inside.double(), expected)  # 5 standard errors: false-alarm rate 5.7e-7
    assert math.isnan(d.mean.item())
    assert d.variance.item() == math.inf


def test_draws_of_a_group_have_the_stated_norm_and_variance() -> None:
    d = GroupLasso(double([1.0, 3.0]), 4)
    x = draws(d, 20_000)
    assert x.shape == (20_000, 2, 4)
    assert d.mean.shape == d.variance.shape == (2, 4)
    # 5 standard errors, 18 comparisons: false-alarm rate 1e-5
    assert_mean_close(x, 0.0)
    assert_mean_close(x.square(), d.variance)
    assert_mean_close(x.norm(dim=-1), 4 / d.rate)


def test_the_gradient_of_a_draw_moves_it_along_its_own_quantile() -> None:
    # at a fixed level of the distribution function, dx/da = -(dF/da) / p
    scale, power = double(0.9).requires_grad_(), double(1.4).requires_grad_()
    x = draws(GeneralisedGaussian(scale, power), 50, reparameterised=True)
    for i in range(0, 50, 7):
        gradients = torch.autograd.grad(x[i], (scale, power), retain_graph=True)
        at, h = x[i].item(), 1e-5
        cdf = lambda a, p, at=at: stats.gennorm(p, scale=a).cdf(at)  # noqa: E731
        density = stats.gennorm(1.4, scale=0.9).pdf(at)
        expected = [
            -(cdf(0.9 + h, 1.4) - cdf(0.9 - h, 1.4)) / (2 * h) / density,
            -(cdf(0.9, 1.4 + h) - cdf(0.9, 1.4 - h)) / (2 * h) / density,
        ]
        assert [g.item() for g in gradients] == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("d", [Logistic(1.0, 2.0), Horseshoe(2.0), GroupLasso(0.5, 3)], ids=lambda d: type(d).__name__)
def test_a_scale_multiplies_the_draws(d: Distribution) -> None:
    name = "rate" if isinstance(d, GroupLasso) else "scale"
    scale = getattr(d, name).clone().requires_grad_()
    rest = {k: v for k, v in vars(d).items() if k in d.arg_constraints and k != name}
    x = draws(type(d)(**{name: scale}, **rest), 20, reparameterised=True)
    (gradient,) = torch.autograd.grad(x.sum(), scale)
    noise = (x - (1.0 if isinstance(d, Logistic) else 0.0)).sum().item()
    sign = -1 if name == "rate" else 1
    torch.testing.assert_close(gradient.item(), sign * noise / scale.item(), rtol=1e-4, atol=1e-4)


def test_spike_and_slab_has_an_atom_at_zero() -> None:
    d = SpikeAndSlab(double(0.3), Normal(double(1.0), double(2.0)))
    x = draws(d, 20_000)
    # 5 standard errors: false-alarm rate 5.7e-7 each
    assert_mean_close((x == 0).double(), 0.7)
    assert_mean_close(x, d.mean)
    assert_mean_close((x - d.mean).square(), d.variance)
    assert d.log_prob(double(0.0)).item() == pytest.approx(math.log(0.7))
    expected = math.log(0.3) + Normal(1.0, 2.0).log_prob(torch.tensor(0.5)).item()
    assert d.log_prob(double(0.5)).item() == pytest.approx(expected)


def test_the_log_uniform_is_improper_and_cannot_be_sampled() -> None:
    d = LogUniform()
    assert d.improper
    torch.testing.assert_close(d.log_prob(X), -X.abs().log())
    for ask in (lambda: d.sample(), lambda: d.rsample((3,)), lambda: d.mean, lambda: d.variance):
        with pytest.raises(NotImplementedError, match="improper"):
            ask()


@pytest.mark.parametrize("name", ON_THE_LINE)
def test_log_prob_works_with_vmap_and_grad(name: str) -> None:
    d = ON_THE_LINE[name]
    plain = type(d)(**{k: v for k, v in vars(d).items() if k in d.arg_constraints}, validate_args=False)
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(d.log_prob(x).sum(), x)
    h = 1e-6 * X.abs()
    differences = (d.log_prob(X + h) - d.log_prob(X - h)) / (2 * h)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(plain.log_prob))(X), expected)
    torch.testing.assert_close(expected, differences, rtol=1e-5, atol=1e-7)


def test_gradients_at_zero_are_finite() -> None:
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for d in (*ON_THE_LINE.values(), GroupLasso(double(1.0), 3)):
        (gradient,) = torch.autograd.grad(d.log_prob(zero).sum(), zero)
        assert bool(gradient.isfinite().all()), d


def test_parameters_broadcast_and_expand() -> None:
    d = ScaleMixture(0.5, torch.ones(3), torch.full((2, 1), 0.1))
    assert d.batch_shape == (2, 3)
    assert d.sample((4,)).shape == (4, 2, 3)
    for one in (Logistic(0.0, 1.0), GeneralisedGaussian(1.0, 1.5), Horseshoe(1.0), LogUniform(), GroupLasso(1.0, 3)):
        wide = one.expand((5, 2))
        assert wide.batch_shape == (5, 2)
        assert wide.event_shape == one.event_shape
        value = torch.randn(5, 2, *one.event_shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(wide.log_prob(value), one.log_prob(value))
    spiked = SpikeAndSlab(torch.tensor([0.1, 0.9]), Normal(0.0, 1.0)).expand((3, 2))
    assert spiked.sample().shape == spiked.mean.shape == (3, 2)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Logistic(0.0, -1.0),
        lambda: GeneralisedGaussian(1.0, 0.0),
        lambda: GroupLasso(-1.0, 3),
        lambda: ScaleMixture(1.5, 1.0, 0.1),
        lambda: Horseshoe(0.0),
        lambda: SpikeAndSlab(-0.1, Normal(0.0, 1.0)),
        lambda: Logistic(0.0, 1.0).log_prob(torch.tensor(math.nan)),
    ],
)
def test_parameters_and_values_outside_their_range_raise_an_error(build: object) -> None:
    with pytest.raises(ValueError, match=r"constraint|support"):
        build()


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: GroupLasso(1.0, 2.5), "The 'n' argument of GroupLasso must be an integer >= 1, got 2.5."),
        (
            lambda: SpikeAndSlab(0.5, 1.0),
            "The 'slab' argument of SpikeAndSlab must be a torch distribution, got float.",
        ),
        (
            lambda: SpikeAndSlab(0.5, torch.distributions.Gamma(1.0, 1.0)),
            "The 'slab' argument of SpikeAndSlab must be over the",
        ),
    ],
)
def test_invalid_arguments_raise_an_error_that_names_them(build: object, sentence: str) -> None:
    with pytest.raises(pr.InputError, match=sentence):
        build()


PRIORS = {
    "logistic": Logistic(0.0, 0.5),
    "generalised Gaussian": GeneralisedGaussian(1.0, 1.5),
    "group lasso": {"*weight": GroupLasso(2.0, 3), "*": Normal(0.0, 1.0)},
    "log-uniform": LogUniform(),
    "scale mixture": ScaleMixture(0.5, 1.0, 0.1),
    "horseshoe": Horseshoe(0.5),
    "spike and slab": SpikeAndSlab(0.5, Normal(0.0, 1.0)),
    "many logistics": Independent(Logistic(torch.zeros(3).double(), torch.ones(3).double()), 1),
}


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_distribution_can_be_the_prior_of_a_model(name: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    net = nn.Linear(3, 1).to(dtype)
    for i, parameter in enumerate(net.parameters()):
        parameter.data = (
            torch.tensor([0.3, -0.2, 0.7]).to(dtype).reshape(1, 3) if i == 0 else torch.tensor([0.1]).to(dtype)
        )
    if name == "many logistics":
        net.bias = None
    model = pr.Model(net, pr.Gaussian(noise=1.0), prior=PRIORS[name])
    data = (torch.randn(8, 3, generator=g).to(dtype), torch.randn(8, generator=g).to(dtype))
    posterior = pr.fit(model, data, pr.MeanField(), steps=3, progress=False)
    assert bool(posterior.history["elbo"].isfinite().all())
    assert all(t.dtype == dtype for t in posterior.mean.values())
