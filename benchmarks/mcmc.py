"""Effective draws per second, including warm-up, of our samplers and of the best peers, on one thread.

    python benchmarks/mcmc.py [--peers FOLDER] [--problems schools logistic network] [--quick]

The number is the least bulk ESS over parameters (over predictions, for the network), by `priory.diagnostics`, divided
by the CPU seconds of warm-up and sampling. Recording and compiling are reported separately: a column for ours, and a
first run for NumPyro, whose whole run is inside one `jax.jit`. CPU seconds of a process that is held to one core are
what a clock shows on an idle machine, and change little on a busy one. NumPyro and Pyro are installed in a separate
environment, in the folder given by `--peers`; each run is a separate process. NumPyro computes in its default, 32 bits;
ours and Pyro in 64.

Problems: eight schools, non-centred, as a user writes it, one draw at a time; a logistic regression of 1000 rows and
25 columns, one draw at a time and with `batched=True`; a regression by a network of 50 units, 100 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Y = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]
SIGMA = [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
UNITS, NOISE = 50, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=str(ROOT / "build" / "peers"))
    parser.add_argument("--problems", nargs="+", default=["schools", "logistic", "network"])
    parser.add_argument("--quick", action="store_true", help="fewer settings, for a look")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run, as JSON: what a process of its own is given
    options = parser.parse_args()
    if options.run is not None:
        one_run(json.loads(options.run))
        return
    python = environment(Path(options.peers))
    with tempfile.TemporaryDirectory() as folder:
        for problem in options.problems:
            data = data_of(problem)
            (Path(folder) / "data.json").write_text(json.dumps(data))
            print(
                f"\n{problem}\n{'':58} {'ESS/s':>9} {'min ESS':>9} {'R-hat':>7} {'CPU s':>7} {'record s':>8}",
                flush=True,
            )
            best: dict[str, float] = {}
            for run in runs(problem, options.quick):
                done = started(run, python, Path(folder))
                if done is None:
                    continue
                best[run["who"]] = max(best.get(run["who"], 0.0), done["rate"])
                print(
                    f"{label(run):58} {done['rate']:9,.0f} {done['ess']:9,.0f} {done['r_hat']:7.3f} {done['cpu']:7.1f} "
                    f"{done['record']:8.1f}",
                    flush=True,
                )
            for peer in ("NumPyro", "Pyro"):
                if best.get(peer):
                    print(f"ours / {peer}, the best of each: {best['Priory'] / best[peer]:.1f}", flush=True)


def runs(problem: str, quick: bool) -> list[dict[str, Any]]:
    """What is run on a problem."""
    warmup, draws = (100, 100) if problem == "network" else (300, 500)
    mine: list[dict[str, Any]] = []
    chains = [8] if problem == "network" else [256, 1024] if quick else [64, 128, 256, 1024]
    forms = [False, True] if problem == "logistic" else [False]
    for batched in forms:
        for k in chains:
            mine.append({"method": "HMC", "chains": k, "batched": batched})
        for k in chains[:1] if quick or problem == "network" else chains[:3]:
            mine.append({"method": "NUTS", "chains": k, "batched": batched})
        for k in () if problem == "network" else chains[-2:]:
            mine.append({"method": "HMC", "chains": k, "compile": True, "batched": batched})
    shorter = lambda k: 200 if k >= 128 else warmup  # noqa: E731 - our default for so many chains, the peers' too
    settings = [{"who": "Priory", "warmup": shorter(m["chains"]), "draws": draws, **m} for m in mine]
    more = {"schools": (64, 256, 1024), "logistic": (64, 256)}.get(problem, ())  # as many chains as ours where they pay
    peers = [(4, "sequential"), (4, "vectorized"), *((k, "vectorized") for k in more)]
    for k, how in peers:
        long = k == 4 and problem != "network"
        few = {"warmup": 500, "draws": 1000} if long else {"warmup": shorter(k), "draws": draws}
        settings.append({"who": "NumPyro", "method": "NUTS", "chains": k, "how": how, **few})
    if problem != "network":
        settings.append({"who": "Pyro", "method": "NUTS", "chains": 1, "warmup": 200, "draws": 200})
    return [{"problem": problem, **s} for s in settings]


def label(run: dict[str, Any]) -> str:
    words = [run["who"], run["method"], f"{run['chains']} chains", run.get("how", "")]
    words += ["batched" if run.get("batched") else "", "compiled" if run.get("compile") else ""]
    return ", ".join(w for w in words if w) + f", {run['warmup']} + {run['draws']}"


def data_of(problem: str) -> dict[str, Any]:
    """The data, made by our own generator, as lists."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if problem == "schools":
        return {"y": Y, "sigma": SIGMA}
    if problem == "logistic":
        X = torch.randn(1000, 25, generator=generator, dtype=torch.float64)
        beta = torch.randn(25, generator=generator, dtype=torch.float64)
        y = (torch.rand(1000, generator=generator, dtype=torch.float64) < torch.sigmoid(X @ beta)).double()
    else:
        X = torch.linspace(-2, 2, 100, dtype=torch.float64)[:, None]
        y = torch.sin(3 * X[:, 0]) + NOISE * torch.randn(100, generator=generator, dtype=torch.float64)
    return {"X": X.tolist(), "y": y.tolist()}


# Processes.


def environment(folder: Path) -> Path:
    """The Python of an environment with NumPyro and Pyro, made if it isn't there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = subprocess.run([str(python), "-c", "import numpyro, pyro"], capture_output=True, check=False)
    if found.returncode:
        for package in ("numpyro", "pyro-ppl"):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", package], check=True)
    return python


def started(run: dict[str, Any], peers: Path, folder: Path) -> dict[str, float] | None:
    """One run in a process of its own, and what its draws are worth."""
    import torch

    from priory.diagnostics import ess_bulk, r_hat

    out = folder / "draws.json"
    out.unlink(missing_ok=True)
    given = {**run, "data": str(folder / "data.json"), "out": str(out)}
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    env = {**os.environ, **one, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    python = sys.executable if run["who"] == "Priory" else str(peers)
    done = subprocess.run(
        [python, __file__, "--run", json.dumps(given)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode or not out.exists():
        print(f"{label(run):58} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    found = json.loads(out.read_text())
    raw = bytearray(Path(found["draws"]).read_bytes())
    draws = torch.frombuffer(raw, dtype=torch.float64).reshape(found["shape"])
    ess = float(ess_bulk(draws).min())
    return {**found, "ess": ess, "r_hat": float(r_hat(draws).max()), "rate": ess / found["cpu"]}


def one_run(run: dict[str, Any]) -> None:
    """Sample once, in this process, on one core."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    data = json.loads(Path(run["data"]).read_text())
    sample = {"Priory": with_priory, "NumPyro": with_numpyro, "Pyro": with_pyro}[run["who"]]
    draws, cpu, record = sample(run, data)
    file = run["out"] + ".raw"
    Path(file).write_bytes(draws.tobytes())
    Path(run["out"]).write_text(json.dumps({"draws": file, "shape": draws.shape, "cpu": cpu, "record": record}))


# The samplers; each gives draws (chain, draw, quantity) as an array of doubles, CPU seconds, and seconds to record.


def with_priory(run: dict[str, Any], data: dict[str, Any]) -> tuple[Any, float, float]:
    import warnings

    import torch
    from torch import nn
    from torch.distributions import HalfCauchy, Normal
    from torch.nn.functional import softplus

    import priory as pr
    from priory.methods.mcmc import HMC, NUTS, sampler

    torch.set_num_threads(1)
    y = torch.tensor(data["y"], dtype=torch.float64)
    recording: list[float] = []
    record = sampler.log_joint

    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        joint = record(*arguments)
        recording.append(time.process_time() - began)
        return joint

    sampler.log_joint = timed
    given: Any = None
    if run["problem"] == "schools":
        sigma = torch.tensor(data["sigma"], dtype=torch.float64)

        def schools(p: dict[str, torch.Tensor]) -> torch.Tensor:
            prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfCauchy(5.0).log_prob(p["tau"])
            prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum()
            return prior + Normal(p["mu"] + p["tau"] * p["z"], sigma).log_prob(y).sum()

        positive = pr.constraints.positive
        model: Any = pr.Density(schools, {"mu": pr.Param(), "tau": pr.Param((), positive), "z": pr.Param((8,))})
    elif run["problem"] == "logistic":
        X = torch.tensor(data["X"], dtype=torch.float64)

        def one(p: dict[str, torch.Tensor]) -> torch.Tensor:
            z = X @ p["beta"]
            return -0.5 * p["beta"].square().sum() + (y * z - softplus(z)).sum()

        def many(p: dict[str, torch.Tensor]) -> torch.Tensor:
            z = p["beta"] @ X.T
            return -0.5 * p["beta"].square().sum(-1) + (y * z - softplus(z)).sum(-1)

        model = pr.Density(many if run["batched"] else one, {"beta": pr.Param((25,))}, batched=run["batched"])
    else:
        X = torch.tensor(data["X"], dtype=torch.float64)
        net = nn.Sequential(nn.Linear(1, UNITS), nn.Tanh(), nn.Linear(UNITS, 1)).double()
        model, given = pr.Model(net, pr.Gaussian(NOISE), prior=1.0), (X, y)
    method = {"HMC": HMC, "NUTS": NUTS}[run["method"]]
    method = method(chains=run["chains"], warmup=run["warmup"], compile=run.get("compile", False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.process_time()
        posterior: Any = pr.fit(model, given, method, steps=run["draws"], progress=False)
        seconds = time.process_time() - began
    draws = posterior.w
    if run["problem"] == "network":
        w1, b1, w2, b2 = draws.split((UNITS, UNITS, UNITS, 1), -1)
        at = torch.linspace(-2, 2, 20, dtype=torch.float64)
        draws = torch.einsum("ksux,ksu->ksx", torch.tanh(w1[..., None] * at + b1[..., None]), w2) + b2
    return draws.contiguous().numpy(), seconds - sum(recording), sum(recording)


def with_numpyro(run: dict[str, Any], data: dict[str, Any]) -> tuple[Any, float, float]:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    import numpy as np
    import numpyro  # pyright: ignore[reportMissingImports]
    import numpyro.distributions as dist  # pyright: ignore[reportMissingImports]
    from numpyro.infer import MCMC, NUTS  # pyright: ignore[reportMissingImports]

    y = jnp.array(data["y"])

    def schools() -> None:
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("school", 8):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu + tau * z, jnp.array(data["sigma"])), obs=y)

    def logistic() -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([25]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=jnp.array(data["X"]) @ beta), obs=y)

    def network() -> None:
        w1, b1, w2 = (numpyro.sample(n, dist.Normal(0, 1).expand([UNITS]).to_event(1)) for n in ("w1", "b1", "w2"))
        b2 = numpyro.sample("b2", dist.Normal(0, 1))
        hidden = jnp.tanh(jnp.array(data["X"]) * w1 + b1)
        numpyro.sample("y", dist.Normal(hidden @ w2 + b2, NOISE), obs=y)

    model = {"schools": schools, "logistic": logistic, "network": network}[run["problem"]]
    mcmc = MCMC(
        NUTS(model),
        num_warmup=run["warmup"],
        num_samples=run["draws"],
        num_chains=run["chains"],
        chain_method=run["how"],
        progress_bar=False,
    )

    def sample(key: Any) -> Any:
        mcmc.run(key)
        return mcmc.get_samples(group_by_chain=True)

    # called as it is, `mcmc.run` compiles again each time, which takes far longer than to sample
    compiled, times, found = jax.jit(sample), [], {}
    for seed in (0, 1):  # the first one compiles
        began = time.process_time()
        found = jax.block_until_ready(compiled(jax.random.PRNGKey(seed)))
        times.append(time.process_time() - began)
    lead = (run["chains"], run["draws"], -1)
    if run["problem"] == "network":
        at = np.linspace(-2, 2, 20)
        w1, b1, w2, b2 = (np.asarray(found[n], dtype=np.float64) for n in ("w1", "b1", "w2", "b2"))
        draws = np.einsum("ksux,ksu->ksx", np.tanh(w1[..., None] * at + b1[..., None]), w2) + b2[..., None]
    else:
        draws = np.concatenate([np.asarray(found[n], dtype=np.float64).reshape(lead) for n in sorted(found)], -1)
    return np.ascontiguousarray(draws), times[1], times[0] - times[1]


def with_pyro(run: dict[str, Any], data: dict[str, Any]) -> tuple[Any, float, float]:
    import numpy as np
    import pyro  # pyright: ignore[reportMissingImports]
    import pyro.distributions as dist  # pyright: ignore[reportMissingImports]
    import torch
    from pyro.infer import MCMC, NUTS  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    y = torch.tensor(data["y"])

    def schools() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0, 5)), pyro.sample("tau", dist.HalfCauchy(5.0 * torch.ones(())))
        with pyro.plate("school", 8):
            z = pyro.sample("z", dist.Normal(0, 1))
            pyro.sample("y", dist.Normal(mu + tau * z, torch.tensor(data["sigma"])), obs=y)

    def logistic() -> None:
        beta = pyro.sample("beta", dist.Normal(0, 1).expand([25]).to_event(1))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=torch.tensor(data["X"]) @ beta), obs=y)

    model = {"schools": schools, "logistic": logistic}[run["problem"]]
    kernel = NUTS(model, jit_compile=True, ignore_jit_warnings=True)
    mcmc = MCMC(kernel, num_samples=run["draws"], warmup_steps=run["warmup"], disable_progbar=True)
    began = time.process_time()
    mcmc.run()
    seconds = time.process_time() - began
    found = mcmc.get_samples(group_by_chain=True)
    lead = (run["chains"], run["draws"], -1)
    draws = np.concatenate([found[n].detach().double().reshape(lead).numpy() for n in sorted(found)], -1)
    return np.ascontiguousarray(draws), seconds, 0.0


if __name__ == "__main__":
    main()
