"""Cost of Laplace: a fit relative to plain training epochs, a prediction relative to forward passes.

    python benchmarks/laplace.py [--repeats 7]

One thread, interleaved, medians. Floor of a fit: one epoch of the plain network, forward, backward and
`torch.optim.Adam` in batches of 128, over the same 5,000 rows. A Kronecker fit reads the rows once: a forward pass, a
backward pass to activations for each sampled label (or for each class, where it is exact), products of activations, and
the decomposition of every factor. Floor of a prediction: one forward pass on the same inputs. In the basis of the
factors the covariance of 10 outputs costs 10 backward passes to activations and three products per layer. Timed once
each: the dense matrix of the last layer, whose 4,010 coordinates cost N C p^2, and laplace-torch where it is installed,
with 100 inputs, because it holds the Jacobian of all of them.
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.curvature import STRUCTURES, Pass, PrecisionGaussian, select
from priory.curvature.base import Kind
from priory.curvature.layer_jacobians import jacobian_rows
from priory.fitting.prepare import make_target

ROWS, BATCH, CLASSES = 5_000, 128, 10
BOUNDS = {"kron, sampled Fisher": 1.8, "kron, exact GGN": 5.0}
OF_PREDICTION, MEMORY = 30, 2048  # forward passes; MiB
FITS: dict[str, tuple[str, str, Kind]] = {
    "kron, sampled Fisher": ("kron", "all", "fisher"),
    "kron, exact GGN": ("kron", "all", "ggn"),
    "diag, sampled Fisher": ("diag", "all", "fisher"),
    "diag, exact GGN": ("diag", "all", "ggn"),
    "last layer, kron": ("kron", "last", "ggn"),
}
FULL = ("full", "last", "ggn")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, CLASSES))


def plain_epoch(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    net = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def epoch() -> None:
        for some in torch.arange(len(x)).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(net(x[some]), y[some]).backward()
            optimizer.step()

    return epoch


class Ours:
    """A model at its starting weights, ready for every structure."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model = pr.Model(net, pr.Categorical(), prior="glorot")
        self.data = Data.of((x, y)).prepared(self.model.prepare)
        self.target = make_target(self.model, self.data)
        self.w = self.model.start(y, torch.Size(), stream(0, "start"))

    def fit(self, structure: str, over: str, kind: Kind) -> PrecisionGaussian:
        selection = select(self.model, over)
        over_rows = Pass(self.target, self.w, self.data, selection, kind, generator=stream(0, "labels"))
        curvature = STRUCTURES[structure].of(over_rows)
        return curvature.gaussian(self.model.prior.precision[selection.places])

    def covariance(self, gaussian: PrecisionGaussian, over: str, x: Tensor) -> Tensor:
        some = jacobian_rows(self.target, self.w, (x,), select(self.model, over))
        return torch.cat([gaussian.output_covariance(part) for part in some])


def once(work: Callable[[], object]) -> float:
    """Its seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleaved(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median seconds of each, taken in turns, after one of each to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            taken[name].append(once(work))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def peer_rows(net: nn.Module, x: Tensor, y: Tensor, inputs: Tensor) -> dict[str, float]:
    """Seconds of laplace-torch: its exact Kronecker fit, and its linearised prediction."""
    folder = sys.path.pop(0)  # where this file, which has the peer's name, would be found in its place
    try:
        from laplace import Laplace
    finally:
        sys.path.insert(0, folder)
    peer = Laplace(copy.deepcopy(net), "classification", subset_of_weights="all", hessian_structure="kron")
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    return {
        "fit": once(lambda: peer.fit(loader)),
        "predict": once(lambda: peer(inputs, pred_type="glm", link_approx="probit")),
    }


def peak() -> float:
    """The most memory that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, x, y = network(), torch.randn(ROWS, 784), torch.randint(CLASSES, (ROWS,))
    ours = Ours(net, x, y)
    print(f"torch {torch.__version__}, one thread; MLP 784-400-400-10, {ROWS:,} rows; decompositions included")
    works: dict[str, Callable[[], object]] = {"plain epoch": plain_epoch(net, x, y)}
    works |= {name: lambda of=of: ours.fit(*of) for name, of in FITS.items()}
    medians = interleaved(works, options.repeats)
    for name, seconds in medians.items():
        bound = f"   bound {BOUNDS[name]:.1f}" if name in BOUNDS else ""
        print(f"  {name:<24} {seconds * 1e3:>10.1f} ms {seconds / medians['plain epoch']:>8.2f}{bound}", flush=True)

    seconds = once(lambda: ours.fit(*FULL))
    print(f"  {'last layer, full, once':<24} {seconds * 1e3:>10.1f} ms {seconds / medians['plain epoch']:>8.2f}")

    print("covariance of the linearised outputs, over forward passes")
    gaussians = {
        name: ours.fit(*FITS[name]) for name in ("kron, sampled Fisher", "diag, exact GGN", "last layer, kron")
    }
    forward: dict[int, float] = {}
    for n in (100, 1_000, 10_000):
        inputs = torch.randn(n, 784)

        def forward_pass(inputs: Tensor = inputs) -> None:
            with torch.no_grad():
                net(inputs)

        works = {"forward pass": forward_pass}
        works |= {
            name: lambda g=gaussian, over=FITS[name][1], at=inputs: ours.covariance(g, over, at)
            for name, gaussian in gaussians.items()
        }
        medians = interleaved(works, options.repeats if n < 10_000 else max(1, options.repeats // 3))
        forward[n] = medians["forward pass"]
        for name, seconds in medians.items():
            bound = f"   bound {OF_PREDICTION}" if name.startswith("kron") else ""
            told = f"{n:>7,} inputs  {name:<24} {seconds * 1e3:>10.1f} ms {seconds / forward[n]:>8.1f}{bound}"
            print(f"  {told}", flush=True)
        print(f"  {n:>7,} inputs  peak memory of the process so far {peak():,.0f} MiB   bound {MEMORY:,}", flush=True)

    try:
        peer = peer_rows(net, x, y, torch.randn(100, 784))
    except ImportError:
        print("  (laplace-torch is not installed: no row)")
    else:
        (epoch,) = interleaved({"plain epoch": plain_epoch(net, x, y)}, 3).values()
        print(f"  laplace-torch, exact kron {peer['fit'] * 1e3:,.0f} ms {peer['fit'] / epoch:.2f} epochs")
        print(
            f"  laplace-torch, 100 inputs {peer['predict'] * 1e3:,.0f} ms {peer['predict'] / forward[100]:,.0f} passes"
        )


if __name__ == "__main__":
    main()
