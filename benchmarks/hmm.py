"""Time of an EM iteration for hidden Markov models relative to hmmlearn's: same data, one thread, interleaved, medians.

    python benchmarks/hmm.py [--repeats 5]

An iteration is an M-step and an E-step over all sequences, float64, 8 states, 4 columns. Ours is a step of the method
over `Data`, with its bound and checks; hmmlearn's is an iteration of `fit`, in log space as it comes, and with its
faster `implementation="scaling"`, which fails where a density underflows.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch

from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.latent.hidden_markov import HiddenMarkov
from priory.methods.base import Plan
from priory.methods.em.em import EM

BOUNDS = {(1000, 100): 0.5, (1, 100_000): 1.0}  # fraction of hmmlearn's time, by sequences and steps
NAMES = {"diagonal": "diag", "full": "full"}
STATES, COLUMNS = 8, 4


def walks(n: int, steps: int) -> torch.Tensor:
    """Sequences (n, steps, columns) whose state stays a while, as EM finds them in practice."""
    generator = torch.Generator().manual_seed(0)
    moved = torch.rand(n, steps, generator=generator) < 0.1
    state = (moved.cumsum(1) * 5 + torch.arange(n)[:, None]) % STATES
    centres = 2 * torch.randn(STATES, COLUMNS, generator=generator, dtype=torch.float64)
    return centres[state] + torch.randn(n, steps, COLUMNS, generator=generator, dtype=torch.float64)


def ours(y: torch.Tensor, covariance: str) -> Callable[[], float]:
    model, rows = HiddenMarkov(STATES, covariance=covariance).meet(y)
    target, generator, method = make_target(model, rows), stream(0, "benchmark"), EM(tolerance=0.0, start="random")
    state = [method.init(target, Plan(rows, 1), generator)]

    def step() -> float:
        start = time.process_time()
        state[0], _ = method.step(target, state[0], rows, generator)
        return time.process_time() - start

    return step


def theirs(y: torch.Tensor, covariance: str, implementation: str) -> Callable[[], float]:
    """An iteration of hmmlearn, from a fit of three less a fit of one: a fit checks the data first."""
    from hmmlearn.hmm import GaussianHMM

    array, lengths = y.flatten(0, 1).numpy(), [y.shape[1]] * len(y)
    options = {"tol": -float("inf"), "implementation": implementation, "random_state": 0}
    peer = GaussianHMM(STATES, covariance_type=NAMES[covariance], n_iter=1, **options)
    peer.fit(array, lengths)
    peer.init_params = ""

    def fit(iterations: int) -> float:
        peer.n_iter = peer.monitor_.n_iter = iterations
        start = time.process_time()
        peer.fit(array, lengths)
        return time.process_time() - start

    return lambda: (-fit(1) + fit(3)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    try:
        import hmmlearn.hmm  # noqa: F401
    except ImportError:
        print("Nothing is compared, as hmmlearn is not installed: pip install hmmlearn")
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for (n, steps), bound in BOUNDS.items():
        y = walks(n, steps)
        for covariance in NAMES:
            runs = {
                "ours": ours(y, covariance),
                "hmmlearn": theirs(y, covariance, "log"),
                "its scaling": theirs(y, covariance, "scaling"),
            }
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(options.repeats):
                for name, run in runs.items():
                    seconds[name].append(run())
            median = {name: statistics.median(values) for name, values in seconds.items()}
            told = ", ".join(f"{name} {value:.3f} s" for name, value in median.items())
            ratio, scaled = median["ours"] / median["hmmlearn"], median["ours"] / median["its scaling"]
            print(
                f"{n:,} x {steps:,} steps, {covariance}: {told}, ratio {ratio:.2f} (at most {bound}), "
                f"to its scaling {scaled:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
