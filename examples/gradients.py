"""Three ways to the gradient of KL(q || p), one of them wrong, and the stochastic node that makes the difference.

The target is p = 1/2 N(-0.2, 0.4^2) + 1/2 N(1, 0.5^2): 0.4 and 0.5 are standard deviations, as torch's Normal takes
them. q = N(loc, scale^2), z ~ q, f(z) = log q(z) - log p(z), and the loss is E_q[f].

    detached        d/dtheta f(z), z held fixed                   expectation E_q[d log q / dtheta] = 0, always
    score function  f(z) d log q(z) / dtheta, f and z held fixed  the gradient, with much noise (Williams 1992)
    pathwise        d/dtheta f(loc + scale eps), eps ~ N(0, 1)    the gradient, with little (Kingma and Welling 2014)

The first results from calling `sample` and differentiating the loss: a common mistake that runs without an error and
learns nothing, because z is a stochastic node through which no gradient passes.

python examples/gradients.py --out pictures
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from drawing import BLUE, GREY, INK, ORANGE, VERMILION, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

import priory as pr
from priory.constraints import gaussian_expectation
from priory.core.streams import stream
from priory.posteriors import DiagonalGaussian

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from priory.fitting.callbacks import FitProgress

START = (-1.5, 0.7)  # loc and scale at which the gradients are compared
FRAMES = (1, 10, 25, 50, 100, 300)
Loss = Callable[[Tensor, Tensor], Tensor]  # of theta = (loc, scale) and one eps


def target() -> MixtureSameFamily:
    """1/2 N(-0.2, 0.4^2) + 1/2 N(1, 0.5^2)."""
    means, scales = (torch.tensor(v, dtype=torch.float64) for v in ((-0.2, 1.0), (0.4, 0.5)))
    # vmap cannot run argument validation, which reads values.
    components = Normal(means, scales, validate_args=False)
    return MixtureSameFamily(Categorical(torch.full_like(means, 0.5)), components, validate_args=False)


P = target()


def log_q(theta: Tensor, z: Tensor) -> Tensor:
    """log N(z; loc, scale^2)."""
    return Normal(theta[0], theta[1], validate_args=False).log_prob(z)


def detached(theta: Tensor, eps: Tensor) -> Tensor:
    """The mistake: z is detached, and only log q depends on theta."""
    z = (theta[0] + theta[1] * eps).detach()
    return log_q(theta, z) - P.log_prob(z)


def score_function(theta: Tensor, eps: Tensor) -> Tensor:
    """A surrogate loss whose gradient is f(z) d log q(z); its value has no meaning."""
    z = (theta[0] + theta[1] * eps).detach()
    f = (log_q(theta, z) - P.log_prob(z)).detach()
    return f * log_q(theta, z)


def pathwise(theta: Tensor, eps: Tensor) -> Tensor:
    """The reparameterised loss: z is a function of theta, so the gradient passes through it."""
    z = theta[0] + theta[1] * eps
    return log_q(theta, z) - P.log_prob(z)


ESTIMATORS: dict[str, Loss] = {"detached": detached, "score function": score_function, "pathwise": pathwise}


def kl(theta: Tensor) -> Tensor:
    """KL(q || p), by quadrature."""
    return gaussian_expectation(lambda z: log_q(theta, z) - P.log_prob(z), theta[0], theta[1])


def exact_gradient(theta: Tensor) -> Tensor:
    """The derivatives of KL(q || p) with respect to loc and scale."""
    return torch.func.grad(kl)(theta)


def gradients(loss: Loss, theta: Tensor, draws: int, seed: int = 0) -> Tensor:
    """One gradient per draw, (draws, 2)."""
    eps = torch.randn(draws, generator=stream(seed, "gradients"), dtype=torch.float64)
    return torch.func.vmap(torch.func.grad(loss), (None, 0))(theta, eps)


def descend(loss: Loss, steps: int, draws: int = 16, rate: float = 0.03, seed: int = 0) -> Tensor:
    """Plain gradient descent on (loc, log scale) from START: theta after every step, (steps, 2)."""
    loc, log_scale = torch.tensor(START[0]).double(), torch.tensor(START[1]).double().log()
    generator, path = stream(seed, "descend"), []
    for _ in range(steps):
        eps = torch.randn(draws, generator=generator, dtype=torch.float64)
        theta = torch.stack([loc, log_scale.exp()])
        slope = torch.func.vmap(torch.func.grad(loss), (None, 0))(theta, eps).mean(0)
        loc, log_scale = loc - rate * slope[0], log_scale - rate * slope[1] * theta[1]
        path.append(torch.stack([loc, log_scale.exp()]))
    return torch.stack(path)


def fitted(steps: int = FRAMES[-1]) -> Tensor:
    """Descent by `pr.fit` with Adam, from N(START): theta after every step, (steps, 2)."""
    # The fit of a density starts at zero with a multiple of unit scale, so the density is shifted to START.
    density = pr.Density(lambda v: P.log_prob(START[0] + v["z"].double()), {"z": pr.Param()})
    path = []

    def look(moment: FitProgress) -> None:
        q = moment.posterior()
        assert isinstance(q, DiagonalGaussian)
        path.append(torch.stack([START[0] + q.family.loc[0], q.family.scale[0]]).double())

    method = pr.MeanField(samples=16, learning_rate=0.05, initial_scale=START[1])
    pr.fit(density, None, method, steps=steps, progress=False, callbacks=[look])
    return torch.stack(path)


def best() -> Tensor:
    """The (loc, scale) of lowest KL(q || p), by Newton's method on the quadrature from p's own mean and scale."""
    theta = torch.stack([P.mean, P.variance.sqrt()])
    for _ in range(20):
        theta = theta - torch.linalg.solve(torch.func.jacrev(exact_gradient)(theta), exact_gradient(theta))
    return theta


def draw_graphs(folder: Path) -> Path:
    """The three computations as graphs: squares are computed, circles are drawn, blue arrows carry a gradient back."""
    figure, panels = sheet(1, 3, 11, 4.1)
    for ax, title in zip(panels, ESTIMATORS, strict=True):
        ax.set_title(title, loc="left", fontsize=11, color=INK)
        ax.set_xlim(-0.3, 4.3)
        ax.set_ylim(-1.25, 3.4)
        ax.set_aspect("equal")
        ax.axis("off")
    for ax in panels[:2]:
        node(ax, 1, 0, r"loc, scale")
        node(ax, 1, 1.4, r"$z\sim q$", drawn=True)
        node(ax, 3, 1.4, r"$\log q(z)$")
        arrow(ax, (1, 0), (1, 1.4))
        arrow(ax, (1, 1.4), (3, 1.4))
        arrow(ax, (1, 0), (3, 1.4))
        back(ax, (3.05, 0.85), (1.75, -0.1))
        ax.text(1.0, 0.62, "x", fontsize=20, color=VERMILION, ha="center", va="center", fontweight="bold")
        ax.text(0.82, 0.66, "no gradient\npasses a draw", fontsize=8, color=VERMILION, ha="right", va="center")
    node(panels[0], 3, 2.8, r"$\log q-\log p$")
    arrow(panels[0], (3, 1.4), (3, 2.8))
    arrow(panels[0], (1, 1.4), (3, 2.8))
    back(panels[0], (3.35, 2.35), (3.35, 1.85))
    panels[0].text(2, -1.1, r"gradient $\nabla\log q(z)$: zero on average", ha="center", fontsize=10, color=VERMILION)
    node(panels[1], 1, 2.8, r"$f(z)$, fixed")
    node(panels[1], 3, 2.8, r"$f\cdot\log q(z)$")
    arrow(panels[1], (1, 1.4), (1, 2.8))
    arrow(panels[1], (1, 2.8), (3, 2.8))
    arrow(panels[1], (3, 1.4), (3, 2.8))
    back(panels[1], (3.35, 2.35), (3.35, 1.85))
    panels[1].text(2, -1.1, r"gradient $f(z)\,\nabla\log q(z)$: right, noisy", ha="center", fontsize=10, color=INK)
    ax = panels[2]
    node(ax, 1, 0, r"loc, scale")
    node(ax, 3, 0, r"$\epsilon\sim\mathcal{N}(0,1)$", drawn=True)
    node(ax, 2, 1.4, r"$z=$ loc $+$ scale$\cdot\epsilon$")
    node(ax, 2, 2.8, r"$\log q-\log p$")
    for begin, end in (((1, 0), (2, 1.4)), ((3, 0), (2, 1.4)), ((2, 1.4), (2, 2.8))):
        arrow(ax, begin, end)
    back(ax, (2.35, 2.35), (2.35, 1.85))
    back(ax, (1.3, 0.98), (0.85, 0.45))
    ax.text(2.6, 2.1, "blue: a gradient\norange: a draw", fontsize=8, color=INK, va="center")
    ax.text(2, -1.1, r"gradient $\nabla f(z(\theta))$: right, quiet", ha="center", fontsize=10, color=INK)
    return save(figure, folder, "gradients_graph.png")


def node(ax: Axes, x: float, y: float, text: str, drawn: bool = False) -> None:
    """Draw a circle for a random variable, a box for a computed one."""
    shape = {"boxstyle": "ellipse,pad=0.35" if drawn else "round,pad=0.35", "linewidth": 1.4, "edgecolor": INK}
    face = "#fbe3c0" if drawn else "#eef3f8"
    ax.text(x, y, text, ha="center", va="center", fontsize=10, color=INK, bbox={**shape, "facecolor": face}, zorder=3)


def arrow(ax: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw a forward arrow. Boxes are wide, so a horizontal arrow must stop earlier."""
    gap = 42 if begin[1] == end[1] else 16 if begin[0] == end[0] else 24
    look = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.5, "shrinkA": gap, "shrinkB": gap}
    ax.annotate("", end, begin, arrowprops=look)


def back(ax: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw a backward arrow, where a gradient passes."""
    ax.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": BLUE, "linewidth": 2})


def draw_noise(theta: Tensor, folder: Path) -> Path:
    """Draw histograms of single-draw gradients with respect to loc, one per estimator."""
    figure, panels = sheet(1, 3, 11, 3.4, sharex=True, sharey=True)
    exact = exact_gradient(theta)[0].item()
    edges = [-60 + 2 * k for k in range(41)]
    for ax, (name, loss), colour in zip(panels, ESTIMATORS.items(), (VERMILION, ORANGE, BLUE), strict=True):
        found = gradients(loss, theta, 20_000)[:, 0]
        dress(ax, name, "gradient in loc, from one draw", "draws" if ax is panels[0] else "")
        ax.hist(found.tolist(), bins=edges, color=colour, alpha=0.75)
        ax.axvline(exact, color=INK, linewidth=1.2, linestyle="--", label=f"exact {exact:.2f}")
        ax.axvline(found.mean().item(), color=INK, linewidth=2, label=f"mean {found.mean():.2f}")
        ax.plot([], [], " ", label=f"std {found.std():.2f}")
        legend(ax, "upper left")
    return save(figure, folder, "gradients_noise.png")


def draw_frames(right: Tensor, wrong: Tensor, folder: Path) -> Path:
    """Draw the target, and both q during their fits."""
    figure, panels = sheet(2, 3, 11, 5.4, sharex=True, sharey=True)
    z = torch.linspace(-3.5, 3.5, 500, dtype=torch.float64)
    for index, (ax, step) in enumerate(zip(panels, FRAMES, strict=True)):
        theta = right[step - 1]
        dress(ax, f"step {step}: KL = {kl(theta):.3f}", "z" if index > 2 else "", "density" if index % 3 == 0 else "")
        ax.fill_between(z.tolist(), P.log_prob(z).exp().tolist(), color=GREY, alpha=0.35, linewidth=0, label="p")
        ax.plot(z.tolist(), log_q(theta, z).exp().tolist(), color=BLUE, linewidth=2, label="q, pathwise")
        other = log_q(wrong[step - 1], z).exp().tolist()
        ax.plot(z.tolist(), other, color=VERMILION, linewidth=1.5, linestyle="--", label="q, detached draws")
    legend(panels[0], "upper right")
    return save(figure, folder, "gradients_frames.png")


def main(folder: Path) -> None:
    """Print the table of estimators and the fitted Gaussian, and draw the three pictures."""
    theta = torch.tensor(START, dtype=torch.float64)
    exact, draws = exact_gradient(theta), 20_000
    print(f"Gradient of KL(q || p) at loc {START[0]}, scale {START[1]}, from {draws} draws")
    print("                       in loc                    in scale")
    print(f"exact            {exact[0]:9.4f}                 {exact[1]:9.4f}")
    for name, loss in ESTIMATORS.items():
        found = gradients(loss, theta, draws)
        mean, error, spread = found.mean(0), found.std(0) / draws**0.5, found.std(0)
        cells = [f"{mean[k]:9.4f} +- {error[k]:.4f} ({spread[k]:5.2f})" for k in (0, 1)]
        print(f"{name:16s} {cells[0]} {cells[1]}")
    print("(in brackets: the standard deviation of one draw)")
    right, wrong = fitted(), descend(detached, FRAMES[-1])
    loc, scale = best()
    print(f"lowest KL {kl(best()):.4f} at N({loc:.4f}, {scale:.4f}^2)")
    print(f"fitted    {kl(right[-1]):.4f} at N({right[-1, 0]:.4f}, {right[-1, 1]:.4f}^2)")
    print(f"detached  {kl(wrong[-1]):.4f} at N({wrong[-1, 0]:.4f}, {wrong[-1, 1]:.4f}^2), begun at {kl(theta):.4f}")
    draw_graphs(folder)
    draw_noise(theta, folder)
    draw_frames(right, wrong, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
