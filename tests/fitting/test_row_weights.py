"""Row weights: integer weights equal repeated rows, weights of one change nothing, weights of zero remove rows."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import priory as pr
from priory.core.data import Data, WeightedBatch
from priory.curvature import STRUCTURES, Pass, select
from priory.curvature.tuning import tune
from priory.estimators.evidence_bound import elbo
from priory.families import DiagonalFamily
from priory.fitting.prepare import make_target
from priory.methods.mcmc import joint
from priory.methods.point.held_out import learn_from_held_out
from priory.models.target import Target

F64 = torch.float64
EXACT = {"rtol": 1e-8, "atol": 1e-10}
COUNTS = torch.tensor([1, 3, 0, 2, 1, 0, 2, 1, 4, 1])


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def rows(kind="numbers"):
    X = draws(10, 3)
    if kind == "labels":
        return X, torch.arange(10) % 3
    return X, X.sum(-1) + 0.3 * draws(10, seed=1)


def repeated(data):
    return tuple(t.repeat_interleave(COUNTS, 0) for t in data)


def network(kind="numbers", noise=0.4):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3 if kind == "labels" else 1)).double()
    return pr.Model(net, pr.Categorical() if kind == "labels" else pr.Gaussian(noise), prior=1.0)


def words():
    """Return a model with an embedding and a layer at several positions, and rows for it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)).double()
    x = torch.randint(5, (10, 4), generator=torch.Generator().manual_seed(0))
    return pr.Model(net, pr.Gaussian(0.4), prior=1.0), (x, draws(10, seed=1))


def target_of(model, data, weights=None, **options):
    bound, prepared = model.bind(data, None, weights)
    return make_target(bound, prepared, **options), prepared


def weighted_and_repeated(model, data, **options):
    """Return target and rows with weights, and target and rows with repetitions."""
    return target_of(model, data, COUNTS, **options), target_of(model, repeated(data), **options)


def coin():
    """A density with one value per row."""
    noise = torch.distributions.Normal(0.0, 1.0)
    return pr.Density(
        params={"a": pr.Param((2,))},
        log_prior=lambda p: noise.log_prob(p["a"]).sum(-1),
        log_likelihood=lambda p, batch: noise.log_prob(batch[1] - batch[0][:, :2] @ p["a"]),
    )


# The target.


@pytest.mark.parametrize("make", [network, coin, lambda: network("labels")], ids=["network", "density", "labels"])
@pytest.mark.parametrize("lead", [(), (2,), (3, 2)], ids=str)
def test_the_log_likelihood_and_its_gradient_equal_those_of_repeated_rows(make, lead):
    model = make()
    data = rows("labels" if model.capabilities.network and model.likelihood.classes else "numbers")
    (weighted, few), (plain, many) = weighted_and_repeated(model, data)
    w = 0.3 * draws(*lead, weighted.size)
    batch, all_rows = few.in_memory(), many.in_memory()
    for own, right in zip(
        weighted.log_likelihood_and_grad(w, batch, weighted.buffers(torch.Size(lead))),
        [t.clone() for t in plain.log_likelihood_and_grad(w, all_rows, plain.buffers(torch.Size(lead)))],
        strict=True,
    ):
        torch.testing.assert_close(own.clone(), right, **EXACT)
    expected = plain.log_likelihood(w, many)
    torch.testing.assert_close(weighted.log_likelihood(w, few), expected, **EXACT)
    torch.testing.assert_close(weighted.log_likelihood_of(w, batch), expected, **EXACT)
    if lead == ():
        torch.testing.assert_close(weighted.differentiable(w, batch), expected, **EXACT)
    assert weighted.pointwise(w, batch).shape == (*lead, 10)
    assert weighted.num_data == 10


def test_minibatches_are_unbiased():
    target, data = target_of(network(), rows(), COUNTS)
    few = Data.of(rows(), 4, COUNTS)
    w = 0.3 * draws(target.size)
    parts = [(len(b[0]), target.log_likelihood_of(w, b)) for b in few.batches(0, 0)]
    mean = sum(n * value for n, value in parts) / 10  # batches of 4, 4 and 2 rows, each scaled to 10
    torch.testing.assert_close(mean, target.log_likelihood(w, data), **EXACT)


def test_batches_of_every_kind_carry_the_weights_of_their_rows():
    X, y = torch.arange(10.0)[:, None], torch.arange(10.0)
    weights = torch.arange(10.0) + 0.5
    for source in ((X, y), Indexed(X, y)):
        data = Data.of(source, 3, weights)
        early, held = data.split(0.3, 0)
        batches = [*data.batches(0, 0), *data.blocks(4), data.some(7), *early.batches(0, 0), *held.blocks(9)]
        for batch in batches:
            assert isinstance(batch, WeightedBatch)
            assert torch.equal(batch.weights, batch[1].double() + 0.5)


class Indexed(Dataset):
    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.X[index], self.y[index]


# Methods.


def test_full_batch_map_equals_that_of_repeated_rows():
    for method in (pr.MAP(), pr.Ensemble(pr.MAP(), 2), pr.SWAG(snapshots=3)):
        options = {"steps": 40, "progress": False}
        found = pr.fit(network(), rows(), method, weights=COUNTS, batch_size=10, **options)
        right = pr.fit(network(), repeated(rows()), method, batch_size=15, **options)
        members = zip(getattr(found, "members", [found]), getattr(right, "members", [right]), strict=True)
        for own, other in members:
            for name, value in own.mean.items():
                torch.testing.assert_close(value, other.mean[name], **EXACT)


@pytest.mark.parametrize("kind", ["numbers", "labels"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical", "hessian"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
def test_the_curvature_equals_that_of_repeated_rows(structure, curvature, kind):
    if curvature == "hessian" and structure in ("diag", "kron"):
        pytest.skip("made of squares")
    (weighted, few), (plain, many) = weighted_and_repeated(network(kind), rows(kind))
    w = 0.3 * draws(weighted.size)
    found, right = (
        STRUCTURES[structure].of(Pass(target, w, data, kind=curvature))
        for target, data in ((weighted, few), (plain, many))
    )
    torch.testing.assert_close(found.dense(), right.dense(), **EXACT)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_at_several_positions_equal_those_of_repeated_rows(sharing):
    model, data = words()
    (weighted, few), (plain, many) = weighted_and_repeated(model, data)
    w = 0.3 * draws(weighted.size)
    found, right = (
        STRUCTURES["kron"].of(Pass(target, w, rows), sharing=sharing)
        for target, rows in ((weighted, few), (plain, many))
    )
    torch.testing.assert_close(found.dense(), right.dense(), **EXACT)
    diagonals = [STRUCTURES["diag"].of(Pass(t, w, r)).diagonal() for t, r in ((weighted, few), (plain, many))]
    torch.testing.assert_close(*diagonals, **EXACT)


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
def test_laplace_and_its_evidence_equal_those_of_repeated_rows(structure):
    found, right = (
        pr.fit(
            network(),
            data,
            pr.Laplace(structure, at=pr.MAP(), tune="scalar"),
            weights=weights,
            batch_size=15,
            steps=300,
            progress=False,
        )
        for data, weights in ((rows(), COUNTS), (repeated(rows()), None))
    )
    torch.testing.assert_close(found.gaussian.variance(), right.gaussian.variance(), rtol=1e-7, atol=1e-9)
    assert found.log_evidence.value == pytest.approx(right.log_evidence.value, rel=1e-8)


@pytest.mark.parametrize("noises", [1, 2])
def test_the_noise_chosen_by_the_evidence_equals_that_of_repeated_rows(noises):
    torch.manual_seed(0)
    X, y = rows()
    y = y if noises == 1 else torch.stack([y, 2 * draws(10, seed=3)], 1)
    model = pr.Model(nn.Linear(3, noises).double(), pr.Gaussian(), prior=1.0)
    w = None
    found = []
    for target, data in weighted_and_repeated(model, (X, y)):
        w = 0.3 * draws(target.size) if w is None else w
        again = lambda v, target=target, data=data: STRUCTURES["full"].of(Pass(target, v, data))  # noqa: E731
        found.append(tune(target, w, again(w), data, by="layer", again=again))
    torch.testing.assert_close(found[0].w, found[1].w, **EXACT)
    assert found[0].log_evidence == pytest.approx(found[1].log_evidence, rel=1e-10)


@pytest.mark.parametrize("likelihood", [pr.Gaussian(0.4), pr.Categorical(), pr.StudentT(4.0, scale=0.5)], ids=repr)
def test_the_last_layer_equals_that_of_repeated_rows(likelihood):
    kind = "labels" if isinstance(likelihood, pr.Categorical) else "numbers"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3 if kind == "labels" else 1)).double()
    model = pr.Model(net, likelihood, prior=1.0)
    found, right = (
        pr.fit(model, data, pr.LastLayer(at="network"), weights=weights, progress=False)
        for data, weights in ((rows(kind), COUNTS), (repeated(rows(kind)), None))
    )
    torch.testing.assert_close(found.belief.precision, right.belief.precision, **EXACT)
    torch.testing.assert_close(found.w, right.w, **EXACT)
    assert found.log_evidence.value == pytest.approx(right.log_evidence.value, rel=1e-9)


def test_the_bound_of_a_factorised_gaussian_equals_that_of_repeated_rows():
    (weighted, few), (plain, many) = weighted_and_repeated(network(), rows())
    family, noise = DiagonalFamily(0.3 * draws(21), -1 + 0.1 * draws(21, seed=1)), draws(4, 21, seed=2)
    found = elbo(weighted, family, noise, few.in_memory())
    right = elbo(plain, family, noise, many.in_memory())
    torch.testing.assert_close(found.value, right.value, **EXACT)


@pytest.mark.parametrize(
    "method",
    [pr.MeanField(), pr.MeanField(samples=3), pr.FullRank(), pr.NaturalGradient(), pr.MeanField(estimator="score")],
    ids=repr,
)
@pytest.mark.parametrize("make", [network, coin])
def test_variational_fits_equal_those_of_repeated_rows(make, method):
    options = {"steps": 20, "progress": False, "seed": 3}
    found = pr.fit(make(), rows(), method, weights=COUNTS, batch_size=10, **options)
    right = pr.fit(make(), repeated(rows()), method, batch_size=15, **options)
    for name, value in found.mean.items():
        torch.testing.assert_close(value, right.mean[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("blocks", [False, True], ids=["recorded", "in blocks"])
@pytest.mark.parametrize("make", [network, coin])
@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
def test_the_log_joint_of_samplers_equals_that_of_repeated_rows(make, tempers, blocks, monkeypatch):
    if blocks:
        monkeypatch.setattr(joint, "BLOCK_NUMBERS", 9)
    pairs = weighted_and_repeated(make(), rows(), temperature=2.0, tempers=tempers)
    w = 0.3 * draws(3, pairs[0][0].size)
    found, right = (joint.log_joint(target, data, w)(w) for target, data in pairs)
    for own, other in zip(found, right, strict=True):
        torch.testing.assert_close(own, other, **EXACT)


def test_laplace_of_a_density_equals_that_of_repeated_rows():
    found, right = (
        pr.fit(coin(), data, pr.Laplace(), weights=weights, progress=False)
        for data, weights in ((rows(), COUNTS), (repeated(rows()), None))
    )
    torch.testing.assert_close(found.w, right.w, **EXACT)
    torch.testing.assert_close(found.gaussian.variance(), right.gaussian.variance(), **EXACT)
    assert found.log_evidence.value == pytest.approx(right.log_evidence.value, rel=1e-10)


def test_em_equals_that_of_repeated_rows():
    y = torch.cat([draws(5, 2) - 2, draws(5, 2, seed=1) + 2])
    theta = {
        "weights": torch.tensor([0.5, 0.5], dtype=F64),
        "means": torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=F64),
        "covariances": torch.eye(2, dtype=F64).repeat(2, 1, 1),
    }
    found, right = (
        pr.fit(pr.latent.GaussianMixture(2), data, pr.EM(start=theta), weights=weights, steps=20, progress=False)
        for data, weights in ((y, COUNTS), (y.repeat_interleave(COUNTS, 0), None))
    )
    for name, value in found.mean.items():
        torch.testing.assert_close(value, right.mean[name], **EXACT)


def test_dropout_weights_the_rows():
    model, data = network(), rows()
    fits = [
        pr.fit(model, data, pr.Dropout(rate=0.2), weights=weights, batch_size=10, steps=30, progress=False)
        for weights in (None, torch.full((10,), 1e-12))
    ]
    likely = [float(fit.history["nll"][-1]) for fit in fits]
    assert abs(likely[1]) < 1e-9 * abs(likely[0])  # with tiny weights only the prior remains
    size = [sum(float(v.square().sum()) for v in fit.mean.values()) for fit in fits]
    assert size[1] < size[0]


def test_the_noise_estimated_on_held_out_rows_weights_them():
    model = pr.Model(nn.Linear(3, 1).double(), pr.Gaussian(), prior=1.0)
    target = Target(model, 10)
    w = 0.2 * draws(4, target.size)
    X, y = rows()
    few = WeightedBatch(model.prepare((X, y)), COUNTS.double())
    found, right = (learn_from_held_out(target, w, held, {}) for held in (few, model.prepare(repeated((X, y)))))
    torch.testing.assert_close(found, right, **EXACT)


# Weights of one and of zero.


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField(), pr.Laplace(), pr.NUTS(chains=2, warmup=5)], ids=repr)
def test_weights_of_one_give_the_same_result_as_none(method):
    options = {"steps": 400 if isinstance(method, pr.Laplace) else 10, "progress": False, "batch_size": 10}
    found, right = (pr.fit(network(), rows(), method, weights=w, **options) for w in (torch.ones(10), None))
    for name, value in found.mean.items():
        assert torch.equal(value, right.mean[name])


def test_weights_of_one_give_em_the_same_result_as_none():
    y = torch.cat([draws(5, 2) - 2, draws(5, 2, seed=1) + 2])
    model = pr.latent.GaussianMixture(2)
    found, right = (pr.fit(model, y, pr.EM(), weights=w, progress=False) for w in ([1] * 10, None))
    for name, value in found.mean.items():
        assert torch.equal(value, right.mean[name])


def test_rows_of_weight_zero_have_no_influence():
    X, y = rows()
    wild = (torch.cat([X, 100 + X[:2]]), torch.cat([y, torch.full((2,), 1e6, dtype=F64)]))
    weights = torch.cat([torch.ones(10), torch.zeros(2)])
    found = pr.fit(network(), wild, pr.Laplace(), weights=weights, batch_size=12, steps=400, progress=False)
    right = pr.fit(network(), (X, y), pr.Laplace(), batch_size=10, steps=400, progress=False)
    for name, value in found.mean.items():
        torch.testing.assert_close(value, right.mean[name], **EXACT)
    torch.testing.assert_close(found.gaussian.variance(), right.gaussian.variance(), **EXACT)


def test_a_saved_posterior_holds_no_row_weights(tmp_path):
    model = network()
    found = pr.fit(model, rows(), pr.Laplace(), weights=COUNTS, steps=400, progress=False)
    found.save(tmp_path / "weighted.priory")
    again = pr.load(tmp_path / "weighted.priory", model)
    assert torch.equal(again.predict(rows()[0]).mean, found.predict(rows()[0]).mean)
    mixture = pr.fit(pr.latent.GaussianMixture(2), draws(10, 2), pr.EM(), weights=COUNTS, progress=False)
    mixture.save(tmp_path / "mixture.priory")
    assert pr.load(tmp_path / "mixture.priory", pr.latent.GaussianMixture(2)).mean.keys() == mixture.mean.keys()


# Invalid weights.


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(9), r"The 'weights' argument of fit must have one number per row, \(10,\), got the shape \(9,\)"),
        (torch.ones(10, 1), r"must have one number per row, \(10,\), got the shape \(10, 1\)"),
        (torch.zeros(10), "The 'weights' argument of fit must be above 0 for some row, got zeros only"),
        (-torch.ones(10), "The 'weights' argument of fit must be finite numbers >= 0, got -1"),
        (torch.full((10,), math.nan), "The 'weights' argument of fit must be finite numbers >= 0, got nan"),
        (torch.ones(10) * 1j, "The 'weights' argument of fit must be finite numbers >= 0, got complex numbers"),
        ("heavy", "The 'weights' argument of fit must be numbers"),
    ],
)
def test_invalid_weights_are_refused_with_the_same_message_by_every_method(weights, message):
    with pytest.raises(pr.InputError, match=message):
        pr.fit(network(), rows(), pr.MAP(), weights=weights, progress=False)
    with pytest.raises(pr.InputError, match=message):
        pr.fit(pr.latent.GaussianMixture(2), draws(10, 2), pr.EM(), weights=weights, progress=False)


def test_complex_weights_in_the_data_are_refused():
    known = pr.latent.GaussianMixture(2, given="weights")
    with pytest.raises(pr.InputError, match="must be finite numbers >= 0, got complex numbers"):
        pr.fit(known, (draws(10, 2), torch.ones(10) * 1j), pr.EM(), progress=False)


def test_weights_are_refused_for_loaders_no_data_and_models_with_their_own():
    loader = DataLoader(TensorDataset(*rows()), batch_size=5)
    with pytest.raises(pr.InputError, match=r"must be left out with a DataLoader.*loader\.dataset"):
        pr.fit(network(), loader, pr.MAP(), weights=torch.ones(10), progress=False)
    one = pr.Density(lambda p: -p["a"].square(), {"a": pr.Param()})
    with pytest.raises(pr.InputError, match="must be left out without data"):
        pr.fit(one, None, pr.MAP(), weights=torch.ones(10), progress=False)
    with pytest.raises(pr.InputError, match="must be left out for NormalGamma"):
        pr.fit(pr.latent.NormalGamma(), draws(10), pr.VariationalEM(), weights=2 * torch.ones(10), progress=False)
    known = pr.latent.GaussianMixture(2, given="weights")
    with pytest.raises(pr.InputError, match="given='weights'"):
        pr.fit(known, (draws(10, 2), torch.ones(10)), pr.EM(), weights=2 * torch.ones(10), progress=False)


def test_the_default_selection_of_a_pass_is_the_whole_network():
    target, data = target_of(network(), rows())
    given = Pass(target, draws(target.size), data)
    assert torch.equal(given.selection.places, select(target.model).places)
