"""Time of an EM iteration relative to scikit-learn's: same data, same start, one thread, interleaved, medians.

    python benchmarks/em.py [--rows 200000] [--repeats 5] [--stream 10000000]

An iteration is an M-step and an E-step over all rows, float64. Ours is a step of the method over `Data`, with its
blocks, bound and checks; scikit-learn's is `_e_step` and `_m_step` of its GaussianMixture.

Memory is the peak growth of a separate process, without the pages of files: in an iteration, and where rows come from a
memory-mapped file, float32. It is about the same for a file of a tenth of the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.mixture import GaussianMixture as Peer
from threadpoolctl import threadpool_limits

from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.latent import GaussianMixture
from priory.methods.base import Plan
from priory.methods.em.em import EM

BOUND = 0.35  # fraction of scikit-learn's time, full covariances
NAMES = {"full": "full", "tied": "tied", "diagonal": "diag", "spherical": "spherical"}


def clouds(rows: int, columns: int, components: int) -> torch.Tensor:
    """Rows from overlapping Gaussians, as EM finds them in practice."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(components, columns, generator=generator, dtype=torch.float64)
    which = torch.randint(components, (rows,), generator=generator)
    return centres[which] + torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def ours(x: torch.Tensor, components: int, covariance: str) -> Callable[[], object]:
    model, rows = GaussianMixture(components, covariance).meet(x)
    target, generator, method = make_target(model, rows), stream(0, "benchmark"), EM(tolerance=0.0, start="random")
    state = [method.init(target, Plan(rows, 1), generator)]

    def step() -> None:
        state[0], _ = method.step(target, state[0], rows, generator)

    return step


def theirs(x: torch.Tensor, components: int, covariance: str) -> Callable[[], object]:
    array = x.numpy()
    peer = Peer(components, covariance_type=NAMES[covariance], init_params="random_from_data", max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.fit(array)

    def step() -> None:
        _, log_responsibilities = peer._e_step(array)
        peer._m_step(array, log_responsibilities)

    return step


def interleaved(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median of each one's seconds, taken in turns, so that a busy machine is busy for all."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def anonymous() -> float:
    """Megabytes of this process that are not pages of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def grown(run: Callable[[], object]) -> float:
    """By how many megabytes the process grows at most while something runs."""
    before, most, ended = anonymous(), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    ended.set()
    watcher.join()
    return max(0.0, most[0] - before)


def apart(function: Callable[..., object], *arguments: object) -> dict[str, float]:
    """What a function of this file prints as JSON, run in a process of its own: no memory is left over from before."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import em; em.{function.__name__}{arguments!r}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def memory_of(name: str, rows: int, columns: int, components: int) -> None:
    """By how much a start and an iteration grow the process, beside the rows themselves."""
    torch.set_num_threads(1)
    x = clouds(rows, columns, components)
    maker = {"ours": ours, "scikit-learn": theirs}[name]
    print(json.dumps({"grown": grown(lambda: maker(x, components, "full")())}))


def streamed(rows: int, columns: int, components: int) -> None:
    """EM over rows in a file, mapped into memory."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.f32"
        generator = np.random.default_rng(0)
        with open(path, "wb") as file:
            for start in range(0, rows, 1 << 12):
                n = min(1 << 12, rows - start)
                made = generator.normal(size=(n, columns)) + 3 * generator.integers(0, 3, (n, 1))
                file.write(made.astype("f4").tobytes())
        seconds = []

        def run() -> None:
            x = torch.from_numpy(np.memmap(path, dtype="f4", mode="r+", shape=(rows, columns)))
            step = ours(x, components, "full")
            for _ in range(2):
                start = time.process_time()
                step()
                seconds.append(time.process_time() - start)

        most = grown(run)
        size = path.stat().st_size / 2**20
    print(json.dumps({"seconds": min(seconds), "grown": most, "file": size}))


def memory(rows: int, stream_rows: int) -> None:
    """Two tables: an iteration beside N x K numbers, and a file beside a tenth of it."""
    allowed = (rows * 16 + 2 * 4096 * 153) * 8 / 2**20  # 153 features of a row of 16 columns
    peak = {name: apart(memory_of, name, rows, 16, 16)["grown"] for name in ("ours", "scikit-learn")}
    print(
        f"memory: N={rows:,} D=16 K=16 full: a start and an iteration take {peak['ours']:.0f} MB "
        f"(at most N x K and two blocks: {allowed:.0f} MB), scikit-learn's {peak['scikit-learn']:.0f} MB"
    )
    for n in (stream_rows // 10, stream_rows) if stream_rows else ():
        found = apart(streamed, n, 8, 8)
        print(
            f"streamed: N={n:,} D=8 K=8 full, float32: {found['seconds']:.1f} s an iteration, {found['grown']:.0f} MB "
            f"beside a file of {found['file']:,.0f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stream", type=int, default=10_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = clouds(options.rows, 16, 16)
    with threadpool_limits(1):
        for covariance in NAMES:
            steps = {"ours": ours(x, 16, covariance), "scikit-learn": theirs(x, 16, covariance)}
            seconds = interleaved(steps, options.repeats)
            ratio = seconds["ours"] / seconds["scikit-learn"]
            bound = f" (at most {BOUND})" if covariance == "full" else ""
            print(
                f"{covariance}: N={options.rows:,} D=16 K=16: ours {seconds['ours']:.3f} s, "
                f"scikit-learn {seconds['scikit-learn']:.3f} s, ratio {ratio:.2f}{bound}"
            )
    memory(options.rows, options.stream)


if __name__ == "__main__":
    main()
