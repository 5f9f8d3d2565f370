"""A Gaussian around a mode: draws, densities, linearised outputs and files, against dense formulas."""

import math
import re

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.laplace.laplace import Laplace, Subnetwork
from priory.posteriors import Point
from priory.posteriors import laplace as of_laplace
from priory.posteriors.laplace import runs
from priory.testing.contract import seeded

F64 = torch.float64
STRUCTURES = ["full", "kron", "diag", "lowrank"]
X_NEW = torch.randn(5, 2, generator=stream(9, "new"), dtype=F64)

pytestmark = pytest.mark.filterwarnings("ignore:The gradient of the log joint")


def problem(likelihood=None, dtype=F64, prior=1.0):
    generator = stream(0, "posterior")
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    seeded(net, generator)
    X = torch.randn(10, 2, generator=generator, dtype=dtype)
    likelihood = likelihood or pr.Categorical()
    y = torch.arange(10) % 3 if isinstance(likelihood, pr.Categorical) else torch.sin(X @ torch.ones(2, 3, dtype=dtype))
    return pr.Model(net, likelihood, prior=prior), (X, y)


def fitted(method, likelihood=None, dtype=F64):
    """Fit Laplace around the given weights."""
    model, data = problem(likelihood, dtype)
    rows = Data.of(data).prepared(model.prepare)
    w = make_target(model, rows).start(rows, torch.Size(), stream(0))
    start = Point(make_target(model, rows), w)
    return pr.fit(model, data, Laplace(**{**vars(method), "at": start}), progress=False)


def jacobian(posterior, x):
    """Return the Jacobian (n, C, p), computed by autograd through the network."""
    network = posterior.model.network
    network.set_mode(train=False)
    full = torch.autograd.functional.jacobian(lambda w: network.functional(w, (x,), {}), posterior.w)
    return full[..., posterior.selection.places]


def covariance(posterior):
    return posterior.gaussian.solve(torch.eye(posterior.selection.size, dtype=F64))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_gaussians_mean_and_covariance(structure):
    posterior = fitted(Laplace(structure))
    draws = posterior.draw(40_000, stream(1))
    spread = covariance(posterior)
    z = (draws.mean(0) - posterior.w) / (spread.diagonal() / 40_000).sqrt()
    assert float(z.abs().max()) < 5.5  # 27 comparisons: false alarms below 2e-6
    scale = spread.diagonal().sqrt()
    off = (draws.T.cov() - spread) / scale[:, None] / scale
    assert float(off.abs().max()) < 6 * math.sqrt(2 / 40_000)  # 6 times an upper bound of the standard error


def test_draws_for_a_prediction_are_antithetic_pairs():
    posterior = fitted(Laplace())
    for n in (6, 7):
        draws = posterior.draw_for_prediction(n, stream(1))
        assert len(draws) == n
        half = (n + 1) // 2
        torch.testing.assert_close(draws[half:] + draws[: n // 2], 2 * posterior.w.expand(n // 2, -1))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_log_density_equals_that_of_the_dense_gaussian(structure):
    posterior = fitted(Laplace(structure))
    normal = torch.distributions.MultivariateNormal(posterior.w, covariance(posterior))
    w = posterior.draw(3, stream(2))
    params = posterior.model.layout.constrain(w)
    torch.testing.assert_close(posterior.log_prob(params), normal.log_prob(w), rtol=1e-8, atol=1e-8)


def test_a_selection_has_its_own_density_and_draws_keep_the_other_weights():
    posterior = fitted(Laplace("full", over=["2.bias"]), pr.Gaussian(outputs=3))
    layout = posterior.model.layout
    params = layout.constrain(posterior.draw(2, stream(2)))
    value = posterior.log_prob(params)
    moved = {**params, "0.weight": params["0.weight"] + 1, "likelihood.noise": 2 * params["likelihood.noise"]}
    torch.testing.assert_close(posterior.log_prob(moved), value)
    wanted = layout.constrain(posterior.w)["likelihood.noise"]
    assert torch.equal(posterior.mean["likelihood.noise"], wanted)
    assert torch.equal(posterior.sample(3)["likelihood.noise"], wanted.expand(3, -1))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("over", ["all", "last", ["0.weight"]], ids=str)
def test_linearised_outputs_have_the_covariance_computed_with_the_dense_jacobian(structure, over):
    posterior = fitted(Laplace(structure, over=over))
    slopes, spread = jacobian(posterior, X_NEW), covariance(posterior)
    mean, found = posterior.outputs(X_NEW)
    torch.testing.assert_close(mean, posterior.model.network(posterior.w, (X_NEW,), {}, train=False).detach())
    torch.testing.assert_close(found, slopes @ spread @ slopes.mT, rtol=1e-8, atol=1e-10)
    mean, joint = posterior.outputs(X_NEW, joint=True)
    assert joint.shape == (5, 3, 5, 3)
    torch.testing.assert_close(joint, torch.einsum("acp,pq,bdq->acbd", slopes, spread, slopes), rtol=1e-8, atol=1e-10)


def test_a_joint_covariance_in_chunks_is_the_same():
    posterior = fitted(Laplace())
    whole = posterior.outputs(X_NEW, joint=True)[1]
    torch.testing.assert_close(posterior.outputs(X_NEW, joint=True, limit=1)[1], whole)
    torch.testing.assert_close(posterior.outputs(X_NEW, limit=1)[1], posterior.outputs(X_NEW)[1])


def dense(likelihood, structure, channels=3):
    """Fit Laplace around the given weights of a network from 3 x 3 pixels to one output per pixel."""
    generator = stream(3, "dense")
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, channels, 1)]
    net = nn.Sequential(*layers, *([nn.Flatten(1, 2)] if channels == 1 else [])).to(F64)
    seeded(net, generator)
    X = torch.randn(6, 1, 3, 3, generator=generator, dtype=F64)
    y = (X[:, 0] > 0).long() + (X[:, 0] > 1) if likelihood.classes else X[:, 0].sin()
    model = pr.Model(net, likelihood, prior=1.0)
    return pr.fit(model, (X, y), Laplace(structure, at="network"), progress=False), X


@pytest.mark.parametrize("structure", STRUCTURES)
def test_dense_class_outputs_have_one_covariance_per_pixel(structure, monkeypatch):
    posterior, X = dense(pr.Categorical(), structure)
    mean, whole = posterior.outputs(X)
    joint = posterior.predict(X, link="probit")
    monkeypatch.setattr(of_laplace, "MAX_JOINT_OUTPUTS", 26)
    monkeypatch.setattr(
        of_laplace, "OUTPUTS_PER_PASS", 7
    )  # blocks of two pixels with three classes, and one pixel at the end
    prediction = posterior.predict(X, link="probit")
    assert prediction.distribution.covariance.shape == (6, 3, 3, 3, 3)
    pixels = whole.view(6, 9, 3, 9, 3)
    wanted = torch.stack([pixels[:, i, :, i] for i in range(9)], 1).view(6, 3, 3, 3, 3)
    torch.testing.assert_close(prediction.distribution.covariance, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(prediction.distribution.location, mean)
    torch.testing.assert_close(prediction.probs, joint.probs)
    torch.testing.assert_close(prediction.distribution.location, posterior.predict(X, seed=3).distribution.location)


def test_dense_numeric_outputs_have_variances(monkeypatch):
    posterior, X = dense(pr.Gaussian(0.3), "kron", channels=1)
    joint = posterior.predict(X)
    assert joint.distribution.covariance.shape == (6, 9, 9)
    monkeypatch.setattr(of_laplace, "MAX_JOINT_OUTPUTS", 8)
    monkeypatch.setattr(of_laplace, "OUTPUTS_PER_PASS", 4)
    prediction = posterior.predict(X)
    assert prediction.distribution.covariance.shape == (6, 3, 3)
    torch.testing.assert_close(prediction.std, joint.std)
    torch.testing.assert_close(prediction.mean, joint.mean)


def test_with_a_subnetwork_only_its_coordinates_vary():
    posterior = fitted(Laplace(over=Subnetwork(5)))
    slopes = jacobian(posterior, X_NEW)
    assert slopes.shape == (5, 3, 5)
    torch.testing.assert_close(posterior.outputs(X_NEW)[1], slopes @ covariance(posterior) @ slopes.mT)


def test_a_regression_predicts_in_closed_form_through_the_linearised_network():
    posterior = fitted(Laplace("full"), pr.Gaussian(0.3))
    mean, spread = posterior.outputs(X_NEW)
    prediction = posterior.predict(X_NEW)
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.epistemic, spread.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(mean, 0.09))


def test_labels_are_predicted_by_draws_of_outputs_or_by_a_closed_form_link():
    posterior = fitted(Laplace("kron"))
    sampled = posterior.predict(X_NEW, samples=20_000, seed=1).probs
    mean, spread = posterior.outputs(X_NEW)
    logits = torch.distributions.MultivariateNormal(mean, spread).sample((20_000,))
    torch.testing.assert_close(sampled, logits.softmax(-1).mean(0), rtol=0, atol=0.02)  # 6 standard errors of 0.0035
    for link in ("probit", "bridge"):
        closed = posterior.predict(X_NEW, link=link).probs
        torch.testing.assert_close(closed.sum(-1), torch.ones(5, dtype=F64))
        assert float((closed - sampled).abs().max()) < 0.15
    variances = spread.diagonal(dim1=-2, dim2=-1)
    wanted = (mean / (1 + math.pi / 8 * variances).sqrt()).softmax(-1)
    torch.testing.assert_close(posterior.predict(X_NEW, link="probit").probs, wanted)


def test_predictions_through_the_network_draw_weights():
    posterior = fitted(Laplace("kron"))
    prediction = posterior.predict(X_NEW, samples=8, seed=3, through="network")
    w = posterior.draw_for_prediction(8, stream(3, "predict"))
    outputs = torch.stack([posterior.model.network(v.contiguous(), (X_NEW,), {}, train=False).detach() for v in w])
    torch.testing.assert_close(prediction.outputs, outputs)
    other = fitted(Laplace("kron", predictive="network"))
    torch.testing.assert_close(other.predict(X_NEW, samples=8, seed=3).probs, prediction.probs)
    linear = other.predict(X_NEW, through="linear", link="probit").probs
    torch.testing.assert_close(linear, posterior.predict(X_NEW, link="probit").probs)


def test_the_prediction_of_a_row_does_not_depend_on_other_rows():
    posterior = fitted(Laplace("kron"))
    whole, one = posterior.outputs(X_NEW), posterior.outputs(X_NEW[2:3])
    torch.testing.assert_close(one[0], whole[0][2:3])
    torch.testing.assert_close(one[1], whole[1][2:3])


# Files.


@pytest.mark.parametrize(
    "method",
    [*[Laplace(s) for s in STRUCTURES], Laplace(over=Subnetwork(4)), Laplace(over="last", predictive="network")],
    ids=["full", "kron", "diag", "lowrank", "subnetwork", "last"],
)
def test_a_loaded_posterior_equals_the_saved_one(method, tmp_path):
    posterior = fitted(method, pr.Gaussian(outputs=3))
    posterior.save(tmp_path / "p")
    other = pr.load(tmp_path / "p", problem(pr.Gaussian(outputs=3))[0])
    assert torch.equal(other.draw(4, stream(5)), posterior.draw(4, stream(5)))
    assert torch.equal(other.predict(X_NEW).mean, posterior.predict(X_NEW).mean)
    assert torch.equal(other.predict(X_NEW).variance, posterior.predict(X_NEW).variance)
    assert other.log_evidence == posterior.log_evidence
    assert (other.notes, other.through, repr(other)) == (posterior.notes, posterior.through, repr(posterior))
    assert torch.equal(other.selection.places, posterior.selection.places)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_loaded_float32_posterior_equals_the_saved_one(structure, tmp_path):
    posterior = fitted(Laplace(structure), dtype=torch.float32)
    posterior.save(tmp_path / "p")
    other = pr.load(tmp_path / "p", problem(dtype=torch.float32)[0])
    assert torch.equal(other.draw(4, stream(5)), posterior.draw(4, stream(5)))
    assert other.draw(1, stream(0)).dtype == torch.float32


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_file_stores_the_tuned_prior(structure, tmp_path):
    posterior = fitted(Laplace(structure, tune="layer"), pr.Gaussian(outputs=3))
    posterior.save(tmp_path / "p")
    model = problem(pr.Gaussian(outputs=3))[0]
    other = pr.load(tmp_path / "p", model)
    assert torch.equal(other.draw(4, stream(5)), posterior.draw(4, stream(5)))
    assert torch.equal(other.model.prior.precision, posterior.model.prior.precision)
    assert not torch.equal(other.model.prior.precision, model.prior.precision)
    assert other.log_evidence == posterior.log_evidence


def test_coordinates_are_stored_as_ranges():
    assert runs(torch.tensor([3])) == [[3, 4]]
    assert runs(torch.arange(7)) == [[0, 7]]
    assert runs(torch.tensor([0, 2, 3, 9])) == [[0, 1], [2, 4], [9, 10]]


# Notes and invalid arguments.


def test_fallbacks_are_listed_in_notes_and_repr():
    generator = stream(1, "posterior")
    net = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(F64)
    seeded(net, generator)
    model, data = pr.Model(net, pr.Categorical(), prior=1.0), problem()[1]
    posterior = pr.fit(model, data, Laplace(), steps=5, progress=False)
    assert any("1.weight of LayerNorm: exact block" in note for note in posterior.notes)
    assert "kron over 35 of 35 parameters" in repr(posterior)
    assert "LayerNorm" in repr(posterior)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"through": "glass"}, "'through' argument of predict must be 'linear' or 'network', got 'glass'"),
        ({"link": "logit"}, "'link' argument of predict must be among samples, probit, extended, bridge, got 'logit'"),
        (
            {"link": "probit", "through": "network"},
            "'link' argument of predict must be 'samples' for draws through the network",
        ),
        ({"samples": 0}, "'samples' argument of predict must be an integer >= 1, got 0"),
        ({"seed": 0.5}, "'seed' argument of predict must be an integer, got 0.5"),
    ],
    ids=str,
)
def test_invalid_options_of_predict_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        fitted(Laplace("diag")).predict(X_NEW, **options)


def test_invalid_inputs_are_refused():
    posterior = fitted(Laplace("diag"))
    with pytest.raises(
        InputError, match="'x' argument of predict must have one row or more, and equally many in each part"
    ):
        posterior.predict((X_NEW, X_NEW[:2]))
    with pytest.raises(InputError, match=r"The 'x' argument of predict must be finite, got NaN in row 0"):
        posterior.outputs(X_NEW * math.nan)
    with pytest.raises(InputError, match="network must take the inputs"):
        posterior.predict(torch.zeros(2, 7, dtype=F64))
    with pytest.raises(
        InputError,
        match=r"The 'link' argument of predict must be 'samples' for .*, whose targets are numbers",
    ):
        fitted(Laplace("diag"), pr.Gaussian(0.3)).predict(X_NEW, link="probit")


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField()], ids=repr)
def test_other_posteriors_refuse_the_options_of_laplace(method):
    posterior = pr.fit(*problem(), method, steps=2, progress=False)
    kind = type(posterior).__name__
    with pytest.raises(
        InputError, match=f"The 'link' argument of predict must be left out: {kind} takes samples, seed, got 'p"
    ):
        posterior.predict(X_NEW, link="probit")
    assert len(posterior.predict(x=X_NEW, samples=2, seed=1).probs) == 5


@pytest.mark.parametrize("x", [None, "words", 3.0], ids=repr)
def test_invalid_inputs_are_named_in_the_error(x):
    with pytest.raises(InputError, match="The 'x' argument of predict must"):
        fitted(Laplace("diag")).predict(x)
    with pytest.raises(InputError, match="Part 1 of the 'x' argument of predict must"):
        fitted(Laplace("diag")).predict((X_NEW, x))
