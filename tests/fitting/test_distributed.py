"""Chains on several processes: each process has its own noise, and all return the chains of all processes."""

import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn

import priory as pr
from priory import Param
from priory.core.distributed import gather, own_stream, rank, world
from priory.core.errors import InputError
from priory.core.streams import stream
from priory.diagnostics import ess_bulk
from priory.fitting.callbacks import FitProgress
from priory.posteriors.chains import Chains

sys.path.insert(0, str(Path(__file__).parent))
from test_kept_draws import Autoregression, StopAt, Walk, kill_at

WORLD_SIZE, STEPS = 2, 12


def density() -> pr.Density:
    return pr.Density(lambda p: -0.5 * p["w"].square().sum(-1), {"w": Param((2,))}, batched=True)


def fit(method: Any, steps: int = STEPS, **options: Any) -> Chains:
    found = pr.fit(density(), None, method, steps=steps, progress=False, **options)
    assert isinstance(found, Chains)
    return found


def mode() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 8)[:, None]
    return pr.fit(
        pr.Model(nn.Linear(1, 1), pr.Gaussian(0.3)), (x, x[:, 0]), pr.MAP(), steps=9, batch_size=4, progress=False
    ).mean["weight"]


def killed_and_resumed(folder: Path, here: int) -> Chains:
    """Kill one process at step 60 and the other at 75, between the first and the second check of the ESS."""
    method = Autoregression(until_ess=400)
    checkpoint = pr.Checkpoint(folder / "fit.checkpoint", every=7 + here)
    with pytest.raises(StopAt):
        fit(method, 4000, checkpoint=checkpoint, callbacks=[kill_at(60 + 15 * here)])
    return fit(method, 4000, checkpoint=checkpoint)


def finished_on_one(folder: Path, here: int) -> Chains:
    """Resume when the first process has finished the fit and the second has only an early checkpoint."""
    method, path = Autoregression(until_ess=400), folder / "ended.checkpoint"
    mine, kept = Path(f"{path}.{here}" if here else path), folder / f"kept.{here}"

    def keep(moment: FitProgress) -> None:
        if moment.step == 70:
            shutil.copy(mine, kept)

    fit(method, 4000, checkpoint=pr.Checkpoint(path, every=20), callbacks=[keep])
    if here:
        shutil.copy(kept, mine)
    return fit(method, 4000, checkpoint=pr.Checkpoint(path, every=20))


def work(here: int, folder: Path) -> None:
    """Run all fits on one process, and write the results to a file."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=here, world_size=WORLD_SIZE, timeout=timedelta(minutes=3)
    )
    assert (world(), rank()) == (WORLD_SIZE, here)
    found: dict[str, Any] = {
        "gathered": gather(torch.tensor([[10 * here, 1]])),
        "noise": torch.rand(3, generator=own_stream(0, "noise")),
        "mode": mode(),
    }
    walk = fit(Walk(chains=3, warmup=5))
    found |= {"walk": walk.w, **walk.statistics, "draws": walk.draws["w"], "sample": walk.sample(4, seed=1)["w"]}
    enough = fit(Autoregression(until_ess=400), 4000)
    found |= {"enough": enough.w, "again": killed_and_resumed(folder, here).w, "ended": finished_on_one(folder, here).w}
    with pytest.raises(
        InputError, match="'store' argument of Autoregression must be left out when chains run on several"
    ):
        fit(Autoregression(store=folder / "draws"))
    torch.save(found, folder / f"{here}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("processes")
    multiprocessing.spawn(work, (folder,), nprocs=WORLD_SIZE)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"{k}.pt") for k in range(WORLD_SIZE)]


def test_without_torch_distributed_there_is_one_process():
    assert (world(), rank()) == (1, 0)
    assert torch.equal(gather(torch.arange(3)), torch.arange(3))
    assert torch.equal(
        torch.rand(3, generator=own_stream(4, "noise")),
        torch.rand(3, generator=stream(4, "noise")),
    )


def test_gathering_returns_the_tensors_of_all_processes_in_rank_order(found):
    for each in found:
        assert each["gathered"].tolist() == [[0, 1], [10, 1]]


def test_each_process_has_its_own_noise_and_rank_zero_that_of_a_single_process(found):
    alone = torch.rand(3, generator=stream(0, "noise"))
    assert torch.equal(found[0]["noise"], alone)
    assert not torch.equal(found[1]["noise"], alone)


def test_every_process_returns_all_chains_and_those_of_rank_zero_equal_a_single_process(found):
    alone = fit(Walk(chains=3, warmup=5))
    for each in found:
        assert each["walk"].shape == (2 * 3, STEPS, 2)
        assert torch.equal(each["walk"][:3], alone.w)
        assert torch.equal(each["draws"], each["walk"])
        for name, t in alone.statistics.items():
            assert each[name].shape == (2 * 3, STEPS)
            assert torch.equal(each[name][:3], t), name
    for name in found[0]:
        if name != "noise":
            assert torch.equal(found[0][name], found[1][name]), name


def test_all_chains_are_different(found):
    w = found[0]["walk"]
    assert len({tuple(chain.flatten().tolist()) for chain in w}) == 6


def test_all_processes_stop_when_their_chains_together_reach_the_ess(found):
    w = found[0]["enough"]
    assert w.shape[0] == 8
    assert float(ess_bulk(w).min()) >= 400
    assert float(ess_bulk(w[:4]).min()) < 400  # one process alone would have continued
    assert 100 < w.shape[1] < 300


def test_processes_killed_at_different_steps_resume_together_with_the_same_result(found):
    assert torch.equal(found[0]["again"], found[0]["enough"])


def test_a_process_that_lags_behind_finishes_where_the_other_has(found):
    assert torch.equal(found[0]["ended"], found[0]["enough"])


@pytest.mark.slow
def test_the_script_of_the_documentation_runs_under_torchrun(tmp_path: Path):
    page = Path(__file__).resolve().parents[2] / "docs" / "mcmc.md"
    found = re.search(r"^```py\n(# chains\.py\n.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "chains.py").write_text(found.group(1), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "chains.py"]
    paths = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths}
    )
    assert ran.returncode == 0, ran.stderr
    assert "torch.Size([16, 50, 3])" in ran.stdout
    assert (tmp_path / "posterior.priory").exists()


def test_a_method_without_chains_gives_the_same_fit_on_each_process(found):
    assert torch.equal(found[0]["mode"], mode())
