"""A Bayesian last layer: conjugate on features, the mode of a logistic regression, rows that come later."""

import math

import pytest
import torch
from torch import nn

import priory as pr
from priory.streams import stream
from priory.testing.contract import CLAUSES, classification

KEPT = [
    clause
    for clause in CLAUSES
    if clause.__name__
    not in ("records_one_number_a_step", "finds_the_mean_of_a_gaussian", "stays_inside_the_support")  # no Density
]


@pytest.mark.parametrize("clause", KEPT, ids=lambda clause: clause.__name__)
def test_it_keeps_the_contract(clause):
    clause(pr.LastLayer())


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
def test_with_gaussian_noise_it_is_the_conjugate_posterior(bias):
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


def test_several_outputs_are_regressions_of_their_own():
    model, X, y = problem(outputs=3)
    phi = design(model, X)
    precision = phi.T @ phi / 0.09 + torch.eye(6, dtype=phi.dtype) / 0.49
    posterior = pr.fit(model, (X, y), pr.LastLayer(at="network"))
    for k in range(3):
        mean = torch.linalg.solve(precision, phi.T @ y[:, k] / 0.09)
        assert torch.allclose(posterior.mean["2.weight"][k], mean[:5], atol=1e-10)
    assert torch.allclose(posterior.belief.precision, torch.block_diag(*[precision] * 3), atol=1e-9)


@pytest.mark.parametrize("pieces", [2, 5])
def test_rows_that_come_later_give_what_all_rows_at_once_do(pieces, tmp_path):
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
def test_it_follows_the_temperature(tempers):
    model, X, y = problem()
    phi = design(model, X)
    weight = 1.0 if tempers == "likelihood" else 0.25
    precision = phi.T @ phi / 0.09 / 4 + weight * torch.eye(6, dtype=phi.dtype) / 0.49
    posterior = pr.fit(model, (X, y), pr.LastLayer(at="network"), temperature=4.0, tempers=tempers)
    assert torch.allclose(posterior.belief.precision, precision, rtol=1e-10)


def test_an_ensemble_of_them_has_features_of_its_own():
    model, data = classification()
    posterior = pr.fit(model, data, pr.Ensemble(pr.LastLayer(), 2), steps=20)
    assert not torch.equal(posterior.members[0].mean["0.weight"], posterior.members[1].mean["0.weight"])


def test_what_has_no_last_layer_is_refused_in_a_sentence():
    model, X, y = problem()
    with pytest.raises(pr.InputError, match="'at' of LastLayer must be a method, a posterior, or 'network'"):
        pr.LastLayer(at="map")
    soft = pr.Model(nn.Sequential(nn.Linear(2, 1), nn.Softplus()).double(), pr.Gaussian(0.3))
    with pytest.raises(pr.InputError, match="give the output of its last linear layer as its own"):
        pr.fit(soft, (X, y), pr.LastLayer(at="network"))
    flat = pr.Model(model.net, pr.Gaussian(0.3), prior="flat")
    with pytest.raises(pr.InputError, match="needs a Gaussian prior over every weight of the last layer"):
        pr.fit(flat, (X, y), pr.LastLayer(at="network"))
    wide = pr.Model(nn.Linear(2000, 20), pr.Categorical(), prior=1.0)
    with pytest.raises(pr.InputError, match=r"have a last layer that fits into 4 GiB\. Got 40,020 weights"):
        pr.fit(wide, (torch.zeros(3, 2000), torch.arange(3)), pr.LastLayer(at="network"))
    with pytest.raises(pr.InputError, match="needs a Model"):
        pr.fit(pr.Density(lambda p: -(p["x"] ** 2), {"x": pr.Param()}), None, pr.LastLayer(at="network"))
    with pytest.raises(pr.InputError, match="The 'data' of update must be inputs and targets"):
        pr.fit(model, (X, y), pr.LastLayer(at="network")).update(None)


def test_many_rows_in_single_precision_have_the_mode_that_double_precision_has():
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
    assert abs(one.evidence().value - two.evidence().value) < 0.05  # of -11,000 nats, in rows of single precision
