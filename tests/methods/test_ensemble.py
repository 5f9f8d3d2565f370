"""Ensembles: members are fits of their own, anchored ones draws of an exact posterior, and the contract."""

import pytest
import torch
from torch import nn

import priory as pr
from priory.data import Data
from priory.loop import make_target
from priory.methods.ensemble import drawn_from_prior, noise_of_targets
from priory.streams import stream
from priory.testing import assert_covariance_close, assert_mean_close
from priory.testing.contract import CLAUSES, classification, regression


def rows(n=40, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 2, generator=generator, dtype=dtype)
    return X, X @ torch.tensor([1.0, -0.5], dtype=dtype) + 0.3 * torch.randn(n, generator=generator, dtype=dtype)


def line(noise=0.3):
    return pr.Model(nn.Linear(2, 1, dtype=torch.float64), pr.Gaussian(noise), prior=0.8)


def exact(X, y, noise=0.3, scale=0.8):
    """The mean and covariance of (weights, bias) under the conjugate posterior."""
    design = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    covariance = torch.linalg.inv(design.T @ design / noise**2 + torch.eye(3, dtype=X.dtype) / scale**2)
    return covariance @ design.T @ y / noise**2, covariance


def vectors(posterior):
    return torch.stack([torch.cat([t.reshape(-1) for t in member.mean.values()]) for member in posterior.members])


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
def test_it_keeps_the_contract(clause):
    clause(pr.Ensemble(pr.MAP(), 3))


def test_members_of_a_convex_problem_all_find_its_one_mode():
    X, y = rows()
    mean, _ = exact(X, y)
    posterior = pr.fit(line(), (X, y), pr.Ensemble(pr.MAP(learning_rate=0.05), 4), steps=1500)
    assert len(posterior.members) == 4
    assert torch.allclose(vectors(posterior), mean.expand(4, 3), atol=1e-6)


NOISE = 2.0  # so wide that twelve rows say about as much as the prior: a wrong part of either shows
TEMPERED = pytest.mark.parametrize(("t", "tempers"), [(1.0, "likelihood"), (4.0, "likelihood"), (4.0, "posterior")])


def target_of(t, tempers):
    X, y = rows(12)
    model = line(NOISE)
    data = Data.of((X, y), batch_size=12).prepared(model.prepare)
    return make_target(model, data, t, tempers), data


def solved(anchors, noise, t, tempers):
    """Where -log p(y + s sqrt(T) e | w) - T log p(w - a) is least, for every member: a linear system."""
    X, y = rows(12)
    design = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    weight = (t if tempers == "likelihood" else 1.0) / 0.64
    precision = design.T @ design / NOISE**2 + weight * torch.eye(3, dtype=X.dtype)
    moved = y + NOISE * t**0.5 * noise
    return torch.linalg.solve(precision, (moved @ design / NOISE**2 + weight * anchors).T).T


@TEMPERED
def test_each_anchored_member_of_a_linear_model_is_where_its_own_anchor_and_noise_say(t, tempers):
    method, (target, data), generator = anchored(3), target_of(t, tempers), stream(0, "members")
    plan = method.plan(target, data, 500, 0)
    state = method.init(target, plan, generator, torch.Size())
    for _ in range(500):
        state, _ = method.step(target, state, next(plan.data.batches(0, 0)), generator)
    found = vectors(method.posterior(target, state))
    assert torch.allclose(found, solved(state.anchors, state.noise, t, tempers), rtol=0, atol=1e-7)


@TEMPERED
def test_anchored_members_of_a_linear_model_are_draws_from_the_exact_posterior(t, tempers):
    (target, data), generator, (X, y) = target_of(t, tempers), stream(0, "anchors"), rows(12)
    anchors, noise = drawn_from_prior(target, 20_000, generator), noise_of_targets(target, data, 20_000, generator)
    design = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    wider = t if tempers == "posterior" else 1.0
    precision = design.T @ design / NOISE**2 / t + torch.eye(3, dtype=X.dtype) / 0.64 / wider
    covariance = torch.linalg.inv(precision)
    w = solved(anchors, noise, t, tempers)
    # three means and nine covariances at 5 standard errors: a false alarm in 100,000 seeds
    assert_mean_close(w, covariance @ design.T @ y / NOISE**2 / t)
    assert_covariance_close(w, covariance)
    with pytest.raises(AssertionError):  # as it would be without noise on the targets
        assert_covariance_close(solved(anchors, 0 * noise, t, tempers), covariance)


def anchored(size):
    return pr.Ensemble(pr.MAP(learning_rate=0.1), size, anchored=True)


def test_an_anchored_ensemble_takes_a_noise_that_is_learnt_and_labels():
    model, data = regression(torch.float64)
    posterior = pr.fit(model, data, pr.Ensemble(pr.MAP(), 3, anchored=True), steps=30)
    assert len({float(member.mean["likelihood.noise"]) for member in posterior.members}) == 3
    model, data = classification()
    assert pr.fit(model, data, pr.Ensemble(pr.MAP(), 2, anchored=True), steps=20).predict(data[0]).probs.shape == (
        20,
        3,
    )


@pytest.mark.parametrize("method", [pr.Laplace(), pr.MeanField(), pr.SWAG(snapshots=20), pr.MeanField(start=pr.MAP())])
def test_an_ensemble_of_any_method_predicts_and_keeps_its_members(method, tmp_path):
    model, data = classification()
    posterior = pr.fit(model, data, pr.Ensemble(method, 2), steps=20)
    prediction = posterior.predict(data[0], samples=8)
    parts = [member.predict(data[0], samples=4, seed=k) for k, member in enumerate(posterior.members)]
    assert torch.allclose(prediction.probs, (parts[0].probs + parts[1].probs) / 2)
    posterior.save(tmp_path / "ensemble")
    loaded = pr.load(tmp_path / "ensemble", model)
    assert torch.equal(loaded.predict(data[0], samples=8).probs, prediction.probs)
    assert type(loaded.members[0]) is type(posterior.members[0])


def test_every_member_keeps_its_own_batch_statistics(tmp_path):
    X, y = rows(30, dtype=torch.float32)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    model = pr.Model(net, pr.Gaussian(0.3))
    posterior = pr.fit(model, (X, y), pr.Ensemble(size=2), steps=20)
    first, second = (member.buffers["1.running_mean"] for member in posterior.members)
    assert first.shape == (4,)
    assert not torch.equal(first, second)
    posterior.save(tmp_path / "ensemble")
    assert torch.equal(pr.load(tmp_path / "ensemble", model).predict(X).mean, posterior.predict(X).mean)


def test_a_noise_that_is_learnt_is_each_members_own():
    model, data = regression(torch.float64)
    posterior = pr.fit(model, data, pr.Ensemble(pr.MAP(), 3), steps=300)
    alone = [
        pr.fit(model, data, pr.MAP(start=member), steps=60).mean["likelihood.noise"] for member in posterior.members
    ]
    found = [member.mean["likelihood.noise"] for member in posterior.members]
    assert all(abs(float((a / b).log())) < 0.5 for a, b in zip(found, alone, strict=True))
    assert len({float(noise) for noise in found}) == 3


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: pr.Ensemble(size=0), "The 'size' of Ensemble must be a whole number from 1. Got 0 instead."),
        (lambda: pr.Ensemble(pr.MAP), "The 'method' of Ensemble must be a method such as MAP(). Got the class MAP"),
        (lambda: pr.Ensemble(pr.HMC()), "The 'method' of Ensemble must be one that doesn't sample"),
        (lambda: pr.Ensemble(pr.MeanField(), anchored=True), "The 'anchored' of Ensemble must be False unless"),
        (lambda: pr.Ensemble(anchored=1), "The 'anchored' of Ensemble must be True or False. Got 1 instead."),
    ],
)
def test_what_an_ensemble_can_not_be_is_said_in_a_sentence(build, sentence):
    with pytest.raises(pr.InputError) as error:
        build()
    assert sentence in str(error.value)


def test_anchors_need_a_gaussian_prior_and_rows_in_memory():
    X, y = rows()
    moved = pr.Ensemble(size=2, anchored=True)
    flat = pr.Model(nn.Linear(2, 1, dtype=X.dtype), pr.Gaussian(0.3), prior="flat")
    with pytest.raises(pr.InputError, match="have a Gaussian prior over every weight"):
        pr.fit(flat, (X, y), moved, steps=2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=8)
    with pytest.raises(pr.InputError, match="have its data in memory"):
        pr.fit(line(), loader, moved, steps=2)
