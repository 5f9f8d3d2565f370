"""Does a fit at its defaults arrive? Distance to the exact answer, seconds and status, for nine methods.

    python benchmarks/convergence.py [--data DIR] [--targets far,wide] [--methods MeanField] [--peer PYTHON]

DIR holds `posteriordb` (see `_posteriors.py`); without it the 13 reference posteriors are left out. The distance is

    MAP, Laplace           standard deviations per coordinate to the mode, sqrt(g' H^-1 g / P) at the result
    families               nats to the optimum of the family: closed forms on Gaussians; otherwise what 1,500 steps of
                           Adam with fresh draws, started from the result, still gain on 16,384 common draws
    Pathfinder             largest error of a mean in standard deviations, where the exact moments are known

A miss is a result outside its bound; it is silent if the status is "converged". PYTHON is an environment with NumPyro,
whose SVI with `AutoNormal` and `AutoMultivariateNormal` (Adam at 0.01, 10,000 steps, 64 bits) is run beside, on the
Gaussians and the regressions, with its compilation. Seconds are processor time in one thread, without imports.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _convergence_targets import GAUSSIANS, targets
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

import priory as pr
from priory.families import DiagonalFamily, FullRankFamily
from priory.models.target import Target, summed

METHODS: dict[str, Callable[[], Any]] = {
    "MAP": pr.MAP,
    "Laplace": pr.Laplace,
    "MeanField": pr.MeanField,
    "FullRank": pr.FullRank,
    "LowRank": pr.LowRank,
    "NaturalGradient": pr.NaturalGradient,
    "Flow": pr.Flow,
    "MixtureOfGaussians": pr.MixtureOfGaussians,
    "Pathfinder": pr.Pathfinder,
}
BOUNDS = {"MAP": 1e-6, "Laplace": 1e-3, "MeanField": 0.02, "NaturalGradient": 0.02, "FullRank": 0.05}
BOUNDS |= {"LowRank": 0.05, "MixtureOfGaussians": 0.05, "Flow": 0.2, "Pathfinder": 0.2}
POLISH_STEPS, POLISH_DRAWS, COMMON_DRAWS = 1_500, 64, 16_384


def distance(name: str, method: str, posterior: Any) -> float:
    """The distance of a posterior to the exact answer; NaN where that is not known."""
    if method in ("MAP", "Laplace"):
        return to_mode(posterior, jacobian=method == "Laplace")
    if method == "Pathfinder":
        return moments_error(name, posterior)
    exact = closed_form(name, posterior.family)
    return polish(posterior) if exact is None else exact


def to_mode(posterior: Any, jacobian: bool) -> float:
    """Standard deviations per coordinate between the centre and the mode, by gradient and Hessian there."""
    target: Target = posterior.target
    w = posterior.draw(1, torch.Generator())[0] if posterior.point else posterior.centre
    assert w is not None

    def log_joint(v: Tensor) -> Tensor:
        return target.differentiable(v, ()) + target.prior.log_prob_of_others(v, jacobian)

    hessian = torch.func.hessian(log_joint)(w)
    gradient = torch.func.grad(log_joint)(w)
    return math.sqrt(abs(float(gradient @ torch.linalg.solve(-hessian, gradient))) / len(w))


def moments_error(name: str, posterior: Any) -> float:
    """The largest error of a mean in standard deviations, for a Gaussian target."""
    if name not in GAUSSIANS:
        return math.nan
    mean, covariance = GAUSSIANS[name]
    return float(((posterior.mean["x"] - mean) / covariance.diagonal().sqrt()).abs().max())


def closed_form(name: str, q: Any) -> float | None:
    """Nats below the optimum of a Gaussian family on a Gaussian target; None for others."""
    if name not in GAUSSIANS or not isinstance(q, (DiagonalFamily, FullRankFamily)):
        return None
    mean, covariance = GAUSSIANS[name]
    target = MultivariateNormal(mean, covariance)
    full = isinstance(q, FullRankFamily)
    tril = q.tril if full else q.scale.diag()
    best = covariance if full else torch.linalg.inv(covariance).diagonal().reciprocal().diag()
    gap = kl_divergence(MultivariateNormal(q.loc, scale_tril=tril), target)
    return float(gap - kl_divergence(MultivariateNormal(mean, best), target))


def polish(posterior: Any) -> float:
    """Nats that Adam with fresh draws still gains, in coordinates of unit scale."""
    form, target = posterior.form, posterior.target
    w = posterior.draw(4096, torch.Generator().manual_seed(1)).double()
    mean, sd = w.mean(0), w.std(0)
    theta = form.moved(posterior.theta.double(), -mean / sd, 1 / sd)

    def joint(v: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = target.log_likelihood_and_grad(mean + sd * v, ())
        prior, slope = summed(target.prior.log_prob_of_others, mean + sd * v)
        return value + prior, sd * (gradient + slope)

    def bound(theta: Tensor, draws: int, seed: int) -> Tensor:
        q = form.family(theta)
        v = q.sample(draws, torch.Generator().manual_seed(seed))
        weights = q.weights(draws)
        value, gradient = joint(v.detach())
        each = value + (gradient * (v - v.detach())).sum(-1)
        log_q = q.log_prob(v)
        return (each - log_q).mean() if weights is None else (weights * (each - log_q)).sum()

    with torch.no_grad():
        before = float(bound(theta, COMMON_DRAWS, 0))
    leaf = theta.clone().requires_grad_()
    adam = torch.optim.Adam([leaf], lr=0.01)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(adam, POLISH_STEPS)
    for step in range(POLISH_STEPS):
        adam.zero_grad()
        (-bound(leaf, POLISH_DRAWS, step + 1)).backward()
        adam.step()
        fall.step()
    with torch.no_grad():
        after = float(bound(leaf.detach(), COMMON_DRAWS, 0))
    return after - before


def run(name: str, make: Callable[[], pr.Density], method: str) -> dict[str, Any]:
    """Fit one target by one method."""
    density = make()
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            posterior = pr.fit(density, None, METHODS[method](), progress=False)
        except (pr.DivergedError, pr.InputError) as error:
            return {"target": name, "method": method, "seconds": time.process_time() - began, "error": str(error)[:80]}
        seconds = time.process_time() - began
        away = distance(name, method, posterior)
    status = posterior.status
    missed = not away <= BOUNDS[method] and not math.isnan(away)
    silent = missed and status.name == "converged"
    row = {"target": name, "method": method, "distance": away, "seconds": seconds, "status": status.name}
    return {**row, "reason": status.reason[:60], "missed": missed, "silent": silent}


def peer(python: str, names: list[str]) -> list[dict[str, Any]]:
    """Run NumPyro's SVI on the targets that it has."""
    script = Path(__file__).with_name("_convergence_numpyro.py")
    data = {name: [t.tolist() for t in GAUSSIANS[name]] for name in names if name in GAUSSIANS}
    rows = []
    for name, (mean, covariance) in data.items():
        run = json.dumps({"mean": mean, "covariance": covariance})
        done = subprocess.run([python, str(script)], input=run, capture_output=True, text=True, check=True)
        for guide, found in json.loads(done.stdout).items():
            loc, tril = (torch.tensor(found[part], dtype=torch.float64) for part in ("loc", "tril"))
            q: Any = FullRankFamily(loc, tril) if tril.ndim == 2 else DiagonalFamily(loc, tril.log())
            finite = bool(torch.isfinite(loc).all() and torch.isfinite(tril).all())
            away = closed_form(name, q) if finite else math.inf
            rows.append({"target": name, "method": guide, "distance": away, "seconds": found["seconds"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--targets", type=lambda text: text.split(","))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--peer")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = targets(given.data)
    names = given.targets or list(chosen)
    rows: list[dict[str, Any]] = []
    print(f"{'target':38} {'method':19} {'distance':>9} {'seconds':>8}  status")
    for name in names:
        for method in given.methods:
            row = run(name, chosen[name], method)
            rows.append(row)
            mark = "SILENT MISS" if row.get("silent") else "miss" if row.get("missed") else ""
            said = row.get("error") or f"{row['status']} {mark} {row['reason']}"
            print(
                f"{name:38} {method:19} {row.get('distance', math.nan):9.2g} {row['seconds']:8.2f}  {said}", flush=True
            )
    misses = sum(bool(row.get("missed")) for row in rows)
    print(f"{len(rows)} fits, {misses} outside their bound, {sum(bool(row.get('silent')) for row in rows)} silently")
    if given.peer:
        others = peer(given.peer, names)
        for row in others:
            print(f"{row['target']:38} {row['method']:19} {row['distance']:9.2g} {row['seconds']:8.2f}")
        for method, guide in (("MeanField", "AutoNormal"), ("FullRank", "AutoMultivariateNormal")):
            ours = {row["target"]: row["seconds"] for row in rows if row["method"] == method}
            theirs = {row["target"]: row["seconds"] for row in others if row["method"] == guide}
            ratios = [ours[name] / theirs[name] for name in theirs if name in ours]
            if ratios:
                print(f"median seconds of {method} / seconds of {guide}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
