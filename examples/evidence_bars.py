"""The evidence is the bound plus the gap, at every step of a fit.

    log p(D) = ELBO(q) + KL(q || p(w|D))

The left side does not depend on q. So training moves nats from the divergence to the ELBO, and the height of the
stacked bars stays the same. The model is a line with known noise, whose posterior and evidence are known in closed
form. Its slope and intercept are correlated under the posterior but not under q, so the gap cannot be closed
completely.

python examples/evidence_bars.py --out pictures
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from drawing import BLUE, GREY, INK, VERMILION, dress, ellipse, folder_for_pictures, save, sheet
from torch import Tensor
from torch.distributions import MultivariateNormal

import priory as pr
from priory.core.streams import stream
from priory.fitting.callbacks import FitProgress
from priory.posteriors import DiagonalGaussian
from priory.testing import LinearRegression

FRAMES = (1, 5, 10, 20, 40, 200)
Gaussian = tuple[Tensor, Tensor]  # means and standard deviations, (P,)


class Frame(NamedTuple):
    """The state of the fit after a step, and the two parts of the evidence in nats."""

    step: int
    q: Gaussian
    elbo: float
    kl: float


def line() -> LinearRegression:
    """Twelve points around a line, all on one side of zero."""
    generator = stream(0, "evidence bars")
    X = 0.2 + 1.6 * torch.rand(12, 1, generator=generator, dtype=torch.float64)
    y = 0.8 * X[:, 0] - 0.6 + torch.randn(12, generator=generator, dtype=torch.float64)
    return LinearRegression(X, y, noise=1.0, prior_scale=1.0, intercept=True)


def elbo(problem: LinearRegression, q: Gaussian) -> float:
    """E_q[log p(D|w)] + E_q[log p(w)] + H(q), each in closed form: a Gaussian's mean square is its variance and mean.

    E_q (y - x'w)^2 = (y - x'm)^2 + sum_i x_i^2 s_i^2,    E_q w_i^2 = m_i^2 + s_i^2
    """
    (m, s), X, log_2_pi = q, problem.design(problem.X), math.log(2 * math.pi)
    square = (problem.y - X @ m).square() + X.square() @ s.square()
    log_likelihood = -0.5 * (square / problem.noise**2 + log_2_pi + 2 * math.log(problem.noise)).sum()
    square = (m.square() + s.square()) / problem.prior_scale**2
    log_prior = -0.5 * (square + log_2_pi + 2 * math.log(problem.prior_scale)).sum()
    entropy = (s.log() + 0.5 * (1 + log_2_pi)).sum()
    return float(log_likelihood + log_prior + entropy)


def kl_to_posterior(problem: LinearRegression, q: Gaussian) -> float:
    """KL(q || p(w|D)), from the exact posterior and never from the ELBO."""
    m, s = q
    return float(pr.kl(MultivariateNormal(m, scale_tril=s.diag()), problem.posterior))


def train(problem: LinearRegression, steps: int = FRAMES[-1]) -> list[Frame]:
    """Fit by MeanField, and record q after every step."""
    frames = []

    def look(moment: FitProgress) -> None:
        posterior = moment.posterior()
        assert isinstance(posterior, DiagonalGaussian)
        q = posterior.family.loc, posterior.family.scale
        frames.append(Frame(moment.step, q, elbo(problem, q), kl_to_posterior(problem, q)))

    method = pr.MeanField(learning_rate=0.05, initial_scale=1.0, samples=16)
    pr.fit(problem.model(), problem.data, method, steps=steps, progress=False, callbacks=[look])
    return frames


def draw(problem: LinearRegression, frames: list[Frame], folder: Path) -> Path:
    """Draw q and the posterior above, the bars below, one column per frame."""
    figure, panels = sheet(2, len(frames), 11, 5.6, height_ratios=[1, 1.5])
    for ax in panels[len(frames) :]:
        ax.remove()
    exact, low = problem.posterior, min(frame.elbo for frame in frames) - 1.5
    for column, frame in enumerate(frames):
        m, s = frame.q
        ax = dress(panels[column], f"step {frame.step}", "slope", "intercept" if column == 0 else "")
        ax.fill(*ellipse(exact.loc, exact.covariance_matrix), color=GREY, alpha=0.35, linewidth=0)
        ax.plot(*ellipse(m, s.square().diag()), color=BLUE, linewidth=2)
        ax.set_xlim(-2.2, 2.2)
        ax.set_ylim(-2.2, 2.2)
        ax.set_aspect("equal")
    last = panels[len(frames) - 1]
    last.text(0.04, 0.9, "blue: q", transform=last.transAxes, fontsize=9, color=BLUE)
    last.text(0.04, 0.76, r"grey: $p(w|D)$", transform=last.transAxes, fontsize=9, color=GREY)

    grid = panels[0].get_gridspec()
    assert grid is not None
    ax = dress(figure.add_subplot(grid[1, :]), r"$\log p(D)$ = ELBO + KL, step by step", "step of the fit", "nats")
    place = range(len(frames))
    bounds, gaps = [frame.elbo for frame in frames], [frame.kl for frame in frames]
    ax.bar(place, [bound - low for bound in bounds], bottom=low, width=0.55, color=BLUE, alpha=0.85, label="ELBO")
    ax.bar(place, gaps, bottom=bounds, width=0.55, color=VERMILION, alpha=0.8, label=r"KL$(q\,\Vert\,p(w|D))$")
    ax.axhline(problem.log_evidence, color=INK, linewidth=1.2, linestyle="--")
    here = f"$\\log p(D)$ = {problem.log_evidence:.3f}, the same for every q"
    ax.text(-0.45, problem.log_evidence + 0.15, here, fontsize=9, color=INK, va="bottom")
    for x, bound, gap in zip(place, bounds, gaps, strict=True):
        ax.text(x, low + 0.25, f"{bound:.2f}", ha="center", fontsize=9, color="white")
        middle = min(bound + gap / 2, problem.log_evidence - 0.6)
        ax.text(x + 0.31, middle, f"{gap:.2f}", va="center", fontsize=9, color=VERMILION)
    ax.set_xticks(list(place), [str(frame.step) for frame in frames])
    ax.set_ylim(low, problem.log_evidence + 1.2)
    ax.grid(visible=False, axis="x")
    ax.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return save(figure, folder, "evidence_bars.png")


def main(folder: Path) -> None:
    """Train, print the table and draw it."""
    problem = line()
    frames = train(problem)
    shown = [frame for frame in frames if frame.step in FRAMES]
    print(f"log p(D) = {problem.log_evidence:.8f} nats, in closed form")
    print("step       ELBO         KL        sum")
    for frame in shown:
        print(f"{frame.step:4d} {frame.elbo:10.5f} {frame.kl:10.5f} {frame.elbo + frame.kl:10.5f}")
    left = problem.log_evidence - problem.best_mean_field().elbo
    print(f"No factorised q closes the last {left:.5f} nats: the weights are correlated and q's are not.")
    draw(problem, shown, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
