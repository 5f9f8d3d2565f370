"""Time from import to the answer of `pr.fit(density, None, pr.NUTS())` at its defaults, and whether it is right.

    python benchmarks/posteriordb.py --data DIR [--only NAME ...] [--seeds 5] [--ours] [--numpyro] [--nutpie]

Posteriors: the thirteen of posteriordb that have reference draws (`_posteriors.py`; the data are in DIR/posteriordb),
and models of everyday practice (`_practice.py`), whose references are in posteriordb_references.json and are made by
`--make-references` (`_references.py`). Each run is a fresh process on one core, with its data read from a file. Beside
it run NumPyro with its defaults (NUTS, 4 chains, 1,000 + 1,000, in 64 bits, compilation included) and, if asked for,
PyMC with nutpie (4 chains, 400 + 1,000), from an environment in the folder given by `--peers`. `--cache FILE` keeps the
results of the peers, so that ours can be run again alone. Stan is not run: its models would have to be written again.

A mean or sd is right if it is within 4 standard errors of the reference, those of the draws and of the reference
combined. There are about 210 quantities, so that with 5 seeds, if every answer is right, one of eight runs of the whole
benchmark has a comparison beyond 4. Smallest ESS and nested R-hat are over all unconstrained coordinates. Gradients are
per chain, warm-up included if the sampler counts it; those of the peers are of their draws alone. On a busy machine
compare CPU seconds (`--clock cpu`), which change less than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _posterior_report import Result, criteria, table, told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

BENCHMARK_FOLDER = Path(__file__).resolve().parent
REFERENCE_FILE = BENCHMARK_FOLDER / "posteriordb_references.json"
# packages and scripts of the peers
PEERS = {
    "numpyro": (("numpyro",), "_posteriors_numpyro.py"),
    "nutpie": (("pymc", "nutpie"), "_posteriors_pymc.py"),
}
# a program that gives itself so many CPU seconds and becomes another
CPU_LIMIT_PROGRAM = (
    "import os, resource, sys; n = int(sys.argv[1]); "
    "resource.setrlimit(resource.RLIMIT_CPU, (n, n + 5)); os.execv(sys.argv[2], sys.argv[2:])"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that has posteriordb; without it, the models of practice")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of posteriors, or parts of names")
    parser.add_argument("--seeds", type=int, default=5, help="runs of ours per posterior")
    parser.add_argument("--peer-seeds", type=int, default=1, help="runs of each peer per posterior")
    parser.add_argument("--ours", action="store_true", help="run ours; without flags, ours and NumPyro are run")
    parser.add_argument("--numpyro", action="store_true", help="run NumPyro")
    parser.add_argument("--nutpie", action="store_true", help="run PyMC with nutpie")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="environment of the peers")
    parser.add_argument("--cache", type=Path, help="file for results of peers, which are not run again")
    parser.add_argument("--out", type=Path, help="file for all results, as JSON")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of --clock after which a run is stopped")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="seconds that are compared")
    parser.add_argument("--make-references", action="store_true", help="make the references of the models of practice")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run of ours, as JSON: what its process is given
    options = parser.parse_args()
    if options.run is not None:
        one_run(json.loads(options.run))
        return
    names = selected(options.only, options.data)
    if options.make_references:
        make_references(names)
        return
    results = run_all(names, options)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))
    print()
    print(*table(results, options.clock), sep="\n")
    print()
    print(*criteria(results, options.clock), sep="\n")


def selected(only: Sequence[str] | None, folder: Path | None) -> list[str]:
    """The names of the posteriors to run."""
    from _posteriors import MODELS
    from _practice import PRACTICE

    names = [*(MODELS if folder is not None else ()), *PRACTICE]
    found = names if only is None else [n for n in names if any(part in n for part in only)]
    if not found:
        raise SystemExit(f"No posterior is called {only}. The names are {', '.join(names)}.")
    return found


def make_references(names: Sequence[str]) -> None:
    """Make the references of the named models of practice, and store them one quantity per line."""
    from _practice import PRACTICE
    from _references import reference

    stored = json.loads(REFERENCE_FILE.read_text()) if REFERENCE_FILE.exists() else {}
    for name in names:
        if name in PRACTICE:
            print(name, flush=True)
            stored[name] = reference(name)
    blocks = []
    for name in PRACTICE:
        lines = [f"    {json.dumps(q)}: {json.dumps(rounded(values))}" for q, values in stored.get(name, {}).items()]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    REFERENCE_FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def rounded(values: Any) -> Any:
    """Nested numbers with ten digits."""
    if isinstance(values, dict):
        return {key: rounded(value) for key, value in values.items()}
    return [rounded(v) for v in values] if isinstance(values, list) else float(f"{values:.10g}")


# Runs, each in a process of its own.


def run_all(names: Sequence[str], options: argparse.Namespace) -> dict[str, dict[str, list[Result]]]:
    """All results, by posterior and by sampler."""
    flags = {who: getattr(options, who) for who in ("ours", *PEERS)}
    wanted = {who for who, flag in flags.items() if flag} or {"ours", "numpyro"}
    limits = (options.timeout, options.clock)
    cached = read(options.cache)
    pythons = {who: peer_python(options.peers, who) for who in PEERS if who in wanted}
    results: dict[str, dict[str, list[Result]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            files = written(name, options.data, Path(folder))
            results[name] = {"ours": [], **{who: [] for who in PEERS}}
            for who, seed in ((who, seed) for who in PEERS for seed in range(options.peer_seeds)):
                key, python = f"{who} {name} {seed}", pythons.get(who)
                if key in cached:
                    results[name][who].append({**cached[key], "cached": True})
                elif python is not None:
                    cached[key] = with_peer(who, name, seed, files, python, limits)
                    results[name][who].append(cached[key])
                    print(told(name, f"{who} {seed}", cached[key]), flush=True)
                    if options.cache is not None:  # read again: another run may have added its own
                        options.cache.write_text(json.dumps({**read(options.cache), key: cached[key]}, indent=1))
            for seed in range(options.seeds if "ours" in wanted else 0):
                found = with_priory(name, seed, files, limits)
                results[name]["ours"].append(found)
                print(told(name, f"ours {seed}", found), flush=True)
    return results


def read(cache: Path | None) -> dict[str, Result]:
    """The results in a cache, by peer, posterior and seed."""
    return json.loads(cache.read_text()) if cache is not None and cache.exists() else {}


def peer_python(folder: Path, who: str) -> str | None:
    """The Python of an environment with a peer, or None with a message."""
    python, packages = folder.absolute() / "bin" / "python", PEERS[who][0]
    imports = [str(python), "-c", f"import {', '.join(packages)}"]
    if python.exists() and not subprocess.run(imports, capture_output=True, check=False).returncode:
        return str(python)
    print(f"{who} is left out: make {folder} with `python -m venv`, and install {' and '.join(packages)} in it.")
    return None


def written(name: str, data: Path | None, folder: Path) -> dict[str, str]:
    """The files of a posterior: its data, its reference, and where results go."""
    import _posteriors
    import _practice

    if name in _practice.PRACTICE:
        given, reference = _practice.PRACTICE[name][0](), json.loads(REFERENCE_FILE.read_text())[name]
    else:
        assert data is not None
        given, reference = _posteriors.data(name, data), _posteriors.reference(name, data)
    plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in given.items()}
    (folder / "data.json").write_text(json.dumps(plain))
    (folder / "reference.json").write_text(json.dumps(reference))
    files = {"data": "data.json", "reference": "reference.json", "out": "out.json", "draws": "draws.npz"}
    return {key: str(folder / file) for key, file in files.items()}


def process(command: Sequence[str], run: Result, timeout: float, clock: str) -> Result:
    """Run a command with a JSON argument on one core; seconds until it had its answer, and what it wrote.

    The timeout is in seconds of the clock that is compared, so that a busy machine does not stop a run.
    """
    out = Path(run["out"])
    out.unlink(missing_ok=True)
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    env = {
        **os.environ,
        **one,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(BENCHMARK_FOLDER.parent / "src"),
    }
    began = time.time()
    late = {"wall": timeout, "cpu": timeout, "failed": f"no answer in {timeout:.0f} s ({clock})"}
    limit = timeout if clock == "wall" else None
    whole = (
        [sys.executable, "-c", CPU_LIMIT_PROGRAM, str(math.ceil(timeout)), *command] if clock == "cpu" else [*command]
    )
    try:
        done = subprocess.run(
            [*whole, json.dumps(run)], env=env, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return late
    if done.returncode == -signal.SIGXCPU:
        return late
    if done.returncode or not out.exists():
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"failed": lines[-1][:300]}
    found = json.loads(out.read_text())
    return {"wall": found.pop("answered") - began, **found}


def with_priory(name: str, seed: int, files: dict[str, str], limits: tuple[float, str]) -> Result:
    return process([sys.executable, __file__, "--run"], {"name": name, "seed": seed, **files}, *limits)


def with_peer(who: str, name: str, seed: int, files: dict[str, str], python: str, limits: tuple[float, str]) -> Result:
    """One run of a peer, with diagnostics of its draws by ours."""
    import numpy as np
    import torch

    run = {"name": name, "seed": seed, **files}
    found = process([python, str(BENCHMARK_FOLDER / PEERS[who][1])], run, *limits)
    if "failed" in found:
        return found
    with np.load(files["draws"]) as stored:
        draws = {n: torch.from_numpy(x.astype(np.float64)) for n, x in stored.items()}
    flat = torch.cat([x.flatten(2) if x.ndim > 2 else x[..., None] for x in draws.values()], 2)
    return {**found, **measured(flat, None), **compared(name, draws, json.loads(Path(files["reference"]).read_text()))}


def one_run(run: Result) -> None:
    """Sample once with ours, in this process."""
    import warnings

    pin()
    import torch

    import priory as pr

    torch.set_num_threads(1)
    data = json.loads(Path(run["data"]).read_text())
    if "-" in run["name"]:  # as posteriordb names its posteriors: data-model
        from _posteriors import MODELS

        density = MODELS[run["name"]](data)
    else:
        from _practice import PRACTICE

        density = PRACTICE[run["name"]][1](data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior: Any = pr.fit(density, None, pr.NUTS(), seed=run["seed"], progress=False)
        status = posterior.status
    answered, cpu = time.time(), time.process_time()
    if "gradients" in posterior.history:
        gradients = float(posterior.history["gradients"].sum())
    else:
        gradients = float(posterior.statistics["steps"].double().sum(1).mean())
    found = {
        "answered": answered,
        "cpu": cpu,
        "chains": posterior.num_chains,
        "draws": posterior.num_draws,
        "gradients": gradients,
        "divergences": len(posterior.divergences),
        "status": status.name,
        "reason": status.reason,
        **measured(posterior.w, getattr(posterior, "superchains", None)),
        **compared(run["name"], posterior.draws, json.loads(Path(run["reference"]).read_text())),
    }
    Path(run["out"]).write_text(json.dumps(found))


def pin() -> None:
    """Hold this process to one core."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


# What draws are worth.


def measured(draws: Tensor, superchains: Tensor | None) -> Result:
    """Smallest ESS and largest R-hat of draws (chain, draw, coordinate); constant coordinates are left out."""
    from priory.diagnostics import ess_bulk, ess_tail, nested_r_hat, r_hat

    varies = draws.flatten(0, 1).std(0) > 0
    draws = draws[..., varies]
    if draws.shape[1] < 4 or draws.shape[2] == 0:
        return {"ess_bulk": math.nan, "ess_tail": math.nan, "r_hat": math.nan, "nested_r_hat": None}
    nested = None if superchains is None else float(nested_r_hat(draws, superchains).max())
    return {
        "ess_bulk": float(ess_bulk(draws).min()),
        "ess_tail": float(ess_tail(draws).min()),
        "r_hat": float(r_hat(draws).max()),
        "nested_r_hat": nested,
    }


def compared(name: str, draws: dict[str, Tensor], reference: Mapping[str, Mapping[str, Any]]) -> Result:
    """The largest distances of means and sds from the reference, in combined standard errors, and where they are."""
    import _posteriors
    import _practice
    import torch

    from priory.diagnostics import mcse_mean, mcse_sd

    quantities: Callable[[Any], dict[str, Tensor]]
    quantities = {**_posteriors.QUANTITIES, **_practice.QUANTITIES}.get(name, lambda p: p)
    found = quantities(draws)
    distances: dict[str, dict[str, float]] = {"mean": {}, "sd": {}}
    for quantity, values in reference.items():
        x, known = found[quantity], {k: torch.tensor(v, dtype=torch.float64) for k, v in values.items()}
        for key, own, error in (
            ("mean", x.mean((0, 1)), mcse_mean(x)),
            ("sd", x.flatten(0, 1).std(0), mcse_sd(x)),
        ):
            combined = (error.square() + known[f"mcse_{key}"].square()).sqrt()
            away = ((own - known[key]).abs() / combined).nan_to_num(nan=math.inf)
            distances[key][quantity] = float(away.max())
    worst = {key: max(values, key=lambda q, v=values: v[q]) for key, values in distances.items()}
    return {
        **{f"z_{key}": distances[key][worst[key]] for key in distances},
        **{f"worst_{key}": worst[key] for key in distances},
    }


if __name__ == "__main__":
    main()
