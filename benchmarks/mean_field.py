"""Time of a mean-field step relative to a plain Adam step: same network, same batch, one thread, interleaved, medians.

    python benchmarks/mean_field.py [--steps 200]

Floor: `torch.optim.Adam` on the plain network. Peers, where they are installed: IVON (ivon-opt), bayesian-torch, Pyro.
A step of ours costs one pass of the network and O(P): a normal draw, an exponential, Adam on 2P numbers. Estimators by
scores take two draws, and no backward pass. Noise at the layers has its own floor: Adam on a network with a second
product per layer, f(x; M) + f(x^2; S), and as many parameters as there are means and scales. The last row is the whole
driver: `pr.fit`, with its batches, history and checks, over its number of steps.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.methods.base import Plan

BOUNDS = {"tiny 13-50-2": (1.0, 1.25), "MLP 784-400-400-10": (1.8, 1.9), "LeNet": (1.05, 1.08)}
OF_LAYERS = 1.3  # bound for noise at the layers, relative to a second product per layer
NUM_DATA = 10_000  # number of rows of the whole data set


def problems() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    torch.manual_seed(0)
    lenet = nn.Sequential(
        *[nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
        *[nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)],
    )
    mlp = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    tiny = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 2))
    return {
        "tiny 13-50-2": (tiny, torch.randn(32, 13), torch.randint(2, (32,))),
        "MLP 784-400-400-10": (mlp, torch.randn(128, 784), torch.randint(10, (128,))),
        "LeNet": (lenet, torch.randn(128, 1, 28, 28), torch.randint(10, (128,))),
    }


def plain(net: nn.Module, x: Tensor, y: Tensor, **options: bool) -> Callable[[], object]:
    net = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, **options)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


class Twice(nn.Module):
    """A layer with a second product of the same shapes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.second = layer, copy.deepcopy(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x * x)


def second_product(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    layers = [Twice(m) if isinstance(m, (nn.Linear, nn.Conv2d)) else m for m in copy.deepcopy(net).children()]
    return plain(nn.Sequential(*layers), x, y)


def ours(net: nn.Module, x: Tensor, y: Tensor, method: Any) -> Callable[[], object]:
    model = pr.Model(net, pr.Categorical(), prior="glorot")
    data = Data.of((x, y), batch_size=len(y)).prepared(model.prepare)
    target = make_target(model, data, 1.0, "likelihood")
    generator = stream(0, "noise")
    state = method.init(target, Plan(data, 10_000), generator)
    return lambda: method.step(target, state, (x, y), generator)


def ivon(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    import ivon as peer

    net = copy.deepcopy(net)
    optimizer = peer.IVON(net.parameters(), lr=1e-3, ess=NUM_DATA)

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def bayesian_torch(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = copy.deepcopy(net)
    options = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    dnn_to_bnn(net, {**options, "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (cross_entropy(net(x), y) + get_kl_loss(net) / NUM_DATA).backward()
        optimizer.step()

    return step


def pyro(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    import pyro as peer
    from pyro import distributions as dist
    from pyro.infer import SVI, TraceMeanField_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroSample
    from pyro.nn.module import to_pyro_module_

    net = copy.deepcopy(net)
    to_pyro_module_(net)
    for module in net.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, PyroSample(dist.Normal(0.0, 1.0).expand(p.shape).to_event(p.dim())))

    def model(x: Tensor, y: Tensor) -> None:
        logits = net(x)
        with peer.plate("data", len(y)), peer.poutine.scale(scale=NUM_DATA / len(y)):
            peer.sample("y", dist.Categorical(logits=logits), obs=y)

    peer.clear_param_store()
    inference = SVI(model, AutoNormal(model), peer.optim.Adam({"lr": 1e-3}), TraceMeanField_ELBO())
    return lambda: inference.step(x, y)


OURS = {
    "priory MeanField": pr.MeanField(learning_rate=1e-3),
    "  sticking": pr.MeanField(learning_rate=1e-3, estimator="sticking"),
    "  antithetic": pr.MeanField(learning_rate=1e-3, antithetic=True),
    "  score": pr.MeanField(learning_rate=1e-3, estimator="score", samples=2),
    "  score_baseline": pr.MeanField(learning_rate=1e-3, estimator="score_baseline", samples=2),
    "  leave_one_out": pr.MeanField(learning_rate=1e-3, estimator="leave_one_out", samples=2),
    "  vargrad": pr.MeanField(learning_rate=1e-3, estimator="vargrad", samples=2),
    "priory NaturalGradient": pr.NaturalGradient(),
    "  local": pr.MeanField(learning_rate=1e-3, estimator="local"),
    "  flipout": pr.MeanField(learning_rate=1e-3, estimator="flipout"),
}
PEERS = {"IVON": ivon, "bayesian-torch": bayesian_torch, "Pyro": pyro}


def interleaved(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median seconds of each, taken in turns, the first fifth left out."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[repeats // 5 :]) for name, times in taken.items()}


def whole_fit(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> float:
    """Seconds per step of `pr.fit`, including its set-up."""
    model = pr.Model(net, pr.Categorical(), prior="glorot")
    began = time.perf_counter()
    pr.fit(model, (x, y), pr.MeanField(learning_rate=1e-3), steps=steps, batch_size=len(y), progress=False)
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps a network; the tiny one takes ten times as many")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; times over a plain Adam step, medians of interleaved steps")
    for name, (net, x, y) in problems().items():
        repeats = options.steps * (10 if "tiny" in name else 1)
        steps: dict[str, Callable[[], object]] = {
            "plain Adam": plain(net, x, y),
            "plain Adam, fused": plain(net, x, y, fused=True),
            "second product per layer": second_product(net, x, y),
            **{row: ours(net, x, y, method) for row, method in OURS.items()},
        }
        for peer, make in PEERS.items():
            try:
                steps[peer] = make(net, x, y)
            except ImportError:
                print(f"  ({peer} is not installed: no row)")
        medians = interleaved(steps, repeats)
        medians["priory fit, whole"] = whole_fit(net, x, y, repeats)
        print(f"{name}, {sum(p.numel() for p in net.parameters()):,} parameters, batch {len(y)}")
        for row, seconds in medians.items():
            layers = row.strip() in ("local", "flipout")
            over = seconds / medians["second product per layer"]
            told = f"   {over:.2f} of a second product per layer, bound {OF_LAYERS:.2f}" if layers else bound(name, row)
            print(f"  {row:<24} {seconds * 1e6:>10.0f} us {seconds / medians['plain Adam']:>7.2f}{told}", flush=True)


def bound(name: str, row: str) -> str:
    first, others = BOUNDS[name]
    if row == "priory MeanField":
        return f"   bound {first:.2f}"
    return f"   bound {others:.2f}" if row.strip() in ("sticking", "antithetic", "priory NaturalGradient") else ""


if __name__ == "__main__":
    main()
