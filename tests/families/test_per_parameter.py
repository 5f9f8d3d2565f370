"""A torch distribution for each parameter, over its own support: densities, draws, starts and refusals."""

import math

import pytest
import torch
from torch.distributions import Beta, Dirichlet, Gamma, Independent, LogNormal, MultivariateNormal, constraints
from torch.testing import assert_close

from priory.core.errors import InputError
from priory.core.flat import Layout, Param
from priory.core.streams import stream
from priory.families import DiagonalFamily, FullRankFamily, PerParameterForm
from priory.testing import assert_covariance_close, assert_mean_close

F64 = torch.float64
LAYOUT = Layout(
    {
        "p": Param((2,), constraints.unit_interval),
        "rate": Param((), constraints.positive),
        "weights": Param((3,), constraints.simplex),
        "m": Param((2,)),
        "noise": Param((2, 2), constraints.positive),
    }
)
FORM = PerParameterForm({"p": "Beta", "rate": "Gamma", "weights": "Dirichlet", "m": "MultivariateNormal"}, LAYOUT)


def random_theta(*shape, form=FORM, seed=0):
    return 0.5 * torch.randn(*shape, form.length, generator=stream(seed, "theta"), dtype=F64)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_the_density_is_the_product_of_the_distributions_and_the_volume_element(shape):
    q = FORM.family(random_theta(*shape))
    of = q.distributions()
    assert isinstance(of["p"], Beta)
    assert isinstance(of["rate"], Gamma)
    assert isinstance(of["weights"], Dirichlet)
    assert isinstance(of["m"], MultivariateNormal)
    w = torch.randn(5, *shape, LAYOUT.size, generator=stream(1, "points"), dtype=F64)
    x = LAYOUT.constrain(w)
    expected = (
        of["p"].log_prob(x["p"]).sum(-1)
        + of["rate"].log_prob(x["rate"])
        + of["weights"].log_prob(x["weights"])
        + of["m"].log_prob(x["m"])
        + Independent(LogNormal(of["noise"].loc, of["noise"].scale), 1).log_prob(x["noise"].flatten(-2))
        + LAYOUT.log_det(w)
    )
    assert_close(q.log_prob(w), expected, rtol=1e-10, atol=1e-10)


def test_constrained_draws_have_the_moments_of_the_distributions():
    """5 standard errors, 20 comparisons: false-alarm rate 1e-5."""
    q = FORM.family(random_theta(seed=2))
    of, x = q.distributions(), LAYOUT.constrain(q.sample(20_000, stream(0, "draws")))
    for name in ("p", "rate", "weights"):
        assert_mean_close(x[name], of[name].mean)
        assert_mean_close((x[name] - of[name].mean).square(), of[name].variance)
    assert_mean_close(x["m"], of["m"].loc)
    assert_covariance_close(x["m"], of["m"].covariance_matrix)
    assert_mean_close(x["noise"].log().flatten(1), of["noise"].loc)


def test_a_multivariate_normal_over_a_real_vector_is_the_full_rank_gaussian():
    layout = Layout({"m": Param((3,), constraints.real_vector)})
    form = PerParameterForm({"m": "MultivariateNormal"}, layout)
    q = form.family(random_theta(form=form))
    mine = q.distributions()["m"]
    w = torch.randn(5, 3, generator=stream(0, "points"), dtype=F64)
    assert_close(q.log_prob(w), FullRankFamily(mine.loc, mine.scale_tril).log_prob(w), rtol=1e-10, atol=1e-10)


def test_parameters_without_a_class_are_normal_in_unconstrained_coordinates():
    form = PerParameterForm({}, LAYOUT)
    loc = torch.randn(LAYOUT.size, generator=stream(0, "loc"), dtype=F64)
    scale = torch.linspace(0.02, 2, LAYOUT.size, dtype=F64)
    q = form.family(form.initial(loc, scale, stream(0, "start")))
    w = torch.randn(5, LAYOUT.size, generator=stream(1, "points"), dtype=F64)
    assert_close(
        q.log_prob(loc + scale * w), DiagonalFamily(loc, scale.log()).log_prob(loc + scale * w), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("concentration", [1e-3, 1e-2, 1.0, 1e4])
@pytest.mark.parametrize(("name", "support"), [("Beta", constraints.unit_interval), ("Gamma", constraints.positive)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_draws_at_the_ends_of_a_support_stay_finite(name, support, concentration, dtype):
    layout = Layout({"x": Param((), support)})
    form = PerParameterForm({"x": name}, layout)
    theta = torch.full((2,), math.log(concentration), dtype=dtype, requires_grad=True)
    q = form.family(theta)
    w = q.sample(1_000, stream(0, "draws"))
    assert bool(w.isfinite().all())
    assert bool(q.log_prob(w.detach()).isfinite().all())
    if concentration >= 1.0:
        assert bool(torch.autograd.grad(w.mean(), theta)[0].isfinite().all())


@pytest.mark.parametrize("loc", [-200.0, 200.0])
def test_draws_rounded_to_zero_or_infinity_are_moved_inside_the_support(loc):
    form = PerParameterForm({"x": "LogNormal"}, Layout({"x": Param((), constraints.positive)}))
    q = form.family(torch.tensor([loc, 0.0]))  # exp(200) and exp(-200) overflow and underflow in float32
    w = q.sample(10, stream(0, "draws"))
    assert bool(w.isfinite().all())
    assert bool((w * loc > 0).all())


STARTS = [
    ("Normal", constraints.real, 0.01),
    ("Laplace", constraints.real, 0.2),
    ("Gumbel", constraints.real, 0.5),
    ("StudentT", constraints.real, 0.1),
    ("LogNormal", constraints.positive, 0.01),
    ("Gamma", constraints.positive, 0.4),
    ("InverseGamma", constraints.positive, 0.4),
    ("Weibull", constraints.positive, 0.5),
    ("Beta", constraints.unit_interval, 0.15),
    ("Kumaraswamy", constraints.unit_interval, 0.35),
    ("Dirichlet", constraints.simplex, 0.5),
]


@pytest.mark.parametrize(("name", "support", "tolerance"), STARTS)
@pytest.mark.parametrize(("centre", "spread"), [(0.0, 0.3), (0.5, 1.0)])
def test_the_initial_q_is_near_the_given_mean_and_scale(name, support, tolerance, centre, spread):
    """Means within half a standard deviation; spreads within the tolerance, with 0.05 for 4,000 draws."""
    layout = Layout({"x": Param((3,), support)})
    form = PerParameterForm({"x": name}, layout)
    loc = torch.full((2, layout.size), centre, dtype=F64)
    theta = form.initial(loc, torch.full((layout.size,), spread, dtype=F64), stream(0, "start"))
    assert theta.shape == (2, form.length)
    q = form.family(theta)
    w = q.sample(4_000, stream(1, "draws"))
    assert bool(q.log_prob(w).isfinite().all())
    assert float(((w.mean(0) - loc) / spread).abs().max()) < 0.5
    assert float((w.std(0) / spread - 1).abs().max()) < tolerance + 0.05


def test_a_named_family_starts_no_narrower_than_a_tenth():
    layout = Layout({"x": Param((), constraints.positive), "y": Param((), constraints.positive)})
    form = PerParameterForm({"x": "LogNormal"}, layout)
    theta = form.initial(torch.zeros(2, dtype=F64), torch.full((2,), 0.02, dtype=F64), stream(0, "start"))
    of = form.family(theta).distributions()
    assert float(of["x"].scale) == pytest.approx(0.1, rel=1e-4)
    assert float(of["y"].scale) == pytest.approx(0.02, rel=1e-12)


def test_draws_leave_the_global_generator_unchanged():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    q = FORM.family(random_theta())
    first = q.sample(3, stream(0, "draws"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, q.sample(3, stream(0, "draws")))
    generator = stream(0, "draws")
    assert not torch.equal(q.sample(3, generator), q.sample(3, generator))


HAVE = "must name a distribution for 'x' with the same support"
SHAPES = "must name a distribution for 'x' whose arguments have constraints and the shape of its draws"


@pytest.mark.parametrize(
    ("classes", "support", "sentence"),
    [
        ({"x": "Gamma"}, constraints.real, f"{HAVE}, got Gamma."),
        ({"x": "Normal"}, constraints.positive, f"{HAVE}, got Normal."),
        ({"x": "Beta"}, constraints.interval(0.0, 2.0), f"{HAVE}, got Beta."),
        ({"x": "Gamma"}, constraints.greater_than(1.0), f"{HAVE}, got Gamma."),
        ({"x": "Uniform"}, constraints.unit_interval, f"{HAVE}, got Uniform."),
        ({"x": "Poisson"}, constraints.positive, f"{HAVE}, got Poisson."),
        ({"x": "LogisticNormal"}, constraints.simplex, f"{SHAPES}, got LogisticNormal."),
        ({"x": "RelaxedBernoulli"}, constraints.unit_interval, f"{SHAPES}, got RelaxedBernoulli."),
        (
            {"x": "VonMises"},
            constraints.real,
            "must name a distribution for 'x' that implements rsample, got VonMises.",
        ),
        (
            {"x": "Nothing"},
            constraints.real,
            "must name a class in torch.distributions for 'x', got 'Nothing'.",
        ),
        ({"x": 3}, constraints.real, "must name a class in torch.distributions for 'x', got 3."),
        ({"y": "Normal"}, constraints.real, "must name parameters among x, got ['y']."),
        (
            "Normal",
            constraints.real,
            "must be a dict from parameter names to class names, got Normal.",
        ),
    ],
)
def test_invalid_classes_raise_an_error_that_names_them(classes, support, sentence):
    with pytest.raises(InputError) as caught:
        PerParameterForm(classes, Layout({"x": Param((3,), support)}))
    assert str(caught.value) == f"The 'classes' argument of PerParameterForm {sentence}"
