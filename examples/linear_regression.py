"""Linear regression: variational inference against the exact posterior, and why mean-field is overconfident.

With a Gaussian prior and known noise the posterior is N(m, Lambda^-1). A Gaussian with a full covariance
reaches it. A factorised one has the right mean and the variances 1 / Lambda_ii, the conditional variances of a weight
given all others. They are never above the true ones, (Lambda^-1)_ii, and the gap of the bound is

    log p(D) - ELBO = 1/2 (sum_i log Lambda_ii - log det Lambda)

Here the inputs lie far from zero, so slope and intercept are strongly correlated. Predictions show this away from
the data, where mean-field is overconfident; among the data it is slightly underconfident.

python examples/linear_regression.py --out pictures
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, GREY, INK, VERMILION, dress, ellipse, folder_for_pictures, legend, save, sheet
from torch import Tensor

import priory as pr
from priory.core.streams import stream
from priory.families import FullRankFamily
from priory.posteriors import DiagonalGaussian, Variational
from priory.testing import LinearRegression

Moments = tuple[Tensor, Tensor]  # mean and covariance of (slope, intercept)


def line() -> LinearRegression:
    """Twenty rows with x between 1 and 2.5."""
    generator = stream(0, "linear regression example")
    X = 1 + 1.5 * torch.rand(20, 1, generator=generator, dtype=torch.float64)
    y = 0.7 * X[:, 0] - 0.5 + 0.4 * torch.randn(20, generator=generator, dtype=torch.float64)
    return LinearRegression(X, y, noise=0.4, prior_scale=1.0, intercept=True)


def mean_field(problem: LinearRegression, steps: int = 1500) -> Moments:
    """The posterior found by MeanField."""
    method = pr.MeanField(samples=16, learning_rate=0.03)
    q = pr.fit(problem.model(), problem.data, method, steps=steps, progress=False)
    assert isinstance(q, DiagonalGaussian)
    return q.family.loc, q.family.scale.square().diag()


def full_rank(problem: LinearRegression, steps: int = 300) -> Moments:
    """The posterior found by FullRank."""
    q = pr.fit(problem.model(), problem.data, pr.FullRank(learning_rate=0.2), steps=steps, progress=False)
    assert isinstance(q, Variational)
    assert isinstance(q.family, FullRankFamily)
    return q.family.loc, q.family.tril @ q.family.tril.mT


def spread(covariance: Tensor, x: Tensor) -> Tensor:
    """The standard deviation of the line's height at x, for a covariance of (slope, intercept)."""
    design = torch.stack([x, torch.ones_like(x)], 1)
    return (design @ covariance * design).sum(-1).sqrt()


def draw(problem: LinearRegression, mean: Moments, full: Moments, folder: Path) -> Path:
    """Draw the three Gaussians over the weights, their bands of lines, and their standard deviations at x."""
    figure, (plane, lines, sure) = sheet(1, 3, 12, 4.1)
    exact = problem.posterior
    dress(plane, "Over the weights, two standard deviations", "slope", "intercept")
    plane.fill(*ellipse(exact.loc, exact.covariance_matrix), color=GREY, alpha=0.35, linewidth=0, label="exact")
    plane.plot(*ellipse(*full), color=BLUE, linewidth=2, label="FullRank")
    plane.plot(*ellipse(*mean), color=VERMILION, linewidth=2, label="MeanField")
    legend(plane, "upper right")

    x = torch.linspace(-1, 4, 200, dtype=torch.float64)
    dress(lines, "The line, two standard deviations", "x", "y")
    for (loc, covariance), colour in ((full, BLUE), (mean, VERMILION)):
        centre, width = loc[0] * x + loc[1], 2 * spread(covariance, x)
        for edge in (centre - width, centre + width):
            lines.plot(x.tolist(), edge.tolist(), color=colour, linewidth=1.8)
    lines.plot(x.tolist(), (exact.loc[0] * x + exact.loc[1]).tolist(), color=GREY, linewidth=1.5, linestyle="--")
    lines.scatter(problem.X[:, 0].tolist(), problem.y.tolist(), s=14, color=INK, zorder=3)
    lines.set_ylim(-3, 4)

    dress(sure, "Standard deviation of the line", "x", "")
    sure.axvspan(1, 2.5, color=GREY, alpha=0.15, linewidth=0)
    sure.text(1.75, 0.02, "data", ha="center", fontsize=9, color=INK)
    height = spread(exact.covariance_matrix, x)
    sure.plot(x.tolist(), height.tolist(), color=GREY, linewidth=6, alpha=0.5, label="exact")
    sure.plot(x.tolist(), spread(full[1], x).tolist(), color=BLUE, linewidth=1.8, label="FullRank")
    sure.plot(x.tolist(), spread(mean[1], x).tolist(), color=VERMILION, linewidth=1.8, label="MeanField")
    sure.set_ylim(0, None)
    legend(sure, "upper center")
    return save(figure, folder, "linear_regression.png")


def main(folder: Path) -> None:
    """Fit both, print the moments beside the exact ones, and draw them."""
    problem = line()
    mean, full, exact, best = mean_field(problem), full_rank(problem), problem.posterior, problem.best_mean_field()
    print("            slope  intercept   std of each        correlation")
    for name, (loc, covariance) in (
        ("exact", (exact.loc, exact.covariance_matrix)),
        ("FullRank", full),
        ("MeanField", mean),
    ):
        scale = covariance.diagonal().sqrt()
        correlation = covariance[0, 1] / scale.prod()
        print(f"{name:10s}{loc[0]:7.4f}   {loc[1]:8.4f}   {scale[0]:.4f}  {scale[1]:.4f}     {correlation:7.4f}")
    print(f"log p(D) = {problem.log_evidence:.4f}; no factorised q has a bound above {best.elbo:.4f}.")
    draw(problem, mean, full, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
