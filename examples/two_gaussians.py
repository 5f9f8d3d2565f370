"""Two Gaussians, with z observed and then hidden: complete-data maximum likelihood, EM, and what EM does in a picture.

    p(z) = pi^z (1 - pi)^(1-z),      p(y | z) = N(y; mu_z, sigma_z^2)

The rows are like waiting times of a geyser, in minutes: some are short, some long. If z is recorded, maximum likelihood
is two means, two variances and a weight. If it is not, EM repeats the same computation with the probability of each z
in its place.

The picture is the lectures' "visual explanation". Seen as a function of one mean, the log-likelihood is a curve that
has no closed maximum. At theta_t the E-step makes a lower bound that touches it there,

    log p(y | theta)  >=  Q(theta, theta_t) + H(q_t),      equal at theta = theta_t

and the M-step goes to the bound's maximum, where the curve is at least as high as the bound, so higher than before.

python examples/two_gaussians.py --out pictures
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, GREEN, INK, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor
from torch.distributions import Normal

import priory as pr
from priory.core.streams import stream
from priory.latent import GaussianMixture
from priory.plot import em
from priory.posteriors import LatentPoint

PI, MEANS, SCALES = 0.64, (54.6, 80.1), (5.9, 5.9)
FIRST, FRAMES = 78.0, 3  # initial mean in the picture, and its number of iterations
Theta = dict[str, Tensor]


def made(rows: int = 272) -> tuple[Tensor, Tensor]:
    """y and z: first which kind of wait, then its minutes."""
    generator = stream(0, "geyser")
    z = (torch.rand(rows, generator=generator) < PI).long()
    means, scales = (torch.tensor(t, dtype=torch.float64) for t in (MEANS, SCALES))
    return means[z] + scales[z] * torch.randn(rows, generator=generator, dtype=torch.float64), z


def observed(y: Tensor, z: Tensor) -> LatentPoint:
    """Fit with z observed: one M-step gives the maximum."""
    return fitted(GaussianMixture(2, given="z"), (y, z))


def hidden(y: Tensor) -> LatentPoint:
    """Fit with z hidden: alternate E- and M-steps until the bound converges."""
    return fitted(GaussianMixture(2), y)


def fitted(model: GaussianMixture, data: Tensor | tuple[Tensor, Tensor]) -> LatentPoint:
    """The maximum of the likelihood, by EM."""
    posterior = pr.fit(model, data, pr.EM(tolerance=1e-12), steps=1000, progress=False)
    assert isinstance(posterior, LatentPoint)
    return posterior


def by_hand(y: Tensor, z: Tensor) -> Theta:
    """The maximum likelihood estimates from complete data, by hand."""
    groups = [y[z == k] for k in range(2)]
    return {
        "weights": torch.stack([y.new_tensor(len(group) / len(y)) for group in groups]),
        "means": torch.stack([group.mean() for group in groups]),
        "covariances": torch.stack([group.var(correction=0) for group in groups]),
    }


def ordered(theta: Theta) -> Theta:
    """The shorter wait first: without z nothing says which is which."""
    return {name: t[theta["means"].argsort()] for name, t in theta.items()}


def iterations(y: Tensor, theta: Theta, first: float = FIRST, count: int = FRAMES) -> list[em.Turn]:
    """EM in the mean of the short waits alone, from `first`, with the other parameters as they are in theta."""
    return em.turns(GaussianMixture(2), y, em.entries(theta, ("means", 0)), [first], [(36, 96)], count)


def draw(y: Tensor, z: Tensor, seen: Theta, unseen: Theta, frames: list[em.Turn], folder: Path) -> Path:
    """Draw the rows with both fits, and three iterations."""
    figure, (rows, *panels) = sheet(2, 2, 10.5, 7.2)
    grid = torch.linspace(30, 110, 300, dtype=torch.float64)
    dress(rows, "The rows, with z and without", "minutes", "density")
    kinds = [y[z == k].tolist() for k in range(2)]
    colours = [GREEN, BLUE]
    labels = ["short waits (z = 0)", "long waits (z = 1)"]
    weights = [[1 / (2.5 * len(y))] * len(kind) for kind in kinds]
    bins = [30 + 2.5 * i for i in range(33)]
    rows.hist(kinds, bins, weights=weights, stacked=True, color=colours, alpha=0.3, label=labels)
    for theta, style, name in ((seen, "-", "z observed"), (unseen, "--", "z hidden: EM")):
        density = Normal(theta["means"], theta["covariances"].sqrt()).log_prob(grid[:, None]).exp() @ theta["weights"]
        rows.plot(grid.tolist(), density.tolist(), color=INK, linestyle=style, linewidth=1.6, label=name)
    rows.set_ylim(0, 0.068)
    legend(rows, "upper left", 2)
    for t, (ax, frame) in enumerate(zip(panels, frames, strict=True)):
        title = f"Iteration {t + 1}: up by {frame.at_after - frame.at_here:.1f} nats"
        em.bound(frame, ["the mean of the short waits"], title=title, ax=ax).legend().remove()
    names = panels[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return save(figure, folder, "two_gaussians.png")


def told(name: str, theta: Theta) -> str:
    """The parameters in one line of text."""
    means, scales = theta["means"].tolist(), theta["covariances"].sqrt().tolist()
    pi = float(theta["weights"][1])
    return f"{name:<14}pi = {pi:.4f}   mu = {means[0]:.3f}, {means[1]:.3f}   sigma = {scales[0]:.3f}, {scales[1]:.3f}"


def main(folder: Path) -> None:
    """Print both fits beside the true parameters, and draw the picture."""
    y, z = made()
    seen, unseen = observed(y, z), hidden(y)
    theta = ordered(unseen.mean)
    print(f"{'what made y':<14}pi = {PI:.4f}   mu = {MEANS[0]}, {MEANS[1]}   sigma = {SCALES[0]}, {SCALES[1]}")
    print(told("by hand", by_hand(y, z)))
    print(told("z observed", seen.mean))
    print(told("z hidden", theta))
    bound = unseen.history["bound"]
    print(f"log p(y | theta) rose from {bound[0]:.4f} to {bound[-1]:.4f} in {len(bound)} iterations, and never fell.")
    frames = iterations(y, theta)
    for t, frame in enumerate(frames):
        print(
            f"iteration {t + 1} of the picture: the mean goes from {float(frame.here):.3f} to {float(frame.after):.3f}"
        )
    draw(y, z, seen.mean, theta, frames, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
