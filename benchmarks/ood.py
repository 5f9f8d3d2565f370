"""Out-of-distribution images: confidence of an MLP trained on MNIST on Fashion-MNIST, before and after Laplace.

    python benchmarks/ood.py --data DIR                # DIR holds mnist/*.gz and fashion-mnist/*.gz
    python benchmarks/ood.py --data DIR --size 6000 --epochs 20 --test 2000     # a smaller one

One network, trained once by MAP; every other row is Laplace at its weights, which keeps what they predict at the mode.
Confidence is the largest probability of an image, "inside" on test images of MNIST, "outside" on those of
Fashion-MNIST. AUROC is the probability that an image from inside has the higher confidence. The prior is either
the one that the network was trained with, or has one factor per layer that the evidence chooses: no image from outside,
and no label of a test image, is used. The last column is accuracy minus MAP's, image by image, with its
standard error. The last lines say whether Laplace over all layers, tuned, lowers confidence outside by a third, and at
what price inside.

Cost: a training epoch is linear in size x width^2; the curvature costs about five of them, a prediction about thirty
forward passes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _images import auroc, mlp, read
from torch import Tensor

import priory as pr

BATCH, RATE = 128, 1e-3
CENTRE, SPREAD = 0.1307, 0.3081  # mean and deviation of MNIST's pixels, used to standardise all images
THIRD = 1 / 3


@dataclass(frozen=True)
class Scores:
    """What a posterior says of the images inside and outside."""

    right: Tensor  # (n,), one or zero
    nll: float
    inside: Tensor  # (n,), the largest probability
    outside: Tensor  # (m,)

    @classmethod
    def of(cls, posterior: Any, inside: tuple[Tensor, Tensor], outside: Tensor, draws: int) -> Scores:
        x, y = inside
        probs, away = (posterior.predict(images, samples=draws).probs for images in (x, outside))
        nll = -float(probs.gather(1, y[:, None]).clamp_min(1e-12).log().mean())
        return cls((probs.argmax(-1) == y).double(), nll, probs.amax(-1), away.amax(-1))

    @property
    def auroc(self) -> float:
        """The chance that an image from inside has the higher confidence, ties counting half."""
        return auroc(self.outside, self.inside)

    def line(self, first: Scores) -> str:
        gap, root = 100 * (self.right - first.right), len(self.right) ** 0.5
        return (
            f"{100 * self.right.mean():>10.2f} {self.nll:>8.4f} {self.inside.mean():>8.3f} {self.outside.mean():>8.3f} "
            f"{self.auroc:>7.3f} {gap.mean():>8.2f} +- {gap.std() / root:.2f}"
        )


def images(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images as rows of 784 numbers, and their labels."""
    pixels, labels = read(folder, name)
    return (pixels.flatten(1) - CENTRE) / SPREAD, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds mnist and fashion-mnist")
    parser.add_argument("--size", type=int, default=60_000, help="training images")
    parser.add_argument("--test", type=int, default=10_000, help="images from inside, and as many from outside")
    parser.add_argument("--width", type=int, default=200, help="of the two hidden layers")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--prior", type=float, default=1.0, help="standard deviation of a weight before the data")
    parser.add_argument("--draws", type=int, default=256, help="of the ten outputs, at each image")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore", pr.PrioryWarning)  # ten epochs of minibatches end near a mode, not at it
    torch.set_num_threads(options.threads)

    data = tuple(part[: options.size] for part in images(options.data / "mnist", "train"))
    test = images(options.data / "mnist", "t10k")
    inside = (test[0][: options.test], test[1][: options.test])
    outside = images(options.data / "fashion-mnist", "t10k")[0][: options.test]
    model = pr.Model(mlp(options.width), pr.Categorical(), prior=options.prior)

    def fit(method: Any, epochs: int | None = None) -> Any:
        return pr.fit(model, data, method, epochs=epochs, batch_size=BATCH, progress=False)

    print(f"MLP 784-{options.width}-{options.width}-10 on {len(data[0]):,} images, {options.epochs} epochs", end="; ")
    print(f"prior N(0, {options.prior}^2); {len(outside):,} images inside and outside")
    print(
        f"{'':<24} {'accuracy %':>10} {'NLL':>8} {'inside':>8} {'outside':>8} {'AUROC':>7} {'- MAP':>15} {'seconds':>8}"
    )
    found: dict[str, Scores] = {}
    mode: Any = None
    methods = {
        "MAP": pr.MAP(learning_rate=RATE),
        "Laplace last": pr.Laplace(over="last"),
        "Laplace last, tuned": pr.Laplace(over="last", tune="layer"),
        "Laplace all": pr.Laplace(),
        "Laplace all, tuned": pr.Laplace(tune="layer"),
    }
    for name, method in methods.items():
        began = time.perf_counter()
        if isinstance(method, pr.Laplace):
            posterior = fit(replace(method, at=mode))
        else:
            posterior = mode = fit(method, epochs=options.epochs)
        found[name] = Scores.of(posterior, inside, outside, options.draws)
        taken = time.perf_counter() - began
        print(f"{name:<24} {found[name].line(found['MAP'])} {taken:>8.0f}", flush=True)

    first, last = found["MAP"], found["Laplace all, tuned"]
    drop = 1 - float(last.outside.mean() / first.outside.mean())
    gap = 100 * (last.right - first.right)
    error = float(gap.std()) / len(gap) ** 0.5
    lost = float(gap.mean()) < -2 * error
    print(
        f"\nconfidence outside is {100 * drop:.0f} % lower: {'a third, as asked' if drop >= THIRD else 'NOT a third'}"
    )
    print(f"accuracy: {'LOWER by more than two standard errors' if lost else 'no loss within two standard errors'}")


if __name__ == "__main__":
    main()
