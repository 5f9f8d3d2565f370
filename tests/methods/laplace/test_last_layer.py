"""A Bayesian last layer: conjugate regression and logistic regression on features, and updates with new rows."""

import copy
import math

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.testing import assert_covariance_close, assert_mean_close
from priory.testing.contract import classification


def problem(outputs=1, bias=True, likelihood=None, n=40):
    generator = stream(0, "last layer")
    X = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs, bias=bias)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    y = torch.sin(X[:, 0]) + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    if outputs > 1:
        y = torch.stack([y, -y, 2 * y][:outputs], 1)
    return pr.Model(net, likelihood or pr.Gaussian(0.3), prior=0.7), X, y


def design(model, X, bias=True):
    with torch.no_grad():
        h = torch.tanh(model.net[0](X))
    return torch.cat([h, torch.ones_like(h[:, :1])], 1) if bias else h


@pytest.mark.parametrize("bias", [True, False])
def test_with_gaussian_noise_the_posterior_is_conjugate(bias):
    model, X, y = problem(bias=bias)
    phi = design(model, X, bias)
    precision = phi.T @ phi / 0.09 + torch.eye(phi.shape[1], dtype=phi.dtype) / 0.49
    mean = torch.linalg.solve(precision, phi.T @ y / 0.09)
    posterior = pr.fit(model, (X, y), pr.LastLayer(at="network"))
    found = torch.cat([posterior.mean["2.weight"][0], *([posterior.mean["2.bias"]] if bias else [])])
    assert torch.allclose(found, mean, rtol=0, atol=1e-10)
    assert torch.allclose(posterior.belief.precision, precision, rtol=1e-10)
    assert torch.equal(posterior.mean["0.weight"], model.net[0].weight)
    new = torch.randn(3, 2, generator=stream(1, "new"), dtype=torch.float64)
    at = design(model, new, bias)
    variance = (at * torch.linalg.solve(precision, at.T).T).sum(1)
    prediction = posterior.predict(new)
    assert torch.allclose(prediction.mean, at @ mean, atol=1e-10)
    assert torch.allclose(prediction.epistemic, variance, atol=1e-10)
    covariance = 0.09 * torch.eye(len(X), dtype=X.dtype) + 0.49 * phi @ phi.T
    exact = torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
    assert posterior.log_evidence.value == pytest.approx(float(exact), abs=1e-8)
    assert posterior.log_evidence.kind == "log p(D) of the last layer, given the other layers"


def test_draws_have_the_conjugate_mean_and_covariance():
    """20,000 draws, 6 means and 21 covariances at 5 standard errors (false alarms: 2e-5)."""
    model, X, y = problem()
    phi = design(model, X)
    precision = phi.T @ phi / 0.09 + torch.eye(6, dtype=phi.dtype) / 0.49
    posterior = pr.fit(model, (X, y), pr.LastLayer(at="network"))
    draws = posterior.draw(20_000, stream(0, "draws"))[:, posterior.layer.places]
    assert_mean_close(draws, torch.linalg.solve(precision, phi.T @ y / 0.09))
    assert_covariance_close(draws, torch.linalg.inv(precision))


def test_several_outputs_are_independent_regressions():
    model, X, y = problem(outputs=3)
    phi = design(model, X)
    precision = phi.T @ phi / 0.09 + torch.eye(6, dtype=phi.dtype) / 0.49
    posterior = pr.fit(model, (X, y), pr.LastLayer(at="network"))
    for k in range(3):
        mean = torch.linalg.solve(precision, phi.T @ y[:, k] / 0.09)
        assert torch.allclose(posterior.mean["2.weight"][k], mean[:5], atol=1e-10)
    assert torch.allclose(posterior.belief.precision, torch.block_diag(*[precision] * 3), atol=1e-9)


@pytest.mark.parametrize("pieces", [2, 5])
def test_updates_with_new_rows_equal_one_fit_of_all_rows(pieces, tmp_path):
    model, X, y = problem()
    whole = pr.fit(model, (X, y), pr.LastLayer(at="network"))
    parts = list(zip(X.chunk(pieces), y.chunk(pieces), strict=True))
    posterior = pr.fit(model, parts[0], pr.LastLayer(at="network"))
    for part in parts[1:]:
        posterior.save(tmp_path / "last")
        posterior = pr.load(tmp_path / "last", model).update(part)  # from the file alone, without the rows before
    assert torch.allclose(posterior.w, whole.w, atol=1e-9)
    assert torch.allclose(posterior.covariance, whole.covariance, atol=1e-11)
    assert posterior.num_data == 40
    assert posterior.log_evidence.value == pytest.approx(whole.log_evidence.value, abs=1e-8)


def test_labels_have_the_exact_mode_and_the_curvature_there():
    model, X, y = problem(outputs=3, likelihood=pr.Categorical())
    labels = y.argmax(1)
    posterior = pr.fit(model, (X, labels), pr.LastLayer(at="network"))
    w = posterior.w[posterior.layer.places].clone().requires_grad_()
    phi = design(model, X)

    def joint(theta):
        logits = phi @ theta.view(3, 6).T
        return -nn.functional.cross_entropy(logits, labels, reduction="sum") - 0.5 * theta.square().sum() / 0.49

    (slope,) = torch.autograd.grad(joint(w), w)
    assert float(slope.abs().max()) < 1e-4
    hessian = torch.autograd.functional.hessian(joint, w.detach())
    assert torch.allclose(posterior.belief.precision, -hessian, rtol=1e-6, atol=1e-6)
    normaliser = 18 * math.log(0.7 * math.sqrt(2 * math.pi))
    laplace = joint(w.detach()) - normaliser + 9 * math.log(2 * math.pi) - 0.5 * torch.logdet(-hessian)
    assert posterior.log_evidence.value == pytest.approx(float(laplace), abs=1e-6)
    later = posterior.update((X[:5], labels[:5]))
    assert later.num_data == 45
    assert later.predict(X, link="probit").probs.shape == (40, 3)


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
def test_the_posterior_is_tempered(tempers):
    model, X, y = problem()
    phi = design(model, X)
    weight = 1.0 if tempers == "likelihood" else 0.25
    precision = phi.T @ phi / 0.09 / 4 + weight * torch.eye(6, dtype=phi.dtype) / 0.49
    posterior = pr.fit(model, (X, y), pr.LastLayer(at="network"), temperature=4.0, tempers=tempers)
    assert torch.allclose(posterior.belief.precision, precision, rtol=1e-10)


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
@pytest.mark.parametrize("pieces", [2, 5])
def test_updates_with_new_rows_are_tempered_too(pieces, tempers):
    """At T = 4 a row with noise 0.3 counts as one with noise 0.6, up to the normaliser of its density."""
    model, X, y = problem()
    phi = design(model, X)
    weight = 1.0 if tempers == "likelihood" else 0.25
    precision = phi.T @ phi / 0.36 + weight * torch.eye(6, dtype=phi.dtype) / 0.49
    mean = torch.linalg.solve(precision, phi.T @ y / 0.36)
    parts = list(zip(X.chunk(pieces), y.chunk(pieces), strict=True))
    posterior = pr.fit(model, parts[0], pr.LastLayer(at="network"), temperature=4.0, tempers=tempers)
    for part in parts[1:]:
        posterior = posterior.update(part)
    assert torch.allclose(posterior.belief.precision, precision, rtol=1e-10)
    assert torch.allclose(posterior.belief.mean, mean, rtol=0, atol=1e-10)
    whole = pr.fit(model, (X, y), pr.LastLayer(at="network"), temperature=4.0, tempers=tempers)
    assert posterior.log_evidence.value == pytest.approx(whole.log_evidence.value, abs=1e-8)
    if tempers == "likelihood":
        covariance = 0.36 * torch.eye(40, dtype=X.dtype) + 0.49 * phi @ phi.T
        wide = torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
        normaliser = 20 * math.log(2 * math.pi * 0.36) - 5 * math.log(2 * math.pi * 0.09)
        assert posterior.log_evidence.value == pytest.approx(float(wide) + normaliser, abs=1e-8)


def test_members_of_an_ensemble_have_their_own_features():
    model, data = classification()
    posterior = pr.fit(model, data, pr.Ensemble(pr.LastLayer(), 2), steps=20)
    assert not torch.equal(posterior.members[0].mean["0.weight"], posterior.members[1].mean["0.weight"])


def test_a_network_without_a_linear_last_layer_is_refused():
    model, X, y = problem()
    with pytest.raises(pr.InputError, match="'at' argument of LastLayer must be a method, a posterior, or 'network'"):
        pr.LastLayer(at="map")
    soft = pr.Model(nn.Sequential(nn.Linear(2, 1), nn.Softplus()).double(), pr.Gaussian(0.3))
    with pytest.raises(pr.InputError, match="return the output of its last linear layer unchanged"):
        pr.fit(soft, (X, y), pr.LastLayer(at="network"))
    flat = pr.Model(model.net, pr.Gaussian(0.3), prior="flat")
    with pytest.raises(pr.InputError, match="needs a Gaussian prior over every weight of the last layer"):
        pr.fit(flat, (X, y), pr.LastLayer(at="network"))
    wide = pr.Model(nn.Linear(2000, 20), pr.Categorical(), prior=1.0)
    with pytest.raises(
        pr.InputError, match=r"have a last layer that fits into 4 GiB for LastLayer, got 40,020 weights"
    ):
        pr.fit(wide, (torch.zeros(3, 2000), torch.arange(3)), pr.LastLayer(at="network"))

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return self.first(x) + self.last(x)

    beside = pr.Model(Beside().double(), pr.Gaussian(0.3), prior=1.0)
    with pytest.raises(
        pr.InputError, match="LastLayer needs a network with one last layer: its output comes from last"
    ):
        pr.fit(beside, (X, y), pr.LastLayer(at="network"))
    with pytest.raises(pr.InputError, match="needs a Model"):
        pr.fit(pr.Density(lambda p: -(p["x"] ** 2), {"x": pr.Param()}), None, pr.LastLayer(at="network"))
    with pytest.raises(pr.InputError, match="The 'data' argument of update must be inputs and targets"):
        pr.fit(model, (X, y), pr.LastLayer(at="network")).update(None)


def test_invalid_rows_and_options_are_refused():
    model, X, y = problem()
    last = pr.fit(model, (X, y), pr.LastLayer(at="network"))
    for ask, sentence in (
        (
            lambda: last.update(X),
            "The 'data' argument of update must be inputs and targets, such as (X, y), got 1 part.",
        ),
        (
            lambda: last.update((X[:3], y[:2])),
            "The 'data' argument of update must have the same number of rows in each part",
        ),
        (lambda: last.update((X[:3, :1], y[:3])), "The network must take the inputs, got (1, 1)"),
        (lambda: last.predict(X, samples=0), "The 'samples' argument of predict must be an integer >= 1, got 0."),
        (lambda: last.predict(X, seed="a"), "The 'seed' argument of predict must be an integer, got 'a'."),
    ):
        with pytest.raises(pr.InputError) as error:
            ask()
        assert sentence in str(error.value)


def test_the_evidence_of_a_tempered_fit_has_another_kind():
    model, X, y = problem()
    for likelihood, t, kind in (
        (pr.Gaussian(0.3), 1.0, "log p(D) of the last layer, given the other layers"),
        (
            pr.Gaussian(0.3),
            10.0,
            "the tempered log p(D), T = 10, which is not log p(D), of the last layer, given the other",
        ),
        (
            pr.StudentT(3.0, 0.3),
            2.5,
            "Laplace estimate of the tempered log p(D), T = 2.5, which is not log p(D), of the",
        ),
    ):
        model = pr.Model(model.net, likelihood, prior=0.7)
        found = pr.fit(model, (X, y), pr.LastLayer(at="network"), temperature=t).log_evidence
        assert found.kind.startswith(kind)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "columns"),
    [(pr.StudentT(3.0, 0.1), 1, 1), (pr.StudentT(1.0, 0.01), 1, 1), (pr.StudentT(3.0, 0.1), 2, 2),
     (pr.Gaussian("network"), 2, 1), (pr.Gaussian("network"), 4, 2), (pr.StudentT(3.0, "network"), 4, 2)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("exact", [True, False])
def test_noise_whose_log_joint_is_not_concave_has_a_mode_with_the_fisher_curvature(likelihood, outputs, columns, exact):
    """Rows on an exact function of the features have twice the Fisher information, with which scoring oscillates."""
    model, X, y = problem(outputs, likelihood=likelihood)
    phi = design(model, X)
    y = phi @ torch.ones(phi.shape[1], 2, dtype=X.dtype) if exact else torch.stack([X[:, 0], -2 * X[:, 1]], 1)
    y = y[:, 0] if columns == 1 else y
    posterior = pr.fit(model, (X, y), pr.LastLayer(at="network"))
    theta = posterior.belief.mean.clone().requires_grad_()

    def joint(theta):
        f = likelihood.arrange(phi @ theta.view(outputs, -1).T, y.shape[1:])
        return likelihood.log_prob(f, y, {}).sum() - 0.5 * theta.square().sum() / 0.49

    (slope,) = torch.autograd.grad(joint(theta), theta)
    bend = -torch.autograd.functional.hessian(joint, theta.detach())
    assert bool((torch.linalg.eigvalsh(bend) > 0).all())  # a mode, not a saddle point
    assert float(slope @ torch.linalg.solve(bend, slope)) < 1e-8  # twice the remaining gain in nats
    step = torch.autograd.functional.jacobian(
        lambda t: likelihood.arrange(phi @ t.view(outputs, -1).T, y.shape[1:]).reshape(len(X), -1), theta.detach()
    )  # (n, K, Q), in the order of the arranged outputs
    f = likelihood.arrange(phi @ theta.detach().view(outputs, -1).T, y.shape[1:])
    roots = likelihood.roots(f, {}).reshape(-1, len(X), outputs)
    pulled = torch.einsum("cnk,nkq->cnq", roots, step)
    precision = torch.einsum("cnq,cnr->qr", pulled, pulled) + torch.eye(len(theta), dtype=X.dtype) / 0.49
    assert torch.allclose(posterior.belief.precision, precision, rtol=1e-6, atol=1e-6)
    covariance = step[:3] @ torch.linalg.inv(precision) @ step[:3].mT
    assert torch.allclose(posterior.predict(X[:3]).distribution.covariance, covariance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("flat", [nn.Flatten(0), nn.Flatten(0, 1)])
def test_flattening_a_single_output_does_not_change_the_last_layer(flat):
    model, X, y = problem()
    squeezed = pr.Model(nn.Sequential(*model.net, flat), pr.Gaussian(0.3), prior=0.7)
    one, two = (pr.fit(m, (X, y), pr.LastLayer(at="network")) for m in (model, squeezed))
    assert torch.allclose(one.belief.precision, two.belief.precision, rtol=1e-12)
    assert torch.allclose(one.belief.mean, two.belief.mean, rtol=0, atol=1e-12)
    assert torch.allclose(one.predict(X[:4]).std, two.predict(X[:4]).std, rtol=0, atol=1e-12)
    later = [fitted.update((X[:7], y[:7])).belief.mean for fitted in (one, two)]
    assert torch.allclose(*later, rtol=0, atol=1e-12)


def test_a_minibatch_in_a_custom_loop_is_refused():
    model, X, y = problem()
    data = Data.of((X, y)).prepared(model.prepare)
    target, generator, method = make_target(model, data), stream(0, "loop"), pr.LastLayer(at="network")
    plan = method.plan(target, data, 1, 0)
    state = method.init(target, plan, generator)
    with pytest.raises(pr.InputError, match=r"must be all rows as one Data, plan.rows\(step\), not a minibatch"):
        method.step(target, state, next(iter(plan.data.batches(0, 0))), generator)
    state, info = method.step(target, state, plan.rows(0), generator)
    assert info.done
    assert torch.equal(method.posterior(target, state).w, pr.fit(model, (X, y), method).w)


def test_the_mode_of_many_rows_in_float32_agrees_with_float64():
    generator = stream(3, "many rows")
    X = torch.randn(20_000, 6, generator=generator)
    y = (X[:, :3] + 0.5 * torch.randn(20_000, 3, generator=generator)).argmax(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    found = {}
    for kind in (torch.float32, torch.float64):
        model = pr.Model(net.to(kind), pr.Categorical(), prior=1.0)
        found[kind] = pr.fit(model, (X.to(kind), y), pr.LastLayer(at="network"), progress=False)
    one, two = found[torch.float32], found[torch.float64]
    scale = two.covariance.diagonal().sqrt()
    assert ((one.belief.mean - two.belief.mean).abs() < 1e-2 * scale).all()
    assert abs(one.evidence().value - two.evidence().value) < 0.05  # of -11,000 nats


def test_at_a_trained_network_the_evidence_sets_a_learnt_noise():
    """The noise maximises the exact log p(D)."""
    _, X, y = problem(n=200)
    model, _, _ = problem(likelihood=pr.Gaussian())
    phi = design(model, X)
    found = pr.fit(model, (X, y), pr.LastLayer(at="network")).mean["likelihood.noise"]

    def exact(noise):
        covariance = noise**2 * torch.eye(len(X), dtype=X.dtype) + 0.49 * phi @ phi.T
        return float(torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y))

    grid = torch.linspace(0.5, 2.0, 301, dtype=torch.float64) * float(found)
    best = float(grid[torch.tensor([exact(noise) for noise in grid]).argmax()])
    assert float(found) == pytest.approx(best, rel=0.01)


def test_standard_deviations_draws_and_evidence_in_float32_agree_with_float64():
    """50 nearly collinear features of one input, whose precision matrix is too ill-conditioned for float32."""
    generator = stream(4, "collinear")
    X = torch.linspace(-1, 1, 2000, dtype=torch.float64)[:, None]
    y = torch.sin(3 * X[:, 0]) + 0.01 * torch.randn(2000, generator=generator, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype).float())
    at = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    found = {}
    for kind in (torch.float32, torch.float64):
        model = pr.Model(copy.deepcopy(net).to(kind), pr.Gaussian(0.01), prior=1.0)
        posterior = pr.fit(model, (X.to(kind), y.to(kind)), pr.LastLayer(at="network"))
        draws = posterior.draw(2000, stream(0, "draws"))[:, posterior.layer.places].double()
        found[kind] = posterior.predict(at.to(kind)).epistemic.double(), draws.var(0), posterior.log_evidence.value
    (single, drawn, evidence), (double, wanted, exact) = found[torch.float32], found[torch.float64]
    assert torch.allclose(single, double, rtol=1e-2)  # the features are in float32
    assert torch.allclose(drawn, wanted, rtol=1e-2)  # the same noise
    assert evidence == pytest.approx(exact, rel=1e-5)


def test_features_are_computed_at_the_centre_of_a_posterior_with_its_prior():
    model, X, y = problem()
    around = pr.fit(model, (X, y), pr.MeanField(), steps=20)
    found = pr.fit(model, (X, y), pr.LastLayer(at=around))
    assert torch.equal(found.mean["0.weight"], around.mean["0.weight"])
    tuned = pr.fit(model, (X, y), pr.MAP(evidence_every=10), steps=40)
    layer = pr.fit(model, (X, y), pr.LastLayer(at=tuned))
    places = layer.layer.places
    noiseless = layer.belief.precision.diagonal() - tuned.model.prior.precision[places]
    plain = pr.fit(model, (X, y), pr.LastLayer(at=pr.MAP()), steps=1).model.prior.precision[places]
    assert not torch.allclose(tuned.model.prior.precision[places], plain)
    phi = torch.cat([torch.tanh(X @ layer.mean["0.weight"].T + layer.mean["0.bias"]), torch.ones(40, 1).double()], 1)
    assert torch.allclose(noiseless, phi.square().sum(0) / 0.09, rtol=1e-9)
    masks = pr.fit(model, (X, y), pr.Dropout(rate=0.1), steps=20)
    with pytest.raises(pr.InputError, match="The 'at' argument of LastLayer must be a posterior with a centre"):
        pr.fit(model, (X, y), pr.LastLayer(at=masks))


def test_a_last_layer_whose_weight_is_frozen_is_refused():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    net[2].weight.requires_grad_(False)
    with pytest.raises(pr.InputError, match=r"must train the weight of its last layer .*got '2.bias' alone"):
        pr.fit(pr.Model(net, pr.Gaussian(0.1)), (torch.zeros(4, 2), torch.zeros(4)), pr.LastLayer(at="network"))
