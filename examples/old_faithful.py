"""Old Faithful: eruptions and waits in two columns, the number of clusters, and missing values.

The rows are made as the geyser's are, from two Gaussians: a short eruption of about two minutes, and then a wait of
about 54; or a long one of more than four, and then a wait of about 80. Three questions:

    how many kinds?      variational EM for each number of components, compared by its bound, which has every constant
    what does EM do?     from a poor start, with two components on one side, iteration by iteration
    missing values?      four in ten waits are missing (NaN); EM marginalises them out, and dropping rows is biased

Most waits after short eruptions are missing here, so the complete rows come from another mixture. Whether a wait is
missing depends on the observed eruption alone (missing at random), which is all that EM requires.

python examples/old_faithful.py --out pictures
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from drawing import folder_for_pictures, save, sheet
from torch import Tensor

import priory as pr
from priory.core.streams import stream
from priory.latent import BayesianGaussianMixture, GaussianMixture
from priory.plot import em
from priory.posteriors import LatentPoint

ROWS, SHORT = 272, 0.36
MEANS = ((2.04, 54.5), (4.29, 80.0))
COVARIANCES = (((0.07, 0.44), (0.44, 33.7)), ((0.17, 0.94), (0.94, 36.0)))
LOST = (0.8, 0.2)  # fraction of missing waits after short and long eruptions
START = {"weights": [0.5, 0.5], "means": [[4.5, 95.0], [4.8, 65.0]], "covariances": [[[0.3, 0.0], [0.0, 60.0]]] * 2}
Theta = dict[str, Tensor]


def made(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Minutes of eruptions and waits, (n, 2), and which kind each is, 0 for short."""
    generator = stream(0, "old faithful")
    z = (torch.rand(rows, generator=generator) > SHORT).long()
    means, spread = (torch.tensor(t, dtype=torch.float64) for t in (MEANS, COVARIANCES))
    noise = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    return means[z] + (torch.linalg.cholesky(spread)[z] @ noise[..., None])[..., 0], z


def with_holes(y: Tensor) -> Tensor:
    """The rows with NaN for missing waits, which depend on the eruption alone."""
    chance = torch.tensor(LOST, dtype=torch.float64)[(y[:, 0] > 3).long()]
    lost = torch.rand(len(y), generator=stream(0, "holes"), dtype=torch.float64) < chance
    return torch.stack([y[:, 0], torch.where(lost, torch.nan, y[:, 1])], 1)


def chosen(y: Tensor, numbers: tuple[int, ...] = (1, 2, 3, 4, 5)) -> dict[int, Any]:
    """q(theta) for each number of components."""
    method = pr.VariationalEM(restarts=2, tolerance=1e-5)
    return {k: pr.fit(BayesianGaussianMixture(k), y, method, progress=False) for k in numbers}


def after(y: Tensor, iterations: int) -> LatentPoint:
    """The result of EM after the given number of iterations from the poor start."""
    posterior = pr.fit(GaussianMixture(2), y, pr.EM(start=START, tolerance=0.0), steps=iterations, progress=False)
    assert isinstance(posterior, LatentPoint)
    return posterior


def ordered(theta: Theta) -> Theta:
    """The parameters sorted with short eruptions first."""
    return {name: t[theta["means"][:, 0].argsort()] for name, t in theta.items()}


def draw(y: Tensor, fits: dict[int, Any], folder: Path) -> Path:
    """Draw EM at three iterations, and the bound for each number of components."""
    figure, panels = sheet(2, 2, 10.5, 7.6)
    for ax, iterations in zip(panels[:3], (1, 5, 40), strict=True):
        posterior = after(y, iterations)
        em.components(posterior, y, ax=ax)
        ax.set_title(f"EM, iteration {iterations}: {posterior.log_evidence.value:.1f} nats", loc="left", fontsize=11)
        ax.set_xlabel("eruption, minutes")
        ax.set_ylabel("wait, minutes")
        ax.set_xlim(1, 6)
        ax.set_ylim(35, 105)
    em.evidence(fits, ax=panels[3])
    return save(figure, folder, "old_faithful.png")


def told(name: str, theta: Theta) -> str:
    """The parameters in one line of text."""
    means = "   ".join(f"({eruption:.2f}, {wait:.1f})" for eruption, wait in theta["means"].tolist())
    return f"{name:<26}{float(theta['weights'][0]):.3f} short   means {means}"


def main(folder: Path) -> None:
    """Print the bounds, the fit and the fit with missing values, and draw the picture."""
    y, _ = made()
    fits = chosen(y)
    for k, posterior in fits.items():
        print(f"{k} components: log p(y) is at least {posterior.log_evidence_of_labels.value:.2f}")
    print(f"{'what made the rows':<26}{SHORT:.3f} short   means {'   '.join(f'({a:.2f}, {b:.1f})' for a, b in MEANS)}")
    print(told("EM", ordered(after(y, 200).mean)))
    holes = with_holes(y)
    print(f"{int(holes[:, 1].isnan().sum())} of {len(y)} waits are lost")
    print(told("EM, with holes", ordered(after(holes, 200).mean)))
    print(told("EM, whole rows alone", ordered(after(holes[~holes[:, 1].isnan()], 200).mean)))
    draw(y, fits, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
