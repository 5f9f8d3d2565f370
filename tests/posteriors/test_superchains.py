"""Chains in superchains: what their summary, status, files and ArviZ say."""

import math

import pytest
import torch

import priory as pr
from priory.core import distributed
from priory.core.streams import stream
from priory.diagnostics import nested_r_hat, r_hat
from priory.diagnostics.summary import CHAIN_COLUMNS, Summary
from priory.models.target import Target
from priory.posteriors import chains as module
from priory.posteriors.chains import Chains

DOUBLE = torch.float64
DENSITY = pr.Density(
    lambda p: -p["x"].square().sum() - p["s"], {"x": pr.Param((2,)), "s": pr.Param((), pr.constraints.positive)}
)
TARGET = Target(DENSITY, None)
IDS = torch.arange(64) // 16


def autoregression(chains: int, draws: int, phi: float, quantities: int = 3) -> torch.Tensor:
    """Stationary chains of x_t = phi x_(t-1) + noise with variance one."""
    e = torch.randn(draws, chains, quantities, generator=stream(0, "superchains"), dtype=DOUBLE)
    rows = [e[0]]
    for t in range(1, draws):
        rows.append(phi * rows[-1] + math.sqrt(1 - phi**2) * e[t])
    return torch.stack(rows, 1)


def test_the_summary_has_nested_r_hat_beside_r_hat():
    posterior = Chains(TARGET, autoregression(64, 40, 0.5), superchains=IDS)
    summary = posterior.summary()
    assert list(summary.columns) == [*CHAIN_COLUMNS, "nested_r_hat"]
    x = torch.cat([posterior.draws["x"], posterior.draws["s"][..., None]], -1)
    torch.testing.assert_close(summary["nested_r_hat"], nested_r_hat(x, IDS), rtol=1e-12, atol=0)
    torch.testing.assert_close(summary["r_hat"], r_hat(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(posterior.diagnostics["nested_r_hat"]["x"], nested_r_hat(x[..., :2], IDS))
    assert str(summary).split("\n")[0].split()[-2:] == ["r_hat", "nested_r_hat"]
    assert summary is posterior.summary()


def test_chains_without_superchains_have_no_such_column():
    posterior = Chains(TARGET, autoregression(4, 40, 0.5))
    assert posterior.superchains is None
    assert "nested_r_hat" not in posterior.summary().columns
    assert "nested_r_hat" not in posterior.diagnostics


def test_short_stationary_chains_are_converged_by_nested_r_hat_where_r_hat_objects():
    """4 superchains of 16 chains of 40 draws with tau = 3 are worth 213 draws each: R-hat near 1.05, nested 1.002."""
    w = autoregression(64, 40, 0.5)
    assert Chains(TARGET, w).status.name == "not_converged"
    posterior = Chains(TARGET, w, superchains=IDS)
    assert float(posterior.summary()["r_hat"].max()) > 1.02
    assert posterior.status.name == "converged"
    assert posterior.summary().verdict == []


def test_superchains_that_disagree_are_named_with_the_measure():
    w = autoregression(64, 40, 0.5)
    w[IDS == 2, :, 1] += 1.0
    posterior = Chains(TARGET, w, superchains=IDS)
    assert posterior.status.name == "not_converged"
    assert posterior.status.reason.startswith("Nested R-hat is above 1.01 for 1 of 3 quantities, and largest (")
    assert "for x[1]: the superchains disagree. Take more draws." in posterior.status.reason


def test_long_chains_in_superchains_are_judged_by_r_hat():
    """Half of the chains of each superchain are wrong in the same way, which only the comparison of chains detects."""
    w = 0.5 * autoregression(32, 1000, 0.0)
    good = Chains(TARGET, w, superchains=torch.arange(32) // 8).summary()
    assert good.agreement == "r_hat"
    assert good.verdict == []
    w[::2] += 0.2
    summary = Chains(TARGET, w, superchains=torch.arange(32) // 8).summary()
    assert float(summary["nested_r_hat"].max()) < 1.01
    assert float(summary["ess_bulk"].min()) > 400
    (said,) = summary.verdict
    assert said.startswith("R-hat is above 1.01 for 3 of 3 quantities")


def test_chains_that_never_leave_their_starts_have_not_converged_though_superchains_agree():
    """Eight superchains of 64 chains, each chain at its own draw of the target: nested R-hat is near 1.008."""
    ids = torch.arange(512) // 64
    w = autoregression(512, 1, 0.0).expand(512, 40, 3) + 0.01 * autoregression(512, 40, 0.0)
    posterior = Chains(TARGET, w, superchains=ids)
    assert float(posterior.summary()["nested_r_hat"].min()) < 1.01
    assert posterior.status.name == "not_converged"
    few = posterior.summary().shortage
    assert few.startswith("ESS is below 1024 (2 per chain, below which chains stay near their starts) for 3 of 3")


def test_a_few_effective_draws_of_many_chains_need_two_per_chain():
    columns = {name: torch.ones(2, dtype=DOUBLE) for name in (*CHAIN_COLUMNS, "nested_r_hat")}
    columns |= {name: torch.tensor([1e4, 600.0], dtype=DOUBLE) for name in ("ess_bulk", "ess_tail")}
    assert Summary(["a", "b"], columns, 256, 40, short=True).verdict == []
    assert Summary(["a", "b"], columns, 300, 40, short=True).verdict == []
    assert Summary(["a", "b"], columns, 301, 400).verdict == []
    (said,) = Summary(["a", "b"], columns, 301, 40, short=True).verdict
    assert said.startswith("ESS is below 602 (2 per chain, ")
    assert said.endswith("for 1 of 2 quantities, and smallest (600) for b: take more draws.")


@pytest.mark.parametrize("draws", [1, 3])
def test_fewer_than_four_draws_have_nested_r_hat_and_no_effective_size(draws):
    w = autoregression(64, draws, 0.5)
    posterior = Chains(TARGET, w, superchains=IDS)
    assert bool(torch.isfinite(posterior.summary()["nested_r_hat"]).all())
    assert "Fewer than 4 draws per chain have no effective sample size: take more draws." in posterior.summary().verdict
    assert posterior.status.name == "not_converged"
    w[IDS == 1] += 3
    assert Chains(TARGET, w, superchains=IDS).status.reason.startswith("Nested R-hat is above 1.01 for 3 of 3")


def test_one_draw_of_one_chain_per_superchain_has_no_nested_r_hat():
    posterior = Chains(TARGET, autoregression(4, 1, 0.5), superchains=[0, 1, 2, 3])
    assert "nested_r_hat" not in posterior.summary().columns
    assert posterior.status.name == "not_converged"


def test_the_quick_status_compares_superchains():
    w = autoregression(64, 40, 0.95)  # R-hat of the chains is near 1.4
    assert float(r_hat(w).max()) > 1.2
    assert Chains(TARGET, w, superchains=IDS).quick_status().name == "converged"
    w[IDS == 0, :, 2] += 3
    status = Chains(TARGET, w, superchains=IDS).quick_status()
    assert status.name == "not_converged"
    assert status.reason.startswith("Nested R-hat is ")
    assert "for s: the superchains disagree" in status.reason


def test_some_of_many_coordinates_are_judged_by_nested_r_hat_too(monkeypatch):
    monkeypatch.setattr(module, "STATUS_CHECK_ELEMENTS", 64 * 40 * 2)
    assert Chains(TARGET, autoregression(64, 40, 0.5), superchains=IDS).status.name == "converged"


def test_a_file_keeps_the_superchains(tmp_path):
    posterior = Chains(TARGET, autoregression(64, 5, 0.5), superchains=IDS.flip(0) + 7)
    posterior.save(tmp_path / "chains")
    loaded = pr.load(tmp_path / "chains", DENSITY)
    assert isinstance(loaded, Chains)
    assert loaded.superchains is not None
    assert torch.equal(loaded.superchains, IDS.flip(0) + 7)
    assert loaded.superchains.dtype == torch.long
    assert torch.equal(loaded.summary()["nested_r_hat"], posterior.summary()["nested_r_hat"])
    Chains(TARGET, posterior.w).save(tmp_path / "without")
    without = pr.load(tmp_path / "without", DENSITY)
    assert isinstance(without, Chains)
    assert without.superchains is None


def test_arviz_has_the_superchain_of_each_chain():
    pytest.importorskip("arviz")
    found = Chains(TARGET, autoregression(64, 5, 0.5), superchains=IDS).to_arviz()["constant_data"]
    assert found["superchain"].dims == ("chain",)
    assert torch.equal(torch.as_tensor(found["superchain"].to_numpy()), IDS)


def test_what_a_sampler_keeps_has_its_superchains():
    w = autoregression(64, 6, 0.5)
    w[3, 4] = math.nan
    found = Chains.kept(TARGET, w, w[:, 0], superchains=IDS)
    assert found.superchains is not None
    assert found.num_draws == 4
    assert Chains.kept(TARGET, None, w[:, 0], superchains=IDS).superchains is not None


def test_no_two_processes_share_a_superchain(monkeypatch):
    posterior = Chains(TARGET, autoregression(4, 5, 0.5), superchains=[3, 3, 5, 5])
    monkeypatch.setattr(module, "rank", lambda: 1)  # the ids that the second process adds to the gathered ones
    monkeypatch.setattr(module, "gather", distributed.gather)
    posterior.join()
    assert posterior.superchains is not None
    assert posterior.superchains.tolist() == [3, 3, 5, 5]
    monkeypatch.setattr(module, "rank", lambda: 0)
    posterior.join()
    assert posterior.superchains.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("ids", [[0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [0.5, 0.5, 1.0, 1.0]])
def test_superchains_that_do_not_fit_the_chains_are_refused(ids):
    with pytest.raises(pr.InputError, match="The 'superchains' argument of Chains must be"):
        Chains(TARGET, autoregression(4, 5, 0.5), superchains=ids)


def test_the_function_space_has_nested_r_hat():
    model = pr.Model(torch.nn.Linear(1, 1).double(), pr.Gaussian(0.1), prior=1.0)
    posterior = Chains(Target(model, 3), autoregression(64, 10, 0.5, 2), superchains=IDS)
    x = torch.tensor([[0.0], [2.0]], dtype=DOUBLE)
    means = posterior.w @ torch.tensor([[0.0, 2.0], [1.0, 1.0]], dtype=DOUBLE)
    torch.testing.assert_close(posterior.function_space(x)["nested_r_hat"], nested_r_hat(means, IDS))
