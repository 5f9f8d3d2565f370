"""Fashion-MNIST with LeNet: Adam, natural gradients and mean-field inference in the same number of epochs.

    python benchmarks/fashion.py --data DIR            # DIR holds fashion-mnist/*.gz; about 15 minutes on two cores
    python benchmarks/fashion.py --data DIR --size 6000 --epochs 2     # a smaller one

Rows of the first table train on all images with a cosine schedule; the temperature of the last mean-field row is the
one with the lowest negative log-likelihood on a tenth of the training images, held out from the fits that choose it.
Rows of the second table train on a sixth of the images for six times as many epochs, at a constant rate, where Adam
overfits. Adam's rate of the first table and the prior, the steps and the first scale of natural gradients were chosen
on the last 6,000 training images, among two and about twenty settings. Standard errors are over the test images; the
last column is the difference in NLL to the first row, image by image.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _images import read
from torch import Tensor, nn

import priory as pr

BATCH, DRAWS, SEED = 128, 16, 0
TEMPERATURES = (0.01, 0.1)


@dataclass(frozen=True)
class Images:
    """Images as (n, 1, 28, 28), standardised, and their labels."""

    x: Tensor
    y: Tensor

    def first(self, n: int) -> Images:
        return Images(self.x[:n], self.y[:n])

    def after(self, n: int) -> Images:
        return Images(self.x[n:], self.y[n:])


def load(folder: Path, name: str) -> Images:
    pixels, labels = read(folder, name)
    return Images((pixels[:, None] - 0.2860) / 0.3530, labels)


def lenet() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        *[nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
        *[nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)],
    )


def adam(images: Images, epochs: int, schedule: str, rate: float) -> nn.Module:
    """Plain PyTorch: what most people run."""
    net = lenet()
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    steps = epochs * -(-len(images.x) // BATCH)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(epochs):
        order = torch.randperm(len(images.x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images.x[rows]), images.y[rows]).backward()
            optimizer.step()
            if schedule == "cosine":
                cosine.step()
    return net.eval()


def plain(net: nn.Module, test: Images) -> Tensor:
    with torch.no_grad():
        return torch.cat([net(x) for x in test.x.split(1000)]).log_softmax(-1)


def fitted(images: Images, epochs: int, method: Any, temperature: float = 1.0) -> Any:
    prior = 0.3 if isinstance(method, pr.NaturalGradient) else "glorot"
    model = pr.Model(lenet(), pr.Categorical(), prior=prior)
    data = (images.x, images.y)
    return pr.fit(model, data, method, epochs=epochs, batch_size=BATCH, temperature=temperature, seed=SEED)


def natural(learning_rate: float, clip: float, schedule: str) -> pr.NaturalGradient:
    rates = {"learning_rate": learning_rate, "hessian_rate": 1e-4, "schedule": schedule}
    return pr.NaturalGradient(clip=clip, initial_scale=0.05, **rates)


def averaged(posterior: Any, test: Images) -> Tensor:
    return posterior.predict(test.x, samples=DRAWS).probs.log()


def scores(log_probs: Tensor, test: Images) -> tuple[Tensor, Tensor]:
    """Right or wrong, and minus the log probability of the label, image by image."""
    right = (log_probs.argmax(-1) == test.y).double()
    return right, -log_probs.gather(1, test.y[:, None])[:, 0].double()


def table(title: str, rows: dict[str, Any], test: Images) -> None:
    print(f"\n{title}\n{'':<34} {'accuracy %':>14} {'NLL':>16} {'NLL - first':>18} {'seconds':>8}", flush=True)
    first: Tensor | None = None
    for name, run in rows.items():
        began = time.perf_counter()
        right, nll = scores(run(), test)
        taken, root = time.perf_counter() - began, len(nll) ** 0.5
        first = nll if first is None else first
        gap = nll - first
        accuracy = f"{100 * right.mean():>7.2f} +- {100 * right.std() / root:.2f}"
        paired = f"{gap.mean():>9.4f} +- {gap.std() / root:.4f}"
        print(f"{name:<34} {accuracy} {nll.mean():>8.4f} +- {nll.std() / root:.4f} {paired} {taken:>8.0f}", flush=True)


def chosen_temperature(images: Images, epochs: int) -> float:
    """The temperature with the lowest NLL on held-out training images."""
    kept = len(images.x) * 9 // 10
    train, held = images.first(kept), images.after(kept)
    found = {}
    for temperature in (*TEMPERATURES, 1.0):
        posterior = fitted(train, epochs, pr.MeanField(learning_rate=2e-3), temperature)
        found[temperature] = float(scores(averaged(posterior, held), held)[1].mean())
    print("validation NLL by temperature:", {t: round(v, 4) for t, v in found.items()}, flush=True)
    return min(found, key=lambda t: found[t])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds fashion-mnist")
    parser.add_argument("--size", type=int, default=60_000, help="training images")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(2)
    folder = options.data / "fashion-mnist"
    images, test = load(folder, "train").first(options.size), load(folder, "t10k")
    epochs, few = options.epochs, images.first(options.size // 6)
    t = chosen_temperature(images, epochs)
    mean_field = pr.MeanField(learning_rate=2e-3)
    quick, slow = natural(0.5, 0.015, "cosine"), natural(0.05, 0.1, "constant")
    table(
        f"{epochs} epochs of {len(images.x):,} images, cosine schedule",
        {
            "Adam, 3e-3": lambda: plain(adam(images, epochs, "cosine", 3e-3), test),
            "priory NaturalGradient": lambda: averaged(fitted(images, epochs, quick), test),
            "priory MeanField, T = 1": lambda: averaged(fitted(images, epochs, mean_field), test),
            f"priory MeanField, T = {t} (validation)": lambda: averaged(fitted(images, epochs, mean_field, t), test),
        },
        test,
    )
    longer = 6 * epochs
    table(
        f"{longer} epochs of {len(few.x):,} images, constant rate",
        {
            "Adam, 1e-3": lambda: plain(adam(few, longer, "constant", 1e-3), test),
            "priory NaturalGradient": lambda: averaged(fitted(few, longer, slow), test),
        },
        test,
    )


if __name__ == "__main__":
    main()
