"""Draws kept by the driver: in memory or in shards, resumed exactly, stopped by ESS, visible to callbacks."""

import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import priory as pr
import priory.fitting.store
from priory import Param
from priory.core.data import Data
from priory.core.errors import InputError, StoreError
from priory.diagnostics import ess_bulk
from priory.fitting import draws_store, progress
from priory.fitting.callbacks import FitProgress
from priory.fitting.draws_store import KeptDraws
from priory.fitting.prepare import make_target
from priory.fitting.run import Run
from priory.methods.base import Info, Options, Plan, Traits
from priory.methods.draw_policy import FIRST_CHECK_DRAWS, DrawPolicy, smallest_ess
from priory.methods.mcmc import HMC, RandomWalk
from priory.methods.mcmc.sgld import SGLD
from priory.models.target import Target
from priory.posteriors.chains import Chains

DOUBLE = torch.float64


@dataclass
class State:
    w: Tensor  # (K, P)
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Autoregression(Options):
    """x <- r x + sqrt(1 - r^2) noise: exact draws of N(0, I) with an ESS of (1 - r) / (1 + r) per draw."""

    r: float = 0.5
    chains: int = 4
    still: bool = False  # whether the last coordinate never moves
    until_ess: Any = None
    store: Any = None
    start: Any = None

    @property
    def traits(self) -> Traits:
        policy = DrawPolicy(self.until_ess, self.store)
        return Traits(reads="pass", chains=True, spread=True, draws=policy)

    def length(self, data: Data) -> int:
        return 100

    def plan(self, target: Target, data: Data, steps: int, seed: int) -> Plan:
        return Plan(data, steps)

    def init(self, target: Any, plan: Any, generator: torch.Generator, shape: Any, start: Any = None) -> State:
        return State(torch.randn(*shape, self.chains, target.size, generator=generator, dtype=DOUBLE), {})

    def step(self, target: Any, state: State, batch: Any, generator: torch.Generator) -> tuple[State, Info]:
        noise = torch.randn(state.w.shape, generator=generator, dtype=DOUBLE)
        state.w.mul_(self.r).add_(noise, alpha=(1 - self.r**2) ** 0.5)
        if self.still:
            state.w[..., -1] = 0.0
        return state, Info({}, draw=state.w)

    def posterior(self, target: Any, state: State, draws: Tensor | None = None) -> Chains:
        return Chains(target, state.w.unsqueeze(-2) if draws is None else draws)


@dataclass(frozen=True)
class Walk(RandomWalk):
    """A random walk with the driver's options."""

    until_ess: Any = None
    store: Any = None


def density(size: int = 3) -> pr.Density:
    return pr.Density(lambda p: -0.5 * p["w"].square().sum(-1), {"w": Param((size,))}, batched=True)


def network() -> pr.Model:
    torch.manual_seed(0)
    return pr.Model(nn.Linear(2, 1).double(), pr.Gaussian(0.3))


X = torch.linspace(-1, 1, 24, dtype=DOUBLE).reshape(12, 2)
DATA = (X, X[:, 0])


def fit(method: Any, steps: int = 30, **options: Any) -> Chains:
    sgld = isinstance(method, SGLD)
    model, data = (network(), DATA) if sgld else (density(), None)
    more = {"batch_size": 4} if sgld else {}
    found = pr.fit(model, data, method, steps=steps, progress=False, **more, **options)
    assert isinstance(found, Chains)
    return found


def assert_same_chains(a: Chains, b: Chains) -> None:
    assert torch.equal(a.w, b.w)
    for mine, other in ((a.statistics, b.statistics), (a.history, b.history)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def small_shards(monkeypatch: pytest.MonkeyPatch, draws: int, chains: int = 4, size: int = 3) -> None:
    monkeypatch.setattr(draws_store, "SHARD_BYTES", draws * chains * size * 8)


def shards(folder: Path) -> Iterator[Tensor]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield file.get_tensor("draws")


# The store.


def some_draws(n: int) -> list[Tensor]:
    return list(torch.randn(n, 4, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("count", range(15))
def test_a_store_resumes_after_any_number_of_draws(count, mapped, tmp_path, monkeypatch):
    small_shards(monkeypatch, 5)
    folder, draws = tmp_path / "draws", some_draws(20)
    before = KeptDraws(folder, "this", mapped)
    for draw in draws[:14]:
        before.append(draw)
    before.flush()
    after = KeptDraws(folder, "this", mapped)
    after.begin(count)
    assert len(after) == count
    for draw in draws[count:]:
        after.append(draw)
    after.flush()
    found = after.tensor()
    assert found is not None
    assert torch.equal(found, torch.stack(draws, -2))
    assert torch.equal(after.columns(1, 3), found[..., 1:3])
    assert (after.chains, after.size, len(after)) == (4, 3, 20)
    assert [t.shape[-2] for t in shards(folder)] == [5, 5, 5, 5]
    assert torch.equal(torch.cat(list(shards(folder)), -2), found)


def test_draws_of_members_and_without_chains_keep_their_shape():
    for shape, chains in (((2, 4, 3), 8), ((3,), 1)):
        kept = KeptDraws()
        assert kept.tensor() is None
        for _ in range(6):
            kept.append(torch.randn(shape))
        found = kept.tensor()
        assert found is not None
        assert found.shape == (*shape[:-1], 6, 3)
        assert kept.chains == chains
        assert smallest_ess(kept) > 0


def test_kept_draws_are_copies():
    kept, w = KeptDraws(), torch.zeros(2, 3)
    for k in range(3):
        w.fill_(k)
        kept.append(w)
    found = kept.tensor()
    assert found is not None
    assert found[0, :, 0].tolist() == [0, 1, 2]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory statistics of Linux")
def test_draws_on_disk_use_the_memory_of_one_shard(tmp_path, monkeypatch):
    def anonymous() -> int:
        return int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10

    monkeypatch.setattr(draws_store, "SHARD_BYTES", 1 << 20)
    kept, before = KeptDraws(tmp_path / "draws", "this", mapped=True), anonymous()
    for k in range(100):
        kept.append(torch.full((4, 1 << 16), float(k)))  # 1 MiB
    found = kept.tensor()
    assert found is not None
    assert found.nbytes == 100 << 20
    assert found[:, 21, 7].tolist() == [21.0] * 4
    assert float(found.mean()) == 49.5
    assert anonymous() - before < 30 << 20


def test_a_missing_corrupt_or_foreign_shard_is_refused(tmp_path, monkeypatch):
    small_shards(monkeypatch, 5)
    kept = KeptDraws(tmp_path, "this")
    for draw in some_draws(12):
        kept.append(draw)
    kept.flush()
    with pytest.raises(StoreError, match="lacks some of the 13 draws"):
        KeptDraws(tmp_path, "this").begin(13)
    with pytest.raises(StoreError, match="another fit"):
        KeptDraws(tmp_path, "that").begin(12)
    path = sorted(tmp_path.glob("*"))[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match="corrupt"):
        KeptDraws(tmp_path, "this").begin(12)
    path.unlink()
    with pytest.raises(StoreError, match="another fit"):
        KeptDraws(tmp_path, "this").begin(12)


# A fit with its draws on disk.


@pytest.mark.parametrize("method", [Autoregression, Walk])
def test_a_fit_with_a_store_equals_one_in_memory(method, tmp_path, monkeypatch):
    small_shards(monkeypatch, 7)
    stored, plain = fit(method(chains=4, store=tmp_path / "draws")), fit(method(chains=4))
    assert_same_chains(stored, plain)
    assert stored.w.untyped_storage().filename is not None
    assert plain.w.untyped_storage().filename is None
    assert [t.shape[-2] for t in shards(tmp_path / "draws")] == [7, 7, 7, 7, 2]
    assert torch.equal(torch.cat(list(shards(tmp_path / "draws")), -2), plain.w)
    assert [p.name for p in (tmp_path / "draws").iterdir() if p.name.startswith(".")] == []
    assert str(stored.summary()) == str(plain.summary()).replace(plain.method, stored.method)
    assert torch.equal(stored.sample(5, seed=0)["w"], plain.sample(5, seed=0)["w"])
    stored.save(tmp_path / "chains.priory")
    assert torch.equal(pr.load(tmp_path / "chains.priory", density()).draws["w"], plain.draws["w"])  # pyright: ignore[reportAttributeAccessIssue]


def test_a_store_holds_the_draws_before_an_interrupt(tmp_path):
    def interrupt(progress_info: FitProgress) -> None:
        if progress_info.step == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(Autoregression(store=tmp_path / "draws"), callbacks=[interrupt])
    assert torch.equal(torch.cat(list(shards(tmp_path / "draws")), -2), fit(Autoregression(), steps=13).w)


def test_a_store_with_draws_of_another_fit_is_refused_and_unchanged(tmp_path):
    fit(Autoregression(store=tmp_path / "draws"))
    before = list(shards(tmp_path / "draws"))
    for options in ({}, {"checkpoint": tmp_path / "fit.checkpoint"}):
        with pytest.raises(StoreError, match="holds the draws of another fit"):
            fit(Autoregression(store=tmp_path / "draws"), seed=1, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, shards(tmp_path / "draws"), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"until_ess": 0}, "The 'until_ess' argument of Autoregression must be a positive number, got 0."),
        ({"until_ess": True}, "The 'until_ess' argument of Autoregression must be a positive number, got True."),
        ({"until_ess": "many"}, "The 'until_ess' argument of Autoregression must be a positive number, got 'many'."),
        ({"until_ess": float("inf")}, "The 'until_ess' argument of Autoregression must be a positive number, got inf."),
        ({"store": 3}, "The 'store' argument of Autoregression must be the path of a folder, got 3."),
    ],
)
def test_invalid_values_of_until_ess_and_store_are_refused(options, message):
    with pytest.raises(InputError) as error:
        fit(Autoregression(**options))
    assert str(error.value) == message


def test_a_store_that_is_a_file_or_in_a_missing_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"'store' argument of Autoregression must be a folder, got the file"):
        fit(Autoregression(store=tmp_path / "file"))
    with pytest.raises(InputError, match=r"'store' argument of Autoregression must lie in a folder that exists"):
        fit(Autoregression(store=tmp_path / "no" / "draws"))


# Checkpoints.

SAMPLERS: dict[str, Any] = {
    "autoregression": Autoregression(),
    "random walk": Walk(chains=4, warmup=10),
    "HMC": HMC(chains=4, warmup=10),
    "SGLD": SGLD(burn_in=5, thin=2),
}


class StopAt(BaseException):
    """Stands for the death of the process: the fit can't write anything after it."""


def kill_at(progress_info: int) -> Any:
    def callback(now: FitProgress) -> None:
        if now.step >= progress_info:
            raise StopAt

    return callback


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("step", [6, 24])
def test_a_killed_sampler_resumes_with_the_same_result(name, step, tmp_path, monkeypatch):
    small_shards(monkeypatch, 5)
    checkpoint = pr.Checkpoint(tmp_path / "fit.checkpoint", every=4)
    with pytest.raises(StopAt):
        fit(SAMPLERS[name], checkpoint=checkpoint, callbacks=[kill_at(step)])
    assert_same_chains(fit(SAMPLERS[name], checkpoint=checkpoint), fit(SAMPLERS[name]))
    assert_same_chains(
        fit(SAMPLERS[name], checkpoint=checkpoint), fit(SAMPLERS[name])
    )  # a finished fit is read from its checkpoint


@pytest.mark.parametrize("stored", [False, True])
def test_a_fit_killed_at_any_write_resumes_with_the_same_result(stored, tmp_path, monkeypatch):
    small_shards(monkeypatch, 5)
    whole, replace, files = fit(Autoregression(), steps=22), os.replace, 0
    for write in range(1, 100):
        folder = tmp_path / str(write)
        folder.mkdir()
        method = Autoregression(store=folder / "draws") if stored else Autoregression()
        checkpoint, left = pr.Checkpoint(folder / "fit.checkpoint", every=3), iter(range(write, 0, -1))

        def killed(source: Any, goal: Any, left: Iterator[int] = left) -> None:
            if next(left) == 1:
                raise StopAt
            replace(source, goal)

        monkeypatch.setattr(priory.fitting.store.os, "replace", killed)
        try:
            fit(method, steps=22, checkpoint=checkpoint)
            ended = True
        except StopAt:
            ended = False
        except StopIteration:
            ended = True
        monkeypatch.setattr(priory.fitting.store.os, "replace", replace)
        found = fit(method, steps=22, checkpoint=checkpoint)
        assert_same_chains(found, whole)
        files = write
        if ended:
            break
    assert files > 15  # five full shards, eight checkpoints, and a partial shard with each of them


def test_the_size_of_a_checkpoint_does_not_grow_with_the_number_of_draws(tmp_path, monkeypatch):
    small_shards(monkeypatch, 5)
    replace, written = os.replace, []

    def counted(source: Any, goal: Any) -> None:
        written.append((Path(goal).name, os.path.getsize(source)))
        replace(source, goal)

    monkeypatch.setattr(priory.fitting.store.os, "replace", counted)
    fit(Autoregression(), steps=200, checkpoint=pr.Checkpoint(tmp_path / "fit.checkpoint", every=2))
    states = [size for name, size in written if name == "fit.checkpoint"]
    assert len(states) == 101
    assert max(states) - min(states) < 32  # more digits in the number of steps
    assert max(size for name, size in written if name != "fit.checkpoint") < 5 * 4 * 3 * 8 + 1024


def test_after_the_checkpoint_is_removed_a_fit_starts_anew_despite_old_draws(tmp_path, monkeypatch):
    small_shards(monkeypatch, 5)
    path = tmp_path / "fit.checkpoint"
    fit(Autoregression(), checkpoint=path)
    path.unlink()
    found = fit(Autoregression(), steps=9, seed=1, checkpoint=path)
    assert_same_chains(found, fit(Autoregression(), steps=9, seed=1))
    assert torch.equal(torch.cat(list(shards(tmp_path / "fit.checkpoint.draws")), -2), found.w)


# Stopping at an effective sample size.


def test_a_sampler_stops_when_the_smallest_ess_reaches_until_ess(monkeypatch):
    checked_at: list[int] = []

    def counted(draws: KeptDraws, *options: Any) -> float:
        checked_at.append(len(draws))
        return smallest_ess(draws, *options)

    monkeypatch.setattr("priory.methods.draw_policy.smallest_ess", counted)
    found = fit(Autoregression(until_ess=1000), steps=100_000)
    reached = float(ess_bulk(found.w).min())
    assert 1000 <= reached < 1500
    assert checked_at[0] == FIRST_CHECK_DRAWS
    assert checked_at[-1] == found.num_draws
    # The ESS of 4 chains of S draws is 4 S / 3, so 750 draws per chain are needed, up to the spacing of the checks.
    assert 600 < found.num_draws < 1000
    assert sum(checked_at) < 5 * checked_at[-1]
    for early in checked_at[:-1]:
        assert float(ess_bulk(found.w[:, :early]).min()) < 1000


def test_a_sampler_takes_at_most_the_given_steps():
    assert fit(Autoregression(until_ess=1000), steps=120).num_draws == 120


def test_a_constant_coordinate_never_reaches_until_ess():
    assert fit(Autoregression(until_ess=10, still=True), steps=150).num_draws == 150


def test_the_smallest_ess_is_the_same_for_all_block_sizes(monkeypatch):
    kept = KeptDraws()
    for draw in some_draws(80):
        kept.append(draw.cumsum(-1))
    whole = torch.stack([d.cumsum(-1) for d in some_draws(80)], -2)
    for some in (1 << 22, 500, 1):
        monkeypatch.setattr("priory.methods.draw_policy.ESS_BLOCK_ELEMENTS", some)
        assert smallest_ess(kept) == pytest.approx(float(ess_bulk(whole).min()), rel=1e-12)


@pytest.mark.parametrize("step", [40, 70, 160])
def test_a_resumed_fit_stops_at_the_same_draw(step, tmp_path):
    method = Autoregression(until_ess=300)
    checkpoint = pr.Checkpoint(tmp_path / "fit.checkpoint", every=9)
    with pytest.raises(StopAt):
        fit(method, steps=5000, checkpoint=checkpoint, callbacks=[kill_at(step)])
    found, whole = fit(method, steps=5000, checkpoint=checkpoint), fit(method, steps=5000)
    assert_same_chains(found, whole)
    assert whole.num_draws < 1000
    assert_same_chains(fit(method, steps=5000, checkpoint=checkpoint), whole)


@pytest.mark.parametrize("check", [1, 2, 3])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_during_a_check_of_the_ess_does_not_change_the_result(check, after, tmp_path, monkeypatch):
    num_checks, method = [0], Autoregression(until_ess=190)
    whole = fit(method, steps=5000)

    def interrupted(draws: KeptDraws, *options: Any) -> float:
        num_checks[0] += 1
        if not after and num_checks[0] == check:
            raise KeyboardInterrupt
        return smallest_ess(draws, *options)

    def due(bar: progress.Progress) -> bool:
        if num_checks[0] == check:
            raise KeyboardInterrupt
        return False

    checkpoint = pr.Checkpoint(tmp_path / "fit.checkpoint", every=9)
    with monkeypatch.context() as patch:
        patch.setattr("priory.methods.draw_policy.smallest_ess", interrupted)
        patch.setattr(progress.Progress, "due", due)
        with pytest.raises(KeyboardInterrupt):
            fit(method, steps=5000, checkpoint=checkpoint)
        assert num_checks[0] == check
    assert_same_chains(fit(method, steps=5000, checkpoint=checkpoint), whole)


def test_random_walk_stops_at_until_ess_with_statistics_per_draw():
    found = fit(Walk(chains=16, warmup=50, until_ess=400), steps=4000)
    assert FIRST_CHECK_DRAWS <= found.num_draws < 2000
    assert float(ess_bulk(found.w).min()) >= 400
    assert found.statistics["energy"].shape == found.w.shape[:2]


# Thinning and callbacks.


def test_thinning_keeps_every_nth_draw():
    thin, thick = fit(RandomWalk(chains=4, warmup=0, thin=5), steps=8), fit(RandomWalk(chains=4, warmup=0), steps=40)
    assert torch.equal(thin.w, thick.w[:, 4::5])
    method, target = RandomWalk(chains=4, warmup=3, thin=5), make_target(density(), Data.of(None))
    run = Run(target, method, method.plan(target, Data.of(None), 8, 0), 0, None)
    run.run(False, [])
    assert run.step == 43
    assert len(run.draws) == 8


@pytest.mark.parametrize("stored", [False, True])
def test_a_callback_gets_the_current_chains(stored, tmp_path, monkeypatch):
    small_shards(monkeypatch, 5)
    seen: dict[int, Tensor] = {}

    def check(progress_info: FitProgress) -> None:
        if progress_info.step in (3, 10, 11, 18, 30):
            posterior = progress_info.posterior()
            assert isinstance(posterior, Chains)
            assert torch.isfinite(posterior.mean["w"]).all()
            seen[progress_info.step] = posterior.w

    store = tmp_path / "draws" if stored else None
    found = fit(Walk(chains=4, warmup=10, store=store), steps=20, callbacks=[check])
    assert {step: w.shape[1] for step, w in seen.items()} == {3: 1, 10: 1, 11: 1, 18: 8, 30: 20}
    for step in (11, 18, 30):
        assert torch.equal(seen[step], found.w[:, : step - 10])


def test_a_sampler_that_a_callback_stops_returns_its_draws_so_far():
    assert (
        fit(Walk(chains=4, warmup=10), steps=20, callbacks=[lambda progress_info: progress_info.step >= 15]).num_draws
        == 5
    )


# Progress.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fake_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal, without rich."""
    screen = Terminal()
    monkeypatch.setitem(sys.modules, "rich.console", None)  # the plain bar
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    return screen


def test_the_progress_bar_shows_step_size_acceptance_divergences_and_ess(monkeypatch):
    terminal = fake_terminal(monkeypatch)
    pr.fit(density(), None, HMC(chains=4, warmup=20), steps=120)
    lines = terminal.getvalue().split("\r")
    assert "ESS" not in lines[30]  # too few draws for an ESS
    last = lines[-1]
    assert re.search(r"HMC\(.*\) \[#+\] 140/140 ", last)
    assert re.search(r"step size \d\.\d+  acceptance 0\.\d\d  divergences 0  ESS \d+  0 s left", last)


def test_the_progress_bar_estimates_the_number_of_steps_to_until_ess(monkeypatch):
    terminal = fake_terminal(monkeypatch)
    found = pr.fit(density(), None, Autoregression(until_ess=300), steps=100_000)
    assert isinstance(found, Chains)
    seen = [int(n) for n in re.findall(r" \d+/(\d+) ", terminal.getvalue())]
    assert seen[0] == 100_000
    assert 150 < seen[FIRST_CHECK_DRAWS] < 400  # 225 draws per chain on average
    assert seen[-1] == found.num_draws


def test_the_progress_bar_counts_divergences_after_the_warm_up(monkeypatch):
    terminal = fake_terminal(monkeypatch)
    with pytest.warns(pr.PrioryWarning, match="diverged"):
        found = pr.fit(cliff(), None, HMC(chains=4, warmup=30), steps=60)
    assert isinstance(found, Chains)
    count = re.findall(r"divergences (\d+)", terminal.getvalue())[-1]
    assert int(count) == len(found.divergences) > 0
    assert found.history["divergences"].sum() > int(count)


def cliff() -> pr.Density:
    """A normal density that drops by 1e5 nats per coordinate below zero."""

    def log_prob(p: dict[str, Tensor]) -> Tensor:
        x = p["w"]
        return (-0.5 * x.square() - torch.where(x < 0, 1e5, 0.0)).sum(-1)

    return pr.Density(log_prob, {"w": Param((2,))}, batched=True)


def test_without_a_terminal_nothing_is_printed_and_no_ess_is_computed(capfd: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr("priory.methods.draw_policy.smallest_ess", None)
    pr.fit(density(), None, Autoregression(), steps=120)
    assert capfd.readouterr() == ("", "")
