"""The term of the divergence that pulls each standard deviation to the prior's.

    KL(N(m, s^2) || N(0, 1/lambda)) = lambda m^2 / 2 + [lambda s^2 / 2 - log s] - (1 + log lambda) / 2

The first part is weight decay on the mean. The part in brackets is lowest at s = 1 / sqrt(lambda), the prior's own
standard deviation. The fit on the right has one weight that the data inform and one whose input is always zero. Only
this term moves the scale of the second; the data pull the scale of the first lower, to 1 / sqrt(lambda + x'x /
noise^2).

python examples/sigma_term.py --out pictures
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, COLOURS, VERMILION, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor, nn

import priory as pr
from priory.fitting.callbacks import FitProgress
from priory.posteriors import DiagonalGaussian

LAMBDAS = (0.25, 1.0, 4.0, 16.0)
NOISE, PRIOR_SCALE = 1.0, 0.5


def term(scale: Tensor, precision: float) -> Tensor:
    """lambda s^2 / 2 - log s."""
    return 0.5 * precision * scale.square() - scale.log()


def lowest(precision: float) -> tuple[float, float]:
    """Where lambda s - 1/s is zero, and the value there."""
    scale = torch.tensor(precision, dtype=torch.float64).rsqrt()
    return scale.item(), term(scale, precision).item()


def data() -> tuple[Tensor, Tensor]:
    """Ten rows: the first input varies, the second is always zero."""
    x = torch.linspace(-1, 1, 10, dtype=torch.float64)
    return torch.stack([x, 0 * x], 1), 0.7 * x


def exact_scales() -> Tensor:
    """The exact standard deviations: precisions add, and the uninformed weight has the prior's precision alone."""
    X, _ = data()
    return (PRIOR_SCALE**-2 + X.square().sum(0) / NOISE**2).rsqrt()


def train(initial_scale: float, steps: int = 300) -> Tensor:
    """The standard deviations of q after every step, (steps, 2), from `initial_scale` times the prior's."""
    net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    model = pr.Model(net, pr.Gaussian(NOISE), prior=PRIOR_SCALE)
    scales = []

    def look(moment: FitProgress) -> None:
        q = moment.posterior()
        assert isinstance(q, DiagonalGaussian)
        scales.append(q.family.scale)

    method = pr.MeanField(learning_rate=0.05, samples=32, initial_scale=initial_scale)
    pr.fit(model, data(), method, steps=steps, progress=False, callbacks=[look])
    return torch.stack(scales)


def draw(runs: list[Tensor], folder: Path) -> Path:
    """Draw the term for several lambda, and the scales during training."""
    figure, (ax, fit) = sheet(1, 2, 10.5, 4.2)
    dress(ax, r"$\frac{1}{2}\lambda\sigma^2-\log\sigma$ is lowest at $\sigma=1/\sqrt{\lambda}$", r"$\sigma$", "nats")
    scale = torch.linspace(0.03, 3.2, 400, dtype=torch.float64)
    for precision, colour in zip(LAMBDAS, COLOURS, strict=False):
        where, value = lowest(precision)
        ax.plot(scale.tolist(), term(scale, precision).tolist(), color=colour, linewidth=2)
        ax.plot([where], [value], "o", color=colour, markersize=7)
        ax.plot([], [], "o-", color=colour, label=rf"$\lambda={precision:g}$: $\sigma={where:g}$")
    ax.set_ylim(-0.8, 6)
    ax.set_xlim(0, 3.2)
    legend(ax, "upper right")

    dress(fit, "Two scales of q while it trains, from three starts", "step", r"$\sigma$")
    for run in runs:
        for column, colour in ((0, VERMILION), (1, BLUE)):
            fit.plot(range(1, len(run) + 1), run[:, column].tolist(), color=colour, linewidth=1.8)
    seen, unseen = exact_scales().tolist()
    fit.axhline(unseen, color=BLUE, linestyle="--", linewidth=1)
    fit.axhline(seen, color=VERMILION, linestyle="--", linewidth=1)
    last = len(runs[0])
    fit.text(last, unseen * 1.06, f"no data: the prior's {unseen:g}", ha="right", fontsize=9, color=BLUE)
    fit.text(last, seen / 1.06, f"ten rows: {seen:.4f}", ha="right", va="top", fontsize=9, color=VERMILION)
    fit.set_yscale("log")
    fit.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
    fit.minorticks_off()
    return save(figure, folder, "sigma_term.png")


def main(folder: Path) -> None:
    """Print the minima and the results of the fits, and draw both."""
    print("lambda   lowest at   1/sqrt(lambda)   value")
    for precision in LAMBDAS:
        where, value = lowest(precision)
        print(f"{precision:6g}   {where:9.4f}   {precision**-0.5:14.4f}   {value:.4f}")
    runs = [train(initial) for initial in (0.1, 1.0, 4.0)]
    seen, unseen = exact_scales().tolist()
    print(f"A weight that the data don't see ends at {runs[0][-1, 1]:.5f}; the prior's scale is {unseen:.5f}.")
    print(f"A weight that they do see ends at {runs[0][-1, 0]:.4f}; the posterior's scale is {seen:.4f}.")
    draw(runs, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
