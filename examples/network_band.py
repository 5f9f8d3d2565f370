"""A network in one dimension with its uncertainty band.

Sixty rows of a sine with noise, on both sides of a gap. The band of the prediction has two parts: the noise, which more
data would not remove, and the epistemic uncertainty, which grows outside the data. In the gap it doesn't grow, a
limitation of a factorised q (Foong et al. 2020). Fresh rows among the data test the band there: nine in ten must lie
inside the 90 % interval.

python examples/network_band.py --out pictures
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, GREY, INK, VERMILION, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor, nn

import priory as pr
from priory.core.streams import stream
from priory.posteriors import Posterior
from priory.predictive import Prediction

NOISE = 0.15
LEVEL = 0.9


def truth(x: Tensor) -> Tensor:
    """The curve without its noise."""
    return torch.sin(2 * x)


def rows(count: int, name: str = "rows") -> tuple[Tensor, Tensor]:
    """The given number of rows, half of x in (-2, -0.6) and half in (0.6, 2)."""
    generator = stream(0, "network band", name)
    x = 0.6 + 1.4 * torch.rand(count, generator=generator)
    x[: count // 2] *= -1
    return x[:, None], truth(x) + NOISE * torch.randn(count, generator=generator)


def fit(steps: int = 4000) -> Posterior:
    """A network with thirty hidden units and fixed initial weights; torch's global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 30), nn.ReLU(), nn.Linear(30, 1))
    model = pr.Model(net, pr.Gaussian(NOISE), prior=1.0)
    return pr.fit(model, rows(60), pr.MeanField(samples=2), steps=steps, progress=False)


def inside(prediction: Prediction, y: Tensor, level: float = LEVEL) -> float:
    """The fraction of targets inside the interval of this level."""
    low, high = prediction.interval(level)
    return ((low <= y) & (y <= high)).double().mean().item()


def curves(posterior: Posterior, x: Tensor, count: int) -> Tensor:
    """Predictions of single networks drawn from q, (count, n)."""
    draws = posterior.sample(count, seed=1)
    hidden = torch.relu(x @ draws["0.weight"].mT + draws["0.bias"][:, None])  # (count, n, 30)
    return (hidden @ draws["2.weight"].mT + draws["2.bias"][:, None])[..., 0]


def draw(posterior: Posterior, folder: Path) -> Path:
    """Draw single networks on the left, their band on the right."""
    figure, (single, band) = sheet(1, 2, 11, 4.4, sharey=True)
    x = torch.linspace(-4, 4, 300)[:, None]
    dress(single, "Twelve networks drawn from q", "x", "y")
    for curve in curves(posterior, x, 12):
        single.plot(x[:, 0].tolist(), curve.tolist(), color=BLUE, linewidth=1, alpha=0.6)
    pr.plot.predictive(posterior.predict(x, samples=200), x, level=LEVEL, ax=band)
    band.set_ylabel("")
    for ax in (single, band):
        ax.plot(
            x[:, 0].tolist(), truth(x[:, 0]).tolist(), color=VERMILION, linewidth=1.3, linestyle="--", label="truth"
        )
        points = [part.reshape(-1).tolist() for part in rows(60)]
        ax.scatter(*points, s=14, color=INK, zorder=3, label="data")
        ax.axvspan(-0.6, 0.6, color=GREY, alpha=0.1, linewidth=0)
        ax.set_ylim(-4, 4)
        ax.set_xlim(-3.5, 3.5)
    legend(band, "upper right")
    return save(figure, folder, "network_band.png")


def main(folder: Path) -> None:
    """Fit, print the width of the band at several inputs, and draw it."""
    posterior = fit()
    x, y = rows(1000, "fresh")
    prediction = posterior.predict(x, samples=200)
    print(f"{100 * inside(prediction, y):.1f} % of 1000 fresh rows lie inside the {100 * LEVEL:g} % interval.")
    print("Standard deviation of the prediction, in all and for the weights alone; the noise is", NOISE)
    for name, place in (("among the data", 1.3), ("in the gap", 0.0), ("outside", 3.0), ("far outside", 4.0)):
        at = posterior.predict(torch.tensor([[place]]), samples=1000)
        print(f"{name:14s} x = {place:3.1f}   {at.std.item():.3f}   {at.epistemic.sqrt().item():.3f}")
    draw(posterior, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
