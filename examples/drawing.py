"""Shared helpers of the examples' pictures: style, saving, and the command-line option `--out`.

The style is that of `priory.plot`. Figures are made without pyplot, so no global state is changed.
"""

from __future__ import annotations

import argparse
import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from PIL import Image

import priory as pr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

COLOURS = pr.plot.COLOURS
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = COLOURS
INK, GREY = "#222222", "#8a8a8a"


def sheet(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """An empty figure of the given size in inches, and its panels row by row."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(panels.flat)


def dress(ax: Axes, title: str, xlabel: str = "", ylabel: str = "") -> Axes:
    """Set the title, the labels and a faint grid, and remove the frame above and on the right."""
    ax.set_title(title, loc="left", fontsize=11, color=INK)
    ax.set_xlabel(xlabel, fontsize=10)
    ax.set_ylabel(ylabel, fontsize=10)
    ax.tick_params(labelsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def legend(ax: Axes, place: Any = "best", columns: int = 1) -> None:
    """Add a legend without a box."""
    ax.legend(frameon=False, fontsize=9, loc=place, ncols=columns)


def ellipse(loc: Tensor, covariance: Tensor, deviations: float = 2.0) -> tuple[list[float], list[float]]:
    """The outline of a Gaussian in the plane, at the given number of standard deviations."""
    angle = torch.linspace(0, 2 * math.pi, 200, dtype=loc.dtype)
    circle = torch.stack([angle.cos(), angle.sin()])
    outline = loc[:, None] + deviations * torch.linalg.cholesky(covariance) @ circle
    return outline[0].tolist(), outline[1].tolist()


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write the figure, with identical bytes each time, and print its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    image = BytesIO()
    figure.savefig(image)
    # The pictures have few colours, so a palette needs a third of the bytes.
    Image.open(image).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"picture: {path}")
    return path


def folder_for_pictures(description: str | None) -> Path:
    """The folder given by `--out` on the command line, or the current folder."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="the folder that the pictures go to")
    return parser.parse_args().out
