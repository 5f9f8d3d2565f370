"""Likelihoods against torch.distributions and scipy, with and without leading dimensions of draws."""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor, distributions
from torch.nn.functional import softplus

import priory as pr
from priory.core.special import student_cdf
from priory.core.streams import stream
from priory.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
from priory.likelihoods.scale import MIN_NETWORK_SCALE
from priory.testing import assert_covariance_close, assert_mean_close

LEADS = [(), (5,), (2, 3)]  # one vector, draws, chains of draws
ROWS = 7
EXACT = {"rtol": 0, "atol": 1e-10}


@dataclass
class Case:
    """A likelihood, what it is given, and torch's own distribution with the batch shape (*lead, n, *event)."""

    likelihood: pr.likelihoods.Likelihood
    outputs: Tensor
    learnt: dict[str, Tensor]
    event: tuple[int, ...]
    reference: distributions.Distribution

    @property
    def targets(self) -> Tensor:
        torch.manual_seed(3)
        drawn = self.reference.sample()
        return drawn.reshape(-1, ROWS, *self.event)[0]

    def per_datum(self, values: Tensor) -> Tensor:
        return values.flatten(-len(self.event)).sum(-1) if self.event else values


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def located(kind: str, source: str, lead: tuple[int, ...], event: tuple[int, ...]) -> Case:
    """A Gaussian or StudentT whose scale comes from `source`."""
    f, learnt = normal(*lead, ROWS, *event), {}
    name = "noise" if kind == "gaussian" else "scale"
    build = Gaussian if kind == "gaussian" else lambda scale, **more: StudentT(4.5, scale, **more)
    if source == "number":
        likelihood, outputs, scale = build(0.7), f, torch.tensor(0.7, dtype=torch.float64)
    elif source == "tensor":
        scale = normal(event[-1], seed=1).exp()
        likelihood, outputs = build(scale), f
    elif source == "learnt":
        value = normal(*lead, seed=1).exp()
        likelihood, outputs, learnt = build("learn"), f, {name: value}
        scale = value.reshape(*lead, 1, *[1] * len(event))
    elif source == "learnt per output":
        value = normal(*lead, event[-1], seed=1).exp()
        likelihood, outputs, learnt = build("learn", outputs=event[-1]), f, {name: value}
        scale = value.reshape(*lead, 1, *[1] * (len(event) - 1), event[-1])
    else:
        raw = normal(*lead, ROWS, *event, seed=1)
        likelihood, outputs, scale = build("network"), torch.stack([f, raw], -1), softplus(raw) + MIN_NETWORK_SCALE
    scale = scale.expand(*lead, ROWS, *event)
    ours = distributions.Normal(f, scale) if kind == "gaussian" else distributions.StudentT(4.5, f, scale)
    return Case(likelihood, outputs, learnt, event, ours)


SOURCES = [
    ("number", ()),
    ("number", (1,)),
    ("number", (3,)),
    ("number", (2, 3)),
    ("tensor", (3,)),
    ("tensor", (2, 3)),
    ("learnt", ()),
    ("learnt", (1,)),
    ("learnt", (3,)),
    ("learnt per output", (3,)),
    ("learnt per output", (2, 3)),
    ("network", ()),
    ("network", (1,)),
    ("network", (3,)),
]


@functools.cache
def all_cases(lead: tuple[int, ...]) -> dict[str, Case]:
    cases = {
        f"{kind} {source} {event}": located(kind, source, lead, event)
        for kind, (source, event) in itertools.product(("gaussian", "student"), SOURCES)
    }
    for event in ((), (1,), (4,)):
        f = normal(*lead, ROWS, *event)
        cases[f"bernoulli {event}"] = Case(Bernoulli(), f, {}, event, distributions.Bernoulli(logits=f))
        cases[f"poisson {event}"] = Case(Poisson(), f, {}, event, distributions.Poisson(f.exp()))
    f = 2 * normal(*lead, ROWS, 5)
    cases["categorical"] = Case(Categorical(), f, {}, (), distributions.Categorical(logits=f))
    return cases


ALL = pytest.mark.parametrize(
    ("lead", "name"), [(lead, name) for lead in LEADS for name in all_cases(lead)], ids=lambda v: str(v)
)


@ALL
def test_log_prob_is_the_sum_over_the_event_of_torchs_log_prob(lead: tuple[int, ...], name: str) -> None:
    case = all_cases(lead)[name]
    found = case.likelihood.log_prob(case.outputs, case.targets, case.learnt)
    assert found.shape == (*lead, ROWS)
    torch.testing.assert_close(found, case.per_datum(case.reference.log_prob(case.targets)), **EXACT)


@ALL
def test_mean_and_variance_are_those_of_torchs_distribution(lead: tuple[int, ...], name: str) -> None:
    case = all_cases(lead)[name]
    mean = case.likelihood.mean(case.outputs, case.learnt)
    variance = case.likelihood.variance(case.outputs, case.learnt)
    if name == "categorical":
        p = case.reference.probs
        torch.testing.assert_close(mean, p, **EXACT)
        torch.testing.assert_close(variance, p * (1 - p), **EXACT)
        return
    assert mean.shape == variance.shape == (*lead, ROWS, *case.event)
    torch.testing.assert_close(mean, case.reference.mean, **EXACT)
    torch.testing.assert_close(variance, case.reference.variance, **EXACT)


@ALL
def test_cdf_agrees_with_scipy(lead: tuple[int, ...], name: str) -> None:
    case = all_cases(lead)[name]
    value = case.targets + (0.3 if not case.likelihood.discrete else 0.0)
    if case.likelihood.classes:
        with pytest.raises(pr.InputError, match="labels"):
            case.likelihood.cdf(case.outputs, case.learnt, value)
        return
    if isinstance(case.likelihood, Gaussian):
        expected = scipy.stats.norm.cdf(value, case.reference.loc, case.reference.scale)
    elif isinstance(case.likelihood, StudentT):
        expected = scipy.stats.t.cdf(value, 4.5, case.reference.loc, case.reference.scale)
    else:
        expected = scipy.stats.poisson.cdf(value, case.reference.rate)
    found = case.likelihood.cdf(case.outputs, case.learnt, value)
    assert found.shape == (*lead, ROWS, *case.event)
    torch.testing.assert_close(found, torch.as_tensor(np.asarray(expected)), **EXACT)


@ALL
def test_a_draw_has_the_leading_dimensions_and_then_the_shape_of_the_targets(lead: tuple[int, ...], name: str) -> None:
    case = all_cases(lead)[name]
    drawn = case.likelihood.draw(case.outputs, case.learnt, stream(0, "test"))
    assert drawn.shape == (*lead, ROWS, *case.event)
    again = case.likelihood.draw(case.outputs, case.learnt, stream(0, "test"))
    assert torch.equal(drawn, again)


@pytest.mark.parametrize("name", sorted(all_cases(())))
def test_draws_have_the_mean_and_the_spread_of_the_likelihood(name: str) -> None:
    case, draws = all_cases(())[name], 4_000
    outputs = case.outputs.expand(draws, *case.outputs.shape)
    learnt = {k: v.expand(draws, *v.shape) for k, v in case.learnt.items()}
    y = case.likelihood.draw(outputs, learnt, stream(1, name))
    if isinstance(case.likelihood, Categorical):
        y = torch.nn.functional.one_hot(y, 5).double()
    if isinstance(case.likelihood, StudentT):  # heavy tails: compare P(Y <= y), which is uniform
        uniform = case.likelihood.cdf(outputs, learnt, y)
        assert_mean_close(uniform, 0.5)  # false alarms: 5.7e-7 per entry, at most 42 entries, 2.4e-5
        assert_mean_close((uniform - 0.5).square(), 1 / 12)  # 2.4e-5
        return
    mean, variance = (
        case.likelihood.mean(case.outputs, case.learnt),
        case.likelihood.variance(case.outputs, case.learnt),
    )
    assert_mean_close(y, mean)  # false alarms: 5.7e-7 per entry, at most 42 entries, 2.4e-5
    assert_mean_close((y - mean).square(), variance)  # 2.4e-5


def test_draws_are_independent_across_rows_and_outputs() -> None:
    likelihood, outputs = (
        Gaussian(torch.tensor([0.5, 2.0], dtype=torch.float64)),
        torch.zeros(20_000, 2, 2, dtype=torch.float64),
    )
    y = likelihood.draw(outputs, {}, stream(0, "independent")).reshape(20_000, 4)
    # 10 comparisons at 5 standard errors: false-alarm rate 5.7e-6
    assert_covariance_close(y, torch.diag(torch.tensor([0.25, 4.0, 0.25, 4.0], dtype=torch.float64)))


# The Student-t cumulative distribution function.

DEGREES = [0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 4.5, 7.3, 10.0, 31.0, 100.0, 200.0]


def student(df: float, t: Tensor) -> Tensor:
    """P(T <= t) by scipy, whose own value at df = 1 is off by 2e-9 near zero: there it is the arctangent."""
    if df == 1:
        return torch.where(t < -1, -torch.atan(1 / t) / math.pi, 0.5 + torch.atan(t) / math.pi)
    return torch.as_tensor(scipy.special.stdtr(df, t.numpy()))


@pytest.mark.parametrize("df", DEGREES)
def test_student_cdf_agrees_with_scipy_from_the_centre_to_a_thousand(df: float) -> None:
    sizes = torch.cat([torch.logspace(-12, 3, 301, dtype=torch.float64), torch.tensor([0.0]).double()])
    t = torch.cat([-sizes, sizes])
    expected = student(df, t)
    torch.testing.assert_close(student_cdf(t, df), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("df", DEGREES)
def test_the_lower_tail_of_student_cdf_keeps_its_digits(df: float) -> None:
    t = -torch.logspace(0, 3, 301, dtype=torch.float64)
    expected = student(df, t)
    kept = expected > 1e-290
    torch.testing.assert_close(student_cdf(t, df)[kept], expected[kept], rtol=1e-9, atol=0)


@pytest.mark.parametrize("df", DEGREES)
def test_student_cdf_in_float32_is_accurate_to_single_precision(df: float) -> None:
    sizes = torch.logspace(-8, 3, 221)
    t = torch.cat([-sizes, sizes])
    expected = student(df, t.double())
    torch.testing.assert_close(student_cdf(t, df).double(), expected, rtol=0, atol=1e-6 * (1 + df**0.5))


def test_student_cdf_is_a_distribution_function() -> None:
    for df in DEGREES:
        t = torch.linspace(-50, 50, 2001, dtype=torch.float64)
        p = student_cdf(t, df)
        assert bool((p.diff() >= -1e-15).all())
        assert student_cdf(torch.zeros(1, dtype=torch.float64), df).item() == pytest.approx(0.5, abs=1e-15)
        torch.testing.assert_close(p + p.flip(0), torch.ones_like(p), rtol=0, atol=1e-14)
        ends = student_cdf(torch.tensor([-math.inf, math.inf], dtype=torch.float64), df)
        assert ends.tolist() == [0.0, 1.0]


# Moments that don't exist.


def test_student_has_no_mean_up_to_df_1_and_no_finite_variance_up_to_df_2() -> None:
    f = normal(4)
    assert bool(StudentT(1.0, 0.5).mean(f, {}).isnan().all())
    assert torch.equal(StudentT(1.5, 0.5).mean(f, {}), f)
    for df in (0.5, 1.5, 2.0):
        assert bool(StudentT(df, 0.5).variance(f, {}).isposinf().all())
    assert StudentT(3.0, 0.5).variance(f, {}).tolist() == pytest.approx([0.75] * 4)


# Entropy of labels.


def test_the_entropy_of_classes_agrees_with_torch() -> None:
    p = torch.softmax(3 * normal(4, 6, 5), -1)
    found = Categorical().entropy(p, 0)
    torch.testing.assert_close(found, distributions.Categorical(probs=p).entropy(), **EXACT)
    certain = torch.eye(3, dtype=torch.float64)
    assert Categorical().entropy(certain, 0).tolist() == [0.0, 0.0, 0.0]


def test_the_entropy_of_several_labels_is_their_sum() -> None:
    p = torch.sigmoid(3 * normal(4, 6, 5))
    each = distributions.Bernoulli(probs=p).entropy()
    torch.testing.assert_close(Bernoulli().entropy(p, 0), each, **EXACT)
    torch.testing.assert_close(Bernoulli().entropy(p, 1), each.sum(-1), **EXACT)
    assert Bernoulli().entropy(torch.tensor([0.0, 1.0]), 0).tolist() == [0.0, 0.0]


def test_likelihoods_over_numbers_have_no_label_entropy() -> None:
    for likelihood in (Gaussian(), StudentT(3.0), Poisson()):
        with pytest.raises(pr.InputError, match="over numbers"):
            likelihood.entropy(torch.ones(3), 0)


# Extreme logits do not overflow.


def test_log_probs_of_labels_are_finite_at_large_logits() -> None:
    f = torch.tensor([-800.0, 800.0], dtype=torch.float64)
    assert Bernoulli().log_prob(f, torch.tensor([1.0, 1.0]).double(), {}).tolist() == [-800.0, 0.0]
    logits = torch.tensor([[0.0, 1000.0]], dtype=torch.float64)
    assert Categorical().log_prob(logits, torch.tensor([0]), {}).tolist() == [-1000.0]
    assert Bernoulli().variance(torch.tensor([40.0], dtype=torch.float64), {}).item() == pytest.approx(
        math.exp(-40), rel=1e-12
    )


# Initial values of learnt scales.


@pytest.mark.parametrize("build", [Gaussian, lambda **k: StudentT(3.0, **k)])
def test_a_learnt_scale_starts_at_three_tenths_of_the_spread_or_a_tenth_of_the_size_of_the_targets(
    build: object,
) -> None:
    y = 3 * normal(50, 2)
    name = next(iter(build().declared))
    for targets in (y + 1, y + 100):
        wanted = max(0.3 * targets.numpy().std(), 0.1 * abs(targets.numpy().mean()))
        assert build().start(targets)[name].item() == pytest.approx(wanted, rel=1e-12)
    assert build().start(y[:, 0])[name].item() == pytest.approx(0.3 * y[:, 0].numpy().std(), rel=1e-12)
    np.testing.assert_allclose(build(outputs=2).start(y)[name].numpy(), 0.3 * y.numpy().std(0), rtol=1e-12)


def test_a_learnt_scale_of_constant_targets_starts_above_zero() -> None:
    assert Gaussian().start(torch.full((9,), 5.0))["noise"].item() > 0
    assert bool((Gaussian(outputs=2).start(torch.full((9, 2), 5.0))["noise"] > 0).all())


def test_one_scale_per_output_starts_with_one_value_per_output() -> None:
    y = normal(50, 4, 2)
    start = Gaussian(outputs=2).start(y)["noise"]
    assert start.shape == (2,)
    np.testing.assert_allclose(start.numpy(), 0.3 * y.reshape(-1, 2).numpy().std(0), rtol=1e-12)


def test_a_scale_that_is_given_or_predicted_has_no_initial_value() -> None:
    for likelihood in (Gaussian(0.5), Gaussian("network"), StudentT(3.0, 1.0), Poisson(), Bernoulli(), Categorical()):
        assert likelihood.start(normal(5)) == {}
        assert likelihood.declared == {}


def test_a_learnt_scale_is_declared_positive_with_its_prior() -> None:
    declared = Gaussian().declared["noise"]
    assert declared.param.shape == ()
    assert (declared.prior.loc.item(), declared.prior.scale.item()) == (0.0, 3.0)
    own = distributions.Gamma(2.0, 3.0)
    assert Gaussian(prior=own).declared["noise"].prior is own
    assert StudentT(3.0, outputs=4).declared["scale"].param.shape == (4,)


# Shapes of outputs and targets.


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), StudentT(3.0, 0.5), Poisson(), Bernoulli()])
def test_one_output_fits_a_column_and_a_vector_of_targets(likelihood: pr.likelihoods.Likelihood) -> None:
    column, vector = normal(6, 1), normal(6)
    assert likelihood.arrange(column, torch.Size()).shape == (6,)
    assert likelihood.arrange(column, torch.Size([1])).shape == (6, 1)
    assert likelihood.arrange(vector, torch.Size()).shape == (6,)
    assert likelihood.arrange(vector, torch.Size([1])).shape == (6, 1)
    y = torch.ones(6, dtype=torch.float64)
    flat = likelihood.log_prob(likelihood.arrange(column, torch.Size()), y, {})
    tall = likelihood.log_prob(likelihood.arrange(column, torch.Size([1])), y[:, None], {})
    assert torch.equal(flat, tall)
    with pytest.raises(pr.InputError, match=r"\(rows, 2\)"):
        likelihood.arrange(column, torch.Size([2]))
    with pytest.raises(pr.InputError, match="must fit"):
        likelihood.arrange(normal(6, 3), torch.Size())


def test_a_networks_scales_follow_its_locations() -> None:
    outputs = normal(6, 6)
    arranged = Gaussian("network").arrange(outputs, torch.Size([3]))
    location, scale = Gaussian("network").location_and_scale(arranged, {})
    assert torch.equal(location, outputs[:, :3])
    torch.testing.assert_close(scale, softplus(outputs[:, 3:]) + MIN_NETWORK_SCALE, **EXACT)
    pair = Gaussian("network").arrange(normal(6, 2), torch.Size())
    assert Gaussian("network").mean(pair, {}).shape == (6,)
    with pytest.raises(pr.InputError, match="locations and then scales"):
        Gaussian("network").arrange(normal(6, 3), torch.Size([3]))


def test_one_scale_per_output_needs_as_many_outputs() -> None:
    for likelihood in (Gaussian(torch.ones(3)), Gaussian(outputs=3), StudentT(3.0, torch.ones(3))):
        assert likelihood.arrange(normal(6, 3), torch.Size([3])).shape == (6, 3)
        for event in ((), (2,)):
            with pytest.raises(pr.InputError, match="one value for each output"):
                likelihood.arrange(normal(6, *event), torch.Size(event))


def test_classes_need_at_least_two_logits_and_labels_below_their_number() -> None:
    with pytest.raises(pr.InputError, match="one logit per class"):
        Categorical().arrange(normal(6, 1), torch.Size())
    with pytest.raises(pr.InputError, match="one logit per class"):
        Categorical().arrange(normal(6), torch.Size())
    Categorical().check(normal(6, 3), torch.tensor([0, 1, 2]))
    with pytest.raises(pr.InputError, match="below 3"):
        Categorical().check(normal(6, 3), torch.tensor([0, 3]))


# Targets.


def test_targets_outside_the_support_raise_an_error() -> None:
    double = torch.float64
    with pytest.raises(pr.InputError, match="be 0 or 1"):
        Bernoulli().prepare(torch.tensor([0.0, 0.5]), double)
    with pytest.raises(pr.InputError, match="counts"):
        Poisson().prepare(torch.tensor([1, -1]), double)
    with pytest.raises(pr.InputError, match="counts"):
        Poisson().prepare(torch.tensor([1.5]), double)
    for wrong in (torch.tensor([0.0, 1.0]), torch.tensor([0, -1]), torch.tensor([True])):
        with pytest.raises(pr.InputError, match="Categorical"):
            Categorical().prepare(wrong, double)
    with pytest.raises(pr.InputError, match="real numbers"):
        Gaussian().prepare(torch.ones(2, dtype=torch.complex64), double)


def test_targets_are_converted_to_the_dtype_of_the_model() -> None:
    assert Bernoulli().prepare(torch.tensor([True, False]), torch.float64).dtype == torch.float64
    assert Poisson().prepare(torch.tensor([3, 0]), torch.float32).dtype == torch.float32
    assert Gaussian().prepare(torch.tensor([3, 0]), torch.float32).dtype == torch.float32
    assert Categorical().prepare(torch.tensor([1, 0], dtype=torch.uint8), torch.float32).dtype == torch.int64


# Arguments of the constructors.


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Gaussian(0.0), "must be positive: one number, or one per output, got 0.0"),
        (lambda: Gaussian(torch.tensor([1.0, -1.0])), "must be positive"),
        (lambda: Gaussian(torch.ones(2, 2)), "must be positive: one number, or one per output"),
        (lambda: Gaussian(math.nan), "must be positive"),
        (lambda: Gaussian("guess"), "'noise' argument of Gaussian must be 'learn', 'network', a number or a tensor"),
        (lambda: Gaussian(outputs=0), "'outputs' argument of Gaussian must be an integer >= 1, got 0"),
        (lambda: StudentT(-1.0), "'df' argument of StudentT must be a positive number, got -1.0"),
        (lambda: StudentT(3.0, scale=-1.0), "'scale' argument of StudentT must be positive"),
    ],
)
def test_invalid_arguments_raise_an_error_that_names_them(build: object, sentence: str) -> None:
    with pytest.raises(pr.InputError, match=sentence):
        build()


def test_float32_outputs_give_float32_values() -> None:
    f, y = torch.zeros(3, 4), torch.ones(4)
    for likelihood in (Gaussian(0.5), StudentT(3.0, 0.5), Poisson(), Bernoulli()):
        assert likelihood.log_prob(f, y, {}).dtype == torch.float32
        assert likelihood.variance(f, {}).dtype == torch.float32
        assert likelihood.draw(f, {}, stream(0, "x")).dtype == torch.float32
