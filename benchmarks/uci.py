"""UCI regression on the 20 standard splits, beside the published numbers (Hernandez-Lobato and Adams 2015).

    python benchmarks/uci.py --data DIR

DIR holds `uci/NAME.npz` (X, y, train_index, test_index) and `results/uci_regression.csv`. Protocol: one hidden layer of
50 units, X and y standardised on the training split, RMSE and mean log predictive density in the original units, means
with standard errors over the splits. Rates, noises and prior precisions are set on the training rows alone (on rows
held out of them, or by the evidence), never on the test split; epochs and SGHMC's rates are given by hand for each set.

The published rows are the best log-likelihood of a network with one hidden layer of 50 units, mean-field variational
inference, and MC dropout split by split (`results/mc_dropout_gal2018_per_split.csv`), with which `Dropout` is compared
in pairs. Cost: linear in rows x epochs; with two processes MAP takes about two minutes per data set, NUTS up to three
minutes per split of the small ones.
"""

from __future__ import annotations

import argparse
import csv
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

import priory as pr

SETS = {"concrete": 200, "energy": 400, "power-plant": 40, "yacht": 800}  # epochs each
RATES = (0.005, 0.01, 0.05, 0.1)  # dropout rates, as searched for the published rows
PRIOR = 1.0  # the standard deviation of every weight
# less where less noise makes the posterior narrower
SGHMC_RATES = {"concrete": 1e-3, "energy": 1e-4, "power-plant": 1e-3, "yacht": 1e-4}
METHODS = {
    "MAP": lambda _: pr.MAP(),
    "MeanField": lambda _: pr.MeanField(),
    "NaturalGradient": lambda _: pr.NaturalGradient(),
    "LowRank": lambda _: pr.LowRank(),
    "MixtureOfGaussians": lambda _: pr.MixtureOfGaussians(),
    "Flow": lambda _: pr.Flow(),
    "FullRank": lambda _: pr.FullRank(),
    "Laplace": lambda _: pr.Laplace("kron", tune="layer"),
    "LastLayer": lambda _: pr.LastLayer(),
    "Dropout": lambda _: pr.Dropout(RATES),
    "SWAG": lambda _: pr.SWAG(),
    "Ensemble": lambda _: pr.Ensemble(pr.MAP(), 8),
    "anchored": lambda _: pr.Ensemble(pr.MAP(), 8, anchored=True),
    "Ensemble of Laplace": lambda _: pr.Ensemble(pr.Laplace("kron", tune="layer"), 4),
    "Pathfinder": lambda _: pr.Pathfinder(),
    "SGHMC": lambda name: pr.SGHMC(SGHMC_RATES[name], chains=4, start=pr.MAP()),
    "SGLD": lambda _: pr.SGLD(1e-3, precondition=True, chains=4, start=pr.MAP()),
    "RandomWalk": lambda _: pr.RandomWalk(chains=8, warmup=1000, start=pr.Ensemble(pr.MAP(), 8)),
    "MALA": lambda _: pr.MALA(chains=8, warmup=1000, start=pr.Ensemble(pr.MAP(), 8)),
    "NUTS": lambda _: pr.NUTS(chains=8, warmup=30, accept=0.8, start=pr.Ensemble(pr.MAP(), 8)),
    "HMC": lambda _: pr.HMC(chains=8, warmup=30, accept=0.8, trajectory=1.0, start=pr.Ensemble(pr.MAP(), 8)),
}
# steps instead of epochs; draws per chain for the last four
STEPS = {"Dropout": 20_000, "SGHMC": 10_000, "SGLD": 10_000, "RandomWalk": 1000, "MALA": 1000, "NUTS": 15, "HMC": 15}
# an approximation that has to stay narrow underfits beneath a wide prior; its elbo says so on the training rows
VARIATIONAL = ("MeanField", "NaturalGradient", "LowRank", "MixtureOfGaussians", "Flow")
PRIORS = dict.fromkeys(VARIATIONAL, "glorot")
VI = "VI (Graves 2011)"
ONE_LAYER = "1 layer x 50 ReLU (100 protein)"


def one_split(
    folder: Path, name: str, split: int, method: str, epochs: int | None, batch_size: int | None
) -> tuple[float, float]:
    """RMSE and mean log predictive density of one split, in the original units."""
    torch.set_num_threads(1)
    torch.manual_seed(split)
    stored = np.load(folder / "uci" / f"{name}.npz")
    X, y = stored["X"].astype(np.float32), stored["y"].astype(np.float32).reshape(-1)
    train, test = stored["train_index"][split], stored["test_index"][split]
    net = nn.Sequential(nn.Linear(X.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    model = pr.Model(net, pr.Gaussian(), prior=PRIORS.get(method, PRIOR), standardise=True)
    length = {"steps": STEPS[method]} if epochs and method in STEPS else {"epochs": epochs}
    options = {"batch_size": batch_size, "seed": split, "progress": False, **length}
    posterior = pr.fit(model, (X[train], y[train]), METHODS[method](name), **options)
    prediction = posterior.predict(X[test], samples=256)
    targets = torch.as_tensor(y[test])
    return float((prediction.mean - targets).square().mean().sqrt()), float(prediction.log_prob(targets).mean())


def published(folder: Path, name: str) -> list[str]:
    """Lines of the published numbers: mean-field, and the best log-likelihood of one hidden layer."""
    with open(folder / "results" / "uci_regression.csv") as stream:
        rows = [row for row in csv.DictReader(stream) if row["dataset"] == name]
    scores = {
        metric: {row["method"]: row for row in rows if row["metric"] == metric} for metric in ("rmse", "log_likelihood")
    }
    single = [row for row in scores["log_likelihood"].values() if row["network"] == ONE_LAYER]
    best = max(single, key=lambda row: float(row["mean"]))["method"]
    lines = []
    for method in (VI, best):
        said = []
        for metric in scores.values():
            row = metric.get(method)
            said.append("-" if row is None else f"{float(row['mean']):.2f} +- {row['plus_minus'] or '?'}")
        lines.append(f"{name:<12} {method:<40} {said[0]:>16} {said[1]:>18} {'-':>9}")
    return lines


def per_split(folder: Path, name: str) -> torch.Tensor:
    """The published log-likelihood of MC dropout of every split."""
    with open(folder / "results" / "mc_dropout_gal2018_per_split.csv") as stream:
        rows = [row for row in csv.DictReader(stream) if row["dataset"] == name]
    return torch.tensor([float(r["log_likelihood_mc"]) for r in sorted(rows, key=lambda r: int(r["split"]))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epochs", type=int, help="instead of each set's own number, for methods without one")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--defaults", action="store_true", help="the length and batch size of fit itself")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if not (options.data / "uci").is_dir():
        print(f"There is no folder {options.data / 'uci'}: give the data's place with --data DIR.")
        return
    print(f"{'set':<12} {'method':<40} {'RMSE':>16} {'log-likelihood':>18} {'seconds':>9}")
    for name in options.sets:
        print("\n".join(published(options.data, name)))
        for method in options.methods:
            began = time.perf_counter()
            epochs = None if options.defaults else options.epochs or SETS[name]
            batch_size = None if options.defaults else options.batch_size
            with ProcessPoolExecutor(options.jobs) as pool:
                runs = [
                    pool.submit(one_split, options.data, name, split, method, epochs, batch_size)
                    for split in range(options.splits)
                ]
                scores = torch.tensor([run.result() for run in runs], dtype=torch.float64)
            mean, error = scores.mean(0), scores.std(0) / len(scores) ** 0.5
            seconds = time.perf_counter() - began
            numbers = f"{mean[0]:>8.3f} +- {error[0]:.3f} {mean[1]:>9.3f} +- {error[1]:.3f}"
            print(f"{name:<12} {method:<40} {numbers} {seconds:>9.1f}", flush=True)
            if method == "Dropout":
                gap = scores[:, 1] - per_split(options.data, name)[: len(scores)]
                error = float(gap.std()) / len(gap) ** 0.5
                print(f"{'':<12} {'  over MC dropout 2018, in pairs':<40} {'':>16} {gap.mean():>9.3f} +- {error:.3f}")


if __name__ == "__main__":
    main()
