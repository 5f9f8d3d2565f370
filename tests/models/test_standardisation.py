"""Standardised models: each fit equals the one on rows that were standardised by hand, in the user's units."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import priory as pr
from priory.core.data import Data
from priory.core.units import RunningMoments, Units
from priory.models.standardisation import odd_column

pytestmark = pytest.mark.filterwarnings("ignore:The gradient of the log joint")  # short fits don't reach the mode
F64 = torch.float64
ROWS, NEW = 40, 7


def raw(outputs: int = 0, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows on the scales of a table: a price, a year, a concentration; targets around 3,000."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, 3, generator=generator, dtype=F64)
    x = z * torch.tensor([200.0, 5.0, 0.002], dtype=F64) + torch.tensor([1e4, 1998.0, 0.01], dtype=F64)
    noise = torch.randn(rows, max(1, outputs), generator=generator, dtype=F64)
    y = z[:, :1] - 0.5 * z[:, 1:2] + 0.3 * noise
    scale, shift = (torch.tensor(v[: max(1, outputs)], dtype=F64) for v in ([50.0, 0.01], [3e3, -2.0]))
    y = shift + scale * y
    return x, y if outputs else y[:, 0]


def by_hand(x: Tensor, y: Tensor) -> tuple[Units, Units]:
    return tuple(Units(t.mean(0), t.std(0, correction=0)) for t in (x, y))  # pyright: ignore[reportReturnType]


def same(found: Units | None, wanted: Units) -> None:
    assert found is not None
    torch.testing.assert_close(found.shift, wanted.shift, rtol=1e-13, atol=0)
    torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-11, atol=0)


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, outputs).double()


def pair(
    method: Any, likelihood: Any, at_unit_scale: Any = None, outputs: int = 0, width: int | None = None, **options: Any
) -> tuple[Any, Any, Units, Units]:
    """The fit of a standardised model, the fit to rows standardised by hand, and the units of both."""
    x, y = raw(outputs)
    of_x, of_y = by_hand(x, y)
    module = net(width or max(1, outputs))
    options = {"progress": False, "steps": 60} | options
    own = pr.fit(pr.Model(module, likelihood, 1.0, standardise=True), (x, y), method, **options)
    hand = pr.Model(module, at_unit_scale or likelihood, 1.0)
    return own, pr.fit(hand, (of_x.standard(x), of_y.standard(y)), method, **options), of_x, of_y


def check_predictions(own: Any, hand: Any, of_x: Units, of_y: Units, outputs: int = 0, tolerance: float = 1e-8) -> None:
    x, y = raw(outputs, NEW, seed=3)
    ours, theirs = own.predict(x, samples=8), hand.predict(of_x.standard(x), samples=8)
    volume, close = of_y.log_volume(y.shape[1:]), {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(of_y.standard(ours.mean), theirs.mean, **close)
    torch.testing.assert_close(ours.std / of_y.scale, theirs.std, **close)
    torch.testing.assert_close(ours.epistemic.sqrt() / of_y.scale, theirs.epistemic.sqrt(), **close)
    torch.testing.assert_close(of_y.standard(ours.quantile(0.9)), theirs.quantile(0.9), **close)
    torch.testing.assert_close(of_y.standard(ours.samples), theirs.samples, **close)
    torch.testing.assert_close(ours.log_prob(y), theirs.log_prob(of_y.standard(y)) - volume, **close)
    torch.testing.assert_close(ours.cdf(y), theirs.cdf(of_y.standard(y)), **close)


METHODS: dict[str, Any] = {
    "MAP": pr.MAP(),
    "MAP by the evidence": pr.MAP(evidence_every=5),
    "MeanField": pr.MeanField(),
    "FullRank": pr.FullRank(),
    "Laplace": pr.Laplace("full"),
    "Laplace, tuned": pr.Laplace("full", tune="scalar"),
    "LastLayer": pr.LastLayer(),
    "Dropout": pr.Dropout(),
    "Ensemble": pr.Ensemble(pr.MeanField(), 2),
    "anchored": pr.Ensemble(pr.MAP(), 2, anchored=True),
    "SGLD": pr.SGLD(1e-3, chains=2),
    "RandomWalk": pr.RandomWalk(chains=4, warmup=30),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_fit_equals_the_one_that_is_standardised_by_hand(name: str) -> None:
    own, hand, of_x, of_y = pair(METHODS[name], pr.Gaussian())
    check_predictions(own, hand, of_x, of_y)


@pytest.mark.parametrize("name", ["MeanField", "Laplace", "Laplace, tuned", "LastLayer"])
def test_evidences_are_densities_in_the_users_units(name: str) -> None:
    own, hand, _, of_y = pair(METHODS[name], pr.Gaussian())
    assert float(own.log_evidence) == pytest.approx(float(hand.log_evidence) - ROWS * math.log(of_y.scale), abs=1e-8)


def test_the_evidence_of_a_linear_model_is_that_of_the_conjugate_posterior() -> None:
    x, y = raw()
    of_x, of_y = by_hand(x, y)
    noise, s = 15.0, float(of_y.scale)
    model = pr.Model(net(), pr.Gaussian(noise), 1.0, standardise=True)
    posterior = pr.fit(model, (x, y), pr.Laplace("full"), steps=4000, progress=False)
    design = torch.cat([of_x.standard(x), torch.ones(ROWS, 1, dtype=F64)], 1)
    covariance = s**2 * design @ design.T + noise**2 * torch.eye(ROWS, dtype=F64)
    exact = torch.distributions.MultivariateNormal(of_y.shift.expand(ROWS), covariance)
    assert float(posterior.log_evidence) == pytest.approx(float(exact.log_prob(y)), abs=1e-6)
    new, target = raw(rows=NEW, seed=3)
    added = torch.cat([of_x.standard(new), torch.ones(NEW, 1, dtype=F64)], 1)
    gain = s**2 * added @ design.T @ torch.linalg.inv(covariance)
    mean = of_y.shift + gain @ (y - of_y.shift)
    variance = (s**2 * added @ added.T - gain @ (s**2 * design @ added.T)).diagonal() + noise**2
    prediction = posterior.predict(new)
    torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=1e-5 * s)
    torch.testing.assert_close(prediction.variance, variance, rtol=1e-8, atol=0)
    wanted = torch.distributions.Normal(mean, variance.sqrt()).log_prob(target)
    torch.testing.assert_close(prediction.log_prob(target), wanted, rtol=0, atol=1e-5)


LIKELIHOODS = {
    "a given noise": (pr.Gaussian(20.0), lambda s: pr.Gaussian(20.0 / float(s)), 0, 1),
    "a noise per output": (pr.Gaussian(outputs=2), None, 2, 2),
    "one noise for two outputs": (pr.Gaussian(), None, 2, 2),
    "a given noise for two outputs": (pr.Gaussian(0.02), lambda s: pr.Gaussian(0.02 / s), 2, 2),
    "given noises": (
        pr.Gaussian(torch.tensor([20.0, 0.02], dtype=F64)),
        lambda s: pr.Gaussian(torch.tensor([20.0, 0.02], dtype=F64) / s),
        2,
        2,
    ),
    "noise of the network": (pr.Gaussian("network"), None, 0, 2),
    "noises of the network": (pr.Gaussian("network"), None, 2, 4),
    "Student": (pr.StudentT(4.0), None, 0, 1),
    "Student with a given scale": (pr.StudentT(4.0, 20.0), lambda s: pr.StudentT(4.0, 20.0 / float(s)), 0, 1),
}


@pytest.mark.parametrize("method", [pr.MeanField(), pr.Laplace("full")], ids=["MeanField", "Laplace"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_noise_has_the_units_that_it_should(name: str, method: Any) -> None:
    likelihood, at_unit_scale, outputs, width = LIKELIHOODS[name]
    scale = by_hand(*raw(outputs))[1].scale
    other = None if at_unit_scale is None else at_unit_scale(scale)
    own, hand, of_x, of_y = pair(method, likelihood, other, outputs, width)
    check_predictions(own, hand, of_x, of_y, outputs)
    wanted = float(hand.log_evidence) - ROWS * of_y.log_volume(torch.Size([outputs] if outputs else []))
    assert float(own.log_evidence) == pytest.approx(wanted, abs=1e-8, rel=1e-12)


@pytest.mark.parametrize("tune", ["scalar", None])
def test_the_evidence_sets_one_noise_of_two_outputs_as_at_unit_scale(tune: str | None) -> None:
    for likelihood in (pr.Gaussian(), pr.Gaussian(outputs=2)):
        own, hand, of_x, of_y = pair(pr.Laplace("full", tune=tune, at=pr.MAP()), likelihood, outputs=2)
        check_predictions(own, hand, of_x, of_y, outputs=2)
        assert float(own.log_evidence) == pytest.approx(
            float(hand.log_evidence) - ROWS * of_y.log_volume(torch.Size([2])), abs=1e-7
        )


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [(pr.Categorical(), lambda y: (y > 3e3).long()), (pr.Poisson(), lambda y: (y - 2800).clamp_min(0).round() // 50)],
    ids=["labels", "counts"],
)
def test_labels_and_counts_have_no_units(likelihood: Any, targets: Any) -> None:
    x, y = raw()
    of_x, _ = by_hand(x, y)
    module = net(2 if likelihood.classes else 1)
    options: dict[str, Any] = {"steps": 60, "progress": False}
    own = pr.fit(pr.Model(module, likelihood, standardise=True), (x, targets(y)), pr.MeanField(), **options)
    hand = pr.fit(pr.Model(module, likelihood), (of_x.standard(x), targets(y)), pr.MeanField(), **options)
    torch.testing.assert_close(own.predict(x).mean, hand.predict(of_x.standard(x)).mean, rtol=1e-9, atol=1e-9)
    assert own.model.units is not None
    assert own.model.units.targets is None


def test_pointwise_log_likelihoods_are_densities_in_the_users_units() -> None:
    own, hand, _, of_y = pair(METHODS["MeanField"], pr.Gaussian())
    wanted = hand.log_likelihood(samples=5) - math.log(of_y.scale)
    torch.testing.assert_close(own.log_likelihood(samples=5), wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(own.log_likelihood(raw(), samples=5), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["MeanField", "RandomWalk"])
def test_a_check_predicts_the_rows_of_the_fit_in_their_units(name: str) -> None:
    own, hand, _, _ = pair(METHODS[name], pr.Gaussian())
    ours, theirs = ({item.name: item.value for item in one.check().items} for one in (own, hand))
    assert list(ours) == list(theirs)
    for item, value in ours.items():
        assert value == (None if value is None else pytest.approx(theirs[item], rel=1e-6, abs=1e-6, nan_ok=True))


# Inputs of other shapes, and rows from other sources.


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(5, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.head(torch.cat([x, self.tokens(tokens)], 1))


def test_tokens_are_left_alone() -> None:
    x, y = raw()
    tokens = torch.arange(ROWS) % 5
    model = pr.Model(TwoInputs().double(), pr.Gaussian(), standardise=True)
    posterior = pr.fit(model, (x, tokens, y), pr.MAP(), steps=5, progress=False)
    units = posterior.model.units
    assert units is not None
    same(units.inputs[0], by_hand(x, y)[0])
    assert units.inputs[1] is None
    assert posterior.predict((x, tokens)).mean.shape == (ROWS,)


def test_integer_columns_of_a_table_are_numbers() -> None:
    x = torch.tensor([[1998, 3], [2004, 3], [2010, 3], [2016, 3]])
    posterior = pr.fit(
        pr.Model(nn.Linear(2, 1), pr.Gaussian(1.0), standardise=True), (x, torch.arange(4.0)), pr.MAP(), steps=2
    )
    units = posterior.model.units
    assert units is not None
    same(units.inputs[0], Units(torch.tensor([2007.0, 3.0], dtype=F64), torch.tensor([45.0, 1.0], dtype=F64).sqrt()))


@pytest.mark.parametrize(
    ("shape", "module", "wanted"),
    [
        ((30, 2, 4, 5), nn.Sequential(nn.Conv2d(2, 1, 3), nn.Flatten(), nn.Linear(6, 1)), (2, 1, 1)),
        ((30, 2, 6), nn.Sequential(nn.Conv1d(2, 1, 3), nn.Flatten(), nn.Linear(4, 1)), (2, 1)),
        ((30, 4, 2), nn.Sequential(nn.Linear(2, 1), nn.Flatten(), nn.Linear(4, 1)), (2,)),
    ],
    ids=["images", "signals", "sequences"],
)
def test_channels_and_features_have_units_of_their_own(shape: Any, module: nn.Module, wanted: Any) -> None:
    x = 5 + 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    posterior = pr.fit(pr.Model(module, pr.Gaussian(1.0), standardise=True), (x, torch.randn(30)), pr.MAP(), steps=2)
    units = posterior.model.units
    assert units is not None
    found = units.inputs[0]
    assert found is not None
    assert found.scale.shape == wanted
    dim = 1 if len(wanted) > 1 else 2
    rest = [d for d in range(len(shape)) if d != dim]
    torch.testing.assert_close(found.scale.reshape(-1), x.double().std(rest, correction=0), rtol=1e-12, atol=0)


def test_a_loader_gives_the_same_units_as_its_rows() -> None:
    x, y = raw()
    model = pr.Model(net(), pr.Gaussian(), standardise=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
    found = pr.fit(model, loader, pr.MAP(), steps=2, progress=False).model.units
    assert found is not None
    for units, wanted in zip((found.inputs[0], found.targets), by_hand(x, y), strict=True):
        same(units, wanted)


def test_weights_count_rows_in_the_units_too() -> None:
    x, y = raw()
    weights = torch.arange(ROWS) % 3
    model = pr.Model(net(), pr.Gaussian(), standardise=True)
    weighted = pr.fit(model, (x, y), pr.MAP(), weights=weights, steps=2, progress=False).model.units
    repeated = by_hand(x.repeat_interleave(weights, 0), y.repeat_interleave(weights, 0))
    assert weighted is not None
    for units, wanted in zip((weighted.inputs[0], weighted.targets), repeated, strict=True):
        same(units, wanted)


def test_moments_of_blocks_are_those_of_all_rows_also_far_from_zero() -> None:
    x = 1e9 + torch.randn(1000, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    moments = RunningMoments(1)
    for block in x.split(37):
        moments.add(block)
    torch.testing.assert_close(moments.units().shift, x.mean(0), rtol=1e-15, atol=0)
    torch.testing.assert_close(moments.units().scale, x.std(0, correction=0), rtol=1e-7, atol=0)


def test_missing_values_are_refused() -> None:
    x, y = raw()
    x[3, 1] = torch.nan
    model = pr.Model(net(), pr.Gaussian(), standardise=True)
    for data in ((x, y), DataLoader(TensorDataset(x, y), batch_size=9)):
        with pytest.raises(pr.InputError, match="inputs of the data must be finite, got NaN in row 3"):
            pr.fit(model, data, pr.MAP(), steps=2, progress=False)


# Which units a fit has: its own, or those of the posterior or the rows that it starts from.


def test_a_fit_leaves_the_users_model_without_units() -> None:
    model = pr.Model(net(), pr.Gaussian(), standardise=True)
    first = pr.fit(model, raw(), pr.MAP(), steps=2, progress=False)
    second = pr.fit(model, raw(seed=5), pr.MAP(), steps=2, progress=False)
    assert model.units is None
    assert first.model.units != second.model.units
    assert repr(model).endswith("prior=glorot, standardise=True)")
    assert "standardise=True (inputs in 3 columns, targets 3.01e+03 +- 61.9)" in repr(first.model)
    assert repr(first).startswith("Point(5 parameters, 40 standardised rows, by MAP()")


def test_a_fit_from_a_posterior_has_its_units() -> None:
    model = pr.Model(net(), pr.Gaussian(), standardise=True)
    first = pr.fit(model, raw(), pr.MAP(), steps=2, progress=False)
    for method in (pr.MeanField(start=first), pr.Laplace(at=first), pr.LastLayer(at=first)):
        assert pr.fit(model, raw(seed=5), method, steps=2, progress=False).model.units == first.model.units
    assert pr.fit(first.model, raw(seed=5), pr.MAP(), steps=2, progress=False).model.units == first.model.units
    assert first.data is not None
    assert pr.fit(model, first.data, pr.MAP(), steps=2, progress=False).model.units == first.model.units


def test_units_that_do_not_fit_are_refused() -> None:
    plain, model = pr.Model(net(), pr.Gaussian()), pr.Model(net(), pr.Gaussian(), standardise=True)
    first = pr.fit(model, raw(), pr.MAP(), steps=2, progress=False)
    standard = tuple(units.standard(t) for units, t in zip(by_hand(*raw()), raw(), strict=True))
    ours = pr.fit(plain, standard, pr.MAP(), steps=2, progress=False)
    for given, start in ((plain, first), (model, ours)):
        with pytest.raises(
            pr.InputError, match="'start' argument of MeanField must be a posterior of a model that sta"
        ):
            pr.fit(given, raw(), pr.MeanField(start=start), steps=2, progress=False)
    with pytest.raises(pr.InputError, match="'data' argument of fit must be the rows as you have them"):
        pr.fit(plain, first.data, pr.MAP(), steps=2, progress=False)
    for method in (pr.Laplace(at="network"), pr.LastLayer(at="network")):
        with pytest.raises(pr.InputError, match="must be a method or a posterior where the model standardises"):
            pr.fit(model, raw(), method, progress=False)
    with pytest.raises(pr.InputError, match="'standardise' argument of Model must be False where no fit"):
        Data.of(raw()).prepared(model.prepare)
    with pytest.raises(pr.InputError, match="'standardise' argument of Model must be True or False, got 1"):
        pr.Model(net(), pr.Gaussian(), standardise=1)  # pyright: ignore[reportArgumentType]


# Files.


@pytest.mark.parametrize("name", ["MAP", "MeanField", "Laplace", "LastLayer", "Ensemble", "RandomWalk"])
def test_files_and_pickles_keep_the_units(name: str, tmp_path: Path) -> None:
    model = pr.Model(net(), pr.Gaussian(), standardise=True)
    posterior = pr.fit(model, raw(), METHODS[name], steps=30, progress=False)
    posterior.save(tmp_path / "fit.priory")
    x, y = raw(rows=NEW, seed=3)
    wanted = posterior.predict(x, samples=8)
    for again in (pr.load(tmp_path / "fit.priory", model), pickle.loads(pickle.dumps(posterior))):
        found = again.predict(x, samples=8)
        assert torch.equal(found.mean, wanted.mean)
        assert torch.equal(found.log_prob(y), wanted.log_prob(y))
        assert again.model.units == posterior.model.units
    with pytest.raises(pr.StoreError, match="belongs to another model: it was made with standardise=True"):
        pr.load(tmp_path / "fit.priory", pr.Model(net(), pr.Gaussian()))


def test_a_resumed_fit_has_the_same_bits(tmp_path: Path) -> None:
    model, data = pr.Model(net(), pr.Gaussian(), standardise=True), raw()
    options: dict[str, Any] = {"steps": 20, "batch_size": 9, "progress": False}
    whole = pr.fit(model, data, pr.MeanField(), **options)

    def interrupt(now: Any) -> None:
        if now.step >= 10:
            raise RuntimeError("enough")

    place = pr.Checkpoint(tmp_path / "fit.checkpoint", every=5)
    with pytest.raises(RuntimeError, match="enough"):
        pr.fit(model, data, pr.MeanField(), checkpoint=place, callbacks=[interrupt], **options)
    again = pr.fit(copy.deepcopy(model), data, pr.MeanField(), checkpoint=place, **options)
    for name, value in whole.mean.items():
        assert torch.equal(again.mean[name], value)


def test_an_update_of_the_last_layer_keeps_the_units() -> None:
    x, y = raw()
    model = pr.Model(net(), pr.Gaussian(20.0), 1.0, standardise=True)
    start = pr.fit(model, (x, y), pr.MAP(), steps=20, progress=False)
    whole = pr.fit(model, (x, y), pr.LastLayer(at=start), progress=False)
    half = pr.fit(model, (x[:20], y[:20]), pr.LastLayer(at=start), progress=False).update((x[20:], y[20:]))
    torch.testing.assert_close(half.predict(x).mean, whole.predict(x).mean, rtol=1e-10, atol=0)
    torch.testing.assert_close(half.predict(x).std, whole.predict(x).std, rtol=1e-10, atol=0)


def test_float32_networks_learn_from_raw_scales() -> None:
    x, y = raw(rows=200)
    model = pr.Model(nn.Linear(3, 1), pr.Gaussian(), standardise=True)
    prediction = pr.fit(model, (x, y), pr.MeanField(), steps=2000, progress=False).predict(x)
    error = float((prediction.mean.double() - y).square().mean().sqrt())
    assert error < 1.1 * 15.0  # the noise is 15, with a standard error of 0.75
    assert float(prediction.log_prob(y).mean()) > -(math.log(15.0) + 0.5 * math.log(2 * math.pi) + 0.5) - 0.2


# The warning without it.


@pytest.mark.parametrize(
    ("columns", "place"),
    [
        ([[0.0, 1.0], [1.0, 3.0]], None),
        ([[0.0, 29.0], [1.0, 31.0]], 1),
        ([[-30.0], [30.0]], 0),
        ([[0.01], [0.02]], 0),
        ([[1.0], [1.0]], None),
        ([[100.0], [100.0]], 0),
        ([[0.0]] * 99 + [[1.0]], None),
        ([[1.0]] * 99 + [[0.0]], None),
    ],
    ids=["unit", "far", "wide", "small", "intercept", "constant", "rare", "frequent"],
)
def test_a_column_far_from_unit_scale_is_found(columns: list[list[float]], place: int | None) -> None:
    assert odd_column(torch.tensor(columns, dtype=F64)) == place


def test_the_warning_names_the_option_for_loaders_too() -> None:
    x, y = raw()
    x = (x - x.mean(0)) / x.std(0)
    model = pr.Model(net(), pr.Gaussian())
    for data in ((x, y), DataLoader(TensorDataset(x, y), batch_size=9)):
        with pytest.warns(pr.PrioryWarning, match=r"The targets have mean 3.* use Model\(..., standardise=True\)"):
            pr.fit(model, data, pr.MAP(), steps=2, progress=False)
