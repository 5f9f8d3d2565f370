"""Each estimator against its hand-derived formula at known noise, and against the gradient of the bound itself."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributions import Laplace, Normal

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.divergences import KL, ForwardKL, JensenShannon, Renyi
from priory.estimators import elbo
from priory.estimators.gradients import SCORE_ESTIMATORS, estimate
from priory.families import (
    DiagonalFamily,
    DiagonalForm,
    FactorisedForm,
    FlowForm,
    FullRankForm,
    LowRankForm,
    MixtureForm,
)
from priory.fitting.checkpoint import Checkpoint
from priory.fitting.prepare import make_target
from priory.methods.base import Plan
from priory.testing import LinearRegression, assert_mean_close

F64 = torch.float64
NOISE, SCALE, LOC = 0.7, 1.3, 0.2  # of the likelihood, and of the prior
ROWS = 5  # of twenty: the factor N/n is 4
PATHS = ("pathwise", "sticking")


def normal(scale, loc=0.0):
    return Normal(torch.tensor(loc, dtype=F64), torch.tensor(scale, dtype=F64))


def linear_problem(temperature=1.0, tempers="likelihood"):
    exact = LinearRegression.make(4)
    model = pr.Model(nn.Linear(3, 1, bias=False).to(F64), pr.Gaussian(NOISE), prior=normal(SCALE, LOC))
    data = Data.of((exact.X, exact.y), batch_size=ROWS).prepared(model.prepare)
    return make_target(model, data, temperature, tempers), tuple(t[:ROWS] for t in data.tensors)


def loc_and_log_scale(size, seed=1):
    generator = stream(seed, "q")
    loc = torch.randn(size, generator=generator, dtype=F64)
    return loc, 0.3 * torch.randn(size, generator=generator, dtype=F64) - 1


def gradient_of(target, form, theta, batch, generator, samples, estimator, **options):
    """The estimate of the bound's own gradient in theta: minus that of the loss."""
    theta = theta.detach().requires_grad_()
    buffers = target.buffers(theta.shape[:-1])
    found = estimate(target, form.family(theta), batch, buffers, generator, samples, estimator, **options)
    return -torch.autograd.grad(found.loss.sum(), theta)[0], found


class Hand:
    """Everything about a linear model with factorised q, from its equations: no code of the library's."""

    def __init__(self, batch, noise, a=1.0, t=1.0):
        self.X, self.y = batch[0], batch[1]
        self.a, self.t, self.factor = a, t, 20 / len(self.X)
        self.m, self.log_s = loc_and_log_scale(3)
        self.s, self.eps = self.log_s.exp(), noise
        self.w = self.m + self.s * noise  # (S, 3)

    @property
    def slope(self):
        """Of the log-likelihood at the draws."""
        return self.factor * (self.y - self.w @ self.X.T) @ self.X / NOISE**2

    @property
    def f(self):
        residual = (self.y - self.w @ self.X.T).square()
        log_likelihood = (-0.5 * residual / NOISE**2 - math.log(NOISE) - 0.5 * math.log(2 * math.pi)).sum(-1)
        square = ((self.w - LOC) / SCALE).square()
        log_prior = (-0.5 * square - math.log(SCALE) - 0.5 * math.log(2 * math.pi)).sum(-1)
        log_q = (-0.5 * self.eps.square() - self.log_s - 0.5 * math.log(2 * math.pi)).sum(-1)
        return self.factor * log_likelihood + self.a * log_prior - self.t * log_q

    @property
    def score(self):
        """d log q / d (m, log s), (S, 6)."""
        return torch.cat([self.eps / self.s, self.eps.square() - 1], -1)

    def pathwise(self):
        g = self.slope
        in_m = g.mean(0) - self.a * (self.m - LOC) / SCALE**2
        in_log_s = (g * self.eps).mean(0) * self.s - self.a * self.s.square() / SCALE**2 + self.t
        return torch.cat([in_m, in_log_s])

    def sticking(self):
        total = self.slope - self.a * (self.w - LOC) / SCALE**2 + self.t * self.eps / self.s
        return torch.cat([total.mean(0), (total * self.eps).mean(0) * self.s])

    def by_scores(self, baseline):
        return ((self.f - baseline)[:, None] * self.score).mean(0)

    def leave_one_out(self):
        f, rows = self.f, []
        for s in range(len(f)):
            rest = sum(float(f[r]) for r in range(len(f)) if r != s) / (len(f) - 1)
            rows.append((float(f[s]) - rest) * self.score[s])
        return torch.stack(rows).mean(0)

    def vargrad(self):
        """d/dtheta of half the variance of log q - log p over draws that stay where they are, over t."""
        difference = -self.f
        centred = difference - difference.mean()
        return -(centred[:, None] * self.score).sum(0) / (len(self.f) - 1)


TEMPERS = [(1.0, "likelihood"), (0.4, "likelihood"), (0.4, "posterior"), (2.0, "posterior")]


@pytest.mark.parametrize(("temperature", "tempers"), TEMPERS)
@pytest.mark.parametrize("estimator", [*PATHS, *SCORE_ESTIMATORS])
def test_at_known_noise_it_is_the_formula_derived_by_hand(estimator, temperature, tempers):
    target, batch = linear_problem(temperature, tempers)
    loc, log_scale = loc_and_log_scale(3)
    noise = torch.randn(3, 3, generator=stream(2, "noise"), dtype=F64)
    a = temperature if tempers == "likelihood" else 1.0
    hand = Hand(batch, noise, a, temperature)
    theta, baseline = torch.cat([loc, log_scale]), 1.7
    found, _ = gradient_of(
        target, DiagonalForm(3), theta, batch, stream(2, "noise"), 3, estimator, baseline=torch.tensor(baseline)
    )
    wanted = {
        "pathwise": hand.pathwise,
        "sticking": hand.sticking,
        "score": lambda: hand.by_scores(0.0),
        "score_baseline": lambda: hand.by_scores(baseline),
        "leave_one_out": hand.leave_one_out,
        "vargrad": hand.vargrad,
    }[estimator]()
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("estimator", ["sticking", *SCORE_ESTIMATORS])
def test_its_value_is_the_mean_of_f_and_it_returns_f_at_each_draw(estimator):
    target, batch = linear_problem(0.4)
    theta = torch.cat(loc_and_log_scale(3))
    noise = torch.randn(3, 3, generator=stream(2, "noise"), dtype=F64)
    hand = Hand(batch, noise, 0.4, 0.4)
    _, found = gradient_of(target, DiagonalForm(3), theta, batch, stream(2, "noise"), 3, estimator)
    torch.testing.assert_close(found.each, hand.f, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.bound.value, hand.f.mean(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.bound.value, -found.bound.nll - 0.4 * found.bound.kl, rtol=1e-10, atol=1e-10)


def test_vargrad_is_leave_one_out_for_every_family():
    target = banana_target()
    for form in FORMS.values():
        theta = start_of(form)
        one, two = (
            gradient_of(target, form, theta, (), stream(3, "noise"), 5, name)[0]
            for name in ("leave_one_out", "vargrad")
        )
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_pathwise_is_the_gradient_of_the_autograd_elbo(samples):
    target, batch = linear_problem(0.4)
    loc, log_scale = (t.requires_grad_() for t in loc_and_log_scale(3))
    noise = torch.randn(samples if samples % 2 else samples // 2, 3, generator=stream(2, "noise"), dtype=F64)
    if samples % 2 == 0:  # draws of a symmetric q come in pairs
        noise = torch.cat([noise, -noise])
    parts = elbo(target, DiagonalFamily(loc, log_scale), noise, batch)
    wanted = torch.cat(torch.autograd.grad(parts.value, (loc, log_scale)))
    theta = torch.cat([loc, log_scale])
    found, told = gradient_of(target, DiagonalForm(3), theta, batch, stream(2, "noise"), samples, "pathwise")
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(told.bound.value, parts.value.detach(), rtol=1e-10, atol=1e-10)


# Unbiasedness, against the integral of q (log p - log q) on a grid, which needs q's density and nothing else.


def banana(p):
    """A curved density in the plane: it knows neither its constant nor symmetry."""
    x, y = p["w"][..., 0], p["w"][..., 1]
    return -0.5 * x.square() - 0.5 * ((y - 0.5 * x.square() + 0.3) / 0.8).square() - 0.4


def banana_target():
    model = pr.Density(banana, {"w": pr.Param((2,))}, batched=True)
    return make_target(model, Data.of(None).prepared(model.prepare))


FORMS = {
    "diagonal": DiagonalForm(2),
    "full rank": FullRankForm(2),
    "low rank": LowRankForm(2, 1),
    "mixture": MixtureForm(2, 2),
    "mixture of full rank": MixtureForm(2, 3, "full"),
    "flow": FlowForm(2, layers=2, hidden=3),
    "laplace": FactorisedForm(2, "laplace"),
    "logistic": FactorisedForm(2, "logistic"),
    "uniform": FactorisedForm(2, "uniform"),
}


def start_of(form, seed=0):
    """A theta that is nowhere in particular."""
    generator = stream(seed, "theta")
    loc = torch.tensor([0.3, -0.2], dtype=F64)
    theta = form.initial(loc, torch.tensor([0.7, 0.5], dtype=F64), generator)
    return theta + 0.2 * torch.randn(theta.shape, generator=generator, dtype=F64)


def exact_gradient(form, theta):
    """The gradient of the bound in theta."""
    theta = theta.detach().requires_grad_()
    bound = by_moments(form, theta) if isinstance(form, FactorisedForm) else by_quadrature(form, theta)
    return torch.autograd.grad(bound, theta)[0]


def by_quadrature(form, theta):
    """The integral of q (log p - log q) over a square that holds all of q but 1e-12."""
    grid = torch.linspace(-9, 9, 361, dtype=F64)
    w = torch.cartesian_prod(grid, grid)
    log_q = form.family(theta).log_prob(w)
    return (log_q.exp() * (banana({"w": w}) - log_q)).sum() * (grid[1] - grid[0]) ** 2


MOMENTS = {"laplace": (2.0, 24.0), "logistic": (math.pi**2 / 3, 7 * math.pi**4 / 15), "uniform": (1 / 3, 1 / 5)}


def by_moments(form, theta):
    """The banana is a polynomial of degree four: second and fourth moments are all it takes, for q with kinks too."""
    second, fourth = MOMENTS[form.base]
    m, s = theta[:2], theta[2:].exp()
    variance = second * s.square()
    x_square = m[0] ** 2 + variance[0]
    its_variance = 4 * m[0] ** 2 * variance[0] + (fourth - second**2) * s[0] ** 4
    bend = (m[1] - 0.5 * x_square + 0.3) ** 2 + variance[1] + 0.25 * its_variance
    return -0.5 * x_square - 0.5 * bend / 0.8**2 + theta[2:].sum()  # and the entropy of the noise, a constant


# A flow and a large mixture have many numbers: the paths are enough. The score of a uniform does not have mean zero.
LEFT_OUT = {
    "flow": SCORE_ESTIMATORS,
    "mixture of full rank": SCORE_ESTIMATORS,
    "uniform": ("sticking", *SCORE_ESTIMATORS),
}


@pytest.mark.parametrize(
    ("family", "estimator"),
    [
        pair
        for pair in itertools.product(FORMS, (*PATHS, *SCORE_ESTIMATORS))
        if pair[1] not in LEFT_OUT.get(pair[0], ())
    ],
)
def test_it_is_unbiased(family, estimator):
    """4,000 estimates, each coordinate within 5 standard errors (false alarms: 6e-7 a coordinate)."""
    form, samples = FORMS[family], 3
    theta, target = start_of(form), banana_target()
    wanted = exact_gradient(form, theta)
    many = theta.expand(4_000, -1)
    options = {"baseline": torch.tensor(-1.0, dtype=F64)} if estimator == "score_baseline" else {}
    found, _ = gradient_of(target, form, many, (), stream(4, "unbiased"), samples, estimator, **options)
    assert_mean_close(found, wanted)
    assert float(wanted.abs().max()) > 0.1  # there is something to find


def test_pairs_of_draws_leave_it_unbiased():
    """4,000 estimates from a pair each, within 5 standard errors (false alarms: 6e-7 a coordinate)."""
    target = banana_target()
    for form in (FORMS["diagonal"], FORMS["full rank"], FORMS["low rank"], FORMS["laplace"]):
        theta = start_of(form)
        found, _ = gradient_of(target, form, theta.expand(4_000, -1), (), stream(5, "pairs"), 2, "sticking")
        assert_mean_close(found, exact_gradient(form, theta))


def test_scores_of_a_mixture_use_independent_draws_that_count_equally():
    """Of 4 stratified draws two are of each component; independent ones are, in 4,000 estimates, mostly not."""
    form, target, batch = MixtureForm(2, 2), banana_target(), ()
    centres = torch.tensor([[-30.0, 0.0], [30.0, 0.0]], dtype=F64)
    theta = torch.cat([torch.tensor([0.0, 1.0], dtype=F64), *(torch.cat([c, torch.zeros(2)]) for c in centres)])
    theta = theta.expand(4_000, -1)
    _, found = gradient_of(target, form, theta, batch, stream(6, "mixture"), 4, "score")
    family = form.family(theta)
    w = family.independent(4, stream(6, "mixture"))
    torch.testing.assert_close(found.each, banana({"w": w}) - family.log_prob(w))
    right = (w[..., 0] > 0).double().sum(0)  # how many of four are of the second component
    p = 1 / (1 + math.exp(-1.0))
    assert_mean_close(right, 4 * p)  # 5 standard errors: false alarms 6e-7
    assert float((right == 2).double().mean()) < 0.5


# Sticking the landing.


@pytest.mark.parametrize("form", [DiagonalForm(3), FullRankForm(3), LowRankForm(3, 3), MixtureForm(3, 2)])
def test_sticking_the_landing_has_no_variance_at_the_optimum_of_a_gaussian_target(form):
    """And pathwise has: at the same q its estimates differ."""
    loc, spread = torch.tensor([1.0, -2.0, 0.5], dtype=F64), torch.tensor([0.5, 2.0, 0.1], dtype=F64)

    def log_prob(p):
        return (-0.5 * ((p["w"] - loc) / spread).square()).sum(-1) - 7.0

    model = pr.Density(log_prob, {"w": pr.Param((3,))}, batched=True)
    target = make_target(model, Data.of(None).prepared(model.prepare))
    theta = form.initial(loc, spread, stream(0, "form"))
    if isinstance(form, LowRankForm):  # its factor breaks the symmetry at the start
        theta = torch.cat([loc, torch.zeros(9, dtype=F64), spread.log()])
    if isinstance(form, MixtureForm):  # two components in one place, of unequal weight
        one = torch.cat([loc, spread.log()])
        theta = torch.cat([torch.tensor([0.3, -0.4], dtype=F64), one, one])
    many = theta.expand(50, -1)
    still, _ = gradient_of(target, form, many, (), stream(1, "noise"), 2, "sticking")
    moving, _ = gradient_of(target, form, many, (), stream(1, "noise"), 1, "pathwise")
    assert float(still.abs().max()) < 1e-11
    assert float(moving.std(0).max()) > 0.1


# Mean-field's step in place.


def coin_density():
    def log_prior(p):
        return 2 * p["p"].log() + torch.log1p(-p["p"]) - 0.5 * p["x"].square().sum(-1)

    def log_likelihood(p, batch):
        return batch[0] * p["p"].log() + (1 - batch[0]) * torch.log1p(-p["p"]) - 0.1 * p["x"].sum() * batch[1]

    params = {"p": pr.Param((), pr.constraints.unit_interval), "x": pr.Param((2,))}
    return pr.Density(params=params, log_prior=log_prior, log_likelihood=log_likelihood)


def laplace_model():
    prior = {"weight": Laplace(normal(1.0).loc, normal(0.8).scale), "bias": normal(1.5, -0.4)}
    return pr.Model(nn.Linear(1, 1).to(F64), pr.Gaussian(), prior=prior)


TARGETS = {
    "a prior with a location": lambda: pr.Model(nn.Linear(1, 1).to(F64), pr.Gaussian(0.7), prior=normal(1.3, 0.2)),
    "a Laplace prior and a learnt noise": laplace_model,
    "a constrained density": coin_density,
}


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize(("temperature", "tempers"), [(1.0, "likelihood"), (0.5, "likelihood"), (0.5, "posterior")])
@pytest.mark.parametrize("name", TARGETS)
def test_the_step_in_place_that_sticks_the_landing_is_the_generic_one(name, temperature, tempers, samples, shape):
    model = TARGETS[name]()
    y = torch.arange(12.0, dtype=F64) % 2
    x = torch.randn(12, generator=stream(0, "x"), dtype=F64)
    parts = (y, x) if isinstance(model, pr.Density) else (x[:, None], y)
    data = Data.of(parts, 4).prepared(model.prepare)
    target, batch = make_target(model, data, temperature, tempers), tuple(t[:4] for t in data.tensors)
    method = pr.MeanField(samples=samples, estimator="sticking")
    state = method.init(target, Plan(data, 10), stream(1, "start"), torch.Size(shape))
    state.variational[1] += 1.5  # wider, so that every term counts
    theta = torch.cat([*state.variational], -1)
    method.step(target, state, batch, stream(2, "noise"))
    wanted, _ = gradient_of(target, DiagonalForm(target.size), theta, batch, stream(2, "noise"), samples, "sticking")
    torch.testing.assert_close(torch.cat([*state.gradient], -1), -wanted, rtol=1e-10, atol=1e-10)


def test_antithetic_draws_of_one_sample_are_mirrored_by_every_second_step():
    target, batch = linear_problem()
    data = Data.of(batch).prepared(target.model.prepare)
    method = pr.MeanField(antithetic=True)
    state = method.init(target, Plan(data, 10), stream(0, "init"), torch.Size())
    generator, seen = stream(1, "noise"), []
    for _ in range(6):
        state, _ = method.step(target, state, batch, generator)
        seen.append(state.noise.clone())
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(first, -second)
    assert not torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("every", [3, 4])
def test_a_fit_interrupted_between_a_draw_and_its_mirror_resumes_with_the_same_bits(every, tmp_path):
    exact = LinearRegression.make(1)
    options = {"steps": 9, "batch_size": 7, "progress": False}
    method = pr.MeanField(antithetic=True)
    whole = pr.fit(exact.model(), exact.data, method, **options)

    def interrupt(moment):
        if moment.step >= every:
            raise KeyboardInterrupt

    keep = Checkpoint(tmp_path / "fit", every=every)
    with pytest.raises(KeyboardInterrupt):
        pr.fit(exact.model(), exact.data, method, checkpoint=keep, callbacks=[interrupt], **options)
    resumed = pr.fit(exact.model(), exact.data, method, checkpoint=keep, **options)
    assert torch.equal(whole.theta, resumed.theta)
    assert torch.equal(whole.history["elbo"], resumed.history["elbo"])


def test_antithetic_draws_of_an_odd_number_or_a_lopsided_family_are_refused():
    theta = start_of(FORMS["full rank"])
    for form, samples in ((FORMS["full rank"], 3), (FORMS["flow"], 2)):
        theta = start_of(form)
        with pytest.raises(InputError, match="'antithetic' of the method must be used with an even number"):
            gradient_of(banana_target(), form, theta, (), stream(0, "n"), samples, "pathwise", antithetic=True)


def test_an_estimator_that_is_not_of_draws_is_refused_by_name():
    with pytest.raises(InputError, match="'local'"):
        gradient_of(banana_target(), DiagonalForm(2), start_of(DiagonalForm(2)), (), stream(0, "n"), 1, "local")


@pytest.mark.parametrize("estimator", ["sticking", *SCORE_ESTIMATORS])
def test_a_uniform_whose_ends_move_is_refused_by_estimators_that_need_a_score_of_mean_zero(estimator):
    """At fixed w, d log q / d log s is -1 and not 0 on average: sticking would let q collapse."""
    with pytest.raises(
        InputError, match="'estimator' argument of MeanField must be 'pathwise' for the family 'uniform'"
    ):
        pr.MeanField(family="uniform", estimator=estimator, samples=2)


# Other divergences to the prior.


@pytest.mark.parametrize(("temperature", "samples"), [(1.0, 1), (0.4, 3)])
def test_the_kl_as_a_divergence_is_the_default(temperature, samples):
    target, batch = linear_problem(temperature)
    theta = torch.cat(loc_and_log_scale(3))
    found = [
        gradient_of(target, DiagonalForm(3), theta, batch, stream(2, "noise"), samples, "pathwise", divergence=one)
        for one in (None, KL())
    ]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-10, atol=1e-10)
    for part in ("value", "nll", "kl"):
        torch.testing.assert_close(getattr(found[0][1].bound, part), getattr(found[1][1].bound, part))


def prior_divergence(divergence, loc, scale):
    """D(q, prior) in one dimension by the trapezoid rule, differentiable in q."""
    w = torch.linspace(-40, 40, 40_001, dtype=F64)
    q, p = Normal(loc, scale), normal(SCALE, LOC)
    log_q, log_p, step = q.log_prob(w), p.log_prob(w), w[1] - w[0]
    if isinstance(divergence, Renyi):
        a = divergence.alpha
        return (a * log_q + (1 - a) * log_p).exp().sum().mul(step).log() / (a - 1)
    if isinstance(divergence, ForwardKL):
        return (log_p.exp() * (log_p - log_q)).sum() * step
    log_m = torch.logaddexp(log_q, log_p) - math.log(2)
    return 0.5 * (log_q.exp() * (log_q - log_m) + log_p.exp() * (log_p - log_m)).sum() * step


@pytest.mark.parametrize("divergence", [Renyi(0.5), Renyi(1.5), ForwardKL()], ids=str)
def test_another_divergence_has_the_gradient_of_quadrature(divergence):
    """E_q[log p(D|w)] - T D(q, p), 4,000 estimates within 5 standard errors (false alarms: 6e-7 a coordinate)."""
    temperature = 0.4
    target, batch = linear_problem(temperature)
    theta = torch.cat(loc_and_log_scale(3))
    leaf = theta.clone().requires_grad_()
    loc, scale = leaf[:3], leaf[3:].exp()
    X, y = batch
    residual = (y - X @ loc).square().sum() + (X.square() @ scale.square()).sum()
    distance = torch.stack([prior_divergence(divergence, loc[i], scale[i]) for i in range(3)]).sum()
    (wanted,) = torch.autograd.grad(-4 * residual / (2 * NOISE**2) - temperature * distance, leaf)
    found, told = gradient_of(
        target,
        DiagonalForm(3),
        theta.expand(4_000, -1),
        batch,
        stream(7, "divergence"),
        1,
        "pathwise",
        divergence=divergence,
    )
    assert_mean_close(found, wanted)
    torch.testing.assert_close(told.bound.kl, distance.detach().expand(4_000), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("divergence", [Renyi(0.5), ForwardKL(), JensenShannon()], ids=str)
def test_ratios_at_draws_find_the_divergence_where_there_is_no_closed_form(divergence):
    """A density keeps its prior to itself. From 40,000 draws to 5 %: the noise is 1 %, and a factor would be 100 %."""

    def log_prior(p):
        return normal(SCALE, LOC).log_prob(p["w"])

    def log_likelihood(p, batch):
        return 0 * p["w"] * batch[0]

    model = pr.Density(params={"w": pr.Param()}, log_prior=log_prior, log_likelihood=log_likelihood)
    data = Data.of((torch.ones(4, dtype=F64),)).prepared(model.prepare)
    target, theta = make_target(model, data), torch.tensor([0.6, 0.6], dtype=F64)  # wider than the prior
    leaf = theta.clone().requires_grad_()
    distance = prior_divergence(divergence, leaf[0], leaf[1].exp())
    (wanted,) = torch.autograd.grad(-distance, leaf)
    found, told = gradient_of(
        target, DiagonalForm(1), theta, data.tensors, stream(8, "ratios"), 40_000, "pathwise", divergence=divergence
    )
    assert float(told.bound.kl) == pytest.approx(float(distance.detach()), rel=0.05)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0)


def test_another_divergence_is_refused_without_a_prior_and_with_a_tempered_one():
    theta, density = start_of(DiagonalForm(2)), banana_target()
    with pytest.raises(InputError, match="'divergence' of the method must be left out for a Density without"):
        gradient_of(density, DiagonalForm(2), theta, (), stream(0, "n"), 2, "pathwise", divergence=Renyi(0.5))
    target, batch = linear_problem(0.5, "posterior")
    theta = torch.cat(loc_and_log_scale(3))
    with pytest.raises(InputError, match="'tempers' argument of another divergence must be 'likelihood'"):
        gradient_of(target, DiagonalForm(3), theta, batch, stream(0, "n"), 2, "pathwise", divergence=KL())
