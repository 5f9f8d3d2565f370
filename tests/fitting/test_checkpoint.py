"""An interrupted fit resumes with the same result as an uninterrupted one; a checkpoint of another fit is refused."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import priory as pr
from priory.fitting.callbacks import FitProgress
from priory.posteriors import Posterior

SOURCE = Path(pr.__file__).parents[1]
STEPS = 30


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = normal(22, 3)
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3 * normal(22, seed=1)


class Rows(Dataset[Any]):
    """A map-style data set that is not in memory."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def plain(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)


def loader_with_its_own_generator() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(7))


def loader_whose_sampler_has_a_generator() -> DataLoader[Any]:
    rows = TensorDataset(X, Y)
    return DataLoader(rows, batch_size=8, sampler=RandomSampler(rows, generator=torch.Generator().manual_seed(7)))


class ShortMAP(pr.MAP):
    """MAP with few steps, as a first stage."""

    def length(self, data: Any) -> int:
        return 12


LEARNT, GIVEN = pr.Gaussian, lambda: pr.Gaussian(0.3)


def run(
    method: Any,
    data: Any = (X, Y),
    *,
    net: Callable[[], nn.Module] = plain,
    likelihood: Callable[[], Any] = LEARNT,
    prior: Any = "glorot",
    **options: Any,
) -> Posterior:
    """Run one fit of a newly built model."""
    if not isinstance(data, DataLoader):
        options.setdefault("batch_size", 8)
    if "epochs" not in options:
        options.setdefault("steps", STEPS)
    return pr.fit(pr.Model(net(), likelihood(), prior), data, method, progress=False, **options)


def assert_same_fit(a: Posterior, b: Posterior) -> None:
    """Assert that tensors, buffers, histories and draws of two posteriors are equal exactly."""
    for mine, other in ((a.tensors(), b.tensors()), (a.buffers, b.buffers), (a.history, b.history)):
        assert mine.keys() == other.keys()
        for name in mine:
            assert torch.equal(mine[name], other[name]), name
    assert a.sample(2, seed=0)["0.weight"].equal(b.sample(2, seed=0)["0.weight"])


class Interrupt:
    """A callback that raises KeyboardInterrupt at the first epoch that ends at or after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, progress: FitProgress) -> None:
        if progress.step >= self.step:
            raise KeyboardInterrupt


class StopAt(Exception):  # noqa: N818 - not an error
    """Stands for the death of the process: the fit can't write anything after it."""


class Kill(Interrupt):
    """A callback that ends the fit without a last checkpoint, as a killed process does."""

    def __call__(self, progress: FitProgress) -> None:
        if progress.step >= self.step:
            raise StopAt


# Interrupted and resumed.

FITS: dict[str, Callable[..., Posterior]] = {
    "MAP": lambda **o: run(pr.MAP(), likelihood=GIVEN, **o),
    "MAP with a learnt noise": lambda **o: run(pr.MAP(), **o),
    "MAP with full batches": lambda **o: run(pr.MAP(), batch_size=22, **o),
    "MeanField": lambda **o: run(pr.MeanField(), **o),
    "MeanField with three samples": lambda **o: run(pr.MeanField(samples=3), **o),
    "MeanField with a prior without a closed-form KL": lambda **o: run(pr.MeanField(), prior=Laplace(0.0, 1.0), **o),
    "MeanField with a schedule": lambda **o: run(pr.MeanField(schedule=lambda opt: StepLR(opt, 10)), **o),
    "MeanField from MAP": lambda **o: run(pr.MeanField(start=ShortMAP(learning_rate=0.05)), **o),
    "MeanField of a Dataset": lambda **o: run(pr.MeanField(), Rows(), **o),
    "MeanField of a DataLoader": lambda **o: run(pr.MeanField(), loader(), **o),
    "MeanField of a DataLoader with its own generator": lambda **o: run(
        pr.MeanField(), loader_with_its_own_generator(), **o
    ),
    "MeanField of a DataLoader whose sampler has a generator": lambda **o: run(
        pr.MeanField(), loader_whose_sampler_has_a_generator(), **o
    ),
    "MAP with a learnt noise of a DataLoader": lambda **o: run(pr.MAP(), loader(), **o),
    "MAP with a learnt noise of a Dataset": lambda **o: run(pr.MAP(), Rows(), **o),
    "MAP with running statistics": lambda **o: run(pr.MAP(), net=normed, **o),
    "MeanField with running statistics": lambda **o: run(pr.MeanField(), net=normed, **o),
    "MeanField with three samples and running statistics": lambda **o: run(pr.MeanField(samples=3), net=normed, **o),
}


@pytest.mark.parametrize("name", FITS)
def test_two_runs_of_a_fit_give_the_same_result(name: str) -> None:
    assert_same_fit(FITS[name](), FITS[name]())


@pytest.mark.parametrize("step", [1, 12, 25])
@pytest.mark.parametrize("name", FITS)
def test_an_interrupted_fit_resumes_with_the_same_result(name: str, step: int, tmp_path: Path) -> None:
    path = tmp_path / "fit.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        FITS[name](checkpoint=path, callbacks=[Interrupt(step)])
    assert path.exists()
    assert_same_fit(FITS[name](checkpoint=path), FITS[name]())


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("name", ["MAP with a learnt noise", "MeanField with three samples"])
def test_a_killed_fit_resumes_from_its_last_checkpoint_with_the_same_result(
    name: str, every: int, tmp_path: Path
) -> None:
    path, whole = tmp_path / "fit.checkpoint", FITS[name]()
    for step in (8, 14, 21, 27):
        path.unlink(missing_ok=True)
        with contextlib.suppress(StopAt):  # if no epoch ends after this step, the fit finishes
            FITS[name](checkpoint=pr.Checkpoint(path, every=every), callbacks=[Kill(step)])
        assert_same_fit(FITS[name](checkpoint=pr.Checkpoint(path, every=every)), whole)


def test_a_fit_may_be_interrupted_several_times(tmp_path: Path) -> None:
    path = tmp_path / "fit.checkpoint"
    for step in (5, 11, 16, 22):
        with pytest.raises(KeyboardInterrupt):
            FITS["MeanField"](checkpoint=path, callbacks=[Interrupt(step)])
    assert_same_fit(FITS["MeanField"](checkpoint=path), FITS["MeanField"]())


class InterruptedLayer(nn.Module):
    """A layer that raises KeyboardInterrupt at the given pass after it is armed."""

    left: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if InterruptedLayer.left is not None:
            InterruptedLayer.left -= 1
            if InterruptedLayer.left == 0:
                InterruptedLayer.left = None
                raise KeyboardInterrupt
        return x


def interruptible() -> nn.Module:
    return nn.Sequential(*plain(), InterruptedLayer())


class ArmLayer:
    """A callback that arms the layer at the first epoch that ends at or after a step."""

    def __init__(self, step: int, passes: int) -> None:
        self.step, self.passes = step, passes

    def __call__(self, progress: FitProgress) -> None:
        if progress.step >= self.step and self.passes:
            InterruptedLayer.left, self.passes = self.passes, 0


@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField(), pr.MeanField(samples=3)], ids=str)
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_fit_interrupted_inside_a_step_resumes_with_the_same_result(method: Any, passes: int, tmp_path: Path) -> None:
    path = tmp_path / "fit.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        run(method, net=interruptible, checkpoint=path, callbacks=[ArmLayer(9, passes)])
    assert_same_fit(run(method, net=interruptible, checkpoint=path), run(method, net=interruptible))


CHILD_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
import test_checkpoint as t
import priory as pr
t.short_fit(sys.argv[3], checkpoint=pr.Checkpoint(sys.argv[1], every=5), callbacks=[t.KillTheProcess(23)])
"""


class KillTheProcess(Interrupt):
    """A callback that kills the process at the first epoch that ends at or after a step."""

    def __call__(self, progress: FitProgress) -> None:
        if progress.step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def short_fit(name: str, **options: Any) -> Posterior:
    """Run the fit that the child process is killed in, between two checkpoints."""
    return run(pr.MAP() if name == "MAP" else pr.MeanField(samples=3), steps=60, **options)


@pytest.mark.parametrize("name", ["MAP", "MeanField"])
def test_a_fit_in_a_killed_process_resumes_with_the_same_result(name: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.checkpoint"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD_SCRIPT, str(path), str(Path(__file__).parent), name]
    child = subprocess.run(command, env=environment, stderr=subprocess.PIPE, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert path.exists()
    assert_same_fit(short_fit(name, checkpoint=path), short_fit(name))


# Callbacks with a state.


def test_early_stop_resumes_with_its_state(tmp_path: Path) -> None:
    def fit(*more: Any, **options: Any) -> tuple[Posterior, pr.EarlyStop]:
        stop = pr.EarlyStop(patience=6, data=(X[:6], Y[:6] + 3.0))
        method = pr.MeanField(learning_rate=0.05)
        return run(method, steps=300, callbacks=[stop, *more], **options), stop

    path, (whole, first) = tmp_path / "fit.checkpoint", fit()
    steps = len(whole.history["loss"])
    assert 20 < steps < 300
    with pytest.raises(KeyboardInterrupt):
        fit(Interrupt(steps - 9), checkpoint=path)
    resumed, second = fit(checkpoint=path)
    assert_same_fit(resumed, whole)
    assert (second.best, second.waited) == (first.best, first.waited)


def test_a_fit_that_a_callback_stopped_is_not_resumed(tmp_path: Path) -> None:
    path, calls = tmp_path / "fit.checkpoint", []

    def stop(progress: FitProgress) -> bool:
        calls.append(progress.step)
        return progress.step >= 9

    first = run(pr.MeanField(), checkpoint=path, callbacks=[stop])
    assert calls == [3, 6, 9]
    second = run(pr.MeanField(), checkpoint=path, callbacks=[stop])
    assert calls == [3, 6, 9]
    assert len(second.history["loss"]) == 9
    assert_same_fit(first, second)


@pytest.mark.parametrize("name", FITS)
def test_a_finished_fit_is_loaded_from_its_checkpoint_without_further_steps(name: str, tmp_path: Path) -> None:
    path, calls = tmp_path / "fit.checkpoint", []
    first = FITS[name](checkpoint=path)
    written = path.read_bytes()
    second = FITS[name](checkpoint=path, callbacks=[lambda progress: calls.append(progress.step)])
    assert calls == []
    assert path.read_bytes() == written
    assert_same_fit(first, second)
    assert_same_fit(first, FITS[name]())


def test_writing_checkpoints_does_not_change_the_fit(tmp_path: Path) -> None:
    assert_same_fit(
        FITS["MeanField"](checkpoint=pr.Checkpoint(tmp_path / "fit.checkpoint", every=1)), FITS["MeanField"]()
    )


# When checkpoints are written.


def steps_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from priory.fitting.checkpoint import CheckpointWriter

    found, write = [], CheckpointWriter.write

    def noting(self: Any, step: int, *rest: Any) -> None:
        found.append(step)
        write(self, step, *rest)

    monkeypatch.setattr(CheckpointWriter, "write", noting)
    return found


def test_a_checkpoint_is_written_every_n_steps_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps_written(monkeypatch)
    run(pr.MeanField(), steps=25, checkpoint=pr.Checkpoint(tmp_path / "fit.checkpoint", every=10))
    assert sorted(set(found)) == [10, 20, 25]


def test_a_checkpoint_every_zero_seconds_is_written_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps_written(monkeypatch)
    run(pr.MeanField(), steps=5, checkpoint=pr.Checkpoint(tmp_path / "fit.checkpoint", seconds=0))
    assert sorted(set(found)) == [1, 2, 3, 4, 5]


def test_a_short_fit_with_a_path_writes_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps_written(monkeypatch)
    run(pr.MeanField(), steps=5, checkpoint=str(tmp_path / "fit.checkpoint"))
    assert found == [5]
    assert os.listdir(tmp_path) == ["fit.checkpoint"]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: pr.Checkpoint(3), "The 'path' argument of Checkpoint must be a path"),
        (lambda: pr.Checkpoint("x", seconds=-1), "The 'seconds' argument of Checkpoint must be zero or more"),
        (lambda: pr.Checkpoint("x", every=0), "The 'every' argument of Checkpoint must be an integer >= 1"),
    ],
)
def test_invalid_checkpoint_arguments_are_refused(build: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(pr.InputError, match=sentence):
        build()


def test_a_missing_folder_is_refused_before_the_first_step(tmp_path: Path) -> None:
    calls = []
    with pytest.raises(pr.InputError, match="folder that exists"):
        run(
            pr.MeanField(),
            checkpoint=tmp_path / "nowhere" / "fit.checkpoint",
            callbacks=[lambda progress: calls.append(progress.step)],
        )
    assert calls == []


# Checkpoints of other fits.


@pytest.fixture
def checkpoint_path(tmp_path: Path) -> Path:
    path = tmp_path / "fit.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        run(pr.MeanField(), checkpoint=path, callbacks=[Interrupt(12)])
    return path


OTHER_FITS: dict[str, tuple[Callable[..., Posterior], str]] = {
    "seed": (lambda **o: run(pr.MeanField(), seed=1, **o), "its seed is 0, this one's is 1"),
    "method": (lambda **o: run(pr.MAP(), **o), r"its method is MeanField\(\), this one's is MAP\(\)"),
    "options": (
        lambda **o: run(pr.MeanField(samples=3), **o),
        r"its method is MeanField\(\), this one's is MeanField\(samples=3\)",
    ),
    "steps": (lambda **o: run(pr.MeanField(), steps=40, **o), "its steps is 30, this one's is 40"),
    "batch size": (lambda **o: run(pr.MeanField(), batch_size=4, **o), "its batch size is 8, this one's is 4"),
    "rows": (lambda **o: run(pr.MeanField(), (X[:20], Y[:20]), **o), "its rows is 22, this one's is 20"),
    "data": (lambda **o: run(pr.MeanField(), (X, Y + 1), **o), "data"),
    "data in another order": (lambda **o: run(pr.MeanField(), (X, Y.flip(0)), **o), "data"),
    "inputs in another order": (lambda **o: run(pr.MeanField(), (X.flip(1), Y), **o), "data"),
    "temperature": (lambda **o: run(pr.MeanField(), temperature=0.5, **o), "temperature"),
    "network": (lambda **o: run(pr.MeanField(), net=lambda: plain(5), **o), "model"),
    "likelihood": (lambda **o: run(pr.MeanField(), likelihood=lambda: pr.StudentT(3.0), **o), "model"),
    "prior": (lambda **o: run(pr.MeanField(), prior=0.1, **o), "prior"),
    "type": (lambda **o: run(pr.MeanField(), net=lambda: plain().float(), **o), "float64"),
}


@pytest.mark.parametrize("name", OTHER_FITS)
def test_a_checkpoint_of_another_fit_is_refused_with_the_difference(name: str, checkpoint_path: Path) -> None:
    fit, difference = OTHER_FITS[name]
    before = checkpoint_path.read_bytes()
    with pytest.raises(pr.StoreError, match=f"is of another fit: .*{difference}"):
        fit(checkpoint=checkpoint_path)
    assert checkpoint_path.read_bytes() == before


def test_a_corrupt_checkpoint_is_refused(checkpoint_path: Path) -> None:
    data = bytearray(checkpoint_path.read_bytes())
    data[-9] ^= 1
    checkpoint_path.write_bytes(data)
    with pytest.raises(pr.StoreError, match="corrupt"):
        run(pr.MeanField(), checkpoint=checkpoint_path)


# Seeds and random generators.


@pytest.mark.parametrize("data", [(X, Y), Rows(), None], ids=["tensors", "dataset", "loader"])
@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField()], ids=str)
def test_different_seeds_give_different_fits(method: Any, data: Any) -> None:
    one, other = (run(method, loader() if data is None else data, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.mean["0.weight"], other.mean["0.weight"])
    assert not torch.equal(one.history["loss"], other.history["loss"])


@pytest.mark.parametrize("net", [plain, normed])
@pytest.mark.parametrize("data", [(X, Y), Rows(), None], ids=["tensors", "dataset", "loader"])
@pytest.mark.parametrize("method", [pr.MAP(), pr.MeanField(samples=3), pr.MeanField(start=ShortMAP())], ids=str)
def test_a_fit_and_a_prediction_leave_all_global_generators_unchanged(method: Any, data: Any, net: Any) -> None:
    model, rows = pr.Model(net(), pr.Gaussian()), loader() if data is None else data
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    posterior = pr.fit(model, rows, method, steps=9, progress=False)
    posterior.sample(2)
    assert posterior.predict(X, samples=3).samples.shape[1] == len(X)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


def test_a_fit_does_not_depend_on_the_global_seed() -> None:
    model = pr.Model(plain(), pr.Gaussian())
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(pr.fit(model, loader(), pr.MeanField(), steps=9, progress=False))
    assert_same_fit(*found)


def test_the_generator_of_a_loader_is_left_unchanged() -> None:
    rows = loader_with_its_own_generator()
    before = rows.generator.get_state()
    run(pr.MeanField(), rows, steps=5)
    assert torch.equal(before, rows.generator.get_state())


def test_a_fit_leaves_the_network_unchanged() -> None:
    net = normed()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    pr.fit(pr.Model(net, pr.Gaussian()), (X, Y), pr.MAP(), steps=5, batch_size=8, progress=False)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert modes == [m.training for m in net.modules()]
    assert all(p.grad is None for p in net.parameters())
