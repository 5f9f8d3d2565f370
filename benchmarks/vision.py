"""Every method on Fashion-MNIST, with MNIST out of distribution: accuracy, calibration, cost, and shifted images.

    python benchmarks/vision.py --data DIR             # DIR holds fashion-mnist/*.gz and mnist/*.gz
    python benchmarks/vision.py --data DIR --rows 500 --epochs 1       # does everything run?

One network, an MLP 784-100-100-10, and one prior for all rows. The last tenth of the training images is held out: it
chooses among the settings that are printed below a row, and weighs the stack. Nothing is chosen on test images. Each
method has as many epochs as the plain loop, unless its row says what it adds; those that start at another's weights
(Laplace, LastLayer, SWAG, SGLD) pay for these too. What the search for settings takes is not counted.

ECE has 15 bins. The two AUROCs are the probability that an image of MNIST has the higher entropy, or the higher mutual
information of label and weights, than one of Fashion-MNIST. Standard errors are over test images; "- MAP" is the NLL
less that of MAP, image by image. Times are processor time of one thread: training over a plain loop with Adam, the
prediction of all test images over a forward pass of the plain network, both measured right before and after.

The second table and the picture are of test images that are rotated, noisy (the mean over Gaussian, shot, impulse and
speckle noise) or have less contrast, with the severities of MNIST-C. Ctrl-C ends the first table; the second and the
picture are then of the rows so far. Cost: about 100 plain trainings, and 100 forward passes of all test images per row.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _images import LEVELS, auroc, corrupted, mlp, read, rotated
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import priory as pr
from priory.core.streams import stream

WIDTH, BATCH = 100, 128
DRAWS = 20  # draws per prediction, divided among the members of an ensemble
MEMBERS, SNAPSHOTS = 5, 20
CENTRE, SPREAD = 0.2860, 0.3530  # mean and deviation of Fashion-MNIST's pixels, used to standardise all images
PACE, LEAST = 100, 0.1  # plain steps, and seconds of forward passes, that measure the current speed of the machine
CURVES = {
    "rotation, degrees": (0, 15, 30, 45, 60, 90, 120, 150, 180),
    "noise, severity": (0, 1, 3, 5),
    "contrast lost, severity": (0, 1, 3, 5),
}
SHOWN = {  # columns of the second table, by the place of a curve and the level on it
    "as is": (0, 0),
    "30 degrees": (0, 30),
    "90 degrees": (0, 90),
    "noise 3": (1, 3),
    "noise 5": (1, 5),
    "contrast 5": (2, 5),
}
DRAWN = ("MAP", "MeanField, cold", "Laplace, all layers", "Dropout", "SWAG", "SGHMC, cyclical", "Ensemble", "stack")


@dataclass(frozen=True)
class Rows:
    """Images as standardised rows of 784 numbers, and their labels."""

    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, pixels: Tensor, labels: Tensor) -> Rows:
        return cls((pixels.flatten(1) - CENTRE) / SPREAD, labels)

    def part(self, start: int, stop: int) -> Rows:
        return Rows(self.x[start:stop], self.y[start:stop])


@dataclass(frozen=True)
class Scores:
    """Of each image: whether the most probable label is right, the NLL, and the entropy of the label."""

    right: Tensor
    nll: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor) -> Scores:
        p = probs.double()
        nll = -p.gather(1, labels[:, None])[:, 0].clamp_min(1e-12).log()
        return cls((p.argmax(-1) == labels).double(), nll, entropy(p))

    @property
    def means(self) -> tuple[float, float, float]:
        return float(self.right.mean()), float(self.nll.mean()), float(self.entropy.mean())


def entropy(probs: Tensor) -> Tensor:
    return -torch.xlogy(probs, probs).sum(-1).double()


@dataclass(frozen=True)
class Fit:
    """What a method found, in which setting, and what that took in plain trainings."""

    predict: Callable[[Tensor], Any]  # .probs and .mutual_information
    posterior: Any
    took: float
    needs: tuple[str, ...] = ()  # rows whose fits it began with
    option: Any = None
    tried: str = ""


@dataclass
class Lab:
    """The images, and the fits so far; those that a row needs are made when it asks for them."""

    train: Rows
    held: Rows
    epochs: int
    seed: int
    fits: dict[str, Fit] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Fit:
        if name not in self.fits:
            self.fits[name] = METHODS[name](self)
        return self.fits[name]

    @property
    def batch(self) -> int:
        return min(BATCH, max(1, len(self.train.x) // 16))

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-len(self.train.x) // self.batch)

    # What is fitted.

    def plain(self, rate: float) -> Fit:
        net = mlp(WIDTH, self.seed)
        took, _ = self.timed(lambda: descend(net, self.train, rate, self.epochs, self.batch))
        return Fit(lambda x: certain(net, x), None, took)

    def fit(
        self,
        method: Any,
        *needs: str,
        prior: Any = None,
        epochs: int | None = None,
        temperature: float = 1.0,
    ) -> Fit:
        """A fit of the method; one that begins where another ended has a length of its own."""
        believed = self["MAP"].option if prior is None else prior
        model = pr.Model(mlp(WIDTH, self.seed), pr.Categorical(), prior=believed)
        data, options = (self.train.x, self.train.y), {"batch_size": self.batch, "seed": self.seed, "progress": False}
        options |= {"epochs": epochs or self.epochs, "temperature": temperature}
        took, posterior = self.timed(lambda: pr.fit(model, data, method, **options))
        return Fit(lambda x: posterior.predict(x, samples=DRAWS), posterior, took, needs)

    def stack(self, *needs: str) -> Fit:
        posteriors = [self[name].posterior for name in needs]
        took, mixture = self.timed(lambda: pr.stack(posteriors, (self.held.x, self.held.y), samples=DRAWS))
        weights = ", ".join(f"{a:.2f} {name}" for a, name in zip(mixture.weights.tolist(), needs, strict=True))
        return Fit(lambda x: mixture.predict(x, samples=DRAWS), mixture, took, needs, tried=f"weights: {weights}")

    def best(self, name: str, options: Iterable[Any], run: Callable[[Any], Fit]) -> Fit:
        """The fit with the lowest NLL of the held-out images; a setting that fails is left out, and said."""
        found: list[tuple[float, Fit]] = []
        said = []
        for option in options:
            try:
                fit = replace(run(option), option=option)
            except pr.DivergedError:
                said.append(f"{option}: diverged")
                continue
            nll = Scores.of(fit.predict(self.held.x).probs, self.held.y).means[1]
            found.append((nll, fit))
            said.append(f"{option}: {nll:.4f}")
        if not found:
            raise pr.DivergedError(", ".join(said))
        _, chosen = min(found, key=lambda pair: pair[0])
        return replace(chosen, tried=f"NLL of held-out images by {name}: {', '.join(said)}")

    # What it costs.

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """The processor time of some work over that of the plain loop, and what it returns."""
        some = self.train.part(0, PACE * self.batch)
        pace = lambda: seconds(lambda: descend(mlp(WIDTH), some, 1e-3, 1, self.batch))[0]  # noqa: E731
        before = pace()
        taken, found = seconds(work)
        step = 0.5 * (before + pace()) / -(-len(some.x) // self.batch)
        return taken / (self.epochs * self.steps * step), found

    def cost(self, name: str) -> float:
        """Of a row in plain trainings, with all that it began with, each once."""
        needed, open_ = set(), [name]
        while open_:
            needed.add(open_.pop())
            open_ = [n for row in needed for n in self[row].needs if n not in needed]
        return sum(self[row].took for row in needed)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of some work, and what it returns."""
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


def repeated(work: Callable[[], Any]) -> tuple[float, Any]:
    """The median time of some work, done as often as it takes to be measured, and what it returns."""
    taken, found = [], None
    while sum(taken) < LEAST:
        once, found = seconds(work)
        taken.append(once)
    return statistics.median(taken), found


def asked(fit: Fit, x: Tensor) -> Any:
    """A prediction whose probabilities are worked out."""
    prediction = fit.predict(x)
    assert prediction.probs.shape == (len(x), 10)
    return prediction


def descend(net: nn.Module, rows: Rows, rate: float, epochs: int, batch: int) -> None:
    """Plain PyTorch: what most people run."""
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(rows.x) // batch))
    for epoch in range(epochs):
        order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(epoch))
        for part in order.split(batch):
            optimizer.zero_grad()
            cross_entropy(net(rows.x[part]), rows.y[part]).backward()
            optimizer.step()
            cosine.step()


def certain(net: nn.Module, x: Tensor) -> Any:
    """What a plain network predicts: it has no weights to disagree."""
    with torch.no_grad():
        return SimpleNamespace(probs=net(x).softmax(-1), mutual_information=torch.zeros(len(x)))


# The methods.


def learnt_dropout(lab: Lab) -> Fit:
    return lab.fit(pr.Dropout(rate="learn", learning_rate=lab["plain"].option))


def gaussian_dropout(lab: Lab) -> Fit:
    return lab.fit(pr.Dropout(rate="learn", noise="gaussian", learning_rate=lab["plain"].option))


def swag(lab: Lab, rate: float, start: Any) -> pr.SWAG:
    every = max(1, lab.steps // 4)
    return pr.SWAG(snapshots=SNAPSHOTS, rank=SNAPSHOTS, every=every, learning_rate=rate, start=start)


def sgld(lab: Lab, rate: float) -> Fit:
    kept = max(1, lab.epochs * lab.steps // 2 // DRAWS)
    return lab.fit(pr.SGLD(rate, chains=1, thin=kept, start=lab["MAP"].posterior), "MAP")


def sghmc(lab: Lab, rate: float) -> Fit:
    cycles, epochs = pr.Cyclical(cycles=4, exploring=0.8), 2 * lab.epochs
    kept = max(1, epochs * lab.steps // 5 // DRAWS)
    return lab.fit(pr.SGHMC(rate, chains=1, thin=kept, schedule=cycles), epochs=epochs)


def natural(lab: Lab, clip: float) -> Fit:
    """Steps and first scales are in standard deviations of the prior."""
    method = pr.NaturalGradient(learning_rate=0.5, hessian_rate=1e-4, clip=clip, initial_scale=3 * clip)
    return lab.fit(method)


def variational(lab: Lab, method: Any) -> Fit:
    """At the rate of MeanField; the estimator of their own defaults is too noisy for so many weights and few steps."""
    return lab.fit(replace(method, learning_rate=lab["MeanField"].option, estimator="pathwise"))


RATES = (1e-3, 3e-3)
METHODS: dict[str, Callable[[Lab], Fit]] = {
    "MAP": lambda lab: lab.best(
        "prior",
        (0.1, 0.3, 1.0),
        lambda prior: lab.fit(pr.MAP(lab["plain"].option), prior=prior),
    ),
    "plain": lambda lab: lab.best("rate", RATES, lab.plain),
    "Laplace, all layers": lambda lab: lab.fit(pr.Laplace(at=lab["MAP"].posterior, tune="layer"), "MAP"),
    "Laplace, diagonal": lambda lab: lab.fit(pr.Laplace("diag", at=lab["MAP"].posterior, tune="layer"), "MAP"),
    "Laplace, last layer": lambda lab: lab.fit(pr.Laplace(over="last", at=lab["MAP"].posterior, tune="layer"), "MAP"),
    "LastLayer": lambda lab: lab.fit(pr.LastLayer(at=lab["MAP"].posterior), "MAP"),
    "MeanField": lambda lab: lab.best("rate", RATES, lambda rate: lab.fit(pr.MeanField(learning_rate=rate))),
    "MeanField, cold": lambda lab: lab.best(
        "T",
        (0.01, 0.1),
        lambda t: lab.fit(pr.MeanField(learning_rate=lab["MeanField"].option), temperature=t),
    ),
    "NaturalGradient": lambda lab: lab.best("clip", (0.005, 0.015), lambda clip: natural(lab, clip)),
    "Dropout": lambda lab: lab.best(
        "rate", (0.05, 0.2), lambda p: lab.fit(pr.Dropout(rate=p, learning_rate=lab["plain"].option))
    ),
    "Dropout, learnt": learnt_dropout,
    "Dropout, Gaussian, learnt": gaussian_dropout,
    "SWAG": lambda lab: lab.best(
        "rate", (1e-3, 3e-3), lambda rate: lab.fit(swag(lab, rate, lab["MAP"].posterior), "MAP")
    ),
    "Ensemble": lambda lab: lab.fit(pr.Ensemble(pr.MAP(lab["plain"].option), MEMBERS)),
    "Ensemble, anchored": lambda lab: lab.fit(pr.Ensemble(pr.MAP(lab["plain"].option), MEMBERS, anchored=True)),
    "Ensemble of SWAG": lambda lab: lab.fit(
        pr.Ensemble(swag(lab, lab["SWAG"].option, lab["Ensemble"].posterior), MEMBERS), "Ensemble"
    ),
    "Ensemble of Laplace": lambda lab: lab.fit(
        pr.Ensemble(pr.Laplace(at=lab["Ensemble"].posterior, tune="layer"), MEMBERS), "Ensemble"
    ),
    "SGLD": lambda lab: lab.best("rate", (0.01, 0.05), lambda rate: sgld(lab, rate)),
    "SGHMC, cyclical": lambda lab: lab.best("rate", (0.03, 0.1), lambda rate: sghmc(lab, rate)),
    "stack": lambda lab: lab.stack(
        "Laplace, all layers", "MeanField, cold", "NaturalGradient", "Dropout", "SWAG", "SGHMC, cyclical"
    ),
    "LowRank": lambda lab: variational(lab, pr.LowRank(rank=5)),
    "MixtureOfGaussians": lambda lab: variational(lab, pr.MixtureOfGaussians(components=2, samples=2)),
    "Flow": lambda lab: variational(lab, pr.Flow(layers=2, hidden=8, samples=1)),
}


# What they are worth.


@dataclass(frozen=True)
class Result:
    """A row of the first table, and the curves of the picture."""

    inside: Scores
    ece: float
    entropy: float  # AUROCs
    information: float | None
    training: float
    prediction: float
    curves: dict[str, dict[int, tuple[float, float, float]]]

    def line(self, first: Result | None) -> str:
        root = len(self.inside.right) ** 0.5
        right, nll = 100 * self.inside.right, self.inside.nll
        gap = f"{'':>17}"
        if first is not None and first is not self:
            less = nll - first.inside.nll
            gap = f"{less.mean():>8.4f} ± {less.std() / root:.4f}"
        information = "-" if self.information is None else f"{self.information:.3f}"
        return (
            f"{right.mean():>6.2f} ± {right.std() / root:.2f} {nll.mean():>7.4f} ± {nll.std() / root:.4f} {gap} "
            f"{self.ece:>6.3f} {self.entropy:>6.3f} {information:>6} {self.training:>7.2f} {self.prediction:>7.1f}"
        )


HEAD = (
    f"{'':<26} {'accuracy %':>13} {'NLL':>16} {'- MAP':>17} {'ECE':>6} {'AUROC':>6} {'by MI':>6} {'train':>7} "
    f"{'predict':>7}"
)


def result(lab: Lab, name: str, test: Rows, outside: Tensor, shifted: dict[str, dict[int, Rows]]) -> Result:
    fit = lab[name]
    forward = mlp(WIDTH)
    before, _ = repeated(lambda: certain(forward, test.x))
    taken, here = repeated(lambda: asked(fit, test.x))
    after, _ = repeated(lambda: certain(forward, test.x))
    price, there = taken / (0.5 * (before + after)), fit.predict(outside)
    inside = Scores.of(here.probs, test.y)
    ece = pr.evaluate.expected_calibration_error(here.probs, test.y)
    known, unknown = here.mutual_information.double(), there.mutual_information.double()
    information = auroc(known, unknown) if float(unknown.max()) > 1e-5 else None  # a point has none but by rounding
    curves = {
        along: {level: Scores.of(fit.predict(rows.x).probs, rows.y).means for level, rows in levels.items()}
        for along, levels in shifted.items()
    }
    return Result(inside, ece, auroc(inside.entropy, entropy(there.probs)), information, lab.cost(name), price, curves)


def shift(pixels: Tensor, labels: Tensor, along: str, level: int, seed: int) -> Rows:
    """Test images, shifted; of noise every kind."""
    if along.startswith("rotation"):
        return Rows.of(rotated(pixels, level), labels)
    lost = along.startswith("contrast")
    kinds = [kind for kind in LEVELS if (kind == "contrast") is lost] if level else ["contrast"]
    parts = [corrupted(pixels, kind, level, stream(seed, kind, level)) for kind in kinds]
    return Rows.of(torch.cat(parts), labels.repeat(len(kinds)))


def table_of_shifts(found: dict[str, Result]) -> None:
    names = list(CURVES)
    print("\nShifted test images: accuracy %, NLL, mean entropy")
    print(f"{'':<26}" + "".join(f"{title:>17}" for title in SHOWN))
    for name, row in found.items():
        cells = (row.curves[names[place]][level] for place, level in SHOWN.values())
        print(f"{name:<26}" + "".join(f"  {100 * a:>4.1f} {nll:>5.2f} {h:>4.2f}" for a, nll, h in cells))


def picture(found: dict[str, Result], folder: Path) -> Path:
    """A panel for each shift and score, one line per method."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(11, 9.5), dpi=100, layout="constrained")
    panels = figure.subplots(len(CURVES), 3)
    colours = [*pr.plot.COLOURS, "#222222", "#8a8a8a"]
    for row, along in enumerate(CURVES):
        for column, title in enumerate(("accuracy", "NLL", "mean entropy")):
            ax = panels[row][column]
            for colour, name in zip(colours, DRAWN, strict=True):
                if name in found:
                    curve = found[name].curves[along]
                    values = [scores[column] for scores in curve.values()]
                    ax.plot(list(curve), values, color=colour, marker="o", markersize=3, linewidth=1.4, label=name)
            ax.set_xlabel(along)
            ax.set_title(title, loc="left", fontsize=11)
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(color="#e6e6e6", linewidth=0.8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "vision.png"
    drawn = BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
        path, optimize=True
    )  # a third as large
    return path


def main(arguments: list[str] | None = None) -> dict[str, Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds fashion-mnist and mnist")
    parser.add_argument("--rows", type=int, default=60_000, help="training images, and at most as many test images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="the folder that the picture goes to")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", pr.PrioryWarning)  # ten epochs of minibatches end near a mode, not at it
    torch.set_num_threads(1)

    rows, kept = options.rows, options.rows * 9 // 10
    images = Rows.of(*(part[:rows] for part in read(options.data / "fashion-mnist", "train")))
    pixels, labels = (part[:rows] for part in read(options.data / "fashion-mnist", "t10k"))
    outside = Rows.of(*read(options.data / "mnist", "t10k")).x[:rows]
    few = min(1_000, rows // 5)
    shifted = {
        along: {level: shift(pixels[:few], labels[:few], along, level, options.seed) for level in levels}
        for along, levels in CURVES.items()
    }
    lab = Lab(images.part(0, kept), images.part(kept, rows), options.epochs, options.seed)
    test, found = Rows.of(pixels, labels), {}
    size = sum(p.numel() for p in mlp(WIDTH).parameters())
    print(f"MLP 784-{WIDTH}-{WIDTH}-10, {size:,} weights; {kept:,} images to fit, {rows - kept:,} held out,", end=" ")
    print(f"{len(labels):,} to test; {options.epochs} epochs, seed {options.seed}\n{HEAD}", flush=True)
    descend(mlp(WIDTH), lab.held, 1e-3, 1, lab.batch)  # warm-up: the first step loads code, and is not timed
    for name in options.methods:
        try:
            found[name] = result(lab, name, test, outside, shifted)
        except KeyboardInterrupt:
            break
        except Exception as error:  # a row that fails is reported, and the others continue
            print(f"{name:<26} failed: {type(error).__name__}: {error}", flush=True)
            continue
        print(f"{name:<26} {found[name].line(found.get('MAP'))}", flush=True)
        if lab[name].tried:
            print(f"    {lab[name].tried}", flush=True)
    table_of_shifts(found)
    print(f"\npicture: {picture(found, options.out)}")
    return found


if __name__ == "__main__":
    main()
