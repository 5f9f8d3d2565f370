"""Laplace lowers the confidence of a trained classifier on images of unknown classes.

A network is trained by a plain PyTorch loop and then evaluated on images of classes without a label: digits 5 to 9
after training on 0 to 4 or, with --data, handwritten digits after training on clothes. Its softmax is confident about
most of them. Laplace puts a Gaussian around the trained weights without retraining, over the last layer and over all
layers. The evidence sets the width of the prior, so no out-of-distribution image is used. The picture shows the
confidence of each on known and unknown classes.

python examples/honest_classifier.py --out pictures
python examples/honest_classifier.py --out pictures --data DIR     # DIR holds fashion-mnist/*.gz and mnist/*.gz
"""

from __future__ import annotations

import argparse
import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from drawing import BLUE, VERMILION, dress, legend, save, sheet
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import priory as pr
from priory.core.streams import stream

DRAWS = 256


@dataclass(frozen=True)
class Problem:
    """Training images, test images, and images of unknown classes."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: Tensor
    epochs: int
    width: int
    decay: float  # weight decay of the training loop, which is the initial prior of Laplace

    @property
    def classes(self) -> int:
        return int(self.train[1].max()) + 1


@dataclass(frozen=True)
class Verdict:
    """Confidence on images of known classes (inside) and unknown classes (outside)."""

    accuracy: float
    nll: float
    inside: Tensor  # largest class probability of each image
    outside: Tensor

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor, away: Tensor) -> Verdict:
        right = (probs.argmax(-1) == labels).double().mean().item()
        nll = -probs.gather(1, labels[:, None]).log().mean().item()
        return cls(right, nll, probs.amax(-1), away.amax(-1))

    @property
    def auroc(self) -> float:
        """The probability that an image from inside has a higher confidence than one from outside."""
        above = (self.inside[:, None] > self.outside).double().mean()
        return (above + 0.5 * (self.inside[:, None] == self.outside).double().mean()).item()


def digits() -> Problem:
    """The 8 x 8 digits of scikit-learn: 0 to 4 inside, of which a third is for the test, 5 to 9 outside."""
    found = load_digits()
    x, y = torch.as_tensor(found.data, dtype=torch.float32) / 16, torch.as_tensor(found.target)  # pyright: ignore
    x = (x - x.mean()) / x.std()
    known = torch.where(y < 5)[0]
    order = known[torch.randperm(len(known), generator=stream(0, "digits"))]
    train, test = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    return Problem("digits 0 to 4, and 5 to 9", (x[train], y[train]), (x[test], y[test]), x[y >= 5], 60, 100, 3e-3)


def clothes(folder: Path, size: int = 60_000, asked: int = 2_000) -> Problem:
    """Fashion-MNIST inside, MNIST outside."""
    x, y = images(folder / "fashion-mnist", "train")
    test, labels = images(folder / "fashion-mnist", "t10k")
    away = images(folder / "mnist", "t10k")[0]
    train = (x[:size], y[:size])
    return Problem("clothes, and digits", train, (test[:asked], labels[:asked]), away[:asked], 10, 200, 1e-4)


def images(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images as rows of 784 standardised numbers, and their labels."""
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
        _, n, height, width = struct.unpack(">4I", file.read(16))
        x = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(n, height * width)
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as file:
        file.read(8)
        y = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    return (x.float() / 255 - 0.2860) / 0.3530, y


def trained(problem: Problem) -> nn.Module:
    """Train by a plain PyTorch loop; torch's global random state is not changed."""
    x, y = problem.train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        width = problem.width
        net = nn.Sequential(
            *[nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()],
            nn.Linear(width, problem.classes),
        )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=problem.decay)
    order = stream(0, "order")
    for _ in range(problem.epochs):
        for rows in torch.randperm(len(x), generator=order).split(64):
            optimizer.zero_grad()
            cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net.eval()


def verdicts(problem: Problem, net: nn.Module) -> dict[str, Verdict]:
    """Evaluate the trained network, and Laplace around its weights."""
    test, labels = problem.test
    with torch.no_grad():
        found = {"as trained": Verdict.of(net(test).softmax(-1), labels, net(problem.outside).softmax(-1))}
    model = pr.Model(net, pr.Categorical(), prior=pr.priors.weight_decay(problem.decay, len(problem.train[0])))
    for name, over in (("Laplace, last layer", "last"), ("Laplace, all layers", "all")):
        posterior = pr.fit(model, problem.train, pr.Laplace(over=over, at="network", tune="layer"), progress=False)
        probs, away = (posterior.predict(x, samples=DRAWS).probs for x in (test, problem.outside))
        found[name] = Verdict.of(probs, labels, away)
    return found


def draw(problem: Problem, found: dict[str, Verdict], folder: Path) -> Path:
    """Draw histograms of confidence, inside and outside."""
    figure, panels = sheet(1, len(found), 11, 3.4, sharey=True)
    for ax, (name, verdict) in zip(panels, found.items(), strict=True):
        dress(ax, name, "confidence", "images" if ax is panels[0] else "")
        for values, colour, label in ((verdict.inside, BLUE, "known"), (verdict.outside, VERMILION, "never seen")):
            text = f"{label}, {values.mean():.2f} on average"
            ax.hist(values.tolist(), bins=20, range=(0, 1), color=colour, alpha=0.6, label=text)
        ax.set_xlim(0, 1)
        legend(ax, "upper left")
    return save(figure, folder, "honest_classifier.png")


def main(folder: Path, data: Path | None = None) -> None:
    """Train, approximate, print and draw."""
    problem = digits() if data is None else clothes(data)
    found = verdicts(problem, trained(problem))
    print(f"Trained on the first of {problem.name}; the second it has never seen.")
    print(f"{'':<22}{'accuracy %':>11}{'NLL':>8}{'known':>8}{'never seen':>12}{'AUROC':>8}")
    for name, one in found.items():
        inside, outside = one.inside.mean(), one.outside.mean()
        print(f"{name:<22}{100 * one.accuracy:>11.2f}{one.nll:>8.3f}{inside:>8.3f}{outside:>12.3f}{one.auroc:>8.3f}")
    draw(problem, found, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="the folder that the picture goes to")
    parser.add_argument("--data", type=Path, help="the folder that holds fashion-mnist and mnist")
    options = parser.parse_args()
    main(options.out, options.data)
