"""Cost of predicting with 64 draws: time relative to 64 forward passes of the plain network, and peak memory.

    python benchmarks/predict.py

Floor: the plain network's forward pass, once per draw, on the same inputs. Our cost grows as draws x (one pass + O(P)
to draw), and memory as the outputs that are kept (draws x inputs x outputs) plus the activations of one chunk, which
stay under `priory.network.skeleton.MEMORY_LIMIT`.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import priory as pr
from priory.network.skeleton import MEMORY_LIMIT

DRAWS = 64


def medians(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The median seconds of two pieces of work, taken in turns, after one of each to warm up."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for work, times in zip((first, second), taken, strict=True):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
    return statistics.median(taken[0][1:]), statistics.median(taken[1][1:])


def row(name: str, net: nn.Module, likelihood: object, x: Tensor, y: Tensor, repeats: int) -> None:
    model = pr.Model(net, likelihood, prior="glorot")  # pyright: ignore
    posterior = pr.fit(model, (x[:64], y[:64]), pr.MeanField(), steps=2, progress=False)
    net.eval()

    def floor() -> None:
        with torch.no_grad():
            for _ in range(DRAWS):
                net(x)

    def predict() -> None:
        _ = posterior.predict(x, samples=DRAWS).mean

    ours, plain = medians(predict, floor, repeats)
    print(f"{name:<22} {len(x):>7,} {plain * 1e3:>12.1f} {ours * 1e3:>12.1f} {ours / plain:>8.2f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tiny = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1))
    mlp = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    lenet = nn.Sequential(
        *[nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
        *[nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)],
    )
    print(f"{'network':<22} {'inputs':>7} {'floor ms':>12} {'predict ms':>12} {'ratio':>8}   (bound 1.00)")
    for rows in (100, 1_000, 3_000, 10_000):
        x = torch.randn(rows, 13)
        row("tiny 13-50-1", tiny, pr.Gaussian(), x, x[:, 0], 101)
    for rows in (1_000, 10_000):
        x = torch.randn(rows, 784)
        row("MLP 784-400-400-10", mlp, pr.Categorical(), x, torch.randint(10, (rows,)), 7 if rows < 5_000 else 3)
    x = torch.randn(1_000, 1, 28, 28)
    row("LeNet", lenet, pr.Categorical(), x, torch.randint(10, (1_000,)), 7)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process {peak:,.0f} MiB; limit for activations {MEMORY_LIMIT >> 20} MiB")


if __name__ == "__main__":
    main()
