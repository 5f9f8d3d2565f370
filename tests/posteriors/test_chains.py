import math
import sys
import types

import pytest
import torch
from torch import nn

import priory as pr
from priory.core.data import Data
from priory.core.errors import MissingExtra
from priory.core.streams import stream
from priory.diagnostics import bfmi, ess_bulk, ess_tail, mcse_mean, r_hat
from priory.diagnostics.summary import CHAIN_COLUMNS, MAX_PRINTED_ROWS, Summary
from priory.fitting.prepare import make_target
from priory.models.target import Target
from priory.posteriors import Draws, base, pointwise
from priory.posteriors import chains as module
from priory.posteriors.arviz import replicated
from priory.posteriors.chains import Chains
from priory.testing import LinearRegression, assert_mean_close

DOUBLE = torch.float64
DENSITY = pr.Density(
    lambda p: -p["x"].square().sum() - p["s"], {"x": pr.Param((2,)), "s": pr.Param((), pr.constraints.positive)}
)
TARGET = Target(DENSITY, None)


def vectors(chains: int = 4, draws: int = 200) -> torch.Tensor:
    return 0.5 * torch.randn(chains, draws, 3, generator=stream(0, "chains"), dtype=DOUBLE)


def statistics(chains: int = 4, draws: int = 200) -> dict[str, torch.Tensor]:
    generator = stream(1, "chains")
    divergent = torch.zeros(chains, draws, dtype=torch.bool)
    divergent[1, 3] = divergent[-2, 5] = True
    return {
        "energy": torch.randn(chains, draws, generator=generator, dtype=DOUBLE),
        "acceptance": torch.rand(chains, draws, generator=generator, dtype=DOUBLE),
        "divergent": divergent,
        "steps": torch.randint(1, 100, (chains, draws), generator=generator),
    }


def regression(draws: int = 25) -> tuple[LinearRegression, Chains]:
    """Return exact posterior draws of a linear regression in two chains, with the data."""
    exact = LinearRegression.make(0)
    model = exact.model()
    rows = Data.of(exact.data).prepared(model.prepare)
    noise = torch.randn(2, draws, 4, generator=stream(2, "chains"), dtype=DOUBLE)
    posterior = Chains(make_target(model, rows), exact.posterior.loc + noise @ exact.posterior.scale_tril.T)
    posterior.data = rows
    return exact, posterior


# The draws.


def test_draws_are_constrained_parameters_by_chain_and_draw():
    w = vectors()
    posterior = Chains(TARGET, w)
    assert {name: tuple(x.shape) for name, x in posterior.draws.items()} == {"x": (4, 200, 2), "s": (4, 200)}
    assert torch.equal(posterior.draws["x"], w[..., :2])
    torch.testing.assert_close(posterior.draws["s"], w[..., 2].exp(), rtol=1e-12, atol=0)
    torch.testing.assert_close(posterior.mean["s"], w[..., 2].exp().mean(), rtol=1e-12, atol=0)
    assert (posterior.num_chains, posterior.num_draws) == (4, 200)


def test_sampling_all_draws_returns_each_once_and_more_repeats_them_evenly():
    w = vectors(2, 10)
    posterior = Chains(TARGET, w)
    drawn = posterior.draw(20, stream(0))
    assert torch.equal(drawn.sort(0).values, w.flatten(0, 1).sort(0).values)
    assert len(posterior.draw(7, stream(0)).unique(dim=0)) == 7
    assert_mean_close(posterior.draw(20_000, stream(0)), w.mean((0, 1)))  # 3 comparisons: false alarms at 2e-6


def test_draws_are_cut_before_the_first_one_that_is_not_finite():
    w, now = vectors(2, 10), vectors(2, 1)[:, 0]
    w[1, 6, 0], w[0, 8, 0] = math.nan, math.inf
    found = Chains.kept(TARGET, w, now, statistics={"energy": torch.arange(20.0).reshape(2, 10)})
    assert torch.equal(found.w, w[:, :6])
    assert found.statistics["energy"].shape == (2, 6)
    w[0, 0, 0] = math.nan
    for nothing in (None, w):
        assert torch.equal(Chains.kept(TARGET, nothing, now, statistics=statistics(2, 10)).w, now[:, None])


def test_a_file_stores_draws_and_statistics_exactly(tmp_path):
    posterior = Chains(TARGET, vectors(), statistics=statistics())
    posterior.save(tmp_path / "chains")
    loaded = pr.load(tmp_path / "chains", DENSITY)
    assert isinstance(loaded, Chains)
    assert torch.equal(loaded.w, posterior.w)
    assert list(loaded.statistics) == list(posterior.statistics)
    for name, t in posterior.statistics.items():
        assert loaded.statistics[name].dtype == t.dtype
        assert torch.equal(loaded.statistics[name], t)


def test_a_file_of_a_float32_model_stores_its_statistics(tmp_path):
    density = pr.Density(lambda p: -p["x"].square(), {"x": pr.Param()}, dtype=torch.float32)
    own = {"energy": torch.rand(2, 5, generator=stream(0), dtype=DOUBLE), "steps": torch.full((2, 5), 1023)}
    posterior = Chains(Target(density, None), torch.zeros(2, 5, 1), statistics=own)
    posterior.save(tmp_path / "chains")
    loaded = pr.load(tmp_path / "chains", density)
    assert isinstance(loaded, Chains)
    for name, t in posterior.statistics.items():
        assert torch.equal(loaded.statistics[name], t)
        assert loaded.statistics[name].dtype == t.dtype


def test_chains_predict_like_the_same_draws_without_chains():
    exact, posterior = regression()
    flat = Draws(posterior.target, posterior.w.flatten(0, 1))
    assert torch.equal(posterior.predict(exact.X).mean, flat.predict(exact.X).mean)


def test_a_prediction_in_chunks_uses_the_same_draws_once_each(monkeypatch):
    exact, posterior = regression()
    for each in (posterior, Draws(posterior.target, posterior.w.flatten(0, 1))):
        for samples in (50, 33, 80):
            monkeypatch.setattr(base, "BLOCK_ELEMENTS", 1 << 21)
            at_once = each.predict(exact.X, samples=samples).outputs
            monkeypatch.setattr(base, "BLOCK_ELEMENTS", 8 * 4)  # eight draws of four coordinates per chunk
            outputs = each.predict(exact.X, samples=samples).outputs
            torch.testing.assert_close(outputs, at_once, rtol=1e-12, atol=1e-12)
            assert samples > 50 or len(outputs[:, 0].unique()) == samples


# Convergence diagnostics.


def test_the_summary_has_the_diagnostics_of_every_entry():
    posterior = Chains(TARGET, vectors(), statistics=statistics())
    summary = posterior.summary()
    assert summary.names == ["x[0]", "x[1]", "s"]
    x = torch.stack([*posterior.draws["x"].unbind(-1), posterior.draws["s"]], -1)
    flat = x.flatten(0, 1)
    wanted = {
        "mean": flat.mean(0),
        "mcse": mcse_mean(x),
        "sd": flat.std(0),
        "5%": flat.quantile(0.05, 0),
        "50%": flat.quantile(0.5, 0),
        "95%": flat.quantile(0.95, 0),
        "ess_bulk": ess_bulk(x),
        "ess_tail": ess_tail(x),
        "r_hat": r_hat(x),
    }
    assert list(summary.columns) == list(wanted)
    for name, values in wanted.items():
        torch.testing.assert_close(summary[name], values, rtol=1e-12, atol=1e-12)
    assert summary.divergences == 2
    torch.testing.assert_close(summary.bfmi, bfmi(posterior.statistics["energy"]))
    assert posterior.diagnostics["r_hat"]["x"].shape == (2,)
    torch.testing.assert_close(posterior.diagnostics["ess_bulk"]["s"], wanted["ess_bulk"][2])


def test_the_summary_prints_a_table_and_a_verdict():
    text = str(Chains(TARGET, vectors(), statistics=statistics()).summary())
    head, *rows = text.split("\n")
    assert head.split() == ["mean", "mcse", "sd", "5%", "50%", "95%", "ess_bulk", "ess_tail", "r_hat"]
    assert [row.split()[0] for row in rows[:3]] == ["x[0]", "x[1]", "s"]
    assert len({len(row) for row in (head, *rows[:3])}) == 1
    assert "4 chains of 200 draws. Divergences: 2. E-BFMI: " in text
    assert "2 draws diverged (0.25 %)" in text


def test_good_chains_have_an_empty_verdict():
    assert Chains(TARGET, vectors(4, 1000)).summary().verdict == []


@pytest.mark.parametrize(
    ("chains", "wanted"), [(1, 100), (2, 200), (3, 300), (4, 400), (5, 400), (8, 400), (64, 400), (1000, 400)]
)
@pytest.mark.parametrize("short", ["ess_bulk", "ess_tail"])
def test_the_verdict_asks_for_an_ess_of_100_per_chain_and_at_most_400(chains, wanted, short):
    columns = {name: torch.full((2,), 1.0, dtype=DOUBLE) for name in CHAIN_COLUMNS}
    columns |= {name: torch.full((2,), 1e6, dtype=DOUBLE) for name in ("ess_bulk", "ess_tail")}
    columns[short] = torch.tensor([1e6, wanted], dtype=DOUBLE)
    assert Summary(["a", "b"], columns, chains, 1000).verdict == []
    columns[short] = torch.tensor([1e6, wanted - 1], dtype=DOUBLE)
    assert Summary(["a", "b"], columns, chains, 1000).verdict == [
        f"ESS is below {wanted} for 1 of 2 quantities, and smallest ({wanted - 1}) for b: take more draws."
    ]


def test_the_verdict_names_quantities_on_which_chains_disagree():
    w = vectors()
    w[2, :, 1] += 2
    verdict = Chains(TARGET, w).summary().verdict
    assert verdict[0].startswith("R-hat is above 1.01 for 1 of 3 quantities, and largest (")
    assert verdict[0].endswith("for x[1]: the chains disagree. Take more draws.")
    assert verdict[1].startswith("ESS is below 400 for 1 of 3 quantities, and smallest (")


def test_the_verdict_reports_a_low_bfmi_and_constant_quantities():
    w, own = vectors(), {"energy": torch.arange(800.0).reshape(4, 200)}
    w[..., 0] = 1.0
    summary = Chains(TARGET, w, statistics=own).summary()
    assert any("1 of 3 quantities never vary" in sentence for sentence in summary.verdict)
    assert any("E-BFMI is below 0.3 for 4 of 4 chains" in sentence for sentence in summary.verdict)
    assert "nan" in str(summary)


def test_fewer_than_four_draws_have_no_diagnostics():
    summary = Chains(TARGET, vectors(2, 3)).summary()
    assert summary.verdict == ["Fewer than 4 draws per chain say nothing about convergence."]
    assert "nan" in str(summary)


def test_a_long_summary_shows_the_quantities_with_the_highest_r_hat():
    density = pr.Density(lambda p: -p["x"].square().sum(), {"x": pr.Param((80,))})
    w = torch.randn(2, 50, 80, generator=stream(0, "many"), dtype=DOUBLE)
    w[0, :, 77] += 5
    summary = Chains(Target(density, None), w).summary()
    assert len(summary.cells) == MAX_PRINTED_ROWS
    assert "x[77]" in [row[0] for row in summary.cells]
    assert "Shown are the 50 of 80 quantities with the highest R-hat." in str(summary)


def test_the_html_of_the_summary_escapes_names():
    density = pr.Density(lambda p: -p["a<b"].square(), {"a<b": pr.Param()})
    html = Chains(Target(density, None), torch.zeros(2, 5, 1, dtype=DOUBLE)).summary()._repr_html_()
    assert "<td>a&lt;b</td>" in html
    assert "2 chains of 5 draws." in html


def test_an_unknown_column_is_refused():
    with pytest.raises(pr.InputError, match="The 'column' argument of Summary must be among mean, mcse, sd"):
        _ = Chains(TARGET, vectors()).summary()["rhat"]


def test_divergences_are_listed_by_chain_and_draw():
    posterior = Chains(TARGET, vectors(), statistics=statistics())
    assert posterior.divergences.tolist() == [[1, 3], [2, 5]]
    assert Chains(TARGET, vectors()).divergences.shape == (0, 2)
    assert Chains(TARGET, vectors()).summary().divergences is None


# In function space.


def test_the_function_space_of_a_line_has_its_mean_predictions():
    exact, posterior = regression()
    x = exact.X[:3]
    means = posterior.w @ exact.design(x).T
    summary = posterior.function_space(x)
    assert summary.names == ["y[0]", "y[1]", "y[2]"]
    torch.testing.assert_close(summary["mean"], means.mean((0, 1)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(summary["r_hat"], r_hat(means), rtol=1e-8, atol=0)
    torch.testing.assert_close(summary["ess_bulk"], ess_bulk(means), rtol=1e-8, atol=0)
    for same in ((x,), [x], x.numpy()):
        assert torch.equal(posterior.function_space(same)["mean"], summary["mean"])


def test_chains_with_mirrored_weights_agree_only_in_function_space(monkeypatch):
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1, bias=False)).double()
    model = pr.Model(net, pr.Gaussian(0.1), prior=1.0)
    x = torch.linspace(-1, 1, 5, dtype=DOUBLE)[:, None]
    target = make_target(model, Data.of((x, x[:, 0])).prepared(model.prepare))
    w = torch.tensor([1.0, 2.0, 0.5, -0.5, 1.0, -1.0], dtype=DOUBLE)
    w = w + 0.1 * torch.randn(4, 200, 6, generator=stream(0, "mirror"), dtype=DOUBLE)
    w[1::2] = -w[1::2]  # tanh is odd: the same function
    posterior = Chains(target, w)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 500)  # a hundred draws per chunk
    assert float(posterior.summary()["r_hat"].max()) > 1.5
    assert float(posterior.function_space(x)["r_hat"].max()) < 1.02


def test_the_function_space_of_classes_has_a_row_for_every_probability():
    model = pr.Model(nn.Linear(2, 3).double(), pr.Categorical(), prior=1.0)
    X = torch.randn(6, 2, generator=stream(0), dtype=DOUBLE)
    target = make_target(model, Data.of((X, torch.arange(6) % 3)).prepared(model.prepare))
    posterior = Chains(target, torch.randn(2, 30, 9, generator=stream(1), dtype=DOUBLE))
    summary = posterior.function_space(X[:2])
    assert summary.names[:4] == ["y[0, 0]", "y[0, 1]", "y[0, 2]", "y[1, 0]"]
    torch.testing.assert_close(summary["mean"].reshape(2, 3).sum(1), torch.ones(2, dtype=DOUBLE))


def test_a_density_has_no_function_space():
    with pytest.raises(pr.InputError, match="A posterior over a Density has no network to predict with"):
        Chains(TARGET, vectors()).function_space(torch.zeros(2, 1))


# ArviZ.


def fake_arviz(monkeypatch, version: str) -> list[tuple]:
    calls: list[tuple] = []
    fake = types.SimpleNamespace(__version__=version, from_dict=lambda *a, **k: calls.append((a, k)))
    monkeypatch.setitem(sys.modules, "arviz", fake)
    return calls


@pytest.mark.parametrize("version", ["0.20.0", "1.2.0"])
def test_arviz_gets_its_groups_in_the_form_of_its_version(version, monkeypatch):
    calls = fake_arviz(monkeypatch, version)
    exact, posterior = regression()
    posterior.statistics = statistics(2, 25)
    posterior.to_arviz()
    ((given, named),) = calls
    groups = given[0] if version == "1.2.0" else named
    assert list(groups) == ["posterior", "sample_stats", "log_likelihood", "posterior_predictive", "observed_data"]
    assert groups["posterior"]["weight"].shape == (2, 25, 1, 3)
    assert list(groups["sample_stats"]) == ["energy", "acceptance_rate", "diverging", "n_steps"]
    found = torch.from_numpy(groups["log_likelihood"]["y"])
    outputs = posterior.w @ exact.design(exact.X).T
    wanted = torch.distributions.Normal(outputs, torch.tensor(exact.noise, dtype=DOUBLE)).log_prob(exact.y)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    assert torch.equal(torch.from_numpy(groups["observed_data"]["y"]), exact.y)
    drawn = (torch.from_numpy(groups["posterior_predictive"]["y"]) - outputs) / exact.noise
    assert_mean_close(drawn.flatten(), torch.zeros((), dtype=DOUBLE))  # 1,000 of N(0, 1)
    assert_mean_close(drawn.flatten().square(), torch.ones((), dtype=DOUBLE))


def test_a_density_with_rows_has_a_log_likelihood_and_no_posterior_predictive(monkeypatch):
    calls = fake_arviz(monkeypatch, "1.0.0")
    tosses = torch.tensor([1.0, 0.0, 1.0], dtype=DOUBLE)
    coin = pr.Density(
        params={"p": pr.Param((), pr.constraints.unit_interval)},
        log_prior=lambda p: torch.zeros_like(p["p"]),
        log_likelihood=lambda p, toss: torch.where(toss == 1, p["p"].log(), torch.log1p(-p["p"])),
    )
    w = torch.linspace(-1, 1, 10, dtype=DOUBLE).reshape(2, 5, 1)
    Chains(make_target(coin, Data.of(tosses).prepared(coin.prepare)), w).to_arviz(tosses)
    groups = calls[0][0][0]
    assert list(groups) == ["posterior", "log_likelihood"]
    p = w.sigmoid()
    wanted = torch.cat([p.log(), (1 - p).log(), p.log()], -1)
    torch.testing.assert_close(torch.from_numpy(groups["log_likelihood"]["y"]), wanted, rtol=1e-12, atol=1e-12)


def test_labels_are_sampled_with_their_probabilities():
    model = pr.Model(nn.Linear(1, 3, bias=False).double(), pr.Categorical(), prior=1.0)
    X = torch.ones(4, 1, dtype=DOUBLE)
    target = make_target(model, Data.of((X, torch.tensor([0, 1, 2, 2]))).prepared(model.prepare))
    w = torch.tensor([0.0, 1.0, -1.0], dtype=DOUBLE).expand(2, 500, 3)
    found = replicated(Chains(target, w), Data.of((X, torch.tensor([0, 1, 2, 2]))).prepared(model.prepare))
    assert found["observed_data"].tolist() == [0, 1, 2, 2]
    drawn = found["posterior_predictive"]
    assert drawn.shape == (2, 500, 4)
    assert_mean_close(nn.functional.one_hot(drawn.flatten(), 3).double(), w[0, 0].softmax(0))


def test_a_loaded_posterior_takes_the_data_as_an_argument(monkeypatch, tmp_path):
    calls = fake_arviz(monkeypatch, "1.0.0")
    exact, posterior = regression()
    posterior.save(tmp_path / "chains")
    loaded = pr.load(tmp_path / "chains", exact.model())
    assert isinstance(loaded, Chains)
    loaded.to_arviz()
    loaded.to_arviz(exact.data)
    assert [list(given[0]) for given, _ in calls] == [
        ["posterior"],
        ["posterior", "log_likelihood", "posterior_predictive", "observed_data"],
    ]


def test_the_log_likelihood_is_computed_in_blocks_of_rows(monkeypatch):
    _, posterior = regression()
    assert posterior.data is not None
    whole = posterior.log_likelihood(posterior.data)
    monkeypatch.setattr(pointwise, "BLOCK_ELEMENTS", 150)  # three rows per block
    torch.testing.assert_close(posterior.log_likelihood(), whole, rtol=1e-12, atol=1e-12)
    assert whole.shape == (2, 25, 20)


def test_a_density_that_is_one_log_prob_has_no_log_likelihood(monkeypatch):
    calls = fake_arviz(monkeypatch, "1.0.0")
    Chains(TARGET, vectors()).to_arviz()
    assert list(calls[0][0][0]) == ["posterior"]


def test_arviz_reads_the_draws_and_computes_the_leave_one_out_score():
    """On exact draws p_loo is near the number of weights, 4, and az.summary agrees with our summary."""
    import arviz as az

    _, posterior = regression(draws=1000)
    data = posterior.to_arviz()
    table = az.summary(data, round_to="none")
    ours = posterior.summary()
    assert list(table.index) == ours.names
    # from version 1 on, the tail ESS of ArviZ is computed at other quantiles
    tail = () if az.__version__.startswith("1.") else ("ess_tail",)
    for name in ("mean", "sd", "ess_bulk", *tail, "r_hat"):
        torch.testing.assert_close(torch.tensor(table[name].to_numpy()), ours[name], rtol=1e-8, atol=1e-8)
    scores = az.loo(data)
    assert 2 < float(getattr(scores, "p_loo", getattr(scores, "p", math.nan))) < 6


def test_without_arviz_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(MissingExtra, match=r"This needs 'arviz': pip install 'priory\[plot\]'"):
        Chains(TARGET, vectors()).to_arviz()


# Invalid arguments.


def test_chains_have_no_density_and_no_evidence():
    posterior = Chains(TARGET, vectors())
    with pytest.raises(pr.InputError, match="The posterior of Chains has no density"):
        posterior.log_prob(posterior.mean)
    with pytest.raises(pr.InputError, match="A set of chains gives no evidence: its draws have no density"):
        _ = posterior.log_evidence


@pytest.mark.parametrize("w", [torch.zeros(5, 3), torch.zeros(2, 0, 3), torch.zeros(2, 5, 4), "draws"])
def test_draws_of_another_shape_are_refused(w):
    with pytest.raises(pr.InputError, match=r"The 'w' argument of Chains must be draws \(chain, draw, 3 coordinates\)"):
        Chains(TARGET, w)


def test_draws_that_are_not_finite_are_refused():
    with pytest.raises(pr.InputError, match="The 'w' argument of Chains must be finite"):
        Chains(TARGET, torch.full((2, 5, 3), math.nan))


def test_statistics_of_another_shape_are_refused():
    with pytest.raises(
        pr.InputError,
        match=r"The 'statistics' argument of Chains must have the shape \(4, "
        r"200\), got 'energy'",
    ):
        Chains(TARGET, vectors(), statistics={"energy": torch.zeros(200, 4)})
