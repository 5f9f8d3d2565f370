"""UCI regression by Laplace, with and without tuning the prior and the noise by the evidence.

    python benchmarks/laplace_uci.py --data DIR

DIR holds `uci/NAME.npz` (X, y, train_index, test_index). One hidden layer of 50 units, X and y standardised on the
training split; mean log predictive density of the linearised network on the test split, in the original units. Four
columns, of which the second and third share one network:

    untuned   prior N(0, 1) and noise 1 as given, in standardised units, nothing is tuned on data
    held out  the prior "glorot"; MAP sets the noise on rows held out from the weights
    tuned     the same mode, then Laplace with prior and noise set by the evidence
    trained   MAP(evidence_every=5), then Laplace under the prior and the noise that it found

Cost: linear in rows x epochs; about a minute per split on one core.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import priory as pr

WAYS = ("untuned", "held out", "tuned", "trained")


def one_split(folder: Path, name: str, split: int, structure: str, by: str, epochs: int) -> list[float]:
    """The mean log predictive density of one split for each way, in the original units."""
    torch.set_num_threads(1)
    torch.manual_seed(split)
    stored = np.load(folder / "uci" / f"{name}.npz")
    X, y = stored["X"].astype(np.float32), stored["y"].astype(np.float32).reshape(-1)
    train, test = stored["train_index"][split], stored["test_index"][split]
    spread = X[train].std(0)
    X = (X - X[train].mean(0)) / np.where(spread > 0, spread, 1)
    centre, scale = y[train].mean(), y[train].std()
    data, goal = (X[train], (y[train] - centre) / scale), torch.as_tensor((y[test] - centre) / scale)
    net = nn.Sequential(nn.Linear(X.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    model = pr.Model(net, pr.Gaussian(), prior="glorot")

    given = pr.Model(net, pr.Gaussian(1.0), prior=1.0)

    def fit(method: Any, model: pr.Model = model, **options: int) -> Any:
        return pr.fit(model, data, method, batch_size=64, seed=split, progress=False, **options)

    mode, trained = fit(pr.MAP(), epochs=epochs), fit(pr.MAP(evidence_every=5, structure=structure), epochs=epochs)
    posteriors = [
        fit(pr.Laplace(structure=structure), given, epochs=epochs),
        fit(pr.Laplace(structure=structure, at=mode)),
        fit(pr.Laplace(structure=structure, at=mode, tune=by)),
        fit(pr.Laplace(structure=structure, at=trained)),
    ]
    return [float(p.predict(X[test]).log_prob(goal).mean()) - math.log(scale) for p in posteriors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument(
        "--sets", nargs="+", default=["concrete"], choices=["concrete", "energy", "power-plant", "yacht"]
    )
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--structure", default="kron", choices=["kron", "diag", "full"])
    parser.add_argument("--by", default="layer", choices=["scalar", "layer", "parameter"])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if not (options.data / "uci").is_dir():
        print(f"There is no folder {options.data / 'uci'}: give the data's place with --data DIR.")
        return
    for name in options.sets:
        print(f"{name}, {options.structure}, a factor by {options.by}")
        print(f"{'split':>8}" + "".join(f"{way:>12}" for way in WAYS))
        with ProcessPoolExecutor(options.jobs) as pool:
            runs = [
                pool.submit(one_split, options.data, name, split, options.structure, options.by, options.epochs)
                for split in range(options.splits)
            ]
            for split, run in enumerate(runs):
                print(f"{split:>8}" + "".join(f"{value:>12.3f}" for value in run.result()), flush=True)
        scores = torch.tensor([run.result() for run in runs], dtype=torch.float64)
        print(f"{'mean':>8}" + "".join(f"{value:>12.3f}" for value in scores.mean(0)))
        for place in (2, 3):
            for beside in (0, 1):
                above = int((scores[:, place] > scores[:, beside]).sum())
                print(f"{WAYS[place]} above {WAYS[beside]} on {above} of {len(scores)} splits")


if __name__ == "__main__":
    main()
