"""A Bayesian network by NUTS: the ground truth for variational inference and for Laplace on the same network.

The network has one hidden layer and is small enough for NUTS to sample its posterior. The weights have symmetries
(units can be permuted, and signs flipped), so chains disagree about weights. They agree about predictions, which is
what matters: `posterior.function_space(x)` gives the R-hat of predictions. Where it is near 1, the draws are the true
posterior predictive, and the approximations are compared with it: the error of their mean, and the width of their band
relative to the true one.

The metric is diagonal: chains sit in mirror images of one another, so a covariance of weights over chains describes
none of them.

python examples/ground_truth.py --out pictures
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from drawing import BLUE, GREY, INK, ORANGE, VERMILION, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor, nn

import priory as pr
from priory.core.streams import stream
from priory.posteriors import Chains, Posterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOISE, UNITS, EDGE = 0.3, 4, 3.0
PLACES = {"among the data": (0.8, 1.8), "in the gap": (-0.4, 0.4), "outside": (2.4, EDGE)}


def rows(count: int = 20) -> tuple[Tensor, Tensor]:
    """A wave with noise, half of x in (-2, -0.6) and half in (0.6, 2)."""
    generator = stream(0, "ground truth")
    x = 0.6 + 1.4 * torch.rand(count, generator=generator, dtype=torch.float64)
    x[: count // 2] *= -1
    return x[:, None], torch.sin(2 * x) + NOISE * torch.randn(count, generator=generator, dtype=torch.float64)


def along(count: int) -> Tensor:
    """Equally spaced inputs, (count, 1)."""
    return torch.linspace(-EDGE, EDGE, count, dtype=torch.float64)[:, None]


def model() -> pr.Model:
    """A network with one hidden layer and fixed initial weights; torch's global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, UNITS), nn.Tanh(), nn.Linear(UNITS, 1)).double()
    return pr.Model(net, pr.Gaussian(NOISE), prior=1.0)


def by_nuts(chains: int = 64, draws: int = 120, warmup: int = 100) -> Chains:
    """Sample the posterior by NUTS."""
    method = pr.NUTS(chains=chains, warmup=warmup, max_depth=7, metric="diagonal")
    posterior = pr.fit(model(), rows(), method, steps=draws, progress=False)
    assert isinstance(posterior, Chains)
    return posterior


def by_vi(steps: int = 3000) -> Posterior:
    """Fit a factorised Gaussian."""
    return pr.fit(model(), rows(), pr.MeanField(samples=4, learning_rate=0.02), steps=steps, progress=False)


def by_laplace(steps: int = 3000) -> Posterior:
    """Fit a full-covariance Laplace approximation, with the network linearised at the mode."""
    return pr.fit(model(), rows(), pr.Laplace(structure="full"), steps=steps, progress=False)


@dataclass(frozen=True)
class Distance:
    """Distance of an approximation's predictions from the true ones, over a range of inputs."""

    mean: float  # root mean square error of the mean, in true standard deviations
    width: float  # width of the epistemic band, relative to the true one


def distance(found: Posterior, truth: Posterior, low: float, high: float, samples: int = 1000) -> Distance:
    """The distance of the predictions between two inputs."""
    x = torch.linspace(low, high, 9, dtype=torch.float64)[:, None]
    ours, true = (posterior.predict(x, samples=samples) for posterior in (found, truth))
    off = (ours.mean - true.mean) / true.std
    return Distance(off.square().mean().sqrt().item(), (ours.epistemic / true.epistemic).sqrt().mean().item())


# The picture.


def draw(fits: dict[str, Posterior], folder: Path) -> Path:
    """Draw the R-hats of NUTS, and each approximation over the band of NUTS."""
    truth, *others = fits.items()
    figure, (agreement, *panels) = sheet(1, 1 + len(others), 14, 4.3, width_ratios=[0.7, 1, 1])
    assert isinstance(truth[1], Chains)
    draw_agreement(agreement, truth[1])
    figure.supxlabel("Bands: the curve's mean ± 2 standard deviations, without the noise of y.", fontsize=9, color=GREY)
    for ax, (name, posterior), colour in zip(panels, others, (BLUE, VERMILION), strict=True):
        width = distance(posterior, truth[1], *PLACES["outside"]).width
        dress(ax, f"{name}: outside, its band has {width:.1f} of the true width", "x", "y")
        band(ax, truth[1], truth[0], GREY, 0.35)
        band(ax, posterior, name, colour, 0.0)
        ax.scatter(*[part.reshape(-1).tolist() for part in rows()], s=14, color=INK, zorder=3)
        ax.set_ylim(-3.4, 3.4)
        legend(ax, "upper center", columns=2)
    return save(figure, folder, "ground_truth.png")


def draw_agreement(ax: Axes, truth: Chains) -> None:
    """Draw the R-hat of every weight beside that of predictions along x."""
    dress(ax, f"Do the {truth.num_chains} chains of NUTS agree?", "", "R-hat")
    found = {"each weight": truth.summary(), "each prediction": truth.function_space(along(UNITS * 3 + 1))}
    for place, (summary, colour) in enumerate(zip(found.values(), (ORANGE, BLUE), strict=True)):
        values = summary["r_hat"]
        ax.scatter((place + torch.linspace(-0.25, 0.25, len(values))).tolist(), values.tolist(), s=22, color=colour)
    ax.axhline(1.01, color=INK, linewidth=1, linestyle="--")
    ax.text(0.5, 1.015, "1.01", ha="center", fontsize=9, color=INK)
    ax.set_xticks(range(2), list(found))
    ax.set_xlim(-0.5, 1.5)


def band(ax: Axes, posterior: Posterior, name: str, colour: str, alpha: float) -> None:
    """Draw the mean curve with a band of two standard deviations, filled or with dashed edges."""
    x = along(160)
    prediction = posterior.predict(x, samples=1000)
    place, mean, width = x[:, 0].tolist(), prediction.mean, 2 * prediction.epistemic.sqrt()
    low, high = (mean - width).tolist(), (mean + width).tolist()
    ax.plot(place, mean.tolist(), color=colour, linewidth=1.8, label=name)
    if alpha:
        ax.fill_between(place, low, high, color=colour, alpha=alpha, linewidth=0)
        return
    for edge in (low, high):
        ax.plot(place, edge, color=colour, linewidth=1.3, linestyle="--")


def main(folder: Path) -> None:
    """Fit all three, print the agreement of the chains and the distances of the approximations, and draw them."""
    truth = by_nuts()
    functions = truth.function_space(along(17))
    print(
        f"NUTS: the largest R-hat is {float(truth.summary()['r_hat'].max()):.2f} of a weight, and "
        f"{float(functions['r_hat'].max()):.3f} of a prediction, of which there are "
        f"{float(functions['ess_bulk'].min()):,.0f} effective draws or more."
    )
    fits: dict[str, Posterior] = {"NUTS": truth, "VI": by_vi(), "Laplace": by_laplace()}
    print("Predictions: distance of the mean in true standard deviations, width of the weights' band over the true one")
    for name in ("VI", "Laplace"):
        found = {place: distance(fits[name], truth, *ends) for place, ends in PLACES.items()}
        print(f"{name:8s}", "   ".join(f"{place}: {d.mean:.2f}, {d.width:.2f}" for place, d in found.items()))
    draw(fits, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
