"""MAP against variational inference on the same loss: what each term of the two objectives does.

    MAP    minimise over w        loss(w) + lambda w^2 / 2
    VI     minimise over m, s     E[loss(m + s eps)] + lambda m^2 / 2 + lambda s^2 / 2 - log s

up to constants, for a prior N(0, 1/lambda) and q = N(m, s^2). The loss is -log p(D|w), here of a logistic classifier
with one weight. Its data are separable: the loss alone decreases without bound as w grows, and the penalty stops it.
In m the two objectives look alike, except that VI averages the loss over q, which moves its minimum. In s, which MAP
doesn't have, loss and penalty pull down and -log s, the entropy, pushes up.

python examples/map_against_vi.py --out pictures
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, GREEN, INK, ORANGE, VERMILION, dress, folder_for_pictures, legend, save, sheet
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import softplus

import priory as pr
from priory.constraints import gaussian_expectation
from priory.posteriors import DiagonalGaussian

PRECISION = 0.25  # lambda
LOOKS = {  # colour and label of each term in the picture
    "loss(w)": (VERMILION, "loss(w)"),
    "penalty": (BLUE, r"$\frac{1}{2}\lambda w^2$"),
    "E loss": (VERMILION, r"E$[$loss$(m+s\epsilon)]$"),
    "penalty of m": (BLUE, r"$\frac{1}{2}\lambda m^2$"),
    "penalty of s": (BLUE, r"$\frac{1}{2}\lambda s^2$"),
    "-log s": (GREEN, r"$-\log s$"),
}


def data() -> tuple[Tensor, Tensor]:
    """Six points, labels by their sign."""
    x = torch.tensor([-1.6, -1.0, -0.4, 0.3, 0.9, 1.5], dtype=torch.float64)
    return x[:, None], (x > 0).double()


def model() -> pr.Model:
    """One weight, a logistic likelihood and the prior N(0, 1/lambda): the model of both methods."""
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    zero = torch.zeros((), dtype=torch.float64)
    return pr.Model(net, pr.Bernoulli(), prior=Normal(zero, zero + PRECISION**-0.5))


def loss(w: Tensor) -> Tensor:
    """-log p(D|w), for any shape of w."""
    x, y = data()
    margin = (2 * y - 1) * x[:, 0]
    return softplus(-w[..., None] * margin).sum(-1)


def map_terms(w: Tensor) -> dict[str, Tensor]:
    """The parts of MAP's objective."""
    return {"loss(w)": loss(w), "penalty": 0.5 * PRECISION * w.square()}


def vi_terms(m: Tensor, s: Tensor) -> dict[str, Tensor]:
    """The parts of VI's objective, the expectation by quadrature."""
    m, s = torch.broadcast_tensors(m, s)
    return {
        "E loss": gaussian_expectation(loss, m, s),
        "penalty of m": 0.5 * PRECISION * m.square(),
        "penalty of s": 0.5 * PRECISION * s.square(),
        "-log s": -s.log(),
    }


def total(terms: dict[str, Tensor]) -> Tensor:
    """The sum of the parts."""
    return torch.stack(list(terms.values())).sum(0)


def minima() -> tuple[Tensor, Tensor]:
    """MAP's w and VI's (m, s), by Newton's method: both objectives are convex."""

    def of_vi(theta: Tensor) -> Tensor:
        return total(vi_terms(theta[0], theta[1]))

    def of_map(theta: Tensor) -> Tensor:
        return total(map_terms(theta[0]))

    found = []
    for objective, theta in ((of_map, [0.0]), (of_vi, [1.0, 1.0])):
        point = torch.tensor(theta, dtype=torch.float64)
        for _ in range(30):
            slope = torch.func.grad(objective)
            step = torch.linalg.solve(torch.func.jacrev(slope)(point), slope(point))
            point = point - step.clamp(-0.5, 0.5)
        found.append(point)
    return found[0][0], found[1]


def fitted() -> tuple[Tensor, Tensor]:
    """The minima found by `pr.fit`, with only the method changed."""
    rate = 0.05
    w = pr.fit(model(), data(), pr.MAP(learning_rate=rate), steps=800, progress=False).mean["weight"].reshape(())
    q = pr.fit(model(), data(), pr.MeanField(samples=32, learning_rate=rate), steps=800, progress=False)
    assert isinstance(q, DiagonalGaussian)
    return w, torch.cat([q.family.loc, q.family.scale])


def draw(w: Tensor, q: Tensor, folder: Path) -> Path:
    """The terms of each objective as curves: in w, in m at the best s, in s at the best m."""
    figure, panels = sheet(1, 3, 11.5, 4.3)
    along = torch.linspace(-1, 9, 300, dtype=torch.float64)
    scales = torch.linspace(0.05, 4, 300, dtype=torch.float64)
    of_m, of_s = vi_terms(along, q[1]), vi_terms(q[0], scales)
    constant = {"m": ("penalty of s", "-log s"), "s": ("penalty of m",), "w": ()}
    for ax, title, name, x, terms, where in (
        (panels[0], "MAP in w", "w", along, map_terms(along), w),
        (panels[1], "VI in m, at the best s", "m", along, of_m, q[0]),
        (panels[2], "VI in s, at the best m", "s", scales, of_s, q[1]),
    ):
        kept = {part: values for part, values in terms.items() if part not in constant[name]}
        dress(ax, title, name, "nats" if name == "w" else "")
        for part, values in kept.items():
            colour, label = LOOKS[part]
            ax.plot(x.tolist(), values.tolist(), color=colour, linewidth=1.8, label=label)
        summed = total(kept)
        ax.plot(x.tolist(), summed.tolist(), color=INK, linewidth=2.4, label="sum")
        lowest = summed[(x - where).abs().argmin()].item()
        ax.plot([where.item()], [lowest], "o", color=ORANGE, markersize=8, zorder=4)
        ax.annotate(
            f"{where:.3f}", (where.item(), lowest), (0, 9), textcoords="offset points", ha="center", fontsize=10
        )
        ax.set_ylim(-1.5, 6 if name == "s" else 8)
        legend(ax, "upper right" if name == "s" else "upper center")
    return save(figure, folder, "map_against_vi.png")


def main(folder: Path) -> None:
    """Print the terms of both objectives at their minima and the results of `fit`, and draw the curves."""
    (w, q), (w_fit, q_fit) = minima(), fitted()
    print(f"MAP minimises at w = {w:.4f} (fit: {w_fit:.4f})")
    print(f"VI minimises at m = {q[0]:.4f}, s = {q[1]:.4f} (fit: {q_fit[0]:.4f}, {q_fit[1]:.4f})")
    for name, terms in (("MAP", map_terms(w)), ("VI", vi_terms(q[0], q[1]))):
        print(f"{name:4s}" + "  ".join(f"{part} {value:.4f}" for part, value in terms.items()))
    print(f"The prior's scale is {PRECISION**-0.5:g}: without the loss, s would end there.")
    draw(w, q, folder)


if __name__ == "__main__":
    main(folder_for_pictures(__doc__))
