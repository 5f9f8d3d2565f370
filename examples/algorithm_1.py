"""Algorithm 1 of the lectures in bare torch, beside one line of Priory, with the same numbers.

    repeat   draw eps ~ p(eps) and a random subset S of M of the N rows
             d = -N/M sum_{i in S} d/dtheta log p(y_i | f^{g(theta, eps)}(x_i)) + d/dtheta KL(q_theta(w) || p(w))
             theta <- theta - eta d
    until    theta has converged

with w = g(theta, eps) = m + s eps and theta = (m, log s). As printed the last line has a plus, which climbs the loss.
Both use Adam instead of the plain step. Both read the same random streams, so they see the same noise and the same rows
in the same order, and differ by rounding alone.

python examples/algorithm_1.py --out pictures
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import torch
from drawing import BLUE, GREY, INK, ORANGE, VERMILION, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import priory as pr
from priory.core.streams import stream
from priory.posteriors import DiagonalGaussian
from priory.testing import LinearRegression

STEPS, M, ETA = 1500, 10, 0.05


def rows() -> LinearRegression:
    """Forty rows of three inputs, with known noise."""
    generator = stream(0, "algorithm 1")
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = X @ torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    y = y + 0.5 * torch.randn(40, generator=generator, dtype=torch.float64)
    return LinearRegression(X, y, noise=0.5, prior_scale=1.0)


def bare(X: Tensor, y: Tensor, noise: float, prior: Normal, seed: int = 0) -> tuple[Tensor, Tensor, list[float]]:
    """Algorithm 1, line by line: the means, the standard deviations and the loss of each step."""
    N, P = X.shape
    m = torch.zeros(P, dtype=X.dtype, requires_grad=True)
    log_s = torch.full((P,), math.log(0.02), dtype=X.dtype, requires_grad=True)
    optimiser = torch.optim.Adam([m, log_s], lr=ETA)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    draws, losses = stream(seed, "noise"), []
    for step in range(STEPS):
        epoch, batch = divmod(step, N // M)
        order = torch.randperm(N, generator=stream(seed, "order", epoch))
        S = order[batch * M : (batch + 1) * M]
        eps = torch.randn(P, generator=draws, dtype=X.dtype)
        w = m + log_s.exp() * eps
        log_likelihood = N / M * Normal(X[S] @ w, noise).log_prob(y[S]).sum()
        loss = -log_likelihood + kl_divergence(Normal(m, log_s.exp()), prior).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    return m.detach(), log_s.detach().exp(), losses


def ours(model: pr.Model, data: tuple[Tensor, Tensor], seed: int = 0) -> DiagonalGaussian:
    """Fit the same model by one line of Priory."""
    q = pr.fit(model, data, pr.MeanField(learning_rate=ETA), steps=STEPS, batch_size=M, seed=seed, progress=False)
    assert isinstance(q, DiagonalGaussian)
    return q


def both(problem: LinearRegression) -> tuple[tuple[Tensor, Tensor, list[float]], DiagonalGaussian]:
    """The results of both on the same rows."""
    one = torch.ones((), dtype=torch.float64)
    found = bare(problem.X, problem.y, problem.noise, Normal(0 * one, problem.prior_scale * one))
    return found, ours(problem.model(), problem.data)


def lines_of_code(function: object) -> int:
    """The lines of a function's body, without its docstring."""
    body = inspect.getsource(function).split('"""')[-1]  # pyright: ignore[reportArgumentType]
    return len(body.strip().splitlines())


def draw(problem: LinearRegression, losses: list[float], history: Tensor, folder: Path) -> Path:
    """Draw both losses, and their difference."""
    figure, (ax, difference) = sheet(1, 2, 10.5, 3.9, width_ratios=[1.5, 1])
    dress(ax, "The loss of each of the first 120 steps, by both", "step", "nats, whole data")
    best, steps, first = -problem.best_mean_field().elbo, list(range(1, len(losses) + 1)), slice(120)
    ax.plot(steps[first], history[first].tolist(), color=BLUE, linewidth=1.5, label="one line of Priory")
    ax.plot(steps[first], losses[first], "o", markersize=3.5, color=ORANGE, label="Algorithm 1 in bare torch")
    ax.axhline(best, color=INK, linewidth=1.2, linestyle="--", label=f"lowest expected loss, {best:.2f}")
    ax.set_yscale("log")
    ax.set_yticks([30, 50, 100, 200], ["30", "50", "100", "200"])
    ax.minorticks_off()
    legend(ax, "upper right")

    dress(difference, "What is between them, all 1,500 steps", "step", "relative difference")
    apart = (history - torch.tensor(losses, dtype=torch.float64)).abs() / history.abs()
    difference.plot(steps, apart.tolist(), ".", markersize=2, color=VERMILION)
    difference.axhline(torch.finfo(torch.float64).eps, color=GREY, linewidth=1.2, linestyle="--")
    difference.text(len(steps), 2e-15, "dashed: the rounding of one number", ha="right", fontsize=9, color=INK)
    difference.set_yscale("log")
    difference.set_ylim(5e-17, 1e-12)
    return save(figure, folder, "algorithm_1.png")


def main(folder: Path) -> None:
    """Run both, print their results beside the exact optimum, and draw the losses."""
    problem = rows()
    (m, s, losses), q = both(problem)
    best = problem.best_mean_field()
    print(f"Algorithm 1 in {lines_of_code(bare)} lines of torch, and one line of Priory; then the exact optimum")
    for name, found, our, exact in (("m", m, q.family.loc, best.loc), ("s", s, q.family.scale, best.scale)):
        for index in range(len(found)):
            print(f"{name}_{index + 1}  {found[index]:.12f}  {our[index]:.12f}  {exact[index]:.4f}")
    apart = (q.history["loss"] - torch.tensor(losses, dtype=torch.float64)).abs().max()
    print(f"The losses of {STEPS} steps differ by {apart:.1e} nats at most.")
    draw(problem, losses, q.history["loss"], folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
