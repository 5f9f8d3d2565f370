"""The pointwise log-likelihood of posteriors, and their draws as a DataFrame."""

import sys

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import priory as pr
from priory.core.data import Data
from priory.core.errors import MissingExtra
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.models.target import Target
from priory.posteriors import Draws, Mixture
from priory.posteriors.chains import Chains

DOUBLE = torch.float64
X = torch.linspace(-1, 1, 6, dtype=DOUBLE)[:, None]
Y = torch.tensor([0.3, -0.1, 0.4, 0.2, 0.9, 0.5], dtype=DOUBLE)
MODEL = pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.5), prior=1.0)
ROWS = Data.of((X, Y)).prepared(MODEL.prepare)
NORMAL = pr.Density(
    params={"mu": pr.Param(), "sigma": pr.Param((), pr.constraints.positive)},
    log_prior=lambda p: -0.5 * p["mu"].square() - p["sigma"],
    log_likelihood=lambda p, y: Normal(p["mu"], p["sigma"]).log_prob(y),
)
CORRELATED = pr.Density(
    lambda p: p["L"].diagonal(dim1=-2, dim2=-1).log().sum(-1) - p["x"].square().sum(-1),
    {"x": pr.Param((2,)), "L": pr.Param((2, 2), pr.constraints.corr_cholesky)},
)


def of_a_line(w: torch.Tensor) -> torch.Tensor:
    """log N(y_n; a x_n + b, 0.5^2) at w = (a, b), (..., 2) -> (..., row)."""
    return Normal(w[..., :1] * X[:, 0] + w[..., 1:], torch.tensor(0.5, dtype=DOUBLE)).log_prob(Y)


def draws(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=stream(0, "pointwise"), dtype=DOUBLE)


def test_chains_have_a_value_per_chain_draw_and_row():
    posterior = Chains(make_target(MODEL, ROWS), draws(3, 5, 2))
    found = posterior.log_likelihood((X, Y))
    torch.testing.assert_close(found, of_a_line(posterior.w), rtol=1e-10, atol=1e-10)
    posterior.data = ROWS
    assert torch.equal(posterior.log_likelihood(), found)
    some = posterior.log_likelihood(samples=4)
    assert some.shape == (4, 6)
    assert all(bool((row == found.flatten(0, 1)).all(1).any()) for row in some)


def test_new_rows_have_values_too():
    posterior = Chains(make_target(MODEL, ROWS), draws(3, 5, 2))
    torch.testing.assert_close(posterior.log_likelihood((X[:2], Y[:2])), of_a_line(posterior.w)[..., :2])


def test_stored_draws_keep_their_order():
    posterior = Draws(make_target(MODEL, ROWS), draws(7, 2))
    torch.testing.assert_close(posterior.log_likelihood((X, Y)), of_a_line(posterior.w), rtol=1e-10, atol=1e-10)


def test_a_density_with_a_log_likelihood_has_values_of_its_rows():
    posterior = Chains(make_target(NORMAL, Data.of(Y).prepared(NORMAL.prepare)), draws(2, 4, 2))
    mu, sigma = posterior.draws["mu"], posterior.draws["sigma"]
    wanted = Normal(mu[..., None], sigma[..., None]).log_prob(Y)
    torch.testing.assert_close(posterior.log_likelihood(Y), wanted, rtol=1e-12, atol=1e-12)


def test_a_variational_posterior_draws_as_many_as_are_asked_for():
    posterior = pr.fit(NORMAL, Y, pr.MeanField(), steps=3, progress=False)
    found = posterior.log_likelihood(samples=20, seed=3)
    assert found.shape == (20, 6)
    assert torch.equal(found, posterior.log_likelihood(Y, samples=20, seed=3))
    assert not torch.equal(found, posterior.log_likelihood(samples=20, seed=4))
    assert posterior.log_likelihood().shape == (1000, 6)


def test_a_point_has_one_draw():
    posterior = pr.fit(MODEL, (X, Y), pr.MAP(), steps=3, progress=False)
    w = torch.cat([posterior.mean["weight"].reshape(1), posterior.mean["bias"]])
    torch.testing.assert_close(posterior.log_likelihood(), of_a_line(w[None]), rtol=1e-8, atol=1e-8)


def test_a_mixture_has_draws_of_its_members_by_their_weights():
    target = make_target(MODEL, ROWS)
    members = [Draws(target, draws(1, 2) + shift) for shift in (0.0, 1.0)]
    found = Mixture(members, [0.25, 0.75]).log_likelihood((X, Y), samples=4000)
    assert found.shape == (4000, 6)
    first, second = ((found - of_a_line(member.w)).abs().lt(1e-10).all(1) for member in members)
    assert bool((first | second).all())
    # 5 standard errors of a binomial share, false alarms at 6e-7
    assert abs(float(first.double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5


def test_members_with_buffers_keep_their_own():
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    model = pr.Model(net, pr.Gaussian(0.5), prior=1.0)
    ensemble = pr.fit(model, (X, Y), pr.Ensemble(pr.MAP(), size=2), steps=20, progress=False)
    found = ensemble.log_likelihood(samples=50)
    alone = [member.log_likelihood((X, Y)) for member in ensemble.members]
    assert found.unique(dim=0).shape == (2, 6)
    torch.testing.assert_close(found.unique(dim=0).sort(0).values, torch.cat(alone).sort(0).values)


def test_dropout_is_drawn_by_masks_alone():
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    posterior = pr.fit(pr.Model(net, pr.Gaussian(0.5)), (X, Y), pr.Dropout(0.5), steps=3, progress=False)
    found = posterior.log_likelihood(samples=16, seed=1)
    assert torch.equal(found, posterior.log_likelihood(samples=16, seed=1))
    assert len(found.unique(dim=0)) <= 16  # four units have 16 masks


def test_a_density_of_one_log_prob_has_no_rows():
    posterior = Chains(Target(CORRELATED, None), draws(2, 4, 3))
    with pytest.raises(pr.InputError, match="log_likelihood needs a log-likelihood of each row, and a Density that is"):
        posterior.log_likelihood()


def test_without_data_the_argument_is_named():
    posterior = Chains(make_target(MODEL, ROWS), draws(3, 5, 2))
    with pytest.raises(pr.InputError, match="The 'data' argument of log_likelihood must be given: this posterior does"):
        posterior.log_likelihood()
    with pytest.raises(pr.InputError, match="The 'samples' argument of log_likelihood must be an integer >= 1"):
        posterior.log_likelihood((X, Y), samples=0)


# pandas.


def test_a_frame_of_chains_has_a_row_per_draw_and_a_column_per_varying_entry():
    pytest.importorskip("pandas")
    posterior = Chains(Target(CORRELATED, None), draws(2, 4, 3))
    frame = posterior.to_pandas()
    assert list(frame.columns) == ["x[0]", "x[1]", "L[1, 0]", "L[1, 1]"]
    assert frame.index.names == ["chain", "draw"]
    assert frame.index.tolist() == [(c, s) for c in range(2) for s in range(4)]
    assert torch.equal(torch.tensor(frame.loc[1]["x[1]"].to_numpy()), posterior.draws["x"][1, :, 1])
    assert torch.equal(torch.tensor(frame["L[1, 0]"].to_numpy()), posterior.draws["L"][..., 1, 0].flatten())
    assert posterior.to_pandas(samples=3).shape == (3, 4)


def test_a_frame_of_other_posteriors_has_draws():
    pytest.importorskip("pandas")
    posterior = Draws(make_target(MODEL, ROWS), draws(7, 2))
    frame = posterior.to_pandas()
    assert list(frame.columns) == ["weight[0, 0]", "bias[0]"]
    assert frame.index.name == "draw"
    assert torch.equal(torch.tensor(frame.to_numpy()), posterior.w)
    variational = pr.fit(NORMAL, Y, pr.MeanField(), steps=3, progress=False)
    assert variational.to_pandas().shape == (1000, 2)
    assert bool((variational.to_pandas(samples=50)["sigma"] > 0).all())


def test_without_pandas_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"This needs 'pandas': pip install 'priory\[plot\]'"):
        Draws(make_target(MODEL, ROWS), draws(7, 2)).to_pandas()
