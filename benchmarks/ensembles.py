"""Cost of ensembles and similar posteriors: eight members trained together, a step of each method, and a prediction.

    python benchmarks/ensembles.py [--steps 300]

Steps are relative to one step of one member of the same method: interleaved, medians, one thread, CPU time. Floor:
eight members one after the other, which is eight steps; bound: 2.5 for members that are trained together, anchored ones
among them. Fits are whole calls of `fit` with as many steps on 1,000 rows, over one by `MAP`, under the same bound.
Steps of single methods are over one of `MAP`. Predictions are over as many forward passes of the plain network as there
are draws.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import priory as pr
from priory.core.data import Data
from priory.core.streams import stream
from priory.fitting.prepare import make_target
from priory.likelihoods import Likelihood

MEMBERS, DRAWS, BOUND = 8, 64, 2.5
NUM_INPUTS = 1000  # inputs of a prediction, or rows of a whole fit
OPTIONS = {"together": False, "anchored": True, "prior functions": "function"}  # of Ensemble's `anchored`

Problem = tuple[nn.Module, Likelihood, Tensor, Tensor]
Work = Callable[[], object]


def problems() -> dict[str, Problem]:
    torch.manual_seed(0)
    tiny = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 2))
    uci = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 1))
    return {
        "tiny 13-50-2, batch 32": (tiny, pr.Categorical(), torch.randn(32, 13), torch.randint(2, (32,))),
        "UCI 8-50-1, batch 128": (uci, pr.Gaussian(0.1), torch.randn(128, 8), torch.randn(128)),
    }


def step_of(problem: Problem, method: Any) -> Work:
    """One step of a method from where it begins."""
    net, likelihood, x, y = problem
    model = pr.Model(net, likelihood, prior="glorot")
    data = Data.of((x, y), batch_size=len(y)).prepared(model.prepare)
    target = make_target(model, data, drops=method.traits.draws_masks)
    plan = method.plan(target, data, 10_000, 0)
    generator = stream(0, "noise")
    state = method.init(target, plan, generator, torch.Size())
    batch = next(plan.rows(0).batches(0, 0))
    return lambda: method.step(target, state, batch, generator)


def after_the_other(problem: Problem, method: Any) -> Work:
    """A step of each of eight fits."""
    each = [step_of(problem, method) for _ in range(MEMBERS)]
    return lambda: [step() for step in each]


def interleaved(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """The median seconds of each, taken in turns, the first fifth left out."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            began = time.process_time()
            work()
            taken[name].append(time.process_time() - began)
    return {name: statistics.median(times[repeats // 5 :]) for name, times in taken.items()}


def steps(problem: Problem, repeats: int) -> None:
    singles = {"MAP": pr.MAP(), "MeanField": pr.MeanField(), "Dropout": pr.Dropout(rate=0.1)}
    works: dict[str, Work] = {}
    for name, method in singles.items():
        works[name] = step_of(problem, method)
        works[f"{MEMBERS} x {name}, together"] = step_of(problem, pr.Ensemble(method, MEMBERS))
    works[f"{MEMBERS} x MAP, one after the other"] = after_the_other(problem, pr.MAP())
    for name in ("anchored", "prior functions"):
        works[f"{MEMBERS} x MAP, {name}"] = step_of(problem, pr.Ensemble(pr.MAP(), MEMBERS, anchored=OPTIONS[name]))
    works["SWAG, a snapshot a step"] = step_of(problem, pr.SWAG(every=1))
    medians = interleaved(works, repeats)
    for row, seconds in medians.items():
        together = row.endswith(tuple(OPTIONS))
        one = row.split(" x ")[1].split(",")[0] if " x " in row else "MAP"
        told = f"   bound {BOUND}" if together else ""
        print(f"  {row:<32} {seconds * 1e6:>8.0f} us {seconds / medians[one]:>7.2f} of {one}{told}", flush=True)


def fits(problem: Problem, length: int, repeats: int) -> None:
    net, likelihood, x, y = problem
    model = pr.Model(net, likelihood, prior="glorot")
    rows = torch.arange(NUM_INPUTS) % len(y)
    options: dict[str, Any] = {"steps": length, "batch_size": len(y), "progress": False}
    methods: dict[str, Any] = {"MAP": pr.MAP()}
    for name, anchored in OPTIONS.items():
        methods[f"{MEMBERS} x MAP, {name}"] = pr.Ensemble(pr.MAP(), MEMBERS, anchored=anchored)
    works: dict[str, Work] = {
        name: lambda method=method: pr.fit(model, (x[rows], y[rows]), method, **options)
        for name, method in methods.items()
    }
    medians = interleaved(works, repeats)
    for row, seconds in medians.items():
        told = f"   bound {BOUND}" if row != "MAP" else ""
        print(f"  fit, {row:<27} {seconds * 1e3:>8.0f} ms {seconds / medians['MAP']:>7.2f} of MAP{told}", flush=True)


def predictions(problem: Problem, repeats: int) -> None:
    net, likelihood, x, y = problem
    model = pr.Model(net, likelihood, prior="glorot")
    mode = pr.fit(model, (x, y), pr.MAP(), steps=50, progress=False)
    new = torch.randn(NUM_INPUTS, x.shape[1])
    methods: dict[str, tuple[Any, int]] = {
        f"{MEMBERS} members": (pr.Ensemble(pr.MAP(), MEMBERS), MEMBERS),
        f"{MEMBERS} prior functions": (pr.Ensemble(pr.MAP(), MEMBERS, anchored="function"), 2 * MEMBERS),
        f"Dropout, {DRAWS} draws": (pr.Dropout(rate=0.1), DRAWS),
        f"SWAG, {DRAWS} draws": (pr.SWAG(start=mode, snapshots=20), DRAWS),
        "LastLayer": (pr.LastLayer(at=mode), 1),
    }
    for name, (method, draws) in methods.items():
        chosen = None if name.startswith(("SWAG", "Last")) else 5
        posterior = pr.fit(model, (x, y), method, steps=chosen, progress=False)

        def plain(draws: int = draws) -> None:
            with torch.no_grad():
                for _ in range(draws):
                    net(new)

        def ours(posterior: Any = posterior) -> None:
            prediction = posterior.predict(new, samples=DRAWS)
            _ = prediction.mean, prediction.epistemic

        medians = interleaved({"plain": plain, "ours": ours}, repeats)
        ratio, passes = medians["ours"] / medians["plain"], f"{draws} forward passes" if draws > 1 else "a forward pass"
        print(f"  predict, {name:<23} {medians['ours'] * 1e6:>8.0f} us {ratio:>7.2f} of {passes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help="repeats of each step; predictions take a tenth, and fits a thirtieth, of as many steps each",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; medians of interleaved repeats")
    for name, problem in problems().items():
        print(f"{name}, {sum(p.numel() for p in problem[0].parameters()):,} parameters")
        steps(problem, options.steps)
        fits(problem, options.steps, max(5, options.steps // 30))
        predictions(problem, max(20, options.steps // 10))


if __name__ == "__main__":
    main()
