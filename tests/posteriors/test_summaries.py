"""Summaries of posteriors: exact where closed forms exist, from draws otherwise."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import LogNormal, Normal, constraints

import priory as pr
from priory.core.streams import stream
from priory.diagnostics import Summary
from priory.families import DiagonalFamily
from priory.models.target import Target
from priory.posteriors import Chains, DiagonalGaussian, Draws, Mixture, Point

DOUBLE = torch.float64
PLAIN = ["mean", "sd", "5%", "50%", "95%"]
Q = (0.05, 0.5, 0.95)


def density(**supports):
    params = {name: pr.Param((), support) for name, support in supports.items()}
    return pr.Density(lambda p: -sum(x.square() for x in p.values()), params)


def test_the_summary_of_a_gaussian_is_exact_for_every_support():
    target = Target(density(x=constraints.real, s=constraints.positive, b=constraints.less_than(2.0)), None)
    loc, scale = torch.tensor([0.5, -0.3, 0.2], dtype=DOUBLE), torch.tensor([2.0, 0.7, 0.4], dtype=DOUBLE)
    summary = DiagonalGaussian(target, DiagonalFamily(loc, scale.log())).summary()
    assert summary.names == ["x", "s", "b"]
    assert list(summary.columns) == PLAIN
    x, s, b = Normal(loc[0], scale[0]), LogNormal(loc[1], scale[1]), LogNormal(loc[2], scale[2])
    at = lambda d, q: float(d.icdf(torch.tensor(q, dtype=DOUBLE)))  # noqa: E731
    wanted = {
        "x": [x.mean, x.stddev, *(at(x, q) for q in Q)],
        "s": [s.mean, s.stddev, *(at(s, q) for q in Q)],
        "b": [2 - b.mean, b.stddev, *(2 - at(b, 1 - q) for q in Q)],  # 2 - exp(u) decreases in u
    }
    for name, values in wanted.items():
        for column, value in zip(PLAIN, values, strict=True):
            assert math.isclose(summary.row(name)[column], float(value), rel_tol=1e-8), (name, column)


def test_the_moments_on_an_interval_agree_with_quadrature():
    target = Target(density(p=constraints.unit_interval), None)
    loc, scale = torch.tensor([0.4], dtype=DOUBLE), torch.tensor([1.3], dtype=DOUBLE)
    row = DiagonalGaussian(target, DiagonalFamily(loc, scale.log())).summary().row("p")
    scipy = pytest.importorskip("scipy.integrate")
    weight = lambda z: math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)  # noqa: E731
    moment = lambda k: scipy.quad(lambda z: weight(z) / (1 + math.exp(-0.4 - 1.3 * z)) ** k, -12, 12, epsabs=1e-13)[0]  # noqa: E731
    assert math.isclose(row["mean"], moment(1), rel_tol=1e-10)
    assert math.isclose(row["sd"], math.sqrt(moment(2) - moment(1) ** 2), rel_tol=1e-8)


def test_laplace_and_the_last_layer_have_the_standard_deviations_of_their_covariance():
    x = torch.linspace(-1, 1, 30, dtype=DOUBLE)[:, None]
    y = 2 * x[:, 0] + 0.1 * torch.randn(30, generator=stream(0, "y"), dtype=DOUBLE)
    model = pr.Model(nn.Linear(1, 1).double(), pr.Gaussian(0.3), prior=1.0)
    design = torch.cat([x, torch.ones_like(x)], 1)
    covariance = torch.linalg.inv(design.T @ design / 0.09 + torch.eye(2, dtype=DOUBLE))
    for method in (pr.Laplace("full"), pr.LastLayer()):
        summary = pr.fit(model, (x, y), method, steps=1500, progress=False).summary()
        assert summary.names == ["weight[0, 0]", "bias[0]"]
        torch.testing.assert_close(summary["sd"], covariance.diagonal().sqrt(), rtol=1e-8, atol=0)
        torch.testing.assert_close(summary["95%"] - summary["mean"], 1.6448536269514722 * summary["sd"])


def test_a_point_has_zero_standard_deviation():
    target = Target(density(x=constraints.real, s=constraints.positive), None)
    summary = Point(target, torch.tensor([1.5, 0.0], dtype=DOUBLE)).summary()
    assert summary.to_dict() == {
        "x": {"mean": 1.5, "sd": 0.0, "5%": 1.5, "50%": 1.5, "95%": 1.5},
        "s": {"mean": 1.0, "sd": 0.0, "5%": 1.0, "50%": 1.0, "95%": 1.0},
    }


def test_the_summary_of_draws_uses_all_of_them():
    w = torch.randn(500, 1, generator=stream(0, "w"), dtype=DOUBLE)
    row = Draws(Target(density(x=constraints.real), None), w).summary().row("x")
    assert math.isclose(row["mean"], float(w.mean()), rel_tol=1e-12)
    assert math.isclose(row["sd"], float(w.std()), rel_tol=1e-12)
    assert math.isclose(row["5%"], float(w.quantile(0.05)), rel_tol=1e-12)


def test_a_summary_without_a_closed_form_uses_draws_with_a_fixed_seed_and_says_so():
    target = Target(density(x=constraints.real), None)
    one, two = (
        DiagonalGaussian(target, DiagonalFamily(torch.tensor([m], dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)))
        for m in (-2.0, 2.0)
    )
    summary = Mixture([one, two]).summary()
    assert "Standard deviations and quantiles are those of 4,096 draws." in str(summary)
    assert summary.row("x")["mean"] == 0.0
    assert abs(summary.row("x")["sd"] - math.sqrt(5)) < 4 * math.sqrt(5) / math.sqrt(2 * 4096)  # false alarms: 6e-5
    assert str(Mixture([one, two]).summary()) == str(summary)


def test_a_long_summary_shows_the_first_entries_and_a_count():
    model = pr.Model(nn.Linear(40, 3).double(), pr.Gaussian(0.3))
    summary = Point(Target(model, 5), torch.arange(123.0, dtype=DOUBLE)).summary()
    assert summary.names == [*(f"weight[0, {i}]" for i in range(10)), *(f"bias[{i}]" for i in range(3))]
    assert summary["mean"].tolist() == [*range(10), 120, 121, 122]
    assert "weight: 10 of 120 entries." in str(summary)


@pytest.mark.parametrize("kind", ["chains", "gaussian"])
def test_constant_entries_of_a_support_are_left_out(kind):
    target = Target(pr.Density(lambda p: -p["c"].square().sum(), {"c": pr.Param((3, 3), constraints.corr_cholesky)}), 0)
    w = torch.randn(4, 500, 3, generator=stream(0, "w"), dtype=DOUBLE)
    zero = torch.zeros(3, dtype=DOUBLE)
    posterior = Chains(target, w) if kind == "chains" else DiagonalGaussian(target, DiagonalFamily(zero, zero))
    summary = posterior.summary()
    assert summary.names == ["c[1, 0]", "c[1, 1]", "c[2, 0]", "c[2, 1]", "c[2, 2]"]
    if kind == "chains":
        assert float(summary["r_hat"].max()) < 1.01
        assert posterior.summary() is summary  # cached
        assert posterior.status.name == "converged"


def test_rows_are_found_by_name_and_an_unknown_one_is_refused():
    summary = Summary(["a", "b"], {"mean": torch.tensor([1.0, 2.0]), "sd": torch.tensor([0.5, 0.25])})
    assert summary.row("b") == {"mean": 2.0, "sd": 0.25}
    assert summary.to_dict() == {"a": {"mean": 1.0, "sd": 0.5}, "b": {"mean": 2.0, "sd": 0.25}}
    with pytest.raises(pr.InputError, match="The 'name' argument of Summary must be among a, b"):
        summary.row("c")


def test_every_kind_of_latent_posterior_has_a_summary():
    y = torch.randn(100, 2, generator=stream(0, "y"), dtype=DOUBLE)
    point = pr.fit(pr.latent.GaussianMixture(2), y, pr.EM(), steps=5, progress=False)
    assert set(point.summary()["sd"].tolist()) == {0.0}
    conjugate = pr.fit(pr.latent.BayesianGaussianMixture(2), y, pr.VariationalEM(), steps=5, progress=False)
    summary = conjugate.summary()
    assert float(summary["sd"].min()) > 0
    name = summary.names[0]
    assert math.isclose(summary.row(name)["mean"], float(conjugate.mean[name.split("[")[0]].flatten()[0]))


def test_a_posterior_without_parameters_refuses():
    x = torch.linspace(-1, 1, 20)[:, None]
    model = pr.Model(nn.Linear(1, 1), pr.Gaussian(0.3), prior=1.0)
    posterior = pr.fit(model, (x, x[:, 0]), pr.Ensemble(pr.MAP(), 2, anchored="function"), steps=5, progress=False)
    with pytest.raises(pr.InputError, match="has no single parameter vector"):
        posterior.summary()
