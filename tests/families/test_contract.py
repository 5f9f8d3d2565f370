"""Every family against the same exact oracles: quadrature of its density, its own moments, autograd and its draws."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Normal, constraints
from torch.testing import assert_close

from priory.core.errors import InputError
from priory.core.flat import Layout, Param
from priory.core.streams import stream
from priory.families import (
    FORMS,
    DiagonalForm,
    FactorisedForm,
    FlowForm,
    FullRankForm,
    LowRankForm,
    MixtureForm,
    PerParameterForm,
    form_of,
)
from priory.families.base import FixedNoise
from priory.testing import assert_covariance_close, assert_mean_close

F64 = torch.float64
SUPPORTS = {"Beta": constraints.unit_interval, "Gamma": constraints.positive, "Normal": constraints.real}


def layout(size):
    """Parameters of one coordinate each: a probability, a positive number, the rest real."""
    supports = [*[SUPPORTS["Beta"], SUPPORTS["Gamma"]][:size], *[constraints.real] * (size - 2)]
    return Layout({f"x{i}": Param((), support) for i, support in enumerate(supports)})


def per_parameter(size):
    classes = dict(zip(("x0", "x1"), ("Beta", "Gamma"), strict=True))
    return PerParameterForm({name: classes[name] for name in classes if name in layout(size).names}, layout(size))


TABLE = {
    "diagonal": DiagonalForm,
    "full_rank": FullRankForm,
    "low_rank": lambda size: LowRankForm(size, 2),
    "flow": lambda size: FlowForm(size, layers=3, hidden=4),
    "mixture": lambda size: MixtureForm(size, 3),
    "mixture of full covariances": lambda size: MixtureForm(size, 2, "full"),
    "laplace": lambda size: FactorisedForm(size, "laplace"),
    "logistic": lambda size: FactorisedForm(size, "logistic"),
    "uniform": lambda size: FactorisedForm(size, "uniform"),
    "per parameter": per_parameter,
}
every_form = pytest.mark.parametrize("name", TABLE)
smooth_form = pytest.mark.parametrize("name", [name for name in TABLE if name not in ("uniform", "laplace")])


def start(form, shape=(), dtype=F64, seed=0):
    """A theta away from the start, (*shape, K)."""
    generator = stream(seed, "theta")
    loc = 0.5 * torch.randn(*shape, form.size, generator=generator, dtype=dtype)
    theta = form.initial(loc, torch.linspace(0.5, 0.8, form.size, dtype=dtype), generator)
    return theta + 0.3 * torch.randn(theta.shape, generator=generator, dtype=dtype)


def grid(size, half=25.0, nodes=501):
    """Points (n, P) and the weight of each, for integrals over a square on which nothing is left out."""
    axis = torch.linspace(-half, half, nodes, dtype=F64)
    return torch.cartesian_prod(*[axis] * size).reshape(-1, size), (2 * half / (nodes - 1)) ** size


def moments(form, theta):
    """Mean (P,) and covariance (P, P) by quadrature."""
    points, weight = grid(form.size)
    density = form.family(theta).log_prob(points).exp() * weight
    mean = density @ points
    return mean, (points - mean).T @ (density[:, None] * (points - mean))


@smooth_form
@pytest.mark.parametrize("size", [1, 2])
def test_a_density_integrates_to_one(name, size):
    form = TABLE[name](size)
    points, weight = grid(size)
    total = form.family(start(form)).log_prob(points).exp().sum() * weight
    assert_close(total, torch.ones((), dtype=F64), rtol=0, atol=1e-8)


@smooth_form
def test_entropy_and_moments_are_those_of_the_density(name):
    form = TABLE[name](2)
    theta = start(form)
    q = form.family(theta)
    points, weight = grid(2)
    log_q = q.log_prob(points)
    if q.entropy() is not None:
        assert_close(q.entropy(), -(log_q.exp() * log_q).sum() * weight, rtol=0, atol=1e-8)
    if q.moments() is not None:
        mean, covariance = moments(form, theta)
        assert_close(q.moments()[0], mean, rtol=0, atol=1e-8)
        assert_close(q.moments()[1], covariance.diagonal(), rtol=0, atol=1e-8)


@every_form
def test_cross_entropy_is_the_mean_of_minus_the_log_prior(name):
    """5 standard errors, 1 comparison: false-alarm rate 6e-7."""
    form = TABLE[name](3)
    q = form.family(start(form))
    loc, scale = torch.tensor([0.5, -1.0, 0.0], dtype=F64), torch.tensor([0.7, 1.5, 2.0], dtype=F64)
    prior = SimpleNamespace(loc=loc, precision=scale**-2, log_normaliser=float(Normal(loc, scale).log_prob(loc).sum()))
    closed = q.cross_entropy(prior)
    if q.moments() is None:
        assert closed is None
    else:
        w = q.independent(20_000, stream(1, "draws"))
        assert_mean_close(-Normal(loc, scale).log_prob(w).sum(-1), closed)


@every_form
def test_independent_draws_have_the_mean_and_covariance_of_the_density(name):
    """5 standard errors, 5 comparisons a form: false-alarm rate 3e-6."""
    form = TABLE[name](2)
    theta = start(form)
    q = form.family(theta)
    w = q.independent(20_000, stream(2, "draws"))
    if name in ("uniform", "laplace"):  # quadrature on a grid misses their kinks
        mean, covariance = q.moments()[0], q.moments()[1].diag()
    else:
        mean, covariance = moments(form, theta)
    assert_mean_close(w, mean)
    assert_covariance_close(w, covariance)
    assert bool(q.log_prob(w).isfinite().all())


@every_form
def test_the_reparameterised_gradient_is_that_of_the_expectation(name):
    """One estimate a member, 400 members; 5 standard errors, K <= 60 comparisons: false-alarm rate 3e-5."""
    form, members, n = TABLE[name](2), 400, 60
    theta, slopes = start(form).requires_grad_(), torch.tensor([1.0, -2.0], dtype=F64)

    def f(w):
        return ((slopes * w + 0.3).sin() + 0.2 * w.square()).sum(-1)

    many = theta.detach().expand(members, -1).clone().requires_grad_()
    q = form.family(many)
    values, weights = f(q.sample(n, stream(3, "draws"))), q.weights(n)
    estimate = values.mean(0) if weights is None else (weights * values).sum(0)
    (estimated,) = torch.autograd.grad(estimate.sum(), many)
    if isinstance(form, FactorisedForm):  # jumps and kinks move with theta: the grid is over z
        z = (torch.arange(80_000, dtype=F64) + 0.5) / 1_000 - 40
        base, one = type(form)(1, form.base).family(torch.zeros(2, dtype=F64)), form.family(theta)
        expected = base.log_prob(z[:, None]).exp() @ f(one.loc + one.scale * z[:, None]) / 1_000
    else:
        points, weight = grid(2)
        expected = (form.family(theta).log_prob(points).exp() * f(points)).sum() * weight
    (exact,) = torch.autograd.grad(expected, theta)
    assert_mean_close(estimated, exact)


@every_form
def test_gradients_reach_every_entry_of_theta(name):
    form = TABLE[name](3)
    theta = start(form).requires_grad_()
    q = form.family(theta)
    w = q.sample(6, stream(4, "draws"))
    weights = q.weights(len(w))
    loss = (w.pow(3).sum(-1) * (1.0 if weights is None else weights)).sum() + q.log_prob(w.detach()).sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    assert bool((gradient != 0).all())
    assert bool(gradient.isfinite().all())


@every_form
def test_members_of_a_batch_are_independent_and_equal_to_single_members(name):
    form = TABLE[name](3)
    theta = start(form, (3,))
    other = theta.clone()
    other[1] += 0.1
    w, moved = (form.family(t).sample(6, stream(5, "draws")) for t in (theta, other))
    assert w.shape == (6, 3, 3)
    for member in (0, 2):
        assert torch.equal(w[:, member], moved[:, member])
    assert not torch.equal(w[:, 1], moved[:, 1])
    x = 0.5 * w.detach()
    together, changed = (form.family(t).log_prob(x) for t in (theta, other))
    assert together.shape == (6, 3)
    for member in (0, 2):
        assert torch.equal(together[:, member], changed[:, member])
    for member in range(3):
        alone = form.family(theta[member])
        assert_close(together[:, member], alone.log_prob(x[:, member]), rtol=1e-12, atol=1e-12)
        for mine, theirs in ((form.family(theta).entropy(), alone.entropy()),):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert_close(mine[member], theirs, rtol=1e-12, atol=1e-12)


@every_form
def test_log_prob_takes_any_leading_dimensions(name):
    form = TABLE[name](2)
    q = form.family(start(form, (2, 3)))
    w = torch.stack([q.sample(6, stream(6, "draws")), q.sample(6, stream(7, "draws"))])
    values = q.log_prob(w)
    assert values.shape == (2, 6, 2, 3)
    for i in range(2):
        for j in range(6):
            assert_close(values[i, j], q.log_prob(w[i, j]), rtol=1e-12, atol=1e-12)


@every_form
def test_weights_sum_to_one_and_have_the_shape_of_the_draws(name):
    form = TABLE[name](2)
    for shape in ((), (4,)):
        q = form.family(start(form, shape))
        for n in (1, 7, 12):
            w, weights = q.sample(n, stream(8, "draws")), q.weights(n)
            assert w.shape[1:] == (*shape, 2)
            if weights is None:
                assert len(w) == n
            else:
                assert weights.shape == w.shape[:-1]
                assert_close(weights.sum(0), torch.ones(shape, dtype=F64), rtol=0, atol=1e-12)


@every_form
def test_no_gradient_flows_through_a_detached_family(name):
    form = TABLE[name](2)
    q = form.family(start(form).requires_grad_())
    quiet = q.detached()
    w = torch.tensor([0.1, 0.2], dtype=F64, requires_grad=True)
    assert not quiet.sample(6, stream(9, "draws")).requires_grad
    assert torch.equal(quiet.log_prob(w), q.log_prob(w))
    value = quiet.log_prob(w) + (0.0 if quiet.entropy() is None else quiet.entropy())
    assert torch.autograd.grad(value, w)[0].shape == (2,)
    assert q.log_prob(w.detach()).requires_grad
    assert not quiet.log_prob(w.detach()).requires_grad


@every_form
def test_a_form_can_be_stored_and_restored(name):
    form = TABLE[name](3)
    description = json.loads(json.dumps(form.describe()))
    again = form_of(description, layout(3))
    assert type(again) is type(form)
    assert again.describe() == form.describe()
    theta = start(form)
    w = form.family(theta).sample(6, stream(10, "draws"))
    assert torch.equal(w, again.family(theta).sample(6, stream(10, "draws")))
    assert FORMS[form.kind] is type(form)


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("flow", "per parameter")])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_the_initial_q_has_the_given_mean_and_standard_deviations(name, shape):
    form = TABLE[name](3)
    loc = torch.randn(*shape, 3, generator=stream(0, "loc"), dtype=F64)
    scale = torch.tensor([0.1, 1.0, 20.0], dtype=F64)
    theta = form.initial(loc, scale, stream(1, "start"))
    assert theta.shape == (*shape, form.length)
    mean, variance = form.family(theta).moments()
    assert_close(mean, loc, rtol=0, atol=1e-10)
    assert_close(variance.sqrt(), scale.expand_as(loc), rtol=1e-10, atol=0)


@every_form
def test_float32_and_float64_agree(name):
    form = TABLE[name](3)
    theta = start(form, (2,))
    double, single = form.family(theta), form.family(theta.float())
    w = double.sample(6, stream(11, "draws"))
    w32 = single.sample(6, stream(11, "draws"))
    assert w32.dtype == torch.float32
    assert w32.shape == w.shape
    assert bool(single.log_prob(w32).isfinite().all())
    inside = 0.9 * (w - w.mean(0)) + w.mean(0)
    assert single.log_prob(inside.float()).dtype == torch.float32
    assert_close(single.log_prob(inside.float()).double(), double.log_prob(inside), rtol=1e-3, atol=1e-3)
    assert form.initial(torch.zeros(3), torch.ones(3), stream(0, "start")).dtype == torch.float32
    for one, other in ((single.entropy(), double.entropy()), (single.moments(), double.moments())):
        if one is not None:
            assert_close(one, other, rtol=1e-4, atol=1e-4, check_dtype=False)


@every_form
def test_invalid_arguments_raise_an_error_that_names_them(name):
    form = TABLE[name](3)
    owner = type(form).__name__
    with pytest.raises(
        InputError,
        match=rf"The 'theta' argument of {owner} must have {form.length} entries in its last dimension, "
        rf"got \(7777,\)",
    ):
        form.family(torch.zeros(7777))
    with pytest.raises(
        InputError, match=rf"The 'loc' argument of {owner} must have 3 entries in its last dimension, got \(2,\)"
    ):
        form.initial(torch.zeros(2), torch.ones(3), stream(0, "start"))
    with pytest.raises(InputError, match=rf"The 'scale' argument of {owner} must have the shape \(3,\), got \(2,\)"):
        form.initial(torch.zeros(3), torch.ones(2), stream(0, "start"))
    with pytest.raises(InputError, match=rf"The 'scale' argument of {owner} must be positive, got 0.0"):
        form.initial(torch.zeros(3), torch.zeros(3), stream(0, "start"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DiagonalForm(0), "The 'size' argument of DiagonalForm must be an integer >= 1, got 0."),
        (lambda: LowRankForm(3, 0), "The 'rank' argument of LowRankForm must be an integer >= 1, got 0."),
        (lambda: FlowForm(3, layers=0), "The 'layers' argument of FlowForm must be an integer >= 1, got 0."),
        (lambda: FlowForm(3, hidden=1.5), "The 'hidden' argument of FlowForm must be an integer >= 1, got 1.5."),
        (lambda: FlowForm(3, seed=-1), "The 'seed' argument of FlowForm must be an integer >= 0, got -1."),
        (lambda: MixtureForm(3, 0), "The 'components' argument of MixtureForm must be an integer >= 1, got 0."),
        (
            lambda: MixtureForm(3, 2, "round"),
            "The 'covariance' argument of MixtureForm must be 'diagonal' or 'full', got 'round'.",
        ),
        (
            lambda: FactorisedForm(3, "cauchy"),
            "The 'base' argument of FactorisedForm must be one of laplace, logistic, uniform, got 'cauchy'.",
        ),
        (
            lambda: form_of({"kind": "diagonal", "size": 2}, layout(3)),
            "The 'description' argument of form_of must be of size 3, got 2.",
        ),
    ],
)
def test_invalid_forms_raise_an_error_that_names_the_field(make, sentence):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == sentence


def test_an_unknown_kind_raises_an_error():
    with pytest.raises(InputError, match="The 'description' argument of form_of must name a kind among diagonal"):
        form_of({"kind": "nothing"}, layout(2))


MOVED = {
    "diagonal": DiagonalForm(4),
    "factorised": FactorisedForm(4, "logistic"),
    "full_rank": FullRankForm(4),
    "low_rank": LowRankForm(4, 2),
    "mixture": MixtureForm(4, 3, "full"),
    "flow": FlowForm(4, 3, 8),
    "linear flow": FlowForm(4, 3, 8, linear=True),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_form_is_the_distribution_of_an_affine_function(name):
    form, generator = MOVED[name], stream(0, "moved")
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    theta, centre, v = 0.3 * random(2, form.length), random(4), random(5, 2, 4)
    roots = [random(4).exp(), random(4, 4).tril(-1) + random(4).exp().diag()]
    for root in roots:
        moved = form.moved(theta, centre, root)
        if moved is None:
            assert root.ndim == 2
            continue
        matrix = root.diag() if root.ndim == 1 else root
        found = form.family(moved).log_prob(centre + v @ matrix.mT)
        torch.testing.assert_close(found, form.family(theta).log_prob(v) - matrix.diagonal().log().sum())
        noise = FixedNoise(torch.rand(6, 99, generator=generator).double(), random(6, 99))
        draws = form.family(theta).sample(6, noise.restarted())
        torch.testing.assert_close(form.family(moved).sample(6, noise.restarted()), centre + draws @ matrix.mT)
