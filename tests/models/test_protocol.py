"""The model protocol: what every model has, how it is bound to data, and that nothing asks for its class."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Laplace, Normal

import priory as pr
from priory import latent
from priory.core.data import Data
from priory.core.errors import InputError, PrioryWarning
from priory.core.flat import Param
from priory.core.streams import stream
from priory.models.base import BaseModel, Capabilities, has_network

SOURCE = Path(pr.__file__).parent
F64 = torch.float64
X = torch.linspace(-1, 1, 12, dtype=F64)[:, None]
ROWS = torch.cat([X + 3, X - 3])


def network() -> pr.Model:
    return pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.5), prior=1.0)


def density() -> pr.Density:
    def located(params, y):
        return Normal(params["m"], 1.0).log_prob(y)

    return pr.Density(params={"m": Param()}, log_prior=lambda p: -p["m"].square(), log_likelihood=located)


def whole_density() -> pr.Density:
    return pr.Density(lambda p: -p["m"].square(), {"m": Param()})


def auto_encoder() -> latent.VAE:
    return latent.VAE(nn.Linear(1, 2), nn.Linear(1, 1), 1)


CASES = {
    "network": (network, (X, 2 * X[:, 0]), Capabilities(network=True)),
    "density": (density, X[:, 0], Capabilities()),
    "density with its data inside": (whole_density, None, Capabilities(separate_likelihood=False)),
    "mixture": (lambda: latent.GaussianMixture(2), ROWS, Capabilities(latent=True)),
    "conjugate": (lambda: latent.BayesianGaussianMixture(2), ROWS, Capabilities(latent=True, conjugate=True)),
    "auto-encoder": (auto_encoder, ROWS, Capabilities(latent=True, encoder=True)),
    "hidden Markov": (lambda: latent.HiddenMarkov(2), ROWS.reshape(2, 12), Capabilities(latent=True)),
}
RANDOM = ("auto-encoder",)  # whose log-likelihood is a bound that is estimated


@pytest.mark.filterwarnings("ignore:This density can't be vectorised")
@pytest.mark.parametrize("case", CASES)
def test_every_model_is_bound_to_data_and_has_what_the_protocol_says(case):
    make, data, capabilities = CASES[case]
    model, rows = make().bind(data)
    assert isinstance(model, BaseModel)
    assert isinstance(rows, Data)
    assert model.capabilities == capabilities
    assert has_network(model) == capabilities.network
    few = rows.some(24) if data is not None else ()
    w = model.start(few[-1] if few else torch.empty(0), torch.Size([2]), stream(0))
    assert w.shape == (2, model.layout.size)
    assert w.dtype == model.dtype
    assert torch.isfinite(model.prior_as_given().log_prob(w)).all()
    assert model.like(model.describe()) is model
    if case in RANDOM:
        return
    batch = few[0] if rows.single else few
    values = model.log_likelihood(w, batch, model.buffers())
    assert values.shape == (2, 1 if data is None else rows.num_data)
    total, gradient = model.log_likelihood_and_grad(w, batch, 1.0, model.buffers())
    torch.testing.assert_close(total, values.sum(-1), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(model.log_likelihood_sum(w[1], batch), total[1], rtol=1e-8, atol=1e-8)
    assert gradient.shape == w.shape


@pytest.mark.parametrize("case", CASES)
def test_data_that_were_bound_before_are_taken_as_they_are(case):
    make, data, _ = CASES[case]
    model, rows = make().bind(data)
    again, same = model.bind(rows)
    assert again is model
    assert same is rows


def test_a_latent_model_has_a_density_from_when_it_is_bound_and_stays_as_it_was():
    given = latent.GaussianMixture(2)
    model, rows = given.bind(ROWS)
    assert given.density is None
    assert not isinstance(model, pr.Density)
    assert isinstance(model.density, pr.Density)
    assert model.layout is model.density.layout
    with pytest.raises(InputError, match=r"GaussianMixture\(2.*\) has no parameters before it is bound to data"):
        given.bound()
    theta = model.begin(model.rows(rows.tensors), "k-means++", stream(0))
    w = model.layout.unconstrain(theta)
    expected = model.e_step(theta, model.rows(rows.tensors)).log_likelihood
    torch.testing.assert_close(model.log_likelihood(w, rows.tensors[0], {}), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:This density can't be vectorised", "ignore:The draws")
@pytest.mark.parametrize(
    ("method", "steps"), [(pr.MAP(), 400), (pr.MeanField(), 400), (pr.Laplace(), 400), (pr.NUTS(2, 10), 20)], ids=repr
)
def test_methods_for_densities_fit_a_latent_model_with_its_hidden_variables_summed_out(method, steps):
    torch.manual_seed(0)
    y = torch.randn(20, 1, dtype=F64) + torch.tensor([[4.0], [-4.0]], dtype=F64).repeat(10, 1)
    posterior = pr.fit(latent.GaussianMixture(2), y, method, steps=steps, progress=False)
    means = posterior.sample(8, seed=0)["means"]  # a sampler's chains may name the components the other way round
    assert means.abs().mean().item() == pytest.approx(4, abs=0.8)
    assert (means[:, 0] * means[:, 1] < 0).all()


def test_weights_of_the_data_count_rows_in_e_steps_as_the_models_own_do():
    weights = torch.arange(24.0, dtype=F64) % 4
    theirs, rows = latent.GaussianMixture(2, given="weights").bind((ROWS, weights))
    ours, plain = latent.GaussianMixture(2).bind(Data.of(ROWS, weights=weights))
    ours.frame = theirs.frame
    theta = theirs.begin(theirs.rows(rows.tensors), "k-means++", stream(0))
    (a,) = latent.expect(theirs, [theta], rows.blocks(7))
    (b,) = latent.expect(ours, [theta], plain.blocks(7))
    assert float(a.bound) == pytest.approx(float(b.bound), rel=1e-12)
    for name, t in a.statistics.items():
        torch.testing.assert_close(b.statistics[name], t, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [5, 24])
def test_random_rows_keep_their_weights(rows):
    weights = torch.arange(24.0)
    some = Data.of(weights[:, None] + 1, weights=weights).random_rows(rows, 4, stream(0))
    assert torch.equal(some[0][:, 0], some.weights + 1)


def test_a_density_without_a_gradient_has_one_of_zero_for_methods_that_need_none():
    rounded = pr.Density(lambda p: -p["m"].detach().square(), {"m": Param()})
    rounded.check(())
    assert rounded.no_slope
    w = torch.tensor([[0.5], [2.0]], dtype=F64)
    value, gradient = rounded.values_only().log_likelihood_and_grad(w, (), 1.0, {})
    assert value.tolist() == [-0.25, -4.0]
    assert gradient.tolist() == [[0.0], [0.0]]
    smooth = whole_density()
    smooth.check(())
    assert smooth.values_only() is smooth


def test_a_file_of_a_prior_that_rounds_otherwise_is_read_without_a_warning_and_another_prior_with_one(tmp_path):
    posterior = pr.fit(network(), (X, X[:, 0]), pr.MAP(), steps=5, progress=False)
    posterior.save(tmp_path / "a.priory")
    near = pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.5), prior=1.0 + 1e-8)
    assert torch.equal(pr.load(tmp_path / "a.priory", near).w, posterior.w)
    for far in (1.0 + 1e-4, Laplace(0.0, 1.0)):
        with pytest.warns(PrioryWarning, match="fitted with another prior"):
            pr.load(tmp_path / "a.priory", pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.5), prior=far))


def test_hardly_anything_asks_which_class_a_model_has():
    asks = re.compile(r"isinstance\([^()]*(?:\([^()]*\))?[^()]*\)")
    kinds = re.compile(r",[^,]*\b(?<!nn\.)(Model|Density|Latent)\b|\((Model|Density)")
    found = [text for path in SOURCE.rglob("*.py") for text in asks.findall(path.read_text()) if kinds.search(text)]
    assert len(found) <= 10, found
