"""Penalties on q: training with the penalty of a prior equals training with the prior, and certificates."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace, Normal

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.base import Plan
from priory.penalties import Variational, penalty_from_prior
from priory.penalties.as_prior.variational import with_unit_scale_penalties

F64 = torch.float64
NORMAL_PRIOR = Normal(torch.zeros((), dtype=F64), torch.tensor(0.7, dtype=F64))
LAPLACE_PRIOR = Laplace(torch.zeros((), dtype=F64), torch.tensor(0.4, dtype=F64))


def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(20, 3, generator=stream(0, "x"), dtype=F64)
    return X, torch.sin(X.sum(1, keepdim=True))


def model(prior: object) -> pr.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(F64)
    return pr.Model(net, pr.Gaussian(0.3), prior=prior)


def stepped(
    prior: object, method: pr.MeanField, steps: int = 2, temperature: float = 1.0, shape: tuple[int, ...] = ()
) -> tuple[Tensor, list[float]]:
    """Return the variational parameters after some steps, and the loss at each step."""
    built = model(prior)
    rows = Data.of(data(), 20).prepared(built.prepare)
    target = make_target(built, rows, temperature, "likelihood")
    state = method.init(target, Plan(rows, 5), stream(0, "start"), torch.Size(shape))
    if isinstance(getattr(state, "variational", None), Tensor):  # the same start, whatever scales the prior suggests
        state.variational[1] = -2.0
    else:
        state.theta[..., built.layout.size :] = -2.0
    losses, generator = [], stream(3, "noise")
    for _ in range(steps):
        state, info = method.step(target, state, rows.tensors, generator)
        losses.append(torch.as_tensor(info.metrics["loss"]).sum().item())
    return getattr(state, "variational", getattr(state, "theta", None)), losses


@pytest.mark.parametrize("prior", [NORMAL_PRIOR, LAPLACE_PRIOR], ids=["Normal", "Laplace"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("estimator", ["pathwise", "local"])
def test_the_penalty_of_a_prior_trains_as_the_prior_does(prior, temperature: float, estimator: str) -> None:
    penalty = Variational(penalty_from_prior(prior, "gaussian"))
    method = pr.MeanField(estimator=estimator)
    wanted, losses = stepped(prior, method, temperature=temperature)
    found, penalised_losses = stepped(penalty, method, temperature=temperature)
    assert penalised_losses == pytest.approx(losses, abs=1e-8)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)  # two steps of Adam: the gradients are equal


def test_the_gradient_equals_the_gradient_of_the_loss_by_autograd() -> None:
    """Value and gradient of E[-log p] at one draw plus r, for a penalty that is not a divergence."""
    penalty = Variational(lambda mu, s: (mu.square() + 3 * s.square() + mu * s).sin(), factor=1.3)
    built = model(penalty)
    rows = Data.of(data(), 20).prepared(built.prepare)
    target = make_target(built, rows, 1.0, "likelihood")
    method = pr.MeanField()
    state = method.init(target, Plan(rows, 5), stream(0, "start"))
    start, generator = state.variational.clone(), stream(3, "noise")
    state, info = method.step(target, state, rows.tensors, generator)
    loc, log_scale = (t.clone().requires_grad_() for t in start)
    w = loc + log_scale.exp() * state.noise[0]
    r = 1.3 * (loc.square() + 3 * log_scale.exp().square() + loc * log_scale.exp()).sin().sum()
    loss = -target.differentiable(w, rows.tensors) + r
    slopes = torch.stack(torch.autograd.grad(loss, [loc, log_scale]))
    assert float(info.metrics["loss"]) == pytest.approx(float(loss.detach()), abs=1e-8)
    torch.testing.assert_close(state.gradient, slopes, rtol=0, atol=1e-8)
    assert float(info.metrics["kl"]) == pytest.approx(float(r.detach()), abs=1e-8)


@pytest.mark.parametrize("family", ["laplace", "logistic", "uniform"])
def test_other_families_train_with_the_penalty_of_a_prior(family: str) -> None:
    """Steps agree up to noise: the prior is evaluated at draws, and its penalty in closed form."""
    penalty = Variational(penalty_from_prior(NORMAL_PRIOR, family))
    method = pr.MeanField(family=family, samples=4_000)
    wanted, losses = stepped(NORMAL_PRIOR, method, steps=1)
    found, penalised_losses = stepped(penalty, method, steps=1)
    assert penalised_losses[0] == pytest.approx(losses[0], rel=5e-3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)  # one step of Adam: the signs of all gradients agree


@pytest.mark.parametrize("family", ["laplace", "logistic", "uniform"])
@pytest.mark.parametrize("temperature", [0.3, 4.0])
def test_the_temperature_multiplies_the_penalty_in_loss_and_bound_alike(family: str, temperature: float) -> None:
    """The first steps at T and at 1 have the same draws, so their bounds differ by (T - 1) r only."""
    built = model(Variational(lambda mu, s: mu.square() + 3 * s.square() + mu * s, factor=1.3))
    rows = Data.of(data(), 20).prepared(built.prepare)
    method, found = pr.MeanField(family=family), []
    for t in (1.0, temperature):
        target = make_target(built, rows, t, "likelihood")
        state = method.init(target, Plan(rows, 5), stream(0, "start"))
        q = method.form(target).family(state.theta)
        mu, s = q.loc.clone(), q.scale.clone()
        _, info = method.step(target, state, rows.tensors, stream(3, "noise"))
        found.append({name: float(value) for name, value in info.metrics.items()})
    r = float(1.3 * (mu.square() + 3 * s.square() + mu * s).sum())
    plain, tempered = found
    assert tempered["nll"] == pytest.approx(plain["nll"], abs=1e-9)
    assert tempered["kl"] == pytest.approx(r, abs=1e-9)
    assert tempered["elbo"] == pytest.approx(plain["elbo"] - (temperature - 1) * r, abs=1e-9)
    assert tempered["loss"] == pytest.approx(plain["loss"] + (temperature - 1) * r, abs=1e-9)


def test_each_member_has_its_own_penalty() -> None:
    penalty = Variational(lambda mu, s: (0.5 * (mu.square() + s.square()) - s.log()).sum())
    both, losses = stepped(penalty, pr.MeanField(), shape=(3,))
    assert both.shape[1] == 3
    standard = Normal(torch.zeros((), dtype=F64), torch.ones((), dtype=F64))
    wanted, other = stepped(standard, pr.MeanField(), shape=(3,))
    torch.testing.assert_close(both, wanted, rtol=0, atol=1e-8)
    constant = 3 * 21 * -0.5  # the constant of the KL that this r lacks
    assert [a + constant for a in losses] == pytest.approx(other, abs=1e-7)


def test_a_penalty_may_be_on_some_parameters_and_a_prior_on_others() -> None:
    penalty = Variational(penalty_from_prior(NORMAL_PRIOR, "gaussian"))
    wanted, losses = stepped(NORMAL_PRIOR, pr.MeanField())
    found, penalised_losses = stepped({"0.*": penalty, "*": NORMAL_PRIOR}, pr.MeanField())
    assert penalised_losses == pytest.approx(losses, abs=1e-8)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)


# Certificates.


def fitted(prior: object, **options: object):
    return pr.fit(model(prior), data(), pr.MeanField(**options), steps=5, progress=False)


def test_a_posterior_carries_the_certificate_of_its_penalty() -> None:
    good = fitted(Variational(lambda mu, s: 0.5 * (mu.square() + s.square() - 1) - s.log())).certificate
    assert good.valid
    cold = fitted(Variational(lambda mu, s: 0.5 * (mu.square() + s.square() - 1) - s.log(), factor=0.1)).certificate
    assert not cold.valid
    assert "0.1" in cold.verdict
    assert fitted(NORMAL_PRIOR).certificate is None


def test_the_certificate_is_for_the_family_of_q() -> None:
    penalty = Variational(penalty_from_prior(NORMAL_PRIOR, "laplace"))
    assert fitted(penalty, family="laplace").certificate.valid
    assert not fitted(penalty).certificate.valid


def test_predictions_under_a_penalty_on_q_need_no_density() -> None:
    prediction = fitted(Variational(lambda mu, s: mu.square() + s.square())).predict(data()[0])
    assert bool(torch.isfinite(prediction.mean).all())


class Line(nn.Module):
    """A linear map whose intercept is a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.offset = (nn.Parameter(torch.zeros(shape, dtype=F64)) for shape in ((3, 1), ()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.slope + self.offset


def test_a_scalar_parameter_is_penalised_too() -> None:
    built = pr.Model(Line(), pr.Gaussian(0.3), prior=Variational(lambda mu, s: mu.square() + s.square() - s.log()))
    assert pr.fit(built, data(), pr.MeanField(), steps=3, progress=False).mean["offset"].shape == ()
    rows = Data.of(data(), 20).prepared(built.prepare)
    target, method = make_target(built, rows, 1.0, "likelihood"), pr.MeanField()
    state = method.init(target, Plan(rows, 5), stream(0, "start"))
    loc, log_scale = (t.clone().requires_grad_() for t in state.variational)
    assert loc.shape == (4,)  # three slopes and the offset
    state, info = method.step(target, state, rows.tensors, stream(3, "noise"))
    r = (loc.square() + (2 * log_scale).exp() - log_scale).sum()
    loss = r - target.differentiable(loc + log_scale.exp() * state.noise[0], rows.tensors)
    slopes = torch.stack(torch.autograd.grad(loss, [loc, log_scale]))
    assert float(info.metrics["kl"]) == pytest.approx(float(r.detach()), abs=1e-8)
    torch.testing.assert_close(state.gradient, slopes, rtol=0, atol=1e-8)


def test_penalties_on_q_at_unit_scale_have_a_value_at_each_w() -> None:
    w = torch.randn(2, 21, generator=stream(0, "w"), dtype=F64)
    penalty = Variational(lambda mu, s: 0.5 * (mu.square() + s.square()) - s.log(), factor=3.0)
    prior = model({"0.*": penalty, "*": NORMAL_PRIOR}).prior
    found = with_unit_scale_penalties(prior).log_prob(w)
    wanted = -1.5 * (w[:, :16].square() + 1).sum(-1) + NORMAL_PRIOR.log_prob(w[:, 16:]).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    with pytest.raises(pr.InputError, match="has no density at a single w"):
        prior.log_prob(w)


# Invalid arguments.


@pytest.mark.parametrize(
    "method",
    [pr.MAP(), pr.HMC(chains=2, warmup=2), pr.FullRank(), pr.NaturalGradient()],
    ids=lambda m: type(m).__name__,
)
def test_a_method_that_needs_a_density_rejects_a_penalty_on_q_in_a_sentence(method) -> None:
    penalty = Variational(lambda mu, s: mu.square() + s.square())
    with pytest.raises(pr.InputError, match="on q has no density at a single w: only MeanField"):
        pr.fit(model(penalty), data(), method, steps=2, progress=False)


def test_the_evidence_under_a_penalty_on_q_is_rejected_in_a_sentence() -> None:
    with pytest.raises(pr.InputError, match="has no density at a single w"):
        fitted(Variational(lambda mu, s: mu.square() + s.square())).evidence()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"estimator": "sticking"}, "The 'estimator' argument of MeanField must be one of pathwise, local, flipout"),
        ({"estimator": "score"}, "The 'estimator' argument of MeanField must be one of pathwise, local, flipout"),
        (
            {"objective": "iwae", "samples": 4},
            "The 'estimator' argument of MeanField must be one of pathwise, local, flipout",
        ),
        ({"divergence": pr.divergences.Renyi(0.5)}, "The 'divergence' argument of MeanField must be left out"),
    ],
)
def test_objectives_without_a_divergence_to_replace_are_rejected(options, says: str) -> None:
    with pytest.raises(pr.InputError) as error:
        fitted(Variational(lambda mu, s: mu.square() + s.square()), **options)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Variational(3), "The 'function' argument of Variational must be a function of means and scales"),
        (
            lambda: Variational(torch.add, factor=0),
            "The 'factor' argument of Variational must be a positive number, got 0",
        ),
        (
            lambda: model(Variational(lambda mu: mu)),
            "must accept the means and scales of '0.weight', but it raised TypeError",
        ),
        (lambda: model(Variational(lambda mu, s: mu[0])), "must return a scalar or one value per weight"),
        (
            lambda: Variational(lambda mu, s: (mu + s).sum()).equivalence(),
            "must return one value per weight to be certified",
        ),
    ],
)
def test_invalid_penalties_on_q_are_rejected_in_a_sentence(make, says: str) -> None:
    with pytest.raises(pr.InputError) as error:
        make()
    assert says in str(error.value)
