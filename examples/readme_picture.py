"""The picture of the README: the same network fitted by MAP and by MeanField to data with a gap.

python examples/readme_picture.py                         writes docs/images/demo.png
python examples/readme_picture.py picture.png --steps 500
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import priory as pr

NOISE = 0.12
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "demo.png"


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """A curve with noise, observed on two intervals with a gap between them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.linspace(-2.2, -1.0, 35), torch.linspace(0.8, 2.0, 35)])[:, None]
    y = 0.8 * torch.sin(2.2 * x[:, 0]) + 0.25 * x[:, 0] + NOISE * torch.randn(len(x), generator=generator)
    return x, y


def network() -> nn.Module:
    """A network with two hidden layers and fixed initial weights; torch's global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))


def draw(path: Path, steps: int = 10_000) -> Path:
    """Fit both methods and draw them side by side."""
    x, y = data()
    grid = torch.linspace(-3.2, 3.2, 400)[:, None]
    model = pr.Model(network(), pr.Gaussian(NOISE), prior=0.5)
    figure = Figure(figsize=(14, 6), dpi=100, layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    methods = {"MAP: one best network": pr.MAP(), "MeanField: a posterior over networks": pr.MeanField()}
    for ax, (title, method) in zip(panels, methods.items(), strict=True):
        posterior = pr.fit(model, (x, y), method, steps=steps, progress=False)
        pr.plot.predictive(posterior.predict(grid, samples=200), grid, ax=ax)
        ax.scatter(x[:, 0].tolist(), y.tolist(), s=16, color="#222222", zorder=3, label="data")
        ax.set_title(title, loc="left", fontsize=17)
        ax.set_xlabel("x", fontsize=14)
        ax.set_ylabel("y" if ax is panels[0] else "", fontsize=14)
        ax.tick_params(labelsize=12)
    panels[0].set_ylim(-1.75, 1.75)
    panels[0].get_legend().remove()
    panels[1].legend(frameon=False, fontsize=13, loc="lower right")
    figure.savefig(path, metadata={"Software": None})
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    print(draw(arguments.path, arguments.steps))
