"""Calibration of nine methods away from the data, on a small regression with a gap.

The table has four columns and 160 rows: the target is a wave along the first column and linear in two others; the
fourth has no effect. No row has its first column in the gap (-0.7, 0.7) or beyond 2. The network, its prior and the
noise are the same for all methods. Fresh rows are of three kinds: among the data, in the gap, and beyond. For a
calibrated method, the 90 % intervals contain 90 % of the rows of each kind.

Two more methods are printed. The first is an ensemble with randomised prior functions (Osband et al. 2018), f_w(x) +
f_0(x), where each member has its own frozen random network f_0 and its own noise on the targets; for a model that is
linear in its weights it equals the anchored ensemble. The second is the stack of all nine.

python examples/knows_what_it_does_not.py --out pictures
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from drawing import BLUE, GREY, INK, VERMILION, dress, folder_for_pictures, save, sheet
from torch import Tensor, nn

import priory as pr
from priory.core.streams import stream
from priory.posteriors import Posterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOISE = 0.2
COLUMNS = 4
KINDS = ("among", "gap", "beyond")
LEVEL = 0.9
BATCH = 32

Rows = tuple[Tensor, Tensor]
Fits = dict[str, Posterior]


@dataclass(frozen=True)
class Effort:
    """Lengths of the fits: steps of an optimiser, draws per chain, members of an ensemble."""

    steps: int = 1200
    draws: int = 40
    chains: int = 8
    members: int = 8


# The rows.


def truth(X: Tensor) -> Tensor:
    """The mean of the target."""
    return 1.2 * torch.sin(1.6 * X[:, 0]) + others(X)


def others(X: Tensor) -> Tensor:
    """The contribution of the other columns to the mean of the target."""
    return 0.5 * X[:, 1] - 0.3 * X[:, 2]


def rows(kind: str, count: int, seed: int) -> Rows:
    """Rows whose first column lies among the data, in the gap, or beyond, on either side."""
    generator = stream(seed, "knows", kind)
    low, high = {"among": (0.7, 2.0), "gap": (0.0, 0.6), "beyond": (2.3, 3.2)}[kind]
    X = torch.randn(count, COLUMNS, generator=generator, dtype=torch.float64)
    side = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    X[:, 0] = side * (low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64))
    return X, truth(X) + NOISE * torch.randn(count, generator=generator, dtype=torch.float64)


def train() -> Rows:
    """The rows that are fitted."""
    return rows("among", 160, seed=0)


# The methods.


def network(seed: int = 0) -> nn.Sequential:
    """A network with one hidden layer, initialised from a seed; torch's global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(COLUMNS, 20), nn.Tanh(), nn.Linear(20, 1)).double()


def model_of(net: nn.Module) -> pr.Model:
    """The network with a known noise, and normal priors of standard deviation 1 and, behind the units, 0.5."""
    return pr.Model(net, pr.Gaussian(NOISE), prior={"0.*": 1.0, "*": 0.5})


def fits(effort: Effort) -> Fits:
    """The nine methods; the sampler comes last, as its only error is its finite length, and is the reference."""
    data, net, climb = train(), network(), pr.MAP()
    mode = pr.fit(model_of(net), data, climb, steps=effort.steps, batch_size=BATCH, progress=False)
    methods = {
        "Dropout": pr.Dropout(rate="learn"),
        "SWAG": pr.SWAG(start=mode),
        "Ensemble": pr.Ensemble(climb, effort.members),
        "anchored Ensemble": pr.Ensemble(climb, effort.members, anchored=True),
        "LastLayer": pr.LastLayer(at=mode),
        "Laplace": pr.Laplace(structure="full", at=mode),
        "MeanField": pr.MeanField(),
        "NUTS": pr.NUTS(chains=effort.chains, warmup=2 * effort.draws, max_depth=6),
    }
    lengths = {"NUTS": effort.draws, "SWAG": None, "LastLayer": None, "Laplace": None}
    found: Fits = {"MAP": mode}
    for name, method in methods.items():
        steps = lengths.get(name, effort.steps)
        found[name] = pr.fit(model_of(net), data, method, steps=steps, batch_size=BATCH, progress=False)
    return found


def randomised(data: Rows, members: int, steps: int) -> Posterior:
    """An ensemble with randomised prior functions: each member has its own start, fixed function and noise."""
    method = pr.Ensemble(pr.MAP(), members, anchored="function")
    return pr.fit(model_of(network()), data, method, steps=steps, batch_size=BATCH, progress=False)


# Scores.


def scores(posterior: Posterior, kind: str, count: int = 400) -> tuple[float, float]:
    """The mean log density of fresh rows of a kind, and the fraction inside their 90 % intervals."""
    X, y = rows(kind, count, seed=1)
    prediction = posterior.predict(X, samples=200)
    low, high = prediction.interval(LEVEL)
    return float(prediction.log_prob(y).mean()), float(((low <= y) & (y <= high)).double().mean())


def table(found: Fits) -> dict[str, dict[str, tuple[float, float]]]:
    """Scores of every method at every kind of rows."""
    return {name: {kind: scores(posterior, kind) for kind in KINDS} for name, posterior in found.items()}


# The picture.


def draw(found: Fits, folder: Path) -> Path:
    """Draw one panel per method: the mean and the 90 % band along the first column, with the other columns at zero."""
    figure, panels = sheet(3, 3, 12, 9, sharex=True, sharey=True)
    for ax, (name, posterior) in zip(panels, found.items(), strict=True):
        inside = [scores(posterior, kind)[1] for kind in KINDS]
        dress(ax, f"{name}: {', '.join(f'{share:.0%}' for share in inside)}")
        band(ax, posterior)
    figure.supxlabel(
        "first column, the others at 0; titles: fresh rows inside of 90 % intervals, among the data, in the gap, beyond"
    )
    figure.supylabel("target")
    return save(figure, folder, "knows_what_it_does_not.png")


def band(ax: Axes, posterior: Posterior) -> None:
    """Draw one panel; the contribution of the other columns is subtracted from the rows."""
    X = torch.zeros(120, COLUMNS, dtype=torch.float64)
    X[:, 0] = torch.linspace(-3.2, 3.2, len(X), dtype=torch.float64)
    prediction = posterior.predict(X, samples=400)
    low, high = prediction.interval(LEVEL)
    x = X[:, 0].tolist()
    ax.fill_between(x, low.tolist(), high.tolist(), color=BLUE, alpha=0.2, linewidth=0)
    ax.plot(x, prediction.mean.tolist(), color=BLUE, linewidth=1.8)
    ax.plot(x, truth(X).tolist(), color=VERMILION, linewidth=1.2, linestyle="--")
    seen, y = train()
    ax.scatter(seen[:, 0].tolist(), (y - others(seen)).tolist(), s=5, color=INK, alpha=0.6, zorder=3)
    ax.axvspan(-0.7, 0.7, color=GREY, alpha=0.1, linewidth=0)
    ax.set_ylim(-2.6, 2.6)


def main(folder: Path) -> None:
    """Fit all methods, print their scores, and draw the nine."""
    effort = Effort()
    found = fits(effort)
    held = rows("among", 100, seed=2)
    more: Fits = {
        "randomised priors": randomised(train(), effort.members, effort.steps),
        "stack of the nine": pr.stack(list(found.values()), held),
    }
    print(f"{'':18s}  log density of a row          inside of 90 % intervals")
    print(f"{'':18s} {'':s}{' '.join(f'{kind:>8s}' for kind in (*KINDS, *KINDS))}")
    for name, row in table({**found, **more}).items():
        numbers = [f"{row[kind][0]:8.2f}" for kind in KINDS] + [f"{row[kind][1]:8.2f}" for kind in KINDS]
        print(f"{name:18s} {' '.join(numbers)}")
    weights = more["stack of the nine"].weights  # pyright: ignore[reportAttributeAccessIssue] - a Mixture
    print("stack:", ", ".join(f"{a:.2f} {name}" for name, a in zip(found, weights.tolist(), strict=True) if a > 0.005))
    draw(found, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
