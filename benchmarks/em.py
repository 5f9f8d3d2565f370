"""What an iteration of EM costs beside scikit-learn's: same data, same start, one thread, interleaved, medians.

    python benchmarks/em.py [--rows 200000] [--repeats 5] [--stream 10000000]

An iteration is an M-step and an E-step over all rows, float64. Ours is a step of the method over `Data`, with its
blocks, bound and checks; scikit-learn's is `_e_step` and `_m_step` of its GaussianMixture. The last row streams rows
from a file that is mapped into memory, float32, in blocks, and says by how much the process grew at most, beyond the
file's own pages.
"""

from __future__ import annotations

import argparse
import statistics
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

from priory.latent import GaussianMixture
from priory.loop import make_target
from priory.methods.base import Plan
from priory.methods.em import EM
from priory.streams import stream

BOUND = 0.35  # of scikit-learn's time, full covariances
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


def streamed(rows: int, columns: int = 8, components: int = 8) -> None:
    """EM over rows in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.f32"
        generator = np.random.default_rng(0)
        with open(path, "wb") as file:
            for start in range(0, rows, 1 << 18):
                n = min(1 << 18, rows - start)
                file.write(
                    (generator.normal(size=(n, columns)) + 3 * generator.integers(0, 3, (n, 1))).astype("f4").tobytes()
                )
        x = np.memmap(path, dtype="f4", mode="r+", shape=(rows, columns))
        before, most, ended = anonymous(), [0.0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                most[0] = max(most[0], anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        step = ours(torch.from_numpy(x), components, "full")
        seconds = []
        for _ in range(2):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
        ended.set()
        watcher.join()
        grown = most[0] - before
        print(
            f"streamed: N={rows:,} D={columns} K={components} full, float32: {min(seconds):.1f} s an iteration, "
            f"{grown:.0f} MB beside a file of {x.nbytes / 2**20:,.0f} MB"
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
        if options.stream:
            streamed(options.stream)


if __name__ == "__main__":
    main()
