"""Peak memory of NUTS and HMC at their defaults on many coordinates, and whether it grows with the trajectories.

    python benchmarks/mcmc_memory.py [--coordinates 10000]

Each run is a fresh process: a Gaussian whose standard deviations go from 0.1 to 10, with the default number of chains,
and metric (low-rank beyond 256 coordinates), a warm-up of 40 and 50 draws per chain. NUTS runs with trajectories of at
most 4 and 64 points, and of the default length. `peak` is the largest resident set of the process, `imports` what it
was before the fit, `kept` the draws.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinates", type=int, default=10_000)
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run, as JSON: what a process of its own is given
    options = parser.parse_args()
    if options.run is not None:
        one_run(**json.loads(options.run))
        return
    print(f"{'MiB':20} {'imports':>8} {'kept':>8} {'peak':>8} {'chains':>8} {'draws':>8} {'gradients':>10}  status")
    for method, depth in (("NUTS", 2), ("NUTS", 6), ("NUTS", None), ("HMC", None)):
        given = {"method": method, "coordinates": options.coordinates, "depth": depth}
        command = [sys.executable, __file__, "--run", json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        name = method if depth is None else f"{method}, {2**depth} points"
        sizes = " ".join(f"{found[key]:8,.0f}" for key in ("imports", "kept", "peak", "chains", "draws"))
        print(f"{name:20} {sizes} {found['gradients']:10,.0f}  {found['status']}", flush=True)


def one_run(method: str, coordinates: int, depth: int | None) -> None:
    """Sample once, and print what it took."""
    import warnings

    import torch

    import priory as pr

    torch.set_num_threads(1)
    scale = torch.logspace(-1, 1, coordinates, dtype=torch.float64)
    density = pr.Density(lambda p: -0.5 * (p["x"] / scale).square().sum(), {"x": pr.Param((coordinates,))})
    options = {} if depth is None else {"max_depth": depth}
    sampler: Any = {"HMC": pr.HMC, "NUTS": pr.NUTS}[method](warmup=40, **options)
    imports = peak_mebibytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior: Any = pr.fit(density, None, sampler, steps=50, progress=False)
    found = {
        "imports": imports,
        "peak": peak_mebibytes(),
        "kept": posterior.w.numel() * posterior.w.element_size() / 2**20,
        "chains": posterior.num_chains,
        "draws": posterior.num_draws,
        "gradients": float(posterior.history["gradients"].sum()),
        "status": posterior.status.name,
    }
    print(json.dumps(found))


def peak_mebibytes() -> float:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
