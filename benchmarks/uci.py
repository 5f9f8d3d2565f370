"""UCI regression on the 20 standard splits, beside the published numbers (Hernandez-Lobato and Adams 2015).

    python benchmarks/uci.py --data DIR

DIR holds `uci/NAME.npz` (X, y, train_index, test_index) and `results/uci_regression.csv`. Protocol: one hidden layer of
50 units, X and y standardised on the training split, RMSE and mean log predictive density in the original units, means
with standard errors over the splits. Cost: linear in rows x epochs; about ten minutes for everything on two cores.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

import priory as pr

SETS = {"concrete": 200, "energy": 400, "power-plant": 40, "yacht": 800}  # epochs each
METHODS = {
    "MAP": lambda: pr.MAP(learning_rate=1e-2),
    "MeanField": lambda: pr.MeanField(learning_rate=1e-2),
}
PUBLISHED = "VI (Graves 2011)"


def one_split(folder: Path, name: str, split: int, method: str, epochs: int, batch_size: int) -> tuple[float, float]:
    """RMSE and mean log predictive density of one split, in the original units."""
    torch.set_num_threads(1)
    torch.manual_seed(split)
    stored = np.load(folder / "uci" / f"{name}.npz")
    X, y = stored["X"].astype(np.float32), stored["y"].astype(np.float32).reshape(-1)
    train, test = stored["train_index"][split], stored["test_index"][split]
    spread = X[train].std(0)
    X = (X - X[train].mean(0)) / np.where(spread > 0, spread, 1)
    centre, scale = y[train].mean(), y[train].std()

    net = nn.Sequential(nn.Linear(X.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    model = pr.Model(net, pr.Gaussian(), prior="glorot")
    data = (X[train], (y[train] - centre) / scale)
    posterior = pr.fit(model, data, METHODS[method](), epochs=epochs, batch_size=batch_size, seed=split, progress=False)
    prediction = posterior.predict(X[test], samples=256)
    standard = torch.as_tensor((y[test] - centre) / scale)
    rmse = float((prediction.mean - standard).square().mean().sqrt()) * float(scale)
    return rmse, float(prediction.log_prob(standard).mean()) - math.log(scale)


def published(folder: Path, name: str, metric: str) -> str:
    with open(folder / "results" / "uci_regression.csv") as stream:
        for row in csv.DictReader(stream):
            if (row["dataset"], row["method"], row["metric"]) == (name, PUBLISHED, metric):
                return f"{float(row['mean']):.2f} +- {float(row['plus_minus']):.2f}"
    return "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epochs", type=int, help="instead of each set's own number")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if not (options.data / "uci").is_dir():
        print(f"There is no folder {options.data / 'uci'}: give the data's place with --data DIR.")
        return
    print(f"{'set':<12} {'method':<22} {'RMSE':>16} {'log-likelihood':>18} {'seconds':>9}")
    for name in options.sets:
        print(
            f"{name:<12} {PUBLISHED:<22} {published(options.data, name, 'rmse'):>16} "
            f"{published(options.data, name, 'log_likelihood'):>18} {'-':>9}"
        )
        for method in options.methods:
            began = time.perf_counter()
            epochs = options.epochs or SETS[name]
            with ProcessPoolExecutor(options.jobs) as pool:
                runs = [
                    pool.submit(one_split, options.data, name, split, method, epochs, options.batch_size)
                    for split in range(options.splits)
                ]
                scores = torch.tensor([run.result() for run in runs], dtype=torch.float64)
            mean, error = scores.mean(0), scores.std(0) / len(scores) ** 0.5
            print(
                f"{name:<12} {method:<22} {mean[0]:>8.3f} +- {error[0]:.3f} {mean[1]:>9.3f} +- {error[1]:.3f} "
                f"{time.perf_counter() - began:>9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
