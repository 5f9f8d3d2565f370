"""Ensembles: members are separate fits; anchored members of a linear model are draws of the exact posterior."""

import itertools
import math
from datetime import timedelta

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributions import Normal
from torch.func import functional_call

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.ensemble.ensemble import drawn_from_prior, noise_of_targets
from priory.methods.point.map import fit_noise_on_held_out
from priory.testing import assert_covariance_close, assert_mean_close, contract
from priory.testing.contract import classification, regression


def rows(n=40, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 2, generator=generator, dtype=dtype)
    return X, X @ torch.tensor([1.0, -0.5], dtype=dtype) + 0.3 * torch.randn(n, generator=generator, dtype=dtype)


def line(noise=0.3):
    return pr.Model(nn.Linear(2, 1, dtype=torch.float64), pr.Gaussian(noise), prior=0.8)


def exact(X, y, noise=0.3, scale=0.8):
    """Return mean and covariance of (weights, bias) under the conjugate posterior."""
    design = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    covariance = torch.linalg.inv(design.T @ design / noise**2 + torch.eye(3, dtype=X.dtype) / scale**2)
    return covariance @ design.T @ y / noise**2, covariance


def vectors(posterior):
    return torch.stack([torch.cat([t.reshape(-1) for t in member.mean.values()]) for member in posterior.members])


OF_PREDICTIONS = (
    contract.gives_the_same_bits_for_the_same_seed,
    contract.resumes_with_the_same_bits,
    contract.leaves_the_module_alone,
    contract.predicts_in_the_shape_of_the_targets,
    contract.survives_a_round_trip_through_a_file,
    contract.records_one_value_per_step,
)


@pytest.mark.parametrize("anchored", [True, "function"])
@pytest.mark.parametrize("clause", OF_PREDICTIONS, ids=lambda clause: clause.__name__)
def test_anchored_members_satisfy_the_contract_of_predictions(clause, anchored):
    clause(pr.Ensemble(pr.MAP(), 2, anchored=anchored))


def test_members_start_at_different_points():
    model, data = classification()
    for anchored in (False, True, "function"):
        members = pr.fit(model, data, pr.Ensemble(pr.MAP(1e-6), 4, anchored=anchored), steps=1).members
        for first, second in itertools.combinations([member.w for member in members], 2):
            assert float((first - second).abs().max()) > 0.1


def test_all_members_find_the_mode_of_a_convex_problem():
    X, y = rows()
    mean, _ = exact(X, y)
    posterior = pr.fit(line(), (X, y), pr.Ensemble(pr.MAP(learning_rate=0.05), 4), steps=1500)
    assert len(posterior.members) == 4
    assert torch.allclose(vectors(posterior), mean.expand(4, 3), atol=1e-6)


NOISE = 2.0  # so large that data and prior have equal weight, and errors in either show
TEMPERED = pytest.mark.parametrize(("t", "tempers"), [(1.0, "likelihood"), (4.0, "likelihood"), (4.0, "posterior")])


def target_of(t, tempers):
    X, y = rows(12)
    model = line(NOISE)
    data = Data.of((X, y), batch_size=12).prepared(model.prepare)
    return make_target(model, data, t, tempers), data


def solved(anchors, noise, t, tempers):
    """Return the minimiser of -log p(y + s sqrt(T) e | w) - T log p(w - a) of every member, by a linear system."""
    X, y = rows(12)
    design = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    weight = (t if tempers == "likelihood" else 1.0) / 0.64
    precision = design.T @ design / NOISE**2 + weight * torch.eye(3, dtype=X.dtype)
    moved = y + NOISE * t**0.5 * noise
    return torch.linalg.solve(precision, (moved @ design / NOISE**2 + weight * anchors).T).T


def weights_of(posterior):
    """Return the weights of each member of a linear model, (M, P), including those of its prior function."""
    return torch.stack([member.w + getattr(member, "a", 0) for member in posterior.members])


@TEMPERED
@pytest.mark.parametrize("kind", [True, "function"])
def test_each_anchored_member_of_a_linear_model_is_the_minimiser_of_its_objective(t, tempers, kind):
    method, (target, data), generator = anchored(3, kind), target_of(t, tempers), stream(0, "members")
    plan = method.plan(target, data, 700, 0)
    state = method.init(target, plan, generator, torch.Size())
    for _ in range(700):
        state, _ = method.step(target, state, next(plan.data.batches(0, 0)), generator)
    found, seen = weights_of(method.posterior(target, state)), state.seen
    assert torch.allclose(found, solved(seen.anchors, seen.noise, t, tempers), rtol=0, atol=1e-8)


def test_prior_functions_of_a_linear_model_predict_like_anchors():
    """With the same draws of the prior and the same noise, both predict the same from different starts."""
    X, y = rows(12)
    fits = [pr.fit(line(NOISE), (X, y), anchored(4, kind), steps=700) for kind in (True, "function")]
    first, second = (fit.predict(3 * X) for fit in fits)
    assert torch.allclose(first.outputs, second.outputs, rtol=0, atol=1e-8)
    assert torch.allclose(first.std, second.std, rtol=0, atol=1e-8)
    assert float(first.epistemic.min()) > 1e-3


@TEMPERED
def test_anchored_members_of_a_linear_model_are_draws_from_the_exact_posterior(t, tempers):
    (target, data), generator, (X, y) = target_of(t, tempers), stream(0, "anchors"), rows(12)
    anchors, noise = drawn_from_prior(target, 20_000, generator), noise_of_targets(target, data, 20_000, generator)
    design = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    wider = t if tempers == "posterior" else 1.0
    precision = design.T @ design / NOISE**2 / t + torch.eye(3, dtype=X.dtype) / 0.64 / wider
    covariance = torch.linalg.inv(precision)
    w = solved(anchors, noise, t, tempers)
    # 3 means and 9 covariances at 5 standard errors (false alarms: 1e-5).
    assert_mean_close(w, covariance @ design.T @ y / NOISE**2 / t)
    assert_covariance_close(w, covariance)
    with pytest.raises(AssertionError):  # the covariance without noise on the targets
        assert_covariance_close(solved(anchors, 0 * noise, t, tempers), covariance)


def anchored(size, kind=True):
    return pr.Ensemble(pr.MAP(learning_rate=0.1), size, anchored=kind)


NETS = {
    "a chain": lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)),
    "small and dense": lambda: nn.Sequential(
        nn.Linear(2, 4), nn.Sequential(nn.LayerNorm(4), nn.Tanh()), nn.Linear(4, 2)
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
}
NOISES = {
    "given": lambda: pr.Gaussian(torch.tensor([0.5, 2.0])),
    "learnt": lambda: pr.Gaussian(outputs=2),
}


@pytest.mark.parametrize(("net", "noise"), [*((net, "given") for net in NETS), ("a chain", "learnt")])
@pytest.mark.parametrize("kind", [True, "function"])
def test_the_objective_of_anchored_members_equals_that_of_each_computed_separately(kind, net, noise):
    """Two members at temperature 3 and three rows of six: values and gradients of both terms, in two calls."""
    torch.manual_seed(0)
    net, X, y = NETS[net]().double(), torch.randn(6, 2).double(), torch.randn(6, 2).double()
    model = pr.Model(net, NOISES[noise](), prior=Normal(0.25, 0.5))
    method, data = pr.Ensemble(pr.MAP(), 2, anchored=kind), Data.of((X, y), 6).prepared(model.prepare)
    target = make_target(model, data, temperature=3.0)
    state = method.init(target, method.plan(target, data, 10, 0), stream(0, "members"), torch.Size())
    seen, w, rows = state.seen, state.together.w, torch.tensor([2, 4, 0])
    batch, buffers = (X[rows], y[rows], rows), target.buffers(torch.Size([2]))
    _, found = (
        [*seen.log_likelihood_and_grad(w, batch, buffers), *seen.log_prior_and_grad(w)] for _ in range(2)
    )  # the noise is the same at every step

    shapes = {name: p.shape for name, p in net.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def outputs_at(v, train):
        named = {name: t.view(shapes[name]) for name, t in zip(shapes, v[: sum(sizes)].split(sizes), strict=True)}
        return functional_call(net.train(train), {**named, **{n: b.clone() for n, b in net.named_buffers()}}, X[rows])

    for m in range(2):
        leaf = w[m].clone().requires_grad_()
        weights, tail = leaf.split([sum(sizes), len(leaf) - sum(sizes)])
        outputs, centre = outputs_at(weights, train=True), seen.anchors[m, : sum(sizes)]
        if kind == "function":
            outputs, centre = outputs + outputs_at(seen.anchors[m], train=False), torch.zeros_like(centre)
        scale = torch.tensor([0.5, 2.0]).double() if noise == "given" else tail.exp()
        moved = y[rows] + math.sqrt(3) * scale.detach() * seen.noise[m, rows]
        value = 6 / 3 * Normal(outputs, scale).log_prob(moved).sum()
        prior = Normal(centre, 0.5).log_prob(weights).sum() + Normal(torch.zeros_like(tail), 3.0).log_prob(tail).sum()
        wanted = [value, *torch.autograd.grad(value, leaf, retain_graph=True), prior, *torch.autograd.grad(prior, leaf)]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[m], theirs.detach(), rtol=1e-10, atol=1e-10)


def test_a_prior_function_is_added_in_predictions_and_parameters_are_refused(tmp_path):
    model, data = classification()
    posterior = pr.fit(model, data, pr.Ensemble(pr.MAP(), 3, anchored="function"), steps=20)
    total = 0
    for member in posterior.members:
        learnt, fixed = (
            functional_call(model.net, model.layout.constrain(v), (data[0],)) for v in (member.w, member.a)
        )
        probs = torch.softmax(learnt + fixed, -1).detach()
        assert torch.allclose(member.predict(data[0]).probs, probs, atol=1e-6)
        total = total + probs / 3
    prediction = posterior.predict(data[0])
    assert torch.allclose(prediction.probs, total, atol=1e-6)
    posterior.save(tmp_path / "functions")
    assert torch.equal(pr.load(tmp_path / "functions", model).predict(data[0]).probs, prediction.probs)
    for ask in (lambda: posterior.mean, posterior.sample, lambda: posterior.members[0].mean):
        with pytest.raises(pr.InputError, match="has no single parameter vector; use predict"):
            ask()


def test_a_learnt_noise_is_estimated_from_the_residuals_of_the_mean_of_the_members():
    """The residuals of each member contain the added noise, so a scale estimated from them would feed back."""
    X, y = rows()
    model = pr.Model(nn.Linear(2, 1, dtype=torch.float64), pr.Gaussian(), prior=0.8)
    method, data = pr.Ensemble(pr.MAP(), 3, anchored="function"), Data.of((X, y), 40).prepared(model.prepare)
    target = make_target(model, data)
    plan = method.plan(target, data, 100, 0)
    state = method.init(target, plan, stream(0, "members"), torch.Size())
    inner, (at, left) = state.together, plan.held.tensors
    for _ in range(30):
        fit_noise_on_held_out(state.seen, inner)
    weights = inner.w[:, :3] + state.seen.anchors[:, :3]
    residual = left - torch.cat([at, torch.ones_like(at[:, :1])], 1) @ weights.mean(0)
    assert torch.allclose(inner.w[:, 3].exp(), residual.square().mean().sqrt(), rtol=0.02)


def test_an_anchored_member_starts_at_the_corresponding_member_of_its_start():
    X, y = rows()
    first = pr.fit(line(), (X, y), pr.Ensemble(pr.MAP(), 3), steps=3)
    for kind in (True, "function"):
        method = pr.Ensemble(pr.MAP(1e-9, start=first), 3, anchored=kind)
        again = pr.fit(line(), (X, y), method, steps=1)
        for member, start in zip(again.members, first.members, strict=True):
            assert torch.allclose(member.w, start.w, atol=1e-8)


def test_an_anchored_ensemble_supports_learnt_noise_and_labels():
    model, data = regression(torch.float64)
    posterior = pr.fit(model, data, pr.Ensemble(pr.MAP(), 3, anchored=True), steps=30)
    assert len({float(member.mean["likelihood.noise"]) for member in posterior.members}) == 1
    model, data = classification()
    assert pr.fit(model, data, pr.Ensemble(pr.MAP(), 2, anchored=True), steps=20).predict(data[0]).probs.shape == (
        20,
        3,
    )


@pytest.mark.parametrize("method", [pr.Laplace(), pr.MeanField(), pr.SWAG(snapshots=20), pr.MeanField(start=pr.MAP())])
def test_an_ensemble_of_any_method_predicts_and_is_saved_with_its_members(method, tmp_path):
    model, data = classification()
    posterior = pr.fit(model, data, pr.Ensemble(method, 2), steps=20)
    prediction = posterior.predict(data[0], samples=8)
    parts = [member.predict(data[0], samples=4, seed=k) for k, member in enumerate(posterior.members)]
    assert torch.allclose(prediction.probs, (parts[0].probs + parts[1].probs) / 2)
    posterior.save(tmp_path / "ensemble")
    loaded = pr.load(tmp_path / "ensemble", model)
    assert torch.equal(loaded.predict(data[0], samples=8).probs, prediction.probs)
    assert type(loaded.members[0]) is type(posterior.members[0])


def test_every_member_has_its_own_batch_statistics(tmp_path):
    X, y = rows(30, dtype=torch.float32)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    model = pr.Model(net, pr.Gaussian(0.3))
    posterior = pr.fit(model, (X, y), pr.Ensemble(size=2), steps=20)
    first, second = (member.buffers["1.running_mean"] for member in posterior.members)
    assert first.shape == (4,)
    assert not torch.equal(first, second)
    posterior.save(tmp_path / "ensemble")
    assert torch.equal(pr.load(tmp_path / "ensemble", model).predict(X).mean, posterior.predict(X).mean)


def test_every_member_has_its_own_learnt_noise():
    model, data = regression(torch.float64)
    posterior = pr.fit(model, data, pr.Ensemble(pr.MAP(), 3), steps=300)
    alone = [
        pr.fit(model, data, pr.MAP(start=member), steps=60).mean["likelihood.noise"] for member in posterior.members
    ]
    found = [member.mean["likelihood.noise"] for member in posterior.members]
    assert all(abs(float((a / b).log())) < 0.5 for a, b in zip(found, alone, strict=True))
    assert len({float(noise) for noise in found}) == 3


def run_process(here, folder):
    """Fit the members of one of two processes, and write all members to a file."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    distributed.init_process_group("gloo", init_method=meet, rank=here, world_size=2, timeout=timedelta(minutes=3))
    model, data = classification()
    found = [pr.fit(model, data, pr.Ensemble(pr.MAP(), 4, anchored=kind), steps=5) for kind in (False, "function")]
    torch.save([torch.stack([member.w for member in each.members]) for each in found], folder / f"{here}.pt")
    with pytest.raises(pr.InputError, match="The 'size' argument of Ensemble must be a multiple of the 2 processes"):
        pr.fit(model, data, pr.Ensemble(pr.MAP(), 3), steps=5)
    distributed.destroy_process_group()


def test_processes_split_the_members_and_both_return_all_of_them(tmp_path):
    multiprocessing.spawn(run_process, (tmp_path,), nprocs=2)
    first, second = (torch.load(tmp_path / f"{k}.pt") for k in (0, 1))
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)
        assert len({tuple(w.tolist()) for w in mine}) == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: pr.Ensemble(size=0), "The 'size' argument of Ensemble must be an integer >= 1, got 0."),
        (
            lambda: pr.Ensemble(pr.MAP),
            "The 'method' argument of Ensemble must be a method such as MAP(), got the class MAP",
        ),
        (
            lambda: pr.Ensemble(pr.Ensemble()),
            "The 'method' argument of Ensemble must be the method of one member, not an Ensemble",
        ),
        (lambda: pr.Ensemble(pr.LastLayer(at="network")), "fit separate weights for each member"),
        (lambda: pr.Ensemble(pr.Laplace(at="network")), "fit separate weights for each member"),
        (
            lambda: pr.Ensemble(pr.HMC()),
            "The 'method' argument of Ensemble must not be a sampler, which runs its own chains",
        ),
        (
            lambda: pr.Ensemble(pr.MeanField(), anchored=True),
            "The 'anchored' argument of Ensemble must be False unless",
        ),
        (
            lambda: pr.Ensemble(anchored=1),
            "The 'anchored' argument of Ensemble must be True, False or 'function', got 1.",
        ),
    ],
)
def test_invalid_ensembles_are_refused(build, message):
    with pytest.raises(pr.InputError) as error:
        build()
    assert message in str(error.value)


def test_anchors_need_a_gaussian_prior_and_rows_in_memory():
    X, y = rows()
    moved = pr.Ensemble(size=2, anchored=True)
    flat = pr.Model(nn.Linear(2, 1, dtype=X.dtype), pr.Gaussian(0.3), prior="flat")
    with pytest.raises(pr.InputError, match="have a Gaussian prior over every weight"):
        pr.fit(flat, (X, y), moved, steps=2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=8)
    with pytest.raises(pr.InputError, match="have its data in memory"):
        pr.fit(line(), loader, moved, steps=2)


@pytest.mark.parametrize("likelihood", [pr.Gaussian("network"), pr.StudentT(3.0, 0.1), pr.StudentT(3.0, "network")])
@pytest.mark.parametrize("kind", [True, "function"])
def test_anchors_are_refused_for_other_noise(likelihood, kind):
    X, y = rows()
    model = pr.Model(nn.Linear(2, 2, dtype=X.dtype), likelihood, prior=0.8)
    with pytest.raises(pr.InputError, match="have Gaussian noise that doesn't come from the network, or labels or cou"):
        pr.fit(model, (X, y if "network" in repr(likelihood) else y[:, None].expand(-1, 2)), anchored(2, kind), steps=2)


def test_anchored_members_of_counts_have_their_own_anchors_and_no_noise():
    X, _ = rows()
    model = pr.Model(nn.Linear(2, 1, dtype=X.dtype), pr.Poisson(), prior=0.8)
    target = make_target(model, Data.of((X, torch.arange(40) % 3)).prepared(model.prepare))
    assert noise_of_targets(target, Data.of((X, torch.arange(40) % 3)), 2, stream(0, "noise")) is None
    assert len(pr.fit(model, (X, torch.arange(40) % 3), anchored(2), steps=3).members) == 2


@pytest.mark.parametrize("kind", [False, True, "function"])
def test_members_report_their_method_also_after_loading(kind, tmp_path):
    posterior = pr.fit(line(), rows(), pr.Ensemble(pr.MAP(), 2, anchored=kind), steps=2)
    posterior.save(tmp_path / "members")
    for member in [*posterior.members, *pr.load(tmp_path / "members", line()).members]:
        assert repr(member).endswith("40 rows, by MAP)")


@pytest.mark.parametrize("method", [pr.MAP, pr.SWAG, lambda start: pr.LastLayer(at=start)])
def test_equal_starts_of_all_members_are_refused(method):
    model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.1))
    point = pr.fit(model, (torch.zeros(4, 1), torch.zeros(4)), pr.MAP(), steps=2)
    with pytest.raises(pr.InputError, match="must have a different start for each member"):
        pr.Ensemble(method(start=point), 3)
    assert pr.Ensemble(pr.MAP(start=point), 3, anchored=True).size == 3  # their anchors differ
